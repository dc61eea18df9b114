"""What a job tries first: similar jobs' settings, if this job's own model of itself has nothing against them.

Three sources meet: the registry says what was good elsewhere, planners make plans anew that do not travel, and the
simulator of this job's measured link says what to expect of either.

The registry proposes, the model may object. Settings that the model expects to be slower than the best plan it knows by
more than `INDIFFERENCE` are left out: each would cost iterations. Those that it cannot tell apart run in the order of
the registry, nearest job first: what it knows has been measured (docs/decisions/0033).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from sirtaki.autotune.arms.planners import make_planners
from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.comm.layout import GradientLayout
from sirtaki.errors import PlanError
from sirtaki.gain import faster
from sirtaki.registry.warm_start import WarmStart

from .knob_choices import checked_plans

logger = logging.getLogger(__name__)

INDIFFERENCE = 0.02
"""Share of the expected span that no model of measured links can be sure of; more where the link's fit is worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstProposal:
    """A setting to begin with.

    Attributes:
        knobs: the setting.
        arm: who found it in the other job, or planned it anew for this one.
        message: where it comes from, for the log.
    """

    knobs: Knobs
    arm: str
    message: str


def first_proposals(
    starts: Sequence[WarmStart],
    *,
    layouts: Sequence[GradientLayout],
    space: KnobSpace,
    model: PlanningModel | None,
) -> list[FirstProposal]:
    """What to try first, in this order.

    Args:
        starts: what similar jobs have found, the most similar first, adapted to this job.
        layouts: of this job; what does not fit them is left out.
        space: what may be chosen.
        model: of this job, None if it could not be measured; then nothing is planned anew and nothing left out.
    """
    planners = {planner.name: planner for planner in make_planners(space=space, model=model)}

    @cache
    def planned(name: str) -> list[Knobs]:
        return [proposal.knobs for proposal in planners[name].ask()] if name in planners else []

    proposals: list[FirstProposal] = []
    for start in starts:
        proposal = _carried_over(start, layouts)
        if start.lost_cuts and (plans := planned(start.entry.arm)):
            words = f"{start.source}; planned anew by {start.entry.arm}, whose plan that was"
            proposal = FirstProposal(knobs=plans[0], arm=start.entry.arm, message=words)
        if proposal is not None and all(proposal.knobs != other.knobs for other in proposals):
            proposals.append(proposal)
    if model is None or not proposals:
        return proposals
    return _promising(proposals, planned(next(iter(planners))), model)  # the first is the one that did best in general


def _carried_over(start: WarmStart, layouts: Sequence[GradientLayout]) -> FirstProposal | None:
    try:
        knobs = Knobs.from_json(start.knobs)
        checked_plans(knobs, layouts)
    except PlanError as err:
        logger.warning("the registry's entry %s is left alone: %s", start.entry.id[:8], err)
        return None
    return FirstProposal(knobs=knobs, arm=start.entry.arm, message=start.explanation)


def _promising(
    proposals: Sequence[FirstProposal], rivals: Sequence[Knobs], model: PlanningModel
) -> list[FirstProposal]:
    """Those that the model expects to be about as fast as the best that it knows, and those it knows nothing of."""
    expected_s = [_expected_s(proposal.knobs, model) for proposal in proposals]
    known_s = [
        span_s for span_s in [*expected_s, *(_expected_s(knobs, model) for knobs in rivals)] if span_s is not None
    ]
    doubt = max([INDIFFERENCE, *(link.residual for link in model.links.values())])
    kept = []
    for proposal, span_s in zip(proposals, expected_s, strict=True):
        if span_s is None or span_s <= (1 + doubt) * min(known_s):
            kept.append(proposal)
        else:
            slower = faster(min(known_s), span_s)
            logger.info("not tried, as it would be %s than the best plan: %s", slower, proposal.message)
    return kept


def _expected_s(knobs: Knobs, model: PlanningModel) -> float | None:
    """The span by simulation; None on a route that was not measured."""
    route = knobs.route
    return model.simulator(route).run_knobs(knobs).span_s if route in model.links else None
