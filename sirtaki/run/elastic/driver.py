"""Carries out what the rules of membership decide: has agents start ranks, asks discovery, says what happens."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from sirtaki.errors import ConfigError, LaunchError

from .actions import Action, Dismiss, End, Form, KillRank, Say, StartAgent, StartRank, StopAgent, Tell
from .agent_crew import AgentCrew, Heard, Lost
from .discovery import Discovery, Hosts
from .elastic_job import ElasticJob, Inheritance
from .elastic_output import ElasticOutput
from .job_members import JobMembers
from .workers import Phase, RankEnd, Worker

ADOPT_S = 30.0
"""How long a driver that takes over waits for agents; those that have lost others before may need some time."""

_TICK_S = 0.2


class Driver:
    """One job from start to end; used once."""

    def __init__(self, job: ElasticJob, inheritance: Inheritance, members: JobMembers, output: ElasticOutput) -> None:
        """Listens; with another driver's inheritance where its agents expect it."""
        self._members, self._output = members, output
        self._crew = AgentCrew(job, inheritance, output.pump)
        self._attendees: dict[int, Mapping[str, Any]] = {}
        self._hosts: dict[int, str] = {}
        self._end: End | None = None
        self._signal: int | None = None

    def run(self, hosts: Hosts, ask: Callable[[], Hosts] | None) -> int:
        """Runs the job to its end; no process of it is left on hosts that can be reached.

        Args:
            hosts: with which to begin.
            ask: for all hosts, from now on; None = they stay.

        Returns:
            0, the exit code of the rank that failed first, or 128 + the signal that ended this process.
        """
        discovery = None if ask is None else Discovery(ask, on_answer=self._crew.wake)
        with self._signals():
            try:
                self._do(self._members.found(hosts, time.monotonic()))
                while self._end is None and self._signal is None:
                    for event in self._crew.look(_TICK_S):
                        self._answer(event)
                    if discovery is not None:
                        self._hear_discovery(discovery)
                    self._do(self._members.tick(time.monotonic()))
            finally:
                if discovery is not None:
                    discovery.close()
                self._crew.close()
                self._output.finish()
        if self._signal is not None:
            return 128 + self._signal
        assert self._end is not None
        if self._end.text:
            self._output.say(self._end.text)
        return self._end.exit_code

    def take_over(self, hosts: Hosts, ask: Callable[[], Hosts] | None) -> int:
        """As `run`, for a job whose driver is lost: the agents that come say what there is.

        Args:
            hosts: fixed ones; where there is discovery, those whose agents come.
            ask: for all hosts, from now on; None = they stay.
        """
        reports: dict[str, Mapping[str, Any]] = {}
        later: list[Heard | Lost] = []
        deadline_s = time.monotonic() + ADOPT_S
        while self._crew.expected and time.monotonic() < deadline_s:
            for event in self._crew.look(_TICK_S):
                if isinstance(event, Heard) and event.message["is"] == "up":
                    reports[event.host] = event.message
                else:
                    later.append(event)
        self._crew.expected = set()
        workers = [
            self._adopted(host, *values)
            for host, report in reports.items()
            if host in self._crew.hosts
            for values in report["ranks"]
        ]
        known = [report["generation"] for report in reports.values()] or [{"number": 0, "workers": []}]
        newest = max(known, key=lambda generation: int(generation["number"]))
        goes_on = self._members.take_over(workers, self._crew.hosts, newest["number"], newest["workers"])
        there = f"{len(workers)} ranks on {', '.join(self._crew.hosts)}"
        if not goes_on:
            self._output.say(f"the driver is lost, and only {there} can be reached: too few to go on")
            self._crew.close()
            return 1
        self._output.say(f"the driver is lost; process {os.getpid()} on {socket.gethostname()} takes over {there}")
        self._crew.tell_each_other()
        for event in later:
            self._answer(event)
        return self.run(hosts if ask is None else _slots(self._crew.hosts, workers), ask)

    def _adopted(
        self, host: str, number: int, slot: int, phase: str, generation: int, rank: int | None, has_state: bool,
        attendee: Mapping[str, Any],
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
            since_s=time.monotonic(),
        )

    def _hear_discovery(self, discovery: Discovery) -> None:
        while (answer := discovery.take()) is not None:
            if isinstance(answer, LaunchError):
                self._output.say(f"host discovery script: {answer}; hosts stay as they are, it is asked again")
            else:
                self._do(self._members.found(answer, time.monotonic()))

    def _answer(self, event: Heard | Lost) -> None:
        now_s = time.monotonic()
        if isinstance(event, Lost):
            self._hosts = {worker: host for worker, host in self._hosts.items() if host != event.host}
            self._do(self._members.agent_lost(event.host, event.why, now_s))
            return
        match event.message:
            case {"is": "up"}:
                self._do(self._members.agent_up(event.host, now_s))
                self._crew.tell_each_other()
            case {"is": _, "worker": int(worker)} if self._hosts.get(worker) != event.host:
                pass  # it was given up
            case {"is": "joined", "worker": int(worker), "has_state": bool(has_state), "attendee": dict(attendee)}:
                self._attendees[worker] = attendee
                self._do(self._members.joined(worker, has_state=has_state, now_s=now_s))
            case {"is": "finished", "worker": int(worker)}:
                self._do(self._members.finished(worker, now_s))
            case {"is": "ended", "worker": int(worker), "exit_code": int(code), "reason": str(reason)}:
                del self._hosts[worker]
                self._attendees.pop(worker, None)
                self._do(self._members.ended(worker, RankEnd(exit_code=code, reason=reason), now_s))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartAgent(host=host):
                    try:
                        self._crew.start(host)
                    except OSError as err:
                        why = f"its agent could not be started: {err}"
                        self._do(self._members.agent_lost(host, why, time.monotonic()))
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
                    for host in {self._hosts[worker] for worker in workers}:
                        there = [worker for worker in workers if self._hosts[worker] == host]
                        told = {"do": "change", "workers": there, "change": change.value, "lost": lost}
                        self._crew.send(host, told)
                case Form():
                    self._announce(action)
                case Say(text=text):
                    self._output.say(text)
                case End():
                    self._end = action

    def _announce(self, form: Form) -> None:
        workers = self._members.roll.workers
        generation = {
            "number": form.number,
            "workers": form.workers,
            "members": [[workers[each].host, workers[each].slot, each in form.new] for each in form.workers],
            "attendees": [self._attendees[each] for each in form.workers],
        }
        for host in {workers[each].host for each in form.workers}:
            ranks = [[each, rank] for rank, each in enumerate(form.workers) if workers[each].host == host]
            self._crew.send(host, {"do": "generation", "ranks": ranks, **generation})

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and SIGHUP end the job; outside the main thread Python permits no handlers."""

        def remember(number: int, frame: FrameType | None) -> None:
            del frame
            self._signal = number
            self._crew.wake()

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, remember) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _slots(hosts: Sequence[str], workers: Sequence[Worker]) -> Hosts:
    """What is known of hosts before discovery has been asked."""
    slots = dict.fromkeys(hosts, 1)
    for worker in workers:
        slots[worker.host] = max(slots[worker.host], worker.slot + 1)
    return slots


def first_answer(ask: Callable[[], Hosts]) -> Hosts:
    """What discovery says at the start, where a failure is the user's to mend.

    Raises:
        ConfigError: there is no answer.
    """
    try:
        return ask()
    except LaunchError as err:
        raise ConfigError(f"host discovery script: {err}") from err
