"""Transport through shared memory: the ranks of a node reduce each other's buffers in place, without sockets.

A unit (bucket) is an element range that one all-reduce reduces. Each rank owns one share of every unit: an equal part
of its elements. The rank reduces its share over the buffers of all ranks, and writes the result to all these buffers.
With several nodes (the hierarchical algorithm), each rank first reduces its share within the node. The ranks with equal
local rank then reduce the share between nodes, over another transport. Finally each rank writes the result to all
buffers of its node.

A unit passes three stages. Counters in shared memory record how many units each rank has posted and reduced:

    posted      this rank's gradients are in its buffer
    reduced     this rank has written its share to all buffers
    complete    all ranks have written their shares

The shared memory consists of anonymous files (`memfd_create`), which the peers open through `/proc/PID/fd`. Because the
files have no names, a killed rank leaves no files behind, and the size of /dev/shm does not matter.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sirtaki.comm.control.failure import caused
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.waiting import wait_for_work
from sirtaki.errors import CommError, PeerLostError, TransportError
from sirtaki.machine import explained, is_alive, private_in_forked_children

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
    """Open the files that the ranks of this node offer to each other, one file per rank. Collective over the job.

    Args:
        control: control plane of the job (small messages between ranks).
        descriptor: descriptor of the file that this rank offers. The caller may close it after the call. -1 = the file
            could not be created, and `problem` says why.
        flags: mode in which to open the files, such as `os.O_RDWR`.
        problem: error that kept this rank from creating its file. Empty = no error.

    Returns:
        Descriptors of the opened files, by local rank, including this rank's file. The caller must close them.

    Raises:
        TransportError: on all ranks, if any rank could not create or open a file.
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
                    raise OSError(
                        f"process id {pid} of rank {rank} belongs to a different process here, because the ranks run "
                        "in containers with separate process ids; run all ranks of a host in one container"
                    )
        except OSError as err:
            problem = f"rank {control.rank}: {err}"
        # Exchange the errors of all ranks. After this, each rank may close its own file, because all ranks have opened
        # it.
        problems = [text for text in control.all_gather(problem) if text]
    if problems:
        for number in opened:
            os.close(number)
        raise TransportError(
            f"ranks of one node cannot share memory ({problems[0]}); run all ranks of a node as one user and in one "
            "container"
        )
    return opened


def share_memory(control: ControlPlane, size_bytes: int) -> list[torch.Tensor]:
    """Allocate one zeroed region of shared memory per rank, and map the regions of all ranks of this node.

    Collective over the job. A region is freed when no tensor of any rank refers to the region any more.

    Returns:
        The regions of the ranks of this node, by local rank. Each is uint8, `(size_bytes,)`.

    Raises:
        TransportError: on all ranks, if any rank could not allocate or map a region.
    """
    length, descriptor, problem = max(1, size_bytes), -1, ""
    try:
        descriptor = os.memfd_create("sirtaki")
        # Reserve the pages now, so that lack of memory raises an error here, and no SIGBUS ends the process later.
        os.posix_fallocate(descriptor, 0, length)
    except (OSError, AttributeError) as err:
        # On systems other than Linux, the functions for shared memory do not exist.
        problem = f"rank {control.rank}: {length} bytes of shared memory: {explained(err)}"
    peers: list[int] = []
    try:
        peers = open_peers(control, descriptor, os.O_RDWR, problem)
        try:
            regions = [
                _mapped(peer, length, own=rank == control.rank)[:size_bytes]
                for rank, peer in zip(control.node_ranks, peers, strict=True)
            ]
        except (OSError, RuntimeError, MemoryError) as err:
            regions, problem = [], f"{length} bytes of shared memory cannot be mapped: {explained(err)}"
        control.agree_on_success(problem)
        return regions
    finally:
        for number in (*peers, descriptor):
            if number >= 0:
                os.close(number)


def _mapped(descriptor: int, length: int, *, own: bool) -> torch.Tensor:
    """Map the file behind `descriptor` into memory, shared with the ranks of this node.

    If `own` is True, the file is the region of this rank, else the region of a peer. A forked child must not write
    shared memory. Instead of this rank's own region, the child gets a private copy, because `.grad` may refer to the
    region. For this copy, a duplicate of `descriptor` stays open. Instead of a peer's region, the child gets zeros,
    because no tensor of the user refers to a peer's region.
    """
    memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=length, dtype=torch.uint8).numpy()
    private_in_forked_children(memory, memory.ctypes.data, length, descriptor if own else None)
    return torch.from_numpy(memory)  # The tensor keeps the NumPy array alive, and thereby the mapping.


MAX_PIDFDS = 4
"""Largest number of peers on the node for which a stream opens a process descriptor (pidfd), which reports the exit of
a peer at once. The stream detects the exit of other peers later, by polling, or other ranks report it."""


class Doorbell:
    """Lets threads of the ranks of a node wake each other. Each rank has a pipe into which its peers write bytes.

    The value of a byte has no meaning, because the woken thread reads counters in shared memory. Writing a byte never
    blocks: if the pipe is full, the reader will wake up anyway. The rank that reads a byte sees all that the writer has
    written to shared memory before the byte, because the system calls act as memory barriers.
    """

    def __init__(self, control: ControlPlane) -> None:
        """Open the pipes of this node. Collective over the job.

        Raises:
            TransportError: on all ranks, if any rank could not open a pipe.
        """
        self._inbox = offered = -1
        self._outboxes: list[int] = []
        self._lives: dict[int, int] = {}  # Peers whose exit a process descriptor reports, as descriptor (pidfd) → rank.
        self._polled: dict[int, int] = {}  # Peers of the node whose exit is found by polling, as process id → rank.
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
        pids, size = control.all_gather(os.getpid()), control.local_size
        for distance in range(1, size):
            rank = control.node_ranks[(control.local_rank + distance) % size]
            if distance <= MAX_PIDFDS:
                self._watch(pids[rank], rank)
            else:
                self._polled[pids[rank]] = rank

    def _watch(self, pid: int, rank: int) -> None:
        """Make `listen` report when the process `pid` of `rank` ends."""
        try:
            life = os.pidfd_open(pid)
        except (OSError, AttributeError) as err:
            # `pidfd_open` fails on Linux before 5.3, in some sandboxes, or if no descriptor is free.
            _warn_once(f"the end of other ranks is detected by polling /proc, because pidfd_open() failed ({err})")
            self._polled[pid] = rank
        else:
            self._lives[life] = rank
            self._poll.register(life, select.POLLIN)

    def ring_peers(self) -> None:
        """Wake the thread of each peer on the node that blocks in `listen`. Non-blocking."""
        for outbox in self._outboxes:
            if outbox != self._own:
                # Ignore a full pipe, because its reader will wake up anyway. Ignore a broken pipe, because `listen`
                # reports the end of the peer.
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    os.write(outbox, b"\0")

    def ring_own(self) -> None:
        """Wake the thread of this rank that blocks in `listen`. Non-blocking."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._own, b"\0")

    def listen(self, timeout_s: float) -> list[int]:
        """Block until a peer on the node calls `ring_peers`, this rank calls `ring_own`, or a peer ends.

        Blocks for at most `timeout_s`.

        Returns:
            Ranks of this node that have ended since the last call.
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
        """Close this rank's ends of the pipes. Not collective: peers may still call `ring_peers`."""
        for descriptor in (self._inbox, *self._outboxes, *self._lives):
            if descriptor >= 0:
                os.close(descriptor)
        self._inbox, self._outboxes, self._lives = -1, [], {}


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


MAX_STREAMS = 4

COMBINE = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}

WIDEN: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda wide, halves: torch.minimum(wide, halves.float(), out=wide),
    ReduceOp.MAX: lambda wide, halves: torch.maximum(wide, halves.float(), out=wide),
}
"""Functions that reduce a tensor of 16-bit floats (second argument) into a float32 tensor (first argument), in
place."""

CHUNK_ELEMENTS = 32768
"""Number of elements that one call of torch or NumPy reduces. It is small, so that the elements fit into the L2 cache,
and that torch does not split the call over several threads."""

POSTED, REDUCED = 0, 1

STREAM_BETWEEN_NODES = StreamSpec(0)
"""Stream (connection) 0 of a transport between nodes. Each shared-memory stream has such a transport of its own, which
has no other streams."""


def reduce_share(
    buffers: Sequence[torch.Tensor],
    start: int,
    stop: int,
    *,
    op: ReduceOp,
    scale: float,
    outputs: Sequence[torch.Tensor],
) -> None:
    """Reduce elements `[start, stop)` over `buffers`, and write the result to the same elements of all `outputs`.

    16-bit floats are accumulated in float32 and rounded once. `outputs` and `buffers` may be the same tensors.
    """
    halves = buffers[0].dtype in HALF_DTYPES
    dtype = torch.float32 if halves else buffers[0].dtype
    scratch = torch.empty(min(CHUNK_ELEMENTS, stop - start), dtype=dtype, device="cpu")
    combine, widen = COMBINE[op], WIDEN[op]
    # Use NumPy, because it is faster than torch here, but torch for 16-bit floats, because NumPy has no bfloat16.
    arrays, targets = ([] if halves else [each.numpy() for each in side] for side in (buffers, outputs))
    with np.errstate(all="ignore"):  # Silence NumPy's warnings of overflows. The results are inf or nan, as in torch.
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
    """An operation in flight on a stream: an all-reduce of a unit (bucket), an all-to-all, or a `visit`, in which a
    function of the caller reads the other ranks' buffers.

    Attributes:
        posted: True if this rank's counter of posted tasks includes this task. Peers read the counter.
        receive: function that reads the other ranks' buffers, for an all-to-all or a visit. None for an all-reduce.
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
    """One stream, which reduces units (buckets) in order.

    It consists of counters in shared memory, a doorbell (pipes that wake peers), and one or two threads.
    One thread waits until a unit is in the buffers of all ranks of the node, then reduces this rank's share, and marks
    the unit as ended when all ranks have reduced theirs.
    """

    def __init__(self, control: ControlPlane, index: int, across: Transport | None) -> None:
        """Open the stream. Collective over the job.

        Args:
            control: control plane of the job (small messages between ranks).
            index: number of the stream.
            across: transport between nodes, which only this stream uses. None = all ranks are on one node.

        Raises:
            TransportError: on all ranks, if any rank could not open the stream.
        """
        self._control, self.across = control, across
        self._me = control.local_rank
        # Count the units that each rank has posted and reduced: `(2, local_size)`, int64. The counters are in the
        # region of local rank 0, and never decrease.
        region = share_memory(control, 2 * control.local_size * 8)[0]
        self._counters = region.numpy().view(np.int64).reshape(2, control.local_size)
        self._doorbell = Doorbell(control)
        self._shares = min(control.local_sizes) if across else control.local_size
        self._incoming: queue.SimpleQueue[_UnitTask | Callable[[], None]] = queue.SimpleQueue()
        # A function of `prepare` must run before the units (buckets) that are submitted after it. So these units are
        # queued behind it, and the stream's thread posts them. `_to_prepare` counts the functions and units in this
        # queue, since the start. `_prepared` counts those that the thread has called or posted.
        self._to_prepare = self._prepared = 0
        self._to_reduce: deque[_UnitTask] = deque()
        self._to_complete: deque[_UnitTask] = deque()
        self._reduced = self._completed = 0
        self._crossing: queue.SimpleQueue[tuple[_UnitTask, Work] | None] = queue.SimpleQueue()
        self._closing = False
        targets = {"shm": self._run}
        if across is not None:
            targets["cross"] = self._distribute_shares
        self._threads: list[threading.Thread] = []
        problem = ""
        try:
            if across is not None:
                across.open_streams([STREAM_BETWEEN_NODES])
            try:
                for name, target in targets.items():
                    thread = threading.Thread(target=target, name=f"sirtaki-{name}-{index}", daemon=True)
                    thread.start()
                    self._threads.append(thread)
            except (RuntimeError, MemoryError) as err:
                problem = f"shared-memory stream {index}: {explained(err)}"
            control.agree_on_success(problem)
        except CommError:
            self.close()
            raise

    def prepare(self, act: Callable[[], None] | _UnitTask) -> None:
        """Queue a function that the stream's thread calls, or a unit (bucket) that it posts. Non-blocking.

        Posting a unit tells the peers that its gradients are in this rank's buffer.
        """
        self._to_prepare += 1
        self._incoming.put(act)
        if self._to_prepare - self._prepared == 1:
            # If an earlier task is still queued, the stream's thread is already awake.
            self._doorbell.ring_own()

    def submit(self, task: _UnitTask) -> None:
        """Queue a unit (bucket), and post it: tell the peers that its gradients are in this rank's buffer.

        Non-blocking. If functions of `prepare` are queued, the stream's thread posts the unit after it has called them.
        The unit is queued before the counter of posted units increases, so that the thread finds the unit when it reads
        the counter.
        """
        if self._to_prepare != self._prepared:
            task.posted = False
            self.prepare(task)
            return
        self._incoming.put(task)
        self._post()
        posted = self._counters[POSTED]
        # Wake the thread only if this rank is the last one to post the unit. Otherwise, a peer that posts later wakes
        # it.
        if posted.min() == posted[self._me]:
            self._doorbell.ring_own()

    def _post(self) -> None:
        self._counters[POSTED, self._me] += 1
        self._doorbell.ring_peers()

    def _run(self) -> None:
        # Use the policy SCHED_BATCH, so that this thread preempts no computing thread. The call fails outside Linux and
        # in some sandboxes.
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        try:
            while not self._closing:
                if not self._advance():
                    for rank in self._doorbell.listen(timeout_s=1.0):
                        # First reduce units that the lost rank posted before it ended. Then fail the other units.
                        self._advance()
                        self._fail_units_of(rank)
        except Exception as err:
            # Catch every error, because otherwise the threads that wait for units would never wake up.
            self._fail(err)

    def _fail(self, err: Exception) -> None:
        if not isinstance(err, CommError):
            err = caused(CommError(f"shared memory failed on rank {self._control.rank}: {err!r}"), err)
        self._control.failures.report(err)

    def _advance(self) -> bool:
        """Reduce this rank's share of units (buckets) that all ranks have posted. End completely reduced units.

        Return whether a unit was reduced or ended.
        """
        moved = False
        while not self._incoming.empty():
            self._accept(self._incoming.get())
        while self._to_reduce and int(self._counters[POSTED].min()) > self._reduced:
            self._reduce(self._to_reduce.popleft())
            moved = True
        everywhere = int(self._counters[REDUCED].min())
        while self._to_complete and everywhere > self._completed:
            self._completed += 1
            self._to_complete.popleft().work.finish()
            moved = True
        return moved

    def _accept(self, task: _UnitTask | Callable[[], None]) -> None:
        if not isinstance(task, _UnitTask):
            task()
        else:
            self._to_reduce.append(task)
            if task.posted:
                return
            self._post()
        self._prepared += 1

    def _bounds(self, task: _UnitTask) -> tuple[int, int]:
        """Return the element range of a unit (bucket) that this rank reduces.

        The range is empty on a rank whose local rank does not exist on all nodes.
        """
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
            self._count_reduced()
            return
        start, stop = self._bounds(task)
        if self.across is None:
            peers = task.buffer.peers
            reduce_share(peers, start, stop, op=task.op, scale=task.scale, outputs=peers)
            self._count_reduced()
            return
        own = task.buffer.tensor
        reduce_share(task.buffer.peers, start, stop, op=task.op, scale=1.0, outputs=[own])
        work = self.across.all_reduce(
            task.buffer, start, stop, stream=STREAM_BETWEEN_NODES, op=task.op, scale=task.scale
        )
        self._crossing.put((task, work))

    def _distribute_shares(self) -> None:
        """Wait until this rank's shares of units (buckets) are reduced between nodes. Copy them to the node's ranks.

        Loops in the second thread of the stream, until the stream is closed.
        """
        try:
            while (crossing := self._crossing.get()) is not None:
                task, work = crossing
                wait_for_work([work], failures=self._control.failures, blame_s=None)
                start, stop = self._bounds(task)
                share = task.buffer.tensor[start:stop]
                for local_rank, peer in enumerate(task.buffer.peers):
                    if local_rank != self._me:
                        peer[start:stop].copy_(share)
                self._count_reduced()
                self._doorbell.ring_own()
        except Exception as err:
            # Catch every error, because otherwise the threads that wait for units would never wake up.
            self._fail(err)

    def _count_reduced(self) -> None:
        self._counters[REDUCED, self._me] += 1
        self._doorbell.ring_peers()

    def _fail_units_of(self, rank: int) -> None:
        """Fail the units (buckets) in flight, because `rank` has ended, and its gradients will be missing."""
        while not self._incoming.empty():
            self._accept(self._incoming.get())
        if not (self._to_reduce or self._to_complete or self._crossing.qsize()):
            return
        error = PeerLostError(f"rank {rank} has ended while rank {self._control.rank} waited for its gradients")
        self._control.failures.report(error)
        for tasks in (self._to_reduce, self._to_complete):
            # Remove each failed unit. Otherwise this method would call its `finish` again when another rank ends.
            while tasks:
                tasks.popleft().work.finish(error)

    def close(self) -> bool:
        """End the threads of the stream. Return False if the transport between nodes still waits for a peer."""
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
    """Transport through memory that the ranks of a node share.

    With several nodes, the all-reduce is hierarchical: within each node first, then between nodes over another
    transport.
    """

    kind = TransportKind.SHARED_MEMORY
    max_streams = MAX_STREAMS

    def __init__(self, control: ControlPlane, *, across: Callable[[], Transport] | None = None) -> None:
        """Create the transport. `open_streams` allocates counters and starts threads.

        Args:
            control: control plane of the job (small messages between ranks).
            across: creates a transport between the ranks with the same local rank. Called once per stream. None = all
                ranks are on one node.
        """
        super().__init__()
        self._control, self._across = control, across
        peers = control.local_size
        # A stream needs these descriptors: one pipe end per peer, the process descriptors of peers, both ends of this
        # rank's own pipe, and one file that is open only while the stream opens.
        watched = min(peers, MAX_PIDFDS)
        self.stream_cost = StreamCost(
            descriptors=peers + watched + 3, threads=1, connections=peers - 1 if across is None else 0
        )
        if across is not None:
            example = across()
            self.max_streams = example.max_streams
            self.stream_cost += example.stream_cost + StreamCost(threads=1)

    def _open(self, numbers: range) -> Iterator[_SharedMemoryStream]:
        for number in numbers:
            yield _SharedMemoryStream(self._control, number, self._across() if self._across is not None else None)

    def _start(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        """Launch the all-reduce of elements `[start, stop)` of `buffer`. `buffer` must be in shared memory."""
        task = _UnitTask(buffer, start, stop, op, scale)
        self.streams[stream.number].submit(task)
        return task.work

    def prepare(self, act: Callable[[], None], *, stream: StreamSpec) -> bool:
        """Queue a call of `act` for the thread of `stream`. Return True, because each stream has a thread."""
        self.streams[stream.number].prepare(act)
        return True

    def _exchange(self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, stream: StreamSpec) -> Work:
        """Launch copies of the parcels (messages) for this rank from the send buffers of all ranks of the node.

        `outgoing`, which contains these buffers, must be in shared memory.
        """
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
        """Make the thread of `stream` call `read` once all ranks have called `visit`. Collective, non-blocking.

        The returned work ends once `read` has returned on all ranks. Until then, no rank may write the shared memory
        that `read` uses.
        """
        task = _UnitTask(NO_BUFFER, receive=read)
        self.streams[stream.number].submit(task)
        return task.work

    def keep(self, streams: int) -> None:
        """Close all but the first `streams` streams, if they use Gloo between nodes.

        Other streams stay open, because only the threads of idle Gloo connections use CPU time.
        """
        if any(stream.across is not None and stream.across.kind is TransportKind.GLOO for stream in self.streams):
            self._close_after(streams)

    def _close_streams(self, streams: list[_SharedMemoryStream]) -> bool:
        ended = [stream.close() for stream in streams]
        return all(ended)
