"""What is told of a choice, and that a log can hold it."""

import json

import numpy as np
import pytest

from sirtaki.autotune.sparse import Shape, SparseChoice, SparseSummary, TouchCounts, summarise
from sirtaki.comm.sparse.plan import GATHER, SparsePath, SparsePlan

SHAPE = Shape(n_rows=1000, row_bytes=32, item_bytes=4, index_bytes=4)


def counts() -> TouchCounts:
    """Rows 0 to 9 by both ranks, and rows of their own, thirty each."""
    found = TouchCounts()
    for _ in range(3):
        found.note([np.r_[0:10, 100:130], np.r_[0:10, 200:230]], 70)
    return found


def told(choice: SparseChoice) -> SparseSummary:
    totals = TouchCounts()
    totals.note_totals(60, 30, 55)
    return summarise(choice, SHAPE, name="table", width=8, ranks=2, looked_up=55.0, counts=totals)


def tried() -> SparseChoice:
    choice = SparseChoice(fixed=None, tries=True)
    choice.learned = counts()
    choice.candidates = [GATHER, SparsePlan(path=SparsePath.HOT_COLD, hot_rows=tuple(range(10)))]
    choice.predicted_s, choice.measured_s = [0.01, 0.02], [0.03, 0.02]
    choice.plan = choice.candidates[1]
    return choice


def test_it_says_what_was_touched_and_which_part_of_it_hot_rows_are() -> None:
    found = told(tried())
    assert (found.density, found.touched, found.popular_rows) == (0.07, 80, 10)
    assert found.popular_share == pytest.approx(20 / 80)
    assert found.curve[-1] == (70, 1.0)


def test_ways_have_their_times_and_bytes_and_the_chosen_ones_are_compared() -> None:
    found = told(tried())
    assert [(way.plan.split()[0], way.predicted_s, way.measured_s) for way in found.ways] == [
        ("gather", 0.01, 0.03),
        ("hot_cold", 0.02, 0.02),
    ]
    assert found.n_bytes == pytest.approx(10 * 36 + 30 * 36)  # a ring of two brings a tensor once
    assert (found.dense_bytes, found.horovod_bytes) == (32_000, 55 * 40)
    assert "7.00% of rows in an iteration, 10 of them are 25% of touches; by hot_cold (10 hot rows" in found.describe()


def test_without_hot_rows_the_popular_ones_are_those_before_the_knee() -> None:
    choice = tried()
    choice.plan = GATHER
    assert told(choice).popular_rows == 10


def test_a_fixed_way_is_told_without_a_curve() -> None:
    found = told(SparseChoice(fixed=SparsePath.OWNER, tries=True))
    assert (found.plan, found.curve, found.popular_share) == ("owner", (), 0.0)
    assert (found.density, len(found.ways), found.ways[0].measured_s) == (0.055, 1, None)
    assert "touches" not in found.describe()


def test_it_can_be_written_down_and_read_again() -> None:
    for choice in (tried(), SparseChoice(fixed=SparsePath.OWNER, tries=True)):
        found = told(choice)
        assert SparseSummary.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    "wrong",
    [{"n_rows": 0}, {"union": -1}, {"plan": "by air"}, {"ways": [1]}, {"curve": [[1]]}, {"dense_bytes": float("nan")}],
)
def test_what_is_wrong_with_a_log_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        SparseSummary.from_json({**told(tried()).to_json(), **wrong})
