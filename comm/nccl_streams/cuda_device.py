"""A GPU, as the synchroniser sees it: order by events, memory kept by stashing, time taken by events."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from sirtaki.comm.device import Event

logger = logging.getLogger(__name__)

HIGH_PRIORITY = -1


class CudaDevice:
    """One GPU of this process; see `sirtaki.comm.device.Device`.

    Gradients are packed on a side stream, so the backward pass does not wait for the copies. The caching allocator
    would hand a gradient's memory out again as soon as the *backward* stream lets it go, so what the side stream
    still reads is kept here until it has been read.
    """

    streams = True
    users = 0

    def __init__(self, index: int) -> None:
        """Args: `index` of the GPU, as `cuda:index`."""
        self.torch_device = torch.device("cuda", index)
        self._index = index
        self._side = self.make_stream()
        self._stash: deque[tuple[Event, list[torch.Tensor]]] = deque()
        self._stashing = threading.Lock()
        self._latest_stream = 0
        self._noticed: set[int] = set()

    def launch(self, function: Callable[..., object], *args: object) -> None:
        """See `Device`."""
        function(*args)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """See `Device`."""
        self._side.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._side):
            yield

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """See `Device`."""
        return torch.cuda.stream(stream)

    def make_stream(self) -> torch.cuda.Stream:
        """See `Device`."""
        stream: torch.cuda.Stream = torch.cuda.Stream(self.torch_device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]  # torch's
        return stream

    def notice_stream(self) -> None:
        """See `Device`. Autograd may compute gradients on several streams; packing waits for the last one anyway."""
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if raw != self._latest_stream:
            if self._latest_stream:
                self._side.wait_stream(self._external(self._latest_stream))
            self._latest_stream = raw
            self._noticed.add(raw)

    def pin(self, tensor: torch.Tensor) -> None:
        """See `Device`: page-locks memory that is there already, such as that which ranks share."""
        if tensor.numel() == 0:
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
        status = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel() * tensor.element_size(), 0)
        if int(status) != 0:
            logger.warning("copies to and from the GPU are slow: CUDA cannot page-lock their memory (%s)", status)
            return
        weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr()).atexit = False

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Device`."""
        event = self.record_event()
        with self._stashing:
            self._stash.append((event, list(tensors)))
            while self._stash[0][0] is not event and self._stash[0][0].query():
                self._stash.popleft()

    def release(self) -> None:
        """See `Device`. Gradients go back to the streams that they were made on, which may not be the current one."""
        for raw in self._noticed:
            self._external(raw).wait_stream(self._side)
        self._noticed = {self._latest_stream} if self._latest_stream else set()
        with self._stashing:
            self._stash.clear()

    def _external(self, raw: int) -> Any:  # Any: torch leaves it untyped
        return torch.cuda.ExternalStream(raw, self.torch_device)  # type: ignore[no-untyped-call]  # torch's

    def record_event(self) -> Event:
        """See `Device`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def order_after(self, event: Event) -> None:
        """See `Device`."""
        torch.cuda.current_stream(self.torch_device).wait_event(event)

    def is_reached(self, event: Event) -> bool:
        """See `Device`."""
        return bool(event.query())

    def wait_for(self, event: Event) -> None:
        """See `Device`."""
        event.synchronize()

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """See `Device`."""
        return float(begin.elapsed_time(end)) / 1e3

    def synchronise(self) -> None:
        """See `Device`."""
        torch.cuda.synchronize(self.torch_device)


@functools.cache
def cuda_device(index: int) -> CudaDevice:
    """The one object for `cuda:index` in this process."""
    return CudaDevice(index)
