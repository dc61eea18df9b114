"""Learns how a backward pass ends: autograd calls what is queued at its end, and drops it if the pass raises."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class BackwardEnd:
    """Calls one of two methods when the current backward pass is over; knows their object by weak references only."""

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        """To be called in a hook, in a backward pass.

        Args:
            ended: bound method, called at the end of the pass.
            failed: bound method, called when the pass has raised.
        """
        self._ended, self._failed = weakref.WeakMethod(ended), weakref.WeakMethod(failed)
        self._over = False
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        """Autograd's call."""
        self._over = True
        if (ended := self._ended()) is not None:
            ended()

    def __del__(self) -> None:
        if not self._over and (failed := self._failed()) is not None:
            failed()
