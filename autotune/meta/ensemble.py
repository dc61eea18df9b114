"""Builds the bandit over all arms of a job: search techniques by name, planners, and arms given by the user."""

import logging
from collections.abc import Sequence

import numpy as np

from sirtaki.errors import TuningError

from ..arms.base import Arm
from ..arms.catalogue import OUR_ARMS, make_arm, third_party_arms
from ..arms.planner import Planner
from ..knobs import KnobSpace
from .auc_bandit import Opening, window_for
from .bandit_arm import BanditArm

logger = logging.getLogger(__name__)

ITERATIONS_PER_TRIAL = 3  # a discarded and two measured ones


def default_arms(
    *,
    space: KnobSpace,
    rng: np.random.Generator,
    budget_iterations: int = 100,
    names: Sequence[str] | None = None,
    planners: Sequence[Arm] = (),
    exploration: float = 0.2,
    opening: Opening = Opening.AS_GIVEN,
    whole_space: KnobSpace | None = None,
) -> BanditArm:
    """The bandit over the named search techniques and the given planners.

    A technique that cannot be built, or whose name is taken, is left out with a warning, unless the caller named it.

    Args:
        space: what techniques choose from.
        rng: split among the arms, so that one arm's draws do not depend on another's.
        budget_iterations: of the warm-up; the bandit's window scales with it.
        names: search techniques; None = all of ours and all that installed packages bring.
        planners: arms that are there already, with names of their own; the best first.
        exploration: C of the AUC formula.
        opening: order of the arms' first turns: planners as given, then the techniques, or random as printed.
        whole_space: what techniques choose from once trials have spoken against the planners' model, by whose word
            `space` is narrower; None = `space`.

    Raises:
        TuningError: a named technique is unknown or cannot be built, or no arm is left.
    """
    wanted = [*OUR_ARMS, *third_party_arms()] if names is None else list(names)
    ties, *generators = rng.spawn(1 + len(wanted))

    def techniques(space: KnobSpace) -> list[Arm]:
        arms: list[Arm] = []
        for name, generator in zip(wanted, generators, strict=True):
            try:
                arm = make_arm(name, space=space, rng=generator)
                if any(arm.name == other.name for other in (*planners, *arms)):
                    raise TuningError(f"there are two search techniques called {arm.name!r}")
            except Exception as err:
                if names is not None:
                    raise
                logger.warning("%s; it is left out", err)
            else:
                arms.append(arm)
        return arms

    arms = [*planners, *techniques(space)]
    return BanditArm(
        arms,
        rng=ties,
        window=window_for(budget_iterations // ITERATIONS_PER_TRIAL, len(arms)),
        exploration=exploration,
        opening=opening,
        doubted=lambda: any(isinstance(arm, Planner) and arm.doubted for arm in planners),
        wider=None if whole_space is None or whole_space == space else lambda: techniques(whole_space),
    )
