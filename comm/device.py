"""The device that holds the gradients: host memory, or one CUDA GPU.

On the host, an operation is complete when its call returns. On a GPU, a call only queues work on a CUDA stream. Only
events order the work of two CUDA streams, and memory freed by one stream may be overwritten while another one still
reads it. `Device` hides these differences, so that the gradient pipeline has one implementation for host and GPU.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from sirtaki.errors import ConfigError
from sirtaki.machine import finalize, free_in_forked_children

count_storage_users: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
"""Function that returns the number of tensors that use a storage, given the storage's `_cdata`. None in older versions
of PyTorch that are built without CUDA."""

Event = Any
"""A point in the work of a device, recorded by `Device.record_event`: a host time in seconds, or a CUDA event."""


class NcclOwner(Protocol):
    """Owner of NCCL communicators of this process: of a gradient pipeline, or of eager operations.

    Attributes:
        number: id of the gradient pipeline, different for each pipeline and equal on its ranks.
        launched: number of units (buckets) that the gradient pipeline has launched over NCCL.
    """

    number: int
    launched: int

    @property
    def is_open(self) -> bool:
        """Return whether a communicator is open. Thread-safe."""

    def abort(self) -> int:
        """End pending operations, and free the communicators. Return their number. Not collective. Thread-safe."""


_nccl_owners: list[weakref.ref[NcclOwner]] = []


def nccl_owners() -> list[NcclOwner]:
    """Return the owners of the NCCL communicators that are open in this process. Thread-safe.

    The communicators of a closed gradient pipeline stay open until all ranks have closed the pipeline.
    """
    return [owner for reference in _nccl_owners if (owner := reference()) is not None and owner.is_open]


def add_nccl_owner(owner: NcclOwner) -> None:
    """Add an owner of NCCL communicators, by weak reference."""
    global _nccl_owners
    _nccl_owners = [*(reference for reference in _nccl_owners if reference() is not None), weakref.ref(owner)]


class Device:
    """Device of gradients in the host's memory. Its subclass `CudaDevice` is for gradients on a GPU.

    Attributes:
        torch_device: device of the tensors.
        streams: True if the device runs work asynchronously, as a GPU does. All ranks must then launch all-reduces in
            the same order, from one thread at a time, and the times of an iteration are known only when the next
            iteration ends.
        users: number of gradient pipelines on this device. Each pipeline increments it.
    """

    torch_device = torch.device("cpu")
    streams = False
    users = 0
    _nothing = nullcontext()

    def launch(self, function: Callable[..., object], *args: object) -> None:
        """Call `function(*args)`. Its tensor operations run on the current CUDA stream, or on the host."""
        function(*args)

    def beside(self) -> AbstractContextManager[object]:
        """Return a context manager whose body runs on the packing stream, which copies gradients into flat buffers.

        The packing stream first waits for the work that is queued on the current CUDA stream.
        """
        return self._nothing

    def before_packing(self) -> AbstractContextManager[object]:
        """Return a context manager that leaves the packing stream within the body of `beside`.

        Its body runs on the CUDA stream that was current outside of `beside`. The packing stream, which copies
        gradients into flat buffers, then waits for the body's work.
        """
        return self._nothing

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Return a context manager whose body runs on `stream`, which `make_stream` has returned.

        The work of the body is not ordered after the work on the current CUDA stream.
        """
        return self._nothing

    def make_stream(self) -> Any:
        """Return a CUDA stream of high priority. None on the host.

        The first 32 returned streams differ. Later ones repeat them, because PyTorch has no more.
        """
        return None

    def notice_stream(self) -> None:
        """Make the packing stream, which copies gradients into flat buffers, wait for the current CUDA stream.

        Called for each gradient, on the CUDA stream that has just written it.
        """

    def pin(self, tensor: torch.Tensor) -> None:
        """Page-lock the host memory of `tensor` until it is freed, so that copies to the device are asynchronous."""

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeroed host memory, `(numel,)`. It is page-locked if the device is a GPU."""
        return torch.zeros(numel, dtype=dtype, device="cpu")

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep references to `tensors` until the work that is queued on the current CUDA stream has ended, so that they
        are not freed.
        """

    def record_use(self, *tensors: torch.Tensor) -> None:
        """Keep the memory of `tensors` of other CUDA streams from being used again before the current stream's work."""

    def release(self, *, forget: bool = True) -> None:
        """Drop the tensor references that `keep` holds.

        CUDA streams that may reuse the memory of the tensors wait until it has been copied into flat buffers.

        Args:
            forget: True = all gradients of the iteration have been copied, so also forget which CUDA streams have
                written gradients.
        """

    def record_event(self, *, timed: bool = False) -> Event:
        """Record an event. On a GPU, record it on the current CUDA stream. On the host, take the time.

        `elapsed_s` needs `timed` events.
        """
        return time.perf_counter()

    def order_after(self, event: Event) -> None:
        """Make later work on the current CUDA stream wait for `event`. Does not block the host."""

    def is_reached(self, event: Event) -> bool:
        """Return whether the device has done all work before `event`. Non-blocking."""
        return True

    def wait_for(self, event: Event) -> None:
        """Block the calling thread until the device has done all work before `event`."""

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """Return the seconds between two timed events, whose preceding work must be done."""
        return float(end - begin)

    def synchronise(self) -> None:
        """Block the calling thread until the device has done all work that is queued on it."""

    def enter_thread(self) -> None:
        """Prepare the calling thread for work on the device. Each thread that Sirtaki starts must call it first."""


HOST = Device()


def refuse_capture(what: str) -> None:
    """Raise an error if a CUDA graph captures the current stream of this thread.

    Args:
        what: what Sirtaki is asked to do, for the message.

    Raises:
        ConfigError: a CUDA graph captures the stream.
    """
    # `is_current_stream_capturing` alone would create a CUDA context in a process that does not use a GPU.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise ConfigError(
            f"{what} cannot be captured in a CUDA graph, because Sirtaki reduces tensors from Python, which a replay "
            "does not run; call it outside of the capture. torch.cuda.make_graphed_callables and "
            'torch.compile(mode="reduce-overhead") capture the forward and backward computation without the reduction. '
            "To capture a whole step of a DDP model, let DDP reduce its gradients: SIRTAKI_ATTACH=0, or "
            "sirtaki.torch.ddp.detach(model)"
        )


def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `target`. Between page-locked host memory and a GPU, the copy does not block the host."""
    target.copy_(source, non_blocking=True)


logger = logging.getLogger(__name__)

HIGH_PRIORITY = -1

POOL_STREAMS = 32
"""Number of different CUDA streams that PyTorch has per device and priority, and returns in turn. Its source file
`c10/cuda/CUDAStream.cpp` defines the number."""

CAPTURE_MODE_THREAD_LOCAL = 1
"""Value of `cudaStreamCaptureModeThreadLocal`, a mode of a thread. In this mode, the thread may call CUDA functions
that a CUDA graph capture in another thread would otherwise forbid."""


@functools.cache
def cuda_runtime() -> Any:  # The return type is Any, because ctypes has no types for C functions.
    """Return the CUDA runtime library that PyTorch has loaded, through ctypes. None = it cannot be found.

    It has functions that `torch.cuda.cudart()` lacks: `cudaGetLastError`, `cudaDriverGetVersion` and
    `cudaThreadExchangeStreamCaptureMode`.
    """
    major = str(torch.version.cuda).split(".")[0]
    for name in (f"libcudart.so.{major}", "libcudart.so"):
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
    logger.debug(
        "this PyTorch has no shared library libcudart, so that other threads may break the capture of a CUDA graph; "
        "if a capture fails, install PyTorch from PyPI"
    )
    return None


def driver_version() -> tuple[int, int]:
    """Return the newest CUDA version that the installed GPU driver supports, as (major, minor). (0, 0) = unknown."""
    found = ctypes.c_int(0)
    library = cuda_runtime()
    if library is None or library.cudaDriverGetVersion(ctypes.byref(found)) != 0:
        return 0, 0
    return found.value // 1000, found.value % 1000 // 10


class CudaDevice(Device):
    """One GPU of this process, as the device that holds the gradients.

    Gradients are copied into flat buffers on a separate CUDA stream, the packing stream, so the backward pass does not
    wait for the copies. When the last reference to a gradient is dropped, the caching allocator may give its memory to
    the next kernel of the backward pass. So `keep` holds a reference until the packing stream has read the gradient.
    """

    streams = True

    def __init__(self, index: int) -> None:
        """Create the device for the GPU `cuda:index`. Call `cuda_device` instead, which creates one object per GPU."""
        self.torch_device = torch.device("cuda", index)
        self._index = index
        self._own_streams: set[int] = set()
        self._known_streams: dict[int, Any] = {}
        self._side = self.make_stream()
        self._outer: Any = None  # CUDA stream that was current when `beside` was entered. None outside of `beside`.
        self._stash: deque[tuple[Event, list[torch.Tensor]]] = deque()
        self._stashing = free_in_forked_children(threading.Lock())
        # Handle of the CUDA stream that last wrote a gradient. 0 = default stream.
        self._latest_stream: int | None = None
        self._noticed: set[int] = set()
        self._thread = threading.local()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the body of the `with` statement on the packing stream, which copies gradients into flat buffers.

        The packing stream first waits for the work that is queued on the current CUDA stream.
        """
        outer, self._outer = self._outer, torch.cuda.current_stream(self.torch_device)
        try:
            self._side.wait_stream(self._outer)
            with torch.cuda.stream(self._side):
                yield
        finally:
            self._outer = outer

    @contextmanager
    def before_packing(self) -> Iterator[None]:
        """Run the body of the `with` statement on the CUDA stream that was current outside of `beside`.

        The packing stream, which copies gradients into flat buffers, then waits for this CUDA stream.
        """
        if self._outer is None:
            yield
            return
        with torch.cuda.stream(self._outer):
            yield
        self._side.wait_stream(self._outer)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Return a context manager whose body runs on `stream`, not ordered after the current CUDA stream."""
        return torch.cuda.stream(stream)

    def make_stream(self) -> torch.cuda.Stream:
        """Return a CUDA stream of high priority, different from earlier ones as long as PyTorch has unused streams."""
        for _ in range(POOL_STREAMS):
            stream: torch.cuda.Stream = torch.cuda.Stream(self.torch_device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]  # torch's
            if stream.cuda_stream not in self._own_streams:
                break
        self._own_streams.add(stream.cuda_stream)
        return stream

    def notice_stream(self) -> None:
        """Record the current CUDA stream as one that writes gradients. Called for each gradient.

        The packing stream copies gradients into flat buffers, so it must wait for each stream that writes gradients. If
        the current stream differs from that of the last call, this call makes the packing stream wait for the earlier
        stream. `beside` makes it wait for the last one.
        """
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if raw != self._latest_stream:
            if self._latest_stream is not None:
                self._side.wait_stream(self._stream_of(self._latest_stream))
            self._latest_stream = raw
            self._noticed.add(raw)

    def pin(self, tensor: torch.Tensor) -> None:
        """Page-lock the host memory of `tensor`, which ranks may share, until it is freed.

        If CUDA refuses, log a warning.
        """
        if tensor.numel() == 0:
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
        status = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel() * tensor.element_size(), 0)
        if int(status) != 0:
            if (library := cuda_runtime()) is not None:
                library.cudaGetLastError()  # Clear CUDA's error. Otherwise PyTorch's next kernel launch would raise it.
            logger.warning(
                "CUDA cannot page-lock host memory (error %s), so copies between GPU and host will be slower",
                status,
            )
            return
        finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr())

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeroed, page-locked host memory, `(numel,)`. If CUDA refuses, log a warning and leave it pageable.

        A forked child process may use the returned memory, unlike memory that `pin` has page-locked.
        """
        try:
            return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as err:
            logger.warning("CUDA cannot page-lock host memory (%s), so copies between GPU and host will be slower", err)
            return torch.zeros(numel, dtype=dtype, device="cpu")

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep references to `tensors` until the work that is queued on the current CUDA stream has ended.

        Also drop the references of earlier calls whose work has ended.
        """
        event = self.record_event()
        with self._stashing:
            self._stash.append((event, list(tensors)))
            while self._stash[0][0] is not event and self._stash[0][0].query():
                self._stash.popleft()

    def record_use(self, *tensors: torch.Tensor) -> None:
        """Make the caching allocator wait for the current CUDA stream before it uses the memory of `tensors` again."""
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream(self.torch_device))

    def release(self, *, forget: bool = True) -> None:
        """Drop the tensor references that `keep` holds.

        The current CUDA stream, and those that have written gradients, wait for the packing stream first, because they
        may reuse the memory that it reads.
        """
        torch.cuda.current_stream(self.torch_device).wait_stream(self._side)
        for raw in self._noticed:
            self._stream_of(raw).wait_stream(self._side)
        if forget:
            self._noticed.clear()
            self._latest_stream = None
        with self._stashing:
            self._stash.clear()

    def _stream_of(self, raw: int) -> Any:  # The return type is Any, because torch has no type for streams.
        stream = self._known_streams.get(raw)
        if stream is None:
            if raw == 0:  # `ExternalStream` rejects handle 0, the default stream.
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
        """Make later work on the current CUDA stream wait for the CUDA event `event`. Does not block the host."""
        torch.cuda.current_stream(self.torch_device).wait_event(event)

    def is_reached(self, event: Event) -> bool:
        """Return whether the GPU has done all work before the CUDA event `event`. Non-blocking."""
        return bool(event.query())

    def wait_for(self, event: Event) -> None:
        """Block the calling thread until the GPU has done all work before the CUDA event `event`."""
        event.synchronize()

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """Return the seconds between two timed CUDA events, measured by the GPU."""
        return float(begin.elapsed_time(end)) / 1e3

    def synchronise(self) -> None:
        """Block the calling thread until all work on all CUDA streams of this GPU is done."""
        torch.cuda.synchronize(self.torch_device)

    def enter_thread(self) -> None:
        """Prepare the calling thread, started by Sirtaki, for calls to this GPU.

        Make the GPU the thread's current device. With another current device, a call could create a CUDA context of
        about 0.5 GB on GPU 0. Also exempt the thread from CUDA graph captures of other threads. Without this, an event
        query here would invalidate a graph that the user captures in the default mode. The main thread is not changed,
        because the user sets its current device.
        """
        if threading.current_thread() is threading.main_thread() or getattr(self._thread, "entered", False):
            return
        torch.cuda.set_device(self.torch_device)
        if (library := cuda_runtime()) is not None:
            library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(CAPTURE_MODE_THREAD_LOCAL)))
        self._thread.entered = True


@functools.cache
def cuda_device(index: int) -> CudaDevice:
    """Return the only `CudaDevice` object of this process for the GPU `cuda:index`."""
    return CudaDevice(index)
