"""Whole tensors, cut into units that travel over several lanes at the same time.

Large tensors of eager operations and of torch.distributed's process groups go this way; gradients, whose units are
planned, go that of `gradients.pipeline`, over the same lanes. A tensor goes through these hands:

    submit ─▶ _issue: its next unit is cut off, and copied into a free slot if there are slots
           ─▶ _begin: the unit goes over the next stream
    finish ─▶ _advance: the oldest unit is awaited, its result copied back, and the next one issued

Nobody plans here, and nothing is negotiated: all ranks submit the same tensors in the same order, as with every process
group. The units of all of them form one sequence; the n-th one travels on stream n modulo their number. Where ranks
share memory, units pass through a window of *slots* there: copied in, reduced, copied out, slot after slot, so that a
tensor of any size needs little shared memory, which stays in the processor's cache. Elsewhere they are reduced where
they lie.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass

import torch

from sirtaki.comm.control.failure import caused, fresh
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.waiting import WAIT_SLICE_S, wait_for_work
from sirtaki.comm.transports.contract import FlatBuffer, ReduceOp, Work
from sirtaki.errors import CommError, StallError
from sirtaki.machine import free_in_forked_children

from .plan import Route
from .router import Router

LEAST_BYTES = 128 << 10
"""A tensor of less than one unit for each stream is cut into equal parts, one for each, of at least this size."""

LATE_S = 0.5
"""How long a unit may take to end after a rank has: one that leaves after its last operation has done its part."""

HEARD_S = 0.5
"""How long a unit that has failed waits to hear which rank has ended: lanes end after the control plane of theirs."""


class TensorOperation:
    """Something that fills tensors, under way.

    Attributes:
        ended: gets its result when they are filled, or why it has failed.
    """

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        """Nothing happens yet; `then` is called with the tensors filled, before anybody hears of it."""
        self.ended: Future[None] = Future()
        self._then = then

    def finish(self, error: CommError | None = None) -> None:
        """Called by whoever drives it; what comes after the first time counts for nothing."""
        if error is None:
            try:
                self._then()
            except Exception as err:  # whatever it is, those who wait must hear of it
                error = CommError(f"a tensor has come, but could not be put away: {err!r}")
        with suppress(InvalidStateError):
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended within that time; drives nothing."""
        return bool(wait([self.ended], timeout_s).done)

    def check(self) -> None:
        """Raises why it has failed, if it has."""
        error = self.ended.exception() if self.ended.done() else None
        if isinstance(error, CommError):
            raise fresh(error)


class TensorReduction(TensorOperation):
    """A tensor under way.

    Attributes:
        source: of this rank, 1-d and contiguous; left alone until it is done.
        target: where elements `[start, start + target.numel())` of the result belong, 1-d and contiguous. It may be
            `source`.
        start: see there.
    """

    def __init__(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        start: int = 0,
        op: ReduceOp = ReduceOp.SUM,
        timeout_s: float,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing happens yet.

        Args:
            source: see above.
            target: see above.
            start: see above.
            op: how elements are combined.
            timeout_s: after so long, from now on, it has failed.
            then: see `TensorOperation`.
        """
        super().__init__(then)
        self.source, self.target, self.start = source, target, start
        self.op = op
        self.timeout_s, self.deadline_s = timeout_s, time.monotonic() + timeout_s


@dataclass(slots=True, eq=False)
class _TensorUnit:
    """Elements `[low, high)` of a tensor, on their way."""

    reduction: TensorReduction
    low: int
    high: int
    result: torch.Tensor
    work: Work


class UnitPipeline:
    """Reduces tensors over one route, in the order in which they are submitted."""

    def __init__(
        self,
        router: Router,
        control: ControlPlane,
        *,
        route: Route,
        streams: int,
        unit_bytes: int,
        slots: FlatBuffer | None = None,
    ) -> None:
        """Keeps what it is given; the streams are open.

        Args:
            router: of these ranks, for this pipeline alone, which closes it.
            control: the ranks; closed with the pipeline if all ranks close it.
            route: of all units.
            streams: how many run at the same time.
            unit_bytes: size of a unit.
            slots: memory that the ranks of the node share, some times `unit_bytes`, as uint8; None = units are reduced
                in the tensors themselves.
        """
        self._router, self._control, self._failures = router, control, control.failures
        self._route, self._streams, self._unit_bytes = route, streams, unit_bytes
        self._slots = slots
        self._window = slots.tensor.numel() // unit_bytes if slots is not None else 1 << 30
        self._typed: dict[torch.dtype, FlatBuffer] = {}
        self._waiting: deque[TensorReduction] = deque()
        self._position = 0  # in the first of those
        self._issued = 0
        self._in_flight: deque[_TensorUnit] = deque()
        self._issuing = free_in_forked_children(threading.Lock())
        self._turn = free_in_forked_children(threading.Lock())  # of whoever waits for units
        self._error: CommError | None = None

    def submit(self, reduction: TensorReduction) -> None:
        """Starts it; does not wait for others, nor for anything that was submitted before.

        Raises:
            CommError: an earlier one has failed.
        """
        with self._issuing:
            if self._error is not None:
                raise fresh(self._error)
            if not reduction.source.numel():
                reduction.finish()
                return
            self._waiting.append(reduction)
            problem = self._issue()
        if problem is not None:
            self.fail(problem)

    def finish(self, reduction: TensorReduction, timeout_s: float | None = None) -> bool:
        """Drives the units, unless another thread does, until that reduction is done; False if the time is up.

        Raises:
            CommError: it has failed.
        """
        limit_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not reduction.ended.done():
            if time.monotonic() > limit_s:
                return False
            if self._turn.acquire(blocking=False):
                try:
                    while not reduction.ended.done() and time.monotonic() <= limit_s:
                        self._advance()
                finally:
                    self._turn.release()
            else:
                reduction.wait(WAIT_SLICE_S)
        reduction.check()
        return True

    def reduce_(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Collective: reduces a contiguous 1-d tensor in place, and blocks until it is there.

        Raises:
            CommError: it has failed.
        """
        reduction = TensorReduction(tensor, tensor, op=op, timeout_s=float("inf"))
        self.submit(reduction)
        self.finish(reduction)

    def drain(self) -> None:
        """Drives the units until none is left. What fails is told to those who wait for it."""
        while self._in_flight:
            with self._turn:
                self._advance()

    def fail(self, error: CommError) -> None:
        """Ends what is under way; nothing can be submitted any more."""
        with self._issuing:
            self._error = self._error or error
            pending = [*(unit.reduction for unit in self._in_flight), *self._waiting]
            self._in_flight.clear()
            self._waiting.clear()
        for reduction in dict.fromkeys(pending):
            if not reduction.ended.done():
                reduction.finish(error)

    def close(self, *, together: bool) -> None:
        """Ends threads and connections of this rank; communicators, too, if all ranks close it at the same time.

        Args:
            together: all do; collective then, with nothing under way.
        """
        if together:
            self._router.close()
            self._control.close()
        else:
            self._router.release()

    def _issue(self) -> CommError | None:
        """With `_issuing`: sends off what fits into the window. Returns what has gone wrong."""
        while self._waiting and len(self._in_flight) < self._window:
            reduction = self._waiting[0]
            itemsize, numel = reduction.source.itemsize, reduction.source.numel()
            step = min(max(-(-numel // self._streams), LEAST_BYTES // itemsize), self._unit_bytes // itemsize)
            low, high = self._position, min(self._position + step, numel)
            try:
                self._in_flight.append(self._begin(reduction, low, high))
            except Exception as err:  # whatever it is, those who wait must hear of it
                return caused(CommError(f"elements [{low}, {high}) of a tensor could not be sent: {err!r}"), err)
            self._issued += 1
            self._position = high
            if high == numel:
                self._waiting.popleft()
                self._position = 0
        return None

    def _begin(self, reduction: TensorReduction, low: int, high: int) -> _TensorUnit:
        if self._slots is None:
            if low == 0 and reduction.target is not reduction.source:
                reduction.source = reduction.source.clone()  # which is reduced in place
            buffer, start, result = FlatBuffer(reduction.source), low, reduction.source[low:high]
        else:
            buffer = self._typed.get(reduction.source.dtype) or self._view(self._slots, reduction.source.dtype)
            start = self._issued % self._window * (self._unit_bytes // reduction.source.itemsize)
            result = buffer.tensor[start : start + high - low]
            result.copy_(reduction.source[low:high])
        work = self._router.all_reduce(
            buffer,
            start,
            start + high - low,
            route=self._route,
            stream=self._issued % self._streams,
            op=reduction.op,
        )
        return _TensorUnit(reduction, low, high, result, work)

    def _view(self, slots: FlatBuffer, dtype: torch.dtype) -> FlatBuffer:
        found = FlatBuffer(slots.tensor.view(dtype), tuple(peer.view(dtype) for peer in slots.peers))
        self._typed[dtype] = found
        return found

    def _advance(self) -> None:
        """With the turn: waits a little for the oldest unit, and puts away its result if it is there."""
        try:
            unit = self._in_flight[0]
        except IndexError:  # whoever issues is about to, or another thread has ended all
            time.sleep(0)
            return
        reduction = unit.reduction
        try:
            if not wait_for_work(
                [unit.work], failures=self._failures, interrupted=lambda: True, late_s=LATE_S, blame_s=HEARD_S
            ):
                if time.monotonic() > reduction.deadline_s:
                    raise StallError(
                        f"a tensor of {reduction.source.numel()} elements was not reduced within "
                        f"{reduction.timeout_s:g} s: another rank has not come, or stands still"
                    )
                return
            self._put_away(unit)
        except CommError as err:
            self.fail(err)
            return
        except Exception as err:  # whatever it is, those who wait must hear of it
            self.fail(
                CommError(f"elements [{unit.low}, {unit.high}) of a reduced tensor could not be put away: {err!r}")
            )
            return
        with self._issuing:
            if self._in_flight:  # else another thread has ended all
                self._in_flight.popleft()
            problem = self._issue()
        if unit.high == reduction.source.numel() and not reduction.ended.done():
            reduction.finish()
        if problem is not None:
            self.fail(problem)

    def _put_away(self, unit: _TensorUnit) -> None:
        """Copies what belongs into the target, unless it is there."""
        reduction = unit.reduction
        if self._slots is None and reduction.target is reduction.source:
            return
        low = max(unit.low, reduction.start)
        high = min(unit.high, reduction.start + reduction.target.numel())
        if low < high:
            part = unit.result[low - unit.low : high - unit.low]
            reduction.target[low - reduction.start : high - reduction.start].copy_(part)
