"""GPU gradients through the host: out to pinned memory, over a transport of the host's, and back.

For ranks without NCCL, or that share a GPU. The copy of each unit runs on a copy stream behind the packing; one thread
a stream hands units on to the transport as their copies end, and another one copies results back, so that copies of
some units run beside the reduction of others.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.device import Device, Event, copy_
from sirtaki.errors import CommError

from ..plan import TransportKind
from .contract import (
    NOTHING_TO_DO,
    FlatBuffer,
    ReduceOp,
    StreamCost,
    StreamSpec,
    StreamTransport,
    ThreadWork,
    Transport,
    Work,
)


@dataclass(slots=True, eq=False)
class _Task:
    """One unit on its way."""

    buffer: FlatBuffer
    start: int
    stop: int
    op: ReduceOp
    scale: float
    out: Event  # its copy to the host is done
    work: _StagedWork


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


class _Stream:
    """One stream's copies and its two threads."""

    def __init__(self, index: int, device: Device, inner: Transport, failures: FailureBoard) -> None:
        self._index, self._device, self._inner, self._failures = index, device, inner, failures
        self._out, self._back = device.make_stream(), device.make_stream()
        self._leaving: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._coming: queue.SimpleQueue[tuple[_Task, Work] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"sirtaki-staged-{name}-{index}", daemon=True)
            for target, name in ((self._send, "out"), (self._receive, "back"))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, buffer: FlatBuffer, start: int, stop: int, op: ReduceOp, scale: float) -> Work:
        """Starts the copy out behind what is on the current stream."""
        assert buffer.mirror is not None
        packed = self._device.record_event()
        with self._device.on(self._out):
            self._device.order_after(packed)
            self._device.launch(copy_, buffer.mirror.tensor[start:stop], buffer.tensor[start:stop])
            out = self._device.record_event()
        task = _Task(buffer, start, stop, op, scale, out, _StagedWork(self._device))
        self._leaving.put(task)
        return task.work

    def _send(self) -> None:
        while (task := self._leaving.get()) is not None:
            self._guarded(task, self._hand_on)
        self._coming.put(None)

    def _hand_on(self, task: _Task) -> None:
        self._device.wait_for(task.out)
        task.work.begun_s = time.perf_counter()
        assert task.buffer.mirror is not None
        work = self._inner.all_reduce(
            task.buffer.mirror, task.start, task.stop, stream=StreamSpec(self._index), op=task.op, scale=task.scale
        )
        self._coming.put((task, work))

    def _receive(self) -> None:
        while (coming := self._coming.get()) is not None:
            task, work = coming
            self._guarded(task, partial(self._copy_back, work=work))

    def _copy_back(self, task: _Task, work: Work) -> None:
        while not work.wait(timeout_s=1.0):
            self._failures.check()
        assert task.buffer.mirror is not None
        with self._device.on(self._back):
            self._device.launch(
                copy_, task.buffer.tensor[task.start : task.stop], task.buffer.mirror.tensor[task.start : task.stop]
            )
            task.work.back = self._device.record_event()
        task.work.finish()

    def _guarded(self, task: _Task, step: Callable[[_Task], None]) -> None:
        try:
            step(task)
        except CommError as err:
            task.work.finish(err)
        except Exception as err:  # whatever it is, the waiting thread must hear of it
            task.work.finish(CommError(f"staging elements [{task.start}, {task.stop}) failed: {err!r}"))

    def close(self) -> None:
        """Ends the threads."""
        self._leaving.put(None)
        for thread in self._threads:
            thread.join(timeout=2.0)


class StagedTransport(StreamTransport[_Stream]):
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

    def _open(self, number: int) -> _Stream:
        return _Stream(number, self._device, self._inner, self._failures)

    def all_reduce(
        self, buffer: FlatBuffer, start: int, stop: int, *, stream: StreamSpec, op: ReduceOp, scale: float
    ) -> Work:
        """Copies the range to the buffer's mirror, reduces it there and copies it back; it must have one."""
        if start == stop:
            return NOTHING_TO_DO
        return self.streams[stream.number].submit(buffer, start, stop, op, scale)

    def keep(self, streams: int) -> None:
        """Closes idle streams of the transport inside; those that copy stay."""
        self._inner.keep(streams)

    def _end(self, streams: list[_Stream]) -> bool:
        for stream in streams:
            stream.close()
        return True

    def close(self) -> bool:
        """Ends the threads that copy, and the transport inside."""
        super().close()
        return self._inner.close()
