"""Trainings of several processes that start from the ways of rows which earlier ones have left in the registry."""

import re
from pathlib import Path

import pytest
from conftest import RunRanks

from sirtaki.autotune.sparse import CHECKS, LEARNING_ITERATIONS
from sirtaki.registry.safe_store import open_store

TOLD = re.compile(r"(even|popular): kept after (\d+), (probed|not probed), (\w+)")


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_second_training_starts_from_the_first_ones_way_and_another_skew_is_tried_anew(
    run_ranks: RunRanks, tmp_path: Path, ranks: int
) -> None:
    registry, skews = tmp_path / "registry.db", ["even", "even", "popular", "popular", "even"]
    env = {"SIRTAKI_REGISTRY": str(registry), "SIRTAKI_LOG_LEVEL": "info"}
    job = run_ranks("sparse_memory.py", ranks, *skews, env=env, timeout_s=180)
    told = TOLD.findall(job.stdout)
    logs = re.split(r"trained: \w+", job.stderr)
    assert [skew for skew, *_ in told] == skews
    for first, second in ((0, 1), (2, 3)):
        assert told[first][2] == "probed"
        assert "are touched like those" not in logs[first]
        assert f"are touched like those of weight in an earlier job, which went by {told[first][3]}" in logs[second]
        recalled = 0 if told[first][3] == "gather" else 2 * CHECKS
        if "is clearly faster than" in logs[second]:  # trials are short, and the machine may be busy
            assert told[second][2] == "probed"
        else:
            # In the first iteration gradients travel dense; it is found out then which are sparse.
            assert (int(told[second][1]), told[second][2]) == (LEARNING_ITERATIONS + recalled, "not probed")
            assert int(told[first][1]) >= int(told[second][1])
    assert "are touched like those of weight" in logs[4]
    ways = open_store(str(registry)).row_ways()
    assert {way.skew.covered(ranks * 150) > 0.45 for way in ways} == {False, True}
