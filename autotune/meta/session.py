"""A tuning session: the default first, then the search, then the final comparison."""

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

DEFAULT_ARM = "default"  # whose trial the untuned default is
REGISTRY_ARM = "registry"  # whose trials remembered settings are
PLAN_ARM = "plan"  # whose trial a plan is that the user has given
REFINEMENT_ARM = "refinement"  # whose trials the neighbours of the fastest setting are
DRAW_ARM = "random draw"  # whose trials settings are that planners learn contention from
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
class Assignment(Generic[S]):
    """What to run now.

    Attributes:
        knobs: the setting.
        discarded_iterations: iterations to run first and not to measure; 0 where the knobs are running already.
        measured_iterations: iterations to measure then; 0 once the warm-up is over, or where nothing is run.
        arm: who proposed it.
        purpose: why it is run.
    """

    knobs: S
    discarded_iterations: int
    measured_iterations: int
    arm: str
    purpose: Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult(Generic[S]):
    """What the warm-up found, or has found so far.

    Attributes:
        knobs: the setting to keep.
        default_span_s: span of the untuned default; infinite if not measured yet.
        best_span_s: span of `knobs`; where a gain is proved, what that makes of the default's.
        noise_s: standard deviation of one measured span of `knobs`.
        arm: who proposed `knobs`.
        n_trials: settings that were measured, the default among them.
        iterations_used: training iterations spent, discarded ones included.
        reason: why it ended so, in words.
        tuned: `knobs` are not the untuned default.
        gain: of `knobs` over the default, proved in paired turns; None where the default stays, and before the end.
        doubt: why the default stays although something seemed to be faster: the host is shared, or the default drifts.
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


CLEAR = 2.0  # standard errors between two settings that are told apart
PRIOR_NOISE = 0.05  # what a network's spans usually scatter, until this one's has been seen
_PRIOR_WEIGHT = 3  # in repeated measurements
_OUTLIER = 2.5  # standard deviations from which on a difference counts as no larger


@dataclass(slots=True, kw_only=True)
class Setting(Generic[S]):
    """One setting's measurements.

    Attributes:
        knobs: the setting.
        arm: who proposed it first.
        spans_s: all its measured spans, `(n_measured,)`; infinite where it could not be run.
    """

    knobs: S
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
        self, proposal: Proposal[S], *, status: TrialStatus = TrialStatus.COMPLETE, was_best: bool = False
    ) -> Trial[S]:
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


class Ledger(Generic[S]):
    """All settings measured so far, and the noise of one measurement.

    Args:
        identity: knobs with equal identity are one setting (say, because they expand to the same plan).
    """

    def __init__(self, *, identity: Callable[[S], Hashable]) -> None:
        self._identity = identity
        self._settings: dict[Hashable, Setting[S]] = {}
        self._differences: list[float] = []

    def __len__(self) -> int:
        return len(self._settings)

    def __getitem__(self, knobs: S) -> Setting[S]:
        return self._settings[self._identity(knobs)]

    def find(self, knobs: S) -> Setting[S] | None:
        """The setting that these knobs stand for, if it has been measured."""
        return self._settings.get(self._identity(knobs))

    def add(self, knobs: S, *, arm: str, spans_s: Sequence[float], repeats: bool = True) -> Setting[S]:
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

    def ranked(self) -> list[Setting[S]]:
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

    def at_stake(self, first: Setting[S], second: Setting[S]) -> float:
        """Share of the span that is lost on average by taking `first` for the faster one, as it seems to be."""
        if math.isinf(first.span_s) or math.isinf(second.span_s):
            return 0.0
        error, lead = self._error(first, second), math.log(second.span_s / first.span_s)
        luck = statistics.NormalDist()
        return error * luck.pdf(lead / error) - lead * luck.cdf(-lead / error)

    def _error(self, first: Setting[S], second: Setting[S]) -> float:
        """Standard error of the difference between two settings' logarithms."""
        return self.noise * math.sqrt(1.0 / len(first.spans_s) + 1.0 / len(second.spans_s))

    def sure_lead(self, first: Setting[S], second: Setting[S]) -> float:
        """Logarithm of how much faster `first` is, less what luck usually gives to the fastest of several."""
        return math.log(second.span_s / first.span_s) - self._error(first, second)

    def lead(self, first: Setting[S], second: Setting[S]) -> float:
        """By how many standard errors `first` is faster than `second`; negative if it is slower."""
        if math.isinf(first.span_s) or math.isinf(second.span_s):
            return 0.0 if first.span_s == second.span_s else math.copysign(math.inf, second.span_s - first.span_s)
        return math.log(second.span_s / first.span_s) / self._error(first, second)


# ── what proves a gain ───────────────────────────────────────────────────────────────────────────────────────────────

MOST_PAIRS = 24
MOST_PAIRS_OF_CHECK = 8  # for a remembered setting; a search follows, in which it takes part
ENOUGH_PAIRS = 8  # budget for a proof of a setting with a compressor

OTHER_GAIN = 1.25  # how many times as large or as small a gain may be on the same link
USUAL_MEASUREMENTS = 4  # that an earlier job's times rest on


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered(Generic[S]):
    """What an earlier job of the same kind has kept.

    Attributes:
        knobs: the setting.
        best_s: span with the setting.
        default_s: span with the untuned default.
        noise: standard deviation of one measured span, as a share of it.
        gain: that was proved; None where the default was kept, or by a release that proved nothing.
        other_times: how many times as much or as little time both may take on the same link.
    """

    knobs: S
    best_s: float
    default_s: float
    noise: float = 0.0
    gain: Gain | None = None
    other_times: float = 1.5

    def broken_by(self, best: Setting[S], default: Setting[S], *, noise: float) -> bool:
        """Return whether the link is clearly another one than it was.

        Args:
            best: what was measured of the setting here.
            default: of the default; the same object where that is the setting.
            noise: of one measured span here, as a share.
        """
        ratios = best.span_s / self.best_s, default.span_s / self.default_s
        if not all(0.0 < ratio < math.inf for ratio in ratios):
            return False
        then = self.noise / math.sqrt(USUAL_MEASUREMENTS)
        errors = [math.hypot(then, noise / math.sqrt(len(one.spans_s))) for one in (best, default)]
        times = [math.log(ratio) for ratio in ratios]
        least = min(map(abs, times)) if times[0] * times[1] > 0.0 else 0.0
        if least - CLEAR * max(errors) > math.log(self.other_times):
            return True
        gained = abs(times[0] - times[1]) if best is not default else 0.0
        return gained - CLEAR * math.hypot(*errors) > math.log(OTHER_GAIN)


PROOF = 1.5
"""Iterations of the final comparison, as a share of the budget of the search, in addition to it. Pairs of two fast
settings cost a job next to nothing, whereas a fast setting that is not proved is lost."""

REFINEMENT = 0.12  # share of the budget that is for neighbours of the fastest setting
SHORT = 60  # iterations below which trials are too few to spend some on neighbours
NOISY = 0.06  # noise from which on neighbours cannot be told apart

MAX_RETRIES = 8  # proposals in a row that need not be run, until the arm is taken to have run dry
FEW = 16  # settings that are all tried: those of a model of a unit or two, where most knobs come to the same

PROMISING = 1.0  # standard errors behind the best at which a setting is not measured again
WORTHWHILE = 0.001  # the share of the span that must be in reach to go on searching

INDIFFERENT = 0.001  # share of the span that may be lost by not comparing any further
DOUBTFUL = 0.1  # gain that noise may hide in a search that asks for a least gain, before its result is in doubt
HOPELESS = 3.0  # standard errors behind the fastest at which a setting has no place in the finals
MAX_ROUNDS = 8  # of the finals
SHORT_SEARCH_ITERATIONS = 40  # from a setting that is good, but was found on another link

_Script = Generator[Assignment[S], Sequence[float], None]
"""Yields what is to run, and is sent the measured spans."""


def _seeds(similar: Sequence[S], draws: Sequence[S]) -> list[Proposal[S]]:
    return [
        *(Proposal(arm=REGISTRY_ARM, knobs=knobs, reason="a similar job's") for knobs in similar),
        *(Proposal(arm=DRAW_ARM, knobs=knobs, reason="to learn contention") for knobs in draws),
    ]


class TuningSession(Generic[S]):
    """A search for the fastest setting within a budget of iterations. Runs on rank 0.

    Args:
        space: proposals outside it are refused.
        default: the untuned setting, measured first; what stays if nothing beats it. In a re-tune, the one that runs.
        arm: proposes; told every trial. None = nobody, until `begin_search`.
        rng: the order in which finalists are run.
        budget_iterations: training iterations in all, discarded ones and finals included.
        discarded_iterations: iterations after a change of knobs that are not measured.
        measured_iterations: measured iterations of a trial that is not given up early.
        exact: the registry's setting for this very job, run at once in paired turns with the default: it is kept if it
            is faster, and proved now or by that job. If the link has changed, a short search follows, from there on.
        seeds: settings of similar jobs; the first proposals.
        draws: settings from which something is to be learnt before the arm is asked; the next ones (`skip_draws`).
        given: the user's: the very first one; beside `exact` it is compared with that, too.
        history: an earlier, unfinished session's `trials`; counted into the budget.
        identity: knobs with equal identity are the same setting and not run twice.
        refine: what lies next to the fastest setting is run, too, after the arms have had their trials.
        retune: it is no warm-up: `default` runs already.
        least_gain: share that a setting must gain over the default to be kept.
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
                f"a trial needs at least one measured and no negative number of discarded iterations, "
                f"not {measured_iterations} and {discarded_iterations}"
            )
        self._default, self._arm, self._rng, self._identity = default, arm, rng, identity
        self._iterations, self._spent = budget_iterations, 0
        self._for_proof = 0  # iterations beyond the budget
        self._discarded, self._measured = discarded_iterations, measured_iterations
        self._turn = discarded_iterations + measured_iterations  # what a setting takes that did not run before
        self._most_finalists = 3 if budget_iterations >= 60 else 2
        self._refines, self._least_gain = refine, least_gain
        self._ledger = Ledger(identity=identity)
        self._trials: list[Trial[S]] = []
        self._since_best = 0  # trials since the last new best
        self._incumbent: Setting[S] | None = None  # the last new best, at first the default
        self._running = default if retune else None
        self._called = "the setting that ran" if retune else "the default"
        self._exact = exact
        self._space, self._given = space, given
        self._seeds = _seeds(seeds, draws)
        self._has_refused = False
        # No session has more trials than iterations, whatever is claimed.
        self._history = tuple(trial for trial in history[-budget_iterations:] if self._accepts(trial.knobs))
        self._outcome: tuple[S, str, Gain | None] | None = None
        self._doubt = ""
        self._script = self._warm_up()
        self._assignment = next(self._script)

    @property
    def assignment(self) -> Assignment[S]:
        """What to run now; after the end, the kept knobs with nothing to measure."""
        return self._assignment

    @property
    def done(self) -> bool:
        """The warm-up is over."""
        return self._outcome is not None

    @property
    def trials(self) -> tuple[Trial[S], ...]:
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
    def result(self) -> SessionResult[S]:
        """What was found; before the end, the best so far if it beats the default by more than the noise."""
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
        """Training iterations until the end, those that have run included, if nothing ends it earlier."""
        return self._iterations + round(PROOF * self._iterations)

    def begin_search(self, arm: Arm[S], *, space: Space[S], seeds: Sequence[S] = (), draws: Sequence[S] = ()) -> None:
        """Goes on from `Purpose.SEARCH`, as if nothing had been found but with what was measured.

        Args:
            arm: proposes; is told what has run so far.
            space: what may be proposed, narrower perhaps than before.
            seeds: settings of similar jobs; the first proposals.
            draws: as at the beginning.

        Raises:
            TuningError: the session has not asked for it.
        """
        if self._assignment.purpose is not Purpose.SEARCH:
            raise TuningError(f"a search begins after {Purpose.SEARCH}, not after {self._assignment.purpose}")
        self._arm, self._space, self._seeds = arm, space, _seeds(seeds, draws)
        self._advance(())

    def skip_draws(self) -> None:
        """Those that have not run would teach nothing."""
        self._seeds = [proposal for proposal in self._seeds if proposal.arm != DRAW_ARM]

    # ── the course of events ─────────────────────────────────────────────────────────────────────────────────────

    def _warm_up(self) -> _Script[S]:
        if self._exact is not None and self._accepts(self._exact.knobs):
            held = yield from self._check(self._exact)
            if held and not self._link_has_changed(self._exact):
                return
            logger.info(
                "the registry's setting for this job %s",
                "holds, but the link has changed: a short search begins there"
                if held
                else "did not hold: a search begins",
            )
            stays = self._outcome[0] if self._outcome else self._default
            self._outcome = None
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
        kept, gain, verdict = yield from self._prove(self._default, self._called, lossy=False)
        if self._setting(self._default).failed:
            return self._end(kept, f"{verdict}; {why}")
        if any(self._loses(setting.knobs) for setting in self._ledger.ranked()):
            doubt = self._doubt
            rival = self._called if kept == self._default else "the fastest that loses nothing"
            found, more, told = yield from self._prove(kept, rival, lossy=True)
            if more is not None:
                whole = more if gain is None else more.after(gain)
                return self._end(found, f"{told}; {why}", whole)
            self._doubt = doubt or (self._doubt if gain is None else "")
        return self._end(kept, f"{verdict}; {why}", gain)

    def _prove(
        self, base: S, called: str, *, lossy: bool
    ) -> Generator[Assignment[S], Sequence[float], tuple[S, Gain | None, str]]:
        """The fastest of those settings that lose something, or nothing, if paired turns prove it faster than `base`.

        Returns:
            What is kept, the gain over `base` that is proved, and the verdict in words.
        """
        self._for_proof = round(PROOF * self._iterations)
        kept, gain, verdict = base, None, f"nothing came near {called}"
        beaten: list[S] = []  # by the base, clearly: then another one has its turn
        while (challenger := (yield from self._select(base, beaten, lossy=lossy))) is not None:
            if self._setting(base).failed:
                return challenger, None, f"{called} cannot be run"
            turns = yield from self._compare(challenger, base=base, arm=FINALS_ARM)
            if turns is None:
                verdict = verdict if beaten else "too few iterations are left to prove a gain"
                break
            kept, gain, verdict = self._judge(challenger, turns, base=base, called=called)
            if turns.verdict not in (Verdict.SLOWER, Verdict.FAILED):
                break
            beaten.append(challenger)
        return kept, gain, verdict

    def _end(self, knobs: S, reason: str, gain: Gain | None = None) -> None:
        self._outcome = knobs, reason, gain

    def _check(self, exact: Remembered[S]) -> Generator[Assignment[S], Sequence[float], bool]:
        """Runs an earlier job's result in paired turns with the default, then the user's plan if there is one.

        Returns:
            Whether one of them is kept, or the default, if that is what the earlier job kept.
        """
        given, self._given = self._given, None
        kept: list[tuple[float, S, str, Gain | None]] = []
        if self._same(exact.knobs, self._default):
            yield from self._run_default()
            kept.append((1.0, exact.knobs, "the registry knows the default as the best for this job", None))
        else:
            turns = yield from self._compare(exact.knobs, arm=REGISTRY_ARM, known=exact.gain)
            knobs, gain, verdict = self._judge(exact.knobs, turns)
            if gain is not None:
                kept.append((gain.times, knobs, f"the registry's setting for this job {verdict}", gain))
            if self._ledger.find(self._default) is None:
                yield from self._run_default()
            else:
                self._finish(Proposal(arm=DEFAULT_ARM, knobs=self._default))
        if given is not None and self._accepts(given) and not self._same(given, exact.knobs):
            turns = yield from self._compare(given, arm=PLAN_ARM)
            knobs, gain, verdict = self._judge(given, turns)
            if gain is not None:
                kept.append((gain.times, knobs, f"the plan that was given {verdict}", gain))
        if kept:
            self._end(*max(kept, key=lambda one: one[0])[1:])
        return bool(kept)

    def _link_has_changed(self, exact: Remembered[S]) -> bool:
        """Return whether this job's first iterations are not like those of the job that `exact` is of."""
        best, default = self._setting(exact.knobs), self._setting(self._default)
        return exact.broken_by(best, default, noise=self._ledger.noise)

    # ── the search ───────────────────────────────────────────────────────────────────────────────────────────────

    def _search(self) -> Generator[Assignment[S], Sequence[float], str]:
        """Runs trials until the budget, the patience or the proposals end; says which."""
        patience = max(8, self._iterations // (4 * self._turn))
        while True:
            if self._left - self._for_refinement < self._discarded + 1:
                return f"budget of {self._iterations} steps used"
            if self._since_best >= patience:
                expected = opinion(self._arm, "expected_improvement")
                if expected is not None and expected < WORTHWHILE:
                    return f"no new best in {self._since_best} trials"
            proposal = self._next_proposal()
            if proposal is None:
                return "nothing left to propose"
            yield from self._race(proposal)

    def _refine(self) -> _Script[S]:
        """Runs what lies next to the fastest setting, until nothing new does or the iterations for trials are used."""
        while self._left > self._discarded:
            tried = [setting.knobs for setting in self._ledger.ranked()]
            beside = opinion(self._space, "around", tried[0], tried) if tried else None
            knobs = next((one for one in beside or () if self._accepts(one) and self._ledger.find(one) is None), None)
            if knobs is None:
                return
            yield from self._race(Proposal(arm=REFINEMENT_ARM, knobs=knobs, reason="next to the fastest"))

    def _race(self, proposal: Proposal[S]) -> _Script[S]:
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
            if hopeless or (enough and not undecided) or self._left < 1:
                break
        self._finish(proposal)

    def _next_proposal(self) -> Proposal[S] | None:
        """The next proposal that is worth running; the arm is told at once what is known of the others."""
        for _ in range(MAX_RETRIES):
            given, self._given = self._given, None
            if given is not None:
                proposal = Proposal(arm=PLAN_ARM, knobs=given, reason="the plan that was given")
            elif self._seeds:
                proposal = self._seeds.pop(0)
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

    def _overlooked(self) -> Proposal[S] | None:
        """Where there are few settings in all: one that nobody has proposed; to try it costs less than to doubt."""
        distinct = {
            self._identity(knobs): knobs for knobs in opinion(self._space, "every") or () if self._accepts(knobs)
        }
        left = (knobs for knobs in distinct.values() if self._ledger.find(knobs) is None)
        knobs = next(left, None) if len(distinct) <= FEW else None
        return None if knobs is None else Proposal(arm=REFINEMENT_ARM, knobs=knobs, reason="nobody has proposed it")

    def _accepts(self, knobs: S) -> bool:
        """Return whether these knobs can be run here; what similar jobs, histories and arms propose may be anything."""
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

    def _finalists(self, base: S, beaten: Sequence[S], *, lossy: bool) -> list[S]:
        """The fastest settings and those with the best surrogate's estimate, in turns, but none that is hopeless."""
        ranked = [setting for setting in self._ledger.ranked() if self._loses(setting.knobs) is lossy]
        rivals = [
            setting.knobs
            for setting in ranked
            if not self._same(setting.knobs, base)
            and not (lossy and self._ledger.lead(setting, self._setting(base)) < 0.0)
            and setting.knobs not in beaten
            and self._ledger.lead(setting, ranked[0]) > -HOPELESS
        ]
        in_turns = zip(rivals, sorted(rivals, key=self._believed_s), strict=True)
        return list(dict.fromkeys(knobs for pair in in_turns for knobs in pair))[: self._most_finalists]

    def _select(
        self, base: S, beaten: Sequence[S], *, lossy: bool
    ) -> Generator[Assignment[S], Sequence[float], S | None]:
        """Rounds of the finalists in random order, after each of which the slower half leaves; who remains.

        Of two that cannot be told apart both stay while iterations last that the paired turns do not need.
        """
        field = self._finalists(base, beaten, lossy=lossy)
        for _ in range(MAX_ROUNDS):
            left = self._left - self._for_pairs - (0 if lossy else self._for_lossy)
            if len(field) < 2 or left < len(field) * self._turn:
                break
            for i in self._rng.permutation(len(field)).tolist():
                yield from self._run(
                    field[i], arm=self._setting(field[i]).arm, purpose=Purpose.FINALS, measured=self._measured
                )
                self._finish(Proposal(arm=FINALS_ARM, knobs=field[i]))
            stay = max((len(field) + 1) // 2, 2 if self._ledger.noise > NOISY else 1)
            field = sorted(field, key=self._believed_s)[:stay]
            best = self._setting(field[0])
            rest = [one for one in field[1:] if self._ledger.at_stake(best, self._setting(one)) > INDIFFERENT]
            field = [field[0], *rest]
        return min(field, key=self._believed_s, default=None)

    def _compare(
        self, knobs: S, *, arm: str, known: Gain | None = None, base: S | None = None
    ) -> Generator[Assignment[S], Sequence[float], PairedComparison | None]:
        """Compare a setting with the default in pairs.

        The first look comes after as many pairs as will probably prove the lead seen in the search, the last one after
        as many as the budget allows.

        Args:
            knobs: the setting.
            arm: name of the arm whose trial this is.
            known: gain that an earlier job has proved.
            base: setting to compare with instead of the default.

        Returns:
            The comparison; None if too few iterations are left.
        """
        default, final = base or self._default, arm == FINALS_ARM
        most = MOST_PAIRS if final else MOST_PAIRS_OF_CHECK
        left = self._left - (0 if self._loses(knobs) or not final else self._for_lossy)
        at_most = max((n for n in range(FEWEST_PAIRS, most + 1) if self._for_turns(n) <= left), default=0)
        if final and not at_most:
            return None
        if final:
            wanted = min(self._pairs_wanted(knobs, default), at_most)
        else:  # even if that exceeds the budget
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
        self, knobs: S, pairs: PairedComparison | None, *, base: S | None = None, called: str = ""
    ) -> tuple[S, Gain | None, str]:
        """Return the setting to keep, its proved gain if there is one, and the verdict in words.

        Args:
            knobs: the candidate.
            pairs: its comparison with the baseline.
            base: the baseline; None = the default.
            called: name of the baseline in the verdict.
        """
        base = base or self._default
        if pairs is None or pairs.failed:
            return base, None, "could not be compared"
        against = f"{called or self._called} in {pairs.n_pairs} paired turns"
        self._doubt = pairs.doubt
        if pairs.verdict is Verdict.FASTER:
            return knobs, pairs.pooled, f"beat {against}"
        if self._least_gain and not self._doubt and pairs.gain.high > 1.0 + DOUBTFUL:
            possible = f"a gain of {100 * (pairs.gain.high - 1.0):.0f} % would not show"
            self._doubt = f"measurements scatter so that {possible}: others seem to use the host or the network"
        return base, None, f"nothing was proved to beat {against}" + (self._doubt and f": {self._doubt}")

    def _loses(self, knobs: S) -> bool:
        return bool(opinion(self._space, "loses", knobs))

    # ── the budget ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _left(self) -> int:
        return self._iterations + self._for_proof - self._spent

    def _pairs_wanted(self, knobs: S, base: S | None = None) -> int:
        """Return how many pairs will probably prove the lead of a setting over the default, or over `base`."""
        setting, default = self._setting(knobs), self._setting(base or self._default)
        if not all(0.0 < one.span_s < math.inf for one in (setting, default)):
            return FEWEST_PAIRS
        lead = self._ledger.sure_lead(setting, default)
        return pairs_wanted(lead, self._ledger.noise, most=MOST_PAIRS) if lead > 0.0 else FEWEST_PAIRS

    @property
    def _for_pairs(self) -> int:
        """Iterations that paired turns of the fastest setting will take."""
        ranked = self._ledger.ranked()
        return self._for_turns(self._pairs_wanted(ranked[0].knobs)) if ranked else 0

    @property
    def _for_lossy(self) -> int:
        """Iterations for a proof that compressing is faster than the fastest setting that loses nothing.

        None are kept where no compressed setting is the fastest, nor in a short session, where those that lose nothing
        come first.
        """
        ranked = self._ledger.ranked() if self._iterations >= SHORT else []
        return self._for_turns(ENOUGH_PAIRS) + self._turn if ranked and self._loses(ranked[0].knobs) else 0

    def _for_turns(self, n_pairs: int) -> int:
        """Iterations of so many paired turns, in each of which the setting changes once, and once before them."""
        return self._discarded + n_pairs * (2 + self._discarded)

    @property
    def _for_refinement(self) -> int:
        """Iterations for neighbours of the fastest setting, of those for trials: none where noise hides them."""
        worthwhile = self._refines and self._ledger.noise <= NOISY and self._iterations >= SHORT
        return round(REFINEMENT * self._iterations) if worthwhile else 0

    # ── what runs, and what was measured ─────────────────────────────────────────────────────────────────────────

    def _run(
        self, knobs: S, *, arm: str, purpose: Purpose, measured: int
    ) -> Generator[Assignment[S], Sequence[float], Sequence[float]]:
        """Has a setting measured; its spans."""
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

    def _tell(self, trial: Trial[S]) -> None:
        if self._arm is not None:
            self._arm.tell([trial])

    def _take_in(self, history: Sequence[Trial[S]]) -> None:
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
        left = self._for_turns(FEWEST_PAIRS) + self._turn
        self._spent = min(self._spent, max(self._iterations - left, self._turn))

    def _setting(self, knobs: S) -> Setting[S]:
        """What was measured of these knobs, perhaps nothing."""
        return self._ledger.find(knobs) or Setting(knobs=knobs, arm=DEFAULT_ARM)

    def _believed_s(self, knobs: S) -> float:
        """What a setting truly takes by the arm's surrogate, which knows its neighbours; as measured if unknown."""
        belief = opinion(self._arm, "expected_span_s", knobs)
        return self._setting(knobs).span_s if belief is None else belief

    def _best_so_far(self) -> S:
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

    def _same(self, first: S, second: S) -> bool:
        return self._identity(first) == self._identity(second)
