"""Interface between `TuningController` and the parts of Sirtaki whose settings it tunes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

from sirtaki.autotune.meta.session import TuningSession
from sirtaki.autotune.trial import S
from sirtaki.engine.console import TuningProgress


class TunableTarget(ABC, Generic[S]):
    """A part of a job that can run with different settings, of which `TuningController` chooses the fastest.

    The controller calls methods marked "Collective." on all ranks in the same order, and methods without this mark on
    rank 0 only. An exception in a method without the mark ends tuning, not training.

    Attributes:
        default: setting without tuning; the same on all ranks.
        stays: setting to run while the controller tries none, on rank 0. None = the default.
        slowest: True if a measurement is the longest time of any rank. False if it is the shortest time. That is the
            time of the rank that begins communication last, and so waits for no other rank.
        iterations: number of iterations of one measurement. Ranks exchange their times only after the last iteration.
        refine_until: number of iterations after the first search in which the setting is refined; 0 = none. Equal on
            all ranks.
    """

    default: S
    stays: S | None = None
    slowest: bool = False
    iterations: int = 1
    refine_until: int = 0

    def recall(self) -> TuningSession[S] | None:
        """Return a session (a search in progress) that checks an earlier job's setting; None without such a setting."""
        return None

    def prepare(self) -> None:  # Do nothing by default, because most targets have nothing to measure.
        """Measure what a search for settings needs, such as the bandwidth of connections. Collective."""

    @abstractmethod
    def search(self, session: TuningSession[S] | None) -> TuningSession[S]:
        """Begin a search for the fastest setting, and return its session, which decides what to try.

        Args:
            session: session that has checked the setting of an earlier job and found it slow; it is continued. None =
                make a new one.
        """

    def refine(self, session: TuningSession[S], iterations_left: int) -> bool:
        """Resume a session that has ended, to try more settings. Return False if further trials are not worthwhile.

        Args:
            session: session of the last search.
            iterations_left: number of training iterations that would profit from a faster setting.
        """
        return session.resume(iterations_left)

    @abstractmethod
    def apply(self, setting: S) -> None:
        """Let the job use a setting from the next iteration on. Collective.

        Raises:
            PlanError: the setting cannot be run. Raised on all ranks.
            TransportError: a transport cannot run the setting. Raised on all ranks.
        """

    @abstractmethod
    def measured_s(self) -> float:
        """Return the time that this rank has measured with the running setting, in seconds.

        NaN discards the measurement on all ranks. Called on all ranks when a measurement ends. Non-blocking.
        """

    def record(self, session: TuningSession[S], spans_s: Sequence[float]) -> None:
        """Record the measured times of the running setting in the session, which decides what to try next."""
        session.record(spans_s)

    def progress(self, session: TuningSession[S]) -> TuningProgress | None:
        """Return the progress of the search, which is logged; None = nothing is logged."""
        return None

    @abstractmethod
    def keep(self) -> None:
        """Close what only the search needed, such as connections. Collective.

        Called when the search, or a refinement, has ended and the job uses its result.
        """

    @abstractmethod
    def report(self, session: TuningSession[S]) -> None:
        """Store and log the result of the search of a session that has ended. It may have been resumed."""
