"""Which algorithm suits a sparse gradient: accesses are counted, times follow, candidates run, one is kept."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from sirtaki.autotune.sparse import (
    LEARNING_ITERATIONS,
    LEAST_WATCHED,
    LOOKS,
    N_CANDIDATES,
    UNCOUNTED,
    Pace,
    Seen,
    SparseChoice,
    SparseSummary,
    Stage,
    TouchCounts,
    Traffic,
    VolumeModel,
    coverage,
    dense_bytes,
    horovod_bytes,
    knee,
    summarise,
    traffic,
    until_little_is_gained,
)
from sirtaki.comm.sparse.plan import GATHER, SparsePath, SparsePlan
from sirtaki.comm.sparse.worker import RowFormat

PACE = Pace(exchange_s=1e-4, exchange_bytes_per_s=1e8, reduce_s=1e-4, reduce_bytes_per_s=1e8 / 1.5, add_bytes_per_s=1e9)
RANKS = 4


# ── counts of accesses, and their coverage, on Zipf's law as in the paper ─────────────────────────────────────────────


def test_counts_are_exact() -> None:
    counts = TouchCounts()
    counts.note([np.array([0, 2]), np.array([2, 5])], 3)
    counts.note([np.array([2]), np.array([], dtype=np.int64)], 1)
    assert (counts.rows.tolist(), counts.counts.tolist()) == ([0, 2, 5], [1, 3, 1])
    assert counts.of([1, 2, 5, 9]).tolist() == [0, 3, 1, 0]
    assert TouchCounts().of([0, 7]).tolist() == [0, 0]
    assert (counts.touched, counts.most, counts.union, counts.n_samples) == (2.5, 1.5, 2.0, 4)
    assert counts.ranked().tolist() == [2, 0, 5]


def test_the_knee_is_farthest_above_the_chord() -> None:
    assert knee(coverage(np.array([50, 40, 4, 3, 2, 1]))) == 2
    assert knee(coverage(np.ones(8, dtype=np.int32))) == 0  # all are alike
    assert knee(np.array([])) == 0


def test_the_hot_set_grows_until_a_step_gains_little() -> None:
    curve = coverage(np.array([400, 300, 200, *[1] * 100]))
    assert until_little_is_gained(curve, step=1, least=0.01) == 3
    assert until_little_is_gained(curve, step=1000, least=0.01) == len(curve)
    assert until_little_is_gained(np.array([])) == 0


# ── bytes and rows of a reduction, against what is counted by hand ────────────────────────────────────────────────────

FORM = RowFormat(1000, 8, torch.float32)


def by_hand() -> TouchCounts:
    """Rows 0 to 9 by all ranks in both iterations, and ten rows that a rank has for itself."""
    found = TouchCounts()
    for _ in range(2):
        found.note([np.r_[0:10, 100 + 10 * rank : 110 + 10 * rank] for rank in range(RANKS)], 50)
    return found


def of(plan: SparsePlan) -> Traffic:
    return traffic(plan, FORM, RANKS, by_hand())


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
    totals.note_totals(80, 20, 50)
    for path in (SparsePath.GATHER, SparsePath.OWNER, SparsePath.BLOCKS, SparsePath.DENSE):
        assert traffic(SparsePlan(path=path), FORM, RANKS, totals) == of(SparsePlan(path=path))


# ── times that the model predicts, and which rows, blocks and paths follow ────────────────────────────────────────────


def model(chances: np.ndarray, *, width: int = 64, ranks: int = RANKS) -> VolumeModel:
    drawn, counts = np.random.default_rng(3), TouchCounts()
    for _ in range(8):
        by_rank = [np.flatnonzero(drawn.random(len(chances)) < chances) for _ in range(ranks)]
        counts.note(by_rank, len(np.unique(np.concatenate(by_rank))))
    shape = RowFormat(len(chances), width, torch.float32)
    return VolumeModel(shape, ranks, counts, PACE)


def zipf_chances(rows: int, looked_up: int, exponent: float) -> np.ndarray:
    share = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return 1.0 - np.exp(-looked_up * share / share.sum())


def test_dense_costs_the_same_whoever_touches_what() -> None:
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


def test_what_would_not_fit_is_not_tried_dense() -> None:
    huge = VolumeModel(RowFormat(1 << 30, 64, torch.float32), RANKS, model(np.full(100, 0.5)).counts, PACE)
    assert huge.best_of(SparsePath.DENSE) is None
    assert SparsePath.DENSE not in {plan.path for plan in huge.ranked()}


# ── the choice of one parameter ───────────────────────────────────────────────────────────────────────────────────────

N_ROWS = 1000


def quick(counts: TouchCounts) -> VolumeModel:
    pace = Pace(exchange_s=1e-4, exchange_bytes_per_s=1e7, reduce_s=1e-4, reduce_bytes_per_s=7e6, add_bytes_per_s=1e9)
    return VolumeModel(RowFormat(N_ROWS, 16, torch.float32), 4, counts, pace)


def seen(hot: int = 0, n: int = 120) -> Seen:
    rows = np.arange(n // 4)
    return Seen(n, hot, n // 4 + 10, [rows] * 4)


def learned(choice: SparseChoice) -> None:
    for _ in range(LEARNING_ITERATIONS):
        assert choice.stage is Stage.LEARN
        assert choice.plan is GATHER
        assert not choice.has_learned
        choice.note(seen())
    assert choice.has_learned
    choice.choose(quick(choice.counts))


def tried_out(choice: SparseChoice, seconds: Callable[[int, int], float]) -> int:
    """Run and judge trials, whose times follow from candidate and round, to the end; how many there were."""
    spans, n = list[float](), len(choice.candidates)
    while choice.stage is Stage.TRY:
        while not choice.has_tried:
            turn = len(spans) % (2 * n)
            number = min(turn, 2 * n - 1 - turn)  # every second round in reverse order
            assert choice.plan is choice.candidates[number]
            spans.append(
                9.0 * number if len(spans) < n else seconds(number, len(spans) // n)
            )  # the first is not counted
            choice.note(seen())
        choice.settle(spans)
    return len(spans)


def kept(choice: SparseChoice, fastest: int) -> None:
    expected = (UNCOUNTED + LOOKS[0]) * N_CANDIDATES
    assert tried_out(choice, lambda number, _: 1.0 + (number != fastest)) == expected


@pytest.mark.parametrize("fastest", range(N_CANDIDATES))
def test_the_fastest_that_was_measured_is_kept_whatever_was_predicted(fastest: int) -> None:
    choice = SparseChoice(fixed=None, tries=True)
    learned(choice)
    assert (choice.stage, len(choice.candidates)) == (Stage.TRY, N_CANDIDATES)
    kept(choice, fastest)
    assert choice.stage is Stage.KEEP
    assert choice.plan is choice.candidates[fastest]
    choice.note(seen(hot=120))
    assert choice.stage is Stage.KEEP


def test_iterations_that_touch_nothing_teach_nothing() -> None:
    choice = SparseChoice(fixed=None, tries=True)
    for _ in range(5 * LEARNING_ITERATIONS):
        choice.note(Seen(0, 0, 0, [np.arange(0)] * 4))
    assert not choice.has_learned
    learned(choice)


@pytest.mark.parametrize("path", [path for path in SparsePath if path is not SparsePath.HOT_COLD])
def test_a_path_that_is_fixed_runs_at_once(path: SparsePath) -> None:
    for tries in (True, False):
        choice = SparseChoice(fixed=path, tries=tries)
        assert not choice.may_recall
        for _ in range(100):
            choice.note(seen(n=4))
        assert (choice.stage, choice.plan.path) == (Stage.KEEP, path)


def test_hot_rows_are_learned_also_where_their_path_is_fixed_and_nothing_is_tried() -> None:
    choice = SparseChoice(fixed=SparsePath.HOT_COLD, tries=False)
    learned(choice)
    assert (choice.stage, choice.plan.path) == (Stage.KEEP, SparsePath.HOT_COLD)
    untuned = SparseChoice(fixed=None, tries=False)
    assert (untuned.stage, untuned.plan) == (Stage.KEEP, GATHER)


def test_what_is_hopeless_is_not_tried() -> None:
    choice = SparseChoice(fixed=None, tries=True)
    for _ in range(LEARNING_ITERATIONS):
        choice.note(seen())

    def slow_reductions(counts: TouchCounts) -> VolumeModel:
        slow = Pace(
            exchange_s=1e-4, exchange_bytes_per_s=1e7, reduce_s=1.0, reduce_bytes_per_s=7e6, add_bytes_per_s=1e9
        )
        return replace(quick(counts), pace=slow)

    choice.choose(slow_reductions(choice.counts))
    assert {plan.path for plan in choice.candidates} == {SparsePath.GATHER, SparsePath.OWNER}


def hot_choice() -> SparseChoice:
    choice = SparseChoice(fixed=SparsePath.HOT_COLD, tries=True)
    learned(choice)
    return choice


def iterations_until_it_learns_again(choice: SparseChoice, now: Seen) -> int | None:
    for number in range(1, 200):
        choice.note(now)
        if choice.stage is Stage.LEARN:
            return number
    return None


def test_hot_rows_are_ranked_anew_once_a_tenth_of_their_coverage_is_lost() -> None:
    covered = 4 * len(hot_choice().plan.hot_rows)  # of 120, each of them by all four ranks
    assert iterations_until_it_learns_again(hot_choice(), seen(hot=covered)) is None
    assert iterations_until_it_learns_again(hot_choice(), seen(hot=int(0.95 * covered))) is None
    anew = iterations_until_it_learns_again(hot_choice(), seen(hot=int(0.7 * covered)))
    assert anew is not None
    assert LEAST_WATCHED <= anew <= 2 * LEAST_WATCHED


def test_paths_are_chosen_anew_where_much_more_or_less_is_touched() -> None:
    for n, expected in ((120, False), (100, False), (400, True), (40, True)):
        choice = SparseChoice(fixed=None, tries=True)
        learned(choice)
        choice.candidates = [SparsePlan(path=path) for path in (SparsePath.GATHER, SparsePath.OWNER, SparsePath.DENSE)]
        choice.plan = choice.candidates[0]
        kept(choice, 1)
        assert (iterations_until_it_learns_again(choice, seen(n=n)) is not None) == expected


def recalled(plan: SparsePlan) -> SparseChoice:
    choice = SparseChoice(fixed=None, tries=True)
    for _ in range(LEARNING_ITERATIONS):
        choice.note(seen())
    assert choice.may_recall
    choice.recall(plan)
    return choice


def checked(choice: SparseChoice, remembered_s: float, gathered_s: float) -> None:
    tried_out(choice, lambda number, _: (remembered_s, gathered_s)[number])


def test_another_way_that_an_earlier_job_kept_holds_unless_gathering_is_proved_faster() -> None:
    owner = SparsePlan(path=SparsePath.OWNER)
    assert (recalled(GATHER).stage, recalled(GATHER).plan) == (Stage.KEEP, GATHER)
    for remembered_s in (0.5, 1.0):
        choice = recalled(owner)
        assert choice.candidates == [owner, GATHER]
        checked(choice, remembered_s, 1.0)
        assert (choice.stage, choice.plan, choice.measured_s) == (Stage.KEEP, owner, [remembered_s, 1.0])


@pytest.mark.parametrize("surprise", [0.001, 1000.0])
@pytest.mark.parametrize("place", range(LOOKS[0]))
def test_one_surprising_trial_changes_no_choice(surprise: float, place: int) -> None:
    for rival_s, expected in ((1.0, 0), (0.9, 1)):
        choice, rng = SparseChoice(fixed=None, tries=True), np.random.default_rng(place)
        learned(choice)

        def seconds(number: int, turn: int, rng: np.random.Generator = rng, rival_s: float = rival_s) -> float:
            if (number, turn) == (1, UNCOUNTED + place):
                return surprise
            return (rival_s if number == 1 else 1.0) * math.exp(0.001 * rng.standard_normal())

        tried_out(choice, seconds)
        assert choice.plan is choice.candidates[expected]


def test_what_does_not_hold_gives_way_to_what_the_model_says_and_is_not_asked_for_again() -> None:
    choice = recalled(SparsePlan(path=SparsePath.OWNER))
    checked(choice, 1.05, 1.0)
    assert choice.has_learned
    assert not choice.may_recall
    choice.choose(quick(choice.counts))
    assert len(choice.candidates) == N_CANDIDATES
    kept(choice, 1)
    assert choice.stage is Stage.KEEP


# ── what is told of it ────────────────────────────────────────────────────────────────────────────────────────────────


def of_two() -> TouchCounts:
    """Rows 0 to 9 by both ranks, and rows of their own, thirty each."""
    found = TouchCounts()
    for _ in range(3):
        found.note([np.r_[0:10, 100:130], np.r_[0:10, 200:230]], 70)
    return found


def told(choice: SparseChoice) -> SparseSummary:
    totals = TouchCounts()
    totals.note_totals(60, 30, 55)
    return summarise(choice, FORM, name="table", ranks=2, looked_up=55.0, counts=totals)


def tried() -> SparseChoice:
    choice = SparseChoice(fixed=None, tries=True)
    choice.learned = of_two()
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
