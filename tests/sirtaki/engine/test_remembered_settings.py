"""Whatever earlier jobs, strangers or a broken disk have left in the registry, a job trains right and to its end."""

from pathlib import Path

import pytest
from conftest import RunRanks

from sirtaki.registry.entry import Entry
from sirtaki.registry.safe_store import open_store

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
    """Standard error, in which each step has left a line."""
    env = {"SIRTAKI_WARMUP_ITERATIONS": "20", "SIRTAKI_REGISTRY": str(registry)}
    job = run_ranks("remembered_settings.py", ranks, *steps, env=env, timeout_s=340)
    assert job.stderr.count("done: ") + job.stderr.count("damaged: ") == len(steps)
    assert "Traceback" not in job.stderr
    return job.stderr


def entries_of(registry: Path) -> list[Entry]:
    return list(open_store(str(registry)).entries())


@pytest.mark.timeout(360)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_jobs_that_reduce_other_parts_of_one_model_do_not_run_each_others_settings(
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
def test_whatever_is_in_the_registry_jobs_train_right_and_put_it_right(
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
    fixed = [entry.key.fixed for entry in entries_of(registry)]
    assert {} in fixed
    assert {"streams": "2"} in fixed
    assert len(fixed) == 2
    assert len(entries_of(registry)) == 3
