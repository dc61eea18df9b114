"""A CUDA GPU without a GPU: a fake `torch.cuda` that checks the order of streams.

Inside `with FakeCuda() as cuda:` tensors on "cuda" are in host memory and every operation runs at once, but the checker
treats an operation as pending work of the stream that was current. It keeps a vector clock for each stream and for the
host, and reports

- `races`: two accesses to the same bytes, one of them a write, that no event orders; and memory that returns to the
  caching allocator while another stream may still use it;
- `blocking`: calls that make the host wait for the GPU, while `steady` is True (`.item()`, `nonzero`, copies from or to
  pageable memory, waiting for an event of the same iteration);
- `problems`: misuse of CUDA and NCCL: operations of two communicators that nothing orders, two threads in NCCL at once,
  buffers that are not aligned to 16 bytes, a second GPU's context, an error that was not cleared, and calls that
  invalidate another thread's graph capture.

`Event.query` returns True only after the host has waited for the event or for later work, as on an infinitely slow GPU.
NCCL groups have the attributes that PyTorch's release has (tests/formats/nccl_attributes.json), and reduce over Gloo.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import json
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

import sirtaki
from sirtaki.comm import device as product
from sirtaki.comm import modes

HOST = "host"
PACKAGE = f"{Path(sirtaki.__file__).parent}/"
Clock = dict[Any, int]
MEMORY = torch.device("cpu", 0)
"""Device of fake GPU tensors. Index 0 distinguishes it from `torch.device("cpu")` in the arguments of factories."""

RELEASES = json.loads((Path(__file__).parents[1] / "formats" / "nccl_attributes.json").read_text())["releases"]
SYNCHRONOUS_ON_CURRENT_STREAM = (2, 8)

HIDDEN_WRITES = {
    "allreduce_": 0,
    "broadcast_": 0,
    "_allgather_base_": 0,
    "_reduce_scatter_base_": 0,
    "all_gather_copy_in": 1,
}
"""Index of the argument that an operation writes although its schema does not say so."""

HOST_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "_coalesce",
    "_to_sparse",
}
UNCHECKED = {"detach", "is_pinned", "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "record_stream"}


class Place(Enum):
    """Location of a block of memory."""

    GPU = "GPU"
    PINNED = "pinned memory"
    PAGEABLE = "pageable memory"


@dataclass(eq=False)
class Access:
    low: int
    high: int
    actor: Any
    moment: int
    writes: bool
    what: str


@dataclass(eq=False)
class Block:
    """Memory of one storage."""

    low: int
    high: int
    place: Place
    stream: Any = None
    registered: bool = False
    freed: bool = False
    streams_recorded: set[Any] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


class FakeCuda:
    """A fake `torch.cuda` that checks the order of streams, see the module.

    Attributes:
        index: index of the GPU. Further GPUs exist and must stay unused.
        races, blocking, problems: findings, each with the lines of Sirtaki that caused it.
        steady: report calls that block the host.
        iteration: number of the training iteration, counted by `next_iteration`.
        initialized: return value of `torch.cuda.is_initialized()`.
        register_status: return value of `cudaHostRegister`.
        capturing: thread that captures a CUDA graph in the default mode.
        allocated_bytes, peak_bytes: bytes of GPU memory that tensors occupy, and their maximum since the last reset.
        refuse_nccl: message with which NCCL refuses to create communicators on the ranks in `refusing_ranks`.
    """

    def __init__(self, *, index: int = 0, release: str = "2.11.0") -> None:
        """Imitate the NCCL groups of PyTorch's version `release`."""
        self.index, self.release = index, release
        self.races: list[str] = []
        self.blocking: list[str] = []
        self.problems: list[str] = []
        self.steady = False
        self.iteration = self.allocated_bytes = self.peak_bytes = 0
        self.initialized = False
        self.register_status = self.last_error = 0
        self.capturing: threading.Thread | None = None
        self.refuse_nccl = ""
        self.refusing_ranks: set[int] | None = None
        self.contexts: set[int] = set()
        self.nccl = FakeNccl(self)
        self.lock = threading.RLock()
        self._clocks: dict[Any, Clock] = {}
        self._moment = 0
        self._blocks: list[Block] = []
        self._lows: list[int] = []
        self._returned: dict[Any, list[Access]] = {}
        self._next_stream = {0: 0, -1: 0}
        self._thread = threading.local()
        self._default = Stream.of(self, 0)
        self._active = False

    # ── the clocks ───────────────────────────────────────────────────────────────────────────────────────────────

    def _clock(self, actor: Any) -> Clock:
        return self._clocks.setdefault(actor, {})

    def now(self, actor: Any) -> Clock:
        """Return the clock of everything that is ordered before the actor's next operation."""
        with self.lock:
            return dict(self._clock(actor))

    def order_after(self, actor: Any, earlier: Clock) -> None:
        with self.lock:
            clock = self._clock(actor)
            for other, moment in earlier.items():
                clock[other] = max(clock.get(other, 0), moment)

    def is_ordered(self, actor: Any, access: Access) -> bool:
        return actor == access.actor or self._clock(actor).get(access.actor, 0) >= access.moment

    def next_iteration(self) -> None:
        """Mark the end of a training iteration."""
        self.iteration += 1

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────

    def block_of(self, tensor: torch.Tensor) -> Block:
        """Return the block of a tensor's memory. Memory that was not allocated here is pageable host memory."""
        return self._block_at(tensor.untyped_storage())

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the GPU. One without memory is where the operation that made it ran."""
        parts = list(_tensors(tensor))
        stored = [part for part in parts if part.untyped_storage().nbytes()]
        if not stored:
            return any(hasattr(part, EMPTY_ON_GPU) for part in (tensor, *parts))
        return self.block_of(stored[-1]).place is Place.GPU

    def _block_at(self, storage: Any) -> Block:
        low, high = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        with self.lock:
            place = bisect.bisect_right(self._lows, low) - 1
            if place >= 0 and low < self._blocks[place].high:
                return self._blocks[place]
            return self._insert(Block(low, high, Place.PAGEABLE))

    def _insert(self, block: Block) -> Block:
        first = bisect.bisect_left(self._lows, block.low)
        last = first
        while last < len(self._lows) and self._lows[last] < block.high:
            last += 1  # the owner, such as a mapping, has freed this memory
        self._blocks[first:last], self._lows[first:last] = [block], [block.low]
        return block

    def allocated(self, tensor: torch.Tensor, place: Place) -> None:
        """Register the new memory of a tensor that an operation has returned."""
        self._allocated(tensor.untyped_storage(), place)

    def _allocated(self, storage: Any, place: Place) -> None:
        if not storage.nbytes():
            return
        block = Block(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), place, self.current)
        with self.lock:
            if place is Place.GPU:
                self._reuse(block.stream)
                self.allocated_bytes += block.high - block.low
                self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
            self._insert(block)
        weakref.finalize(storage, self._freed, block).atexit = False

    def _freed(self, block: Block) -> None:
        with self.lock:
            if block.freed:
                return
            block.freed = True
            if block.place is Place.GPU:
                self.allocated_bytes -= block.high - block.low
            if self._active and (block.place is Place.GPU or block.registered):
                pending = [access for access in block.accesses if access.actor not in block.streams_recorded]
                self._returned.setdefault(block.stream, []).extend(pending)
                if block.registered:
                    self._reuse(HOST)
            place = bisect.bisect_left(self._lows, block.low)
            if place < len(self._blocks) and self._blocks[place] is block:
                del self._blocks[place], self._lows[place]

    def resize(self, storage: Any, n_bytes: int, *, real: Callable[..., Any]) -> Any:
        """Stand in for `UntypedStorage.resize_`, which returns the old memory to the allocator and takes new memory."""
        if storage.nbytes():
            block = self._block_at(storage)
            storage.on_gpu = block.place is Place.GPU
            if storage.on_gpu:
                self._freed(block)
        real(storage, n_bytes)
        if getattr(storage, "on_gpu", False):
            self._allocated(storage, Place.GPU)
        return storage

    def _reset_peak(self, device: Any = None) -> None:
        self.peak_bytes = self.allocated_bytes

    def _reuse(self, stream: Any) -> None:
        """Report work on other streams that is still pending in memory that returns to a stream's pool."""
        for access in self._returned.pop(stream, ()):
            if not (self.is_ordered(stream, access) or self.is_ordered(HOST, access)):
                verb = "write" if access.writes else "read"
                text = f"memory of {self._name(stream)} is used again while {access.what} on {self._name(access.actor)}"
                self._report(self.races, f"{text} may {verb} it")

    @staticmethod
    def _name(actor: Any) -> str:
        return "the host" if actor == HOST else f"stream {actor}"

    def allocated_bytes(self) -> int:
        """Return the bytes of GPU memory that tensors occupy."""
        return sum(block.high - block.low for block in self._blocks if block.place is Place.GPU)

    def span(self, tensor: torch.Tensor) -> tuple[int, int]:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()

    def access(self, actor: Any, what: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Check an operation of a stream or of the host against all pending operations on the same bytes."""
        with self.lock:
            self._moment += 1
            if actor != HOST:
                self.order_after(actor, self._clock(HOST))  # include the host's operations before the launch
                if self.last_error:
                    self._report(self.problems, f"the launch of {what} fails with CUDA's error {self.last_error}")
                self._uses_device()
            found = [(tensor, is_write) for some, is_write in ((reads, False), (writes, True)) for tensor in some]
            spans = [
                (self.block_of(tensor), *self.span(tensor), is_write) for tensor, is_write in found if tensor.numel()
            ]
            for block, low, high, is_write in spans:
                for other in block.accesses:
                    overlaps = other.low < high and low < other.high
                    if overlaps and (is_write or other.writes) and not self.is_ordered(actor, other):
                        self._report(
                            self.races,
                            f"{what} on {self._name(actor)} {'writes' if is_write else 'reads'} what {other.what} on "
                            f"{self._name(other.actor)} {'writes' if other.writes else 'reads'}: no event orders them",
                        )
            for block, low, high, is_write in spans:
                block.accesses = [
                    other
                    for other in block.accesses
                    if not (low <= other.low and other.high <= high and (is_write or other.actor == actor))
                    or (other.writes and not is_write)
                ]
                block.accesses.append(Access(low, high, actor, self._moment, is_write, what))
            self._clock(actor)[actor] = self._moment

    def _report(self, where: list[str], text: str) -> None:
        frames = traceback.extract_stack()
        ours = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if frame.filename.startswith(PACKAGE)]
        report = f"{text} ({' < '.join(reversed(ours[-4:])) or 'test'})"
        if report not in where:
            where.append(report)

    def host_waits(self, what: str) -> None:
        """Order the host after all work of the GPU."""
        if self.steady:
            self._report(self.blocking, what)
        with self.lock:
            for clock in list(self._clocks.values()):
                self.order_after(HOST, dict(clock))

    # ── torch.cuda ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def current(self) -> Any:
        """Return the raw handle of this thread's current stream."""
        return self.current_stream().cuda_stream

    def current_stream(self, device: Any = None) -> Stream:
        stream: Stream = getattr(self._thread, "stream", self._default)
        return stream

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Stand in for `torch.cuda.stream`."""
        if stream is None:
            yield
            return
        before = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Check this thread's operations in the body."""
        if getattr(self._thread, "observed", False):
            yield
            return
        self._thread.observed = True
        try:
            with _Operations(self):
                yield
        finally:
            self._thread.observed = False

    def _observe(self, run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        """Return `Thread.run` with the checker's dispatch mode active, for threads that are started from now on."""

        def observed_run(thread: threading.Thread) -> None:
            with self.observed():
                run(thread)

        return observed_run

    @staticmethod
    def _unchecked(wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return the `wait` of Gloo's works, whose copies an NCCL work does not make, without a check."""

        def unchecked(*args: Any, **kwargs: Any) -> Any:
            with torch._C._DisableTorchDispatch():
                return wait(*args, **kwargs)

        return unchecked

    def make_stream(self, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        """Return a stream of PyTorch's pool, which has 32 streams per priority and uses them in turn."""
        kind = min(0, max(-1, priority))
        number = self._next_stream[kind]
        self._next_stream[kind] = (number + 1) % product.POOL_STREAMS
        return Stream.of(self, (200 if kind else 100) + number)

    def external_stream(self, raw: int, device: Any = None) -> Stream:
        if raw == 0:
            raise RuntimeError("ExternalStream of the default stream's handle")
        return Stream.of(self, raw)

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    def set_device(self, device: Any) -> None:
        self._thread.device = device if isinstance(device, int) else torch.device(device).index or 0

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self._thread.device = before

    def _uses_device(self) -> None:
        """Record that a CUDA call creates a context on the thread's current device."""
        self.contexts.add(self.current_device())
        if self.current_device() != self.index:
            name = threading.current_thread().name
            self._report(self.problems, f"thread {name} makes a context on GPU {self.current_device()}")

    def _captures(self) -> bool:
        """Return whether the current stream of this thread is being captured. Backward passes use their caller's."""
        threads = threading.current_thread(), getattr(self._thread, "caller", None)
        return self.capturing is not None and self.capturing in threads

    def polls(self, what: str) -> None:
        """Report a call that is forbidden while another thread captures a graph in the default mode."""
        self._uses_device()
        thread_local = getattr(self._thread, "capture_mode", 0) != 0
        if self.capturing is not None and not self._captures() and not thread_local:
            self._report(
                self.problems, f"{what} in thread {threading.current_thread().name} invalidates a graph capture"
            )

    def synchronize(self, device: Any = None) -> None:
        self._uses_device()
        self.host_waits("torch.cuda.synchronize")

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def _register(self, address: int, n_bytes: int, flags: int) -> int:
        if self.register_status:
            self.last_error = self.register_status
            return self.register_status
        with self.lock:
            block = Block(address, address + n_bytes, Place.PINNED, HOST, registered=True)
            self._insert(block)
        return 0

    def _unregister(self, address: int) -> int:
        with self.lock:
            place = bisect.bisect_left(self._lows, address)
            if place < len(self._blocks) and self._blocks[place].low == address:
                self._freed(self._blocks[place])
        return 0

    def runtime(self, name: str, *args: Any, real: Any, **options: Any) -> Any:
        """Stand in for `ctypes.CDLL`."""
        if not str(name).startswith("libcudart"):
            return real(name, *args, **options)

        def get_last_error() -> int:
            error, self.last_error = self.last_error, 0
            return error

        def exchange_capture_mode(mode: Any) -> int:
            before = getattr(self._thread, "capture_mode", 0)
            self._thread.capture_mode, mode._obj.value = mode._obj.value, before
            return 0

        def get_driver_version(found: Any) -> int:
            found._obj.value = 13000
            return 0

        return SimpleNamespace(
            cudaGetLastError=get_last_error,
            cudaDriverGetVersion=get_driver_version,
            cudaThreadExchangeStreamCaptureMode=exchange_capture_mode,
        )

    # ── DDP and autograd, which are written in C++ ───────────────────────────────────────────────────────────────

    def _reducer_class(self, real: Any) -> Any:
        """Return a subclass of DDP's reducer whose buckets are on the GPU, as those of a model on a GPU are."""

        def on_gpu(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                self._thread.in_reducer = True
                try:
                    return method(*args)
                finally:
                    self._thread.in_reducer = False

            return call

        names = {name: on_gpu(getattr(real, name)) for name in ("__init__", "_rebuild_buckets")}
        return type("Reducer", (real,), names)

    def _in_device_thread(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a backward pass in a thread of the GPU, as autograd does.

        Hooks and callbacks run in this thread too, on the caller's stream.
        """
        thread = ThreadPoolExecutor(1, "autograd of the GPU")
        self._stack.callback(thread.shutdown)

        def run(caller: threading.Thread, stream: Stream, *args: Any, **kwargs: Any) -> Any:
            self.set_device(self.index)
            self._thread.caller, self._thread.stream = caller, stream
            return real(*args, **kwargs)

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if hasattr(self._thread, "caller"):  # a nested pass
                return real(*args, **kwargs)
            return thread.submit(run, threading.current_thread(), self.current_stream(), *args, **kwargs).result()

        return run_backward

    # ── in force ─────────────────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> FakeCuda:
        self._stack = contextlib.ExitStack()
        real_library, gpu = ctypes.CDLL, torch.device("cuda", self.index)
        properties = SimpleNamespace(
            uuid=f"gpu of process {os.getpid()}", name="fake", total_memory=1 << 34, major=9, minor=0
        )
        release = RELEASES[self.release]

        def place(tensor: torch.Tensor) -> torch.device:
            if isinstance(tensor, FakeTensor):
                return tensor.fake_device
            real = real_device(tensor)
            if (inner := getattr(tensor, "_local_tensor", None)) is not None:  # a DTensor
                return place(inner)
            return gpu if real.type == "cpu" and self.is_on_gpu(tensor) else real

        def make_event(event: Event, enable_timing: bool = False, **_: Any) -> None:
            Event.__init__(event, self, timed=enable_timing)

        cuda = {
            "is_available": lambda: True,
            "is_initialized": lambda: self.initialized,
            "device_count": lambda: 2,
            "current_device": self.current_device,
            "set_device": self.set_device,
            "device": self.device,
            "Stream": self.make_stream,
            "Event": type("Event", (Event,), {"__init__": make_event}),
            "ExternalStream": self.external_stream,
            "stream": self.on,
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: self._default,
            "synchronize": self.synchronize,
            "cudart": self.cudart,
            "memory_allocated": lambda device=None: self.allocated_bytes,
            "max_memory_allocated": lambda device=None: self.peak_bytes,
            "reset_peak_memory_stats": self._reset_peak,
            "mem_get_info": lambda device=None: (1 << 33, 1 << 34),
            "get_device_properties": lambda device=None: properties,
            "get_device_name": lambda device=None: "fake",
            "is_current_stream_capturing": self._captures,
            "_sleep": lambda cycles: self.access(self.current, "_sleep", [], []),
        }
        nccl_version = tuple(map(int, release["nccl"].split(".")))
        changes = [
            *(patch.object(torch.cuda, name, value, create=True) for name, value in cuda.items()),
            patch.object(torch.cuda.nccl, "version", lambda: nccl_version),
            patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: self.current, create=True),
            patch.object(torch.version, "cuda", release["cuda"]),
            patch.object(dist, "is_nccl_available", lambda: True),
            patch.object(dist, "ProcessGroupNCCL", self.nccl.group_class(), create=True),
            patch.object(dist.Work, "wait", self._unchecked(dist.Work.wait)),
            patch.object(dist, "Reducer", self._reducer_class(dist.Reducer)),
            patch.object(dist.ProcessGroup, "_register_backend", self.nccl.registering()),
            patch.object(torch.autograd, "_engine_run_backward", self._in_device_thread(_engine_run_backward)),
            patch.object(threading.Thread, "run", self._observe(threading.Thread.run)),
            patch.object(modes, "_disable_current_modes", contextlib.nullcontext),  # keeps the checker's mode
            patch.object(
                torch.UntypedStorage,
                "resize_",
                lambda storage, n_bytes, real=torch.UntypedStorage.resize_: self.resize(storage, n_bytes, real=real),
            ),
            patch.object(ctypes, "CDLL", functools.partial(self.runtime, real=real_library)),
            patch.object(torch.Tensor, "device", property(place), create=True),
            patch.object(torch.Tensor, "is_cuda", property(lambda tensor: place(tensor).type == "cuda"), create=True),
            patch.object(torch.Tensor, "is_cpu", property(lambda tensor: place(tensor).type == "cpu"), create=True),
        ]
        for change in (*changes, *_Names(self).changes()):
            self._stack.enter_context(change)
        for cached in (product.cuda_runtime, product.cuda_device):
            cached.cache_clear()
            self._stack.callback(cached.cache_clear)
        self._stack.enter_context(self.observed())
        self.set_device(self.index)
        self._active = True
        return self

    def __exit__(self, *_: object) -> None:
        self._active = False
        self._stack.close()

    def check(self) -> None:
        """Fail if there are findings."""
        assert not self.races, "\n".join(self.races)
        assert not self.blocking, "\n".join(self.blocking)
        assert not self.problems, "\n".join(self.problems)


@dataclass(frozen=True)
class Stream:
    """Stand-in for `torch.cuda.Stream`. Streams with the same handle are equal."""

    cuda_stream: int
    cuda: FakeCuda = field(compare=False, repr=False)

    @classmethod
    def of(cls, cuda: FakeCuda, raw: int) -> Stream:
        return cls(raw, cuda)

    def wait_stream(self, other: Stream) -> None:
        self.cuda.order_after(self.cuda_stream, self.cuda.now(other.cuda_stream))

    def wait_event(self, event: Event) -> None:
        self.cuda.order_after(self.cuda_stream, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.cuda, timed=False)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.cuda.polls("a wait for a stream")
        if self.cuda.steady:
            self.cuda._report(self.cuda.blocking, "Stream.synchronize")
        self.cuda.order_after(HOST, self.cuda.now(self.cuda_stream))


class Event:
    """Stand-in for `torch.cuda.Event`."""

    def __init__(self, cuda: FakeCuda, *, timed: bool) -> None:
        self._cuda, self._timed = cuda, timed
        self.clock: Clock = {}
        self._moment = self._iteration = -1

    def record(self, stream: Stream | None = None) -> None:
        cuda = self._cuda
        self.clock = cuda.now((stream or cuda.current_stream()).cuda_stream)
        self._moment, self._iteration = cuda._moment, cuda.iteration

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._cuda.current_stream()).wait_event(self)

    def query(self) -> bool:
        self._cuda.polls("a query of an event")
        host = self._cuda.now(HOST)
        return all(host.get(actor, 0) >= moment for actor, moment in self.clock.items())

    def synchronize(self) -> None:
        cuda = self._cuda
        cuda.polls("a wait for an event")
        trains = threading.current_thread() is threading.main_thread() or hasattr(cuda._thread, "caller")
        if cuda.steady and self._iteration == cuda.iteration and trains:
            cuda._report(cuda.blocking, "Event.synchronize, of an event of this iteration")
        cuda.order_after(HOST, self.clock)

    def elapsed_time(self, end: Event) -> float:
        assert self._timed, "the first event has no time"
        assert end._timed, "the second event has no time"
        assert self._moment >= 0, "the first event was not recorded"
        assert end._moment >= 0, "the second event was not recorded"
        return 0.01 * (end._moment - self._moment)


def real_device(tensor: torch.Tensor) -> torch.device:
    """Return the device that PyTorch's C++ code sees; "meta" for a FakeTensor."""
    if isinstance(tensor, FakeTensor):
        return torch.device("meta")
    device: torch.device = torch._C.TensorBase.device.__get__(tensor)  # type: ignore[attr-defined]
    return device


EMPTY_ON_GPU = "is_empty_on_fake_gpu"
"""Name of the attribute that marks a tensor on the GPU without memory."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an argument. Those of a sparse tensor are its indices and its values."""
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
        with torch._C._DisableTorchDispatch():
            parts = value._indices(), value._values()
        if hasattr(value, EMPTY_ON_GPU):
            for part in parts:
                setattr(part, EMPTY_ON_GPU, True)
        yield from parts
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def mark_empty_on_gpu(value: Any) -> None:
    """Put the tensors in `value` that have no memory on the GPU."""
    sparse = [value] if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo else []
    for tensor in (*sparse, *_tensors(value)):
        if real_device(tensor).type == "cpu" and (tensor.is_sparse or not tensor.untyped_storage().nbytes()):
            setattr(tensor, EMPTY_ON_GPU, True)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value.split(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand", "randn", "randint", "empty_strided"),
    *("eye", "linspace", "scalar_tensor", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like"),
    *("randn_like", "sparse_coo_tensor"),
)
METHODS = ["new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"]


class _Names:
    """Function mode that accepts the device "cuda", and observes calls that do not reach the dispatcher on the CPU."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def changes(self) -> list[Any]:
        """Return the patches that replace PyTorch's functions."""
        tensor = torch.Tensor
        return [
            *(patch.object(torch, name, self._making(getattr(torch, name))) for name in FACTORIES),
            *(patch.object(tensor, name, self._making(getattr(tensor, name)), create=True) for name in METHODS),
            *(patch.object(tensor, name, self._moving(name)) for name in ("to", "cuda", "cpu")),
            *(patch.object(tensor, name, self._reading(name)) for name in ("tolist", "numpy", "__array__")),
            patch.object(tensor, "record_stream", lambda one, stream: self._record(one, stream)),
            patch.object(tensor, "is_pinned", lambda one, *_: self._cuda.block_of(one).place is Place.PINNED),
        ]

    def _making(self, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = MEMORY
            if real.__name__ == "sparse_coo_tensor":
                kwargs.pop("device", None)  # it is that of the indices and values
            pinned = kwargs.pop("pin_memory", False)
            made = real(*args, **kwargs)
            if pinned:
                self._cuda.allocated(made, Place.PINNED)
            if made.is_sparse and self._cuda.is_on_gpu(args[1]):
                mark_empty_on_gpu(made)
            return made

        return make

    def _reading(self, name: str) -> Callable[..., Any]:
        real, cuda = getattr(torch.Tensor, name), self._cuda

        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() and real_device(tensor).type == "cpu":
                on_gpu = cuda.block_of(tensor).place is Place.GPU
                assert name == "tolist" or not on_gpu, "NumPy cannot read the GPU's memory"
                if on_gpu:
                    cuda.host_waits("tolist")
                cuda.access(HOST, name, [tensor], [])
            return real(tensor, *args, **kwargs)

        return read

    def _record(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._cuda.block_of(tensor).streams_recorded.add(stream.cuda_stream)

    def _moving(self, name: str) -> Callable[..., torch.Tensor]:
        real = getattr(torch.Tensor, name)

        def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if is_traceable_wrapper_subclass(tensor):
                return real(tensor, *args, **kwargs)
            other = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
            named = next((arg for arg in args if isinstance(arg, str | torch.device)), None)
            target = {"cuda": "cuda", "cpu": "cpu"}.get(name) or kwargs.get("device") or named
            target = other.device if other is not None else target
            if target is None or torch.device(target).type == "meta" or real_device(tensor).type != "cpu":
                return real(tensor, *args, **kwargs)
            dtype = kwargs.get("dtype") or next((arg for arg in args if isinstance(arg, torch.dtype)), tensor.dtype)
            if tensor.is_cuda == _is_cuda(target) and not kwargs.get("copy"):
                return tensor if tensor.dtype is dtype else real(tensor, dtype=dtype)
            if tensor.is_sparse:
                parts = (move(tensor._indices(), target), move(tensor._values(), target))
                made = torch.sparse_coo_tensor(
                    *parts, tensor.shape, is_coalesced=tensor.is_coalesced(), check_invariants=False
                )
                if _is_cuda(target):
                    mark_empty_on_gpu(made)
                return made
            non_blocking = kwargs.get("non_blocking") or next((arg for arg in args if isinstance(arg, bool)), False)
            made = torch.empty_like(tensor, dtype=dtype, device=MEMORY if _is_cuda(target) else "cpu")
            return made.copy_(tensor, non_blocking=non_blocking)

        return move


class _Operations(TorchDispatchMode):
    """Dispatch mode that assigns each operation's reads and writes to the current stream, or to the host."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, cuda, name = kwargs or {}, self._cuda, func._schema.name.split("::")[1]
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        options: dict[str, Any] = {}
        for number, argument in enumerate(func._schema.arguments):
            given = kwargs.get(argument.name) if argument.kwarg_only or number >= len(args) else args[number]
            options[argument.name] = given
            info = argument.alias_info
            is_write = HIDDEN_WRITES.get(name) == number or (info is not None and info.is_write)
            (writes if is_write else reads).extend(_tensors(given))
        if func.namespace == "c10d" and torch._C._len_torch_dispatch_stack():
            return func(*args, **kwargs)  # a process group in Python calls another group, which is checked
        if any(is_traceable_wrapper_subclass(tensor) for tensor in (*reads, *writes)):
            return NotImplemented  # a DTensor repeats the operation on its local parts
        if any(real_device(tensor).type != "cpu" for tensor in (*reads, *writes)):  # such as a FakeTensor
            return func(*args, **kwargs)
        inputs = [tensor for tensor in (*reads, *writes) if tensor.numel()]
        on_gpu = any(map(cuda.is_on_gpu, (*reads, *writes)))
        out = func(*args, **kwargs)
        device = options.get("device")
        made_on_gpu = on_gpu if device is None else device == MEMORY or getattr(cuda._thread, "in_reducer", False)
        if made_on_gpu and not writes:
            mark_empty_on_gpu(out)
        if func.is_view:
            return out
        place = Place.GPU if made_on_gpu else Place.PAGEABLE
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        fresh = [
            tensor
            for tensor in _tensors(out)
            if real_device(tensor).type == "cpu" and tensor.numel()
            if tensor.untyped_storage().data_ptr() not in known
        ]
        for tensor in fresh:
            if name != "lift_fresh":
                cuda.allocated(tensor, place)
        if name in UNCHECKED:
            return out
        cuda.access(cuda.current if on_gpu or place is Place.GPU else HOST, name, reads, [*writes, *fresh])
        if name in HOST_WAITS and on_gpu:
            cuda.host_waits(name)
        alone = len(inputs) == 1 or name == "copy_"  # other operations take scalars of the CPU as arguments of kernels
        places = {cuda.block_of(tensor).place for tensor in (*inputs, *fresh) if tensor.dim() or alone}
        crosses = len(places) > 1 and "copy" in name
        if crosses and (Place.PAGEABLE in places or not options.get("non_blocking")):
            cuda.host_waits(f"{name} between the GPU and {'/'.join(sorted(p.value for p in places - {Place.GPU}))}")
        return out


class OnStream(torch.autograd.Function):
    """Run the rest of the backward pass on another stream, as autograd does if the forward pass ran there.

    At the end of the pass, the caller's stream waits for this stream before callbacks run.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, cuda: FakeCuda, stream: Stream) -> torch.Tensor:  # type: ignore[override]
        ctx.cuda, ctx.stream = cuda, stream
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        cuda, stream = ctx.cuda, ctx.stream
        stream.wait_stream(cuda.current_stream())
        cuda._thread.stream = stream
        return gradient, None, None

    @staticmethod
    def ends_with_pass(loss: torch.Tensor, cuda: FakeCuda) -> torch.Tensor:
        """Order the caller's stream after the pass's stream at the end of the loss's backward pass. Return the loss."""

        def end(caller: Stream, _: torch.Tensor) -> None:
            def join() -> None:
                caller.wait_stream(cuda.current_stream())
                cuda._thread.stream = caller

            torch.autograd.Variable._execution_engine.queue_callback(join)

        loss.register_hook(functools.partial(end, cuda.current_stream()))  # type: ignore[no-untyped-call]
        return loss


class GraphedLinear:
    """An `nn.Linear` as `torch.cuda.make_graphed_callables` returns it: replays write to the same memory every time.

    Autograd makes the gradients' memory that of `.grad`, where it is None.

    Attributes:
        gradients: memory of the gradients of weight and bias.
    """

    def __init__(self, linear: torch.nn.Linear, rows: int) -> None:
        """Allocate the graph's memory for inputs of `rows` rows."""
        weight, bias = linear.weight, linear.bias
        self._params, self.gradients = (weight, bias), (torch.zeros_like(weight.data), torch.zeros_like(bias.data))
        self._inputs, self._outputs = weight.new_zeros(rows, weight.shape[1]), weight.new_zeros(rows, weight.shape[0])

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Replays.apply(self, inputs, *self._params)
        return found

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Replay the forward pass's graph on the current stream."""
        weight, bias = self._params
        self._inputs.copy_(inputs)
        torch.addmm(bias.detach(), self._inputs, weight.detach().t(), out=self._outputs)
        return self._outputs.detach()

    def backward(self, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Replay the backward pass's graph on the current stream."""
        torch.mm(gradient.t(), self._inputs, out=self.gradients[0])
        torch.sum(gradient, 0, out=self.gradients[1])
        return gradient @ self._params[0].detach(), *(each.detach() for each in self.gradients)


class _Replays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: GraphedLinear, inputs: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.graph = graph
        return graph.forward(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return None, *ctx.graph.backward(gradient)


# ── NCCL ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class FakeNccl:
    """State of NCCL in one process.

    Attributes:
        launches: launched collectives in order: (communicator, operation, raw stream).
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.launches: list[tuple[int, str, Any]] = []
        self.groups: list[Any] = []
        self.parameters: dict[str, str] | None = None
        self._issuing = threading.Lock()
        self._pending: dict[int, Access] = {}

    def launch(self, group: int, what: str, reads: list[torch.Tensor], writes: list[torch.Tensor], stream: Any) -> None:
        """Launch a collective on a stream."""
        cuda = self.cuda
        if self.parameters is None:  # NCCL reads its parameters at the first launch only
            self.parameters = dict(os.environ)
        if not self._issuing.acquire(blocking=False):
            cuda._report(cuda.problems, "two threads use NCCL at once")
            self._issuing.acquire()
        try:
            for tensor in filter(torch.Tensor.numel, (*reads, *writes)):
                moved = what in ("broadcast", "all-to-all")  # parts of any size
                if not moved and (tensor.data_ptr() - cuda.block_of(tensor).low) % 16:
                    cuda._report(cuda.problems, f"{what}: a buffer is not aligned to 16 bytes")
                if not tensor.is_cuda:
                    cuda._report(cuda.problems, f"{what}: a buffer is not on the GPU")
            ordered = self.parameters.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"
            for other, access in self._pending.items():
                if other != group and not ordered and not cuda.is_ordered(stream, access):
                    cuda._report(cuda.problems, f"nothing orders {what} after {access.what} of another communicator")
            cuda.access(stream, f"NCCL {what}", reads, writes)
            self._pending[group] = Access(0, 0, stream, cuda._moment, True, what)
            self.launches.append((group, what, stream))
        finally:
            self._issuing.release()

    def registering(self) -> Callable[..., None]:
        """Return `ProcessGroup._register_backend`, which ignores imitated groups, because C++ cannot call them."""
        real = dist.ProcessGroup._register_backend

        def register(group: Any, device: torch.device, kind: Any, backend: Any) -> None:
            if not hasattr(backend, "nccl"):
                real(group, device, kind, backend)

        return register

    def group_class(self) -> type:
        """Return `ProcessGroupNCCL` with the attributes of the release."""
        table = RELEASES[self.cuda.release]
        allowed = set(table["ProcessGroupNCCL"])
        config = type("NCCLConfig", (), {"__slots__": table["ProcessGroupNCCL.NCCLConfig"]})
        names = [name for name in table["ProcessGroupNCCL.Options"] if name != "config"]

        class Options:
            __slots__ = (*names, "config")

            def __init__(self, is_high_priority_stream: bool = False) -> None:
                self.is_high_priority_stream, self.config = is_high_priority_stream, config()

        methods = {
            name: value
            for name, value in vars(_Group).items()
            if name in allowed | _Group.INNER or name in ("__init__", "__doc__")
        }
        missing = {name: _missing(name) for name in allowed if name not in vars(_Group)}
        return type("ProcessGroupNCCL", (), {**missing, **methods, "Options": Options, "nccl": self})


def _missing(name: str) -> Callable[..., Any]:
    def not_imitated(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"ProcessGroupNCCL.{name} is not imitated")

    return not_imitated


class _Group:
    """All methods of `ProcessGroupNCCL`. `group_class` removes those that a release lacks."""

    INNER = frozenset({"_start", "_reduce"})
    nccl: FakeNccl

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        cuda = self.nccl.cuda
        if cuda.refuse_nccl and (cuda.refusing_ranks is None or rank in cuda.refusing_ranks):
            raise RuntimeError(cuda.refuse_nccl)
        self._rank, self._size = rank, size
        self._number = len(self.nccl.groups)
        self.nccl.groups.append(self)
        self.ended = ""
        self.problem = "SUCCESS"
        self._stream = cuda.make_stream(priority=-1 if options.is_high_priority_stream else 0).cuda_stream
        self._inner = dist.ProcessGroupGloo(store, rank, size, options._timeout) if size > 1 else None

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def _start(self, what: str, reads: Any, writes: Any, options: Any, act: Callable[[], object]) -> Any:
        cuda = self.nccl.cuda
        assert not self.ended, f"the communicator has ended: {self.ended}"
        new = tuple(map(int, cuda.release.split(".")[:2])) >= SYNCHRONOUS_ON_CURRENT_STREAM
        at_once = new and options is not None and not options.asyncOp
        stream = cuda.current if at_once else self._stream
        cuda.order_after(stream, cuda.now(cuda.current))
        self.nccl.launch(self._number, what, reads, writes, stream)
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            act()
        return None if at_once else _Work(cuda, cuda.now(stream), writes)

    def _reduce(self, tensor: torch.Tensor, op: Any) -> None:
        kind, factor = op.__getstate__() if hasattr(op, "__getstate__") else (op, None)
        scale = {"AVG": 1.0 / self._size, "PREMUL_SUM": factor}.get(getattr(kind, "name", str(kind)).split(".")[-1])
        if scale is not None:
            tensor.mul_(scale)  # NCCL multiplies floating-point numbers before it sums them, see `hostToDevRedOp`
        if self._inner is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.SUM if scale is not None else op
            self._inner.allreduce([tensor], options).wait()

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        given = options if hasattr(options, "asyncOp") else None
        op = given.reduceOp if given is not None else options or dist.ReduceOp.SUM
        return self._start("all-reduce", [], tensors, given, lambda: self._reduce(tensors[0], op))

    def _reduce_scatter_base(self, share: torch.Tensor, tensor: torch.Tensor, options: Any = None) -> Any:
        def act() -> None:
            whole = tensor.clone()
            self._reduce(whole, options.reduceOp)
            share.copy_(whole.view(self._size, -1)[self._rank])

        return self._start("reduce-scatter", [tensor], [share], options, act)

    def _allgather_base(self, tensor: torch.Tensor, share: torch.Tensor, options: Any = None) -> Any:
        def act() -> None:
            parts = [torch.empty_like(share) for _ in range(self._size)]
            if self._inner is None:
                parts[0].copy_(share)
            else:
                self._inner.allgather([parts], [share.clone()]).wait()
            tensor.copy_(torch.cat([part.flatten() for part in parts]))

        return self._start("all-gather", [share], [tensor], options, act)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        def act() -> None:
            if self._inner is not None:
                inner = dist.BroadcastOptions()
                inner.rootRank = options.rootRank
                self._inner.broadcast(tensors, inner).wait()

        return self._start("broadcast", [], tensors, options, act)

    def alltoall_base(
        self, received: torch.Tensor, sent: torch.Tensor, source: list[int], to: list[int], options: Any
    ) -> Any:
        assert received.numel() == sum(source)
        assert sent.numel() == sum(to)

        def act() -> None:
            if self._inner is None:
                received.copy_(sent)
            else:
                self._inner.alltoall_base(received, sent.clone(), source, to).wait()

        return self._start("all-to-all", [sent], [received], options, act)

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.problem)

    def memory_stats(self) -> dict[str, int]:
        return {"suspend": 0, "suspended": 0, "persist": 1 << 28, "total": 1 << 29}

    def shutdown(self) -> None:
        self.ended = self.ended or "shutdown"

    def _shutdown(self) -> None:
        self.ended = self.ended or "shutdown"

    def abort(self) -> None:
        self.ended = self.ended or "abort"


class _Work(dist.Work):
    """Stand-in for `ProcessGroupNCCL`'s work object."""

    def __init__(self, cuda: FakeCuda, clock: Clock, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._cuda, self._clock, self._outputs = cuda, clock, outputs

    def wait(self, timeout: Any = None) -> bool:
        self._cuda.order_after(self._cuda.current, self._clock)
        return True

    def get_future(self) -> Any:
        """Return a future that has ended. DDP's C++ code waits for it, which nothing can observe, so wait here."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future
