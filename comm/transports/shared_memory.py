"""Shared memory: the ranks of a node reduce each other's buffers in place, no byte goes through a socket.

Each rank owns one share of every unit: it adds up that share of all buffers and writes the result to all of them.
Across nodes (the hierarchical algorithm) the owners of a share reduce it over another transport in between, each local
rank carrying its part. A unit of a stream passes three gates, all kept in counters that the node shares: *posted* (this
rank's gradients are in), *reduced* (its share is written everywhere), and *complete* (all shares are).

The memory consists of anonymous files, opened by the other ranks through `/proc/PID/fd`: nothing has a name that could
be left behind, a killed rank leaks nothing, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sirtaki.comm.control.failure import caused
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.waiting import wait_for_work
from sirtaki.errors import CommError, PeerLostError, TransportError
from sirtaki.machine import is_alive, private_in_forked_children

from ..plan import TransportKind
from .contract import (
    HALF_DTYPES,
    FlatBuffer,
    Parcels,
    ReduceOp,
    StreamCost,
    StreamSpec,
    StreamTransport,
    ThreadWork,
    Transport,
    Work,
    scale_,
)

logger = logging.getLogger(__name__)


def open_peers(control: ControlPlane, descriptor: int, flags: int, problem: str = "") -> list[int]:
    """Collective over the job: opens the file that each rank of this node offers.

    Args:
        control: the ranks.
        descriptor: what this rank offers; may be closed afterwards. -1 = it has none because of `problem`.
        flags: as for `os.open`.
        problem: what went wrong on this rank already.

    Returns:
        Descriptors by local rank, this rank's among them; the caller closes them.

    Raises:
        TransportError: on all ranks alike, if any rank could not open one.
    """
    inode = -1 if problem else os.fstat(descriptor).st_ino
    offers = control.all_gather((os.getpid(), descriptor, inode, problem))
    problems = [offer[3] for offer in offers if offer[3]]
    opened: list[int] = []
    if not problems:
        try:
            for rank in control.node_ranks:
                pid, number, expected, _ = offers[rank]
                opened.append(os.open(f"/proc/{pid}/fd/{number}", flags))
                if os.fstat(opened[-1]).st_ino != expected:
                    raise OSError(f"process {pid} is not rank {rank}: they live in different containers")
        except OSError as err:
            problem = f"rank {control.rank}: {err}"
        # This gather also tells everyone that the descriptors on offer have been opened.
        problems = [text for text in control.all_gather(problem) if text]
    if problems:
        for number in opened:
            os.close(number)
        raise TransportError(f"ranks of one node cannot share memory: {problems[0]}")
    return opened


def share_memory(control: ControlPlane, size_bytes: int) -> list[torch.Tensor]:
    """Collective over the job: one zeroed region a rank, mapped by all ranks of its node.

    The memory lives as long as any rank holds a tensor of it.

    Returns:
        The regions of this node by local rank, uint8, `(size_bytes,)` each.

    Raises:
        TransportError: on all ranks alike, if any rank could not map a region.
    """
    length, descriptor, problem = max(1, size_bytes), -1, ""
    try:
        descriptor = os.memfd_create("sirtaki")
        # Reserving the pages now turns "out of memory" into an error here instead of a SIGBUS in mid-training.
        os.posix_fallocate(descriptor, 0, length)
    except (OSError, AttributeError) as err:  # AttributeError: not Linux
        problem = f"rank {control.rank}: {err}"
    peers: list[int] = []
    try:
        peers = open_peers(control, descriptor, os.O_RDWR, problem)
        try:
            regions = [
                _mapped(peer, length, own=rank == control.rank)[:size_bytes]
                for rank, peer in zip(control.node_ranks, peers, strict=True)
            ]
        except (OSError, RuntimeError, MemoryError) as err:
            regions, problem = [], f"{length} bytes of shared memory cannot be mapped: {err}"
        control.agree_on_success(problem)
        return regions
    finally:
        for number in (*peers, descriptor):
            if number >= 0:
                os.close(number)


def _mapped(descriptor: int, length: int, *, own: bool) -> torch.Tensor:
    """Map the file behind `descriptor`, shared with the other ranks.

    A child that this rank forks gets a private copy of the rank's own region, where `.grad` may be. That keeps a
    descriptor open. In the regions of the other ranks, of which user code has no tensor, a child finds zeros.
    """
    memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=length, dtype=torch.uint8).numpy()
    private_in_forked_children(memory, memory.ctypes.data, length, descriptor if own else None)
    return torch.from_numpy(memory)  # which keeps the array


class Doorbell:
    """Wakes a thread of each rank of the node: a pipe a rank, into which the others write single bytes.

    A byte carries no meaning: who is woken looks at the shared counters. A full pipe means that a wake-up is pending
    already, so ringing never blocks. The system calls also order the memory accesses of the two sides.
    """

    def __init__(self, control: ControlPlane) -> None:
        """Collective over the job.

        Raises:
            TransportError: see `open_peers`.
        """
        self._inbox = offered = -1
        self._outboxes: list[int] = []
        self._lives: dict[int, int] = {}  # descriptor of a peer's process → its rank
        self._polled: dict[int, int] = {}  # process number of a peer without such a descriptor → its rank
        problem = ""
        try:
            self._inbox, offered = os.pipe()
            os.set_blocking(self._inbox, False)
        except OSError as err:
            problem = f"rank {control.rank}: no pipe: {err}"
        try:
            self._outboxes = open_peers(control, offered, os.O_WRONLY | os.O_NONBLOCK, problem)
        except CommError:
            self.close()
            raise
        finally:
            if offered >= 0:
                os.close(offered)
        self._own = self._outboxes[control.local_rank]
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)
        pids = control.all_gather(os.getpid())
        for rank in control.node_ranks:
            if rank != control.rank:
                self._watch(pids[rank], rank)

    def _watch(self, pid: int, rank: int) -> None:
        """From now on notices the end of that process."""
        try:
            life = os.pidfd_open(pid)
        except (OSError, AttributeError) as err:  # kernels before 5.3, sandboxes, no descriptor left
            _say_once(f"the end of other ranks is looked for in /proc, as pidfd_open() does not work here ({err})")
            self._polled[pid] = rank
        else:
            self._lives[life] = rank
            self._poll.register(life, select.POLLIN)

    def ring_others(self) -> None:
        """Wakes the listening thread of every other rank of the node."""
        for outbox in self._outboxes:
            if outbox != self._own:
                # Pending wake-ups suffice; a peer that is gone is noticed by its process descriptor.
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    os.write(outbox, b"\0")

    def ring_own(self) -> None:
        """Wakes this rank's listening thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._own, b"\0")

    def listen(self, timeout_s: float) -> list[int]:
        """Blocks until somebody rings or dies, at most `timeout_s`.

        Returns:
            Ranks of this node that have ended; each is named once.
        """
        dead = []
        ready = self._poll.poll(timeout_s * 1000)
        if not ready:
            dead = [self._polled.pop(pid) for pid in list(self._polled) if not is_alive(pid)]
        for descriptor, _ in ready:
            if descriptor == self._inbox:
                os.read(self._inbox, 65536)
            else:
                self._poll.unregister(descriptor)
                dead.append(self._lives.pop(descriptor))
                os.close(descriptor)
        return dead

    def close(self) -> None:
        """Closes the pipes. Nobody may listen any more; others may still ring."""
        for descriptor in (self._inbox, *self._outboxes, *self._lives):
            if descriptor >= 0:
                os.close(descriptor)
        self._inbox, self._outboxes, self._lives = -1, [], {}


@functools.cache
def _say_once(message: str) -> None:
    logger.warning("%s", message)


MAX_STREAMS = 4

COMBINE = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}

WIDEN: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda wide, halves: torch.minimum(wide, halves.float(), out=wide),
    ReduceOp.MAX: lambda wide, halves: torch.maximum(wide, halves.float(), out=wide),
}
"""How halves are accumulated in float32, in place."""

CHUNK_ELEMENTS = 32768
"""Elements added at once: they stay in the second-level cache, and torch does not spread them over threads."""

POSTED, REDUCED = 0, 1

CROSSING = StreamSpec(0)
"""The one stream of the transport by which a stream's units cross between nodes."""


def reduce_share(
    buffers: Sequence[torch.Tensor],
    start: int,
    stop: int,
    *,
    op: ReduceOp,
    scale: float,
    outputs: Sequence[torch.Tensor],
) -> None:
    """Reduces elements `[start, stop)` of `buffers` and writes the result there in all `outputs`.

    Halves are accumulated in float32 and rounded once. `outputs` may be `buffers`.
    """
    halves = buffers[0].dtype in HALF_DTYPES
    dtype = torch.float32 if halves else buffers[0].dtype
    scratch = torch.empty(min(CHUNK_ELEMENTS, stop - start), dtype=dtype, device="cpu")
    combine, widen = COMBINE[op], WIDEN[op]
    # NumPy takes less time than torch, but does not know all halves.
    arrays, targets = ([] if halves else [each.numpy() for each in side] for side in (buffers, outputs))
    with np.errstate(all="ignore"):  # what overflows is the script's to see
        for low in range(start, stop, CHUNK_ELEMENTS):
            high = min(low + CHUNK_ELEMENTS, stop)
            result = scratch[: high - low]
            if halves or len(buffers) == 1:
                result.copy_(buffers[0][low:high])
                for buffer in buffers[1:]:
                    widen(result, buffer[low:high])
            else:
                sums = combine(arrays[0][low:high], arrays[1][low:high], out=result.numpy())
                for array in arrays[2:]:
                    combine(sums, array[low:high], out=sums)
            scale_(result, scale)
            for target in targets:
                np.copyto(target[low:high], result.numpy())
            for output in outputs if halves else ():
                output[low:high].copy_(result)


NO_BUFFER = FlatBuffer(torch.empty(0, dtype=torch.float32, device="cpu"))


@dataclass(slots=True, eq=False)
class _UnitTask:
    """One unit on its way through the gates.

    Attributes:
        posted: the others have been told that it is in.
        receive: of an exchange: takes this rank's parcels out of the other ranks' buffers; None = a reduction.
    """

    buffer: FlatBuffer
    start: int = 0
    stop: int = 0
    op: ReduceOp = ReduceOp.SUM
    scale: float = 1.0
    posted: bool = True
    receive: Callable[[], None] | None = None
    work: ThreadWork = field(default_factory=ThreadWork)


class _SharedMemoryStream:
    """One stream: its counters, its doorbell, and the thread that moves its units from gate to gate."""

    def __init__(self, control: ControlPlane, index: int, across: Transport | None) -> None:
        """Collective over the job.

        Args:
            control: the ranks.
            index: its number.
            across: a transport of its own that reduces over the nodes; None = there is only this one.

        Raises:
            TransportError: on all ranks alike, if any rank could not open it.
        """
        self._control, self.across = control, across
        self._me = control.local_rank
        # Node leaders hold the counters of their node: (gate, local rank), int64, only ever counting up.
        region = share_memory(control, 2 * control.local_size * 8)[0]
        self._counters = region.numpy().view(np.int64).reshape(2, control.local_size)
        self._doorbell = Doorbell(control)
        self._shares = min(control.local_sizes) if across else control.local_size
        self._incoming: queue.SimpleQueue[_UnitTask | Callable[[], None]] = queue.SimpleQueue()
        # What the thread has to do before it has posted all units: counted by who submits them, and by the thread.
        self._to_prepare = self._prepared = 0
        self._to_reduce: deque[_UnitTask] = deque()
        self._to_complete: deque[_UnitTask] = deque()
        self._reduced = self._completed = 0
        self._crossing: queue.SimpleQueue[tuple[_UnitTask, Work] | None] = queue.SimpleQueue()
        self._closing = False
        targets = {"shm": self._run}
        if across is not None:
            targets["cross"] = self._finish_crossings
        self._threads: list[threading.Thread] = []
        problem = ""
        try:
            if across is not None:
                across.open_streams([CROSSING])
            try:
                for name, target in targets.items():
                    thread = threading.Thread(target=target, name=f"sirtaki-{name}-{index}", daemon=True)
                    thread.start()
                    self._threads.append(thread)
            except (RuntimeError, MemoryError) as err:
                problem = f"shared-memory stream {index}: {err}"
            control.agree_on_success(problem)
        except CommError:
            self.close()
            raise

    def prepare(self, act: Callable[[], None] | _UnitTask) -> None:
        """Has the thread do this, or post this unit, behind all that it still has to prepare."""
        self._to_prepare += 1
        self._incoming.put(act)
        if self._to_prepare - self._prepared == 1:  # else it has been woken, and goes on until nothing is left
            self._doorbell.ring_own()

    def submit(self, task: _UnitTask) -> None:
        """Posts a unit. The queue is filled first, so that the thread finds the task once it sees the count."""
        if self._to_prepare != self._prepared:
            task.posted = False
            self.prepare(task)
            return
        self._incoming.put(task)
        self._post()
        posted = self._counters[POSTED]
        if posted.min() == posted[self._me]:  # else whoever posts last wakes this rank's thread: nobody is so for all
            self._doorbell.ring_own()

    def _post(self) -> None:
        self._counters[POSTED, self._me] += 1
        self._doorbell.ring_others()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # not Linux; sandboxes
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # it interrupts nobody who computes
        try:
            while not self._closing:
                if not self._advance():
                    for rank in self._doorbell.listen(timeout_s=1.0):
                        self._advance()  # what it did before it ended counts
                        self._lose(rank)
        except Exception as err:  # whatever it is, those who wait must hear of it
            self._fail(err)

    def _fail(self, err: Exception) -> None:
        if not isinstance(err, CommError):
            err = caused(CommError(f"shared memory failed on rank {self._control.rank}: {err!r}"), err)
        self._control.failures.report(err)

    def _advance(self) -> bool:
        """Moves every unit that can move; False if none could."""
        moved = False
        while not self._incoming.empty():
            self._take(self._incoming.get())
        while self._to_reduce and int(self._counters[POSTED].min()) > self._reduced:
            self._reduce(self._to_reduce.popleft())
            moved = True
        everywhere = int(self._counters[REDUCED].min())
        while self._to_complete and everywhere > self._completed:
            self._completed += 1
            self._to_complete.popleft().work.finish()
            moved = True
        return moved

    def _take(self, task: _UnitTask | Callable[[], None]) -> None:
        if not isinstance(task, _UnitTask):
            task()
        else:
            self._to_reduce.append(task)
            if task.posted:
                return
            self._post()
        self._prepared += 1

    def _bounds(self, task: _UnitTask) -> tuple[int, int]:
        """This rank's share of a unit; empty on ranks that own none."""
        numel = task.stop - task.start
        if self._me >= self._shares:
            return task.start, task.start
        return (
            task.start + numel * self._me // self._shares,
            task.start + numel * (self._me + 1) // self._shares,
        )

    def _reduce(self, task: _UnitTask) -> None:
        self._reduced += 1
        task.work.begun_s = time.perf_counter()
        self._to_complete.append(task)
        if task.receive is not None:
            task.receive()
            self._publish()
            return
        start, stop = self._bounds(task)
        if self.across is None:
            peers = task.buffer.peers
            reduce_share(peers, start, stop, op=task.op, scale=task.scale, outputs=peers)
            self._publish()
            return
        own = task.buffer.tensor
        reduce_share(task.buffer.peers, start, stop, op=task.op, scale=1.0, outputs=[own])
        work = self.across.all_reduce(task.buffer, start, stop, stream=CROSSING, op=task.op, scale=task.scale)
        self._crossing.put((task, work))

    def _finish_crossings(self) -> None:
        """Second thread: hands the shares that other nodes have added to on to the ranks of this node."""
        try:
            while (crossing := self._crossing.get()) is not None:
                task, work = crossing
                wait_for_work([work], failures=self._control.failures, blame_s=None)
                start, stop = self._bounds(task)
                share = task.buffer.tensor[start:stop]
                for local_rank, peer in enumerate(task.buffer.peers):
                    if local_rank != self._me:
                        peer[start:stop].copy_(share)
                self._publish()
                self._doorbell.ring_own()
        except Exception as err:  # whatever it is, those who wait must hear of it
            self._fail(err)

    def _publish(self) -> None:
        self._counters[REDUCED, self._me] += 1
        self._doorbell.ring_others()

    def _lose(self, rank: int) -> None:
        """A rank of this node has ended; what it has not posted will never come."""
        while not self._incoming.empty():
            self._take(self._incoming.get())
        if not (self._to_reduce or self._to_complete or self._crossing.qsize()):
            return
        error = PeerLostError(f"rank {rank} has ended while rank {self._control.rank} waited for its gradients")
        self._control.failures.report(error)
        for tasks in (self._to_reduce, self._to_complete):
            while tasks:  # another rank may end, too
                tasks.popleft().work.finish(error)

    def close(self) -> bool:
        """Ends the threads; False if what the other nodes are reached by does not end."""
        if self._closing:
            return True
        self._closing = True
        self._doorbell.ring_own()
        self._crossing.put(None)
        for thread in self._threads:
            thread.join(timeout=2.0)
        if not any(thread.is_alive() for thread in self._threads):
            self._doorbell.close()
        return self.across is None or self.across.close()


class SharedMemoryTransport(StreamTransport[_SharedMemoryStream]):
    """Streams through memory that the ranks of a node share; with `across`, hierarchical over several nodes."""

    kind = TransportKind.SHARED_MEMORY
    max_streams = MAX_STREAMS

    def __init__(self, control: ControlPlane, *, across: Callable[[], Transport] | None = None) -> None:
        """Starts nothing.

        Args:
            control: the ranks.
            across: makes a transport that reduces over the nodes, among ranks of one local rank; each stream has one
                of its own. None if there is one node only.
        """
        super().__init__()
        self._control, self._across = control, across
        peers = control.local_size
        # A pipe that all write to, a descriptor of every other process, and the counters' memory; others meanwhile.
        self.stream_cost = StreamCost(descriptors=2 * peers + 3, threads=1)
        if across is not None:
            example = across()
            self.max_streams = example.max_streams
            self.stream_cost += example.stream_cost + StreamCost(threads=1)

    def _open(self, number: int) -> _SharedMemoryStream:
        return _SharedMemoryStream(self._control, number, self._across() if self._across is not None else None)

    def _carry(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        """Has the stream's thread reduce the range with those of other ranks; the buffer must be a shared one."""
        task = _UnitTask(buffer, start, stop, op, scale)
        self.streams[stream.number].submit(task)
        return task.work

    def prepare(self, act: Callable[[], None], *, stream: StreamSpec) -> bool:
        """Has the stream's thread do it."""
        self.streams[stream.number].prepare(act)
        return True

    def _exchange(self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, stream: StreamSpec) -> Work:
        """Copies the parcels for this rank out of the others' buffers, which must be shared ones on one node."""
        me = self._control.local_rank

        def receive() -> None:
            begin = 0
            for sender, peer in enumerate(outgoing.peers):
                start, stop = parcels.sent_by(sender)[me]
                incoming[begin : begin + stop - start].copy_(peer[start:stop])
                begin += stop - start

        task = _UnitTask(outgoing, receive=receive)
        self.streams[stream.number].submit(task)
        return task.work

    def visit(self, read: Callable[[], None], *, stream: StreamSpec) -> Work:
        """Has `read` called, in the stream's thread, once all ranks of the node have come; done once all have read.

        What ranks read must lie in memory that they share, and not be written until the work is done.
        """
        task = _UnitTask(NO_BUFFER, receive=read)
        self.streams[stream.number].submit(task)
        return task.work

    def keep(self, streams: int) -> None:
        """Closes those behind that reach other nodes over Gloo, which never sleeps; others sleep when idle."""
        if any(stream.across is not None and stream.across.kind is TransportKind.GLOO for stream in self.streams):
            self._end_behind(streams)

    def _end(self, streams: list[_SharedMemoryStream]) -> bool:
        ended = [stream.close() for stream in streams]
        return all(ended)
