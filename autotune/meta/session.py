"""Tuning session: measure the default, search for faster settings, and compare the fastest with the default."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import combinations_with_replacement
from typing import Generic

import numpy as np

from sirtaki.errors import TuningError
from sirtaki.measures import Gain

from ..paired import FEWEST_PAIRS, FEWEST_PAIRS_KNOWN, PairedComparison, Verdict, pairs_wanted
from ..trial import Arm, Proposal, S, Space, Trial, TrialStatus
from .bandit import opinion

logger = logging.getLogger(__name__)

# Values of `Trial.arm` for settings that no arm has proposed.
DEFAULT_ARM = "default"  # the untuned default
REGISTRY_ARM = "registry"  # settings from the registry
PLAN_ARM = "plan"  # a plan given by the user
REFINEMENT_ARM = "refinement"  # neighbours of the fastest setting
DRAW_ARM = "random draw"  # random settings for fitting the planners' contention model
FINALS_ARM = "finals"  # repeated measurements


class Purpose(Enum):
    """Purpose of an assignment."""

    DEFAULT = "default"
    """Measure the default."""
    TRIAL = "trial"
    """Measure a proposal."""
    FINALS = "finals"
    """Compare the fastest settings and the default."""
    SEARCH = "search"
    """Run nothing, because the session waits for `begin_search`."""
    KEPT = "kept"
    """Use this setting from now on, because the session has ended."""

    @property
    def description(self) -> str:
        """Return the purpose in words, for log lines."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    Purpose.DEFAULT: "measuring the default",
    Purpose.TRIAL: "trying",
    Purpose.FINALS: "comparing in pairs",
    Purpose.SEARCH: "preparing a search",
    Purpose.KEPT: "keeping",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment(Generic[S]):
    """Setting to run next.

    Attributes:
        knobs: the setting.
        discarded_iterations: number of iterations to run first without measuring; 0 if the setting is in use already.
        measured_iterations: number of iterations to measure afterwards; 0 for the purposes SEARCH and KEPT.
        arm: name of the proposing arm.
        purpose: purpose of the assignment.
    """

    knobs: S
    discarded_iterations: int
    measured_iterations: int
    arm: str
    purpose: Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult(Generic[S]):
    """Result of a session, final or preliminary.

    Attributes:
        knobs: setting to use.
        default_span_s: span of the untuned default; infinite if not measured yet.
        best_span_s: span of `knobs`; the default's span divided by `gain` if there is one.
        noise_s: standard deviation of one measured span of `knobs`.
        arm: name of the arm that proposed `knobs`.
        n_trials: number of measured settings, including the default.
        iterations_used: number of training iterations, including discarded ones.
        reason: why the session ended with this result, in words.
        tuned: whether `knobs` differ from the untuned default.
        gain: gain of `knobs` over the default, proved by a paired comparison. None if the default is used, and before
            the session has ended.
        doubt: why measurements of a seemingly faster setting were not trusted (shared host, drift of the default).
    """

    knobs: S
    default_span_s: float
    best_span_s: float
    noise_s: float
    arm: str
    n_trials: int
    iterations_used: int
    reason: str
    tuned: bool
    gain: Gain | None = None
    doubt: str = ""


CLEAR = 2.0  # difference between two settings, in standard errors, from which it is significant
PRIOR_NOISE = 0.05  # usual noise of a network's spans, as a fraction, used until this network's noise is measured
_PRIOR_WEIGHT = 3  # weight of PRIOR_NOISE, as a number of repeated measurements
_OUTLIER = 2.5  # limit in standard deviations to which larger differences are clipped


@dataclass(slots=True, kw_only=True)
class Setting(Generic[S]):
    """Measurements of one setting.

    Attributes:
        knobs: the setting.
        arm: name of the arm that proposed it first.
        spans_s: measured spans, `(n_measured,)`; infinite if the setting could not be applied.
    """

    knobs: S
    arm: str
    spans_s: list[float] = field(default_factory=list)

    @property
    def span_s(self) -> float:
        """Return the Hodges–Lehmann estimate of the span; infinite without measurements or if one failed.

        It is the median of the means of all pairs of measured spans. It is as robust as the median and needs a third
        fewer measurements.
        """
        if not self.spans_s or self.failed:
            return math.inf
        return statistics.median((a + b) / 2 for a, b in combinations_with_replacement(self.spans_s, 2))

    @property
    def spread_s(self) -> float:
        """Return the median absolute deviation of the measured spans; 0 for a single one."""
        centre = self.span_s
        return 0.0 if math.isinf(centre) else statistics.median(abs(span - centre) for span in self.spans_s)

    @property
    def failed(self) -> bool:
        """Return whether the setting could not be applied."""
        return any(math.isinf(span) for span in self.spans_s)

    def as_trial(
        self, proposal: Proposal[S], *, status: TrialStatus = TrialStatus.COMPLETE, was_best: bool = False
    ) -> Trial[S]:
        """Return all measurements of the setting as one trial of `proposal`."""
        return Trial(
            arm=proposal.arm,
            knobs=proposal.knobs,
            iterations=len(self.spans_s),
            span_s=self.span_s,
            noise_s=self.spread_s,
            status=TrialStatus.FAILED if self.failed else status,
            was_best=was_best,
        )


class Ledger(Generic[S]):
    """Measurements of all settings so far, and the noise of one measurement.

    Args:
        identity: returns equal values for knobs that are the same setting, such as knobs with equal plans.
    """

    def __init__(self, *, identity: Callable[[S], Hashable]) -> None:
        self._identity = identity
        self._settings: dict[Hashable, Setting[S]] = {}
        self._differences: list[float] = []

    def __len__(self) -> int:
        return len(self._settings)

    def find(self, knobs: S) -> Setting[S] | None:
        """Return the measurements of a setting; None if it has not been measured."""
        return self._settings.get(self._identity(knobs))

    def add(self, knobs: S, *, arm: str, spans_s: Sequence[float], repeats: bool = True) -> Setting[S]:
        """Add measured spans to a setting.

        Args:
            knobs: the measured setting.
            arm: name of the proposing arm. Ignored if the setting has been measured before.
            spans_s: measured spans, `(n,)`. A span that is not a positive finite number counts as failed.
            repeats: whether the spans are single measurements, from which the noise is estimated.
        """
        setting = self._settings.setdefault(self._identity(knobs), Setting(knobs=knobs, arm=arm))
        for span in spans_s:
            valid = span if math.isfinite(span) and span > 0.0 else math.inf
            if repeats and setting.spans_s and math.isfinite(valid) and not setting.failed:
                self._differences.append(abs(math.log(valid / setting.spans_s[-1])))
            setting.spans_s.append(valid)
        return setting

    def ranked(self) -> list[Setting[S]]:
        """Return all settings that did not fail, the fastest first."""
        return sorted(
            (setting for setting in self._settings.values() if not setting.failed), key=lambda setting: setting.span_s
        )

    @property
    def noise(self) -> float:
        """Return the standard deviation of one measured span, as a fraction of the span.

        The estimate is based on differences between successive measurements of one setting, with outliers clipped.
        It is averaged with `PRIOR_NOISE`, which dominates while there are few differences.
        """
        n = len(self._differences)
        # The median absolute value of a normal variable is 0.6745 standard deviations.
        longest = _OUTLIER * statistics.median(self._differences) / 0.6745 if n else 0.0
        squares = sum(min(difference, longest) ** 2 / 2.0 for difference in self._differences)
        return math.sqrt((_PRIOR_WEIGHT * PRIOR_NOISE**2 + squares) / (_PRIOR_WEIGHT + n))

    def expected_loss(self, first: Setting[S], second: Setting[S]) -> float:
        """Return the expected loss, as a fraction of the span, of choosing `first` because it was measured faster."""
        if math.isinf(first.span_s) or math.isinf(second.span_s):
            return 0.0
        error, lead = self._error(first, second), math.log(second.span_s / first.span_s)
        normal = statistics.NormalDist()
        return error * normal.pdf(lead / error) - lead * normal.cdf(-lead / error)

    def _error(self, first: Setting[S], second: Setting[S]) -> float:
        """Return the standard error of the difference between the logarithms of two settings' spans."""
        return self.noise * math.sqrt(1.0 / len(first.spans_s) + 1.0 / len(second.spans_s))

    def cautious_lead(self, first: Setting[S], second: Setting[S]) -> float:
        """Return log(span of `second` / span of `first`) less one standard error.

        The standard error corrects for selection: the fastest of several measured settings is usually also a lucky one.
        """
        return math.log(second.span_s / first.span_s) - self._error(first, second)

    def lead(self, first: Setting[S], second: Setting[S]) -> float:
        """Return by how many standard errors `first` is faster than `second`; negative if it is slower."""
        if math.isinf(first.span_s) or math.isinf(second.span_s):
            return 0.0 if first.span_s == second.span_s else math.copysign(math.inf, second.span_s - first.span_s)
        return math.log(second.span_s / first.span_s) / self._error(first, second)


# ── what proves a gain ───────────────────────────────────────────────────────────────────────────────────────────────

MOST_PAIRS = 24
MOST_PAIRS_OF_CHECK = 8  # for a setting from the registry, which the following search can still choose
ENOUGH_PAIRS = 8  # budget for comparing a compressed setting with the fastest lossless one

OTHER_GAIN = 1.25  # ratio of two gains from which the link must have changed
USUAL_MEASUREMENTS = 4  # assumed number of measurements behind an earlier job's spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered(Generic[S]):
    """Result of an earlier session of the same job, from the registry.

    Attributes:
        knobs: the setting that the earlier session chose.
        best_s: span of the setting.
        default_s: span of the untuned default.
        noise: standard deviation of one measured span, as a fraction of the span.
        gain: proved gain over the default. None if the default was chosen, or by a release that proved no gains.
        other_times: ratio of spans, then and now, from which the link must have changed.
    """

    knobs: S
    best_s: float
    default_s: float
    noise: float = 0.0
    gain: Gain | None = None
    other_times: float = 1.5

    def contradicted_by(self, best: Setting[S], default: Setting[S], *, noise: float) -> bool:
        """Return whether this job's measurements show that the link has changed.

        Args:
            best: this job's measurements of the setting.
            default: this job's measurements of the default. Must be the object `best` if the default was chosen.
            noise: standard deviation of one measured span in this job, as a fraction.
        """
        ratios = best.span_s / self.best_s, default.span_s / self.default_s
        if not all(0.0 < ratio < math.inf for ratio in ratios):
            return False
        earlier_error = self.noise / math.sqrt(USUAL_MEASUREMENTS)
        errors = [math.hypot(earlier_error, noise / math.sqrt(len(one.spans_s))) for one in (best, default)]
        changes = [math.log(ratio) for ratio in ratios]
        common_change = min(map(abs, changes)) if changes[0] * changes[1] > 0.0 else 0.0
        if common_change - CLEAR * max(errors) > math.log(self.other_times):
            return True
        gain_change = abs(changes[0] - changes[1]) if best is not default else 0.0
        return gain_change - CLEAR * math.hypot(*errors) > math.log(OTHER_GAIN)


PROOF = 1.5
"""Maximum number of iterations of the final comparison, as a multiple of the budget, which they do not count to.

Pairs of two fast settings cost a job almost nothing. A fast setting that is not proved faster is lost.
"""

REFINEMENT = 0.12  # fraction of the budget for neighbours of the fastest setting
SHORT = 60  # budget in iterations below which neighbours are not tried, because there are too few trials
NOISY = 0.06  # noise above which the spans of neighbours cannot be distinguished

MAX_RETRIES = 8  # consecutive proposals that need no measurement, after which the arm counts as exhausted
FEW = 16  # number of distinct settings up to which all are tried, as with a model of one or two units

PROMISING = 1.0  # distance to the best setting, in standard errors, from which a setting is not measured again
WORTHWHILE = 0.001  # expected improvement, as a fraction of the span, below which the search may end

INDIFFERENT = 0.001  # expected loss, as a fraction of the span, below which finalists are not compared any further
DOUBTFUL = 0.1  # gain that the noise may hide before the result is in doubt, in a session with a `least_gain`
HOPELESS = 3.0  # distance to the fastest setting, in standard errors, from which a setting is not a finalist
MAX_ROUNDS = 8  # maximum number of rounds of the finals
SHORT_SEARCH_ITERATIONS = 40  # budget of a search that starts from a good setting found on a different link

_Script = Generator[Assignment[S], Sequence[float], None]
"""Generator that yields assignments and receives their measured spans."""


def _seeds(similar: Sequence[S], draws: Sequence[S]) -> list[Proposal[S]]:
    return [
        *(Proposal(arm=REGISTRY_ARM, knobs=knobs, reason="a similar job's") for knobs in similar),
        *(Proposal(arm=DRAW_ARM, knobs=knobs, reason="to learn contention") for knobs in draws),
    ]


class TuningSession(Generic[S]):
    """Search for the fastest setting within a budget of iterations. Runs on rank 0.

    The caller runs the current `assignment`, passes the measured spans to `record`, and repeats until `done`.

    Args:
        space: permitted settings. Proposals outside the space are rejected.
        default: untuned setting, measured first and chosen if no setting is proved faster. In a re-tune, the setting in
            use.
        arm: source of proposals; receives every trial. None = no proposals until `begin_search`.
        rng: determines the order in which finalists are run.
        budget_iterations: training iterations of the search, including discarded ones. The final comparison takes as
            many more as a proof needs, at most `PROOF` times the budget.
        discarded_iterations: iterations that are not measured after each change of the setting.
        measured_iterations: measured iterations of a trial that is not stopped early.
        exact: the registry's result for this job. It is compared with the default before anything else, and chosen if
            it is faster and this job or the earlier one proves it. If the link has changed, a short search follows.
        seeds: settings of similar jobs, which are the first proposals.
        draws: random settings for fitting the contention model, which follow the seeds (see `skip_draws`).
        given: the user's plan, proposed before all others. It is also compared if `exact` is chosen.
        history: `trials` of an earlier, unfinished session. They count against the budget.
        identity: returns equal values for knobs that are the same setting, which is then measured only once.
        refine: whether to try neighbours of the fastest setting after the arm's trials.
        retune: whether the job is already tuned and `default` is in use.
        least_gain: fraction that a setting must gain over the default to be chosen.

    Raises:
        TuningError: `discarded_iterations` is negative, or `measured_iterations` is below 1.
    """

    def __init__(
        self,
        *,
        space: Space[S],
        default: S,
        arm: Arm[S] | None,
        rng: np.random.Generator,
        budget_iterations: int = 100,
        discarded_iterations: int = 1,
        measured_iterations: int = 2,
        exact: Remembered[S] | None = None,
        seeds: Sequence[S] = (),
        draws: Sequence[S] = (),
        given: S | None = None,
        history: Sequence[Trial[S]] = (),
        identity: Callable[[S], Hashable] = lambda knobs: knobs,
        refine: bool = True,
        retune: bool = False,
        least_gain: float = 0.0,
    ) -> None:
        if discarded_iterations < 0 or measured_iterations < 1:
            raise TuningError(
                f"a trial must have at least 1 measured and 0 discarded iterations, "
                f"found {measured_iterations} and {discarded_iterations}"
            )
        self._default, self._arm, self._rng, self._identity = default, arm, rng, identity
        self._iterations, self._spent = budget_iterations, 0
        self._for_proof = 0  # iterations of the final comparison, once it has begun
        self._discarded, self._measured = discarded_iterations, measured_iterations
        self._trial_iterations = discarded_iterations + measured_iterations
        self._most_finalists = 3 if budget_iterations >= 60 else 2
        self._refines, self._least_gain = refine, least_gain
        self._ledger = Ledger(identity=identity)
        self._trials: list[Trial[S]] = []
        self._since_best = 0  # trials since the last new best
        self._incumbent: Setting[S] | None = None  # the last new best; the default until there is one
        self._running = default if retune else None
        self._default_name = "the setting that ran" if retune else "the default"
        self._exact = exact
        self._space, self._given = space, given
        self._seeds = _seeds(seeds, draws)
        self._has_rejected = False
        # The history is limited, because a session cannot have more trials than iterations.
        self._history = tuple(trial for trial in history[-budget_iterations:] if self._accepts(trial.knobs))
        self._outcome: tuple[S, str, Gain | None] | None = None
        self._doubt = ""
        self._script = self._warm_up()
        self._assignment = next(self._script)

    @property
    def assignment(self) -> Assignment[S]:
        """Return the assignment to run now. After the end, it has the purpose KEPT and no iterations to measure."""
        return self._assignment

    @property
    def done(self) -> bool:
        """Return whether the session has ended."""
        return self._outcome is not None

    @property
    def trials(self) -> tuple[Trial[S], ...]:
        """Return all finished trials in order, including the default's. Can be passed to a session as `history`."""
        return tuple(self._trials)

    def record(self, spans_s: Sequence[float]) -> None:
        """Record the measured spans of the current assignment, and proceed to the next one.

        Args:
            spans_s: spans of the measured iterations in seconds, each the smallest over ranks; infinite if the setting
                could not be applied.

        Raises:
            TuningError: the session has ended, or `spans_s` is empty.
        """
        if self.done:
            raise TuningError("the session has ended: there is no assignment to record spans for")
        if not spans_s:
            raise TuningError("an assignment's measured spans must not be empty; record [math.inf] for a failed one")
        self._advance(spans_s)

    def _advance(self, spans_s: Sequence[float]) -> None:
        try:
            self._assignment = self._script.send(spans_s)
        except StopIteration:
            result = self.result
            self._assignment = Assignment(
                knobs=result.knobs, discarded_iterations=0, measured_iterations=0, arm=result.arm, purpose=Purpose.KEPT
            )
            logger.debug("tuning session ended after %d iterations: %s", self._spent, result.reason)

    @property
    def result(self) -> SessionResult[S]:
        """Return the result. Before the end, it is the best setting so far, or the default if its lead may be noise."""
        knobs, reason, gain = self._outcome or (self._best_so_far(), "the tuning phase was cut short", None)
        setting, default_s = self._setting(knobs), self._setting(self._default).span_s
        return SessionResult(
            knobs=knobs,
            default_span_s=default_s,
            best_span_s=setting.span_s if gain is None else default_s / gain.times,
            noise_s=self._ledger.noise * setting.span_s,
            arm=setting.arm,
            n_trials=len(self._ledger),
            iterations_used=self._spent,
            reason=reason,
            tuned=knobs != self._default,
            gain=gain,
            doubt=self._doubt,
        )

    @property
    def iterations_at_most(self) -> int:
        """Return the maximum number of training iterations of the session, including the finished ones."""
        return self._iterations + self._proof_iterations

    def begin_search(self, arm: Arm[S], *, space: Space[S], seeds: Sequence[S] = (), draws: Sequence[S] = ()) -> None:
        """Start a search when the current assignment has the purpose SEARCH. Measurements so far are used.

        Args:
            arm: source of proposals; receives all trials so far.
            space: permitted settings, which may be fewer than before.
            seeds: settings of similar jobs, which are the first proposals.
            draws: random settings for fitting the contention model, which follow the seeds.

        Raises:
            TuningError: the current assignment has another purpose.
        """
        if self._assignment.purpose is not Purpose.SEARCH:
            raise TuningError(f"a search must begin at {Purpose.SEARCH}, found {self._assignment.purpose}")
        self._arm, self._space, self._seeds = arm, space, _seeds(seeds, draws)
        self._advance(())

    def skip_draws(self) -> None:
        """Skip the remaining `draws`, because the contention model does not need them."""
        self._seeds = [proposal for proposal in self._seeds if proposal.arm != DRAW_ARM]

    # ── phases ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _warm_up(self) -> _Script[S]:
        if self._exact is not None and self._accepts(self._exact.knobs):
            confirmed = yield from self._check(self._exact)
            if confirmed and not self._link_has_changed(self._exact):
                return
            logger.info(
                "the registry's setting for this job %s",
                "holds, but the link has changed: starting a short search from this setting"
                if confirmed
                else "did not hold: starting a search",
            )
            in_use = self._outcome[0] if self._outcome else self._default
            self._outcome = None
            if confirmed:
                self._iterations = min(self._iterations, self._spent + SHORT_SEARCH_ITERATIONS)
            yield Assignment(
                knobs=in_use,
                discarded_iterations=0,
                measured_iterations=0,
                arm=REGISTRY_ARM if confirmed else DEFAULT_ARM,
                purpose=Purpose.SEARCH,
            )
            if self._arm is not None:
                self._arm.tell(self._trials)
            self._since_best = 0
        else:
            yield from self._run_default()
        self._add_history(self._history)
        search_end = yield from self._search()
        if self._reserved_for_refinement:
            yield from self._refine()
        chosen, gain, verdict = yield from self._prove(self._default, self._default_name, lossy=False)
        if self._setting(self._default).failed:
            return self._end(chosen, f"{verdict}; {search_end}")
        if any(self._is_lossy(setting.knobs) for setting in self._ledger.ranked()):
            doubt = self._doubt
            baseline_name = self._default_name if chosen == self._default else "the fastest lossless setting"
            lossy, lossy_gain, lossy_verdict = yield from self._prove(chosen, baseline_name, lossy=True)
            if lossy_gain is not None:
                total_gain = lossy_gain if gain is None else lossy_gain.multiplied(gain)
                return self._end(lossy, f"{lossy_verdict}; {search_end}", total_gain)
            self._doubt = doubt or (self._doubt if gain is None else "")
        return self._end(chosen, f"{verdict}; {search_end}", gain)

    def _prove(
        self, base: S, base_name: str, *, lossy: bool
    ) -> Generator[Assignment[S], Sequence[float], tuple[S, Gain | None, str]]:
        """Select the fastest lossy or lossless setting, and compare it with `base` in pairs.

        If the candidate is clearly slower than `base`, the next candidate is compared.

        Returns:
            The chosen setting, its proved gain over `base` (None without one), and the verdict in words.
        """
        self._for_proof = self._proof_iterations
        chosen, gain, verdict = base, None, f"no setting was nearly as fast as {base_name}"
        beaten: list[S] = []
        while (candidate := (yield from self._select(base, beaten, lossy=lossy))) is not None:
            if self._setting(base).failed:
                return candidate, None, f"{base_name} cannot be run"
            pairs = yield from self._compare(candidate, base=base, arm=FINALS_ARM)
            if pairs is None:
                verdict = verdict if beaten else "too few iterations are left to prove a gain"
                break
            chosen, gain, verdict = self._judge(candidate, pairs, base=base, base_name=base_name)
            if pairs.verdict not in (Verdict.SLOWER, Verdict.FAILED):
                break
            beaten.append(candidate)
        return chosen, gain, verdict

    def _end(self, knobs: S, reason: str, gain: Gain | None = None) -> None:
        self._outcome = knobs, reason, gain

    def _check(self, exact: Remembered[S]) -> Generator[Assignment[S], Sequence[float], bool]:
        """Compare an earlier job's result with the default, then the user's plan if there is one.

        Returns:
            Whether the session may end: one of both settings is proved faster, or the earlier job chose the default.
        """
        given, self._given = self._given, None
        confirmed: list[tuple[float, S, str, Gain | None]] = []
        if self._same(exact.knobs, self._default):
            yield from self._run_default()
            confirmed.append((1.0, exact.knobs, "the registry's best setting for this job is the default", None))
        else:
            pairs = yield from self._compare(exact.knobs, arm=REGISTRY_ARM, known=exact.gain)
            knobs, gain, verdict = self._judge(exact.knobs, pairs)
            if gain is not None:
                confirmed.append((gain.times, knobs, f"the registry's setting for this job {verdict}", gain))
            if self._ledger.find(self._default) is None:
                yield from self._run_default()
            else:
                self._finish(Proposal(arm=DEFAULT_ARM, knobs=self._default))
        if given is not None and self._accepts(given) and not self._same(given, exact.knobs):
            pairs = yield from self._compare(given, arm=PLAN_ARM)
            knobs, gain, verdict = self._judge(given, pairs)
            if gain is not None:
                confirmed.append((gain.times, knobs, f"the given plan {verdict}", gain))
        if confirmed:
            self._end(*max(confirmed, key=lambda one: one[0])[1:])
        return bool(confirmed)

    def _link_has_changed(self, exact: Remembered[S]) -> bool:
        """Return whether this job's measurements contradict those of the earlier job."""
        best, default = self._setting(exact.knobs), self._setting(self._default)
        return exact.contradicted_by(best, default, noise=self._ledger.noise)

    # ── the search ───────────────────────────────────────────────────────────────────────────────────────────────

    def _search(self) -> Generator[Assignment[S], Sequence[float], str]:
        """Run trials until the budget is used, nothing is found any more, or no proposal is left. Return the reason."""
        patience = max(8, self._iterations // (4 * self._trial_iterations))
        while True:
            if self._remaining - self._reserved_for_refinement < self._discarded + 1:
                return f"budget of {self._iterations} steps used"
            if self._since_best >= patience:
                expected = opinion(self._arm, "expected_improvement")
                if expected is not None and expected < WORTHWHILE:
                    return f"no new best in {self._since_best} trials"
            proposal = self._next_proposal()
            if proposal is None:
                return "nothing left to propose"
            yield from self._run_trial(proposal)

    def _refine(self) -> _Script[S]:
        """Run trials of the fastest setting's neighbours until all are measured or the trials' budget is used."""
        while self._remaining > self._discarded:
            tried = [setting.knobs for setting in self._ledger.ranked()]
            around = opinion(self._space, "around", tried[0], tried) if tried else None
            knobs = next((one for one in around or () if self._accepts(one) and self._ledger.find(one) is None), None)
            if knobs is None:
                return
            yield from self._run_trial(Proposal(arm=REFINEMENT_ARM, knobs=knobs, reason="neighbour of the fastest"))

    def _run_trial(self, proposal: Proposal[S]) -> _Script[S]:
        """Measure a proposal until it is clearly better or worse than the best other setting."""
        wanted = proposal.iterations or self._measured
        rival = next((best for best in self._ledger.ranked() if not self._same(best.knobs, proposal.knobs)), None)
        while True:
            yield from self._run(proposal.knobs, arm=proposal.arm, purpose=Purpose.TRIAL, measured=1)
            setting = self._setting(proposal.knobs)
            enough = len(setting.spans_s) >= wanted
            lead = self._ledger.lead(setting, rival) if rival else 0.0
            hopeless = setting.failed or lead < -PROMISING
            undecided = rival is not None and 0.0 <= lead <= CLEAR and len(setting.spans_s) < 2 * wanted
            if hopeless or (enough and not undecided) or self._remaining < 1:
                break
        self._finish(proposal)

    def _next_proposal(self) -> Proposal[S] | None:
        """Return the next proposal that needs a measurement. For all others, send the known result to the arm."""
        for _ in range(MAX_RETRIES):
            given, self._given = self._given, None
            if given is not None:
                proposal = Proposal(arm=PLAN_ARM, knobs=given, reason="the given plan")
            elif self._seeds:
                proposal = self._seeds.pop(0)
            elif self._arm is not None and (asked := self._arm.ask(1)):
                proposal = asked[0]
            else:
                break
            if not self._accepts(proposal.knobs):
                rejected = Setting(knobs=proposal.knobs, arm=proposal.arm)
                self._tell(rejected.as_trial(proposal, status=TrialStatus.FAILED))
                continue
            known = self._ledger.find(proposal.knobs)
            if known is None or (not known.failed and (proposal.iterations or 0) > len(known.spans_s)):
                return proposal
            self._tell(known.as_trial(proposal))
        return self._untried()

    def _untried(self) -> Proposal[S] | None:
        """Propose a setting that no arm has proposed, if the space has at most `FEW` distinct settings."""
        distinct = {
            self._identity(knobs): knobs for knobs in opinion(self._space, "every") or () if self._accepts(knobs)
        }
        untried = (knobs for knobs in distinct.values() if self._ledger.find(knobs) is None)
        knobs = next(untried, None) if len(distinct) <= FEW else None
        return None if knobs is None else Proposal(arm=REFINEMENT_ARM, knobs=knobs, reason="not proposed by any arm")

    def _accepts(self, knobs: S) -> bool:
        """Return whether the knobs are permitted and fit this job. Knobs from arms or other jobs may be invalid."""
        try:
            if knobs in self._space:
                self._identity(knobs)
                return True
            reason = f"outside the permitted space: {knobs.describe()}"
        except Exception as err:
            reason = f"that do not fit this job: {err}"
        logger.log(logging.DEBUG if self._has_rejected else logging.WARNING, "rejected knobs %s", reason)
        self._has_rejected = True
        return False

    # ── the final comparison ─────────────────────────────────────────────────────────────────────────────────────

    def _finalists(self, base: S, beaten: Sequence[S], *, lossy: bool) -> list[S]:
        """Return the finalists: alternately the next fastest by measurement and by the arm's estimate."""
        ranked = [setting for setting in self._ledger.ranked() if self._is_lossy(setting.knobs) is lossy]
        rivals = [
            setting.knobs
            for setting in ranked
            if not self._same(setting.knobs, base)
            and not (lossy and self._ledger.lead(setting, self._setting(base)) < 0.0)
            and setting.knobs not in beaten
            and self._ledger.lead(setting, ranked[0]) > -HOPELESS
        ]
        alternating = zip(rivals, sorted(rivals, key=self._estimated_s), strict=True)
        return list(dict.fromkeys(knobs for pair in alternating for knobs in pair))[: self._most_finalists]

    def _select(
        self, base: S, beaten: Sequence[S], *, lossy: bool
    ) -> Generator[Assignment[S], Sequence[float], S | None]:
        """Run the finalists in rounds, and drop the slower half after each round. Return the fastest; None without any.

        The rounds end when one finalist remains, or when all other iterations are reserved for the paired comparison.
        """
        finalists = self._finalists(base, beaten, lossy=lossy)
        for _ in range(MAX_ROUNDS):
            remaining = self._remaining - self._reserved_for_pairs - (0 if lossy else self._reserved_for_lossy)
            if len(finalists) < 2 or remaining < len(finalists) * self._trial_iterations:
                break
            for i in self._rng.permutation(len(finalists)).tolist():
                arm = self._setting(finalists[i]).arm
                yield from self._run(finalists[i], arm=arm, purpose=Purpose.FINALS, measured=self._measured)
                self._finish(Proposal(arm=FINALS_ARM, knobs=finalists[i]))
            n_kept = max((len(finalists) + 1) // 2, 2 if self._ledger.noise > NOISY else 1)
            finalists = sorted(finalists, key=self._estimated_s)[:n_kept]
            best = self._setting(finalists[0])
            rest = [one for one in finalists[1:] if self._ledger.expected_loss(best, self._setting(one)) > INDIFFERENT]
            finalists = [finalists[0], *rest]
        return min(finalists, key=self._estimated_s, default=None)

    def _compare(
        self, knobs: S, *, arm: str, known: Gain | None = None, base: S | None = None
    ) -> Generator[Assignment[S], Sequence[float], PairedComparison | None]:
        """Compare a setting with the default in pairs.

        The first look is at the number of pairs that will probably prove the lead measured in the search, the last look
        at the largest number that the budget allows.

        Args:
            knobs: the setting.
            arm: name of the arm for the resulting trial.
            known: gain that an earlier job has proved; None = no such gain.
            base: setting to compare with; None = the default.

        Returns:
            The comparison; None if too few iterations are left.
        """
        default, final = base or self._default, arm == FINALS_ARM
        most = MOST_PAIRS if final else MOST_PAIRS_OF_CHECK
        remaining = self._remaining - (0 if self._is_lossy(knobs) or not final else self._reserved_for_lossy)
        at_most = max((n for n in range(FEWEST_PAIRS, most + 1) if self._pair_iterations(n) <= remaining), default=0)
        if final and not at_most:
            return None
        if final:
            wanted = min(self._pairs_wanted(knobs, default), at_most)
        else:  # may exceed the budget
            wanted = FEWEST_PAIRS_KNOWN if known is not None and known.proved else FEWEST_PAIRS
        pairs = PairedComparison(
            noise_before=self._ledger.noise,
            looks=(wanted, at_most) if wanted < at_most else (wanted,),
            least_gain=self._least_gain,
            earlier=known,
        )

        def measure(one: S) -> Generator[Assignment[S], Sequence[float], float]:
            proposer = DEFAULT_ARM if one == self._default else self._setting(one).arm if final else arm
            spans_s = yield from self._run(one, arm=proposer, purpose=Purpose.FINALS, measured=1)
            return spans_s[0]

        yield from pairs.run(lambda: measure(default), lambda: measure(knobs), candidate_first=self._running != default)
        self._finish(Proposal(arm=arm, knobs=knobs))
        return pairs

    def _judge(
        self, knobs: S, pairs: PairedComparison | None, *, base: S | None = None, base_name: str = ""
    ) -> tuple[S, Gain | None, str]:
        """Return the setting to use, its proved gain (None without one), and the verdict in words.

        Args:
            knobs: the candidate.
            pairs: comparison of the candidate with the baseline.
            base: the baseline; None = the default.
            base_name: name of the baseline in the verdict; empty = name of the default.
        """
        base = base or self._default
        if pairs is None or pairs.failed:
            return base, None, "could not be compared"
        against = f"{base_name or self._default_name} in {pairs.n_pairs} paired rounds"
        self._doubt = pairs.doubt
        if pairs.verdict is Verdict.FASTER:
            return knobs, pairs.pooled, f"beat {against}"
        if self._least_gain and not self._doubt and pairs.gain.high > 1.0 + DOUBTFUL:
            possible = f"a gain of {100 * (pairs.gain.high - 1.0):.0f} % would not show"
            self._doubt = f"measurements vary so much that {possible}: other jobs seem to use the host or the network"
        return base, None, f"no setting was proved to beat {against}" + (self._doubt and f": {self._doubt}")

    def _is_lossy(self, knobs: S) -> bool:
        return bool(opinion(self._space, "loses", knobs))

    # ── the budget ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _remaining(self) -> int:
        return self._iterations + self._for_proof - self._spent

    @property
    def _proof_iterations(self) -> int:
        """Return the maximum number of iterations of the final comparison."""
        return max(self._pair_iterations(FEWEST_PAIRS), round(PROOF * self._iterations))

    def _pairs_wanted(self, knobs: S, base: S | None = None) -> int:
        """Return the number of pairs that will probably prove a setting's lead over the default, or over `base`."""
        setting, default = self._setting(knobs), self._setting(base or self._default)
        if not all(0.0 < one.span_s < math.inf for one in (setting, default)):
            return FEWEST_PAIRS
        lead = self._ledger.cautious_lead(setting, default)
        return pairs_wanted(lead, self._ledger.noise, most=MOST_PAIRS) if lead > 0.0 else FEWEST_PAIRS

    @property
    def _reserved_for_pairs(self) -> int:
        """Return the iterations reserved for the paired comparison of the fastest setting."""
        ranked = self._ledger.ranked()
        return self._pair_iterations(self._pairs_wanted(ranked[0].knobs)) if ranked else 0

    @property
    def _reserved_for_lossy(self) -> int:
        """Return the iterations reserved for comparing a compressed setting with the fastest lossless one.

        Zero if the fastest setting so far is lossless, or if the session is short.
        """
        ranked = self._ledger.ranked() if self._iterations >= SHORT else []
        needed = ranked and self._is_lossy(ranked[0].knobs)
        return self._pair_iterations(ENOUGH_PAIRS) + self._trial_iterations if needed else 0

    def _pair_iterations(self, n_pairs: int) -> int:
        """Return the iterations of `n_pairs` pairs. The setting changes once before them, and once in each pair."""
        return self._discarded + n_pairs * (2 + self._discarded)

    @property
    def _reserved_for_refinement(self) -> int:
        """Return the part of the trials' iterations for neighbours of the fastest setting. Zero if noise is large."""
        worthwhile = self._refines and self._ledger.noise <= NOISY and self._iterations >= SHORT
        return round(REFINEMENT * self._iterations) if worthwhile else 0

    # ── measurements ─────────────────────────────────────────────────────────────────────────────────────────────

    def _run(
        self, knobs: S, *, arm: str, purpose: Purpose, measured: int
    ) -> Generator[Assignment[S], Sequence[float], Sequence[float]]:
        """Yield an assignment, record its measured spans, and return them."""
        discarded = 0 if self._running == knobs else self._discarded
        spans_s = yield Assignment(
            knobs=knobs, discarded_iterations=discarded, measured_iterations=measured, arm=arm, purpose=purpose
        )
        self._spent += discarded + len(spans_s)
        self._running = knobs
        self._ledger.add(knobs, arm=arm, spans_s=spans_s)
        return spans_s

    def _run_default(self) -> _Script[S]:
        yield from self._run(self._default, arm=DEFAULT_ARM, purpose=Purpose.DEFAULT, measured=self._measured)
        self._finish(Proposal(arm=DEFAULT_ARM, knobs=self._default))

    def _finish(self, proposal: Proposal[S]) -> None:
        """Create a trial from the measurements of a proposed setting, and send it to the arm."""
        setting = self._setting(proposal.knobs)
        was_best = self._ledger.lead(setting, self._incumbent or setting) > 1.0
        if was_best or self._incumbent is None:
            self._incumbent = setting
        enough = len(setting.spans_s) >= (proposal.iterations or self._measured)
        status = TrialStatus.COMPLETE if enough else TrialStatus.PRUNED
        trial = setting.as_trial(proposal, status=status, was_best=was_best)
        self._since_best = 0 if was_best else self._since_best + 1
        self._trials.append(trial)
        self._tell(trial)
        logger.debug(
            "%s: %s: %.4g ms%s", trial.arm, trial.knobs.describe(), 1e3 * trial.span_s, ", new best" if was_best else ""
        )

    def _tell(self, trial: Trial[S]) -> None:
        if self._arm is not None:
            self._arm.tell([trial])

    def _add_history(self, history: Sequence[Trial[S]]) -> None:
        """Add an earlier session's trials. Scale their spans by the ratio of the default's spans, now to then."""
        before = [trial.span_s for trial in history if self._same(trial.knobs, self._default)]
        scale = self._setting(self._default).span_s / before[-1] if before else 1.0
        scale = scale if 0.0 < scale < math.inf else 1.0
        latest = {
            self._identity(trial.knobs): trial for trial in history
        }  # includes the setting's earlier measurements
        proposers = {self._identity(trial.knobs): trial.arm for trial in reversed(history)}  # first proposing arm
        for trial in history:
            if self._same(trial.knobs, self._default):
                continue
            scaled = replace(trial, span_s=trial.span_s * scale, noise_s=trial.noise_s * scale)
            self._trials.append(scaled)
            self._tell(scaled)
            identity = self._identity(trial.knobs)
            if trial is latest[identity]:
                spans_s = [scaled.span_s] * max(1, min(trial.iterations, self._measured))
                self._ledger.add(trial.knobs, arm=proposers[identity], spans_s=spans_s, repeats=False)
                self._spent += trial.iterations + self._discarded
        best = self._setting(self._best_so_far())
        if self._incumbent is not None and best.spans_s:
            self._incumbent = best  # because a new best must also beat the earlier session's best
        self._spent = min(self._spent, max(self._iterations, self._trial_iterations))

    def _setting(self, knobs: S) -> Setting[S]:
        """Return the measurements of a setting, or an empty `Setting`."""
        return self._ledger.find(knobs) or Setting(knobs=knobs, arm=DEFAULT_ARM)

    def _estimated_s(self, knobs: S) -> float:
        """Return the arm's estimate of a setting's span, or the measured span if the arm has none."""
        estimate = opinion(self._arm, "expected_span_s", knobs)
        return self._setting(knobs).span_s if estimate is None else estimate

    def _best_so_far(self) -> S:
        """Return the fastest setting if its lead over the default exceeds the noise, else the default.

        The noise must be exceeded because the fastest of many measured settings may only have been lucky. A setting
        from the registry was not selected by these measurements, so any lead suffices.
        """
        ranked, default = self._ledger.ranked(), self._setting(self._default)
        if ranked and self._ledger.lead(ranked[0], default) > 1.0:
            return ranked[0].knobs
        from_registry = next((setting for setting in ranked if setting.arm == REGISTRY_ARM), None)
        if from_registry is not None and self._ledger.lead(from_registry, default) > 0.0:
            return from_registry.knobs
        return self._default

    def _same(self, first: S, second: S) -> bool:
        return self._identity(first) == self._identity(second)
