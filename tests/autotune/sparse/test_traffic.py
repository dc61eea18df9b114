"""Bytes and rows of a reduction, against what is counted by hand."""

import numpy as np
import pytest

from sirtaki.autotune.sparse import Shape, TouchCounts, Traffic, dense_bytes, horovod_bytes, traffic
from sirtaki.comm.sparse.plan import SparsePath, SparsePlan

SHAPE = Shape(n_rows=1000, row_bytes=32, item_bytes=4, index_bytes=4)
RANKS = 4


def counts() -> TouchCounts:
    """Rows 0 to 9 by all ranks in both iterations, and ten rows that a rank has for itself."""
    found = TouchCounts()
    for _ in range(2):
        found.note([np.r_[0:10, 100 + 10 * rank : 110 + 10 * rank] for rank in range(RANKS)], 50)
    return found


def of(plan: SparsePlan) -> Traffic:
    return traffic(plan, SHAPE, RANKS, counts())


def test_gathered_rows_come_from_every_other_rank() -> None:
    found = of(SparsePlan(path=SparsePath.GATHER))
    assert (found.exchanges, found.exchanged_bytes, found.added_rows) == (2, 3 * 20 * 36, 80)
    assert found.received_bytes(RANKS) == 3 * 20 * 36


def test_owners_get_their_rows_and_give_sums() -> None:
    found = of(SparsePlan(path=SparsePath.OWNER))
    assert found.exchanged_bytes == pytest.approx(0.75 * (20 + 50) * 36)
    assert found.added_rows == 80 / 4 + 50


def test_hot_rows_travel_dense_and_only_the_others_with_numbers() -> None:
    found = of(SparsePlan(path=SparsePath.HOT_COLD, hot_rows=tuple(range(10))))
    assert (found.reductions, found.reduced_bytes) == (1, 10 * 36)
    assert found.exchanged_bytes == pytest.approx(3 * 10 * 36)
    assert found.received_bytes(RANKS) == pytest.approx(3 * 10 * 36 + 1.5 * 10 * 36)


def test_an_aggregator_sends_each_rank_its_hot_rows_once() -> None:
    found = of(SparsePlan(path=SparsePath.HOT_COLD, hot_rows=tuple(range(10)), aggregated=True))
    assert (found.reductions, found.aggregations, found.aggregated_bytes) == (0, 1, 10 * 36)
    assert found.received_bytes(RANKS) == pytest.approx(3 * 10 * 36 + 10 * 36)


def test_blocks_of_one_row_are_a_bitmap_and_the_rows_that_any_rank_has() -> None:
    found = of(SparsePlan(path=SparsePath.BLOCKS))
    assert (found.exchanged_bytes, found.reduced_bytes) == (3 * 125, 50 * 32)
    larger = of(SparsePlan(path=SparsePath.BLOCKS, block_rows=10))
    assert larger.reduced_bytes == pytest.approx(50 * 36, rel=0.3)  # five blocks, two of them touched by one rank


def test_dense_costs_all_rows_and_a_little_more_than_without_flags() -> None:
    found = of(SparsePlan(path=SparsePath.DENSE))
    assert found.received_bytes(RANKS) == 1.5 * 1000 * 36
    assert dense_bytes(SHAPE, RANKS) == 1.5 * 1000 * 32


def test_horovods_rule_sends_each_look_up_with_a_long_number() -> None:
    assert horovod_bytes(SHAPE, RANKS, 25.0) == 3 * 25 * 40


def test_totals_alone_are_enough_for_ways_without_hot_rows() -> None:
    totals = TouchCounts()
    totals.note_totals(80, 20, 50)
    for path in (SparsePath.GATHER, SparsePath.OWNER, SparsePath.BLOCKS, SparsePath.DENSE):
        assert traffic(SparsePlan(path=path), SHAPE, RANKS, totals) == of(SparsePlan(path=path))
