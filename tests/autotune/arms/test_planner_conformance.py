import pytest
from conformance.arm import ARM_CHECKS, GPU, WIDE

from sirtaki.autotune.arms.planners import AscWfbp, AscWfbpN, Dpro, Libra, LibraM, MgWfbp
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import GradientLayout
from sirtaki.measures import LinkModel

PLANNERS = (MgWfbp, AscWfbp, AscWfbpN, Libra, LibraM, Dpro)
LINK = LinkModel(alpha_s=1e-3, throughput=(3e8, 6e8, 8e8))
CONTENTION = ContentionModel(
    alpha_1=0.98,
    alpha_2=1e-4,
    overlapped=RateCurve(gamma_1=4e8, gamma_2=3e8, gamma_3=0.02),
    alone=RateCurve(gamma_1=5e8, gamma_2=3e8, gamma_3=0.03),
)
MODEL = PlanningModel(
    layout=GradientLayout(sizes=(300_000, 1000, 2_000_000) * 6),
    profile=Profile.from_durations([2e-3, 0.0, 5e-3] * 6),
    links=dict.fromkeys((*WIDE.routes, *GPU.routes), LINK),
    contention=CONTENTION,
)


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
@pytest.mark.parametrize("check", ARM_CHECKS, ids=lambda check: check.__name__)
def test_planners_are_arms(planner, check):
    check(lambda space, rng: planner(space=space, model=MODEL))


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
@pytest.mark.parametrize("check", ARM_CHECKS, ids=lambda check: check.__name__)
def test_planners_without_a_model_are_arms_that_propose_nothing(planner, check):
    check(lambda space, rng: planner(space=space))
