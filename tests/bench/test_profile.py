"""What `bench.profile` puts into clocks is what it says, and nothing else."""

import pytest
from fakes import recordings

from bench.profile import moved


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
