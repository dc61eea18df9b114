"""Where gradients live, and in which order things happen there: the seam between the synchroniser and CUDA.

On the host things happen when they are called. On a GPU a call only puts work on a *stream*, and order exists between
streams where someone asked for it. All of that is here, so that the synchroniser is written once, and so that tests
can run it on streams that are not CUDA's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

Event = Any
"""A moment on a device, as `Device.record_event` gives it: a float of the host's clock, or an event."""


class Device(Protocol):
    """What the synchroniser needs to know of a place where gradients live.

    Attributes:
        torch_device: of its tensors.
        streams: work is put on streams and done later. All ranks must then start reductions in the same order, one
            thread at a time, and what an iteration measured is known when the next one ends.
        users: synchronisers that use it now; each counts itself.
    """

    torch_device: torch.device
    streams: bool
    users: int

    def launch(self, function: Callable[..., object], *args: object) -> None:
        """Calls a function whose tensor operations belong to the current stream."""
        ...

    def beside(self) -> AbstractContextManager[object]:
        """What is launched inside runs beside the current stream, after all that was launched there so far."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """What is launched inside runs on a stream of `make_stream`, with no order to the current one."""
        ...

    def make_stream(self) -> Any:
        """A stream of its own; high priority."""
        ...

    def notice_stream(self) -> None:
        """Something that reductions depend on was just put on the current stream; cheap, called a gradient."""
        ...

    def pin(self, tensor: torch.Tensor) -> None:
        """Makes copies between a tensor in the host's memory and the device fast, as long as the tensor lives."""
        ...

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps the memory of tensors until all that was launched so far on the current stream is done."""
        ...

    def release(self) -> None:
        """Lets go what is kept: the current stream is ordered after all that reads it."""
        ...

    def record_event(self) -> Event:
        """The moment in which all that was launched so far on the current stream is done."""
        ...

    def order_after(self, event: Event) -> None:
        """What is launched on the current stream from now on happens after `event`."""
        ...

    def is_reached(self, event: Event) -> bool:
        """Whether the moment is over; never waits."""
        ...

    def wait_for(self, event: Event) -> None:
        """Blocks the calling thread until the moment has come."""
        ...

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """Seconds between two moments that are over."""
        ...

    def synchronise(self) -> None:
        """Blocks until everything on the device is done."""
        ...


class HostDevice:
    """The host's memory: everything has happened when its call returns."""

    torch_device = torch.device("cpu")
    streams = False
    users = 0
    _nothing = nullcontext()

    def launch(self, function: Callable[..., object], *args: object) -> None:
        """See `Device`."""
        function(*args)

    def beside(self) -> AbstractContextManager[object]:
        """See `Device`."""
        return self._nothing

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """See `Device`."""
        return self._nothing

    def make_stream(self) -> Any:
        """See `Device`."""
        return None

    def notice_stream(self) -> None:
        """See `Device`."""

    def pin(self, tensor: torch.Tensor) -> None:
        """See `Device`."""

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Device`."""

    def release(self) -> None:
        """See `Device`."""

    def record_event(self) -> Event:
        """See `Device`."""
        return time.perf_counter()

    def order_after(self, event: Event) -> None:
        """See `Device`."""

    def is_reached(self, event: Event) -> bool:
        """See `Device`."""
        return True

    def wait_for(self, event: Event) -> None:
        """See `Device`."""

    def elapsed_s(self, begin: Event, end: Event) -> float:
        """See `Device`."""
        elapsed: float = end - begin
        return elapsed

    def synchronise(self) -> None:
        """See `Device`."""


HOST = HostDevice()


def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies without waiting, where one of the two is page-locked; for `Device.launch`."""
    target.copy_(source, non_blocking=True)
