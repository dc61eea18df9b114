"""Steps and commits of a job in which nobody is lost are timed."""

import pytest

from bench.elastic_cost import train


@pytest.mark.slow
def test_steps_commits_and_those_to_be_written_are_told_apart() -> None:
    times = train(1, elastic=False, seconds=6.0, commit_every=10, state_bytes=4_000_000)
    assert len(times["step"]) > 10
    assert len(times["commit"]) > len(times["due"]) == 1
    assert all(0 < took_s < 6 for each in times.values() for took_s in each)
