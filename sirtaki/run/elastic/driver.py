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
from typing import Any, Protocol

from sirtaki.errors import ConfigError, LaunchError

from .direction import Crew, Direction, has_waited
from .discovery import Discovery, Hosts
from .job_members import JobMembers
from .roster import Heard, Lost
from .workers import Worker

_TICK_S = 0.2


class HeardCrew(Crew, Protocol):
    """Agents that are heard, too."""

    @property
    def expected(self) -> set[int]:
        """Numbers of agents that another driver has started and that have not come yet."""
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


class Output(Protocol):
    """What is shown to the user."""

    def say(self, text: str) -> None:
        """A line of the driver's own."""
        ...

    def finish(self) -> None:
        """Nothing more comes."""
        ...


class Driver:
    """One job from start to end; used once."""

    def __init__(self, crew: HeardCrew, members: JobMembers, output: Output) -> None:
        """Does nothing yet.

        Args:
            crew: the agents, which end with the driver.
            members: the rules.
            output: ends with the driver, too.
        """
        self._crew, self._output = crew, output
        self._direction = Direction(members, crew, output.say)
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
                self._output.finish()
        if self._signal is not None:
            return 128 + self._signal
        end = self._direction.end
        assert end is not None
        if end.text:
            self._output.say(end.text)
        return end.exit_code

    def take_over(self, hosts: Hosts, ask: Callable[[], Hosts] | None) -> int:
        """As `run`, for a job whose driver is lost: the agents that come say what there is.

        Args:
            hosts: fixed ones; where there is discovery, those whose agents come.
            ask: for all hosts, from now on; None = they stay.
        """
        reports: dict[str, Mapping[str, Any]] = {}
        later: list[Heard | Lost] = []
        begin_s = time.monotonic()
        while not has_waited(time.monotonic() - begin_s, reports, self._crew.expected):
            for event in self._crew.look(_TICK_S):
                if isinstance(event, Heard) and event.message["is"] == "up":
                    reports[event.host] = event.message
                else:
                    later.append(event)
        self._crew.expect_no_more()
        goes_on = self._direction.take_over(reports, time.monotonic())
        workers = list(self._direction.members.roll.workers.values())
        there = f"{len(workers)} ranks on {', '.join(self._crew.hosts)}"
        if not goes_on:
            self._output.say(f"the driver is lost, and only {there} can be reached: too few to go on")
            self._crew.close()
            return 1
        self._output.say(f"the driver is lost; process {os.getpid()} on {socket.gethostname()} takes over {there}")
        self._crew.tell_each_other()
        self._direction.answer(later, time.monotonic())
        return self.run(hosts if ask is None else _slots(self._crew.hosts, workers), ask)

    def _hear_discovery(self, discovery: Discovery) -> None:
        while (answer := discovery.take()) is not None:
            if isinstance(answer, LaunchError):
                self._output.say(f"host discovery script: {answer}; hosts stay as they are, it is asked again")
            else:
                self._direction.found(answer, time.monotonic())

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
