"""Who searches in a warm-up: the planners with the job's model, and the bandit over them and the search techniques."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np

from sirtaki.autotune.arms.base import Arm
from sirtaki.autotune.arms.planner import Planner
from sirtaki.autotune.arms.planners import make_planners
from sirtaki.autotune.knobs import KnobSpace
from sirtaki.autotune.meta.assignment import DEFAULT_ARM, PLAN_ARM, REFINEMENT_ARM, REGISTRY_ARM
from sirtaki.autotune.meta.auc_bandit import window_for
from sirtaki.autotune.meta.bandit_arm import BanditArm
from sirtaki.autotune.meta.ensemble import ITERATIONS_PER_TRIAL, default_arms
from sirtaki.autotune.model.forecast import Forecast
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.comm.plan import Route
from sirtaki.link_model import LinkModel

from .step_times import StepTime

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Searchers:
    """Nobody, until `make` has been called.

    Attributes:
        bandit: shares the trials among all; None until then.
        model: the planners'; None where there are no planners.
    """

    def __init__(self, arms: Sequence[Arm] | None, *, seed: int, presumed: bool) -> None:
        """Nothing is made yet.

        Args:
            arms: search techniques that take the place of all of ours, None = the usual ones.
            seed: of what they draw.
            presumed: planners are asked before trials have borne their model out.
        """
        self._arms, self._seed, self._presumed = arms, seed, presumed
        self.bandit: BanditArm | None = None
        self.model: PlanningModel | None = None
        self._planners: Sequence[Planner] = ()

    def make(
        self,
        space: KnobSpace,
        promising: KnobSpace,
        make_model: Callable[[], PlanningModel | None],
        *,
        budget_iterations: int,
        usual: StepTime | None,
    ) -> BanditArm:
        """The bandit of a search. Without planners where their model raises.

        Args:
            space: what may be chosen.
            promising: what techniques choose from while trials bear the planners' model out.
            make_model: fits the planners' model; None = there is none.
            budget_iterations: of the search.
            usual: how long the parts of a step take, None = unknown.

        Raises:
            Exception: of a search technique.
        """
        self.model = model = _attempt(make_model, None)
        self._planners = ()
        if model is not None:
            make = functools.partial(make_planners, space=promising, model=model, presumed=self._presumed)
            self._planners = _attempt(make, ())
            self.know_pace(usual)
        rng = np.random.default_rng(self._seed)
        if self._arms is not None:
            window = window_for(budget_iterations // ITERATIONS_PER_TRIAL, len(self._arms))
            self.bandit = BanditArm(self._arms, rng=rng, window=window)
            return self.bandit
        build = functools.partial(
            default_arms,
            space=promising,
            whole_space=space,
            rng=rng,
            budget_iterations=budget_iterations,
            planners=self._planners,
        )
        # What arms import may keep the errors of imports that failed, which keep the frames that led to them: on a
        # stack of its own, so that these are not the user's with his model in them.
        with ThreadPoolExecutor(max_workers=1) as stack:
            self.bandit = stack.submit(build).result()
        return self.bandit

    def know_pace(self, usual: StepTime | None) -> None:
        """Tells the planners: the profile is of the first iterations, later ones show how long its parts take."""
        if self.model is not None and usual is not None:
            self.model = replace(self.model, profile=usual.at_this_pace(self.model.profile))
            for planner in self._planners:
                planner.update_model(self.model)

    def leave(self) -> None:
        """Forgets them all."""
        self.bandit, self.model, self._planners = None, None, ()

    @property
    def forecast(self) -> Forecast | None:
        """What the planners predict; None where there are none."""
        return self._planners[0].forecast if self._planners else None

    @property
    def credits(self) -> Mapping[str, float]:
        """The bandit's, by arm."""
        return {} if self.bandit is None else self.bandit.credits

    @property
    def links(self) -> Mapping[Route, LinkModel]:
        """What probes have shown of each route."""
        return self.model.links if self.model is not None else {}

    def name(self, arm: str) -> str:
        """An arm, for people."""
        if arm in (REGISTRY_ARM, DEFAULT_ARM, REFINEMENT_ARM, PLAN_ARM):
            return f"the {arm}"
        kind = "planner" if any(planner.name == arm for planner in self._planners) else "search technique"
        return f"the {kind} {arm}"


def _attempt(action: Callable[[], _T], otherwise: _T) -> _T:
    try:
        return action()
    except Exception:
        logger.warning("tuning goes on without planners", exc_info=True)
        return otherwise
