"""What the control plane asks of those who carry it: a communicator, of which there are two kinds.

All operations are non-blocking and collective unless they say otherwise: every rank of a communicator calls them in the
same order, from one thread at a time, and leaves their arrays alone until they are complete. Threads that talk on their
own get a duplicate each. An operation moves on while somebody tests it, and only then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .failure import FailureBoard

Array = npt.NDArray[Any]
"""Contiguous, of a number type: what travels has no other form."""

Test = Callable[[], bool]
"""Moves an operation on and says whether it is complete: for `wait_for`, one thread at a time; keeps the arrays."""


class Backend(Enum):
    """What carries the control plane."""

    MPI = "mpi"
    MESH = "mesh"


class Op(Enum):
    """How arrays of several ranks become one, element by element."""

    AND = "and"
    MINIMUM = "min"
    MAXIMUM = "max"
    SUM = "sum"
    PRODUCT = "product"


UFUNCS: dict[Op, np.ufunc] = {
    Op.AND: np.bitwise_and,
    Op.MINIMUM: np.minimum,
    Op.MAXIMUM: np.maximum,
    Op.SUM: np.add,
    Op.PRODUCT: np.multiply,
}
"""The same operations of NumPy."""


class Communicator(Protocol):
    """Some ranks of a job, for one thread at a time."""

    @property
    def backend(self) -> Backend:
        """What carries it."""
        ...

    @property
    def rank(self) -> int:
        """This process among the ranks of this communicator."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def failures(self) -> FailureBoard:
        """Where the loss of the job is reported; one for all communicators that stem from one."""
        ...

    def duplicate(self) -> Communicator:
        """Collective, may block: the same ranks, for another thread."""
        ...

    def subset(self, ranks: Sequence[int]) -> Communicator:
        """Collective over `ranks` alone, may block: those, numbered in the order given."""
        ...

    def free(self) -> None:
        """Collective, may block: ends it. Nothing may be under way."""
        ...

    def abort(self, reason: str, *, fault: bool = False) -> None:
        """Not collective, from any thread: this rank ends for good, which all of the job are told with the reason.

        MPI ends their processes, this one among them.

        Args:
            reason: names the rank.
            fault: the rank does not leave, but its communication has failed (`PeerFaultError`).
        """
        ...

    def same_host(self) -> int:
        """Collective, may block: equal on ranks that the backend takes for one host's; maybe on others, too."""
        ...

    def all_reduce(self, array: Array, op: Op) -> Test:
        """Replaces `array`, of one shape and dtype on all ranks, by the reduction over ranks: the same bits on each."""
        ...

    def broadcast(self, array: Array, root: int) -> Test:
        """Fills `array` with that of `root`."""
        ...

    def all_gather(self, mine: Array, gathered: Array, counts: Sequence[int] | None = None) -> Test:
        """Fills `gathered`, of `mine`'s dtype, with the arrays of all ranks, one after the other.

        Args:
            mine: of this rank.
            gathered: as many elements as all ranks have.
            counts: elements of each rank; None = all have as many.
        """
        ...

    def all_to_all(
        self, sent: Array, received: Array, counts: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Test:
        """Gives each rank a part of `sent`, and fills `received` with the parts that the others give.

        Args:
            sent: the parts, by rank.
            received: of the same dtype; the others' parts, by rank.
            counts: elements of each part, (sent, received); None = all are equal.
        """
        ...

    def reduce_scatter(self, array: Array, part: Array, counts: Sequence[int], op: Op) -> Test:
        """Fills `part` with this rank's part of the reduction of 1-d `array`, which is cut into `counts`."""
        ...

    def barrier(self) -> Test:
        """Completes once all ranks have come."""
        ...

    def send(self, array: Array, rank: int) -> Test:
        """Not collective: to the `receive` of another rank, in the order of calls."""
        ...

    def receive(self, array: Array, rank: int) -> Test:
        """Not collective: fills `array` with what `rank` sends."""
        ...

    def post(self, rank: int, tag: int, message: bytes) -> None:
        """Not collective, from any thread but one at a time: a short message, read when its receiver looks."""
        ...

    def collect(self) -> tuple[int, int, bytes] | None:
        """The next message that was posted to this rank, (source, tag, message), those of one source in order.

        Not collective, from any thread but one at a time with `post`; None if none has come.
        """
        ...
