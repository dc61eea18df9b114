"""Targets of tuning: the interface between `TuningController` and the parts of Sirtaki that have settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

from sirtaki.autotune.meta.session import TuningSession
from sirtaki.autotune.trial import S
from sirtaki.engine.console import TuningProgress


class TunableTarget(ABC, Generic[S]):
    """A part of a job that runs with one of several settings.

    Methods marked "Collective." run on all ranks in the same order. The others run on rank 0 only, and what they raise
    ends tuning, not training.

    Attributes:
        default: setting without tuning, the same on all ranks.
        stays: setting to run without a session, on rank 0; None = the default.
        slowest: an iteration takes as long as on the slowest rank; else as on the rank that was last to arrive, whose
            time holds no waiting.
        iterations: iterations of one measurement. Only the end of the last one needs the other ranks.
    """

    default: S
    stays: S | None = None
    slowest: bool = False
    iterations: int = 1

    def recall(self) -> TuningSession[S] | None:
        """Return a session that checks what an earlier job has found; None if nothing was found."""
        return None

    def prepare(self) -> None:  # most targets have nothing to measure
        """Measure what a search needs to know. Collective."""

    @abstractmethod
    def search(self, session: TuningSession[S] | None) -> TuningSession[S]:
        """Begin a search in the session that has asked for it, or in a new one."""

    @abstractmethod
    def apply(self, setting: S) -> None:
        """Run a setting from the next iteration on. Collective.

        Raises:
            PlanError: the setting cannot be run. Raised on all ranks alike.
            TransportError: as above.
        """

    @abstractmethod
    def measured_s(self) -> float:
        """Return the seconds of the measurement that has just ended on this rank; NaN voids it on all ranks.

        Runs on all ranks and sends nothing.
        """

    def record(self, session: TuningSession[S], spans_s: Sequence[float]) -> None:
        """Hand the measurements of the current assignment to the session."""
        session.record(spans_s)

    def progress(self, session: TuningSession[S]) -> TuningProgress | None:
        """Describe how far the search is; None if nothing is to be reported."""
        return None

    @abstractmethod
    def keep(self) -> None:
        """Take note that the search has ended, and that its result runs. Collective."""

    @abstractmethod
    def report(self, session: TuningSession[S]) -> None:
        """Store and log the result of a session that has ended."""
