"""The search of a session: proposals screened by a surrogate, neighbours of the best, until a stop condition holds."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..arms.base import expected_improvement
from ..knobs import KnobLattice, Knobs, KnobSpace
from ..trial import Proposal, Trial, TrialStatus
from .trials import CLEAR, PLAN_ARM, REFINEMENT_ARM, REGISTRY_ARM, Assignment, Purpose, Trials

STEP_OCTAVES = 0.5
NEAR_OCTAVES = 0.3
"""Unit sizes that differ by less are neighbours that have been tried."""


def neighbours(knobs: Knobs, space: KnobSpace) -> Iterator[Knobs]:
    """Settings that differ in one knob by one step: streams, unit size, route, threads; a plan counts as uniform."""
    if knobs.cuts is not None:
        knobs = replace(knobs, cuts=None)
        yield knobs
    for streams in space.streams_around(knobs.streams):
        if streams != knobs.streams:
            yield replace(knobs, streams=streams)
    low, high = space.unit_bytes
    for step in (-STEP_OCTAVES, STEP_OCTAVES):
        size = space.whole_unit_bytes(knobs.unit_bytes * 2**step)
        if low <= size <= high:
            yield replace(knobs, unit_bytes=size)
    for transport, algorithm in space.routes:
        if (transport, algorithm) != knobs.route:
            yield replace(knobs, transport=transport, algorithm=algorithm)
    for threads in space.threads_around(knobs.threads):
        if threads != knobs.threads:
            yield replace(knobs, threads=threads)


def untried(knobs: Knobs, space: KnobSpace, tried: Iterable[Knobs]) -> Iterator[Knobs]:
    """The neighbours that no tried setting is near to."""
    known = [one for one in tried if one.cuts is None]
    near = (one for one in neighbours(knobs, space) if one in space)
    return (one for one in near if not any(_near(one, other) for other in known))


def _near(first: Knobs, second: Knobs) -> bool:
    same = replace(first, unit_bytes=second.unit_bytes) == second
    return same and abs(math.log2(first.unit_bytes / second.unit_bytes)) < NEAR_OCTAVES


logger = logging.getLogger(__name__)

MAX_RETRIES = 8  # proposals in a row that need not be run, until the arm is taken to have run dry
FEW = 16  # settings that are all tried: those of a model of a unit or two, where most knobs come to the same
MOST_POINTS = 100  # of a lattice that is looked at for that


class Proposals:
    """What is worth running.

    Attributes:
        space: proposals outside it are refused.
        seeds: settings of similar jobs, which come first.
        given: the user's, which comes before them; None = there is none, or it has been proposed.
    """

    def __init__(self, trials: Trials, *, space: KnobSpace, seeds: Sequence[Knobs], given: Knobs | None = None) -> None:
        self._trials, self.space = trials, space
        self.seeds, self.given = list(seeds), given
        self._has_refused = False

    def next(self) -> Proposal | None:
        """The next proposal that is worth running; the arm is told at once what is known of the others."""
        for _ in range(MAX_RETRIES):
            asked = [self._next_seed()] if self.seeds or self.given else self._trials.arm.ask(1)
            if not asked:
                break
            proposal = asked[0]
            if not self.accepts(proposal.knobs):
                self._trials.tell(
                    Trial(
                        arm=proposal.arm,
                        knobs=proposal.knobs,
                        iterations=0,
                        span_s=float("inf"),
                        status=TrialStatus.FAILED,
                    )
                )
                continue
            known = self._trials.ledger.find(proposal.knobs)
            more = known is not None and not known.failed and (proposal.iterations or 0) > len(known.spans_s)
            if known is None or more:
                return proposal
            self._trials.tell(
                known.as_trial(arm=proposal.arm, knobs=proposal.knobs, status=TrialStatus.COMPLETE, was_best=False)
            )
        return self._overlooked()

    def _overlooked(self) -> Proposal | None:
        """Where there are few settings in all: one that nobody has proposed; to try it costs less than to doubt."""
        lattice = KnobLattice(self.space)
        if len(lattice) > MOST_POINTS:
            return None
        distinct = {self._trials.identity(knobs): knobs for knobs in lattice.points if self.accepts(knobs)}
        left = (knobs for knobs in distinct.values() if self._trials.ledger.find(knobs) is None)
        knobs = next(left, None) if len(distinct) <= FEW else None
        return None if knobs is None else Proposal(arm=REFINEMENT_ARM, knobs=knobs, reason="nobody has proposed it")

    def _next_seed(self) -> Proposal:
        given, self.given = self.given, None
        if given is not None:
            return Proposal(arm=PLAN_ARM, knobs=given, reason="the plan that was given")
        return Proposal(arm=REGISTRY_ARM, knobs=self.seeds.pop(0), reason="a similar job's")

    def accepts(self, knobs: Knobs) -> bool:
        """Whether these knobs can be run here; what similar jobs, histories and arms propose may be anything."""
        try:
            if knobs in self.space:
                self._trials.identity(knobs)
                return True
            why = f"outside the permitted space: {knobs.describe()}"
        except Exception as err:
            why = f"that do not fit this job: {err}"
        logger.log(logging.DEBUG if self._has_refused else logging.WARNING, "refused knobs %s", why)
        self._has_refused = True
        return False


PROMISING = 1.0  # standard errors behind the best at which a setting is not measured again
WORTHWHILE = 0.001  # the share of the span that must be in reach to go on searching

_Script = Generator[Assignment, Sequence[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is searched with.

    Attributes:
        trials: what has run, and runs here.
        proposals: what is worth running.
    """

    trials: Trials
    proposals: Proposals

    def run(self, *, for_refinement: int) -> Generator[Assignment, Sequence[float], str]:
        """Runs trials until the budget, but for so many iterations, the patience or the proposals end; says which."""
        budget = self.trials.budget
        patience = max(8, budget.iterations // (4 * budget.turn))
        while True:
            if self.trials.left - for_refinement < budget.discarded + 1:
                return f"budget of {budget.iterations} iterations used"
            if self.trials.since_best >= patience:
                expected = expected_improvement(self.trials.arm)
                if expected is not None and expected < WORTHWHILE:
                    return f"no new best in {self.trials.since_best} trials"
            proposal = self.proposals.next()
            if proposal is None:
                return "nothing left to propose"
            yield from self._race(proposal)
            self.trials.finish(proposal)

    def refine(self) -> _Script:
        """Runs what lies next to the fastest setting, until nothing new does or the iterations for trials are used."""
        while self.trials.left > self.trials.budget.discarded:
            ledger, space = self.trials.ledger, self.proposals.space
            tried = [setting.knobs for setting in ledger.ranked()]
            beside = untried(tried[0], space, tried) if tried else iter(())
            knobs = next((one for one in beside if self.proposals.accepts(one) and ledger.find(one) is None), None)
            if knobs is None:
                return
            proposal = Proposal(arm=REFINEMENT_ARM, knobs=knobs, reason="next to the fastest")
            yield from self._race(proposal)
            self.trials.finish(proposal)

    def _race(self, proposal: Proposal) -> _Script:
        """Measures a proposal as often as it takes to tell it from the best."""
        trials = self.trials
        wanted = proposal.iterations or trials.budget.measured
        rival = next((best for best in trials.ledger.ranked() if not trials.same(best.knobs, proposal.knobs)), None)
        while True:
            yield from trials.run(proposal.knobs, arm=proposal.arm, purpose=Purpose.TRIAL, measured=1)
            setting = trials.setting(proposal.knobs)
            enough = len(setting.spans_s) >= wanted
            lead = trials.ledger.lead(setting, rival) if rival else 0.0
            hopeless = setting.failed or lead < -PROMISING
            undecided = rival is not None and 0.0 <= lead <= CLEAR and len(setting.spans_s) < 2 * wanted
            if hopeless or (enough and not undecided) or trials.left < 1:
                return
