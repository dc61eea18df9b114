"""Who takes part in a search."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from sirtaki.autotune.arms.techniques import OUR_ARMS
from sirtaki.autotune.knobs import MIB, Knobs, KnobSpace
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.autotune.trial import Proposal, Trial
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.engine.tuning.coordinator import Searchers
from sirtaki.engine.tuning.trial_log import StepTime
from sirtaki.measures import LinkModel

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)
SPACE = KnobSpace(routes=(ROUTE,), unit_bytes=(MIB, 64 * MIB))
MODEL = PlanningModel(
    layout=GradientLayout(sizes=(4 * MIB,) * 8),
    profile=Profile.from_durations([1e-3] * 8, forward_s=4e-3),
    links={ROUTE: LinkModel(alpha_s=1e-6, throughput=(1e9, 2e9))},
)


class Mine:
    name = "mine"

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        return [Proposal(arm="mine", knobs=Knobs(unit_bytes=MIB, streams=1, transport=ROUTE[0]))]

    def tell(self, trials: Sequence[Trial]) -> None:
        pass


def made(model: PlanningModel | None, *, presumed: bool = True, usual: StepTime | None = None) -> Searchers:
    searchers = Searchers(None, presumed=presumed)
    searchers.make(SPACE, SPACE, lambda: model, budget_iterations=100, usual=usual)
    return searchers


def test_without_a_model_only_search_techniques_take_part() -> None:
    searchers = made(None)
    assert set(searchers.credits) == set(OUR_ARMS)
    assert searchers.forecast is None
    assert not searchers.links


def test_with_a_model_planners_do_too_and_are_named_so() -> None:
    searchers = made(MODEL)
    assert searchers.name("asc_wfbp_n") == "the planner asc_wfbp_n"
    assert searchers.name("grid") == "the search technique grid"
    assert searchers.name("default") == "the default"
    assert searchers.links == MODEL.links
    assert searchers.forecast is not None
    assert searchers.forecast.believed
    assert not made(MODEL, presumed=False).forecast.believed  # type: ignore[union-attr]


def test_a_model_that_cannot_be_made_is_told_of_and_done_without(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> PlanningModel:
        raise ZeroDivisionError

    searchers = Searchers(None, presumed=True)
    with caplog.at_level(logging.WARNING):
        searchers.make(SPACE, SPACE, broken, budget_iterations=100, usual=None)
    assert set(searchers.credits) == set(OUR_ARMS)
    assert "tuning goes on without planners" in caplog.text


def test_the_users_arms_take_the_place_of_the_usual_ones() -> None:
    searchers = Searchers([Mine()], presumed=True)
    bandit = searchers.make(SPACE, SPACE, lambda: None, budget_iterations=100, usual=None)
    assert [proposal.arm for proposal in bandit.ask()] == ["mine"]


def test_planners_learn_how_long_steps_usually_take() -> None:
    usual = StepTime(between_s=2e-3, backward_s=4e-3)
    searchers = made(MODEL, usual=usual)
    assert searchers.model is not None
    assert searchers.model.profile == usual.at_this_pace(MODEL.profile) != MODEL.profile


def test_nobody_is_left_after_leaving() -> None:
    searchers = made(MODEL)
    searchers.leave()
    assert searchers.bandit is None
    assert searchers.forecast is None
    assert not searchers.credits
