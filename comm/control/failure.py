"""The failure board: an object through which the threads of a rank report and read the job's failure."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sirtaki.errors import CommError
from sirtaki.machine import in_forked_children

WAIT_CALLBACK_PERIOD_S = 2e-3
"""Shortest time between two calls of the wait callback (a function that waiting threads call regularly), in seconds."""

Timeout = Callable[[], float]
"""Function that returns the timeout of a wait for other ranks, in seconds. Called at each wait, because PyTorch may
change the timeout."""

FORKED = "this process was forked from a rank of the job: only the rank itself may communicate, not its child processes"


class FailureBoard:
    """Object through which the threads of a rank report and read the job's first failure. Thread-safe without locks.

    Attributes:
        connection_broken: True once a connection to a peer broke. A wait for a rank that has ended its script then
            fails at once, without a grace period.
        oversubscribed: True if a host has more ranks than processors. Waiting threads then do not spin, because they
            would take processors from ranks that compute.
        raises_next: True while the training thread waits for a GPU in `raising`. The GPU's NCCL operations may be
            aborted only then, because the training thread would otherwise use gradients that were never reduced.
    """

    def __init__(self) -> None:
        self._error: CommError | None = None
        self._listeners: list[Callable[[], None]] = []
        self._wait_callback: Callable[[], None] | None = None
        self._due_s = 0.0
        self.connection_broken = self.oversubscribed = self.raises_next = False
        in_forked_children(self, FailureBoard._leave_in_child)

    def _leave_in_child(self) -> None:
        """Make each operation and wait raise in a forked child, because the child has none of the rank's threads."""
        self._error, self._listeners, self._wait_callback = CommError(FORKED), [], None

    def report(self, error: CommError) -> None:
        """Record `error` as the job's failure, and call the functions from `listen`. Only the first error counts."""
        if self._error is None:
            self._error = error
            for listener in self._listeners:
                listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Register a function that is called once the job fails, in the thread that reports the failure.

        The function can wake a thread that waits without polling this board.
        """
        self._listeners.append(listener)

    @property
    def error(self) -> CommError | None:
        """Return the recorded failure, or None."""
        return self._error

    def set_wait_callback(self, callback: Callable[[], None] | None) -> None:
        """Set the function that waiting threads of this rank call regularly. None removes it."""
        self._wait_callback = callback

    def run_wait_callback(self) -> None:
        """Call the wait callback, unless the job has failed or the last call was less than a period ago."""
        now_s, callback = time.monotonic(), self._wait_callback
        if callback is not None and self._error is None and now_s >= self._due_s:
            self._due_s = now_s + WAIT_CALLBACK_PERIOD_S
            callback()

    def raise_if_failed(self) -> None:
        """Raise the recorded failure, if there is one."""
        if self._error is not None:
            raise fresh(self._error)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Run a wait for a GPU as the `with` body, then raise the recorded failure, if there is one."""
        self.raises_next = True
        try:
            yield
        finally:
            self.raises_next = False
        # Look for a failure only after `raises_next` is reset. A thread that found a failure while it was set may have
        # aborted NCCL operations. Their results must not be used, so this method must raise.
        self.raise_if_failed()

    def check(self) -> None:
        """Raise the recorded failure, else run the wait callback. Every wait loop calls this."""
        self.raise_if_failed()
        self.run_wait_callback()


def fresh(error: CommError) -> CommError:
    """Return a copy of an exception, so that each thread raises its own copy and tracebacks do not mix."""
    return caused(type(error)(*error.args), error.__cause__)


def caused(error: CommError, by: BaseException | None) -> CommError:
    """Set the cause of an exception that another thread raises later, as `raise error from by` does. Return `error`."""
    error.__cause__ = by
    return error
