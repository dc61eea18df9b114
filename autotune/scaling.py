"""How a job would scale on a cluster that is only described: what if there were 64 nodes at 25 Gbit/s?

Planners and simulator without a running job. Pure: the command line prints and plots what comes back.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sirtaki.comm.plan import CommPlan, GradientLayout
from sirtaki.errors import TuningError
from sirtaki.measures import LinkModel

from .arms.planners import make_planners
from .knobs import Knobs, KnobSpace
from .model.fits import ContentionModel
from .model.planning import PlanningModel
from .model.simulator import Profile

DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One plan on one number of ranks.

    Attributes:
        ranks: members of the ring.
        planner: who made the plan; `DEFAULT` for the untuned setting.
        knobs: the setting.
        units: how many all-reduces an iteration takes.
        iteration_s: forward pass, backward pass and the communication that remains visible.
        span_s: from the first ready gradient to the last reduced one.
        efficiency: throughput of a rank as part of what it would be alone, up to 1.
    """

    ranks: int
    planner: str
    knobs: Knobs
    units: int
    iteration_s: float
    span_s: float
    efficiency: float

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "knobs": self.knobs.to_json()}


def scaling_table(
    *,
    layout: GradientLayout,
    profile: Profile,
    link_at: Callable[[int], LinkModel],
    ranks: Sequence[int],
    space: KnobSpace,
    default: Knobs,
    contention: ContentionModel | None = None,
    contention_ranks: int | None = None,
) -> list[ScalingRow]:
    """The untuned setting and every planner's plan on each number of ranks, the best of each number first.

    Args:
        layout: of the job.
        profile: of the job, measured or made up.
        link_at: the link of a ring of that many ranks: `lambda n: replace(cluster, ranks=n).link()` for a described
            cluster, `lambda n: link.rescaled(from_ranks=measured, to_ranks=n)` for a measured link (LIBRA eq. 4).
        ranks: numbers of ranks, each at least two.
        space: what planners may choose; its first route is planned for.
        default: the untuned setting.
        contention: LIBRA's model, if known.
        contention_ranks: how many ranks it was measured on.

    Raises:
        TuningError: there is no number of ranks, or one is below two.
    """
    if not ranks or min(ranks) < 2:
        raise TuningError(f"scaling needs numbers of ranks from two up, not {list(ranks)}")
    rows: list[ScalingRow] = []
    for count in ranks:
        corrected = contention
        if contention is not None and contention_ranks is not None:
            corrected = contention.rescaled(from_ranks=contention_ranks, to_ranks=count)
        model = PlanningModel(
            layout=layout, profile=profile, links={space.routes[0]: link_at(count)}, contention=corrected
        )
        rows += sorted(_rows(count, model, space, default), key=lambda row: (row.iteration_s, row.units))
    return rows


def _rows(ranks: int, model: PlanningModel, space: KnobSpace, default: Knobs) -> Iterator[ScalingRow]:
    simulator = model.simulator(space.routes[0])
    alone_s = model.profile.forward_s + model.profile.compute_s
    settings = [(DEFAULT, default)]
    settings += [(p.arm, p.knobs) for planner in make_planners(space=space, model=model) for p in planner.ask()]
    for planner, knobs in settings:
        plan: CommPlan = knobs.to_plan(model.layout)
        timeline = simulator.run(plan)
        yield ScalingRow(
            ranks=ranks,
            planner=planner,
            knobs=knobs,
            units=len(plan.units),
            iteration_s=timeline.iteration_s,
            span_s=timeline.span_s,
            efficiency=alone_s / timeline.iteration_s if timeline.iteration_s > 0 else 1.0,
        )
