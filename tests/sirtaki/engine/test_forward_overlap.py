"""The search for deferred updates: whether iterations may end in the next forward pass, and with which setting."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from fakes.gradients import make_buffers, parameters

from sirtaki.autotune.knobs import KIB, MIB, Cut, Knobs, KnobSpace
from sirtaki.autotune.meta.session import Purpose, TuningSession
from sirtaki.comm.gradients.flags import FLAG_COUNT
from sirtaki.comm.gradients.schedule import IterationPace, ScheduledUnit
from sirtaki.comm.gradients.trace import IterationReport
from sirtaki.comm.plan import Algorithm, CommPlan, GradientLayout, TransportKind
from sirtaki.engine.tuning import overlap as forward_overlap
from sirtaki.engine.tuning.controller import TuningController
from sirtaki.engine.tuning.overlap import (
    MOST_TRIED,
    SKIPPED,
    TIMED,
    UNITS,
    ForwardOverlap,
    OverlapArm,
    OverlapChoice,
    session_of,
    tapered,
)
from sirtaki.engine.tuning.plans import plans_for
from sirtaki.engine.tuning.report import describe_overlap
from sirtaki.measures import LinkModel

REPORT = IterationReport(span_s=4.0, backward_s=1.0)


PROFILED = IterationReport(span_s=9.0, backward_s=2.0, ready_s=(2.0, 1.0, 0.0), profiled=True)


KNOBS = Knobs(unit_bytes=512 * KIB, streams=2, transport=TransportKind.GLOO)


SPACE = KnobSpace(routes=((TransportKind.GLOO, Algorithm.FLAT),), streams=(1, 2))


class Control:
    """Control plane of two ranks. The peer's values are added."""

    rank = 0

    def __init__(self, others: list[float]) -> None:
        self.others, self.said = others, list[list[float]]()

    def broadcast(self, value: Any) -> Any:
        return value

    def minimum(self, values: Any) -> Any:
        return np.array(values)

    def total(self, values: Any) -> Any:
        self.said.append([float(value) for value in values])
        return np.array(values) + np.array(self.others if len(values) == len(self.others) else [0.0] * len(values))


class Sync:
    n_params, on_streams = 3, False
    layouts = (GradientLayout(sizes=(1 << 20,)),)

    def __init__(self) -> None:
        self.order: list[IterationPace] = []

    def reorder_units(self, pace: IterationPace) -> None:
        self.order.append(pace)

    def reordered_units(self, plans: list[CommPlan], pace: IterationPace) -> tuple[list[ScheduledUnit], list[float]]:
        (group,), (plan,) = make_buffers(parameters(((1 << 20) - FLAG_COUNT,)), None).groups, plans
        route = (plan.transport, plan.units[0].algorithm)
        units = [ScheduledUnit(group, unit.start, unit.stop, unit.stream, route) for unit in plan.units]
        return units, [1.0] * len(units)


class Pipeline:
    """A gradient pipeline without gradients.

    Attributes:
        applied: knobs of all settings that ran, in order.
    """

    def __init__(self, control: Control, *, link: LinkModel | None = None, forward_s: float = 0.0) -> None:
        self.controller = TuningController(control)  # type: ignore[arg-type]
        self.synchroniser, self.knobs, self.space = Sync(), KNOBS, SPACE
        self.link_and_forward_s = link, forward_s
        self.applied = list[Knobs]()

    def apply(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.applied.append(knobs)

    def keep_overlap(self) -> None:
        pass


def overlap_of(pipeline: Pipeline, control: Control, *, tries: bool = False) -> Any:
    return ForwardOverlap(control, pipeline, tries=tries)  # type: ignore[arg-type]


def test_two_iterations_prepare_it_and_then_all_ranks_have_one_order() -> None:
    control = Control([0.0, 1.0, 2.0, 3.0, 2.5, 0.0, 3.0, 12.0, 1.0])
    pipeline = Pipeline(control)
    overlap, states = overlap_of(pipeline, control), []
    for _ in range(3):
        states.append((overlap.learning, overlap.ready))
        overlap.reads = [2, 0]
        overlap.iteration_ended(REPORT, pipeline.synchroniser, profiled=PROFILED, joined=False)
    assert states == [(False, False), (True, False), (False, True)]
    # What is never read is last; gradients come in half the time that they took while they were profiled.
    assert control.said == [[1.0, 3.0, 0.0, 1.0, 0.5, 0.0, 1.0, 4.0, 1.0]]
    (pace,) = pipeline.synchroniser.order
    assert (pace.needed, pace.ready_s, pace.backward_s) == ([0.5, 2.0, 1.0], [2.0, 1.5, 0.0], 2.0)
    assert pace.s_per_byte == pytest.approx(8.0 / (1 << 22))
    overlap.begin()
    assert not overlap.ready


def test_with_an_unknown_order_the_units_stay_unchanged() -> None:
    control = Control([0.0] * 9)
    pipeline = Pipeline(control)
    overlap = overlap_of(pipeline, control)
    overlap.reads = [0, 1, 2]
    for _ in range(2):
        overlap.iteration_ended(REPORT, pipeline.synchroniser, profiled=PROFILED, joined=True)
    assert overlap.ready
    assert pipeline.synchroniser.order == []


class Played:
    """A job on a clock of its own; putting off halves its iterations."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, put_off_s: Sequence[float] = (0.5,), link: LinkModel | None = None
    ) -> None:
        self.now_s, control = 0.0, Control([])
        monkeypatch.setattr(forward_overlap.time, "perf_counter", lambda: self.now_s)
        self.pipeline = Pipeline(control, link=link)
        self.overlap = overlap_of(self.pipeline, control, tries=True)
        self.overlap.reads = [0, 1, 2]
        self.put_off, self.put_off_s = list[bool](), cycle(put_off_s)

    def iterate(self, count: int) -> None:
        for _ in range(count):
            self.put_off.append(self.overlap.ready)
            self.now_s += next(self.put_off_s) if self.overlap.ready else 1.0
            searching = self.pipeline.controller.searching
            self.overlap.iteration_ended(REPORT, self.pipeline.synchroniser, profiled=PROFILED, joined=False)
            if searching:
                self.pipeline.controller.iteration_ended()

    def search(self) -> None:
        """To the end of the search."""
        while not self.overlap.trying:
            self.iterate(1)
        while self.overlap.trying:
            assert len(self.put_off) < 1000
            self.iterate(1)


MEASUREMENT = SKIPPED + TIMED + 1


LINK = LinkModel(alpha_s=0.0, throughput=(1.0,))


def test_it_is_tried_after_the_tuners_choice_and_kept_where_iterations_are_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Played(monkeypatch)
    before = 2 + 1 + MEASUREMENT  # preparing, a change, and a measurement
    played.iterate(before)
    assert played.put_off == [False] * before
    assert played.pipeline.synchroniser.order  # of the next trial
    played.iterate(1 + MEASUREMENT)
    assert played.put_off[before:] == [True] * MEASUREMENT + [False]  # in the last one ranks agree
    played.search()
    assert played.overlap.ready
    played.iterate(3)
    assert played.put_off[-3:] == [True] * 3


def test_it_is_not_used_where_iterations_are_as_fast_without(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, put_off_s=(1.0,))
    played.search()
    assert not played.overlap.ready
    assert played.pipeline.knobs == KNOBS


def test_the_best_replayed_order_is_tried_after_the_tuners_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def replayed_s(units: list[ScheduledUnit], come_s: list[float], pace: Any, *, forward_s: float, link: Any) -> float:
        assert (len(units), forward_s, link) == (len(come_s), 0.0, LINK)
        return 10.0 + abs(len(units) - 12) / (1 + len({unit.stream for unit in units}))

    monkeypatch.setattr(forward_overlap, "deferred_iteration_s", replayed_s)
    played = Played(monkeypatch, link=LINK)
    played.search()
    tried = list(dict.fromkeys(played.pipeline.applied))[:3]
    counts = [len(plans_for(knobs, Sync.layouts)[0].units) for knobs in tried]
    assert tried[0] == KNOBS
    assert [knobs.streams for knobs in tried] == [2, 1, 2]
    assert counts[1:] == [13, 13]


def test_a_changed_order_ends_a_search_and_keeps_a_found_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.iterate(2 + 3 * MEASUREMENT)
    assert played.overlap.trying
    played.overlap.begin()
    assert not played.overlap.trying
    played.search()
    played.overlap.begin()
    assert not played.overlap.ready
    played.iterate(2)
    assert played.overlap.ready
    assert not played.overlap.trying
    played.overlap.forget()
    played.iterate(2)
    assert played.overlap.trying


TRIED_SPACE = KnobSpace(
    routes=((TransportKind.GLOO, Algorithm.FLAT),), unit_bytes=(64 * KIB, 8 * MIB), streams=(1, 2, 4)
)


LAYOUT = GradientLayout(sizes=(1000, 2 * MIB - 1000), itemsize_bytes=4, dtype="float32", device="cpu")


TUNED = Knobs(unit_bytes=2 * MIB, streams=4, transport=TransportKind.GLOO)


def made(tuned: Knobs = TUNED, space: KnobSpace = TRIED_SPACE) -> OverlapArm:
    return OverlapArm(tuned, space, [LAYOUT])


def play(
    seconds: Callable[[OverlapChoice], float], arm: OverlapArm | None = None, tuned: Knobs = TUNED
) -> tuple[list[OverlapChoice], TuningSession[OverlapChoice]]:
    """Run a search. Return the settings that ran, and the search."""
    session = session_of(made() if arm is None else arm, OverlapChoice(tuned, is_deferred=False))
    run = []
    while not session.done:
        now = session.assignment
        run.append(now.knobs)
        session.record([seconds(now.knobs) for _ in range(now.measured_iterations)])
    return run, session


@pytest.mark.parametrize(("unit_bytes", "streams"), [(128 * KIB, 1), (512 * KIB, 4), (4 * MIB, 2)])
def test_a_better_setting_is_climbed_to(unit_bytes: int, streams: int) -> None:
    def seconds(choice: OverlapChoice) -> float:
        if not choice.is_deferred:
            return 1.0
        off = max(choice.knobs.unit_bytes / unit_bytes, unit_bytes / choice.knobs.unit_bytes)
        return 0.6 + 0.05 * off + 0.05 * abs(choice.knobs.streams - streams)

    run, session = play(seconds)
    kept = session.result.knobs
    assert kept.is_deferred
    assert (kept.knobs.unit_bytes, kept.knobs.streams) == (unit_bytes, streams)
    assert len({choice for choice in run if choice.is_deferred}) <= MOST_TRIED


def test_less_than_a_percent_is_not_worth_it() -> None:
    _, session = play(lambda choice: 0.995 if choice.is_deferred else 1.0)
    assert session.result.knobs == OverlapChoice(TUNED, is_deferred=False)


@pytest.mark.parametrize("seconds", [0.01, 100.0])
def test_one_surprising_measurement_does_not_keep_it(seconds: float) -> None:
    for place in range(0, 40, 3):
        session, compared = session_of(made(), OverlapChoice(TUNED, is_deferred=False)), 0
        while not session.done:
            now = session.assignment
            compared += now.purpose is Purpose.FINALS
            session.record([seconds if compared == place + 1 else 1.0] * now.measured_iterations)
        assert not session.result.knobs.is_deferred


@pytest.mark.lengthy
def test_where_it_gains_nothing_noise_hardly_ever_keeps_it() -> None:
    rng = np.random.default_rng(0)
    kept = 0
    for _ in range(100):
        _, session = play(lambda choice: math.exp(0.05 * rng.standard_normal()))
        kept += session.result.knobs.is_deferred
    assert kept <= 4


def test_knobs_fixed_by_the_user_are_not_tried_otherwise() -> None:
    fixed = KnobSpace(routes=TRIED_SPACE.routes, unit_bytes=(2 * MIB, 2 * MIB), streams=(4,))
    run, _ = play(lambda choice: 1.0, made(space=fixed))
    assert {choice.knobs for choice in run} == {TUNED}


def test_planned_units_are_tried_as_they_are_and_tapered_ones_beside_them() -> None:
    planned = Knobs(unit_bytes=2 * MIB, streams=2, transport=TransportKind.GLOO, cuts=(Cut(stop=2 * MIB, stream=0),))
    run, _ = play(lambda choice: 1.0, made(planned), planned)
    assert run[1].knobs == planned
    others = {choice.knobs for choice in run} - {planned}
    assert others
    assert others == {tapered(knobs.but(cuts=None), LAYOUT) for knobs in others}


@pytest.mark.parametrize(
    ("unit_bytes", "numel"), [(4, 3000), (16, 3000), (64 * KIB, 2 * MIB), (100_001, 2 * MIB), (4 * MIB, 2 * MIB)]
)
def test_the_last_units_are_a_half_and_a_quarter_of_the_others(unit_bytes: int, numel: int) -> None:
    layout = replace(LAYOUT, sizes=(1000, numel - 1000))
    knobs = tapered(TUNED.but(unit_bytes=unit_bytes), layout)
    units = [unit.stop - unit.start for unit in knobs.to_plan(layout).units]
    assert sum(units) == numel
    if unit_bytes < 16:
        assert knobs.cuts is None
        return
    unit = unit_bytes // 4
    assert units[-2:] == [unit // 2, numel - sum(units[:-1])]
    assert units[-1] == pytest.approx(unit / 4, abs=1)
    assert max(units[:-2]) - min(units[:-2]) <= 1
    assert units[0] == pytest.approx(unit, rel=0.5)


def test_the_fastest_predictions_are_tried_first_and_then_neighbours_of_the_best() -> None:
    arm, units = made(), dict[Knobs, int]()

    def expected_s(knobs: Knobs) -> float:
        units[knobs] = len(knobs.to_plan(LAYOUT).units)
        return 10.0 + 0.5 * abs(units[knobs] - 13) + (2.0 if knobs.streams == 1 else 0.0)

    arm.expect(expected_s)
    assert max(units.values()) > 20

    def seconds(choice: OverlapChoice) -> float:
        return 0.5 if choice.is_deferred and choice.knobs.streams == 4 and units.get(choice.knobs) == 13 else 1.0

    run, session = play(seconds, arm)
    first, second, *rest = dict.fromkeys(choice.knobs for choice in run if choice.is_deferred)
    assert first == TUNED
    assert (second.streams, rest[0].streams) == (2, 4)  # one stream is far from the best
    assert {units[second], units[rest[0]]} == {13}
    assert session.result.knobs.knobs == rest[0]
    assert {knobs.unit_bytes / rest[0].unit_bytes for knobs in rest[1:]} >= {0.5, 2.0}


def test_where_nothing_can_be_expected_it_begins_with_smaller_units() -> None:
    run, _ = play(lambda choice: 1.0)
    tried = list(dict.fromkeys(choice.knobs for choice in run if choice.is_deferred))
    assert tried[1].unit_bytes == LAYOUT.total_bytes // UNITS


def test_the_log_reports_the_proved_gain_or_the_best_measurement() -> None:
    _, faster = play(lambda choice: 0.8 if choice.is_deferred else 1.0)
    assert "overlap_forward: iterations are 25.0 % faster" in describe_overlap(faster, TUNED)
    assert ": 800 ms instead of 1000 ms; 2 MiB units on 4 streams" in describe_overlap(faster, TUNED)
    _, slower = play(lambda choice: 1.2 if choice.is_deferred else 1.0)
    said = describe_overlap(slower, TUNED)
    assert said.startswith("overlap_forward: not used, because no setting ")
    assert said.endswith("(1000 ms an iteration without it, 1200 ms with it at best)")
