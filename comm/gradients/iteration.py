"""What belongs to an iteration of a synchroniser beside its course: negotiation of what is ready, traces, reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sirtaki.errors import CommError
from sirtaki.machine import free_in_forked_children

from .. import recorder, timeline
from ..control.communicator import Backend, Communicator, Op, Test
from ..control.failure import FailureBoard, caused
from ..control.waiting import wait_for, wait_for_work
from ..device import Device, Event
from ..recorder import CopySpan, ReadyMoment, Recorder, TracedIteration, TracedUnit
from ..timeline import Timeline
from ..transports.contract import Work
from .buffers import GradientBuffers
from .schedule import ScheduledUnit

Bits = npt.NDArray[np.bool_]

Interrupted = Callable[[], bool]
"""Whether to stop waiting; asked now and then."""


_given_up: list[Test] = []
"""Rounds that other ranks never joined; MPI still knows their arrays, which these keep."""


def agree(
    bits: Bits, *, comm: Communicator, failures: FailureBoard, closing: Callable[[], bool] = lambda: False
) -> Bits | None:
    """Collective: one round; the bits that are set on every rank, `(n,)`. None if it was given up, being `closing`."""
    packed = np.packbits(bits)
    test = comm.all_reduce(packed, Op.AND)
    wait_for(lambda: test() or closing(), failures=failures)
    if not test():
        if comm.backend is Backend.MPI:
            _given_up.append(test)
        return None
    return np.unpackbits(packed, count=bits.size).view(np.bool_)


class ReadinessNegotiation:
    """Finds out, during one backward pass, which gradients are ready on all ranks; a thread of its own does it.

    Used while the order of the gradients is not known yet. A rank joins a round once `granularity_bytes` of
    gradients have become ready since its last one, or when all are or its backward pass has ended, and goes on until
    every gradient is agreed. All ranks see the same results, so all stop after the same round.
    """

    def __init__(self, comm: Communicator, failures: FailureBoard) -> None:
        """Keeps `comm` for its thread, which starts with the first backward pass."""
        self._comm, self._failures = comm, failures
        self._wake = free_in_forked_children(threading.Condition())
        self._thread: threading.Thread | None = None
        self._bits: Bits = np.zeros(0, dtype=np.bool_)
        self._sizes_bytes: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._granularity_bytes = 0
        self._fresh_bytes = 0
        self._ended = False
        self._closing = self._left_open = False
        self._on_agreed: Callable[[list[int]], None] | None = None
        self._done = threading.Event()

    def begin(
        self, sizes_bytes: npt.NDArray[np.int64], *, granularity_bytes: int, on_agreed: Callable[[list[int]], None]
    ) -> None:
        """Starts the negotiation of one backward pass.

        Args:
            sizes_bytes: of each gradient, `(n_gradients,)`.
            granularity_bytes: ready bytes that are worth a round.
            on_agreed: called in the thread with the indices, ascending, that a round has brought.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sirtaki-negotiation", daemon=True)
            self._thread.start()
        self._done.clear()
        with self._wake:
            self._sizes_bytes, self._granularity_bytes = sizes_bytes, granularity_bytes
            self._bits = np.zeros(sizes_bytes.size, dtype=np.bool_)
            self._fresh_bytes, self._ended, self._on_agreed = 0, False, on_agreed

    def set_ready(self, index: int) -> None:
        """This rank's gradient `index` is ready, in its place in the flat buffer."""
        with self._wake:
            self._bits[index] = True
            self._fresh_bytes += int(self._sizes_bytes[index])
            # With the last one the pass has ended here: the main thread may wait for other gradients first.
            self._ended = bool(self._bits.all())
            if self._worth_a_round():
                self._wake.notify()

    def end(self) -> None:
        """The backward pass has ended: all gradients count as ready."""
        with self._wake:
            self._bits[:] = True
            self._ended = True
            self._wake.notify()

    def wait(self, interrupted: Callable[[], bool] | None = None) -> bool:
        """Blocks until every gradient is agreed; False if `interrupted`, which is asked now and then, says so.

        Raises:
            CommError: the job failed meanwhile.
        """
        if not wait_for_work([self._done], failures=self._failures, interrupted=interrupted):
            return False
        self._failures.check()
        return True

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(
                        lambda: self._closing or (self._on_agreed is not None and self._worth_a_round())
                    )
                if self._closing:
                    return
                self._negotiate()
                self._done.set()
        except CommError as err:
            self._failures.report(err)
        except Exception as err:  # whatever it is, those who wait must hear of it
            self._failures.report(caused(CommError(f"the negotiation of gradients failed: {err!r}"), err))
        finally:
            self._done.set()

    def _worth_a_round(self) -> bool:
        return self._ended or self._fresh_bytes >= self._granularity_bytes

    def _negotiate(self) -> None:
        """Rounds until all gradients of this backward pass are agreed."""
        on_agreed = self._on_agreed
        assert on_agreed is not None
        agreed = np.zeros(self._bits.size, dtype=np.bool_)
        while not agreed.all():
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._worth_a_round())
                if self._closing:
                    return
                bits = self._bits.copy()
                self._fresh_bytes = 0
            begin_s = time.perf_counter()
            result = agree(bits, comm=self._comm, failures=self._failures, closing=lambda: self._closing)
            if result is None:
                self._left_open = True
                return
            if (trace := timeline.current) is not None:
                brought = int((result & ~agreed).sum())
                trace.span("negotiation", "round", begin_s, time.perf_counter(), marked=int(bits.sum()), agreed=brought)
            if fresh := np.flatnonzero(result & ~agreed).tolist():
                on_agreed(fresh)
            agreed |= result
        self._on_agreed = None

    def close(self) -> bool:
        """Ends the thread; False if the communicator is in use for ever, by a round that other ranks never joined."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is None:
            return True
        self._thread.join(timeout=2.0)
        return not (self._thread.is_alive() or self._left_open)


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """What one iteration measured on this rank.

    Attributes:
        span_s: from the first ready gradient to the last reduced one; on a device with streams, of the iteration
            before, except in order-profiling iterations.
        backward_s: from the first ready gradient to the end of the backward pass, of the same iteration.
        ready_s: when each gradient became ready after the first, by parameter index, `(n_gradients,)`; only
            order-profiling iterations record it.
        profiled: the order was profiled in this iteration: layouts may be new, and plans the default again.
    """

    span_s: float
    backward_s: float
    ready_s: tuple[float, ...] = ()
    profiled: bool = False


@dataclass(frozen=True, slots=True)
class IterationEvents:
    """When the parts of one iteration end on the device."""

    iteration: int
    first_ready: Event
    backward_ended: Event
    reduced: Event


@dataclass(slots=True)
class InFlight:
    """What was started and may not be done.

    Attributes:
        units: of the last iteration, with their works.
    """

    device: Device
    units: list[tuple[ScheduledUnit, Work]] = field(default_factory=list)
    _iterations: list[IterationEvents] = field(default_factory=list)
    _stalled: tuple[int, float] | None = None

    def add(self, events: IterationEvents) -> IterationEvents:
        """An iteration more; the last but one is forgotten. Returns the one before it; itself, if there is none."""
        self._iterations = [*self._iterations[-1:], events]
        return self._iterations[0]

    @property
    def busy(self) -> bool:
        """Return whether the device is still working on these iterations. Thread-safe."""
        self.device.enter_thread()
        iterations = self._iterations  # none on a device without streams
        return bool(iterations) and not all(self.device.is_reached(it.reduced) for it in iterations)

    def stalled(self) -> tuple[int, float] | None:
        """The iteration of which the backward pass is over on the device but not the reduction, and since when.

        The time is `time.monotonic()` of the first call that found it so. Thread-safe.
        """
        self.device.enter_thread()
        late = [events for events in self._iterations if not self.device.is_reached(events.reduced)]
        if not late or not self.device.is_reached(late[0].backward_ended):
            self._stalled = None
        elif self._stalled is None or self._stalled[0] != late[0].iteration:
            self._stalled = late[0].iteration, time.monotonic()
        return self._stalled

    def unreduced_unit(self) -> str:
        """Describe the first unit of the last iteration that is not reduced; empty if there is none. Thread-safe."""
        self.device.enter_thread()
        for number, (unit, work) in enumerate(self.units):
            if not work.is_done():
                what = unit.group.layout.describe(unit.start, unit.stop)
                return f"unit {number + 1} of {len(self.units)} ({what}) on stream {unit.stream}"
        return ""


@dataclass(slots=True)
class IterationTrace:
    """Collects one iteration's events for the timeline and for a recorder, as far as there are any when it begins.

    Attributes:
        source: the synchroniser's mark.
        shown, recorded: who is told.
        buffers: where the gradients lie.
        copies: gradients that were copied into the flat buffers: begin, end, and how many.
        units: that were issued, and when; their works tell the rest.
        ready: of each gradient that has come, the parameter's index, and when; only for a recorder.
    """

    device: Device
    source: object
    buffers: GradientBuffers
    shown: Timeline | None = field(default_factory=lambda: timeline.current)
    recorded: Recorder | None = field(default_factory=lambda: recorder.current)
    copies: list[tuple[Event, Event, int]] = field(default_factory=list)
    units: list[tuple[ScheduledUnit, Work, Event]] = field(default_factory=list)
    ready: list[tuple[int, Event]] = field(default_factory=list)

    def write(self, events: IterationEvents, *, profiling: bool) -> None:
        """All gradients are reduced, on the device, too: tells of the iteration."""
        end_s = time.perf_counter()

        def at(moment: Event) -> float:
            # Transports of the host tell the time themselves.
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
