"""How the ranks of a mesh find each other and prove to each other that they belong to one job.

Either a launcher knows all of them and has told each where the others listen (an appointment), or they tell each other
through PyTorch's TCPStore, which is needed no more afterwards. What stands in the store is JSON: nothing that came from
it is ever unpickled. Whoever reaches the store can read the secret that rank 0 makes, unless the user has given the
ranks one.

Before either end of a connection reads anything else, each sends a random challenge, and answers the other's with an
HMAC-SHA256 under the job's key over both challenges and both ranks. What was recorded from one connection proves
nothing on another. Messages are not encrypted afterwards.

    connector → acceptor   hello: magic, from, to, challenge
    acceptor → connector   challenge, proof
    connector → acceptor   proof
    acceptor → connector   welcome
"""

from __future__ import annotations

import datetime
import hmac
import json
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from sirtaki.errors import CommError, ConfigError, PeerLostError, SirtakiError
from sirtaki.machine import LOOPBACK, host_identity, own_addresses, serve_store

from .mesh import Links, MeshCommunicator
from .waiting import Deadline, Poll, wait_for

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

HANDSHAKE_S = 5.0
"""How long a connection may take to prove itself."""

MAX_UNPROVED = 128
"""Connections that have not proved themselves yet; one more, and the oldest of them is closed."""

MAGIC = b"SIRTAKI\x01"
_HELLO = struct.Struct("<8sII32s")
_CHALLENGE_BYTES = _PROOF_BYTES = 32
_REPLY_BYTES = _CHALLENGE_BYTES + _PROOF_BYTES
_WELCOME = b"\x01"


class NoProof(CommError):
    """The other end does not know the job's secret."""


def job_key(secret: str, job: str) -> bytes:
    """What proves are made with: of the job's secret, for this job only."""
    return hmac.digest(secret.encode(), f"sirtaki mesh {job}".encode(), "sha256")


def _proof(key: bytes, side: bytes, hello: bytes, challenge: bytes) -> bytes:
    return hmac.digest(key, side + hello + challenge, "sha256")


def connect(address: tuple[str, int], *, key: bytes, own: int, other: int) -> socket.socket:
    """A connection to rank `other`, both ends of which have proved themselves to be the job's ranks.

    Raises:
        OSError: nobody is there, or it does not answer in time.
        NoProof: it does not prove itself.
    """
    sock = socket.create_connection(address, timeout=HANDSHAKE_S)
    try:
        hello = _HELLO.pack(MAGIC, own, other, secrets.token_bytes(_CHALLENGE_BYTES))
        sock.sendall(hello)
        reply = _read(sock, _REPLY_BYTES)
        challenge, proof = reply[:_CHALLENGE_BYTES], reply[_CHALLENGE_BYTES:]
        if not hmac.compare_digest(proof, _proof(key, b"acceptor", hello, challenge)):
            raise NoProof(f"who answers at {address[0]}:{address[1]} does not know this job's secret")
        sock.sendall(_proof(key, b"connector", hello, challenge))
        if _read(sock, len(_WELCOME)) != _WELCOME:
            raise OSError("not welcome")
    except BaseException:
        sock.close()
        raise
    return sock


def _read(sock: socket.socket, length: int) -> bytes:
    """So many bytes, and no more, within the time that a handshake may take in all."""
    deadline_s, read = time.monotonic() + HANDSHAKE_S, b""
    while len(read) < length:
        sock.settimeout(max(1e-3, deadline_s - time.monotonic()))
        if not (more := sock.recv(length - len(read))):
            raise ConnectionError("it was closed in the middle of the handshake")
        read += more
    return read


class Candidate:
    """A connection that somebody has made, and that has not proved itself yet."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes a socket that does not block."""
        self.sock, self.deadline_s = sock, time.monotonic() + HANDSHAKE_S
        self.hello = self.read = b""
        self.challenge = secrets.token_bytes(_CHALLENGE_BYTES)

    def advance(self, key: bytes, own: int) -> int | None:
        """Reads what has come; the rank at the other end once it has proved itself.

        Raises:
            OSError: it has not, and will not.
        """
        wanted = _PROOF_BYTES if self.hello else _HELLO.size
        more = self.sock.recv(wanted - len(self.read))
        if not more:
            raise ConnectionError("closed")
        self.read += more
        if len(self.read) < wanted:
            return None
        read, self.read = self.read, b""
        if not self.hello:
            magic, _, to, _ = _HELLO.unpack(read)
            if magic != MAGIC or to != own:
                raise ConnectionError("no rank of this job")
            self.hello = read
            self._send(self.challenge + _proof(key, b"acceptor", read, self.challenge))
            return None
        if not hmac.compare_digest(read, _proof(key, b"connector", self.hello, self.challenge)):
            raise ConnectionError("no proof")
        return int(_HELLO.unpack(self.hello)[1])

    def _send(self, message: bytes) -> None:
        if self.sock.send(message) < len(message):  # into an empty buffer
            raise ConnectionError("it does not read")

    def welcome(self) -> None:
        """To whom has proved itself.

        Raises:
            OSError: it is gone.
        """
        self._send(_WELCOME)


def listen(addresses: Sequence[str]) -> list[socket.socket]:
    """Listens at a port of each address, and nowhere else.

    Raises:
        OSError: it cannot.
    """
    listeners: list[socket.socket] = []
    try:
        for address in addresses:
            listeners.append(socket.create_server((address, 0), backlog=512))  # noqa: PERF401  # closed if one fails
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


class Door:
    """Lets connections in that prove themselves; asked by a selector, it never blocks.

    Strangers cost a time limit and no more.

    Attributes:
        places: where it listens.
        refused: connections that did not prove themselves.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        *,
        key: bytes,
        own: int,
        events: selectors.BaseSelector,
        is_wanted: Callable[[int], bool] = lambda number: True,
    ) -> None:
        """The listeners become its own.

        Args:
            listeners: sockets.
            key: of the job.
            own: number by which it is looked for.
            events: where it registers what it waits for, with itself as the data.
            is_wanted: says of the number of who has proved itself whether it is let in.
        """
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._key, self._own, self._events, self._is_wanted = key, own, events, is_wanted
        self._candidates: dict[int, Candidate] = {}
        self.places: list[tuple[str, int]] = [listener.getsockname()[:2] for listener in listeners]
        self.refused = 0
        for listener in listeners:
            listener.setblocking(False)
            events.register(listener, selectors.EVENT_READ, self)

    def advance(self, descriptor: int) -> tuple[int, socket.socket] | None:
        """Something has come there: number and connection of who has proved itself by it; None = nobody."""
        if (listener := self._listeners.get(descriptor)) is not None:
            with suppress(OSError):
                sock, _ = listener.accept()
                sock.setblocking(False)
                if len(self._candidates) >= MAX_UNPROVED:
                    self._drop(next(iter(self._candidates)))
                self._candidates[sock.fileno()] = Candidate(sock)
                self._events.register(sock, selectors.EVENT_READ, self)
        elif (candidate := self._candidates.get(descriptor)) is not None:
            try:
                number = candidate.advance(self._key, self._own)
                if number is None:
                    return None
                if not self._is_wanted(number):
                    raise ConnectionError("it is there already")
                candidate.welcome()
            except BlockingIOError:  # what came was for one of the same descriptor that has just been dropped
                return None
            except OSError:
                self._drop(descriptor)
                return None
            del self._candidates[descriptor]
            self._events.unregister(candidate.sock)
            return number, candidate.sock
        return None

    def drop_late(self) -> None:
        """Closes what has not proved itself in time."""
        now_s = time.monotonic()
        for descriptor in [number for number, each in self._candidates.items() if each.deadline_s < now_s]:
            self._drop(descriptor)

    def close(self) -> None:
        """Listens no more."""
        for descriptor in list(self._candidates):
            self._drop(descriptor)
        for listener in self._listeners.values():
            with suppress(KeyError, ValueError):
                self._events.unregister(listener)
            listener.close()

    def _drop(self, descriptor: int) -> None:
        gone = self._candidates.pop(descriptor)
        self._events.unregister(gone.sock)
        gone.sock.close()
        self.refused += 1


class Acceptor:
    """Accepts the connections of other ranks, in a thread."""

    def __init__(self, listeners: Sequence[socket.socket], *, key: bytes, own: int, expected: Sequence[int]) -> None:
        """The listeners become its own."""
        self._expected = set(expected)
        self._accepted: dict[int, socket.socket] = {}
        self._closing = threading.Event()
        self._events = selectors.DefaultSelector()
        self.door = Door(listeners, key=key, own=own, events=self._events, is_wanted=lambda rank: rank in self.missing)
        self._thread = threading.Thread(target=self._run, name="sirtaki-accept", daemon=True)
        self._thread.start()

    @property
    def missing(self) -> list[int]:
        """Ranks that have not connected yet."""
        return sorted(self._expected - self._accepted.keys())

    def wait(self, timeout_s: float) -> bool:
        """Whether all are there, at the latest after so long."""
        self._thread.join(timeout_s)
        return not self.missing

    def close(self) -> dict[int, socket.socket]:
        """Stops listening, and gives the connections by rank; they are the caller's."""
        self._closing.set()
        self._thread.join()
        self.door.close()
        self._events.close()
        return self._accepted

    def _run(self) -> None:
        while self.missing and not self._closing.is_set():
            for chosen, _ in self._events.select(0.05):
                if (found := self.door.advance(chosen.fd)) is not None:
                    self._accepted[found[0]] = found[1]
            self.door.drop_late()


_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendee:
    """A rank, as those who are to meet it are told.

    Attributes:
        host: of `host_identity`.
        places: where it listens; those at loopback reach it from its own host.
    """

    host: tuple[str, ...]
    places: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Appointment:
    """Who meets whom.

    Attributes:
        attendees: by rank.
        secret: of the job.
        listeners: of this rank; they are closed once it has met the others, or has not.
        in_vain: why one of them will not come, as far as the launcher knows; "" = all may. It never blocks.
    """

    attendees: tuple[Attendee, ...]
    secret: str = field(repr=False)
    listeners: tuple[socket.socket, ...] = field(default=(), repr=False)
    in_vain: Callable[[], str] = field(default=lambda: "", repr=False)


def open_places(interface: str | None, *, loopback_only: bool = False) -> tuple[socket.socket, ...]:
    """Listeners of a rank: at loopback, and at the addresses that other hosts may reach; the caller's to close.

    Args:
        interface: name of the network interface that joins the hosts; None = any.
        loopback_only: the job has one host.

    Raises:
        CommError: it cannot listen.
        ConfigError: there is no such interface.
    """
    addresses = [LOOPBACK, *([] if loopback_only else own_addresses(interface))]
    try:
        return tuple(listen(addresses))
    except OSError as err:
        raise CommError(f"this rank cannot listen at {', '.join(addresses)}: {err}") from err


def attendee(listeners: Sequence[socket.socket]) -> Attendee:
    """This rank, as the others are to be told."""
    return Attendee(host=host_identity(), places=tuple(listener.getsockname()[:2] for listener in listeners))


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a rank tells the others of itself; of the first one's they take the name of the mesh, and the secret.

    Attributes:
        attendee: without places as long as it does not listen.
        name: that the mesh may have.
        secret: that the job may have; "" = the user has given this rank one, which it keeps to itself.
    """

    attendee: Attendee
    name: str
    secret: str = field(repr=False)


def arrange(
    exchange: Callable[[Introduction], Sequence[Introduction]],
    *,
    interface: str | None,
    secret: str | None,
    ranks: Sequence[int] | None = None,
    in_vain: Callable[[], str] = lambda: "",
) -> tuple[str, Appointment]:
    """Collective: the name of a mesh, and who meets in it: each tells the others where it is, then where it listens.

    Args:
        exchange: collective: what all have told of themselves, by rank.
        interface: name of the network interface that joins the hosts; None = any.
        secret: of the job, from the user; None = the first rank makes one.
        ranks: by which numbers messages name them; None = from 0.
        in_vain: see `Appointment`.

    Raises:
        ConfigError: some have a secret from the user, and some have none; or there is no such interface.
        CommError: this rank cannot listen, or what `exchange` raises.
    """
    here = Attendee(host=host_identity(), places=())
    mine = Introduction(attendee=here, name=secrets.token_hex(16), secret="" if secret else secrets.token_hex(32))
    told = exchange(mine)
    for number, each in enumerate(told):
        if bool(each.secret) is not bool(told[0].secret):
            first, odd = (0, number) if ranks is None else (ranks[0], ranks[number])
            raise ConfigError(f"SIRTAKI_SECRET is set on one of the ranks {first} and {odd} only; all need the same")
    listeners = open_places(interface, loopback_only=all(each.attendee.host == here.host for each in told))
    try:
        told = exchange(replace(mine, attendee=attendee(listeners)))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    attendees = tuple(each.attendee for each in told)
    return told[0].name, Appointment(
        attendees=attendees, secret=secret or told[0].secret, listeners=listeners, in_vain=in_vain
    )


def keep(
    appointment: Appointment, *, rank: int, name: str, timeout_s: float, unproved_s: float = float("inf")
) -> dict[int, socket.socket]:
    """Collective: connections to all others, by rank. Each rank connects to those before it.

    Args:
        appointment: with them.
        rank: of this process.
        name: that the others have been told, too.
        timeout_s: how long to wait for the others in all.
        unproved_s: how long who answers for a rank may be somebody else.

    Raises:
        ConfigError: who answers does not know the secret.
        CommError: some do not come or cannot be reached.
    """
    key, deadline = job_key(appointment.secret, name), Deadline.after(timeout_s)
    own = appointment.attendees[rank]
    here = all(other.host == own.host for other in appointment.attendees)
    for listener in appointment.listeners:
        if here and listener.getsockname()[0] != LOOPBACK:
            listener.close()  # nobody needs it, and strangers may find it
    listeners = [listener for listener in appointment.listeners if listener.fileno() >= 0]
    acceptor = Acceptor(listeners, key=key, own=rank, expected=range(rank + 1, len(appointment.attendees)))
    sockets: dict[int, socket.socket] = {}

    def check() -> None:
        if problem := appointment.in_vain():
            raise PeerLostError(problem)

    def reach(other: int) -> socket.socket:
        """A connection to that rank, at the first of its places that proves to be it."""
        near = appointment.attendees[other].host == own.host
        places = [place for place in appointment.attendees[other].places if (place[0] == LOOPBACK) == near]
        problem, limit = "it listens nowhere", deadline
        while not limit.passed:
            for place in places:
                check()
                try:
                    return connect(place, key=key, own=rank, other=other)
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
        tried = ", ".join(f"{host}:{port}" for host, port in places)
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
        for sock in (*sockets.values(), *acceptor.close().values()):
            sock.close()
        raise
    return sockets | acceptor.close()


logger = logging.getLogger(__name__)

_ASK_S = 0.1
_NAME_INTERFACE = "name the interface that joins the hosts in SIRTAKI_GLOO_IFACE"
_NOTICE_S = 10.0
"""A wait that lasts so long is told."""

WRONG_SECRET_S = 3.0
"""How long a rank that does not prove itself has to be another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks of a job meet, as all of them are told.

    Attributes:
        rank: of this process.
        size: how many there are.
        host, port: of the store.
        agent_store: the launcher keeps it; else rank 0 opens it.
        name: no other meeting at this store has it.
        members: ranks that meet, if not all do.
        appointment: of a launcher that knows all ranks, so that they need no store.
    """

    rank: int
    size: int
    host: str = ""
    port: int = 0
    agent_store: bool = False
    name: str = ""
    members: tuple[int, ...] = ()
    appointment: Appointment | None = None


_stores: dict[tuple[str, int], TCPStore] = {}
"""Those of rank 0 stay open: other ranks may still read."""

_met: Counter[tuple[str, int]] = Counter()
"""How often this process has met there: `init()` may be called again."""


def alone() -> MeshCommunicator:
    """The mesh of one rank."""
    return MeshCommunicator(Links(0, {}, heartbeat_s=None))


def meet(
    meeting: Meeting, *, interface: str | None, secret: str | None, timeout_s: float, heartbeat_s: float | None
) -> MeshCommunicator:
    """Collective: connects the ranks, each with each.

    Args:
        meeting: where they meet.
        interface: name of the network interface that joins the hosts; None = any. With an appointment it has been
            chosen.
        secret: of the job, which an appointment has, too; None = rank 0 makes one and hands it out through the store.
        timeout_s: how long to wait for the others in all.
        heartbeat_s: a rank that is silent for so long later is given up; None = never.

    Returns:
        The communicator of all of them; with it the mesh ends.

    Raises:
        ConfigError: what the ranks were told does not fit together.
        CommError: some do not come or cannot be reached.
    """
    deadline = Deadline.after(timeout_s)

    def joined(rank: int, sockets: dict[int, socket.socket]) -> MeshCommunicator:
        return MeshCommunicator(Links(rank, sockets, heartbeat_s=heartbeat_s, first_s=deadline.left_s))

    if meeting.appointment is not None:
        sockets = keep(meeting.appointment, rank=meeting.rank, name=meeting.name, timeout_s=timeout_s)
        return joined(meeting.rank, sockets)
    members = meeting.members or tuple(range(meeting.size))
    if len(members) == 1:
        return alone()
    name = f"{meeting.name}/{','.join(map(str, meeting.members))}"
    _met[name, meeting.rank] += 1
    prefix = f"sirtaki/{name}/{_met[name, meeting.rank]}"
    table = _Table(_store(meeting, deadline), prefix, meeting, members, deadline)
    if not table.claim():  # which must not trouble those who are right
        raise ConfigError(
            f"two processes say that they are rank {meeting.rank} at {meeting.host}:{meeting.port}; each needs a "
            "RANK of its own, and each job a MASTER_PORT of its own"
        )
    own = members.index(meeting.rank)
    try:
        name, appointment = arrange(
            table.exchange, interface=interface, secret=secret, ranks=members, in_vain=table.problem
        )
        sockets = keep(appointment, rank=own, name=name, timeout_s=deadline.left_s, unproved_s=WRONG_SECRET_S)
    except SirtakiError as err:
        table.tell_problem(err)
        raise
    return joined(own, sockets)


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


class _Table:
    """What the ranks tell each other through the store."""

    def __init__(self, store: Store, prefix: str, meeting: Meeting, members: Sequence[int], deadline: Deadline) -> None:
        self._store, self._prefix, self._meeting, self.members = store, prefix, meeting, members
        self.deadline = deadline
        self._ask_s = 0.0

    def exchange(self, mine: Introduction) -> list[Introduction]:
        """Collective: what all have told of themselves, by the order of members.

        Raises:
            ConfigError: they do not agree on how many there are.
            CommError: one of them does not come, or has met a problem.
        """
        what = "places" if mine.attendee.places else "host"
        own_size, own_key = self._meeting.size, self._key(what, self._meeting.rank)
        self._call("set", own_key, msgspec.json.encode((own_size, mine)).decode())
        keys = [self._key(what, rank) for rank in self.members]

        def all_are_there() -> bool:
            if self._call("check", keys):
                return True
            if problem := self.problem():
                raise CommError(problem)
            return False

        def missing() -> str:
            ranks = [rank for rank, key in zip(self.members, keys, strict=True) if not self._call("check", [key])]
            return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}"

        rank = self._meeting.rank
        if not _wait_with_notice(all_are_there, self.deadline, Poll.SLICES, rank=rank, what=missing):
            raise CommError(
                f"{missing()} of {own_size} did not come to {self._meeting.host}:{self._meeting.port} in time; are "
                "all processes started, with one WORLD_SIZE and different RANKs? SIRTAKI_START_TIMEOUT_S=… "
                "waits longer"
            )
        told = [msgspec.json.decode(self._call("get", key), type=tuple[int, Introduction]) for key in keys]
        for rank, (size, _) in zip(self.members, told, strict=True):
            if size != told[0][0]:
                raise ConfigError(
                    f"WORLD_SIZE is {told[0][0]} on rank {self.members[0]} and {size} on rank {rank}; it must be one "
                    "on all ranks"
                )
        return [each for _, each in told]

    def claim(self) -> bool:
        """Whether this process is the first that says to be this rank."""
        return bool(self._call("add", self._key("claim", self._meeting.rank), 1) == 1)

    def tell_problem(self, error: SirtakiError) -> None:
        """For those who wait: they need not find it out by waiting."""
        with suppress(CommError):
            self._call("set", f"{self._prefix}/problem", json.dumps(str(error)))

    def problem(self) -> str:
        """What another rank has told that keeps it from coming, asked for now and then; "" = nothing."""
        key, now_s = f"{self._prefix}/problem", time.monotonic()
        if now_s < self._ask_s:
            return ""
        self._ask_s = now_s + _ASK_S
        return str(json.loads(self._call("get", key))) if self._call("check", [key]) else ""

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"

    def _call(self, method: str, *arguments: Any) -> Any:  # Any: as the store's methods
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as err:
            raise PeerLostError(f"the store is gone, and rank 0 or the launcher with it: {_first_line(err)}") from err
