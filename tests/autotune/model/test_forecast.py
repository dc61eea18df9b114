"""How far a model is believed follows from the trials, whoever asked for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sirtaki.autotune.arms.planner import Planner
from sirtaki.autotune.arms.planners import make_planners
from sirtaki.autotune.knobs import MIB, Cut, Knobs, KnobSpace
from sirtaki.autotune.model.forecast import Forecast
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.profile import Profile
from sirtaki.autotune.trial import Trial
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.link_model import LinkModel

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


# ── fitted to trials ─────────────────────────────────────────────────────────────────────────────────────────────

PROBED = replace(MODEL, links={ROUTE: LinkModel(alpha_s=1e-3, throughput=(1e9, 2e9, 3e9, 4e9))})
TRUE = replace(MODEL, links={ROUTE: LinkModel(alpha_s=4e-3, throughput=(1.5e9, 2.2e9, 2.1e9, 1.2e9))})
"""Where many streams hinder each other; an idle network did not show it."""


def true_s(knobs: Knobs) -> float:
    return TRUE.simulator(ROUTE).run_knobs(knobs).span_s


def setting(unit_mib: int, count: int) -> Knobs:
    return Knobs(unit_bytes=unit_mib * MIB, streams=count, transport=ROUTE[0])


TRIED = [setting(2, 1), setting(2, 4), setting(16, 1), setting(16, 3), setting(32, 4), setting(4, 1)]
OTHERS = [setting(8, 1), setting(8, 4), setting(32, 2), setting(4, 4), setting(4, 2)]


def trials_of(settings: Sequence[Knobs]) -> list[Trial]:
    return [Trial(arm="any", knobs=knobs, iterations=1, span_s=true_s(knobs)) for knobs in settings]


def worst_miss(forecast: Forecast) -> float:
    return max(abs(math.log((forecast.predicted_s(knobs) or math.inf) / true_s(knobs))) for knobs in OTHERS)


def test_links_that_trials_speak_against_are_fitted_to_them() -> None:
    forecast = Forecast(PROBED)
    before = worst_miss(forecast)
    forecast.tell(trials_of(TRIED))
    assert worst_miss(forecast) < before / 3
    assert forecast.believed


def test_planners_plan_with_the_fitted_links() -> None:
    (planner, *_) = make_planners(space=replace(SPACE, streams=(1, 2, 3, 4)), model=PROBED)
    before = [proposal.knobs for proposal in planner.ask()]
    planner.tell(trials_of(TRIED))
    after = [proposal.knobs for proposal in planner.ask()]
    assert [knobs.streams for knobs in (*before, *after)] == [4, 2]


def test_links_that_predict_well_stay_as_they_were_probed() -> None:
    forecast = Forecast(TRUE)
    forecast.tell(trials_of(TRIED))
    assert forecast.model is TRUE


def test_what_no_link_explains_changes_nothing() -> None:
    forecast = Forecast(PROBED)
    forecast.tell([replace(trial, span_s=0.01 * 7.0 ** ((5 * i) % 6)) for i, trial in enumerate(trials_of(TRIED))])
    assert forecast.model is PROBED
    assert not forecast.believed


def test_a_new_profile_is_taken_over_and_its_links_fitted() -> None:
    forecast = Forecast(PROBED)
    forecast.tell(trials_of(TRIED))
    slower = replace(PROBED, profile=Profile.from_durations([2e-4] * 8))
    forecast.update_model(slower)
    assert forecast.model.profile is slower.profile
    assert forecast.model.links[ROUTE].total_bytes_per_s(4) < 2e9
