"""The process group behind `init_process_group("sirtaki")`.

Large all-reduces, reduce-scatters and all-gathers of CPU tensors go through lanes; everything else is an inner group's:
Gloo's, and for CUDA tensors NCCL's. PyTorch asks that by itself for what is not defined here.

What PyTorch's C++ lets a Python class define has to be defined, though: for what is missing it asks the inner group
with the interpreter locked, which hangs if one of Gloo's threads wants the interpreter, to free a tensor.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
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
from sirtaki.engine.autograd import in_backward, when_backward_ends
from sirtaki.engine.c10d import timeout_of
from sirtaki.engine.console import start_logging
from sirtaki.engine.lanes import control_of, open_lanes, open_shards
from sirtaki.engine.ranks import open_at_store, open_ranks
from sirtaki.engine.settings import NEVER_S, Settings
from sirtaki.errors import CommError, ConfigError, PeerFaultError, PeerLostError, StallError
from sirtaki.machine import finalize, free_in_forked_children, in_forked_children, keep_in_forked_children
from sirtaki.torch_backend import NAME
from sirtaki.uncompiled import exclude_from_compilation

from .shown import RELEASES_INTERPRETER, FlightEntries, shown

# ── what carries the large tensors of one process group ───────────────────────────────────────────────────────────────
#
# They are opened when the first tensor comes, as a group that only tells small things needs none. A thread does that,
# and drives what nobody waits for, so that submitting never waits for other ranks. Gathers have streams and a thread
# of their own, which are opened in the same way.

LEAVE_S = 5.0
"""How long ranks that destroy a group wait for each other."""


PIECE_BYTES = 2 << 20
"""Of a shard, at most: gathers go in such pieces, as ranks of one host have two slots of that size each."""

AT_ONCE = 4
"""So many gathers are under way before the first of them is waited for."""


class TensorGather(TensorOperation):
    """The tensors of all ranks on their way to each.

    Attributes:
        rows: get those of each rank, 1-d and contiguous.
        shard: this rank's, 1-d and contiguous; left alone until it is done. It may be its row.
    """

    def __init__(
        self, rows: Sequence[torch.Tensor], shard: torch.Tensor, then: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(then)
        self.rows, self.shard = rows, shard
        self._works: list[ShardWork] = []

    def start(self, lanes: ShardLanes) -> None:
        """Collective: in pieces, of which earlier ones may be awaited."""
        step = PIECE_BYTES // self.shard.itemsize
        for low in range(0, self.shard.numel(), step):
            piece = slice(low, low + step)
            self._works.append(lanes.gather([row[piece] for row in self.rows], self.shard[piece]))

    def complete(self) -> None:
        """Waits for all pieces, and says that they are there."""
        for work in self._works:
            work.wait()
        self.finish()


class GroupLanes:
    """The lanes of one process group; every rank submits the same tensors in the same order."""

    def __init__(self, ranks: Communicator, *, settings: Settings, timeout: Timeout) -> None:
        """Opens nothing.

        Args:
            ranks: of the group; ends with the lanes.
            settings: of this process.
            timeout: how long this rank waits for the others.
        """
        self._ranks, self._settings, self._timeout = ranks, settings, timeout
        self._pipeline: UnitPipeline | None = None
        self._error: CommError | None = None
        self._backlog: deque[TensorReduction] = deque()  # of what came before they were open
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
        """What has gone wrong in the communication of any rank, which ends the group.

        That a rank has ended is none: what others do without it goes on.
        """
        error = self._ranks.failures.error
        return None if isinstance(error, PeerLostError) and not isinstance(error, PeerFaultError) else error

    def gather(self, gather: TensorGather) -> None:
        """Starts it; never blocks on other ranks.

        Raises:
            CommError: the group has failed.
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
        """Starts it; never blocks on other ranks.

        Args:
            reduction: of one tensor.
            awaited: `finish` follows at once, so that no other thread need be woken.

        Raises:
            CommError: the group has failed.
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
        """From now on what has been submitted gets on though nobody waits for it."""
        self._business.set()

    def finish(self, operation: TensorOperation, timeout_s: float | None = None) -> bool:
        """Blocks until it is done; False if the time is up.

        Raises:
            CommError: it has failed.
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
        except Exception as err:  # whatever it is, those who wait must hear of it
            self._fail(err if isinstance(err, CommError) else CommError(f"no streams for this process group: {err}"))
            return
        with self._lock:
            self._pipeline = pipeline
            with suppress(CommError):  # which those hear of who wait
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
        except Exception as err:  # whatever it is, those who wait must hear of it
            error = err if isinstance(err, CommError) else CommError(f"this process group cannot gather: {err!r}")
            error = self._ranks.failures.error or error  # what broke the connections, where that is known
            self._fail(error)
            for gather in under_way:
                gather.finish(error)

    @contextmanager
    def _limited_opening(self) -> Iterator[None]:
        """Fail the group if its lanes are not open within its timeout, because another rank has not come."""
        begin_s, opened = time.monotonic(), threading.Event()

        def watch() -> None:
            while not opened.wait(FAULT_LOOK_S):
                if time.monotonic() - begin_s > (limit_s := self._timeout()):
                    late = f"the first large tensor of this process group was not sent within {limit_s:g} s"
                    self._ranks.failures.report(StallError(f"{late}: another rank has not come, or stands still"))
                    return

        threading.Thread(target=watch, name="sirtaki-group-opening", daemon=True).start()
        try:
            yield
        finally:
            opened.set()

    def _report(self, ended: Future[None]) -> None:
        """What an operation has failed with has failed for the whole group; how it ends when that is closed is none."""
        if isinstance(error := ended.exception(), CommError) and not self._closing:
            self._ranks.failures.report(error)

    def _tell_of_fault(self) -> None:
        """The others wait for what this rank will not do any more: they hear of it at once, from whatever thread."""
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
        """Collective in so far as ranks take leave of each other, for some seconds at most; what is under way fails.

        Ranks that wait for this one after that are told that it has left.
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
        self._ranks.failures.report(destroyed)  # which ends waits for what another rank has not begun
        for thread in (self._thread, self._gatherer):
            if thread is not None:
                thread.join(LEAVE_S)
        self._ranks.free()
        if pipeline is not None:
            pipeline.close(together=False)
        if self._shards is not None:
            self._shards.close()

    def _take_leave(self) -> None:
        with suppress(CommError):  # then all know already that the group has failed
            if not leave_together(self._ranks.duplicate(), LEAVE_S):
                self._ranks.abort(f"rank {self._ranks.rank} has destroyed the process group, and others use it")


# ── the process group behind `init_process_group("sirtaki")` ──────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)

LANE_OPS = {theirs: ours for ours, theirs in TORCH_OPS.items()}

LANE_DTYPES = frozenset(
    (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    )
)
"""Those that Gloo adds up, too; a bool is left to Gloo, for which it is a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceRecipe:
    """How tensors of different ranks are combined.

    Attributes:
        op: PyTorch's, without averages and scaled sums.
        factor: what this rank's tensor is multiplied by before that; None = nothing.
        divisor: what the result is divided by; 1 = nothing. Integers are rounded towards zero, as NCCL does.
    """

    op: TorchOp.RedOpType
    factor: float | torch.Tensor | None = None
    divisor: int = 1

    @classmethod
    def of(cls, op: TorchOp | TorchOp.RedOpType, size: int) -> ReduceRecipe:
        """That of an operation over `size` ranks."""
        whole: Any = TorchOp(op) if isinstance(op, TorchOp.RedOpType) else op  # Any: the stub lacks what pickles it
        kind, factor = whole.__getstate__()
        if kind == TorchOp.AVG:
            return cls(op=TorchOp.SUM, divisor=size)
        return cls(op=TorchOp.SUM if kind == TorchOp.PREMUL_SUM else kind, factor=factor)

    @property
    def lane_op(self) -> ReduceOp | None:
        """What lanes do; None if they can't."""
        return LANE_OPS.get(self.op)

    def prepare_(self, tensor: torch.Tensor) -> None:
        """In place, before others see it."""
        if self.factor is not None:
            tensor.mul_(self.factor)

    def divide_(self, tensor: torch.Tensor) -> None:
        """In place, at the end."""
        if self.divisor == 1:
            return
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.div_(self.divisor)
        else:
            tensor.div_(self.divisor, rounding_mode="trunc")


NO_TIMEOUT = timedelta(0)
"""What PyTorch says where it means none."""


KEEPS_WORKS = TorchVersion(torch.__version__) >= "2.7"
"""Whether PyTorch's C++ keeps a work of Python's alive; 2.4 does not, and waits for ever."""


class FillingWork(Work):
    """An operation that fills some tensors."""

    def __init__(self, outputs: Any) -> None:  # Any: tensors, or lists of them where PyTorch has lists
        super().__init__()
        self._outputs = outputs

    def synchronize(self) -> None:
        """Waits: the tensors are the host's, which knows no streams."""
        self.wait()

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def result(self) -> Any:
        """What the operation fills."""
        return self._outputs


class LaneWork(FillingWork):
    """A tensor on its way through the lanes."""

    def __init__(self, lanes: GroupLanes, operation: TensorOperation, outputs: Any) -> None:
        super().__init__(outputs)
        self._lanes, self._operation = lanes, operation
        self._future: torch.futures.Future[Tensors] | None = None
        self._told, self._teller = threading.Event(), 0  # what waits for the future has run; in which thread it does

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Drives the lanes until the tensor is there; a timeout of 0 is none.

        Raises:
            CommError: it has failed, or the time is up.
        """
        limit_s = timeout.total_seconds()
        if not self._lanes.finish(self._operation, limit_s if limit_s > 0 else None):
            raise RuntimeError(f"an operation of this process group did not end within {limit_s:g} s")
        if self._future is not None and not self._tells():
            self._told.wait()  # the thread that ends the operation tells the future after those who wait
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, after a turn of the lanes if not; never waits."""
        if not self._operation.ended.done():
            self._lanes.drive()
        return self._operation.ended.done() and (self._future is None or self._told.is_set() or self._tells())

    def _tells(self) -> bool:
        """Return whether this is called by what waits for the future."""
        return self._teller == threading.get_ident()

    def exception(self) -> BaseException | None:
        """What it has failed with, if it has."""
        return self._operation.ended.exception() if self._operation.ended.done() else None

    def get_future(self) -> torch.futures.Future[Tensors]:
        """A future that gets the outputs, or the error, at the end."""
        if self._future is not None:
            return self._future
        future = self._future = torch.futures.Future()

        def tell(ended: Future[None]) -> None:
            self._teller = threading.get_ident()
            try:
                if (error := ended.exception()) is None:
                    future.set_result(self._outputs)
                else:
                    future.set_exception(error)  # type: ignore[arg-type]  # so torch's stub has it
            finally:
                self._teller = 0
                self._told.set()

        self._operation.ended.add_done_callback(tell)
        self._lanes.drive()
        return future


class LastingWork(FillingWork):
    """A work that C++ may wait for though PyTorch before 2.7 keeps none of Python's alive: it does so itself.

    PyTorch's own way out, `_create_work_from_future`, gives works whose `wait` raises nothing where the future fails.
    """

    _under_way: ClassVar[set[LastingWork]] = set()  # of those that Python has let go of
    _ended: ClassVar[deque[LastingWork]] = deque(maxlen=10_000)
    _with_tensors: ClassVar[deque[LastingWork]] = deque()  # of those that have ended, some: C++ may want the future

    def __init__(self, work: FillingWork) -> None:
        super().__init__(None)
        self._work: FillingWork | None = work
        self._error: Exception | None = None
        self._is_asked = self._is_kept = False
        self._process = os.getpid()

    def __del__(self) -> None:
        """Python has let go of it. C++ may have it, if nobody has waited or asked for the future."""
        if self._is_asked or self._work is None or sys.is_finalizing() or self._process != os.getpid():
            return
        self._is_kept = True
        self._under_way.add(self)  # which undoes that it goes
        try:
            self._work.get_future().add_done_callback(self._end)
        except RuntimeError:  # a reduce-scatter of Gloo's, which has none
            self._under_way.discard(self)
            self._ended.append(self)

    def _end(self, ended: torch.futures.Future[Any]) -> None:
        try:
            if isinstance(error := ended.value(), Exception):
                self._error = error
        except Exception as err:
            self._error = err
        self._ended.append(self)
        self._under_way.discard(self)
        self._with_tensors.append(self)
        if len(self._with_tensors) > 16:
            with suppress(IndexError):  # another thread was faster
                self._with_tensors.popleft()._work = None

    def _drop(self) -> None:
        """Its tensors, if C++ has it, which looks at no results."""
        self._is_asked = True
        if self._is_kept:
            self._work = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits as the work does, and raises what that raises."""
        self._is_asked = True
        if (work := self._work) is not None:
            work.wait(timeout)
            self._drop()
        if self._error is not None:
            raise fresh(self._error) if isinstance(self._error, CommError) else self._error
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self._work is None or self._work.is_completed()

    def exception(self) -> BaseException | None:
        """What it has failed with, if it has."""
        return self._error if self._work is None else self._work.exception()

    def result(self) -> Any:
        """What it fills."""
        return None if self._work is None else self._work.result()

    def get_future(self) -> torch.futures.Future[Any]:
        """That of the work."""
        if self._work is None:
            raise RuntimeError("whoever wants the future of this work has to ask for it before others end")
        future = self._work.get_future()
        self._drop()
        return future


def lasting(work: FillingWork) -> FillingWork:
    """What C++ may be given."""
    return work if KEEPS_WORKS else LastingWork(work)


FAULT_LOOK_S = 0.1
"""How often a wait for Gloo looks whether the group has failed."""


class InnerGroupWork(FillingWork):
    """A collective of the inner group, which that would wait for though a rank cannot come any more."""

    def __init__(self, lanes: GroupLanes, work: Work) -> None:
        super().__init__(None)
        self._lanes, self._work = lanes, work

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits for it as long as the group has not failed.

        Raises:
            CommError: the group has failed.
            RuntimeError: the collective has, or the time is up.
        """
        limit_s = timeout.total_seconds()
        deadline_s = time.monotonic() + limit_s if limit_s > 0 else float("inf")
        while True:
            begin_s = time.monotonic()
            slice_s = max(1e-3, min(FAULT_LOOK_S, deadline_s - begin_s))
            try:
                return self._work.wait(timedelta(seconds=slice_s))
            except RuntimeError as err:
                if (fault := self._lanes.fault) is not None:
                    raise fresh(fault) from err
                if self._work.is_completed():
                    break
                now_s = time.monotonic()
                # Some works of PyTorch's do not know that they have failed: those raise before the slice is over.
                if now_s > deadline_s or now_s - begin_s < slice_s / 2:
                    raise
        return self._work.wait()

    def is_completed(self) -> bool:
        """Return whether it has ended, or the group has failed."""
        return self._work.is_completed() or self._lanes.fault is not None

    def exception(self) -> BaseException | None:
        """What it has failed with, if it has."""
        if not self._work.is_completed():
            return self._lanes.fault
        try:  # PyTorch before 2.7 cannot say it to Python
            self._work.wait()
        except RuntimeError as err:
            return err
        return None

    def result(self) -> Any:
        """What it fills."""
        return self._work.result()

    def get_future(self) -> torch.futures.Future[Any]:
        """Gloo's: it ends when the collective does."""
        return self._work.get_future()


class FollowedWork(FillingWork):
    """Operations of other groups, and what is done when they have ended, once, by whoever is there first."""

    def __init__(self, works: Sequence[Work], then: Callable[[], None], outputs: Tensors) -> None:
        super().__init__(outputs)
        self._works, self._then = works, then
        self._followed = False
        self._error: RuntimeError | None = None
        self._following = threading.Lock()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits for each, and does what follows."""
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
        """Return whether all have ended; does what follows then."""
        if not all(work.is_completed() for work in self._works):
            return False
        try:
            self.wait()
        except RuntimeError as err:
            self._error = err
        return True

    def exception(self) -> BaseException | None:
        """What one of them has failed with, if all have ended."""
        return self._error if self.is_completed() else None

    def get_future(self) -> torch.futures.Future[Tensors]:
        """A future that does what follows when all have ended."""

        def follow(ended: torch.futures.Future[Any]) -> Any:
            for future in ended.value():
                if isinstance(error := future.value(), Exception):  # all that is left of a LaneWork's `set_exception`
                    raise error
            self._follow()
            return self._outputs

        followed: torch.futures.Future[Tensors] = torch.futures.collect_all(
            [work.get_future() for work in self._works]
        ).then(follow)
        return followed


def meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Collective over all ranks that the launcher has started.

    Returns:
        A store that all of them reach, this process's rank, and how many there are.

    Raises:
        ConfigError: what the launcher says does not fit together.
        CommError: the ranks do not find each other.
    """
    settings = replace(Settings.from_environ(), start_timeout_s=timeout.total_seconds())
    ranks = open_ranks(settings)
    control = ControlPlane(ranks, interface=settings.gloo_interface)
    store, _ = control.store()
    control.close()
    ranks.free()
    return store, control.rank, control.size


LARGE_BYTES = 256 * 1024
"""From this size on tensors take the lanes: below it Gloo is as fast, with a core for each rank."""

LARGE_GATHER_BYTES = 512 * 1024
"""Of all ranks' tensors together, from which on they are gathered by lanes.

Between four emulated nodes, on busy cores, a gather of 256 KiB took 1.5 times as long as Gloo's, of 512 KiB half as
long; on one host it paid at any size at four ranks, at two from 4 MiB on.
"""

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

Tensors = list[torch.Tensor]

_ProcessGroup: Any = dist.ProcessGroup  # Any: what it declares differs between versions of torch


def _left_to_inner(name: str) -> Callable[..., Work | None]:
    """A method that calls the inner group's of this name, whose first argument has tensors."""

    def method(self: SirtakiProcessGroup, tensors: Any, *args: Any, **options: Any) -> Work | None:  # Any: as there
        return self._ask(name, tensors, *args, **options)

    method.__name__ = name
    return shown(method)


def _first(tensors: Any) -> torch.Tensor | None:
    """Of arguments with tensors in them, or lists of them, or lists of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    found = map(_first, tensors) if isinstance(tensors, list | tuple) else ()
    return next((tensor for tensor in found if tensor is not None), None)


def _is_ours(tensors: Sequence[torch.Tensor]) -> bool:
    """Dense ones on the CPU; real, as torch.distributed has made of complex ones."""
    return all(
        tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_complex() for tensor in tensors
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as threads of the group may write it: without gradients, and no inference tensor.

    An inference tensor may be written within `torch.inference_mode()` only, in which those threads are not.
    """
    if not tensor.is_inference():
        return tensor.detach()
    with torch.inference_mode(False):
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return whole.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _as_real(tensors: Tensors, opts: Any) -> Tensors:  # Any: options with an operation
    """Complex ones as pairs of numbers, which torch.distributed does for all-reduces only, where the sum is theirs."""
    if ReduceRecipe.of(opts.reduceOp, 1).op != TorchOp.SUM:
        return tensors
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


@dataclass(slots=True)
class _Unreduced:
    """A model over this backend whose gradients DDP has not reduced yet.

    It is attached where the backward pass ends in which DDP has: all ranks come there, in the same order. A forward
    pass, or one within `no_sync()`, may be of one rank alone.

    Attributes:
        wanted: parameters that DDP reduces, by name: those that wanted gradients when it was made, frozen since or not.
        begun: DDP has begun to.
    """

    wanted: frozenset[str]
    begun: bool = False

    def attach(self, model: DistributedDataParallel) -> None:
        """Collective: from now on Sirtaki reduces what DDP has reduced.

        Raises:
            ConfigError: on all ranks: the model cannot be attached.
        """
        from sirtaki.torch.ddp import attach

        before = [(param, param.requires_grad) for param in model.module.parameters()]
        try:
            for name, param in model.module.named_parameters():
                param.requires_grad_(name in self.wanted)
            attach(model)
        finally:
            for param, wants in before:
                param.requires_grad_(wants)


_unreduced: weakref.WeakKeyDictionary[DistributedDataParallel, _Unreduced] = weakref.WeakKeyDictionary()
"""In the order in which they were made, the same on all ranks."""


def _see_ddp(module: torch.nn.Module, name: str, inside: torch.nn.Module | None, *, attach: bool) -> None:
    """A hook of PyTorch's where a module gets another one: DDP its model."""
    if name == "module" and inside is not None and isinstance(module, DistributedDataParallel):
        exclude_from_compilation()
        group = module.process_group
        if attach and isinstance(group, SirtakiProcessGroup) and group.size() == dist.get_world_size():
            _unreduced[module] = _Unreduced(
                frozenset(name for name, param in inside.named_parameters() if param.requires_grad)
            )


def _see_reduction() -> None:
    """In a backward pass in which DDP reduces gradients of some model, before it waits for them."""
    if _unreduced:
        when_backward_ends(_see_models)


def _see_models() -> None:
    """At the end of that pass, just before DDP waits."""
    for model, known in list(_unreduced.items()):
        done = model.static_graph and model._static_graph_delay_allreduce_enqueued  # it has waited, in its first pass
        known.begun |= done or not _is_idle(model)
    when_backward_ends(_attach_reduced)


def _is_idle(model: DistributedDataParallel) -> bool:
    """Return whether DDP has begun to reduce no gradients of the model, or has ended."""
    try:
        model.reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def _attach_reduced() -> None:
    """Collective, as DDP's reductions before it: attaches models that it has reduced, or leaves them to it for ever."""
    reduced = [(model, known) for model, known in _unreduced.items() if known.begun and _is_idle(model)]
    for model, known in reduced:
        del _unreduced[model]
        if model._join_config.enable or any(each.device.type != "cpu" for each in model.parameters()):
            continue
        try:
            known.attach(model)
        except ConfigError as err:  # on all ranks: DDP goes on as before
            logger.info("a model under DDP is not attached: %s", err)


_ended: list[Any] = []  # groups of Gloo's (Any: whose class is PyTorch's) where the interpreter is not released, until
# the next group is made

_told = False


def _tell_once(settings: Settings, rank: int, size: int) -> None:
    """What the first group of this process does, and how to do without: on rank 0, in one line."""
    global _told
    if _told:
        return
    _told = True
    if not job.is_initialized():  # else `hvd.init()` has
        start_logging(settings, rank)
    exclude_from_compilation()
    register_module_module_registration_hook(partial(_see_ddp, attach=settings.attach and size > 1))
    if size == 1:
        logger.info("process group of one rank: nothing is sent")
        return
    then = "gradients of DDP are reduced in its buckets, untuned (SIRTAKI_ATTACH=0): ddp.attach(model) tunes them"
    if settings.attach:
        tuned = "averaged, untuned," if not settings.tunes else "tuned"
        then = f"gradients of models under DDP are {tuned} from their second step on (SIRTAKI_ATTACH=0: left to DDP)"
    logger.info(
        "process group of %d ranks: sums and gathers of large CPU tensors go through shared memory within a host, over "
        "several connections between hosts, the rest through Gloo; %s",
        size,
        then,
    )


class SirtakiProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """Some ranks; every rank calls the same operations in the same order."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        """Collective over them.

        Args:
            store: this group's alone.
            rank: of this process in the group.
            size: how many there are.
            timeout: how long operations wait for other ranks.

        Raises:
            ConfigError: an environment variable is invalid.
            CommError: the ranks do not find each other.
        """
        super().__init__(rank, size)
        settings = Settings.from_environ()
        self._inner: Any = open_group(PrefixStore("gloo/", store), rank, size, timeout)
        _ended.clear()
        if not RELEASES_INTERPRETER:
            finalize(self, _ended.append, self._inner)
        types = dist.ProcessGroup.BackendType
        if hasattr(self, "_set_default_backend"):  # torch >= 2.6
            self._set_default_backend(types.GLOO)
        self._register_backend(CPU, types.GLOO, self._inner)
        self._on_cuda = self._open_cuda(PrefixStore("nccl/", store), rank, size, timeout)
        # `torch.distributed` changes the timeout of the inner groups.
        self._timeout: Timeout = timeout_of(self) or timeout.total_seconds
        self._lanes: GroupLanes | None = None
        self._keeps_entries = settings.flight_entries > 0
        _tell_once(settings, dist.get_rank() if dist.is_initialized() else rank, size)
        if size > 1:
            ranks = open_at_store(
                settings, PrefixStore("mesh/", store), rank=rank, size=size, timeout_s=timeout.total_seconds()
            )
            self._lanes = GroupLanes(ranks, settings=settings, timeout=self._timeout)
            # Not at the interpreter's end: a rank that ends without leave is lost to the others.
            finalize(self, self._lanes.close)

    @cached_property
    def plain(self) -> dist.ProcessGroup:
        """A group of PyTorch's own over the same inner groups; only its operators are used."""
        plain = dist.ProcessGroup(self.rank(), self.size())  # type: ignore[call-arg]  # the stub lacks this one
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

    def _open_cuda(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:  # Any: as `_inner`
        """Open and register the inner group for CUDA tensors: NCCL's, or Gloo's if there is no NCCL. Collective."""
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
        """PyTorch's C++ asks for it under this name."""
        return NAME

    # ── all-reduce ───────────────────────────────────────────────────────────────────────────────────────────────

    @shown
    @outside_modes
    def allreduce(
        self, tensors: Any, opts: Any = None
    ) -> Work | None:  # Any: one tensor or several, two classes of options
        """Collective: see `torch.distributed.all_reduce`."""
        if in_backward():  # DDP's, of gradients
            _see_reduction()
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
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work | None:  # Any: as above
        """Collective: see `torch.distributed.all_reduce_coalesced`."""
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        if not tensors or not _is_ours(tensors) or len({tensor.dtype for tensor in tensors}) > 1:
            return self._ask("allreduce_coalesced", tensors, opts)
        return self._all_reduce(tensors, opts.reduceOp, opts)

    def _all_reduce(self, tensors: Tensors, op: dist.ReduceOp, opts: Any) -> Work:
        """The tensors as one: a contiguous one where it lies, others in a copy."""
        plain = [_plain(tensor) for tensor in tensors]  # parameters are written by threads that record gradients
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
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Work | None:  # Any: as above
        """Collective: see `torch.distributed.reduce_scatter`; the inputs' sizes may differ from rank to rank."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        outputs, inputs = _as_real(outputs, opts), [_as_real(each, opts) for each in inputs]
        if not _is_ours([*outputs, *(tensor for each in inputs for tensor in each)]):
            return self._ask("reduce_scatter", outputs, inputs, opts)
        parts, (output,) = inputs[0], outputs
        if len(parts) != self.size() or parts[self.rank()].numel() != output.numel():
            raise ValueError(
                f"reduce_scatter needs one input for each of {self.size()} ranks, this rank's as its output"
            )
        start = sum(part.numel() for part in parts[: self.rank()])
        return self._scatter(torch.cat([part.reshape(-1) for part in parts]), output, start, opts)

    @shown
    @outside_modes
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work | None:
        """Collective: see `torch.distributed.reduce_scatter_tensor`."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        output, tensor = _as_real([output, tensor], opts)
        if not _is_ours([output, tensor]):
            return self._ask("_reduce_scatter_base", output, tensor, opts)
        if tensor.numel() != self.size() * output.numel() or tensor.dtype != output.dtype:
            raise ValueError(
                f"reduce_scatter of {tensor.numel()} elements of {tensor.dtype} over {self.size()} ranks does not give "
                f"{output.numel()} of {output.dtype}"
            )
        return self._scatter(tensor.reshape(-1), output, self.rank() * output.numel(), opts)

    @shown
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Collective: several at once."""
        works = [
            self.reduce_scatter_single(output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._joined(works, outputs)

    # Their names before torch 2.13.
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
        """Return one work for all of them; None if all were synchronous."""
        left = [work for work in works if work is not None]
        return lasting(FollowedWork(left, lambda: None, outputs)) if left else None

    # ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────

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
        """Collective: `target` gets elements of the reduction of `flat` over ranks, from `start` on.

        Args:
            flat: 1-d and contiguous; left as it is, unless it is `target`.
            target: 1-d and contiguous.
            start: see above.
            recipe: how.
            opts: of PyTorch, for time limit and synchrony.
            outputs: what the work has filled in the end.
            then: fills them from `target`; None = they are `target`.
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
            return self._watched(  # a future has this shape
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
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Work | None:  # Any: as above
        """Collective: see `torch.distributed.all_gather`."""
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
        """Collective: see `torch.distributed.all_gather_into_tensor`."""
        opts = AllgatherOptions() if opts is None else opts
        if self._lanes is None or not self._gathers([output], tensor):
            return self._ask("_allgather_base", output, tensor, opts)
        plain = _plain(output)
        whole = plain if plain.is_contiguous() else torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
        return self._gather(
            whole.view(-1).chunk(self.size()),
            tensor,
            [] if whole is plain else [(plain, whole)],
            list(plain.chunk(self.size())),  # Gloo tells parts
        )

    @shown
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work | None:
        """Collective: several at once."""
        works = [self.all_gather_single(output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)]
        return self._joined(works, outputs)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gathers(self, outputs: Tensors, tensor: torch.Tensor) -> bool:
        """Return whether lanes gather that: what all ranks decide alike. What does not fit is Gloo's to refuse."""
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
        """Collective: `rows` get the tensors of all ranks, then each first one of `copies` what its second one has."""
        assert self._lanes is not None

        def copy_back() -> None:
            for output, copy in copies:
                output.copy_(copy)

        if self._keeps_entries:
            self._entries.add("all_gather", tensor.numel(), torch.uint8 if tensor.dtype is torch.bool else tensor.dtype)
        gather = TensorGather(rows, tensor.detach().contiguous().view(-1), copy_back)
        self._lanes.gather(gather)
        return lasting(LaneWork(self._lanes, gather, outputs))

    # ── what inner groups do ─────────────────────────────────────────────────────────────────────────────────────

    def _ask(
        self, name: str, tensors: Any, *args: Any, **options: Any
    ) -> Work | None:  # Any: as the inner group has it
        """Call that method of the inner group for the device of these tensors, or lists of tensors.

        Returns:
            The work. None for a synchronous collective of NCCL from torch 2.8 on: the current stream waits for it.
        """
        first = _first((tensors, *args))
        on_cuda = first is not None and first.device.type == "cuda"
        inferred = first is not None and first.is_inference()
        with torch.inference_mode() if inferred else nullcontext():  # its threads take that over
            work: Work | None = getattr(self._on_cuda if on_cuda else self._inner, name)(tensors, *args, **options)
        # A wait for those that ends early breaks the connection; PyTorch 2.4's never tells that it has ended.
        alone = name in ("send", "recv") or (name == "_reduce_scatter_base" and not KEEPS_WORKS)
        if work is None or alone or (on_cuda and self._on_cuda is not self._inner):
            return work
        return self._watched(work)

    def _watched(self, work: Work) -> Work:
        """A collective of Gloo's that ends when the group fails."""
        return lasting(InnerGroupWork(self._lanes, work)) if self._lanes is not None else work

    @shown
    def barrier(self, opts: Any = None) -> Work | None:
        """Collective: see `torch.distributed.barrier`."""
        opts = dist.BarrierOptions() if opts is None else opts
        on_cuda = opts.device is not None and opts.device.type == "cuda"
        work: Work = (self._on_cuda if on_cuda else self._inner).barrier(opts)
        return work if on_cuda and self._on_cuda is not self._inner else self._watched(work)

    @shown
    def broadcast(self, tensors: Any, *args: Any, **options: Any) -> Work | None:  # Any: as the inner group has it
        """Collective: see `torch.distributed.broadcast`; contiguous or not, where Gloo writes between elements."""
        return self._ask_contiguous("broadcast", tensors, *args, **options)

    @shown
    @outside_modes
    def reduce(self, tensors: Any, opts: Any = None, *args: Any, **options: Any) -> Work | None:  # Any: as above
        """Collective: see `torch.distributed.reduce`; contiguous or not, as for `broadcast`."""
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
    def scatter(self, outputs: Any, inputs: Any, *args: Any, **options: Any) -> Work | None:  # Any: as above
        """Collective: see `torch.distributed.scatter`; contiguous or not, as for `broadcast`."""
        plain = [[tensor.contiguous() for tensor in part] if isinstance(part, list) else part for part in inputs]
        return self._ask_contiguous("scatter", outputs, plain, *args, **options)

    @shown
    def gather(
        self, outputs: list[Tensors], inputs: Tensors, *args: Any, **options: Any
    ) -> Work | None:  # Any: as above
        """Collective: see `torch.distributed.gather`; contiguous or not: PyTorch 2.4's Gloo sends what lies between."""
        return self._ask("gather", outputs, [tensor.contiguous() for tensor in inputs], *args, **options)

    @shown
    def all_to_all_single(
        self, output: Any, tensor: torch.Tensor, *args: Any, **options: Any
    ) -> Work | None:  # Any: as above
        """Collective: see `torch.distributed.all_to_all_single`; contiguous or not, as for `broadcast`."""
        return self._ask_contiguous("alltoall_base", output, tensor.detach().contiguous(), *args, **options)

    def _ask_contiguous(self, name: str, tensors: Any, *args: Any, **options: Any) -> Work | None:  # Any: as above
        """As `_ask`, with contiguous copies of tensors that are not, from which they are filled at the end."""
        outputs = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if all(tensor.layout is not torch.strided or tensor.is_contiguous() for tensor in outputs):
            return self._ask(name, tensors, *args, **options)
        plain = [_plain(tensor) for tensor in outputs]
        copies = [tensor.contiguous() for tensor in plain]

        def copy_back() -> None:
            for tensor, copy in zip(plain, copies, strict=True):
                tensor.copy_(copy)

        work = self._ask(name, copies[0] if isinstance(tensors, torch.Tensor) else copies, *args, **options)
        if work is None:  # the current stream waits for NCCL
            copy_back()
            return None
        return lasting(FollowedWork([work], copy_back, outputs))

    send = _left_to_inner("send")
    recv = _left_to_inner("recv")

    alltoall_base = all_to_all_single  # its name before torch 2.13

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def shutdown(self) -> None:
        """End the lanes, then NCCL's communicators. PyTorch calls it from `destroy_process_group`."""
        try:
            if self._lanes is not None:
                self._lanes.close()
        finally:
            self._end_on_cuda("shutdown")

    def abort(self) -> None:
        """End all communication of this rank, NCCL's first. PyTorch calls it where the group has failed."""
        try:
            self._end_on_cuda("abort")
        finally:
            if self._lanes is not None:
                self._lanes.close()
            if hasattr(self._inner, "abort"):  # torch >= 2.7
                self._inner.abort()

    def _end_on_cuda(self, method: str) -> None:
        if self._on_cuda is not self._inner:
            name = method if hasattr(self._on_cuda, method) else f"_{method}"  # its name before torch 2.6
            getattr(self._on_cuda, name)()
