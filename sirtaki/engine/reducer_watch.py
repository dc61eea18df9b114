"""What the watchdog learns of one reducer, which it does not keep alive."""

from __future__ import annotations

import weakref
from typing import Protocol

from sirtaki.comm.control.watchdog import Wait

from .participants import Participant, Participants
from .warmup import TunedSynchroniser


class Watched(Participant, Protocol):
    """A reducer, as far as this module knows it."""

    @property
    def tuned(self) -> TunedSynchroniser | None:
        """What reduces the dense gradients; None if there are none."""
        ...


class ReducerWatch:
    """Answers for one reducer, as long as it lives."""

    def __init__(self, participants: Participants, reducer: Watched) -> None:
        self._participants, self._reducer = participants, weakref.ref(reducer)

    def current_wait(self) -> Wait | None:
        """What this rank waits for.

        Raises:
            CommError: a transport has found out by itself that it will never come.
        """
        reducer = self._reducer()
        if reducer is None:
            return None
        waiting, iteration, tuned = reducer.progress.waiting, 0, reducer.tuned
        since_s = None if waiting is None else waiting[1]
        if tuned is not None:
            tuned.check()
            iteration = tuned.synchroniser.iteration
            if since_s is None and (stalled := tuned.synchroniser.in_flight.stalled()):
                iteration, since_s = stalled
        return None if since_s is None else Wait(what=f"the gradients of iteration {iteration}", since_s=since_s)

    def progress(self) -> str:
        """For the other ranks' watchdogs: how far this rank is; nothing if a later optimizer has taken over."""
        reducer = self._reducer()
        tuned = None if reducer is None else reducer.tuned
        if reducer is None or tuned is None:
            return ""
        sync = tuned.synchroniser
        if not (reducer.pending or reducer.progress.waiting or reducer in self._participants.in_use):
            return ""
        missing = sync.missing_names()
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        waiting = sync.in_flight.unreduced_unit()
        return "".join(
            [
                f"is in iteration {sync.iteration}",
                f", has not computed {shown}" if missing else "",
                f", its GPU waits for {waiting}" if waiting else "",
            ]
        )
