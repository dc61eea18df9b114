"""How far a model is believed follows from the trials, whoever asked for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sirtaki.autotune.arms.planners import Planner, make_planners
from sirtaki.autotune.knobs import MIB, Cut, Knobs, KnobSpace
from sirtaki.autotune.model.planning import Forecast, PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.autotune.trial import Trial
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.measures import LinkModel

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)
SPACE = KnobSpace(routes=(ROUTE,), unit_bytes=(MIB, 64 * MIB))
LAYOUT = GradientLayout(sizes=(4 * MIB,) * 8)
MODEL = PlanningModel(
    layout=LAYOUT,
    profile=Profile.from_durations([1e-4] * 8),
    links={ROUTE: LinkModel(alpha_s=1e-6, throughput=(1e9, 2e9, 3e9, 4e9))},
)


def streams(count: int) -> Knobs:
    return Knobs(unit_bytes=2 * MIB, streams=count, transport=ROUTE[0])


def ran(count: int, span_s: float) -> Trial:
    return Trial(arm="any", knobs=streams(count), iterations=2, span_s=span_s)


def told(*spans_s: float) -> Forecast:
    """After trials on 1, 2, 3 … streams, of which the model expects each to be faster than the one before."""
    forecast = Forecast(MODEL)
    forecast.tell([ran(count, span_s) for count, span_s in enumerate(spans_s, 1)])
    return forecast


def test_a_model_is_believed_until_trials_have_run() -> None:
    assert told().believed
    assert told(0.2).believed


def test_trials_in_its_order_bear_a_model_out() -> None:
    assert told(0.4, 0.2, 0.15, 0.1).agreement == pytest.approx(1.0)


def test_trials_in_the_other_order_do_not() -> None:
    assert not told(0.1, 0.12, 0.15).believed
    assert told(0.1, 0.2, 0.3).agreement < -0.5


def test_the_order_of_near_equals_says_little() -> None:
    assert told(0.4, 0.2, 0.201, 0.2015).believed


def test_a_trial_that_is_told_twice_counts_once() -> None:
    forecast = told(0.1, 0.12)
    before = forecast.agreement
    forecast.tell([ran(2, 0.12)])
    assert forecast.agreement == before


def test_failed_trials_and_what_cannot_be_predicted_are_left_out() -> None:
    forecast = told(float("inf"), 0.1)
    elsewhere = replace(streams(1), transport=TransportKind.MPI)
    other_layout = replace(streams(1), cuts=(Cut(stop=3),))
    forecast.tell([replace(ran(1, 0.01), knobs=elsewhere), replace(ran(1, 0.01), knobs=other_layout)])
    assert forecast.predicted_s(elsewhere) is None
    assert forecast.predicted_s(other_layout) is None
    assert forecast.believed


def test_what_is_promised_is_measured_by_the_best_so_far() -> None:
    forecast = told(0.4, 0.2)
    assert forecast.promises(streams(4), gain=0.01)
    assert not forecast.promises(streams(1), gain=0.01)
    assert told().promises(streams(1), gain=0.01)


def test_another_model_is_judged_by_the_same_trials() -> None:
    forecast = told(0.1, 0.12, 0.15)
    crowded = LinkModel(alpha_s=1e-6, throughput=(4e9, 3e9, 2e9, 1e9))
    forecast.update_model(replace(MODEL, links={ROUTE: crowded}))
    assert forecast.believed


def test_planners_hold_their_tongue_while_trials_speak_against_their_model() -> None:
    planners = make_planners(space=SPACE, model=MODEL)
    assert any(planner.ask() for planner in planners)
    planners[0].tell([ran(1, 0.1), ran(2, 0.2), ran(3, 0.4)])
    assert all(isinstance(planner, Planner) and planner.doubted and not planner.ask() for planner in planners)
    crowded = LinkModel(alpha_s=1e-6, throughput=(4e9, 3e9, 2e9, 1e9))
    for planner in planners:
        planner.update_model(replace(MODEL, links={ROUTE: crowded}))
    assert not any(planner.doubted for planner in planners)


def test_a_model_that_is_not_presumed_right_is_believed_once_trials_bear_it_out() -> None:
    forecast = Forecast(MODEL, presumed=False)
    assert not forecast.believed
    forecast.tell([ran(count, span_s) for count, span_s in ((1, 0.4), (2, 0.2), (3, 0.14))])
    assert forecast.believed


def test_planners_are_silent_until_then() -> None:
    planners = make_planners(space=replace(SPACE, streams=(1, 2, 3, 4)), model=MODEL, presumed=False)
    assert not any(planner.ask() for planner in planners)
    for planner in planners:
        planner.tell([ran(1, 0.4), ran(2, 0.2), ran(3, 0.14)])
    assert planners[0].ask()
