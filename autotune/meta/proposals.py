"""Which setting runs next: similar jobs' first, then what the arm proposes, unless it is known or invalid."""

import logging
from collections.abc import Sequence

from ..knobs import Knobs, KnobSpace
from ..lattice import KnobLattice
from ..trial import Proposal, Trial, TrialStatus
from .assignment import PLAN_ARM, REFINEMENT_ARM, REGISTRY_ARM
from .trials import Trials

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
