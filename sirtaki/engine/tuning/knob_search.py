"""Sessions that tune the knobs of one gradient pipeline: what they begin with, and what becomes of their results."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np

from sirtaki.autotune.arms.planners import Planner, make_planners
from sirtaki.autotune.arms.techniques import CompressorArm
from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.autotune.meta.bandit import ITERATIONS_PER_TRIAL, BanditArm, default_arms, window_for
from sirtaki.autotune.meta.session import (
    DEFAULT_ARM,
    DRAW_ARM,
    PLAN_ARM,
    REFINEMENT_ARM,
    REGISTRY_ARM,
    SHORT,
    Purpose,
    TuningSession,
)
from sirtaki.autotune.model.planning import ContentionLearner, Observation, PlanningModel
from sirtaki.autotune.trial import Arm
from sirtaki.comm.plan import GradientLayout, Route
from sirtaki.engine.settings import Settings
from sirtaki.errors import in_a_line
from sirtaki.measures import LinkModel
from sirtaki.watch import watchers
from sirtaki.watch.watchers import Decision, TrialEnded

from .cache import CacheHit, TuningCache, condition_of
from .plans import Carried, traffic
from .report import describe_change, describe_result, describe_retune
from .trial_log import StepTimer, TrialLogWriter

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

SEED = 0
"""Seed of all that the tuner draws: equal times give equal trials."""

RETUNE_SEARCH_ITERATIONS, RETUNE_ITERATIONS = 12, 31
"""Iterations of a search after a change of communication time, without and with the final comparison."""


MEASURED, MEASURED_IN_RETUNE = 2, 1
"""Measured iterations of a trial. After a change one suffices, because a setting worth changing to shows in one."""

EARLIER_SETTINGS = 2
"""Number of settings kept before in this job that are tried after a change of communication time."""


class KnobSearch:
    """Preparation, log and result of the sessions that tune one gradient pipeline. Exists on rank 0 only.

    Attributes:
        default: setting without tuning.
        stays: setting that runs without a session; None = the default.
        times: step times of this rank.
        retuning: the search follows a change of communication time.
        given: setting that the user wants tried first; None = none.
        model: model of the job for planners; None = there is none.
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
        where: Callable[[], str] = str,
    ) -> None:
        """Begin without a session.

        Args:
            settings: settings of the job.
            cache: results of earlier jobs.
            default: setting without tuning.
            arms: search techniques, None = the usual ones.
            discarded_iterations: iterations after a change of setting that do not count.
            presumed: planners are asked before trials have confirmed their model.
            where: describes where training is, for the log of a failure.
        """
        self._settings, self._cache, self.default = settings, cache, default
        self._discarded_iterations = discarded_iterations
        self._arms, self._presumed, self._where = arms, presumed, where
        self._bandit: BanditArm | None = None  # None until a search begins
        self.model: PlanningModel | None = None
        self._planners: Sequence[Planner] = ()
        self._learner: ContentionLearner | None = None  # None where contention is not learnt
        self._layouts: Sequence[GradientLayout] = ()
        self._hit = CacheHit()
        self.stays: Knobs | None = None
        self._usual_default_s = math.nan
        self._earlier: list[Knobs] = []  # what was kept before that, the last one first
        self.retuning = False
        self.given: Knobs | None = None
        self._suggested: list[Knobs] = []  # by the generation before
        self.times = StepTimer()
        self._log = TrialLogWriter(settings.trial_log)

    def recall(
        self,
        layouts: Sequence[GradientLayout],
        space: KnobSpace,
        before: Sequence[Carried] = (),
        *,
        place: Sequence[int] = (),
    ) -> TuningSession | None:
        """Return a session that checks the setting of an earlier job; None without one, or if `stays` is set now.

        Args:
            layouts: layouts of the flat buffers.
            space: settings that may be chosen.
            before: results of earlier generations of this job, one for each placement of ranks, the last one first.
            place: for each rank, the first rank on its host.
        """
        self._layouts = layouts
        self._hit = self._cache.look_up(layouts, space)
        session = None
        if self._hit.exact is not None:
            session = self._begin(space, None)
        else:
            self._go_on_from(before, space, tuple(place))
        if self._hit.message and self.stays is None:
            logger.info("%s", self._hit.message)
        return session

    def _go_on_from(self, before: Sequence[Carried], space: KnobSpace, place: tuple[int, ...]) -> None:
        """Keep an earlier generation's setting if the ranks are placed as before, else begin the search with it."""
        possible = [carried for carried in before if carried.knobs in space]
        here = next((carried for carried in possible if carried.place == place), None)
        if here is not None and here.settled:
            logger.info("what ran before runs on: %s", here.knobs.describe())
            self.stays = here.knobs
        elif here is not None and here.trials:
            logger.info("tuning goes on after %d trials", len(here.trials))
            self._hit = replace(self._hit, history=here.trials)
        elif possible:
            self._suggested = [possible[0].knobs]
            counts = (n for each in (place, possible[0].place) for n in (len(each), len(set(each))))
            logger.info("tuning anew for %d ranks (hosts: %d), from what ran on %d (hosts: %d)", *counts)

    def retune(self, running: Knobs, layouts: Sequence[GradientLayout], *, ratio: float, iteration: int) -> None:
        """Prepare a search after a change of communication time; its result is compared with the running setting.

        Args:
            running: the running setting.
            layouts: layouts of the flat buffers.
            ratio: communication time now over the time when the setting was chosen; NaN = not known.
            iteration: training iterations so far.
        """
        logger.info("%s", describe_change(ratio, RETUNE_ITERATIONS))
        self.retuning, self.stays, self._layouts, self._hit = True, running, layouts, CacheHit()
        self._bandit, self.model, self._planners, self._learner = None, None, (), None
        self._cache.look_again()
        cold_between_s = self.times.cold_between_s
        self.times = StepTimer()
        self.times.cold_between_s = cold_between_s
        self._log.retunes(running, ratio, iteration=iteration)

    def search(
        self,
        session: TuningSession | None,
        space: KnobSpace,
        promising: KnobSpace,
        make_model: Callable[[], PlanningModel | None],
    ) -> TuningSession:
        """Begin a search in the session that has asked for it, or in a new one.

        Args:
            session: the session; None = a new one is made.
            space: settings that may be chosen.
            promising: settings from which techniques choose while trials confirm the planners' model.
            make_model: fits the planners' model; None = there is none.
        """
        self.model = self._attempt(make_model, None)
        self._planners, self._learner = (), None
        if self.model is not None:
            make = functools.partial(make_planners, space=promising, model=self.model, presumed=self._presumed)
            self._planners = self._attempt(make, [])
            if self._presumed and self._budget_iterations >= SHORT and not self.retuning:
                learn = functools.partial(ContentionLearner, space=promising, default=self.default)
                rng = np.random.default_rng(SEED)
                self._learner = self._attempt(functools.partial(learn, self.model, rng=rng), None)
        draws = () if self._learner is None else self._learner.draws
        self._tell_pace()
        self._bandit = bandit = self._make_bandit(space, promising)
        proposals = self._cache.first_proposals(self._layouts, space, self.model)
        for proposal in proposals:
            logger.log(logging.DEBUG if self.retuning else logging.INFO, "%s", proposal.message)
        seeds = [*self._suggested, *(proposal.knobs for proposal in proposals)]
        if self.retuning:
            seeds = [self.default, *self._earlier[:EARLIER_SETTINGS], *seeds]
        if session is None:
            return self._begin(space, bandit, seeds, draws)
        self._cache.disprove()
        session.begin_search(bandit, space=space, seeds=seeds, draws=draws)
        return session

    def _attempt(self, action: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return action()
        except Exception as err:
            logger.warning("tuning goes on without planners: %s", in_a_line(err, self._where()))
            logger.debug("where they failed", exc_info=True)
            return otherwise

    def _make_bandit(self, space: KnobSpace, promising: KnobSpace) -> BanditArm:
        rng = np.random.default_rng(SEED)
        if self._arms is not None:
            arms = [*self._arms, *([CompressorArm(space)] if space.lossy else [])]
            window = window_for(self._budget_iterations // ITERATIONS_PER_TRIAL, len(arms))
            return BanditArm(arms, rng=rng, window=window, where=self._where)
        build = functools.partial(
            default_arms,
            space=promising,
            whole_space=space,
            rng=rng,
            budget_iterations=self._budget_iterations,
            planners=self._planners,
            where=self._where,
        )
        # A thread has a stack of its own. Modules that arms import may keep errors of failed imports, and these errors
        # would keep the user's frames, with the model in them.
        with ThreadPoolExecutor(max_workers=1) as stack:
            return stack.submit(build).result()

    def record(
        self, session: TuningSession, spans_s: Sequence[float], *, iteration: int, backward_s: Sequence[float] = ()
    ) -> None:
        """Hand the measurements of the current assignment to the session, the log and watchers.

        Args:
            session: the session.
            spans_s: communication times, `(n_measured,)`; infinite if the setting could not be run.
            iteration: last iteration of the assignment.
            backward_s: backward times of this rank in the same iterations, `(n_measured,)`; empty if none has run.
        """
        assignment = session.assignment
        if assignment.purpose is Purpose.DEFAULT:
            self._tell_pace()
        if self._learner is not None:
            self._learn(self._learner, session, spans_s, backward_s)
        forecast = self._planners[0].forecast if self._planners else None
        predicted_s = None if forecast is None else forecast.predicted_s(assignment.knobs)
        session.record(spans_s)
        best_s = session.result.best_span_s
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
            watchers.notify(lambda watcher: watcher.trial(event), iteration=iteration)
        self.times.pause()

    def _learn(
        self,
        learner: ContentionLearner,
        session: TuningSession,
        spans_s: Sequence[float],
        backward_s: Sequence[float],
    ) -> None:
        """Learn contention from an assignment, and give it to the planners once enough has been learned."""
        knobs, model = session.assignment.knobs, self.model
        assert model is not None  # as there is a learner
        both = zip(spans_s, backward_s or [math.nan] * len(spans_s), strict=True)
        seen = [Observation(knobs=knobs, span_s=span, backward_s=backward) for span, backward in both]
        learnt = self._attempt(lambda: learner.learn(model, seen), self.model)
        if learnt is None:
            return
        session.skip_draws()
        self._learner, self.model = None, learnt
        for planner in self._planners:
            planner.update_model(learnt)
        if not self.retuning:
            self._log.knows(learnt)

    def _tell_pace(self) -> None:
        """Give the planners the pace of later iterations, because the profile is of the slower first ones."""
        if self.model is None:
            return
        if self.times.usual is not None:
            self.model = replace(self.model, profile=self.times.usual.at_this_pace(self.model.profile))
            for planner in self._planners:
                planner.update_model(self.model)
        if not self.retuning:
            self._log.knows(self.model)

    @property
    def _links(self) -> Mapping[Route, LinkModel]:
        return {} if self.model is None else self.model.links

    def _name(self, arm: str) -> str:
        """Return the name of an arm for log lines."""
        if arm in (REGISTRY_ARM, DEFAULT_ARM, DRAW_ARM, REFINEMENT_ARM, PLAN_ARM):
            return f"the {arm}"
        kind = "planner" if any(planner.name == arm for planner in self._planners) else "search technique"
        return f"the {kind} {arm}"

    def report(self, session: TuningSession, *, iteration: int) -> None:
        """Store and log the result of a session that has ended."""
        result = session.result
        if self.retuning:
            stored = self._keep_condition(session)
            proposer = self._name(result.arm)
            told = describe_retune(result, default=self.default, earlier=self._earlier, proposer=proposer)
        else:
            # On a shared host the result is in doubt: the next job continues the search.
            stored = self._cache.keep(result, session.trials, complete=not result.doubt, links=self._links)
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
                retune=self.retuning,
            )
            watchers.notify(lambda watcher: watcher.decision(event), iteration=iteration)
        earlier = [] if self.stays is None else [self.stays]
        self._earlier = [*earlier, *(knobs for knobs in self._earlier if knobs not in (result.knobs, *earlier))]
        self.stays = result.knobs

    def _keep_condition(self, session: TuningSession) -> bool:
        """Store the result beside that of the search before, because it holds only as long as the change lasts."""
        default_s = next((trial.span_s for trial in session.trials if trial.knobs == self.default), math.nan)
        condition = condition_of(default_s / self._usual_default_s)
        result = replace(session.result, default_span_s=default_s, gain=None)  # which is over what ran
        return bool(condition) and self._cache.keep(
            result, session.trials, complete=True, links=self._links, condition=condition
        )

    def remember(self, session: TuningSession | None) -> None:
        """Store the trials of an unfinished session, so that the next job continues from them."""
        if session is not None and not self.retuning and session.trials:
            result = session.result
            stored = self._cache.keep(result, session.trials, complete=False, links=self._links)
            logger.info(
                "the job ends while settings are tried; until now %s; %s",
                describe_result(result, self.times.usual, self._name(result.arm)),
                "stored in the registry, the next job goes on" if stored else "the next job begins anew",
            )
        self._log.close()

    def close(self) -> None:
        """Stop watching for the model's graph."""
        self._cache.close()

    def _begin(
        self, space: KnobSpace, arm: Arm | None, seeds: Sequence[Knobs] = (), draws: Sequence[Knobs] = ()
    ) -> TuningSession:
        return TuningSession(
            space=space,
            default=self.stays or self.default,
            arm=arm,
            rng=np.random.default_rng(SEED),
            budget_iterations=self._budget_iterations,
            measured_iterations=MEASURED_IN_RETUNE if self.retuning else MEASURED,
            retune=self.retuning,
            discarded_iterations=self._discarded_iterations,
            exact=self._hit.exact if arm is None else None,
            seeds=seeds,
            draws=draws,
            given=None if self.retuning else self.given,
            history=self._hit.history,
            identity=functools.cache(functools.partial(traffic, layouts=self._layouts)),
        )

    @property
    def _budget_iterations(self) -> int:
        return RETUNE_SEARCH_ITERATIONS if self.retuning else self._settings.warmup_iterations
