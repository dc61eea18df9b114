"""The process group behind `init_process_group("sirtaki")`.

Large all-reduces, reduce-scatters and all-gathers of CPU tensors use Sirtaki's own connections between the ranks,
called *lanes*. Every other collective is passed to an *inner group*: a Gloo group, or an NCCL group for CUDA tensors.
PyTorch itself calls the inner group for methods that are not defined here.

Every collective that a Python class can define must be defined here. If one is missing, PyTorch's C++ calls the inner
group while it holds Python's global lock (GIL). That call hangs if a thread of Gloo needs the GIL to free a tensor.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, Store, Work
from torch.distributed import ReduceOp as TorchOp
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.failure import Timeout, fresh
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.waiting import WAIT_SLICE_S, leave_together
from sirtaki.comm.modes import outside_modes
from sirtaki.comm.shards import ShardLanes, ShardWork
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.comm.transports.gloo import TORCH_OPS, open_group
from sirtaki.comm.units import TensorOperation, TensorReduction, UnitPipeline
from sirtaki.engine import job
from sirtaki.engine.c10d import timeout_of
from sirtaki.engine.console import start_logging
from sirtaki.engine.lanes import control_of, open_lanes, open_shards
from sirtaki.engine.launchers import AGENT
from sirtaki.engine.ranks import open_at_store, open_ranks
from sirtaki.engine.settings import NEVER_S, Settings
from sirtaki.errors import CommError, ConfigError, PeerFaultError, PeerLostError, StallError
from sirtaki.machine import finalize, free_in_forked_children, in_forked_children, keep_in_forked_children
from sirtaki.torch import auto_attach
from sirtaki.torch_backend import NAME
from sirtaki.uncompiled import exclude_from_compilation

from .shown import RELEASES_INTERPRETER, FlightEntries, shown

# ── lanes: connections for the large tensors of one process group ────────────────────────────────────────────────────
#
# A thread opens the lanes (Sirtaki's connections between the ranks) when the first large tensor is submitted, because
# many groups send only small tensors. The same thread drives operations (sends and receives their data) while no caller
# waits for them. So `submit` never waits for other ranks. All-gathers use a second set of connections and a second
# thread, opened when the first large all-gather is submitted.

LEAVE_S = 5.0
"""Maximum time in seconds for which a rank that destroys a group waits for the other ranks to destroy it too."""


PIECE_BYTES = 2 << 20
"""Maximum bytes that one message of an all-gather sends; larger tensors are divided.

Each rank has two buffers of this size in shared memory.
"""

AT_ONCE = 4
"""Maximum number of all-gathers in flight.

If it is reached, the thread that launches all-gathers waits for the oldest one.
"""


class TensorGather(TensorOperation):
    """An all-gather of one tensor per rank.

    Attributes:
        rows: tensors that receive the tensors of all ranks, in rank order. 1-d and contiguous.
        shard: tensor that this rank sends, 1-d and contiguous. It must not change until the all-gather ends. May be
            this rank's item of `rows`.
    """

    def __init__(
        self, rows: Sequence[torch.Tensor], shard: torch.Tensor, then: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(then)
        self.rows, self.shard = rows, shard
        self._works: list[ShardWork] = []

    def start(self, lanes: ShardLanes) -> None:
        """Launch the all-gather, divided into pieces of at most `PIECE_BYTES`. Collective.

        May wait for earlier pieces.

        `lanes` are Sirtaki's connections between the ranks.
        """
        step = PIECE_BYTES // self.shard.itemsize
        for low in range(0, self.shard.numel(), step):
            piece = slice(low, low + step)
            self._works.append(lanes.gather([row[piece] for row in self.rows], self.shard[piece]))

    def complete(self) -> None:
        """Wait for all pieces of the all-gather, then mark the operation as finished."""
        for work in self._works:
            work.wait()
        self.finish()


class GroupLanes:
    """Lanes: Sirtaki's connections between the ranks of one process group, and the threads that serve them.

    Every rank must submit operations with equal sizes and dtypes in the same order.
    """

    def __init__(self, ranks: Communicator, *, settings: Settings, timeout: Timeout) -> None:
        """Store the arguments. No connection is opened before the first operation is submitted.

        Args:
            ranks: communicator for control messages between the ranks of the group. `close` frees it.
            settings: values of Sirtaki's environment variables.
            timeout: function that returns the maximum time in seconds to wait for other ranks.
        """
        self._ranks, self._settings, self._timeout = ranks, settings, timeout
        self._pipeline: UnitPipeline | None = None
        self._error: CommError | None = None
        # Reductions that were submitted before the lanes (connections) are open.
        self._backlog: deque[TensorReduction] = deque()
        self._lock = free_in_forked_children(threading.Lock())
        self._business = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._gathering = ranks.duplicate()
        self._shards: ShardLanes | None = None
        self._gathers: queue.SimpleQueue[TensorGather | None] = queue.SimpleQueue()
        self._gatherer: threading.Thread | None = None
        ranks.failures.listen(self._tell_of_fault)
        in_forked_children(self, GroupLanes._leave_in_child)

    def _leave_in_child(self) -> None:
        self._error, self._closing = self._ranks.failures.error, True

    @property
    def fault(self) -> CommError | None:
        """Return the communication error that ended the group. None if there is no error.

        The exit of a rank is not an error, because the other ranks may continue without it.
        """
        error = self._ranks.failures.error
        return None if isinstance(error, PeerLostError) and not isinstance(error, PeerFaultError) else error

    def gather(self, gather: TensorGather) -> None:
        """Submit an all-gather. Non-blocking.

        Raises:
            CommError: the communication of the group has failed.
        """
        with self._lock:
            if self._error is not None:
                raise fresh(self._error)
            gather.ended.add_done_callback(self._report)
            self._gathers.put(gather)
            if self._gatherer is None:
                self._gatherer = threading.Thread(target=self._run_gathers, name="sirtaki-group-gathers", daemon=True)
                self._gatherer.start()

    def submit(self, reduction: TensorReduction, *, awaited: bool) -> None:
        """Submit an all-reduce or reduce-scatter. Non-blocking.

        Args:
            reduction: reduction of one tensor over the ranks.
            awaited: whether the caller calls `finish` at once. Then the thread that sends and receives in the
                background need not wake up.

        Raises:
            CommError: the communication of the group has failed.
        """
        with self._lock:
            if self._error is not None:
                raise fresh(self._error)
            reduction.ended.add_done_callback(self._report)
            if self._pipeline is None:
                self._backlog.append(reduction)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="sirtaki-group", daemon=True)
                    self._thread.start()
                return
            self._pipeline.submit(reduction)
        if not awaited:
            self._business.set()

    def drive(self) -> None:
        """Wake the thread that sends and receives, so that operations progress while no caller waits for them."""
        self._business.set()

    def finish(self, operation: TensorOperation, timeout_s: float | None = None) -> bool:
        """Wait until an operation has ended.

        Returns:
            Whether the operation has ended. False if it has not ended after `timeout_s` seconds.

        Raises:
            CommError: the operation has failed.
        """
        while not operation.ended.done():
            if self._pipeline is not None and isinstance(operation, TensorReduction):
                return self._pipeline.finish(operation, timeout_s)
            slice_s = WAIT_SLICE_S if timeout_s is None else min(timeout_s, WAIT_SLICE_S)
            operation.wait(slice_s)
            if timeout_s is not None and (timeout_s := timeout_s - slice_s) <= 0:
                return False
        operation.check()
        return True

    def _run(self) -> None:
        try:
            with self._limited_opening():
                pipeline = open_lanes(self._ranks, settings=self._settings, timeout_s=NEVER_S)
        except Exception as err:
            # Catch every error of the thread, because callers that wait for operations must get it.
            self._fail(err if isinstance(err, CommError) else CommError(f"cannot open streams of a group: {err}"))
            return
        with self._lock:
            self._pipeline = pipeline
            with suppress(CommError):  # Ignore the error here. `finish` raises it for the callers that wait.
                while self._backlog:
                    pipeline.submit(self._backlog.popleft())
        pipeline.drain()
        while not self._closing:
            self._business.wait()
            self._business.clear()
            pipeline.drain()

    def _run_gathers(self) -> None:
        under_way: deque[TensorGather] = deque()
        try:
            with self._limited_opening():
                control = control_of(self._gathering, self._settings)
                lanes = self._shards = open_shards(control, settings=self._settings, timeout=self._timeout)
                lanes.reserve(shard_bytes=PIECE_BYTES)
            while True:
                if under_way and (len(under_way) == AT_ONCE or self._gathers.empty()):
                    under_way[0].complete()
                    under_way.popleft()
                elif (gather := self._gathers.get()) is not None:
                    under_way.append(gather)
                    gather.start(lanes)
                else:
                    return
        except Exception as err:
            # Catch every error of the thread, because callers that wait for operations must get it.
            error = err if isinstance(err, CommError) else CommError(f"this process group cannot gather: {err!r}")
            # Report the error that broke the connections, if there is one, because it is the cause.
            error = self._ranks.failures.error or error
            self._fail(error)
            for gather in under_way:
                gather.finish(error)

    @contextmanager
    def _limited_opening(self) -> Iterator[None]:
        """Report a failure if the `with` block takes longer than the group's timeout.

        The block opens the lanes (connections).
        """
        begin_s, opened = time.monotonic(), threading.Event()

        def watch() -> None:
            while not opened.wait(FAULT_POLL_S):
                if time.monotonic() - begin_s > (limit_s := self._timeout()):
                    late = f"the first large tensor of this process group was not sent within {limit_s:g} s"
                    self._ranks.failures.report(StallError(f"{late}: another rank has not sent it, or hangs"))
                    return

        threading.Thread(target=watch, name="sirtaki-group-opening", daemon=True).start()
        try:
            yield
        finally:
            opened.set()

    def _report(self, ended: Future[None]) -> None:
        """Store the error of a failed operation as the error of the group.

        Do nothing if the group is being closed.
        """
        if isinstance(error := ended.exception(), CommError) and not self._closing:
            self._ranks.failures.report(error)

    def _tell_of_fault(self) -> None:
        """Report an error to the other ranks, because they would wait for operations that this rank cannot finish.

        Thread-safe.
        """
        error = self._ranks.failures.error
        if not self._closing and not isinstance(error, PeerLostError):
            self._ranks.abort(f"rank {self._ranks.rank}: {error}", fault=True)

    def _fail(self, error: CommError) -> None:
        with self._lock:
            self._error = self._error or error
            failed: list[TensorOperation] = list(self._backlog)
            self._backlog.clear()
            while not self._gathers.empty():
                if (gather := self._gathers.get()) is not None:
                    failed.append(gather)
        for operation in failed:
            operation.finish(error)

    def close(self) -> None:
        """Fail operations in flight, wait up to `LEAVE_S` seconds for the other ranks to close, and disconnect.

        A rank that still waits for this rank afterwards gets an error.
        """
        if self._closing:
            return
        self._closing = True
        destroyed = CommError("this process group has been destroyed")
        self._fail(destroyed)
        self._business.set()
        if (pipeline := self._pipeline) is not None:
            pipeline.fail(destroyed)
        self._gathers.put(None)
        self._take_leave()
        # End the waits of both threads for operations that other ranks have not begun.
        self._ranks.failures.report(destroyed)
        for thread in (self._thread, self._gatherer):
            if thread is not None:
                thread.join(LEAVE_S)
        self._ranks.free()
        if pipeline is not None:
            pipeline.close(together=False)
        if self._shards is not None:
            self._shards.close()

    def _take_leave(self) -> None:
        with suppress(CommError):  # Ignore the error. The group has failed before, and all ranks know why.
            if not leave_together(self._ranks.duplicate(), LEAVE_S):
                self._ranks.abort(f"rank {self._ranks.rank} has destroyed the process group while other ranks use it")


# ── the process group behind `init_process_group("sirtaki")` ──────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)

LANE_OPS = {theirs: ours for ours, theirs in TORCH_OPS.items()}

_LANE_FLOATS = torch.float32, torch.float64, torch.float16, torch.bfloat16
LANE_DTYPES = frozenset((*_LANE_FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64))
"""Dtypes that lanes (Sirtaki's connections) can reduce. Gloo reduces the same dtypes, and bool as a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceRecipe:
    """A reduction of PyTorch as three steps: multiply the inputs by a factor, reduce, divide by a divisor.

    Attributes:
        op: operator of the reduction in the second step. It is neither AVG nor PREMUL_SUM, which `divisor` and `factor`
            express.
        factor: number that multiplies this rank's tensor before the reduction. None for no multiplication.
        divisor: number that divides the result. Integers are rounded towards zero, as in NCCL.
    """

    op: TorchOp.RedOpType
    factor: float | torch.Tensor | None = None
    divisor: int = 1

    @classmethod
    def of(cls, op: TorchOp | TorchOp.RedOpType, size: int) -> ReduceRecipe:
        """Convert a reduction of PyTorch over `size` ranks into three steps: multiply, reduce, divide."""
        # Typed as Any, because PyTorch's stub of the class lacks `__getstate__`.
        whole: Any = TorchOp(op) if isinstance(op, TorchOp.RedOpType) else op
        kind, factor = whole.__getstate__()
        if kind == TorchOp.AVG:
            return cls(op=TorchOp.SUM, divisor=size)
        return cls(op=TorchOp.SUM if kind == TorchOp.PREMUL_SUM else kind, factor=factor)

    @property
    def lane_op(self) -> ReduceOp | None:
        """Return the operator with which lanes (Sirtaki's connections) reduce for `op`.

        None if they do not support `op`.
        """
        return LANE_OPS.get(self.op)

    def prepare_(self, tensor: torch.Tensor) -> None:
        """Multiply a tensor by `factor` in place, before it is sent. Do nothing if `factor` is None."""
        if self.factor is not None:
            tensor.mul_(self.factor)

    def divide_(self, tensor: torch.Tensor) -> None:
        """Divide a reduced tensor by `divisor` in place, with integers rounded towards zero."""
        if self.divisor == 1:
            return
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.div_(self.divisor)
        else:
            tensor.div_(self.divisor, rounding_mode="trunc")


NO_TIMEOUT = timedelta(0)
"""Value of a timeout that means no limit, as in PyTorch."""


KEEPS_WORKS = TorchVersion(torch.__version__) >= "2.7"
"""Whether PyTorch's C++ keeps a `Work` object of Python alive. PyTorch before 2.7 does not.

It would wait forever for a `Work` object that Python has freed.
"""


class FillingWork(Work):
    """Base class of the `Work` objects of collectives that write their results to the caller's tensors."""

    def __init__(self, outputs: Any) -> None:  # `outputs` is a list of tensors, or for an all-gather a list of lists.
        super().__init__()
        self._outputs = outputs

    def synchronize(self) -> None:
        """Block until the collective has ended. NCCL makes the current stream wait, but CPU tensors have no stream."""
        self.wait()

    def is_success(self) -> bool:
        """Return whether the collective has ended without an error."""
        return self.is_completed() and self.exception() is None

    def result(self) -> Any:
        """Return the tensors to which the collective writes its results."""
        return self._outputs


class LaneWork(FillingWork):
    """`Work` object of a collective over lanes (Sirtaki's connections), not in the inner group (Gloo or NCCL)."""

    def __init__(self, lanes: GroupLanes, operation: TensorOperation, outputs: Any) -> None:
        super().__init__(outputs)
        self._lanes, self._operation = lanes, operation
        self._future: torch.futures.Future[Tensors] | None = None
        self._callbacks_done = threading.Event()  # Set once all callbacks of this work's future have run.
        self._callback_thread = 0  # Id of the thread that is running the callbacks, or 0.

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the operation has ended, and send and receive its data meanwhile.

        A timeout of 0 means no limit.

        Raises:
            CommError: the operation has failed.
            RuntimeError: the timeout has passed.
        """
        limit_s = timeout.total_seconds()
        if not self._lanes.finish(self._operation, limit_s if limit_s > 0 else None):
            raise RuntimeError(
                f"this collective did not end within {limit_s:g} s, the timeout of wait(); check that all ranks of the "
                "process group call the collective"
            )
        if self._future is not None and not self._is_in_callback():
            # Wait for the callbacks too. The thread that ends the operation wakes waiting threads before it runs the
            # callbacks.
            self._callbacks_done.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has ended and the callbacks of its future have run.

        If not, wake the thread that sends and receives its data.
        """
        if not self._operation.ended.done():
            self._lanes.drive()
        ended = self._operation.ended.done()
        return ended and (self._future is None or self._callbacks_done.is_set() or self._is_in_callback())

    def _is_in_callback(self) -> bool:
        """Return whether the calling code runs inside a callback of this work's future."""
        return self._callback_thread == threading.get_ident()

    def exception(self) -> BaseException | None:
        """Return the error of the operation. None if it has not failed."""
        return self._operation.ended.exception() if self._operation.ended.done() else None

    def get_future(self) -> torch.futures.Future[Tensors]:
        """Return a future that gets the output tensors or the error when the operation ends."""
        if self._future is not None:
            return self._future
        future = self._future = torch.futures.Future()

        def complete(ended: Future[None]) -> None:
            self._callback_thread = threading.get_ident()
            try:
                if (error := ended.exception()) is None:
                    future.set_result(self._outputs)
                else:
                    future.set_exception(error)  # type: ignore[arg-type]  # PyTorch's stub is wrong
            finally:
                self._callback_thread = 0
                self._callbacks_done.set()

        self._operation.ended.add_done_callback(complete)
        self._lanes.drive()
        return future


class LastingWork(FillingWork):
    """Wrapper that keeps a `Work` object alive until its collective ends, for PyTorch before 2.7.

    These PyTorch versions may wait in C++ for a `Work` object of Python without keeping it alive. PyTorch's
    alternative, `_create_work_from_future`, returns works whose `wait` does not raise the error of the future.
    """

    # Works in flight to which only C++ may refer. The set keeps Python from destroying them.
    _in_flight: ClassVar[set[LastingWork]] = set()
    _ended: ClassVar[deque[LastingWork]] = deque(maxlen=10_000)
    # The latest works that have ended and still hold their tensors, because C++ may request their future.
    _with_tensors: ClassVar[deque[LastingWork]] = deque()

    def __init__(self, work: FillingWork) -> None:
        super().__init__(None)
        self._work: FillingWork | None = work
        self._error: Exception | None = None
        self._is_asked = self._is_kept = False
        self._process = os.getpid()

    def __del__(self) -> None:
        """Keep this work alive if C++ may refer to it, because no Python caller has waited for it or asked for its
        future.
        """
        if self._is_asked or self._work is None or sys.is_finalizing() or self._process != os.getpid():
            return
        self._is_kept = True
        self._in_flight.add(self)  # Keep a reference to the work, so that Python does not destroy it.
        try:
            self._work.get_future().add_done_callback(self._end)
        except RuntimeError:  # In Gloo, the work of a reduce-scatter has no future.
            self._in_flight.discard(self)
            self._ended.append(self)

    def _end(self, ended: torch.futures.Future[Any]) -> None:
        try:
            if isinstance(error := ended.value(), Exception):
                self._error = error
        except Exception as err:
            self._error = err
        self._ended.append(self)
        self._in_flight.discard(self)
        self._with_tensors.append(self)
        if len(self._with_tensors) > 16:
            with suppress(IndexError):  # The list is empty if another thread has removed the last item.
                self._with_tensors.popleft()._work = None

    def _drop(self) -> None:
        """Free the output tensors if C++ refers to this work, because C++ does not read a work's results."""
        self._is_asked = True
        if self._is_kept:
            self._work = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the collective of the wrapped work has ended. Raise its error if it has failed."""
        self._is_asked = True
        if (work := self._work) is not None:
            work.wait(timeout)
            self._drop()
        if self._error is not None:
            raise fresh(self._error) if isinstance(self._error, CommError) else self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the collective of the wrapped work has ended."""
        return self._work is None or self._work.is_completed()

    def exception(self) -> BaseException | None:
        """Return the error of the wrapped work's collective. None if it has not failed."""
        return self._error if self._work is None else self._work.exception()

    def result(self) -> Any:
        """Return the tensors to which the wrapped work's collective writes, or None if `wait` has freed that work.

        `wait` frees it if C++ code refers to this object.
        """
        return None if self._work is None else self._work.result()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of the wrapped work.

        Raises:
            RuntimeError: the wrapped work has been freed.
        """
        if self._work is None:
            raise RuntimeError(
                "get_future() was called too late, because this Work object was freed when a later collective ended; "
                "call get_future() directly after launching the collective"
            )
        future = self._work.get_future()
        self._drop()
        return future


def lasting(work: FillingWork) -> FillingWork:
    """Return a `Work` object that stays alive as long as C++ may wait for it.

    Wrap `work` if this PyTorch requires it.
    """
    return work if KEEPS_WORKS else LastingWork(work)


FAULT_POLL_S = 0.1
"""Interval in seconds at which a thread that waits for Gloo checks whether the whole process group has failed."""


class InnerGroupWork(FillingWork):
    """`Work` object of a collective in the inner group (Gloo or NCCL).

    Its `wait` raises an error if the whole group fails.

    The inner group's own `Work` object would continue to wait after such a failure.
    """

    def __init__(self, lanes: GroupLanes, work: Work) -> None:
        super().__init__(None)
        self._lanes, self._work = lanes, work

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the collective has ended or the whole process group has failed.

        Raises:
            CommError: the process group has failed.
            RuntimeError: the collective has failed, or the timeout has passed.
        """
        limit_s = timeout.total_seconds()
        deadline_s = time.monotonic() + limit_s if limit_s > 0 else float("inf")
        while True:
            begin_s = time.monotonic()
            slice_s = max(1e-3, min(FAULT_POLL_S, deadline_s - begin_s))
            try:
                return self._work.wait(timedelta(seconds=slice_s))
            except RuntimeError as err:
                if (fault := self._lanes.fault) is not None:
                    raise fresh(fault) from err
                if self._work.is_completed():
                    break
                now_s = time.monotonic()
                # A wait is cut into slices of `slice_s`, and PyTorch also raises an error (timeout) at the end of a
                # slice. An earlier error is the collective's own, so raise it. `is_completed` cannot distinguish the
                # two, because some failed works of PyTorch never complete.
                if now_s > deadline_s or now_s - begin_s < slice_s / 2:
                    raise
        return self._work.wait()

    def is_completed(self) -> bool:
        """Return whether the collective has ended or the whole process group has failed."""
        return self._work.is_completed() or self._lanes.fault is not None

    def exception(self) -> BaseException | None:
        """Return the error of the collective or of the process group. None if there is no error."""
        if not self._work.is_completed():
            return self._lanes.fault
        try:  # PyTorch before 2.7 raises the error only in `wait`.
            self._work.wait()
        except RuntimeError as err:
            return err
        return None

    def result(self) -> Any:
        """Return the tensors to which the collective writes its results."""
        return self._work.result()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of the inner group's work."""
        return self._work.get_future()


class FollowedWork(FillingWork):
    """`Work` object that stands for several other works, followed by a function `then`.

    `then` runs once, after all of the works have ended.

    The first thread that finds that all of the works have ended calls `then`.
    """

    def __init__(self, works: Sequence[Work], then: Callable[[], None], outputs: Tensors) -> None:
        super().__init__(outputs)
        self._works, self._then = works, then
        self._followed = False
        self._error: RuntimeError | None = None
        self._following = threading.Lock()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for all of the works, then call `then` unless another thread has called it."""
        for work in self._works:
            work.wait(timeout)
        self._follow()
        return True

    def _follow(self) -> None:
        with self._following:
            if not self._followed:
                self._then()
                self._followed = True

    def is_completed(self) -> bool:
        """Return whether all of the works have ended. If they have, first call `then`."""
        if not all(work.is_completed() for work in self._works):
            return False
        try:
            self.wait()
        except RuntimeError as err:
            self._error = err
        return True

    def exception(self) -> BaseException | None:
        """Return the error of a failed work. None if some works have not ended, or if none has failed."""
        return self._error if self.is_completed() else None

    def get_future(self) -> torch.futures.Future[Tensors]:
        """Return a future that calls `then` when all of the works have ended."""

        def follow(ended: torch.futures.Future[Any]) -> Any:
            for future in ended.value():
                # The future of a failed LaneWork has the exception as its value, which must be raised.
                if isinstance(error := future.value(), Exception):
                    raise error
            self._follow()
            return self._outputs

        followed: torch.futures.Future[Tensors] = torch.futures.collect_all(
            [work.get_future() for work in self._works]
        ).then(follow)
        return followed


def meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Connect all ranks that the launcher has started. Collective.

    Returns:
        A store shared by all ranks, the rank of this process, and the number of ranks.

    Raises:
        ConfigError: the launcher's environment variables contradict each other, or the job is elastic.
        CommError: the ranks cannot connect to each other.
    """
    if AGENT in os.environ:
        # In an elastic job, each process would be a group of its own, and train alone without a warning.
        raise ConfigError(
            'init_process_group("sirtaki") requires a fixed set of ranks, but this job is elastic; start the job '
            "without --min-np and --max-np, or use hvd.init() and hvd.elastic"
        )
    settings = replace(Settings.from_environ(), start_timeout_s=timeout.total_seconds())
    ranks = open_ranks(settings)
    control = ControlPlane(ranks, interface=settings.gloo_interface)
    store = control.store()
    control.close()
    ranks.free()
    return store, control.rank, control.size


LARGE_BYTES = 256 * 1024
"""Minimum bytes of a tensor that lanes (Sirtaki's connections) reduce.

Below it, Gloo is as fast if each rank has a core.
"""

LARGE_GATHER_BYTES = 512 * 1024
"""Minimum size in bytes of the output of an all-gather that runs over lanes (Sirtaki's connections).

Measured between four emulated nodes on busy cores: for 256 KiB, lanes took 1.5 times as long as Gloo, and for 512 KiB
half as long. On one host, lanes were faster at any size with four ranks, and from 4 MiB on with two ranks.
"""

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

Tensors = list[torch.Tensor]

# Typed as Any, because the methods of `dist.ProcessGroup` differ between versions of PyTorch.
_ProcessGroup: Any = dist.ProcessGroup


def _left_to_inner(name: str) -> Callable[..., Work | None]:
    """Return a method that calls the method `name` of the inner group (Gloo or NCCL).

    The first argument of the method must contain tensors, whose device decides which inner group is called.
    """

    # The arguments of the inner group's method differ between versions of PyTorch.
    def method(self: SirtakiProcessGroup, tensors: Any, *args: Any, **options: Any) -> Work | None:
        return self._ask(name, tensors, *args, **options)

    method.__name__ = name
    return shown(method)


def _first(tensors: Any) -> torch.Tensor | None:
    """Return the first tensor in nested lists or tuples of tensors. None if there is no tensor."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    found = map(_first, tensors) if isinstance(tensors, list | tuple) else ()
    return next((tensor for tensor in found if tensor is not None), None)


def _is_ours(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether lanes (Sirtaki's connections) support all of these tensors: dense, real and on the CPU."""
    return all(
        tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_complex() for tensor in tensors
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor over the same memory that is no inference tensor, so that any thread may write to it.

    Only code within `torch.inference_mode()` may write to an inference tensor. The group's threads run outside of this
    mode.
    """
    if not tensor.is_inference():
        return tensor.detach()
    with torch.inference_mode(False):
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return whole.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


# `opts` are PyTorch's options of the collective, which contain the operator of the reduction.
def _as_real(tensors: Tensors, opts: Any) -> Tensors:
    """Return views of complex tensors as real ones if the reduction is a sum.

    torch.distributed does this for all-reduces itself, but not for other reductions.
    """
    if ReduceRecipe.of(opts.reduceOp, 1).op != TorchOp.SUM:
        return tensors
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


_ended: list[Any] = []
"""Gloo groups that have been shut down.

They are freed when the next group is created: before PyTorch 2.9, freeing them at once could hang.
"""

_logged = False


def _on_submodule(module: torch.nn.Module, name: str, inside: torch.nn.Module | None) -> None:
    """Attach new DDP models over this backend. Global hook that PyTorch calls when a module gets a submodule."""
    if name == "module" and inside is not None and isinstance(module, DistributedDataParallel):
        auto_attach.watch(module, inside, backend=NAME)


def _log_once(settings: Settings, rank: int, size: int, *, has_nccl: bool) -> None:
    """Set up logging and the hook that finds DDP models, and log the settings.

    Does so only for the first process group of this process.
    """
    global _logged
    if _logged:
        return
    _logged = True
    if not job.is_initialized():  # Start logging here only if `hvd.init()` has not done so.
        start_logging(settings, rank)
    exclude_from_compilation()
    if settings.attach and size > 1:
        register_module_module_registration_hook(_on_submodule)
    if size == 1:
        logger.info('the process group "sirtaki" has one rank, so it sends nothing')
        return
    if rank == 0 and not has_nccl and torch.cuda.is_available():
        logger.warning(
            'this PyTorch has no NCCL, so the process group "sirtaki" copies CUDA tensors through host memory (Gloo); '
            "install a PyTorch with NCCL"
        )
    then = "DDP reduces gradients in its buckets, without tuning (SIRTAKI_ATTACH=0); call ddp.attach(model) to tune"
    if settings.attach:
        reduces = "tunes the reduction of" if settings.tunes else "reduces, without tuning,"
        then = f"Sirtaki {reduces} DDP gradients from each model's second step on (SIRTAKI_ATTACH=0 disables this)"
    logger.info(
        'the process group "sirtaki" has %d ranks. Large CPU tensors use shared memory within a host, and several '
        "connections between hosts; %s use Gloo. %s",
        size,
        "CUDA tensors use NCCL; all other tensors" if has_nccl else "all other tensors",
        then,
    )


class SirtakiProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """The process group of `init_process_group("sirtaki")`. All ranks must call the same collectives in one order."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        """Connect the ranks of the group. Collective.

        Args:
            store: key-value store of PyTorch that only this group uses.
            rank: rank of this process in the group.
            size: number of ranks in the group.
            timeout: maximum time to wait for other ranks.

        Raises:
            ConfigError: an environment variable is invalid.
            CommError: the ranks cannot connect to each other.
        """
        super().__init__(rank, size)
        settings = Settings.from_environ()
        self._inner: Any = open_group(PrefixStore("gloo/", store), rank, size, timeout)
        _ended.clear()
        if not RELEASES_INTERPRETER:
            finalize(self, _ended.append, self._inner)
        types = dist.ProcessGroup.BackendType
        if hasattr(self, "_set_default_backend"):  # PyTorch before 2.6 has no `_set_default_backend`.
            self._set_default_backend(types.GLOO)
        self._register_backend(CPU, types.GLOO, self._inner)
        self._on_cuda = self._open_cuda(PrefixStore("nccl/", store), rank, size, timeout)
        # Read the timeout at every use, because `torch.distributed` may change the timeout of the inner groups.
        self._timeout: Timeout = timeout_of(self) or timeout.total_seconds
        self._lanes: GroupLanes | None = None
        self._keeps_entries = settings.flight_entries > 0
        has_nccl = self._on_cuda is not self._inner
        _log_once(settings, dist.get_rank() if dist.is_initialized() else rank, size, has_nccl=has_nccl)
        if size > 1:
            ranks = open_at_store(
                settings, PrefixStore("mesh/", store), rank=rank, size=size, timeout_s=timeout.total_seconds()
            )
            self._lanes = GroupLanes(ranks, settings=settings, timeout=self._timeout)
            # Do not close the lanes (connections) at interpreter exit, because the other ranks must count a rank that
            # exits without `shutdown` as lost.
            finalize(self, self._lanes.close)

    @cached_property
    def plain(self) -> dist.ProcessGroup:
        """Return a `dist.ProcessGroup` with the same Gloo and NCCL groups.

        PyTorch's dispatch modes can record its collectives, but not those of this class.
        """
        plain = dist.ProcessGroup(self.rank(), self.size())  # type: ignore[call-arg]  # missing in PyTorch's stub
        types = dist.ProcessGroup.BackendType
        plain._register_backend(CPU, types.GLOO, self._inner)
        if self._on_cuda is not self._inner:
            plain._register_backend(CUDA, types.NCCL, self._on_cuda)
        plain._set_group_name(self.group_name)
        plain._set_group_desc(self.group_desc)
        return plain

    @cached_property
    def _entries(self) -> FlightEntries:
        return FlightEntries(self)

    # The result is Any, because PyTorch's stubs lack methods of process groups.
    def _open_cuda(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Create the inner group for CUDA tensors with NCCL. Collective.

        Return the Gloo group if this PyTorch has no NCCL.
        """
        types = dist.ProcessGroup.BackendType
        if not torch.cuda.is_available():
            return self._inner
        if not dist.is_nccl_available():
            self._register_backend(CUDA, types.GLOO, self._inner)
            return self._inner
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = keep_in_forked_children(dist.ProcessGroupNCCL(store, rank, size, options))
        self._register_backend(CUDA, types.NCCL, nccl)
        return nccl

    def getBackendName(self) -> str:
        """Return the name of the backend. Called by PyTorch's C++."""
        return NAME

    # ── all-reduce ───────────────────────────────────────────────────────────────────────────────────────────────

    @shown
    @outside_modes
    def allreduce(
        self, tensors: Any, opts: Any = None
    ) -> Work | None:  # PyTorch passes one tensor or a list of tensors, and options of two classes.
        """See `torch.distributed.all_reduce`. Collective."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        opts = dist.AllreduceOptions() if opts is None else opts
        if isinstance(opts, dist.AllreduceOptions):
            if len(tensors) != 1 or not _is_ours(tensors):
                return self._ask_contiguous("allreduce", tensors, opts)
            return self._all_reduce(tensors, opts.reduceOp, opts)
        options = dist.AllreduceOptions()
        options.reduceOp = opts
        return self.allreduce(tensors, options)

    @shown
    @outside_modes
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_reduce_coalesced`. Collective."""
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        if not tensors or not _is_ours(tensors) or len({tensor.dtype for tensor in tensors}) > 1:
            return self._ask("allreduce_coalesced", tensors, opts)
        return self._all_reduce(tensors, opts.reduceOp, opts)

    def _all_reduce(self, tensors: Tensors, op: dist.ReduceOp, opts: Any) -> Work:
        """Reduce several tensors as one flat copy. Reduce a single contiguous tensor in place."""
        # Detach, because autograd may be enabled in the thread that writes to the tensors.
        plain = [_plain(tensor) for tensor in tensors]
        whole = len(tensors) == 1 and tensors[0].is_contiguous()
        flat = plain[0].view(-1) if whole else torch.cat([tensor.reshape(-1) for tensor in plain])

        def copy_back() -> None:
            parts = torch.split(flat, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(plain, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

        return self._reduce(
            flat, flat, 0, ReduceRecipe.of(op, self.size()), opts, tensors, None if whole else copy_back
        )

    # ── reduce-scatter ───────────────────────────────────────────────────────────────────────────────────────────

    @shown
    @outside_modes
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work | None:
        """See `torch.distributed.reduce_scatter`. Collective.

        The input tensors of one rank may have different sizes.
        """
        opts = dist.ReduceScatterOptions() if opts is None else opts
        outputs, inputs = _as_real(outputs, opts), [_as_real(each, opts) for each in inputs]
        if not _is_ours([*outputs, *(tensor for each in inputs for tensor in each)]):
            return self._ask("reduce_scatter", outputs, inputs, opts)
        parts, (output,) = inputs[0], outputs
        if len(parts) != self.size() or parts[self.rank()].numel() != output.numel():
            raise ValueError(
                f"reduce_scatter requires a list of {self.size()} input tensors, and the output of a rank must have "
                f"the size of input[rank]; found {len(parts)} inputs and an output of {output.numel()} elements"
            )
        start = sum(part.numel() for part in parts[: self.rank()])
        return self._scatter(torch.cat([part.reshape(-1) for part in parts]), output, start, opts)

    @shown
    @outside_modes
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work | None:
        """See `torch.distributed.reduce_scatter_tensor`. Collective."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        output, tensor = _as_real([output, tensor], opts)
        if not _is_ours([output, tensor]):
            return self._ask("_reduce_scatter_base", output, tensor, opts)
        if tensor.numel() != self.size() * output.numel() or tensor.dtype != output.dtype:
            raise ValueError(
                f"the output of reduce_scatter_tensor must have the dtype {tensor.dtype} and 1/{self.size()} of the "
                f"input's {tensor.numel()} elements, found the dtype {output.dtype} and {output.numel()} elements"
            )
        return self._scatter(tensor.reshape(-1), output, self.rank() * output.numel(), opts)

    @shown
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Launch several reduce-scatters and return one `Work` object for all of them. Collective."""
        works = [
            self.reduce_scatter_single(output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._joined(works, outputs)

    # Define the names by which PyTorch before 2.13 calls the reduce-scatters above.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scatter(self, flat: torch.Tensor, output: torch.Tensor, start: int, opts: Any) -> Work:
        flat, plain = flat.detach(), _plain(output)
        if output.is_contiguous():
            target = plain.view(-1)
        else:
            target = torch.empty(output.numel(), dtype=output.dtype, device="cpu")

        def copy_back() -> None:
            plain.copy_(target.view(output.shape))

        then = None if output.is_contiguous() else copy_back
        return self._reduce(flat, target, start, ReduceRecipe.of(opts.reduceOp, self.size()), opts, [output], then)

    @staticmethod
    def _joined(works: Sequence[Work | None], outputs: Tensors) -> Work | None:
        """Return one `Work` object that has ended when all `works` have ended.

        None if all of the collectives were synchronous.
        """
        left = [work for work in works if work is not None]
        return lasting(FollowedWork(left, lambda: None, outputs)) if left else None

    # ── all-reduce and reduce-scatter ────────────────────────────────────────────────────────────────────────────

    def _reduce(
        self,
        flat: torch.Tensor,
        target: torch.Tensor,
        start: int,
        recipe: ReduceRecipe,
        opts: Any,
        outputs: Tensors,
        then: Callable[[], None] | None,
    ) -> Work:
        """Reduce `flat` over ranks, and write the result from element `start` on to `target`. Collective.

        Args:
            flat: tensor that this rank contributes, 1-d and contiguous. Unchanged, unless `flat` is `target`.
            target: tensor that receives a part of the result, 1-d and contiguous.
            start: index of the result's first element that is written to `target`.
            recipe: the reduction.
            opts: PyTorch's options of the collective. Only the timeout and `asyncOp` are used.
            outputs: the caller's output tensors, which the `Work` object returns as its result.
            then: function that copies `target` to `outputs`. None if `outputs` share the memory of `target`.
        """
        if recipe.factor is not None and target is not flat:
            flat = flat.clone()
        recipe.prepare_(flat)

        def end() -> None:
            recipe.divide_(target)
            if then is not None:
                then()

        if self._lanes is not None and self._takes_lanes(flat, recipe):
            op = recipe.lane_op
            assert op is not None
            timeout_s = opts.timeout.total_seconds()
            reduction = TensorReduction(
                flat,
                target,
                start=start,
                op=op,
                timeout_s=timeout_s if timeout_s > 0 else self._timeout(),
                then=end,
            )
            if self._keeps_entries:
                self._entries.add("all_reduce" if target is flat else "reduce_scatter", flat.numel(), flat.dtype)
            self._lanes.submit(reduction, awaited=not getattr(opts, "asyncOp", True))
            return lasting(LaneWork(self._lanes, reduction, outputs))
        scratch = flat if target is flat else flat.clone()
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp(recipe.op), opts.timeout
        if target is flat and recipe.divisor == 1 and then is None:
            return self._watched(  # Pass a view with the output's shape, because the future's value is this view.
                self._inner.allreduce([flat.view(outputs[0].shape)], options)
            )
        work = self._watched(self._inner.allreduce([scratch], options))

        def end_small() -> None:
            if target is not scratch:
                target.copy_(scratch[start : start + target.numel()])
            end()

        return lasting(FollowedWork([work], end_small, outputs))

    @staticmethod
    def _takes_lanes(flat: torch.Tensor, recipe: ReduceRecipe) -> bool:
        large = flat.numel() * flat.itemsize >= LARGE_BYTES
        return large and flat.dtype in LANE_DTYPES and recipe.lane_op is not None

    # ── all-gather ───────────────────────────────────────────────────────────────────────────────────────────────

    @shown
    @outside_modes
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_gather`. Collective."""
        opts = AllgatherOptions() if opts is None else opts
        if self._lanes is None or len(inputs) != 1 or len(outputs) != 1 or not self._gathers(outputs[0], inputs[0]):
            return self._ask("allgather", outputs, inputs, opts)
        plain = [_plain(tensor) for tensor in outputs[0]]
        apart = [tensor for tensor in plain if not tensor.is_contiguous()]
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in apart]
        instead = dict(zip(map(id, apart), copies, strict=True))
        rows = [instead.get(id(tensor), tensor).view(-1) for tensor in plain]
        return self._gather(rows, inputs[0], list(zip(apart, copies, strict=True)), outputs)

    @shown
    @outside_modes
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work | None:
        """See `torch.distributed.all_gather_into_tensor`. Collective."""
        opts = AllgatherOptions() if opts is None else opts
        if self._lanes is None or not self._gathers([output], tensor):
            return self._ask("_allgather_base", output, tensor, opts)
        plain = _plain(output)
        whole = plain if plain.is_contiguous() else torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
        return self._gather(
            whole.view(-1).chunk(self.size()),
            tensor,
            [] if whole is plain else [(plain, whole)],
            list(plain.chunk(self.size())),  # Return a list of parts, like the result of Gloo's work.
        )

    @shown
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Launch several all-gathers and return one `Work` object for all of them. Collective."""
        works = [self.all_gather_single(output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)]
        return self._joined(works, outputs)

    # Define the names by which PyTorch before 2.13 calls the all-gathers above.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gathers(self, outputs: Tensors, tensor: torch.Tensor) -> bool:
        """Return whether lanes (Sirtaki's connections), and not Gloo, gather the tensors.

        All ranks get the same answer.

        Invalid arguments are left to Gloo, which raises an error for them.
        """
        numel = self.size() * tensor.numel()
        return (
            numel * tensor.itemsize >= LARGE_GATHER_BYTES
            and (tensor.dtype in LANE_DTYPES or tensor.dtype is torch.bool)
            and _is_ours([tensor, *outputs])
            and all(output.dtype is tensor.dtype and output.numel() * len(outputs) == numel for output in outputs)
        )

    def _gather(
        self,
        rows: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        outputs: Any,
    ) -> Work:
        """Gather the tensors of all ranks over the lanes (Sirtaki's connections).

        Args:
            rows: tensors that receive the tensors of all ranks, in rank order.
            tensor: tensor that this rank sends.
            copies: pairs of tensors. After the gather, the second tensor of each pair is copied to the first.
            outputs: the caller's output tensors, which the `Work` object returns as its result.
        """
        assert self._lanes is not None

        def copy_back() -> None:
            for output, copy in copies:
                output.copy_(copy)

        if self._keeps_entries:
            self._entries.add("all_gather", tensor.numel(), torch.uint8 if tensor.dtype is torch.bool else tensor.dtype)
        gather = TensorGather(rows, tensor.detach().contiguous().view(-1), copy_back)
        self._lanes.gather(gather)
        return lasting(LaneWork(self._lanes, gather, outputs))

    # ── collectives of the inner groups ──────────────────────────────────────────────────────────────────────────

    def _ask(
        self, name: str, tensors: Any, *args: Any, **options: Any
    ) -> Work | None:  # The arguments of the inner group's method differ between versions of PyTorch.
        """Call the method `name` of the inner group (Gloo or NCCL) for the device of the tensors.

        Returns:
            The `Work` object. None for a synchronous collective of NCCL from PyTorch 2.8 on, which makes the current
            CUDA stream wait instead.
        """
        first = _first((tensors, *args))
        on_cuda = first is not None and first.device.type == "cuda"
        inferred = first is not None and first.is_inference()
        # Enter inference mode to send inference tensors. The inner group's threads inherit the mode, without which they
        # must not write to such tensors.
        with torch.inference_mode() if inferred else nullcontext():
            work: Work | None = getattr(self._on_cuda if on_cuda else self._inner, name)(tensors, *args, **options)
        # Do not watch works that cannot be polled with short timeouts: a timeout of send or recv breaks the connection,
        # and the work of PyTorch 2.4's reduce-scatter never reports completion.
        alone = name in ("send", "recv") or (name == "_reduce_scatter_base" and not KEEPS_WORKS)
        if work is None or alone or (on_cuda and self._on_cuda is not self._inner):
            return work
        return self._watched(work)

    def _watched(self, work: Work) -> Work:
        """Return a `Work` object that waits for `work`, and raises an error if the whole process group fails."""
        return lasting(InnerGroupWork(self._lanes, work)) if self._lanes is not None else work

    @shown
    def barrier(self, opts: Any = None) -> Work | None:
        """See `torch.distributed.barrier`. Collective."""
        opts = dist.BarrierOptions() if opts is None else opts
        on_cuda = opts.device is not None and opts.device.type == "cuda"
        work: Work = (self._on_cuda if on_cuda else self._inner).barrier(opts)
        return work if on_cuda and self._on_cuda is not self._inner else self._watched(work)

    @shown
    def broadcast(self, tensors: Any, *args: Any, **options: Any) -> Work | None:
        """See `torch.distributed.broadcast`. Collective.

        Non-contiguous tensors are copied, because Gloo ignores strides.
        """
        return self._ask_contiguous("broadcast", tensors, *args, **options)

    @shown
    @outside_modes
    def reduce(self, tensors: Any, opts: Any = None, *args: Any, **options: Any) -> Work | None:
        """See `torch.distributed.reduce`. Collective. Non-contiguous tensors are copied, as Gloo ignores strides."""
        opts = dist.ReduceOptions() if opts is None else opts
        outputs = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        known = isinstance(opts, dist.ReduceOptions) and _is_ours(outputs)
        if not known or (recipe := ReduceRecipe.of(opts.reduceOp, self.size())).op == opts.reduceOp:
            return self._ask_contiguous("reduce", tensors, opts, *args, **options)
        plain = _plain(outputs[0])
        total = plain.reshape(-1).clone()
        recipe.prepare_(total)
        asked = dist.ReduceOptions()
        asked.reduceOp, asked.rootRank, asked.timeout = dist.ReduceOp(recipe.op), opts.rootRank, opts.timeout

        def end() -> None:
            if self.rank() == opts.rootRank:
                recipe.divide_(total)
                plain.copy_(total.view(plain.shape))

        return lasting(FollowedWork([self._watched(self._inner.reduce([total], asked))], end, outputs))

    @shown
    def scatter(self, outputs: Any, inputs: Any, *args: Any, **options: Any) -> Work | None:
        """See `torch.distributed.scatter`. Collective. Non-contiguous tensors are copied, as Gloo ignores strides."""
        plain = [[tensor.contiguous() for tensor in part] if isinstance(part, list) else part for part in inputs]
        return self._ask_contiguous("scatter", outputs, plain, *args, **options)

    @shown
    def gather(self, outputs: list[Tensors], inputs: Tensors, *args: Any, **options: Any) -> Work | None:
        """See `torch.distributed.gather`. Collective. Non-contiguous inputs are copied, as old Gloo ignores strides."""
        return self._ask("gather", outputs, [tensor.contiguous() for tensor in inputs], *args, **options)

    @shown
    def all_to_all_single(self, output: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Work | None:
        """See `torch.distributed.all_to_all_single`. Collective. Non-contiguous tensors are copied for Gloo."""
        return self._ask_contiguous("alltoall_base", output, tensor.detach().contiguous(), *args, **options)

    def _ask_contiguous(self, name: str, tensors: Any, *args: Any, **options: Any) -> Work | None:
        """Call the inner group (Gloo or NCCL) with contiguous copies of tensors, because Gloo ignores strides.

        Copy the results back to the tensors.
        """
        outputs = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if all(tensor.layout is not torch.strided or tensor.is_contiguous() for tensor in outputs):
            return self._ask(name, tensors, *args, **options)
        plain = [_plain(tensor) for tensor in outputs]
        copies = [tensor.contiguous() for tensor in plain]

        def copy_back() -> None:
            for tensor, copy in zip(plain, copies, strict=True):
                tensor.copy_(copy)

        work = self._ask(name, copies[0] if isinstance(tensors, torch.Tensor) else copies, *args, **options)
        if work is None:  # The collective is synchronous, and NCCL makes the current CUDA stream wait for it.
            copy_back()
            return None
        return lasting(FollowedWork([work], copy_back, outputs))

    send = _left_to_inner("send")
    recv = _left_to_inner("recv")

    alltoall_base = all_to_all_single  # Name of the same method in PyTorch before 2.13.

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def shutdown(self) -> None:
        """Close Sirtaki's connections, then NCCL's communicators. PyTorch calls it from `destroy_process_group`."""
        try:
            if self._lanes is not None:
                self._lanes.close()
        finally:
            self._end_on_cuda("shutdown")

    def abort(self) -> None:
        """Abort this rank's communication in this process group, that of NCCL first.

        PyTorch calls it if the group has failed.
        """
        try:
            self._end_on_cuda("abort")
        finally:
            if self._lanes is not None:
                self._lanes.close()
            if hasattr(self._inner, "abort"):  # Before PyTorch 2.7, process groups have no `abort`.
                self._inner.abort()

    def _end_on_cuda(self, method: str) -> None:
        if self._on_cuda is not self._inner:
            # Before PyTorch 2.6, the method's name begins with an underscore.
            name = method if hasattr(self._on_cuda, method) else f"_{method}"
            getattr(self._on_cuda, name)()
