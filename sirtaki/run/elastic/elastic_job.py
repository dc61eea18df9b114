"""A job whose ranks come and go, as its driver knows it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sirtaki.comm.control.addresses import LOOPBACK, own_addresses
from sirtaki.comm.control.mesh.handshake import listen
from sirtaki.errors import LaunchError

from .agent_start import AgentStart


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """What is to be started.

    Attributes:
        command: what each rank runs.
        script: the file among its words that must be there; "" = none.
        environ: of the ranks on this machine.
        carried: of it, what ranks elsewhere get.
        interface: network interface that joins the hosts; None = any.
        one_host: there will never be a host besides this one.
        agents: how they are started.
        agent_start_s: how long an agent may take to connect.
        estate: what a driver needs that takes this one's place; None = there will be none.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str]
    carried: Mapping[str, str]
    interface: str | None
    one_host: bool
    agents: AgentStart
    agent_start_s: float = 60.0
    script: str = ""
    estate: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """What a driver has from the one before it, or has made itself.

    Attributes:
        name, secret: of the job.
        listeners: at which agents look for it.
        agents: numbers of those that should come.
        numbers: of agents, that have been given.
    """

    name: str
    secret: str = field(repr=False)
    listeners: tuple[socket.socket, ...]
    agents: tuple[int, ...] = ()
    numbers: int = 0


def new_inheritance(job: ElasticJob) -> Inheritance:
    """That of the first driver.

    Raises:
        LaunchError: it cannot listen.
    """
    return inheritance_at([LOOPBACK, *([] if job.one_host else own_addresses(job.interface))])


def inheritance_at(addresses: Sequence[str]) -> Inheritance:
    """The same, with these addresses to listen at.

    Raises:
        LaunchError: it cannot.
    """
    try:
        listeners = tuple(listen(addresses))
    except OSError as err:
        raise LaunchError(f"the launcher cannot listen at {', '.join(addresses)}: {err}") from err
    return Inheritance(name=secrets.token_hex(8), secret=secrets.token_hex(32), listeners=listeners)
