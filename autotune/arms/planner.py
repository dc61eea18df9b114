"""What all planners share: an arm that asks once for each route, and again when the model has moved.

So a planner is nothing but its rule: which gradients travel together, on which streams.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from statistics import median

from sirtaki.comm.plan import GradientLayout, Route
from sirtaki.errors import TuningError
from sirtaki.measures import SMALLEST_UNIT_BYTES

from ..knobs import Cut, Knobs, KnobSpace
from ..model.planning import Forecast, PlanningModel
from ..trial import Proposal, Trial

logger = logging.getLogger(__name__)

LEAST_PREDICTED_GAIN = 0.005
"""Share of the span that a plan must be predicted to save over the best that has been measured."""


class Planner(ABC):
    """An arm with a model instead of a search.

    It proposes nothing while it has no model, where the user has fixed the unit size (explicit units would overrule
    that), and for a layout without elements. The plan that the simulator likes best comes first.
    """

    name: str

    def __init__(
        self, *, space: KnobSpace, model: PlanningModel | None = None, forecast: Forecast | None = None
    ) -> None:
        """Plans with `model`, and holds its tongue while trials speak against `forecast`, which planners share."""
        self.space = space
        self.forecast = forecast
        self._model: PlanningModel | None = None
        self._to_ask: list[Proposal] | None = []
        if model is not None:
            self.update_model(model)

    @property
    def doubted(self) -> bool:
        """Trials have spoken against the model."""
        return self.forecast is not None and not self.forecast.believed

    @abstractmethod
    def cuts(self, model: PlanningModel, route: Route) -> tuple[Cut, ...]:
        """The units that this planner would use on that route.

        Raises:
            TuningError: it cannot plan with this model.
        """

    def update_model(self, model: PlanningModel) -> None:
        """Takes over a new model; plans anew if it differs from the last by more than its own error."""
        if self.forecast is not None:
            self.forecast.update_model(model)
        if self._model is None or model.differs_from(self._model):
            self._model = model
            self._to_ask = None

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Up to `n` plans, one for each route, the most promising first; each is proposed once."""
        if self.doubted:
            return []
        if self._to_ask is None:
            self._to_ask = self._plan()
        if self.forecast is not None:
            self._to_ask = [one for one in self._to_ask if self.forecast.promises(one.knobs, gain=LEAST_PREDICTED_GAIN)]
        asked, self._to_ask = self._to_ask[:n], self._to_ask[n:]
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        """Drops plans that another arm has had measured already."""
        if self.forecast is not None:
            self.forecast.tell(trials)
        if self._to_ask:
            tried = {trial.knobs for trial in trials}
            self._to_ask = [proposal for proposal in self._to_ask if proposal.knobs not in tried]

    def _plan(self) -> list[Proposal]:
        model = self._model
        if model is None or model.layout.numel == 0 or self.space.unit_bytes[0] == self.space.unit_bytes[1]:
            return []
        plans: list[tuple[float, Proposal]] = []
        for route in (route for route in self.space.routes if route in model.links):
            try:
                knobs = self._knobs(model.layout, route, self.cuts(model, route))
            except TuningError as err:
                logger.info("%s has no plan for %s: %s", self.name, route[0].value, err)
                continue
            span_s = model.simulator(route).run_knobs(knobs).span_s
            reason = f"{len(knobs.cuts or ())} units, {span_s * 1e3:.3g} ms expected"
            plans.append((span_s, Proposal(arm=self.name, knobs=knobs, reason=reason)))
        return [proposal for _, proposal in sorted(plans, key=lambda plan: plan[0])]

    def allocations(self, model: PlanningModel) -> tuple[int | None, ...]:
        """LIBRA's R: the thread counts to choose from. Only None where nobody has measured what they do.

        None, NCCL's own choice, is no count: the model takes it for the one that it resembles, so it would win ties.
        """
        counts = tuple(threads for threads in self.space.threads if threads is not None)
        return counts if counts and model.contention is not None else (None,)

    def _knobs(self, layout: GradientLayout, route: Route, cuts: tuple[Cut, ...]) -> Knobs:
        used = 1 + max(cut.stream for cut in cuts)
        permitted = self.space.streams_on(route)
        streams = next((n for n in permitted if n >= used), None)
        if streams is None:
            raise TuningError(f"the plan needs {used} streams, {permitted[-1]} are permitted")
        starts = [0, *(cut.stop for cut in cuts)]
        typical = median(cut.stop - start for start, cut in zip(starts, cuts, strict=False)) * layout.itemsize_bytes
        low, high = self.space.unit_bytes
        return Knobs(
            unit_bytes=min(max(int(typical), low), high),
            streams=streams,
            transport=route[0],
            algorithm=route[1],
            threads=self.space.threads[0],
            cuts=cuts,
        )


def cuts_for_groups(
    layout: GradientLayout,
    group_ends: Sequence[int],
    *,
    streams: int,
    slices: int | Sequence[int] = 1,
    threads: Sequence[int | None] | None = None,
) -> tuple[Cut, ...]:
    """Explicit units for groups of consecutive gradients, on the streams in turn.

    Args:
        layout: where the gradients lie.
        group_ends: index behind the last gradient of each group, ascending; the last is the number of gradients.
        streams: how many are used.
        slices: how many equal units a group is cut into (for all, or `(n_groups,)`), fewer where a slice would
            be smaller than `SMALLEST_UNIT_BYTES`.
        threads: of each group's units, `(n_groups,)`.
    """
    cuts: list[Cut] = []
    start = 0
    for index, end in enumerate(group_ends):
        stop = layout.offsets[end]
        wanted = slices if isinstance(slices, int) else slices[index]
        count = max(1, min(wanted, (stop - start) * layout.itemsize_bytes // SMALLEST_UNIT_BYTES))
        for part in range(count if stop > start else 0):  # a group of empty gradients has nothing to send
            cut_stop = start + (stop - start) * (part + 1) // count
            cuts.append(
                Cut(stop=cut_stop, stream=len(cuts) % streams, threads=None if threads is None else threads[index])
            )
        start = stop
    return tuple(cuts)
