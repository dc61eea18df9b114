"""Iterations of all ranks, with waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.played_jobs import record
from fakes.replays import over_a_link

from sirtaki.analysis.job_model import histories


def test_ranks_are_on_one_clock_that_begins_with_them() -> None:
    found = histories(record(over_a_link(), offsets_s={1: 7.5}))
    assert found.begin_s == pytest.approx({0: 0.0, 1: 0.0})
    assert found.hosts == {0: 0, 1: 1}
    ends_s = [{rank: mine[-1].end_s for rank, mine in step.stretches.items()} for step in found.steps]
    assert ends_s[0] == pytest.approx({0: ends_s[0][0], 1: ends_s[0][0]})


def test_each_rank_waits_for_the_last_unit_of_each_stream() -> None:
    (step, _) = histories(record(over_a_link(streams=2))).steps
    for mine in step.stretches.values():
        (wait,) = (one for one in mine if one.waits)
        assert set(wait.waits) == {(0, 1000, 4000), (0, 4000, 6500)}
        assert wait.end_s == pytest.approx(max(one.end_s for one in step.barriers))


def test_iterations_that_negotiate_are_left_out() -> None:
    recording = record(over_a_link(iterations=3))
    ranks = {
        number: replace(rank, iterations=(replace(rank.iterations[0], profiling=True), *rank.iterations[1:]))
        for number, rank in recording.ranks.items()
    }
    assert len(histories(replace(recording, ranks=ranks)).steps) == 2
