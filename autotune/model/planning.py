"""What planners know of a job, and what they predict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sirtaki.comm.plan import Algorithm, GradientLayout, Route, TransportKind
from sirtaki.errors import PlanError, TuningError
from sirtaki.measures import LinkModel

from ..knobs import Knobs
from ..trial import Trial
from .fits import ContentionModel
from .replayer import SharedHost
from .simulator import Profile, Simulator


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningModel:
    """The planners' view of one flat buffer.

    Attributes:
        layout: gradients in the order in which they become ready.
        profile: when they do.
        links: cost of the routes that have been measured; at least one.
        contention: LIBRA's model, or None where computation and communication do not slow each other down, or
            nobody has measured it.
        host: that all ranks share, where they communicate on the processors that compute; else None.

    Raises:
        TuningError: profile and layout are of different models, or no route has a link.
    """

    layout: GradientLayout
    profile: Profile
    links: Mapping[Route, LinkModel]
    contention: ContentionModel | None = None
    host: SharedHost | None = None

    def __post_init__(self) -> None:
        self.profile.check_fits(self.layout)
        if not self.links:
            raise TuningError("a planning model needs the link of at least one route")

    def simulator(self, route: Route) -> Simulator:
        """The iteration on that route."""
        return Simulator(
            layout=self.layout,
            profile=self.profile,
            link=self.links[route],
            contention=self.contention,
            host=self.host,
        )

    def link_between_hosts(self, route: Route) -> LinkModel | None:
        """The link of that route; None if it was not measured, or if units take processors that compute, too."""
        return None if self.host is not None else self.links.get(route)

    @property
    def bound_s(self) -> float:
        """What no plan's span falls below: the backward pass from its first gradient on, or all bytes at full rate.

        The rate is the best that any route has shown with any number of streams; it counts gradient bytes, so the
        2 (P − 1) / P of a ring is in it.
        """
        fastest = max(max(link.throughput) for link in self.links.values())
        compute_s = max(self.profile.ready_s) - min(self.profile.ready_s)
        return max(compute_s, self.layout.total_bytes / fastest)

    def differs_from(self, other: PlanningModel) -> bool:
        """Whether plans should be made anew: another layout or route, or a parameter moved beyond its error.

        Ready times count as moved if one of them moved by more than a tenth of the backward pass.
        """
        if self.layout != other.layout or set(self.links) != set(other.links):
            return True
        if any(link.differs_from(other.links[route]) for route, link in self.links.items()):
            return True
        if (self.contention, self.host) != (other.contention, other.host):
            return True
        tolerance_s = 0.1 * max(self.profile.compute_s, other.profile.compute_s)
        pairs = zip(self.profile.ready_s, other.profile.ready_s, strict=True)
        return any(abs(mine - theirs) > tolerance_s for mine, theirs in pairs)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict, to be saved for "what if" questions and reports; `from_json` is its inverse."""
        layout = self.layout
        return {
            "layout": {
                "sizes": list(layout.sizes),
                "itemsize_bytes": layout.itemsize_bytes,
                "dtype": layout.dtype,
                "device": layout.device,
                "names": list(layout.names),
            },
            "profile": self.profile.to_json(),
            "links": [
                {"transport": transport.value, "algorithm": algorithm.value, "link": link.to_json()}
                for (transport, algorithm), link in self.links.items()
            ],
            "contention": None if self.contention is None else self.contention.to_json(),
            "host": None if self.host is None else self.host.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanningModel:
        """The model that `to_json` described.

        Raises:
            TuningError: a field is missing or has a value that is invalid.
        """
        try:
            layout, contention, host = data["layout"], data.get("contention"), data.get("host")
            return cls(
                layout=GradientLayout(
                    sizes=tuple(layout["sizes"]),
                    itemsize_bytes=layout["itemsize_bytes"],
                    dtype=layout["dtype"],
                    device=layout["device"],
                    names=tuple(layout["names"]),
                ),
                profile=Profile.from_json(data["profile"]),
                links={
                    (TransportKind(entry["transport"]), Algorithm(entry["algorithm"])): LinkModel.from_json(
                        entry["link"]
                    )
                    for entry in data["links"]
                },
                contention=None if contention is None else ContentionModel.from_json(contention),
                host=None if host is None else SharedHost.from_json(host),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise TuningError(f"this is not a saved planning model: {err!r}") from err


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
