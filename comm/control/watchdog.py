"""Stall detection: find the ranks that a waiting rank misses, and fail waits that can never end.

The watchdog runs in its own thread, because the main thread may hang. It polls for messages of other ranks a few times
a second. It asks other ranks what they are doing only after a wait of this rank has exceeded the warning time. A
`MessageBoard` carries messages outside the collectives, for the watchdog and for `join()`.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from sirtaki.errors import CommError, PeerLostError, StallError
from sirtaki.machine import free_in_forked_children

from .communicator import Communicator
from .failure import FailureBoard
from .waiting import Deadline, Poll, start_thread, wait_for


class Tag(IntEnum):
    """Kind of a message of a `MessageBoard`. It determines which component of the receiver reads the message."""

    WHERE = 1
    """A watchdog asks what the receiver is doing."""
    HERE = 2
    """The sender answers `WHERE`: the message says what the sender is doing."""
    LOST = 3
    """The sender announces that the job has failed. The message contains the error."""
    LEAVING = 4
    """The sender has ended its script."""
    JOINED = 5
    """The sender has called `join()`."""
    ITERATION = 6
    """The sender is in an iteration of an optimizer. The receiver, which has called `join()`, must take part."""
    BLOCKED = 7
    """Report of what the sender has waited for, once its wait is long. If sender and receiver wait for each other, the
    receiver stops its own wait to end the deadlock."""
    OWN_TIME = 8
    """Report to rank 0: the seconds of an iteration in which the sending rank did not wait for other ranks."""


class MessageBoard:
    """Sends and receives small picklable messages. Thread-safe, non-blocking."""

    def __init__(self, comm: Communicator) -> None:
        """Use `comm`, which no other object may use. The caller frees it."""
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._lock = free_in_forked_children(threading.Lock())
        self._received: defaultdict[Tag, list[tuple[int, Any]]] = defaultdict(list)

    def send(self, rank: int, tag: Tag, message: Any = None) -> None:
        """Pickle a message and send it to `rank`. Messages between two ranks keep their order."""
        with self._lock:
            self._comm.post(rank, tag, pickle.dumps(message))

    def send_all(self, tag: Tag, message: Any = None) -> None:
        """Send a message to all ranks but this one."""
        for rank in range(self.size):
            if rank != self.rank:
                self.send(rank, tag, message)

    def receive(self, tag: Tag) -> list[tuple[int, Any]]:
        """Return the messages with this tag since the last call, as (sender's rank, message), in order."""
        with self._lock:
            while (posted := self._comm.collect()) is not None:
                source, what, message = posted
                self._received[Tag(what)].append((source, pickle.loads(message)))
            return self._received.pop(tag, [])


logger = logging.getLogger(__name__)

TICK_S = 0.25
ANSWER_S = 3.0
"""Time limit in seconds for the answers of other ranks to a watchdog's question (`Tag.WHERE`)."""

MAX_FAILURES = 5
"""Number of checks in a row that raise an error, after which the watchdog stops."""

MAX_NAMED = 4
"""Largest number of missing ranks that a stall warning names one by one."""

LEAVE_GRACE_S = 10.0
"""Seconds for which a rank continues to wait after another rank has ended its script. After this time, the wait
fails."""

LIBRARIES = ("torch", "sirtaki", "importlib")
"""Packages that do not count as user code when the watchdog looks for the line of user code that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingWait:
    """A wait of this rank for its peers.

    Attributes:
        what: description of what the rank waits for, equal on all ranks that wait for the same operation.
        since_s: `time.monotonic()` when the wait began.
    """

    what: str
    since_s: float


class Watchdog:
    """Reports waits of this rank that last too long, and tells the watchdogs of other ranks what this rank is doing.

    Attributes:
        failures: failure board, on which the watchdog reports stalls and lost ranks to all threads of this rank.
    """

    def __init__(
        self,
        courier: MessageBoard,
        failures: FailureBoard,
        *,
        warning_s: float,
        shutdown: Callable[[], float | None],
        also: Callable[[], object] = lambda: None,
    ) -> None:
        """Start the watchdog's thread, unless there is only one rank.

        Args:
            courier: message board that carries the watchdogs' questions and answers between ranks.
            failures: failure board, on which stalls and lost ranks are reported to all threads of this rank.
            warning_s: length of a wait after which a warning is logged.
            shutdown: returns the length of a wait in seconds after which the job fails, or None for never. Called at
                each check, because the limit may change.
            also: called at each check. Must not block.
        """
        self._courier, self.failures = courier, failures
        self._warning_s, self._shutdown, self._also = warning_s, shutdown, also
        self._waits: list[Callable[[], PendingWait | None]] = []
        self._progress: list[Callable[[], str]] = []
        self._ended_ranks: dict[int, float] = {}
        self._answers: dict[int, str] = {}
        self._warned: set[tuple[str, float]] = set()
        self._leaving = threading.Event()
        self._closing = threading.Event()
        self._main_thread = threading.main_thread().ident
        self._thread = threading.Thread(target=self._run, name="sirtaki-watchdog", daemon=True)
        if courier.size > 1:
            start_thread(self._thread)

    def watch(self, wait: Callable[[], PendingWait | None], progress: Callable[[], str]) -> None:
        """Register two functions that describe the state of this rank. The watchdog's thread calls both.

        Args:
            wait: returns what this rank waits for now, or None. If it raises `CommError`, the job fails.
            progress: returns how far this rank is, in words.
        """
        self._waits.append(wait)
        self._progress.append(progress)

    def unwatch(self, wait: Callable[[], PendingWait | None], progress: Callable[[], str]) -> None:
        """Unregister the two functions that `watch` has registered."""
        self._waits.remove(wait)
        self._progress.remove(progress)

    def describe(self) -> str:
        """Return what this rank is doing, in words. "" if it neither waits nor runs code of the user's script."""
        doing = [f"waits for {wait.what}" for wait in self._current_waits()]
        if not doing and (line := self._location()):
            doing = [f"runs {line}"]
        return "; ".join([*doing, *self.progress()])

    def progress(self) -> list[str]:
        """Return descriptions of how far this rank is. Empty if no work is in progress."""
        return [text for progress in self._progress if (text := progress())]

    def _current_waits(self) -> list[PendingWait]:
        waits = []
        for source in list(self._waits):
            try:
                wait = source()
            except CommError as err:
                # Fail the job, because the registered function reports that its wait can never end.
                self.fail(err)
                continue
            if wait is not None:
                waits.append(wait)
        return waits

    def _location(self) -> str | None:
        """Return the line of user code that the main thread runs, if any."""
        # Compare full paths of source files, because a folder of the user may have the name of a library.
        packages = [sys.modules[name].__path__[0] for name in LIBRARIES if name in sys.modules]
        libraries = ("<frozen", *(os.path.join(path, "") for path in packages))
        frame = sys._current_frames().get(self._main_thread or 0)
        while frame is not None:
            name = frame.f_code.co_filename
            if not name.startswith(libraries):
                return f"{os.path.basename(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back
        return None

    def _run(self) -> None:
        failed_in_a_row = 0
        while not self._closing.wait(TICK_S):
            try:
                self._check()
            except Exception:
                # Continue to watch after an error, because without the watchdog a hanging rank stays unnoticed.
                failed_in_a_row += 1
                if failed_in_a_row == MAX_FAILURES:
                    logger.exception(
                        "rank %d no longer checks whether ranks hang, because the check failed %d times in a row; "
                        "training continues",
                        self._courier.rank,
                        MAX_FAILURES,
                    )
                    return
                logger.warning(
                    "rank %d could not check whether ranks hang; Sirtaki will check again",
                    self._courier.rank,
                    exc_info=True,
                )
            else:
                failed_in_a_row = 0

    def _check(self) -> None:
        self._read_messages()
        self._check_for_stalls()
        self._also()
        # Run the wait callback here, because the waiting thread may be in code that does not, such as PyTorch's.
        self.failures.run_wait_callback()

    def _read_messages(self) -> None:
        """Read the messages of other ranks, and tell those that ask which line of the script this rank runs."""
        courier = self._courier
        for rank, _ in courier.receive(Tag.WHERE):
            courier.send(rank, Tag.HERE, self.describe() or "runs no line of its script")
        self._answers |= dict(courier.receive(Tag.HERE))
        for rank, _ in courier.receive(Tag.LEAVING):
            self._ended_ranks.setdefault(rank, time.monotonic())
        for _, (kind, message) in courier.receive(Tag.LOST):
            self.failures.report(kind(message))

    def _check_for_stalls(self) -> None:
        if self.failures.error is not None:
            return
        now = time.monotonic()
        for wait in self._current_waits():
            waited_s, shutdown_s = now - wait.since_s, self._shutdown()
            grace_s = LEAVE_GRACE_S if shutdown_s is None else min(LEAVE_GRACE_S, shutdown_s / 2)
            if self.failures.connection_broken:
                grace_s = 0.0
            ended = [rank for rank, when in self._ended_ranks.items() if now - max(when, wait.since_s) >= grace_s]
            if ended:
                self.fail(
                    PeerLostError(
                        f"rank {self._courier.rank} waits for {wait.what}, but rank {ended[0]} has ended its script; "
                        "all ranks must run the same number of steps (or call join())"
                    )
                )
            elif shutdown_s is not None and waited_s > shutdown_s:
                self.fail(StallError(self._report(wait, waited_s)))
            elif waited_s > self._warning_s and (wait.what, wait.since_s) not in self._warned:
                self._warned.add((wait.what, wait.since_s))
                if self._is_lowest_waiting(wait):
                    logger.warning("%s", self._report(wait, waited_s))

    def _ask(self, ranks: Sequence[int]) -> None:
        """Ask ranks what they are doing, and wait for their answers."""
        self._answers = {}  # This dict may also receive late answers to earlier questions.
        for rank in ranks:
            self._courier.send(rank, Tag.WHERE)

        def all_have_answered() -> bool:
            self._read_messages()
            return all(rank in self._answers for rank in ranks) or self._closing.is_set()

        wait_for(all_have_answered, Deadline.after(ANSWER_S), Poll.SLICES)

    def _is_lowest_waiting(self, wait: PendingWait) -> bool:
        """Return whether no lower rank waits for the operation `wait.what`.

        Only the lowest waiting rank logs a warning.

        Asks a few of the lowest ranks first, because rank 0 usually waits, too. So most ranks need not ask all lower
        ranks.
        """
        first, end = 0, self._courier.rank
        while first < end:
            asked = range(first, min(2 * first + 1, end))
            self._ask(asked)
            if any(self._answers.get(rank, "").startswith(f"waits for {wait.what}") for rank in asked):
                return False
            first = 2 * first + 1
        return True

    def _report(self, wait: PendingWait, waited_s: float) -> str:
        """Ask all ranks what they are doing, and return the answers in one line."""
        others = [rank for rank in range(self._courier.size) if rank != self._courier.rank]
        self._ask(others)
        missing = []
        for rank in others:
            answer = self._answers.get(rank, "does not answer: it has exited or is stopped")
            if rank in self._ended_ranks:
                answer = "has ended its script"
            if not answer.startswith(f"waits for {wait.what}"):
                missing.append(f"rank {rank} {answer}")
        text = f"rank {self._courier.rank} has waited {waited_s:.0f} s for {wait.what}"
        if missing:
            more = f"; and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
            text = "; missing: ".join([text, *missing[:MAX_NAMED]]) + more
        return text

    def fail(self, error: CommError) -> None:
        """Fail the job with this error on all ranks."""
        self.failures.report(error)
        self._courier.send_all(Tag.LOST, (type(error), str(error)))

    def leave(self, timeout_s: float) -> bool:
        """Announce that this rank has ended its script, and wait until all peers have announced it, too.

        Returns:
            False if a peer did not announce it within `timeout_s`. The caller may call again.
        """
        if self._courier.size == 1:
            return True
        if not self._leaving.is_set():
            self._leaving.set()
            self._courier.send_all(Tag.LEAVING)
        others, deadline = self._courier.size - 1, Deadline.after(timeout_s)
        wait_for(lambda: len(self._ended_ranks) == others or self.failures.error is not None, deadline, Poll.SLICES)
        return len(self._ended_ranks) == others

    def close(self) -> None:
        """Stop the watchdog's thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
