"""Measurements of one iteration: its times, its unfinished work on the GPU, and events for timeline and recorder."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from .. import recorder, timeline
from ..device import Device, Event
from ..recorder import CopySpan, ReadyMoment, Recorder, TracedIteration, TracedUnit
from ..timeline import Timeline
from ..transports.contract import Work
from .buffers import FlatBuffers
from .schedule import ScheduledUnit


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """Measurements of one iteration on this rank.

    Attributes:
        span_s: communication time: from the first ready gradient to the last reduced gradient. On a GPU, this is the
            time of the previous iteration, unless the order of ready gradients was profiled in this one.
        backward_s: time from the first ready gradient to the end of the backward pass, of the iteration of `span_s`.
        ready_s: time from the first ready gradient until each gradient was ready, by parameter index, `(n_params,)`.
            Empty unless the order of ready gradients was profiled in this iteration.
        profiled: True if the profile of the order has ended with this iteration. Then flat buffers may have new
            layouts, whose units (buckets) follow the default plan.
    """

    span_s: float
    backward_s: float
    ready_s: tuple[float, ...] = ()
    profiled: bool = False


@dataclass(frozen=True, slots=True)
class IterationEvents:
    """Device events of one iteration: first gradient ready, backward pass ended, all gradients reduced."""

    iteration: int
    first_ready: Event
    backward_ended: Event
    reduced: Event


@dataclass(slots=True)
class InFlight:
    """The last two iterations, which a GPU may still execute when the host has finished them.

    Attributes:
        device: device of the gradients.
        units: units (buckets) of the last iteration, with their all-reduces.
    """

    device: Device
    units: list[tuple[ScheduledUnit, Work]] = field(default_factory=list)
    _iterations: list[IterationEvents] = field(default_factory=list)
    _stalled: tuple[int, float] | None = None

    def add(self, events: IterationEvents) -> IterationEvents:
        """Add an iteration, and keep the last two. Return the older of the kept iterations."""
        self._iterations = [*self._iterations[-1:], events]
        return self._iterations[0]

    @property
    def busy(self) -> bool:
        """Return whether the device still executes one of the last two iterations. Thread-safe."""
        if not (iterations := self._iterations):  # always empty for gradients on the CPU
            return False
        self.device.enter_thread()
        return not all(self.device.is_reached(it.reduced) for it in iterations)

    def stalled(self) -> tuple[int, float] | None:
        """Return the iteration of which the GPU has finished the backward pass, but not the reduction. Thread-safe.

        Returns:
            Number of the iteration, and `time.monotonic()` of the first call that returned it; None if there is no such
            iteration.
        """
        self.device.enter_thread()
        late = [events for events in self._iterations if not self.device.is_reached(events.reduced)]
        if not late or not self.device.is_reached(late[0].backward_ended):
            self._stalled = None
        elif self._stalled is None or self._stalled[0] != late[0].iteration:
            self._stalled = late[0].iteration, time.monotonic()
        return self._stalled

    def unreduced_unit(self) -> str:
        """Describe the first unit (bucket) of the last iteration that is not reduced; empty if all are. Thread-safe."""
        self.device.enter_thread()
        for number, (unit, work) in enumerate(self.units):
            if not work.is_done():
                what = unit.group.layout.describe(unit.start, unit.stop)
                return f"unit {number + 1} of {len(self.units)} ({what}) on stream {unit.stream}"
        return ""


@dataclass(slots=True)
class IterationTrace:
    """Records events of one iteration for the timeline and the recorder that are active when the iteration begins.

    Attributes:
        device: device of the gradients.
        source: the `GradientPipeline`.
        shown: active timeline; None = none.
        recorded: active recorder; None = none.
        buffers: flat buffers of the iteration.
        copies: begin, end and number of gradients of each copy into the flat buffers.
        units: launched units (buckets), their all-reduces, and the times of their launch.
        ready: parameter index and time of each ready gradient. Empty without a recorder.
    """

    device: Device
    source: object
    buffers: FlatBuffers
    shown: Timeline | None = field(default_factory=lambda: timeline.current)
    recorded: Recorder | None = field(default_factory=lambda: recorder.current)
    copies: list[tuple[Event, Event, int]] = field(default_factory=list)
    units: list[tuple[ScheduledUnit, Work, Event]] = field(default_factory=list)
    ready: list[tuple[int, Event]] = field(default_factory=list)

    def write(self, events: IterationEvents, *, profiling: bool) -> None:
        """Write the iteration's events to timeline and recorder. Call after the device has reduced all gradients."""
        end_s = time.perf_counter()

        def at(moment: Event) -> float:
            # On the CPU, a moment is a time in seconds. On a GPU, it is a CUDA event.
            return moment if isinstance(moment, float) else end_s - self.device.elapsed_s(moment, events.reduced)

        def traced_unit(unit: ScheduledUnit, work: Work, issued: Event) -> TracedUnit:
            begun, done = work.times()
            return TracedUnit(
                layout_number=self.buffers.groups.index(unit.group),
                layout=unit.group.layout,
                start=unit.start,
                stop=unit.stop,
                stream=unit.stream,
                route=unit.route,
                issued_s=at(issued),
                began_s=None if begun is None else at(begun),
                done_s=end_s if done is None else at(done),
            )

        places = self.buffers.layout_places
        traced = TracedIteration(
            source=self.source,
            number=events.iteration,
            profiling=profiling,
            first_ready_s=at(events.first_ready),
            backward_ended_s=at(events.backward_ended),
            end_s=end_s,
            ready=tuple(ReadyMoment(*places[index], at(when)) for index, when in self.ready),
            copies=tuple(CopySpan(at(begin), at(copied), count) for begin, copied, count in self.copies),
            units=tuple(traced_unit(*issued) for issued in self.units),
        )
        if self.shown is not None:
            show(traced, self.shown)
        if self.recorded is not None and self.recorded is recorder.current:
            self.recorded.iteration(traced)


def show(traced: TracedIteration, timeline: Timeline) -> None:
    """Write the backward pass, the copies and the units (buckets) of an iteration to the timeline."""
    first_ready_s, ended_s, end_s = traced.first_ready_s, traced.backward_ended_s, traced.end_s
    kind = "order profiling" if traced.profiling else "scheduled"
    timeline.span("iterations", f"iteration {traced.number}", first_ready_s, end_s, kind=kind)
    if ended_s > first_ready_s:
        timeline.span("iterations", "backward", first_ready_s, ended_s)
    timeline.span("iterations", "wait", max(first_ready_s, ended_s), end_s)
    for copy in traced.copies:
        timeline.span("copies", f"copy {copy.n_gradients} gradients", copy.begin_s, copy.end_s)
    free_s: dict[int, float] = {}
    for unit in traced.units:
        # If a transport does not report when it began a bucket, assume that it began when the stream had sent the
        # previous bucket, because a stream sends its buckets one after another.
        began_s = max(unit.issued_s, free_s.get(unit.stream, 0.0), unit.began_s or 0.0)
        free_s[unit.stream] = unit.done_s
        name = unit.layout.describe(unit.start, unit.stop)
        numbers = {"bytes": (unit.stop - unit.start) * unit.layout.itemsize_bytes}
        track = f"{unit.route[0].value} stream {unit.stream}"
        if began_s > unit.issued_s:
            timeline.overlapping(f"{track} queue", unit.issued_s, began_s, unit=name, **numbers)
        timeline.span(track, name, began_s, max(began_s, unit.done_s), **numbers)
