"""The control plane over TCP: a communicator whose collective operations run over the links of a mesh.

An operation is a generator of steps, which yields while something has not come yet; with short messages it takes ⌈log₂
size⌉ rounds for any number of ranks. Dissemination (Hensgen, Finkel, Manber 1988) serves the barrier and what may be
counted twice, Bruck's concatenation (Bruck et al. 1997) gathering, a binomial tree broadcasts, recursive doubling sums
over 2ⁿ ranks. All ranks end with the same bits: sums are taken in one order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .communicator import Array, Backend, Op, Test
from .mesh_links import DIRECT_BYTES, MESH, Kind, Links, Sending

SHORT_BYTES = 32 * 1024
"""Up to here a round counts for more than the bytes in it."""

UFUNCS: dict[Op, np.ufunc] = {
    Op.AND: np.bitwise_and,
    Op.MINIMUM: np.minimum,
    Op.MAXIMUM: np.maximum,
    Op.SUM: np.add,
    Op.PRODUCT: np.multiply,
}

IDEMPOTENT = frozenset({Op.AND, Op.MINIMUM, Op.MAXIMUM})
"""A value that is counted twice changes nothing."""

Steps = Iterator[None]
Bytes = npt.NDArray[np.uint8]


class Exchange(Protocol):
    """One operation's messages with the other ranks of its communicator."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def send(self, array: Array, rank: int) -> Sending:
        """Sends it; it is in use until the sending is done."""
        ...

    def receive(self, array: Array, rank: int) -> Steps:
        """Fills it with the next message of that rank."""
        ...


def until_sent(*sendings: Sending) -> Steps:
    """Until all of them have left."""
    for sending in sendings:
        while not sending.done:
            yield


def disseminate(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce of a short array by an idempotent operation; of an empty one: a barrier."""
    other, distance = np.empty_like(array), 1
    while distance < exchange.size:
        sending = exchange.send(array, (exchange.rank + distance) % exchange.size)
        yield from exchange.receive(other, (exchange.rank - distance) % exchange.size)
        yield from until_sent(sending)
        UFUNCS[op](array, other, out=array)
        distance *= 2


def double(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce of a short array over 2ⁿ ranks: partners compute the same."""
    other, distance = np.empty_like(array), 1
    while distance < exchange.size:
        partner = exchange.rank ^ distance
        sending = exchange.send(array, partner)
        yield from exchange.receive(other, partner)
        yield from until_sent(sending)
        UFUNCS[op](array, other, out=array)
        distance *= 2


def gather(exchange: Exchange, whole: Array, counts: Sequence[int]) -> Steps:
    """Bruck's concatenation: `whole` holds this rank's part already, the others' come; `counts` elements a rank."""
    rank, size, have = exchange.rank, exchange.size, 1
    begin = [0, *accumulate(counts)]

    def parts(first: int, number: int) -> list[Array]:
        """The parts of so many ranks from `first` on, which may wrap around."""
        over = max(0, first + number - size)
        pieces = [whole[begin[first] : begin[first + number - over]]]
        return pieces if not over else [*pieces, whole[: begin[over]]]

    while have < size:
        number = min(have, size - have)
        sendings = [exchange.send(part, (rank - have) % size) for part in parts(rank, number)]
        for part in parts((rank + have) % size, number):
            yield from exchange.receive(part, (rank + have) % size)
        yield from until_sent(*sendings)
        have += number


def gather_and_reduce(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce of a short array: everybody gathers all, and reduces them in the order of ranks."""
    everything = np.empty((exchange.size, array.size), dtype=array.dtype)
    everything[exchange.rank] = array
    yield from gather(exchange, everything.reshape(-1), [array.size] * exchange.size)
    UFUNCS[op].reduce(everything, axis=0, out=array)


def reduce_scatter(exchange: Exchange, array: Array, part: Array, counts: Sequence[int], op: Op) -> Steps:
    """Each rank sends each other its part, and reduces what it gets in the order of ranks."""
    begin, rank, size = [0, *accumulate(counts)], exchange.rank, exchange.size
    sendings = [
        exchange.send(array[begin[other] : begin[other + 1]], other)
        for other in ((rank + distance) % size for distance in range(1, size))
    ]
    theirs = np.empty_like(part)
    for other in range(size):
        target = part if other == 0 else theirs
        if other == rank:
            target[...] = array[begin[rank] : begin[rank + 1]]
        else:
            yield from exchange.receive(target, other)
        if other:
            UFUNCS[op](part, theirs, out=part)
    yield from until_sent(*sendings)


def reduce_in_parts(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce of a long array: each rank reduces a part, and all gather the parts."""
    low, more = divmod(array.size, exchange.size)
    counts = [low + (rank < more) for rank in range(exchange.size)]
    part = np.empty(counts[exchange.rank], dtype=array.dtype)
    yield from reduce_scatter(exchange, array, part, counts, op)
    begin = sum(counts[: exchange.rank])
    array[begin : begin + part.size] = part
    yield from gather(exchange, array, counts)


def all_reduce(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce of a 1-d array, in the way that suits its length."""
    size = exchange.size
    if array.nbytes <= SHORT_BYTES:
        if op in IDEMPOTENT:
            return disseminate(exchange, array, op)
        if size & (size - 1) == 0:
            return double(exchange, array, op)
        if array.nbytes * size <= SHORT_BYTES:
            return gather_and_reduce(exchange, array, op)
    return reduce_in_parts(exchange, array, op)


def broadcast(exchange: Exchange, array: Array, root: int) -> Steps:
    """Along a binomial tree."""
    size = exchange.size
    place = (exchange.rank - root) % size
    distance = 1
    while distance < size and not place & distance:
        distance *= 2
    if place:
        yield from exchange.receive(array, (place - distance + root) % size)
    sendings = []
    while distance > 1:
        distance //= 2
        if place + distance < size:
            sendings.append(exchange.send(array, (place + distance + root) % size))
    yield from until_sent(*sendings)


def all_to_all(exchange: Exchange, given: Array, received: Array, counts: tuple[Sequence[int], Sequence[int]]) -> Steps:
    """Each rank sends each other its part."""
    rank, size = exchange.rank, exchange.size
    give, take = ([0, *accumulate(each)] for each in counts)
    sendings = []
    for distance in range(1, size):
        other = (rank + distance) % size
        sendings.append(exchange.send(given[give[other] : give[other + 1]], other))
    received[take[rank] : take[rank + 1]] = given[give[rank] : give[rank + 1]]
    for distance in range(1, size):
        other = (rank - distance) % size
        yield from exchange.receive(received[take[other] : take[other + 1]], other)
    yield from until_sent(*sendings)


WORLD = MESH + 1
"""The context of all ranks."""


class MeshCommunicator:
    """See `Communicator`.

    Numbers of contexts follow from where they stem from, so that opening one takes no message, and ranks outside of it
    need not know of it. A context belongs to one mesh, and ends with it.
    """

    backend = Backend.MESH

    def __init__(self, links: Links, members: Sequence[int] | None = None, context: int = WORLD) -> None:
        """Of these ranks of the mesh, this one among them.

        Args:
            links: the connections, which end with the communicator of all ranks.
            members: by their rank here, their rank in the mesh; None = all.
            context: its number, the same on all members, and no other's.
        """
        self._links, self._context = links, context
        self._members = tuple(range(links.size) if members is None else members)
        self.rank, self.size = self._members.index(links.rank), len(self._members)
        self.failures = links.failures
        self._mailbox = links.open(context)
        self._sequence = 0
        self._opened: Counter[str] = Counter()

    def duplicate(self) -> MeshCommunicator:
        """The same ranks under a number of their own, which all of them compute: takes no message."""
        return self._derived("duplicate", self._members)

    def subset(self, ranks: Sequence[int]) -> MeshCommunicator:
        """Those ranks under a number of their own, which all of them compute: takes no message."""
        return self._derived(f"of {','.join(map(str, ranks))}", [self._members[rank] for rank in ranks])

    def _derived(self, how: str, members: Sequence[int]) -> MeshCommunicator:
        self._opened[how] += 1
        return MeshCommunicator(self._links, members, _number(f"{self._context} {how} {self._opened[how]}"))

    def free(self) -> None:
        """Forgets it without a message; with the communicator of all ranks the mesh ends."""
        if self._context == WORLD:
            self._links.close()
        self._links.free(self._context)

    def abort(self, reason: str) -> None:
        """Tells all ranks of the mesh that this one ends, and why."""
        self._links.abort(reason)

    def same_host(self) -> int:
        """Equal on all ranks: a mesh knows nothing of hosts."""
        return 0

    # ── operations ───────────────────────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, array: Array, op: Op) -> Test:
        """Begins it, by the algorithm that suits the size and the number of ranks."""
        return self._begin(all_reduce(self._next(), array.reshape(-1), op))

    def broadcast(self, array: Array, root: int) -> Test:
        """Begins it: from `root`, over those that have it."""
        return self._begin(broadcast(self._next(), array, root))

    def all_gather(self, mine: Array, gathered: Array, counts: Sequence[int] | None = None) -> Test:
        """Puts this rank's part in its place and begins to fill the others'."""
        counts = [mine.size] * self.size if counts is None else counts
        whole, begin = gathered.reshape(-1), sum(counts[: self.rank])
        whole[begin : begin + mine.size] = mine.reshape(-1)
        return self._begin(gather(self._next(), whole, counts))

    def all_to_all(
        self, sent: Array, received: Array, counts: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Test:
        """Begins to give each rank its part."""
        counts = ([sent.size // self.size] * self.size,) * 2 if counts is None else counts
        return self._begin(all_to_all(self._next(), sent.reshape(-1), received.reshape(-1), counts))

    def reduce_scatter(self, array: Array, part: Array, counts: Sequence[int], op: Op) -> Test:
        """Begins to reduce towards each rank's part."""
        return self._begin(reduce_scatter(self._next(), array, part, counts, op))

    def barrier(self) -> Test:
        """Begins it: ranks tell each other that they have come."""
        return self._begin(disseminate(self._next(), np.empty(0, dtype=np.uint8), Op.AND))

    def send(self, array: Array, rank: int) -> Test:
        """Begins to send; it matches the `receive` of that rank, in the order of calls."""
        return self._begin(until_sent(_Exchange(self, 0).send(array, rank)))

    def receive(self, array: Array, rank: int) -> Test:
        """Begins to receive from that rank what it sends next."""
        return self._begin(_Exchange(self, 0).receive(array, rank))

    def _next(self) -> _Exchange:
        self._sequence = self._sequence % 0xFFFFFFFF + 1  # 0 is what is not collective
        return _Exchange(self, self._sequence)

    def _begin(self, steps: Steps) -> Test:
        """Takes the first steps, which do not wait for anyone."""
        done = next(steps, True) is True
        progress = self._links.progress

        def test() -> bool:
            nonlocal done
            if not done:
                progress()
                done = next(steps, True) is True
            return done

        return test

    # ── short messages ───────────────────────────────────────────────────────────────────────────────────────────

    def post(self, rank: int, tag: int, message: bytes) -> None:
        """Sends a short message behind what is on its way to that rank; to itself, puts it into its own mailbox."""
        if rank == self.rank:
            self._mailbox.posts.append((self._links.rank, tag, message))
            return
        self._links.send(
            self._members[rank], Kind.POST, memoryview(message), context=self._context, sequence=0, tag=tag
        )

    def collect(self) -> tuple[int, int, bytes] | None:
        """The next short message in the mailbox, with its source and tag; looks at the links once if there is none."""
        posts = self._mailbox.posts
        if not posts:
            self._links.progress()
            if not posts:
                return None
        source, tag, message = posts.popleft()
        return self._members.index(source), tag, message


class _Exchange:
    """The messages of one operation of a communicator, told from those of others by its number."""

    def __init__(self, communicator: MeshCommunicator, sequence: int) -> None:
        self._comm, self._sequence = communicator, sequence
        self.rank, self.size = communicator.rank, communicator.size

    def send(self, array: Array, rank: int) -> Sending:
        comm = self._comm
        return comm._links.send(
            comm._members[rank], Kind.DATA, _view(array), context=comm._context, sequence=self._sequence, tag=0
        )

    def receive(self, array: Array, rank: int) -> Steps:
        inbox, view = self._comm._mailbox.inbox(self._comm._members[rank]), _view(array)
        if len(view) <= DIRECT_BYTES:
            yield from inbox.receive(view, self._sequence)
            return
        with self._comm._links.reading:
            wanted = inbox.post(view, self._sequence)
        while wanted.filled < len(view):
            yield


def _view(array: Array) -> memoryview:
    """The bytes of a contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # NumPy's stub of 3.11


def _number(origin: str) -> int:
    """64 bits, so that no two contexts of a mesh have one number."""
    number = int.from_bytes(hashlib.blake2b(origin.encode(), digest_size=8).digest(), "little")
    return max(number, WORLD + 1)
