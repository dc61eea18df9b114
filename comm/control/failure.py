"""The one place where a rank learns that the job is lost, and the one way to wait without waiting for ever.

Every wait of every transport looks here: a failure found by one thread (a peer died, the watchdog gave up) must end
the waits of all the others.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from sirtaki.errors import CommError
from sirtaki.machine import in_forked_children

T = TypeVar("T")

ALONE_S = 100e-6
"""How long a wait keeps the processor at first, where each rank has one: what it yields to may keep that for long."""

SPIN_S = 300e-6
"""How long a wait yields the processor before it starts to sleep: about ten rounds of four ranks on two cores."""

LONGEST_SLEEP_S = 1e-3
"""Sleeping longer would delay the answer noticeably, sleeping shorter costs processor time."""

DUTY_PERIOD_S = 2e-3
"""How often a rank that waits looks whether another one wants something of it."""

Timeout = Callable[[], float]
"""Seconds to wait for other ranks. Read at each wait, because PyTorch changes a group's timeout while the job runs."""

WAIT_SLICE_S = 0.02
"""How often a wait for other ranks looks whether the job has failed, or another rank wants something of this one."""


BLAME_S = 2.0
"""How long a rank whose connection broke waits to hear which rank has left."""


FORKED = "this process was forked from a rank of the job and is none itself: only the rank may communicate"


class FailureBoard:
    """Holds the first failure of this rank's job; threads write and read it without locks.

    Attributes:
        suspicious: a connection broke, so whoever has left is to blame without further ado.
        crowded: ranks share processors, so that one that waits may keep those it waits for from going on.
    """

    def __init__(self) -> None:
        self._error: CommError | None = None
        self._listeners: list[Callable[[], None]] = []
        self._duty: Callable[[], None] | None = None
        self._due_s = 0.0
        self.suspicious = self.crowded = False
        in_forked_children(self, FailureBoard._leave_in_child)

    def _leave_in_child(self) -> None:
        """In a forked child: each operation and each wait raises, since the child has none of the rank's threads."""
        self._error, self._listeners, self._duty = CommError(FORKED), [], None

    def report(self, error: CommError) -> None:
        """Keeps `error` unless an earlier one is there; the first one is told to those who listen."""
        if self._error is None:
            self._error = error
            for listener in self._listeners:
                listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls `listener` when the job fails, in the thread that finds it out: to end waits that no flag can end."""
        self._listeners.append(listener)

    @property
    def error(self) -> CommError | None:
        """The first failure, None while all is well."""
        return self._error

    def while_waiting(self, duty: Callable[[], None] | None) -> None:
        """From now on calls `duty` now and then, in any thread, while this rank waits for others; None = nothing."""
        self._duty = duty

    def attend(self) -> None:
        """Does what this rank owes to others while it waits, if it is time again."""
        now_s, duty = time.monotonic(), self._duty
        if duty is not None and self._error is None and now_s >= self._due_s:
            self._due_s = now_s + DUTY_PERIOD_S
            duty()

    def raise_if_failed(self) -> None:
        """Raises the failure, if there is one."""
        if self._error is not None:
            raise fresh(self._error)

    def cause_of(self, error: CommError, *, within_s: float | None = None) -> CommError:
        """What has failed, which may become known a little later than the `error` that it led to; else that.

        Args:
            error: has been noticed first.
            within_s: it becomes known within this time; None = `BLAME_S`.
        """
        self.suspicious = True
        deadline_s = time.monotonic() + (BLAME_S if within_s is None else within_s)
        while self._error is None and time.monotonic() < deadline_s:
            time.sleep(WAIT_SLICE_S)
        return error if self._error is None else fresh(self._error)

    def check(self) -> None:
        """Raises the failure, and does what this rank owes to others; every wait calls this now and then."""
        self.raise_if_failed()
        self.attend()


def poll_until(test: Callable[[], bool], *, failures: FailureBoard) -> None:
    """Returns once `test()` is true: yields at first, then sleeps, longer and longer up to a millisecond.

    Raises:
        CommError: the job failed meanwhile.
    """
    begun = time.perf_counter()
    while not failures.crowded and time.perf_counter() < begun + ALONE_S:
        if test():
            return
    give_up_spinning = begun + SPIN_S
    while time.perf_counter() < give_up_spinning:
        if test():
            return
        os.sched_yield()
    sleep_s = 20e-6
    while not test():
        failures.check()
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)


def unless_failed(act: Callable[[], T], *, failures: FailureBoard, undo: Callable[[T], object]) -> T:
    """What `act` gives, which blocks and hears of no failure: it has a thread, and is left to it when the job fails.

    Args:
        act: ends by itself some time.
        failures: of the job.
        undo: what is done with its result if nobody waits for it any more.

    Raises:
        CommError: the job has failed.
        BaseException: what `act` raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    lock, done = threading.Lock(), threading.Event()
    left = False

    def run() -> None:
        try:
            result = act()
        except BaseException as err:
            errors.append(err)
        else:
            with lock:
                results.append(result)
                alone = left
            if alone:
                undo(result)
        done.set()

    threading.Thread(target=run, name="sirtaki-opening", daemon=True).start()
    while not done.wait(WAIT_SLICE_S):
        if failures.error is not None:
            with lock:
                left = not results
            if left:
                failures.raise_if_failed()
    if errors:
        raise errors[0]
    return results[0]


def fresh(error: CommError) -> CommError:
    """Another exception that says the same: one object raised from several threads would mix their tracebacks."""
    return caused(type(error)(*error.args), error.__cause__)


def caused(error: CommError, by: BaseException | None) -> CommError:
    """The error, with what has led to it, which is shown where it is raised: also in another thread."""
    error.__cause__ = by
    return error
