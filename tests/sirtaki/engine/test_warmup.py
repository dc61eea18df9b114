"""Jobs tune while they train, remember what they found, and are never harmed by it."""

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from conftest import RunRanks

from sirtaki.cli.__main__ import main
from sirtaki.registry.opening import open_store
from sirtaki.registry.schema import JobRecord


def read_records(log: Path) -> list[dict[str, Any]]:
    """Return the records of trials and of the end, without the planners' model."""
    records = map(json.loads, log.read_text().splitlines())
    return [record for record in records if record["event"] != "model"]


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_job_tunes_while_it_trains_right_and_the_next_one_starts_tuned(
    run_ranks: RunRanks, tmp_path: Path, ranks: int
) -> None:
    # Search and proof take at most 2.5 times as many iterations, and must end before the job does.
    env = {"SIRTAKI_WARMUP_ITERATIONS": "35", "SIRTAKI_TRIAL_LOG": str(tmp_path / "trials.jsonl")}
    first = run_ranks("tuning.py", ranks, 90, env=env).stderr
    assert "tuned in" in first
    assert "stored in the registry" in first
    records = read_records(tmp_path / "trials.jsonl")
    assert records[0]["purpose"] == "default"
    assert records[-1]["event"] == "result"
    assert len({json.dumps(record["knobs"]) for record in records}) > 3
    env["SIRTAKI_TRIAL_LOG"] = str(tmp_path / "second.jsonl")
    second = run_ranks("tuning.py", ranks, 90, env=env).stderr
    # On a host that is too busy to prove anything the next job goes on instead.
    assert re.search("found (an unfinished tuning phase of )?Sequential", second)
    # What was kept is what runs first; whether it is kept again is up to the noise of a busy machine.
    assert read_records(tmp_path / "second.jsonl")[0]["knobs"] == records[-1]["knobs"]


@pytest.mark.slow
def test_a_remembered_setting_is_where_a_short_search_begins_if_the_link_has_changed(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    env = {"SIRTAKI_WARMUP_ITERATIONS": "40"}  # of 20 proofs would leave no room for a third setting

    def said(pause_s: float, name: str) -> tuple[str, int]:
        log = tmp_path / name
        job = run_ranks("tuning.py", 2, 75, env={**env, "TEST_PAUSE_S": str(pause_s), "SIRTAKI_TRIAL_LOG": str(log)})
        return job.stderr, len({json.dumps(record["knobs"]) for record in read_records(log)})

    said(0.01, "first")
    again, _ = said(0.01, "again")  # what it tries is up to the noise of a busy machine
    assert "found Sequential" in again
    assert "bandwidth has changed" not in again
    slower, tried = said(0.1, "slower")
    assert "bandwidth has changed; Sirtaki starts a short search of at most" in slower
    assert tried > 2


@pytest.mark.slow
def test_a_job_that_ends_early_leaves_its_trials_to_the_next(run_ranks: RunRanks) -> None:
    first = run_ranks("tuning.py", 2, 15).stderr
    assert "the job ends before tuning is complete" in first
    assert "and the next job continues" in first
    second = run_ranks("tuning.py", 2, 130).stderr
    assert "found an unfinished tuning phase" in second
    assert "tuned in" in second


def test_a_job_that_ends_early_and_stores_nothing_logs_it(run_ranks: RunRanks) -> None:
    told = run_ranks("tuning.py", 2, 15, env={"SIRTAKI_REGISTRY": "off"}).stderr
    assert re.search(
        r"the job ends before tuning is complete; result so far: tuned in .* the next job starts tuning again", told
    )


@pytest.mark.slow
@pytest.mark.timeout(360)  # three jobs, and the machine may be busy
def test_settings_travel_to_another_deployment_and_to_a_deeper_model(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Job A tunes; its entry is exported and imported elsewhere; B starts tuned, C (deeper, more ranks) from it."""
    here, there, carried = (str(tmp_path / name) for name in ("here.db", "there.db", "entries.json"))
    first_log, same_log = tmp_path / "first.jsonl", tmp_path / "same.jsonl"
    env = {"SIRTAKI_WARMUP_ITERATIONS": "40"}
    run_ranks(
        "tuning.py", 2, 50, 3, env={**env, "SIRTAKI_REGISTRY": here, "SIRTAKI_TRIAL_LOG": str(first_log)}, timeout_s=120
    )
    assert main(["registry", "--registry", here, "export", "-o", carried]) == 0
    assert main(["registry", "--registry", there, "import", carried]) == 0

    env["SIRTAKI_REGISTRY"] = there
    same = run_ranks("tuning.py", 2, 50, 3, env={**env, "SIRTAKI_TRIAL_LOG": str(same_log)}, timeout_s=120).stderr
    assert "found Sequential" in same
    assert read_records(same_log)[0]["knobs"] == read_records(first_log)[-1]["knobs"]

    # No trials but the check against the default, unless the noise of a busy machine made it lose that.
    assert len(settings_of(same_log)) <= 2 or "registry" not in read_records(same_log)[-1]["reason"]

    deeper_log = tmp_path / "deeper.jsonl"
    deeper = run_ranks("tuning.py", 4, 50, 4, env={**env, "SIRTAKI_TRIAL_LOG": str(deeper_log)}, timeout_s=120).stderr
    assert "a similar job's setting (Sequential on 2 ranks" in deeper
    # What runs right after the default is what those jobs found, unless this job's own probes speak against it, or it
    # is what runs anyway.
    ran = read_records(deeper_log)
    nothing = found_nothing(first_log) or found_nothing(same_log)
    assert "not tried, as" in deeper or "registry" in {record["arm"] for record in ran[:2]} or nothing


def settings_of(log: Path) -> set[str]:
    return {json.dumps(record["knobs"]) for record in read_records(log)}


def found_nothing(log: Path) -> bool:
    return read_records(log)[-1]["knobs"] == read_records(log)[0]["knobs"]


def test_tuning_can_be_switched_off(run_ranks: RunRanks, tmp_path: Path) -> None:
    env = {"HOROVOD_AUTOTUNE": "0", "SIRTAKI_TRIAL_LOG": str(tmp_path / "log")}
    said = run_ranks("tuning.py", 2, 10, env=env).stderr
    assert "warm-up" not in said
    assert said.count("tuning is off (SIRTAKI_TUNE=0)") == 1
    assert "no trial log is written" in said
    assert not (tmp_path / "cache" / "sirtaki").exists()


def test_knobs_fixed_by_the_user_are_not_tuned(run_ranks: RunRanks, tmp_path: Path) -> None:
    log = tmp_path / "trials.jsonl"
    env = {
        "HOROVOD_FUSION_THRESHOLD": "131072",
        "SIRTAKI_STREAMS": "2",
        "SIRTAKI_TRANSPORT": "gloo",
        "SIRTAKI_WARMUP_ITERATIONS": "26",
        "HOROVOD_AUTOTUNE_LOG": str(log),
    }
    run_ranks("tuning.py", 2, 80, env=env)
    knobs = [record["knobs"] for record in read_records(log)]
    assert {(k["unit_bytes"], k["streams"], k["transport"]) for k in knobs} == {(131072, 2, "gloo")}


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"SIRTAKI_STREAMS": "many"}, "SIRTAKI_STREAMS"),
        pytest.param({"SIRTAKI_STREAMS": "500"}, "SIRTAKI_STREAMS=500", marks=pytest.mark.integration),
        ({"SIRTAKI_STREEMS": "2"}, "SIRTAKI_STREAMS"),
        ({"SIRTAKI_TRANSPORT": "nccl"}, "possible: shared_memory flat"),
        pytest.param({"HOROVOD_FUSION_THRESHOLD": "-1"}, "HOROVOD_FUSION_THRESHOLD", marks=pytest.mark.integration),
    ],
)
def test_invalid_settings_are_refused_with_the_remedy(run_ranks: RunRanks, env: dict[str, str], says: str) -> None:
    job = run_ranks("tuning.py", 2, 5, env=env, check=False)
    assert job.returncode != 0
    assert "ConfigError" in job.stderr
    assert says in job.stderr


def test_a_registry_full_of_garbage_is_quarantined_with_a_warning(run_ranks: RunRanks, tmp_path: Path) -> None:
    registry = tmp_path / "registry.db"
    registry.write_bytes(b"this is no database " * 1000)
    env = {"SIRTAKI_REGISTRY": str(registry), "SIRTAKI_WARMUP_ITERATIONS": "26"}
    job = run_ranks("tuning.py", 2, 80, env=env)
    assert "Sirtaki renamed its file to" in job.stderr
    assert job.stdout.count("done") == 2
    assert any(b"this is no database" in path.read_bytes() for path in tmp_path.glob("registry.db.broken*"))


def test_a_cache_directory_that_cannot_be_made_does_not_stop_a_job(run_ranks: RunRanks, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    blocked.chmod(stat.S_IRUSR)
    job = run_ranks("tuning.py", 2, 80, env={"XDG_CACHE_HOME": str(blocked), "SIRTAKI_WARMUP_ITERATIONS": "26"})
    assert "without the registry" in job.stderr
    assert job.stdout.count("done") == 2


SOME_DAMAGES = ["cuts of another model", "knobs out of space", "graphs that are none", "the file cut off"]


ALL_DAMAGES = [
    *SOME_DAMAGES,
    "cuts behind the last gradient",
    "cuts in thousands",
    "streams that are not there",
    "times that are none",
    "a speed-up of millions",
    "a history of nonsense",
    "an empty file",
    "the file gone",
]


def run_jobs(run_ranks: RunRanks, registry: Path, ranks: int, *steps: str) -> str:
    """Run the steps, and return standard error, which has a line for each."""
    env = {"SIRTAKI_WARMUP_ITERATIONS": "26", "SIRTAKI_REGISTRY": str(registry)}
    job = run_ranks("remembered_settings.py", ranks, *steps, env=env, timeout_s=340)
    assert len(re.findall(r"^(?:done|damaged): ", job.stderr, re.MULTILINE)) == len(steps)
    assert "Traceback" not in job.stderr
    return job.stderr


def entries_of(registry: Path) -> list[JobRecord]:
    return list(open_store(str(registry)).all(JobRecord))


@pytest.mark.timeout(360)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_jobs_that_reduce_different_parts_of_one_model_do_not_run_each_others_settings(
    run_ranks: RunRanks, tmp_path: Path, ranks: int
) -> None:
    registry = tmp_path / "registry.db"
    log = run_jobs(run_ranks, registry, ranks, "whole", "body and head", "tail", "body and head")
    first, again = log.split("done: body and head")[:2]
    assert "found Sequential" not in first
    assert again.count("found Sequential") == 2
    assert len([entry for entry in entries_of(registry) if not entry.key.condition]) == 4


@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("ranks", "damages"),
    [
        pytest.param(2, SOME_DAMAGES, marks=pytest.mark.slow),
        pytest.param(2, ALL_DAMAGES, marks=pytest.mark.slow),
        pytest.param(3, ALL_DAMAGES, marks=pytest.mark.slow),
    ],
    ids=["2-some", "2-all", "3-all"],
)
def test_with_any_registry_contents_jobs_train_correctly_and_repair_them(
    run_ranks: RunRanks, tmp_path: Path, ranks: int, damages: list[str]
) -> None:
    registry = tmp_path / "registry.db"
    log = run_jobs(
        run_ranks, registry, ranks, "whole", *[step for damage in damages for step in (damage, "whole")], "whole"
    )
    assert "found Sequential" in log.rpartition("done: ")[0].rpartition("done: ")[2]
    (entry,) = entries_of(registry)
    assert 0.01 < entry.speedup < 100
    assert entry.knobs["streams"] <= 24
    assert list(tmp_path.glob("registry.db.broken-*"))


@pytest.mark.slow
def test_a_job_with_fixed_knobs_or_a_full_disk_leaves_the_free_jobs_entry_alone(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    registry = tmp_path / "registry.db"
    steps = ("two streams", "full disk for the registry", "full disk for the trial log", "middle")
    run_jobs(run_ranks, registry, 2, *steps)
    fixed = {tuple(entry.key.fixed.items()) for entry in entries_of(registry)}
    assert fixed == {(), (("streams", "2"),)}
    assert len(entries_of(registry)) == 3


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_a_trial_that_cannot_be_opened_on_one_rank_fails_alone(run_ranks: RunRanks, ranks: int) -> None:
    job = run_ranks("opening_training.py", ranks, env={"SIRTAKI_TRANSPORT": "gloo", "SIRTAKI_REGISTRY": "off"})
    assert "told ['failed', 'failed', " in job.stdout
    assert "told ['failed', 'failed', 'failed']" not in job.stdout
    assert "Sirtaki cannot open 24 streams (parallel connections) of transport gloo" in job.stderr
