import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.autotune.knobs import Cut, Knobs
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.simulator import Profile, Simulator
from sirtaki.comm.plan import CommPlan, GradientLayout, TransportKind, Unit
from sirtaki.errors import TuningError
from sirtaki.measures import LinkModel

MB = 1_000_000


def layout_of(*sizes_mb):
    return GradientLayout(sizes=tuple(int(size * MB) for size in sizes_mb), itemsize_bytes=1)


def plan_of(layout, stops_mb, streams=None, threads=None):
    streams = streams or [0] * len(stops_mb)
    threads = threads or [None] * len(stops_mb)
    cuts = tuple(
        Cut(stop=int(stop * MB), stream=stream, threads=r)
        for stop, stream, r in zip(stops_mb, streams, threads, strict=True)
    )
    return Knobs(unit_bytes=MB, streams=max(streams) + 1, transport=TransportKind.GLOO, cuts=cuts).to_plan(layout)


def two_streams(*, alpha_s=1.0, single=1.0, double=1.5):
    return LinkModel(alpha_s=alpha_s, throughput=(single * MB, double * MB))


def test_units_on_one_stream_run_one_behind_the_other():
    layout = layout_of(2, 3)
    simulator = Simulator(layout=layout, profile=Profile(ready_s=(1, 2), compute_s=2), link=two_streams())
    timeline = simulator.run(plan_of(layout, [2, 5]))
    assert timeline.issue_s == (1, 2)
    assert timeline.start_s == (1, 4)  # 1 s start-up and 2 s transmission
    assert timeline.stop_s == (4, 8)
    assert timeline.span_s == 7
    assert timeline.iteration_s == 8


def test_two_transmissions_share_the_concurrent_throughput_and_startup_takes_none_of_it():
    layout = layout_of(3, 3)
    simulator = Simulator(layout=layout, profile=Profile(ready_s=(0, 1), compute_s=1), link=two_streams())
    timeline = simulator.run(plan_of(layout, [3, 6], [0, 1]))
    # Alone from 1 s to 2 s (1 MB), then 0.75 MB/s each: 2 MB last until 2 + 8/3, then the other's 1 MB alone.
    assert timeline.stop_s == pytest.approx((2 + 8 / 3, 2 + 8 / 3 + 1))


def test_the_processor_is_shared_by_all_streams_and_works_while_the_link_does():
    link = LinkModel(alpha_s=0.0, throughput=(1 * MB, 2 * MB), host_s=0.5)
    layout = layout_of(1, 1, 0.1, 0.1)
    simulator = Simulator(layout=layout, profile=Profile(ready_s=(0, 0, 0, 0), compute_s=0), link=link)
    # Two long units: the link takes 1 s, the processor (half of it for each) is done at the same time.
    assert simulator.run(plan_of(layout, [1, 2, 2.2], [0, 1, 0])).stop_s == pytest.approx((1, 1, 1.5))
    # Two short ones after them: 0.05 s each on the link, but 0.5 s each of one processor.
    assert simulator.run(plan_of(layout, [1, 2, 2.1, 2.2], [0, 1, 0, 1])).stop_s == pytest.approx((1, 1, 2, 2))


def test_a_unit_is_issued_only_after_all_earlier_units_of_the_plan():
    layout = layout_of(1, 1)
    simulator = Simulator(layout=layout, profile=Profile(ready_s=(5, 1), compute_s=5), link=two_streams())
    timeline = simulator.run(plan_of(layout, [1, 2], [0, 1]))
    assert timeline.issue_s == (5, 5)
    assert timeline.first_ready_s == 1


def test_a_slice_of_a_gradient_waits_for_the_whole_gradient():
    layout = layout_of(1, 4)
    simulator = Simulator(layout=layout, profile=Profile(ready_s=(1, 3), compute_s=3), link=two_streams())
    assert simulator.run(plan_of(layout, [1, 2, 5])).issue_s == (1, 3, 3)


def test_a_backward_pass_longer_than_the_communication_decides_the_iteration():
    layout = layout_of(1)
    simulator = Simulator(
        layout=layout, profile=Profile(ready_s=(1,), compute_s=9, forward_s=4), link=two_streams(alpha_s=0)
    )
    timeline = simulator.run(plan_of(layout, [1]))
    assert (timeline.span_s, timeline.end_s, timeline.iteration_s) == (1, 9, 13)


@pytest.mark.parametrize("sizes", [(0, 0), ()])
def test_nothing_to_send_takes_no_time(sizes):
    layout = layout_of(*sizes, 0)
    profile = Profile(ready_s=(1,) * len(layout.sizes), compute_s=1)
    plan = CommPlan(numel=0, units=(), streams=1, transport=TransportKind.GLOO)
    assert Simulator(layout=layout, profile=profile, link=two_streams()).run(plan).span_s == 0


def contention(**changes):
    fields = {
        "alpha_1": 1.0,
        "alpha_2": 0.5 / 512,
        "overlapped": RateCurve(gamma_1=1 * MB, gamma_2=0, gamma_3=0),
        "alone": RateCurve(gamma_1=2 * MB, gamma_2=0, gamma_3=0),
    }
    return ContentionModel(**{**fields, **changes})


def test_communication_slows_computation_down_and_runs_faster_once_it_is_over():
    layout = layout_of(4, 0)
    simulator = Simulator(
        layout=layout,
        profile=Profile(ready_s=(1, 2), compute_s=2),
        link=two_streams(alpha_s=0),
        contention=contention(),
    )
    timeline = simulator.run(plan_of(layout, [4], threads=[512]))
    # The second of computation left at 1 s takes 2 s (g); meanwhile 2 of 4 MB are sent (p), the rest at q.
    assert timeline.compute_end_s == pytest.approx(3)
    assert timeline.stop_s == pytest.approx((4,))


def test_a_unit_of_fewer_threads_slows_computation_down_less():
    layout = layout_of(4, 0)
    ends = []
    for threads in (128, 512):
        simulator = Simulator(
            layout=layout, profile=Profile(ready_s=(1, 2), compute_s=2), link=two_streams(), contention=contention()
        )
        ends.append(simulator.run(plan_of(layout, [4], threads=[threads])).compute_end_s)
    assert 2 < ends[0] < ends[1]


def naive_stops(needed_s, streams, sizes, link):
    """The same model by another method: work left of every unit, all rates worked out anew at each event."""
    left = {"link": list(sizes), "host": [link.host_s] * len(sizes)}
    state, at = ["waiting"] * len(sizes), [math.inf] * len(sizes)
    stops, now = [0.0] * len(sizes), 0.0
    while any(s != "done" for s in state):
        for i, stream in enumerate(streams):
            earlier_done = all(state[j] == "done" for j in range(i) if streams[j] == stream)
            if state[i] == "waiting" and needed_s[i] <= now and earlier_done:
                state[i], at[i] = "starting", now + link.alpha_s
            if state[i] == "starting" and at[i] <= now:
                state[i] = "running"
        users = {of: [i for i, s in enumerate(state) if s == "running" and left[of][i] > 0] for of in left}
        totals = {"link": link.total_bytes_per_s(len(users["link"]) or 1), "host": 1.0}
        rates = {of: totals[of] / (len(users[of]) or 1) for of in left}
        events = [at[i] for i, s in enumerate(state) if s == "starting"]
        events += [needed for needed in needed_s if needed > now]
        events += [now + left[of][i] / rates[of] for of in left for i in users[of]]
        then = min(events)
        for of in left:
            for i in users[of]:
                left[of][i] -= (then - now) * rates[of]
                left[of][i] = left[of][i] if left[of][i] > 1e-6 * (1 if of == "link" else 1e-3) else 0.0
        for i, s in enumerate(state):
            if s == "running" and left["link"][i] == left["host"][i] == 0.0:
                state[i], stops[i] = "done", then
        now = then
    return stops


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=8))
    durations = draw(st.lists(st.floats(0, 3), min_size=len(sizes), max_size=len(sizes)))
    n_streams = draw(st.integers(1, 4))
    streams = [draw(st.integers(0, n_streams - 1)) for _ in sizes]
    throughput = draw(st.lists(st.floats(10, 1000), min_size=1, max_size=4))
    link = LinkModel(
        alpha_s=draw(st.floats(0, 2)),
        throughput=tuple(throughput),
        host_s=draw(st.one_of(st.just(0.0), st.floats(0.01, 2))),
    )
    return sizes, durations, n_streams, streams, link


@settings(deadline=None)  # a busy machine may pause any example
@given(cases())
def test_the_replay_agrees_with_a_naive_one_and_never_beats_the_bounds(case):
    sizes, durations, n_streams, streams, link = case
    layout = GradientLayout(sizes=tuple(sizes), itemsize_bytes=1)
    units = tuple(
        Unit(start=start, stop=stop, stream=stream)
        for start, stop, stream in zip(layout.offsets, layout.offsets[1:], streams, strict=False)
    )
    plan = CommPlan(numel=layout.numel, units=units, streams=n_streams, transport=TransportKind.GLOO)
    profile = Profile.from_durations(durations)
    timeline = Simulator(layout=layout, profile=profile, link=link).run(plan)
    assert timeline.stop_s == pytest.approx(naive_stops(profile.ready_s, streams, sizes, link), rel=1e-6, abs=1e-6)
    best_rate = max(link.total_bytes_per_s(n) for n in range(1, n_streams + 1))
    assert timeline.stop_s[-1] + 1e-9 >= profile.ready_s[-1] + link.alpha_s + sizes[-1] / best_rate
    assert timeline.span_s + 1e-9 >= sum(sizes) / best_rate


@given(cases())
@settings(max_examples=30, deadline=None)
def test_contention_that_changes_nothing_gives_the_plain_timeline(case):
    sizes, durations, n_streams, streams, link = case
    layout = GradientLayout(sizes=tuple(sizes), itemsize_bytes=1)
    cuts = tuple(Cut(stop=stop, stream=stream) for stop, stream in zip(layout.offsets[1:], streams, strict=True))
    knobs = Knobs(unit_bytes=1, streams=n_streams, transport=TransportKind.GLOO, cuts=cuts)
    flat = RateCurve(gamma_1=link.throughput[0], gamma_2=0, gamma_3=0)
    neutral = ContentionModel(alpha_1=1, alpha_2=0, overlapped=flat, alone=flat)
    profile = Profile.from_durations(durations)
    plain = Simulator(layout=layout, profile=profile, link=link).run_knobs(knobs)
    with_model = Simulator(layout=layout, profile=profile, link=link, contention=neutral).run_knobs(knobs)
    assert with_model.stop_s == pytest.approx(plain.stop_s)


def test_a_plan_of_another_layout_is_refused():
    layout = layout_of(1)
    simulator = Simulator(layout=layout, profile=Profile(ready_s=(1,), compute_s=1), link=two_streams())
    with pytest.raises(TuningError, match="elements"):
        simulator.run(plan_of(layout_of(2), [2]))


def test_a_profile_of_another_model_is_refused():
    with pytest.raises(TuningError, match="2 gradients for a layout of 1"):
        Simulator(layout=layout_of(1), profile=Profile(ready_s=(1, 2), compute_s=2), link=two_streams())


def test_ten_thousand_layers_are_replayed_in_a_fraction_of_a_second():
    layout = GradientLayout(sizes=(1000,) * 10_000)
    cuts = tuple(Cut(stop=stop, stream=i % 8) for i, stop in enumerate(layout.offsets[1:]))
    knobs = Knobs(unit_bytes=4000, streams=8, transport=TransportKind.GLOO, cuts=cuts)
    simulator = Simulator(layout=layout, profile=Profile.from_durations([1e-5] * 10_000), link=two_streams())
    began = time.process_time()
    timeline = simulator.run_knobs(knobs)
    assert time.process_time() - began < 2
    assert len(timeline.stop_s) == 10_000
