"""The one place where a rank learns that the job is lost."""

import time
from collections.abc import Callable

from sirtaki.errors import CommError
from sirtaki.machine import in_forked_children

DUTY_PERIOD_S = 2e-3
"""How often a rank that waits looks whether another one wants something of it."""

Timeout = Callable[[], float]
"""Seconds to wait for other ranks. Read at each wait, because PyTorch changes a group's timeout while the job runs."""

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

    def check(self) -> None:
        """Raises the failure, and does what this rank owes to others; every wait calls this now and then."""
        self.raise_if_failed()
        self.attend()


def fresh(error: CommError) -> CommError:
    """Another exception that says the same: one object raised from several threads would mix their tracebacks."""
    return caused(type(error)(*error.args), error.__cause__)


def caused(error: CommError, by: BaseException | None) -> CommError:
    """The error, with what has led to it, which is shown where it is raised: also in another thread."""
    error.__cause__ = by
    return error
