"""Decides, on one rank, what the iterations of the warm-up and of re-tunes run, and remembers what was found.

No fault in here reaches training: whatever a session, an arm, a model or the registry raises is logged once, and what
raised is done without: the registry is as if empty, there are no planners, or, at worst, the untuned default runs.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from sirtaki.autotune.arms.base import Arm
from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.autotune.meta.assignment import (
    DEFAULT_ARM,
    Assignment,
    Purpose,
)
from sirtaki.autotune.meta.session import WarmupSession
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.trial import Trial
from sirtaki.comm.layout import GradientLayout
from sirtaki.settings import Settings

from .carried_tuning import NOTHING_BROUGHT, Carrying
from .knob_choices import traffic
from .searchers import Searchers
from .step_times import StepTimes
from .telling import tell_decision, tell_trial
from .trial_log import TrialLogWriter
from .tuning_cache import CacheHit, TuningCache, condition_of
from .tuning_messages import describe_change, describe_progress, describe_result, describe_retune

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_P = ParamSpec("_P")

PROGRESS_EVERY_S = 5.0

RETUNE_ITERATIONS = 20
"""That a re-tune takes at most."""


MEASURED, MEASURED_IN_RETUNE = 2, 1
"""Iterations of a trial. There are few in a re-tune, and what is worth changing to shows in one."""

EARLIER_SETTINGS = 2
"""Of those that were kept before in this job, so many are tried in a re-tune."""


def _guarded(
    method: Callable[Concatenate[TuningCoordinator, _P], None],
) -> Callable[Concatenate[TuningCoordinator, _P], None]:
    """Whatever the method raises ends tuning instead of training."""

    def guarded(self: TuningCoordinator, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            stays = "the default" if self._stays is None else "what ran before"
            logger.warning("tuning has failed and ends here; %s runs from now on", stays, exc_info=True)
            self._session, self.failed = None, True

    return guarded


class TuningCoordinator:
    """Holds the warm-up session. None of its methods raises.

    Attributes:
        default: what runs untuned.
        times: of this rank's steps.
        failed: there was a fault in tuning; it does not begin again.
        given: what the user wants tried first; None = nothing.
    """

    def __init__(
        self,
        settings: Settings,
        cache: TuningCache,
        *,
        default: Knobs,
        arms: Sequence[Arm] | None,
        discarded_iterations: int,
        presumed: bool = True,
    ) -> None:
        """A session follows with `recall` or `search`.

        Args:
            settings: of the job.
            cache: what earlier jobs have left.
            default: what runs untuned.
            arms: search techniques, None = the usual ones.
            discarded_iterations: after a change of knobs.
            presumed: planners are asked before trials have borne their model out.
        """
        self._settings, self._cache, self.default = settings, cache, default
        self._discarded_iterations = discarded_iterations
        self._searchers = Searchers(arms, seed=settings.seed, presumed=presumed)
        self._layouts: Sequence[GradientLayout] = ()
        self._hit = CacheHit()
        self._session: WarmupSession | None = None
        self._stays: Knobs | None = None  # what runs without a session; None = the default
        self._usual_default_s = math.nan
        self._earlier: list[Knobs] = []  # what was kept before that, the last one first
        self._retuning = self.failed = False
        self.given: Knobs | None = None
        self._suggested: list[Knobs] = []  # by the generation before
        self.times = StepTimes()
        self._log = TrialLogWriter(settings.trial_log)
        self._told_s = -math.inf

    @property
    def model(self) -> PlanningModel | None:
        """What planners know; None where nothing was probed."""
        return self._searchers.model

    @property
    def assignment(self) -> Assignment:
        """What to run now; for good where there is no session: the default, or what was kept before a re-tune."""
        if self._session is not None:
            return self._session.assignment
        return Assignment(
            knobs=self._stays or self.default,
            discarded_iterations=0,
            measured_iterations=0,
            arm=DEFAULT_ARM,
            purpose=Purpose.KEPT,
        )

    def recall(self, layouts: Sequence[GradientLayout], space: KnobSpace, carrying: Carrying = NOTHING_BROUGHT) -> bool:
        """Whether an earlier job, or generation, has left a setting, which is then run first; else `search` is due."""
        self._layouts = layouts
        self._hit = self._cache.look_up(layouts, space)
        if self._hit.message:
            logger.info("%s", self._hit.message)
        if self._hit.exact is not None:
            self._begin(space, None)
        return self._session is not None or self._go_on_from(carrying, space)

    def _go_on_from(self, carrying: Carrying, space: KnobSpace) -> bool:
        """Whether what ran in the generation before runs on, for good; else what was found then helps the search."""
        before = carrying.before
        if before is None or before.knobs not in space:
            return False
        if before.settled:
            logger.info("what ran before runs on: %s", before.knobs.describe())
            self._stays = before.knobs
        elif before.place == carrying.place and before.trials:
            logger.info("the warm-up goes on after %d trials", len(before.trials))
            self._hit = replace(self._hit, history=before.trials)
        else:
            self._suggested = [before.knobs]
        return before.settled

    def hand_over(self) -> tuple[Knobs, tuple[Trial, ...]] | None:
        """See `Decides`."""
        session, self._session = self._session, None
        if session is None or self._retuning or not session.trials:
            return None
        return session.result.knobs, session.trials

    @_guarded
    def retune(self, running: Knobs, layouts: Sequence[GradientLayout], *, ratio: float, iteration: int) -> None:
        """Communication has changed: `search` follows, and what it finds is compared with what runs.

        Args:
            running: what runs.
            layouts: of the gradients.
            ratio: how many times as long communication takes as when that was chosen; not a number = unknown.
            iteration: training iterations so far.
        """
        logger.info("%s", describe_change(ratio, RETUNE_ITERATIONS))
        self._retuning, self._stays, self._layouts, self._hit = True, running, layouts, CacheHit()
        self._searchers.leave()
        self._cache.look_again()
        cold_between_s = self.times.cold_between_s
        self.times = StepTimes()
        self.times.cold_between_s = cold_between_s
        self._log.retunes(running, ratio, iteration=iteration)

    @_guarded
    def search(self, space: KnobSpace, promising: KnobSpace, make_model: Callable[[], PlanningModel | None]) -> None:
        """Begins a search, in the session that is there or in a new one.

        Args:
            space: what may be chosen.
            promising: what techniques choose from while trials bear the planners' model out.
            make_model: fits the planners' model; None = there is none.
        """
        bandit = self._searchers.make(
            space, promising, make_model, budget_iterations=self._budget_iterations, usual=self.times.usual
        )
        self._log_model()
        proposals = self._cache.first_proposals(self._layouts, space, self._searchers.model)
        for proposal in proposals:
            logger.log(logging.DEBUG if self._retuning else logging.INFO, "%s", proposal.message)
        seeds = [*self._suggested, *(proposal.knobs for proposal in proposals)]
        if self._retuning:
            seeds = [self.default, *self._earlier[:EARLIER_SETTINGS], *seeds]
        if self._session is None:
            self._begin(space, bandit, seeds)
        else:
            self._cache.disprove()
            self._session.begin_search(bandit, space=space, seeds=seeds)

    @_guarded
    def record(self, spans_s: Sequence[float], *, iteration: int) -> None:
        """Tells the session what its assignment has measured until `iteration`."""
        if self._session is None or self._session.done:
            if math.inf in spans_s:  # what stays cannot be run
                self._session = self._stays = None
            return
        assignment = self._session.assignment
        if assignment.purpose is Purpose.DEFAULT:
            self._tell_pace()
        forecast = self._searchers.forecast
        predicted_s = None if forecast is None else forecast.predicted_s(assignment.knobs)
        self._session.record(spans_s)
        best_s = self._session.result.best_span_s
        self._log.ran(
            assignment,
            spans_s,
            iteration=iteration,
            best_span_s=best_s,
            credits=self._searchers.credits,
            predicted_s=predicted_s,
            forecast=forecast,
        )
        tell_trial(assignment, spans_s, iteration=iteration, best_s=best_s)
        quiet = self._session.done or self._retuning
        if not quiet and time.monotonic() - self._told_s > PROGRESS_EVERY_S:
            self._told_s = time.monotonic()
            logger.info("%s", describe_progress(self._session, self.times.usual))

    def _tell_pace(self) -> None:
        self._searchers.know_pace(self.times.usual)
        self._log_model()

    def _log_model(self) -> None:
        if self._searchers.model is not None and not self._retuning:
            self._log.knows(self._searchers.model)

    @_guarded
    def end(self, *, iteration: int) -> None:
        """The warm-up is over: stores and tells what it has found."""
        session, self._session = self._session, None
        if session is None:
            return
        result = session.result
        if self._retuning:
            stored = self._keep_condition(session)
            proposer = self._searchers.name(result.arm)
            told = describe_retune(result, default=self.default, earlier=self._earlier, proposer=proposer)
        else:
            stored = self._cache.keep(result, session.trials, complete=True, links=self._searchers.links)
            told = describe_result(result, self.times.usual, self._searchers.name(result.arm))
            self._usual_default_s = result.default_span_s
        logger.info("%s%s", told, "; stored in the registry" if stored else "")
        self._tell_pace()  # for the report, and for `sirtaki plan`
        self._log.ended(result, iteration=iteration, usual=self.times.usual)
        tell_decision(result, iteration=iteration, retune=self._retuning)
        earlier = [] if self._stays is None else [self._stays]
        self._earlier = [*earlier, *(knobs for knobs in self._earlier if knobs not in (result.knobs, *earlier))]
        self._stays = result.knobs

    def _keep_condition(self, session: WarmupSession) -> bool:
        """What holds while communication is as it is now goes beside what was found before, not into its place."""
        default_s = next((trial.span_s for trial in session.trials if trial.knobs == self.default), math.nan)
        condition = condition_of(default_s / self._usual_default_s)
        result = replace(session.result, default_span_s=default_s)
        return bool(condition) and self._cache.keep(
            result, session.trials, complete=True, links=self._searchers.links, condition=condition
        )

    @_guarded
    def remember(self) -> None:
        """Stores what an unfinished warm-up has found, so that the next job goes on from it. Idempotent."""
        session, self._session = self._session, None
        if session is not None and not self._retuning:
            result = session.result
            if self._cache.keep(result, session.trials, complete=False, links=self._searchers.links):
                logger.info(
                    "the job ends before its warm-up; until now %s; stored in the registry, the next job goes on",
                    describe_result(result, self.times.usual, self._searchers.name(result.arm)),
                )
        self._log.close()

    @_guarded
    def close(self) -> None:
        """Remembers what an unfinished warm-up has found, and does not watch for the model's graph any more."""
        self.remember()
        self._cache.close()

    @_guarded
    def _begin(self, space: KnobSpace, arm: Arm | None, seeds: Sequence[Knobs] = ()) -> None:
        self._session = WarmupSession(
            space=space,
            default=self._stays or self.default,
            arm=arm,
            rng=np.random.default_rng(self._settings.seed),
            budget_iterations=self._budget_iterations,
            measured_iterations=MEASURED_IN_RETUNE if self._retuning else MEASURED,
            retune=self._retuning,
            discarded_iterations=self._discarded_iterations,
            exact=self._hit.exact if arm is None else None,
            promise=self._hit.promise,
            seeds=seeds,
            given=None if self._retuning else self.given,
            history=self._hit.history,
            identity=functools.cache(functools.partial(traffic, layouts=self._layouts)),
        )

    @property
    def _budget_iterations(self) -> int:
        return RETUNE_ITERATIONS if self._retuning else self._settings.warmup_iterations
