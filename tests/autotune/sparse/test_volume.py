"""What the volume model predicts, and which hot rows, blocks and paths follow from it."""

from dataclasses import replace

import numpy as np
import pytest

from sirtaki.autotune.sparse import HotPace, Pace, Shape, TouchCounts, VolumeModel, coverage, knee
from sirtaki.comm.sparse.plan import SparsePath, SparsePlan

PACE = Pace(exchange_s=1e-4, exchange_bytes_per_s=1e8, reduce_s=1e-4, reduce_bytes_per_s=1e8 / 1.5, add_bytes_per_s=1e9)
RANKS = 4


def model(
    chances: np.ndarray, *, width: int = 64, ranks: int = RANKS, pace: Pace = PACE, iterations: int = 8
) -> VolumeModel:
    drawn, counts = np.random.default_rng(3), TouchCounts()
    for _ in range(iterations):
        by_rank = [np.flatnonzero(drawn.random(len(chances)) < chances) for _ in range(ranks)]
        counts.note(by_rank, len(np.unique(np.concatenate(by_rank))))
    shape = Shape(n_rows=len(chances), row_bytes=4 * width, item_bytes=4, index_bytes=4)
    return VolumeModel(shape, ranks, counts, pace)


def zipf_chances(rows: int, looked_up: int, exponent: float) -> np.ndarray:
    share = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return 1.0 - np.exp(-looked_up * share / share.sum())


def test_dense_costs_the_same_whoever_touches_what() -> None:
    few, many = model(np.full(10_000, 0.001)), model(np.full(10_000, 0.9))
    plan = SparsePlan(path=SparsePath.DENSE)
    assert few.seconds(plan) == pytest.approx(1e-4 + 10_000 * 65 * 4 / (1e8 / 1.5), rel=0.02)
    assert many.seconds(plan) < 1.2 * few.seconds(plan)


def test_gather_carries_each_row_once_for_each_rank_that_has_it() -> None:
    found = model(np.full(10_000, 0.01)).seconds(SparsePlan(path=SparsePath.GATHER))
    assert found == pytest.approx(2e-4 + 3 * 100 * 260 / 1e8 + 400 * 256 / 1e9, rel=0.15)


def test_where_nearly_all_is_touched_rows_travel_without_numbers_and_where_little_is_dense_is_the_slowest() -> None:
    all_touched = model(np.full(5000, 0.99))
    first, second = all_touched.ranked()[:2]
    assert {first.path, second.path} <= {SparsePath.DENSE, SparsePath.BLOCKS, SparsePath.HOT_COLD}
    assert all_touched.seconds(SparsePlan(path=SparsePath.GATHER)) > 1.5 * all_touched.seconds(first)
    assert model(zipf_chances(100_000, 500, 1.02)).ranked()[-1].path is SparsePath.DENSE


def test_owners_pay_where_many_ranks_touch_the_same_rows() -> None:
    same = model(zipf_chances(1_000_000, 65_536, 1.03), ranks=16)
    gather, owner = (same.seconds(SparsePlan(path=path)) for path in (SparsePath.GATHER, SparsePath.OWNER))
    assert owner < 0.75 * gather
    apart = model(np.full(1_000_000, 1e-4), ranks=16)
    gather, owner = (apart.seconds(SparsePlan(path=path)) for path in (SparsePath.GATHER, SparsePath.OWNER))
    assert owner > 0.95 * gather


def test_the_hot_rows_are_those_that_most_ranks_touch() -> None:
    chances = np.full(50_000, 0.002)
    chances[[5, 700, 40_000, *range(1000, 1400)]] = 0.97
    plan = model(chances).best_of(SparsePath.HOT_COLD)
    assert plan is not None
    assert {5, 700, 40_000, *range(1000, 1400)} <= set(plan.hot_rows)
    assert len(plan.hot_rows) < 1000
    assert model(np.zeros(10)).best_of(SparsePath.HOT_COLD) is None  # nothing is touched


def test_blocks_are_larger_where_neighbours_are_touched_together() -> None:
    chances = np.zeros(4_000_000)
    chances[:2048] = 0.9
    together = model(chances, width=1).best_of(SparsePath.BLOCKS)
    assert together is not None
    assert together.block_rows > 1
    scattered = np.zeros(40_000)
    scattered[::97] = 0.9
    alone = model(scattered).best_of(SparsePath.BLOCKS)
    assert alone is not None
    assert alone.block_rows == 1


def test_what_would_not_fit_is_not_tried_dense() -> None:
    huge = VolumeModel(
        Shape(n_rows=1 << 30, row_bytes=256, item_bytes=4, index_bytes=4), RANKS, model(np.full(100, 0.5)).counts, PACE
    )
    assert huge.best_of(SparsePath.DENSE) is None
    assert SparsePath.DENSE not in {plan.path for plan in huge.ranked()}


def test_more_rows_are_hot_where_an_aggregator_sums_them_faster_and_never_fewer_than_to_the_knee() -> None:
    chances = zipf_chances(100_000, 20_000, 1.1)
    without = model(chances)
    assert without.best_aggregated() is None
    bend = knee(coverage(without.counts.of(without.counts.ranked())))
    for faster, slow in ((10.0, 1e-4), (0.01, 1e-1)):
        hot_pace = HotPace(start_s=slow, bytes_per_s=faster * PACE.reduce_bytes_per_s)
        there = model(chances, pace=replace(PACE, aggregator=hot_pace))
        usual, plan = there.best_of(SparsePath.HOT_COLD), there.best_aggregated()
        assert usual is not None
        assert plan is not None
        assert usual == without.best_of(SparsePath.HOT_COLD)
        assert (plan.path, plan.aggregated) == (SparsePath.HOT_COLD, True)
        assert len(plan.hot_rows) > len(usual.hot_rows) if faster > 1.0 else len(plan.hot_rows) == bend
        assert (there.seconds(plan) < there.seconds(usual)) == (faster > 1.0)
        assert not any(plan.aggregated for plan in there.ranked())
