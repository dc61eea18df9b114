import pytest

from sirtaki.autotune.arms.planners import AscWfbp, AscWfbpN, MgWfbp, cuts_for_groups
from sirtaki.autotune.knobs import KnobSpace
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.autotune.trial import Trial
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.errors import TuningError
from sirtaki.measures import SMALLEST_UNIT_BYTES, LinkModel

GLOO = (TransportKind.GLOO, Algorithm.FLAT)
MPI = (TransportKind.MPI, Algorithm.FLAT)
SPACE = KnobSpace(routes=(GLOO, MPI))
LINK = LinkModel(alpha_s=1e-3, throughput=(1e8, 2e8, 3e8), residual=0.05)


def model_of(sizes, durations_s=None, links=None):
    durations_s = durations_s or [0.01] * len(sizes)
    return PlanningModel(
        layout=GradientLayout(sizes=tuple(sizes)),
        profile=Profile.from_durations(durations_s),
        links=links or {GLOO: LINK},
    )


PLANNERS = (MgWfbp, AscWfbp, AscWfbpN)


@pytest.mark.parametrize("planner", PLANNERS)
def test_without_a_model_nothing_is_proposed(planner):
    assert planner(space=SPACE).ask(3) == []


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_plan_is_proposed_once_and_fits_the_space(planner):
    arm = planner(space=SPACE, model=model_of([100_000] * 20))
    (proposal,) = arm.ask(5)
    assert proposal.arm == planner.name
    assert proposal.knobs in SPACE
    assert proposal.knobs.to_plan(GradientLayout(sizes=(100_000,) * 20)).numel == 2_000_000
    assert arm.ask(5) == []


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_plan_has_no_more_streams_than_its_route_offers(planner):
    few = KnobSpace(routes=(GLOO, MPI), most_streams=((MPI, 1),))
    arm = planner(space=few, model=model_of([100_000] * 20, links={MPI: LINK}))
    assert all(proposal.knobs in few for proposal in arm.ask(2))


def test_the_route_with_the_shorter_simulated_span_comes_first():
    fast = LinkModel(alpha_s=1e-4, throughput=(1e9,))
    arm = MgWfbp(space=SPACE, model=model_of([1_000_000] * 4, links={GLOO: LINK, MPI: fast}))
    assert [arm.ask()[0].knobs.transport for _ in range(2)] == [TransportKind.MPI, TransportKind.GLOO]


def test_a_model_that_moved_within_its_error_is_not_planned_again():
    arm = MgWfbp(space=SPACE, model=model_of([100_000] * 4))
    assert len(arm.ask()) == 1
    nearly = LinkModel(alpha_s=1.02e-3, throughput=(1e8, 2e8, 3e8), residual=0.05)
    arm.update_model(model_of([100_000] * 4, links={GLOO: nearly}))
    assert arm.ask() == []
    arm.update_model(model_of([100_000] * 4, links={GLOO: LinkModel(alpha_s=5e-3, throughput=(1e8,))}))
    assert len(arm.ask()) == 1


def test_a_plan_that_was_measured_already_is_not_proposed():
    arm = MgWfbp(space=SPACE, model=model_of([100_000] * 4))
    other = MgWfbp(space=SPACE, model=model_of([100_000] * 4))
    knobs = other.ask()[0].knobs
    assert arm._to_ask is None  # not planned before it was asked
    arm.ask(0)
    arm.tell([Trial(arm="other", knobs=knobs, iterations=1, span_s=1.0)])
    assert arm.ask() == []


def test_a_fixed_unit_size_is_not_overruled():
    fixed = KnobSpace(routes=(GLOO,), unit_bytes=(1 << 20, 1 << 20))
    assert MgWfbp(space=fixed, model=model_of([100_000] * 4)).ask() == []


def test_gradients_without_elements_need_no_plan():
    assert AscWfbpN(space=SPACE, model=model_of([0, 0])).ask() == []


def test_a_planner_that_needs_more_streams_than_permitted_proposes_nothing():
    assert AscWfbp(space=KnobSpace(routes=(GLOO,), streams=(1,)), model=model_of([100_000] * 4)).ask() == []


@pytest.mark.parametrize("planner", PLANNERS)
def test_one_gradient_is_one_group(planner):
    (proposal,) = planner(space=SPACE, model=model_of([10])).ask()
    assert len(proposal.knobs.cuts) == 1


@pytest.mark.parametrize("planner", PLANNERS)
def test_empty_gradients_and_zero_times_are_planned_around(planner):
    (proposal,) = planner(space=SPACE, model=model_of([0, 50_000, 0, 70_000, 0], [0.0] * 5)).ask()
    assert proposal.knobs.cuts[-1].stop == 120_000


@pytest.mark.parametrize("planner", PLANNERS)
def test_ten_thousand_gradients_are_planned(planner):
    (proposal,) = planner(space=SPACE, model=model_of([5_000] * 10_000, [2e-5] * 10_000)).ask()
    assert proposal.knobs.cuts[-1].stop == 50_000_000


def test_a_model_needs_a_link_and_a_profile_of_its_layout():
    layout, profile = GradientLayout(sizes=(1, 2)), Profile.from_durations([1.0])
    with pytest.raises(TuningError, match="1 gradients for a layout of 2"):
        PlanningModel(layout=layout, profile=profile, links={GLOO: LINK})
    with pytest.raises(TuningError, match="at least one route"):
        PlanningModel(layout=GradientLayout(sizes=(1,)), profile=profile, links={})


def test_groups_are_sliced_evenly_and_take_the_streams_in_turn():
    size = 3 * SMALLEST_UNIT_BYTES // 4
    layout = GradientLayout(sizes=(size, size, 10))
    cuts = cuts_for_groups(layout, [1, 2, 3], streams=4, slices=3)
    assert [cut.stream for cut in cuts] == [0, 1, 2, 3, 0, 1, 2]
    stops = [size // 3, 2 * size // 3, size, 4 * size // 3, 5 * size // 3, 2 * size]
    assert [cut.stop for cut in cuts] == [*stops, 2 * size + 10]  # the last is too small to be sliced


def test_each_group_has_its_threads():
    layout = GradientLayout(sizes=(10, 10))
    assert [cut.threads for cut in cuts_for_groups(layout, [1, 2], streams=1, threads=[128, 512])] == [128, 512]
