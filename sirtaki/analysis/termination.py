"""SIGTERM, by which launchers end the ranks that are left: what was recorded is written before it does its work."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Termination:
    """Has something written before SIGTERM ends this process. A handler that the script has set stays alone."""

    def __init__(self, keep: Callable[[], None]) -> None:
        """`keep` writes what there is; harmless if it is called again."""
        self._keep = keep
        self._watching = self._keeping = self._terminated = False

    def watch(self) -> None:
        """Watch from now on, until what there is has been written."""
        here = threading.current_thread() is threading.main_thread()  # no other may set handlers
        if here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
            self._watching = True

    def _on_signal(self, *_: Any) -> None:  # Any: as `signal` has it
        self._terminated = True
        if not self._keeping:
            self._keep()
            self._end()

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Inside, what is being written is written to its end; then it is not watched for any more."""
        self._keeping = True
        try:
            yield
        finally:
            self._keeping = False
            self._end()

    def _end(self) -> None:
        if self._watching and threading.current_thread() is threading.main_thread():
            self._watching = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._terminated:
                os.kill(os.getpid(), signal.SIGTERM)
