import time

import pytest
from conformance.oracle import best_span_s
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.lib.workloads import cluster, workload
from sirtaki.autotune.arms.planners import CriticalPathSearch, Dpro, Schedule, coarsened_ends, partial_replay_s
from sirtaki.autotune.knobs import KnobSpace
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile, Simulator
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.measures import LinkModel

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)
MB = 1_000_000


def simulator_of(sizes_mb, durations_s, *, alpha_s=1.0, throughput_mb=(1.0,)):
    return Simulator(
        layout=GradientLayout(sizes=tuple(int(size * MB) for size in sizes_mb), itemsize_bytes=1),
        profile=Profile.from_durations(durations_s),
        link=LinkModel(alpha_s=alpha_s, throughput=tuple(rate * MB for rate in throughput_mb)),
    )


def test_the_coarsened_view_joins_gradients_that_become_ready_together():
    assert coarsened_ends(simulator_of([1, 1, 1, 1], [1.0, 0.0, 1.0, 0.0])) == [2, 4]


def test_the_coarsened_view_joins_what_hooks_saw_a_moment_apart():
    durations_s = [1.0, 0.004, 1.0, 0.004, 0.004]
    assert coarsened_ends(simulator_of([1] * 5, durations_s, alpha_s=0.01)) == [2, 5]
    assert coarsened_ends(simulator_of([1] * 5, durations_s, alpha_s=0.0)) == [1, 2, 3, 4, 5]  # nothing to be saved


def test_a_long_row_of_gradients_is_not_one_tensor():
    """Each is close to the one before, but not to the first."""
    ends = coarsened_ends(simulator_of([1] * 100, [0.01] * 100, alpha_s=0.015))
    assert ends == list(range(2, 101, 2))


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


def test_tensors_that_meet_an_idle_link_are_left_alone():
    schedule = CriticalPathSearch(simulator_of([1, 1], [1.0, 9.0]), streams=1).run()
    assert schedule.ends == (1, 2)


def test_a_tensor_is_partitioned_onto_streams_that_add_throughput():
    simulator = simulator_of([8], [1.0], throughput_mb=(1.0, 2.0, 2.0, 2.0))
    schedule = CriticalPathSearch(simulator, streams=4).run()
    assert schedule.partitions == (2,)
    assert schedule.timeline.end_s == 1 + 1 + 4


def test_the_partial_replay_is_that_of_the_simulator():
    simulator = simulator_of([6], [0.0], throughput_mb=(1.0, 1.5, 1.8))
    for partitions in (1, 2, 3):
        schedule = Schedule(simulator=simulator, ends=(1,), partitions=(partitions,), streams=3)
        expected_s = partial_replay_s(simulator.link, 6 * MB, partitions)
        assert schedule.timeline.span_s == pytest.approx(expected_s)


@st.composite
def models(draw):
    n = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(0, 3 * MB), min_size=n, max_size=n))
    durations_s = draw(st.lists(st.floats(0, 0.02), min_size=n, max_size=n))
    return PlanningModel(
        layout=GradientLayout(sizes=(*sizes, 1000)),
        profile=Profile.from_durations([*durations_s, 0.001]),
        links={ROUTE: LinkModel(alpha_s=draw(st.floats(0, 0.01)), throughput=(draw(st.floats(1e8, 1e9)),))},
    )


@settings(max_examples=40, deadline=None)
@given(models())
def test_the_search_ends_no_worse_than_it_began_and_near_the_best(model):
    simulator = model.simulator(ROUTE)
    unfused_s = CriticalPathSearch(simulator, streams=1)._replayed(coarsened_ends(simulator)).timeline.span_s
    found_s = CriticalPathSearch(simulator, streams=1).run().timeline.span_s
    assert found_s <= unfused_s
    assert found_s <= 1.5 * best_span_s(model, ROUTE, streams=1) + 1e-9


def test_bert_base_is_searched_in_under_ten_seconds():
    bert = workload("bert_base")
    model = PlanningModel(
        layout=bert.layout, profile=bert.profile(), links={ROUTE: cluster("10 Gbit/s TCP", 64).link()}
    )
    began = time.process_time()
    (proposal,) = Dpro(space=KnobSpace(routes=(ROUTE,)), model=model).ask()
    assert time.process_time() - began < 10
    assert proposal.knobs.streams >= 3  # as many flows fill the link
