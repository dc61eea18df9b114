"""A tuning session: the default first, then the search, then the final comparison."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import combinations_with_replacement

import numpy as np

from sirtaki.errors import TuningError

from ..knobs import KnobLattice, Knobs, KnobSpace
from ..trial import Arm, Proposal, Trial, TrialStatus, opinion

logger = logging.getLogger(__name__)

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

    def as_trial(
        self, proposal: Proposal, *, status: TrialStatus = TrialStatus.COMPLETE, was_best: bool = False
    ) -> Trial:
        """All measurements of the setting as one trial of that proposal."""
        return Trial(
            arm=proposal.arm,
            knobs=proposal.knobs,
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


STEP_OCTAVES = 0.5
NEAR_OCTAVES = 0.3
"""Unit sizes that differ by less are neighbours that have been tried."""


def neighbours(knobs: Knobs, space: KnobSpace) -> Iterator[Knobs]:
    """Settings that differ in one knob by one step: streams, unit size, route, threads; a plan counts as uniform."""
    if knobs.cuts is not None:
        knobs = replace(knobs, cuts=None)
        yield knobs
    yield from (replace(knobs, streams=n) for n in space.streams_around(knobs.streams) if n != knobs.streams)
    low, high = space.unit_bytes
    sizes = (space.whole_unit_bytes(knobs.unit_bytes * 2**step) for step in (-STEP_OCTAVES, STEP_OCTAVES))
    yield from (replace(knobs, unit_bytes=size) for size in sizes if low <= size <= high)
    yield from (replace(knobs, transport=t, algorithm=a) for t, a in space.routes if (t, a) != knobs.route)
    yield from (replace(knobs, threads=n) for n in space.threads_around(knobs.threads) if n != knobs.threads)


def untried(knobs: Knobs, space: KnobSpace, tried: Iterable[Knobs]) -> Iterator[Knobs]:
    """The neighbours that no tried setting is near to."""
    known = [one for one in tried if one.cuts is None]
    near = (one for one in neighbours(knobs, space) if one in space)
    return (one for one in near if not any(_near(one, other) for other in known))


def _near(first: Knobs, second: Knobs) -> bool:
    same = replace(first, unit_bytes=second.unit_bytes) == second
    return same and abs(math.log2(first.unit_bytes / second.unit_bytes)) < NEAR_OCTAVES


RESERVE_PER_NOISE = 7.0  # share of the budget kept for the finals over the noise, within the bounds below
QUIET = 0.015  # noise that needs no reserve
MIN_RESERVE, MAX_RESERVE = 0.15, 0.3
REFINEMENT = 0.12  # share of the budget that is for neighbours of the fastest setting
SHORT = 60  # iterations below which trials are too few to spend some on neighbours
NOISY = 0.06  # from this noise on, turns in the finals take all the iterations that are left

MAX_RETRIES = 8  # proposals in a row that need not be run, until the arm is taken to have run dry
FEW = 16  # settings that are all tried: those of a model of a unit or two, where most knobs come to the same
MOST_POINTS = 100  # of a lattice that is looked at for that

PROMISING = 1.0  # standard errors behind the best at which a setting is not measured again
WORTHWHILE = 0.001  # the share of the span that must be in reach to go on searching

INDIFFERENT = 0.001  # share of the span that may be lost by not comparing any further
HOPELESS = 3.0  # standard errors behind the fastest at which a setting has no place in the finals
MAX_ROUNDS, MAX_TURN_ITERATIONS = 8, 12  # of the finals, and measured iterations of one turn in them
MAX_EXACT_ROUNDS = 3  # that a remembered setting gets to beat the default
SHORT_SEARCH_ITERATIONS = 40  # from a setting that is good, but was found on another link

_Script = Generator[Assignment, Sequence[float], None]
"""Yields what is to run, and is sent the measured spans."""


class WarmupSession:
    """Spends a budget of iterations on finding the best knobs.

    Args:
        space: proposals outside it are refused.
        default: the untuned setting, measured first; what stays if nothing beats it. In a re-tune, the one that runs.
        arm: proposes; told every trial. None = nobody, until `begin_search`.
        rng: the order in which finalists are run.
        budget_iterations: training iterations in all, discarded ones and finals included.
        discarded_iterations: iterations after a change of knobs that are not measured.
        measured_iterations: measured iterations of a trial that is not given up early.
        exact: the registry's setting for this very job: run at once, and kept unless the default is clearly faster.
        promise: what that job measured, None = unknown. If the first iterations break it, the link has changed: a short
            search follows, from that setting on.
        seeds: settings of similar jobs; the first proposals.
        given: the user's: the very first one; beside `exact` it is compared with that, too.
        history: an earlier, unfinished session's `trials`; counted into the budget.
        identity: knobs with equal identity are the same setting and not run twice.
        refine: what lies next to the fastest setting is run, too, after the arms have had their trials.
        retune: it is no warm-up: `default` runs already.
    """

    def __init__(
        self,
        *,
        space: KnobSpace,
        default: Knobs,
        arm: Arm | None,
        rng: np.random.Generator,
        budget_iterations: int = 100,
        discarded_iterations: int = 1,
        measured_iterations: int = 2,
        exact: Knobs | None = None,
        promise: Promise | None = None,
        seeds: Sequence[Knobs] = (),
        given: Knobs | None = None,
        history: Sequence[Trial] = (),
        identity: Callable[[Knobs], Hashable] = lambda knobs: knobs,
        refine: bool = True,
        retune: bool = False,
    ) -> None:
        if discarded_iterations < 0 or measured_iterations < 1:
            raise TuningError(
                f"a trial needs at least one measured and no negative number of discarded iterations, "
                f"not {measured_iterations} and {discarded_iterations}"
            )
        self._default, self._arm, self._rng, self._identity = default, arm, rng, identity
        self._iterations, self._spent = budget_iterations, 0
        self._discarded, self._measured = discarded_iterations, measured_iterations
        self._turn = discarded_iterations + measured_iterations  # what a setting takes that did not run before
        self._most_finalists = 3 if budget_iterations >= 60 else 2
        self._refines = refine
        self._ledger = Ledger(identity=identity)
        self._trials: list[Trial] = []
        self._since_best = 0  # trials since the last new best
        self._incumbent: Setting | None = None  # the last new best, at first the default
        self._running = default if retune else None
        self._called = "the setting that ran" if retune else "the default"
        self._exact, self._promise = exact, promise
        self._space, self._seeds, self._given = space, list(seeds), given
        self._has_refused = False
        # No session has more trials than iterations, whatever is claimed.
        self._history = tuple(trial for trial in history[-budget_iterations:] if self._accepts(trial.knobs))
        self._outcome: tuple[Knobs, str] | None = None
        self._script = self._warm_up()
        self._assignment = next(self._script)

    @property
    def assignment(self) -> Assignment:
        """What to run now; after the end, the kept knobs with nothing to measure."""
        return self._assignment

    @property
    def done(self) -> bool:
        """The warm-up is over."""
        return self._outcome is not None

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Every finished trial, in order, the default's among them; another session's `history`."""
        return tuple(self._trials)

    def record(self, spans_s: Sequence[float]) -> None:
        """Takes the measured spans of the current assignment and goes on to the next.

        Args:
            spans_s: seconds, one for each measured iteration, the smallest over the ranks; infinite where the knobs
                could not be run.

        Raises:
            TuningError: there is nothing to record.
        """
        if self.done:
            raise TuningError("the warm-up is over: there is no assignment to record spans for")
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
            logger.debug("warm-up over after %d iterations: %s", self._spent, result.reason)

    @property
    def result(self) -> SessionResult:
        """What was found; before the end, the best so far if it beats the default by more than the noise."""
        knobs, reason = self._outcome or (self._best_so_far(), "the warm-up was cut short")
        setting = self._setting(knobs)
        return SessionResult(
            knobs=knobs,
            default_span_s=self._setting(self._default).span_s,
            best_span_s=setting.span_s,
            noise_s=self._ledger.noise * setting.span_s,
            arm=setting.arm,
            n_trials=len(self._ledger),
            iterations_used=self._spent,
            reason=reason,
            tuned=knobs != self._default,
        )

    @property
    def iterations_at_most(self) -> int:
        """Training iterations until the end, those that have run included, if nothing ends it earlier."""
        return self._iterations

    def begin_search(self, arm: Arm, *, space: KnobSpace, seeds: Sequence[Knobs] = ()) -> None:
        """Goes on from `Purpose.SEARCH`, as if nothing had been found but with what was measured.

        Args:
            arm: proposes; is told what has run so far.
            space: what may be proposed, narrower perhaps than before.
            seeds: settings of similar jobs; the first proposals.

        Raises:
            TuningError: the session has not asked for it.
        """
        if self._assignment.purpose is not Purpose.SEARCH:
            raise TuningError(f"a search begins after {Purpose.SEARCH}, not after {self._assignment.purpose}")
        self._arm, self._space, self._seeds = arm, space, list(seeds)
        self._advance(())

    # ── the course of events ─────────────────────────────────────────────────────────────────────────────────────

    def _warm_up(self) -> _Script:
        if self._exact is not None and self._accepts(self._exact):
            stays, held = yield from self._check(self._exact)
            if held and not self._link_has_changed(self._exact):
                return self._end(stays, held)
            logger.info(
                "the registry's setting for this job %s",
                "holds, but the link has changed: a short search begins there"
                if held
                else "did not hold: a search begins",
            )
            if held:
                self._iterations = min(self._iterations, self._spent + SHORT_SEARCH_ITERATIONS)
            yield Assignment(
                knobs=stays,
                discarded_iterations=0,
                measured_iterations=0,
                arm=REGISTRY_ARM if held else DEFAULT_ARM,
                purpose=Purpose.SEARCH,
            )
            if self._arm is not None:
                self._arm.tell(self._trials)
            self._since_best = 0
        else:
            yield from self._run_default()
        self._take_in(self._history)
        why = yield from self._search()
        if self._for_refinement:
            yield from self._refine()
        field = self._finalists()
        if not field:
            return self._end(self._default, f"nothing came near {self._called}; {why}")
        kept = yield from self._compare(field)
        if kept is None:
            return self._end(self._default, f"no finalist beat {self._called}; {why}")
        return self._end(kept, f"beat {self._called} in alternating iterations; {why}")

    def _end(self, knobs: Knobs, reason: str) -> None:
        self._outcome = knobs, reason

    def _check(self, exact: Knobs) -> Generator[Assignment, Sequence[float], tuple[Knobs, str]]:
        """Runs an earlier job's result in turns with the default, and with the user's plan if there is one.

        Returns:
            What is kept and why; the default and nothing, if neither is.
        """
        given, self._given = self._given, None
        arms = {exact: REGISTRY_ARM}
        if given is not None and self._accepts(given) and not self._same(given, exact):
            arms[given] = PLAN_ARM
        field = [knobs for knobs in arms if not self._same(knobs, self._default)]
        default_was_best = exact, "the registry knows the default as the best for this job"
        if not field:
            yield from self._run_default()
            return default_was_best
        # An earlier job's winner is proved already, and goes only if clearly slower.
        kept = yield from self._compare(
            field,
            arms=arms,
            max_rounds=MAX_EXACT_ROUNDS,
            max_turn_iterations=2 * self._measured,
            doubt=CLEAR if exact in field else 0.0,
        )
        self._finish(Proposal(arm=DEFAULT_ARM, knobs=self._default))
        if kept is not None:
            whose = "the registry's setting for this job" if kept == exact else "the plan that was given"
            return kept, f"{whose}, checked against the default"
        return (self._default, "") if exact in field else default_was_best

    def _link_has_changed(self, exact: Knobs) -> bool:
        """Whether this job's first iterations are not like those of the job that `exact` is of."""
        setting, default = self._setting(exact), self._setting(self._default)
        return self._promise is not None and self._promise.broken_by(setting, default, noise=self._ledger.noise)

    # ── the search ───────────────────────────────────────────────────────────────────────────────────────────────

    def _search(self) -> Generator[Assignment, Sequence[float], str]:
        """Runs trials until the budget, the patience or the proposals end; says which."""
        patience = max(8, self._iterations // (4 * self._turn))
        while True:
            if self._left_for_trials - self._for_refinement < self._discarded + 1:
                return f"budget of {self._iterations} iterations used"
            if self._since_best >= patience:
                expected = opinion(self._arm, "expected_improvement")
                if expected is not None and expected < WORTHWHILE:
                    return f"no new best in {self._since_best} trials"
            proposal = self._next_proposal()
            if proposal is None:
                return "nothing left to propose"
            yield from self._race(proposal)

    def _refine(self) -> _Script:
        """Runs what lies next to the fastest setting, until nothing new does or the iterations for trials are used."""
        while self._left_for_trials > self._discarded:
            tried = [setting.knobs for setting in self._ledger.ranked()]
            beside = untried(tried[0], self._space, tried) if tried else iter(())
            knobs = next((one for one in beside if self._accepts(one) and self._ledger.find(one) is None), None)
            if knobs is None:
                return
            yield from self._race(Proposal(arm=REFINEMENT_ARM, knobs=knobs, reason="next to the fastest"))

    def _race(self, proposal: Proposal) -> _Script:
        """A trial: measures a proposal as often as it takes to tell it from the best."""
        wanted = proposal.iterations or self._measured
        rival = next((best for best in self._ledger.ranked() if not self._same(best.knobs, proposal.knobs)), None)
        while True:
            yield from self._run(proposal.knobs, arm=proposal.arm, purpose=Purpose.TRIAL, measured=1)
            setting = self._setting(proposal.knobs)
            enough = len(setting.spans_s) >= wanted
            lead = self._ledger.lead(setting, rival) if rival else 0.0
            hopeless = setting.failed or lead < -PROMISING
            undecided = rival is not None and 0.0 <= lead <= CLEAR and len(setting.spans_s) < 2 * wanted
            if hopeless or (enough and not undecided) or self._left_for_trials < 1:
                break
        self._finish(proposal)

    def _next_proposal(self) -> Proposal | None:
        """The next proposal that is worth running; the arm is told at once what is known of the others."""
        for _ in range(MAX_RETRIES):
            given, self._given = self._given, None
            if given is not None:
                proposal = Proposal(arm=PLAN_ARM, knobs=given, reason="the plan that was given")
            elif self._seeds:
                proposal = Proposal(arm=REGISTRY_ARM, knobs=self._seeds.pop(0), reason="a similar job's")
            elif self._arm is not None and (asked := self._arm.ask(1)):
                proposal = asked[0]
            else:
                break
            if not self._accepts(proposal.knobs):
                refused = Setting(knobs=proposal.knobs, arm=proposal.arm)
                self._tell(refused.as_trial(proposal, status=TrialStatus.FAILED))
                continue
            known = self._ledger.find(proposal.knobs)
            if known is None or (not known.failed and (proposal.iterations or 0) > len(known.spans_s)):
                return proposal
            self._tell(known.as_trial(proposal))
        return self._overlooked()

    def _overlooked(self) -> Proposal | None:
        """Where there are few settings in all: one that nobody has proposed; to try it costs less than to doubt."""
        lattice = KnobLattice(self._space)
        if len(lattice) > MOST_POINTS:
            return None
        distinct = {self._identity(knobs): knobs for knobs in lattice.points if self._accepts(knobs)}
        left = (knobs for knobs in distinct.values() if self._ledger.find(knobs) is None)
        knobs = next(left, None) if len(distinct) <= FEW else None
        return None if knobs is None else Proposal(arm=REFINEMENT_ARM, knobs=knobs, reason="nobody has proposed it")

    def _accepts(self, knobs: Knobs) -> bool:
        """Whether these knobs can be run here; what similar jobs, histories and arms propose may be anything."""
        try:
            if knobs in self._space:
                self._identity(knobs)
                return True
            why = f"outside the permitted space: {knobs.describe()}"
        except Exception as err:
            why = f"that do not fit this job: {err}"
        logger.log(logging.DEBUG if self._has_refused else logging.WARNING, "refused knobs %s", why)
        self._has_refused = True
        return False

    # ── the final comparison ─────────────────────────────────────────────────────────────────────────────────────

    def _finalists(self) -> list[Knobs]:
        """The fastest settings and those with the best surrogate's estimate, in turns, but none that is hopeless."""
        ranked = self._ledger.ranked()
        rivals = [
            setting.knobs
            for setting in ranked
            if not self._same(setting.knobs, self._default) and self._ledger.lead(setting, ranked[0]) > -HOPELESS
        ]
        in_turns = zip(rivals, sorted(rivals, key=self._believed_s), strict=True)
        field = list(dict.fromkeys(knobs for pair in in_turns for knobs in pair))
        affordable = self._left // self._turn - 1  # beside the default
        return field[: max(1, min(self._most_finalists, affordable))]

    def _compare(
        self,
        field: list[Knobs],
        *,
        arms: Mapping[Knobs, str] = {},
        max_rounds: int = MAX_ROUNDS,
        max_turn_iterations: int = MAX_TURN_ITERATIONS,
        doubt: float = 0.0,
    ) -> Generator[Assignment, Sequence[float], Knobs | None]:
        """Rounds of all finalists and the default in random order; the one that is kept, None = the default stays.

        After each round the slower half leaves, by all that was measured of it; where it is noisy the last two stay
        until they are told apart or the budget ends. The default pauses while the duel with it is clear.

        Args:
            field: the finalists, the favourite first.
            arms: whose trials settings are that have not run before.
            max_rounds: after so many the leader is taken.
            max_turn_iterations: measured iterations of one turn at most.
            doubt: the lead that the default must have to stay.
        """
        ledger, default = self._ledger, self._default
        duel = Ledger(identity=self._identity)
        with_default = True
        for number in range(max_rounds):
            noisy = ledger.noise > NOISY
            measured = min(max_turn_iterations, self._turn_iterations(field, with_default, noisy))
            running = field + [default] * with_default
            turns = self._rng.permutation(len(running)).tolist()
            # At first the favourite: it may be kept for good.
            for i in turns if number else sorted(turns, key=bool):
                knobs = running[i]
                who = DEFAULT_ARM if knobs == default else arms.get(knobs) or self._setting(knobs).arm
                spans_s = yield from self._run(knobs, arm=who, purpose=Purpose.FINALS, measured=measured)
                duel.add(knobs, arm=who, spans_s=spans_s)
            for knobs in field:
                self._finish(Proposal(arm=arms.get(knobs, FINALS_ARM), knobs=knobs))
            stay = max((len(field) + 1) // 2, 2 if noisy else 1)
            field = sorted(field, key=self._believed_s)[:stay]
            best = self._setting(field[0])
            field = [
                knobs
                for knobs in field
                if knobs == best.knobs or ledger.at_stake(best, self._setting(knobs)) > INDIFFERENT
            ]
            lead = duel.lead(duel[best.knobs], duel[default])
            with_default = abs(lead) < CLEAR
            n_running = len(field) + with_default
            if n_running == 1 or lead <= -CLEAR or n_running * self._turn > self._left:
                break
        return best.knobs if lead > -doubt else None

    def _turn_iterations(self, field: list[Knobs], with_default: bool, noisy: bool) -> int:
        """Measured iterations of one turn in the finals: where it is noisy, all that rounds to come leave."""
        if not noisy:
            return self._measured
        beaten = self._ledger.lead(self._setting(field[0]), self._setting(self._default)) > CLEAR
        halvings = len(field).bit_length() - (len(field) == 2)
        rounds = max(1, halvings - beaten)  # and a duel if it is open
        return max(self._measured, self._left // ((len(field) + with_default) * rounds) - self._discarded)

    # ── the budget ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _left(self) -> int:
        return self._iterations - self._spent

    @property
    def _left_for_trials(self) -> int:
        """The others are kept for the finals, the more the noisier it is; negative where they are used already."""
        share = min(max(RESERVE_PER_NOISE * (self._ledger.noise - QUIET), MIN_RESERVE), MAX_RESERVE)
        return self._left - max(2 * self._turn, round(share * self._iterations))

    @property
    def _for_refinement(self) -> int:
        """Iterations for neighbours of the fastest setting, of those for trials: none where noise hides them."""
        worthwhile = self._refines and self._ledger.noise <= NOISY and self._iterations >= SHORT
        return round(REFINEMENT * self._iterations) if worthwhile else 0

    # ── what runs, and what was measured ─────────────────────────────────────────────────────────────────────────

    def _run(
        self, knobs: Knobs, *, arm: str, purpose: Purpose, measured: int
    ) -> Generator[Assignment, Sequence[float], Sequence[float]]:
        """Has a setting measured; its spans."""
        discarded = 0 if self._running == knobs else self._discarded
        spans_s = yield Assignment(
            knobs=knobs, discarded_iterations=discarded, measured_iterations=measured, arm=arm, purpose=purpose
        )
        self._spent += discarded + len(spans_s)
        self._running = knobs
        self._ledger.add(knobs, arm=arm, spans_s=spans_s)
        return spans_s

    def _run_default(self) -> _Script:
        yield from self._run(self._default, arm=DEFAULT_ARM, purpose=Purpose.DEFAULT, measured=self._measured)
        self._finish(Proposal(arm=DEFAULT_ARM, knobs=self._default))

    def _finish(self, proposal: Proposal) -> None:
        """Closes the books on a setting that has run, and tells the arm."""
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

    def _tell(self, trial: Trial) -> None:
        if self._arm is not None:
            self._arm.tell([trial])

    def _take_in(self, history: Sequence[Trial]) -> None:
        """Takes in an earlier session's trials, scaled by what the default took then and takes now."""
        before = [trial.span_s for trial in history if self._same(trial.knobs, self._default)]
        scale = self._setting(self._default).span_s / before[-1] if before else 1.0
        scale = scale if 0.0 < scale < math.inf else 1.0
        latest = {self._identity(trial.knobs): trial for trial in history}  # holds all its measurements
        proposers = {self._identity(trial.knobs): trial.arm for trial in reversed(history)}  # the first of each
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
            self._incumbent = best  # who beats only the default has not found a new best
        self._spent = min(self._spent, max(self._iterations - 4 * self._turn, self._turn))

    def _setting(self, knobs: Knobs) -> Setting:
        """What was measured of these knobs, perhaps nothing."""
        return self._ledger.find(knobs) or Setting(knobs=knobs, arm=DEFAULT_ARM)

    def _believed_s(self, knobs: Knobs) -> float:
        """What a setting truly takes by the arm's surrogate, which knows its neighbours; as measured if unknown."""
        belief = opinion(self._arm, "expected_span_s", knobs)
        return self._setting(knobs).span_s if belief is None else belief

    def _best_so_far(self) -> Knobs:
        """The fastest, if it leads the default by more than the noise: of many settings one is fast by luck.

        What similar jobs have found was named beforehand, not picked for its luck: for that any lead will do.
        """
        ranked, default = self._ledger.ranked(), self._setting(self._default)
        if ranked and self._ledger.lead(ranked[0], default) > 1.0:
            return ranked[0].knobs
        named = next((setting for setting in ranked if setting.arm == REGISTRY_ARM), None)
        if named is not None and self._ledger.lead(named, default) > 0.0:
            return named.knobs
        return self._default

    def _same(self, first: Knobs, second: Knobs) -> bool:
        return self._identity(first) == self._identity(second)
