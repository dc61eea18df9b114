"""The interface of the communicators that carry small collectives between ranks, over MPI or over a TCP mesh.

Unless stated otherwise, operations are collective and non-blocking. All ranks call them in the same order, from one
thread at a time, and do not touch the arrays until completion. Each further thread uses a duplicate of the
communicator. An operation returns a `Test`, a function that tests for completion. The operation makes progress only
while this function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .failure import FailureBoard

Array = npt.NDArray[Any]
"""A contiguous array of a number type."""

Test = Callable[[], bool]
"""Function that advances an operation of a communicator and returns whether the operation is complete. It keeps the
operation's arrays alive. Only one thread may call it at a time."""


class Backend(Enum):
    """Library that carries the small collectives between ranks."""

    MPI = "mpi"
    MESH = "mesh"


class Op(Enum):
    """Element-wise reduction operation."""

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
"""NumPy's function for each reduction operation."""


class Communicator(Protocol):
    """An ordered set of ranks that communicate. Only one thread may use it at a time."""

    @property
    def backend(self) -> Backend:
        """Return the library that carries this communicator."""
        ...

    @property
    def rank(self) -> int:
        """Return the rank of this process in this communicator."""
        ...

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        ...

    @property
    def failures(self) -> FailureBoard:
        """Return the job's failure board, which all communicators of the job share."""
        ...

    def duplicate(self) -> Communicator:
        """Open a communicator over the same ranks, for use by another thread. Collective, may block."""
        ...

    def subset(self, ranks: Sequence[int]) -> Communicator:
        """Open a communicator whose ranks are `ranks`, in this order. Collective over `ranks`, may block."""
        ...

    def free(self) -> None:
        """Free this communicator. No operation may be in flight. Collective, may block."""
        ...

    def abort(self, reason: str, *, fault: bool = False) -> None:
        """Announce to all ranks of the job that this rank aborts, and why. Thread-safe, not collective.

        Over MPI this ends the processes of all ranks, including this one.

        Args:
            reason: text that names the rank.
            fault: True if only the rank's communication failed and its process continues. The other ranks then raise
                `PeerFaultError`.
        """
        ...

    def same_host(self) -> int:
        """Return a number that is equal on all ranks of one host. Collective, may block.

        Over a TCP mesh, ranks of different hosts also get equal numbers, because the mesh does not know the hosts.
        """
        ...

    def all_reduce(self, array: Array, op: Op) -> Test:
        """Reduce `array` over all ranks, in place. The result is bitwise equal on all ranks.

        Shape and dtype must be equal on all ranks.
        """
        ...

    def broadcast(self, array: Array, root: int) -> Test:
        """Overwrite `array` on each rank with the array of rank `root`."""
        ...

    def all_gather(self, own: Array, gathered: Array, counts: Sequence[int] | None = None) -> Test:
        """Concatenate the arrays of all ranks, by rank, and write the result into `gathered`.

        Args:
            own: array of this rank.
            gathered: result, of the same dtype.
            counts: number of elements in each rank's array. None = all arrays are equally long.
        """
        ...

    def all_to_all(
        self, sent: Array, received: Array, counts: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Test:
        """Send a part of `sent` to each rank, and receive a part from each rank.

        Args:
            sent: parts to send, contiguous, by rank.
            received: result, of the same dtype: received parts, contiguous, by rank.
            counts: number of elements of each part, as (sent, received). None = all parts are equal.
        """
        ...

    def reduce_scatter(self, array: Array, part: Array, counts: Sequence[int], op: Op) -> Test:
        """Reduce a 1-d array over all ranks, and store this rank's part of the result in `part`.

        Args:
            array: values of this rank.
            part: result, `counts[rank]` elements.
            counts: number of elements of each rank's part.
            op: reduction operation.
        """
        ...

    def barrier(self) -> Test:
        """Start a barrier. It completes once all ranks have called it."""
        ...

    def send(self, array: Array, rank: int) -> Test:
        """Send `array` to `rank`, which must call `receive`. Messages arrive in order. Not collective."""
        ...

    def receive(self, array: Array, rank: int) -> Test:
        """Overwrite `array` with the next array that `rank` sends by `send`. Not collective."""
        ...

    def post(self, rank: int, tag: int, message: bytes) -> None:
        """Send a short message, which the receiver reads by `collect`. Not collective.

        Any thread may call it, but `post` and `collect` must not run at the same time.
        """
        ...

    def collect(self) -> tuple[int, int, bytes] | None:
        """Return the next message sent by `post`, as (source rank, tag, message). None if none has arrived.

        Messages of one source keep their order. Not collective. Any thread may call it, but `post` and `collect` must
        not run at the same time.
        """
        ...
