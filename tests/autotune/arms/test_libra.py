from dataclasses import replace

import pytest

from bench.lib.workloads import cluster, workload
from sirtaki.autotune.arms.planners import AscWfbpN, Libra, LibraM, MgWfbp
from sirtaki.autotune.knobs import KnobSpace
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.measures import LinkModel

ROUTE = (TransportKind.NCCL, Algorithm.FLAT)
THREADS = (128, 256, 512, 1024, 2048, 4096)
SPACE = KnobSpace(routes=(ROUTE,), streams=(1, 2, 4), threads=THREADS)
LINK = LinkModel(alpha_s=5e-4, throughput=(3e9,))
CONTENTION = ContentionModel(
    alpha_1=0.98,
    alpha_2=1.3e-4,
    overlapped=RateCurve(gamma_1=3.3e9, gamma_2=3.2e9, gamma_3=0.02),
    alone=RateCurve(gamma_1=3.5e9, gamma_2=3.2e9, gamma_3=0.03),
)


def model_of(name, *, backward_s=None, contention=CONTENTION, link=LINK):
    network = workload(name)
    return PlanningModel(
        layout=network.layout,
        profile=network.profile(backward_s=backward_s),
        links={ROUTE: link},
        contention=contention,
    )


def planned(arm, model):
    (proposal,) = arm(space=SPACE, model=model).ask()
    timeline = model.simulator(ROUTE).run_knobs(proposal.knobs)
    return proposal.knobs, timeline.end_s


@pytest.mark.parametrize("name", ["resnet152", "vgg16", "bert_base", "xception"])
def test_threads_chosen_for_the_same_groups_beat_any_one_count_for_all(name):
    model = model_of(name)
    knobs, end_s = planned(LibraM, model)
    simulator = model.simulator(ROUTE)
    for threads in THREADS:
        cuts = [type(cut)(stop=cut.stop, stream=cut.stream, threads=threads) for cut in knobs.cuts]
        assert end_s <= simulator.run_cuts(cuts).end_s * 1.01


@pytest.mark.parametrize("name", ["resnet152", "vgg16", "bert_base", "xception"])
def test_choosing_groups_and_threads_together_is_no_worse_than_one_after_the_other(name):
    model = model_of(name)
    assert planned(Libra, model)[1] <= planned(LibraM, model)[1] * 1.01


def test_long_computation_gets_few_threads_and_short_computation_many():
    typical = {}
    for backward_s in (0.05, 2.0):
        knobs, _ = planned(Libra, model_of("resnet152", backward_s=backward_s))
        inner = [cut.threads for cut in knobs.cuts[:-1]]
        typical[backward_s] = sum(inner) / len(inner)
    assert typical[2.0] < typical[0.05]


@pytest.mark.parametrize("arm", [Libra, LibraM, AscWfbpN])
def test_units_get_threads_that_were_counted_not_nccls_own_choice(arm):
    model = model_of("resnet50")
    (proposal,) = arm(space=replace(SPACE, threads=(None, *THREADS)), model=model).ask()
    assert all(cut.threads in THREADS for cut in proposal.knobs.cuts)


def test_threads_that_the_user_has_fixed_are_every_units():
    (proposal,) = Libra(space=replace(SPACE, threads=(2048,)), model=model_of("resnet50", contention=None)).ask()
    plan = proposal.knobs.to_plan(workload("resnet50").layout)
    assert {unit.threads for unit in plan.units} == {2048}


def test_without_contention_no_threads_are_named_and_the_plan_is_no_worse_than_mg_wfbp():
    model = model_of("resnet50", contention=None)
    knobs, end_s = planned(Libra, model)
    assert all(cut.threads is None for cut in knobs.cuts)
    assert end_s <= planned(MgWfbp, model)[1] * 1.01


def test_a_link_that_one_flow_cannot_fill_is_filled_by_slices():
    model = model_of("vgg16", contention=None, link=cluster("10 Gbit/s TCP", 8).link())
    space = KnobSpace(routes=(ROUTE,), streams=(1, 2, 3, 4))
    (proposal,) = Libra(space=space, model=model).ask()
    assert proposal.knobs.streams == 3


@pytest.mark.parametrize("arm", [Libra, LibraM])
def test_odd_profiles_are_planned(arm):
    for sizes, durations_s in (((10,), [0.0]), ((0, 5, 0), [0.1, 0.0, 0.2]), ((1000,) * 10_000, [1e-5] * 10_000)):
        model = PlanningModel(
            layout=GradientLayout(sizes=sizes),
            profile=Profile.from_durations(durations_s),
            links={ROUTE: LINK},
            contention=CONTENTION,
        )
        (proposal,) = arm(space=SPACE, model=model).ask()
        assert proposal.knobs.cuts[-1].stop == sum(sizes)
