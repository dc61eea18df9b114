"""The contract of everything that carries units, and what its implementations share.

A transport reduces ranges of buffers over streams and, where it can, exchanges parcels. Streams are opened on all ranks
or on none, and only if the descriptors and threads that they take can be had: what fails in the middle leaves other
ranks waiting, and Gloo's own threads end the process if they get no descriptor.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from sirtaki.comm.control.failure import fresh
from sirtaki.comm.device import Event
from sirtaki.errors import CommError, TransportError

from ..plan import NcclWay, TransportKind

Lengths = npt.NDArray[np.int64]
"""`(n_ranks, n_ranks)` bytes, by sender and receiver."""


@dataclass(frozen=True, slots=True, eq=False)
class Parcels:
    """The parcels of one exchange; those of one sender lie one behind the other in its outgoing buffer.

    Attributes:
        lengths: see `Lengths`.
        shared: each sender has one parcel only, which goes to all; then the rows of `lengths` are constant.
    """

    lengths: Lengths
    shared: bool = False

    @classmethod
    def to_all(cls, lengths: npt.ArrayLike) -> Parcels:
        """Each rank sends its one parcel to all: `(n_ranks,)` bytes."""
        each = np.asarray(lengths, dtype=np.int64)
        return cls(np.repeat(each[:, None], len(each), axis=1), shared=True)

    def piece(self, number: int, of: int) -> Parcels:
        """One of so many pieces, about equal, that each parcel is cut into."""
        return Parcels(self.lengths * (number + 1) // of - self.lengths * number // of, self.shared)

    def sent_by(self, rank: int) -> list[tuple[int, int]]:
        """Where in its outgoing buffer the parcels lie, by receiver: `[start, stop)`."""
        lengths = self.lengths[rank].tolist()
        if self.shared:
            return [(0, length) for length in lengths]
        stops = np.cumsum(self.lengths[rank]).tolist()
        return [(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)]

    def received_by(self, rank: int) -> list[int]:
        """Bytes by sender."""
        received: list[int] = self.lengths[:, rank].tolist()
        return received

    @property
    def largest_outgoing_bytes(self) -> int:
        """What the rank with the most to send has in its outgoing buffer."""
        return int((self.lengths.max(1) if self.shared else self.lengths.sum(1)).max())

    @property
    def empty(self) -> bool:
        """Nobody sends anything."""
        return not self.lengths.any()


SHARE = 0.5
"""Of the descriptors that are free, what streams may take; data loaders, files and sockets want some, too."""

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCost:
    """What one stream takes of this process."""

    descriptors: int = 0
    threads: int = 0

    def __add__(self, other: StreamCost) -> StreamCost:
        return StreamCost(descriptors=self.descriptors + other.descriptors, threads=self.threads + other.threads)

    def __mul__(self, streams: int) -> StreamCost:
        return StreamCost(descriptors=self.descriptors * streams, threads=self.threads * streams)


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open descriptors to the hard one; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # A hard limit above what the kernel permits now is left as it is.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """How many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def descriptors_for_streams() -> int:
    """How many more descriptors streams may take."""
    try:
        in_use = len(os.listdir("/proc/self/fd"))
    except OSError:  # no /proc, or no descriptor to read it with
        in_use = descriptor_limit() // 2
    return max(0, int(SHARE * (descriptor_limit() - in_use)))


def streams_within(descriptors: int, cost: StreamCost, *, most: int) -> int:
    """How many streams fit into so many descriptors, at most `most`; 1 is always tried."""
    return max(1, min(most, descriptors // cost.descriptors)) if cost.descriptors else most


@contextlib.contextmanager
def held(cost: StreamCost) -> Iterator[str]:
    """Takes so many descriptors and threads while the context lasts, to find out whether they can be had.

    Yields:
        What cannot be had, in words; empty if all can.
    """
    descriptors: list[int] = []
    threads: list[threading.Thread] = []
    release = threading.Event()
    problem = ""
    try:
        try:
            # Those that could be had are in the list, too, if the next one cannot.
            descriptors.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(cost.descriptors))
        except OSError as err:
            problem = f"{cost.descriptors} more descriptors cannot be had ({err}; the limit is {descriptor_limit()})"
        try:
            for _ in range(cost.threads):
                thread = threading.Thread(target=release.wait, name="sirtaki-held", daemon=True)
                thread.start()
                threads.append(thread)
        except (RuntimeError, MemoryError) as err:
            problem = problem or f"{cost.threads} more threads cannot be started ({err})"
        yield problem
    finally:
        release.set()
        for descriptor in descriptors:
            os.close(descriptor)
        for thread in threads:
            thread.join()


HALF_DTYPES = (torch.float16, torch.bfloat16)


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """`tensor *= factor` in place; halves go through float32, integers through float64 and are truncated."""
    if factor == 1.0 or tensor.numel() == 0:
        return
    if tensor.dtype in HALF_DTYPES:
        tensor.copy_(tensor.float().mul_(factor))
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor).trunc_())


class ReduceOp(Enum):
    """How elements of different ranks are combined; averages are sums with a scale."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


@dataclass(frozen=True, slots=True, eq=False)
class FlatBuffer:
    """One contiguous buffer a rank, all of one size; units are element ranges of it.

    Attributes:
        tensor: this rank's buffer, 1-d and contiguous.
        peers: where the ranks of one node share memory, the buffers of all of them by local rank (this rank's own
            among them); empty otherwise.
        mirror: where a device's buffer travels through the host, the buffer of the same size there.
    """

    tensor: torch.Tensor
    peers: tuple[torch.Tensor, ...] = ()
    mirror: FlatBuffer | None = None


class Work:
    """A reduction under way; this one has nothing to do."""

    def wait(self, timeout_s: float) -> bool:
        """Blocks until the result is in the buffer, for at most `timeout_s`; False if it is not there by then.

        On a device with streams the current stream waits instead, where the transport can have it wait.

        Raises:
            CommError: the reduction failed.
        """
        return True

    def is_done(self) -> bool:
        """Return whether it is reduced, or has failed; never waits."""
        return True

    def times(self) -> tuple[Event | None, Event | None]:
        """When the transport began and when it ended, as far as it knows; after the end."""
        return None, None


NOTHING_TO_DO = Work()


class Worker:
    """A thread that does one thing after the other; whoever gives it something to do sees to errors."""

    def __init__(self, name: str) -> None:
        """Starts the thread.

        Raises:
            RuntimeError: it cannot be started.
        """
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def put(self, task: Callable[[], object]) -> None:
        """Has it done after all that was put before."""
        self._tasks.put(task)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it holds buffers

    def end(self) -> None:
        """Ends the thread after what it has to do."""
        self._tasks.put(None)


def ended(workers: Sequence[Worker], *, within_s: float) -> bool:
    """Ends threads after what they have to do; False if one has not ended, each of which is waited for so long."""
    for worker in workers:
        worker.end()
    for worker in workers:
        worker.thread.join(within_s)
    return not any(worker.thread.is_alive() for worker in workers)


class ThreadWork(Work):
    """A piece of work that another thread does and reports.

    Attributes:
        begun_s, done_s: when the thread took it up and ended it, as of `time.perf_counter`; 0 = not yet, or unknown.
    """

    def __init__(self) -> None:
        self._under_way = threading.Lock()  # a lock that is held until then: an Event costs several times as much
        self._under_way.acquire()
        self._error: CommError | None = None
        self.begun_s = self.done_s = 0.0

    def finish(self, error: CommError | None = None) -> None:
        """Called by the working thread, once."""
        self._error = error
        self.done_s = time.perf_counter()
        self._under_way.release()

    def attempt(self, act: Callable[[], None], failed: str) -> bool:
        """Called by the working thread: acts, and is finished if that fails; what was not foreseen is a `CommError`.

        Args:
            act: what to do.
            failed: what could not be done, in words.
        """
        try:
            act()
        except CommError as err:
            self.finish(err)
        except Exception as err:  # whatever it is, those who wait must hear of it
            self.finish(CommError(f"{failed}: {err!r}"))
        else:
            return True
        return False

    def run(self, act: Callable[[], None], failed: str) -> None:
        """Called by the working thread, once: attempts it, and is finished."""
        if self.attempt(act, failed):
            self.finish()

    def wait(self, timeout_s: float) -> bool:
        """Blocks until the thread is done with it, for at most so long; raises what it has failed with."""
        if not self._under_way.acquire(timeout=timeout_s):
            return False
        self._under_way.release()  # others may wait, too
        if self._error is not None:
            raise fresh(self._error)
        return True

    def is_done(self) -> bool:
        """Return whether the thread is done with it."""
        return self.done_s > 0.0

    def times(self) -> tuple[Event | None, Event | None]:
        """When the thread took it up and when it was done."""
        return self.begun_s or None, self.done_s or None


class StreamSpec(NamedTuple):
    """What one unit travels on: a stream, with a thread allowance where the transport has any (None = its own), and
    over NCCL how it is reduced (None = as NCCL decides).
    """

    number: int
    threads: int | None = None
    nccl: NcclWay | None = None


class Transport(ABC):
    """Carries units over several streams at the same time.

    Units of one stream are reduced in the order in which they were submitted, which must be the same on all ranks;
    streams are independent of each other. Submitting never blocks on other ranks. Transports without thread
    allowances (`threads` is empty) look at the number alone.

    Attributes:
        kind: which one it is.
        max_streams: as many may be open at once.
        threads: thread allowances of a unit.
        stream_cost: what one stream takes of this process.
    """

    kind: TransportKind
    max_streams: int
    threads: tuple[int, ...] = ()
    stream_cost: StreamCost

    @abstractmethod
    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        """Collective, with nothing in flight: makes these streams usable; others may be closed.

        Raises:
            PlanError: on all ranks, if so many cannot be open at once.
            TransportError: on all ranks, if one of them could not open a stream. Those that were open before still are,
                what this call opened is closed.
            CommError: the job has failed.
        """

    def all_reduce(
        self, buffer: FlatBuffer, start: int, stop: int, *, stream: StreamSpec, op: ReduceOp, scale: float
    ) -> Work:
        """Reduces elements `[start, stop)` of `buffer` over all ranks in place, and multiplies them by `scale`.

        The range may be empty; it must not be touched until the work is done.
        """
        return self._carry(buffer, start, stop, stream, op, scale) if start < stop else NOTHING_TO_DO

    @abstractmethod
    def _carry(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        """What `all_reduce` does to a range that is not empty."""

    def prepare(self, act: Callable[[], None], *, stream: StreamSpec) -> bool:
        """Has a thread of the stream do this before it looks at units that are submitted from now on.

        Args:
            act: raises nothing.
            stream: that is open.

        Returns:
            False, and nothing is done: the stream has no thread.
        """
        return False

    def exchange(self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, *, stream: StreamSpec) -> Work:
        """Sends this rank's parcels and receives those for it; in order with all other units of the stream.

        Between hosts' memories only.

        Args:
            outgoing: bytes, with the parcels as `parcels` says; not to be written until the work is done.
            parcels: of all ranks, the same on all.
            incoming: bytes, contiguous, as many as come; the parcels lie there one behind the other, by sender.
            stream: that is open.
        """
        return NOTHING_TO_DO if parcels.empty else self._exchange(outgoing, parcels, incoming, stream)

    def _exchange(self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, stream: StreamSpec) -> Work:
        """What `exchange` does if there are parcels."""
        raise NotImplementedError

    def keep(self, streams: int) -> None:  # noqa: B027 - most have nothing to close
        """Collective, with nothing in flight on any rank: closes all but the first so many if idle ones take time."""

    @abstractmethod
    def close(self) -> bool:
        """Releases threads and connections; pending works fail. May be called twice.

        Returns:
            False if a thread does not end, since it waits for other ranks: what it uses must not be freed.
        """


Stream = TypeVar("Stream")
Opened = TypeVar("Opened")

Agree = Callable[[str], None]
"""`ControlPlane.agree_on_success` of all ranks that open streams at the same time."""


class StreamTransport(Transport, Generic[Stream]):
    """A transport whose streams are opened one after the other, by number.

    Attributes:
        streams: those that are open.
    """

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    @abstractmethod
    def _open(self, number: int) -> Stream:
        """Collective: opens the stream of that number, or raises `TransportError` on all ranks."""

    @abstractmethod
    def _end(self, streams: list[Stream]) -> bool:
        """Ends streams, which nobody else holds any more; False if one waits for other ranks."""

    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        """Collective: opens what is missing; if that fails on a rank, closes again what was opened here."""
        before = len(self.streams)
        try:
            while len(self.streams) <= max(stream.number for stream in streams):
                self.streams.append(self._open(len(self.streams)))
        except TransportError:
            self._end_behind(before)
            raise

    def _end_behind(self, count: int) -> bool:
        """Ends all but the first so many."""
        ended = self.streams[count:]
        del self.streams[count:]
        return self._end(ended)

    def close(self) -> bool:
        """Ends all streams."""
        return self._end_behind(0)


def open_together(
    what: str, open_mine: Callable[[], Opened], *, agree: Agree, close: Callable[[Opened], object] = lambda _: None
) -> Opened:
    """Collective: what `open_mine` gives, if it succeeds on every rank.

    Args:
        what: is opened, for messages.
        open_mine: opens it on this rank.
        agree: tells the ranks whether it is open on all of them.
        close: undoes `open_mine` where another rank has failed.

    Raises:
        TransportError: on all ranks, if one of them cannot open it.
        CommError: the job has failed.
    """
    opened: list[Opened] = []
    problem = ""
    try:
        opened.append(open_mine())
    except (RuntimeError, MemoryError) as err:  # as torch, MPI and threads raise them
        problem = f"{what}: {err}"
    try:
        agree(problem)
    except CommError:
        for each in opened:
            close(each)
        raise
    return opened[0]
