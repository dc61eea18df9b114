"""Touch counts and the coverage curve, on Zipf's law as in the paper."""

import numpy as np
import numpy.typing as npt
import pytest

from sirtaki.autotune.sparse import TouchCounts, coverage, knee, until_little_is_gained


def zipf(n: int, rows: int, exponent: float, seed: int) -> npt.NDArray[np.int64]:
    edges = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(edges, np.random.default_rng(seed).random(n) * edges[-1])


def test_counts_are_exact() -> None:
    counts = TouchCounts()
    counts.note([np.array([0, 2]), np.array([2, 5])], 3)
    counts.note([np.array([2]), np.array([], dtype=np.int64)], 1)
    assert (counts.rows.tolist(), counts.counts.tolist()) == ([0, 2, 5], [1, 3, 1])
    assert counts.of([2, 5]).tolist() == [3, 1]
    assert (counts.touched, counts.most, counts.union, counts.n_samples) == (2.5, 1.5, 2.0, 4)
    assert counts.ranked().tolist() == [2, 0, 5]


def test_the_curve_says_which_part_of_touches_the_first_rows_have() -> None:
    assert coverage(np.array([6, 3, 1])).tolist() == [0.6, 0.9, 1.0]
    assert coverage(np.array([], dtype=np.int32)).tolist() == []


def test_the_knee_is_farthest_above_the_chord() -> None:
    assert knee(coverage(np.array([50, 40, 4, 3, 2, 1]))) == 2
    assert knee(coverage(np.ones(8, dtype=np.int32))) == 0  # all are alike
    assert knee(np.array([])) == 0


def test_the_hot_set_grows_until_a_step_gains_little() -> None:
    curve = coverage(np.array([400, 300, 200, *[1] * 100]))
    assert until_little_is_gained(curve, step=1, least=0.01) == 3
    assert until_little_is_gained(curve, step=1000, least=0.01) == len(curve)
    assert until_little_is_gained(np.array([])) == 0


@pytest.mark.parametrize(("part", "least"), [(0.04, 0.8), (0.08, 0.9)])
def test_a_sample_finds_the_hot_rows(part: float, least: float) -> None:
    """The paper's § 5.3: more than 80 % of the hot set at a sample of 4 %, 90 % at 8 %."""
    touches, rows, hot = 4_000_000, 200_000, 1000
    looked_up = zipf(touches, rows, 1.1, seed=1)
    whole, sample = TouchCounts(), TouchCounts()
    whole.note([looked_up], 0)
    sample.note([looked_up[: int(part * touches)]], 0)
    found = set(sample.ranked()[:hot].tolist()) & set(whole.ranked()[:hot].tolist())
    assert len(found) >= least * hot
