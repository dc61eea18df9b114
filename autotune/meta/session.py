"""A tuning session: the default first, then the search, then the final comparison."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sirtaki.errors import TuningError

from ..arms.base import Arm, Nobody
from ..knobs import Knobs, KnobSpace
from ..trial import Proposal, Trial
from .search import Proposals, Search
from .trials import (
    CLEAR,
    DEFAULT_ARM,
    FINALS_ARM,
    NOISY,
    PLAN_ARM,
    REGISTRY_ARM,
    Assignment,
    Budget,
    Ledger,
    Promise,
    Purpose,
    SessionResult,
    Trials,
)

INDIFFERENT = 0.001  # share of the span that may be lost by not comparing any further
HOPELESS = 3.0  # standard errors behind the fastest at which a setting has no place in the finals


def finalists(trials: Trials, *, most: int) -> list[Knobs]:
    """The fastest settings and those with the best surrogate's estimate, in turns, but none that is hopeless."""
    ledger, budget = trials.ledger, trials.budget
    ranked = ledger.ranked()
    rivals = [
        setting.knobs
        for setting in ranked
        if not trials.same(setting.knobs, trials.default) and ledger.lead(setting, ranked[0]) > -HOPELESS
    ]
    in_turns = zip(rivals, sorted(rivals, key=trials.believed_s), strict=True)
    field = list(dict.fromkeys(knobs for pair in in_turns for knobs in pair))
    affordable = budget.left // budget.turn - 1  # beside the default
    return field[: max(1, min(most, affordable))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finals:
    """How they are held.

    Attributes:
        trials: what has run, and runs here.
        rng: the order of turns.
        arms: whose trials settings are that have not run before.
        max_rounds: after so many the leader is taken.
        max_turn_iterations: measured iterations of one turn at most.
        doubt: the lead that the default must have to stay; an earlier job's winner is proved already and goes only if
            clearly slower.
    """

    trials: Trials
    rng: np.random.Generator
    arms: Mapping[Knobs, str] = field(default_factory=dict)
    max_rounds: int = 8
    max_turn_iterations: int = 12
    doubt: float = 0.0

    def run(self, field: list[Knobs]) -> Generator[Assignment, Sequence[float], Knobs | None]:
        """Rounds of all finalists and the default in random order; the one that is kept, None = the default stays.

        After each round the slower half leaves, by all that was measured of it; where it is noisy the last two stay
        until they are told apart or the budget ends. The default pauses while the duel with it is clear.
        """
        trials, ledger, budget = self.trials, self.trials.ledger, self.trials.budget
        duel = Ledger(identity=trials.identity)
        with_default = True
        for number in range(self.max_rounds):
            noisy = ledger.noise > NOISY
            measured = self._turn_iterations(field, with_default, noisy)
            yield from self._round(field, duel, with_default=with_default, measured=measured, first=number == 0)
            stay = max((len(field) + 1) // 2, 2 if noisy else 1)
            field = sorted(field, key=trials.believed_s)[:stay]
            best = trials.setting(field[0])
            field = [
                knobs
                for knobs in field
                if knobs == best.knobs or ledger.at_stake(best, trials.setting(knobs)) > INDIFFERENT
            ]
            lead = duel.lead(duel[best.knobs], duel[trials.default])
            with_default = abs(lead) < CLEAR
            n_running = len(field) + with_default
            if n_running == 1 or lead <= -CLEAR or n_running * budget.turn > budget.left:
                break
        return best.knobs if lead > -self.doubt else None

    def _turn_iterations(self, field: list[Knobs], with_default: bool, noisy: bool) -> int:
        trials, ledger = self.trials, self.trials.ledger
        beaten = ledger.lead(trials.setting(field[0]), trials.setting(trials.default)) > CLEAR
        halvings = len(field).bit_length() - (noisy and len(field) == 2)
        rounds = max(1, halvings - beaten)  # and a duel if it is open
        longest = trials.budget.turn_iterations(ledger.noise, field=len(field) + with_default, rounds=rounds)
        return min(self.max_turn_iterations, longest)

    def _round(
        self, finalists: list[Knobs], duel: Ledger, *, with_default: bool, measured: int, first: bool
    ) -> Generator[Assignment, Sequence[float], None]:
        trials = self.trials
        field = finalists + [trials.default] * with_default
        turns = self.rng.permutation(len(field)).tolist()
        for i in sorted(turns, key=bool) if first else turns:  # at first the favourite: it may be kept for good
            knobs = field[i]
            known = DEFAULT_ARM if knobs == trials.default else self.arms.get(knobs)
            who = known or trials.setting(knobs).arm
            spans_s = yield from trials.run(knobs, arm=who, purpose=Purpose.FINALS, measured=measured)
            duel.add(knobs, arm=who, spans_s=spans_s)
        for knobs in finalists:
            trials.finish(Proposal(arm=self.arms.get(knobs, FINALS_ARM), knobs=knobs))


logger = logging.getLogger(__name__)

MAX_EXACT_ROUNDS = 3  # that a remembered setting gets to beat the default
SHORT_SEARCH_ITERATIONS = 40  # from a setting that is good, but was found on another link

_Script = Generator[Assignment, Sequence[float], None]


class WarmupSession:
    """Spends a budget of iterations on finding the best knobs.

    Args:
        space: proposals outside it are refused.
        default: the untuned setting, measured first; what stays if nothing beats it. In a re-tune, the one that runs.
        arm: proposes; told every trial. None = nobody, until `begin_search`; only with `exact`.
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
        self._default, self._rng = default, rng
        self._budget = Budget(
            iterations=budget_iterations, discarded=discarded_iterations, measured=measured_iterations
        )
        self._trials = Trials(
            default=default,
            budget=self._budget,
            identity=identity,
            arm=arm or Nobody(),
            running=default if retune else None,
        )
        self._called = "the setting that ran" if retune else "the default"
        self._exact, self._promise = exact, promise
        self._proposals = Proposals(self._trials, space=space, seeds=seeds, given=given)
        # No session has more trials than iterations, whatever is claimed.
        self._history = tuple(trial for trial in history[-budget_iterations:] if self._proposals.accepts(trial.knobs))
        self._most_finalists = 3 if budget_iterations >= 60 else 2
        self._refines = refine
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
        return tuple(self._trials.all)

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
            logger.debug("warm-up over after %d iterations: %s", self._budget.spent, result.reason)

    @property
    def result(self) -> SessionResult:
        """What was found; before the end, the best so far if it beats the default by more than the noise."""
        knobs, reason = self._outcome or (self._trials.best_so_far(), "the warm-up was cut short")
        setting = self._trials.setting(knobs)
        return SessionResult(
            knobs=knobs,
            default_span_s=self._trials.setting(self._default).span_s,
            best_span_s=setting.span_s,
            noise_s=self._trials.ledger.noise * setting.span_s,
            arm=setting.arm,
            n_trials=len(self._trials.ledger),
            iterations_used=self._budget.spent,
            reason=reason,
            tuned=knobs != self._default,
        )

    @property
    def iterations_at_most(self) -> int:
        """Training iterations until the end, those that have run included, if nothing ends it earlier."""
        return self._budget.iterations

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
        self._trials.arm = arm
        self._proposals.space, self._proposals.seeds = space, list(seeds)
        self._advance(())

    # The course of events.

    def _warm_up(self) -> _Script:
        exact = self._exact if self._exact is not None and self._proposals.accepts(self._exact) else None
        if exact is not None:
            stays, held = yield from self._check(exact)
            changed = self._link_has_changed(exact)
            if held and not changed:
                return self._end(stays, held)
            logger.info(
                "the registry's setting for this job %s",
                "holds, but the link has changed: a short search begins there"
                if held
                else "did not hold: a search begins",
            )
            if held:
                self._budget.iterations = min(self._budget.iterations, self._budget.spent + SHORT_SEARCH_ITERATIONS)
            yield Assignment(
                knobs=stays,
                discarded_iterations=0,
                measured_iterations=0,
                arm=REGISTRY_ARM if held else DEFAULT_ARM,
                purpose=Purpose.SEARCH,
            )
            self._trials.arm.tell(self._trials.all)
            self._trials.since_best = 0
        else:
            yield from self._trials.run_default()
        self._trials.take_in(self._history)
        search = Search(trials=self._trials, proposals=self._proposals)
        why = yield from search.run(for_refinement=self._for_refinement)
        if self._for_refinement:
            yield from search.refine()
        field = finalists(self._trials, most=self._most_finalists)
        if not field:
            return self._end(self._default, f"nothing came near {self._called}; {why}")
        kept = yield from Finals(trials=self._trials, rng=self._rng).run(field)
        if kept is None:
            return self._end(self._default, f"no finalist beat {self._called}; {why}")
        return self._end(kept, f"beat {self._called} in alternating iterations; {why}")

    def _check(self, exact: Knobs) -> Generator[Assignment, Sequence[float], tuple[Knobs, str]]:
        """Runs an earlier job's result in turns with the default, and with the user's plan if there is one.

        Returns:
            What is kept and why; the default and nothing, if neither is.
        """
        given, self._proposals.given = self._proposals.given, None
        arms = {exact: REGISTRY_ARM}
        if given is not None and self._proposals.accepts(given) and not self._trials.same(given, exact):
            arms[given] = PLAN_ARM
        field = [knobs for knobs in arms if not self._trials.same(knobs, self._default)]
        if not field:
            yield from self._trials.run_default()
            return exact, "the registry knows the default as the best for this job"
        finals = Finals(
            trials=self._trials,
            rng=self._rng,
            arms=arms,
            max_rounds=MAX_EXACT_ROUNDS,
            max_turn_iterations=2 * self._budget.measured,
            doubt=CLEAR if exact in field else 0.0,
        )
        kept = yield from finals.run(field)
        self._trials.finish(Proposal(arm=DEFAULT_ARM, knobs=self._default))
        if kept is not None:
            whose = "the registry's setting for this job" if kept == exact else "the plan that was given"
            return kept, f"{whose}, checked against the default"
        if exact not in field:
            return exact, "the registry knows the default as the best for this job"
        return self._default, ""

    def _link_has_changed(self, exact: Knobs) -> bool:
        """Whether this job's first iterations are not like those of the job that `exact` is of."""
        if self._promise is None:
            return False
        setting, default = self._trials.setting(exact), self._trials.setting(self._default)
        return self._promise.broken_by(setting, default, noise=self._trials.ledger.noise)

    @property
    def _for_refinement(self) -> int:
        return self._budget.for_refinement(self._trials.ledger.noise) if self._refines else 0

    def _end(self, knobs: Knobs, reason: str) -> None:
        self._outcome = knobs, reason
