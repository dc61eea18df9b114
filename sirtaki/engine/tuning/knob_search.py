"""Search for the fastest communication setting (knobs) of one gradient pipeline.

This module also logs the search's progress, and stores its result.
"""

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
from sirtaki.autotune.arms.techniques import ArmChoice, CompressorArm, chosen_arms
from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.autotune.meta.bandit import ITERATIONS_PER_TRIAL, BanditArm, default_arms, window_for
from sirtaki.autotune.meta.session import (
    DEFAULT_ARM,
    PLAN_ARM,
    REFINEMENT_ARM,
    REGISTRY_ARM,
    Purpose,
    Remembered,
    TuningSession,
    proof_iterations,
)
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.trial import Arm
from sirtaki.comm.plan import GradientLayout, Route
from sirtaki.engine.settings import Settings
from sirtaki.errors import in_a_line
from sirtaki.measures import LinkModel, counted
from sirtaki.watch import watchers
from sirtaki.watch.watchers import Decision, TrialEnded

from .cache import CacheHit, TuningCache, condition_of
from .plans import Carried, traffic
from .report import describe_change, describe_overhead, describe_result, describe_retune
from .trial_log import StepTimer, TrialLogWriter

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

SEED = 0
"""Seed of the tuner's random numbers. With a constant seed, jobs with equal measurements try the same settings."""

RETUNE_SEARCH_ITERATIONS = 12
"""Maximum iterations of a search after a change of communication time. Does not count the final comparison with the
setting that ran before."""

MEASURED, MEASURED_IN_RETUNE = 2, 1
"""Number of measured iterations of each setting: in the first search, and in a search after communication time changed.
The later search needs only one, because it looks for a large gain."""

EARLIER_SETTINGS = 2
"""Number of settings, chosen earlier in this job, that are tried again after a change of communication time."""


class KnobSearch:
    """Searches for the fastest setting of one gradient pipeline, with their log and results. Exists on rank 0 only.

    Attributes:
        default: setting without tuning.
        stays: setting to run while nothing is tried; None = the default.
        reason: why the last search has ended, for messages. "" before its end.
        times: typical durations of the parts of a training step on this rank.
        retuning: True in a search after a change of communication time.
        given: setting in the user's plan file, which is tried first; None = no plan file.
        model: cost model of the job, from which planners compute settings; None = unknown.
    """

    def __init__(
        self,
        settings: Settings,
        cache: TuningCache,
        *,
        default: Knobs,
        arms: Sequence[ArmChoice] | None,
        discarded_iterations: int,
        presumed: bool = True,
        saturates: bool = False,
        where: Callable[[], str] = str,
    ) -> None:
        """Begin without a session.

        Args:
            settings: settings of the job.
            cache: access to results of earlier jobs.
            default: setting without tuning.
            arms: search methods (arms); None = the default ones.
            discarded_iterations: number of iterations after a change of setting that are not measured.
            presumed: True if planners propose settings before measured times have confirmed their cost model.
            saturates: True if the default probably fills the links, so that the search may end after a few trials.
            where: returns a description of the current iteration, for the log of a failure.
        """
        self._settings, self._cache, self.default = settings, cache, default
        self._discarded_iterations = discarded_iterations
        self._arms, self._presumed, self._saturates, self._where = arms, presumed, saturates, where
        self._bandit: BanditArm | None = None  # Bandit that chooses the search method. None until a search begins.
        self.model: PlanningModel | None = None
        self._planners: Sequence[Planner] = ()
        self._layouts: Sequence[GradientLayout] = ()
        self._hit = CacheHit()
        self.stays: Knobs | None = None
        self.reason = ""
        self._usual_default_s = math.nan
        self._earlier: list[Knobs] = []  # Results of earlier searches of this job, the newest first.
        self.retuning = False
        self.given: Knobs | None = None
        self._suggested: list[Knobs] = []  # Settings to try first, found before a restart of an elastic job.
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
        """Return a session (a search in progress) that checks the setting of an earlier job.

        None if no setting is stored.

        If the registry has no setting of an earlier job, use tuning results from before a restart of this elastic job.
        If these results are final and the ranks are on the same hosts as then, set `stays` to the tuned setting, and
        return a session that has already ended with this setting.

        Args:
            layouts: layouts of the flat buffers.
            space: settings that may be chosen.
            before: tuning results from before restarts of this job, one for each placement of ranks on hosts, the
                newest first.
            place: for each rank, the first rank on its host.
        """
        self._layouts = layouts
        self._hit = self._cache.look_up(layouts, space)
        if self._hit.exact is None:
            self._continue_from(before, space, tuple(place))
        session = None if self._hit.exact is None else self._begin(space, None)
        if self._hit.message and self.stays is None:
            logger.info("%s", self._hit.message)
        return session

    def _continue_from(self, before: Sequence[Carried], space: KnobSpace, place: tuple[int, ...]) -> None:
        """Use tuning results from before a restart of an elastic job, given in `before`, the newest first.

        If a result was measured with the current placement of ranks on hosts, set `stays` to its setting, or continue
        with its trials if the search was not complete. If there is no such result, try the setting of the newest result
        first in the new search.
        """
        possible = [carried for carried in before if carried.knobs in space]
        here = next((carried for carried in possible if carried.place == place), None)
        if here is not None and here.settled:
            logger.info(
                "after an elastic restart on the same hosts, Sirtaki keeps the setting tuned before the restart: %s",
                here.knobs.describe(),
            )
            self.stays = here.knobs
            exact = Remembered(knobs=here.knobs, best_s=math.inf, default_s=math.inf, gain=here.gain)
            self._hit = CacheHit(exact=exact, history=here.trials)
        elif here is not None and here.trials:
            logger.info(
                "after an elastic restart on the same hosts, tuning continues and uses the %s from before the restart",
                counted(len(here.trials), "trial"),
            )
            self._hit = replace(self._hit, history=here.trials)
        elif possible:
            self._suggested = [possible[0].knobs]
            counts = (n for each in (place, possible[0].place) for n in (len(each), len(set(each))))
            logger.info(
                "the elastic job now has %d ranks on %d host(s) and is tuned again, beginning with the setting for "
                "%d ranks on %d host(s)",
                *counts,
            )

    def retune(self, running: Knobs, layouts: Sequence[GradientLayout], *, ratio: float, iteration: int) -> None:
        """Prepare a search after a change of communication time. Its result is compared with the running setting.

        Args:
            running: the running setting.
            layouts: layouts of the flat buffers.
            ratio: communication time now, divided by the time when the setting was chosen; NaN = unknown.
            iteration: number of training iterations so far.
        """
        proof = proof_iterations(RETUNE_SEARCH_ITERATIONS, self._discarded_iterations)
        logger.info("%s", describe_change(ratio, RETUNE_SEARCH_ITERATIONS + proof))
        self.retuning, self.stays, self._layouts, self._hit = True, running, layouts, CacheHit()
        self._bandit, self.model, self._planners = None, None, ()
        self._cache.look_again()
        cold_between_s = self.times.cold_between_s
        self.times = StepTimer()
        self.times.cold_between_s = cold_between_s
        self._log.retunes(running, ratio, iteration=iteration)

    def refine(self, session: TuningSession, iterations_left: int, space: KnobSpace) -> bool:
        """Resume a session that has ended, to try more settings. Return False if further trials are not worthwhile.

        Args:
            session: the last session.
            iterations_left: number of training iterations that would profit from a faster setting.
            space: settings that may be chosen.
        """

        # The session calls this function if it has no search method: it has only checked the setting of an earlier job.
        def make_arm() -> BanditArm:
            self._bandit = self._make_bandit(space, space)
            return self._bandit

        return session.resume(iterations_left, make_arm)

    def search(
        self,
        session: TuningSession | None,
        space: KnobSpace,
        promising: KnobSpace,
        make_model: Callable[[], PlanningModel | None],
    ) -> TuningSession:
        """Begin a search for the fastest setting, and return its session, which decides what to try.

        Args:
            session: session that has checked an earlier job's setting and found it slow; it is continued. None = make
                a new one.
            space: settings that may be chosen.
            promising: settings from which search methods choose while measured times confirm the planners' cost model.
            make_model: returns the cost model for planners, or None if planners cannot be used.
        """
        self.model = self._attempt(make_model, None)
        self._planners = ()
        if self.model is not None:
            make = functools.partial(make_planners, space=promising, model=self.model, presumed=self._presumed)
            self._planners = self._attempt(make, [])
        self._update_pace()
        self._bandit = bandit = self._make_bandit(space, promising)
        proposals = self._cache.first_proposals(self._layouts, space, self.model)
        for proposal in proposals:
            logger.log(logging.DEBUG if self.retuning else logging.INFO, "%s", proposal.message)
        seeds = [*self._suggested, *(proposal.knobs for proposal in proposals)]
        if self.retuning:
            seeds = [self.default, *self._earlier[:EARLIER_SETTINGS], *seeds]
        if session is None:
            return self._begin(space, bandit, seeds)
        self._cache.disprove()
        session.begin_search(bandit, space=space, seeds=seeds)
        return session

    def _attempt(self, action: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return action()
        except Exception as err:
            logger.warning(
                "search methods of the tuner have failed, and tuning continues without them: %s",
                in_a_line(err, self._where()),
            )
            logger.debug("the tuner's search failed with this traceback", exc_info=True)
            return otherwise

    def _make_bandit(self, space: KnobSpace, promising: KnobSpace) -> BanditArm:
        rng = np.random.default_rng(SEED)
        choices = self._arms

        def build_chosen() -> BanditArm:
            assert choices is not None
            arms = [*chosen_arms(choices, space=space, rng=rng), *([CompressorArm(space)] if space.lossy else [])]
            window = window_for(self._budget_iterations // ITERATIONS_PER_TRIAL, len(arms))
            return BanditArm(arms, rng=rng, window=window, where=self._where)

        build_default = functools.partial(
            default_arms,
            space=promising,
            whole_space=space,
            rng=rng,
            budget_iterations=self._budget_iterations,
            planners=self._planners,
            where=self._where,
        )
        # Create the search methods in another thread, because modules that they import may store exceptions of failed
        # imports. The traceback of such an exception keeps all frames of its call stack alive. The call stack of this
        # thread includes user code, so that the user's model would never be freed.
        with ThreadPoolExecutor(max_workers=1) as stack:
            return stack.submit(build_default if choices is None else build_chosen).result()

    def record(self, session: TuningSession, spans_s: Sequence[float], *, iteration: int) -> None:
        """Record the times of the running setting in the session and the trial log, and notify watchers.

        Args:
            session: the search in progress.
            spans_s: communication times with the setting, `(n_measured,)`; infinite if it could not be run.
            iteration: number of the last iteration with the setting.
        """
        assignment = session.assignment
        if assignment.purpose is Purpose.DEFAULT:
            self._update_pace()
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

    def _update_pace(self) -> None:
        """Update the durations of a step in the cost model: replace those of the slow first steps by those of usual
        steps.
        """
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
        """Return the name of a search method (arm) for log lines."""
        if arm in (REGISTRY_ARM, DEFAULT_ARM, REFINEMENT_ARM, PLAN_ARM):
            return f"the {arm}"
        kind = "planner" if any(planner.name == arm for planner in self._planners) else "search technique"
        return f"the {kind} {arm}"

    def report(self, session: TuningSession, *, iteration: int) -> None:
        """Store the result of a session (a search that has ended) in the registry, and log it."""
        result = session.result
        if session.resumed:
            # Store the trials even if no setting was faster, so that the next job does not try these settings again.
            stored = self._keep_condition(session) if self.retuning else self._keep(session)
            if result.knobs == self.stays:
                return
            text = f"changed to a faster setting: {describe_result(result, self.times.usual, self._name(result.arm))}"
        elif self.retuning:
            stored = self._keep_condition(session)
            proposer = self._name(result.arm)
            text = describe_retune(result, default=self.default, earlier=self._earlier, proposer=proposer)
        else:
            # Mark the stored search as incomplete if its measurements were too noisy. The next job then continues it.
            stored = self._keep(session, complete=not result.doubt)
            text = describe_result(result, self.times.usual, self._name(result.arm))
            self._usual_default_s = result.default_span_s
            if session.left_alone:
                link = self._links.get(result.knobs.route)
                text += f"; {describe_overhead(result.knobs, self._layouts, link)}"
        logger.info("%s", f"{text}; {stored}" if stored else text)
        self._update_pace()  # This also writes the cost model to the trial log, where `sirtaki plan` reads it.
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
        self.stays, self.reason = result.knobs, result.reason

    def _keep(self, session: TuningSession, *, complete: bool = True) -> str:
        """Store the result and the trials of a session in the registry.

        Return where they were stored, in words; "" if they were not.
        """
        return self._cache.keep(session.result, session.trials, complete=complete, links=self._links)

    def _keep_condition(self, session: TuningSession) -> str:
        """Store the result of a later search, for the current condition of the network only.

        The result of the first search stays in the registry. Return where the new one was stored; "" if it was not.
        """
        default_s = next((trial.span_s for trial in session.trials if trial.knobs == self.default), math.nan)
        condition = condition_of(default_s / self._usual_default_s)
        # Remove the gain, because it was measured over the setting that ran before, not over the default.
        result = replace(session.result, default_span_s=default_s, gain=None)
        if not condition:
            return ""
        return self._cache.keep(result, session.trials, complete=True, links=self._links, condition=condition)

    def remember(self, session: TuningSession | None) -> None:
        """Store the trials of an unfinished search (session) in the registry, so that the next job continues it."""
        if session is not None and not (session.done or session.resumed or self.retuning) and session.result.n_trials:
            result = session.result
            stored = self._keep(session, complete=False)
            logger.info(
                "the job ends before tuning is complete; result so far: %s; %s",
                describe_result(result, self.times.usual, self._name(result.arm)),
                f"{stored}, and the next job continues" if stored else "the next job starts tuning again",
            )
        self._log.close()

    def close(self) -> None:
        """Close the access to results of earlier jobs."""
        self._cache.close()

    def _begin(self, space: KnobSpace, arm: Arm | None, seeds: Sequence[Knobs] = ()) -> TuningSession:
        ends_early = self._saturates and arm is not None and self._arms is None and not (self.retuning or space.lossy)
        return TuningSession(
            space=space,
            default=(self.retuning and self.stays) or self.default,
            arm=arm,
            rng=np.random.default_rng(SEED),
            budget_iterations=self._budget_iterations,
            measured_iterations=MEASURED_IN_RETUNE if self.retuning else MEASURED,
            retune=self.retuning,
            discarded_iterations=self._discarded_iterations,
            exact=self._hit.exact if arm is None else None,
            checks=self.retuning or self.stays is None,
            seeds=seeds,
            given=None if self.retuning else self.given,
            history=self._hit.history,
            contrasts=space.contrasts(self.default) if ends_early and not space.nccl else (),
            identity=functools.cache(functools.partial(traffic, layouts=self._layouts)),
        )

    @property
    def _budget_iterations(self) -> int:
        return RETUNE_SEARCH_ITERATIONS if self.retuning else self._settings.warmup_iterations
