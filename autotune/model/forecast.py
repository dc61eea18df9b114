"""How far a planning model can be believed: its predictions against the trials that have run, whoever proposed them.

A model is believed until trials speak against it. What counts is the order: of two measured settings, was the one
that it predicted to be faster the faster one? Pairs weigh as much as they differ, so that near-equals, whose order is
noise, say little.

Where predictions are off by more than noise, the links are fitted anew, to trials instead of probes (LIBRA's algorithm
2, `calibration`): an idle network is not the one beside computation. A model that fits no trials stays, and is doubted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median

from sirtaki.comm.plan import Route
from sirtaki.errors import PlanError, TuningError

from ..knobs import Knobs
from ..trial import Trial
from .calibration import calibrate_link
from .planning import PlanningModel

logger = logging.getLogger(__name__)

BENEFIT_OF_THE_DOUBT = 0.05
"""Weight of the belief before any trial: as much as one pair that differs by 5 %."""

LARGEST_WEIGHT = 0.5
"""Of a pair; how much slower something hopeless is says no more than that it is."""

BELIEVED = 0.4
"""Agreement from which on a model is believed: 70 % of what pairs weigh are in its order."""

MOST_COMPARED = 24

OFF = 0.1
"""Share by which half of the predictions of a route must miss the trials for its link to be fitted anew."""

BETTER = 0.67
"""Times what predictions missed before: what a fitted link must reach to be taken."""

FEWEST_TRIALS = 5
"""On a route, to fit its link to; then again whenever there are half as many more."""


class Forecast:
    """A model's predictions, and what became of them.

    Attributes:
        model: predicts, with links as trials have shown them.
    """

    def __init__(self, model: PlanningModel) -> None:
        self.model = self._probed = model
        self._fitted_to: dict[Route, int] = {}  # trials
        self._measured: dict[Knobs, Trial] = {}
        self._predicted_s: dict[Knobs, float | None] = {}
        self._agreement: float | None = None

    def update_model(self, model: PlanningModel) -> None:
        """Takes over a model that knows better; what has been measured stays."""
        if model is not self._probed and model is not self.model:
            self.model = self._probed = model
            self._fitted_to, self._predicted_s, self._agreement = {}, {}, None
            self._fit()

    def tell(self, trials: Sequence[Trial]) -> None:
        """Takes measured spans in; more than once does no harm."""
        for trial in trials:
            known = self._measured.get(trial.knobs)
            if math.isfinite(trial.span_s) and (known is None or known.span_s != trial.span_s):
                self._measured[trial.knobs] = trial
                self._agreement = None
        if self._agreement is None:
            self._fit()

    def predicted_s(self, knobs: Knobs) -> float | None:
        """Span by simulation; None on a route that nobody has probed, or of cuts that are another layout's."""
        if knobs not in self._predicted_s:
            route = (knobs.transport, knobs.algorithm)
            try:
                known = route in self.model.links
                self._predicted_s[knobs] = self.model.simulator(route).run_knobs(knobs).span_s if known else None
            except PlanError:
                self._predicted_s[knobs] = None
        return self._predicted_s[knobs]

    @property
    def agreement(self) -> float:
        """From -1, all pairs in the other order, to 1; the weighted kin of Kendall's rank correlation."""
        if self._agreement is None:
            pairs = self._pairs()[-MOST_COMPARED:]
            right = weight = BENEFIT_OF_THE_DOUBT
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
        both = ((trial.span_s, self.predicted_s(knobs)) for knobs, trial in self._measured.items())
        return [(measured_s, predicted_s) for measured_s, predicted_s in both if predicted_s is not None]

    def _fit(self) -> None:
        for route, link in self._probed.links.items():
            ran = [trial for knobs, trial in self._measured.items() if (knobs.transport, knobs.algorithm) == route]
            if len(ran) < max(FEWEST_TRIALS, 1.5 * self._fitted_to.get(route, 0)):
                continue
            self._fitted_to[route] = len(ran)
            before = self._misses(ran)
            if before <= OFF:
                continue
            model, predicted_s = self.model, self._predicted_s
            try:
                fitted = calibrate_link(link, layout=model.layout, profile=model.profile, trials=ran)
            except (PlanError, TuningError) as err:
                logger.debug("%s: %s", route[0].value, err)
                continue
            self.model, self._predicted_s = replace(model, links={**model.links, route: fitted}), {}
            if self._misses(ran) > BETTER * before:
                self.model, self._predicted_s = model, predicted_s
            else:
                self._agreement = None

    def _misses(self, ran: Sequence[Trial]) -> float:
        """By how much the median of the predictions misses the trials."""
        both = ((trial.span_s, self.predicted_s(trial.knobs)) for trial in ran)
        return median([abs(math.log(predicted_s / span_s)) for span_s, predicted_s in both if predicted_s] or [0.0])
