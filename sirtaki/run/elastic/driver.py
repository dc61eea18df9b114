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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from sirtaki.errors import ConfigError, LaunchError

from ..hosts import MOST_SLOTS, parse_hosts
from ..supervisor import signals_heard
from .agent_crew import AgentCrew
from .job_members import Crew, Heard, JobMembers, Lost, Up, has_waited

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

    def take(self) -> Iterator[Hosts | LaunchError]:
        """What has been answered, or why there was no answer, since the last time."""
        while not self._answers.empty():
            yield self._answers.get()

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


class RunningCrew(Crew, Protocol):
    """Agents as a driver runs them: real ones, or Ray's."""

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


_TICK_S = 0.2


def run_job(
    crew: RunningCrew,
    members: JobMembers,
    say: Callable[[str], None],
    hosts: Hosts,
    ask: Callable[[], Hosts] | None,
    *,
    finish_output: Callable[[], None] = lambda: None,
) -> int:
    """Runs a job to its end; no process of it is left on hosts that can be reached.

    Args:
        crew: the agents, which end with this.
        members: the rules.
        say: shows a line to the user.
        hosts: with which to begin.
        ask: for all hosts, from now on; None = they stay.
        finish_output: called once no rank writes anything any more, before the last line.

    Returns:
        0, the exit code of the rank that failed first, or 128 + the signal that ended this process.
    """
    signals: list[int] = []

    def remember(number: int) -> None:
        signals.append(number)
        crew.wake()

    discovery = None if ask is None else Discovery(ask, on_answer=crew.wake)
    with signals_heard(remember):
        try:
            members.found(hosts, time.monotonic())
            while members.end is None and not signals:
                members.answer(list(crew.look(_TICK_S)), time.monotonic())
                for answer in () if discovery is None else discovery.take():
                    if isinstance(answer, LaunchError):
                        say(f"host discovery script: {answer}; hosts stay as they are, it is asked again")
                    else:
                        members.found(answer, time.monotonic())
        finally:
            if discovery is not None:
                discovery.close()
            crew.close(signals[-1] if signals else None)
            finish_output()
    if signals:
        return 128 + signals[-1]
    assert members.end is not None
    if members.end.text:
        say(members.end.text)
    return members.end.exit_code


def take_over(crew: AgentCrew, members: JobMembers, say: Callable[[str], None]) -> Hosts | None:
    """Goes on with a job whose driver is lost: the agents that come say what there is.

    Returns:
        The hosts that the job goes on with, as far as their agents tell; None = there are too few, and all have ended.
    """
    reports: dict[str, Up] = {}
    later: list[Heard | Lost] = []
    begin_s = time.monotonic()
    while not has_waited(time.monotonic() - begin_s, reports, crew.expected):
        for event in crew.look(_TICK_S):
            if isinstance(event, Heard) and isinstance(event.message, Up):
                reports[event.host] = event.message
            else:
                later.append(event)
    crew.expect_no_more()
    goes_on = members.take_over(reports, time.monotonic())
    workers = members.member_list.workers.values()
    there = f"{len(workers)} ranks on {', '.join(crew.hosts)}"
    if not goes_on:
        say(f"the driver is lost, and only {there} can be reached: too few to go on")
        crew.close()
        return None
    say(f"the driver is lost; process {os.getpid()} on {socket.gethostname()} takes over {there}")
    crew.tell_each_other()
    members.answer(later, time.monotonic())
    slots = dict.fromkeys(crew.hosts, 1)
    for worker in members.member_list.workers.values():
        slots[worker.host] = max(slots.get(worker.host, 1), worker.slot + 1)
    return slots
