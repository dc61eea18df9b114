"""Jobs of real ranks that are killed, stopped and added."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from elastic_jobs import ElasticJob
from rank_jobs import OVER_MESH, UNTUNED, Job, Launcher, played_on_ranks
from ranks.elastic_features import SIZES, WAITS

from sirtaki.registry.opening import open_store
from sirtaki.registry.schema import JobRecord

# ── generations ───────────────────────────────────────────────────────────────────────────────────────────────────────


Start = Callable[..., ElasticJob]


GLOO = {"SIRTAKI_TRANSPORT": "gloo", "SIRTAKI_STREAMS": "3"}


@pytest.fixture
def start(launcher: Launcher, tmp_path: Path) -> Start:
    """Return a function that creates a job."""
    return lambda **how: ElasticJob(launcher, tmp_path, **how)


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "phase",
    [slow("backward"), slow("forward"), slow("before_step"), "in_step", slow("step"), slow("commit"), slow("saving")],
)
def test_a_rank_is_killed(start: Start, phase: str) -> None:
    with start(ranks=3, faults=[(1, 5, phase, "kill")]) as job:
        job.run().check(ended=2, killed=1)


@pytest.mark.integration
def test_rank_0_and_another_one_are_killed_in_the_same_moment_and_replaced(start: Start) -> None:
    faults = [(0, 5, "in_step", "kill"), (3, 5, "in_step", "kill")]
    with start(ranks=4, iterations=150, pause_s=0.02, replaces=True, faults=faults) as job:
        job.run().check(ended=4, killed=2)


@pytest.mark.integration
def test_one_of_three_is_left(start: Start) -> None:
    with start(ranks=3, faults=[(1, 5, "in_step", "kill"), (0, 5, "backward", "kill")]) as job:
        judge = job.run()
    judge.check(ended=1, killed=2)
    assert judge.effective()[-1][0]["size"] == 1


@pytest.mark.integration
def test_a_rank_is_added_and_one_is_dismissed(start: Start) -> None:
    faults = [(0, 3, "before_step", "add"), (1, 21, "before_step", "leave")]
    with start(ranks=2, iterations=40, pause_s=0.02, faults=faults) as job:
        judge = job.run()
    judge.check(ended=2, dismissed=1)
    sizes = [lines[0]["size"] for lines in judge.effective()]
    assert [sizes[0], max(sizes), sizes[-1]] == [2, 3, 2]


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_a_second_is_awaited(start: Start) -> None:
    with start(ranks=2, faults=[(1, 5, "in_step", "stop")]) as job:
        judge = job.run()
    judge.check(ended=2)
    assert len({line["generation"] for line in judge.lines("iteration")}) == 1


@pytest.mark.slow
def test_an_error_of_the_scripts_own_is_recovered_from_by_all(start: Start) -> None:
    with start(ranks=3, faults=[(1, 5, "before_step", "raise_")]) as job:
        judge = job.run()
    judge.check(ended=3)
    assert {line["generation"] for line in judge.lines("iteration")} == {1, 2}


@pytest.mark.integration
@pytest.mark.parametrize(
    ("how", "env"),
    [
        ({"inside": True}, {}),
        slow({"passes": 2, "batch": 4}, {}),
        slow({"commit_every": 1}, {}),
        ({"width": 3000}, GLOO),
        slow({}, {"SIRTAKI_LOCAL_SIZE": "1", "SIRTAKI_TRANSPORT": "gloo"}),
    ],
)
def test_scripts_and_transports_of_other_kinds(start: Start, how: dict[str, object], env: dict[str, str]) -> None:
    with start(ranks=3, env=env, faults=[(1, 5, "backward", "kill")], **how) as job:
        judge = job.run()
        if env:  # which adds in another order
            judge._check_reference = lambda history: None  # type: ignore[method-assign]
        judge.check(ended=2, killed=1)


@pytest.mark.parametrize("env", [{}, GLOO])
@pytest.mark.slow
def test_a_hundred_generations_leave_nothing(start: Start, env: dict[str, str]) -> None:
    faults = [(1, number, "before_step", "raise_") for number in range(2, 102)]
    with start(ranks=2, iterations=110, commit_every=1, width=4000, env=env, faults=faults) as job:
        judge = job.run(120.0)
    judge.check(ended=2)
    for log in judge.logs.values():
        calls = [line for line in log if line["what"] == "train"]
        assert len(calls) == 101
        early, late = calls[20], calls[-1]
        for what in ("descriptors", "threads", "mappings"):
            assert late[what] <= early[what] + 2, f"{what}: {[call[what] for call in calls]}"
        assert late["pages"] <= early["pages"] + 2000, f"{[call['pages'] for call in calls]}"


@pytest.mark.integration
def test_the_tuners_result_survives_generations(start: Start) -> None:
    env = {"SIRTAKI_WARMUP_ITERATIONS": "8", "SIRTAKI_TRANSPORT": "shared_memory"}
    with start(ranks=3, iterations=40, env=env, faults=[(0, 30, "in_step", "kill")]) as job:
        judge = job.run()
    judge.check(ended=2, killed=1)
    assert "Sirtaki keeps the setting tuned before the restart" not in judge.output  # it was found with 3 ranks
    assert (
        "2 ranks on 1 host(s) and is tuned again, beginning with the setting for 3 ranks on 1 host(s)" in judge.output
    )


@pytest.mark.integration
@pytest.mark.parametrize("registry", ["a file", slow("off")])
def test_a_world_that_shrinks_and_grows_runs_settings_that_were_found_for_its_size(
    launcher: Launcher, tmp_path: Path, registry: str
) -> None:
    path = tmp_path / "registry.db"
    env = {
        "SIRTAKI_REGISTRY": "off" if registry == "off" else str(path),
        "SIRTAKI_WARMUP_ITERATIONS": "40",
        "SIRTAKI_TRANSPORT": "gloo",
    }
    with ElasticJob(launcher, tmp_path, ranks=3, env=env, program="elastic_features.py", play="tuned") as job:
        judge = job.run(100.0)
    assert {worker for worker, code in judge.codes.items() if code == 0} == {0, 2, 3}, judge.output
    assert len(judge.codes) == 5
    assert "Traceback" not in judge.output
    assert "has failed" not in judge.output
    ends = [[line for line in judge.lines("stage") if line["stage"] == stage] for stage in range(len(SIZES))]
    assert [[line["size"] for line in stage] for stage in ends] == [[size] * size for size in SIZES], judge.output
    assert all(len({line["hash"] for line in stage}) == 1 for stage in ends)
    begins_s = [0.0, *(max(line["s"] for line in stage) for stage in ends)]
    tried = [
        [line for line in judge.lines("trial") if begins_s[stage] < line["s"] < begins_s[stage + 1]]
        for stage in range(len(SIZES))
    ]
    assert all({line["size"] for line in lines} <= {size} for lines, size in zip(tried, SIZES, strict=True)), tried
    # A size that the job has not had is tuned anew; one that it has had is looked up.
    for stage in (0, 1, 3):
        assert len({line["setting"] for line in tried[stage]}) > 1, tried
    # Where turns scatter nothing is proved, and what the registry has is no result: the job's own stays then.
    again = re.findall(r"found Sequential on 3 ranks|Sirtaki keeps the setting tuned before the restart", judge.output)
    assert len(again) == 2, judge.output
    if registry == "off":
        return
    store = open_store(str(path))
    try:
        assert {record.topology.world_size for record in store.all(JobRecord)} == {2, 3, 4}
    finally:
        store.close()


# ── features ──────────────────────────────────────────────────────────────────────────────────────────────────────────


SOON_S = 2.0


@pytest.mark.slow
def test_every_wait_ends_with_an_error_of_horovods_name_on_all_that_are_left(
    launcher: Launcher, tmp_path: Path
) -> None:
    with ElasticJob(launcher, tmp_path, ranks=len(WAITS) + 1, program="elastic_features.py", play="waits") as job:
        judge = job.run(90.0)
    assert sorted(code for code in judge.codes.values() if code is not None) == [-9] * len(WAITS) + [0], judge.codes
    for step, kill in enumerate(judge.lines("kill")):
        raised = [line for line in judge.lines("raised") if line["step"] == step]
        assert {line["worker"] for line in raised} == {0, *range(step + 2, len(WAITS) + 1)}
        assert max(line["s"] for line in raised) - kill["s"] < SOON_S
    assert not judge.lines("returned")


@pytest.mark.integration
def test_process_sets_and_their_optimizers_are_those_of_the_present_ranks(launcher: Launcher, tmp_path: Path) -> None:
    with ElasticJob(launcher, tmp_path, ranks=3, program="elastic_features.py", play="sets") as job:
        judge = job.run()
    assert judge.codes == {0: 0, 1: -9, 2: 0}, judge.logs
    before = {line["rank"]: line for line in judge.lines("train") if line["size"] == 3}
    after = {line["rank"]: line for line in judge.lines("train") if line["size"] == 2}
    assert [before[rank].get("first") for rank in range(3)] == [2.0, 2.0, None]
    assert [before[rank].get("outer") for rank in range(3)] == [2.0, None, 2.0]
    assert [before[rank]["weight"] for rank in range(3)] == [-1.5, -1.5, -3.0]
    assert [after[rank]["first"] for rank in range(2)] == [2.0, 2.0]
    assert all("the job has only 2 ranks" in after[rank]["outer"] for rank in range(2))
    assert [after[rank]["weight"] for rank in range(2)] == [-1.5, -1.5]


def test_a_rank_that_is_lost_before_training_ends_no_other_script(launcher: Launcher, tmp_path: Path) -> None:
    with ElasticJob(launcher, tmp_path, ranks=3, program="elastic_features.py", play="beginning") as job:
        judge = job.run()
    assert judge.codes == {0: 0, 1: -9, 2: 0}, judge.output
    assert [(line["size"], line["weight"]) for line in judge.lines("train")] == [(2, -4.5)] * 2


@pytest.mark.integration
def test_diloco_continues_with_the_remaining_ranks(launcher: Launcher, tmp_path: Path) -> None:
    with ElasticJob(
        launcher, tmp_path, ranks=3, program="elastic_features.py", replaces=True, play="less_often"
    ) as job:
        judge = job.run(60.0)
    assert judge.codes == {0: 0, 1: -9, 2: 0, 3: 0}, judge.output
    assert {line["size"] for line in judge.lines("step")} >= {3}
    ends = judge.lines("hash")
    assert len(ends) == 3
    assert len({(line["hash"], line["momentum"]) for line in ends}) == 1, ends
    # Nobody has gone back by more than the step that was being made when a rank was lost.
    for worker in (0, 2):
        steps = [line["step"] for line in judge.lines("step") if line["worker"] == worker]
        assert sorted(set(steps)) == list(range(1, 25)), steps
        assert all(after - before in (0, 1) for before, after in pairwise(steps)), steps


@pytest.mark.integration
def test_residuals_of_compression_stay_with_the_remaining_ranks(launcher: Launcher, tmp_path: Path) -> None:
    env = {"SIRTAKI_TRANSPORT": "gloo"}
    with ElasticJob(
        launcher, tmp_path, ranks=3, env=env, program="elastic_features.py", replaces=True, play="compressed"
    ) as job:
        judge = job.run(60.0)
    assert judge.codes == {0: 0, 1: -9, 2: 0, 3: 0}, judge.output
    ends = judge.lines("hash")
    assert len({line["hash"] for line in ends}) == 1, ends
    assert all(line["off"] < 0.1 for line in ends), ends
    owed = {(line["worker"], line["step"]): line["owed"] for line in judge.lines("step")}
    # A step in which a rank was lost may be told by nobody.
    assert {(worker, step) for worker in (0, 2) for step in (11, 17)} <= owed.keys()
    assert all(left > 0.0 for (worker, step), left in owed.items() if worker in (0, 2) and 11 <= step <= 17), owed


# ── repeating ─────────────────────────────────────────────────────────────────────────────────────────────────────────


test_a_rank_goes_from_generation_to_generation = played_on_ranks("elastic_alone", Job(1, env={**UNTUNED, **OVER_MESH}))


@pytest.mark.integration
def test_gpus_that_wait_for_a_killed_rank_are_freed_and_training_goes_on_from_the_last_commit(start: Start) -> None:
    with start(ranks=3, program="elastic_on_streams.py") as job:
        assert job.wait() == 0, job.output()
        output = job.output()
    assert re.search(r"rank [02] has aborted 2 NCCL communicators, so that its GPU does not wait", output), output
    found = re.findall(r"restarted at step 6 after (\d+\.\d+) s", output)
    assert len(found) == 2, output
    assert max(map(float, found)) < 10.0, output  # usually 0.4 s: one abort, and a new generation
    assert {"done 0 of 2", "done 1 of 2"} == set(re.findall(r"done \d of \d", output)), output


@pytest.mark.slow
def test_a_rank_whose_script_waits_for_the_gpu_ends_and_the_others_go_on(start: Start) -> None:
    with start(ranks=3, program="elastic_on_streams.py", waits_in="script") as job:
        assert job.wait() == 0, job.output()
        output = job.output()
    assert "rank 0 leaves the elastic job, because the job has failed while its GPU waits for other ranks" in output
    assert re.findall(r"done \d of \d", output) == ["done 0 of 1"], output
