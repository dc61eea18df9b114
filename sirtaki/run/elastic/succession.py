"""How agents find a driver: the one that has started them, and where that is lost, another one.

Each agent has a port at which nobody answers as long as the driver lives. When it is lost, all agents go through the
list of agents that it has sent last, from the lowest number: whoever finds itself there starts a driver that listens
at its port, and the others connect to the first that answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from sirtaki.comm.control.addresses import LOOPBACK, own_addresses
from sirtaki.comm.control.mesh.handshake import connect, job_key, listen
from sirtaki.errors import CommError
from sirtaki.json_channel import JsonChannel

from .agent_config import AgentConfig
from .heirs import CONNECT_S, Agents, candidates, inherited

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
    """Of one agent."""

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
            "estate": config.estate,
            "environ": dict(config.environ),
            "secret": config.secret,
            "job": config.job,
            "listeners": descriptors,
            **inherited(agents, config.number),
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
