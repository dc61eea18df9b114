"""The agents that a driver has: who may come, who is given up and why; without sockets, processes or a clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sirtaki.json_channel import encoded

AGENT_SILENT_S = 10.0
"""After which the agent of a host, and its ranks with it, are given up."""

REMEMBERED_S = 120.0
"""How long the others are told of an agent that is lost: it may live beyond a network that has come apart, and they
must find each other where it is this driver that has to end."""


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


class Channel(Protocol):
    """To an agent."""

    def send(self, message: Mapping[str, Any]) -> None:
        """What is sent to somebody who is gone is dropped."""
        ...

    def send_encoded(self, text: bytes) -> None:
        """As `send`, of what `json_channel.encoded` has given."""
        ...

    def close(self) -> None:
        """Ends it; again is harmless."""
        ...


_Channel = TypeVar("_Channel", bound=Channel)


class AgentRecord(Generic[_Channel]):
    """What is known of an agent.

    Attributes:
        host: "" = not known yet.
        number: names it in the job.
        channel: to it, None until it has proved itself.
        program: that has started it.
        started_s: when.
        heard_s: when something has come from it last.
        places: where a driver would listen that it has started.
    """

    def __init__(self, host: str, number: int, *, program: str, now_s: float) -> None:
        self.host, self.number, self.program = host, number, program
        self.channel: _Channel | None = None
        self.started_s = self.heard_s = now_s
        self.places: list[tuple[str, int]] = []

    @property
    def exit_code(self) -> int | None:
        """Of the program; None = it runs, or nobody knows."""
        return None

    def why_ended(self, code: int) -> str:
        """Why the program has ended with this exit code before the agent has come, as far as it is known."""
        return f"{os.path.basename(self.program)} ended with exit code {code}"

    def disconnect(self) -> None:
        """The agent ends its ranks and itself as soon as it notices."""
        if self.channel is not None:
            self.channel.close()


_Agent = TypeVar("_Agent", bound=AgentRecord[Any])  # of whatever channel


class Roster(Generic[_Agent]):
    """Of one driver.

    Attributes:
        agents: by host; who is given up is not among them.
        expected: numbers of those that another driver has started and that have not come yet.
        adopts: any other one of the job may come, too: the lost driver may have given it up.
    """

    def __init__(
        self,
        *,
        expected: Iterable[int],
        numbers: int,
        start_s: float,
        tells: bool,
        sent: Callable[[_Agent], None],
        let_go: Callable[[_Agent], None],
        now_s: float,
    ) -> None:
        """Has no agent yet.

        Args:
            expected: see above.
            numbers: of agents, that have been given.
            start_s: how long an agent may take to connect.
            tells: agents are told of each other, since one of them may start the next driver.
            sent: called after something was sent to an agent.
            let_go: called when an agent is let go, before its connection is closed.
            now_s: the time.
        """
        self.agents: dict[str, _Agent] = {}
        self.expected = set(expected)
        self.adopts = bool(self.expected)
        self._numbers, self._start_s, self._tells = numbers, start_s, tells
        self._sent, self._has_let_go = sent, let_go
        self._looked_s = now_s
        self._remembered: list[tuple[float, _Agent]] = []

    def next_number(self) -> int:
        """For an agent that is about to be started."""
        self._numbers += 1
        return self._numbers

    def started(self, agent: _Agent) -> None:
        """It is to come."""
        self.agents[agent.host] = agent

    def close_adoption(self) -> None:
        """Who has not come yet comes too late."""
        self.expected.clear()
        self.adopts = False

    def awaited(self, number: int) -> _Agent | None:
        """That of this number which has not come yet; None = there is none."""
        return next((each for each in self.agents.values() if each.number == number and each.channel is None), None)

    def hear(self, agent: _Agent, message: Mapping[str, Any], now_s: float) -> Heard | None:
        """An agent has said that; None = nothing for others."""
        agent.heard_s = now_s
        match message:
            case {"is": "beat"}:
                self.send(agent.host, {"do": "beat"})
                return None
            case {"is": "up", "host": str(host), "places": list(places)}:
                agent.places = [(address, port) for address, port in places]
                if not agent.host:
                    self.expected.discard(agent.number)
                    self._numbers = max(self._numbers, agent.number)
                    agent.host, self.agents[host] = host, agent
        return Heard(host=agent.host, message=message) if agent.host else None

    def send(self, host: str, message: Mapping[str, Any]) -> None:
        """To the agent of a host; nothing happens if there is none."""
        self.send_to([host], message)

    def send_to(self, hosts: Iterable[str], message: Mapping[str, Any]) -> None:
        """The same to the agents of these hosts."""
        text = encoded(message)
        for host in hosts:
            agent = self.agents.get(host)
            if agent is not None and agent.channel is not None:
                agent.channel.send_encoded(text)
                self._sent(agent)

    def tell_each_other(self) -> None:
        """Lets all agents know who may be the next driver."""
        if self._tells:
            known = (*self.agents.values(), *(agent for _, agent in self._remembered))
            agents = [[agent.number, agent.places] for agent in known if agent.places]
            self.send_to(self.agents, {"do": "agents", "agents": agents})

    def tick(self, now_s: float) -> Iterator[Lost]:
        """Those that have not come, or say nothing any more."""
        if now_s - self._looked_s > AGENT_SILENT_S / 2:  # this process was stopped, or the machine slept
            for agent in self.agents.values():
                agent.heard_s = now_s
        self._looked_s = now_s
        self._remembered = [(until_s, agent) for until_s, agent in self._remembered if now_s < until_s]
        for agent in list(self.agents.values()):
            if agent.channel is None and (code := agent.exit_code) is not None:
                yield from self.lose(agent, now_s, agent.why_ended(code))
            elif agent.channel is None and now_s - agent.started_s > self._start_s:
                yield from self.lose(agent, now_s, f"its agent has not answered within {self._start_s:g} s")
            elif agent.channel is not None and now_s - agent.heard_s > AGENT_SILENT_S:
                yield from self.lose(agent, now_s, f"it has been silent for {AGENT_SILENT_S:g} s")

    def lose(self, agent: _Agent, now_s: float, why: str = "its agent is gone") -> Iterator[Lost]:
        """An agent is gone; nothing if it had been given up, or has never said its host."""
        is_known = self.agents.get(agent.host) is agent
        self._let_go(agent)
        if is_known:
            self._remembered.append((now_s + REMEMBERED_S, agent))
            yield Lost(host=agent.host, why=why)

    def stop(self, agent: _Agent) -> None:
        """It is to end; nothing that it says counts any more."""
        if agent.channel is not None:
            agent.channel.send({"do": "end"})
        self._let_go(agent)

    def _let_go(self, agent: _Agent) -> None:
        """Without a word, since it may be this side that has to end; an agent without a driver ends, or finds one."""
        if self.agents.get(agent.host) is agent:
            del self.agents[agent.host]
        self._has_let_go(agent)
        agent.disconnect()
