"""Launch the units (buckets) of one iteration and wait for them, with error messages that name the unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from sirtaki.errors import CommError

from ..compress import CompressedUnits
from ..control.failure import FailureBoard, caused
from ..control.waiting import WAIT_SLICE_S
from ..device import Event
from ..router import Router
from ..transports.contract import Work, scale_
from .buffers import Reduction
from .negotiation import Interrupted
from .ready import LARGE_ELEMENTS, ReadyGradients
from .schedule import ScheduledUnit
from .trace import IterationTrace

NAMED_GRADIENTS = 6
"""Largest number of gradients of a unit (bucket) that an error lists. If there are more, it names the first and
last."""


@dataclass(slots=True, kw_only=True, eq=False)
class LaunchedUnits:
    """Launched units (buckets) of one iteration, in launch order.

    Attributes:
        router: object that sends units over the transports.
        compressed: object that sends compressed units; None = no unit is compressed.
        reduction: operation and scaling of every gradient.
        failures: receives errors of transport threads that copy gradients into the flat buffers.
        ready: ready gradients of the iteration, with the copies into the flat buffers that transport threads run.
        planned: all units of the iteration in launch order, so that errors can number them.
        names: names of the parameters.
        place: rank and iteration, for errors.
        trace: records launches; None = the iteration is not traced.
        units: the launched units.
        works: all-reduces of `units`, in the same order.
    """

    router: Router
    compressed: CompressedUnits | None
    reduction: Reduction
    failures: FailureBoard
    ready: ReadyGradients
    planned: Sequence[ScheduledUnit]
    names: Sequence[str]
    place: str
    trace: IterationTrace | None
    units: list[ScheduledUnit] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)

    def launch(self, unit: ScheduledUnit) -> None:
        """Launch the all-reduce of a unit (bucket) on its stream. Non-blocking.

        If gradients of the unit are not in the flat buffer yet, the transport's thread copies them there first.

        Raises:
            CommError: the transport has failed; the error names the unit.
        """
        copies, device = self.ready.copies, self.router.device
        if copies.copied < copies.count:
            copy = partial(self._copy_deferred, unit, self._needed_copies(unit))
            self.router.prepare(copy, route=unit.route, stream=unit.stream)
        elif self.reduction.prescale != 1.0:
            self._prescale(unit)
        issued = None if self.trace is None else device.record_event(timed=True)
        carrier = self.router if self.compressed is None else self.compressed
        try:
            work = carrier.all_reduce(
                unit.group.buffer,
                unit.start,
                unit.stop,
                route=unit.route,
                stream=unit.stream,
                threads=unit.threads,
                nccl=unit.nccl,
                op=self.reduction.op,
                scale=self.reduction.postscale,
            )
        except Exception as err:
            error = self.with_place(err, unit)
            raise error from error.__cause__
        self.works.append(work)
        self.units.append(unit)
        if self.trace is not None:
            self.trace.units.append((unit, work, issued))

    def _needed_copies(self, unit: ScheduledUnit) -> int:
        """Return how many of the deferred copies into the flat buffers must run before the unit (bucket) is sent."""
        copies, last, layout = self.ready.copies, unit.due[0], unit.group.layout
        if last not in copies.cut:
            return copies.count
        # The last gradient of the unit (bucket) is copied in pieces. Count only its pieces with elements of the unit.
        start = layout.offsets[unit.group.indices.index(self.ready.buffers.order[last])]
        return min(copies.count, copies.cut[last] - (start - unit.stop) // LARGE_ELEMENTS)

    def _copy_deferred(self, unit: ScheduledUnit, needed: int) -> None:
        """Run the first `needed` copies into the flat buffers, and multiply the unit (bucket) by `Reduction.prescale`.

        A transport thread calls this before it sends the unit.
        """
        try:
            self.ready.copies.copy(needed)
            self._prescale(unit)
        except Exception as err:  # report any error, because the training thread waits for this all-reduce
            self.failures.report(self.with_place(err, unit))

    def _prescale(self, unit: ScheduledUnit) -> None:
        if (factor := self.reduction.prescale) != 1.0:
            self.router.device.launch(scale_, unit.group.buffer.tensor[unit.start : unit.stop], factor)

    def wait(self, interrupted: Interrupted | None, units: Sequence[ScheduledUnit] | None = None) -> bool:
        """Block until the given units (buckets) are reduced, or all launched ones if `units` is None.

        Returns:
            False if `interrupted` has returned True before the units were reduced.

        Raises:
            CommError: a reduction or the job has failed. The error names the unit.
        """
        works = self.works if units is None else [self.works[self.units.index(unit)] for unit in units]
        try:
            return self.router.wait_for(works, interrupted=interrupted)
        except CommError as err:
            waited = zip(self.units if units is None else units, works, strict=True)
            error = self.with_place(err, next((unit for unit, work in waited if not _is_reduced(work)), None))
            raise error from error.__cause__

    def last_done(self, backward_ended: Event) -> Event:
        """Return the time at which all units (buckets) were reduced, or at which backward ended if that is later.

        Return the current time on a GPU, or if the end of a unit is unknown. Call if the training thread has waited for
        units one by one, because it has not recorded a time after the last unit then.
        """
        moments = [backward_ended, *(work.times()[1] for work in self.works)]
        known = [moment for moment in moments if moment is not None]
        if self.router.device.streams or len(known) < len(moments):
            return self.router.device.record_event(timed=True)
        return max(known)

    def with_place(self, error: Exception, unit: ScheduledUnit | None = None) -> CommError:
        """Return the error as a `CommError` whose message names the rank, the iteration and the unit (bucket)."""
        place = self.place
        if isinstance(error, CommError) and place in str(error):
            return error
        if unit is not None:
            names = [self.names[index] for index in unit.members]
            which = f"unit {self.planned.index(unit) + 1} of {len(self.planned)}" if unit in self.planned else "a unit"
            few = 0 < len(names) <= NAMED_GRADIENTS
            what = ", ".join(names) if few else unit.group.layout.describe(unit.start, unit.stop)
            place += f", {which} ({what}) on stream {unit.stream}"
        if isinstance(error, CommError):
            return caused(type(error)(f"{error} ({place})"), error.__cause__)
        carrier = "communication" if unit is None else unit.route[0].value
        return caused(CommError(f"{carrier} failed: {error!r} ({place})"), error)


def _is_reduced(work: Work) -> bool:
    """Return whether the all-reduce of a unit (bucket) has succeeded. Non-blocking."""
    try:
        return work.is_done() and work.wait(WAIT_SLICE_S)
    except CommError:
        return False
