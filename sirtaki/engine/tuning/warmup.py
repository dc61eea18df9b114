"""The course of a tuning phase inside training: what rank 0 decides, what all ranks run, and how it begins anew."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

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
    Assignment,
    Purpose,
    SessionResult,
    TuningSession,
)
from sirtaki.autotune.model.planning import ContentionLearner, Observation, PlanningModel
from sirtaki.autotune.trial import Arm, Trial
from sirtaki.comm.compress import Cost, PowerSgd
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.gradients.buffers import Pace, Reduction
from sirtaki.comm.gradients.iteration import IterationReport
from sirtaki.comm.gradients.synchroniser import Synchroniser
from sirtaki.comm.plan import (
    CommPlan,
    GradientLayout,
    Route,
    TransportKind,
    UnitClass,
    goes_through_sockets,
)
from sirtaki.comm.router import Router
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.engine.console import NO_LOG, Progress, at_most, progress_every_s, tell_progress, tuning_ahead, tuning_off
from sirtaki.engine.settings import Settings
from sirtaki.errors import ConfigError, PlanError, TransportError, in_a_line
from sirtaki.measures import LinkModel, faster, in_ms
from sirtaki.watch import watchers
from sirtaki.watch.watchers import Decision, IterationEnded, TrialEnded

from .cache import CacheHit, Hardware, TuningCache, condition_of, hosts_by_rank
from .overlap import ForwardOverlap
from .plans import (
    Carried,
    CarriedTuning,
    default_knobs,
    given_to_all,
    key_of,
    knob_space,
    measure,
    open_default,
    plans_for,
    still_possible,
    traffic,
    without_planners,
)
from .trial_log import StepTime, StepTimes, TrialLogWriter

logger = logging.getLogger(__name__)


_T = TypeVar("_T")


SEED = 0
"""Of all that the tuner draws: equal times give equal trials."""


def describe_progress(session: TuningSession, usual: StepTime | None) -> Progress:
    """How long the warm-up may still take, what it has seen, and what runs now.

    Args:
        session: of the warm-up.
        usual: what steps take besides, None = unknown.
    """
    result, now = session.result, session.assignment
    default_s, best_s = result.default_span_s, result.best_span_s
    known = math.isfinite(default_s) and math.isfinite(best_s)
    left = seen = aside = ""
    if known and usual is not None:
        left = at_most((session.iterations_at_most - result.iterations_used) * usual.step_s(best_s))
    if known and not result.tuned:
        seen, aside = "nothing seen that beats the default", _a_step(usual, default_s)
    elif known:
        seen = f"fastest seen so far, not yet proved: {in_ms(default_s - best_s)} a step less"
        aside = _a_step(usual, default_s, best_s)
    return Progress(
        used=result.iterations_used,
        at_most=session.iterations_at_most,
        left=left,
        seen=seen,
        aside=aside,
        now=f"{now.purpose.description}: {now.knobs.describe()}",
    )


def _a_step(usual: StepTime | None, *spans_s: float) -> str:
    """What a step takes with the default, and with the best, in brackets; empty where that is unknown."""
    if usual is None:
        return ""
    return " (" + " → ".join(in_ms(usual.step_s(span_s)) for span_s in spans_s) + ")"


def describe_result(result: SessionResult, usual: StepTime | None, who: str) -> str:
    """What the warm-up has found, in one line.

    Args:
        result: of the session.
        usual: what steps take besides, None = unknown.
        who: has proposed what is kept.
    """
    found = f"{result.knobs.describe()}, proposed by {who}" if result.tuned else "the default stays"
    gain = ""
    if result.gain is not None:
        before_s, after_s = result.default_span_s, result.best_span_s
        gain = f"communication is {result.gain.describe()}; "
        if usual is not None:
            before, after = usual.step_s(before_s), usual.step_s(after_s)
            gain += (
                f"steps take {in_ms(after)} instead of {in_ms(before)} ({faster(before, after)}), and communication "
                f"that the backward pass does not hide {in_ms(usual.exposed_s(after_s))} "
                f"instead of {in_ms(usual.exposed_s(before_s))}; "
            )
    elif result.tuned:
        gain = "the fastest seen, not yet proved: "
    trials = f"{result.n_trials} setting{'s' if result.n_trials != 1 else ''}"
    return f"tuned in {result.iterations_used} steps with {trials}: {gain}{found} ({result.reason})"


def describe_change(ratio: float, iterations: int) -> str:
    """Why a re-tune of at most so many iterations begins, in one line.

    Args:
        ratio: how many times as long communication takes as it did; not a number = unknown.
        iterations: that it may take.
    """
    takes = "communication no longer takes as long as when"
    if math.isfinite(ratio) and ratio >= 1.0:
        takes = f"communication takes {ratio:.2g} times as long as when"
    elif math.isfinite(ratio):
        takes = f"communication is {1.0 / ratio:.2g} times as fast as when"
    return f"{takes} this setting was chosen: trying others for at most {iterations} steps"


def describe_retune(result: SessionResult, *, default: Knobs, earlier: Sequence[Knobs], proposer: str) -> str:
    """What a re-tune has found, in one line.

    Args:
        result: of the session.
        default: what runs untuned.
        earlier: what was kept before in this job.
        proposer: who has proposed what is kept now.
    """
    if not result.tuned:
        return f"nothing better found in {result.iterations_used} steps: the setting stays ({result.reason})"
    whence = f"proposed by {proposer}"
    if result.knobs == default:
        whence = "the untuned default"
    elif result.knobs in earlier:
        whence = "as earlier in this job"
    gain = "" if result.gain is None else f"communication is {result.gain.describe()}, than with the setting that ran; "
    found = f"{gain}{result.knobs.describe()}, {whence}"
    return f"tuned again in {result.iterations_used} steps: {found} ({result.reason})"


MEASURED_LOSS = 20
"""Iterations after the warm-up over which it is measured what compression costs in accuracy."""


def describe_lossy(knobs: Knobs, cost: Cost, iterations: int, whose: str) -> str:
    """What compressors that the tuner has kept save, and what they cost, in one line.

    Args:
        knobs: what was kept.
        cost: what was measured.
        iterations: over which that was.
        whose: what gradients these are of.
    """
    left = math.sqrt(cost.owed_squares / cost.gradient_squares) if cost.gradient_squares else 0.0
    share = cost.sent_bytes / cost.whole_bytes if cost.whole_bytes else 1.0
    return (
        f"compressed as SIRTAKI_LOSSY allows, by {knobs.compressors}: {share:.2g} of the bytes; what is left to the "
        f"next step has {100.0 * left:.3g} % of the gradients' norm ({whose}, {iterations} iterations)"
    )


def allowed_compressors(
    control: ControlPlane, settings: Settings, reduction: Reduction, space: KnobSpace, params: Sequence[torch.Tensor]
) -> tuple[str, ...]:
    """Collective: by which compressors the tuner may have these gradients travel, as rank 0 allows; rank 0 tells."""
    allowed: tuple[str, ...] = control.broadcast(settings.lossy)
    why = ""
    if not allowed:
        return ()
    if reduction.compression is not None or reduction.wire_dtype:
        why = "compression= of the optimizer says how these gradients travel"
    elif not settings.tunes:
        why = "nothing is tuned"
    elif reduction.op is not ReduceOp.SUM:
        why = "gradients are neither summed nor averaged"
    elif not any(param.is_floating_point() for param in params):
        dtypes = ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in params}))
        why = f"gradients of {dtypes} cannot be compressed"
    elif not any(goes_through_sockets(route) for route in space.routes):
        why = "gradients travel through sockets on no route here"
    if why and control.rank == 0:
        logger.warning("SIRTAKI_LOSSY=%s has no effect: %s", ",".join(allowed), why)
    return () if why else allowed


EMPTY_ROWS = 0.5
"""Of a matrix's rows, from which on it counts as an embedding's."""


def embeddings_among(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
    """Those whose averaged gradient has mostly rows without any number but zero."""

    def empty_rows(gradient: torch.Tensor) -> float:
        return 1.0 - float(gradient.any(dim=1).float().mean())

    gradients = ((name, param.grad) for name, param in named)
    return tuple(
        name
        for name, gradient in gradients
        if gradient is not None and gradient.dim() == 2 and gradient.numel() and EMPTY_ROWS < empty_rows(gradient) < 1.0
    )


_P = ParamSpec("_P")

RETUNE_ITERATIONS = 31
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
        except Exception as err:
            stays = "the default" if self._stays is None else "what ran before"
            words = "tuning has failed and ends here; %s runs from now on: %s"
            logger.warning(words, stays, in_a_line(err, self._where()))
            logger.debug("where it failed", exc_info=True)
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
        where: Callable[[], str] = str,
    ) -> None:
        """A session follows with `recall` or `search`.

        Args:
            settings: of the job.
            cache: what earlier jobs have left.
            default: what runs untuned.
            arms: search techniques, None = the usual ones.
            discarded_iterations: after a change of knobs.
            presumed: planners are asked before trials have borne their model out.
            where: says where training is, for the log of a fault.
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
        self._session: TuningSession | None = None
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
        before: Sequence[Carried] = (),
        *,
        place: Sequence[int] = (),
    ) -> bool:
        """Whether an earlier job, or generation, has left a setting, which is then run first; else `search` is due.

        Args:
            layouts: of the gradients.
            space: what may be chosen.
            before: what the generations before have left, one a place, the last one first.
            place: of each rank the first one on its host.
        """
        self._layouts = layouts
        self._hit = self._cache.look_up(layouts, space)
        if self._hit.exact is not None:
            self._begin(space, None)
        found = self._session is not None or self._go_on_from(before, space, tuple(place))
        if self._hit.message and self._stays is None:
            logger.info("%s", self._hit.message)
        return found

    def _go_on_from(self, before: Sequence[Carried], space: KnobSpace, place: tuple[int, ...]) -> bool:
        """Whether what ran when ranks were placed as now runs on, for good; else what was found helps the search."""
        possible = [carried for carried in before if carried.knobs in space]
        here = next((carried for carried in possible if carried.place == place), None)
        if here is not None and here.settled:
            logger.info("what ran before runs on: %s", here.knobs.describe())
            self._stays = here.knobs
            return True
        if here is not None and here.trials:
            logger.info("tuning goes on after %d trials", len(here.trials))
            self._hit = replace(self._hit, history=here.trials)
        elif possible:
            self._suggested = [possible[0].knobs]
            counts = (n for each in (place, possible[0].place) for n in (len(each), len(set(each))))
            logger.info("tuning anew for %d ranks (hosts: %d), from what ran on %d (hosts: %d)", *counts)
        return False

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
        self._bandit, self.model, self._planners, self._learner = None, None, (), None
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
        self.model = self._attempt(make_model, None)
        self._planners, self._learner = (), None
        if self.model is not None:
            make = functools.partial(make_planners, space=promising, model=self.model, presumed=self._presumed)
            self._planners = self._attempt(make, [])
            if self._presumed and self._budget_iterations >= SHORT and not self._retuning:
                learn = functools.partial(ContentionLearner, space=promising, default=self.default)
                rng = np.random.default_rng(SEED)
                self._learner = self._attempt(functools.partial(learn, self.model, rng=rng), None)
        draws = () if self._learner is None else self._learner.draws
        self._tell_pace()
        self._bandit = bandit = self._make_bandit(space, promising)
        proposals = self._cache.first_proposals(self._layouts, space, self.model)
        for proposal in proposals:
            logger.log(logging.DEBUG if self._retuning else logging.INFO, "%s", proposal.message)
        seeds = [*self._suggested, *(proposal.knobs for proposal in proposals)]
        if self._retuning:
            seeds = [self.default, *self._earlier[:EARLIER_SETTINGS], *seeds]
        if self._session is None:
            self._begin(space, bandit, seeds, draws)
        else:
            self._cache.disprove()
            self._session.begin_search(bandit, space=space, seeds=seeds, draws=draws)

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
        # What arms import may keep the errors of imports that failed, which keep the frames that led to them: on a
        # stack of its own, so that these are not the user's with his model in them.
        with ThreadPoolExecutor(max_workers=1) as stack:
            return stack.submit(build).result()

    @_guarded
    def record(self, spans_s: Sequence[float], *, iteration: int, backward_s: Sequence[float] = ()) -> None:
        """Tells the session what its assignment has measured until `iteration`.

        Args:
            spans_s: of its iterations, `(n_measured,)`; infinite where it could not be run.
            iteration: the last one.
            backward_s: of this rank in the same iterations, `(n_measured,)`; empty where none has run.
        """
        if self._session is None or self._session.done:
            if math.inf in spans_s:  # what stays cannot be run
                self._session = self._stays = None
            return
        assignment = self._session.assignment
        if assignment.purpose is Purpose.DEFAULT:
            self._tell_pace()
        if self._learner is not None:
            self._learn(self._learner, self._session, spans_s, backward_s)
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
            watchers.tell_all(lambda watcher: watcher.trial(event), iteration=iteration)
        quiet = self._session.done or self._retuning
        if not quiet and time.monotonic() - self._told_s > progress_every_s():
            self._told_s = time.monotonic()
            tell_progress(logger, describe_progress(self._session, self.times.usual))

    def _learn(
        self,
        learner: ContentionLearner,
        session: TuningSession,
        spans_s: Sequence[float],
        backward_s: Sequence[float],
    ) -> None:
        """Notes what the assignment took, and tells the planners what that says of contention once enough has run."""
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
        if not self._retuning:
            self._log.knows(learnt)

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
        if arm in (REGISTRY_ARM, DEFAULT_ARM, DRAW_ARM, REFINEMENT_ARM, PLAN_ARM):
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
            # Of a host that is shared nothing is known yet: the next job goes on.
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
                retune=self._retuning,
            )
            watchers.tell_all(lambda watcher: watcher.decision(event), iteration=iteration)
        earlier = [] if self._stays is None else [self._stays]
        self._earlier = [*earlier, *(knobs for knobs in self._earlier if knobs not in (result.knobs, *earlier))]
        self._stays = result.knobs

    def _keep_condition(self, session: TuningSession) -> bool:
        """What holds while communication is as it is now goes beside what was found before, not into its place."""
        default_s = next((trial.span_s for trial in session.trials if trial.knobs == self.default), math.nan)
        condition = condition_of(default_s / self._usual_default_s)
        result = replace(session.result, default_span_s=default_s, gain=None)  # which is over what ran
        return bool(condition) and self._cache.keep(
            result, session.trials, complete=True, links=self._links, condition=condition
        )

    @_guarded
    def remember(self) -> None:
        """Stores what an unfinished warm-up has found, so that the next job goes on from it. Idempotent."""
        session, self._session = self._session, None
        if session is not None and not self._retuning and session.trials:
            result = session.result
            stored = self._cache.keep(result, session.trials, complete=False, links=self._links)
            logger.info(
                "the job ends while settings are tried; until now %s; %s",
                describe_result(result, self.times.usual, self._name(result.arm)),
                "stored in the registry, the next job goes on" if stored else "the next job begins anew",
            )
        self._log.close()

    @_guarded
    def close(self) -> None:
        """Remembers what an unfinished warm-up has found, and does not watch for the model's graph any more."""
        self.remember()
        self._cache.close()

    @_guarded
    def _begin(
        self, space: KnobSpace, arm: Arm | None, seeds: Sequence[Knobs] = (), draws: Sequence[Knobs] = ()
    ) -> None:
        self._session = TuningSession(
            space=space,
            default=self._stays or self.default,
            arm=arm,
            rng=np.random.default_rng(SEED),
            budget_iterations=self._budget_iterations,
            measured_iterations=MEASURED_IN_RETUNE if self._retuning else MEASURED,
            retune=self._retuning,
            discarded_iterations=self._discarded_iterations,
            exact=self._hit.exact if arm is None else None,
            seeds=seeds,
            draws=draws,
            given=None if self._retuning else self.given,
            history=self._hit.history,
            identity=functools.cache(functools.partial(traffic, layouts=self._layouts)),
        )

    @property
    def _budget_iterations(self) -> int:
        return RETUNE_ITERATIONS if self._retuning else self._settings.warmup_iterations


class AssignmentUnderWay:
    """An assignment and the spans of its iterations so far.

    Attributes:
        assignment: which.
        spans_s: of the iterations that count, each the shortest of all ranks.
        backward_s: this rank's backward passes of the same iterations.
    """

    def __init__(self, assignment: Assignment) -> None:
        """Nothing has run of it."""
        self.assignment, self.spans_s, self.backward_s = assignment, list[float](), list[float]()
        self._to_discard = assignment.discarded_iterations

    def note(self, span_s: float, control: ControlPlane, *, backward_s: float = math.nan) -> bool:
        """Collective: counts an iteration; whether it was the last one.

        `span_s` of a rank that has joined is not a number: nothing overlaps then, and the iteration shows nothing.
        """
        if self._to_discard > 0:
            self._to_discard -= 1
            return False
        # The last rank to arrive sets the pace; the others' spans hold its lateness.
        shortest_s = float(control.minimum(np.array([-1.0 if math.isnan(span_s) else span_s]))[0])
        if shortest_s < 0.0:
            return False
        self.spans_s.append(shortest_s)
        self.backward_s.append(backward_s)
        return len(self.spans_s) >= self.assignment.measured_iterations


SKIPPED = 2
"""Iterations after a change of the setting that are not like later ones."""

REFERENCE = 24
"""Iterations whose median is the reference, and whose spread is the noise."""

ALLOWANCE = math.log(1.25)
LIMIT = 0.3
ENOUGH = 1.8
"""Of the logarithm of a span: what does not count, what one iteration may add, and what the sum must reach."""

USUAL_NOISE = 0.12
"""Where logarithms of spans scatter more than this (standard deviation), the three above grow alike."""

COOL_DOWN = 50
"""Iterations after a first re-tune in which there is no second one; doubled by each that follows soon."""

LONG = 10
"""What comes later than so many cool-downs is like the first again."""

_DEVIATIONS_BETWEEN_TENTHS = 2.56


class DriftWatch:
    """Compares the iterations of one setting with its first ones.

    Attributes:
        pace: what this rank finds.
    """

    def __init__(self) -> None:
        self.pace = Pace.USUAL
        self._cool_down = 0
        self._forget()

    def _forget(self) -> None:
        self.pace = Pace.USUAL
        self._iterations = 0
        self._reference: list[float] = []
        self._usual, self._scale = math.nan, 1.0
        self._slower = self._faster = 0.0
        self._recent: deque[float] = deque(maxlen=7)

    def retuned(self) -> None:
        """A setting was chosen anew because of what this watch has found."""
        soon = self._cool_down > 0 and self._iterations < LONG * self._cool_down
        self._cool_down = 2 * self._cool_down if soon else COOL_DOWN
        self._forget()

    def reordered(self) -> None:
        """Gradients travel in another order from now on, which takes its own time."""
        self._forget()

    @property
    def due(self) -> bool:
        """There may be a re-tune now; the same on all ranks."""
        return self._iterations >= max(SKIPPED + REFERENCE, self._cool_down)

    @property
    def ratio(self) -> float:
        """How many times as long communication takes now; not a number where this rank does not know."""
        return math.exp(median(self._recent) - self._usual) if self._recent else math.nan

    def note(self, span_s: float) -> None:
        """An iteration has ended; its span is not a number on a rank that has joined."""
        self._iterations += 1
        if self._iterations <= SKIPPED or not span_s > 0.0:
            return
        moment = math.log(span_s)
        if len(self._reference) < REFERENCE:
            self._reference.append(moment)
            if len(self._reference) == REFERENCE:
                self._learn()
            return
        self._recent.append(moment)
        excess = (moment - self._usual) / self._scale
        self._slower = min(max(0.0, self._slower + min(excess - ALLOWANCE, LIMIT)), ENOUGH)
        self._faster = min(max(0.0, self._faster + min(-excess - ALLOWANCE, LIMIT)), ENOUGH)
        self.pace = Pace.USUAL
        if self.due and max(self._slower, self._faster) >= ENOUGH:
            self.pace = Pace.SLOWER if self._slower >= ENOUGH else Pace.FASTER

    def _learn(self) -> None:
        ordered = sorted(self._reference)
        tenth = REFERENCE // 10
        noise = (ordered[-1 - tenth] - ordered[tenth]) / _DEVIATIONS_BETWEEN_TENTHS
        self._usual, self._scale = median(ordered), max(1.0, noise / USUAL_NOISE)


def open_router(control: ControlPlane, settings: Settings, params: Sequence[torch.Tensor]) -> Router:
    """Open the router for the gradients of `params`. Collective.

    NCCL reduces gradients on GPUs, unless it is missing, ranks share a GPU, or `SIRTAKI_TRANSPORT=staged`.

    Raises:
        ConfigError: the parameters are on several devices, or on one that is neither the CPU nor a CUDA GPU.
    """
    places = sorted({str(param.device) for param in params})
    if len(places) > 1 or {param.device.type for param in params} - {"cpu", "cuda"}:
        raise ConfigError(
            f"the parameters are on {' and '.join(places)}; they must all be on the CPU or all on one CUDA GPU: move "
            "the model to one device, and start one process for each GPU"
        )
    if not params or params[0].device.type == "cpu":
        return Router(control, timeout_s=settings.transport_timeout_s)
    from sirtaki.comm.device import cuda_device
    from sirtaki.comm.nccl_streams.transport import find_nccl

    index = params[0].device.index
    device = cuda_device(torch.cuda.current_device() if index is None else index)
    wanted = settings.transport
    if wanted is TransportKind.STAGED:
        return Router(control, timeout_s=settings.transport_timeout_s, device=device)
    nccl = find_nccl(control, device, forced=wanted is TransportKind.NCCL, timeout_s=settings.transport_timeout_s)
    return Router(control, timeout_s=settings.transport_timeout_s, device=device, nccl=nccl)


def without_others(settings: Settings) -> str:
    """What happens on one rank, in one line."""
    return f"on one rank nothing is reduced, and nothing tuned{NO_LOG if settings.trial_log else ''}"


def _coordinator(
    settings: Settings,
    control: ControlPlane,
    params: Sequence[torch.Tensor],
    *,
    default: Knobs,
    arms: Sequence[Arm] | None,
    on_streams: bool,
    where: Callable[[], str],
) -> TuningCoordinator | None:
    """Collective: on rank 0, None elsewhere."""
    kinds = control.all_gather(Hardware.here(params[0].device)) if params else []
    if control.rank != 0:
        return None
    return TuningCoordinator(
        settings,
        TuningCache(settings, params, hosts_by_rank(control, settings), kinds),
        default=default,
        arms=arms,
        # On a device with streams the first report after a change is of the iteration before it.
        discarded_iterations=2 if on_streams else 1,
        # The ranks of one host communicate on the processors that compute, which no probe has shown.
        presumed=on_streams or not control.one_node,
        where=where,
    )


class TunedSynchroniser:
    """Has gradients reduced, and in the first iterations finds out how.

    Attributes:
        synchroniser: what reduces them; only its iterations are ended here, by `finish`.
        knobs: what runs now.
        router: carries units.
        tuning: the warm-up is not over.
        overlap: whether iterations may end in the next forward pass; None where they are not to.
    """

    def __init__(
        self,
        control: ControlPlane,
        settings: Settings,
        params: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        reduction: Reduction,
        arms: Sequence[Arm] | None = None,
        carried: CarriedTuning | None = None,
        overlaps: bool = False,
        rank: int | None = None,
    ) -> None:
        """Collective.

        Args:
            control: the ranks that take part.
            settings: of the job.
            params: parameters whose gradients are reduced, the same on all ranks.
            names: of the parameters.
            reduction: what is done to every gradient.
            arms: search techniques, None = the usual ones.
            carried: of the generations of this job; None where ranks stay.
            overlaps: iterations are to end in the next forward pass; rank 0's holds for all.
            rank: by which messages name this one; None = its rank among those of `control`.

        Raises:
            ConfigError: on all ranks; the user's plan cannot be read, and ranks stay.
        """
        self._control = control = control.scope()
        self._given = given_to_all(control, settings.plan, ranks_stay=carried is None)
        self._carried = carried  # None where ranks stay, and nothing is brought nor left
        self._key = "" if carried is None else key_of(names, params)
        self._kept: Knobs | None = None  # by the last warm-up or re-tune of this generation
        self.router = open_router(control, settings, params)
        self.router.between_nodes = reduction.compression is not None
        total_bytes = sum(param.numel() * reduction.travels_as(param.dtype).itemsize for param in params)
        self._choose = partial(default_knobs, total_bytes=total_bytes, one_node=control.one_node)
        space = knob_space(self.router, settings, total_bytes)
        if isinstance(reduction.compression, PowerSgd) and settings.unit_bytes is None:
            # Whole matrices compress more, and a unit takes two rounds however little is left of it.
            low, high = space.unit_bytes
            space = replace(space, unit_bytes=(max(low, high // 4), high))
        self._allowed = allowed_compressors(control, settings, reduction, space, params)
        self._named, self._embeddings = list(zip(names, params, strict=True)), tuple[str, ...]()
        self._to_measure = 0  # iterations until it is told what compression costs
        space = replace(space, lossy=self._allowed)
        self._space, self._default = open_default(space, control, self.router, self._choose)
        self.synchroniser = self._sync = Synchroniser(
            params,
            names,
            control=control,
            router=self.router,
            reduction=reduction,
            default_plan=self._default_plan,
            unused_as_none=settings.unused_as_none,
            lossy=bool(self._allowed),
            rank=rank,
        )
        self.knobs = self._default
        self._total_bytes, self._told_s = total_bytes, math.nan
        self._arms = arms
        self.tuning = settings.tunes
        wanted, tries = control.broadcast((overlaps, self.tuning))
        self.overlap = ForwardOverlap(control, tries=tries) if wanted else None
        self._assignment: AssignmentUnderWay | None = None
        self._profiled: IterationReport | None = None
        self._promising: Sequence[Route] = ()  # by the probes of the warm-up
        self._coordinator: TuningCoordinator | None = None
        self._drift: DriftWatch | None = None
        if self.tuning:
            if control.size > 1 and self._space.has_choices:
                self._drift = DriftWatch()
            self._coordinator = _coordinator(
                settings,
                control,
                params,
                default=self._default,
                arms=arms,
                on_streams=self.on_streams,
                where=self._sync.where,
            )
        if control.rank == 0 and not (carried is not None and carried.of(self._key)):
            count = f"{len(params)} parameter{'' if len(params) == 1 else 's'}"
            logger.info("gradients of %s between %d ranks: %s", count, control.size, self._intention(settings))

    def _intention(self, settings: Settings) -> str:
        """What will happen, and how to switch that off, in one line."""
        if not self.tuning:
            no_log = NO_LOG if settings.trial_log else ""
            return f"{self._default.describe()}; {tuning_off(settings)}{no_log}"
        if not self._space.has_choices:
            return f"{self._default.describe()}, which is all that there is to choose from"
        return f"{self._default.describe()}; {tuning_ahead(settings)}"

    def _default_plan(self, layout: GradientLayout) -> CommPlan:
        """Collective: the untuned plan of a new layout, for which there may not be shared memory any more."""
        if self._default.route not in self.router.routes:
            space = still_possible(self._space, self.router)
            self._space, self._default = open_default(space, self._control, self.router, self._choose)
        return replace(self._default, cuts=None).to_plan(layout)

    @property
    def model(self) -> PlanningModel | None:
        """What planners know; on rank 0, None elsewhere and where nothing was probed."""
        return None if self._coordinator is None else self._coordinator.model

    @property
    def on_streams(self) -> bool:
        """Gradients are on a device on which things happen later than they are called."""
        return self.router.device.streams

    @property
    def can_put_off(self) -> bool:
        """The end of this iteration needs no other rank, once all gradients have left."""
        ready = self.overlap is not None and self.overlap.ready
        return ready and not self.tuning and not self._to_measure and self._sync.can_put_off

    def check(self) -> None:
        """Raises what a transport has found out by itself; any thread may ask."""
        self.router.check()

    def finish(self, *, joined: bool = False) -> None:
        """Collective: blocks until all gradients are reduced, and decides what the next iteration runs.

        Args:
            joined: this rank has no data any more and takes part with zeros.
        """
        report = self._sync.finish(joined=joined)
        if watchers.watching:
            self._tell(report)
        if self.tuning and self._coordinator is not None:
            self._coordinator.times.note(report)
        if report.profiled:
            self._after_profiling(report)
        elif not report.ready_s:
            span_s = math.nan if joined else report.span_s
            if self._assignment is not None:
                if self._assignment.note(span_s, self._control, backward_s=report.backward_s):
                    self._record(self._assignment.spans_s, self._assignment.backward_s)
                    self._next_assignment()
            else:
                if self._drift is not None and (self.overlap is None or not self.overlap.trying):
                    self._watch(self._drift, span_s, self._sync.pace)
                if self._to_measure and not self.tuning:
                    self._measure_loss()
                elif self.overlap is not None and not self.tuning:
                    self._note_overlap(self.overlap, report, joined=joined)

    def _tell(self, report: IterationReport) -> None:
        """Tells watchers of an iteration; its step took as long as it is since the one before was told of."""
        before_s, self._told_s = self._told_s, time.perf_counter()
        event = IterationEnded(
            number=self._sync.iteration,
            step_s=self._told_s - before_s,
            communication_s=report.span_s,
            exposed_s=max(0.0, report.span_s - report.backward_s),
            n_bytes=self._total_bytes,
            tuning=self.tuning,
        )
        watchers.tell_all(lambda watcher: watcher.iteration(event), iteration=event.number)

    # ── the warm-up ──────────────────────────────────────────────────────────────────────────────────────────────

    def _after_profiling(self, report: IterationReport) -> None:
        """Collective: the order is known. The first time, the warm-up begins; later, its current knobs go on."""
        if self.overlap is not None:
            if self.overlap.trials is not None and self.overlap.trying:
                self.knobs = self.overlap.trials.first.knobs
            self.overlap.begin()
        if self._allowed:
            self._learn_classes(first=self._profiled is None)
        self._profiled = report
        if self._drift is not None:
            self._drift.reordered()
            self._sync.say_pace(Pace.USUAL)
        self._take_given()
        if self.tuning and self._assignment is None:
            remembered = False
            if self._coordinator is not None:
                self._coordinator.default = self._default
                before = [] if self._carried is None else self._carried.of(self._key)
                remembered = self._coordinator.recall(self._layouts, self._space, before, place=self._control.hosts)
            if not self._control.broadcast(remembered):
                self._search()
            self._next_assignment()
        elif self.knobs != self._default:
            try:
                self._apply(self.knobs)
            except (PlanError, TransportError) as err:
                logger.info("%s cannot be run any more: %s", self.knobs.describe(), err)
                self.knobs = self._default

    def _learn_classes(self, *, first: bool) -> None:
        """Collective: which units there are that compressors may be chosen for; embeddings by the first profile."""
        if first:
            self._embeddings = self._control.broadcast(embeddings_among(self._named))
        sizes = {self._default.unit_bytes, self._space.unit_bytes[1]}
        there = {
            layout.class_of(unit.start, unit.stop)
            for layout in self._layouts
            for size in sizes
            for unit in replace(self._default, unit_bytes=size).to_plan(layout).units
        }
        self._space = replace(self._space, classes=tuple(kind for kind in UnitClass if kind in there))

    @property
    def _layouts(self) -> tuple[GradientLayout, ...]:
        layouts = self._sync.layouts
        if not self._embeddings:
            return layouts
        return tuple(replace(layout, embeddings=self._embeddings) for layout in layouts)

    def _take_given(self) -> None:
        """What the user has given is tried first; where nothing is tuned, it runs. Once."""
        given, self._given = self._given, None
        if given is not None:
            must_run = not self.tuning and self._carried is None
            knobs = given.accepted(self._layouts, self._control, self._space, must_run=must_run)
            if self._coordinator is not None:
                self._coordinator.given = knobs
            elif not self.tuning:
                self.knobs = knobs or self.knobs

    def _search(self, routes: Sequence[Route] = (), *, span_s: float = math.nan) -> None:
        """Collective: measures what a search needs (links of `routes` only, if given), and has it begin.

        `span_s` is what synchronising takes now on this rank; not a number = as when the order was profiled.
        """
        report, layouts = self._profiled, self._layouts
        assert report is not None
        # Planners plan one flat buffer; of several, each would have to know what the others do.
        if self._arms is None and len(layouts) == 1:
            probed = replace(self._space, routes=tuple(routes) or self._space.routes)
            now_s = span_s if span_s > 0.0 else report.span_s
            found = measure(self._control, self.router, probed, default=self._default, span_s=now_s)
            if routes:
                found = found.with_routes(self._space.routes, promising=[*routes, *self._promising])
            else:
                self._promising = found.promising.routes
        else:
            found = without_planners(self._space)
        self._space = found.space
        if self._coordinator is not None:
            ready_s = [*self._sync.in_layout_order(report.ready_s), report.backward_s]  # the flags are there at the end
            between_s = self._coordinator.times.cold_between_s
            self._coordinator.search(
                found.space, found.promising, lambda: found.model(layouts[0], ready_s, report.backward_s, between_s)
            )

    def _record(self, spans_s: Sequence[float], backward_s: Sequence[float] = ()) -> None:
        if self._coordinator is not None:
            self._coordinator.record(spans_s, iteration=self._sync.iteration, backward_s=backward_s)
            self._coordinator.times.pause()

    def _next_assignment(self) -> None:
        """Collective: the coordinator's next assignment, on all ranks; ends the warm-up if it is the last."""
        while True:
            now: Assignment = self._control.broadcast(self._coordinator.assignment if self._coordinator else None)
            if now.purpose is Purpose.SEARCH:
                self._search()
                continue
            self._assignment = AssignmentUnderWay(now)
            try:
                self._apply(now.knobs)
            except (PlanError, TransportError) as err:  # on all ranks alike
                if now.knobs == self._default and now.purpose is Purpose.KEPT:
                    raise  # nothing is left
                logger.info("%s cannot be run: %s", now.knobs.describe(), err)
                self._record([math.inf])
                continue
            break
        if now.purpose is Purpose.KEPT:
            self._end()

    def _apply(self, knobs: Knobs) -> None:
        """Collective."""
        self._sync.set_plans(plans_for(knobs, self._layouts))
        self.knobs = knobs

    def _end(self) -> None:
        self.tuning, self._assignment, self._kept = False, None, self.knobs
        self.router.keep_only(plans_for(self.knobs, self._layouts))
        if self._coordinator is not None:
            self._coordinator.end(iteration=self._sync.iteration)
        self._to_measure = MEASURED_LOSS if self.knobs.lossy else 0
        if self._sync.compressed is not None:
            self._sync.compressed.cost()
            self._sync.compressed.measures = bool(self.knobs.lossy)

    def _measure_loss(self) -> None:
        """Collective: another iteration has been measured; after the last of them rank 0 tells what was lost."""
        self._to_measure -= 1
        compressed = self._sync.compressed
        if self._to_measure or compressed is None:
            return
        compressed.measures = False
        cost = Cost(*self._control.total(np.array(compressed.cost())).tolist())
        if self._control.rank == 0:
            logger.info("%s", describe_lossy(self.knobs, cost, MEASURED_LOSS, "all ranks"))

    # ── after the warm-up ────────────────────────────────────────────────────────────────────────────────────────

    def _note_overlap(self, overlap: ForwardOverlap, report: IterationReport, *, joined: bool) -> None:
        """Collective at the ends of trials: tells the overlap with the forward pass of an iteration."""
        knobs = overlap.note(
            report,
            self._sync,
            self.knobs,
            self._space,
            profiled=self._profiled,
            joined=joined,
            link=None if self.model is None else self.model.link_between_hosts(self.knobs.route),
        )
        if knobs is not None:
            self._sync.set_plans(plans_for(knobs, self._layouts))
            self.knobs = knobs
            overlap.order(self._sync)
            if overlap.trying:
                return
            self.router.keep_only(self._sync.plans)
            if self._drift is not None:
                self._drift.reordered()

    def _watch(self, drift: DriftWatch, span_s: float, agreed: Pace) -> None:
        """Collective if all ranks have agreed that communication has changed; else nothing but arithmetic."""
        if agreed is not Pace.USUAL and drift.due:
            if self.overlap is not None and self.overlap.ready:
                self.overlap.begin()  # a re-tune needs all ranks, who may be anywhere when this iteration ends
            else:
                self._retune(drift, span_s)
            return
        drift.note(span_s)
        if self._coordinator is None or not self._coordinator.failed:
            self._sync.say_pace(drift.pace)

    def _retune(self, drift: DriftWatch, span_s: float) -> None:
        """Collective: a short search begins with what runs now."""
        if self._coordinator is not None:
            self._coordinator.retune(self.knobs, self._layouts, ratio=drift.ratio, iteration=self._sync.iteration)
        drift.retuned()
        if self.overlap is not None:
            self.overlap.forget()
        self._sync.say_pace(Pace.USUAL)
        self.tuning = True
        self._search([route for route in self._space.routes if route == self.knobs.route], span_s=span_s)
        self._next_assignment()

    def remember(self) -> None:
        """Stores what an unfinished warm-up has found, so that the next job goes on from it. Idempotent."""
        if self._coordinator is not None:
            self._coordinator.remember()

    def close(self) -> None:
        """Ends all threads; what an unfinished warm-up has found is stored. Not collective, once.

        What only all ranks together can close is left to the control plane's `reclaim`.
        """
        if self._carried is not None and self._carried.going_on and (self._kept or self._assignment is not None):
            self._carried.leave(self._key, self._left_behind())
        compressed, iterations = self._sync.compressed, MEASURED_LOSS - self._to_measure
        if self._to_measure and iterations and compressed is not None and self._coordinator is not None:
            logger.info("%s", describe_lossy(self.knobs, compressed.cost(), iterations, "rank 0"))
        if self._coordinator is not None:
            self._coordinator.close()
        if all([self._sync.close(), self.router.release()]):
            self._control.release(self.router.close)

    def _left_behind(self) -> Carried:
        """For the next generation: what was kept, or how far an unfinished warm-up has come."""
        found = None
        if self._kept is None and self._coordinator is not None:
            found = self._coordinator.hand_over()
        knobs, trials = found or (self._kept or self.knobs, ())
        return Carried(knobs=knobs, settled=self._kept is not None, place=tuple(self._control.hosts), trials=trials)
