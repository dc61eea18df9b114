"""Signs of life of a rank between sums, from a thread of its own: a training step may take long."""

from __future__ import annotations

import threading
from collections.abc import Callable

END_S = 2.0
"""How long the thread may take to end."""


class Heartbeat:
    """Calls a function again and again until it is stopped."""

    def __init__(self, beat: Callable[[], None], *, every_s: float) -> None:
        """Starts the thread."""
        self._beat, self._every_s = beat, every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sirtaki-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            self._beat()

    def stop(self) -> None:
        """Ends the thread; again is harmless."""
        self._stopped.set()
        self._thread.join(END_S)
