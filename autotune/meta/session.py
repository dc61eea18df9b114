"""The warm-up: which knobs the job's first iterations run, and which it keeps (docs/explanation/tuning.md).

The session is pure: no process group, file, thread, clock or sleep. It lives on one rank, says what to run
(`assignment`), takes the measured spans (`record`), and that rank tells the others. Its course is written down as one
generator, `_warm_up`, that yields assignments and is sent their spans, so it reads in the order in which it happens:

    default → trials → finals against each other and the default → done

A setting that an earlier job has left for this very job is run first, in turns with the default. If it holds, that is
the end; if it does not, or if the link is not what it was, the session asks for an arm (`Purpose.SEARCH`), so that what
a search needs (probes, planners) is made only then, and begins the usual course.

A trial is a race: it is measured once, given up if it is clearly slower than the best, and measured more often the
closer it comes. More measurements of what runs already cost no discarded iteration. The fastest of many noisy
measurements is fast by luck too. So a share of the budget that grows with the noise is kept for the finals, where the
fastest settings and those that the arms' surrogate believes in run in turns with the default. Each round halves the
field; what remains is kept if it beats the default in what was measured in the finals alone (docs/decisions/0011).
"""

import logging
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from sirtaki.errors import TuningError

from ..arms.base import Arm, expected_improvement, expected_span_s
from ..knobs import Knobs, KnobSpace
from ..trial import Proposal, Trial, TrialStatus
from .assignment import DEFAULT_ARM, REGISTRY_ARM, VERIFY_ARM, Assignment, Purpose, SessionResult
from .ledger import Ledger, Setting

logger = logging.getLogger(__name__)

CLEAR = 2.0  # standard errors between two settings that are told apart
HOPELESS = 3.0  # standard errors behind the fastest at which a setting has no place in the finals
WORTHWHILE = 0.01  # the share of the span that must be in reach to go on searching
MAX_RETRIES = 8  # proposals in a row that need not be run, until the arm is taken to have run dry
MAX_ROUNDS = 8  # of the finals
MAX_EXACT_ROUNDS = 3  # that a remembered setting gets to beat the default
RESERVE_PER_NOISE = 6.0  # share of the budget kept for the finals over the noise, within the bounds below
MIN_RESERVE, MAX_RESERVE = 0.15, 0.6
NOISY = 0.05  # from this noise on, turns in the finals take all the iterations that are left
MAX_TURN_ITERATIONS = 12
OTHER_LINK = 3.0  # how many times as much or as little time a remembered setting takes on a link that has changed
SHORT_SEARCH_ITERATIONS = 40  # from a setting that is good, but was found on another link


_Script = Generator[Assignment, Sequence[float], None]


class _Nobody:
    """The arm of a session that has no arm yet."""

    name = "nobody"

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        return ()

    def tell(self, trials: Sequence[Trial]) -> None:
        pass


_NOBODY = _Nobody()


def _seeds(knobs: Sequence[Knobs]) -> list[Proposal]:
    return [Proposal(arm=REGISTRY_ARM, knobs=each, reason="a similar job's") for each in knobs]


class WarmupSession:
    """Spends a budget of iterations on finding the best knobs.

    Args:
        space: proposals outside it are refused.
        default: the untuned setting, measured first; what stays if nothing beats it.
        arm: proposes; told every trial. None = nobody, until `begin_search`; only with `exact`.
        rng: the order in which finalists are run.
        budget_iterations: training iterations in all, discarded and guard included.
        discarded_iterations: iterations after a change of knobs that are not measured.
        measured_iterations: measured iterations of a trial that is not given up early.
        exact: the registry's setting for this very job: run at once, and kept unless the default is clearly faster.
        exact_spans_s: what that setting and the default took in that job, None = unknown. If both take clearly more or
            both clearly less now (`OTHER_LINK`), the link has changed: a short search follows, from that setting on.
        seeds: settings of similar jobs; the first proposals.
        history: an earlier, unfinished session's `trials`; counted into the budget.
        identity: knobs with equal identity are the same setting and not run twice.
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
        exact_spans_s: tuple[float, float] | None = None,
        seeds: Sequence[Knobs] = (),
        history: Sequence[Trial] = (),
        identity: Callable[[Knobs], Hashable] = lambda knobs: knobs,
    ) -> None:
        if discarded_iterations < 0 or measured_iterations < 1:
            raise TuningError(
                f"a trial needs at least one measured and no negative number of discarded iterations, "
                f"not {measured_iterations} and {discarded_iterations}"
            )
        self._space = space
        self._default = default
        self._arm: Arm = arm or _NOBODY
        self._rng = rng
        self._budget = budget_iterations
        self._settle = discarded_iterations
        self._measured = measured_iterations
        self._identity = identity
        self._exact, self._exact_spans_s = exact, exact_spans_s
        self._seeds = _seeds(seeds)
        self._has_refused = False
        # No session has more trials than iterations, whatever is claimed.
        self._history = tuple(trial for trial in history[-budget_iterations:] if self._accepts(trial.knobs))
        run = discarded_iterations + measured_iterations
        self._n_finalists = 3 if budget_iterations >= 60 else 2
        self._duel_cost = 2 * run
        self._patience = max(8, budget_iterations // (4 * run))

        self._ledger = Ledger(identity=identity)
        self._trials: list[Trial] = []
        self._spent = 0
        self._running: Knobs | None = None
        self._since_best = 0
        self._incumbent: Setting | None = None  # the last new best, at first the default
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
        """Takes the measured spans of the present assignment and goes on to the next.

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
        now = self._assignment
        self._spent += now.discarded_iterations + len(spans_s)
        self._running = now.knobs
        self._advance(spans_s)

    def _advance(self, spans_s: Sequence[float]) -> None:
        try:
            self._assignment = self._script.send(spans_s)
        except StopIteration:
            result = self.result
            self._assignment = Assignment(
                knobs=result.knobs, discarded_iterations=0, measured_iterations=0, arm=result.arm, purpose=Purpose.FINAL
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

    def progress(self) -> str:
        """One line: iteration, best so far against the default, who found it, what runs now."""
        result = self.result
        change = ""
        if 0.0 < result.default_span_s < float("inf"):
            change = (
                f"best {1e3 * result.best_span_s:.3g} ms against {1e3 * result.default_span_s:.3g} ms by default "
                f"({100 * (result.best_span_s / result.default_span_s - 1):+.0f} %), {result.arm} leads; "
            )
        now = self._assignment
        return f"warm-up {self._spent}/{self._budget}: {change}{now.purpose.value} {now.knobs.describe()}"

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
        self._arm, self._space, self._seeds = arm, space, _seeds(seeds)
        self._advance(())

    # The course of events.

    def _warm_up(self) -> _Script:
        exact = self._exact if self._exact is not None and self._accepts(self._exact) else None
        if exact is not None:
            held = yield from self._check(exact)
            changed = self._link_has_changed(exact)
            if held and not changed:
                return self._end(exact, held)
            logger.info(
                "the registry's setting for this job %s",
                "holds, but the link has changed: a short search begins there" if held else "did not hold: tuning anew",
            )
            if held:
                self._budget = min(self._budget, self._spent + SHORT_SEARCH_ITERATIONS)
            yield Assignment(
                knobs=exact if held else self._default,
                discarded_iterations=0,
                measured_iterations=0,
                arm=REGISTRY_ARM if held else DEFAULT_ARM,
                purpose=Purpose.SEARCH,
            )
            self._arm.tell(self._trials)
            self._since_best = 0
        else:
            yield from self._run(self._default, arm=DEFAULT_ARM, purpose=Purpose.DEFAULT, measured=self._measured)
            self._finish_trial(Proposal(arm=DEFAULT_ARM, knobs=self._default))
        self._recall()
        why = yield from self._search()
        finalists = self._finalists()
        if not finalists:
            return self._end(self._default, f"nothing came near the default; {why}")
        kept = yield from self._finals(finalists)
        if kept is None:
            return self._end(self._default, f"no finalist beat the default; {why}")
        return self._end(kept, f"beat the default in alternating iterations; {why}")

    def _check(self, exact: Knobs) -> Generator[Assignment, Sequence[float], str]:
        """Runs an earlier job's result in turns with the default; why it is kept, empty if it is not."""
        if self._same(exact, self._default):
            yield from self._run(self._default, arm=DEFAULT_ARM, purpose=Purpose.DEFAULT, measured=self._measured)
            self._finish_trial(Proposal(arm=DEFAULT_ARM, knobs=self._default))
            return "the registry knows the default as the best for this job"
        kept = yield from self._finals(
            [exact],
            arm=REGISTRY_ARM,
            max_rounds=MAX_EXACT_ROUNDS,
            max_turn_iterations=2 * self._measured,
            doubt=CLEAR,
        )
        self._finish_trial(Proposal(arm=DEFAULT_ARM, knobs=self._default))
        return "" if kept is None else "the registry's setting for this job, checked against the default"

    def _link_has_changed(self, exact: Knobs) -> bool:
        """Whether both settings now take clearly less, or clearly more time than in the job that `exact` is of."""
        if self._exact_spans_s is None:
            return False
        both = zip((exact, self._default), self._exact_spans_s, strict=True)
        ratios = [self._setting(knobs).span_s / then_s for knobs, then_s in both]
        return min(ratios) > OTHER_LINK or max(ratios) < 1 / OTHER_LINK

    def _search(self) -> Generator[Assignment, Sequence[float], str]:
        """Runs trials until the budget, the patience or the proposals end; says which."""
        while True:
            if self._left() < self._settle + 1:
                return f"budget of {self._budget} iterations used"
            if self._since_best >= self._patience:
                expected = expected_improvement(self._arm)
                if expected is None or expected < WORTHWHILE:
                    return f"no new best in {self._since_best} trials"
            proposal = self._next_proposal()
            if proposal is None:
                return "nothing left to propose"
            yield from self._race(proposal)
            self._finish_trial(proposal)

    def _race(self, proposal: Proposal) -> _Script:
        """Measures a proposal as often as it takes to tell it from the best."""
        wanted = proposal.iterations or self._measured
        rival = next((best for best in self._ledger.ranked() if not self._same(best.knobs, proposal.knobs)), None)
        while True:
            yield from self._run(proposal.knobs, arm=proposal.arm, purpose=Purpose.TRIAL, measured=1)
            setting = self._setting(proposal.knobs)
            enough = len(setting.spans_s) >= wanted
            lead = self._ledger.lead(setting, rival) if rival else 0.0
            hopeless = setting.failed or lead < -CLEAR
            undecided = rival is not None and 0.0 <= lead <= CLEAR and len(setting.spans_s) < 2 * wanted
            if hopeless or (enough and not undecided) or self._left() < 1:
                return

    def _finalists(self) -> list[Knobs]:
        """The fastest settings and those with the best surrogate's estimate, in turns, but none that is hopeless."""
        ranked = self._ledger.ranked()
        rivals = [
            setting.knobs
            for setting in ranked
            if not self._same(setting.knobs, self._default) and self._ledger.lead(setting, ranked[0]) > -HOPELESS
        ]
        beliefs = {rival: expected_span_s(self._arm, rival) for rival in rivals}
        believed = sorted((belief, place) for place, belief in enumerate(beliefs.values()) if belief is not None)
        in_turns = zip_longest(rivals, (rivals[place] for _, place in believed))
        field = list(dict.fromkeys(knobs for pair in in_turns for knobs in pair if knobs is not None))
        affordable = (self._budget - self._spent) // (self._settle + self._measured) - 1  # beside the default
        return field[: max(1, min(self._n_finalists, affordable))]

    def _finals(
        self,
        finalists: list[Knobs],
        *,
        arm: str | None = None,
        max_rounds: int = MAX_ROUNDS,
        max_turn_iterations: int = MAX_TURN_ITERATIONS,
        doubt: float = 0.0,
    ) -> Generator[Assignment, Sequence[float], Knobs | None]:
        """Rounds of all finalists and the default in random order; the one that is kept, None = the default stays.

        After each round the slower half leaves, by all that was measured of it; where it is noisy the last two stay
        until they are told apart or the budget ends. The duel with the default counts what is measured here alone,
        since the finalists got here by luck too; it pauses while it is clear. `doubt` is the lead that the default must
        have: an earlier job's winner is proved already and goes only if clearly slower.
        """
        duel = Ledger(identity=self._identity)
        field = [*finalists, self._default]
        for number in range(max_rounds):
            beaten = self._ledger.lead(self._setting(finalists[0]), self._setting(self._default)) > CLEAR
            noisy = self._ledger.noise > NOISY
            halvings = len(finalists).bit_length() - (noisy and len(finalists) == 2)
            rounds = max(1, halvings - beaten)  # and a duel if it is open
            measured = min(max_turn_iterations, self._turn_iterations(len(field), rounds=rounds))
            turns = self._rng.permutation(len(field)).tolist()
            for i in turns if number else sorted(turns, key=bool):  # at first the favourite: it may be kept for good
                knobs = field[i]
                purpose, who = Purpose.GUARD_DEFAULT, DEFAULT_ARM
                if knobs != self._default:
                    purpose = Purpose.GUARD_WINNER if len(finalists) == 1 else Purpose.VERIFY
                    who = arm or self._setting(knobs).arm
                spans_s = yield from self._run(knobs, arm=who, purpose=purpose, measured=measured)
                duel.add(knobs, arm=who, spans_s=spans_s)
            for knobs in finalists:
                self._finish_trial(Proposal(arm=arm or VERIFY_ARM, knobs=knobs))
            stay = max((len(finalists) + 1) // 2, 2 if noisy else 1)
            finalists = sorted(finalists, key=lambda knobs: self._setting(knobs).span_s)[:stay]
            best = self._setting(finalists[0])
            finalists = [knobs for knobs in finalists if self._ledger.lead(self._setting(knobs), best) > -CLEAR]
            lead = duel.lead(duel[best.knobs], duel[self._default])
            field = finalists + ([self._default] if abs(lead) < CLEAR else [])
            if (
                len(field) == 1
                or lead <= -CLEAR
                or self._spent + len(field) * (self._settle + self._measured) > self._budget
            ):
                break
        return best.knobs if lead > -doubt else None

    def _run(
        self, knobs: Knobs, *, arm: str, purpose: Purpose, measured: int
    ) -> Generator[Assignment, Sequence[float], Sequence[float]]:
        settle = 0 if self._running == knobs else self._settle
        spans_s = yield Assignment(
            knobs=knobs, discarded_iterations=settle, measured_iterations=measured, arm=arm, purpose=purpose
        )
        self._ledger.add(knobs, arm=arm, spans_s=spans_s)
        return spans_s

    # Book-keeping.

    def _next_proposal(self) -> Proposal | None:
        """The next proposal that is worth running; the arm is told at once what is known of the others."""
        for _ in range(MAX_RETRIES):
            asked = [self._seeds.pop(0)] if self._seeds else self._arm.ask(1)
            if not asked:
                return None
            proposal = asked[0]
            if not self._accepts(proposal.knobs):
                self._tell(
                    Trial(
                        arm=proposal.arm,
                        knobs=proposal.knobs,
                        iterations=0,
                        span_s=float("inf"),
                        status=TrialStatus.FAILED,
                    )
                )
                continue
            known = self._ledger.find(proposal.knobs)
            more = known is not None and not known.failed and (proposal.iterations or 0) > len(known.spans_s)
            if known is None or more:
                return proposal
            self._tell(
                known.as_trial(arm=proposal.arm, knobs=proposal.knobs, status=TrialStatus.COMPLETE, was_best=False)
            )
        return None

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

    def _finish_trial(self, proposal: Proposal) -> None:
        """Closes the books on a setting that has run, and tells the arm."""
        setting = self._setting(proposal.knobs)
        was_best = self._ledger.lead(setting, self._incumbent or setting) > 1.0
        if was_best or self._incumbent is None:
            self._incumbent = setting
        wanted = proposal.iterations or self._measured
        status = TrialStatus.COMPLETE if len(setting.spans_s) >= wanted else TrialStatus.PRUNED
        trial = setting.as_trial(arm=proposal.arm, knobs=proposal.knobs, status=status, was_best=was_best)
        self._since_best = 0 if was_best else self._since_best + 1
        self._trials.append(trial)
        self._tell(trial)
        logger.debug(
            "%s: %s: %.4g ms%s", trial.arm, trial.knobs.describe(), 1e3 * trial.span_s, ", new best" if was_best else ""
        )

    def _tell(self, trial: Trial) -> None:
        self._arm.tell([trial])

    def _recall(self) -> None:
        """Takes in an earlier session's trials, scaled by what the default took then and takes now."""
        before = [trial.span_s for trial in self._history if self._same(trial.knobs, self._default)]
        scale = self._setting(self._default).span_s / before[-1] if before else 1.0
        scale = scale if 0.0 < scale < float("inf") else 1.0
        latest = {self._identity(trial.knobs): trial for trial in self._history}  # holds all its measurements
        proposers = {self._identity(trial.knobs): trial.arm for trial in reversed(self._history)}  # the first of each
        for trial in self._history:
            if self._same(trial.knobs, self._default):
                continue
            scaled = replace(trial, span_s=trial.span_s * scale, noise_s=trial.noise_s * scale)
            self._trials.append(scaled)
            self._tell(scaled)
            identity = self._identity(trial.knobs)
            if trial is latest[identity]:
                spans_s = [scaled.span_s] * max(1, min(trial.iterations, self._measured))
                self._ledger.add(trial.knobs, arm=proposers[identity], spans_s=spans_s, repeats=False)
                self._spent += trial.iterations + self._settle
        best = self._setting(self._best_so_far())
        if self._incumbent is not None and best.spans_s:
            self._incumbent = best  # who beats only the default has not found a new best
        self._spent = min(self._spent, max(self._budget - 2 * self._duel_cost, self._settle + self._measured))

    def _setting(self, knobs: Knobs) -> Setting:
        """What was measured of these knobs, perhaps nothing."""
        return self._ledger.find(knobs) or Setting(knobs=knobs, arm=DEFAULT_ARM)

    def _best_so_far(self) -> Knobs:
        """The fastest, if it leads the default by more than the noise: of many settings one is fast by luck.

        What similar jobs have found was named beforehand, not picked for its luck: for that any lead will do.
        """
        ranked = self._ledger.ranked()
        default = self._setting(self._default)
        if ranked and self._ledger.lead(ranked[0], default) > 1.0:
            return ranked[0].knobs
        named = next((setting for setting in ranked if setting.arm == REGISTRY_ARM), None)
        if named is not None and self._ledger.lead(named, default) > 0.0:
            return named.knobs
        return self._default

    def _left(self) -> int:
        """Iterations that trials may still use; the others are kept for the finals, the more the noisier it is."""
        share = min(max(RESERVE_PER_NOISE * self._ledger.noise, MIN_RESERVE), MAX_RESERVE)
        return self._budget - max(self._duel_cost, round(share * self._budget)) - self._spent

    def _turn_iterations(self, field: int, *, rounds: int) -> int:
        """Measured iterations of one turn in the finals, if so many are left in the field for so many rounds."""
        if self._ledger.noise <= NOISY:
            return self._measured
        longest = (self._budget - self._spent) // (field * rounds) - self._settle
        return max(self._measured, longest)

    def _same(self, first: Knobs, second: Knobs) -> bool:
        return self._identity(first) == self._identity(second)

    def _end(self, knobs: Knobs, reason: str) -> None:
        self._outcome = knobs, reason
