"""Where gradients live, and in which order things happen there: the seam between the synchroniser and CUDA.

On the host things happen when they are called. On a GPU a call only puts work on a *stream*, and order exists between
streams where someone asked for it: by events; memory is kept by stashing, time is taken by events. All of that is here,
so that the synchroniser is written once, and so that tests can run it on streams that are not CUDA's.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

Event = Any
"""A moment on a device, as `Device.record_event` gives it: a float of the host's clock, or an event."""


class Device:
    """Where gradients live, and what the synchroniser needs to know of it: this one is the host's memory.

    There everything has happened when its call returns; see `CudaDevice` for a GPU.

    Attributes:
        torch_device: of its tensors.
        streams: work is put on streams and done later. All ranks must then start reductions in the same order, one
            thread at a time, and what an iteration measured is known when the next one ends.
        users: synchronisers that use it now; each counts itself.
    """

    torch_device = torch.device("cpu")
    streams = False
    users = 0
    _nothing = nullcontext()

    def launch(self, function: Callable[..., object], *args: object) -> None:
        """Calls a function whose tensor operations belong to the current stream."""
        function(*args)

    def beside(self) -> AbstractContextManager[object]:
        """What is launched inside runs beside the current stream, after all that was launched there so far."""
        return self._nothing

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """What is launched inside runs on a stream of `make_stream`, with no order to the current one."""
        return self._nothing

    def make_stream(self) -> Any:
        """A stream of its own; high priority. None on the host, which has no other order than that of calls."""
        return None

    def notice_stream(self) -> None:
        """Something that reductions depend on was just put on the current stream; cheap, called a gradient."""

    def pin(self, tensor: torch.Tensor) -> None:
        """Makes copies between a tensor in the host's memory and the device fast, as long as the tensor lives."""

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps the memory of tensors until all that was launched so far on the current stream is done."""

    def release(self) -> None:
        """Lets go what is kept: the current stream is ordered after all that reads it."""

    def record_event(self) -> Event:
        """The moment in which all that was launched so far on the current stream is done."""
        return time.perf_counter()

    def order_after(self, event: Event) -> None:
        """What is launched on the current stream from now on happens after `event`."""

    def is_reached(self, event: Event) -> bool:
        """Whether the moment is over; never waits."""
        return True

    def wait_for(self, event: Event) -> None:
        """Blocks the calling thread until the moment has come."""

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """Seconds between two moments that are over."""
        return float(end - begin)

    def synchronise(self) -> None:
        """Blocks until everything on the device is done."""


HOST = Device()


def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies without waiting, where one of the two is page-locked; for `Device.launch`."""
    target.copy_(source, non_blocking=True)


logger = logging.getLogger(__name__)

HIGH_PRIORITY = -1


class CudaDevice(Device):
    """One GPU of this process.

    Gradients are packed on a side stream, so the backward pass does not wait for the copies. The caching allocator
    would hand a gradient's memory out again as soon as the *backward* stream lets it go, so what the side stream
    still reads is kept here until it has been read.
    """

    streams = True

    def __init__(self, index: int) -> None:
        """Args: `index` of the GPU, as `cuda:index`."""
        self.torch_device = torch.device("cuda", index)
        self._index = index
        self._side = self.make_stream()
        self._stash: deque[tuple[Event, list[torch.Tensor]]] = deque()
        self._stashing = threading.Lock()
        self._latest_stream = 0
        self._noticed: set[int] = set()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launches on the side stream, behind what is on the current one by now."""
        self._side.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._side):
            yield

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Launches on that stream, and orders nothing."""
        return torch.cuda.stream(stream)

    def make_stream(self) -> torch.cuda.Stream:
        """A CUDA stream of high priority."""
        stream: torch.cuda.Stream = torch.cuda.Stream(self.torch_device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]  # torch's
        return stream

    def notice_stream(self) -> None:
        """Has the side stream wait when autograd changes streams; packing waits for the last one anyway."""
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if raw != self._latest_stream:
            if self._latest_stream:
                self._side.wait_stream(self._external(self._latest_stream))
            self._latest_stream = raw
            self._noticed.add(raw)

    def pin(self, tensor: torch.Tensor) -> None:
        """Page-locks memory that is there already, such as that which ranks share."""
        if tensor.numel() == 0:
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
        status = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel() * tensor.element_size(), 0)
        if int(status) != 0:
            logger.warning("copies to and from the GPU are slow: CUDA cannot page-lock their memory (%s)", status)
            return
        weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr()).atexit = False

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Holds the tensors behind an event of the current stream, and lets go those whose event is over."""
        event = self.record_event()
        with self._stashing:
            self._stash.append((event, list(tensors)))
            while self._stash[0][0] is not event and self._stash[0][0].query():
                self._stash.popleft()

    def release(self) -> None:
        """Gives gradients back to the streams that they were made on, which may not be the current one."""
        for raw in self._noticed:
            self._external(raw).wait_stream(self._side)
        self._noticed = {self._latest_stream} if self._latest_stream else set()
        with self._stashing:
            self._stash.clear()

    def _external(self, raw: int) -> Any:  # Any: torch leaves it untyped
        return torch.cuda.ExternalStream(raw, self.torch_device)  # type: ignore[no-untyped-call]  # torch's

    def record_event(self) -> Event:
        """An event with a time, on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def order_after(self, event: Event) -> None:
        """Has the current stream wait for the event; the host goes on."""
        torch.cuda.current_stream(self.torch_device).wait_event(event)

    def is_reached(self, event: Event) -> bool:
        """Asks the event, and does not wait."""
        return bool(event.query())

    def wait_for(self, event: Event) -> None:
        """Blocks the host until the event is over."""
        event.synchronize()

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """Seconds by the GPU's clock."""
        return float(begin.elapsed_time(end)) / 1e3

    def synchronise(self) -> None:
        """Blocks the host until all streams of this GPU are done."""
        torch.cuda.synchronize(self.torch_device)


@functools.cache
def cuda_device(index: int) -> CudaDevice:
    """The one object for `cuda:index` in this process."""
    return CudaDevice(index)
