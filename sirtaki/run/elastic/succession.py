"""How agents find a driver: the one that has started them, and where that is lost, another one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sirtaki.comm.control.addresses import LOOPBACK, own_addresses
from sirtaki.comm.control.mesh_rendezvous import connect, job_key, listen
from sirtaki.errors import CommError
from sirtaki.json_channel import JsonChannel

CONNECT_S = 20.0
"""How long to try to reach a driver that is there, or is about to be."""

CANDIDATE_S = 6.0
"""How long to try to reach an agent that may be the next driver."""

Place = tuple[str, int]
Agents = Sequence[tuple[int, list[Place]]]
"""Number and places of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Where the next driver may be.

    Attributes:
        number: of the agent there.
        places: of it.
        is_own: it is for this agent to start the driver.
        timeout_s: how long to try to reach it.
    """

    number: int
    places: Sequence[Place]
    is_own: bool
    timeout_s: float


def candidates(agents: Agents, own: int) -> Iterator[Candidate]:
    """Those that an agent tries, one after the other, until it reaches a driver.

    Args:
        agents: as the lost driver has told last.
        own: number of this agent.
    """
    for number, places in sorted(agents):
        timeout_s = CONNECT_S if number == own else CANDIDATE_S
        yield Candidate(number=number, places=places, is_own=number == own, timeout_s=timeout_s)


def agents_for_successor(agents: Agents, own: int) -> dict[str, Any]:
    """What a driver is told of agents that this one starts: who may come to it, and which numbers have been given."""
    return {
        "agents": [number for number, _ in agents if number >= own],
        "numbers": max(number for number, _ in agents),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What an agent is told on its standard input.

    Attributes:
        host: as the job calls it.
        need: what it must have, see `Need`.
        number: of the agent; no other one of the job has had it.
        places: where the driver listens.
        secret: of the job.
        job: names it.
        command: what a rank runs.
        environ: what is added to this process's environment for ranks.
        folder: where they run.
        hosts: "one" if there will never be another host, else "many".
        interface: network interface that joins the hosts; None = any.
        successor_config: what a new driver needs; None = the loss of the driver is the end of the job.
    """

    host: str
    number: int
    places: tuple[tuple[str, int], ...]
    secret: str = field(repr=False)
    job: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    folder: str
    hosts: str
    interface: str | None
    successor_config: Mapping[str, Any] | None
    need: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def decode(cls, line: bytes) -> AgentConfig:
        """From JSON; ValueError, TypeError or KeyError if it is something else."""
        values = json.loads(line)
        places = tuple((host, port) for host, port in values["places"])
        return cls(**{**values, "places": places, "command": tuple(values["command"])})


DRIVER = 0
"""The driver's number in the handshake; agents count from 1."""


def agents_key(secret: str, job: str) -> bytes:
    """With which agents and driver prove themselves; ranks of a generation have other ones."""
    return job_key(secret, f"{job}/agents")


def reach_driver(
    places: Sequence[tuple[str, int]], *, key: bytes, number: int, timeout_s: float = CONNECT_S
) -> JsonChannel:
    """A connection to the driver, at the first of its places that answers.

    Raises:
        CommError: none does.
    """
    deadline_s, problem = time.monotonic() + timeout_s, "it listens nowhere"
    while time.monotonic() < deadline_s:
        for place in places:
            try:
                sock = connect(place, key=key, own=number, other=DRIVER)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return JsonChannel(sock)
            except (OSError, CommError) as err:
                problem = str(err)
        time.sleep(0.2)
    tried = ", ".join(f"{host}:{port}" for host, port in places)
    raise CommError(f"the driver cannot be reached at {tried} ({problem}); name the interface with --network-interface")


class Succession:
    """Finds an agent another driver when its own is lost, and starts that driver where it is this agent's turn."""

    def __init__(self, config: AgentConfig) -> None:
        """Opens the port.

        Raises:
            OSError: it cannot.
        """
        self._config = config
        addresses = [LOOPBACK, *([] if config.hosts == "one" else own_addresses(config.interface))]
        self._listeners = listen(addresses)
        self._driver: subprocess.Popen[bytes] | None = None

    @property
    def places(self) -> list[tuple[str, int]]:
        """Where a driver would listen that this agent has started."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    def find_driver(self, agents: Agents) -> JsonChannel | None:
        """Blocks, up to some seconds for each agent that is gone; None = there is none.

        Args:
            agents: as the driver has told last.
        """
        self._write_to_file()
        config = self._config
        key = agents_key(config.secret, config.job)
        for candidate in candidates(agents, config.number):
            if candidate.is_own:
                self._start_driver(agents)
            places = self.places if candidate.is_own else candidate.places
            with contextlib.suppress(CommError):
                return reach_driver(places, key=key, number=config.number, timeout_s=candidate.timeout_s)
        return None

    def close(self) -> None:
        """Closes the port; a driver that this agent has started ends by itself, and is waited for."""
        for listener in self._listeners:
            listener.close()
        if self._driver is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._driver.wait(10.0)

    def _start_driver(self, agents: Agents) -> None:
        if self._driver is not None and self._driver.poll() is None:
            return  # it goes on, and has done without this agent, which was stopped meanwhile
        config = self._config
        descriptors = [listener.fileno() for listener in self._listeners]
        told = {
            "successor_config": config.successor_config,
            "environ": dict(config.environ),
            "secret": config.secret,
            "job": config.job,
            "listeners": descriptors,
            **agents_for_successor(agents, config.number),
        }
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "sirtaki.run.elastic.successor"],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=descriptors,
        )
        assert self._driver.stdin is not None  # a pipe
        with contextlib.suppress(OSError), self._driver.stdin as stdin:
            stdin.write(json.dumps(told).encode())

    def _write_to_file(self) -> None:
        """Nobody reads any more what this process and its ranks write."""
        with contextlib.suppress(OSError), open(f"sirtaki-{self._config.host}.log", "ab") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
