"""What rank 0 decides in a tuning phase: the searchers, the session, and messages about it."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from sirtaki.autotune.arms.planners import Planner, make_planners
from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.autotune.meta.bandit import ITERATIONS_PER_TRIAL, BanditArm, default_arms, window_for
from sirtaki.autotune.meta.session import (
    DEFAULT_ARM,
    PLAN_ARM,
    REFINEMENT_ARM,
    REGISTRY_ARM,
    Assignment,
    Purpose,
    SessionResult,
    WarmupSession,
)
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.trial import Arm, Trial
from sirtaki.comm.plan import GradientLayout, Route
from sirtaki.measures import LinkModel, faster, faster_than
from sirtaki.settings import Settings
from sirtaki.watch import watchers
from sirtaki.watch.watchers import Decision, TrialEnded

from .cache import CacheHit, TuningCache, condition_of
from .plans import Carried, traffic
from .trial_log import StepTime, StepTimes, TrialLogWriter

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


SEED = 0
"""Of all that the tuner draws: equal times give equal trials."""


def _attempt(action: Callable[[], _T], otherwise: _T) -> _T:
    try:
        return action()
    except Exception:
        logger.warning("tuning goes on without planners", exc_info=True)
        return otherwise


def describe_progress(session: WarmupSession, usual: StepTime | None) -> str:
    """How long the warm-up may still take, what it has gained, and what runs now, in one line.

    Args:
        session: of the warm-up.
        usual: what steps take besides, None = unknown.
    """
    result, now = session.result, session.assignment
    default_s, best_s = result.default_span_s, result.best_span_s
    known = math.isfinite(default_s) and math.isfinite(best_s)
    line = f"warm-up, iteration {result.iterations_used} of at most {session.iterations_at_most}"
    if known and usual is not None:
        left_s = (session.iterations_at_most - result.iterations_used) * usual.step_s(best_s)
        line += f", {_seconds(left_s)} more"
    gained = ""
    if known and not result.tuned:
        gained = f"nothing gained on the default yet{_a_step(usual, default_s)}; "
    elif known:
        gained = f"{1e3 * (default_s - best_s):.3g} ms a step gained so far{_a_step(usual, default_s, best_s)}; "
    return f"{line}: {gained}now {now.purpose.description}: {now.knobs.describe()}"


def _a_step(usual: StepTime | None, *spans_s: float) -> str:
    """What a step takes with the default, and with the best, in brackets; empty where that is unknown."""
    if usual is None:
        return ""
    return " (" + " → ".join(f"{1e3 * usual.step_s(span_s):.3g} ms" for span_s in spans_s) + ")"


def _seconds(at_most_s: float) -> str:
    if at_most_s < 1.0:
        return "less than 1 s"
    return f"at most {at_most_s:.0f} s" if at_most_s < 100.0 else f"at most {at_most_s / 60.0:.0f} minutes"


def describe_result(result: SessionResult, usual: StepTime | None, who: str) -> str:
    """What the warm-up has found, in one line.

    Args:
        result: of the session.
        usual: what steps take besides, None = unknown.
        who: has proposed what is kept.
    """
    found = f"{result.knobs.describe()}, proposed by {who}" if result.tuned else "the default stays"
    gain = ""
    if result.tuned and math.isfinite(result.default_span_s) and result.default_span_s > 0:
        before_s, after_s = result.default_span_s, result.best_span_s
        gain = f"communication {faster_than(before_s, after_s, other='with the default')}"
        if usual is not None:
            before, after = usual.step_s(before_s), usual.step_s(after_s)
            gain = (
                f"steps take {1e3 * after:.3g} ms instead of {1e3 * before:.3g} ({faster(before, after)}); "
                f"communication that the backward pass does not hide takes {1e3 * usual.exposed_s(after_s):.3g} ms "
                f"instead of {1e3 * usual.exposed_s(before_s):.3g}"
            )
        gain += "; "
    trials = f"{result.n_trials} setting{'s' if result.n_trials != 1 else ''}"
    return f"tuned in {result.iterations_used} iterations with {trials}: {gain}{found} ({result.reason})"


def describe_change(ratio: float, iterations: int) -> str:
    """Why a re-tune of at most so many iterations begins, in one line.

    Args:
        ratio: how many times as long communication takes as it did; not a number = unknown.
        iterations: that it may take.
    """
    takes = (
        f"communication takes {ratio:.2g} times as long as when"
        if math.isfinite(ratio)
        else "communication no longer takes as long as when"
    )
    return f"{takes} this setting was chosen: trying others for at most {iterations} iterations"


def describe_retune(result: SessionResult, *, default: Knobs, earlier: Sequence[Knobs], proposer: str) -> str:
    """What a re-tune has found, in one line.

    Args:
        result: of the session.
        default: what runs untuned.
        earlier: what was kept before in this job.
        proposer: who has proposed what is kept now.
    """
    if not result.tuned:
        return f"nothing better found in {result.iterations_used} iterations: the setting stays ({result.reason})"
    whence = f"proposed by {proposer}"
    if result.knobs == default:
        whence = "the untuned default"
    elif result.knobs in earlier:
        whence = "as earlier in this job"
    return (
        f"tuned again in {result.iterations_used} iterations: communication "
        f"{faster(result.default_span_s, result.best_span_s)} than with the setting that ran; "
        f"{result.knobs.describe()}, {whence} ({result.reason})"
    )


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
        model: what planners know; None where there are none.
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
        self._arms, self._presumed = arms, presumed
        self._bandit: BanditArm | None = None  # None until a search begins
        self.model: PlanningModel | None = None
        self._planners: Sequence[Planner] = ()
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

    def recall(
        self,
        layouts: Sequence[GradientLayout],
        space: KnobSpace,
        before: Carried | None = None,
        *,
        place: Sequence[int] = (),
    ) -> bool:
        """Whether an earlier job, or generation, has left a setting, which is then run first; else `search` is due.

        Args:
            layouts: of the gradients.
            space: what may be chosen.
            before: what the generation before has left, None = nothing.
            place: of each rank the first one on its host.
        """
        self._layouts = layouts
        self._hit = self._cache.look_up(layouts, space)
        if self._hit.message:
            logger.info("%s", self._hit.message)
        if self._hit.exact is not None:
            self._begin(space, None)
        return self._session is not None or self._go_on_from(before, space, tuple(place))

    def _go_on_from(self, before: Carried | None, space: KnobSpace, place: tuple[int, ...]) -> bool:
        """Whether what ran in the generation before runs on, for good; else what was found then helps the search."""
        if before is None or before.knobs not in space:
            return False
        if before.settled:
            logger.info("what ran before runs on: %s", before.knobs.describe())
            self._stays = before.knobs
        elif before.place == place and before.trials:
            logger.info("the warm-up goes on after %d trials", len(before.trials))
            self._hit = replace(self._hit, history=before.trials)
        else:
            self._suggested = [before.knobs]
        return before.settled

    def hand_over(self) -> tuple[Knobs, tuple[Trial, ...]] | None:
        """The best until now and all trials of an unfinished warm-up, which ends here; None if there are none."""
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
        self._bandit, self.model, self._planners = None, None, ()
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
        self.model = _attempt(make_model, None)
        self._planners = ()
        if self.model is not None:
            make = functools.partial(make_planners, space=promising, model=self.model, presumed=self._presumed)
            self._planners = _attempt(make, [])
        self._tell_pace()
        self._bandit = bandit = self._make_bandit(space, promising)
        proposals = self._cache.first_proposals(self._layouts, space, self.model)
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

    def _make_bandit(self, space: KnobSpace, promising: KnobSpace) -> BanditArm:
        rng = np.random.default_rng(SEED)
        if self._arms is not None:
            window = window_for(self._budget_iterations // ITERATIONS_PER_TRIAL, len(self._arms))
            return BanditArm(self._arms, rng=rng, window=window)
        build = functools.partial(
            default_arms,
            space=promising,
            whole_space=space,
            rng=rng,
            budget_iterations=self._budget_iterations,
            planners=self._planners,
        )
        # What arms import may keep the errors of imports that failed, which keep the frames that led to them: on a
        # stack of its own, so that these are not the user's with his model in them.
        with ThreadPoolExecutor(max_workers=1) as stack:
            return stack.submit(build).result()

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
        forecast = self._planners[0].forecast if self._planners else None
        predicted_s = None if forecast is None else forecast.predicted_s(assignment.knobs)
        self._session.record(spans_s)
        best_s = self._session.result.best_span_s
        self._log.ran(
            assignment,
            spans_s,
            iteration=iteration,
            best_span_s=best_s,
            credits={} if self._bandit is None else self._bandit.credits,
            predicted_s=predicted_s,
            forecast=forecast,
        )
        if watchers.watching:
            event = TrialEnded(
                iteration=iteration,
                arm=assignment.arm,
                setting=assignment.knobs.describe(),
                knobs=assignment.knobs.to_json(),
                communication_s=min(spans_s),
                best_s=best_s,
            )
            watchers.tell_all(lambda watcher: watcher.trial(event))
        quiet = self._session.done or self._retuning
        if not quiet and time.monotonic() - self._told_s > PROGRESS_EVERY_S:
            self._told_s = time.monotonic()
            logger.info("%s", describe_progress(self._session, self.times.usual))

    def _tell_pace(self) -> None:
        """Tells the planners: the profile is of the first iterations, later ones show how long its parts take."""
        if self.model is None:
            return
        if self.times.usual is not None:
            self.model = replace(self.model, profile=self.times.usual.at_this_pace(self.model.profile))
            for planner in self._planners:
                planner.update_model(self.model)
        if not self._retuning:
            self._log.knows(self.model)

    @property
    def _links(self) -> Mapping[Route, LinkModel]:
        return {} if self.model is None else self.model.links

    def _name(self, arm: str) -> str:
        """An arm, for people."""
        if arm in (REGISTRY_ARM, DEFAULT_ARM, REFINEMENT_ARM, PLAN_ARM):
            return f"the {arm}"
        kind = "planner" if any(planner.name == arm for planner in self._planners) else "search technique"
        return f"the {kind} {arm}"

    @_guarded
    def end(self, *, iteration: int) -> None:
        """The warm-up is over: stores and tells what it has found."""
        session, self._session = self._session, None
        if session is None:
            return
        result = session.result
        if self._retuning:
            stored = self._keep_condition(session)
            proposer = self._name(result.arm)
            told = describe_retune(result, default=self.default, earlier=self._earlier, proposer=proposer)
        else:
            stored = self._cache.keep(result, session.trials, complete=True, links=self._links)
            told = describe_result(result, self.times.usual, self._name(result.arm))
            self._usual_default_s = result.default_span_s
        logger.info("%s%s", told, "; stored in the registry" if stored else "")
        self._tell_pace()  # for the report, and for `sirtaki plan`
        self._log.ended(result, iteration=iteration, usual=self.times.usual)
        if watchers.watching:
            event = Decision(
                iteration=iteration,
                arm=result.arm,
                setting=result.knobs.describe(),
                knobs=result.knobs.to_json(),
                default_s=result.default_span_s,
                best_s=result.best_span_s,
                n_trials=result.n_trials,
                retune=self._retuning,
            )
            watchers.tell_all(lambda watcher: watcher.decision(event))
        earlier = [] if self._stays is None else [self._stays]
        self._earlier = [*earlier, *(knobs for knobs in self._earlier if knobs not in (result.knobs, *earlier))]
        self._stays = result.knobs

    def _keep_condition(self, session: WarmupSession) -> bool:
        """What holds while communication is as it is now goes beside what was found before, not into its place."""
        default_s = next((trial.span_s for trial in session.trials if trial.knobs == self.default), math.nan)
        condition = condition_of(default_s / self._usual_default_s)
        result = replace(session.result, default_span_s=default_s)
        return bool(condition) and self._cache.keep(
            result, session.trials, complete=True, links=self._links, condition=condition
        )

    @_guarded
    def remember(self) -> None:
        """Stores what an unfinished warm-up has found, so that the next job goes on from it. Idempotent."""
        session, self._session = self._session, None
        if session is not None and not self._retuning:
            result = session.result
            if self._cache.keep(result, session.trials, complete=False, links=self._links):
                logger.info(
                    "the job ends before its warm-up; until now %s; stored in the registry, the next job goes on",
                    describe_result(result, self.times.usual, self._name(result.arm)),
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
            rng=np.random.default_rng(SEED),
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
