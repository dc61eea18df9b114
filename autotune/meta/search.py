"""The search of a warm-up: which proposals run, how often each is measured, and when it ends.

A trial is a race: it is measured once, given up if it is slower than the best, and measured more often the closer it
comes. More measurements of what runs already cost no discarded iteration.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from ..arms.base import expected_improvement
from ..trial import Proposal
from .assignment import REFINEMENT_ARM, Assignment, Purpose
from .ledger import CLEAR
from .neighbours import untried
from .proposals import Proposals
from .trials import Trials

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
