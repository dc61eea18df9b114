"""Gathers of shards and scatters of sums, as sharded training needs them, over several connections or shared memory.

A gather puts the shard of every rank into the whole tensor on all ranks; a scatter adds up the whole tensors of all
ranks, and leaves one part of the sum on each. Between hosts each rank talks to every other one directly:

    gather     my shard ─▶ its place in the whole tensor of each other rank, in pieces, each over the next connection
    scatter    row r of my tensor ─▶ rank r, which adds up what it gets, in the order of ranks

Nothing is copied on the way, and nothing waits for another operation, as pieces are told apart by a number and not by
their order. Ranks of one host read each other's memory instead. Where nodes have several ranks, both happen, so that
each number crosses the network once for a node and not once for each of its ranks:

    gather     shards of the ranks with my local rank on other nodes ─▶ what my neighbours have got from theirs
    scatter    sums over my node, of the rows of all ranks with my local rank ─▶ sums over the nodes, of mine

Small tensors of several gathers or scatters may travel as one (`JointGather`, `JointScatter`): they are copied together
before and apart again afterwards, which takes less time than a message for each. They are packed only if each of them
would be.

What goes over sockets may be packed in fewer bytes (a `Codec`): a shard before it is sent, and each row of a tensor
that is scattered (ZeRO++'s qwZ and qgZ: Wang et al., 2023). Sums are made of what was unpacked, in float32. What is
lost is not given back: a rank has no room for what it owes of the other ranks' shards.

All ranks submit the same operations in the same order, as with every process group; they may wait for them in any.
Each may have a label, so that ranks which do not (one has caught an exception that the others have not seen) are told.
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
from sirtaki.comm.transports.contract import FlatBuffer, ReduceOp, StreamSpec, ThreadWork, Work, Worker, ended
from sirtaki.comm.transports.gloo import GlooTransport
from sirtaki.comm.transports.shared_memory import SharedMemoryTransport, reduce_share
from sirtaki.comm.units import HEARD_S, LATE_S
from sirtaki.errors import CommError, MismatchError, StallError
from sirtaki.machine import finalize

MOST_TAGS = 1 << 30

GATHERS, SCATTERS = StreamSpec(0), StreamSpec(1)

END_S = 1.0
"""How long threads may take to end, whose connections are closed, before they are left to themselves."""

NEVER_S = 7 * 24 * 3600.0
"""Timeout of the transport. `ShardWork.wait` gives up before: its timeout may change, and it can say more."""


class ShardWork:
    """A gather or scatter under way."""

    def __init__(
        self, work: Work, control: ControlPlane, what: str, timeout: Timeout, problems: Sequence[CommError]
    ) -> None:
        self._work, self._control, self._what, self._timeout = work, control, what, timeout
        self._problems = problems

    def is_done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._work.is_done()

    def wait(self) -> None:
        """Blocks until the result is in its place; may be called again.

        Raises:
            CommError: it failed, or another rank has not come within the time.
        """
        failures, begin_s = self._control.failures, time.monotonic()

        def late() -> bool:  # the timeout may change during the wait
            return time.monotonic() - begin_s > self._timeout()

        try:
            if not wait_for_work([self._work], failures=failures, interrupted=late, late_s=LATE_S, blame_s=HEARD_S):
                raise StallError(
                    f"{self._what} did not end within {self._timeout():g} s: another rank has not come, stands "
                    "still, or has submitted something else"
                )
            for problem in self._problems:
                raise fresh(problem)
        except (StallError, MismatchError) as err:
            if failures.error is None:  # the others are told, which may wait for this rank elsewhere
                failures.report(err)
                self._control.comm.abort(f"rank {self._control.rank}: {err}")
            raise


@dataclass(slots=True)
class Loss:
    """What packing has saved and lost.

    Attributes:
        squares, lost_squares: sums of squares of what was packed, and of what that has changed.
        whole_bytes, sent_bytes: of what was packed, before and after.
    """

    squares: float = 0.0
    lost_squares: float = 0.0
    whole_bytes: float = 0.0
    sent_bytes: float = 0.0

    def add(self, values: torch.Tensor, packed: torch.Tensor, codec: Codec, itemsize: int) -> None:
        """These values, which had so many bytes each, have been packed."""
        self.squares += float(values.square().sum())
        self.lost_squares += float((values - codec.unpack(packed, values.numel())).square().sum())
        self.whole_bytes += values.numel() * itemsize
        self.sent_bytes += packed.numel()

    def describe(self) -> str:
        """In words: `0.25 of the bytes, 0.6 % of the norm lost`."""
        bytes_share = self.sent_bytes / self.whole_bytes if self.whole_bytes else 1.0
        lost = math.sqrt(self.lost_squares / self.squares) if self.squares else 0.0
        return f"{bytes_share:.2g} of the bytes, {100.0 * lost:.2g} % of the norm lost"


class ShardLanes(ABC):
    """What carries the shards of one group of ranks.

    Attributes:
        control: these ranks, for what they agree on; for one thread at a time.
        kind: what carries them.
        most_streams: as many connections can be used.
        peers: ranks that each one has connections to.
        losses: of gathers and of scatters, if they are to be measured.
    """

    kind: TransportKind
    most_streams = 1

    def __init__(self, control: ControlPlane, router: Router, *, timeout: Timeout) -> None:
        self.control, self._router, self._timeout = control, router, timeout
        self.peers = control.size - 1
        self.losses: tuple[Loss, Loss] | None = None

    def reserve(self, *, shard_bytes: int, whole_bytes: int = 0) -> None:  # noqa: B027 - most need nothing
        """Collective: so large are the largest shard that is gathered, and the largest tensor that is scattered.

        If nothing is scattered (0), `gather_memory` has nothing that is shared.
        """

    def within_node(self, *, shard_bytes: int) -> ShardLanes | None:
        """Collective: lanes of their own for gathers between the ranks of this node, whose largest shard is so large.

        They are closed with these; None = nodes have one rank, or there is one node.
        """
        return None

    def use(self, streams: int) -> None:  # noqa: B027 - where there are no connections
        """Collective, with nothing under way: from now on cuts what is submitted over so many connections.

        Raises:
            TransportError: on all ranks, if they cannot be opened; those that were used still are.
        """

    @abstractmethod
    def gather(
        self, rows: Sequence[torch.Tensor], shard: torch.Tensor, *, codec: Codec | None = None, label: int = 0
    ) -> ShardWork:
        """Collective: fills `rows[r]`, `(n,)`, with the `shard`, `(n,)`, of rank r; this rank's may be that already.

        Args:
            rows: may lie apart, or one after the other in `gather_memory`.
            shard: of this rank.
            codec: packs shards of floating numbers that go over sockets; all ranks get what was unpacked, whoever's it
                is. None = they travel as they are.
            label: says what this is, so that ranks which have gone different ways do not take one for another: where
                they give different ones, the work fails.
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
        """Collective: fills `part`, `(n,)`, with this rank's row of the reduction of `whole`, `(ranks, n)`, over ranks.

        Args:
            whole: contiguous, as is `part`; not to be written until the work is done.
            part: of the same dtype.
            op: how elements are combined; halves in float32, rounded once.
            scale: what the result is multiplied by.
            codec: packs rows of floating numbers that go over sockets to be summed; None = they travel as they are.
            label: as of a gather.
        """

    def gather_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the whole tensor of the next gather, where shards need not be copied; `(numel,)`."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    def scatter_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the whole tensor of the next scatter, where it need not be copied; `(numel,)`.

        Collective: waits until all ranks have read what was there.
        """
        return torch.empty(numel, dtype=dtype, device="cpu")

    def close(self) -> None:
        """Not collective, with nothing under way: ends threads and connections of this rank."""
        self._router.release()

    def _under_way(self, work: Work, kind: str, elements: int, problems: Sequence[CommError] = ()) -> ShardWork:
        return ShardWork(work, self.control, f"a {kind} of {elements} elements", self._timeout, problems)


class JointGather:
    """Gathers of several tensors of one dtype between the same ranks that travel as one.

    Attributes:
        sent: it is under way, and takes no more.
    """

    sent = False

    def __init__(self, lanes: ShardLanes, dtype: torch.dtype, *, codec: Codec | None) -> None:
        """Arguments as of `ShardLanes.gather`."""
        self.lanes, self.dtype, self._codec = lanes, dtype, codec
        self._label: int | None = None
        self._shards: list[torch.Tensor] = []
        self._numel = 0
        self._came: list[torch.Tensor] = []  # of each rank, one tensor after the other

    def add(self, rows: Sequence[torch.Tensor], shard: torch.Tensor, *, label: int = 0) -> Callable[[], None]:
        """One more, as `ShardLanes.gather` takes it; what comes back fills its rows, once this has been waited for."""
        self._label = _joint_label(self._label, label)
        start, stop = self._numel, self._numel + shard.numel()
        self._shards.append(shard.detach())
        self._numel = stop

        def put() -> None:
            for row, common in zip(rows, self._came, strict=True):
                row.detach().copy_(common[start:stop])

        return put

    def send(self) -> None:
        """Collective: begins."""
        if not self.sent:
            self.sent, ranks = True, self.lanes.control
            self._came = list(self.lanes.gather_memory(self._numel * ranks.size, self.dtype).view(ranks.size, -1))
            mine = torch.cat(self._shards, out=self._came[ranks.rank])
            codec = self._codec if min(shard.numel() for shard in self._shards) >= FEWEST else None
            self._shards = []
            self._work = self.lanes.gather(self._came, mine, codec=codec, label=self._label or 0)

    def is_done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self.sent and self._work.is_done()

    def wait(self) -> None:
        """Blocks until all have come; begins if that has not been done. May be called again.

        Raises:
            CommError: as `ShardWork.wait`.
        """
        self.send()
        self._work.wait()


class JointScatter:
    """Scatters of several tensors of one dtype between the same ranks that travel as one.

    Attributes:
        sent: it is under way, and takes no more.
    """

    sent = False

    def __init__(
        self, lanes: ShardLanes, dtype: torch.dtype, *, op: ReduceOp, scale: float, codec: Codec | None
    ) -> None:
        """Arguments as of `ShardLanes.scatter`."""
        self.lanes, self.dtype, self.op, self.scale = lanes, dtype, op, scale
        self._codec = codec
        self._label: int | None = None
        self._wholes: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []

    def add(self, whole: torch.Tensor, part: torch.Tensor, *, label: int = 0) -> None:
        """One more, as `ShardLanes.scatter` takes it, in memory that nobody writes to until the scatter begins."""
        self._label = _joint_label(self._label, label)
        self._wholes.append(whole.detach().view(self.lanes.control.size, -1))
        self._parts.append(part.detach().view(-1))

    def send(self) -> None:
        """Collective: begins."""
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
        """Blocks until all parts have their sums; begins if that has not been done. May be called again.

        Raises:
            CommError: as `ShardWork.wait`.
        """
        self.send()
        self._work.wait()
        parts, self._parts = self._parts, []
        if parts:
            torch._foreach_copy_(parts, list(torch.split(self._sums, [part.numel() for part in parts])))


def _joint_label(label: int | None, another: int) -> int:
    """Of what travels as one: of a single member its own, of several another one for other members as large."""
    return another if label is None else ((label + 1) * 8191 + another) % (1 << 40)


def open_shard_lanes(control: ControlPlane, *, timeout: Timeout, kind: TransportKind | None = None) -> ShardLanes:
    """Collective: lanes through shared memory if all ranks are on one node, over sockets between nodes, or over both.

    Args:
        control: the ranks, two or more; nothing else may use it.
        timeout: how long to wait for other ranks.
        kind: what the user wants, None = what is best; what cannot carry shards counts as sockets.

    Raises:
        TransportError: on all ranks, if no connection can be opened.
        CommError: the job has failed.
    """
    router = Router(control, timeout_s=NEVER_S)
    shared = router.transports.get((TransportKind.SHARED_MEMORY, Algorithm.FLAT))
    if kind in (None, TransportKind.SHARED_MEMORY) and isinstance(shared, SharedMemoryTransport):
        return _InSharedMemory(control, router, shared, timeout=timeout)
    trees = (TransportKind.GLOO, Algorithm.HIERARCHICAL) in router.transports  # nodes' memory can be shared
    if kind in (None, TransportKind.SHARED_MEMORY) and trees and control.is_homogeneous and control.in_order:
        return _OverNodes(control, router, timeout=timeout)
    return _OverSockets(control, router, timeout=timeout)


LEAST_PIECE_BYTES = 16 << 10
"""Of what one connection carries: to cut smaller pieces takes more time than to send them."""


class _Finisher(Worker):
    """A thread that does what follows when pieces have come, in the order in which they were submitted."""

    def follow(self, step: Callable[[], None]) -> Work:
        """`step` blocks until the pieces are there, and puts them away."""
        work = ThreadWork()
        self.put(partial(work.run, step, "shards could not be put away"))
        return work


class _OverSockets(ShardLanes):
    """Each piece goes straight to the rank it is for, over one of several Gloo connections between the two."""

    kind = TransportKind.GLOO

    def __init__(self, control: ControlPlane, router: Router, *, timeout: Timeout) -> None:
        super().__init__(control, router, timeout=timeout)
        self._route = (TransportKind.GLOO, Algorithm.FLAT)
        sockets = router.transports[self._route]
        assert isinstance(sockets, GlooTransport)
        self._sockets = sockets
        self.most_streams = router.max_streams([self._route])
        self._streams = 0
        self._tags = itertools.count()
        self._gathers, self._scatters = _Finisher("sirtaki-gathers"), _Finisher("sirtaki-scatters")
        self._scratch: list[torch.Tensor] = []  # of scatters that are over
        self._largest_scratch = 0
        self.use(1)

    def use(self, streams: int) -> None:
        self._router.open_streams(self._route, streams)
        self._streams = streams

    def gather(
        self, rows: Sequence[torch.Tensor], shard: torch.Tensor, *, codec: Codec | None = None, label: int = 0
    ) -> ShardWork:
        rows, mine = [row.detach() for row in rows], shard.detach()
        if codec is not None and mine.is_floating_point() and mine.numel() >= FEWEST:
            return self._gather_packed(rows, mine, codec, label)
        came = self._trade([mine] * self.control.size, rows, GATHERS, label)
        if (own := rows[self.control.rank]).data_ptr() != mine.data_ptr():
            own.copy_(mine)
        return self._under_way(self._gathers.follow(came), "gather", len(rows) * mine.numel())

    def _gather_packed(self, rows: list[torch.Tensor], mine: torch.Tensor, codec: Codec, label: int) -> ShardWork:
        values, me = mine.float(), self.control.rank
        packed = codec.pack(values)
        parcels = list(torch.empty(len(rows), packed.numel(), dtype=torch.uint8, device="cpu"))
        parcels[me] = packed
        came = self._trade([packed] * len(rows), parcels, GATHERS, label)
        if self.losses is not None:
            self.losses[0].add(values, packed, codec, mine.itemsize)

        def unpack() -> None:
            came()
            for row, parcel in zip(rows, parcels, strict=True):
                row.copy_(codec.unpack(parcel, row.numel()))

        return self._under_way(self._gathers.follow(unpack), "gather", len(rows) * mine.numel())

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
        came = self._trade(list(rows), summands, SCATTERS, label)

        def add_up() -> None:
            came()
            reduce_share(summands, 0, target.numel(), op=op, scale=scale, outputs=[target])
            self._put_scratch(memory)

        return self._under_way(self._scatters.follow(add_up), "reduce-scatter", whole.numel())

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
        came = self._trade(sent, received, SCATTERS, label)

        def add_up() -> None:
            came()
            total = torch.zeros(count, dtype=torch.float32, device="cpu")
            for other, parcel in enumerate(received):
                total += rows[me] if other == me else codec.unpack(parcel, count)
            target.copy_(total.mul_(scale))

        return self._under_way(self._scatters.follow(add_up), "reduce-scatter", len(rows) * count)

    def _take_scratch(self, size_bytes: int) -> torch.Tensor:
        """What an earlier scatter has used, if it is large enough: fresh memory costs more than what comes into it."""
        self._largest_scratch = max(self._largest_scratch, size_bytes)
        while self._scratch:
            if (memory := self._scratch.pop()).numel() >= size_bytes:
                return memory
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def _put_scratch(self, memory: torch.Tensor) -> None:
        """A scatter is over: what it has used is left for others, but no more than the largest one needs."""
        if sum(one.numel() for one in self._scratch) + memory.numel() <= self._largest_scratch:
            self._scratch.append(memory)

    def _trade(
        self, sent: list[torch.Tensor], received: list[torch.Tensor], kind: StreamSpec, label: int
    ) -> Callable[[], None]:
        """Sends `sent[r]` to each other rank r and receives `received[r]` from it; the result waits for that."""
        numel = sent[0].numel()
        pieces = max(1, min(self._streams, numel * sent[0].itemsize // LEAST_PIECE_BYTES))
        bounds = [numel * piece // pieces for piece in range(pieces + 1)]
        waits = []
        for start, stop in itertools.pairwise(bounds):
            number = next(self._tags)
            # A piece of another length or label is another message, for which nobody waits: no rank writes behind its
            # memory, or takes one module's numbers for another's.
            tag = (number * 8191 + numel + (2 * label + kind.number) * 524287) % MOST_TAGS
            if start < stop:
                parts = [[row[start:stop] for row in rows] for rows in (sent, received)]
                waits.append(self._sockets.trade(*parts, stream=number % self._streams, tag=tag))

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def close(self) -> None:
        super().close()  # which ends what threads wait for
        # Of a thread that comes back from there while the interpreter ends PyTorch makes the end of the process.
        ended([self._gathers, self._scatters], within_s=END_S)


SLOTS = 2
"""In shared memory, of either kind: one is read while the next one is filled."""

MARK_BYTES = 16
"""At the end of a slot: how many bytes it holds, negative = they lie in the whole tensor that all ranks share; and the
label of what they are."""

WHOLES = 4
"""Whole tensors that the ranks share at the same time: as many gathers may be ahead of what is used."""

RELEASE_S = 0.05
"""How long to wait until the others have let go of one, before memory of this rank's own is taken instead."""


class _Slots:
    """Memory of each rank that the others of the node see, for operations of one kind, one after the other."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._slots: list[FlatBuffer] = []
        self._works: list[ShardWork | None] = [None] * SLOTS
        self._next = 0

    def reserve(self, size_bytes: int) -> None:
        """Collective: from now on operations may be so large."""
        if not self._slots or self._slots[0].tensor.numel() - MARK_BYTES < size_bytes:
            for work in self._works:
                if work is not None:
                    work.wait()
            self._slots = []  # which frees them
            whole_bytes = (size_bytes // MARK_BYTES + 2) * MARK_BYTES
            self._slots = [self._router.allocate(whole_bytes, torch.uint8) for _ in range(SLOTS)]

    def next(self, size_bytes: int) -> FlatBuffer:
        """Collective: the slot whose turn it is, as bytes, once all ranks are through with it."""
        self.reserve(size_bytes)
        if (work := self._works[self._next]) is not None:
            work.wait()
        return self._slots[self._next]

    def fill(self, mark: int, label: int) -> FlatBuffer:
        """The slot that `next` gave, into which so much has been put."""
        slot = self._slots[self._next]
        marks = torch.tensor([mark, label], dtype=torch.int64, device="cpu")
        slot.tensor[-MARK_BYTES:].view(torch.int64).copy_(marks)
        return slot

    def taken_by(self, work: ShardWork) -> None:
        """What the slot is read for."""
        self._works[self._next] = work
        self._next = (self._next + 1) % SLOTS


class _Wholes:
    """Whole tensors that exist once for all ranks of a node: each puts its shard there, and nobody copies anything.

    The n-th gather has the n-th of them in turn, if every rank has let go of what was there. Where one has not, or what
    is gathered is larger than was reserved, a rank takes memory of its own, whatever the others do.
    """

    def __init__(self, control: ControlPlane, router: Router, size_bytes: int) -> None:
        """Collective: for whole tensors of so many bytes."""
        size_bytes = -(-size_bytes // 64) * 64
        each = -(-WHOLES // control.size)
        memory = router.allocate(each * size_bytes, torch.uint8)
        self._memory = [
            memory.peers[n % control.size][n // control.size * size_bytes :][:size_bytes].numpy() for n in range(WHOLES)
        ]
        self._released = [peer.numpy() for peer in router.allocate(WHOLES, torch.int64).peers]
        self._me, self._failures = control.rank, control.failures
        self._held: dict[int, int] = {}  # the gather that this rank holds each of them for
        self._over = [0] * WHOLES  # gathers of each of them that are over for this rank, but for the one it holds
        self.number = 0  # of the next gather

    def take(self, size_bytes: int) -> torch.Tensor | None:
        """What the next gather goes to, as bytes; None = memory of one's own. It is released when nobody holds it."""
        place, least = self.number % WHOLES, self.number - WHOLES + 1
        if place in self._held or size_bytes > len(self._memory[place]):
            return None

        def is_held() -> bool:
            return min(int(each[place]) for each in self._released) < least

        wait_for(lambda: not is_held() or self._failures.error is not None, Deadline.after(RELEASE_S))
        if is_held():
            return None
        taken = self._memory[place][:size_bytes]  # an array of its own, which the tensor's memory keeps alive
        self._held[place] = self.number
        finalize(taken, self._release, place)
        return torch.from_numpy(taken)

    def _release(self, place: int) -> None:
        self._let_go(place, self._held.pop(place) + 1)

    def _let_go(self, place: int, number: int) -> None:
        """Of all gathers before that one, unless one of them is held. Any thread calls it, at any time."""
        self._over[place] = max(self._over[place], number)
        if place not in self._held:
            self._released[self._me][place] = self._over[place]

    def next(self) -> torch.Tensor:
        """Of the next gather, which begins: where it goes, as bytes. Who has not taken it lets go of it at the end."""
        place = self.number % WHOLES
        self.number += 1
        return torch.from_numpy(self._memory[place])

    def end(self, number: int) -> None:
        """All shards of that gather have been read, by a rank that has not taken the memory."""
        self._let_go(number % WHOLES, number + 1)


class _InSharedMemory(ShardLanes):
    """Ranks of one node read what they need from memory that all of them see."""

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
        me, mine, wholes = self.control.rank, _bytes(shard), self._wholes
        rows, size_bytes, elements = [_bytes(row) for row in rows], mine.numel(), len(rows) * shard.numel()
        number = wholes.number if wholes is not None else 0
        common = wholes.next() if wholes is not None else None
        in_common = common is not None and rows[0].data_ptr() == common.data_ptr()
        slot = self._gathered.next(size_bytes)
        if not in_common:
            slot.tensor[:size_bytes].copy_(mine)
        if rows[me].data_ptr() != mine.data_ptr():
            rows[me].copy_(mine)

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
        return self._visit(self._gathered, mark, label, read, "gather", elements)

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

        return self._visit(self._scattered, _bytes(plain).numel(), label, add_up, "reduce-scatter", plain.numel())

    def _visit(
        self,
        slots: _Slots,
        mark: int,
        label: int,
        read: Callable[[Sequence[int], Sequence[torch.Tensor]], None],
        kind: str,
        elements: int,
    ) -> ShardWork:
        """Has `read` called with the marks of all ranks, and with what they have put into the slot whose turn it is."""
        slot, size_bytes = slots.fill(mark, label), abs(mark)
        problems: list[CommError] = []

        def compared() -> None:
            told = [peer[-MARK_BYTES:].view(torch.int64).tolist() for peer in slot.peers]
            marks, sizes, labels = [mark for mark, _ in told], [abs(mark) for mark, _ in told], [one for _, one in told]
            if set(sizes) != {size_bytes}:
                problems.append(
                    MismatchError(f"the ranks have submitted tensors of different sizes, in bytes: {sizes}")
                )
            elif set(labels) != {label}:
                problems.append(
                    MismatchError(
                        f"the ranks have submitted a {kind} of different tensors, by number: {labels}; one of them has "
                        "left out something that the others have not, or does it in another order"
                    )
                )
            else:
                read(marks, [peer[:size_bytes] for peer in slot.peers])

        stream = GATHERS if slots is self._gathered else SCATTERS
        work = self._under_way(self._shared.visit(compared, stream=stream), kind, elements, problems)
        slots.taken_by(work)
        return work


class _OverNodes(ShardLanes):
    """Shared memory within each node, and sockets between the ranks that have one local rank on all nodes.

    Gathers and scatters have lanes of their own, since a thread for each of them goes on where the other level ends.
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
        came = across.gather([node[place] for node in nodes], shard, codec=codec, label=label)

        def share() -> None:
            came.wait()
            for work in [within.gather(node, node[place], label=label) for node in nodes]:
                work.wait()

        return self._under_way(self._finishers[0].follow(share), "gather", len(rows) * shard.numel())

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

        def pass_on() -> None:
            for work in added:
                work.wait()
            across.scatter(sums, part, op=op, scale=scale, codec=codec, label=label).wait()

        return self._under_way(self._finishers[1].follow(pass_on), "reduce-scatter", whole.numel())

    def close(self) -> None:
        for finisher in self._finishers:
            finisher.end()
        for lanes in (*self._within, *self._across):
            lanes.close()
        super().close()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
