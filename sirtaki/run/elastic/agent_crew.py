"""The agents of a job, as its driver has them: started, heard, told, given up."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from sirtaki.json_channel import JsonChannel

from .agent import KILL_GRACE_S
from .agent_handle import AdoptedAgent, AgentHandle
from .agent_server import AgentServer
from .elastic_job import ElasticJob, Inheritance
from .succession import agents_key

AGENT_SILENT_S = 10.0
"""After which the agent of a host, and its ranks with it, are given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The agent of a host has said something."""

    host: str
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The agent of a host is given up; it ends its ranks and itself, if it lives, when it finds that out."""

    host: str
    why: str


class AgentCrew:
    """All agents, one a host.

    Attributes:
        expected: numbers of those that another driver has started and that have not come yet.
    """

    def __init__(self, job: ElasticJob, inheritance: Inheritance, pump: Callable[[str, IO[bytes]], None]) -> None:
        """Has none yet.

        Args:
            job: of the driver.
            inheritance: where it listens, and who may come.
            pump: shows what an agent writes to "stdout" or "stderr".
        """
        self._job, self._own, self._pump = job, inheritance, pump
        self._events = selectors.DefaultSelector()
        key = agents_key(inheritance.secret, inheritance.name)
        self._server = AgentServer(inheritance.listeners, key=key, events=self._events)
        self._numbers, self.expected = inheritance.numbers, set(inheritance.agents)
        self._agents: dict[str, AgentHandle] = {}
        self._leaving: list[AgentHandle] = []
        self._looked_s = time.monotonic()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._events.register(self._woken, selectors.EVENT_READ)

    @property
    def hosts(self) -> list[str]:
        """Of agents that have not been given up."""
        return list(self._agents)

    def wake(self) -> None:
        """From any thread: `look` returns."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def start(self, host: str) -> None:
        """Starts the agent of a host; it is heard once it is up.

        Raises:
            OSError: its command cannot be run.
        """
        self._numbers += 1
        job, number, places = self._job, self._numbers, self._server.places
        is_child = job.agents.is_child(host)
        config = {
            "host": host,
            "number": number,
            "places": places if is_child else places[1:] + places[:1],
            "secret": self._own.secret,
            "job": self._own.name,
            "command": job.command,
            "environ": {} if is_child else dict(job.carried),
            "folder": os.getcwd(),
            "hosts": "one" if job.one_host else "many",
            "interface": job.interface,
            "estate": job.estate,
        }
        words, line = job.agents.words(host, job.environ), json.dumps(config).encode() + b"\n"
        self._agents[host] = AgentHandle(host, number, words, job.environ, line, self._pump)

    def stop(self, host: str) -> None:
        """Has the agent of a host end."""
        if (agent := self._agents.get(host)) is not None:
            self._give_up(agent)

    def send(self, host: str, message: Mapping[str, Any]) -> None:
        """To the agent of a host; nothing happens if there is none."""
        agent = self._agents.get(host)
        if agent is not None and agent.channel is not None:
            agent.channel.send(message)
            self._watch(agent)

    def tell_each_other(self) -> None:
        """Lets all agents know who may be the next driver."""
        if self._job.estate is not None:
            agents = [[agent.number, agent.places] for agent in self._agents.values() if agent.places]
            for host in self._agents:
                self.send(host, {"do": "agents", "agents": agents})

    def look(self, timeout_s: float) -> Iterator[Heard | Lost]:
        """Waits for something to happen, at most so long, and says what."""
        for chosen, _ in self._events.select(timeout_s):
            if chosen.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif chosen.data is self._server:
                if (found := self._server.advance(chosen.fd)) is not None:
                    self._welcome(*found)
            else:
                yield from self._hear(chosen.data)
        self._server.drop_late()
        yield from self._missed()

    def close(self) -> None:
        """Has all agents end their ranks and themselves, and waits for it, within limits."""
        for host in self._agents:
            self.send(host, {"do": "end"})
        deadline_s = time.monotonic() + KILL_GRACE_S + 2.0
        for agent in (*self._agents.values(), *self._leaving):
            agent.wait(deadline_s - time.monotonic())
        self._server.close()
        self._events.close()
        for end in (self._woken, self._waker):
            end.close()

    def _welcome(self, number: int, channel: JsonChannel) -> None:
        """An agent has proved itself."""
        agent = next((each for each in self._agents.values() if each.number == number), None)
        if agent is None and number in self.expected:
            agent = AdoptedAgent(number)
        if agent is None or agent.channel is not None:
            channel.close()
            return
        agent.channel, agent.heard_s = channel, time.monotonic()
        self._events.register(channel, selectors.EVENT_READ, agent)

    def _hear(self, agent: AgentHandle) -> Iterator[Heard | Lost]:
        if agent.channel is None or agent.channel.fileno() < 0:
            return
        agent.channel.flush()
        self._watch(agent)
        try:
            messages = agent.channel.receive()
        except ConnectionError:
            yield from self._lose(agent, "its agent is gone")
            return
        agent.heard_s = time.monotonic()
        for message in messages:
            match message:
                case {"is": "beat"}:
                    self.send(agent.host, {"do": "beat"})
                    continue
                case {"is": "up", "host": str(host), "places": list(places)}:
                    agent.places = [(address, port) for address, port in places]
                    if agent.number in self.expected:
                        self.expected.discard(agent.number)
                        agent.host, self._agents[host] = host, agent
            if agent.host:
                yield Heard(host=agent.host, message=message)

    def _missed(self) -> Iterator[Lost]:
        """Agents that have not come, or say nothing any more."""
        now_s = time.monotonic()
        if now_s - self._looked_s > AGENT_SILENT_S / 2:  # this process was stopped, or the machine slept
            for agent in self._agents.values():
                agent.heard_s = now_s
        self._looked_s = now_s
        for agent in list(self._agents.values()):
            if agent.channel is None and (code := agent.exit_code) is not None:
                yield from self._lose(agent, f"{os.path.basename(agent.program)} ended with exit code {code}")
            elif agent.channel is None and now_s - agent.started_s > self._job.agent_start_s:
                yield from self._lose(agent, f"its agent has not answered within {self._job.agent_start_s:g} s")
            elif agent.channel is not None and now_s - agent.heard_s > AGENT_SILENT_S:
                yield from self._lose(agent, f"it has been silent for {AGENT_SILENT_S:g} s")

    def _lose(self, agent: AgentHandle, why: str) -> Iterator[Lost]:
        is_known = self._agents.get(agent.host) is agent
        self._give_up(agent)
        if is_known:
            self.tell_each_other()
            yield Lost(host=agent.host, why=why)

    def _give_up(self, agent: AgentHandle) -> None:
        if agent.channel is not None:
            agent.channel.send({"do": "end"})
            with contextlib.suppress(KeyError, ValueError):
                self._events.unregister(agent.channel)
        if self._agents.get(agent.host) is agent:
            del self._agents[agent.host]
        agent.disconnect()
        self._leaving.append(agent)

    def _watch(self, agent: AgentHandle) -> None:
        """Asks the selector for what is needed of that agent just now."""
        if agent.channel is not None and self._events.get_map().get(agent.channel) is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if agent.channel.has_unsent else 0)
            self._events.modify(agent.channel, wanted, agent)
