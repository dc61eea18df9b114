"""Names the ranks that others wait for, and ends waits that would never end.

The watchdog has a thread of its own, because the main thread is the one that hangs. It sends nothing while nobody waits
too long: it looks for messages a few times a second, and asks the other ranks where they are only once a wait on this
rank has passed the stall time. A courier carries these messages, and those of others that must be heard beside the
collectives.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from sirtaki.errors import CommError, PeerLostError, StallError
from sirtaki.machine import free_in_forked_children

from .communicator import Communicator
from .failure import FailureBoard
from .waiting import Deadline, Poll, wait_for


class Tag(IntEnum):
    """What a message is about, and with it who reads it."""

    WHERE = 1
    """The watchdog asks where a rank is."""
    HERE = 2
    """The answer to that."""
    LOST = 3
    """The job is lost."""
    LEAVING = 4
    """The sender needs the others no more."""
    JOINED = 5
    """The sender has called `join()`."""
    ITERATION = 6
    """The sender takes part in an iteration of an optimizer, in which the receiver, which has joined, is missing."""
    BLOCKED = 7
    """What the sender waits for, which may be the receiver."""


class MessageBoard:
    """Carries small picklable messages; any thread may use it, and no call waits for another rank."""

    def __init__(self, comm: Communicator) -> None:
        """Keeps `comm`, a duplicate that nobody else uses; its owner frees it."""
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._lock = free_in_forked_children(threading.Lock())
        self._received: defaultdict[Tag, list[tuple[int, Any]]] = defaultdict(list)

    def send(self, rank: int, tag: Tag, message: Any = None) -> None:
        """Sends a message (Any: whatever can be pickled) to another rank; messages of one sender keep their order."""
        with self._lock:
            self._comm.post(rank, tag, pickle.dumps(message))

    def send_all(self, tag: Tag, message: Any = None) -> None:
        """Sends a message to all other ranks."""
        for rank in range(self.size):
            if rank != self.rank:
                self.send(rank, tag, message)

    def receive(self, tag: Tag) -> list[tuple[int, Any]]:
        """What has come under this tag since the last call: the senders' ranks and their messages, in order."""
        with self._lock:
            while (posted := self._comm.collect()) is not None:
                source, what, message = posted
                self._received[Tag(what)].append((source, pickle.loads(message)))
            return self._received.pop(tag, [])


logger = logging.getLogger(__name__)

TICK_S = 0.25
ANSWER_S = 3.0
"""How long the others have to say where they are."""

MOST_FAILURES = 5
"""After so many errors in a row the watchdog gives up."""

MOST_NAMED = 4
"""How many of the missing ranks a message names."""

LEAVE_GRACE_S = 10.0
"""How long a wait may last once a rank that is waited for has ended its script."""

NOT_THE_USERS = ("torch", "sirtaki", "importlib")
"""Packages whose code a user does not look for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingWait:
    """Something this rank waits for.

    Attributes:
        what: in words, equal on ranks that wait for the same thing.
        since_s: `time.monotonic()` when it began.
    """

    what: str
    since_s: float


class Watchdog:
    """Watches the waits of this rank and answers the questions of other ranks' watchdogs.

    Attributes:
        failures: where a stall that has lasted too long, or a lost rank, is reported.
    """

    def __init__(
        self, courier: MessageBoard, failures: FailureBoard, *, warning_s: float, shutdown: Callable[[], float | None]
    ) -> None:
        """Starts the thread if there are other ranks.

        Args:
            courier: carries the questions and answers.
            failures: where losses are reported.
            warning_s: a wait longer than this is a warning.
            shutdown: returns the seconds after which a wait is an error on all ranks, or None for never. Called in
                each look at a wait, because the limit may change.
        """
        self._courier, self.failures = courier, failures
        self._warning_s, self._shutdown = warning_s, shutdown
        self._waits: list[Callable[[], PendingWait | None]] = []
        self._progress: list[Callable[[], str]] = []
        self._left: dict[int, float] = {}
        self._answers: dict[int, str] = {}
        self._warned: set[tuple[str, float]] = set()
        self._leaving = threading.Event()
        self._closing = threading.Event()
        self._main_thread = threading.main_thread().ident
        self._thread = threading.Thread(target=self._run, name="sirtaki-watchdog", daemon=True)
        if courier.size > 1:
            self._thread.start()

    def watch(self, wait: Callable[[], PendingWait | None], progress: Callable[[], str]) -> None:
        """From now on looks at `wait()` and tells other ranks that ask `progress()`; the thread calls both.

        A `wait` that raises a `CommError` ends the job.
        """
        self._waits.append(wait)
        self._progress.append(progress)

    def forget(self, wait: Callable[[], PendingWait | None], progress: Callable[[], str]) -> None:
        """Undoes `watch`."""
        self._waits.remove(wait)
        self._progress.remove(progress)

    def describe(self) -> str:
        """What this rank does and how far it is, in words; "" if nothing of its script is under way."""
        doing = [f"waits for {wait.what}" for wait in self._current_waits()]
        if not doing and (line := self._location()):
            doing = [f"runs {line}"]
        return "; ".join([*doing, *self.progress()])

    def progress(self) -> list[str]:
        """How far this rank is, in words; empty if nothing is under way."""
        return [text for progress in self._progress if (text := progress())]

    def _current_waits(self) -> list[PendingWait]:
        waits = []
        for source in list(self._waits):
            try:
                wait = source()
            except CommError as err:  # something has found out by itself that it will never end
                self.fail(err)
                continue
            if wait is not None:
                waits.append(wait)
        return waits

    def _location(self) -> str | None:
        """The user's line that the main thread is at, if any."""
        # By where they lie: the user's own folder may have one of these names.
        packages = [sys.modules[name].__path__[0] for name in NOT_THE_USERS if name in sys.modules]
        not_the_users = ("<frozen", *(os.path.join(path, "") for path in packages))
        frame = sys._current_frames().get(self._main_thread or 0)
        while frame is not None:
            name = frame.f_code.co_filename
            if not name.startswith(not_the_users):
                return f"{os.path.basename(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back
        return None

    def _run(self) -> None:
        failed_in_a_row = 0
        while not self._closing.wait(TICK_S):
            try:
                self._look()
            except Exception:  # nobody else would notice a rank that hangs
                failed_in_a_row += 1
                if failed_in_a_row == MOST_FAILURES:
                    logger.exception("rank %d does not watch for stalls any more", self._courier.rank)
                    return
                logger.warning("looking for stalls failed on rank %d; trying again", self._courier.rank, exc_info=True)
            else:
                failed_in_a_row = 0

    def _look(self) -> None:
        self._read_messages()
        self._look_for_stalls()
        self.failures.attend()  # whoever waits may be where nothing of this is done

    def _read_messages(self) -> bool:
        """Read messages, answer questions, and return whether all ranks have answered this rank's last question."""
        courier = self._courier
        for rank, _ in courier.receive(Tag.WHERE):
            courier.send(rank, Tag.HERE, self.describe() or "runs no line of its script")
        self._answers |= dict(courier.receive(Tag.HERE))
        for rank, _ in courier.receive(Tag.LEAVING):
            self._left.setdefault(rank, time.monotonic())
        for _, (kind, message) in courier.receive(Tag.LOST):
            self.failures.report(kind(message))
        return len(self._answers) == self._courier.size - 1

    def _look_for_stalls(self) -> None:
        if self.failures.error is not None:
            return
        now = time.monotonic()
        for wait in self._current_waits():
            waited_s, shutdown_s = now - wait.since_s, self._shutdown()
            grace_s = LEAVE_GRACE_S if shutdown_s is None else min(LEAVE_GRACE_S, shutdown_s / 2)
            if self.failures.suspicious:
                grace_s = 0.0
            gone = [rank for rank, when in self._left.items() if now - max(when, wait.since_s) >= grace_s]
            if gone:
                self.fail(
                    PeerLostError(
                        f"rank {self._courier.rank} waits for {wait.what}, but rank {gone[0]} has ended its script; "
                        "all ranks must run the same number of steps (or call join())"
                    )
                )
            elif shutdown_s is not None and waited_s > shutdown_s:
                self.fail(StallError(self._report(wait, waited_s)[0]))
            elif waited_s > self._warning_s and (wait.what, wait.since_s) not in self._warned:
                self._warned.add((wait.what, wait.since_s))
                text, is_first = self._report(wait, waited_s)
                logger.log(logging.WARNING if is_first else logging.DEBUG, "%s", text)

    def _report(self, wait: PendingWait, waited_s: float) -> tuple[str, bool]:
        """Ask all ranks where they are.

        Returns:
            The answers in words, as one line; and whether no lower rank waits for the same, which would say it, too.
        """
        self._answers = {}
        self._courier.send_all(Tag.WHERE)
        wait_for(self._read_messages, Deadline.after(ANSWER_S), Poll.SLICES)
        missing, waiting = [], [self._courier.rank]
        for rank in range(self._courier.size):
            answer = self._answers.get(rank, "does not answer: it is gone or stopped")
            if rank in self._left:
                answer = "has ended its script"
            if answer.startswith(f"waits for {wait.what}"):
                waiting.append(rank)
            elif rank != self._courier.rank:
                missing.append(f"rank {rank} {answer}")
        text = f"rank {self._courier.rank} has waited {waited_s:.0f} s for {wait.what}"
        if missing:
            more = f"; and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
            text = "; missing: ".join([text, *missing[:MOST_NAMED]]) + more
        return text, min(waiting) == self._courier.rank

    def fail(self, error: CommError) -> None:
        """Ends the job with this error on all ranks."""
        self.failures.report(error)
        self._courier.send_all(Tag.LOST, (type(error), str(error)))

    def leave(self, timeout_s: float) -> bool:
        """Tells the others that this rank needs them no more, and waits for the same from them.

        Returns:
            True if all ranks have left within `timeout_s`; may be called again if not.
        """
        if self._courier.size == 1:
            return True
        if not self._leaving.is_set():
            self._leaving.set()
            self._courier.send_all(Tag.LEAVING)
        others, deadline = self._courier.size - 1, Deadline.after(timeout_s)
        wait_for(lambda: len(self._left) == others or self.failures.error is not None, deadline, Poll.SLICES)
        return len(self._left) == others

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
