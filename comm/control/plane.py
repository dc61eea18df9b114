"""The control plane: ranks, nodes and hosts of a job, and small collectives over any communicator.

Also aligns the clocks of the ranks, so that events of all ranks share one time axis. Each rank asks rank 0 for the time
several times, and uses the answer with the shortest round trip (Cristian 1989). Its error is at most half of that round
trip.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import pickle
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sirtaki.errors import CommError, ConfigError, MismatchError, SirtakiError, TransportError, require
from sirtaki.machine import LOOPBACK, allowed_processors, explained, host_identity, own_addresses, serve_store

from .communicator import Communicator, Op, Test
from .failure import FailureBoard
from .waiting import Deadline, retry, unless_failed, wait_for

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

CLOCK_SAMPLES = 16


class ClockOffset(NamedTuple):
    """Estimated difference of two clocks.

    Attributes:
        offset_s: seconds to add to this rank's clock to get rank 0's time.
        round_trip_s: shortest round trip in seconds. The error of `offset_s` is at most half of it.
    """

    offset_s: float
    round_trip_s: float


def estimate_offset(answers: Sequence[tuple[float, float, float]]) -> ClockOffset:
    """Estimate the offset between this rank's clock and a remote clock.

    Args:
        answers: samples (time of the question, remote clock's time in the answer, time of receipt), in seconds.
    """
    asked_s, answer_s, received_s = min(answers, key=lambda answer: answer[2] - answer[0])
    offset_s, round_trip_s = answer_s - (asked_s + received_s) / 2, received_s - asked_s
    # Treat an offset within the measurement error as 0, because processes of one host share a clock.
    return ClockOffset(0.0 if abs(offset_s) <= round_trip_s / 2 else offset_s, round_trip_s)


def compare_clocks(control: ControlPlane, *, now_s: Callable[[], float] = time.perf_counter) -> ClockOffset:
    """Estimate the difference between this rank's clock and rank 0's clock. Collective.

    Args:
        control: control plane of the ranks.
        now_s: reads this rank's clock.
    """
    answers = []
    comm, question, answer = control.comm, np.zeros(1), np.zeros(1)
    wait = partial(wait_for, failures=control.failures)
    for rank in range(1, control.size):
        for _ in range(CLOCK_SAMPLES):
            if control.rank == 0:
                wait(comm.receive(question, rank))
                answer[0] = now_s()
                wait(comm.send(answer, rank))
            elif control.rank == rank:
                asked_s = now_s()
                wait(comm.send(question, 0))
                wait(comm.receive(answer, 0))
                answers.append((asked_s, float(answer[0]), now_s()))
    return estimate_offset(answers) if answers else ClockOffset(0.0, 0.0)


def align_clocks(control: ControlPlane) -> float:
    """Return the seconds to add to this rank's clock to get the job's time, which is 0 at this call. Collective."""
    offset_s = compare_clocks(control).offset_s
    origin_s: float = control.broadcast(time.perf_counter() if control.rank == 0 else None)
    return offset_s - origin_s


_FIRST_BYTES, _LENGTH_BYTES = 256, 8
"""Size in bytes of each rank's message in the first all-gather of `gather`, and of the length field at its beginning.

The rest of the message holds the pickled value if the value fits. Otherwise a second all-gather sends the values."""


def gather(value: Any, *, comm: Communicator) -> list[Any]:
    """Return the picklable values of all ranks, by rank. Collective.

    Raises:
        CommError: the job has failed.
    """
    data = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    own, firsts = np.zeros(_FIRST_BYTES, dtype=np.uint8), np.empty((comm.size, _FIRST_BYTES), dtype=np.uint8)
    own[:_LENGTH_BYTES].view(np.int64)[0] = data.size
    own[_LENGTH_BYTES : _LENGTH_BYTES + data.size] = data[: _FIRST_BYTES - _LENGTH_BYTES]
    wait_for(comm.all_gather(own, firsts), failures=comm.failures)
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


def _peers_with_mark(rank: int, marks: Sequence[int]) -> list[int]:
    """Return the ranks with the same mark as `rank`, in ascending order.

    `marks` are integers by rank, such as the number of each rank's node.
    """
    return [other for other, mark in enumerate(marks) if mark == marks[rank]]


LIMIT_S = 300.0
"""Timeout in seconds for connecting to a key-value store (`TCPStore`), and for each of the store's answers."""

CONNECT_TIMEOUT_S, CONNECTIONS = 3.0, 3
APART_S = 100e-6
"""Delay in seconds between the connections of consecutive ranks to rank 0. It keeps the queue of rank 0's listening
socket from overflowing."""

ATTEMPT_S, RETRY_INTERVAL_S = 1.0, 0.05
"""Time limit of one attempt to connect to a key-value store, and pause before the next attempt, in seconds. If the job
fails, the pause ends early, but a running attempt does not."""


@dataclass(slots=True)
class _Rendezvous:
    """Addresses of rank 0 and of this host, and a key-value store that rank 0 serves for process groups.

    A control plane shares them with its scopes (views of the control plane, one for each communicating component).

    Attributes:
        store: the key-value store. None before first use.
        server: address of rank 0 at which this rank reaches it. "" before first use.
        own_address: address of this host at which peers reach it.
        round_trip_s: longest network round trip between rank 0 and a peer, in seconds.
        prefixes: number of key prefixes that `ControlPlane.next_prefix` has returned.
    """

    store: TCPStore | None = None
    server: str = ""
    own_address: str = LOOPBACK
    round_trip_s: float = 0.0
    prefixes: int = 0


def reach(candidates: Sequence[str], port: int, *, of: str = "rank 0") -> tuple[str, str, float]:
    """Find the first address that accepts connections at a port, and measure the round trip to it.

    `candidates` are the addresses of one process, which `of` names in error messages.

    The round trip is measured as the time of a TCP connect, because the remote kernel answers it without waking a
    process.

    Returns:
        The address, this host's own address on the route to it, and the shortest round trip in seconds.

    Raises:
        CommError: no address answers.
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
        f"{of} cannot be reached at {', '.join(tried) or 'any address'}; "
        "set SIRTAKI_GLOO_IFACE to the network interface between the hosts"
    )


def connect_to_store(host: str, port: int, *, failures: FailureBoard) -> TCPStore:
    """Connect to the key-value store of another process.

    Raises as soon as `failures` (the job's failure board) reports a failure. PyTorch's own connect would continue to
    wait.

    Raises:
        RuntimeError: the store cannot be reached.
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

    # Connect in a thread, because an attempt blocks forever if the store's process is stopped and never answers.
    return unless_failed(connect, failures=failures, undo=lambda _: None)


class ControlPlane:
    """The ranks of a job or of a subset of it, and small collectives between them.

    Methods that communicate are collective: all ranks call them in the same order, from one thread. Each further thread
    uses a communicator from `duplicate`.

    Attributes:
        comm: communicator of this control plane, for the thread that calls the collective methods.
        backend: library that carries the control plane.
        rank, size: rank of this process, and number of ranks.
        local_rank, local_size: position of this process on its node, and number of ranks on this node.
        cross_rank, cross_size: position of this node among the nodes that have a rank with this local rank, and their
            number.
        local_sizes: for each rank, the number of ranks on its node.
        in_order: True if the ranks of each node have consecutive numbers.
        host_names: host name of each rank, for display. Two hosts may have one name.
        hosts: id of each rank's host, which is the lowest rank on that host. Simulated nodes do not change it.
        node_ranks: ranks of this node, by local rank.
        failures: failure board, through which all threads of this rank report and read the job's failure.
    """

    def __init__(self, comm: Communicator, *, local_size: int | None = None, interface: str | None = None) -> None:
        """Open the control plane over a duplicate of `comm`. Collective.

        Args:
            comm: the ranks of this job.
            local_size: simulate nodes of this many consecutive ranks. None = use the real hosts.
            interface: network interface to offer to remote hosts. None = find one.
        """
        self.failures = comm.failures
        self._interface = interface
        self.comm = comm.duplicate()
        self.backend, self.rank, self.size = comm.backend, comm.rank, comm.size
        valid = local_size is None or self.size % local_size == 0
        require(valid, "SIRTAKI_LOCAL_SIZE", f"a divisor of the number of ranks, {self.size}", local_size)
        gathered = self.all_gather((socket.gethostname(), (self.comm.same_host(), *host_identity())))
        self.host_names: list[str] = [name for name, _ in gathered]
        first: dict[object, int] = {}
        self.hosts = [first.setdefault(identity, rank) for rank, (_, identity) in enumerate(gathered)]
        if self.hosts.count(self.hosts[self.rank]) > len(allowed_processors()):
            self.failures.oversubscribed = True
        nodes = self.hosts if local_size is None else [rank // local_size for rank in range(self.size)]
        self.node_ranks = _peers_with_mark(self.rank, nodes)
        self.local_rank, self.local_size = self.node_ranks.index(self.rank), len(self.node_ranks)
        before: Counter[int] = Counter()  # Number of ranks counted so far on each node.
        local_ranks = []
        for node in nodes:
            local_ranks.append(before[node])
            before[node] += 1
        self.local_sizes = [before[node] for node in nodes]
        self.in_order = nodes == sorted(nodes)
        cross_ranks = _peers_with_mark(self.rank, local_ranks)
        self.cross_rank, self.cross_size = cross_ranks.index(self.rank), len(cross_ranks)
        self.node, self.cross = self.comm.subset(self.node_ranks), self.comm.subset(cross_ranks)
        self._rendezvous = _Rendezvous()
        self._owned: list[Communicator] = []
        self._scopes: list[ControlPlane] = []
        # Set in a scope (view for one component) once this rank has released the scope.
        self._close_collectively: Callable[[], None] | None = None

    @property
    def is_homogeneous(self) -> bool:
        """Return whether all nodes have the same number of ranks."""
        return len(set(self.local_sizes)) == 1

    @property
    def one_node(self) -> bool:
        """Return whether all ranks are on one (possibly simulated) node."""
        return self.local_size == self.size

    def duplicate(self, *, cross: bool = False) -> Communicator:
        """Open a communicator for one more thread. `ControlPlane.close` frees the communicator. Collective.

        Args:
            cross: True for the ranks with this local rank, one per node. False for all ranks.
        """
        comm = (self.cross if cross else self.comm).duplicate()
        self._owned.append(comm)
        return comm

    def of_subset(self, comm: Communicator) -> ControlPlane:
        """Open a control plane over `comm`, whose ranks are a subset of this control plane's. Collective.

        Both control planes share the job's failure board.
        """
        return ControlPlane(comm, interface=self._interface)

    def scope(self) -> ControlPlane:
        """Return a scope: a view of this control plane that owns the communicators of one communicating component.

        All ranks call this in the same order. Communicators from the scope's `duplicate` live until `reclaim` finds
        that all ranks have released the scope. They are not freed earlier, because freeing a communicator is
        collective, but ranks garbage-collect a component at different times.
        """
        scope = copy.copy(self)
        scope._owned, scope._scopes = [], []
        self._scopes.append(scope)
        return scope

    def release(self, close_collectively: Callable[[], None]) -> None:
        """Declare that this rank no longer uses the communicators of this scope (view for one component).

        Thread-safe, not collective. The communicators are freed later, by `reclaim`.

        Args:
            close_collectively: closes further resources of the component. Called on all ranks when all ranks have
                released the scope.
        """
        self._close_collectively = close_collectively

    def reclaim(self) -> None:
        """Free the communicators and other resources of the scopes that all ranks have released. Collective.

        All ranks free them in the same order.
        """
        if not self._scopes:
            # All ranks return here, because they open scopes in the same order. So no rank waits in the collective
            # below.
            return
        released = self.minimum(np.array([float(scope._close_collectively is not None) for scope in self._scopes])) > 0
        kept = []
        for scope, by_all in zip(self._scopes, released, strict=True):
            if by_all:
                assert scope._close_collectively is not None
                scope._close_collectively()
                scope._free_owned()
            else:
                kept.append(scope)
        self._scopes = kept

    def address(self) -> str:
        """Return the address of this host at which peers reach it. Collective at the first call.

        Raises:
            ConfigError: rank 0 lacks the network interface that the user named. Raised on all ranks.
            TransportError: a rank cannot reach rank 0. Raised on all ranks.
        """
        rendezvous = self._rendezvous
        if not rendezvous.server:
            listener, offer = self._listen() if self.rank == 0 else (None, None)
            try:
                found: tuple[list[str], int] | SirtakiError = self.broadcast(offer)
                if isinstance(found, SirtakiError):
                    raise found
                problem, server, own_address, round_trip_s = "", LOOPBACK, "", 0.0
                if self.rank == 0:
                    server = own_address = found[0][0] if found[0] else LOOPBACK
                else:
                    try:
                        time.sleep(APART_S * self.rank)
                        server, own_address, round_trip_s = reach(*found)
                    except (CommError, OSError) as err:
                        problem = str(err)
                self.agree_on_success(problem)
            finally:
                if listener is not None:
                    with suppress(OSError):
                        listener.shutdown(socket.SHUT_RDWR)
                    listener.close()
            rendezvous.round_trip_s = float(self.maximum(np.array([round_trip_s]))[0])
            rendezvous.server, rendezvous.own_address = server, own_address
        return rendezvous.own_address

    def store(self) -> TCPStore:
        """Return the key-value store through which PyTorch's process groups connect. Collective at the first call.

        Raises:
            ConfigError: rank 0 lacks the network interface that the user named. Raised on all ranks.
            TransportError: a rank cannot reach rank 0. Raised on all ranks.
        """
        rendezvous = self._rendezvous
        if rendezvous.store is None:
            self.address()
            problem, store = "", None
            if self.rank == 0:
                try:
                    addresses = self._addresses()
                    at = addresses[0] if len(addresses) == 1 else "0.0.0.0"
                    store = serve_store(at, timeout=datetime.timedelta(seconds=LIMIT_S))
                except (OSError, RuntimeError) as err:
                    problem = f"rank 0 cannot open a store: {err}"
            port = self.broadcast(0 if store is None else store.port)
            if self.rank != 0 and port:
                try:
                    store = connect_to_store(rendezvous.server, port, failures=self.failures)
                except (CommError, OSError, RuntimeError) as err:
                    problem = str(err)
            self.agree_on_success(problem)
            rendezvous.store = store
        assert rendezvous.store is not None
        return rendezvous.store

    @property
    def round_trip_s(self) -> float:
        """Return the longest network round trip between rank 0 and a peer, in seconds. 0.0 = not measured yet."""
        return self._rendezvous.round_trip_s

    def _addresses(self) -> list[str]:
        return [LOOPBACK] if len(set(self.hosts)) == 1 else own_addresses(self._interface)

    def _listen(self) -> tuple[socket.socket | None, tuple[list[str], int] | SirtakiError]:
        """Listen, and close each accepted connection at once, so that peers can test whether they reach this rank.

        Return the listener, and its addresses and port, or an error.
        """
        try:
            addresses = self._addresses()
            listener = socket.create_server((addresses[0] if len(addresses) == 1 else "0.0.0.0", 0), backlog=512)
        except ConfigError as err:
            return None, err
        except OSError as err:
            return None, TransportError(f"rank 0 cannot listen for connections: {err}")

        def accept() -> None:
            with suppress(OSError):  # `accept` raises OSError once the listening socket is closed.
                while True:
                    listener.accept()[0].close()

        try:
            threading.Thread(target=accept, name="sirtaki-reach", daemon=True).start()
        except RuntimeError as err:
            listener.close()
            return None, TransportError(f"rank 0 cannot listen for connections: {explained(err)}")
        return listener, (addresses, listener.getsockname()[1])

    def next_prefix(self) -> str:
        """Return an unused prefix for keys in the store. Equal on all ranks if they call this in the same order."""
        self._rendezvous.prefixes += 1
        return f"sirtaki/{self._rendezvous.prefixes}"

    def all_gather(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks, by rank. Collective."""
        return gather(value, comm=self.comm)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the picklable value of rank `root`. Collective."""
        data = np.frombuffer(pickle.dumps(value), dtype=np.uint8).copy() if self.rank == root else None
        length = np.array([0 if data is None else data.size], dtype=np.int64)
        self._wait(self.comm.broadcast(length, root))
        if data is None:
            data = np.empty(int(length[0]), dtype=np.uint8)
        self._wait(self.comm.broadcast(data, root))
        return value if self.rank == root else pickle.loads(data.tobytes())

    def minimum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the element-wise minimum of a small array over all ranks. Collective."""
        return self._reduce(values, Op.MINIMUM)

    def maximum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the element-wise maximum of a small array over all ranks. Collective."""
        return self._reduce(values, Op.MAXIMUM)

    def total(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the element-wise sum of a small array over all ranks. Collective."""
        return self._reduce(values, Op.SUM)

    def _reduce(self, values: npt.NDArray[np.float64], op: Op) -> npt.NDArray[np.float64]:
        result = values.copy()
        self._wait(self.comm.all_reduce(result, op))
        return result

    def require_equal(self, value: str, what: str) -> None:
        """Raise on all ranks unless `value` is equal on all ranks. `what` names it in the message. Collective.

        Raises:
            MismatchError: the values differ. The message names the ranks that differ from rank 0.
        """
        # Compare hashes of 96 bits first, because gathering the values takes time on many ranks.
        digest = hashlib.blake2b(str(value).encode(), digest_size=12).digest()
        parts = np.array([float(int.from_bytes(part, "little")) for part in (digest[:6], digest[6:])])
        lowest = self.minimum(np.concatenate([parts, -parts]))
        if np.array_equal(lowest[:2], -lowest[2:]):
            return
        values = self.all_gather(value)
        different = [f"rank {rank} has {other}" for rank, other in enumerate(values) if other != values[0]]
        if different:
            raise MismatchError(
                f"the ranks disagree about {what}, which must be equal on all ranks: rank 0 has {values[0]}; ranks "
                f"that differ: {', '.join(different)}"
            )

    def agree_on_success(self, problem: str) -> None:
        """Raise on all ranks if any rank reports a `problem`, an error text. "" = no problem. Collective.

        Raises:
            TransportError: a rank has a problem. The message lists rare problems first, because common ones may be
                their consequences.
        """
        if not self.maximum(np.array([float(bool(problem))]))[0]:
            return
        problems: list[str] = self.all_gather(problem)
        failed = sorted((problems.count(text), rank) for rank, text in enumerate(problems) if text)
        found = [f"rank {rank}: {problems[rank]}" for _, rank in failed]
        if found:
            raise TransportError("; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else ""))

    def barrier(self) -> None:
        """Return once all ranks have called this. Collective."""
        self._wait(self.comm.barrier())

    def _wait(self, test: Test) -> None:
        wait_for(test, failures=self.failures)

    def close(self) -> None:
        """Free all communicators except the one passed to the constructor. Collective."""
        # `reclaim` frees only scopes that all ranks have released. Another scope stays open, because a component of
        # some rank still uses it.
        self.reclaim()
        self._free_owned()
        for comm in (self.cross, self.node, self.comm):
            comm.free()
        self._rendezvous.store = None

    def abandon(self) -> None:
        """Drop this rank's resources after the job has failed, without communication."""
        self._scopes.clear()
        self._owned.clear()
        self._rendezvous.store = None

    def _free_owned(self) -> None:
        for comm in self._owned:
            comm.free()
        self._owned.clear()
