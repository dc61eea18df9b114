"""What messages of agents mean to the rules of membership, and what the rules want means to agents.

Without sockets, processes or a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from .actions import Action, Dismiss, End, Form, KillRank, Say, Settle, StartAgent, StartRank, StopAgent, Tell
from .agent_rules import NO_GENERATION
from .job_members import JobMembers
from .quorum import Quorum
from .roster import Heard, Lost
from .workers import Phase, RankEnd, Worker

ADOPT_S = 30.0
"""How long a driver that takes over waits for more agents than it needs; those that have tried others before may need
some time."""

GATHER_S = 120.0
"""How long it waits for as many as it needs: one agent finds the end of a connection at once, another one silence."""


class Crew(Protocol):
    """The agents that are told."""

    @property
    def hosts(self) -> list[str]:
        """Of agents that have not been given up."""
        ...

    def start(self, host: str) -> None:
        """Starts the agent of a host; OSError if its command cannot be run."""
        ...

    def stop(self, host: str) -> None:
        """Has the agent of a host end."""
        ...

    def send(self, host: str, message: Mapping[str, Any]) -> None:
        """To the agent of a host; nothing happens if there is none."""
        ...

    def send_to(self, hosts: Iterable[str], message: Mapping[str, Any]) -> None:
        """The same to the agents of these hosts."""
        ...

    def tell_each_other(self) -> None:
        """Lets all agents know who may be the next driver."""
        ...


def _newest(reports: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The newest generation that any agent has reported."""
    known = [report["generation"] for report in reports.values()] or [NO_GENERATION]
    return max(known, key=lambda generation: (int(generation["number"]), -len(generation["older"])))


def has_waited(for_s: float, reports: Mapping[str, Mapping[str, Any]], expected: Collection[int]) -> bool:
    """Whether a driver that takes over has waited for long enough.

    Args:
        for_s: how long it has.
        reports: of agents that have come, by host.
        expected: numbers of those that have not.
    """
    if not are_enough(reports):
        return for_s > GATHER_S
    return not expected or for_s > ADOPT_S


def are_enough(reports: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a driver could go on with the agents that have reported this, by host."""
    newest, quorum = _newest(reports), Quorum()
    present = [values[0] for report in reports.values() for values in report["ranks"]]
    quorum.take_over([*newest["older"], newest["workers"]], newest["number"], present)
    return bool(newest["number"]) and not quorum.is_lost


class Direction:
    """Of one driver.

    Attributes:
        members: the rules.
        end: of the job; None = it goes on.
    """

    def __init__(self, members: JobMembers, crew: Crew, say: Callable[[str], None]) -> None:
        """Does nothing yet.

        Args:
            members: the rules.
            crew: the agents.
            say: shows a line to the user.
        """
        self.members = members
        self._crew, self._say = crew, say
        self._attendees: dict[int, Mapping[str, Any]] = {}
        self._hosts: dict[int, str] = {}
        self.end: End | None = None

    def take_over(self, reports: Mapping[str, Mapping[str, Any]], now_s: float) -> bool:
        """Goes on where another driver is lost; False = too few of the job can be reached.

        Args:
            reports: what agents have said that have come, by host.
            now_s: the time.
        """
        hosts = self._crew.hosts
        workers = [
            self._adopted(host, *values, now_s=now_s)
            for host, report in reports.items()
            if host in hosts
            for values in report["ranks"]
        ]
        newest = _newest(reports)
        self.members.pool.remember(newest["left_out"], now_s)
        return self.members.take_over(
            workers, hosts, newest["number"], newest["workers"], newest["older"], has_state=newest["has_state"]
        )

    def _adopted(
        self, host: str, number: int, slot: int, phase: str, generation: int, rank: int | None, has_state: bool,
        attendee: Mapping[str, Any], *, now_s: float,
    ) -> Worker:  # fmt: skip
        self._hosts[number], self._attendees[number] = host, attendee
        return Worker(
            number=number,
            host=host,
            slot=slot,
            phase=Phase(phase),
            rank=rank,
            generation=generation,
            has_state=has_state,
            since_s=now_s,
        )

    def found(self, hosts: Mapping[str, int], now_s: float) -> None:
        """Discovery says which hosts there are, with how many slots each."""
        self._do(self.members.found(hosts, now_s), now_s)

    def tick(self, now_s: float) -> None:
        """Time has passed; to be told often."""
        self._do(self.members.tick(now_s), now_s)

    def answer(self, events: Iterable[Heard | Lost], now_s: float) -> None:
        """Agents have said something, or are given up, all at one time as far as anybody knows."""
        with self.members.deferring():
            for event in events:
                self._answer(event, now_s)
        self.tick(now_s)

    def _answer(self, event: Heard | Lost, now_s: float) -> None:
        if isinstance(event, Lost):
            self._hosts = {worker: host for worker, host in self._hosts.items() if host != event.host}
            self._do(self.members.agent_lost(event.host, event.why, now_s), now_s)
            return
        match event.message:
            case {"is": "up"}:
                self._do(self.members.agent_up(event.host, now_s), now_s)
                self._crew.tell_each_other()
            case {"is": "told", "number": int(number)}:
                self._do(self.members.told(event.host, number, now_s), now_s)
            case {"is": _, "worker": int(worker)} if self._hosts.get(worker) != event.host:
                pass  # it was given up
            case {"is": "joined", "worker": int(worker), "has_state": bool(has_state), "attendee": dict(attendee)}:
                self._attendees[worker] = attendee
                self._do(self.members.joined(worker, has_state=has_state, now_s=now_s), now_s)
            case {"is": "patient", "worker": int(), "seconds": float(seconds)}:
                self.members.slow(seconds)
            case {"is": "finished", "worker": int(worker)}:
                self._do(self.members.finished(worker, now_s), now_s)
            case {"is": "ended", "worker": int(worker), "exit_code": int(code), "reason": str(reason)}:
                del self._hosts[worker]
                self._attendees.pop(worker, None)
                self._do(self.members.ended(worker, RankEnd(exit_code=code, reason=reason), now_s), now_s)

    def _do(self, actions: Sequence[Action], now_s: float) -> None:
        for action in actions:
            match action:
                case StartAgent(host=host):
                    try:
                        self._crew.start(host)
                    except OSError as err:
                        self._do(self.members.agent_lost(host, f"its agent could not be started: {err}", now_s), now_s)
                case StopAgent(host=host):
                    self._crew.stop(host)
                case StartRank(worker=worker, host=host, slot=slot):
                    self._hosts[worker] = host
                    self._crew.send(host, {"do": "start", "worker": worker, "slot": slot})
                case KillRank(worker=worker, host=host, at_once=at_once):
                    self._crew.send(host, {"do": "kill", "worker": worker, "at_once": at_once})
                case Dismiss(worker=worker, host=host):
                    self._crew.send(host, {"do": "dismiss", "worker": worker})
                case Tell(workers=workers, change=change, lost=lost):
                    for host in {self._hosts[worker]: None for worker in workers}:
                        there = [worker for worker in workers if self._hosts[worker] == host]
                        told = {"do": "change", "workers": there, "change": change.value, "lost": lost}
                        self._crew.send(host, told)
                case Form():
                    self._announce(action, now_s)
                case Settle(number=number, older=older):
                    self._crew.send_to(self._crew.hosts, {"do": "settle", "number": number, "older": older})
                case Say(text=text):
                    self._say(text)
                case End():
                    self.end = action

    def _announce(self, form: Form, now_s: float) -> None:
        """To agents of members, and to all others where another driver may be needed: one text for all of them."""
        workers = self.members.roll.workers
        hosts = self._crew.hosts if form.older is not None else {workers[each].host: None for each in form.workers}
        generation = {
            "number": form.number,
            "workers": form.workers,
            "older": form.older,
            "has_state": len(form.new) < len(form.workers),
            "left_out": self.members.pool.left_out(now_s),
            "members": [[workers[each].host, workers[each].slot, each in form.new] for each in form.workers],
            "attendees": [self._attendees[each] for each in form.workers],
        }
        self._crew.send_to(hosts, {"do": "generation", **generation})
