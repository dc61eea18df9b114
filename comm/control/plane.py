"""The control plane: who the ranks are, and the small things they agree on, over whatever communicator there is.

Also aligns the clocks of the ranks, so that events of all of them can stand on one time axis: each rank asks rank 0 for
the time a few times and believes the answer that came quickest, which was made about half way (Cristian 1989) and is
wrong by half of the round trip at most.
"""

from __future__ import annotations

import copy
import datetime
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sirtaki.errors import CommError, ConfigError, MismatchError, SirtakiError, TransportError
from sirtaki.machine import LOOPBACK, allowed_processors, host_identity, own_addresses, serve_store

from .communicator import Backend, Communicator, Op, Test
from .failure import FailureBoard
from .waiting import Deadline, retry, unless_failed, wait_for

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

QUESTIONS = 16


class ClockOffset(NamedTuple):
    """What must be added to this rank's clock to get rank 0's, and the quickest round trip that showed it."""

    offset_s: float
    round_trip_s: float


def offset_from(answers: Sequence[tuple[float, float, float]]) -> float:
    """What must be added to this clock to get the other one.

    Args:
        answers: (asked_s, answer_s, received_s): this clock, the other clock, this clock.
    """
    asked_s, answer_s, received_s = min(answers, key=lambda answer: answer[2] - answer[0])
    offset_s = answer_s - (asked_s + received_s) / 2
    # Processes of one host have one clock; what cannot be told from no difference is none.
    return 0.0 if abs(offset_s) <= (received_s - asked_s) / 2 else offset_s


def compare_clocks(control: ControlPlane, *, now_s: Callable[[], float] = time.perf_counter) -> ClockOffset:
    """Collective: how far this rank's clock is from rank 0's.

    Args:
        control: the ranks.
        now_s: this rank's clock.
    """
    answers = []
    comm, question, answer = control.comm, np.zeros(1), np.zeros(1)
    wait = partial(wait_for, failures=control.failures)
    for rank in range(1, control.size):
        for _ in range(QUESTIONS):
            if control.rank == 0:
                wait(comm.receive(question, rank))
                answer[0] = now_s()
                wait(comm.send(answer, rank))
            elif control.rank == rank:
                asked_s = now_s()
                wait(comm.send(question, 0))
                wait(comm.receive(answer, 0))
                answers.append((asked_s, float(answer[0]), now_s()))
    if not answers:
        return ClockOffset(0.0, 0.0)
    quickest_s = min(received_s - asked_s for asked_s, _, received_s in answers)
    return ClockOffset(offset_from(answers), quickest_s)


def align_clocks(control: ControlPlane) -> float:
    """Collective: what must be added to this rank's clock to get rank 0's, which begins at zero here."""
    offset_s = compare_clocks(control).offset_s
    origin_s: float = control.broadcast(time.perf_counter() if control.rank == 0 else None)
    return offset_s - origin_s


_FIRST_BYTES, _LENGTH_BYTES = 256, 8
"""What every rank sends at first: the length of its value, and the value if there is room, as there mostly is."""


def gather(value: Any, *, comm: Communicator) -> list[Any]:
    """Collective: the picklable values of all ranks, by rank.

    Raises:
        CommError: the job failed meanwhile.
    """
    data = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    mine, firsts = np.zeros(_FIRST_BYTES, dtype=np.uint8), np.empty((comm.size, _FIRST_BYTES), dtype=np.uint8)
    mine[:_LENGTH_BYTES].view(np.int64)[0] = data.size
    mine[_LENGTH_BYTES : _LENGTH_BYTES + data.size] = data[: _FIRST_BYTES - _LENGTH_BYTES]
    wait_for(comm.all_gather(mine, firsts), failures=comm.failures)
    lengths = np.ascontiguousarray(firsts[:, :_LENGTH_BYTES]).view(np.int64)[:, 0]
    if lengths.max() <= _FIRST_BYTES - _LENGTH_BYTES:
        return [
            pickle.loads(first[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
            for first, length in zip(firsts, lengths, strict=True)
        ]
    gathered = np.empty(int(lengths.sum()), dtype=np.uint8)
    wait_for(comm.all_gather(data, gathered, lengths.tolist()), failures=comm.failures)
    ends = np.cumsum(lengths)
    return [pickle.loads(gathered[end - length : end].tobytes()) for end, length in zip(ends, lengths, strict=True)]


def _like(rank: int, marks: Sequence[int]) -> list[int]:
    """The ranks that have the same mark as `rank`, ascending."""
    return [other for other, mark in enumerate(marks) if mark == marks[rank]]


LIMIT_S = 300.0
"""How long a store is waited for, at its opening and for each answer."""

CONNECT_TIMEOUT_S, CONNECTIONS = 3.0, 3
ATTEMPT_S, AGAIN_S = 1.0, 0.05
"""How long one attempt to connect goes on, which hears of no failure, and when the next one follows."""


@dataclass(slots=True)
class _Rendezvous:
    """The key-value store that rank 0 serves, of a control plane and all its scopes; opened once.

    Attributes:
        store: None as long as it is not open.
        own_address: of this host, at which the others reach it.
        round_trip_s: of the network between rank 0 and the rank that is farthest from it.
        prefixes: how many groups have met here.
    """

    store: TCPStore | None = None
    own_address: str = LOOPBACK
    round_trip_s: float = 0.0
    prefixes: int = 0


def reach(candidates: Sequence[str], port: int) -> tuple[str, str, float]:
    """The first candidate that answers at `port`, the address of this host as that one sees it, and the round trip.

    A connection is made when one packet has gone there and one has come back, for which nobody's process has to run.

    Raises:
        CommError: none answers.
    """
    tried = []
    for candidate in candidates:
        try:
            round_trips_s = []
            for _ in range(CONNECTIONS):
                begin_s = time.perf_counter()
                with socket.create_connection((candidate, port), timeout=CONNECT_TIMEOUT_S) as connection:
                    round_trips_s.append(time.perf_counter() - begin_s)
                    own_address = connection.getsockname()[0]
            return candidate, own_address, min(round_trips_s)
        except OSError as err:
            tried.append(f"{candidate}:{port} ({err})")
    raise CommError(
        f"rank 0 cannot be reached at {', '.join(tried) or 'any address'}; "
        "name the interface that joins the hosts in SIRTAKI_GLOO_IFACE"
    )


def connect_to_store(host: str, port: int, *, failures: FailureBoard) -> TCPStore:
    """Another process's store. It may end while this one connects, for which PyTorch would wait until the time is up.

    Raises:
        RuntimeError: it cannot be reached.
        CommError: the job has failed.
    """
    from torch._C._distributed_c10d import TCPStore

    def connect() -> TCPStore:
        attempt_limit = datetime.timedelta(seconds=ATTEMPT_S)
        store = retry(
            lambda: TCPStore(host, port, is_master=False, timeout=attempt_limit),
            RuntimeError,
            Deadline.after(LIMIT_S),
            failures=failures,
        )
        store.set_timeout(datetime.timedelta(seconds=LIMIT_S))
        return store

    # An attempt also waits for a store that accepts it and never answers, as that of a stopped process, without limit.
    return unless_failed(connect, failures=failures, undo=lambda _: None)


class ControlPlane:
    """The ranks of one job, or of a subset of it.

    Every method that talks to other ranks is collective: every rank calls it in the same order, from the same
    thread. Threads that talk on their own get a communicator of their own from `duplicate`.

    Attributes:
        rank, size: this process among all.
        local_rank, local_size: among those of its node.
        cross_rank, cross_size: its node among those nodes that have a rank with this local rank.
        local_sizes: ranks on its node, by rank.
        in_order: the ranks of each node have numbers one after the other.
        host_names: for showing only, by rank: two hosts may have one name.
        hosts: the lowest rank on its host, by rank; equal exactly if the host is. Simulated nodes do not count.
        node_ranks: the ranks of this node by local rank.
        failures: where a lost job is reported.
    """

    def __init__(self, comm: Communicator, *, local_size: int | None = None, interface: str | None = None) -> None:
        """Collective over `comm`, of which a duplicate is kept.

        Args:
            comm: the ranks of this job.
            local_size: pretend that nodes hold this many consecutive ranks (to test several nodes on one host).
            interface: network interface to offer to other hosts, None = find one.
        """
        self.failures = comm.failures
        self._interface = interface
        self._comm = comm.duplicate()
        self.rank, self.size = self._comm.rank, self._comm.size
        if local_size is not None and self.size % local_size:
            raise ConfigError(f"SIRTAKI_LOCAL_SIZE={local_size} does not divide the {self.size} ranks")
        self.host_names: list[str] = self.all_gather(socket.gethostname())
        identities = self.all_gather((self._comm.same_host(), *host_identity()))
        self.hosts = [identities.index(identity) for identity in identities]
        if self.hosts.count(self.hosts[self.rank]) > len(allowed_processors()):
            self.failures.oversubscribed = True
        nodes = self.hosts if local_size is None else [rank // local_size for rank in range(self.size)]
        self.node_ranks = _like(self.rank, nodes)
        self.local_rank, self.local_size = self.node_ranks.index(self.rank), len(self.node_ranks)
        self.local_sizes = [nodes.count(node) for node in nodes]
        self.in_order = nodes == sorted(nodes)
        across = _like(self.rank, [_like(rank, nodes).index(rank) for rank in range(self.size)])
        self.cross_rank, self.cross_size = across.index(self.rank), len(across)
        self.node, self.cross = self._comm.subset(self.node_ranks), self._comm.subset(across)
        self._rendezvous = _Rendezvous()
        self._owned: list[Communicator] = []
        self._scopes: list[ControlPlane] = []
        self._close_together: Callable[[], None] | None = None  # of a scope: set once this rank has released it

    @property
    def backend(self) -> Backend:
        """What carries it."""
        return self._comm.backend

    @property
    def is_homogeneous(self) -> bool:
        """Every node holds the same number of ranks."""
        return len(set(self.local_sizes)) == 1

    @property
    def one_node(self) -> bool:
        """All ranks are on one node (a simulated node counts)."""
        return self.local_size == self.size

    @property
    def comm(self) -> Communicator:
        """The communicator of this control plane, for the calling thread of the collective methods only."""
        return self._comm

    def duplicate(self) -> Communicator:
        """Collective: a communicator over the same ranks for one thread; freed by `close`."""
        comm = self._comm.duplicate()
        self._owned.append(comm)
        return comm

    def duplicate_cross(self) -> Communicator:
        """Collective: like `duplicate`, over the ranks of all nodes that have this rank's local rank."""
        comm = self.cross.duplicate()
        self._owned.append(comm)
        return comm

    def of_subset(self, comm: Communicator) -> ControlPlane:
        """Collective over `comm`: the control plane of some of these ranks, which shares their fate."""
        return ControlPlane(comm, interface=self._interface)

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
            offer = self._serve() if self.rank == 0 else None
            found: tuple[list[str], int] | SirtakiError = self.broadcast(offer)
            if isinstance(found, SirtakiError):
                raise found
            problem, round_trip_s = "", 0.0
            if self.rank != 0:
                try:
                    server, there.own_address, round_trip_s = reach(*found)
                    there.store = connect_to_store(server, found[1], failures=self.failures)
                except (CommError, OSError, RuntimeError) as err:
                    problem = str(err)
            self.agree_on_success(problem)
            there.round_trip_s = float(self.maximum(np.array([round_trip_s]))[0])
        assert there.store is not None
        return there.store, there.own_address

    @property
    def round_trip_s(self) -> float:
        """Seconds for a packet from the rank farthest from rank 0 to it and back; 0.0 until `store` has been called."""
        return self._rendezvous.round_trip_s

    def _serve(self) -> tuple[list[str], int] | SirtakiError:
        """Opens the store here; addresses of which one is to be reached and the port, or why there is none."""
        there, limit = self._rendezvous, datetime.timedelta(seconds=LIMIT_S)
        try:
            addresses = [LOOPBACK] if len(set(self.hosts)) == 1 else own_addresses(self._interface)
            there.store = serve_store(addresses[0] if len(addresses) == 1 else "0.0.0.0", timeout=limit)
        except ConfigError as err:
            return err
        except (OSError, RuntimeError) as err:
            return TransportError(f"rank 0 cannot open a store: {err}")
        there.own_address = addresses[0] if addresses else LOOPBACK
        return addresses, there.store.port

    def next_prefix(self) -> str:
        """A store prefix that no earlier process group has used; the same on all ranks if called in step."""
        self._rendezvous.prefixes += 1
        return f"sirtaki/{self._rendezvous.prefixes}"

    def all_gather(self, value: Any) -> list[Any]:
        """Collective: the picklable values of all ranks, by rank."""
        return gather(value, comm=self._comm)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Collective: the root's picklable value, on every rank."""
        data = np.frombuffer(pickle.dumps(value), dtype=np.uint8).copy() if self.rank == root else None
        length = np.array([0 if data is None else data.size], dtype=np.int64)
        self._wait(self._comm.broadcast(length, root))
        if data is None:
            data = np.empty(int(length[0]), dtype=np.uint8)
        self._wait(self._comm.broadcast(data, root))
        return value if self.rank == root else pickle.loads(data.tobytes())

    def minimum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Collective: the element-wise minimum over ranks of a small array."""
        return self._reduce(values, Op.MINIMUM)

    def maximum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Collective: the element-wise maximum over ranks of a small array."""
        return self._reduce(values, Op.MAXIMUM)

    def total(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Collective: the element-wise sum over ranks of a small array."""
        return self._reduce(values, Op.SUM)

    def _reduce(self, values: npt.NDArray[np.float64], op: Op) -> npt.NDArray[np.float64]:
        result = values.copy()
        self._wait(self._comm.all_reduce(result, op))
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
        self._wait(self._comm.barrier())

    def _wait(self, test: Test) -> None:
        wait_for(test, failures=self.failures)

    def close(self) -> None:
        """Collective: frees the communicators; the one that it was made of stays."""
        self.reclaim()  # what is left is still in use by a thread somewhere
        self._free_owned()
        for comm in (self.cross, self.node, self._comm):
            comm.free()
        self._rendezvous.store = None

    def abandon(self) -> None:
        """Not collective, over a mesh that has failed: gives up what belongs to this rank."""
        self._scopes.clear()
        self._owned.clear()
        self._rendezvous.store = None

    def _free_owned(self) -> None:
        for comm in self._owned:
            comm.free()
        self._owned.clear()
