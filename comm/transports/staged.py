"""GPU gradients through the host: out to pinned memory, over a transport of the host's, and back.

For ranks without NCCL, or that share a GPU. The copy of each unit runs on a copy stream behind the packing; one thread
a stream hands units on to the transport as their copies end, and another one copies results back, so that copies of
some units run beside the reduction of others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.control.waiting import wait_for_work
from sirtaki.comm.device import Device, Event, copy_

from ..plan import TransportKind
from .contract import (
    FlatBuffer,
    ReduceOp,
    StreamCost,
    StreamSpec,
    StreamTransport,
    ThreadWork,
    Transport,
    Work,
    Worker,
    ended,
)


class _StagedWork(ThreadWork):
    """A unit on its way: the caller waits for the reduction, and its current stream for the copy back."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self.back: Event | None = None

    def wait(self, timeout_s: float) -> bool:
        """Waits until the unit is on its way back, and has the current stream wait for the copy."""
        if not super().wait(timeout_s):
            return False
        self._device.order_after(self.back)
        return True


class _StagedStream:
    """One stream's copies and its two threads."""

    def __init__(self, index: int, device: Device, inner: Transport, failures: FailureBoard) -> None:
        self._index, self._device, self._inner, self._failures = index, device, inner, failures
        self._out, self._back = device.make_stream(), device.make_stream()
        self._leaving, self._coming = Worker(f"sirtaki-staged-out-{index}"), Worker(f"sirtaki-staged-back-{index}")
        for worker in (self._leaving, self._coming):
            worker.put(device.enter_thread)

    def submit(self, buffer: FlatBuffer, start: int, stop: int, op: ReduceOp, scale: float) -> Work:
        """Starts the copy out behind what is on the current stream."""
        device, mirror, work = self._device, buffer.mirror, _StagedWork(self._device)
        assert mirror is not None
        here, away, failed = (
            buffer.tensor[start:stop],
            mirror.tensor[start:stop],
            f"staging elements [{start}, {stop}) failed",
        )
        packed = device.record_event()
        with device.on(self._out):
            device.order_after(packed)
            device.launch(copy_, away, here)
            out = device.record_event()

        def leave() -> None:
            device.wait_for(out)
            work.begun_s = time.perf_counter()
            stream = StreamSpec(self._index)
            reduced = self._inner.all_reduce(mirror, start, stop, stream=stream, op=op, scale=scale)
            self._coming.put(partial(work.run, partial(come_back, reduced), failed))

        def come_back(reduced: Work) -> None:
            wait_for_work([reduced], failures=self._failures, blame_s=None)
            with device.on(self._back):
                device.launch(copy_, here, away)
                work.back = device.record_event()

        self._leaving.put(partial(work.attempt, leave, failed))
        return work

    def close(self) -> None:
        """Ends the threads, each after what it has to do."""
        for worker in (self._leaving, self._coming):
            ended([worker], within_s=2.0)


class StagedTransport(StreamTransport[_StagedStream]):
    """Streams through the host's memory, over any transport of the host's."""

    kind = TransportKind.STAGED

    def __init__(self, inner: Transport, device: Device, failures: FailureBoard) -> None:
        """Starts nothing. `inner` reduces the mirrors of the device's buffers; it is closed along with this."""
        super().__init__()
        self._inner, self._device, self._failures = inner, device, failures
        self.max_streams = inner.max_streams
        self.stream_cost = inner.stream_cost + StreamCost(threads=2)

    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        """Collective: opens those of the transport inside first."""
        self._inner.open_streams(streams)
        super().open_streams(streams)

    def _open(self, number: int) -> _StagedStream:
        return _StagedStream(number, self._device, self._inner, self._failures)

    def _carry(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        """Copies the range to the buffer's mirror, reduces it there and copies it back; it must have one."""
        return self.streams[stream.number].submit(buffer, start, stop, op, scale)

    def keep(self, streams: int) -> None:
        """Closes idle streams of the transport inside; those that copy stay."""
        self._inner.keep(streams)

    def _end(self, streams: list[_StagedStream]) -> bool:
        for stream in streams:
            stream.close()
        return True

    def close(self) -> bool:
        """Ends the threads that copy, and the transport inside."""
        super().close()
        return self._inner.close()
