"""Shared memory: the ranks of a node reduce each other's buffers in place, no byte goes through a socket.

Each rank owns one share of every unit: it adds up that share of all buffers and writes the result to all of them.
Across nodes (the hierarchical algorithm) the owners of a share reduce it over another transport in between, each
local rank carrying its part. A unit of a stream passes three gates, all kept in counters that the node shares:
*posted* (this rank's gradients are in), *reduced* (its share is written everywhere), and *complete* (all shares are).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.comm.plan import TransportKind
from sirtaki.errors import CommError, PeerLostError

from .contract import NOTHING_TO_DO, FlatBuffer, ReduceOp, StreamSpec, Transport, Work
from .mpi import ThreadWork
from .node_memory import Doorbell, share_memory
from .opening import open_up_to
from .parcels import Parcels
from .resources import StreamCost
from .scaling import HALF_DTYPES, scale_

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane

MAX_STREAMS = 4

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
    dtype = buffers[0].dtype
    wide = torch.float32 if dtype in HALF_DTYPES else dtype
    scratch = torch.empty(min(CHUNK_ELEMENTS, stop - start), dtype=wide)
    for low in range(start, stop, CHUNK_ELEMENTS):
        high = min(low + CHUNK_ELEMENTS, stop)
        result = scratch[: high - low]
        result.copy_(buffers[0][low:high])
        for buffer in buffers[1:]:
            part = buffer[low:high]
            if op is ReduceOp.SUM:
                result.add_(part)
            elif op is ReduceOp.PRODUCT:
                result.mul_(part)
            elif op is ReduceOp.MIN:
                torch.minimum(result, part.to(wide), out=result)
            else:
                torch.maximum(result, part.to(wide), out=result)
        scale_(result, scale)
        for output in outputs:
            output[low:high].copy_(result)


@dataclass(slots=True, eq=False)
class _Task:
    """One unit on its way through the gates.

    Attributes:
        receive: of an exchange: takes this rank's parcels out of the other ranks' buffers; None = a reduction.
    """

    buffer: FlatBuffer
    start: int = 0
    stop: int = 0
    op: ReduceOp = ReduceOp.SUM
    scale: float = 1.0
    receive: Callable[[], None] | None = None
    work: ThreadWork = field(default_factory=ThreadWork)


class _Stream:
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
        self._control, self._index, self._across = control, index, across
        self._me = control.local_rank
        # Node leaders hold the counters of their node: (gate, local rank), int64, only ever counting up.
        region = share_memory(control, 2 * control.local_size * 8)[0]
        self._counters = region.numpy().view(np.int64).reshape(2, control.local_size)
        self._doorbell = Doorbell(control)
        self._shares = min(control.local_sizes) if across else control.local_size
        self._incoming: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._to_reduce: deque[_Task] = deque()
        self._to_complete: deque[_Task] = deque()
        self._reduced = self._completed = 0
        self._crossing: queue.SimpleQueue[tuple[_Task, Work] | None] = queue.SimpleQueue()
        self._closing = False
        targets = {"shm": self._run}
        if across is not None:
            targets["cross"] = self._finish_crossings
        self._threads: list[threading.Thread] = []
        try:
            if across is not None:
                across.open_streams([CROSSING])
            problem = self._start(targets)
            control.agree_on_success(problem)
        except CommError:
            self.close()
            raise

    def _start(self, targets: Mapping[str, Callable[[], None]]) -> str:
        """Starts the threads; returns what has gone wrong."""
        try:
            for name, target in targets.items():
                thread = threading.Thread(target=target, name=f"sirtaki-{name}-{self._index}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except (RuntimeError, MemoryError) as err:
            return f"shared-memory stream {self._index}: {err}"
        return ""

    @property
    def crosses_by(self) -> TransportKind | None:
        """What carries units between nodes; None = there is only one node."""
        return None if self._across is None else self._across.kind

    def submit(self, task: _Task) -> None:
        """Posts a unit. The queue is filled first, so that the thread finds the task once it sees the count."""
        self._incoming.put(task)
        posted = self._counters[POSTED]
        posted[self._me] += 1
        self._doorbell.ring_others()
        if posted.min() == posted[self._me]:  # else whoever posts last wakes this rank's thread: nobody is so for all
            self._doorbell.ring_own()

    def _run(self) -> None:
        try:
            while not self._closing:
                if not self._advance():
                    for rank in self._doorbell.listen(timeout_s=1.0):
                        self._advance()  # what it did before it ended counts
                        self._lose(rank)
        except Exception as err:  # whatever it is, those who wait must hear of it
            self._control.failures.report(CommError(f"shared memory failed on rank {self._control.rank}: {err!r}"))
            raise

    def _advance(self) -> bool:
        """Moves every unit that can move; False if none could."""
        moved = False
        self._take_incoming()
        while self._to_reduce and int(self._counters[POSTED].min()) > self._reduced:
            self._reduce(self._to_reduce.popleft())
            moved = True
        everywhere = int(self._counters[REDUCED].min())
        while self._to_complete and everywhere > self._completed:
            self._completed += 1
            self._to_complete.popleft().work.finish()
            moved = True
        return moved

    def _take_incoming(self) -> None:
        while not self._incoming.empty():
            self._to_reduce.append(self._incoming.get())

    def _bounds(self, task: _Task) -> tuple[int, int]:
        """This rank's share of a unit; empty on ranks that own none."""
        numel = task.stop - task.start
        if self._me >= self._shares:
            return task.start, task.start
        return (
            task.start + numel * self._me // self._shares,
            task.start + numel * (self._me + 1) // self._shares,
        )

    def _reduce(self, task: _Task) -> None:
        self._reduced += 1
        task.work.begun_s = time.perf_counter()
        self._to_complete.append(task)
        if task.receive is not None:
            task.receive()
            self._publish()
            return
        start, stop = self._bounds(task)
        if self._across is None:
            peers = task.buffer.peers
            reduce_share(peers, start, stop, op=task.op, scale=task.scale, outputs=peers)
            self._publish()
            return
        own = task.buffer.tensor
        reduce_share(task.buffer.peers, start, stop, op=task.op, scale=1.0, outputs=[own])
        work = self._across.all_reduce(task.buffer, start, stop, stream=CROSSING, op=task.op, scale=task.scale)
        self._crossing.put((task, work))

    def _finish_crossings(self) -> None:
        """Second thread: hands the shares that other nodes have added to on to the ranks of this node."""
        while (crossing := self._crossing.get()) is not None:
            task, work = crossing
            try:
                while not work.wait(timeout_s=0.1):
                    self._control.failures.check()
            except CommError as err:
                self._control.failures.report(err)
                return
            start, stop = self._bounds(task)
            share = task.buffer.tensor[start:stop]
            for local_rank, peer in enumerate(task.buffer.peers):
                if local_rank != self._me:
                    peer[start:stop].copy_(share)
            self._publish()
            self._doorbell.ring_own()

    def _publish(self) -> None:
        self._counters[REDUCED, self._me] += 1
        self._doorbell.ring_others()

    def _lose(self, rank: int) -> None:
        """A rank of this node has ended; what it has not posted will never come."""
        self._take_incoming()
        if not (self._to_reduce or self._to_complete or self._crossing.qsize()):
            return
        error = PeerLostError(f"rank {rank} has ended while rank {self._control.rank} waited for its gradients")
        self._control.failures.report(error)
        for task in (*self._to_reduce, *self._to_complete):
            task.work.finish(error)

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
        return self._across is None or self._across.close()


class SharedMemoryTransport:
    """Streams through memory that the ranks of a node share; with `across`, hierarchical over several nodes."""

    kind = TransportKind.SHARED_MEMORY
    max_streams = MAX_STREAMS
    threads: tuple[int, ...] = ()

    def __init__(self, control: ControlPlane, *, across: Callable[[], Transport] | None = None) -> None:
        """Starts nothing.

        Args:
            control: the ranks.
            across: makes a transport that reduces over the nodes, among ranks of one local rank; each stream has one
                of its own. None if there is one node only.
        """
        self._control, self._across = control, across
        self._streams: list[_Stream] = []
        peers = control.local_size
        # A pipe that all write to, a descriptor of every other process, and the counters' memory; others meanwhile.
        self.stream_cost = StreamCost(descriptors=2 * peers + 3, threads=1)
        if across is not None:
            example = across()
            self.max_streams = example.max_streams
            self.stream_cost += example.stream_cost + StreamCost(threads=1)

    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        """Collective: see `Transport`."""
        open_up_to(self._streams, streams, self._open, _Stream.close)

    def _open(self, number: int) -> _Stream:
        return _Stream(self._control, number, self._across() if self._across is not None else None)

    def all_reduce(
        self, buffer: FlatBuffer, start: int, stop: int, *, stream: StreamSpec, op: ReduceOp, scale: float
    ) -> Work:
        """See `Transport`; the buffer must be a shared one."""
        if start == stop:
            return NOTHING_TO_DO
        task = _Task(buffer, start, stop, op, scale)
        self._streams[stream.number].submit(task)
        return task.work

    def exchange(self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, *, stream: StreamSpec) -> Work:
        """See `Exchanger`; the outgoing buffer must be a shared one, and all ranks on one node."""
        if parcels.empty:
            return NOTHING_TO_DO
        me = self._control.local_rank

        def receive() -> None:
            begin = 0
            for sender, peer in enumerate(outgoing.peers):
                start, stop = parcels.sent_by(sender)[me]
                incoming[begin : begin + stop - start].copy_(peer[start:stop])
                begin += stop - start

        task = _Task(outgoing, receive=receive)
        self._streams[stream.number].submit(task)
        return task.work

    def keep(self, streams: int) -> None:
        """See `Transport`: an idle one sleeps, unless it reaches other nodes over Gloo."""
        while len(self._streams) > streams and self._streams[-1].crosses_by is TransportKind.GLOO:
            self._streams.pop().close()

    def close(self) -> bool:
        """See `Transport`."""
        ended = [stream.close() for stream in self._streams]
        self._streams.clear()
        return all(ended)
