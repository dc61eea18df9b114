"""The ranks of a mesh (TCP connections between all ranks), and how they find each other.

Each rank publishes its listening addresses through an `Exchange`: over a key-value store, a process group of PyTorch,
or MPI. In an elastic job, the agents (processes that start the ranks of each host) distribute the addresses. Records in
a store are JSON, because a pickled record could run code. Rank 0 makes the job's secret, by which ranks authenticate
each other, unless the user sets one. Every process that can read the store can read the secret that rank 0 makes.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import logging
import os
import resource
import secrets
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from sirtaki.errors import CommError, ConfigError, PeerLostError, SirtakiError
from sirtaki.machine import LOOPBACK, host_identity, own_addresses, serve_store

from .handshake import Acceptor, NoProof, connect, job_key, listen
from .mesh import Links, MeshCommunicator
from .waiting import Deadline, Poll, wait_for

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

logger = logging.getLogger(__name__)

_AGAIN_S, _ASK_S = 0.05, 0.1
_NOTICE_S = 10.0
"""Seconds after which a rank logs which other ranks have not connected yet."""

WRONG_SECRET_S = 3.0
"""Seconds for which a rank retries a connection whose authentication has failed. A process of another job may use the
port for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank of a mesh (TCP connections between all ranks).

    Attributes:
        host: id of its host, from `host_identity`.
        node: name of its host, from the launcher.
        slot: position of the rank on its host, which stays the same for the whole job. Positions may have gaps.
        number: number by which messages to the user name the rank. In an elastic job, the number never
            changes.
        has_state: True if the rank has synchronised in an earlier generation (set of ranks of an elastic job), and so
            holds the job's state.
        addresses: (host, port) of the sockets at which it listens. Only ranks of the same host use loopback addresses.
    """

    host: tuple[str, ...] = ()
    node: str = ""
    slot: int = 0
    number: int = 0
    has_state: bool = False
    addresses: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """List of all ranks of a mesh, with the mesh's name and secret.

    Attributes:
        generation: number of the generation (set of ranks of an elastic job), from 1. 0 = the ranks of this job never
            change.
        members: the ranks, in order.
        name: name of the job or of the mesh.
        secret: secret by which the job's processes authenticate each other. "" = each rank has it from the user.
    """

    generation: int = 0
    members: tuple[Member, ...]
    name: str
    secret: str = field(repr=False)

    @property
    def mesh_name(self) -> str:
        """Return the name of the mesh, which includes a hash of the addresses of all ranks.

        The key that authenticates connections is derived from this name, so ranks with different lists of members
        cannot connect.
        """
        addresses = msgspec.json.encode([each.addresses for each in self.members])
        return f"{self.name}/{self.generation}/{hashlib.sha256(addresses).hexdigest()[:16]}"


Listeners = tuple[socket.socket, ...]

Exchange = Callable[[Membership], Sequence[Membership]]
"""Function that sends a `Membership` with only this rank to all ranks. Returns what all ranks have sent, by rank.
Collective."""


def alone() -> MeshCommunicator:
    """Return a communicator over this rank only, without connections."""
    return MeshCommunicator(Links(0, {}, heartbeat_s=None))


def open_listeners(interface: str | None, *, loopback_only: bool = False) -> Listeners:
    """Listen at loopback, and at the addresses that remote hosts can reach. The caller closes the listeners.

    Args:
        interface: name of the network interface between the hosts. None = any.
        loopback_only: True if all ranks are on one host.

    Raises:
        CommError: an address cannot be bound.
        ConfigError: the interface does not exist.
    """
    addresses = [LOOPBACK, *([] if loopback_only else own_addresses(interface))]
    try:
        return tuple(listen(addresses))
    except OSError as err:
        raise CommError(
            f"this process cannot listen for connections at the addresses {', '.join(addresses)}: {err}; set "
            "SIRTAKI_GLOO_IFACE to a network interface of this host"
        ) from err


def listening(member: Member, listeners: Sequence[socket.socket]) -> Member:
    """Return a copy of `member` with the id of this host and the addresses of the listening sockets."""
    addresses = tuple(listener.getsockname()[:2] for listener in listeners)
    return replace(member, host=host_identity(), addresses=addresses)


def introduce(
    exchange: Exchange,
    own: Member,
    *,
    generation: int = 0,
    interface: str | None,
    secret: str | None,
    first: bool = True,
) -> tuple[Membership, Listeners]:
    """Exchange the hosts of all ranks, then open listening sockets and exchange their addresses. Collective.

    Args:
        exchange: function that sends this rank's `Membership` to all ranks, and returns one of each rank, by rank.
        own: description of this rank.
        generation: number of the last generation (set of ranks of an elastic job) in which this rank took part. 0 =
            none.
        interface: name of the network interface between the hosts. None = any.
        secret: secret of the job, from the user. None = the first rank makes one.
        first: False if this is not the first rank. It then makes no secret, so that the exchanged data stays short.

    Returns:
        The list of all ranks, with the highest generation of all ranks, and the listening sockets of this rank.

    Raises:
        ConfigError: only some ranks have a secret from the user, or the interface does not exist.
        CommError: an address cannot be bound, or `exchange` has failed.
    """
    token = "" if secret else secrets.token_hex(32) if first else "made by the first rank"
    own_membership = Membership(
        generation=generation,
        members=(listening(own, ()),),
        name=secrets.token_hex(16) if first else "",
        secret=token,
    )
    received = exchange(own_membership)
    leader = received[0]
    for each in received:
        if bool(each.secret) is not bool(leader.secret):
            one, odd = leader.members[0].number, each.members[0].number
            raise ConfigError(
                f"SIRTAKI_SECRET is set on only one of the ranks {one} and {odd}; set it to one value on all ranks"
            )
    one_host = all(each.members[0].host == own_membership.members[0].host for each in received)
    listeners = open_listeners(interface, loopback_only=one_host)
    try:
        received = exchange(replace(own_membership, members=(listening(own, listeners),), name="", secret=""))
    except BaseException:
        _close(listeners)
        raise
    return replace(
        leader,
        generation=max(each.generation for each in received),
        members=tuple(each.members[0] for each in received),
        secret=secret or leader.secret,
    ), listeners


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


_SPARE_DESCRIPTORS = 8
"""Number of file descriptors that a rank needs to connect, in addition to one per connection."""


def _check_descriptors(size: int, *, rank: int) -> None:
    """Check that this process may open a connection to each rank. Otherwise, `connect` would retry until its deadline.

    Raises:
        ConfigError: the limit of open files is too low.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    if soft != resource.RLIM_INFINITY and soft - used < size + _SPARE_DESCRIPTORS:
        raise ConfigError(
            f"rank {rank} needs {size + _SPARE_DESCRIPTORS} more file descriptors to connect {size} ranks, but {used} "
            f"of {soft} are in use; raise the hard limit of open files (ulimit -Hn, LimitNOFILE= or "
            "/etc/security/limits.conf)"
        )


def connect_members(
    membership: Membership,
    listeners: Listeners,
    *,
    rank: int,
    deadline: Deadline,
    heartbeat_s: float | None,
    unproved_s: float = float("inf"),
    why_in_vain: Callable[[], str] = lambda: "",
) -> MeshCommunicator:
    """Open a TCP connection to each other rank: connect to lower ranks, and accept higher ranks. Collective.

    Args:
        membership: list of all ranks, with the mesh's name and secret.
        listeners: sockets at which this rank listens. They are closed at the end.
        rank: rank of this process.
        deadline: time at which this rank stops waiting for other ranks.
        heartbeat_s: seconds without a message after which a rank counts as lost. None = never.
        unproved_s: seconds for which this rank tries again to connect after authentication has failed.
        why_in_vain: returns the reason why a rank can no longer connect. "" = no reason. Must not block.

    Returns:
        The communicator of all ranks. Freeing it closes the mesh.

    Raises:
        ConfigError: a process at a rank's address does not know the secret, or the limit of open files is too low.
        CommError: a rank did not connect, or cannot be reached.
    """
    members = membership.members
    try:
        _check_descriptors(len(members), rank=rank)
    except ConfigError:
        _close(listeners)
        raise
    key = job_key(membership.secret, membership.mesh_name)
    one_host = all(other.host == members[rank].host for other in members)
    for listener in listeners:
        if one_host and listener.getsockname()[0] != LOOPBACK:
            # Close the other listeners, because all ranks are on this host and connect over loopback.
            listener.close()
    listeners = tuple(listener for listener in listeners if listener.fileno() >= 0)
    acceptor = Acceptor(listeners, key=key, own=rank, expected=range(rank + 1, len(members)))
    sockets: dict[int, socket.socket] = {}

    def check() -> None:
        if problem := why_in_vain():
            raise PeerLostError(problem)

    def connect_to(other: int) -> socket.socket:
        """Connect to a rank at the first of its addresses where a process proves that it knows the job's secret."""
        same_host = members[other].host == members[rank].host
        addresses = [each for each in members[other].addresses if (each[0] == LOOPBACK) == same_host]
        problem, limit = "it has no address for this host", deadline
        while not limit.passed:
            for address in addresses:
                check()
                try:
                    return connect(address, key=key, own=rank, other=other)
                except NoProof as err:
                    problem, limit = str(err), min(limit, Deadline.after(unproved_s))
                except OSError as err:
                    problem = str(err)
            time.sleep(_AGAIN_S)
        if limit < deadline:
            raise ConfigError(
                f"authentication between ranks {other} and {rank} failed ({problem}): set SIRTAKI_SECRET to one value "
                "on all ranks"
            )
        tried = ", ".join(f"{host}:{port}" for host, port in addresses)
        raise CommError(
            f"rank {rank} cannot connect: rank {other} cannot be reached at {tried} ({problem}); set "
            "SIRTAKI_GLOO_IFACE to the network interface between the hosts"
        )

    def all_have_connected() -> bool:
        if acceptor.is_complete:
            return True
        check()
        return False

    try:
        # Begin with the next lower rank, so that no rank receives the connections of many ranks at the same time.
        for other in reversed(range(rank)):
            sockets[other] = connect_to(other)
        if not wait_for(all_have_connected, deadline, Poll.SLICES):
            refused = acceptor.handshakes.refused
            at = ", ".join(host for host, _ in acceptor.handshakes.addresses)
            raise CommError(
                f"rank {acceptor.missing[0]} did not connect to rank {rank} at {at} in time ({refused} connections "
                "failed to authenticate); set SIRTAKI_GLOO_IFACE to the network interface between the hosts"
            )
    except BaseException:
        _close([*sockets.values(), *acceptor.close().values()])
        raise
    return MeshCommunicator(Links(rank, sockets | acceptor.close(), heartbeat_s=heartbeat_s, first_s=deadline.left_s))


def rendezvous(
    exchange: Exchange,
    *,
    rank: int,
    number: int | None = None,
    interface: str | None,
    secret: str | None,
    deadline: Deadline,
    heartbeat_s: float | None,
) -> MeshCommunicator:
    """Open TCP connections between all ranks that share an `Exchange`. Collective.

    Args:
        exchange: function that exchanges the addresses of all ranks. A `StoreExchange` also distributes errors.
        rank: rank of this process in the mesh.
        number: number by which messages to the user name this process. None = `rank`.
        interface: name of the network interface between the hosts. None = any.
        secret: secret of the job, from the user. None = the first rank makes one.
        deadline: time at which this rank stops waiting for other ranks.
        heartbeat_s: seconds without a message after which a rank counts as lost. None = never.

    Raises:
        ConfigError: the ranks have contradictory settings.
        CommError: a rank did not connect, or cannot be reached.
    """
    store = exchange if isinstance(exchange, StoreExchange) else None
    own = Member(number=rank if number is None else number)
    try:
        membership, listeners = introduce(exchange, own, interface=interface, secret=secret, first=rank == 0)
        return connect_members(
            membership,
            listeners,
            rank=rank,
            deadline=deadline,
            heartbeat_s=heartbeat_s,
            unproved_s=WRONG_SECRET_S,
            why_in_vain=(lambda: "") if store is None else store.problem,
        )
    except SirtakiError as err:
        if store is not None:
            store.report_problem(err)
        raise


# ── rendezvous at a key-value store ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Settings from the launcher with which ranks connect through a key-value store.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        host, port: address of the key-value store.
        agent_store: True if the launcher serves the store. Otherwise rank 0 serves it.
        name: name of this set of ranks, unique in the store.
        members: ranks that take part. Empty = all.
    """

    rank: int
    size: int
    host: str = ""
    port: int = 0
    agent_store: bool = False
    name: str = ""
    members: tuple[int, ...] = ()


_stores: dict[tuple[str, int], TCPStore] = {}
"""Key-value stores that this process serves as rank 0, by address. They stay open, because slower ranks may still read
them."""

_meeting_counts: Counter[tuple[str, int]] = Counter()
"""Number of calls of `meet` in this process, by (name of the set of ranks, rank). The number is part of the keys in the
store, so that a second `init()` does not read the keys of the first."""


def meet(
    meeting: Meeting, *, interface: str | None, secret: str | None, timeout_s: float, heartbeat_s: float | None
) -> MeshCommunicator:
    """Open TCP connections between ranks, which exchange their addresses through a key-value store. Collective."""
    deadline = Deadline.after(timeout_s)
    members = meeting.members or tuple(range(meeting.size))
    if len(members) == 1:
        return alone()
    name = f"{meeting.name}/{','.join(map(str, meeting.members))}"
    _meeting_counts[name, meeting.rank] += 1
    prefix = f"sirtaki/{name}/{_meeting_counts[name, meeting.rank]}/"
    exchange = StoreExchange(
        _store(meeting, deadline),
        members,
        prefix=prefix,
        own=meeting.rank,
        size=meeting.size,
        place=f"{meeting.host}:{meeting.port}",
        deadline=deadline,
    )
    # If two processes have the same rank, fail only in the second one to register, so that the first can continue.
    if not exchange.claim():
        raise ConfigError(
            f"two processes claim rank {meeting.rank} at {meeting.host}:{meeting.port}; each process of a job must "
            "have a different RANK, and each job a different MASTER_PORT"
        )
    return rendezvous(
        exchange,
        rank=members.index(meeting.rank),
        number=meeting.rank,
        interface=interface,
        secret=secret,
        deadline=deadline,
        heartbeat_s=heartbeat_s,
    )


def _store(meeting: Meeting, deadline: Deadline) -> Store:
    """Return the key-value store through which the ranks exchange their addresses.

    If this rank must serve the store, start it. Otherwise connect to it.
    """
    from torch._C._distributed_c10d import TCPStore

    timeout = datetime.timedelta(seconds=max(1.0, deadline.left_s))
    place = meeting.host, meeting.port
    if not meeting.agent_store and meeting.rank == (meeting.members or (0,))[0]:
        if place not in _stores:
            try:
                # Set multi_tenant, because the script's own process groups may use a store at the same port.
                _stores[place] = serve_store(*place, timeout=timeout, multi_tenant=True)
            except (OSError, RuntimeError) as err:
                raise ConfigError(
                    f"rank {meeting.rank} cannot listen at MASTER_PORT={meeting.port}: {_first_line(err)}; if another "
                    "job uses this port, set MASTER_PORT to another port"
                ) from err
        return _stores[place]
    _wait_for_master(meeting, deadline)
    try:
        return TCPStore(*place, is_master=False, timeout=timeout)
    except (OSError, RuntimeError) as err:
        raise CommError(
            f"rank {meeting.rank} cannot reach the job's key-value store (TCPStore) at {meeting.host}:{meeting.port} "
            f"({_first_line(err)}); check MASTER_ADDR and MASTER_PORT, and that rank 0 runs"
        ) from err


def _wait_for_master(meeting: Meeting, deadline: Deadline) -> None:
    problem = ""

    def can_be_reached() -> bool:
        nonlocal problem
        try:
            socket.create_connection((meeting.host, meeting.port), timeout=2.0).close()
        except socket.gaierror as err:
            raise ConfigError(
                f"MASTER_ADDR={meeting.host} is not the name of a host ({err.strerror}); set MASTER_ADDR to the host "
                "name or IP address of rank 0"
            ) from err
        except OSError as err:
            problem = str(err)
            return False
        return True

    place = f"rank 0 at {meeting.host}:{meeting.port}"
    if not _wait_with_notice(can_be_reached, deadline, Poll.SLOW, rank=meeting.rank, what=lambda: place):
        raise CommError(
            f"rank {meeting.rank} cannot connect to rank 0 at {meeting.host}:{meeting.port} ({problem}); check that "
            "rank 0 runs, MASTER_ADDR and MASTER_PORT are right, and no firewall blocks the port, or set "
            "SIRTAKI_START_TIMEOUT_S to wait longer"
        )


def _wait_with_notice(
    condition: Callable[[], bool], deadline: Deadline, poll: Poll, *, rank: int, what: Callable[[], str]
) -> bool:
    """Wait for a condition.

    After `_NOTICE_S` seconds without success, log the text that `what` returns: what this rank waits for.

    Returns:
        False if the deadline has passed.
    """
    if wait_for(condition, min(deadline, Deadline.after(_NOTICE_S)), poll):
        return True
    if deadline.passed:
        return False
    if awaited := what():
        logger.warning(
            "rank %d has waited %.0f s for %s to start, and continues to wait; check that all processes of the job run",
            rank,
            _NOTICE_S,
            awaited,
        )
    return wait_for(condition, deadline, poll)


def _first_line(err: Exception) -> str:
    return (str(err).splitlines() or [type(err).__name__])[0]


_CHUNK = 64
"""Number of keys in one request to the key-value store."""

_POLL_S, _POLL_SHARE = 0.2e-3, 0.05
"""Interval between two requests of a waiting rank to the key-value store: the larger of `_POLL_S` times the number of
ranks, and `_POLL_SHARE` of the time that the rank has waited. So all ranks together send at most 5 000 requests per
second, and fewer in a long wait."""

_MAX_NAMED = 8
"""Largest number of missing ranks that a message names."""

_MAX_TABLE_BYTES = 64 * 1024**2
"""Largest size in bytes of the uncompressed table of all ranks. A larger one is rejected: any process can write it."""


class StoreExchange:
    """Exchanges the addresses of all ranks over a key-value store.

    Each rank sets a key of its own. The first rank collects these keys, and publishes the table of all ranks under one
    key, for which the other ranks wait. So the number of requests grows with the number of ranks, not with its square.
    Ranks poll the store, because a blocking read would block all users of the store's connection.
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        *,
        own: int,
        size: int,
        place: str,
        deadline: Deadline,
        prefix: str = "",
    ) -> None:
        """Store the arguments.

        Args:
            store: store that all ranks reach.
            ranks: ranks that exchange their addresses.
            own: rank of this process.
            size: number of ranks of the job.
            place: address of the store, for messages to the user.
            deadline: time at which this rank stops waiting for other ranks.
            prefix: text with which all keys in the store begin.
        """
        self._store, self._ranks, self._own, self._size, self._place = store, ranks, own, size, place
        self._deadline, self._prefix = deadline, prefix
        self._poll_s = _POLL_S * len(ranks)
        self._begun_s = self._ask_s = time.monotonic()

    def __call__(self, own_membership: Membership) -> list[Membership]:
        """Publish this rank's `Membership` (its addresses), and return those of all ranks, by rank. Collective.

        Raises:
            ConfigError: ranks have different values of `size`.
            CommError: a rank did not publish its `Membership` in time, or reported a problem.
        """
        what = "addresses" if own_membership.members[0].addresses else "host"
        self._call("set", self._key(what, self._own), msgspec.json.encode((self._size, own_membership)).decode())
        table = f"{self._prefix}table/{what}"
        if self._own == self._ranks[0]:
            received = self._collect(what)
            packed = zlib.compress(msgspec.json.encode(received), 1)
            self._call("set", table, base64.b64encode(packed).decode())
        else:
            due_s = begun_s = time.monotonic()

            def is_published() -> bool:
                nonlocal due_s
                if (now_s := time.monotonic()) < due_s:
                    return False
                due_s = now_s + max(self._poll_s, _POLL_SHARE * (now_s - begun_s))
                return bool(self._call("check", [table]))

            self._wait(is_published, what)
            packed = base64.b64decode(self._call("get", table))
            received = msgspec.json.decode(
                zlib.decompressobj().decompress(packed, _MAX_TABLE_BYTES), type=list[tuple[int, Membership]]
            )
        for rank, (size, _) in zip(self._ranks, received, strict=False):
            if size != received[0][0]:
                raise ConfigError(
                    f"WORLD_SIZE is {received[0][0]} on rank {self._ranks[0]} and {size} on rank {rank}; it must be "
                    "equal on all ranks"
                )
        return [each for _, each in received]

    def _collect(self, what: str) -> list[tuple[int, Membership]]:
        """Wait for the record (`what`) of each rank, and return the records.

        Stop at the first record with another world size than this rank's. The caller rejects it.
        """
        keys = [self._key(what, rank) for rank in self._ranks]
        received: list[tuple[int, Membership]] = []
        count = 1

        def all_are_there() -> bool:
            nonlocal count
            while len(received) < len(keys):
                chunk = keys[len(received) : len(received) + count]
                if self._call("check", chunk):
                    for record in self._call("multi_get", chunk):
                        received.append(msgspec.json.decode(record, type=tuple[int, Membership]))
                        if received[-1][0] != self._size:
                            return True
                    count = min(2 * count, _CHUNK)
                elif count > 1:
                    count = 1
                else:
                    return False
            return True

        self._wait(all_are_there, what)
        return received

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds.

        Raises:
            CommError: a rank has reported a problem, or the time is up. The message names the ranks whose record
                (`what`) is not in the store.
        """

        def holds() -> bool:
            if condition():
                return True
            if problem := self.problem():
                raise CommError(problem)
            return False

        def awaited() -> str:
            """Return the ranks that are missing, as text for the log. The first rank waits for all ranks.

            Every other rank waits only for the first rank.
            """
            if self._own == self._ranks[0]:
                return missing()
            return "" if self._call("check", [self._key(what, self._ranks[0])]) else f"rank {self._ranks[0]}"

        def missing() -> str:
            ranks: list[int] = []
            for start in range(0, len(self._ranks), _CHUNK):
                chunk = {self._key(what, rank): rank for rank in self._ranks[start : start + _CHUNK]}
                if len(ranks) < _MAX_NAMED and not self._call("check", list(chunk)):
                    ranks += [rank for key, rank in chunk.items() if not self._call("check", [key])]
            named = ", ".join(map(str, ranks[:_MAX_NAMED] or self._ranks[:1]))
            return f"rank{'s' * (len(ranks) > 1)} {named}"

        if not _wait_with_notice(holds, self._deadline, Poll.SLICES, rank=self._own, what=awaited):
            raise CommError(
                f"not all {self._size} ranks have registered at {self._place} in time (missing: {missing()}); check "
                "that all processes run, with equal WORLD_SIZE and different RANK, or set SIRTAKI_START_TIMEOUT_S to "
                "wait longer"
            )

    def claim(self) -> bool:
        """Claim this process's rank in the store. Return False if another process has claimed the same rank before."""
        return bool(self._call("add", self._key("claim", self._own), 1) == 1)

    def report_problem(self, error: SirtakiError) -> None:
        """Publish an error of this rank in the store, so that waiting ranks fail with this error."""
        with suppress(CommError):
            self._call("set", f"{self._prefix}problem", json.dumps(str(error)))

    def problem(self) -> str:
        """Return the error that a rank has published in the store, or "".

        Reads the store at most once every `_ASK_S` seconds, and less often in a job of many ranks.
        """
        key, now_s = f"{self._prefix}problem", time.monotonic()
        if now_s < self._ask_s:
            return ""
        self._ask_s = now_s + max(_ASK_S, self._poll_s, _POLL_SHARE * (now_s - self._begun_s))
        return str(json.loads(self._call("get", key))) if self._call("check", [key]) else ""

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}{what}/{rank}"

    # Arguments and result are Any, because the store's methods have different types.
    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as err:
            raise PeerLostError(
                f"the job's key-value store (TCPStore) does not answer ({_first_line(err)}): the process that runs it, "
                "rank 0 or the launcher, has ended; see its output for the cause"
            ) from err
