"""Interface between `TuningController` and the parts of Sirtaki whose settings it tunes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

from sirtaki.autotune.meta.session import TuningSession
from sirtaki.autotune.trial import S
from sirtaki.engine.console import TuningProgress


class TunableTarget(ABC, Generic[S]):
    """A part of a job that can run with different settings.

    The controller calls methods marked "Collective." on all ranks in the same order, and methods without this mark on
    rank 0 only. An exception in a method without the mark ends tuning, not training.

    Attributes:
        default: setting without tuning; the same on all ranks.
        stays: setting to run without a session, on rank 0; None = the default.
        slowest: True if a measurement is the longest time of any rank. False if it is the shortest: the time of the
            rank that begins communication last, and so does not wait for other ranks.
        iterations: iterations of one measurement. Only the last one ends with communication between ranks.
    """

    default: S
    stays: S | None = None
    slowest: bool = False
    iterations: int = 1

    def recall(self) -> TuningSession[S] | None:
        """Return a session that checks the setting of an earlier job; None if there is no such setting."""
        return None

    def prepare(self) -> None:  # most targets have nothing to measure
        """Measure the inputs of a search. Collective."""

    @abstractmethod
    def search(self, session: TuningSession[S] | None) -> TuningSession[S]:
        """Begin a search, and return its session: the given one, whose check of a setting has failed, or a new one."""

    @abstractmethod
    def apply(self, setting: S) -> None:
        """Run a setting from the next iteration on. Collective.

        Raises:
            PlanError: the setting cannot be run. Raised on all ranks.
            TransportError: a transport cannot run the setting. Raised on all ranks.
        """

    @abstractmethod
    def measured_s(self) -> float:
        """Return the result of the measurement that has just ended on this rank, in seconds.

        NaN discards the measurement on all ranks. Called on all ranks. Non-blocking.
        """

    def record(self, session: TuningSession[S], spans_s: Sequence[float]) -> None:
        """Record the measurements of the current assignment in the session."""
        session.record(spans_s)

    def progress(self, session: TuningSession[S]) -> TuningProgress | None:
        """Return the progress of the search for the log; None = nothing is logged."""
        return None

    @abstractmethod
    def keep(self) -> None:
        """Release what only the search needed. Called when the search has ended and its result runs. Collective."""

    @abstractmethod
    def report(self, session: TuningSession[S]) -> None:
        """Store and log the result of a session that has ended."""
