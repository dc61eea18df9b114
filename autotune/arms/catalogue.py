"""All search algorithms and planners by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import cast

import numpy as np

from sirtaki.errors import TuningError

from ..knobs import KnobSpace
from ..model.planning import Forecast, PlanningModel
from .asc_wfbp import AscWfbp, AscWfbpN
from .base import Arm
from .dpro import Dpro
from .libra import Libra, LibraM
from .mg_wfbp import MgWfbp
from .planner import Planner

OUR_PLANNERS: tuple[type[Planner], ...] = (AscWfbpN, Libra, Dpro, AscWfbp, MgWfbp, LibraM)


def make_planners(*, space: KnobSpace, model: PlanningModel | None = None, presumed: bool = True) -> list[Planner]:
    """One of each, the one that did best on the simulated clusters first (`docs/decisions/0020`).

    Without a model they propose nothing; hand it to each by `update_model` when it is known. LIBRA-M takes part
    where there are threads to allocate: elsewhere its plan is MG-WFBP's. Where the model is not `presumed` to be right
    they are silent until trials have borne it out.
    """
    threads = len(space.threads) > 1
    forecast = None if model is None else Forecast(model, presumed=presumed)
    return [
        planner(space=space, model=model, forecast=forecast)
        for planner in OUR_PLANNERS
        if planner is not LibraM or threads
    ]


logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "sirtaki.arms"

MakeArm = Callable[[KnobSpace, np.random.Generator], Arm]


def _grid(space: KnobSpace, rng: np.random.Generator) -> Arm:
    from .grid import GridArm

    return GridArm(space)


def _pbt(space: KnobSpace, rng: np.random.Generator) -> Arm:
    from .pbt import PBTArm

    return PBTArm(space, rng=rng)


def _bayesian(space: KnobSpace, rng: np.random.Generator) -> Arm:
    from .bayesian import BayesianArm

    return BayesianArm(space, rng=rng)


def _hyperband(space: KnobSpace, rng: np.random.Generator) -> Arm:
    from .hyperband import HyperbandArm

    return HyperbandArm(space, rng=rng)


def _scikit_optimize(space: KnobSpace, rng: np.random.Generator) -> Arm:
    from .scikit_optimize import ScikitOptimizeArm

    return ScikitOptimizeArm(space, rng=rng)


OUR_ARMS: Mapping[str, MakeArm] = {"grid": _grid, "pbt": _pbt, "bayesian": _bayesian, "hyperband": _hyperband}
"""Those that tune where nobody has chosen others."""

FURTHER_ARMS: Mapping[str, MakeArm] = {"scikit_optimize": _scikit_optimize}
"""For whoever names them."""


def third_party_arms() -> dict[str, Callable[[], MakeArm]]:
    """Names and loaders of the arms that installed packages bring; nothing of theirs is imported yet."""
    ours = {*OUR_ARMS, *FURTHER_ARMS}
    return {point.name: point.load for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in ours}


def make_arm(name: str, *, space: KnobSpace, rng: np.random.Generator) -> Arm:
    """Builds one arm.

    Raises:
        TuningError: there is no arm of that name, or it cannot be built; the message says why.
    """
    ours = {**OUR_ARMS, **FURTHER_ARMS}
    if name in ours:
        return ours[name](space, rng)
    loaders = third_party_arms()
    if name not in loaders:
        raise TuningError(f"there is no search technique {name!r}; there are {', '.join([*ours, *loaders])}")
    try:
        arm: object = loaders[name]()(space, rng)
    except Exception as err:  # somebody else's code may raise anything
        raise TuningError(f"the search technique {name!r} could not be built: {err!r}") from err
    missing = [part for part in ("name", "ask", "tell") if not hasattr(arm, part)]
    if not missing and not isinstance(arm.name, str):  # type: ignore[attr-defined]
        missing = ["name that is a text"]
    if missing:
        raise TuningError(f"the search technique {name!r} is no arm: it has no {', '.join(missing)}")
    return cast(Arm, arm)
