"""What a synchroniser tells the timeline of one iteration: copies, and each unit's way through queue and transport.

Where no timeline is written, there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sirtaki.comm.device import Device, Event
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.timeline import Timeline
from sirtaki.comm.transports.contract import Work

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
    transport: TransportKind
    work: Work
    issued: Event


@dataclass(slots=True)
class IterationTrace:
    """Collects one iteration's events and writes them at its end."""

    timeline: Timeline
    device: Device
    copies: list[tuple[Event, Event, int]] = field(default_factory=list)
    units: list[IssuedUnit] = field(default_factory=list)

    def copied(self, begin: Event, count: int) -> None:
        """`count` gradients have been copied into the flat buffers."""
        self.copies.append((begin, self.device.record_event(), count))

    def write(self, events: IterationEvents, *, profiling: bool) -> None:
        """All gradients are reduced, on the device, too."""
        end_s, timeline = time.perf_counter(), self.timeline

        def at(moment: Event) -> float:
            # Transports of the host tell the time themselves.
            return moment if isinstance(moment, float) else end_s - self.device.elapsed_s(moment, events.reduced)

        first_ready_s, ended_s = at(events.first_ready), at(events.backward_ended)
        kind = "order profiling" if profiling else "scheduled"
        timeline.span("iterations", f"iteration {events.iteration}", first_ready_s, end_s, kind=kind)
        if ended_s > first_ready_s:
            timeline.span("iterations", "backward", first_ready_s, ended_s)
        timeline.span("iterations", "wait", max(first_ready_s, ended_s), end_s)
        for begin, copied, count in self.copies:
            timeline.span("copies", f"copy {count} gradients", at(begin), at(copied))
        self._write_units(at, end_s)

    def _write_units(self, at: Callable[[Event], float], end_s: float) -> None:
        free_s: dict[int, float] = {}
        for unit in self.units:
            issued_s = at(unit.issued)
            begun, done = unit.work.times()
            # A transport that does not tell when it began takes a stream's units one after the other.
            began_s = max(issued_s, free_s.get(unit.stream, 0.0), 0.0 if begun is None else at(begun))
            done_s = end_s if done is None else at(done)
            free_s[unit.stream] = done_s
            name, numbers = (
                unit.layout.describe(unit.start, unit.stop),
                {"bytes": (unit.stop - unit.start) * unit.layout.itemsize_bytes},
            )
            track = f"{unit.transport.value} stream {unit.stream}"
            if began_s > issued_s:
                self.timeline.overlapping(f"{track} queue", issued_s, began_s, unit=name, **numbers)
            self.timeline.span(track, name, began_s, max(began_s, done_s), **numbers)
