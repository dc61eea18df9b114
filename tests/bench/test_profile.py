"""What `bench.profile` puts into clocks is what it says, and nothing else."""

import pytest
from fakes import recordings

from bench.profile import left_by_hta_s, moved, with_wrong_clock


def test_moments_are_moved_as_by_a_wrong_clock_and_lengths_are_not() -> None:
    own = recordings.rank(1)
    since_s = own.iterations[0].begin_s
    told = moved(own.iterations, 0.05, 1e-3, since_s)
    expected = recordings.shifted(own, by_s=0.05, drift=1e-3).iterations
    assert told[2].units[1].done_s == pytest.approx(expected[2].units[1].done_s, abs=1e-9)
    assert told[1].collectives[0].agreed_s == pytest.approx(expected[1].collectives[0].agreed_s, abs=1e-9)
    assert told[0].units[1].begin_s is None
    assert told[0].exposed_s == own.iterations[0].exposed_s
    assert told[0].units[0].unit == own.iterations[0].units[0].unit


def test_a_wrong_clock_is_anothers_unless_nobody_knows() -> None:
    true = recordings.recording()
    told = with_wrong_clock(true, by_s=0.05, drift=0.0)
    assert told.ranks[1].iterations[0].begin_s == pytest.approx(true.ranks[1].iterations[0].begin_s + 0.05)
    assert told.ranks[1].offset_s == pytest.approx(true.ranks[1].offset_s - 0.05)
    assert told.job.placement[1].clock != told.job.placement[0].clock
    unknown = with_wrong_clock(true, by_s=0.05, drift=0.0, hosts=False)
    assert unknown.job == true.job
    assert unknown.ranks[1].iterations == told.ranks[1].iterations


def test_one_common_minimum_leaves_all_that_a_clock_is_wrong_by() -> None:
    true = recordings.recording()
    assert left_by_hta_s(true, with_wrong_clock(true, by_s=-0.05, drift=0.0)) == pytest.approx(0.05, abs=1e-5)
