"""The device that holds the gradients: host memory, or one CUDA GPU.

On the host, an operation is complete when its call returns. On a GPU, a call only puts work on a CUDA stream. Two CUDA
streams are ordered only by events, and the caching allocator reuses memory in the order of the stream that allocated
it. `Device` hides this difference, so that the gradient pipeline has one implementation for host and GPU.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from sirtaki.machine import finalize, free_in_forked_children

count_storage_users: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
"""Function from a storage's `_cdata` to the number of tensors that use it. None in older PyTorch built without CUDA."""

Event = Any
"""A point in the work of a device, recorded by `Device.record_event`: a host time in seconds, or a CUDA event."""


class Device:
    """The host's memory as the device of the gradients. `CudaDevice` overrides the methods that differ on a GPU.

    Attributes:
        torch_device: device of the tensors.
        streams: True if work is asynchronous. All ranks must then launch reductions in the same order, from one thread
            at a time. The measurements of an iteration are then available when the next iteration ends.
        users: number of gradient pipelines on this device. Each pipeline increments it.
    """

    torch_device = torch.device("cpu")
    streams = False
    users = 0
    _nothing = nullcontext()

    def launch(self, function: Callable[..., object], *args: object) -> None:
        """Call `function`, whose tensor operations run on the current stream."""
        function(*args)

    def beside(self) -> AbstractContextManager[object]:
        """Return a context whose body runs on the packing stream, which copies gradients into flat buffers.

        The body runs after the work that is queued on the current stream now.
        """
        return self._nothing

    def before_packing(self) -> AbstractContextManager[object]:
        """Return a context whose body runs on the stream from which `beside` was entered. Packing waits for it."""
        return self._nothing

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Return a context whose body runs on a stream of `make_stream`, without any order to the current stream."""
        return self._nothing

    def make_stream(self) -> Any:
        """Create a high-priority stream. None on the host. Streams differ until PyTorch's pool of 32 is used up."""
        return None

    def notice_stream(self) -> None:
        """Order packing after the current stream, which has just written a gradient. Called for each gradient."""

    def pin(self, tensor: torch.Tensor) -> None:
        """Page-lock the host memory of `tensor` until it is freed, so that copies to the device are asynchronous."""

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeroed host memory, `(numel,)`. It is page-locked if the device is a GPU."""
        return torch.zeros(numel, dtype=dtype, device="cpu")

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep references to tensors until the work that is queued on the current stream now has ended."""

    def release(self) -> None:
        """Drop the references of `keep`. Streams that may reuse their memory first wait for packing, which reads it."""

    def record_event(self, *, timed: bool = False) -> Event:
        """Record an event on the current stream. Only timed events can be passed to `elapsed_s`."""
        return time.perf_counter()

    def order_after(self, event: Event) -> None:
        """Make the current stream wait for `event`. Does not block the host."""

    def is_reached(self, event: Event) -> bool:
        """Return whether the device has reached `event`. Non-blocking."""
        return True

    def wait_for(self, event: Event) -> None:
        """Block the calling thread until the device has reached `event`."""

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """Return the seconds between two timed events that have been reached."""
        return float(end - begin)

    def synchronise(self) -> None:
        """Block the calling thread until the device has done all its work."""

    def enter_thread(self) -> None:
        """Prepare a helper thread for calls to the device. Call it first in each thread that is not the user's."""


HOST = Device()


def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `target`, without blocking the host if the host memory is page-locked. For `Device.launch`."""
    target.copy_(source, non_blocking=True)


logger = logging.getLogger(__name__)

HIGH_PRIORITY = -1

POOL_STREAMS = 32
"""Number of streams per device and priority that PyTorch creates and returns in turn (c10/cuda/CUDAStream.cpp)."""

CAPTURE_MODE_THREAD_LOCAL = 1
"""`cudaStreamCaptureModeThreadLocal`. A CUDA graph capture in another thread then forbids no calls in this thread."""


@functools.cache
def cuda_runtime() -> Any:  # Any: ctypes has no types for C functions
    """Return the CUDA runtime library that PyTorch has loaded, or None if it cannot be found.

    `torch.cuda.cudart()` lacks `cudaGetLastError`, `cudaDriverGetVersion` and `cudaThreadExchangeStreamCaptureMode`.
    """
    major = str(torch.version.cuda).split(".")[0]
    for name in (f"libcudart.so.{major}", "libcudart.so"):
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
    logger.debug("libcudart is not loaded as a shared library: a CUDA graph capture may collide with helper threads")
    return None


def driver_version() -> tuple[int, int]:
    """Return the newest CUDA version that the driver supports, as (major, minor). (0, 0) = unknown."""
    found = ctypes.c_int(0)
    library = cuda_runtime()
    if library is None or library.cudaDriverGetVersion(ctypes.byref(found)) != 0:
        return 0, 0
    return found.value // 1000, found.value % 1000 // 10


class CudaDevice(Device):
    """One GPU of this process, as the device of the gradients.

    Gradients are copied into flat buffers on a separate CUDA stream, the packing stream, so the backward pass does not
    wait for the copies. When the last reference to a gradient is dropped, the caching allocator may give its memory to
    the next kernel of the backward pass. So `keep` holds a reference until the packing stream has read the gradient.
    """

    streams = True

    def __init__(self, index: int) -> None:
        """Create the device for the GPU `cuda:index`. Use `cuda_device` instead, which returns one device per GPU."""
        self.torch_device = torch.device("cuda", index)
        self._index = index
        self._own_streams: set[int] = set()
        self._known_streams: dict[int, Any] = {}
        self._side = self.make_stream()
        self._outer: Any = None  # the stream from which `beside` was entered
        self._stash: deque[tuple[Event, list[torch.Tensor]]] = deque()
        self._stashing = free_in_forked_children(threading.Lock())
        self._latest_stream: int | None = None  # raw handle of the last noticed stream; 0 is the default stream
        self._noticed: set[int] = set()
        self._thread = threading.local()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the body of the `with` statement on the packing stream, after the work now on the current stream."""
        outer, self._outer = self._outer, torch.cuda.current_stream(self.torch_device)
        try:
            self._side.wait_stream(self._outer)
            with torch.cuda.stream(self._side):
                yield
        finally:
            self._outer = outer

    @contextmanager
    def before_packing(self) -> Iterator[None]:
        """Run the body on the stream from which `beside` was entered. The packing stream then waits for this stream."""
        if self._outer is None:
            yield
            return
        with torch.cuda.stream(self._outer):
            yield
        self._side.wait_stream(self._outer)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Return a context whose body runs on `stream`, without any order to the current stream."""
        return torch.cuda.stream(stream)

    def make_stream(self) -> torch.cuda.Stream:
        """Create a high-priority stream, different from earlier ones as long as PyTorch's pool has unused streams."""
        for _ in range(POOL_STREAMS):
            stream: torch.cuda.Stream = torch.cuda.Stream(self.torch_device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]  # torch's
            if stream.cuda_stream not in self._own_streams:
                break
        self._own_streams.add(stream.cuda_stream)
        return stream

    def notice_stream(self) -> None:
        """Make the packing stream wait for the previous CUDA stream if autograd now runs on a different one.

        The packing stream waits for the last of these streams in `beside`.
        """
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if raw != self._latest_stream:
            if self._latest_stream is not None:
                self._side.wait_stream(self._stream_of(self._latest_stream))
            self._latest_stream = raw
            self._noticed.add(raw)

    def pin(self, tensor: torch.Tensor) -> None:
        """Page-lock the memory of `tensor`, which ranks of a host may share. Log a warning if CUDA refuses."""
        if tensor.numel() == 0:
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
        status = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel() * tensor.element_size(), 0)
        if int(status) != 0:
            if (library := cuda_runtime()) is not None:
                library.cudaGetLastError()  # else PyTorch's next kernel launch would raise this error
            logger.warning("copies to and from the GPU are slow: CUDA cannot page-lock their memory (%s)", status)
            return
        finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr())

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate page-locked memory from PyTorch. If CUDA refuses, log a warning and allocate pageable memory.

        A forked child may use the returned memory, unlike memory that `pin` has page-locked.
        """
        try:
            return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as err:
            logger.warning("copies to and from the GPU are slow: CUDA cannot page-lock their memory (%s)", err)
            return torch.zeros(numel, dtype=dtype, device="cpu")

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep references to `tensors` until the current stream reaches an event that is recorded now.

        Also drop references of earlier calls whose event has been reached.
        """
        event = self.record_event()
        with self._stashing:
            self._stash.append((event, list(tensors)))
            while self._stash[0][0] is not event and self._stash[0][0].query():
                self._stash.popleft()

    def release(self) -> None:
        """Drop the references of `keep`. The current stream, and those that wrote gradients, first wait for packing."""
        torch.cuda.current_stream(self.torch_device).wait_stream(self._side)
        for raw in self._noticed:
            self._stream_of(raw).wait_stream(self._side)
        self._noticed.clear()
        self._latest_stream = None
        with self._stashing:
            self._stash.clear()

    def _stream_of(self, raw: int) -> Any:  # Any: torch has no type for streams
        stream = self._known_streams.get(raw)
        if stream is None:
            if raw == 0:  # because ExternalStream rejects handle 0
                stream = torch.cuda.default_stream(self.torch_device)
            else:
                stream = torch.cuda.ExternalStream(raw, self.torch_device)  # type: ignore[no-untyped-call]  # torch's
            self._known_streams[raw] = stream
        return stream

    def record_event(self, *, timed: bool = False) -> Event:
        """Record a CUDA event on the current stream. Untimed events cost less."""
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]  # torch's
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def order_after(self, event: Event) -> None:
        """Make the current CUDA stream wait for `event`. Does not block the host."""
        torch.cuda.current_stream(self.torch_device).wait_event(event)

    def is_reached(self, event: Event) -> bool:
        """Return whether the GPU has reached `event`. Non-blocking."""
        return bool(event.query())

    def wait_for(self, event: Event) -> None:
        """Block the calling thread until the GPU has reached `event`."""
        event.synchronize()

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """Return the seconds between two timed events by the GPU's clock."""
        return float(begin.elapsed_time(end)) / 1e3

    def synchronise(self) -> None:
        """Block the calling thread until all streams of this GPU are done."""
        torch.cuda.synchronize(self.torch_device)

    def enter_thread(self) -> None:
        """Make this GPU the current device of a helper thread, and exempt the thread from other threads' captures.

        With another current device, a call could create a CUDA context of about 0.5 GB on GPU 0. Without the exemption,
        an event query would invalidate a CUDA graph that the user captures in the default mode. The main thread is not
        changed, because the user sets its current device.
        """
        if threading.current_thread() is threading.main_thread() or getattr(self._thread, "entered", False):
            return
        torch.cuda.set_device(self.torch_device)
        if (library := cuda_runtime()) is not None:
            library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(CAPTURE_MODE_THREAD_LOCAL)))
        self._thread.entered = True


@functools.cache
def cuda_device(index: int) -> CudaDevice:
    """Return the one `CudaDevice` of this process for `cuda:index`."""
    return CudaDevice(index)
