"""Prediction of a job's scaling on a cluster that the user describes, such as 64 nodes at 25 Gbit/s.

No running job is needed: planners compute settings from a model of the job, and a simulator predicts their times. The
command line prints and plots the resulting table.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sirtaki.comm.plan import CommPlan, GradientLayout
from sirtaki.errors import TuningError, require
from sirtaki.measures import LinkModel

from .arms.planners import make_planners
from .knobs import Knobs, KnobSpace
from .model.fits import ContentionModel
from .model.planning import PlanningModel
from .model.simulator import Profile
from .trial import Trial

DEFAULT, KEPT = "default", "kept"
"""Names of the untuned setting and of the setting that the job kept, in place of a planner's name."""

LEAST_ERROR = 0.12
OWN_SHARE = 1.5
RANKS_ERROR = 0.10
UNMEASURED_ERROR = 0.10
"""Errors of a predicted step time on a logarithmic scale, measured by `python -m bench.plan`.

`OWN_SHARE`: error of any prediction, as a multiple of the model's median error for the job's own settings.
`RANKS_ERROR`: error for each factor of e by which the number of ranks changes. `UNMEASURED_ERROR`: error if the job's
network was not measured, because all ranks were on one host.
"""

UNMODELLED = 0.02
OPTIMISM = 0.04
"""Mean ln(measured step / step of the simulator) in measurements by `python -m bench.plan`: of any setting, because the
simulator has no processor time for packing and unpacking, and additionally of plans, because a planner chooses the plan
for which the simulator errs most towards a short step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAccuracy:
    """Error of the model of a job: predicted and measured times of the settings that the job tried.

    Attributes:
        settings: number of compared settings.
        median, most: median and 90th percentile of the settings' errors |ln(predicted step / measured step)|.
    """

    settings: int
    median: float
    most: float

    @classmethod
    def of(cls, model: PlanningModel, trials: Sequence[Trial]) -> "ModelAccuracy | None":
        """Compare the predicted and the measured step time of each tried setting.

        Return None if no trial can be compared.

        Args:
            model: model of the job. Its forward pass is the time of a step outside of communication.
            trials: measured settings.
        """
        errors = []
        for trial in trials:
            span_s = model.expected_s(trial.knobs)
            if span_s is not None and trial.span_s > 0:
                before_s = model.profile.forward_s
                errors.append(abs(math.log((before_s + span_s) / (before_s + trial.span_s))))
        if not errors:
            return None
        most = sorted(errors)[math.ceil(0.9 * len(errors)) - 1]
        return cls(settings=len(errors), median=median(errors), most=most)

    def half_width(self, *, from_ranks: int, to_ranks: int, is_measured: bool = True) -> float:
        """Return the half width of the confidence interval of a predicted step time, on a logarithmic scale.

        Args:
            from_ranks: number of ranks of the job.
            to_ranks: number of ranks of the prediction.
            is_measured: whether the job's ranks communicated over a network.
        """
        ranks = RANKS_ERROR * math.log(to_ranks / from_ranks)
        return math.hypot(max(LEAST_ERROR, OWN_SHARE * self.median), ranks, 0.0 if is_measured else UNMEASURED_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """Predicted times of a job with one plan (division of the gradients into units) on one number of ranks.

    Attributes:
        ranks: number of ranks in the ring.
        planner: name of the planner that made the plan; `DEFAULT` for the untuned setting, `KEPT` for the job's own.
        knobs: the plan as a setting of knobs.
        units: number of all-reduces per iteration, one for each unit (bucket).
        iteration_s: predicted time of the forward pass, the backward pass, and the communication that they do not hide.
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
    kept: Knobs | None = None,
    contention: ContentionModel | None = None,
    contention_ranks: int | None = None,
) -> list[ScalingRow]:
    """Predict a job's iteration time on several numbers of ranks: untuned, as tuned now, and with each planner's plan.

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
        kept: the setting that the job runs now; None = it is the default, or unknown.
        contention: model of how computation and communication slow each other down (LIBRA); None = they do not.
        contention_ranks: number of ranks on which `contention` was measured; None = it is valid for any number.

    Returns:
        Rows in the order of `ranks`. Rows with equal `ranks` are in ascending order of iteration time.

    Raises:
        TuningError: `ranks` is empty, or an entry is below two.
    """
    require(ranks and min(ranks) >= 2, "ranks", "numbers of ranks of at least 2", list(ranks), TuningError)
    rows: list[ScalingRow] = []
    for count in ranks:
        corrected = contention
        if contention is not None and contention_ranks is not None:
            corrected = contention.rescaled(from_ranks=contention_ranks, to_ranks=count)
        model = PlanningModel(
            layout=layout, profile=profile, links={space.routes[0]: link_at(count)}, contention=corrected
        )
        settings = [(DEFAULT, default), *([] if kept is None else [(KEPT, kept)])]
        rows += sorted(_rows(count, model, space, settings), key=lambda row: (row.iteration_s, row.units))
    return rows


def _rows(
    ranks: int, model: PlanningModel, space: KnobSpace, settings: Sequence[tuple[str, Knobs]]
) -> Iterator[ScalingRow]:
    simulator = model.simulator(space.routes[0])
    alone_s = model.profile.forward_s + model.profile.compute_s
    planned = [(p.arm, p.knobs) for planner in make_planners(space=space, model=model) for p in planner.ask()]
    given = [knobs.to_plan(model.layout) for _, knobs in settings]
    for planner, knobs in (*settings, *planned):
        plan: CommPlan = knobs.to_plan(model.layout)
        timeline = simulator.run(plan)
        bias = UNMODELLED + (0.0 if plan in given else OPTIMISM)
        late_s = timeline.iteration_s * math.expm1(bias)
        iteration_s = timeline.iteration_s + late_s
        yield ScalingRow(
            ranks=ranks,
            planner=planner,
            knobs=knobs,
            units=len(plan.units),
            iteration_s=iteration_s,
            span_s=timeline.span_s + late_s,
            efficiency=alone_s / iteration_s if iteration_s > 0 else 1.0,
        )
