"""The agents of a job, as its driver has them: started, heard, told, given up."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import IO, Any

from sirtaki.json_channel import JsonChannel

from ..host_check import Need, versions_here
from .agent_handle import AdoptedAgent, AgentHandle
from .agent_rules import end_grace_s
from .elastic_job import ElasticJob, Inheritance
from .roster import Heard, Lost, Roster
from .switchboard import Switchboard


class AgentCrew:
    """All agents, one a host."""

    def __init__(self, job: ElasticJob, inheritance: Inheritance, pump: Callable[[str, IO[bytes]], None]) -> None:
        """Has none yet.

        Args:
            job: of the driver.
            inheritance: where it listens, and who may come.
            pump: shows what an agent writes to "stdout" or "stderr".
        """
        self._job, self._own, self._pump = job, inheritance, pump
        self._board: Switchboard[AgentHandle | AdoptedAgent] = Switchboard(inheritance)
        self._roster: Roster[AgentHandle | AdoptedAgent] = Roster(
            expected=inheritance.agents,
            numbers=inheritance.numbers,
            start_s=job.agent_start_s,
            tells=job.estate is not None,
            sent=self._watch,
            let_go=self._forget,
            now_s=time.monotonic(),
        )
        self._leaving: list[AgentHandle | AdoptedAgent] = []

    @property
    def hosts(self) -> list[str]:
        """Of agents that have not been given up."""
        return list(self._roster.agents)

    @property
    def expected(self) -> set[int]:
        """Numbers of agents that another driver has started and that have not come yet."""
        return self._roster.expected

    def expect_no_more(self) -> None:
        """Who has not come yet comes too late."""
        self._roster.close_adoption()

    def wake(self) -> None:
        """From any thread: `look` returns."""
        self._board.wake()

    def start(self, host: str) -> None:
        """Starts the agent of a host; it is heard once it is up.

        Raises:
            OSError: its command cannot be run.
        """
        job, number, places = self._job, self._roster.next_number(), self._board.places
        is_child = job.agents.is_child(host)
        need = Need(
            folder=os.getcwd(),
            script=job.script,
            interfaces=tuple(job.interface.split(",")) if job.interface else (),
            versions=versions_here(),
        )
        config = {
            "host": host,
            "need": asdict(need),
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
        self._roster.started(AgentHandle(host, number, words, job.environ, line, self._pump))

    def stop(self, host: str) -> None:
        """Has the agent of a host end."""
        if (agent := self._roster.agents.get(host)) is not None:
            self._roster.stop(agent)

    def send(self, host: str, message: Mapping[str, Any]) -> None:
        """To the agent of a host; nothing happens if there is none."""
        self._roster.send(host, message)

    def send_to(self, hosts: Iterable[str], message: Mapping[str, Any]) -> None:
        """The same to the agents of these hosts."""
        self._roster.send_to(hosts, message)

    def tell_each_other(self) -> None:
        """Lets all agents know who may be the next driver."""
        self._roster.tell_each_other()

    def look(self, timeout_s: float) -> Iterator[Heard | Lost]:
        """Waits for something to happen, at most so long, and says what."""
        for agent in self._board.look(timeout_s, self._welcome):
            yield from self._hear(agent)
        yield from self._roster.tick(time.monotonic())

    def close(self, number: int | None = None) -> None:
        """Has all agents end their ranks and themselves, and waits for it, within limits.

        Args:
            number: the signal that is the reason; None = none is.
        """
        grace_s = end_grace_s(number, self._job.environ)
        for host in self.hosts:
            self.send(host, {"do": "end", "grace_s": grace_s})
        for each in self._roster.agents.values():
            if each.channel is None:
                each.disconnect()  # which it will find out by its standard input
        deadline_s = time.monotonic() + grace_s + 2.0
        for agent in (*self._roster.agents.values(), *self._leaving):
            agent.wait(deadline_s - time.monotonic())
        self._board.close()

    def _welcome(self, number: int, channel: JsonChannel) -> None:
        """An agent has proved itself."""
        agent = self._roster.awaited(number)
        if agent is None and self._roster.adopts:
            agent = AdoptedAgent(number)
        if agent is None:
            channel.close()
            return
        agent.channel, agent.heard_s = channel, time.monotonic()
        self._board.connect(channel, agent)

    def _hear(self, agent: AgentHandle | AdoptedAgent) -> Iterator[Heard | Lost]:
        if agent.channel is None or agent.channel.fileno() < 0:
            return
        agent.channel.flush()
        self._watch(agent)
        try:
            messages = agent.channel.receive()
        except ConnectionError:
            yield from self._roster.lose(agent, time.monotonic())
            return
        for message in messages:
            if (heard := self._roster.hear(agent, message, time.monotonic())) is not None:
                yield heard

    def _forget(self, agent: AgentHandle | AdoptedAgent) -> None:
        """It is given up."""
        if agent.channel is not None:
            self._board.disconnect(agent.channel)
        self._leaving.append(agent)

    def _watch(self, agent: AgentHandle | AdoptedAgent) -> None:
        """Asks the selector for what is needed of that agent just now."""
        if agent.channel is not None:
            self._board.watch(agent.channel, agent)
