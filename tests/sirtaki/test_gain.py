"""Descriptions of a gain: times and factor, and the interval if it is proved."""

import math

import pytest

from sirtaki.errors import TuningError
from sirtaki.measures import Gain, describe_gain, faster


@pytest.mark.parametrize(
    ("before_s", "after_s", "words"),
    [
        (1.24, 1.0, "1.24× faster"),
        (1.0, 1.1, "1.10× slower"),
        (1.0, 1.004, "as fast"),
        (25.0, 1.0, "25× faster"),
    ],
)
def test_two_times_are_compared_by_a_factor(before_s: float, after_s: float, words: str) -> None:
    assert faster(before_s, after_s) == words


def test_an_unproved_gain_is_reported_as_such() -> None:
    assert describe_gain(None, 2.0, 1.0) == "2.00× faster (not proved)"
    assert describe_gain(None, 1.0, 1.001) == "as fast"
    assert describe_gain(Gain(times=1.07, low=1.05, high=1.09), 2.0, 1.0) == "7 % faster, ± 2"


@pytest.mark.parametrize(
    ("gain", "told"),
    [
        (Gain(times=1.07, low=1.05, high=1.09), "7 % faster, ± 2"),
        (Gain(times=1.024, low=1.019, high=1.029), "2.4 % faster, ± 0.5"),
        (Gain(times=0.9, low=0.85, high=0.96), "10 % slower, ± 5"),
        (Gain(times=2.31, low=2.27, high=2.35), "2.31× faster, ± 0.04"),
    ],
)
def test_a_gain_is_reported_with_its_interval(gain: Gain, told: str) -> None:
    assert gain.describe() == told


def test_two_combined_gains_are_between_them_and_more_certain_than_either() -> None:
    vague, sure = Gain(times=1.3, low=0.9, high=1.9), Gain(times=1.1, low=1.05, high=1.16)
    both = vague.pooled(sure)
    assert sure.times < both.times < vague.times
    assert math.log(both.high / both.low) < math.log(sure.high / sure.low)
    assert (vague.proved, both.proved) == (False, True)


@pytest.mark.parametrize("values", [(1.0, 1.1, 1.2), (1.0, 0.0, 1.2), (1.0, 0.9, math.inf), (math.nan, 1.0, 1.0)])
def test_an_invalid_interval_is_rejected(values: tuple[float, float, float]) -> None:
    times, low, high = values
    with pytest.raises(TuningError, match="Gain: expected 0 < low <= times <= high"):
        Gain(times=times, low=low, high=high)
