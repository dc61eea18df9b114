"""One iteration of a synchroniser: what has come, what has left, what has arrived, and what it measured."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sirtaki.errors import CommError

from .. import recorder, timeline
from ..control.communicator import Backend, Communicator, Op, Test
from ..control.failure import WAIT_SLICE_S, FailureBoard, poll_until
from ..device import Device, Event
from ..plan import CommPlan, GradientLayout, Route
from ..recorder import CopySpan, ReadyMoment, Recorder, TracedIteration, TracedUnit
from ..router import Router
from ..timeline import Timeline
from ..transports.contract import Work, scale_
from .buffers import Arrivals, GradientBuffers, Interference, LostEdits, Reduction, Said
from .schedule import OrderProfiling, PlannedBuffers, Schedule, ScheduledUnit

logger = logging.getLogger(__name__)

Bits = npt.NDArray[np.bool_]


_given_up: list[Test] = []
"""Rounds that other ranks never joined; MPI still knows their arrays, which these keep."""


def agree(
    bits: Bits, *, comm: Communicator, failures: FailureBoard, closing: Callable[[], bool] = lambda: False
) -> Bits | None:
    """Collective: one round; the bits that are set on every rank, `(n,)`. None if it was given up, being `closing`."""
    packed = np.packbits(bits)
    test = comm.all_reduce(packed, Op.AND)
    poll_until(lambda: test() or closing(), failures=failures)
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
        self._wake = threading.Condition()
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
        while not self._done.wait(WAIT_SLICE_S):
            self._failures.check()
            if interrupted and interrupted():
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
            self._failures.report(CommError(f"the negotiation of gradients failed: {err!r}"))
            raise
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
            if (trace := timeline.active()) is not None:
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
        """The device is not done with these iterations. Any thread may ask."""
        return not all(self.device.is_reached(events.reduced) for events in self._iterations)

    def stalled(self) -> tuple[int, float] | None:
        """The iteration of which the backward pass is over on the device but not the reduction, and since when.

        Any thread may ask. The time is `time.monotonic()`, and that of the first call that found it so.
        """
        late = [events for events in self._iterations if not self.device.is_reached(events.reduced)]
        if not late or not self.device.is_reached(late[0].backward_ended):
            self._stalled = None
        elif self._stalled is None or self._stalled[0] != late[0].iteration:
            self._stalled = late[0].iteration, time.monotonic()
        return self._stalled

    def unreduced_unit(self) -> str:
        """The first unit of the last iteration that is not reduced, in words; empty if there is none."""
        for number, (unit, work) in enumerate(self.units):
            if not work.is_done():
                what = unit.group.layout.describe(unit.start, unit.stop)
                return f"unit {number + 1} of {len(self.units)} ({what}) on stream {unit.stream}"
        return ""


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


Interrupted = Callable[[], bool]
"""Whether to stop waiting; asked now and then."""


class Iteration:
    """One iteration, whichever way its units are issued.

    Attributes:
        arrivals: the gradients that have come.
        works: units under way, in the order in which they left.
        first_ready: when the first gradient came; None until then.
        ready_events: when each gradient came, by parameter; only while the order is profiled.
        backward_ended: when all gradients had come, or were put in; None until then.
        reduced: when all of them were reduced; None until then.
        joined: this rank has no data any more and takes part with zeros.
        flushed: all units have left.
        complete: all gradients are reduced.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        *,
        router: Router,
        reduction: Reduction,
        trace: IterationTrace | None,
        ready_events: list[Event | None],
    ) -> None:
        self.arrivals, self.device = arrivals, router.device
        self._router, self._reduction, self.trace = router, reduction, trace
        self.works: list[Work] = []
        self.first_ready: Event | None = None
        self.ready_events = ready_events
        self.backward_ended: Event | None = None
        self.reduced: Event | None = None
        self.joined = self.flushed = self.complete = False

    def note_first(self) -> None:
        """The first gradient has come."""
        self.first_ready = self.device.record_event()

    def copy_in(self) -> None:
        """Copies the gradients that came since the last time into the flat buffers."""
        if self.trace is None:
            self.arrivals.copy_in()
            return
        begin = self.device.record_event()
        if count := self.arrivals.copy_in():
            self.trace.copied(begin, count)

    def issue(self, unit: ScheduledUnit) -> None:
        """Submits a unit whose gradients are in the flat buffer."""
        reduction, tensor = self._reduction, unit.group.buffer.tensor
        if reduction.prescale != 1.0:
            self.device.launch(scale_, tensor[unit.start : unit.stop], reduction.prescale)
        issued = None if self.trace is None else self.device.record_event()
        work = self._router.all_reduce(
            unit.group.buffer,
            unit.start,
            unit.stop,
            route=unit.route,
            stream=unit.stream,
            threads=unit.threads,
            op=reduction.op,
            scale=reduction.postscale,
        )
        self.works.append(work)
        if self.trace is not None:
            self.trace.units.append(
                IssuedUnit(
                    layout=unit.group.layout,
                    start=unit.start,
                    stop=unit.stop,
                    stream=unit.stream,
                    route=unit.route,
                    work=work,
                    issued=issued,
                )
            )

    def wait(self, interrupted: Interrupted | None, works: Sequence[Work] | None = None) -> bool:
        """Blocks until all that was issued, or some of it, is reduced; False if it was interrupted.

        Raises:
            CommError: a reduction failed, or the job did.
        """
        return self._router.wait_for(self.works if works is None else works, interrupted=interrupted)


class Issuing(Protocol):
    """One iteration's strategy."""

    @property
    def deferred(self) -> bool:
        """Nothing leaves before `flush`."""
        ...

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """A gradient of this rank is complete, and had this version when it came."""
        ...

    def flush(self) -> None:
        """All gradients have come or were put in: whatever has not left leaves."""
        ...

    def wait(self, interrupted: Interrupted | None) -> bool:
        """Blocks until all is reduced; False if it was interrupted, and may be called again then."""
        ...


class ScheduledIssuing:
    """Units leave as soon as their gradients are complete, and the units that they are to follow have left."""

    def __init__(self, iteration: Iteration, schedule: Schedule) -> None:
        self.deferred = False
        self._iteration, self._schedule = iteration, schedule
        self._arrived, self._units_of = iteration.arrivals, schedule.units_of
        self._missing = schedule.missing

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """Notes it, and issues the units that it completes. The hot path."""
        arrived = self._arrived
        if not arrived.indices:
            self._iteration.note_first()
        arrived.indices.append(index)  # what `add` does, without the call
        arrived.gradients.append(gradient)
        arrived.versions.append(version)
        missing = self._missing
        for number in self._units_of[index]:
            missing[number] -= 1
            if not missing[number]:
                self._issue(number)

    def _issue(self, number: int) -> None:
        with self._iteration.device.beside():
            self._iteration.copy_in()
            for unit in self._schedule.take(number):
                self._iteration.issue(unit)

    def flush(self) -> None:
        """Issues what has not left yet, in the order of the schedule."""
        with self._iteration.device.beside():
            self._iteration.copy_in()
            for unit in self._schedule.take_all():
                self._iteration.issue(unit)

    def wait(self, interrupted: Interrupted | None) -> bool:
        """Waits for all units; False if interrupted."""
        return self._iteration.wait(interrupted)


class StreamIssuing(ScheduledIssuing):
    """On a device with streams; hooks issue nothing while the order is profiled or several share the device."""

    def __init__(self, iteration: Iteration, schedule: Schedule, device: Device, *, profiling: bool) -> None:
        super().__init__(iteration, schedule)
        self._device, self._profiling = device, profiling
        self.deferred = profiling

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """Issues what it completes, or notes it for `flush` while hooks issue nothing."""
        self._device.notice_stream()
        if not self._arrived.indices:
            self.deferred = self._profiling or self._device.users > 1
        if not self.deferred:
            super().ready(index, gradient, version)
            return
        if not self._arrived.indices:
            self._iteration.note_first()
        if self._profiling:
            self._iteration.ready_events[index] = self._device.record_event()
        self._arrived.add(index, gradient, version)


class OneAtATime:
    """Another strategy, where autograd computes the gradients of several devices in a thread for each."""

    def __init__(self, strategy: Issuing) -> None:
        self._strategy, self._lock = strategy, threading.Lock()
        self.flush, self.wait = strategy.flush, strategy.wait

    @property
    def deferred(self) -> bool:
        """Whether the strategy issues nothing before `flush`."""
        return self._strategy.deferred

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """Passes it on, one thread at a time."""
        with self._lock:
            self._strategy.ready(index, gradient, version)


class RecordedIssuing:
    """Another strategy, where somebody wants to know when each gradient comes."""

    def __init__(self, strategy: Issuing, trace: IterationTrace) -> None:
        self._strategy, self._trace = strategy, trace
        self.flush, self.wait = strategy.flush, strategy.wait

    @property
    def deferred(self) -> bool:
        """Whether the strategy issues nothing before `flush`."""
        return self._strategy.deferred

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """Notes when it came, and passes it on."""
        self._trace.came(index)
        self._strategy.ready(index, gradient, version)


class NegotiatedIssuing:
    """Gradients leave once all ranks have them, neighbours in the flat buffer together."""

    def __init__(
        self,
        iteration: Iteration,
        negotiation: ReadinessNegotiation,
        buffers: GradientBuffers,
        plans: Sequence[CommPlan],
        *,
        flags_need_flush: bool,
    ) -> None:
        """Starts nothing.

        Args:
            iteration: what is under way.
            negotiation: finds out what is ready everywhere.
            buffers: where the gradients lie.
            plans: their largest unit is what is worth sending at once; units take the plan's streams in turn.
            flags_need_flush: the control flags are complete only with `flush`, else with the last gradient.
        """
        self.deferred = False
        self._iteration, self._negotiation = iteration, negotiation
        self._buffers, self._plans = buffers, plans
        self._flags_need_flush = flags_need_flush
        self._begun, self._to_agree, self._turn = False, 0, 0
        self._unit_bytes = max(
            (
                unit.numel * layout.itemsize_bytes
                for plan, layout in zip(plans, buffers.layouts, strict=True)
                for unit in plan.units
            ),
            default=1,
        )
        # Of the streams that a plan may use only those are open that its units do use.
        self._streams = [
            sorted({unit.stream for unit in plan.units if unit.algorithm is plan.units[0].algorithm}) for plan in plans
        ]

    def _begin(self) -> None:
        self._begun = True
        buffers = self._buffers
        sizes_bytes = np.array(
            [buffers.views[index].numel() * buffers.views[index].element_size() for index in buffers.order],
            dtype=np.int64,
        )
        if self._flags_need_flush:  # a bit of their own, which is set with the others at the end
            sizes_bytes = np.append(sizes_bytes, 0)
        self._to_agree = sizes_bytes.size
        self._negotiation.begin(sizes_bytes, granularity_bytes=max(1, self._unit_bytes), on_agreed=self._issue_agreed)

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """Packs it and tells the negotiation that this rank has it."""
        if not self._begun:
            self._iteration.note_first()
            self._begin()
        self._iteration.arrivals.add(index, gradient, version)
        self._iteration.ready_events[index] = self._iteration.device.record_event()
        self._iteration.copy_in()
        # Bits are kept in layout order, so that agreed neighbours are neighbours in the flat buffer.
        self._negotiation.set_ready(self._buffers.position[index])

    def _issue_agreed(self, positions: list[int]) -> None:
        """In the negotiation's thread: reduces gradients that are ready everywhere."""
        order = self._buffers.order
        agreed = {order[position] for position in positions if position < len(order)}
        for group, plan, streams in zip(self._buffers.groups, self._plans, self._streams, strict=True):
            if not plan.units:
                continue
            offsets, limit = group.layout.offsets, max(1, self._unit_bytes // group.layout.itemsize_bytes)
            runs: list[tuple[int, int]] = []
            for position, index in enumerate(group.indices):
                start, stop = offsets[position], offsets[position + 1]
                if index not in agreed:
                    continue
                if runs and runs[-1][1] == start and stop - runs[-1][0] <= limit:
                    runs[-1] = (runs[-1][0], stop)
                else:
                    runs.append((start, stop))
            route = (plan.transport, plan.units[0].algorithm)
            for start, stop in runs:
                for low in range(start, stop, limit):
                    stream = streams[self._turn % len(streams)]
                    self._turn += 1
                    self._iteration.issue(ScheduledUnit(group, low, min(low + limit, stop), stream, route))
        self._to_agree -= len(positions)
        if not self._to_agree:  # flags are last
            first, plan = self._buffers.groups[0], self._plans[0]
            start, stop = first.layout.offsets[-2:]
            begin = plan.units[0]
            self._iteration.issue(ScheduledUnit(first, start, stop, begin.stream, (plan.transport, begin.algorithm)))

    def flush(self) -> None:
        """Tells the negotiation that this rank has all it will have."""
        if not self._begun:
            self._begin()
        self._iteration.copy_in()
        self._negotiation.end()

    def wait(self, interrupted: Interrupted | None) -> bool:
        """Waits until all is agreed, and then reduced; False if interrupted."""
        return self._negotiation.wait(interrupted) and self._iteration.wait(interrupted)


def issuing_of(
    iteration: Iteration,
    planned: PlannedBuffers,
    negotiation: ReadinessNegotiation | None,
    *,
    profiling: bool,
    several_devices: bool,
) -> Issuing:
    """The strategy of an iteration.

    Args:
        iteration: it begins now.
        planned: where its gradients lie, and in which units they leave.
        negotiation: finds out what is ready everywhere; None on a device with streams.
        profiling: the order of the gradients is profiled.
        several_devices: autograd computes them in several threads.
    """
    strategy: Issuing
    if negotiation is None:
        strategy = StreamIssuing(iteration, planned.schedule, iteration.device, profiling=profiling)
    elif profiling:
        strategy = NegotiatedIssuing(
            iteration, negotiation, planned.buffers, planned.plans, flags_need_flush=planned.usage.wanted
        )
    else:
        strategy = ScheduledIssuing(iteration, planned.schedule)
    if iteration.trace is not None and iteration.trace.recorder is not None:
        strategy = RecordedIssuing(strategy, iteration.trace)
    return OneAtATime(strategy) if several_devices else strategy


class CurrentIteration:
    """Puts in the gradients that did not come, has all of them reduced, and hands them out."""

    def __init__(
        self, iteration: Iteration, issuing: Issuing, planned: PlannedBuffers, order: OrderProfiling, edits: LostEdits
    ) -> None:
        """Starts nothing.

        Args:
            iteration: what comes and leaves.
            issuing: when it leaves.
            planned: where gradients lie.
            order: whether this rank asks for it to be profiled again.
            edits: hears what was done to gradients before they were reduced.
        """
        self._iteration, self._arrivals, self._issuing = iteration, iteration.arrivals, issuing
        self._planned, self._order, self._edits = planned, order, edits
        self._n_params = len(planned.buffers.order)
        self._done_before = Interference((), ())
        self._one_by_one = False

    @property
    def _device(self) -> Device:
        return self._iteration.device

    @property
    def can_reduce(self) -> bool:
        """Every gradient has come, so that nothing need be known of what the script does next."""
        return not (self._iteration.complete or self._waits_for_step)

    @property
    def _waits_for_step(self) -> bool:
        if len(self._arrivals.indices) < self._n_params:
            return True
        # All ranks issue the optimizers of one GPU in the order of their steps.
        return self._issuing.deferred and self._device.users > 1

    def reduce(self, interrupted: Interrupted | None) -> bool:
        """Blocks until all gradients are reduced; True if they are.

        Args:
            interrupted: asked now and then whether this rank is needed elsewhere; this is to be called again then, and
                goes on waiting.

        Raises:
            CommError: a reduction failed, or the job did; gradients are undefined then.
        """
        self.flush()
        iteration = self._iteration
        if not self._issuing.wait(interrupted):
            return False
        iteration.complete = True
        self._device.release()
        iteration.reduced = self._last_done() if self._one_by_one else self._device.record_event()
        self._hand_out()
        return True

    def _last_done(self) -> Event:
        """When the last unit was reduced, which nobody may have waited for then."""
        moments = [self._iteration.backward_ended, *(work.times()[1] for work in self._iteration.works)]
        known = [moment for moment in moments if moment is not None]
        if self._device.streams or len(known) < len(moments):
            return self._device.record_event()
        return max(known)

    def wait_for(self, index: int, interrupted: Interrupted | None) -> list[int]:
        """Once all units have left: blocks until the units of one gradient are reduced.

        Returns:
            All parameters that have elements in these units only; none if it was interrupted.

        Raises:
            CommError: as `reduce`.
        """
        self._one_by_one, schedule, works = True, self._planned.schedule, self._iteration.works
        numbers = map(schedule.left.index, schedule.units_of[index])
        if not self._iteration.wait(interrupted, [works[number] for number in numbers]):
            return []
        return schedule.together(index)

    def hand_out_some(self, indices: Sequence[int]) -> None:
        """Hands out gradients that are reduced, before all are."""
        done, before = self._arrivals.hand_out_some(indices), self._done_before
        self._done_before = Interference(before.replaced + done.replaced, before.written + done.written)

    def flush(self) -> None:
        """Sends what has not left; waits for nobody."""
        iteration = self._iteration
        if iteration.flushed:
            return
        iteration.flushed = True
        self._edits.begin()
        iteration.backward_ended = self._device.record_event()
        self._put_in_missing()
        if iteration.first_ready is None:
            iteration.first_ready = iteration.backward_ended
        self._issuing.flush()

    def _put_in_missing(self) -> None:
        arrivals, planned = self._arrivals, self._planned
        arrivals.own = len(arrivals.indices)
        if planned.usage.wanted:
            planned.usage.write([] if self._iteration.joined else arrivals.present)
        if self._waits_for_step:  # so the flags have not left
            edits = Said(written=bool(arrivals.written), replaced=arrivals.replaced)
            planned.flags.write(edits._replace(reprofile=self._order.asks))
        if arrivals.own < self._n_params:
            arrived = set(arrivals.indices)
            for index in range(self._n_params):
                if index not in arrived:
                    arrivals.put_in(index)

    def _hand_out(self) -> None:
        planned, unused = self._planned, list[int]()
        if planned.usage.wanted:
            unused = [index for index, somewhere in enumerate(planned.usage.used()) if not somewhere]
        done, before = self._arrivals.hand_out(unused), self._done_before
        done = Interference(before.replaced + done.replaced, before.written + done.written)
        self._edits.look(done, self._arrivals, Said() if self._device.streams else planned.flags.now())


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


def report(
    iteration: Iteration, in_flight: InFlight, *, number: int, profiling: bool, profiled: bool
) -> IterationReport:
    """Of an iteration whose gradients are reduced, on the host; waits for the device, for the iteration before at most.

    Args:
        iteration: what has come and left in it.
        in_flight: takes it up.
        number: its own.
        profiling: the order was profiled in it.
        profiled: and is known now.
    """
    device = iteration.device
    assert iteration.first_ready is not None
    events = IterationEvents(number, iteration.first_ready, iteration.backward_ended, iteration.reduced)
    before = in_flight.add(events)
    measured = before if device.streams and not profiling else events
    # The host is never more than one iteration ahead.
    device.wait_for(measured.reduced if iteration.trace is None else events.reduced)
    if iteration.trace is not None:
        iteration.trace.write(events, profiling=profiling)
    return IterationReport(
        span_s=device.elapsed_s(measured.first_ready, measured.reduced),
        backward_s=max(0.0, device.elapsed_s(measured.first_ready, measured.backward_ended)),  # may be none at all
        ready_s=tuple(
            0.0 if event is None else max(0.0, device.elapsed_s(events.first_ready, event))
            for event in iteration.ready_events
        ),
        profiled=profiled,
    )
