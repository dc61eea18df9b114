"""The simulated iteration by hand-made cases and against a naive replay; what planners know and predict."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.autotune.arms.planners import Planner, make_planners
from sirtaki.autotune.knobs import KIB, MIB, Cut, Knobs, KnobSpace
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.planning import (
    Cluster,
    Forecast,
    PlanningModel,
    calibrate_link,
    fitted_to_trials,
)
from sirtaki.autotune.model.simulator import Profile, Simulator, deferred_iteration_s
from sirtaki.autotune.trial import Trial
from sirtaki.comm.gradients.schedule import IterationPace, ScheduledUnit
from sirtaki.comm.plan import Algorithm, CommPlan, GradientLayout, TransportKind, Unit
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


def two_streams(*, alpha_s=1.0):
    return LinkModel(alpha_s=alpha_s, throughput=(1.0 * MB, 1.5 * MB))


def contention(**changes):
    fields = {
        "alpha_1": 1.0,
        "alpha_2": 0.5 / 512,
        "overlapped": RateCurve(gamma_1=1 * MB, gamma_2=0, gamma_3=0),
        "alone": RateCurve(gamma_1=2 * MB, gamma_2=0, gamma_3=0),
    }
    return ContentionModel(**{**fields, **changes})


def test_communication_slows_computation_down_and_is_faster_after_it():
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


def naive_stops(needed_s, streams, sizes, link):
    """Return the ends of units by a simulation that recomputes all rates at each event."""
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


def test_a_plan_of_another_layout_is_refused():
    layout = layout_of(1)
    simulator = Simulator(layout=layout, profile=Profile(ready_s=(1,), compute_s=1), link=two_streams())
    with pytest.raises(TuningError, match="elements"):
        simulator.run(plan_of(layout_of(2), [2]))


def test_a_profile_of_another_model_is_refused():
    with pytest.raises(TuningError, match="for 2 gradients, but this job has 1 gradients"):
        Simulator(layout=layout_of(1), profile=Profile(ready_s=(1, 2), compute_s=2), link=two_streams())


class Group:
    layout = GradientLayout(sizes=(1,), itemsize_bytes=1)


def unit(n_bytes: int, *members: int, stream: int = 0) -> ScheduledUnit:
    route = (TransportKind.GLOO, Algorithm.FLAT)
    return ScheduledUnit(Group(), 0, n_bytes, stream, route, members=members)  # type: ignore[arg-type]


def pace(*ready_s: float) -> IterationPace:
    return IterationPace(needed=[0.0] * len(ready_s), ready_s=ready_s, backward_s=ready_s[-1], s_per_byte=1.0)


def test_more_messages_than_a_host_gets_through_are_waited_for() -> None:
    link = LinkModel(alpha_s=0.0, throughput=(100.0,), host_s=2.0)
    taken_s = deferred_iteration_s([unit(1, 0), unit(1, 0, stream=1)], [1.0, 1.0], pace(1.0), forward_s=0.5, link=link)
    assert taken_s == pytest.approx(1.0 + 4.0 + 0.5)


@pytest.mark.parametrize("seed", range(20))
def test_units_on_one_stream_take_as_long_as_the_recurrence_predicts(seed: int) -> None:
    rng = random.Random(seed)
    count, forward_s, alpha_s, rate = rng.randint(1, 9), rng.uniform(0.0, 3.0), rng.uniform(0.0, 0.3), rng.uniform(1, 9)
    ready_s = sorted(rng.uniform(0.0, 4.0) for _ in range(count))
    sizes = [rng.randint(1, 9) for _ in range(count)]
    order = rng.sample(range(count), count)
    taken_s = deferred_iteration_s(
        [unit(sizes[number], number) for number in order],
        [ready_s[number] for number in order],
        pace(*ready_s),
        forward_s=forward_s,
        link=LinkModel(alpha_s=alpha_s, throughput=(rate,)),
    )
    done_s, now_s, free_s, ends_s = [0.0] * count, 0.0, 0.0, []
    for _ in range(9):
        begun_s = 0.0
        for number in reversed(range(count)):  # as forward reads them
            read_s = forward_s * (1 - ready_s[number] / ready_s[-1])
            now_s = max(now_s + read_s - begun_s, done_s[number])
            begun_s = read_s
        now_s += forward_s - begun_s
        for number in order:
            free_s = max(free_s, now_s + ready_s[number]) + alpha_s + sizes[number] / rate
            done_s[number] = free_s
        now_s += ready_s[-1]
        ends_s.append(now_s)
    assert taken_s == pytest.approx((ends_s[4] - ends_s[2]) / 2)


def test_a_profile_without_gradients_is_refused():
    with pytest.raises(TuningError, match="at least one gradient"):
        Profile(ready_s=(), compute_s=1.0)


@pytest.mark.parametrize("ready_s", [(-1.0, 2.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_times_that_cannot_be_are_refused(ready_s):
    with pytest.raises(TuningError, match="finite times of at least 0 s"):
        Profile(ready_s=ready_s, compute_s=2.0)


def test_a_gradient_after_the_end_of_the_pass_is_refused():
    with pytest.raises(TuningError, match="before the end of the backward pass"):
        Profile(ready_s=(1.0, 3.0), compute_s=2.0)


@settings(deadline=None)  # a busy machine may pause any example
@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0, 5))
def test_durations_add_up_to_the_pass_and_issue_times_ascend(ready_s, tail_s):
    profile = Profile(ready_s=tuple(ready_s), compute_s=max(ready_s) + tail_s)
    assert sum(profile.durations_s) == pytest.approx(profile.compute_s, abs=1e-9)
    assert list(profile.issuable_s) == sorted(profile.issuable_s)
    assert all(issue >= ready for issue, ready in zip(profile.issuable_s, ready_s, strict=True))


GLOO = (TransportKind.GLOO, Algorithm.FLAT)


TREE = (TransportKind.GLOO, Algorithm.HIERARCHICAL)


RATE = RateCurve(gamma_1=1e9, gamma_2=5e8, gamma_3=0.05)


MODEL = PlanningModel(
    layout=GradientLayout(sizes=(10, 20), names=("b", "a")),
    profile=Profile.from_durations([0.1, 0.2], forward_s=0.1),
    links={
        GLOO: LinkModel(alpha_s=1e-3, throughput=(1e8, 2e8), residual=0.02),
        TREE: LinkModel(alpha_s=0, throughput=(1,)),
    },
    contention=ContentionModel(alpha_1=1.0, alpha_2=1e-4, overlapped=RATE, alone=RATE),
)


@pytest.mark.parametrize(
    "model",
    [MODEL, replace(MODEL, contention=None), replace(MODEL, learnt=dict.fromkeys(MODEL.links, MODEL.contention))],
)
def test_json_keeps_the_model(model):
    assert PlanningModel.from_json(json.loads(json.dumps(model.to_json()))) == model


@pytest.mark.parametrize(
    "damage",
    [
        {"layout": {}},
        {"profile": None},
        {"links": [{"transport": "carrier pigeon", "algorithm": "flat", "link": {}}]},
        {"links": []},
        {"contention": {"alpha_1": 1.0}},
    ],
)
def test_an_invalid_saved_model_is_rejected(damage):
    with pytest.raises(TuningError):
        PlanningModel.from_json({**MODEL.to_json(), **damage})


def test_no_span_is_below_the_bound_of_backward_pass_and_best_rate():
    assert MODEL.bound_s == pytest.approx(0.2)  # from the first ready gradient to the last
    big = replace(MODEL, layout=GradientLayout(sizes=(10_000_000, 20_000_000)))
    assert big.bound_s == pytest.approx(120e6 / 2e8)  # two streams over GLOO


def test_a_model_is_another_where_layout_routes_contention_or_ready_times_are():
    assert not MODEL.differs_from(replace(MODEL, profile=Profile.from_durations([0.11, 0.2])))
    assert MODEL.differs_from(replace(MODEL, profile=Profile.from_durations([0.2, 0.2])))
    assert MODEL.differs_from(replace(MODEL, layout=GradientLayout(sizes=(10, 21))))
    assert MODEL.differs_from(replace(MODEL, links={GLOO: MODEL.links[GLOO]}))
    assert MODEL.differs_from(replace(MODEL, contention=None))


ROUTE = (TransportKind.GLOO, Algorithm.FLAT)


SPACE = KnobSpace(routes=(ROUTE,), unit_bytes=(MIB, 64 * MIB))


LAYOUT = GradientLayout(sizes=(4 * MIB,) * 8)


FORECAST_MODEL = PlanningModel(
    layout=LAYOUT,
    profile=Profile.from_durations([1e-4] * 8),
    links={ROUTE: LinkModel(alpha_s=1e-6, throughput=(1e9, 2e9, 3e9, 4e9))},
)


def streams(count: int) -> Knobs:
    return Knobs(unit_bytes=2 * MIB, streams=count, transport=ROUTE[0])


def ran(count: int, span_s: float) -> Trial:
    return Trial(arm="any", knobs=streams(count), iterations=2, span_s=span_s)


def told(*spans_s: float) -> Forecast:
    """After trials on 1, 2, 3 … streams, of which the model expects each to be faster than the one before."""
    forecast = Forecast(FORECAST_MODEL)
    forecast.tell([ran(count, span_s) for count, span_s in enumerate(spans_s, 1)])
    return forecast


def test_a_model_is_believed_until_trials_have_run() -> None:
    assert told().believed
    assert told(0.2).believed


def test_the_order_of_nearly_equal_plans_counts_little() -> None:
    assert told(0.4, 0.2, 0.201, 0.2015).believed


def test_failed_and_unpredictable_trials_are_ignored() -> None:
    forecast = told(float("inf"), 0.1)
    elsewhere = streams(1).but(transport=TransportKind.MPI)
    other_layout = streams(1).but(cuts=(Cut(stop=3),))
    forecast.tell([replace(ran(1, 0.01), knobs=elsewhere), replace(ran(1, 0.01), knobs=other_layout)])
    assert forecast.predicted_s(elsewhere) is None
    assert forecast.predicted_s(other_layout) is None
    assert forecast.believed


def test_a_promise_is_compared_with_the_best_measured_so_far() -> None:
    forecast = told(0.4, 0.2)
    assert forecast.promises(streams(4), gain=0.01)
    assert not forecast.promises(streams(1), gain=0.01)
    assert told().promises(streams(1), gain=0.01)


def test_planners_hold_their_tongue_while_trials_speak_against_their_model() -> None:
    planners = make_planners(space=SPACE, model=FORECAST_MODEL)
    assert any(planner.ask() for planner in planners)
    planners[0].tell([ran(1, 0.1), ran(2, 0.2), ran(3, 0.4)])
    assert all(isinstance(planner, Planner) and planner.doubted and not planner.ask() for planner in planners)
    crowded = LinkModel(alpha_s=1e-6, throughput=(4e9, 3e9, 2e9, 1e9))
    for planner in planners:
        planner.update_model(replace(FORECAST_MODEL, links={ROUTE: crowded}))
    assert not any(planner.doubted for planner in planners)


SIX_STREAMS = replace(FORECAST_MODEL, links={ROUTE: LinkModel(alpha_s=1e-6, throughput=(1e9, 2e9, 3e9, 4e9, 5e9, 6e9))})

RIGHT_S = (0.4, 0.2, 0.14, 0.1, 0.08)
"""Of trials on 1, 2, 3 … streams, in the order of the model's predictions."""


def unpresumed(*spans_s: float) -> Forecast:
    forecast = Forecast(SIX_STREAMS, presumed=False)
    forecast.tell([ran(count, span_s) for count, span_s in enumerate(spans_s, 1)])
    return forecast


@pytest.mark.parametrize(
    ("spans_s", "believed"),
    [
        ((), False),
        (RIGHT_S[:4], False),
        (RIGHT_S, True),
        ((*RIGHT_S[:3], 0.08, 0.1), True),
        ((0.2, 0.4, 0.08, 0.1, 0.14), False),
        (RIGHT_S[::-1], False),
        ((0.1,) * 5, False),
    ],
)
def test_a_model_that_is_not_presumed_right_is_trusted_once_it_has_ranked_five_trials_right(
    spans_s: Sequence[float], believed: bool
) -> None:
    assert unpresumed(*spans_s).believed is believed


TRIALS_LINK = LinkModel(alpha_s=1.4e-3, throughput=(5e8, 8e8, 9e8, 9e8))


TRIALS_LAYOUT = GradientLayout(sizes=(200_000,) * 40)


PROFILE = Profile.from_durations([1e-3] * 40)


def trials_on(link, *, noise=0.0):
    rng = np.random.default_rng(0)
    simulator = Simulator(layout=TRIALS_LAYOUT, profile=PROFILE, link=link)
    trials = []
    for unit_bytes in (256 * KIB, MIB, 4 * MIB):
        for streams in (1, 2, 4):
            knobs = Knobs(unit_bytes=unit_bytes, streams=streams, transport=TransportKind.GLOO)
            span_s = simulator.run_knobs(knobs).span_s * math.exp(noise * rng.standard_normal())
            trials.append(Trial(arm="grid", knobs=knobs, iterations=1, span_s=span_s))
    return trials


@pytest.mark.lengthy
@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.02), (0.03, 0.15)])
def test_a_wrong_link_is_corrected_by_trials(noise, tolerance):
    shape = [0.6 * 2 ** (n / 3) for n in range(4)]  # from 0.6 times the true G(1) to 1.2 times the true G(4)
    rates = tuple(rate * factor for rate, factor in zip(TRIALS_LINK.throughput, shape, strict=True))
    wrong = LinkModel(alpha_s=3e-3, throughput=rates)
    fitted = calibrate_link(wrong, layout=TRIALS_LAYOUT, profile=PROFILE, trials=trials_on(TRIALS_LINK, noise=noise))
    assert fitted.alpha_s == pytest.approx(TRIALS_LINK.alpha_s, rel=tolerance)
    assert fitted.throughput[0] == pytest.approx(TRIALS_LINK.throughput[0], rel=tolerance)
    assert fitted.throughput[3] == pytest.approx(TRIALS_LINK.throughput[3], rel=tolerance)


@pytest.mark.lengthy
def test_a_correction_finds_the_processors_time():
    link = replace(TRIALS_LINK, host_s=2e-3)
    wrong = replace(link, host_s=0.5e-3)
    assert calibrate_link(wrong, layout=TRIALS_LAYOUT, profile=PROFILE, trials=trials_on(link)).host_s == pytest.approx(
        2e-3, rel=0.1
    )


CONTENTION = ContentionModel(
    alpha_1=1.0,
    alpha_2=1.5e-4,
    overlapped=RateCurve(gamma_1=5e8, gamma_2=4.5e8, gamma_3=0.03),
    alone=RateCurve(gamma_1=6e8, gamma_2=5.4e8, gamma_3=0.03),
)


THREADS = (128, 512, 1024, 4096)


def trials_with_threads(*, noise=0.0, threads=THREADS):
    rng = np.random.default_rng(0)
    simulator = Simulator(layout=TRIALS_LAYOUT, profile=PROFILE, link=TRIALS_LINK, contention=CONTENTION)
    trials = []
    for unit_bytes in (MIB, 2 * MIB, 8 * MIB):
        for r in threads:
            knobs = Knobs(unit_bytes=unit_bytes, streams=1, threads=r, transport=TransportKind.NCCL)
            span_s = simulator.run_knobs(knobs).span_s * math.exp(noise * rng.standard_normal())
            trials.append(Trial(arm="grid", knobs=knobs, iterations=1, span_s=span_s))
    return trials


# ── a job's model ────────────────────────────────────────────────────────────────────────────────────────────────
TRIALS_GLOO, MPI = (TransportKind.GLOO, Algorithm.FLAT), (TransportKind.MPI, Algorithm.FLAT)


PROBED = LinkModel(alpha_s=1e-3, throughput=(4e8, 8e8, 1.2e9, 1.6e9))


"""Link model of an idle network, where streams do not slow each other down."""


def planning_model(link: LinkModel) -> PlanningModel:
    return PlanningModel(layout=TRIALS_LAYOUT, profile=PROFILE, links={TRIALS_GLOO: link, MPI: link})


def worst_miss(model: PlanningModel) -> float:
    simulator = model.simulator(TRIALS_GLOO)
    return max(
        abs(math.log(simulator.run_knobs(trial.knobs).span_s / trial.span_s)) for trial in trials_on(TRIALS_LINK)
    )


def test_only_contention_that_trials_contradict_is_fitted_to_them() -> None:
    probed = planning_model(PROBED)
    fitted = fitted_to_trials(probed, trials_on(TRIALS_LINK, noise=0.03)[:7])
    assert worst_miss(fitted) < worst_miss(probed) / 2
    assert fitted.links[MPI] == PROBED


def test_links_that_meet_the_trials_stay_as_they_were_probed() -> None:
    assert fitted_to_trials(planning_model(TRIALS_LINK), trials_on(TRIALS_LINK, noise=0.03)) == planning_model(
        TRIALS_LINK
    )


@pytest.mark.lengthy
def test_few_trials_and_such_as_no_link_explains_change_nothing() -> None:
    probed = planning_model(PROBED)
    assert fitted_to_trials(probed, trials_on(TRIALS_LINK)[:4]) == probed
    wild = [replace(trial, span_s=0.01 * 7.0 ** ((5 * i) % 9)) for i, trial in enumerate(trials_on(TRIALS_LINK))]
    assert fitted_to_trials(probed, wild) == probed


NCCL = (TransportKind.NCCL, Algorithm.FLAT)


def threads_model(contention: ContentionModel) -> PlanningModel:
    return PlanningModel(layout=TRIALS_LAYOUT, profile=PROFILE, links={NCCL: TRIALS_LINK}, contention=contention)


def missed(model: PlanningModel, trials: list[Trial]) -> float:
    simulator = model.simulator(NCCL)
    return max(abs(math.log(simulator.run_knobs(trial.knobs).span_s / trial.span_s)) for trial in trials)


@pytest.mark.lengthy
def test_contention_that_trials_speak_against_is_fitted_to_them() -> None:
    """Probes of a matrix product alone had shown half the rates, and computation that hardly notices."""
    probed = threads_model(
        replace(
            CONTENTION,
            alpha_2=1e-5,
            overlapped=replace(CONTENTION.overlapped, gamma_1=2.5e8, gamma_2=2.2e8),
            alone=replace(CONTENTION.alone, gamma_1=3e8, gamma_2=2.7e8),
        )
    )
    trials = trials_with_threads(noise=0.03)
    fitted = fitted_to_trials(probed, trials)
    assert missed(probed, trials) > 0.3
    assert missed(fitted, trials_with_threads()) < 0.12
    assert fitted.contention_on(NCCL) != probed.contention


CLUSTER = Cluster(name="four", ranks=4, hop_s=1e-3, link_bytes_per_s=1e9, flow_bytes_per_s=4e8, crowding=0.1)


def test_an_all_reduce_takes_two_rounds_of_all_hops_but_one() -> None:
    assert CLUSTER.link().alpha_s == pytest.approx(6e-3)
    assert replace(CLUSTER, ranks=2).link().alpha_s == pytest.approx(2e-3)


def test_flows_add_up_until_the_link_is_full_and_crowd_each_other_then() -> None:
    wire = 2 * 3 / 4
    rates = CLUSTER.link(max_streams=5).throughput
    full = 1e9 / wire  # at two and a half flows
    expected = [4e8 / wire, 8e8 / wire, *(full * 0.9 ** (n - 2.5) for n in (3, 4, 5))]
    assert rates == pytest.approx(expected)
    assert len(CLUSTER.link().throughput) == 24


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": 1}, "ranks >= 2, .* found .*ranks=1"),
        ({"hop_s": -1e-9}, "hop_s >= 0"),
        ({"flow_bytes_per_s": 0.0}, "0 < flow_bytes_per_s <= link_bytes_per_s"),
        ({"flow_bytes_per_s": 1.1e9}, "0 < flow_bytes_per_s <= link_bytes_per_s"),
        ({"crowding": 1.0}, "0 <= crowding < 1"),
        ({"crowding": -0.1}, "0 <= crowding < 1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(change: dict[str, float], words: str) -> None:
    with pytest.raises(TuningError, match=words):
        replace(CLUSTER, **change)
