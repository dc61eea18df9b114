"""Transport of GPU buffers through pinned host memory, for ranks without NCCL or on the same GPU.

Each unit (bucket) is copied to the host on a CUDA stream for copies, once its gradients are in the flat buffer. Two
threads per stream process the units. The first thread waits for the copy to the host, and submits the unit to the inner
transport, which reduces the unit in host memory. The second thread waits for the reduction, and copies the result to
the GPU. So units are copied while other units are reduced.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
    join_workers,
)


class _StagedWork(ThreadWork):
    """All-reduce of a unit (bucket) in flight.

    `wait` blocks the calling thread until the reduction in host memory has ended. Then it makes the current CUDA stream
    wait until the result is copied to the GPU.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self.copied: Event | None = None

    def wait(self, timeout_s: float) -> bool:
        """Block until the copy of the result to the GPU is launched. Then the current CUDA stream waits for the copy.

        Return False if the copy is not launched within `timeout_s`.
        """
        if not super().wait(timeout_s):
            return False
        self._device.order_after(self.copied)
        return True


class _StagedStream:
    """One stream of the transport: a CUDA stream and a thread for copies to the host, and another pair for copies to
    the GPU.
    """

    def __init__(self, index: int, device: Device, inner: Transport, failures: FailureBoard) -> None:
        self._index, self._device, self._inner, self._failures = index, device, inner, failures
        self._out_stream, self._back_stream = device.make_stream(), device.make_stream()
        self._to_host, self._to_gpu = Worker(f"sirtaki-staged-out-{index}"), Worker(f"sirtaki-staged-back-{index}")
        self._copied: Event = None  # CUDA event recorded after the last copy to the GPU.
        for worker in (self._to_host, self._to_gpu):
            worker.put(device.enter_thread)

    def submit(self, buffer: FlatBuffer, start: int, stop: int, op: ReduceOp, scale: float) -> Work:
        """Launch the all-reduce of elements `[start, stop)` of `buffer`, a unit (bucket). Non-blocking.

        The unit is copied to the host after the kernels that are queued on the current CUDA stream.
        """
        device, mirror, work = self._device, buffer.mirror, _StagedWork(self._device)
        assert mirror is not None
        on_gpu, on_host = buffer.tensor[start:stop], mirror.tensor[start:stop]
        failed = f"staging elements [{start}, {stop}) failed"
        packed = device.record_event()
        with device.on(self._out_stream):
            device.order_after(packed)
            device.launch(copy_, on_host, on_gpu)
            out = device.record_event()

        def reduce() -> None:
            device.wait_for(out)
            work.begun_s = time.perf_counter()
            stream = StreamSpec(self._index)
            reduced = self._inner.all_reduce(mirror, start, stop, stream=stream, op=op, scale=scale)
            self._to_gpu.put(partial(work.run, partial(copy_to_gpu, reduced), failed))

        def copy_to_gpu(reduced: Work) -> None:
            wait_for_work([reduced], failures=self._failures, blame_s=None)
            with device.on(self._back_stream):
                device.launch(copy_, on_gpu, on_host)
                work.copied = self._copied = device.record_event()

        self._to_host.put(partial(work.attempt, reduce, failed))
        return work

    def close(self) -> None:
        """End the two threads after they have processed their queued units (buckets), and wait for the GPU's copies.

        The caller may then free the host memory.
        """
        join_workers([self._to_host], within_s=2.0)
        self._to_gpu.put(self._wait_for_copies)
        join_workers([self._to_gpu], within_s=2.0)

    def _wait_for_copies(self) -> None:
        if self._copied is not None:
            self._device.wait_for(self._copied)


class StagedTransport(StreamTransport[_StagedStream]):
    """Transport of GPU buffers through host memory: copies them to the host, where another transport reduces them."""

    kind = TransportKind.STAGED

    def __init__(self, inner: Transport, device: Device, failures: FailureBoard) -> None:
        """Create the transport. `open_streams` creates CUDA streams and threads.

        Args:
            inner: transport that reduces the copies in host memory (`FlatBuffer.mirror`). `close` also closes it.
            device: GPU of this rank.
            failures: record of the job's failure. Once it contains a failure, waiting operations fail.
        """
        super().__init__()
        self._inner, self._device, self._failures = inner, device, failures
        self.max_streams = inner.max_streams
        self.stream_cost = inner.stream_cost + StreamCost(threads=2)

    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        """Open the streams of the inner transport, then create CUDA streams and threads for copies. Collective."""
        self._inner.open_streams(streams)
        super().open_streams(streams)

    def _open(self, numbers: range) -> Iterator[_StagedStream]:
        for number in numbers:
            yield _StagedStream(number, self._device, self._inner, self._failures)

    def _start(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        """Launch the all-reduce of elements `[start, stop)` of `buffer` through its host copy, `buffer.mirror`.

        `buffer.mirror` must not be None.
        """
        return self.streams[stream.number].submit(buffer, start, stop, op, scale)

    def keep(self, streams: int) -> None:
        """Let the inner transport close all but its first `streams` streams, if idle streams use CPU time.

        The CUDA streams and threads for copies stay, because idle ones use no CPU time.
        """
        self._inner.keep(streams)

    def _close_streams(self, streams: list[_StagedStream]) -> bool:
        for stream in streams:
            stream.close()
        return True

    def close(self) -> bool:
        """End the threads for copies, and close the inner transport.

        Return False if a thread of the inner transport still waits for a peer.
        """
        super().close()
        return self._inner.close()
