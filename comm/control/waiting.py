"""Loops that wait for a condition, for operations in flight, or for all ranks to reach the end of the job.

Each wait for another rank reads the job's `FailureBoard`, so that a failure found by one thread ends the waits of all
threads.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from sirtaki.errors import CommError, ResourceLimitError
from sirtaki.machine import explained

from .failure import FailureBoard, fresh

if TYPE_CHECKING:
    from .communicator import Communicator

T = TypeVar("T")

ALONE_S = 100e-6
"""Seconds for which a waiting thread first spins (evaluates its condition) without yielding its processor. Skipped on
hosts where ranks share processors."""

SPIN_S = 300e-6
"""Seconds for which a waiting thread spins (evaluates its condition) and yields its processor each time, before it
sleeps. This is enough for about ten messages in sequence between four ranks on two cores."""

WAIT_SLICE_S = 0.02
"""Longest time in seconds for which a waiting thread blocks before it checks again whether the job has failed."""

BLAME_S = 2.0
"""Seconds for which a rank with a broken connection waits to learn which rank has ended."""


class Deadline(NamedTuple):
    """A time at which a wait ends without success.

    Attributes:
        at_s: the deadline, as a value of `time.monotonic()`.
    """

    at_s: float

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """Return the deadline `seconds` from now. None = never."""
        return NEVER if seconds is None else cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def passed(self) -> bool:
        """Return whether the time is up."""
        return time.monotonic() > self.at_s


NEVER = Deadline(math.inf)


class Poll(Enum):
    """Intervals at which a wait evaluates its condition.

    Each value is (first, longest) sleep between two evaluations, in seconds. Each sleep is twice as long as the one
    before.
    """

    SPIN = 20e-6, 1e-3
    """Interval for messages of other ranks. The thread spins (evaluates the condition without a pause) before it
    sleeps."""
    SLICES = 1e-3, WAIT_SLICE_S
    """Interval for waits on other threads, and for conditions that are expensive to evaluate, because they need a
    system call."""
    SLOW = 50e-3, 100e-3
    """Interval for waits on processes and hosts, which take seconds to change their state."""


def wait_for(
    condition: Callable[[], bool],
    deadline: Deadline = NEVER,
    poll: Poll = Poll.SPIN,
    *,
    failures: FailureBoard | None = None,
) -> bool:
    """Wait until a condition holds.

    Args:
        condition: function that returns whether the condition holds. Not called again once it has returned True.
        deadline: time at which the wait ends without success.
        poll: how often to evaluate the condition.
        failures: failure board of the job. A failure of the job ends the wait. None = ignore failures.

    Returns:
        True once the condition holds, False if the deadline has passed.

    Raises:
        CommError: the job has failed.
    """
    if poll is Poll.SPIN:
        if condition():
            return True
        begun = time.perf_counter()
        while not (failures and failures.oversubscribed) and time.perf_counter() < begun + ALONE_S:
            if condition():
                return True
        give_up_spinning = begun + SPIN_S
        while time.perf_counter() < give_up_spinning:
            if condition():
                return True
            os.sched_yield()
    sleep_s, longest_s = poll.value
    while not condition():
        if failures is not None:
            failures.check()
        if deadline.passed:
            return False
        time.sleep(min(sleep_s, deadline.left_s))
        sleep_s = min(2 * sleep_s, longest_s)
    return True


def retry(
    action: Callable[[], T],
    error: type[Exception],
    deadline: Deadline,
    poll: Poll = Poll.SLOW,
    *,
    failures: FailureBoard | None = None,
) -> T:
    """Call `action` until it returns without raising an exception of type `error`, and return its result.

    Raises:
        CommError: the job has failed.
        Exception: the last error of `action`, once the deadline has passed.
    """
    results: list[T] = []

    def succeeds() -> bool:
        try:
            results.append(action())
        except error:
            if deadline.passed:
                raise
        return bool(results)

    wait_for(succeeds, poll=poll, failures=failures)
    return results[0]


class Waitable(Protocol):
    """An object to wait for: a `Work` (operation in flight) or a `threading.Event`."""

    def wait(self, timeout_s: float, /) -> bool:
        """Block for at most `timeout_s`. Return whether the work is done or the event is set."""
        ...


def wait_for_work(
    works: Iterable[Waitable],
    *,
    failures: FailureBoard,
    interrupted: Callable[[], bool] | None = None,
    late_s: float = 0.0,
    blame_s: float | None = BLAME_S,
) -> bool:
    """Wait for all works (operations in flight), in the order of their launch.

    Args:
        works: operations in flight.
        failures: failure board of the job. A failure of the job ends the wait.
        interrupted: called every `WAIT_SLICE_S` seconds; ends the wait if it returns True.
        late_s: seconds in which a work may still complete after the job has failed.
        blame_s: if a work fails, seconds to wait for a report of the job's failure that caused the work's error. None =
            raise the work's error at once.

    Returns:
        False if the wait was interrupted.

    Raises:
        CommError: a work or the job has failed.
    """
    try:
        for work in works:
            while not work.wait(WAIT_SLICE_S):
                if late_s and failures.error is not None and work.wait(late_s):
                    break
                failures.check()
                if interrupted is not None and interrupted():
                    return False
    except CommError as err:
        if blame_s is None:
            raise
        cause = cause_of(err, failures, within_s=blame_s)
        raise cause from cause.__cause__
    return True


def cause_of(error: CommError, failures: FailureBoard, *, within_s: float = BLAME_S) -> CommError:
    """Return the job's failure that caused `error`, or `error` itself if no failure is reported in time.

    Waits up to `within_s` seconds for a report, because another thread or rank may report the failure after this rank
    has seen its consequence.
    """
    failures.connection_broken = True
    wait_for(lambda: failures.error is not None, Deadline.after(within_s), Poll.SLICES)
    return error if failures.error is None else fresh(failures.error)


def leave_together(comm: Communicator, within_s: float) -> bool:
    """Wait in a barrier before this rank ends, so that no rank ends while another rank needs it. Collective.

    Returns:
        False if a rank has not entered the barrier within `within_s` seconds.

    Raises:
        CommError: the job has failed.
    """
    return wait_for(comm.barrier(), Deadline.after(within_s), failures=comm.failures)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        ResourceLimitError: the process may not have more threads.
    """
    try:
        thread.start()
    except (RuntimeError, MemoryError) as err:
        raise ResourceLimitError(f"the thread {thread.name} cannot be started: {explained(err)}") from None


def unless_failed(act: Callable[[], T], *, failures: FailureBoard, undo: Callable[[T], object]) -> T:
    """Run a blocking call in a thread of its own, and return its result. If the job fails first, abandon the thread.

    Args:
        act: the blocking call. It must return at some time.
        failures: failure board of the job, which reports the job's failure.
        undo: called with the result of `act` if `act` returns after its thread was abandoned.

    Raises:
        CommError: the job has failed.
        BaseException: the error that `act` raised.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            result = act()
        except BaseException as err:
            if outcome.set_running_or_notify_cancel():
                outcome.set_exception(err)
        else:
            if outcome.set_running_or_notify_cancel():
                outcome.set_result(result)
            else:
                undo(result)

    start_thread(threading.Thread(target=run, name="sirtaki-opening", daemon=True))
    while not futures.wait([outcome], WAIT_SLICE_S).done:
        if failures.error is not None and outcome.cancel():
            failures.raise_if_failed()
    return outcome.result()
