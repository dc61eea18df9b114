"""One parameter's choice: learns, tries, keeps the fastest, and begins anew where rows are touched otherwise."""

from dataclasses import replace

import numpy as np
import pytest

from sirtaki.autotune.sparse import (
    CHECKS,
    LEARNING_ITERATIONS,
    LEAST_WATCHED,
    N_CANDIDATES,
    ROUNDS,
    HotPace,
    Pace,
    Seen,
    Shape,
    SparseChoice,
    Stage,
    TouchCounts,
    VolumeModel,
)
from sirtaki.comm.sparse.plan import GATHER, SparsePath, SparsePlan

ROWS = 1000


def model(counts: TouchCounts) -> VolumeModel:
    pace = Pace(exchange_s=1e-4, exchange_bytes_per_s=1e7, reduce_s=1e-4, reduce_bytes_per_s=7e6, add_bytes_per_s=1e9)
    return VolumeModel(Shape(n_rows=ROWS, row_bytes=64, item_bytes=4, index_bytes=4), 4, counts, pace)


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
    choice.choose(model)


def kept(choice: SparseChoice, fastest: int) -> None:
    spans = []
    while not choice.has_tried:
        number = len(spans) % N_CANDIDATES
        assert choice.plan is choice.candidates[number]
        spans.append(0.0 if len(spans) < N_CANDIDATES else 1.0 + (number != fastest))  # the first round does not count
        choice.note(seen())
    assert len(spans) == ROUNDS * N_CANDIDATES
    choice.settle(spans)


@pytest.mark.parametrize("fastest", range(N_CANDIDATES))
def test_the_fastest_that_was_measured_is_kept_whatever_was_predicted(fastest: int) -> None:
    choice = SparseChoice(fixed=None, tries=True)
    learned(choice)
    assert choice.stage is Stage.TRY
    assert len(choice.candidates) == N_CANDIDATES
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
        assert (choice.stage, choice.plan.path) == (Stage.KEEP, path)
        for _ in range(100):
            choice.note(seen(n=4))
        assert (choice.stage, choice.plan.path) == (Stage.KEEP, path)


def test_hot_rows_are_learned_also_where_their_path_is_fixed_and_nothing_is_tried() -> None:
    choice = SparseChoice(fixed=SparsePath.HOT_COLD, tries=False)
    learned(choice)
    assert (choice.stage, choice.plan.path) == (Stage.KEEP, SparsePath.HOT_COLD)


def test_untuned_rows_are_gathered() -> None:
    choice = SparseChoice(fixed=None, tries=False)
    assert (choice.stage, choice.plan) == (Stage.KEEP, GATHER)


def test_what_is_hopeless_is_not_tried() -> None:
    choice = SparseChoice(fixed=None, tries=True)
    for _ in range(LEARNING_ITERATIONS):
        choice.note(seen())

    def slow_reductions(counts: TouchCounts) -> VolumeModel:
        slow = Pace(
            exchange_s=1e-4, exchange_bytes_per_s=1e7, reduce_s=1.0, reduce_bytes_per_s=7e6, add_bytes_per_s=1e9
        )
        return replace(model(counts), pace=slow)

    choice.choose(slow_reductions)
    assert {plan.path for plan in choice.candidates} == {SparsePath.GATHER, SparsePath.OWNER}


def hot_choice() -> SparseChoice:
    choice = SparseChoice(fixed=SparsePath.HOT_COLD, tries=True)
    learned(choice)
    return choice


def iterations_until_it_learns_again(choice: SparseChoice, now: Seen, most: int = 200) -> int | None:
    for number in range(1, most):
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


def with_aggregator(counts: TouchCounts) -> VolumeModel:
    plain = model(counts)
    return replace(plain, pace=replace(plain.pace, aggregator=HotPace(start_s=10.0, bytes_per_s=1.0)))


def aggregated_choice(fixed: SparsePath | None = None) -> SparseChoice:
    choice = SparseChoice(fixed=fixed, tries=True)
    for _ in range(LEARNING_ITERATIONS):
        choice.note(seen())
    choice.choose(with_aggregator)
    return choice


def settled(choice: SparseChoice, fastest: int) -> SparseChoice:
    n = len(choice.candidates)
    while not choice.has_tried:
        choice.note(seen())
    choice.settle([1.0 + (number % n != fastest) for number in range(ROUNDS * n)])
    return choice


def test_an_aggregator_is_tried_whatever_is_predicted() -> None:
    choice = aggregated_choice()
    assert [plan.aggregated for plan in choice.candidates] == [False] * N_CANDIDATES + [True]
    assert settled(choice, N_CANDIDATES).plan.aggregated


def test_where_an_aggregator_is_lost_what_was_chosen_for_it_is_chosen_anew() -> None:
    in_trials, kept_it, kept_another = (
        aggregated_choice(),
        settled(aggregated_choice(), 3),
        settled(aggregated_choice(), 0),
    )
    for choice in (in_trials, kept_it, kept_another):
        choice.lose_aggregator()
    assert (in_trials.stage, kept_it.stage, kept_another.stage) == (Stage.LEARN, Stage.LEARN, Stage.KEEP)
    learned(kept_it)
    assert not any(plan.aggregated for plan in kept_it.candidates)
    untouched = SparseChoice(fixed=None, tries=True)
    untouched.lose_aggregator()
    learned(untouched)
    untouched.lose_aggregator()
    assert untouched.stage is Stage.TRY


def test_where_hot_rows_are_fixed_they_stay_so_without_an_aggregator() -> None:
    choice = aggregated_choice(SparsePath.HOT_COLD)
    assert (choice.stage, choice.plan.aggregated) == (Stage.KEEP, True)
    hot = choice.plan.hot_rows
    choice.lose_aggregator()
    assert (choice.stage, choice.plan.aggregated, choice.plan.hot_rows) == (Stage.KEEP, False, hot)


def recalled(plan: SparsePlan) -> SparseChoice:
    choice = SparseChoice(fixed=None, tries=True)
    for _ in range(LEARNING_ITERATIONS):
        choice.note(seen())
    assert choice.may_recall
    choice.recall(plan)
    return choice


def checked(choice: SparseChoice, remembered_s: float, gathered_s: float) -> None:
    spans: list[float] = []
    while not choice.has_tried:
        spans.append(9.0 if len(spans) < 2 else (remembered_s, gathered_s)[len(spans) % 2])
        choice.note(seen())
    assert len(spans) == 2 * CHECKS
    choice.settle(spans)


def test_gathering_that_an_earlier_job_kept_is_kept_at_once() -> None:
    choice = recalled(GATHER)
    assert (choice.stage, choice.plan) == (Stage.KEEP, GATHER)


def test_another_way_that_an_earlier_job_kept_is_held_against_gathering() -> None:
    owner = SparsePlan(path=SparsePath.OWNER)
    for remembered_s, expected in ((0.5, owner), (1.0, owner), (1.05, GATHER)):
        choice = recalled(owner)
        assert choice.candidates == [owner, GATHER]
        checked(choice, remembered_s, 1.0)
        assert (choice.stage, choice.plan, choice.measured_s) == (Stage.KEEP, expected, [remembered_s, 1.0])


def test_what_does_not_hold_gives_way_to_what_the_model_says_and_is_not_asked_for_again() -> None:
    choice = recalled(SparsePlan(path=SparsePath.OWNER))
    checked(choice, 1.2, 1.0)
    assert choice.has_learned
    assert not choice.may_recall
    choice.choose(model)
    assert len(choice.candidates) == N_CANDIDATES
    kept(choice, 1)
    assert choice.stage is Stage.KEEP


def test_where_the_path_is_fixed_nothing_is_recalled() -> None:
    assert not SparseChoice(fixed=SparsePath.HOT_COLD, tries=True).may_recall
