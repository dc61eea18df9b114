"""Models under `fully_shard`, whose shards Sirtaki carries, give what one process would give."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import RunRanks
from msgspec import structs
from rank_jobs import OVER_MESH, Job, Play, RankCase, integration, on_ranks, slow

from sirtaki.autotune.meta.session import TuningSession
from sirtaki.autotune.shard_search import shard_session
from sirtaki.autotune.sharded import ShardKnobs, ShardSpace
from sirtaki.cli.__main__ import main
from sirtaki.engine.tuning.report import WHOLE_STEPS, describe_progress, describe_steps
from sirtaki.registry.opening import open_store
from sirtaki.registry.schema import ShardsRecord

SHARED = {**OVER_MESH, "SIRTAKI_REGISTRY": "off", "SIRTAKI_REFINE_UNTIL": "0"}
SOCKETS = {**SHARED, "SIRTAKI_TRANSPORT": "gloo"}

JOBS = (
    Job(2, env=SHARED),
    integration(Job(2, "joined", env={**SOCKETS, "SIRTAKI_TEST_JOINS": "1"})),
    slow(Job(3, "joined", env={**SHARED, "SIRTAKI_TEST_JOINS": "1"})),
    slow(Job(4, "joined", env={**SHARED, "SIRTAKI_LOCAL_SIZE": "2", "SIRTAKI_TEST_JOINS": "1"})),
    integration(Job(2, "carried by PyTorch", env={**SHARED, "SIRTAKI_TEST_CARRIES": "0"})),
    slow(Job(3, "carried by PyTorch", env={**SHARED, "SIRTAKI_TEST_CARRIES": "0"})),
    slow(Job(4, "carried by PyTorch", env={**SHARED, "SIRTAKI_TEST_CARRIES": "0"})),
    slow(Job(3, "sockets", env=SOCKETS)),
    slow(Job(3, env=SHARED)),
    slow(Job(4, "sockets", env=SOCKETS)),
    slow(Job(4, env=SHARED)),
    slow(Job(4, "two nodes", env={**SHARED, "SIRTAKI_LOCAL_SIZE": "2"})),
)


@on_ranks("fsdp_attached", *JOBS)
def test_attached_models_train_as_in_one_process(play: Play, rank_case: RankCase) -> None:
    play(rank_case)


@pytest.mark.parametrize("env", [pytest.param(SHARED, marks=pytest.mark.slow), SOCKETS])
def test_a_rank_that_dies_is_named_to_its_peers(run_ranks: RunRanks, env: dict[str, str]) -> None:
    job = run_ranks("fsdp_faults.py", 3, env=env, check=False, timeout_s=60)
    assert job.stdout.count("PeerLostError: rank 1 has ended") == 2, job.stdout + job.stderr


@pytest.mark.integration
@pytest.mark.timeout(420)
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_setting_takes_more_memory_than_predicted(run_ranks: RunRanks, ranks: int) -> None:
    run_ranks("fsdp_peaks.py", ranks, env={**SOCKETS, "SIRTAKI_TUNE": "0"}, timeout_s=200)


@pytest.mark.integration
def test_a_rank_that_alone_catches_an_exception_and_leaves_a_step_out_does_not_train_with_wrong_shards(
    run_ranks: RunRanks,
) -> None:
    job = run_ranks("fsdp_faults.py", 2, "caught", env=SHARED, check=False, timeout_s=60)
    assert job.stdout.count("MismatchError: the ranks have submitted a gather of different tensors") == 2, job.stdout


@pytest.mark.integration
@pytest.mark.parametrize("env", [SHARED, SOCKETS])
def test_a_rank_that_exits_during_a_search_is_named_to_its_peers(run_ranks: RunRanks, env: dict[str, str]) -> None:
    job = run_ranks("fsdp_left.py", 3, env=env, check=False, timeout_s=40)
    assert job.stdout.count("PeerLostError: rank 0 has exited") == 2, job.stdout + job.stderr


def settings_run(run_ranks: RunRanks, *args: object, ranks: int = 2, **env: str) -> list[str]:
    """Return the settings that a search has run, in order; the last one is kept."""
    tuned = {**SHARED, "SIRTAKI_WARMUP_ITERATIONS": "90", "SIRTAKI_FSDP_MEMORY": "1MiB", **env}
    return run_ranks("fsdp_tuned.py", ranks, *args, env=tuned, timeout_s=90).stdout.splitlines()


def search(faster_times: float, steps: int = 1000) -> TuningSession[ShardKnobs]:
    """Return the search of a job whose steps take 0.3 s, and with two streams less by a factor."""
    space = ShardSpace(modules=2, streams=(1, 2), whole_bytes=(100, 100), dropped=(0, 1))
    session = shard_session(space, ShardKnobs(streams=1), budget=100)
    while not session.done and session.result.iterations_used < steps:
        now = session.assignment
        session.record([0.3 / faster_times if now.knobs.streams == 2 else 0.3] * now.measured_iterations)
    return session


def test_progress_reports_times_remaining_steps_and_that_nothing_is_confirmed() -> None:
    untuned = "1 stream, gathers 1 ahead and 1 behind"
    line = describe_progress(search(1.2, 0), WHOLE_STEPS).line()
    assert line == f"tuning, step 0 of at most 250: now measuring the default: {untuned}"
    line = describe_progress(search(1.2, 3), WHOLE_STEPS).line()
    assert line.startswith(
        "tuning, step 3 of at most 250, at most 74 s more: so far no setting is faster than the default "
        "(step time 300 ms); "
        "now trying: "
    )
    progress = describe_progress(search(1.2, 12), WHOLE_STEPS)
    seen = "best so far, not yet proved: 50 ms less per step"
    assert f"{seen} (step time 300 ms → 250 ms); now " in progress.line()
    assert progress.bar().endswith(f"/250; {seen}")


def test_the_result_reports_the_proved_gain_with_its_interval() -> None:
    said = describe_steps(search(1.2).result, "sockets")
    assert "steps are 20.0 % faster, ± 0.0: 250 ms instead of 300 ms; sockets (beat the default in 6 paired" in said
    said = describe_steps(search(1.0).result, "sockets")
    assert "the default stays; sockets (no setting was proved " in said


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("env", [SHARED, pytest.param(SOCKETS, marks=pytest.mark.slow)])
def test_a_search_keeps_the_fastest_setting_and_the_results_are_those_of_one_process(
    run_ranks: RunRanks, ranks: int, env: dict[str, str]
) -> None:
    found = settings_run(run_ranks, "fast", "2 kept", "evaluated", ranks=ranks, **env)
    assert "kept" not in found[0]
    assert "2 kept" in found[-1]
    assert len(set(found)) > 2
    joined = "2 sent with the module before"
    assert joined in settings_run(run_ranks, "fast", joined, "evaluated", ranks=ranks, **env)[-1]
    found = settings_run(run_ranks, "fast", "2 kept", ranks=ranks, **env, SIRTAKI_FSDP_MEMORY="1")
    assert not any("2 kept" in setting for setting in found)
    assert len(set(found)) > 1


@pytest.mark.integration
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("word", ["2 kept", "2 streams"])
def test_where_pytorch_carries_the_shards_it_is_tuned_when(run_ranks: RunRanks, word: str, device: str) -> None:
    carried = {"SIRTAKI_TEST_CARRIES": "0", "TEST_DEVICE": device, "SIRTAKI_FSDP_MEMORY": "300MiB"}
    found = settings_run(run_ranks, "fast", word, **carried, SIRTAKI_WARMUP_ITERATIONS="110")
    backend = "gloo" if device == "cpu" else "nccl"
    assert found[0] == f"PyTorch's {backend}, 1 stream, gathers 0 ahead and 1 behind"
    assert word in found[-1]


@pytest.mark.integration
def test_prefetching_is_tuned_if_pytorch_has_no_custom_collectives(run_ranks: RunRanks) -> None:
    carried = {"SIRTAKI_TEST_CARRIES": "0", "SIRTAKI_FSDP_MEMORY": "300MiB"}
    found = settings_run(run_ranks, "fast", "1 ahead", "old", **carried, SIRTAKI_WARMUP_ITERATIONS="30")
    assert "1 ahead" in found[-1]
    assert not any("kept" in setting or "2 streams" in setting or "at a time" in setting for setting in found)


@pytest.mark.integration
def test_a_model_trained_through_a_custom_method_is_tuned(run_ranks: RunRanks) -> None:
    found = settings_run(run_ranks, "fast", "2 kept", "method")
    assert "kept" not in found[0]
    assert "2 kept" in found[-1]


@pytest.mark.integration
def test_prefetching_is_not_tuned_if_the_script_sets_it(run_ranks: RunRanks) -> None:
    found = settings_run(run_ranks, "slow", "gathers 2 ahead", "prefetched")
    assert len(set(found)) > 1
    assert {re.search("gathers .* behind", setting)[0] for setting in found} == {"gathers 2 ahead and 1 behind"}  # type: ignore[index]


@pytest.mark.integration
def test_a_search_ends_with_the_default_where_modules_are_used_in_another_order(run_ranks: RunRanks) -> None:
    env = {**SHARED, "SIRTAKI_WARMUP_ITERATIONS": "90", "SIRTAKI_FSDP_MEMORY": "1MiB", "SIRTAKI_LOG": "info"}
    job = run_ranks("fsdp_tuned.py", 2, "fast", "kept", "reordered", env=env, timeout_s=90)
    found = job.stdout.splitlines()
    assert any("kept" in setting for setting in found)
    assert found[-1] == found[0]
    assert "and Sirtaki keeps the default setting: modules are used in another order than before" in job.stderr


REFINED = {**SHARED, "SIRTAKI_WARMUP_ITERATIONS": "6", "SIRTAKI_FSDP_MEMORY": "1MiB", "SIRTAKI_LOG": "info"}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("ranks", "env"),
    [
        (2, {}),
        pytest.param(3, SOCKETS, marks=pytest.mark.slow),
        pytest.param(4, {"SIRTAKI_LOCAL_SIZE": "2"}, marks=pytest.mark.slow),
    ],
)
def test_a_sharded_model_changes_to_a_faster_setting_found_later_which_is_stored(
    run_ranks: RunRanks, tmp_path: Path, ranks: int, env: dict[str, str]
) -> None:
    path = str(tmp_path / "registry.db")
    env = {**REFINED, **env, "SIRTAKI_REGISTRY": path, "SIRTAKI_REFINE_UNTIL": "1000"}
    job = run_ranks("fsdp_tuned.py", ranks, "fast", "2 kept", "refined", env=env, timeout_s=120)
    found = job.stdout.splitlines()
    assert len(set(found)) > 3
    assert "2 kept" in found[-1]
    assert "changed to a faster setting: " in job.stderr
    assert ["2 kept" in record.setting.describe() for record in open_store(path).all(ShardsRecord)] == [True]


@pytest.mark.slow
def test_the_setting_of_a_sharded_model_is_frozen_where_the_user_says_so(run_ranks: RunRanks) -> None:
    env = {**REFINED, "SIRTAKI_REFINE_UNTIL": "1000", "SIRTAKI_FREEZE_AFTER": "40"}
    job = run_ranks("fsdp_tuned.py", 2, "fast", "2 kept", "refined", env=env, timeout_s=90)
    assert "changed to a faster setting" not in job.stderr
    assert "2 kept" not in job.stdout.splitlines()[-1]


@pytest.mark.integration
def test_a_refinement_ends_with_the_setting_before_it_where_modules_are_used_in_another_order(
    run_ranks: RunRanks,
) -> None:
    env = {**REFINED, "SIRTAKI_REFINE_UNTIL": "1000"}
    job = run_ranks("fsdp_tuned.py", 2, "fast", "2 kept", "reordered later", env=env, timeout_s=90)
    found = job.stdout.splitlines()
    assert found[-1] == found[-3]
    assert "and Sirtaki keeps the setting tuned before: modules are used in another order than before" in job.stderr


@pytest.mark.integration
def test_between_nodes_parameters_may_be_kept_by_each_node_where_memory_allows(run_ranks: RunRanks) -> None:
    near = "1 kept by each node"
    found = settings_run(run_ranks, "fast", near, ranks=4, SIRTAKI_LOCAL_SIZE="2", SIRTAKI_WARMUP_ITERATIONS="130")
    assert found[-1].endswith(f"1 kept, {near}")


@pytest.mark.integration
@pytest.mark.parametrize("nodes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_between_hosts_a_step_is_traced_and_the_search_trains_as_one_process_does(
    run_ranks: RunRanks, nodes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = {**SHARED, "SIRTAKI_LOCAL_SIZE": "2"} if nodes else SOCKETS
    env = {**where, "SIRTAKI_WARMUP_ITERATIONS": "30", "SIRTAKI_FSDP_MEMORY": "1MiB", "SIRTAKI_LOG": "debug"}
    env["SIRTAKI_PROFILE"] = str(tmp_path / "profile")
    log = run_ranks("fsdp_tuned.py", 4 if nodes else 2, "real", "", env=env, timeout_s=90).stderr
    traced = re.search(r"traced ShardedStep\(forward_s=\(([^)]*)\), backward_s=\(([^)]*)\)", log)
    assert traced
    for spans in traced.groups():
        assert all(0.0 < float(span) < 10.0 for span in spans.split(", ")), spans
    assert len(traced[1].split(", ")) == 3
    assert "tuned in " in log
    assert main(["optimize", str(tmp_path / "profile"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["by_memory"]) == 5


@pytest.mark.integration
def test_the_tuner_packs_shards_only_where_it_is_allowed_and_pays_and_the_next_job_reuses_it(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    packed = "parameters packed by int8, gradients packed by int8"
    env = {**SOCKETS, "SIRTAKI_FSDP_MEMORY": "1", "SIRTAKI_REGISTRY": str(tmp_path / "registry.db")}
    found = settings_run(run_ranks, "fast", packed, SIRTAKI_LOSSY="int8,topk", **env)
    assert "packed" not in found[0]
    assert found[-1].endswith(packed)
    assert settings_run(run_ranks, "fast", packed, SIRTAKI_LOSSY="int8,topk", **env)[1].endswith(packed)
    assert not any("packed" in setting for setting in settings_run(run_ranks, "fast", packed, **env))
    env["SIRTAKI_REGISTRY"] = "off"
    assert "packed" not in settings_run(run_ranks, "slow", packed, SIRTAKI_LOSSY="int8", **env)[-1]


@pytest.mark.integration
def test_the_next_job_tries_the_found_setting_first_keeps_it_while_it_is_faster_and_replaces_it(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = str(tmp_path / "registry.db")

    def run(*args: str, **env: str) -> list[str]:
        return settings_run(run_ranks, *args, SIRTAKI_REGISTRY=path, **env)

    assert run("fast", "2 kept")[-1].endswith("gathers 2 ahead and 1 behind, 2 kept")
    (first,) = open_store(path).all(ShardsRecord)
    assert (first.setting.kept, first.memory_bytes, first.modules) == ((1, 2), 2**20, 3)
    assert first.gain > 0.0
    unusual = structs.replace(
        first, setting=replace(first.setting, ahead=1), created_s=first.created_s + 1
    )  # not the first that is tried else
    open_store(path).put(unusual)

    again = run("fast", "2 kept")
    assert len(set(again)) == 2, "nothing else is tried where it wins"
    assert again[-1].endswith("gathers 1 ahead and 1 behind, 2 kept")
    (second,) = open_store(path).all(ShardsRecord)
    assert second == structs.replace(unusual, gain=second.gain, created_s=second.created_s)
    assert second.created_s > unusual.created_s

    little = run("fast", "2 kept", SIRTAKI_FSDP_MEMORY="1")
    assert not any("2 kept" in setting for setting in little), "it takes more memory than is allowed"
    assert second in open_store(path).all(ShardsRecord)

    slower = run("slow", "2 kept")
    assert "2 kept" in slower[1], "it is tried first"
    assert "2 kept" not in slower[-1]
    assert all(len(way.setting.kept) != 2 for way in open_store(path).all(ShardsRecord))
    assert len(set(run("slow", "2 kept"))) == 1, "nothing was faster than the default, so nothing is tried again"


@pytest.mark.integration
def test_without_allowed_memory_the_amount_that_would_keep_parameters_is_reported(run_ranks: RunRanks) -> None:
    def log(**env: str) -> str:
        env = {"SIRTAKI_WARMUP_ITERATIONS": "45", "SIRTAKI_REGISTRY": "off", "SIRTAKI_LOG": "info", **env}
        return run_ranks("fsdp_tuned.py", 2, "slow", "no such setting", env=env, timeout_s=90).stderr

    told = re.search(r"a step would send \d+ % less: .* SIRTAKI_FSDP_MEMORY=(\w+) ", log(**SOCKETS))
    assert told
    assert "would send" not in log(**SOCKETS, SIRTAKI_FSDP_MEMORY=told[1])
    assert "would send" not in log(**SHARED), "ranks that share memory send each other nothing"


@pytest.mark.slow
def test_a_checkpoint_is_loaded_by_another_number_of_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    for ranks, act in ((3, "save"), (2, "load")):
        run_ranks("fsdp_checkpoint.py", ranks, act, tmp_path / "checkpoint", env=SHARED, timeout_s=90)
