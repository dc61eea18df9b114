"""Main loop of tuning: ranks agree on a measured time, rank 0 decides which setting to try next, all ranks use it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from sirtaki.autotune.drift import RefinementSchedule
from sirtaki.autotune.meta.session import DEFAULT_ARM, Assignment, Purpose, TuningSession
from sirtaki.autotune.trial import S
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.engine.console import log_progress, progress_every_s
from sirtaki.errors import PlanError, TransportError, in_a_line

from .target import TunableTarget

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Search(Generic[S]):
    """Search for the fastest setting of one target (part of the job with settings of its own).

    Attributes:
        target: part of the job that runs with the settings.
        session: object that decides on rank 0 which setting to try next; None if there is none or if it has failed.
        assignment: setting that runs now, and for how many iterations; None before the first decision.
        refines: True if the search is a refinement: it continues a search that has ended before.
        iterations: number of iterations since the search began.
        iterations_left: number of iterations until the next measurement of the running setting ends.
        spans_s: times measured with the running setting; the same on all ranks.
    """

    target: TunableTarget[S]
    session: TuningSession[S] | None = None
    assignment: Assignment[S] | None = None
    refines: bool = False
    iterations: int = 0
    iterations_left: int = 0
    spans_s: list[float] = field(default_factory=list)

    @property
    def decided(self) -> Assignment[S]:
        """The setting that the target must run next, and the number of iterations. Used on rank 0 only."""
        if self.session is not None:
            return self.session.assignment
        return Assignment(
            knobs=self.target.default if self.target.stays is None else self.target.stays,
            discarded_iterations=0,
            measured_iterations=0,
            arm=DEFAULT_ARM,
            purpose=Purpose.KEPT,
        )

    def start(self, assignment: Assignment[S]) -> None:
        """Begin to measure `assignment`. The target must already use its setting."""
        self.assignment, self.spans_s = assignment, []
        self.iterations_left = assignment.discarded_iterations + self.target.iterations

    def own_value(self) -> float:
        """Return this rank's measured time in the form in which ranks exchange it, as a minimum over ranks.

        If the longest time of any rank counts, this is the negated time, because the minimum of negated times is the
        negated maximum. Minus infinity discards the measurement on all ranks.
        """
        span_s = self.target.measured_s()
        if math.isnan(span_s):
            return -math.inf
        return -span_s if self.target.slowest else span_s

    def add_minimum(self, least: float) -> bool:
        """Record a measurement of the running setting. `least` is the minimum of `own_value` over the ranks.

        Return whether the running setting has been measured often enough.
        """
        assert self.assignment is not None
        self.iterations_left = self.target.iterations
        if math.isinf(least):
            return False
        self.spans_s.append(-least if self.target.slowest else least)
        return len(self.spans_s) >= self.assignment.measured_iterations


@dataclass(slots=True, eq=False)
class _Refinements(Generic[S]):
    """Plan of refinements (continued searches) of a target whose search has ended.

    Attributes:
        schedule: iterations in which refinements begin; the same on all ranks.
        kept: setting that the last search has kept.
        session: session of the last search, on rank 0; None if it has failed.
    """

    schedule: RefinementSchedule
    kept: S
    session: TuningSession[S] | None = None


class TuningController:
    """Runs searches for the fastest settings of some targets (parts of the job), in step on all ranks.

    After its search, a target is refined: at times that `RefinementSchedule` chooses, the search continues.

    Attributes:
        failed: True if tuning code has raised an error on rank 0. Then tuning has ended, and training continues.
    """

    def __init__(self, control: ControlPlane, *, where: Callable[[], str] = str) -> None:
        """Begin without a search.

        Args:
            control: control plane of the ranks.
            where: returns a description of the current iteration, for the log of a failure.
        """
        self._control, self._where = control, where
        self._searches: list[_Search[Any]] = []  # Typed with Any, because each target has its own type of setting.
        self._refinements: dict[TunableTarget[Any], _Refinements[Any]] = {}
        self._logged_s = -math.inf
        self.failed = False

    @property
    def searching(self) -> bool:
        """True while a search for the fastest setting of any target is in progress."""
        return bool(self._searches)

    def tries(self, target: TunableTarget[S]) -> bool:
        """Return whether a search for the fastest setting of this target is in progress."""
        return any(search.target is target for search in self._searches)

    @property
    def agrees(self) -> bool:
        """True if the measurement of some setting ends with this iteration. `iteration_ended` is then collective."""
        return any(search.iterations_left <= 1 for search in self._searches)

    def begin(self, *targets: TunableTarget[Any], recalls: bool = True) -> None:
        """Begin a search for the fastest setting of each target. Collective, between iterations.

        Args:
            targets: the targets.
            recalls: True if the stored setting of an earlier job may replace the search, after a check.
        """
        searches = [_Search(target) for target in targets]
        found = [False] * len(searches)
        if recalls:
            if self._control.rank == 0:
                for search in searches:
                    search.session = self._guarded(search, search.target.recall)
                found = [search.session is not None or search.target.stays is not None for search in searches]
            found = self._control.broadcast(found)
        for search, known in zip(searches, found, strict=True):
            if not known:
                self._begin_search(search)
        self._searches += searches
        self._decide(searches)

    def refine(self, target: TunableTarget[S]) -> bool:
        """Count an iteration without a search. If a refinement is due, continue the search of `target`.

        Collective if a refinement is due.

        Returns:
            True if a search for the fastest setting of the target is in progress now.
        """
        refinements = self._refinements.get(target)
        if refinements is None or not refinements.schedule.add():
            return False
        schedule, session, pays = refinements.schedule, refinements.session, False
        search = _Search(target, session, refines=True)
        if session is not None and not self.failed:
            pays = bool(self._guarded(search, partial(target.refine, session, schedule.left)))
        if self._control.broadcast(pays):
            self._searches.append(search)
            self._decide([search])
        else:
            schedule.ended(0, improved=False)
        return self.tries(target)

    def release(self, target: TunableTarget[S]) -> TuningSession[S] | None:
        """Take the session (record of all trials) from a target's search. Return it on rank 0, else None.

        A search in progress then ends without a session, once the running setting is measured.
        """
        session = None
        if (refinements := self._refinements.get(target)) is not None:
            session, refinements.session = refinements.session, None
        for search in self._searches:
            if search.target is target:
                session, search.session = search.session, None
        return session

    def abandon(self, target: TunableTarget[S]) -> None:
        """End the search and all refinements of a target, without a result. Call on all ranks."""
        self._refinements.pop(target, None)
        self._searches = [search for search in self._searches if search.target is not target]

    def iteration_ended(self) -> None:
        """Count an iteration of all searches, and end the measurements that it completes.

        Collective if `agrees` is True.

        Do not call it after iterations that were slower for another reason than the setting, such as profiling.
        """
        due = []
        for search in self._searches:
            search.iterations += 1
            search.iterations_left -= 1
            if search.iterations_left <= 0:
                due.append(search)
        if not due:
            return
        least = self._control.minimum(np.array([search.own_value() for search in due])).tolist()
        ended = [search for search, value in zip(due, least, strict=True) if search.add_minimum(value)]
        for search in ended:
            self._record(search, search.spans_s)
        self._decide(ended)

    def attempt(self, action: Callable[[], _T]) -> _T | None:
        """Call `action`, a part of the tuner, on rank 0.

        If it raises, log the error, end tuning (not training), and return None.
        """
        return self._guarded(None, action)

    def _decide(self, searches: Sequence[_Search[Any]]) -> None:
        """Choose the next setting of each search on rank 0, and use it on all ranks. Collective.

        Raises:
            PlanError: not even the default setting can be run.
            TransportError: the transport cannot run even the default setting.
        """
        while searches:
            decided: list[Assignment[Any]] = self._control.broadcast(
                [search.decided for search in searches] if self._control.rank == 0 else None
            )
            again = []
            for search, now in zip(searches, decided, strict=True):
                if now.purpose is Purpose.SEARCH:
                    self._begin_search(search)
                elif self._apply(search, now):
                    continue
                again.append(search)
            searches = again

    def _begin_search(self, search: _Search[Any]) -> None:
        """Measure what the search depends on (such as the network), and begin its session on rank 0. Collective."""
        search.target.prepare()
        if self._control.rank == 0:
            search.session = self._guarded(search, partial(search.target.search, search.session))

    def _apply(self, search: _Search[Any], now: Assignment[Any]) -> bool:
        """Run the setting of assignment `now` from now on. If it is the result of the search, end the search.

        Collective.

        Returns:
            False if the setting cannot be run on some rank.
        """
        target = search.target
        try:
            target.apply(now.knobs)
        except (PlanError, TransportError) as err:  # All ranks raise this error together, so all of them return False.
            if now.knobs == target.default and now.purpose is Purpose.KEPT:
                raise  # End the job if the default cannot be run, because there is no other setting to fall back to.
            logger.info("the tuner discards the setting %s, which cannot be run: %s", now.knobs.describe(), err)
            self._record(search, [math.inf])
            return False
        search.start(now)
        if now.purpose is Purpose.KEPT:
            self._searches.remove(search)
            target.keep()
            if search.session is not None:
                self._guarded(search, partial(target.report, search.session))
            self._plan_refinement(search, now.knobs)
        return True

    def _plan_refinement(self, search: _Search[S], kept: S) -> None:
        """Plan the next refinement of a target whose search has ended and which keeps the setting `kept`."""
        target = search.target
        if target.refine_until <= 0:
            return
        refinements = self._refinements.setdefault(target, _Refinements(RefinementSchedule(target.refine_until), kept))
        if search.refines:
            refinements.schedule.ended(search.iterations, improved=kept != refinements.kept)
        refinements.kept, refinements.session = kept, search.session

    def _record(self, search: _Search[Any], spans_s: Sequence[float]) -> None:
        """Record the times of the running setting in the search's session, and log progress at intervals, on rank 0."""
        session, target = search.session, search.target
        if self._control.rank != 0:
            return
        if session is None or session.done:
            if math.inf in spans_s:  # The kept setting cannot be run any more, so forget it.
                search.session = target.stays = None
            return
        self._guarded(search, partial(target.record, session, spans_s))
        if (
            search.session is None
            or session.done
            or search.refines
            or time.monotonic() - self._logged_s <= progress_every_s()
        ):
            return
        progress = self._guarded(search, partial(target.progress, session))
        if progress is not None:
            self._logged_s = time.monotonic()
            log_progress(logger, progress)

    def _guarded(self, search: _Search[Any] | None, action: Callable[[], _T]) -> _T | None:
        """Call `action`, a part of the tuner, on rank 0.

        If it raises, log the error and end all tuning, but not training.
        """
        try:
            return action()
        except Exception as err:
            stays = (
                "the setting that ran before"
                if search is not None and search.target.stays is not None
                else "the default setting"
            )
            logger.warning(
                "tuning has failed and stops; training continues with %s: %s", stays, in_a_line(err, self._where())
            )
            logger.debug("traceback of the error that stopped tuning", exc_info=True)
            self.failed = True
            if search is not None:
                search.session = None
            return None
