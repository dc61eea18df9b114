"""A communicator over the mesh: a context, whose number stands in each of its frames."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from sirtaki.comm.control.communicator import Array, Backend, Op, Test

from . import collectives
from .collectives import Steps
from .connection import Sending
from .frames import Kind
from .links import MESH, Links
from .mailbox import DIRECT_BYTES

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
        """See `Communicator`; takes no message."""
        return self._derived("duplicate", self._members)

    def subset(self, ranks: Sequence[int]) -> MeshCommunicator:
        """See `Communicator`; takes no message."""
        return self._derived(f"of {','.join(map(str, ranks))}", [self._members[rank] for rank in ranks])

    def _derived(self, how: str, members: Sequence[int]) -> MeshCommunicator:
        self._opened[how] += 1
        return MeshCommunicator(self._links, members, _number(f"{self._context} {how} {self._opened[how]}"))

    def free(self) -> None:
        """See `Communicator`; takes no message, but with the communicator of all ranks the mesh ends."""
        if self._context == WORLD:
            self._links.close()
        self._links.free(self._context)

    def abort(self, reason: str) -> None:
        """Tells all ranks of the mesh that this one ends, and why."""
        self._links.abort(reason)

    def same_host(self) -> int:
        """See `Communicator`: nothing is known."""
        return 0

    # ── operations ───────────────────────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, array: Array, op: Op) -> Test:
        """See `Communicator`."""
        return self._begin(collectives.all_reduced(self._next(), array.reshape(-1), op))

    def broadcast(self, array: Array, root: int) -> Test:
        """See `Communicator`."""
        return self._begin(collectives.broadcast(self._next(), array, root))

    def all_gather(self, mine: Array, gathered: Array, counts: Sequence[int] | None = None) -> Test:
        """See `Communicator`."""
        counts = [mine.size] * self.size if counts is None else counts
        whole, begin = gathered.reshape(-1), sum(counts[: self.rank])
        whole[begin : begin + mine.size] = mine.reshape(-1)
        return self._begin(collectives.gathered(self._next(), whole, counts))

    def all_to_all(
        self, sent: Array, received: Array, counts: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Test:
        """See `Communicator`."""
        counts = ([sent.size // self.size] * self.size,) * 2 if counts is None else counts
        return self._begin(collectives.all_to_all(self._next(), sent.reshape(-1), received.reshape(-1), counts))

    def reduce_scatter(self, array: Array, part: Array, counts: Sequence[int], op: Op) -> Test:
        """See `Communicator`."""
        return self._begin(collectives.reduce_scattered(self._next(), array, part, counts, op))

    def barrier(self) -> Test:
        """See `Communicator`."""
        return self._begin(collectives.disseminated(self._next(), np.empty(0, dtype=np.uint8), Op.AND))

    def send(self, array: Array, rank: int) -> Test:
        """See `Communicator`."""
        return self._begin(collectives.sent(_Exchange(self, 0).send(array, rank)))

    def receive(self, array: Array, rank: int) -> Test:
        """See `Communicator`."""
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
        """See `Communicator`."""
        if rank == self.rank:
            self._mailbox.posts.append((self._links.rank, tag, message))
            return
        self._links.send(
            self._members[rank], Kind.POST, memoryview(message), context=self._context, sequence=0, tag=tag
        )

    def collect(self) -> tuple[int, int, bytes] | None:
        """See `Communicator`."""
        posts = self._mailbox.posts
        if not posts:
            self._links.progress()
            if not posts:
                return None
        source, tag, message = posts.popleft()
        return self._members.index(source), tag, message


class _Exchange:
    """See `Exchange`."""

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
