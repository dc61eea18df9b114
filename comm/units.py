"""All-reduce of large tensors in units (element ranges, like buckets), over several connections at the same time.

Eager operations and torch.distributed's process groups reduce their large tensors here. Gradients use
`gradients.pipeline` instead, with the units of a communication plan. A tensor passes these steps, in which a *stream*
is one of the parallel connections:

    submit ─▶ _launch_units: cut off the next unit, and copy it into a free slot if there are slots
           ─▶ _launch: reduce the unit on the next stream
    finish ─▶ _advance: wait for the oldest unit, copy its result to the target, launch the next unit

The ranks do not negotiate which tensors to reduce: all ranks must submit the same tensors in the same order, as with
every process group. The units of all tensors form one sequence. Unit n uses stream n modulo the number of streams.

Where ranks share memory, units pass through a window of *slots* in shared memory. A unit is copied into its slot,
reduced there and copied out again. A tensor of any size therefore needs little shared memory, which stays in the
processor's cache. Where ranks do not share memory, units are reduced in the tensor itself.
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
"""Smallest size in bytes of the units (buckets) into which a tensor is cut. A tensor is cut into at least one unit per
stream (connection), unless the units would be smaller than this."""

LATE_S = 0.5
"""Seconds for which operations in flight may still complete after a rank has ended, because the rank may have exited
normally, after sending all its data."""

UNIT_BLAME_S = 0.5
"""Longest time in seconds that a failed operation waits for the control plane (small messages between ranks) to report
which rank has ended, so that the error can name it. The wait may be short, because a rank that ends closes its control
plane before its transports."""


class TensorOperation:
    """An operation between ranks, in flight, that writes its result into tensors.

    Attributes:
        ended: future that gets a result when the result is in the tensors, or the error if the operation fails.
    """

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        """Create the object. The caller starts the operation.

        Args:
            then: called once the result is in the tensors, before the future `ended` gets its result.
        """
        self.ended: Future[None] = Future()
        self._then = then

    def finish(self, error: CommError | None = None) -> None:
        """Mark the operation as ended, and wake the threads that wait for it. Thread-safe.

        Only the first call has an effect.

        Args:
            error: error of the operation. None = it has succeeded.
        """
        if error is None:
            try:
                self._then()
            except Exception as err:
                # Catch every error, because otherwise the threads that wait for the operation would never wake up.
                error = CommError(f"a tensor was received, but could not be copied to its target: {err!r}")
        with suppress(InvalidStateError):
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)

    def wait(self, timeout_s: float) -> bool:
        """Block until the operation has ended, for at most `timeout_s`. Return whether it has ended.

        This call does not advance the operation; another thread must do so.
        """
        return bool(wait([self.ended], timeout_s).done)

    def check(self) -> None:
        """Raise the error of the operation, if it has failed. Non-blocking."""
        error = self.ended.exception() if self.ended.done() else None
        if isinstance(error, CommError):
            raise fresh(error)


class TensorReduction(TensorOperation):
    """All-reduce of one tensor by a `UnitPipeline`.

    Attributes:
        source: summand of this rank, 1-d and contiguous. Must not be written until the operation has ended.
        target: tensor that receives elements `[start, start + target.numel())` of the result, 1-d and contiguous. May
            be `source`.
        start: index of the first element of the result that `target` receives.
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
        """Create the reduction. `UnitPipeline.submit` starts it.

        Args:
            source: summand of this rank.
            target: tensor for the result.
            start: index of the first element of the result that `target` receives.
            op: reduction over ranks.
            timeout_s: seconds after this call at which the reduction fails if it has not ended.
            then: called once the result is in `target`, before the future `ended` gets its result.
        """
        super().__init__(then)
        self.source, self.target, self.start = source, target, start
        self.op = op
        self.timeout_s, self.deadline_s = timeout_s, time.monotonic() + timeout_s


@dataclass(slots=True, eq=False)
class _TensorUnit:
    """A unit (bucket) in flight: elements `[low, high)` of the tensor of `reduction`."""

    reduction: TensorReduction
    low: int
    high: int
    result: torch.Tensor
    work: Work


class UnitPipeline:
    """All-reduces tensors over one route (transport and algorithm), in the order in which they are submitted."""

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
        """Create the pipeline. The `streams` streams (connections) of `route` must be open already.

        Args:
            router: sends units over the transports between these ranks. The pipeline is its only user, and closes it.
            control: control plane of these ranks (small messages). The pipeline closes it if all ranks close the
                pipeline together.
            route: transport and algorithm of all units.
            streams: number of streams over which units are distributed.
            unit_bytes: size of a unit (bucket) in bytes.
            slots: uint8 buffer in memory that the ranks of the node share, through which units are reduced. Its size
                is a multiple of `unit_bytes`. None = units are reduced in the tensors themselves.
        """
        self._router, self._control, self._failures = router, control, control.failures
        self._route, self._streams, self._unit_bytes = route, streams, unit_bytes
        self._slots = slots
        self._window = slots.tensor.numel() // unit_bytes if slots is not None else 1 << 30
        self._typed: dict[torch.dtype, FlatBuffer] = {}
        self._queue: deque[TensorReduction] = deque()
        self._offset = 0  # Index of the first element of `_queue[0]` whose all-reduce is not launched yet.
        self._launched = 0
        self._in_flight: deque[_TensorUnit] = deque()
        self._submit_lock = free_in_forked_children(threading.Lock())
        # Held by the thread that waits for units in flight and copies their results.
        self._drive_lock = free_in_forked_children(threading.Lock())
        self._error: CommError | None = None

    def submit(self, reduction: TensorReduction) -> None:
        """Queue the all-reduce of a tensor, and launch its units (buckets) as long as slots in shared memory are free.

        Non-blocking. `finish` launches the remaining units.

        Raises:
            CommError: an earlier reduction has failed.
        """
        with self._submit_lock:
            if self._error is not None:
                raise fresh(self._error)
            if not reduction.source.numel():
                reduction.finish()
                return
            self._queue.append(reduction)
            problem = self._launch_units()
        if problem is not None:
            self.fail(problem)

    def finish(self, reduction: TensorReduction, timeout_s: float | None = None) -> bool:
        """Wait until the all-reduce of a tensor has ended. Launch its units (buckets), unless another thread does.

        Returns:
            False if the reduction has not ended within `timeout_s`.

        Raises:
            CommError: the reduction has failed.
        """
        limit_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while not reduction.ended.done():
            if time.monotonic() > limit_s:
                return False
            if self._drive_lock.acquire(blocking=False):
                try:
                    while not reduction.ended.done() and time.monotonic() <= limit_s:
                        self._advance()
                finally:
                    self._drive_lock.release()
            else:
                reduction.wait(WAIT_SLICE_S)
        reduction.check()
        return True

    def reduce_(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """All-reduce a contiguous 1-d tensor in place, and block until it holds the result. Collective.

        Raises:
            CommError: the reduction has failed.
        """
        reduction = TensorReduction(tensor, tensor, op=op, timeout_s=float("inf"))
        self.submit(reduction)
        self.finish(reduction)

    def drain(self) -> None:
        """Wait until no unit (bucket) is in flight. Raise no errors of reductions, because `finish` raises them."""
        while self._in_flight:
            with self._drive_lock:
                self._advance()

    def fail(self, error: CommError) -> None:
        """Fail all queued and launched all-reduces with `error`. Later calls of `submit` raise this error."""
        with self._submit_lock:
            self._error = self._error or error
            pending = [*(unit.reduction for unit in self._in_flight), *self._queue]
            self._in_flight.clear()
            self._queue.clear()
        for reduction in dict.fromkeys(pending):
            if not reduction.ended.done():
                reduction.finish(error)

    def close(self, *, together: bool) -> None:
        """End the threads and connections of this rank.

        Args:
            together: True if all ranks make this call now, with no operation in flight. The call is then collective,
                and also closes NCCL communicators and the control plane.
        """
        if together:
            self._router.close()
            self._control.close()
        else:
            self._router.release()

    def _launch_units(self) -> CommError | None:
        """Launch queued units (buckets) while slots in shared memory are free. The caller must hold `_submit_lock`.

        Return the error if a launch fails, else None.
        """
        while self._queue and len(self._in_flight) < self._window:
            reduction = self._queue[0]
            itemsize, numel = reduction.source.itemsize, reduction.source.numel()
            step = min(max(-(-numel // self._streams), LEAST_BYTES // itemsize), self._unit_bytes // itemsize)
            low, high = self._offset, min(self._offset + step, numel)
            try:
                self._in_flight.append(self._launch(reduction, low, high))
            except Exception as err:
                # Catch every error, because otherwise the threads that wait for the reduction would never wake up.
                return caused(CommError(f"elements [{low}, {high}) of a tensor could not be sent: {err!r}"), err)
            self._launched += 1
            self._offset = high
            if high == numel:
                self._queue.popleft()
                self._offset = 0
        return None

    def _launch(self, reduction: TensorReduction, low: int, high: int) -> _TensorUnit:
        if self._slots is None:
            if low == 0 and reduction.target is not reduction.source:
                # Reduce a clone of the source, because the caller's tensor must not change.
                reduction.source = reduction.source.clone()
            buffer, start, result = FlatBuffer(reduction.source), low, reduction.source[low:high]
        else:
            buffer = self._typed.get(reduction.source.dtype) or self._view(self._slots, reduction.source.dtype)
            start = self._launched % self._window * (self._unit_bytes // reduction.source.itemsize)
            result = buffer.tensor[start : start + high - low]
            result.copy_(reduction.source[low:high])
        work = self._router.all_reduce(
            buffer,
            start,
            start + high - low,
            route=self._route,
            stream=self._launched % self._streams,
            op=reduction.op,
        )
        return _TensorUnit(reduction, low, high, result, work)

    def _view(self, slots: FlatBuffer, dtype: torch.dtype) -> FlatBuffer:
        found = FlatBuffer(slots.tensor.view(dtype), tuple(peer.view(dtype) for peer in slots.peers))
        self._typed[dtype] = found
        return found

    def _advance(self) -> None:
        """Wait briefly for the oldest unit (bucket). If it has ended, copy its result, and launch further units.

        The caller must hold `_drive_lock`.
        """
        try:
            unit = self._in_flight[0]
        except IndexError:  # Another thread is about to launch a unit, or has called `fail`, which ends all units.
            time.sleep(0)
            return
        reduction = unit.reduction
        try:
            if not wait_for_work(
                [unit.work], failures=self._failures, interrupted=lambda: True, late_s=LATE_S, blame_s=UNIT_BLAME_S
            ):
                if time.monotonic() > reduction.deadline_s:
                    raise StallError(
                        f"a tensor of {reduction.source.numel()} elements was not reduced within "
                        f"{reduction.timeout_s:g} s; a rank hangs, or did not submit the same operation: look at "
                        "the logs and stacks of all ranks, or raise the process group's timeout"
                    )
                return
            self._copy_result(unit)
        except CommError as err:
            self.fail(err)
            return
        except Exception as err:
            # Catch every error, because otherwise the threads that wait for the reduction would never wake up.
            elements = f"elements [{unit.low}, {unit.high})"
            self.fail(CommError(f"{elements} of a reduced tensor could not be copied to the target: {err!r}"))
            return
        with self._submit_lock:
            if self._in_flight:  # No unit is in flight if another thread has called `fail`.
                self._in_flight.popleft()
            problem = self._launch_units()
        if unit.high == reduction.source.numel() and not reduction.ended.done():
            reduction.finish()
        if problem is not None:
            self.fail(problem)

    def _copy_result(self, unit: _TensorUnit) -> None:
        """Copy a reduced unit (bucket) to the `target` of its reduction, unless it was reduced in `target` itself.

        Elements that `target` does not receive are left out.
        """
        reduction = unit.reduction
        if self._slots is None and reduction.target is reduction.source:
            return
        low = max(unit.low, reduction.start)
        high = min(unit.high, reduction.start + reduction.target.numel())
        if low < high:
            part = unit.result[low - unit.low : high - unit.low]
            reduction.target[low - reduction.start : high - reduction.start].copy_(part)
