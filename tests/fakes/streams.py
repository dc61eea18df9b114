"""A device with streams, and communicators on it, without a GPU.

A stream is a thread that runs its work late, at a random pace, so that a missing order shows as a wrong result.
Communicators reduce over MPI, and record the order of their use and the calling threads.
"""

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sirtaki.comm.control.mpi import mpi_of
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.nccl_streams.transport import CommunicatorKey, Group, Scope
from sirtaki.comm.plan import NcclWay
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.comm.transports.mpi import mpi_all_reduce_

LATEST_S = 2e-3


@dataclass(eq=False)
class FakeEvent:
    reached: threading.Event = field(default_factory=threading.Event)
    at_s: float = 0.0

    def reach(self) -> None:
        self.at_s = time.perf_counter()
        self.reached.set()


class FakeStream:
    """A stream that runs its work in order, some time later."""

    def __init__(self, seed: int) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._random = random.Random(seed)
        self.problems: list[BaseException] = []
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, task: Callable[[], object]) -> None:
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            if self._random.random() < 0.3:
                time.sleep(self._random.random() * LATEST_S)
            try:
                with torch.no_grad():
                    task()
            except BaseException as err:  # any exception, because the test must see it
                self.problems.append(err)


def aliases(value: Any) -> Any:
    """Return tensors on the same memory, without references to the caller's tensors, like a kernel's pointers."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [aliases(item) for item in value] if isinstance(value, list) else value


class FakeDevice:
    """A device with threads as streams, see `sirtaki.comm.device.Device`."""

    torch_device = torch.device("cpu")
    streams = True

    def __init__(self, seed: int = 0) -> None:
        self.users = 0
        self._seed = seed
        self.all_streams: list[FakeStream] = []
        self._current = threading.local()
        self._default, self._side = self.make_stream(), self.make_stream()
        self._outer: FakeStream | None = None
        self._stash: list[tuple[FakeEvent, list[torch.Tensor]]] = []
        self.pins = 0

    @property
    def current(self) -> FakeStream:
        stream: FakeStream = getattr(self._current, "stream", self._default)
        return stream

    def launch(self, function: Callable[..., object], *args: object) -> None:
        if isinstance(getattr(function, "__self__", None), torch.Tensor):  # keep no reference to this tensor, either
            function, args = getattr(torch.Tensor, function.__name__), (function.__self__, *args)
        pointers = [aliases(arg) for arg in args]
        self.current.put(lambda: function(*pointers))

    @contextmanager
    def beside(self) -> Iterator[None]:
        packed = self.record_event()
        outer, self._outer = self._outer, self.current
        with self.on(self._side):
            self.order_after(packed)
            yield
        self._outer = outer

    @contextmanager
    def before_packing(self) -> Iterator[None]:
        with self.on(self._outer or self.current):
            yield
            done = self.record_event()
        self.order_after(done)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = self.current
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def make_stream(self) -> FakeStream:
        self._seed += 1
        self.all_streams.append(FakeStream(self._seed))
        return self.all_streams[-1]

    def notice_stream(self) -> None:
        pass

    def pin(self, tensor: torch.Tensor) -> None:
        self.pins += 1

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def enter_thread(self) -> None:
        pass

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        self._stash = [(event, kept) for event, kept in self._stash if not event.reached.is_set()]
        self._stash.append((self.record_event(), list(tensors)))

    def release(self, *, forget: bool = True) -> None:
        with self.on(self._side):
            packed = self.record_event()
        for stream in {self._default, self.current}:
            stream.put(packed.reached.wait)
        self._stash.clear()

    def record_event(self, *, timed: bool = False) -> FakeEvent:
        event = FakeEvent()
        self.current.put(event.reach)
        return event

    def order_after(self, event: FakeEvent) -> None:
        self.current.put(event.reached.wait)

    def is_reached(self, event: FakeEvent) -> bool:
        return event.reached.is_set()

    def wait_for(self, event: FakeEvent) -> None:
        assert event.reached.wait(30.0), "a stream does not get on"

    def elapsed_s(self, begin: FakeEvent, end: FakeEvent) -> float:
        assert begin.reached.is_set()
        assert end.reached.is_set()
        return end.at_s - begin.at_s

    def synchronise(self) -> None:
        for stream in list(self.all_streams):
            event = FakeEvent()
            stream.put(event.reach)
            self.wait_for(event)
        for stream in self.all_streams:
            if stream.problems:
                raise stream.problems[0]

    def reuse_when_freed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite the tensor's memory on the default stream once it is freed, as a caching allocator may."""
        memory = tensor.detach()
        weakref.finalize(tensor, lambda: self._default.put(lambda: memory.fill_(float("nan")))).atexit = False
        return tensor


class FakeGroup:
    """A `Group` over an MPI communicator."""

    def __init__(self, opener: "FakeOpener", key: CommunicatorKey, comm: Any) -> None:
        self._opener, self._key, self._comm = opener, key, comm
        self.problem = ""
        self.closed = False

    def _start(self, what: str, function: Callable[..., object], *args: object) -> None:
        opener = self._opener
        assert not self.closed, f"{self._key} is closed"
        assert opener.issuing.acquire(blocking=False), "two threads use NCCL at once"
        try:
            opener.issued.append(f"{self._key} {what}")
            time.sleep(0)  # lets another thread run in between
            opener.device.launch(function, *args)
        finally:
            opener.issuing.release()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        def reduce(tensor: torch.Tensor) -> None:
            mpi_all_reduce_(tensor, comm=self._comm, op=op, scale=1.0)

        self._start(f"all_reduce {tensor.numel()}", reduce, tensor)

    def all_reduce_scaled(self, tensor: torch.Tensor, scale: float) -> bool:
        if tensor.dtype is torch.bfloat16 or not tensor.is_floating_point():
            return False

        def reduce(tensor: torch.Tensor) -> None:
            mpi_all_reduce_(tensor, comm=self._comm, op=ReduceOp.SUM, scale=scale)

        self._start(f"all_reduce_scaled {tensor.numel()}", reduce, tensor)
        return True

    def reduce_scatter(self, share: torch.Tensor, tensor: torch.Tensor, op: ReduceOp) -> None:
        def reduce(share: torch.Tensor, tensor: torch.Tensor) -> None:
            whole = tensor.clone()
            mpi_all_reduce_(whole, comm=self._comm, op=op, scale=1.0)
            rank = self._comm.rank
            share.copy_(whole[rank * share.numel() : (rank + 1) * share.numel()])

        self._start(f"reduce_scatter {tensor.numel()}", reduce, share, tensor)

    def all_gather(self, tensor: torch.Tensor, share: torch.Tensor) -> None:
        def gather(tensor: torch.Tensor, share: torch.Tensor) -> None:
            parts = self._comm.allgather(share.clone())
            tensor.copy_(torch.cat(parts))

        self._start(f"all_gather {tensor.numel()}", gather, tensor, share)

    def error(self) -> str:
        return self.problem

    def memory_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


class FakeOpener:
    """An `Opener` whose communicators take one byte each of a memory of 1000 bytes."""

    threads = (512, 1024)
    ways = tuple(NcclWay)
    max_streams = 4

    def __init__(self, control: ControlPlane, device: FakeDevice) -> None:
        self._control, self.device = control, device
        self.opened: list[CommunicatorKey] = []
        self.groups: dict[CommunicatorKey, FakeGroup] = {}
        self.issued: list[str] = []
        self.issuing = threading.Lock()

    def open(self, key: CommunicatorKey) -> Group:
        control = self._control
        comm = {
            Scope.ALL: control.duplicate,
            Scope.ACROSS: partial(control.duplicate, cross=True),
            Scope.NODE: control.node.duplicate,
        }[key.scope]()
        self.opened.append(key)
        self.groups[key] = FakeGroup(self, key, mpi_of(comm))
        return self.groups[key]

    def memory_bytes(self) -> tuple[int, int]:
        is_open = [group for group in self.groups.values() if not group.closed]
        return 1000 - len(is_open), 1000
