"""The current iteration of a synchroniser, until every `.grad` is what all ranks have reduced."""

from __future__ import annotations

from sirtaki.comm.device import Device

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
        iteration.reduced = self._device.record_event()
        self._hand_out()
        return True

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
        done = self._arrivals.hand_out(unused)
        self._edits.look(done, self._arrivals, Said() if self._device.streams else planned.flags.now())
