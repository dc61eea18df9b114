"""The driver of an elastic job: asks discovery, tells the rules of membership what happens, does what they say."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from sirtaki.errors import ConfigError, LaunchError

from ..hosts import MOST_SLOTS, parse_hosts
from ..supervisor import signals_heard
from .agent import Done, Ended, Joined, Patient, ToAgent, Told, Up
from .agent_crew import Heard, Lost
from .job_members import (
    NO_GENERATION,
    Action,
    Dismiss,
    End,
    Form,
    JobMembers,
    KillRank,
    Quorum,
    Say,
    Settle,
    StartAgent,
    StartRank,
    StopAgent,
    Tell,
    Worker,
)

INTERVAL_S = 1.0
"""Between one answer and the next question."""

LIMIT_S, MOST_BYTES = 20.0, 1 << 20
"""How long the script may take, and how much it may print."""

MOST_HOSTS = 10_000

Hosts = Mapping[str, int]


def ask_script(script: str, slots: int, limit_s: float = LIMIT_S) -> Hosts:
    """Runs the script once: one host a line, `name` or `name:slots`; blank lines and `#` comments are ignored.

    Args:
        script: of the user, with its path; anything that can be executed.
        slots: of a host that the script gives no number for.
        limit_s: how long it may take; then it is killed, with what it has started.

    Raises:
        LaunchError: it cannot be run, fails, hangs or prints what names no host.
    """
    deadline_s = time.monotonic() + limit_s
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [str(Path(script).resolve())] if Path(script).exists() else ["sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as err:
            raise LaunchError(
                f"it cannot be run ({err}); make it executable, with #!/bin/sh in its first line"
            ) from err
        try:
            while process.poll() is None:
                if sum(os.fstat(file.fileno()).st_size for file in (out, errors)) > MOST_BYTES:
                    raise LaunchError(f"it has printed more than {MOST_BYTES} bytes")
                if time.monotonic() > deadline_s:
                    raise LaunchError(f"it has not ended within {limit_s:g} s")
                time.sleep(0.01)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told, complaint = (os.pread(file.fileno(), MOST_BYTES, 0).decode(errors="replace") for file in (out, errors))
    if process.returncode != 0:
        last = (complaint.strip().splitlines() or [""])[-1]
        raise LaunchError(f"it ended with exit code {process.returncode}{f': {last[:200]}' if last else ''}")
    return _hosts(told, slots)


def _hosts(text: str, slots: int) -> Hosts:
    found: dict[str, int] = {}
    for line in text.splitlines():
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        try:
            (host,) = parse_hosts(entry if ":" in entry else f"{entry}:{slots}")
        except (ConfigError, ValueError) as err:
            raise LaunchError(
                f"it printed {entry[:80]!r}, which is no host; write name or name:slots, of {MOST_SLOTS} slots at most"
            ) from err
        found[host.name] = min(MOST_SLOTS, found.get(host.name, 0) + host.slots)
        if len(found) > MOST_HOSTS:
            raise LaunchError(f"it printed more than {MOST_HOSTS} hosts")
    return found


class Discovery:
    """Asks in a thread, since an answer may take long."""

    def __init__(
        self, ask: Callable[[], Hosts], *, on_answer: Callable[[], None], interval_s: float = INTERVAL_S
    ) -> None:
        """Begins at once.

        Args:
            ask: for all hosts; LaunchError where there is no answer.
            on_answer: called in the thread when `take` has something.
            interval_s: between one answer and the next question.
        """
        self._ask, self._on_answer, self._interval_s = ask, on_answer, interval_s
        self._answers: queue.SimpleQueue[Hosts | LaunchError] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        self._thread.start()

    def take(self) -> Hosts | LaunchError | None:
        """The oldest answer that has not been taken, or why there was none; None = nothing new."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get_nowait()
        return None

    def close(self) -> None:
        """Asks no more; a question that is being asked is not waited for."""
        self._closing.set()

    def _run(self) -> None:
        last: object = None
        while not self._closing.wait(self._interval_s):
            try:
                answer: Hosts | LaunchError = self._ask()
            except LaunchError as err:
                answer = err
            found = str(answer) if isinstance(answer, LaunchError) else dict(answer)
            if found != last:  # an error that stays is told once
                last = found
                self._answers.put(answer)
                self._on_answer()


ADOPT_S = 30.0
"""How long a driver that takes over waits for more agents than it needs; those that have tried others before may need
some time."""

GATHER_S = 120.0
"""How long it waits for as many as it needs: one agent finds the end of a connection at once, another one silence."""


class Crew(Protocol):
    """Agents as they are given orders and heard: real ones, or Ray's."""

    @property
    def hosts(self) -> list[str]:
        """Hosts of agents that have not been given up."""
        ...

    @property
    def expected(self) -> set[int]:
        """Numbers of agents that another driver has started and that have not come yet."""
        ...

    def start(self, host: str) -> None:
        """Starts the agent of a host; OSError if its command cannot be run."""
        ...

    def stop(self, host: str) -> None:
        """Has the agent of a host end."""
        ...

    def send_to(self, hosts: Iterable[str], message: ToAgent) -> None:
        """Sends the message to the agents of these hosts; nothing happens where there is none."""
        ...

    def tell_each_other(self) -> None:
        """Lets all agents know who may be the next driver."""
        ...

    def expect_no_more(self) -> None:
        """Who has not come yet comes too late."""
        ...

    def wake(self) -> None:
        """From any thread: `look` returns."""
        ...

    def look(self, timeout_s: float) -> Iterator[Heard | Lost]:
        """Waits for something to happen, at most so long, and says what."""
        ...

    def close(self, number: int | None = None) -> None:
        """Has all agents end their ranks and themselves, and waits for it, within limits.

        Args:
            number: the signal that is the reason; None = none is.
        """
        ...


Reports = Mapping[str, Up]
"""What agents have said that have come to a driver that takes over, by host."""


def _newest(reports: Reports) -> Form:
    """The newest generation that any agent has reported."""
    known = [report.generation for report in reports.values()]
    return max(known, key=lambda form: (form.number, -len(form.older or ())), default=NO_GENERATION)


def has_waited(for_s: float, reports: Reports, expected: Collection[int]) -> bool:
    """Whether a driver that takes over has waited for long enough.

    Args:
        for_s: how long it has.
        reports: of agents that have come.
        expected: numbers of those that have not.
    """
    newest, quorum = _newest(reports), Quorum()
    present = [worker.number for report in reports.values() for worker in report.ranks]
    quorum.take_over([*(newest.older or ()), newest.workers], newest.number, present)
    if not newest.number or quorum.is_lost:  # it could not go on with these
        return for_s > GATHER_S
    return not expected or for_s > ADOPT_S


class Direction:
    """Tells the rules of membership what agents say, and agents what the rules decide.

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
        self.end: End | None = None

    def take_over(self, reports: Reports, now_s: float) -> bool:
        """Goes on where another driver is lost; False = too few of the job can be reached."""
        there = [report for report in reports.values() if report.host in self._crew.hosts]
        workers = [replace(worker, since_s=now_s) for report in there for worker in report.ranks]
        self.members.slow(max((report.patience_s for report in there), default=0.0))
        return self.members.take_over(workers, self._crew.hosts, _newest(reports), now_s)

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
                self._do(self._told(event, now_s), now_s)
        self.tick(now_s)

    def _told(self, event: Heard | Lost, now_s: float) -> Sequence[Action]:
        members = self.members
        if isinstance(event, Lost):
            return members.agent_lost(event.host, event.why, now_s)
        match message := event.message:
            case Up():
                self._crew.tell_each_other()
                return members.agent_up(event.host, now_s)
            case Told(number):
                return members.told(event.host, number, now_s)
            case Joined() | Patient() | Done() | Ended():
                worker = members.member_list.workers.get(message.worker)
                if worker is None or worker.host != event.host:
                    return []  # it was given up
                match message:
                    case Joined(has_state=has_state, attendee=attendee):
                        worker.attendee = attendee
                        return members.joined(worker.number, has_state=has_state, now_s=now_s)
                    case Patient(seconds=seconds):
                        members.slow(seconds)
                    case Done():
                        return members.finished(worker.number, now_s)
                    case Ended(end=end):
                        return members.ended(worker.number, end, now_s)
        return []

    def _do(self, actions: Sequence[Action], now_s: float) -> None:
        for action in actions:
            match action:
                case StartAgent(host):
                    try:
                        self._crew.start(host)
                    except OSError as err:
                        self._do(self.members.agent_lost(host, f"its agent could not be started: {err}", now_s), now_s)
                case StopAgent(host):
                    self._crew.stop(host)
                case StartRank() | KillRank() | Dismiss():
                    self._crew.send_to([action.host], action)
                case Tell():
                    workers = self.members.member_list.workers
                    there = [workers[each].host for each in action.workers if each in workers]
                    self._crew.send_to(dict.fromkeys(there), action)
                case Form():  # to all agents where another driver may be needed, else to those of members
                    hosts = [member.host for member in action.members]
                    self._crew.send_to(dict.fromkeys(self._crew.hosts if action.older is not None else hosts), action)
                case Settle():
                    self._crew.send_to(self._crew.hosts, action)
                case Say(text):
                    self._say(text)
                case End():
                    self.end = action


_TICK_S = 0.2


class Driver:
    """One job from start to end; used once."""

    def __init__(
        self,
        crew: Crew,
        members: JobMembers,
        say: Callable[[str], None],
        *,
        finish_output: Callable[[], None] = lambda: None,
    ) -> None:
        """Does nothing yet.

        Args:
            crew: the agents, which end with the driver.
            members: the rules.
            say: shows a line to the user.
            finish_output: called once no rank writes anything any more, before the last line.
        """
        self._crew, self._say, self._finish_output = crew, say, finish_output
        self._direction = Direction(members, crew, say)
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
        with signals_heard(self._remember):
            try:
                self._direction.found(hosts, time.monotonic())
                while self._direction.end is None and self._signal is None:
                    events = list(self._crew.look(_TICK_S))
                    self._direction.answer(events, time.monotonic())
                    if discovery is not None:
                        self._hear_discovery(discovery)
            finally:
                if discovery is not None:
                    discovery.close()
                self._crew.close(self._signal)
                self._finish_output()
        if self._signal is not None:
            return 128 + self._signal
        end = self._direction.end
        assert end is not None
        if end.text:
            self._say(end.text)
        return end.exit_code

    def take_over(self, hosts: Hosts, ask: Callable[[], Hosts] | None) -> int:
        """As `run`, for a job whose driver is lost: the agents that come say what there is.

        Args:
            hosts: fixed ones; where there is discovery, those whose agents come.
            ask: for all hosts, from now on; None = they stay.
        """
        reports: dict[str, Up] = {}
        later: list[Heard | Lost] = []
        begin_s = time.monotonic()
        while not has_waited(time.monotonic() - begin_s, reports, self._crew.expected):
            for event in self._crew.look(_TICK_S):
                if isinstance(event, Heard) and isinstance(event.message, Up):
                    reports[event.host] = event.message
                else:
                    later.append(event)
        self._crew.expect_no_more()
        goes_on = self._direction.take_over(reports, time.monotonic())
        workers = list(self._direction.members.member_list.workers.values())
        there = f"{len(workers)} ranks on {', '.join(self._crew.hosts)}"
        if not goes_on:
            self._say(f"the driver is lost, and only {there} can be reached: too few to go on")
            self._crew.close()
            return 1
        self._say(f"the driver is lost; process {os.getpid()} on {socket.gethostname()} takes over {there}")
        self._crew.tell_each_other()
        self._direction.answer(later, time.monotonic())
        return self.run(hosts if ask is None else _slots(self._crew.hosts, workers), ask)

    def _hear_discovery(self, discovery: Discovery) -> None:
        while (answer := discovery.take()) is not None:
            if isinstance(answer, LaunchError):
                self._say(f"host discovery script: {answer}; hosts stay as they are, it is asked again")
            else:
                self._direction.found(answer, time.monotonic())

    def _remember(self, number: int) -> None:
        self._signal = number
        self._crew.wake()


def _slots(hosts: Sequence[str], workers: Sequence[Worker]) -> Hosts:
    """What is known of hosts before discovery has been asked."""
    slots = dict.fromkeys(hosts, 1)
    for worker in workers:
        slots[worker.host] = max(slots[worker.host], worker.slot + 1)
    return slots
