"""The ranks of a mesh, and how they find each other.

Each rank tells the others where it listens through an `Exchange`: over a key-value store, a process group of PyTorch,
or MPI. In an elastic job the agents of the hosts know all ranks. Records in a store are JSON, because a record that is
unpickled could run code. Every process that reads the store can read the secret that rank 0 makes, unless the user sets
one.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import secrets
import socket
import time
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
_NAME_INTERFACE = "name the interface that joins the hosts in SIRTAKI_GLOO_IFACE"
_NOTICE_S = 10.0
"""Time after which a rank logs which ranks it waits for."""

WRONG_SECRET_S = 3.0
"""Time in which a process that does not prove its rank may give way to the right one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank of a mesh.

    Attributes:
        host: `host_identity` of its host.
        node: its host as the launcher names it.
        slot: its place on that host for as long as it lives; the slots of a host may have gaps.
        number: its rank or worker number as the user knows it.
        has_state: it holds the state of the job: it has synchronised in an earlier generation.
        addresses: (host, port) where it listens; those at loopback are for ranks of its own host.
    """

    host: tuple[str, ...] = ()
    node: str = ""
    slot: int = 0
    number: int = 0
    has_state: bool = False
    addresses: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """All ranks of a mesh.

    Attributes:
        generation: from 1 in jobs whose ranks change, else 0.
        members: by rank.
        name: name of the job or of the mesh.
        secret: secret of the job; "" = the user has given it to each rank.
    """

    generation: int = 0
    members: tuple[Member, ...]
    name: str
    secret: str = field(repr=False)

    @property
    def mesh_name(self) -> str:
        """Name of the mesh. Ranks that were told of other members connect under another name, and do not succeed."""
        addresses = msgspec.json.encode([each.addresses for each in self.members])
        return f"{self.name}/{self.generation}/{hashlib.sha256(addresses).hexdigest()[:16]}"


Listeners = tuple[socket.socket, ...]

Exchange = Callable[[Membership], Sequence[Membership]]
"""Collective: gives a membership that has this rank as its only member, returns those of all ranks, by rank."""


def alone() -> MeshCommunicator:
    """Return the mesh of one rank."""
    return MeshCommunicator(Links(0, {}, heartbeat_s=None))


def open_listeners(interface: str | None, *, loopback_only: bool = False) -> Listeners:
    """Listen at loopback, and at the addresses that other hosts may reach. The caller closes the listeners.

    Args:
        interface: name of the network interface that joins the hosts; None = any.
        loopback_only: the job has one host.

    Raises:
        CommError: this rank cannot listen.
        ConfigError: there is no such interface.
    """
    addresses = [LOOPBACK, *([] if loopback_only else own_addresses(interface))]
    try:
        return tuple(listen(addresses))
    except OSError as err:
        raise CommError(f"this rank cannot listen at {', '.join(addresses)}: {err}") from err


def listening(member: Member, listeners: Sequence[socket.socket]) -> Member:
    """Return this rank with its host and the addresses of its listeners."""
    addresses = tuple(listener.getsockname()[:2] for listener in listeners)
    return replace(member, host=host_identity(), addresses=addresses)


def introduce(
    exchange: Exchange, own: Member, *, generation: int = 0, interface: str | None, secret: str | None
) -> tuple[Membership, Listeners]:
    """Collective. Tell all ranks which host this one is on, then where it listens.

    Args:
        exchange: carries the memberships.
        own: this rank.
        generation: number of the generation that this rank leaves.
        interface: name of the network interface that joins the hosts; None = any.
        secret: secret of the job, from the user; None = the first rank makes one.

    Returns:
        All ranks with the highest generation of theirs, and the listeners of this one.

    Raises:
        ConfigError: some ranks have a secret from the user, and some have none; or there is no such interface.
        CommError: this rank cannot listen, or `exchange` has failed.
    """
    own_token = "" if secret else secrets.token_hex(32)
    mine = Membership(
        generation=generation, members=(listening(own, ()),), name=secrets.token_hex(16), secret=own_token
    )
    told = exchange(mine)
    for each in told:
        if bool(each.secret) is not bool(told[0].secret):
            first, odd = told[0].members[0].number, each.members[0].number
            raise ConfigError(f"SIRTAKI_SECRET is set on one of the ranks {first} and {odd} only; all need the same")
    one_host = all(each.members[0].host == mine.members[0].host for each in told)
    listeners = open_listeners(interface, loopback_only=one_host)
    try:
        told = exchange(replace(mine, members=(listening(own, listeners),)))
    except BaseException:
        _close(listeners)
        raise
    return replace(
        told[0],
        generation=max(each.generation for each in told),
        members=tuple(each.members[0] for each in told),
        secret=secret or told[0].secret,
    ), listeners


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


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
    """Collective. Connect each rank to all others. A rank connects to those before it.

    Args:
        membership: the ranks.
        listeners: sockets at which this rank listens; they are closed at the end.
        rank: rank of this process.
        deadline: end of the wait for other ranks.
        heartbeat_s: a rank that is silent for longer is lost; None = never.
        unproved_s: time in which a process that does not prove its rank may give way to the right one.
        why_in_vain: returns why a member will not come; "" = all may. Non-blocking.

    Returns:
        The communicator of all ranks. The mesh ends when it is freed.

    Raises:
        ConfigError: a process that answers for a rank does not know the secret.
        CommError: a rank has not come or cannot be reached.
    """
    key, members = job_key(membership.secret, membership.mesh_name), membership.members
    here = all(other.host == members[rank].host for other in members)
    for listener in listeners:
        if here and listener.getsockname()[0] != LOOPBACK:
            listener.close()  # no rank needs it, and strangers may find it
    listeners = tuple(listener for listener in listeners if listener.fileno() >= 0)
    acceptor = Acceptor(listeners, key=key, own=rank, expected=range(rank + 1, len(members)))
    sockets: dict[int, socket.socket] = {}

    def check() -> None:
        if problem := why_in_vain():
            raise PeerLostError(problem)

    def reach(other: int) -> socket.socket:
        """Connect to a rank at the first of its addresses that proves to be it."""
        near = members[other].host == members[rank].host
        addresses = [each for each in members[other].addresses if (each[0] == LOOPBACK) == near]
        problem, limit = "it listens nowhere", deadline
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
                f"rank {other} and rank {rank} do not prove themselves to each other: SIRTAKI_SECRET must be the same "
                f"on all ranks ({problem})"
            )
        tried = ", ".join(f"{host}:{port}" for host, port in addresses)
        raise CommError(f"rank {other} cannot be reached at {tried} ({problem}); {_NAME_INTERFACE}")

    def all_have_connected() -> bool:
        if not acceptor.missing:
            return True
        check()
        return False

    try:
        for other in range(rank):
            sockets[other] = reach(other)
        if not wait_for(all_have_connected, deadline, Poll.SLICES):
            refused = acceptor.door.refused
            strangers = f"; {refused} connections did not prove themselves" if refused else ""
            at = ", ".join(host for host, _ in acceptor.door.places)
            raise CommError(
                f"rank {acceptor.missing[0]} did not connect to rank {rank} at {at}{strangers}; {_NAME_INTERFACE}"
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
    """Collective. Connect ranks that can exchange memberships, each with each.

    Args:
        exchange: carries the memberships. A `StoreExchange` also tells the other ranks what has failed.
        rank: rank of this process among them.
        number: its rank in messages to the user, if another.
        interface: see `introduce`.
        secret: see `introduce`.
        deadline: end of the wait for other ranks.
        heartbeat_s: see `connect_members`.

    Raises:
        ConfigError: what the ranks were told does not fit together.
        CommError: a rank has not come or cannot be reached.
    """
    store = exchange if isinstance(exchange, StoreExchange) else None
    own = Member(number=rank if number is None else number)
    try:
        membership, listeners = introduce(exchange, own, interface=interface, secret=secret)
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
            store.tell_problem(err)
        raise


# ── ranks that meet at a store ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The store at which ranks meet, as a launcher tells them.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        host, port: address of the store.
        agent_store: the launcher serves the store; else rank 0 does.
        name: name of this meeting, unique in the store.
        members: ranks that meet, if not all do.
    """

    rank: int
    size: int
    host: str = ""
    port: int = 0
    agent_store: bool = False
    name: str = ""
    members: tuple[int, ...] = ()


_stores: dict[tuple[str, int], TCPStore] = {}
"""Stores that rank 0 serves stay open, because other ranks may still read them."""

_met: Counter[tuple[str, int]] = Counter()
"""Number of meetings of this process by name, because `init()` may be called again."""


def meet(
    meeting: Meeting, *, interface: str | None, secret: str | None, timeout_s: float, heartbeat_s: float | None
) -> MeshCommunicator:
    """Collective. Connect ranks that meet at a store; see `rendezvous`."""
    deadline = Deadline.after(timeout_s)
    members = meeting.members or tuple(range(meeting.size))
    if len(members) == 1:
        return alone()
    name = f"{meeting.name}/{','.join(map(str, meeting.members))}"
    _met[name, meeting.rank] += 1
    prefix = f"sirtaki/{name}/{_met[name, meeting.rank]}/"
    exchange = StoreExchange(
        _store(meeting, deadline),
        members,
        prefix=prefix,
        own=meeting.rank,
        size=meeting.size,
        place=f"{meeting.host}:{meeting.port}",
        deadline=deadline,
    )
    if not exchange.claim():  # which must not trouble those who are right
        raise ConfigError(
            f"two processes say that they are rank {meeting.rank} at {meeting.host}:{meeting.port}; each needs a "
            "RANK of its own, and each job a MASTER_PORT of its own"
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
    """The store at the meeting's address."""
    from torch._C._distributed_c10d import TCPStore

    timeout = datetime.timedelta(seconds=max(1.0, deadline.left_s))
    place = meeting.host, meeting.port
    if not meeting.agent_store and meeting.rank == (meeting.members or (0,))[0]:
        if place not in _stores:
            try:
                # multi_tenant: the script's own process groups may meet at the same port
                _stores[place] = serve_store(*place, timeout=timeout, multi_tenant=True)
            except (OSError, RuntimeError) as err:
                raise ConfigError(
                    f"rank {meeting.rank} cannot listen at MASTER_PORT={meeting.port}: {_first_line(err)}; does "
                    "another job use it? Give each job a port of its own"
                ) from err
        return _stores[place]
    _wait_for_master(meeting, deadline)
    try:
        return TCPStore(*place, is_master=False, timeout=timeout)
    except (OSError, RuntimeError) as err:
        raise CommError(f"there is no store at {meeting.host}:{meeting.port}: {_first_line(err)}") from err


def _wait_for_master(meeting: Meeting, deadline: Deadline) -> None:
    problem = ""

    def can_be_reached() -> bool:
        nonlocal problem
        try:
            socket.create_connection((meeting.host, meeting.port), timeout=2.0).close()
        except socket.gaierror as err:
            raise ConfigError(f"MASTER_ADDR={meeting.host} names no host ({err.strerror})") from err
        except OSError as err:
            problem = str(err)
            return False
        return True

    place = f"rank 0 at {meeting.host}:{meeting.port}"
    if not _wait_with_notice(can_be_reached, deadline, Poll.SLOW, rank=meeting.rank, what=lambda: place):
        raise CommError(
            f"rank {meeting.rank} finds nobody at {meeting.host}:{meeting.port} ({problem}); is rank 0 running, are "
            "MASTER_ADDR and MASTER_PORT right, does a firewall stand between? SIRTAKI_START_TIMEOUT_S=… waits longer"
        )


def _wait_with_notice(
    condition: Callable[[], bool], deadline: Deadline, poll: Poll, *, rank: int, what: Callable[[], str]
) -> bool:
    """Wait for a condition, and log `what` this rank waits for if that takes long. False if the time is up."""
    if wait_for(condition, min(deadline, Deadline.after(_NOTICE_S)), poll):
        return True
    if deadline.passed:
        return False
    logger.warning("rank %d waits for %s", rank, what())
    return wait_for(condition, deadline, poll)


def _first_line(err: Exception) -> str:
    return (str(err).splitlines() or [type(err).__name__])[0]


class StoreExchange:
    """An `Exchange` over a key-value store. It only polls, because a blocking read would block other users."""

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
        """Keep the arguments.

        Args:
            store: store that all ranks reach.
            ranks: numbers of the ranks that meet.
            own: number of this rank.
            size: number of ranks of the job.
            place: address of the store, for messages.
            deadline: end of the wait for other ranks.
            prefix: start of all keys.
        """
        self._store, self._ranks, self._own, self._size, self._place = store, ranks, own, size, place
        self._deadline, self._prefix = deadline, prefix
        self._ask_s = 0.0

    def __call__(self, mine: Membership) -> list[Membership]:
        """Collective. Return the memberships of all ranks.

        Raises:
            ConfigError: the ranks do not agree on how many there are.
            CommError: a rank has not come, or has met a problem.
        """
        what = "addresses" if mine.members[0].addresses else "host"
        self._call("set", self._key(what, self._own), msgspec.json.encode((self._size, mine)).decode())
        keys = [self._key(what, rank) for rank in self._ranks]

        def all_are_there() -> bool:
            if self._call("check", keys):
                return True
            if problem := self.problem():
                raise CommError(problem)
            return False

        def missing() -> str:
            ranks = [rank for rank, key in zip(self._ranks, keys, strict=True) if not self._call("check", [key])]
            return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}"

        if not _wait_with_notice(all_are_there, self._deadline, Poll.SLICES, rank=self._own, what=missing):
            raise CommError(
                f"{missing()} of {self._size} did not come to {self._place} in time; are all processes started, with "
                "one WORLD_SIZE and different RANKs? SIRTAKI_START_TIMEOUT_S=… waits longer"
            )
        told = [msgspec.json.decode(self._call("get", key), type=tuple[int, Membership]) for key in keys]
        for rank, (size, _) in zip(self._ranks, told, strict=True):
            if size != told[0][0]:
                raise ConfigError(
                    f"WORLD_SIZE is {told[0][0]} on rank {self._ranks[0]} and {size} on rank {rank}; it must be one "
                    "on all ranks"
                )
        return [each for _, each in told]

    def claim(self) -> bool:
        """Return whether this process is the first that claims this rank."""
        return bool(self._call("add", self._key("claim", self._own), 1) == 1)

    def tell_problem(self, error: SirtakiError) -> None:
        """Tell ranks that wait for this one why it does not come."""
        with suppress(CommError):
            self._call("set", f"{self._prefix}problem", json.dumps(str(error)))

    def problem(self) -> str:
        """Return what keeps another rank from coming; "" = nothing. Asks the store every `_ASK_S` at most."""
        key, now_s = f"{self._prefix}problem", time.monotonic()
        if now_s < self._ask_s:
            return ""
        self._ask_s = now_s + _ASK_S
        return str(json.loads(self._call("get", key))) if self._call("check", [key]) else ""

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}{what}/{rank}"

    def _call(self, method: str, *arguments: Any) -> Any:  # Any: as the store's methods
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as err:
            raise PeerLostError(f"the store is gone, and rank 0 or the launcher with it: {_first_line(err)}") from err
