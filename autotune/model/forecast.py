"""How far a planning model can be believed: its predictions against the trials that have run, whoever proposed them.

A model is believed until trials speak against it, or, where it cannot know what matters (ranks that communicate on the
processors that compute), once they speak for it. What counts is the order: of two measured settings, was the one that
it predicted to be faster the faster one? Pairs weigh as much as they differ, so that near-equals, whose order is noise,
say little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from sirtaki.errors import PlanError

from ..knobs import Knobs
from ..trial import Trial
from .planning import PlanningModel

BENEFIT_OF_THE_DOUBT = 0.05
"""Weight of the belief before any trial: as much as one pair that differs by 5 %."""

LARGEST_WEIGHT = 0.5
"""Of a pair; how much slower something hopeless is says no more than that it is."""

BELIEVED = 0.4
"""Agreement from which on a model is believed: 70 % of what pairs weigh are in its order."""

DOUBT = 0.3
"""Weight of trials that a model must outweigh that is not presumed to be right: three pairs that differ by a tenth."""

MOST_COMPARED = 24


class Forecast:
    """A model's predictions, and what became of them.

    Attributes:
        model: predicts; what has been measured stays when it is replaced.
        presumed: it is believed before trials have run.
    """

    def __init__(self, model: PlanningModel, *, presumed: bool = True) -> None:
        self._model, self._presumed = model, presumed
        self._measured_s: dict[Knobs, float] = {}
        self._predicted_s: dict[Knobs, float | None] = {}
        self._agreement: float | None = None

    def update_model(self, model: PlanningModel) -> None:
        """Takes over a model that knows better."""
        if model is not self._model:
            self._model, self._predicted_s, self._agreement = model, {}, None

    def tell(self, trials: Sequence[Trial]) -> None:
        """Takes measured spans in; more than once does no harm."""
        for trial in trials:
            if math.isfinite(trial.span_s) and self._measured_s.get(trial.knobs) != trial.span_s:
                self._measured_s[trial.knobs] = trial.span_s
                self._agreement = None

    def predicted_s(self, knobs: Knobs) -> float | None:
        """Span by simulation; None on a route that nobody has probed, or of cuts that are another layout's."""
        if knobs not in self._predicted_s:
            route = knobs.route
            try:
                known = route in self._model.links
                self._predicted_s[knobs] = self._model.simulator(route).run_knobs(knobs).span_s if known else None
            except PlanError:
                self._predicted_s[knobs] = None
        return self._predicted_s[knobs]

    @property
    def agreement(self) -> float:
        """From -1, all pairs in the other order, to 1; the weighted kin of Kendall's rank correlation."""
        if self._agreement is None:
            pairs = self._pairs()[-MOST_COMPARED:]
            right, weight = (BENEFIT_OF_THE_DOUBT, BENEFIT_OF_THE_DOUBT) if self._presumed else (0.0, DOUBT)
            for (first_s, predicted_s), (second_s, other_predicted_s) in combinations(pairs, 2):
                differ = min(abs(math.log(first_s / second_s)), LARGEST_WEIGHT)
                as_predicted = (first_s - second_s) * (predicted_s - other_predicted_s) > 0.0
                weight += differ
                right += differ if as_predicted else -differ
            self._agreement = right / weight
        return self._agreement

    @property
    def believed(self) -> bool:
        """Whether trials have borne the model out so far."""
        return self.agreement >= BELIEVED

    def promises(self, knobs: Knobs, *, gain: float) -> bool:
        """Whether a setting should beat the best by that share, if the model is as far off there as for the best."""
        predicted_s, pairs = self.predicted_s(knobs), self._pairs()
        if predicted_s is None or not pairs:
            return True
        _, best_predicted_s = min(pairs)
        return predicted_s < (1.0 - gain) * best_predicted_s

    def _pairs(self) -> list[tuple[float, float]]:
        both = ((measured_s, self.predicted_s(knobs)) for knobs, measured_s in self._measured_s.items())
        return [(measured_s, predicted_s) for measured_s, predicted_s in both if predicted_s is not None]
