"""Trials of a tuning session: what is to run, for how long, and what has been measured."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import combinations_with_replacement

from ..arms.base import Arm, expected_span_s
from ..knobs import Knobs
from ..trial import Proposal, Trial, TrialStatus

DEFAULT_ARM = "default"  # whose trial the untuned default is
REGISTRY_ARM = "registry"  # whose trials remembered settings are
PLAN_ARM = "plan"  # whose trial a plan is that the user has given
REFINEMENT_ARM = "refinement"  # whose trials the neighbours of the fastest setting are
FINALS_ARM = "finals"  # whose trials repeated measurements are


class Purpose(Enum):
    """Why an assignment is run."""

    DEFAULT = "default"
    """To know what there is to beat."""
    TRIAL = "trial"
    """Somebody proposes it."""
    FINALS = "finals"
    """The fastest settings and the default run in turns."""
    SEARCH = "search"
    """Nothing is run: the session waits for `begin_search`."""
    KEPT = "kept"
    """The warm-up is over: run these from now on."""

    @property
    def description(self) -> str:
        """For log lines."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    Purpose.DEFAULT: "measuring the default",
    Purpose.TRIAL: "trying",
    Purpose.FINALS: "comparing in turns",
    Purpose.SEARCH: "preparing a search",
    Purpose.KEPT: "keeping",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What to run now.

    Attributes:
        knobs: the setting.
        discarded_iterations: iterations to run first and not to measure; 0 where the knobs are running already.
        measured_iterations: iterations to measure then; 0 once the warm-up is over, or where nothing is run.
        arm: who proposed it.
        purpose: why it is run.
    """

    knobs: Knobs
    discarded_iterations: int
    measured_iterations: int
    arm: str
    purpose: Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """What the warm-up found, or has found so far.

    Attributes:
        knobs: the setting to keep.
        default_span_s: median span of the untuned default; infinite if not measured yet.
        best_span_s: median span of `knobs`.
        noise_s: standard deviation of one measured span of `knobs`.
        arm: who proposed `knobs`.
        n_trials: settings that were measured, the default among them.
        iterations_used: training iterations spent, discarded ones included.
        reason: why it ended so, in words.
        tuned: `knobs` are not the untuned default.
    """

    knobs: Knobs
    default_span_s: float
    best_span_s: float
    noise_s: float
    arm: str
    n_trials: int
    iterations_used: int
    reason: str
    tuned: bool


RESERVE_PER_NOISE = 7.0  # share of the budget kept for the finals over the noise, within the bounds below
QUIET = 0.015  # noise that needs no reserve
MIN_RESERVE, MAX_RESERVE = 0.15, 0.3
REFINEMENT = 0.12  # share of the budget
SHORT = 60  # iterations below which trials are too few to spend some on neighbours
NOISY = 0.06  # from this noise on, turns in the finals take all the iterations that are left


@dataclass(slots=True, kw_only=True)
class Budget:
    """Iterations in all, and those that are spent.

    Attributes:
        iterations: all of them, discarded ones included.
        discarded: iterations after a change of knobs that are not measured.
        measured: measured iterations of a trial that is not given up early.
        spent: how many have run.
    """

    iterations: int
    discarded: int
    measured: int
    spent: int = 0

    @property
    def turn(self) -> int:
        """What a setting takes that did not run before."""
        return self.discarded + self.measured

    @property
    def duel(self) -> int:
        """What two settings take that run in turns."""
        return 2 * self.turn

    def for_refinement(self, noise: float) -> int:
        """Iterations for neighbours of the fastest setting, of those for trials: none where noise hides them."""
        return 0 if noise > NOISY or self.iterations < SHORT else round(REFINEMENT * self.iterations)

    @property
    def left(self) -> int:
        """Iterations that have not run."""
        return self.iterations - self.spent

    def left_for_trials(self, noise: float) -> int:
        """The others are kept for the finals, the more the noisier it is; negative where they are used already."""
        share = min(max(RESERVE_PER_NOISE * (noise - QUIET), MIN_RESERVE), MAX_RESERVE)
        return self.left - max(self.duel, round(share * self.iterations))

    def turn_iterations(self, noise: float, *, field: int, rounds: int) -> int:
        """Measured iterations of one turn in the finals, if so many are left in the field for so many rounds."""
        if noise <= NOISY:
            return self.measured
        return max(self.measured, self.left // (field * rounds) - self.discarded)


CLEAR = 2.0  # standard errors between two settings that are told apart
PRIOR_NOISE = 0.05  # what a network's spans usually scatter, until this one's has been seen
_PRIOR_WEIGHT = 3  # in repeated measurements
_OUTLIER = 2.5  # standard deviations from which on a difference counts as no larger


@dataclass(slots=True, kw_only=True)
class Setting:
    """One setting's measurements.

    Attributes:
        knobs: the setting.
        arm: who proposed it first.
        spans_s: all its measured spans, `(n_measured,)`; infinite where it could not be run.
    """

    knobs: Knobs
    arm: str
    spans_s: list[float] = field(default_factory=list)

    @property
    def span_s(self) -> float:
        """Median of the means of all pairs of measured spans; infinite if there are none or one failed.

        This (Hodges and Lehmann's estimate) takes outliers like the median, and needs a third fewer measurements.
        """
        if not self.spans_s or self.failed:
            return math.inf
        return statistics.median((a + b) / 2 for a, b in combinations_with_replacement(self.spans_s, 2))

    @property
    def spread_s(self) -> float:
        """Median absolute deviation of the measured spans; 0 for a single one."""
        centre = self.span_s
        return 0.0 if math.isinf(centre) else statistics.median(abs(span - centre) for span in self.spans_s)

    @property
    def failed(self) -> bool:
        """It could not be run."""
        return any(math.isinf(span) for span in self.spans_s)

    def as_trial(self, *, arm: str, knobs: Knobs, status: TrialStatus, was_best: bool) -> Trial:
        """All measurements of the setting as one trial."""
        return Trial(
            arm=arm,
            knobs=knobs,
            iterations=len(self.spans_s),
            span_s=self.span_s,
            noise_s=self.spread_s,
            status=TrialStatus.FAILED if self.failed else status,
            was_best=was_best,
        )


class Ledger:
    """All settings measured so far, and the noise of one measurement.

    Args:
        identity: knobs with equal identity are one setting (say, because they expand to the same plan).
    """

    def __init__(self, *, identity: Callable[[Knobs], Hashable]) -> None:
        self._identity = identity
        self._settings: dict[Hashable, Setting] = {}
        self._differences: list[float] = []

    def __len__(self) -> int:
        return len(self._settings)

    def __getitem__(self, knobs: Knobs) -> Setting:
        return self._settings[self._identity(knobs)]

    def find(self, knobs: Knobs) -> Setting | None:
        """The setting that these knobs stand for, if it has been measured."""
        return self._settings.get(self._identity(knobs))

    def add(self, knobs: Knobs, *, arm: str, spans_s: Sequence[float], repeats: bool = True) -> Setting:
        """Enters measured spans.

        Args:
            knobs: what ran.
            arm: who proposed them; kept if the setting is new.
            spans_s: measured spans, `(n,)`; one that is not a positive number counts as failed.
            repeats: the spans are measurements of their own, from which the noise can be learnt.
        """
        setting = self._settings.setdefault(self._identity(knobs), Setting(knobs=knobs, arm=arm))
        for span in spans_s:
            valid = span if math.isfinite(span) and span > 0.0 else math.inf
            if repeats and setting.spans_s and math.isfinite(valid) and not setting.failed:
                self._differences.append(abs(math.log(valid / setting.spans_s[-1])))
            setting.spans_s.append(valid)
        return setting

    def ranked(self) -> list[Setting]:
        """All settings that ran, the fastest first."""
        return sorted(
            (setting for setting in self._settings.values() if not setting.failed), key=lambda setting: setting.span_s
        )

    @property
    def noise(self) -> float:
        """Standard deviation of one measured span, as a share of it.

        From the differences between successive measurements of the same setting, of which outliers are cut to size;
        mixed with `PRIOR_NOISE` while there are few.
        """
        n = len(self._differences)
        # Of normal deviates the median size is 0.6745 standard deviations.
        longest = _OUTLIER * statistics.median(self._differences) / 0.6745 if n else 0.0
        squares = sum(min(difference, longest) ** 2 / 2.0 for difference in self._differences)
        return math.sqrt((_PRIOR_WEIGHT * PRIOR_NOISE**2 + squares) / (_PRIOR_WEIGHT + n))

    def at_stake(self, first: Setting, second: Setting) -> float:
        """Share of the span that is lost on average by taking `first` for the faster one, as it seems to be."""
        if math.isinf(first.span_s) or math.isinf(second.span_s):
            return 0.0
        error, lead = self._error(first, second), math.log(second.span_s / first.span_s)
        luck = statistics.NormalDist()
        return error * luck.pdf(lead / error) - lead * luck.cdf(-lead / error)

    def _error(self, first: Setting, second: Setting) -> float:
        """Standard error of the difference between two settings' logarithms."""
        return self.noise * math.sqrt(1.0 / len(first.spans_s) + 1.0 / len(second.spans_s))

    def lead(self, first: Setting, second: Setting) -> float:
        """By how many standard errors `first` is faster than `second`; negative if it is slower."""
        if math.isinf(first.span_s) or math.isinf(second.span_s):
            return 0.0 if first.span_s == second.span_s else math.copysign(math.inf, second.span_s - first.span_s)
        return math.log(second.span_s / first.span_s) / self._error(first, second)


logger = logging.getLogger(__name__)

Run = Generator[Assignment, Sequence[float], Sequence[float]]
"""Yields what is to run, is sent the measured spans, and returns them."""


class Trials:
    """Runs settings and keeps the books.

    Attributes:
        default: the untuned setting.
        budget: of iterations.
        ledger: measurements by setting.
        all: every finished trial, in order.
        since_best: trials since the last new best.
        arm: who is told.
    """

    def __init__(
        self,
        *,
        default: Knobs,
        budget: Budget,
        identity: Callable[[Knobs], Hashable],
        arm: Arm,
        running: Knobs | None = None,
    ) -> None:
        self.default, self.budget, self.arm = default, budget, arm
        self.identity = identity
        self.ledger = Ledger(identity=identity)
        self.all: list[Trial] = []
        self.since_best = 0
        self._running = running
        self._incumbent: Setting | None = None  # the last new best, at first the default

    def run(self, knobs: Knobs, *, arm: str, purpose: Purpose, measured: int) -> Run:
        """Has a setting measured."""
        discarded = 0 if self._running == knobs else self.budget.discarded
        spans_s = yield Assignment(
            knobs=knobs, discarded_iterations=discarded, measured_iterations=measured, arm=arm, purpose=purpose
        )
        self.budget.spent += discarded + len(spans_s)
        self._running = knobs
        self.ledger.add(knobs, arm=arm, spans_s=spans_s)
        return spans_s

    def run_default(self) -> Run:
        """Has the untuned setting measured, as a trial."""
        spans_s = yield from self.run(
            self.default, arm=DEFAULT_ARM, purpose=Purpose.DEFAULT, measured=self.budget.measured
        )
        self.finish(Proposal(arm=DEFAULT_ARM, knobs=self.default))
        return spans_s

    def finish(self, proposal: Proposal) -> None:
        """Closes the books on a setting that has run, and tells the arm."""
        setting = self.setting(proposal.knobs)
        was_best = self.ledger.lead(setting, self._incumbent or setting) > 1.0
        if was_best or self._incumbent is None:
            self._incumbent = setting
        wanted = proposal.iterations or self.budget.measured
        status = TrialStatus.COMPLETE if len(setting.spans_s) >= wanted else TrialStatus.PRUNED
        trial = setting.as_trial(arm=proposal.arm, knobs=proposal.knobs, status=status, was_best=was_best)
        self.since_best = 0 if was_best else self.since_best + 1
        self.all.append(trial)
        self.tell(trial)
        logger.debug(
            "%s: %s: %.4g ms%s", trial.arm, trial.knobs.describe(), 1e3 * trial.span_s, ", new best" if was_best else ""
        )

    def tell(self, trial: Trial) -> None:
        """Tells the arm of a trial."""
        self.arm.tell([trial])

    def take_in(self, history: Sequence[Trial]) -> None:
        """Takes in an earlier session's trials, scaled by what the default took then and takes now."""
        before = [trial.span_s for trial in history if self.same(trial.knobs, self.default)]
        scale = self.setting(self.default).span_s / before[-1] if before else 1.0
        scale = scale if 0.0 < scale < float("inf") else 1.0
        latest = {self.identity(trial.knobs): trial for trial in history}  # holds all its measurements
        proposers = {self.identity(trial.knobs): trial.arm for trial in reversed(history)}  # the first of each
        budget = self.budget
        for trial in history:
            if self.same(trial.knobs, self.default):
                continue
            scaled = replace(trial, span_s=trial.span_s * scale, noise_s=trial.noise_s * scale)
            self.all.append(scaled)
            self.tell(scaled)
            identity = self.identity(trial.knobs)
            if trial is latest[identity]:
                spans_s = [scaled.span_s] * max(1, min(trial.iterations, budget.measured))
                self.ledger.add(trial.knobs, arm=proposers[identity], spans_s=spans_s, repeats=False)
                budget.spent += trial.iterations + budget.discarded
        best = self.setting(self.best_so_far())
        if self._incumbent is not None and best.spans_s:
            self._incumbent = best  # who beats only the default has not found a new best
        budget.spent = min(budget.spent, max(budget.iterations - 2 * budget.duel, budget.turn))

    def setting(self, knobs: Knobs) -> Setting:
        """What was measured of these knobs, perhaps nothing."""
        return self.ledger.find(knobs) or Setting(knobs=knobs, arm=DEFAULT_ARM)

    def believed_s(self, knobs: Knobs) -> float:
        """What a setting truly takes by the arm's surrogate, which knows its neighbours; as measured if unknown."""
        belief = expected_span_s(self.arm, knobs)
        return self.setting(knobs).span_s if belief is None else belief

    def best_so_far(self) -> Knobs:
        """The fastest, if it leads the default by more than the noise: of many settings one is fast by luck.

        What similar jobs have found was named beforehand, not picked for its luck: for that any lead will do.
        """
        ranked = self.ledger.ranked()
        default = self.setting(self.default)
        if ranked and self.ledger.lead(ranked[0], default) > 1.0:
            return ranked[0].knobs
        named = next((setting for setting in ranked if setting.arm == REGISTRY_ARM), None)
        if named is not None and self.ledger.lead(named, default) > 0.0:
            return named.knobs
        return self.default

    @property
    def left(self) -> int:
        """Iterations that trials may still use."""
        return self.budget.left_for_trials(self.ledger.noise)

    def same(self, first: Knobs, second: Knobs) -> bool:
        """Whether both are one setting."""
        return self.identity(first) == self.identity(second)


OTHER_GAIN = 1.25  # how many times as large or as small a gain may be on the same link
CONFIDENCE = 2.0  # standard errors by which it must be more than that
USUAL_MEASUREMENTS = 4  # that the earlier job's times rest on


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What that job measured.

    Attributes:
        exact_s: span with the setting.
        default_s: span with the untuned default.
        noise: standard deviation of one measured span, as a share of it.
        other_times: how many times as much or as little time both may take on the same link.
    """

    exact_s: float
    default_s: float
    noise: float = 0.0
    other_times: float = 1.5

    def broken_by(self, exact: Setting, default: Setting, *, noise: float) -> bool:
        """Whether the link is clearly another one than it was.

        Args:
            exact: what was measured of the setting here.
            default: of the default; the same object where that is the setting.
            noise: of one measured span here, as a share.
        """
        exact_ratio, default_ratio = exact.span_s / self.exact_s, default.span_s / self.default_s
        if not all(0.0 < ratio < math.inf for ratio in (exact_ratio, default_ratio)):
            return False
        of_exact, of_default = (
            math.hypot(self._error, noise / math.sqrt(len(one.spans_s))) for one in (exact, default)
        )
        times = [math.log(exact_ratio), math.log(default_ratio)]
        error = max(of_exact, of_default)
        least = min(abs(time) for time in times) if times[0] * times[1] > 0.0 else 0.0
        if least - CONFIDENCE * error > math.log(self.other_times):
            return True
        gained = abs(times[0] - times[1]) if exact is not default else 0.0
        return gained - CONFIDENCE * math.hypot(of_exact, of_default) > math.log(OTHER_GAIN)

    @property
    def _error(self) -> float:
        return self.noise / math.sqrt(USUAL_MEASUREMENTS)
