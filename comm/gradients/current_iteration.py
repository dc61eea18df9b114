"""The current iteration of a synchroniser, until every `.grad` is what all ranks have reduced."""

from __future__ import annotations

from collections.abc import Sequence

from sirtaki.comm.device import Device, Event

from .arrivals import Interference
from .control_flags import Said
from .issuing import Issuing
from .iteration import Interrupted, Iteration
from .lost_edits import LostEdits
from .order import OrderProfiling
from .planned_buffers import PlannedBuffers


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
