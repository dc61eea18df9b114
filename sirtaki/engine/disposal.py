"""Closes what has been garbage-collected, in a thread of its own.

Garbage collection runs in any thread at any time, also while that thread holds a lock, so a destructor must neither
wait nor join a thread: it leaves here what there is to close.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

CLOSING_S = 10.0
"""How long others wait for what is being closed; threads that do not end in that time never will."""


class Disposal:
    """Closes things one after the other."""

    def __init__(self) -> None:
        """Starts nothing."""
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # `put` may interrupt itself
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, if it does not run yet; before anything is left here."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sirtaki-disposal", daemon=True)
            self._thread.start()

    def put(self, close: Callable[[], None]) -> None:
        """Has `close` called soon. For destructors: never waits."""
        self._queue.put(close)

    def drain(self) -> None:
        """Waits until all that was left here before is closed."""
        if self._thread is not None and self._thread.is_alive():
            done = threading.Event()
            self._queue.put(done.set)
            done.wait(CLOSING_S)

    def _run(self) -> None:
        while (close := self._queue.get()) is not None:
            try:
                close()
            except Exception:  # whatever it is, the rest is closed
                logger.warning("an optimizer that was dropped could not be closed", exc_info=True)
            del close  # it holds what it closes

    def stop(self) -> None:
        """Closes what is left, and ends the thread."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(CLOSING_S)
