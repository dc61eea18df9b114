"""Which plan the rows of a sparse gradient go by: what is learned, tried, kept, and when that begins anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes.tuned import OneRank

from sirtaki.autotune.sparse import (
    LEARNING_ITERATIONS,
    LEAST_WATCHED,
    N_CANDIDATES,
    TRIAL_BUDGET,
    AccessSample,
    CollectiveCosts,
    TouchCounts,
    VolumeModel,
)
from sirtaki.comm.sparse.plan import GATHER, SparsePath, SparsePlan
from sirtaki.comm.sparse.worker import RowFormat
from sirtaki.engine.rows_target import RowsTarget
from sirtaki.engine.tuning.controller import TuningController

FORM = RowFormat(1000, 16, torch.float32)
OWNER = SparsePlan(path=SparsePath.OWNER)


def quick(counts: TouchCounts) -> VolumeModel:
    pace = CollectiveCosts(
        exchange_s=1e-4, exchange_bytes_per_s=1e7, reduce_s=1e-4, reduce_bytes_per_s=7e6, add_bytes_per_s=1e9
    )
    return VolumeModel(FORM, 4, counts, pace)


def seen(hot: int = 0, n: int = 120) -> AccessSample:
    rows = np.arange(n // 4)
    return AccessSample(n, hot, n // 4 + 10, [rows] * 4)


def made(fixed: SparsePath | None = None, *, tries: bool = True) -> RowsTarget:
    control: Any = OneRank()
    return RowsTarget("table", FORM, control, fixed=fixed, tries=tries)


def learned(target: RowsTarget) -> RowsTarget:
    for _ in range(LEARNING_ITERATIONS):
        assert not target.kept
        assert target.plan is GATHER
        assert not target.has_learned
        target.count_accesses(seen())
    assert target.has_learned
    return target


def chosen(target: RowsTarget) -> RowsTarget:
    learned(target)
    target.choose(quick(target.learned))
    return target


def tried_out(target: RowsTarget, seconds: Callable[[SparsePlan, int], float]) -> list[SparsePlan]:
    """Return the plans that run until one is kept. `seconds`: duration of an iteration by plan and number."""
    control: Any = OneRank()
    controller, ran = TuningController(control), list[SparsePlan]()
    controller.begin(target, recalls=False)
    while controller.tries(target):
        target._span_s = seconds(target.plan, len(ran))
        ran.append(target.plan)
        target.count_accesses(seen())
        controller.iteration_ended()
    assert len(ran) <= 2.5 * TRIAL_BUDGET
    return ran


@pytest.mark.parametrize("fastest", range(N_CANDIDATES))
def test_the_fastest_measured_algorithm_is_kept_against_predictions(fastest: int) -> None:
    target = chosen(made())
    plans = target.decision.candidates
    assert len(plans) == N_CANDIDATES
    ran = tried_out(target, lambda plan, _: 1.0 + (plan != plans[fastest]))
    assert ran[0] == plans[0]
    assert set(ran) == set(plans)
    assert target.kept
    assert target.plan == plans[fastest]
    assert target.decision.measured_s == [1.0 + (plan != plans[fastest]) for plan in plans]
    target.count_accesses(seen(hot=120))
    assert target.kept


def test_noise_hardly_ever_replaces_the_plan_that_was_predicted() -> None:
    replaced = 0
    for seed in range(40):
        rng, target = np.random.default_rng(seed), chosen(made())
        tried_out(target, lambda plan, _, rng=rng: math.exp(0.1 * rng.standard_normal()))
        replaced += target.plan != target.decision.candidates[0]
    assert replaced <= 4


def test_iterations_that_touch_nothing_teach_nothing() -> None:
    target = made()
    for _ in range(5 * LEARNING_ITERATIONS):
        target.count_accesses(AccessSample(0, 0, 0, [np.arange(0)] * 4))
    assert not target.has_learned
    learned(target)


@pytest.mark.parametrize("path", [path for path in SparsePath if path is not SparsePath.HOT_COLD])
def test_a_fixed_algorithm_runs_at_once(path: SparsePath) -> None:
    for tries in (True, False):
        target = made(path, tries=tries)
        assert not target.may_recall
        for _ in range(100):
            target.count_accesses(seen(n=4))
        assert (target.kept, target.plan.path) == (True, path)


def test_hot_rows_are_learned_also_where_their_path_is_fixed_and_nothing_is_tried() -> None:
    target = chosen(made(SparsePath.HOT_COLD, tries=False))
    assert (target.kept, target.plan.path) == (True, SparsePath.HOT_COLD)
    untuned = made(tries=False)
    assert (untuned.kept, untuned.plan) == (True, GATHER)


def test_hopeless_algorithms_are_not_tried() -> None:
    target = learned(made())
    slow = CollectiveCosts(
        exchange_s=1e-4, exchange_bytes_per_s=1e7, reduce_s=1.0, reduce_bytes_per_s=7e6, add_bytes_per_s=1e9
    )
    target.choose(replace(quick(target.learned), pace=slow))
    assert {plan.path for plan in target.decision.candidates} == {SparsePath.GATHER, SparsePath.OWNER}


def iterations_until_it_learns_again(target: RowsTarget, now: AccessSample) -> int | None:
    for number in range(1, 200):
        target.count_accesses(now)
        if not target.kept:
            return number
    return None


def test_hot_rows_are_ranked_anew_once_a_tenth_of_their_coverage_is_lost() -> None:
    def hot() -> RowsTarget:
        return chosen(made(SparsePath.HOT_COLD))

    covered = 4 * len(hot().plan.hot_rows)  # of 120, each of them by all four ranks
    assert iterations_until_it_learns_again(hot(), seen(hot=covered)) is None
    assert iterations_until_it_learns_again(hot(), seen(hot=int(0.95 * covered))) is None
    anew = iterations_until_it_learns_again(hot(), seen(hot=int(0.7 * covered)))
    assert anew is not None
    assert LEAST_WATCHED <= anew <= 2 * LEAST_WATCHED


def test_paths_are_chosen_anew_where_much_more_or_less_is_touched() -> None:
    for n, expected in ((120, False), (100, False), (400, True), (40, True)):
        target = learned(made())
        target.recall_plan(OWNER)
        tried_out(target, lambda plan, _: 1.0)
        assert target.plan == OWNER
        assert (iterations_until_it_learns_again(target, seen(n=n)) is not None) == expected


def test_another_way_that_an_earlier_job_kept_holds_unless_gathering_is_proved_faster() -> None:
    at_once = learned(made())
    assert not at_once.recall_plan(GATHER)
    assert (at_once.kept, at_once.plan) == (True, GATHER)
    for remembered_s in (0.5, 1.0):
        target = learned(made())
        assert target.recall_plan(OWNER)
        assert target.decision.candidates == [OWNER, GATHER]
        tried_out(target, lambda plan, _, seconds=remembered_s: seconds if plan == OWNER else 1.0)
        assert (target.kept, target.plan) == (True, OWNER)
        assert target.decision.measured_s == [remembered_s, 1.0]


@pytest.mark.parametrize("surprise", [0.001, 1000.0])
def test_one_surprising_trial_changes_no_choice(surprise: float) -> None:
    for place in range(0, 30, 2):
        target, rng = chosen(made()), np.random.default_rng(place)
        plans = target.decision.candidates

        def seconds(plan: SparsePlan, number: int, *, place: int = place, rng: np.random.Generator = rng) -> float:
            return surprise if number == place else math.exp(0.001 * rng.standard_normal())

        tried_out(target, seconds)
        assert target.plan == plans[0]


def test_a_refuted_record_is_replaced_by_the_models_choice_and_not_asked_for_again() -> None:
    target = learned(made())
    target.recall_plan(OWNER)
    tried_out(target, lambda plan, _: 1.05 if plan == OWNER else 1.0)
    assert target.has_learned
    assert not target.may_recall
    target.choose(quick(target.learned))
    plans = target.decision.candidates
    assert len(plans) == N_CANDIDATES
    tried_out(target, lambda plan, _: 1.0 + (plan != plans[1]))
    assert (target.kept, target.plan) == (True, plans[1])
