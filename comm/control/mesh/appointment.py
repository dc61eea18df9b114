"""How the ranks of a mesh find each other where a launcher knows all of them: it has told each where the others listen.

No store is needed, nor a rank that opens one. A rank opens its ports before it is known who will meet.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sirtaki.comm.control.addresses import LOOPBACK, host_identity, own_addresses
from sirtaki.errors import CommError, PeerLostError

from . import handshake
from .handshake import Acceptor, job_key, listen

_AGAIN_S = 0.05
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendee:
    """A rank, as those who are to meet it are told.

    Attributes:
        host: of `host_identity`.
        places: where it listens; those at loopback reach it from its own host.
    """

    host: tuple[str, ...]
    places: tuple[tuple[str, int], ...]

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Attendee:
        """What `asdict` has become on its way through JSON."""
        return cls(host=tuple(found["host"]), places=tuple((str(host), int(port)) for host, port in found["places"]))


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


def keep(appointment: Appointment, *, rank: int, name: str, timeout_s: float) -> dict[int, socket.socket]:
    """Collective: connections to all others, by rank. Each rank connects to those before it.

    Raises:
        CommError: some do not come or cannot be reached.
    """
    key, deadline_s = job_key(appointment.secret, name), time.monotonic() + timeout_s
    own = appointment.attendees[rank]
    here = all(other.host == own.host for other in appointment.attendees)
    for listener in appointment.listeners:
        if here and listener.getsockname()[0] != LOOPBACK:
            listener.close()  # nobody needs it, and strangers may find it
    listeners = [listener for listener in appointment.listeners if listener.fileno() >= 0]
    acceptor = Acceptor(listeners, key=key, own=rank, expected=range(rank + 1, len(appointment.attendees)))
    sockets: dict[int, socket.socket] = {}
    try:
        for other in range(rank):
            sockets[other] = _reach(appointment, other, key=key, own=rank, deadline_s=deadline_s)
        while not acceptor.wait(_LOOK_S):
            _check(appointment)
            if time.monotonic() > deadline_s:
                raise CommError(
                    f"rank {acceptor.missing[0]} did not connect to rank {rank}; name the interface that joins the "
                    "hosts in SIRTAKI_GLOO_IFACE"
                )
    except BaseException:
        for sock in (*sockets.values(), *acceptor.close().values()):
            sock.close()
        raise
    return sockets | acceptor.close()


def _check(appointment: Appointment) -> None:
    if problem := appointment.in_vain():
        raise PeerLostError(problem)


def _reach(appointment: Appointment, rank: int, *, key: bytes, own: int, deadline_s: float) -> socket.socket:
    """A connection to that rank, at the first of its places that answers."""
    near = appointment.attendees[rank].host == appointment.attendees[own].host
    places = [place for place in appointment.attendees[rank].places if (place[0] == LOOPBACK) == near]
    problem: Exception = CommError("it listens nowhere")
    while time.monotonic() < deadline_s:
        for place in places:
            _check(appointment)
            try:
                return handshake.connect(place, key=key, own=own, other=rank)
            except (OSError, CommError) as err:
                problem = err
        time.sleep(_AGAIN_S)
    tried = ", ".join(f"{host}:{port}" for host, port in places)
    raise CommError(
        f"rank {rank} cannot be reached at {tried} ({problem}); name the interface that joins the hosts in "
        "SIRTAKI_GLOO_IFACE"
    )
