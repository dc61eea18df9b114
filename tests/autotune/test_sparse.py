"""Which algorithm suits a sparse gradient: accesses are counted, times follow, candidates run, one is kept."""

import json

import numpy as np
import pytest
import torch

from sirtaki.autotune.sparse import (
    CollectiveCosts,
    SparseDecision,
    SparseSummary,
    TouchCounts,
    Traffic,
    VolumeModel,
    coverage,
    dense_bytes,
    elbow,
    horovod_bytes,
    saturation_size,
    summarise,
    traffic,
)
from sirtaki.comm.sparse.plan import GATHER, SparsePath, SparsePlan
from sirtaki.comm.sparse.worker import RowFormat

PACE = CollectiveCosts(
    exchange_s=1e-4, exchange_bytes_per_s=1e8, reduce_s=1e-4, reduce_bytes_per_s=1e8 / 1.5, add_bytes_per_s=1e9
)
RANKS = 4


# ── counts of accesses, and their coverage, on Zipf's law as in the paper ─────────────────────────────────────────────


def test_counts_are_exact() -> None:
    counts = TouchCounts()
    counts.add([np.array([0, 2]), np.array([2, 5])], 3)
    counts.add([np.array([2]), np.array([], dtype=np.int64)], 1)
    assert (counts.rows.tolist(), counts.counts.tolist()) == ([0, 2, 5], [1, 3, 1])
    assert counts.of([1, 2, 5, 9]).tolist() == [0, 3, 1, 0]
    assert TouchCounts().of([0, 7]).tolist() == [0, 0]
    assert (counts.touched, counts.most, counts.union, counts.n_samples) == (2.5, 1.5, 2.0, 4)
    assert counts.ranked().tolist() == [2, 0, 5]


def test_the_knee_is_farthest_above_the_chord() -> None:
    assert elbow(coverage(np.array([50, 40, 4, 3, 2, 1]))) == 2
    assert elbow(coverage(np.ones(8, dtype=np.int32))) == 0  # all are alike
    assert elbow(np.array([])) == 0


def test_the_hot_set_grows_until_a_step_gains_little() -> None:
    curve = coverage(np.array([400, 300, 200, *[1] * 100]))
    assert saturation_size(curve, step=1, least=0.01) == 3
    assert saturation_size(curve, step=1000, least=0.01) == len(curve)
    assert saturation_size(np.array([])) == 0


# ── bytes and rows of a reduction, against what is counted by hand ────────────────────────────────────────────────────

FORM = RowFormat(1000, 8, torch.float32)


def by_hand() -> TouchCounts:
    """Rows 0 to 9 by all ranks in both iterations, and ten rows that a rank has for itself."""
    found = TouchCounts()
    for _ in range(2):
        found.add([np.r_[0:10, 100 + 10 * rank : 110 + 10 * rank] for rank in range(RANKS)], 50)
    return found


def of(plan: SparsePlan) -> Traffic:
    return traffic(plan, FORM, RANKS, by_hand())


def test_gathered_rows_are_received_from_every_other_rank() -> None:
    found = of(SparsePlan(path=SparsePath.GATHER))
    assert (found.exchanges, found.exchanged_bytes, found.added_rows) == (2, 3 * 20 * 36, 80)
    assert found.received_bytes(RANKS) == 3 * 20 * 36


def test_owners_get_their_rows_and_give_sums() -> None:
    found = of(SparsePlan(path=SparsePath.OWNER))
    assert found.exchanged_bytes == pytest.approx(0.75 * (20 + 50) * 36)
    assert found.added_rows == 80 / 4 + 50


def test_frequent_rows_are_sent_dense_and_only_the_others_with_indices() -> None:
    found = of(SparsePlan(path=SparsePath.HOT_COLD, hot_rows=tuple(range(10))))
    assert (found.reductions, found.reduced_bytes) == (1, 10 * 36)
    assert found.exchanged_bytes == pytest.approx(3 * 10 * 36)
    assert found.received_bytes(RANKS) == pytest.approx(3 * 10 * 36 + 1.5 * 10 * 36)


def test_blocks_of_one_row_are_a_bitmap_and_the_rows_that_any_rank_has() -> None:
    found = of(SparsePlan(path=SparsePath.BLOCKS))
    assert (found.exchanged_bytes, found.reduced_bytes) == (3 * 125, 50 * 32)
    larger = of(SparsePlan(path=SparsePath.BLOCKS, block_rows=10))
    assert larger.reduced_bytes == pytest.approx(50 * 36, rel=0.3)  # five blocks, two of them touched by one rank


def test_dense_costs_all_rows_and_a_little_more_than_without_flags() -> None:
    found = of(SparsePlan(path=SparsePath.DENSE))
    assert found.received_bytes(RANKS) == 1.5 * 1000 * 36
    assert dense_bytes(FORM, RANKS) == 1.5 * 1000 * 32
    assert horovod_bytes(FORM, RANKS, 25.0) == 3 * 25 * 40  # each look-up, with a long number


def test_totals_alone_are_enough_for_ways_without_hot_rows() -> None:
    totals = TouchCounts()
    totals.add_totals(80, 20, 50)
    for path in (SparsePath.GATHER, SparsePath.OWNER, SparsePath.BLOCKS, SparsePath.DENSE):
        assert traffic(SparsePlan(path=path), FORM, RANKS, totals) == of(SparsePlan(path=path))


# ── times that the model predicts, and which rows, blocks and paths follow ────────────────────────────────────────────


def model(chances: np.ndarray, *, width: int = 64, ranks: int = RANKS) -> VolumeModel:
    drawn, counts = np.random.default_rng(3), TouchCounts()
    for _ in range(8):
        by_rank = [np.flatnonzero(drawn.random(len(chances)) < chances) for _ in range(ranks)]
        counts.add(by_rank, len(np.unique(np.concatenate(by_rank))))
    shape = RowFormat(len(chances), width, torch.float32)
    return VolumeModel(shape, ranks, counts, PACE)


def zipf_chances(rows: int, looked_up: int, exponent: float) -> np.ndarray:
    share = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return 1.0 - np.exp(-looked_up * share / share.sum())


def test_dense_costs_the_same_for_all_access_patterns() -> None:
    few, many = model(np.full(10_000, 0.001)), model(np.full(10_000, 0.9))
    plan = SparsePlan(path=SparsePath.DENSE)
    assert few.seconds(plan) == pytest.approx(1e-4 + 10_000 * 65 * 4 / (1e8 / 1.5), rel=0.02)
    assert many.seconds(plan) < 1.2 * few.seconds(plan)


def test_where_nearly_all_is_touched_rows_travel_without_numbers_and_where_little_is_dense_is_the_slowest() -> None:
    all_touched = model(np.full(5000, 0.99))
    first, second = all_touched.ranked()[:2]
    assert {first.path, second.path} <= {SparsePath.DENSE, SparsePath.BLOCKS, SparsePath.HOT_COLD}
    assert all_touched.seconds(SparsePlan(path=SparsePath.GATHER)) > 1.5 * all_touched.seconds(first)
    assert model(zipf_chances(100_000, 500, 1.02)).ranked()[-1].path is SparsePath.DENSE


@pytest.mark.lengthy
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


def test_dense_is_not_tried_if_it_does_not_fit_into_memory() -> None:
    huge = VolumeModel(RowFormat(1 << 30, 64, torch.float32), RANKS, model(np.full(100, 0.5)).counts, PACE)
    assert huge.best_of(SparsePath.DENSE) is None
    assert SparsePath.DENSE not in {plan.path for plan in huge.ranked()}


# ── what is told of it ────────────────────────────────────────────────────────────────────────────────────────────────


def of_two() -> TouchCounts:
    """Rows 0 to 9 by both ranks, and rows of their own, thirty each."""
    found = TouchCounts()
    for _ in range(3):
        found.add([np.r_[0:10, 100:130], np.r_[0:10, 200:230]], 70)
    return found


def told(decision: SparseDecision) -> SparseSummary:
    totals = TouchCounts()
    totals.add_totals(60, 30, 55)
    return summarise(decision, FORM, name="table", ranks=2, looked_up=55.0, counts=totals)


FIXED = SparseDecision(plan=SparsePlan(path=SparsePath.OWNER))


def tried() -> SparseDecision:
    hot = SparsePlan(path=SparsePath.HOT_COLD, hot_rows=tuple(range(10)))
    return SparseDecision(
        plan=hot, candidates=[GATHER, hot], learned=of_two(), predicted_s=[0.01, 0.02], measured_s=[0.03, 0.02]
    )


def test_the_summary_reports_touched_rows_and_the_share_of_frequent_rows() -> None:
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
    assert "7.00% of rows in an iteration, 10 of them get 25% of accesses; by hot_cold (10 hot rows" in found.describe()


def test_without_hot_rows_the_popular_ones_are_those_before_the_knee() -> None:
    decision = tried()
    decision.plan = GATHER
    assert told(decision).popular_rows == 10


def test_a_fixed_algorithm_is_reported_without_a_curve() -> None:
    found = told(FIXED)
    assert (found.plan, found.curve, found.popular_share) == ("owner", (), 0.0)
    assert (found.density, len(found.ways), found.ways[0].measured_s) == (0.055, 1, None)
    assert "touches" not in found.describe()


def test_it_can_be_written_down_and_read_again() -> None:
    for decision in (tried(), FIXED):
        found = told(decision)
        assert SparseSummary.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    "wrong",
    [{"n_rows": 0}, {"union": -1}, {"plan": "by air"}, {"ways": [1]}, {"curve": [[1]]}, {"dense_bytes": float("nan")}],
)
def test_an_invalid_log_of_accesses_is_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        SparseSummary.from_json({**told(tried()).to_json(), **wrong})
