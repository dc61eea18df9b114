"""Prediction of a job's scaling on a cluster that the user describes, such as 64 nodes at 25 Gbit/s.

No running job is needed: planners compute settings from a model of the job, and a simulator predicts their times. The
command line prints and plots the resulting table.
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
    """Predicted times of one plan (division of the gradients into units) on one number of ranks.

    Attributes:
        ranks: number of ranks in the ring.
        planner: name of the planner that made the plan; `DEFAULT` for the untuned setting.
        knobs: the plan as a setting of knobs.
        units: number of all-reduces per iteration, one for each unit (bucket).
        iteration_s: predicted time of forward pass, backward pass and communication that they do not hide.
        span_s: predicted communication time, from the first ready gradient to the last reduced gradient.
        efficiency: throughput of a rank relative to training on one rank, at most 1.
    """

    ranks: int
    planner: str
    knobs: Knobs
    units: int
    iteration_s: float
    span_s: float
    efficiency: float

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON-serialisable dict."""
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
    """Predict a job's iteration times on several numbers of ranks: untuned, and with the plan of each planner.

    A planner is a search method that computes a division of the gradients into units (buckets) from a model of the job.

    Args:
        layout: the job's gradients.
        profile: the job's compute times, measured or described by the user.
        link_at: function that returns the network's latency and bandwidth model for a ring of n ranks:
            `lambda n: replace(cluster, ranks=n).link()` for a described cluster,
            `lambda n: link.rescaled(from_ranks=measured, to_ranks=n)` for a measured network (LIBRA eq. 4).
        ranks: numbers of ranks, each at least two.
        space: permitted settings. Plans are made for its first route (transport and algorithm).
        default: the untuned setting.
        contention: model of how computation and communication slow each other down (LIBRA); None = they do not.
        contention_ranks: number of ranks on which `contention` was measured; None = it is valid for any number.

    Returns:
        Rows in the order of `ranks`. Rows with equal `ranks` are in ascending order of iteration time.

    Raises:
        TuningError: `ranks` is empty, or an entry is below two.
    """
    if not ranks or min(ranks) < 2:
        raise TuningError(
            "the argument ranks must list one or more job sizes (numbers of ranks) to simulate, each at least two, "
            f"found {list(ranks)}"
        )
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
