"""All-gather and reduce-scatter for sharded training, over several connections or shared memory.

A *gather* is an all-gather: it copies the shard of every rank into the whole tensor on all ranks. A *scatter* is a
reduce-scatter: it adds up the whole tensors of all ranks, and leaves one row of the sum on each rank. Between hosts,
each rank sends directly to every other rank, over one or several connections:

    gather     this rank's shard, cut into one piece per connection ─▶ its row of the whole tensor on each peer
    scatter    row r of this rank's tensor ─▶ rank r, which adds up the rows in the order of ranks

Data are not copied in between. Operations do not wait for each other, because each message has a tag that names its
operation, so that messages need no order. Ranks of one host do not send, but read each other's memory. If nodes have
several ranks, an operation has two levels, so that each element crosses the network once per node, not once per rank:

    gather     between nodes: shards of the ranks with the same local rank ─▶ within the node: the rows received so far
    scatter    within the node: sum of the rows for each local rank ─▶ between nodes: sum over ranks of one local rank

Several small gathers or scatters may be coalesced into one (`JointGather`, `JointScatter`), because copying the tensors
into one buffer and out of the buffer takes less time than one message for each tensor.

A `Codec` may pack (compress) data that are sent over sockets: the shards of a gather, and the rows of a scatter (qwZ
and qgZ of ZeRO++: Wang et al., 2023). Sums are computed from the unpacked values, in float32. There is no error
feedback, because a rank has no memory for the residuals of the other ranks' shards.

All ranks must submit the same operations in the same order, as with every process group, but may wait for operations in
any order. Operations may have labels (numbers). If the ranks pass different labels, the operation fails. This happens,
for example, after one rank has caught an exception that the other ranks have not seen.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from sirtaki.comm.compress import FEWEST, Codec, packed_bytes
from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.failure import Timeout, fresh
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.waiting import Deadline, wait_for, wait_for_work
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.comm.router import Router
from sirtaki.comm.transports.contract import FlatBuffer, ReduceOp, StreamSpec, ThreadWork, Work, Worker, join_workers
from sirtaki.comm.transports.gloo import GlooTransport
from sirtaki.comm.transports.shared_memory import SharedMemoryTransport, reduce_share
from sirtaki.comm.units import LATE_S, UNIT_BLAME_S
from sirtaki.errors import CommError, MismatchError, StallError
from sirtaki.machine import finalize

MOST_TAGS = 1 << 30
"""Number of different tags of messages. A tag names the operation to which a message belongs."""

GATHERS, SCATTERS = StreamSpec(0), StreamSpec(1)
"""Stream numbers of all-gathers (gathers) and reduce-scatters (scatters) in the shared-memory transport. Over sockets,
the number is part of a message's tag."""

END_S = 1.0
"""Seconds for which `ShardLanes.close` waits for its threads, whose connections are closed. Threads that have not ended
by then keep running."""

NEVER_S = 7 * 24 * 3600.0
"""Timeout in seconds that the transport gets, and that never expires. `ShardWork.wait` checks the real timeout, because
it may change during the job, and because its error names the operation."""


class ShardWork:
    """An all-gather or reduce-scatter in flight."""

    def __init__(
        self, work: Work, control: ControlPlane, what: str, timeout: Timeout, problems: Sequence[CommError]
    ) -> None:
        self._work, self._control, self._what, self._timeout = work, control, what, timeout
        self._problems = problems

    def is_done(self) -> bool:
        """Return whether the all-gather or reduce-scatter has ended, with or without an error. Non-blocking."""
        return self._work.is_done()

    def wait(self) -> None:
        """Block until the result of the all-gather or reduce-scatter is in the tensors of this rank.

        May be called several times.

        Raises:
            CommError: the operation has failed, or has not ended within the timeout.
        """
        failures, begin_s = self._control.failures, time.monotonic()

        def late() -> bool:  # Call `_timeout` at each check, because the timeout may change during the wait.
            return time.monotonic() - begin_s > self._timeout()

        try:
            if not wait_for_work(
                [self._work], failures=failures, interrupted=late, late_s=LATE_S, blame_s=UNIT_BLAME_S
            ):
                raise StallError(
                    f"a collective operation ({self._what}) did not end within {self._timeout():g} s; a rank "
                    "hangs, or did not submit the same operation"
                )
            for problem in self._problems:
                raise fresh(problem)
        except (StallError, MismatchError) as err:
            if failures.error is None:  # Report the error to the other ranks, because they may wait for this rank.
                failures.report(err)
                self._control.comm.abort(f"rank {self._control.rank}: {err}")
            raise


@dataclass(slots=True)
class Loss:
    """Bytes that packing (compression) has saved, and precision that packing has lost.

    Attributes:
        squares: sum of squares of the packed values.
        lost_squares: sum of squares of the differences between the values before packing and after unpacking.
        whole_bytes: size of the values before packing.
        sent_bytes: size of the packed values.
    """

    squares: float = 0.0
    lost_squares: float = 0.0
    whole_bytes: float = 0.0
    sent_bytes: float = 0.0

    def add(self, values: torch.Tensor, packed: torch.Tensor, codec: Codec, itemsize: int) -> None:
        """Add the loss and the saved bytes of packing (compressing) `values` into `packed` by `codec`.

        `itemsize` is the number of bytes of a value before its conversion to float32.
        """
        self.squares += float(values.square().sum())
        self.lost_squares += float((values - codec.unpack(packed, values.numel())).square().sum())
        self.whole_bytes += values.numel() * itemsize
        self.sent_bytes += packed.numel()

    def describe(self) -> str:
        """Return the loss as text for the log, such as `0.25 of the bytes, 0.6 % of the norm lost`."""
        bytes_share = self.sent_bytes / self.whole_bytes if self.whole_bytes else 1.0
        lost = math.sqrt(self.lost_squares / self.squares) if self.squares else 0.0
        return f"{bytes_share:.2g} of the bytes, {100.0 * lost:.2g} % of the norm lost"


class ShardLanes(ABC):
    """Connections over which the ranks of one group run all-gathers (gathers) and reduce-scatters (scatters).

    Attributes:
        control: control plane of these ranks (small messages). Only one thread at a time may use it.
        kind: transport between the ranks, or between nodes if there are two levels.
        most_streams: largest possible number of connections to each peer.
        peers: number of ranks to which each rank has connections.
        losses: precision that packing (compression) has lost in gathers and in scatters. None = not measured.
    """

    kind: TransportKind
    most_streams = 1

    def __init__(self, control: ControlPlane, router: Router, *, timeout: Timeout) -> None:
        self.control, self._router, self._timeout = control, router, timeout
        self.peers = control.size - 1
        self.losses: tuple[Loss, Loss] | None = None

    def reserve(self, *, shard_bytes: int, whole_bytes: int = 0) -> None:  # noqa: B027 - most need no memory
        """Allocate shared memory for later all-gathers and reduce-scatters. Collective.

        Args:
            shard_bytes: size of the largest shard to be gathered.
            whole_bytes: size of the largest tensor to be reduce-scattered. 0 = there is none, and `gather_memory`
                returns memory that ranks do not share.
        """

    def within_node(self, *, shard_bytes: int) -> ShardLanes | None:
        """Open connections for all-gathers between the ranks of this node only. Collective.

        Args:
            shard_bytes: size of the largest shard to be gathered.

        Returns:
            The connections, which `close` of this object closes, too. None = each node has one rank, or there is only
            one node.
        """
        return None

    def use(self, streams: int) -> None:  # noqa: B027 - shared memory has no connections
        """Split the data of later all-gathers and reduce-scatters over `streams` connections to each peer.

        Collective. No operation may be in flight.

        Raises:
            TransportError: on all ranks, if the connections cannot be opened. The earlier connections stay in use.
        """

    @abstractmethod
    def gather(
        self, rows: Sequence[torch.Tensor], shard: torch.Tensor, *, codec: Codec | None = None, label: int = 0
    ) -> ShardWork:
        """Launch an all-gather: fill `rows[r]` with the shard of rank r. Collective, non-blocking.

        Args:
            rows: targets, one tensor per rank, `(n,)`, contiguous. They may be views of `gather_memory`. This rank's
                row may be `shard` itself.
            shard: shard of this rank, `(n,)`.
            codec: packs (compresses) floating-point shards that are sent over sockets. All rows, also this rank's, then
                receive the values after unpacking, which are rounded. None = shards are sent unchanged.
            label: number that names the operation. The work fails if the ranks pass different labels.
        """

    @abstractmethod
    def scatter(
        self,
        whole: torch.Tensor,
        part: torch.Tensor,
        *,
        op: ReduceOp,
        scale: float,
        codec: Codec | None = None,
        label: int = 0,
    ) -> ShardWork:
        """Launch a reduce-scatter: fill `part` with this rank's row of the sum of `whole`. Collective, non-blocking.

        Args:
            whole: summand of this rank, `(ranks, n)`, contiguous. Must not be written until the work has ended.
            part: result of this rank, `(n,)`, contiguous, same dtype as `whole`.
            op: reduction over ranks. 16-bit floats are reduced in float32 and rounded once.
            scale: factor for the result.
            codec: packs (compresses) floating-point rows that are sent over sockets. None = rows are sent unchanged.
            label: number that names the operation. The work fails if the ranks pass different labels.
        """

    def gather_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory, `(numel,)`, for the result of the next all-gather. Ranks of a node share it if possible."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    def scatter_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory, `(numel,)`, for the input of the next reduce-scatter. Ranks of a node share it if possible.

        Collective. Waits until all ranks have read the previous contents of the memory.
        """
        return torch.empty(numel, dtype=dtype, device="cpu")

    def close(self) -> None:
        """End the threads and connections of this rank. Not collective. No operation may be in flight."""
        self._router.release()

    def _shard_work(self, work: Work, kind: str, elements: int, problems: Sequence[CommError] = ()) -> ShardWork:
        return ShardWork(work, self.control, f"{kind} of {elements} elements", self._timeout, problems)


class JointGather:
    """Several all-gathers (gathers) of one dtype between the same ranks, coalesced into one.

    The coalesced gather is packed (compressed) only if each of its shards is large enough to be packed.

    Attributes:
        sent: True once the coalesced gather is launched. `add` must then not be called any more.
    """

    sent = False

    def __init__(self, lanes: ShardLanes, dtype: torch.dtype, *, codec: Codec | None) -> None:
        """Create an empty coalesced all-gather. `codec` packs (compresses) its messages, if not None."""
        self.lanes, self.dtype, self._codec = lanes, dtype, codec
        self._label: int | None = None
        self._shards: list[torch.Tensor] = []
        self._numel = 0
        self._received: list[torch.Tensor] = []  # Entry r is a buffer for the shards of rank r, concatenated.

    def add(self, rows: Sequence[torch.Tensor], shard: torch.Tensor, *, label: int = 0) -> Callable[[], None]:
        """Add an all-gather to the coalesced one.

        Args:
            rows: tensors that receive the shards, one per rank.
            shard: shard of this rank.
            label: number that names the gather. It must be equal on all ranks.

        Returns:
            Function that copies the received shards into `rows`. The caller must call it after `wait`.
        """
        self._label = _joint_label(self._label, label)
        start, stop = self._numel, self._numel + shard.numel()
        self._shards.append(shard.detach())
        self._numel = stop

        def put() -> None:
            for row, common in zip(rows, self._received, strict=True):
                row.detach().copy_(common[start:stop])

        return put

    def send(self) -> None:
        """Launch the coalesced all-gather, unless it is already launched. Collective, non-blocking."""
        if not self.sent:
            self.sent, ranks = True, self.lanes.control
            self._received = list(self.lanes.gather_memory(self._numel * ranks.size, self.dtype).view(ranks.size, -1))
            own_shard = torch.cat(self._shards, out=self._received[ranks.rank])
            codec = self._codec if min(shard.numel() for shard in self._shards) >= FEWEST else None
            self._shards = []
            self._work = self.lanes.gather(self._received, own_shard, codec=codec, label=self._label or 0)

    def is_done(self) -> bool:
        """Return whether the coalesced all-gather has ended, with or without an error. Non-blocking."""
        return self.sent and self._work.is_done()

    def wait(self) -> None:
        """Launch the coalesced all-gather if necessary, and block until it has ended. May be called several times.

        Raises:
            CommError: the gather has failed, or has not ended within the timeout.
        """
        self.send()
        self._work.wait()


class JointScatter:
    """Several reduce-scatters (scatters) of one dtype between the same ranks, coalesced into one.

    The coalesced scatter is packed (compressed) only if each of its parts is large enough to be packed.

    Attributes:
        sent: True once the coalesced scatter is launched. `add` must then not be called any more.
    """

    sent = False

    def __init__(
        self, lanes: ShardLanes, dtype: torch.dtype, *, op: ReduceOp, scale: float, codec: Codec | None
    ) -> None:
        """Create an empty coalesced reduce-scatter. `ShardLanes.scatter` describes the arguments."""
        self.lanes, self.dtype, self.op, self.scale = lanes, dtype, op, scale
        self._codec = codec
        self._label: int | None = None
        self._wholes: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []

    def add(self, whole: torch.Tensor, part: torch.Tensor, *, label: int = 0) -> None:
        """Add a reduce-scatter to the coalesced one.

        Args:
            whole: summand of this rank, `(ranks, n)`. Must not be written before `send` has returned.
            part: tensor that receives this rank's row of the sum, `(n,)`.
            label: number that names the scatter. It must be equal on all ranks.
        """
        self._label = _joint_label(self._label, label)
        self._wholes.append(whole.detach().view(self.lanes.control.size, -1))
        self._parts.append(part.detach().view(-1))

    def send(self) -> None:
        """Launch the coalesced reduce-scatter, unless it is already launched. Collective, non-blocking."""
        if not self.sent:
            self.sent, size = True, self.lanes.control.size
            numel = sum(part.numel() for part in self._parts)
            memory = self.lanes.scatter_memory(numel * size, self.dtype).view(size, -1)
            torch.cat(self._wholes, dim=1, out=memory)
            codec = self._codec if min(part.numel() for part in self._parts) >= FEWEST else None
            self._wholes, self._sums = [], torch.empty(numel, dtype=self.dtype, device="cpu")
            self._work = self.lanes.scatter(
                memory, self._sums, op=self.op, scale=self.scale, codec=codec, label=self._label or 0
            )

    def wait(self) -> None:
        """Launch the coalesced reduce-scatter if necessary, and block until each added `part` holds its row of the sum.

        May be called several times.

        Raises:
            CommError: the scatter has failed, or has not ended within the timeout.
        """
        self.send()
        self._work.wait()
        parts, self._parts = self._parts, []
        if parts:
            torch._foreach_copy_(parts, list(torch.split(self._sums, [part.numel() for part in parts])))


def _joint_label(label: int | None, another: int) -> int:
    """Combine the labels (numbers that name operations) of a coalesced operation and of an operation added to it.

    Args:
        label: label of the coalesced operation before the addition. None = it is empty.
        another: label of the added operation.
    """
    return another if label is None else ((label + 1) * 8191 + another) % (1 << 40)


def open_shard_lanes(control: ControlPlane, *, timeout: Timeout, kind: TransportKind | None = None) -> ShardLanes:
    """Open the fastest connections for shards between these ranks: shared memory, sockets between nodes, or both.

    Collective.

    Args:
        control: control plane of two or more ranks (small messages between them). Other code must not use it.
        timeout: returns the time in seconds after which a wait for other ranks fails.
        kind: transport that the user asked for. None = the fastest one. If it cannot move shards, sockets are used.

    Raises:
        TransportError: on all ranks, if no connection can be opened.
        CommError: the job has failed.
    """
    router = Router(control, timeout_s=NEVER_S)
    shared = router.transports.get((TransportKind.SHARED_MEMORY, Algorithm.FLAT))
    if kind in (None, TransportKind.SHARED_MEMORY) and isinstance(shared, SharedMemoryTransport):
        return _InSharedMemory(control, router, shared, timeout=timeout)
    trees = (
        TransportKind.GLOO,
        Algorithm.HIERARCHICAL,
    ) in router.transports  # This route exists only if the ranks of a node can share memory.
    if kind in (None, TransportKind.SHARED_MEMORY) and trees and control.is_homogeneous and control.in_order:
        return _OverNodes(control, router, timeout=timeout)
    return _OverSockets(control, router, timeout=timeout)


LEAST_PIECE_BYTES = 16 << 10
"""Smallest size in bytes of the pieces into which a shard is cut, one per connection. Cutting smaller pieces takes more
time than is gained by sending them at the same time."""


class _Finisher(Worker):
    """A thread that completes all-gathers or reduce-scatters in the order of submission."""

    def follow(self, step: Callable[[], None]) -> Work:
        """Queue `step` for the thread. Return a work that ends when `step` has returned. Non-blocking.

        `step` waits for the messages of an operation, and copies or reduces their contents.
        """
        work = ThreadWork()
        self.put(partial(work.run, step, "shards could not be copied to their target"))
        return work


class _OverSockets(ShardLanes):
    """All-gathers and reduce-scatters over sockets. Ranks send directly to each other, over several connections."""

    kind = TransportKind.GLOO

    def __init__(self, control: ControlPlane, router: Router, *, timeout: Timeout) -> None:
        super().__init__(control, router, timeout=timeout)
        self._route = (TransportKind.GLOO, Algorithm.FLAT)
        sockets = router.transports[self._route]
        assert isinstance(sockets, GlooTransport)
        self._sockets = sockets
        self.most_streams = router.max_streams([self._route], fixed=True)
        self._streams = 0
        self._tags = itertools.count()
        self._gathers, self._scatters = _Finisher("sirtaki-gathers"), _Finisher("sirtaki-scatters")
        self._scratch: list[torch.Tensor] = []  # Buffers of completed reduce-scatters, kept for reuse.
        self._largest_scratch = 0
        self.use(1)

    def use(self, streams: int) -> None:
        self._router.open_streams(self._route, streams)
        self._streams = streams

    def gather(
        self, rows: Sequence[torch.Tensor], shard: torch.Tensor, *, codec: Codec | None = None, label: int = 0
    ) -> ShardWork:
        rows, own_shard = [row.detach() for row in rows], shard.detach()
        if codec is not None and own_shard.is_floating_point() and own_shard.numel() >= FEWEST:
            return self._gather_packed(rows, own_shard, codec, label)
        wait_for_pieces = self._exchange([own_shard] * self.control.size, rows, GATHERS, label)
        if (own := rows[self.control.rank]).data_ptr() != own_shard.data_ptr():
            own.copy_(own_shard)
        return self._shard_work(self._gathers.follow(wait_for_pieces), "gather", len(rows) * own_shard.numel())

    def _gather_packed(self, rows: list[torch.Tensor], own_shard: torch.Tensor, codec: Codec, label: int) -> ShardWork:
        values, me = own_shard.float(), self.control.rank
        packed = codec.pack(values)
        parcels = list(torch.empty(len(rows), packed.numel(), dtype=torch.uint8, device="cpu"))
        parcels[me] = packed
        wait_for_pieces = self._exchange([packed] * len(rows), parcels, GATHERS, label)
        if self.losses is not None:
            self.losses[0].add(values, packed, codec, own_shard.itemsize)

        def unpack() -> None:
            wait_for_pieces()
            for row, parcel in zip(rows, parcels, strict=True):
                row.copy_(codec.unpack(parcel, row.numel()))

        return self._shard_work(self._gathers.follow(unpack), "gather", len(rows) * own_shard.numel())

    def scatter(
        self,
        whole: torch.Tensor,
        part: torch.Tensor,
        *,
        op: ReduceOp,
        scale: float,
        codec: Codec | None = None,
        label: int = 0,
    ) -> ShardWork:
        me, size = self.control.rank, self.control.size
        rows, target = whole.detach().view(size, -1), part.detach().view(-1)
        if codec is not None and op is ReduceOp.SUM and whole.is_floating_point() and target.numel() >= FEWEST:
            return self._scatter_packed(list(rows), target, scale, codec, label)
        size_bytes = (size - 1) * target.numel() * target.itemsize
        memory = self._take_scratch(size_bytes)
        others = list(memory[:size_bytes].view(whole.dtype).view(size - 1, -1))
        summands = [*others[:me], rows[me], *others[me:]]
        wait_for_pieces = self._exchange(list(rows), summands, SCATTERS, label)

        def add_up() -> None:
            wait_for_pieces()
            reduce_share(summands, 0, target.numel(), op=op, scale=scale, outputs=[target])
            self._put_scratch(memory)

        return self._shard_work(self._scatters.follow(add_up), "reduce-scatter", whole.numel())

    def _scatter_packed(
        self, rows: list[torch.Tensor], target: torch.Tensor, scale: float, codec: Codec, label: int
    ) -> ShardWork:
        me, count = self.control.rank, target.numel()
        length = packed_bytes(codec, count)
        sent, received = (list(torch.empty(len(rows), length, dtype=torch.uint8, device="cpu")) for _ in range(2))
        for other, row in enumerate(rows):
            if other != me:
                values = row.float()
                sent[other] = codec.pack(values)
                if self.losses is not None:
                    self.losses[1].add(values, sent[other], codec, row.itemsize)
        wait_for_pieces = self._exchange(sent, received, SCATTERS, label)

        def add_up() -> None:
            wait_for_pieces()
            total = torch.zeros(count, dtype=torch.float32, device="cpu")
            for other, parcel in enumerate(received):
                total += rows[me] if other == me else codec.unpack(parcel, count)
            target.copy_(total.mul_(scale))

        return self._shard_work(self._scatters.follow(add_up), "reduce-scatter", len(rows) * count)

    def _take_scratch(self, size_bytes: int) -> torch.Tensor:
        """Return memory of `size_bytes` for received rows of a reduce-scatter.

        It is the buffer of a completed reduce-scatter if one is large enough, because first writes to new memory are
        slow.
        """
        self._largest_scratch = max(self._largest_scratch, size_bytes)
        while self._scratch:
            if (memory := self._scratch.pop()).numel() >= size_bytes:
                return memory
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def _put_scratch(self, memory: torch.Tensor) -> None:
        """Keep `memory`, the buffer of a completed reduce-scatter, for reuse. Free it if enough memory is kept."""
        if sum(one.numel() for one in self._scratch) + memory.numel() <= self._largest_scratch:
            self._scratch.append(memory)

    def _exchange(
        self, sent: list[torch.Tensor], received: list[torch.Tensor], kind: StreamSpec, label: int
    ) -> Callable[[], None]:
        """Launch sends of `sent[r]` to each rank r, and receives of `received[r]` from it.

        Returns:
            Function that blocks until all tensors are sent and received.
        """
        numel = sent[0].numel()
        pieces = max(1, min(self._streams, numel * sent[0].itemsize // LEAST_PIECE_BYTES))
        bounds = [numel * piece // pieces for piece in range(pieces + 1)]
        waits = []
        for start, stop in itertools.pairwise(bounds):
            number = next(self._tags)
            # Derive the tag from length and label of the operation, so that a rank that has submitted another operation
            # does not receive this message. Otherwise, the rank could write beyond its memory, or use the values of the
            # wrong module.
            tag = (number * 8191 + numel + (2 * label + kind.number) * 524287) % MOST_TAGS
            if start < stop:
                parts = [[row[start:stop] for row in rows] for rows in (sent, received)]
                waits.append(self._sockets.send_receive(*parts, stream=number % self._streams, tag=tag))

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def close(self) -> None:
        super().close()  # Close the connections first, which makes the pending waits of the threads fail.
        # Wait for the threads now, because PyTorch aborts the process if a thread returns from such a wait at
        # interpreter exit.
        join_workers([self._gathers, self._scatters], within_s=END_S)


SLOTS = 2
"""Number of slots (buffers in shared memory) for all-gathers, and for reduce-scatters. One slot is read while the other
is filled."""

MARK_BYTES = 16
"""Size in bytes of the mark that a rank writes at the end of a slot (buffer in shared memory). The mark consists of two
int64: the size of the data in bytes, and the label (number) of the operation. A negative size means that the data are
in the whole tensor that all ranks share, and not in the slot."""

WHOLES = 4
"""Number of buffers in shared memory for results of all-gathers (whole tensors). If more results are in flight
or in use at the same time, the additional ones use private memory."""

RELEASE_S = 0.05
"""Longest time in seconds for which a rank waits until the other ranks no longer use the previous result in a buffer of
shared memory. After this time, the rank gathers into private memory instead."""


class _Slots:
    """Slots (buffers in shared memory) through which ranks of a node exchange data. Operations use them in turn."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._slots: list[FlatBuffer] = []
        self._works: list[ShardWork | None] = [None] * SLOTS
        self._next = 0

    def reserve(self, size_bytes: int) -> None:
        """Enlarge the slots (buffers in shared memory), if they are smaller than `size_bytes`. Collective."""
        if not self._slots or self._slots[0].tensor.numel() - MARK_BYTES < size_bytes:
            for work in self._works:
                if work is not None:
                    work.wait()
            self._slots = []  # Free the old slots first, so that old and new slots never need memory at the same time.
            whole_bytes = (size_bytes // MARK_BYTES + 2) * MARK_BYTES
            self._slots = [self._router.allocate(whole_bytes, torch.uint8) for _ in range(SLOTS)]

    def next(self, size_bytes: int) -> FlatBuffer:
        """Wait until all ranks have read the next slot (buffer in shared memory), and return it, uint8. Collective."""
        self.reserve(size_bytes)
        if (work := self._works[self._next]) is not None:
            work.wait()
        return self._slots[self._next]

    def fill(self, mark: int, label: int) -> FlatBuffer:
        """Write the mark of this rank's data to the end of the slot that `next` has returned, and return the slot.

        Args:
            mark: size of the data in bytes. Negative = the data are not in the slot.
            label: number that names the operation.
        """
        slot = self._slots[self._next]
        marks = torch.tensor([mark, label], dtype=torch.int64, device="cpu")
        slot.tensor[-MARK_BYTES:].view(torch.int64).copy_(marks)
        return slot

    def end_turn(self, work: ShardWork) -> None:
        """Make the other slot (buffer) the next one. `work` is the operation that reads the current slot."""
        self._works[self._next] = work
        self._next = (self._next + 1) % SLOTS


class _Wholes:
    """Buffers in shared memory for results of all-gathers within a node. Each rank writes only its own shard.

    All-gather n uses the buffer n modulo `WHOLES`, if every rank has released the previous result in the buffer. If a
    rank has not, or if the result is larger than the buffer, private memory is used instead. Each rank decides this
    independently.
    """

    def __init__(self, control: ControlPlane, router: Router, size_bytes: int) -> None:
        """Allocate `WHOLES` buffers of `size_bytes` each in shared memory, for results of all-gathers. Collective."""
        size_bytes = -(-size_bytes // 64) * 64
        each = -(-WHOLES // control.size)
        memory = router.allocate(each * size_bytes, torch.uint8)
        self._memory = [
            memory.peers[n % control.size][n // control.size * size_bytes :][:size_bytes].numpy() for n in range(WHOLES)
        ]
        self._released = [peer.numpy() for peer in router.allocate(WHOLES, torch.int64).peers]
        self._me, self._failures = control.rank, control.failures
        self._held: dict[int, int] = {}  # For each buffer, number of the all-gather whose result this rank still uses.
        self._ended = [0] * WHOLES  # For each buffer, number of the first all-gather that this rank has not ended.
        self.number = 0  # Number of the next all-gather.

    def take(self, size_bytes: int) -> torch.Tensor | None:
        """Return shared memory, uint8, for the result of the next all-gather. None = private memory must be used.

        This rank releases the shared memory when the last tensor that refers to it is freed.
        """
        place, least = self.number % WHOLES, self.number - WHOLES + 1
        if place in self._held or size_bytes > len(self._memory[place]):
            return None

        def is_held() -> bool:
            return min(int(each[place]) for each in self._released) < least

        wait_for(lambda: not is_held() or self._failures.error is not None, Deadline.after(RELEASE_S))
        if is_held():
            return None
        # Make a new array for each all-gather, because it is finalised with the storage of the returned tensor.
        taken = self._memory[place][:size_bytes]
        self._held[place] = self.number
        finalize(taken, self._release, place)
        return torch.from_numpy(taken)

    def _release(self, place: int) -> None:
        self._release_before(place, self._held.pop(place) + 1)

    def _release_before(self, place: int, number: int) -> None:
        """Tell the peers that this rank no longer uses buffer `place` for all-gathers before `number`.

        If this rank still uses a result in the buffer, the message waits until the result is freed. Thread-safe.
        """
        self._ended[place] = max(self._ended[place], number)
        if place not in self._held:
            self._released[self._me][place] = self._ended[place]

    def next(self) -> torch.Tensor:
        """Start the next all-gather, and return the shared memory in which the host's ranks gather, uint8.

        A rank that gathers into private memory, because `take` has returned None, must call `end` when it has read all
        shards.
        """
        place = self.number % WHOLES
        self.number += 1
        return torch.from_numpy(self._memory[place])

    def end(self, number: int) -> None:
        """Report that this rank has read all shards of all-gather `number`, so that their shared memory may be reused.

        Called on a rank for which `take` has returned None. Such a rank gathers into private memory, but copies the
        shards of other ranks from the shared memory.
        """
        self._release_before(number % WHOLES, number + 1)


class _InSharedMemory(ShardLanes):
    """All-gathers and reduce-scatters through memory that all ranks of one node share."""

    kind = TransportKind.SHARED_MEMORY

    def __init__(
        self, control: ControlPlane, router: Router, shared: SharedMemoryTransport, *, timeout: Timeout
    ) -> None:
        super().__init__(control, router, timeout=timeout)
        self._shared = shared
        shared.open_streams([GATHERS, SCATTERS])
        self._gathered, self._scattered = _Slots(router), _Slots(router)
        self._wholes: _Wholes | None = None

    def reserve(self, *, shard_bytes: int, whole_bytes: int = 0) -> None:
        self._gathered.reserve(shard_bytes)
        if whole_bytes:
            self._scattered.reserve(whole_bytes)
        if shard_bytes and whole_bytes:
            self._wholes = _Wholes(self.control, self._router, shard_bytes * self.control.size)

    def gather_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        taken = self._wholes.take(numel * dtype.itemsize) if self._wholes is not None else None
        return super().gather_memory(numel, dtype) if taken is None else taken.view(dtype)

    def gather(
        self, rows: Sequence[torch.Tensor], shard: torch.Tensor, *, codec: Codec | None = None, label: int = 0
    ) -> ShardWork:
        me, own_shard, wholes = self.control.rank, _bytes(shard), self._wholes
        rows, size_bytes, elements = [_bytes(row) for row in rows], own_shard.numel(), len(rows) * shard.numel()
        number = wholes.number if wholes is not None else 0
        common = wholes.next() if wholes is not None else None
        in_common = common is not None and rows[0].data_ptr() == common.data_ptr()
        slot = self._gathered.next(size_bytes)
        if not in_common:
            slot.tensor[:size_bytes].copy_(own_shard)
        if rows[me].data_ptr() != own_shard.data_ptr():
            rows[me].copy_(own_shard)

        def read(marks: Sequence[int], slots: Sequence[torch.Tensor]) -> None:
            for rank, (row, slot, mark) in enumerate(zip(rows, slots, marks, strict=True)):
                if rank == me or (mark < 0 and in_common):
                    continue
                if mark < 0:
                    assert common is not None
                    slot = common[rank * size_bytes : (rank + 1) * size_bytes]
                row.copy_(slot)
            if wholes is not None and not in_common:
                wholes.end(number)

        mark = -size_bytes if in_common else size_bytes
        return self._read_slots(self._gathered, mark, label, read, "gather", elements)

    def scatter_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        size_bytes = numel * dtype.itemsize
        return self._scattered.next(size_bytes).tensor[:size_bytes].view(dtype)

    def scatter(
        self,
        whole: torch.Tensor,
        part: torch.Tensor,
        *,
        op: ReduceOp,
        scale: float,
        codec: Codec | None = None,
        label: int = 0,
    ) -> ShardWork:
        plain, target, me = whole.detach().view(-1), part.detach().view(-1), self.control.rank
        memory = self.scatter_memory(plain.numel(), plain.dtype)
        if memory.data_ptr() != plain.data_ptr():
            memory.copy_(plain)

        def add_up(marks: Sequence[int], slots: Sequence[torch.Tensor]) -> None:
            start, stop = me * target.numel(), (me + 1) * target.numel()
            summands = [slot.view(plain.dtype)[start:stop] for slot in slots]
            reduce_share(summands, 0, target.numel(), op=op, scale=scale, outputs=[target])

        return self._read_slots(self._scattered, _bytes(plain).numel(), label, add_up, "reduce-scatter", plain.numel())

    def _read_slots(
        self,
        slots: _Slots,
        mark: int,
        label: int,
        read: Callable[[Sequence[int], Sequence[torch.Tensor]], None],
        kind: str,
        elements: int,
    ) -> ShardWork:
        """Launch a call of `read`, once all ranks have filled their slots (buffers in shared memory). Non-blocking.

        `read` gets the slots of all ranks, and the sizes (marks) of the data in them.
        """
        slot, size_bytes = slots.fill(mark, label), abs(mark)
        problems: list[CommError] = []

        def compare_and_read() -> None:
            ends = [peer[-MARK_BYTES:].view(torch.int64).tolist() for peer in slot.peers]
            marks, labels = [mark for mark, _ in ends], [one for _, one in ends]
            sizes = [abs(mark) for mark in marks]
            if set(sizes) != {size_bytes}:
                problems.append(
                    MismatchError(f"the ranks have submitted tensors of different sizes, in bytes: {sizes}")
                )
            elif set(labels) != {label}:
                problems.append(
                    MismatchError(
                        f"the ranks have submitted a {kind} of different tensors, by number: {labels}; all ranks must "
                        "submit the same operations in the same order"
                    )
                )
            else:
                read(marks, [peer[:size_bytes] for peer in slot.peers])

        stream = GATHERS if slots is self._gathered else SCATTERS
        work = self._shard_work(self._shared.visit(compare_and_read, stream=stream), kind, elements, problems)
        slots.end_turn(work)
        return work


class _OverNodes(ShardLanes):
    """All-gathers and reduce-scatters in two levels: shared memory within a node, sockets between nodes.

    The sockets connect ranks of equal local rank. One thread for all-gathers and one for reduce-scatters start the
    second level of an operation when its first level has ended. Each of the two threads needs connections of its own.
    """

    kind = TransportKind.GLOO

    def __init__(self, control: ControlPlane, router: Router, *, timeout: Timeout) -> None:
        super().__init__(control, router, timeout=timeout)

        self._within = [self._level(control.node, TransportKind.SHARED_MEMORY) for _ in range(2)]
        self._across = [self._level(control.cross, TransportKind.GLOO) for _ in range(2)]
        self._finishers = [_Finisher("sirtaki-gathers"), _Finisher("sirtaki-scatters")]
        self.most_streams = min(lanes.most_streams for lanes in self._across)
        self.peers = control.cross_size - 1

    def reserve(self, *, shard_bytes: int, whole_bytes: int = 0) -> None:
        self._within[0].reserve(shard_bytes=shard_bytes)
        self._within[1].reserve(shard_bytes=0, whole_bytes=whole_bytes // self.control.cross_size)

    def _level(self, ranks: Communicator, kind: TransportKind) -> ShardLanes:
        return open_shard_lanes(self.control.of_subset(ranks), timeout=self._timeout, kind=kind)

    def within_node(self, *, shard_bytes: int) -> ShardLanes:
        lanes = self._level(self.control.node, TransportKind.SHARED_MEMORY)
        lanes.reserve(shard_bytes=shard_bytes)
        self._within.append(lanes)
        return lanes

    def use(self, streams: int) -> None:
        for lanes in self._across:
            lanes.use(streams)

    def gather(
        self, rows: Sequence[torch.Tensor], shard: torch.Tensor, *, codec: Codec | None = None, label: int = 0
    ) -> ShardWork:
        within, across, place = self._within[0], self._across[0], self.control.local_rank
        across.losses = self.losses
        size = self.control.local_size
        nodes = [rows[start : start + size] for start in range(0, self.control.size, size)]
        between_nodes = across.gather([node[place] for node in nodes], shard, codec=codec, label=label)

        def gather_in_node() -> None:
            between_nodes.wait()
            for work in [within.gather(node, node[place], label=label) for node in nodes]:
                work.wait()

        return self._shard_work(self._finishers[0].follow(gather_in_node), "gather", len(rows) * shard.numel())

    def scatter(
        self,
        whole: torch.Tensor,
        part: torch.Tensor,
        *,
        op: ReduceOp,
        scale: float,
        codec: Codec | None = None,
        label: int = 0,
    ) -> ShardWork:
        within, across, nodes = self._within[1], self._across[1], self.control.cross_size
        across.losses = self.losses
        sums = torch.empty(nodes, part.numel(), dtype=part.dtype, device="cpu")
        rows = whole.detach().view(nodes, -1)
        added = [within.scatter(each, own, op=op, scale=1.0, label=label) for each, own in zip(rows, sums, strict=True)]

        def scatter_between_nodes() -> None:
            for work in added:
                work.wait()
            across.scatter(sums, part, op=op, scale=scale, codec=codec, label=label).wait()

        return self._shard_work(self._finishers[1].follow(scatter_between_nodes), "reduce-scatter", whole.numel())

    def close(self) -> None:
        for finisher in self._finishers:
            finisher.end()
        for lanes in (*self._within, *self._across):
            lanes.close()
        super().close()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
