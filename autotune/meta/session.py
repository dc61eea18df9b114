"""Tuning session: measure a job's default setting, search for faster ones, and compare the fastest with the default.

Settings are compared by communication time (span): the time from the first ready gradient of an iteration to its last
reduced gradient.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import combinations_with_replacement
from typing import Generic

import numpy as np

from sirtaki.errors import TuningError, require
from sirtaki.measures import Gain, counted

from ..paired import FEWEST_PAIRS, FEWEST_PAIRS_KNOWN, PairedComparison, Verdict, pairs_wanted
from ..trial import Arm, Proposal, S, Space, Trial, TrialStatus
from .bandit import opinion

logger = logging.getLogger(__name__)

# Values of `Trial.arm` for trials of settings that no search method (arm) has proposed.
DEFAULT_ARM = "default"  # The untuned default.
REGISTRY_ARM = "registry"  # A setting that an earlier job stored in the registry.
PLAN_ARM = "plan"  # A plan given by the user.
REFINEMENT_ARM = "refinement"  # A setting that differs from the fastest one in one knob.
FINALS_ARM = "finals"  # A repeated measurement of one of the fastest settings.


class Purpose(Enum):
    """Why the job runs a setting during the tuning session."""

    DEFAULT = "default"
    """Measure the untuned default."""
    TRIAL = "trial"
    """Measure a setting that a search method (arm) has proposed."""
    FINALS = "finals"
    """Compare the fastest settings and the default."""
    SEARCH = "search"
    """The job has no setting to run: the session waits until the caller calls `TuningSession.begin_search`."""
    KEPT = "kept"
    """Use this setting for the rest of the job: the session has ended."""

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
    """The setting that the job must run next, and for how many training iterations.

    Attributes:
        knobs: the setting.
        discarded_iterations: number of iterations to run first without measuring; 0 if the setting is in use already.
        measured_iterations: number of iterations to measure afterwards; 0 for the purposes SEARCH and KEPT.
        arm: name of the search method (arm) that proposed the setting.
        purpose: why the setting is run.
    """

    knobs: S
    discarded_iterations: int
    measured_iterations: int
    arm: str
    purpose: Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult(Generic[S]):
    """Result of a tuning session, final or preliminary.

    The communication time (span) of an iteration lasts from its first ready gradient to its last reduced gradient.

    Attributes:
        knobs: setting to use.
        default_span_s: communication time with the untuned default; infinite if not measured yet.
        best_span_s: communication time with `knobs`. If there is a `gain`, it is `default_span_s` / gain.
        noise_s: standard deviation of one measured communication time with `knobs`.
        arm: name of the search method (arm) that proposed `knobs`.
        n_trials: number of measured settings, including the default.
        iterations_used: number of training iterations, including discarded ones.
        reason: why the session ended with this result, in words.
        tuned: whether `knobs` differ from the untuned default.
        gain: gain of `knobs` over the default, proved by a paired comparison. None if the default is used, and before
            the session has ended.
        doubt: why a seemingly faster setting was not chosen: its measurements are not trusted, for example because
            other jobs used the host. Empty if there is no doubt.
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


MOST_USED = 40  # Number of latest measurements from which a setting's communication time is estimated.
CLEAR = 2.0  # Difference between two settings above which it is significant, in standard errors.
PRIOR_NOISE = 0.05  # Noise of communication times assumed before it is measured, as a fraction of them.
_PRIOR_WEIGHT = 3  # Weight of PRIOR_NOISE in the estimated noise, as a number of repeated measurements.
_OUTLIER = 2.5  # Differences between measurements of a setting are clipped to this, in standard deviations.


@dataclass(slots=True, kw_only=True)
class Setting(Generic[S]):
    """Measurements of one setting.

    Attributes:
        knobs: the setting.
        arm: name of the search method (arm) that proposed it first.
        spans_s: measured communication times of single iterations, `(n_measured,)`. An infinite entry means that the
            setting could not be applied.
    """

    knobs: S
    arm: str
    spans_s: list[float] = field(default_factory=list)

    @property
    def span_s(self) -> float:
        """Return the Hodges–Lehmann estimate of the communication time; infinite without measurements or if one failed.

        The estimate is the median of the means of all pairs of the latest `MOST_USED` measured times. It is nearly as
        robust to outliers as the median, and needs a third fewer measurements for the same precision.
        """
        if not self.spans_s or self.failed:
            return math.inf
        latest = self.spans_s[-MOST_USED:]
        return statistics.median((a + b) / 2 for a, b in combinations_with_replacement(latest, 2))

    @property
    def spread_s(self) -> float:
        """Return the median absolute deviation of the measured times from `span_s`; 0 for a single measurement."""
        centre = self.span_s
        return 0.0 if math.isinf(centre) else statistics.median(abs(span - centre) for span in self.spans_s)

    @property
    def failed(self) -> bool:
        """Return whether a measurement failed because the setting could not be applied."""
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
    """Measured communication times of all settings, and the noise of one measurement.

    Args:
        identity: function that returns equal values for knobs that are the same setting, such as knobs with equal
            plans.
    """

    def __init__(self, *, identity: Callable[[S], Hashable]) -> None:
        self._identity = identity
        self._settings: dict[Hashable, Setting[S]] = {}
        self._differences: list[float] = []
        self._noise: float | None = None  # Noise; None = not computed since the last measurement.

    def __len__(self) -> int:
        return len(self._settings)

    def find(self, knobs: S) -> Setting[S] | None:
        """Return the measurements of a setting; None if it has not been measured."""
        return self._settings.get(self._identity(knobs))

    def add(self, knobs: S, *, arm: str, spans_s: Sequence[float], repeats: bool = True) -> Setting[S]:
        """Add measured communication times to a setting, and return the setting with all its measurements.

        Args:
            knobs: the measured setting.
            arm: name of the search method (arm) that proposed the setting. Ignored if the setting has been measured
                before.
            spans_s: communication times of iterations, `(n,)`. A time that is not a positive finite number counts as a
                failed measurement.
            repeats: whether each time is the measurement of one iteration, so that the differences between the times
                show the noise.
        """
        setting = self._settings.setdefault(self._identity(knobs), Setting(knobs=knobs, arm=arm))
        for span in spans_s:
            valid = span if math.isfinite(span) and span > 0.0 else math.inf
            if repeats and setting.spans_s and math.isfinite(valid) and not setting.failed:
                self._differences.append(abs(math.log(valid / setting.spans_s[-1])))
                self._noise = None
            setting.spans_s.append(valid)
        return setting

    def ranked(self) -> list[Setting[S]]:
        """Return all settings that did not fail, the fastest first."""
        return sorted(
            (setting for setting in self._settings.values() if not setting.failed), key=lambda setting: setting.span_s
        )

    @property
    def noise(self) -> float:
        """Return the standard deviation of one measured communication time, as a fraction of that time.

        The estimate is based on differences between successive measurements of one setting, with outliers clipped.
        It is averaged with `PRIOR_NOISE`, which dominates while there are few differences.
        """
        if self._noise is None:
            self._noise = self._estimated_noise()
        return self._noise

    def _estimated_noise(self) -> float:
        n = len(self._differences)
        # The median absolute value of a normal variable is 0.6745 standard deviations.
        longest = _OUTLIER * statistics.median(self._differences) / 0.6745 if n else 0.0
        squares = sum(min(difference, longest) ** 2 / 2.0 for difference in self._differences)
        return math.sqrt((_PRIOR_WEIGHT * PRIOR_NOISE**2 + squares) / (_PRIOR_WEIGHT + n))

    def expected_loss(self, first: Setting[S], second: Setting[S]) -> float:
        """Return the expected loss of choosing `first`, which was measured faster, if `second` is faster in truth.

        The loss is a fraction of the communication time.
        """
        if math.isinf(first.span_s) or math.isinf(second.span_s):
            return 0.0
        error, lead = self._error(first, second), math.log(second.span_s / first.span_s)
        normal = statistics.NormalDist()
        return error * normal.pdf(lead / error) - lead * normal.cdf(-lead / error)

    def _error(self, first: Setting[S], second: Setting[S]) -> float:
        """Return the standard error of the difference between the logarithms of two settings' communication times."""
        return self.noise * math.sqrt(1.0 / len(first.spans_s) + 1.0 / len(second.spans_s))

    def cautious_lead(self, first: Setting[S], second: Setting[S]) -> float:
        """Return a cautious lead: log(communication time of `second` / that of `first`), less one standard error.

        The standard error is subtracted because `first` was selected as the fastest of several settings, so that a part
        of its measured lead is probably noise.
        """
        return math.log(second.span_s / first.span_s) - self._error(first, second)

    def lead(self, first: Setting[S], second: Setting[S]) -> float:
        """Return by how many standard errors `first` was measured faster than `second`; negative if it was slower."""
        if math.isinf(first.span_s) or math.isinf(second.span_s):
            return 0.0 if first.span_s == second.span_s else math.copysign(math.inf, second.span_s - first.span_s)
        return math.log(second.span_s / first.span_s) / self._error(first, second)


# ── what proves a gain ───────────────────────────────────────────────────────────────────────────────────────────────

MOST_PAIRS = 24  # Maximum number of measured pairs (default, candidate) in the final comparison.
MOST_PAIRS_OF_CHECK = 8  # Maximum number of pairs in the check of an earlier job's setting. A search may follow.
ENOUGH_PAIRS = 8  # Number of pairs reserved for comparing a compressed setting with the fastest lossless one.

OTHER_GAIN = 1.25  # If the gains of this and an earlier job differ by more than this factor, the network has changed.
USUAL_MEASUREMENTS = 4  # Assumed number of measurements behind an earlier job's communication time.


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered(Generic[S]):
    """Result of an earlier tuning session of the same job, read from the registry.

    Attributes:
        knobs: the setting that the earlier session chose.
        best_s: communication time with `knobs` in the earlier session.
        default_s: communication time with the untuned default in the earlier session.
        noise: standard deviation of one measured communication time, as a fraction of it.
        gain: proved gain over the default. None if the earlier session chose the default, or if an old release of
            Sirtaki stored the result without a proof.
        other_times: maximum ratio between communication times of this and the earlier job. A larger ratio shows that
            the network has changed.
    """

    knobs: S
    best_s: float
    default_s: float
    noise: float = 0.0
    gain: Gain | None = None
    other_times: float = 1.5

    def contradicted_by(self, best: Setting[S], default: Setting[S], *, noise: float) -> bool:
        """Return whether this job's measurements show that the network's speed has changed since the earlier job.

        Args:
            best: this job's measurements of the setting that the earlier job chose.
            default: this job's measurements of the untuned default. Must be the same object as `best` if the earlier
                job chose the default.
            noise: standard deviation of one measured communication time in this job, as a fraction of it.
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
"""Maximum number of iterations of the final comparison, as a multiple of the search's budget.

These iterations are not part of the search's budget. They cost a job almost nothing, because both compared settings are
fast. With too few, a faster setting remains unproved and unused.
"""

# Refinement: after the search, try neighbours, which are settings that differ from the fastest one in one knob.
REFINEMENT = 0.12  # Fraction of the budget that is reserved for neighbours.
SHORT = 60  # Neighbours are not tried if the budget has fewer iterations, because the search needs all of them.
NOISY = 0.06  # Neighbours are not tried if measurements are noisier, because the times cannot be distinguished.

MAX_RETRIES = 8  # A search method that proposes this many invalid or known settings in a row is exhausted.
FEW = 16  # If at most this many distinct settings exist, all are tried. A model of one or two buckets has so few.

PROMISING = 1.0  # A trial is stopped if its setting is slower than the best one by this many standard errors.
WORTHWHILE = 0.001  # The search may end if less improvement is expected, as a fraction of the communication time.

# Finals: measure the fastest settings (finalists) again in rounds, each of which drops the slower half.
# A finalist is dropped if it is expected to be faster than the fastest one by at most this fraction of the time.
INDIFFERENT = 0.001
# With a `least_gain`, "no gain" is reported as doubtful if noise may hide a larger gain than this fraction.
DOUBTFUL = 0.1
HOPELESS = 3.0  # A setting slower than the fastest one by this many standard errors is not a finalist.
MAX_ROUNDS = 8  # Maximum number of rounds of the finals.

# Budget, in iterations, of the search after the network has changed. It starts from an earlier job's setting.
SHORT_SEARCH_ITERATIONS = 40

# Further trials of an ended session (`TuningSession.resume`). They must cost a job nearly nothing.
MORE_ITERATIONS = 12  # Budget of the trials.
# Maximum number of iterations of the comparison. It is large, because both settings are fast.
MORE_PROOF_ITERATIONS = 120
MORE_PAIRS = 48  # Maximum number of measured pairs in the comparison.
NEAR_FASTEST = 4  # Neighbours of this many settings, the fastest ones, are tried.
LEAST_SAVING = 20.0  # Minimum expected saving by further trials, in communication times of an iteration.


def pair_iterations(n_pairs: int, discarded: int) -> int:
    """Return the number of iterations in a comparison with `n_pairs` pairs of measurements.

    The setting changes once before the pairs, and once in each pair. After each change, `discarded` iterations are not
    measured.
    """
    return discarded + n_pairs * (2 + discarded)


def proof_iterations(budget: int, discarded: int) -> int:
    """Return the maximum number of iterations of the final comparison after a search of `budget` iterations."""
    return max(pair_iterations(FEWEST_PAIRS, discarded), round(PROOF * budget))


_Script = Generator[Assignment[S], Sequence[float], None]
"""Generator that yields assignments (settings to run next) and receives the communication times measured with them."""


def _seeds(similar: Sequence[S]) -> list[Proposal[S]]:
    return [Proposal(arm=REGISTRY_ARM, knobs=knobs, reason="a similar job's") for knobs in similar]


class TuningSession(Generic[S]):
    """Search for the fastest setting within a budget of training iterations. Runs on rank 0.

    The caller runs the setting in `assignment`, passes the measured communication times to `record`, and repeats this
    until `done`.

    Args:
        space: permitted settings. Proposals outside the space are rejected.
        default: untuned setting, which is measured first, and chosen if no setting is proved faster. In a re-tune (a
            later session of a tuned job), it is the setting in use.
        arm: search method that proposes settings and receives the result of every trial. None = no proposals until
            `begin_search`.
        rng: random generator that determines the order in which the fastest settings are measured again at the end.
        budget_iterations: training iterations of the search, including discarded ones. The final comparison takes as
            many more as a proof needs, at most `PROOF` times the budget.
        discarded_iterations: iterations that are not measured after each change of the setting.
        measured_iterations: measured iterations of a trial that is not stopped early.
        exact: result of an earlier run of this job, from the registry. Its setting is first compared with the default.
            It is chosen if the comparison, together with the earlier gain, proves it faster. If the network has
            changed, a short search follows.
        checks: whether `exact` is compared with the default. If not, it is chosen at once, and the session has ended.
        seeds: settings of similar jobs, which are the first proposals.
        given: the user's plan, which is proposed before all other settings. If `exact` is given, first its setting is
            compared with the default, then the plan.
        history: `trials` of an earlier session. In a search, their iterations count against the budget. If `exact` is
            chosen, they are used from the first `resume` on.
        identity: function that returns equal values for knobs that are the same setting, which is then measured only
            once.
        refine: whether to try settings that differ from the fastest one in one knob, after the arm's trials.
        retune: whether the job is already tuned and uses `default` when the session begins.
        least_gain: minimum gain over the default for a setting to be chosen, as a fraction of the communication time.
        contrasts: for a job whose default is probably the best: settings that differ clearly from it. They are tried
            first. If none of them is faster by more than the noise, the session ends with the default.

    Attributes:
        left_alone: True if the session ended because no setting in `contrasts` was faster. It is never resumed then.
        resumed: True if `resume` has continued the session, or if the constructor ended it (`checks` is False).

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
        checks: bool = True,
        seeds: Sequence[S] = (),
        given: S | None = None,
        history: Sequence[Trial[S]] = (),
        identity: Callable[[S], Hashable] = lambda knobs: knobs,
        refine: bool = True,
        retune: bool = False,
        least_gain: float = 0.0,
        contrasts: Sequence[S] = (),
    ) -> None:
        require(discarded_iterations >= 0, "discarded_iterations", "at least 0", discarded_iterations, TuningError)
        require(measured_iterations >= 1, "measured_iterations", "at least 1", measured_iterations, TuningError)
        self._default, self._arm, self._rng, self._identity = default, arm, rng, identity
        self._iterations, self._spent = budget_iterations, 0
        self._for_proof = 0  # Additional iterations for the final comparison; 0 before the comparison begins.
        self._most_pairs = MOST_PAIRS
        self._discarded, self._measured = discarded_iterations, measured_iterations
        self._trial_iterations = discarded_iterations + measured_iterations
        self._most_finalists = 3 if budget_iterations >= 60 else 2
        self._refines, self._least_gain = refine, least_gain
        self._ledger = Ledger(identity=identity)
        self._trials: list[Trial[S]] = []
        self._since_best = 0  # Number of trials since a setting was last faster than all before.
        self._incumbent: Setting[S] | None = None  # Last setting that was clearly faster than all before.
        self._running = default if retune else None
        self._default_name = "the setting that ran" if retune else "the default"
        self._exact, self._checks = exact, checks
        self._space, self._given = space, given
        self._seeds = _seeds(seeds)
        self._contrasts, self.left_alone = contrasts, False
        self._has_rejected = False
        # Only the latest trials of the history are used: a session cannot have more trials than iterations.
        of_default = [trial for trial in history[:-budget_iterations] if trial.knobs == default]
        latest = (*of_default[-1:], *history[-budget_iterations:])
        self._history = tuple(trial for trial in latest if self._accepts(trial.knobs))
        self._outcome: tuple[S, str, Gain | None] | None = None
        self._doubt = ""
        self.resumed = not checks
        self._script = self._warm_up()
        self._advance()

    @property
    def assignment(self) -> Assignment[S]:
        """Return the setting to run now. After the session's end, it has the purpose KEPT and nothing to measure."""
        return self._assignment

    @property
    def done(self) -> bool:
        """Return whether the session has ended. `resume` continues an ended session."""
        return self._assignment.purpose is Purpose.KEPT

    @property
    def trials(self) -> tuple[Trial[S], ...]:
        """Return all finished trials, including those of the default and of `history`.

        A later session accepts them as its `history`.
        """
        return (*self._history, *self._trials)

    def record(self, spans_s: Sequence[float]) -> None:
        """Record the communication times measured with the setting in `assignment`, and choose the next setting.

        Args:
            spans_s: communication time of each measured iteration in seconds, on the rank where it was the shortest;
                infinite if the setting could not be applied.

        Raises:
            TuningError: the session has ended, or `spans_s` is empty.
        """
        if self.done:
            raise TuningError("record() was called after the tuning session had ended; call it only before the end")
        require(spans_s, "spans_s", "at least one measured time (math.inf if the setting failed)", "none", TuningError)
        self._advance(spans_s)

    def _advance(self, spans_s: Sequence[float] | None = None) -> None:
        """Run the script (generator of assignments) until its next assignment.

        `spans_s` are the times measured with the previous assignment; None = start the script.
        """
        try:
            self._assignment = next(self._script) if spans_s is None else self._script.send(spans_s)
        except StopIteration:
            result = self.result
            self._assignment = Assignment(
                knobs=result.knobs, discarded_iterations=0, measured_iterations=0, arm=result.arm, purpose=Purpose.KEPT
            )
            logger.debug("tuning ended after %d training iterations with the result: %s", self._spent, result.reason)

    @property
    def result(self) -> SessionResult[S]:
        """Return the session's result.

        Before the session has ended, this is the fastest setting so far if its lead over the default exceeds the noise,
        else the default.
        """
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
        return self._iterations + proof_iterations(self._iterations, self._discarded)

    def begin_search(self, arm: Arm[S], *, space: Space[S], seeds: Sequence[S] = ()) -> None:
        """Start the search, which also uses the measurements made before it.

        The session needs this call when its `assignment` has the purpose SEARCH. Until then, it has no setting to run.

        Args:
            arm: search method that proposes settings. It receives the results of all trials so far.
            space: permitted settings, which may be fewer than those of the constructor.
            seeds: settings of similar jobs, which are the first proposals.

        Raises:
            TuningError: the session does not wait for this call.
        """
        found = self._assignment.purpose
        require(found is Purpose.SEARCH, "assignment.purpose in begin_search()", Purpose.SEARCH, found, TuningError)
        self._arm, self._space, self._seeds = arm, space, _seeds(seeds)
        self._advance(())

    def resume(self, iterations_left: int, make_arm: Callable[[], Arm[S]] | None = None) -> bool:
        """Continue the ended session if that pays: try more settings, and compare the fastest with the chosen one.

        The trials take `MORE_ITERATIONS` iterations, the comparison at most `MORE_PROOF_ITERATIONS` more. All
        measurements so far are used. Until the session ends again, `result` stays as it was.

        Args:
            iterations_left: number of training iterations that would profit from a faster setting.
            make_arm: function that creates a search method (arm) if the session has none, because it has only checked
                an earlier job's setting.

        Returns:
            True if the session continues. False if trials will probably cost more time than a faster setting saves.

        Raises:
            TuningError: the session has not ended.
        """
        if self.left_alone:
            return False
        if not self.done or self._outcome is None:
            raise TuningError(
                "this tuning session is still running; resume() continues a session only after it has ended"
            )
        if self._arm is None and make_arm is not None:
            self._arm = make_arm()
            self._arm.tell(self._trials)
        self._add_history()
        expected = opinion(self._arm, "expected_improvement")
        if expected is not None and expected * iterations_left < LEAST_SAVING:
            return False
        chosen, _, gain = self._outcome
        self._script = self._try_more(chosen, gain, least_promise=LEAST_SAVING / max(iterations_left, 1))
        self._advance()
        self.resumed = True
        return True

    # ── phases ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _warm_up(self) -> _Script[S]:
        if self._exact is not None and not self._checks:
            self._running = self._exact.knobs
            return self._end(self._exact.knobs, "it was chosen before a restart", self._exact.gain)
        if self._exact is not None and self._accepts(self._exact.knobs):
            confirmed = yield from self._check(self._exact)
            if confirmed and not self._link_has_changed(self._exact):
                self._history = tuple(self._scaled(self._history))
                return
            self._history = ()  # Drop the earlier trials, because the network has changed since the earlier job.
            if confirmed:
                self._iterations = min(self._iterations, self._spent + SHORT_SEARCH_ITERATIONS)
                is_default = self._same(self._exact.knobs, self._default)
                stored = "is the default" if is_default else "is still faster than the default"
                logger.info(
                    "the stored setting of this job %s, but the network's latency or bandwidth has changed; Sirtaki "
                    "starts a short search of at most %d steps",
                    stored,
                    self.iterations_at_most - self._spent,
                )
            else:
                logger.info(
                    "the stored setting of this job is no longer measurably faster than the default; Sirtaki starts "
                    "a new search"
                )
            in_use = self._outcome[0] if self._outcome else self._default
            self._outcome = None
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
            if not (
                self._history or self._given or any(not self._same(one.knobs, self._default) for one in self._seeds)
            ):
                yield from self._try_contrasts()
                if self.left_alone:
                    return
        self._add_history()
        search_end = yield from self._search()
        if self._reserved_for_refinement:
            yield from self._refine()
        self._for_proof = proof_iterations(self._iterations, self._discarded)
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

    def _try_contrasts(self) -> _Script[S]:
        """Run the settings in `contrasts`. End the session if none of them is clearly faster than the default."""
        default, n_tried = self._setting(self._default), 0
        for knobs in self._contrasts:
            if self._remaining <= self._discarded:
                return
            if self._accepts(knobs) and self._ledger.find(knobs) is None:
                yield from self._run_trial(Proposal(arm=REFINEMENT_ARM, knobs=knobs, reason="unlike the default"))
                n_tried += 1
                if default.failed or self._ledger.lead(self._setting(knobs), default) > CLEAR:
                    return
        if n_tried:
            self.left_alone = True
            self._end(
                self._default,
                f"none of {counted(n_tried, 'clearly different setting')} was faster, so the search ended early",
            )

    def _try_more(self, chosen: S, gain: Gain | None, *, least_promise: float) -> _Script[S]:
        """Run more trials, and compare the fastest setting with the chosen one.

        Args:
            chosen: result of the session so far.
            gain: proved gain of `chosen` over the default; None = no such gain.
            least_promise: settings with a smaller expected gain are not tried; a fraction of the communication time.
        """
        self._iterations, self._for_proof, self._since_best = self._spent + MORE_ITERATIONS, 0, 0
        yield from self._run(chosen, arm=FINALS_ARM, purpose=Purpose.FINALS, measured=self._measured)
        while self._remaining > self._discarded and (proposal := self._promising(least_promise)) is not None:
            yield from self._run_trial(proposal)
        self._for_proof, self._most_pairs = MORE_PROOF_ITERATIONS, MORE_PAIRS
        base_name = "the setting that ran"
        better, more, verdict = yield from self._prove(chosen, base_name, lossy=self._is_lossy(chosen))
        if more is None:
            return
        if self._same(better, self._default):
            return self._end(better, verdict)
        # Claim a gain over the default only after a comparison with the default: the more comparisons are made, the
        # likelier one of them is wrong.
        self._for_proof += pair_iterations(MOST_PAIRS, self._discarded)
        pairs = yield from self._compare(better, arm=FINALS_ARM)
        _, claimed, _ = self._judge(better, pairs)
        if claimed is not None or not self._same(chosen, self._default):
            self._end(better, verdict, claimed or gain)

    def _promising(self, least_promise: float) -> Proposal[S] | None:
        """Propose a setting with an expected gain of at least `least_promise`; None if there is no such setting.

        In half of the calls, a neighbour of one of the fastest settings is preferred.
        """
        if self._rng.random() < 0.5 and (proposal := self._promising_neighbour(least_promise)) is not None:
            return proposal
        proposal = self._next_proposal()
        promises = None if proposal is None else opinion(self._arm, "promise", [proposal.knobs])
        if proposal is not None and (promises is None or promises[0] >= least_promise):
            return proposal
        return self._promising_neighbour(least_promise)

    def _promising_neighbour(self, least_promise: float) -> Proposal[S] | None:
        around = list(self._neighbours(NEAR_FASTEST))
        promises = opinion(self._arm, "promise", around) or [math.inf] * len(around)
        promise, knobs = max(zip(promises, around, strict=True), key=lambda pair: pair[0], default=(0.0, self._default))
        enough = promise >= least_promise
        return Proposal(arm=REFINEMENT_ARM, knobs=knobs, reason="near the fastest") if enough else None

    def _prove(
        self, base: S, base_name: str, *, lossy: bool
    ) -> Generator[Assignment[S], Sequence[float], tuple[S, Gain | None, str]]:
        """Select the fastest setting, and compare it with `base` in pairs of measurements.

        If this setting is clearly slower than `base` or fails, the next fastest setting is compared.

        Args:
            base: setting to compare with.
            base_name: name of `base` in the reason.
            lossy: True to select among lossy (compressed) settings, False among lossless ones.

        Returns:
            The chosen setting, which may be `base`; its proved gain over `base`, or None; the reason for the choice in
            words.
        """
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
        """Compare an earlier job's setting with the default, then the user's plan (if there is one) with the default.

        Returns:
            Whether the session may end: the setting or the plan is proved faster than the default, or the earlier job
            chose the default.
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
        """Return whether this job's measurements show that the network has changed since the earlier job.

        `exact` is the earlier job's result.
        """
        best, default = self._setting(exact.knobs), self._setting(self._default)
        return exact.contradicted_by(best, default, noise=self._ledger.noise)

    # ── the search ───────────────────────────────────────────────────────────────────────────────────────────────

    def _search(self) -> Generator[Assignment[S], Sequence[float], str]:
        """Run trials of proposed settings. Return in words why the search ended.

        It ends when the budget is used, when no proposal is left, or when many trials in a row were not faster and the
        search method (arm) expects no improvement.
        """
        patience = max(8, self._iterations // (4 * self._trial_iterations))
        while True:
            if self._remaining - self._reserved_for_refinement < self._discarded + 1:
                return f"the search has used its {counted(self._iterations, 'step')}"
            if self._since_best >= patience:
                expected = opinion(self._arm, "expected_improvement")
                if expected is not None and expected < WORTHWHILE:
                    return f"no new best in {counted(self._since_best, 'trial')}"
            proposal = self._next_proposal()
            if proposal is None:
                return "nothing left to propose"
            yield from self._run_trial(proposal)

    def _refine(self) -> _Script[S]:
        """Run trials of settings that differ from the fastest one in one knob.

        End without such settings or without budget.
        """
        while self._remaining > self._discarded and (proposal := self._neighbour()) is not None:
            yield from self._run_trial(proposal)

    def _neighbour(self) -> Proposal[S] | None:
        """Propose an untried setting that differs from the fastest one in one knob; None if there is none."""
        knobs = next(self._neighbours(1), None)
        return None if knobs is None else Proposal(arm=REFINEMENT_ARM, knobs=knobs, reason="neighbour of the fastest")

    def _neighbours(self, n_fastest: int) -> Iterator[S]:
        """Yield untried settings that differ in one knob from one of the `n_fastest` fastest settings."""
        tried = [setting.knobs for setting in self._ledger.ranked()]
        for fast in tried[:n_fastest]:
            for knobs in opinion(self._space, "around", fast, tried) or ():
                if self._accepts(knobs) and self._ledger.find(knobs) is None:
                    yield knobs

    def _run_trial(self, proposal: Proposal[S]) -> _Script[S]:
        """Measure a proposed setting. Stop early if it is clearly slower than the fastest other setting.

        Measure a setting up to twice as often if its lead is smaller than the noise.
        """
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
        """Return the next proposed setting that needs a measurement; None if there is none.

        Proposals that are not permitted or measured already are skipped. Their result is sent to the search method
        (arm) at once.
        """
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
        """Propose a permitted setting that no search method (arm) has proposed, if at most `FEW` are permitted."""
        distinct = {
            self._identity(knobs): knobs for knobs in opinion(self._space, "every") or () if self._accepts(knobs)
        }
        untried = (knobs for knobs in distinct.values() if self._ledger.find(knobs) is None)
        knobs = next(untried, None) if len(distinct) <= FEW else None
        return None if knobs is None else Proposal(arm=REFINEMENT_ARM, knobs=knobs, reason="not proposed by any arm")

    def _accepts(self, knobs: S) -> bool:
        """Return whether the knobs are permitted and fit this job; log the reason if not.

        The check is needed because search methods (arms) and the registry may return invalid knobs.
        """
        try:
            if knobs in self._space:
                self._identity(knobs)
                return True
            reason = f"the setting {knobs.describe()} is outside the permitted space"
        except Exception as err:
            reason = f"the setting does not fit this job: {err}"
        level = logging.DEBUG if self._has_rejected else logging.WARNING
        logger.log(level, "Sirtaki ignores a setting that was proposed for tuning: %s", reason)
        self._has_rejected = True
        return False

    # ── the final comparison ─────────────────────────────────────────────────────────────────────────────────────

    def _finalists(self, base: S, beaten: Sequence[S], *, lossy: bool) -> list[S]:
        """Return the settings to measure again (finalists) before one of them is compared with `base`.

        Settings in `beaten` are left out. The finalists are taken alternately from two rankings: by measured
        communication time, and by the search method's estimate of the communication time.
        """
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
        """Measure the fastest settings (finalists) again in rounds, and return the fastest; None without finalists.

        Each round drops the slower half. The rounds end when one finalist remains, or when all remaining iterations are
        reserved for the paired comparison.
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
        """Compare a setting with the default (or with `base`) in pairs of measurements.

        The pairs are evaluated at most twice. The first time is when the lead that the search has measured is probably
        proved by so many pairs. The second time is when the budget is used up.

        Args:
            knobs: the setting.
            arm: name to store as the proposer in the resulting trial, `FINALS_ARM` in the final comparison.
            known: gain of the setting that an earlier job has proved; None = no such gain.
            base: setting to compare with; None = the default.

        Returns:
            The comparison; None if too few iterations are left for it.
        """
        default, final = base or self._default, arm == FINALS_ARM
        most = self._most_pairs if final else MOST_PAIRS_OF_CHECK
        remaining = self._remaining - (0 if self._is_lossy(knobs) or not final else self._reserved_for_lossy)
        at_most = max(
            (n for n in range(FEWEST_PAIRS, most + 1) if pair_iterations(n, self._discarded) <= remaining), default=0
        )
        if final and not at_most:
            return None
        if final:
            wanted = min(self._pairs_wanted(knobs, default), at_most)
        else:  # The check of an earlier job's setting or of the user's plan may exceed the search's budget.
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
        """Choose between a setting and the baseline by their paired comparison.

        Args:
            knobs: the setting.
            pairs: comparison of the setting with the baseline; None = they could not be compared.
            base: the baseline; None = the default.
            base_name: name of the baseline for the reason in words; empty = name of the default.

        Returns:
            The chosen setting; its proved gain, or None if the baseline is chosen; and the reason in words.
        """
        base = base or self._default
        if pairs is None or pairs.failed:
            return base, None, "could not be compared"
        against = f"{base_name or self._default_name} in {counted(pairs.n_pairs, 'paired round')}"
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

    def _pairs_wanted(self, knobs: S, base: S | None = None) -> int:
        """Return how many paired measurements will probably prove that a setting is faster than `base` or the default.

        The number is computed from the difference measured in the search.
        """
        setting, default = self._setting(knobs), self._setting(base or self._default)
        if not all(0.0 < one.span_s < math.inf for one in (setting, default)):
            return FEWEST_PAIRS
        lead = self._ledger.cautious_lead(setting, default)
        return pairs_wanted(lead, self._ledger.noise, most=self._most_pairs) if lead > 0.0 else FEWEST_PAIRS

    @property
    def _reserved_for_pairs(self) -> int:
        """Return the number of iterations reserved for the paired comparison of the fastest setting and the default."""
        ranked = self._ledger.ranked()
        return pair_iterations(self._pairs_wanted(ranked[0].knobs), self._discarded) if ranked else 0

    @property
    def _reserved_for_lossy(self) -> int:
        """Return the number of iterations reserved for comparing a compressed setting with the fastest lossless one.

        It is 0 if the fastest setting is lossless, or if the session's budget is below `SHORT`.
        """
        ranked = self._ledger.ranked() if self._iterations >= SHORT else []
        needed = ranked and self._is_lossy(ranked[0].knobs)
        return pair_iterations(ENOUGH_PAIRS, self._discarded) + self._trial_iterations if needed else 0

    @property
    def _reserved_for_refinement(self) -> int:
        """Return the number of iterations reserved for settings that differ from the fastest one in one knob.

        It is 0 if measurements are too noisy to distinguish such settings, or if the budget is small.
        """
        worthwhile = self._refines and self._ledger.noise <= NOISY and self._iterations >= SHORT
        return round(REFINEMENT * self._iterations) if worthwhile else 0

    # ── measurements ─────────────────────────────────────────────────────────────────────────────────────────────

    def _run(
        self, knobs: S, *, arm: str, purpose: Purpose, measured: int
    ) -> Generator[Assignment[S], Sequence[float], Sequence[float]]:
        """Yield a setting as the next assignment. Store and return the communication times measured with it."""
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
        """Create a trial from the measurements of a proposed setting, and send the trial to the search method (arm)."""
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
            "the tuner measured the setting %s (proposed by the search method %s): communication takes %.4g ms per "
            "iteration%s",
            trial.knobs.describe(),
            trial.arm,
            1e3 * trial.span_s,
            ", the fastest so far" if was_best else "",
        )

    def _tell(self, trial: Trial[S]) -> None:
        if self._arm is not None:
            self._arm.tell([trial])

    def _scaled(self, history: Sequence[Trial[S]]) -> Iterator[Trial[S]]:
        """Yield trials of an earlier session, with their times scaled to this session.

        The factor is the default's time in this session divided by the default's time in the earlier session. Without a
        measurement of the default in both sessions, the trials are not scaled.
        """
        before = [trial.span_s for trial in history if self._same(trial.knobs, self._default)]
        scale = self._setting(self._default).span_s / before[-1] if before else 1.0
        scale = scale if 0.0 < scale < math.inf else 1.0
        for trial in history:
            yield replace(trial, span_s=trial.span_s * scale, noise_s=trial.noise_s * scale)

    def _add_history(self) -> None:
        """Add the trials of an earlier session if not yet done, and count their iterations against the budget."""
        history, self._history = tuple(self._scaled(self._history)), ()
        if not history:
            return
        known = self._ledger.find(self._default) is not None
        # Keep the latest trial of each setting, because it includes the earlier measurements of the setting.
        latest = {self._identity(trial.knobs): trial for trial in history}
        # A setting's arm is the arm of its first trial, which proposed the setting. Later trials are repetitions.
        proposers = {self._identity(trial.knobs): trial.arm for trial in reversed(history)}
        for trial in history:
            if known and self._same(trial.knobs, self._default):
                continue
            self._trials.append(trial)
            self._tell(trial)
            identity = self._identity(trial.knobs)
            if trial is latest[identity]:
                spans_s = [trial.span_s] * max(1, min(trial.iterations, self._measured))
                self._ledger.add(trial.knobs, arm=proposers[identity], spans_s=spans_s, repeats=False)
                self._spent += trial.iterations + self._discarded
        best = self._setting(self._best_so_far())
        if self._incumbent is not None and best.spans_s:
            # Compare later trials also with the earlier session's best setting, so that only a faster one counts as a
            # new best.
            self._incumbent = best
        self._spent = min(self._spent, max(self._iterations, self._trial_iterations))

    def _setting(self, knobs: S) -> Setting[S]:
        """Return the measurements of a setting; a `Setting` without measurements if it has not been run."""
        return self._ledger.find(knobs) or Setting(knobs=knobs, arm=DEFAULT_ARM)

    def _estimated_s(self, knobs: S) -> float:
        """Return the search method's estimate of a setting's communication time; if it has none, the measured time."""
        estimate = opinion(self._arm, "expected_span_s", knobs)
        return self._setting(knobs).span_s if estimate is None else estimate

    def _best_so_far(self) -> S:
        """Return the fastest setting if its lead over the default exceeds the noise, else the default.

        A lead within the noise does not count, because the fastest of many settings may owe it to noise. A setting from
        the registry was not selected by these measurements, so any lead counts.
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
