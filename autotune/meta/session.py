"""The warm-up: which knobs the job's first iterations run, and which it keeps (docs/explanation/tuning.md).

The session is pure: no process group, file, thread, clock or sleep. It lives on one rank, says what to run
(`assignment`), takes the measured spans (`record`), and that rank tells the others. Its course is written down as one
generator, `_warm_up`, that yields assignments and is sent their spans, so it reads in the order in which it happens:

    default → trials → neighbours of the fastest → finals against each other and the default → done

A setting that an earlier job has left for this very job is run first, in turns with the default. If it holds, that is
the end; if it does not, or if the link is not what it was, the session asks for an arm (`Purpose.SEARCH`), so that what
a search needs (probes, planners) is made only then, and begins the usual course.

A share of the budget
that grows with the noise is kept for the finals, where the fastest settings and those that the arms' surrogate believes
in run in turns with the default.
"""

import logging
from collections.abc import Callable, Generator, Hashable, Sequence

import numpy as np

from sirtaki.errors import TuningError

from ..arms.base import Arm, Nobody
from ..knobs import Knobs, KnobSpace
from ..trial import Proposal, Trial
from .assignment import DEFAULT_ARM, PLAN_ARM, REGISTRY_ARM, Assignment, Purpose, SessionResult
from .budget import Budget
from .finals import Finals, finalists
from .ledger import CLEAR
from .promise import Promise
from .proposals import Proposals
from .search import Search
from .trials import Trials

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
