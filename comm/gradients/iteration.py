"""What is under way in one iteration: gradients that have come, and units that have left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sirtaki.comm.device import Event
from sirtaki.comm.router import Router
from sirtaki.comm.transports.contract import Work
from sirtaki.comm.transports.scaling import scale_

from .arrivals import Arrivals
from .buffers import Reduction
from .iteration_trace import IssuedUnit, IterationTrace
from .schedule import ScheduledUnit

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
