"""When units leave: three strategies, one a kind of iteration.

`NegotiatedIssuing` reduces whatever is ready on all ranks, while the order of the gradients is being profiled.
`ScheduledIssuing` sends units in a fixed order, straight from the hook, without a message. `StreamIssuing` does the
same on a device with streams, and puts everything off to the end of the iteration where NCCL's one order for all
ranks could not be kept otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from sirtaki.comm.device import Device
from sirtaki.comm.plan import CommPlan

from .buffers import GradientBuffers
from .iteration import Interrupted, Iteration
from .iteration_trace import IterationTrace
from .negotiation import ReadinessNegotiation
from .planned_buffers import PlannedBuffers
from .schedule import Schedule, ScheduledUnit


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
        """See `Issuing`. The hot path."""
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
        """See `Issuing`."""
        with self._iteration.device.beside():
            self._iteration.copy_in()
            for unit in self._schedule.take_all():
                self._iteration.issue(unit)

    def wait(self, interrupted: Interrupted | None) -> bool:
        """See `Issuing`."""
        return self._iteration.wait(interrupted)


class StreamIssuing(ScheduledIssuing):
    """On a device with streams; hooks issue nothing while the order is profiled or several share the device."""

    def __init__(self, iteration: Iteration, schedule: Schedule, device: Device, *, profiling: bool) -> None:
        super().__init__(iteration, schedule)
        self._device, self._profiling = device, profiling
        self.deferred = profiling

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """See `Issuing`."""
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
        """See `Issuing`."""
        return self._strategy.deferred

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """See `Issuing`."""
        with self._lock:
            self._strategy.ready(index, gradient, version)


class RecordedIssuing:
    """Another strategy, where somebody wants to know when each gradient comes."""

    def __init__(self, strategy: Issuing, trace: IterationTrace) -> None:
        self._strategy, self._trace = strategy, trace
        self.flush, self.wait = strategy.flush, strategy.wait

    @property
    def deferred(self) -> bool:
        """See `Issuing`."""
        return self._strategy.deferred

    def ready(self, index: int, gradient: torch.Tensor, version: int) -> None:
        """See `Issuing`."""
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
        """See `Issuing`."""
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
        """See `Issuing`."""
        if not self._begun:
            self._begin()
        self._iteration.copy_in()
        self._negotiation.end()

    def wait(self, interrupted: Interrupted | None) -> bool:
        """See `Issuing`."""
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
