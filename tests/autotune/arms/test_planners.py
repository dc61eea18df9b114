"""Planners: each paper's rule against its text, by brute force and in the simulator, and all of them as arms."""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from conformance.arm import ARM_CHECKS, GPU, WIDE
from conformance.oracle import all_group_ends, best_span_s
from fakes.trial_logs import PLANNING
from fakes.warmup_job import SPACE
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bench.lib.workloads import cluster, workload
from sirtaki.autotune.arms.planners import (
    OUR_PLANNERS,
    AscWfbp,
    AscWfbpN,
    CriticalPathSearch,
    Dpro,
    LayerType,
    Libra,
    LibraM,
    MgWfbp,
    Schedule,
    StageModel,
    allocate,
    coarsen,
    coarsened_ends,
    cuts_for_groups,
    fuse_and_allocate,
    layer_types,
    make_planners,
    merge_gradients,
    merge_optimally,
)
from sirtaki.autotune.knobs import KnobSpace
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile, Simulator
from sirtaki.autotune.trial import Trial
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.errors import TuningError
from sirtaki.measures import SMALLEST_UNIT_BYTES, LinkModel

GLOO = (TransportKind.GLOO, Algorithm.FLAT)


MPI = (TransportKind.MPI, Algorithm.FLAT)


PLANNER_SPACE = KnobSpace(routes=(GLOO, MPI))


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
def test_a_plan_has_no_more_streams_than_its_route_offers(planner):
    few = KnobSpace(routes=(GLOO, MPI), most_streams=((MPI, 1),))
    arm = planner(space=few, model=model_of([100_000] * 20, links={MPI: LINK}))
    assert all(proposal.knobs in few for proposal in arm.ask(2))


def test_the_route_with_the_shorter_simulated_span_is_proposed_first():
    fast = LinkModel(alpha_s=1e-4, throughput=(1e9,))
    arm = MgWfbp(space=PLANNER_SPACE, model=model_of([1_000_000] * 4, links={GLOO: LINK, MPI: fast}))
    assert [arm.ask()[0].knobs.transport for _ in range(2)] == [TransportKind.MPI, TransportKind.GLOO]


def test_a_model_that_moved_within_its_error_is_not_planned_again():
    arm = MgWfbp(space=PLANNER_SPACE, model=model_of([100_000] * 4))
    assert len(arm.ask()) == 1
    nearly = LinkModel(alpha_s=1.02e-3, throughput=(1e8, 2e8, 3e8), residual=0.05)
    arm.update_model(model_of([100_000] * 4, links={GLOO: nearly}))
    assert arm.ask() == []
    arm.update_model(model_of([100_000] * 4, links={GLOO: LinkModel(alpha_s=5e-3, throughput=(1e8,))}))
    assert len(arm.ask()) == 1


def test_a_plan_that_was_measured_already_is_not_proposed():
    arm = MgWfbp(space=PLANNER_SPACE, model=model_of([100_000] * 4))
    other = MgWfbp(space=PLANNER_SPACE, model=model_of([100_000] * 4))
    knobs = other.ask()[0].knobs
    assert arm._pending is None  # not planned before it was asked
    arm.ask(0)
    arm.tell([Trial(arm="other", knobs=knobs, iterations=1, span_s=1.0)])
    assert arm.ask() == []


def test_a_fixed_unit_size_is_not_overruled():
    fixed = KnobSpace(routes=(GLOO,), unit_bytes=(1 << 20, 1 << 20))
    assert MgWfbp(space=fixed, model=model_of([100_000] * 4)).ask() == []


def test_a_planner_that_needs_more_streams_than_permitted_proposes_nothing():
    assert AscWfbp(space=KnobSpace(routes=(GLOO,), streams=(1,)), model=model_of([100_000] * 4)).ask() == []


@pytest.mark.parametrize("planner", PLANNERS)
def test_ten_thousand_gradients_are_planned(planner):
    (proposal,) = planner(space=PLANNER_SPACE, model=model_of([5_000] * 10_000, [2e-5] * 10_000)).ask()
    assert proposal.knobs.cuts[-1].stop == 50_000_000


def test_groups_are_sliced_evenly_and_take_the_streams_in_turn():
    size = 3 * SMALLEST_UNIT_BYTES // 4
    layout = GradientLayout(sizes=(size, size, 10))
    cuts = cuts_for_groups(layout, [1, 2, 3], streams=4, slices=3)
    assert [cut.stream for cut in cuts] == [0, 1, 2, 3, 0, 1, 2]
    stops = [size // 3, 2 * size // 3, size, 4 * size // 3, 5 * size // 3, 2 * size]
    assert [cut.stop for cut in cuts] == [*stops, 2 * size + 10]  # the last is too small to be sliced


WITH_THREADS = replace(SPACE, threads=(512, 1024))


def test_each_is_there_once_and_the_best_one_first() -> None:
    made = make_planners(space=WITH_THREADS, model=PLANNING)
    assert [type(planner) for planner in made] == list(OUR_PLANNERS)
    assert made[0].name == "asc_wfbp_n"
    assert len({planner.name for planner in made}) == len(OUR_PLANNERS)


def test_one_that_allocates_threads_is_left_out_where_there_are_none() -> None:
    for space in (SPACE, replace(SPACE, threads=(512,))):
        names = [type(planner) for planner in make_planners(space=space, model=PLANNING)]
        assert names == [planner for planner in OUR_PLANNERS if planner is not LibraM]


def test_planners_propose_only_with_a_model_that_is_presumed_right() -> None:
    assert any(planner.ask() for planner in make_planners(space=SPACE, model=PLANNING))
    doubted = make_planners(space=SPACE, model=PLANNING, presumed=False)
    assert [list(planner.ask()) for planner in doubted] == [[]] * len(doubted)


PROGRAM = """
import json
from sirtaki.autotune.arms.planners import make_planners
from sirtaki.autotune.knobs import KIB, MIB, KnobSpace
from sirtaki.measures import LinkModel
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import GradientLayout
from sirtaki.comm.plan import Algorithm, TransportKind

route = (TransportKind.GLOO, Algorithm.FLAT)
space = KnobSpace(routes=(route,), unit_bytes=(64 * KIB, 64 * MIB), streams=(1, 2, 3, 4, 6, 8, 12))
link = LinkModel(alpha_s=1e-3, throughput=(1e9,) * 8)  # streams gain nothing, so that many plans take as long
for first in range(4):
    layout = GradientLayout(sizes=tuple(10_000 + 37_000 * ((first + 7 * index) % 11) for index in range(12)))
    profile = Profile.from_durations([1e-3] * 12)
    model = PlanningModel(layout=layout, profile=profile, links={route: link})
    for planner in make_planners(space=space, model=model):
        print(planner.name, json.dumps([proposal.knobs.to_json() for proposal in planner.ask(3)]))
"""


@pytest.mark.lengthy
def test_plans_do_not_depend_on_the_hash_seed(capsys: pytest.CaptureFixture[str]) -> None:
    exec(PROGRAM, {})
    here = capsys.readouterr().out
    assert here.count("asc_wfbp_n") == 4
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout == here


ARMS_PLANNERS = (MgWfbp, AscWfbp, AscWfbpN, Libra, LibraM, Dpro)


ARMS_LINK = LinkModel(alpha_s=1e-3, throughput=(3e8, 6e8, 8e8))


CONTENTION = ContentionModel(
    alpha_1=0.98,
    alpha_2=1e-4,
    overlapped=RateCurve(gamma_1=4e8, gamma_2=3e8, gamma_3=0.02),
    alone=RateCurve(gamma_1=5e8, gamma_2=3e8, gamma_3=0.03),
)


MODEL = PlanningModel(
    layout=GradientLayout(sizes=(300_000, 1000, 2_000_000) * 6),
    profile=Profile.from_durations([2e-3, 0.0, 5e-3] * 6),
    links=dict.fromkeys((*WIDE.routes, *GPU.routes), ARMS_LINK),
    contention=CONTENTION,
)


@pytest.mark.lengthy
@pytest.mark.parametrize("planner", ARMS_PLANNERS, ids=lambda planner: planner.name)
@pytest.mark.parametrize("check", ARM_CHECKS, ids=lambda check: check.__name__)
def test_planners_are_arms(planner, check):
    check(lambda space, rng: planner(space=space, model=MODEL))


ROUTE = (TransportKind.GLOO, Algorithm.FLAT)


def end_s(ready_s, sizes, ends, *, alpha_s, beta):
    """Return the ends of groups that are sent in sequence."""
    free_s, begin = 0.0, 0
    for end in ends:
        free_s = max(ready_s[end - 1], free_s) + alpha_s + beta * sum(sizes[begin:end])
        begin = end
    return free_s


def test_a_gradient_is_merged_if_the_next_is_ready_within_a_start_up():
    ends = merge_gradients([1.0, 1.5, 5.0], [1, 1, 1], alpha_s=1.0, beta_s_per_byte=0.1)
    assert ends == [2, 3]  # 1.5 < 1 + 1 (eq. 5); 5 is not before 1.5 + 1


def test_empty_gradients_travel_with_the_next_one():
    assert merge_gradients([1.0, 9.0], [0, 1], alpha_s=0.0, beta_s_per_byte=0.1) == [2]


cases = st.integers(1, 7).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0, 3), min_size=n, max_size=n),
        st.lists(st.integers(0, 40), min_size=n, max_size=n),
        st.floats(0, 3),
        st.floats(0.01, 1),
    )
)


@settings(deadline=None)  # a busy machine may pause any example
@given(cases)
def test_the_optimum_agrees_with_the_simulator_and_the_oracle(case):
    durations_s, sizes, alpha_s, beta = case
    sizes = [size + 1 for size in sizes[:5]]
    model = PlanningModel(
        layout=GradientLayout(sizes=tuple(sizes), itemsize_bytes=1),
        profile=Profile.from_durations(durations_s[:5]),
        links={ROUTE: LinkModel(alpha_s=alpha_s, throughput=(1 / beta,))},
    )
    ends = merge_optimally(model.profile.issuable_s, sizes, alpha_s=alpha_s, beta_s_per_byte=beta)
    cuts = cuts_for_groups(model.layout, ends, streams=1)
    assert model.simulator(ROUTE).run_cuts(cuts).span_s == pytest.approx(best_span_s(model, ROUTE, streams=1))


N, M, S = LayerType.NORMAL, LayerType.MERGED, LayerType.SIMULTANEOUS


PAPER = {"alpha_s": 1.0, "beta_s_per_byte": 1.0, "gamma": 1.5}


def test_communication_hidden_by_the_next_layers_computation_is_normal():
    assert layer_types([1.0, 10.0], [5, 1], **PAPER) == [N, S]  # Q1, eq. (37)


def test_a_layer_whose_successor_is_ready_within_a_startup_is_merged():
    assert layer_types([1.0, 1.5], [5, 1], **PAPER) == [M, S]  # not Q1, Q2, not Q3: eq. (38)


def test_a_layer_whose_successor_is_ready_during_its_transmission_is_simultaneous():
    assert layer_types([1.0, 3.0, 20.0], [5, 1, 1], **PAPER) == [S, N, S]  # not Q1, not Q2: eq. (39)


def test_theorem_1_merges_where_the_papers_own_model_says_that_two_at_once_are_faster():
    """For two layers that are ready at once, eq. (32) compares merging with sending them in sequence."""
    sizes, alpha_s, beta_s_per_byte, gamma = (10_000_000, 10_000_000), 1.0, 1e-6, 1.5
    assert layer_types([0.0, 0.0], sizes, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte, gamma=gamma) == [M, S]
    link = LinkModel(alpha_s=alpha_s, throughput=(1 / beta_s_per_byte, 2 / (gamma * beta_s_per_byte)))  # eq. (3), (9)
    model = PlanningModel(
        layout=GradientLayout(sizes=sizes, itemsize_bytes=1),
        profile=Profile.from_durations([0.0, 0.0]),
        links={ROUTE: link},
    )
    space = KnobSpace(routes=(ROUTE,), streams=(1, 2))
    assert span_s(AscWfbp(space=space, model=model), model) == pytest.approx(alpha_s + 20)  # eq. (34)
    at_once_s = alpha_s + gamma * 10  # eq. (9)
    assert best_span_s(model, ROUTE, streams=2) == pytest.approx(at_once_s)
    assert span_s(AscWfbpN(space=space, model=model), model) == pytest.approx(at_once_s)


@st.composite
def models(draw, max_gradients=24, least_elements=1):
    n = draw(st.integers(1, max_gradients))
    sizes = draw(st.lists(st.integers(least_elements, 3_000_000), min_size=n, max_size=n))
    durations_s = draw(st.lists(st.floats(0, 0.02), min_size=n, max_size=n))
    flow = draw(st.floats(1e8, 1e9))
    throughput = [flow]
    for _ in range(draw(st.integers(0, 4))):
        throughput.append(throughput[-1] + flow * draw(st.floats(-0.05, 1)))
    return PlanningModel(
        layout=GradientLayout(sizes=tuple(sizes)),
        profile=Profile.from_durations(durations_s),
        links={ROUTE: LinkModel(alpha_s=draw(st.floats(0, 0.01)), throughput=tuple(throughput))},
    )


def span_s(arm, model):
    return model.simulator(ROUTE).run_knobs(arm.ask()[0].knobs).span_s


@pytest.mark.lengthy
@settings(max_examples=40, deadline=None)
@given(models())
def test_n_ways_are_never_worse_than_two_or_one(model):
    space = KnobSpace(routes=(ROUTE,), streams=(1, 2, 3, 4, 6))
    n_way = span_s(AscWfbpN(space=space, model=model), model)
    assert n_way <= span_s(AscWfbp(space=space, model=model), model) + 2e-6
    assert n_way <= span_s(MgWfbp(space=space, model=model), model) + 2e-6


@settings(max_examples=25, deadline=None)
@given(models(max_gradients=5, least_elements=3 * SMALLEST_UNIT_BYTES // 4))  # smaller units are not cut
def test_n_ways_come_near_the_best_plan_of_whole_gradients(model):
    space = KnobSpace(routes=(ROUTE,), streams=(1, 2, 3))
    n_way = span_s(AscWfbpN(space=space, model=model), model)
    assert n_way <= 1.25 * best_span_s(model, ROUTE, streams=3) + 2e-6


LIBRA_ROUTE = (TransportKind.NCCL, Algorithm.FLAT)


THREADS = (128, 256, 512, 1024, 2048, 4096)


LIBRA_SPACE = KnobSpace(routes=(LIBRA_ROUTE,), streams=(1, 2, 4), threads=THREADS)


LIBRA_LINK = LinkModel(alpha_s=5e-4, throughput=(3e9,))


LIBRA_CONTENTION = ContentionModel(
    alpha_1=0.98,
    alpha_2=1.3e-4,
    overlapped=RateCurve(gamma_1=3.3e9, gamma_2=3.2e9, gamma_3=0.02),
    alone=RateCurve(gamma_1=3.5e9, gamma_2=3.2e9, gamma_3=0.03),
)


def libra_model_of(name, *, backward_s=None, contention=LIBRA_CONTENTION, link=LIBRA_LINK):
    network = workload(name)
    return PlanningModel(
        layout=network.layout,
        profile=network.profile(backward_s=backward_s),
        links={LIBRA_ROUTE: link},
        contention=contention,
    )


def planned(arm, model):
    (proposal,) = arm(space=LIBRA_SPACE, model=model).ask()
    timeline = model.simulator(LIBRA_ROUTE).run_knobs(proposal.knobs)
    return proposal.knobs, timeline.end_s


@pytest.mark.parametrize("name", ["resnet152", "vgg16", "bert_base", "xception"])
def test_threads_chosen_for_the_same_groups_beat_any_one_count_for_all(name):
    model = libra_model_of(name)
    knobs, end_s = planned(LibraM, model)
    simulator = model.simulator(LIBRA_ROUTE)
    for threads in THREADS:
        cuts = [type(cut)(stop=cut.stop, stream=cut.stream, threads=threads) for cut in knobs.cuts]
        assert end_s <= simulator.run_cuts(cuts).end_s * 1.01


def test_threads_that_the_user_has_fixed_are_every_units():
    (proposal,) = Libra(
        space=replace(LIBRA_SPACE, threads=(2048,)), model=libra_model_of("resnet50", contention=None)
    ).ask()
    plan = proposal.knobs.to_plan(workload("resnet50").layout)
    assert {unit.threads for unit in plan.units} == {2048}


def test_a_link_that_one_flow_cannot_fill_is_filled_by_slices():
    model = libra_model_of("vgg16", contention=None, link=cluster("10 Gbit/s TCP", 8).link())
    space = KnobSpace(routes=(LIBRA_ROUTE,), streams=(1, 2, 3, 4))
    (proposal,) = Libra(space=space, model=model).ask()
    assert proposal.knobs.streams == 3


ROUNDING = 1e-8


"""The programme takes times that exceed a chunk's end by a billionth of it as equal to it."""


def backward_s(
    compute_s: Sequence[float],
    sizes_bytes: Sequence[int],
    ends: Sequence[int],
    choices: Sequence[int],
    model: StageModel,
) -> float:
    """Return the backward time of a plan by eq. (7)-(15), with arbitrary starts.

    Args:
        compute_s: computation of each layer in the order of the backward pass, `(L,)`.
        sizes_bytes: `(L,)`.
        ends: ends of the groups, `(n_groups,)`.
        choices: thread allocation of each group, `(n_groups,)`.
        model: cost of overlap.
    """
    ready = np.concatenate([[0.0], np.cumsum(compute_s)])
    sent = np.concatenate([[0.0], np.cumsum(sizes_bytes)])
    bounds = [0, *ends]
    total_s = float(ready[bounds[1]])  # stage 0: the computation of the first group
    left_s = float(ready[-1] - ready[bounds[1]])  # s_b
    for i, choice in enumerate(choices):
        size = np.array(sent[bounds[i + 1]] - sent[bounds[i]])
        overlapped_s = float(model.overlapped_s(size)[choice])
        alone_s = float(model.alone_s(size)[choice])
        slowed_s = left_s / float(model.speed_J[choice])  # g(s_b, r)
        both_s = min(overlapped_s, slowed_s)  # eq. (8)
        residual_compute_s = left_s * (1 - both_s / slowed_s) if left_s > 0 else 0.0  # eq. (9), (11), (14)
        residual_communication_s = alone_s * (1 - both_s / overlapped_s) if size > 0 else 0.0  # eq. (10), (11)
        after_next_s = float(ready[-1] - ready[bounds[min(i + 2, len(bounds) - 1)]])
        waiting_s = max(0.0, residual_compute_s - after_next_s)  # eq. (13)
        total_s += both_s + waiting_s + residual_communication_s
        left_s = residual_compute_s - waiting_s  # eq. (15)
    return total_s


STAGES = StageModel(
    alpha_s=0.5, overlapped_J=np.array([1.0, 2.0]), alone_J=np.array([2.0, 3.0]), speed_J=np.array([0.9, 0.7])
)


@st.composite
def instances(draw, *, max_layers=5, max_allocations=2):
    n = draw(st.integers(1, max_layers))
    n_allocations = draw(st.integers(1, max_allocations))
    compute_s = draw(st.lists(st.floats(0, 4), min_size=n, max_size=n))
    sizes = draw(st.lists(st.integers(0, 20), min_size=n, max_size=n))
    rates = st.lists(st.floats(0.5, 10), min_size=n_allocations, max_size=n_allocations)
    overlapped = np.array(draw(rates))
    alone = overlapped * (1 + draw(st.floats(0, 1)))  # assumption 2: p ≥ q
    share = draw(st.lists(st.floats(0, 0.95), min_size=n_allocations, max_size=n_allocations))
    speed = 1 - np.array(share) * overlapped / alone  # assumption 3: (p + a)(1 − v) ≤ q + a
    model = StageModel(alpha_s=draw(st.floats(0, 3)), overlapped_J=overlapped, alone_J=alone, speed_J=speed)
    return compute_s, sizes, model


def listing_1(compute_s, sizes, model, *, chunks, max_groups):
    """LIBRA's listing 1 word for word, six loops deep."""
    n, w = len(sizes), sum(compute_s) / chunks
    table = np.full((max_groups + 1, n + 1, chunks + 1), math.inf)
    table[0, 0] = np.arange(chunks + 1) * w
    for i, layer, z in product(range(1, max_groups + 1), range(1, n + 1), range(chunks + 1)):
        z_min = math.ceil(sum(compute_s[:layer]) / w - 1e-9)
        for before, start, j in product(range(layer), range(z_min, z + 1), range(len(model.speed_J))):
            size = np.array(float(sum(sizes[before:layer])))
            overlapped_s, alone_s = float(model.overlapped_s(size)[j]), float(model.alone_s(size)[j])
            left_s = (z - start) * w
            slowed_s = left_s / model.speed_J[j]
            both_s = min(overlapped_s, slowed_s)
            compute_left_s = left_s * (1 - both_s / slowed_s) if left_s > 0 else 0.0
            unsent_s = alone_s * (1 - both_s / overlapped_s) if overlapped_s > 0 else 0.0
            if z < chunks and unsent_s > 1e-9:
                continue
            table[i, layer, z] = min(
                table[i, layer, z], table[i - 1, before, start] + both_s + compute_left_s + unsent_s
            )
    return table[1:, n, chunks].min()


@settings(max_examples=30, deadline=None)
@given(instances(max_layers=4), st.integers(1, 8))
def test_the_rearranged_programme_fills_the_same_table_as_listing_1(instance, chunks):
    compute_s, sizes, model = instance
    assume(sum(compute_s) > 0.1)
    plan = fuse_and_allocate(compute_s, sizes, model, chunks=chunks)
    assert plan.discrete_s == pytest.approx(listing_1(compute_s, sizes, model, chunks=chunks, max_groups=len(sizes)))


@pytest.mark.lengthy
@settings(max_examples=60, deadline=None)
@given(instances(), st.integers(1, 30))
def test_theorem_2_bounds_the_plan_by_the_optimum_of_trying_all(instance, chunks):
    compute_s, sizes, model = instance
    assume(sum(compute_s) > 0.1)
    plan = fuse_and_allocate(compute_s, sizes, model, chunks=chunks)
    reached_s = backward_s(compute_s, sizes, plan.ends, plan.choices, model)
    best_s = min(
        backward_s(compute_s, sizes, ends, choices, model)
        for ends in all_group_ends(len(sizes))
        for choices in product(range(len(model.speed_J)), repeat=len(ends))
    )
    slack_s = ROUNDING * (1 + best_s)
    assert reached_s <= plan.discrete_s + slack_s
    assert best_s - slack_s <= reached_s <= (1 + (len(sizes) - 1) / chunks) * best_s + slack_s  # eq. (22)


@settings(max_examples=60, deadline=None)
@given(instances(max_allocations=3), st.integers(1, 30), st.data())
def test_theorem_1_bounds_the_allocation_by_the_optimum_of_trying_all(instance, chunks, data):
    compute_s, sizes, model = instance
    assume(sum(compute_s) > 0.1)
    ends = data.draw(st.sampled_from(list(all_group_ends(len(sizes)))))
    plan = allocate(compute_s, sizes, ends, model, chunks=chunks)
    assert plan.ends == tuple(ends)
    reached_s = backward_s(compute_s, sizes, ends, plan.choices, model)
    best_s = min(
        backward_s(compute_s, sizes, ends, choices, model)
        for choices in product(range(len(model.speed_J)), repeat=len(ends))
    )
    slack_s = ROUNDING * (1 + best_s)
    assert best_s - slack_s <= reached_s <= (1 + (len(ends) - 1) / chunks) * best_s + slack_s  # eq. (20)


def test_coarsening_keeps_a_big_layer_alone_and_the_number_within_the_limit():
    compute_s, sizes = [1.0] * 1000, [1] * 1000
    sizes[500] = 1000
    runs = coarsen(compute_s, sizes, limit=100)
    assert len(runs) <= 101
    assert runs[-1] == 1000
    assert runs == sorted(set(runs))
    begin = max((end for end in runs if end <= 500), default=0)
    assert next(end for end in runs if end > 500) - begin <= 11


def test_without_computation_everything_travels_in_one_message():
    plan = fuse_and_allocate([0.0, 0.0], [10, 10], STAGES)
    assert (plan.ends, plan.choices) == ((2,), (1,))
    assert plan.discrete_s == pytest.approx(0.5 + 20 / 3)


def test_one_layer_and_no_layer():
    assert fuse_and_allocate([1.0], [4], STAGES).ends == (1,)
    with pytest.raises(TuningError, match="one value per layer"):
        fuse_and_allocate([], [], STAGES)


MB = 1_000_000


def simulator_of(sizes_mb, durations_s, *, alpha_s=1.0, throughput_mb=(1.0,)):
    return Simulator(
        layout=GradientLayout(sizes=tuple(int(size * MB) for size in sizes_mb), itemsize_bytes=1),
        profile=Profile.from_durations(durations_s),
        link=LinkModel(alpha_s=alpha_s, throughput=tuple(rate * MB for rate in throughput_mb)),
    )


def test_the_coarsened_view_merges_gradients_that_hooks_saw_at_nearly_the_same_time():
    durations_s = [1.0, 0.004, 1.0, 0.004, 0.004]
    assert coarsened_ends(simulator_of([1] * 5, durations_s, alpha_s=0.01)) == [2, 5]
    assert coarsened_ends(simulator_of([1] * 5, durations_s, alpha_s=0.0)) == [1, 2, 3, 4, 5]  # nothing to be saved


def test_the_coarsened_view_leaves_no_tensor_without_elements():
    assert coarsened_ends(simulator_of([0, 1, 0, 1, 0], [1.0] * 5)) == [2, 5]


def test_the_critical_path_begins_where_computation_let_the_communication_begin():
    # The first tensor is through at 3 s, before the second is ready at 9 s; the third waits for the second.
    simulator = simulator_of([1, 5, 1], [1.0, 8.0, 1.0])
    schedule = Schedule(simulator=simulator, ends=(1, 2, 3), partitions=(1, 1, 1), streams=1)
    assert list(schedule.critical_tensors()) == [2]


def test_tensors_that_wait_for_the_link_are_fused_by_theorem_2():
    search = CriticalPathSearch(simulator_of([4, 1, 1, 1], [1.0, 1.0, 1.0, 1.0]), streams=1)
    schedule = search.run()
    # The first is through at 6 s, when all others are ready: they save two of their start-ups.
    assert schedule.ends == (1, 4)
    assert schedule.timeline.end_s == 10


def test_a_tensor_is_partitioned_onto_streams_that_add_throughput():
    simulator = simulator_of([8], [1.0], throughput_mb=(1.0, 2.0, 2.0, 2.0))
    schedule = CriticalPathSearch(simulator, streams=4).run()
    assert schedule.partitions == (2,)
    assert schedule.timeline.end_s == 1 + 1 + 4


@st.composite
def dpro_models(draw):
    n = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(0, 3 * MB), min_size=n, max_size=n))
    durations_s = draw(st.lists(st.floats(0, 0.02), min_size=n, max_size=n))
    return PlanningModel(
        layout=GradientLayout(sizes=(*sizes, 1000)),
        profile=Profile.from_durations([*durations_s, 0.001]),
        links={ROUTE: LinkModel(alpha_s=draw(st.floats(0, 0.01)), throughput=(draw(st.floats(1e8, 1e9)),))},
    )


@settings(max_examples=40, deadline=None)
@given(dpro_models())
def test_the_search_ends_no_worse_than_it_began_and_near_the_best(model):
    simulator = model.simulator(ROUTE)
    unfused_s = CriticalPathSearch(simulator, streams=1)._replayed(coarsened_ends(simulator)).timeline.span_s
    found_s = CriticalPathSearch(simulator, streams=1).run().timeline.span_s
    assert found_s <= unfused_s
    assert found_s <= 1.5 * best_span_s(model, ROUTE, streams=1) + 1e-9
