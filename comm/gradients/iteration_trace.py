"""What a synchroniser tells the timeline and the recorder of one iteration: copies, and each unit's way.

Where neither wants to know, there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sirtaki.comm import recorder, timeline
from sirtaki.comm.device import Device, Event
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import Route
from sirtaki.comm.recorder import CopySpan, ReadyMoment, Recorder, TracedIteration, TracedUnit
from sirtaki.comm.timeline import Timeline
from sirtaki.comm.transports.contract import Work

from .buffers import GradientBuffers
from .in_flight import IterationEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedUnit:
    """One unit as it was issued.

    Attributes:
        layout: of the flat buffer that elements `[start, stop)` are of.
        work: tells when the transport began and ended, where it knows.
        issued: when it was submitted.
    """

    layout: GradientLayout
    start: int
    stop: int
    stream: int
    route: Route
    work: Work
    issued: Event


@dataclass(slots=True)
class IterationTrace:
    """Collects one iteration's events and tells of them at its end.

    Attributes:
        timeline, recorder: who is told.
        source: the synchroniser's mark.
        buffers: where the gradients lie; a recorder wants to know.
        ready: of each gradient that has come, the parameter's index, and when; only for a recorder.
    """

    timeline: Timeline | None
    device: Device
    recorder: Recorder | None = None
    source: object = None
    buffers: GradientBuffers | None = None
    copies: list[tuple[Event, Event, int]] = field(default_factory=list)
    units: list[IssuedUnit] = field(default_factory=list)
    ready: list[tuple[int, Event]] = field(default_factory=list)

    @classmethod
    def wanted(cls, device: Device, source: object, buffers: GradientBuffers) -> IterationTrace | None:
        """For an iteration that begins now; None = nobody wants to know."""
        shown, recorded = timeline.active(), recorder.active()
        if shown is None and recorded is None:
            return None
        return cls(shown, device, recorded, source, buffers)

    def copied(self, begin: Event, count: int) -> None:
        """`count` gradients have been copied into the flat buffers."""
        self.copies.append((begin, self.device.record_event(), count))

    def came(self, index: int) -> None:
        """The gradient of a parameter is complete."""
        self.ready.append((index, self.device.record_event()))

    def write(self, events: IterationEvents, *, profiling: bool) -> None:
        """All gradients are reduced, on the device, too."""
        traced = self._traced(events, time.perf_counter(), profiling=profiling)
        if self.timeline is not None:
            show(traced, self.timeline)
        if self.recorder is not None and self.recorder is recorder.active():
            self.recorder.iteration(traced)

    def _traced(self, events: IterationEvents, end_s: float, *, profiling: bool) -> TracedIteration:
        def at(moment: Event) -> float:
            # Transports of the host tell the time themselves.
            return moment if isinstance(moment, float) else end_s - self.device.elapsed_s(moment, events.reduced)

        places = () if self.buffers is None else self.buffers.layout_places
        layouts = () if self.buffers is None else self.buffers.layouts
        return TracedIteration(
            source=self.source,
            number=events.iteration,
            profiling=profiling,
            first_ready_s=at(events.first_ready),
            backward_ended_s=at(events.backward_ended),
            end_s=end_s,
            ready=tuple(ReadyMoment(*places[index], at(when)) for index, when in self.ready),
            copies=tuple(CopySpan(at(begin), at(copied), count) for begin, copied, count in self.copies),
            units=tuple(_traced_unit(unit, layouts, at, end_s) for unit in self.units),
        )


def _traced_unit(
    unit: IssuedUnit, layouts: Sequence[GradientLayout], at: Callable[[Event], float], end_s: float
) -> TracedUnit:
    begun, done = unit.work.times()
    return TracedUnit(
        layout_number=next((number for number, layout in enumerate(layouts) if layout is unit.layout), 0),
        layout=unit.layout,
        start=unit.start,
        stop=unit.stop,
        stream=unit.stream,
        route=unit.route,
        issued_s=at(unit.issued),
        began_s=None if begun is None else at(begun),
        done_s=end_s if done is None else at(done),
    )


def show(traced: TracedIteration, timeline: Timeline) -> None:
    """Writes an iteration to the timeline."""
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
        # A transport that does not tell when it began takes a stream's units one after the other.
        began_s = max(unit.issued_s, free_s.get(unit.stream, 0.0), unit.began_s or 0.0)
        free_s[unit.stream] = unit.done_s
        name = unit.layout.describe(unit.start, unit.stop)
        numbers = {"bytes": (unit.stop - unit.start) * unit.layout.itemsize_bytes}
        track = f"{unit.route[0].value} stream {unit.stream}"
        if began_s > unit.issued_s:
            timeline.overlapping(f"{track} queue", unit.issued_s, began_s, unit=name, **numbers)
        timeline.span(track, name, began_s, max(began_s, unit.done_s), **numbers)
