"""Every search technique, and the bandit over some of them, passes the arms' conformance suite."""

from collections.abc import Callable

import numpy as np
import pytest
from conformance.arm import ARM_CHECKS, MakeArm

from sirtaki.autotune.arms.bayesian import BayesianArm
from sirtaki.autotune.arms.techniques import GridArm, HyperbandArm, PBTArm, ScikitOptimizeArm
from sirtaki.autotune.knobs import KnobSpace
from sirtaki.autotune.meta.bandit import BanditArm
from sirtaki.autotune.trial import Arm


def grid(space: KnobSpace, rng: np.random.Generator) -> Arm:
    return GridArm(space)


def bayesian(space: KnobSpace, rng: np.random.Generator) -> Arm:
    return BayesianArm(space, rng=rng)


def pbt(space: KnobSpace, rng: np.random.Generator) -> Arm:
    return PBTArm(space, rng=rng)


def hyperband(space: KnobSpace, rng: np.random.Generator) -> Arm:
    return HyperbandArm(space, rng=rng)


def scikit_optimize(space: KnobSpace, rng: np.random.Generator) -> Arm:
    return ScikitOptimizeArm(space, rng=rng)


def bandit(space: KnobSpace, rng: np.random.Generator) -> Arm:
    return BanditArm([GridArm(space), BayesianArm(space, rng=rng)], rng=rng, window=6)


@pytest.mark.parametrize("check", ARM_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "make",
    [grid, bayesian, pbt, hyperband, pytest.param(scikit_optimize, marks=pytest.mark.slow), bandit],
    ids=lambda make: make.__name__,
)
def test_search_technique(check: Callable[[MakeArm], None], make: MakeArm) -> None:
    check(make)
