import time

import pytest
from conformance.oracle import best_span_s
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.autotune.arms.planners import AscWfbp, AscWfbpN, LayerType, MgWfbp, layer_types
from sirtaki.autotune.knobs import KnobSpace
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.measures import LinkModel

N, M, S = LayerType.NORMAL, LayerType.MERGED, LayerType.SIMULTANEOUS
ROUTE = (TransportKind.GLOO, Algorithm.FLAT)
PAPER = {"alpha_s": 1.0, "beta_s_per_byte": 1.0, "gamma": 1.5}


def test_communication_hidden_by_the_next_layers_computation_is_normal():
    assert layer_types([1.0, 10.0], [5, 1], **PAPER) == [N, S]  # Q1, eq. (37)


def test_a_layer_whose_successor_is_ready_within_a_startup_is_merged():
    assert layer_types([1.0, 1.5], [5, 1], **PAPER) == [M, S]  # not Q1, Q2, not Q3: eq. (38)


def test_a_layer_whose_successor_comes_later_but_in_its_transmission_is_simultaneous():
    assert layer_types([1.0, 3.0, 20.0], [5, 1, 1], **PAPER) == [S, N, S]  # not Q1, not Q2: eq. (39)


def test_a_merged_message_counts_as_one():
    # After the merge 7 bytes go out at 1.5 s until 9.5 s, so at 8 s the next one still finds them on the way.
    assert layer_types([1.0, 1.5, 8.0], [5, 2, 1], **PAPER) == [M, S, S]


def test_the_last_layer_is_always_sent():
    assert layer_types([1.0], [5], **PAPER) == [S]


def test_theorem_1_merges_where_the_papers_own_model_says_that_two_at_once_are_faster():
    """Two layers that are ready at once: eq. (32) compares merging with sending one *after* the other."""
    sizes, alpha_s, beta_s_per_byte, gamma = (10_000_000, 10_000_000), 1.0, 1e-6, 1.5
    assert layer_types([0.0, 0.0], sizes, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte, gamma=gamma) == [M, S]
    model = PlanningModel(
        layout=GradientLayout(sizes=sizes, itemsize_bytes=1),
        profile=Profile.from_durations([0.0, 0.0]),
        links={ROUTE: LinkModel.two_way(alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte, gamma=gamma)},
    )
    space = KnobSpace(routes=(ROUTE,), streams=(1, 2))
    assert span_s(AscWfbp(space=space, model=model), model) == pytest.approx(alpha_s + 20)  # eq. (34)
    at_once_s = alpha_s + gamma * 10  # eq. (9)
    assert best_span_s(model, ROUTE, streams=2) == pytest.approx(at_once_s)
    assert span_s(AscWfbpN(space=space, model=model), model) == pytest.approx(at_once_s)


def test_a_thousand_layers_take_under_fifty_milliseconds():
    ready_s = [i * 1e-4 for i in range(1000)]
    began = time.process_time()
    layer_types(ready_s, [10_000] * 1000, alpha_s=1e-3, beta_s_per_byte=1.7e-9, gamma=1.5)
    assert time.process_time() - began < 0.05


@st.composite
def models(draw, max_gradients=24):
    n = draw(st.integers(1, max_gradients))
    sizes = draw(st.lists(st.integers(1, 3_000_000), min_size=n, max_size=n))
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


@settings(max_examples=40, deadline=None)
@given(models())
def test_n_ways_are_never_worse_than_two_or_one(model):
    space = KnobSpace(routes=(ROUTE,), streams=(1, 2, 3, 4, 6))
    n_way = span_s(AscWfbpN(space=space, model=model), model)
    assert n_way <= span_s(AscWfbp(space=space, model=model), model) + 2e-6
    assert n_way <= span_s(MgWfbp(space=space, model=model), model) + 2e-6


@settings(max_examples=25, deadline=None)
@given(models(max_gradients=5))
def test_n_ways_come_near_the_best_plan_of_whole_gradients(model):
    space = KnobSpace(routes=(ROUTE,), streams=(1, 2, 3))
    n_way = span_s(AscWfbpN(space=space, model=model), model)
    assert n_way <= 1.25 * best_span_s(model, ROUTE, streams=3) + 2e-6


def test_a_link_that_three_flows_fill_gets_three_streams():
    model = PlanningModel(
        layout=GradientLayout(sizes=(2_000_000,) * 10),
        profile=Profile.from_durations([0.005] * 10),
        links={ROUTE: LinkModel(alpha_s=1e-4, throughput=(1e8, 2e8, 3e8, 2.9e8, 2.8e8))},
    )
    (proposal,) = AscWfbpN(space=KnobSpace(routes=(ROUTE,)), model=model).ask()
    assert proposal.knobs.streams == 3


def test_a_link_that_one_flow_fills_and_more_crowd_gets_one_stream():
    model = PlanningModel(
        layout=GradientLayout(sizes=(2_000_000,) * 10),
        profile=Profile.from_durations([0.0] * 10),
        links={ROUTE: LinkModel(alpha_s=1e-4, throughput=(3e8, 2.5e8, 2e8))},
    )
    (proposal,) = AscWfbpN(space=KnobSpace(routes=(ROUTE,)), model=model).ask()
    assert proposal.knobs.streams == 1


def test_where_the_links_latency_is_all_everything_is_merged():
    model = PlanningModel(
        layout=GradientLayout(sizes=(1000,) * 10),
        profile=Profile.from_durations([1e-5] * 10),
        links={ROUTE: LinkModel(alpha_s=1.0, throughput=(1e9,))},
    )
    (proposal,) = AscWfbpN(space=KnobSpace(routes=(ROUTE,)), model=model).ask()
    assert len(proposal.knobs.cuts) == 1
    assert span_s(AscWfbpN(space=KnobSpace(routes=(ROUTE,)), model=model), model) == pytest.approx(1.00009, rel=1e-3)


def test_with_contention_the_threads_are_chosen_too():
    rate = RateCurve(gamma_1=1e9, gamma_2=9e8, gamma_3=0.02)
    threads = (128, 512, 2048)
    space = KnobSpace(routes=(ROUTE,), streams=(1, 2), threads=threads)
    chosen = {}
    for compute_s in (0.001, 0.5):  # communication decides, or computation
        model = PlanningModel(
            layout=GradientLayout(sizes=(1_000_000,) * 10),
            profile=Profile.from_durations([compute_s] * 10),
            links={ROUTE: LinkModel(alpha_s=1e-3, throughput=(5e8,))},
            contention=ContentionModel(alpha_1=1.0, alpha_2=2e-4, overlapped=rate, alone=rate),
        )
        (proposal,) = AscWfbpN(space=space, model=model).ask()
        (chosen[compute_s],) = {cut.threads for cut in proposal.knobs.cuts}
    assert chosen[0.5] < chosen[0.001]
