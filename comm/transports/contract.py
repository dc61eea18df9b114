"""The interface of transports, and the code that they share.

A transport all-reduces element ranges of flat buffers over streams (parallel connections on CPUs, CUDA streams on
GPUs). Each stream reduces its ranges in order, and different streams run at the same time. Some transports also offer
an all-to-all of parcels (uint8 messages).

A stream is opened on all ranks or on none, because a rank that failed alone would leave its peers waiting. Before that,
each rank checks that it can have the file descriptors and threads of the stream. Without this check, Gloo's own threads
would end the process if they got no file descriptor.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from sirtaki.comm.control.failure import fresh
from sirtaki.comm.control.waiting import start_thread
from sirtaki.comm.device import Event
from sirtaki.errors import CommError, TransportError
from sirtaki.machine import explained

from ..plan import NcclWay, TransportKind

Lengths = npt.NDArray[np.int64]
"""Lengths of parcels (messages of an all-to-all) in bytes, `(n_ranks, n_ranks)`, by sender and receiver."""


@dataclass(frozen=True, slots=True, eq=False)
class Parcels:
    """Sizes of the parcels of one all-to-all. A parcel is the message from one rank to another.

    The parcels that a rank sends are contiguous in its outgoing buffer.

    Attributes:
        lengths: bytes by sender and receiver.
        shared: True if each rank sends the same parcel to all ranks. Each row of `lengths` then has equal values.
    """

    lengths: Lengths
    shared: bool = False

    @classmethod
    def to_all(cls, lengths: npt.ArrayLike) -> Parcels:
        """Return the parcels of an all-gather: rank r sends `lengths[r]` bytes, `(n_ranks,)`, to all ranks."""
        each = np.asarray(lengths, dtype=np.int64)
        return cls(np.repeat(each[:, None], len(each), axis=1), shared=True)

    def piece(self, number: int, of: int) -> Parcels:
        """Return the sizes of part `number` of each parcel. Each parcel is cut into `of` parts of about equal size."""
        return Parcels(self.lengths * (number + 1) // of - self.lengths * number // of, self.shared)

    def sent_by(self, rank: int) -> list[tuple[int, int]]:
        """Return the range `[start, stop)` in bytes of each parcel in the send buffer of `rank`, by receiver."""
        lengths = self.lengths[rank].tolist()
        if self.shared:
            return [(0, length) for length in lengths]
        stops = np.cumsum(self.lengths[rank]).tolist()
        return [(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)]

    def received_by(self, rank: int) -> list[int]:
        """Return the number of bytes that `rank` receives from each rank, by sender."""
        received: list[int] = self.lengths[:, rank].tolist()
        return received

    @property
    def largest_outgoing_bytes(self) -> int:
        """Size in bytes of the largest send buffer of any rank."""
        return int((self.lengths.max(1) if self.shared else self.lengths.sum(1)).max())

    @property
    def empty(self) -> bool:
        """Return whether all parcels (messages between two ranks) are empty."""
        return not self.lengths.any()


SHARE = 0.5
"""Largest fraction of the free file descriptors that the connections of a transport may use. Data loaders, files and
sockets of the training script need the other file descriptors."""

UNLIMITED = 1 << 30


TUNED_CONNECTIONS = 48
"""Largest total number of connections to other ranks that the streams of a route may have in this process, unless the
user fixes the number of streams. A single stream may have more. If all ranks are on one node, the limit is half of this
value, because several routes are tried, and streams share processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCost:
    """Resources that streams (parallel connections) use in this process.

    Attributes:
        descriptors: number of file descriptors, including those of connections.
        threads: number of threads.
        connections: number of connections to other ranks.
    """

    descriptors: int = 0
    threads: int = 0
    connections: int = 0

    def __add__(self, other: StreamCost) -> StreamCost:
        return StreamCost(
            descriptors=self.descriptors + other.descriptors,
            threads=self.threads + other.threads,
            connections=self.connections + other.connections,
        )

    def __mul__(self, streams: int) -> StreamCost:
        return StreamCost(
            descriptors=self.descriptors * streams,
            threads=self.threads * streams,
            connections=self.connections * streams,
        )


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open file descriptors to the hard limit, and return the new soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Keep the soft limit if `setrlimit` fails, as it does if the hard limit is above the kernel's present maximum.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """Return the number of file descriptors that this process may have open at the same time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def descriptors_for_streams() -> int:
    """Return how many of the free file descriptors new streams (parallel connections) may use."""
    try:
        in_use = len(os.listdir("/proc/self/fd"))
    except OSError:  # `listdir` fails if the system has no /proc, or if no file descriptor is free to open it.
        in_use = descriptor_limit() // 2
    return max(0, int(SHARE * (descriptor_limit() - in_use)))


def streams_within(descriptors: int, cost: StreamCost, *, most: int) -> int:
    """Return the number of streams (connections) for which `descriptors` file descriptors suffice, from 1 to `most`."""
    return max(1, min(most, descriptors // cost.descriptors)) if cost.descriptors else most


@contextlib.contextmanager
def reserved(cost: StreamCost) -> Iterator[str]:
    """Check that this process can open as many file descriptors and start as many threads as `cost` states.

    The check opens that many descriptors and starts that many threads. It frees them at the end of the `with` body.

    Yields:
        Error message if a file descriptor cannot be opened or a thread cannot be started. Empty = no error.
    """
    descriptors: list[int] = []
    threads: list[threading.Thread] = []
    release = threading.Event()
    problem = ""
    try:
        try:
            # Open the files inside `extend`. If one cannot be opened, `extend` has stored the descriptors of the
            # earlier ones, which `finally` closes.
            descriptors.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(cost.descriptors))
        except OSError as err:
            problem = (
                f"{cost.descriptors} more descriptors cannot be opened ({err}; the limit is {descriptor_limit()}, see "
                "ulimit -Hn)"
            )
        try:
            for _ in range(cost.threads):
                thread = threading.Thread(target=release.wait, name="sirtaki-reserved", daemon=True)
                thread.start()
                threads.append(thread)
        except (RuntimeError, MemoryError) as err:
            problem = problem or f"{cost.threads} more threads cannot be started: {explained(err)}"
        yield problem
    finally:
        release.set()
        for descriptor in descriptors:
            os.close(descriptor)
        for thread in threads:
            thread.join()


HALF_DTYPES = (torch.float16, torch.bfloat16)


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply `tensor` by `factor` in place.

    16-bit floats are multiplied in float32. Integers are multiplied in float64, and the product is truncated.
    """
    if factor == 1.0 or tensor.numel() == 0:
        return
    if tensor.dtype in HALF_DTYPES:
        tensor.copy_(tensor.float().mul_(factor))
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor).trunc_())


class ReduceOp(Enum):
    """Reduction over ranks. To average, reduce with `SUM` and pass the scale 1 / number of ranks."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


@dataclass(frozen=True, slots=True, eq=False)
class FlatBuffer:
    """A contiguous buffer of the same size on each rank. Each all-reduce reduces one element range, a unit (bucket).

    Attributes:
        tensor: buffer of this rank, 1-d and contiguous.
        peers: buffers of all ranks of the node in shared memory, by local rank, including this rank's buffer. Empty if
            the ranks do not share memory.
        mirror: host buffer of the same size through which a GPU buffer is reduced. None = the transport reduces
            `tensor` directly.
    """

    tensor: torch.Tensor
    peers: tuple[torch.Tensor, ...] = ()
    mirror: FlatBuffer | None = None


class Work:
    """An all-reduce or all-to-all in flight. An object of this base class is an empty operation, which has ended."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until the result is in the buffer, for at most `timeout_s`.

        The calling thread blocks. For GPU buffers, the current CUDA stream may wait instead of the thread.

        Returns:
            False if the operation has not ended within `timeout_s`.

        Raises:
            CommError: the operation has failed.
        """
        return True

    def is_done(self) -> bool:
        """Return whether the all-reduce or all-to-all has ended, with or without an error. Non-blocking."""
        return True

    def times(self) -> tuple[Event | None, Event | None]:
        """Return the times at which the operation started and ended. None = unknown. Call it after the operation."""
        return None, None


NOTHING_TO_DO = Work()


class Worker:
    """A thread that calls queued functions (tasks) in order. A task must not raise."""

    def __init__(self, name: str) -> None:
        """Start the thread.

        Raises:
            CommError: the thread cannot be started.
        """
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        start_thread(self.thread)

    def put(self, task: Callable[[], object]) -> None:
        """Queue a function, which the thread calls after those queued before. Thread-safe, non-blocking."""
        self._tasks.put(task)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # Drop the reference to the task before the thread blocks, so that the task's buffers are freed.

    def end(self) -> None:
        """Make the thread end after it has run the queued tasks. Non-blocking."""
        self._tasks.put(None)


def join_workers(workers: Sequence[Worker], *, within_s: float) -> bool:
    """Make the threads end after their queued tasks, and wait up to `within_s` for each thread.

    Returns:
        False if a thread still runs.
    """
    for worker in workers:
        worker.end()
    for worker in workers:
        worker.thread.join(within_s)
    return not any(worker.thread.is_alive() for worker in workers)


class ThreadWork(Work):
    """An all-reduce or all-to-all that a helper thread runs for the caller.

    Attributes:
        begun_s: time at which the thread started the operation, by `time.perf_counter`. 0 = not started, or unknown.
        done_s: time at which the operation ended, by `time.perf_counter`. 0 = it has not ended.
    """

    def __init__(self) -> None:
        # The helper thread's lock, held until the work ends. It is cheaper than a `threading.Event`.
        self._in_flight = threading.Lock()
        self._in_flight.acquire()
        self._error: CommError | None = None
        self.begun_s = self.done_s = 0.0

    def finish(self, error: CommError | None = None) -> None:
        """Mark the work as ended, and wake the threads that wait for it. Called once, by the helper thread.

        Args:
            error: error that `wait` raises. None = the work has succeeded.
        """
        self._error = error
        self.done_s = time.perf_counter()
        self._in_flight.release()

    def attempt(self, act: Callable[[], None], failed: str) -> bool:
        """Call `act`, a part of the work. If it raises, mark the work as failed with a `CommError`.

        Args:
            act: function to call.
            failed: start of the error message if `act` raises another error than a `CommError`.

        Returns:
            True if `act` did not raise.
        """
        try:
            act()
        except CommError as err:
            self.finish(err)
        except Exception as err:
            # Catch every error, because otherwise the thread that waits for the work would never wake up.
            self.finish(CommError(f"{failed}: {err!r}"))
        else:
            return True
        return False

    def run(self, act: Callable[[], None], failed: str) -> None:
        """Call `act`, the rest of the work, and mark the work as ended, or as failed if `act` raises.

        Args:
            act: function to call.
            failed: start of the error message if `act` raises another error than a `CommError`.
        """
        if self.attempt(act, failed):
            self.finish()

    def wait(self, timeout_s: float) -> bool:
        """Block until the work has ended, for at most `timeout_s`. Return False if it has not ended by then.

        Raises:
            CommError: the work has failed.
        """
        if not self._in_flight.acquire(timeout=timeout_s):
            return False
        # Release the lock at once, so that other threads that wait for the same work continue.
        self._in_flight.release()
        if self._error is not None:
            raise fresh(self._error)
        return True

    def is_done(self) -> bool:
        """Return whether the all-reduce or all-to-all has ended, with or without an error."""
        return self.done_s > 0.0

    def times(self) -> tuple[Event | None, Event | None]:
        """Return the times at which the helper thread started and ended the work. None = not started, or not ended."""
        return self.begun_s or None, self.done_s or None


class StreamSpec(NamedTuple):
    """Stream (connection on CPUs, CUDA stream on GPUs) that reduces a unit (bucket), with NCCL's settings for the unit.

    Attributes:
        number: index of the stream.
        threads: number of GPU threads for the unit. Only NCCL uses it. None = NCCL decides.
        nccl: NCCL algorithm and protocol. None = NCCL decides.
    """

    number: int
    threads: int | None = None
    nccl: NcclWay | None = None


class Transport(ABC):
    """All-reduces units (buckets, element ranges of a flat buffer) over several streams at the same time.

    A stream is a connection between CPUs, or a CUDA stream. It reduces its units in the order of submission, which must
    be the same on all ranks. Units of different streams are not ordered. Submitting a unit does not wait for peers.

    Attributes:
        kind: name of the transport.
        max_streams: largest number of open streams.
        threads: possible values of `StreamSpec.threads`. Empty = the transport ignores `StreamSpec.threads`.
        stream_cost: file descriptors and threads that one stream uses in this process.
    """

    kind: TransportKind
    max_streams: int
    threads: tuple[int, ...] = ()
    stream_cost: StreamCost

    @abstractmethod
    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        """Open `streams`. If too many streams would be open, close others of this transport. Collective.

        No operation may be in flight.

        Raises:
            PlanError: on all ranks, if that many streams cannot be open at the same time.
            TransportError: on all ranks, if any rank could not open a stream. The new streams are then closed. Streams
                that were open before the call stay open.
            CommError: the job has failed.
        """

    def all_reduce(
        self, buffer: FlatBuffer, start: int, stop: int, *, stream: StreamSpec, op: ReduceOp, scale: float
    ) -> Work:
        """Launch the all-reduce of elements `[start, stop)` of `buffer`, in place. Collective, non-blocking.

        Args:
            buffer: flat buffer. Elements `[start, stop)` must not be read or written until the work has ended.
            start: first element of the range.
            stop: end of the range. The range may be empty.
            stream: an open stream (connection or CUDA stream), which runs the all-reduce.
            op: reduction over ranks.
            scale: factor for the result.
        """
        return self._start(buffer, start, stop, stream, op, scale) if start < stop else NOTHING_TO_DO

    @abstractmethod
    def _start(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        """Launch the all-reduce of the elements `[start, stop)`, at least one, of `buffer`. Called by `all_reduce`."""

    def prepare(self, act: Callable[[], None], *, stream: StreamSpec) -> bool:
        """Make the thread of a stream (connection) call `act` before it reduces later units (buckets). Non-blocking.

        Args:
            act: function to call. Must not raise.
            stream: an open stream.

        Returns:
            False if the stream has no thread, so that the caller must call `act`.
        """
        return False

    def exchange(self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, *, stream: StreamSpec) -> Work:
        """Launch an all-to-all of parcels (messages between two ranks). Collective, non-blocking.

        The parcels are in the memory of the transport's device: on a GPU with NCCL, else on the host. A stream
        processes exchanges and all-reduces in the order of submission.

        Args:
            outgoing: parcels that this rank sends, uint8, contiguous by receiver. Must not be written until the work
                has ended.
            parcels: sizes of all parcels. Must be equal on all ranks.
            incoming: tensor that receives the parcels for this rank, uint8, contiguous by sender.
            stream: an open stream.
        """
        return NOTHING_TO_DO if parcels.empty else self._exchange(outgoing, parcels, incoming, stream)

    def _exchange(self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, stream: StreamSpec) -> Work:
        """Launch an all-to-all of parcels (messages) with at least one byte in all. Called by `exchange`."""
        raise NotImplementedError

    def run(self, act: Callable[[], None], *, stream: StreamSpec) -> Work:
        """Call `act`, which launches operations on the current CUDA stream, with `stream` as that stream. Non-blocking.

        Only NCCL's transports implement it.
        """
        raise NotImplementedError

    def keep(self, streams: int) -> None:  # noqa: B027 - most transports have nothing to close
        """Close all but the first `streams` streams (connections), if idle streams of this transport use CPU time.

        Collective. No operation may be in flight.
        """

    @abstractmethod
    def close(self) -> bool:
        """End the threads and connections of this rank. Pending operations fail. May be called twice.

        Returns:
            False if a thread still waits for a peer. The caller must then not free the buffers of pending operations.
        """


Stream = TypeVar("Stream")
Opened = TypeVar("Opened")

Agree = Callable[[str], None]
"""Type of `ControlPlane.agree_on_success`, which raises an error on all ranks if any rank passes an error message. A
rank without an error passes ""."""


class StreamTransport(Transport, Generic[Stream]):
    """Base of transports that open their streams (parallel connections) in the order of stream numbers.

    Attributes:
        streams: open streams, by number.
    """

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    @abstractmethod
    def _open(self, numbers: range) -> Iterable[Stream]:
        """Open the streams (connections) with these indices, and return or yield them in order. Collective.

        Raises:
            TransportError: on all ranks, if any rank cannot open a stream. Streams that were yielded before it stay
                open.
        """

    @abstractmethod
    def _close_streams(self, streams: list[Stream]) -> bool:
        """Close streams (connections) that the caller has removed from `self.streams`.

        Return False if a thread of a stream still waits for a peer.
        """

    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        """Open those of `streams` (connections) that are not open, in the order of their numbers. Collective.

        If opening fails on any rank, close the streams that this call has opened.
        """
        before = len(self.streams)
        try:
            for opened in self._open(range(before, 1 + max(stream.number for stream in streams))):
                self.streams.append(opened)
        except TransportError:
            self._close_after(before)
            raise

    def _close_after(self, count: int) -> bool:
        """Close all but the first `count` streams (connections).

        Return False if a thread of a closed stream still waits for a peer.
        """
        closed = self.streams[count:]
        del self.streams[count:]
        return self._close_streams(closed)

    def close(self) -> bool:
        """Close all streams (connections). Return False if a thread of a stream still waits for a peer."""
        return self._close_after(0)


def open_together(
    what: str, open_local: Callable[[], Opened], *, agree: Agree, close: Callable[[Opened], object] = lambda _: None
) -> Opened:
    """Call `open_local` on all ranks, and return its result if it has succeeded on every rank. Collective.

    Args:
        what: name of the object to open, for error messages.
        open_local: opens the object on this rank.
        agree: collective function that gets this rank's error message ("" = none), and raises on all ranks if any rank
            has passed an error message.
        close: closes this rank's object. Called if a peer has failed.

    Raises:
        TransportError: on all ranks, if `open_local` has failed on any rank.
        CommError: the job has failed.
    """
    opened: list[Opened] = []
    problem = ""
    try:
        opened.append(open_local())
    except (RuntimeError, MemoryError) as err:  # PyTorch, MPI and the start of a thread raise these errors.
        problem = f"{what}: {explained(err)}"
    try:
        agree(problem)
    except CommError:
        for each in opened:
            close(each)
        raise
    return opened[0]
