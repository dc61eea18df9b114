"""Recorded sweeps of real jobs (`bench.sweep`) as landscapes: a measurement is drawn from the recorded ones.

A setting between the recorded ones counts as the nearest of its route. A plan with explicit cuts that no planner
proposed in the real job counts as units of its median size.

A setting that was measured a few times under varying load looks faster or slower than it is, and the fastest of
hundreds is partly luck. Therefore the true time is an empirical Bayes estimate (James and Stein's): the medians are
shrunk towards a smooth surface over unit sizes and streams, one per route. The shrinkage is weak if the medians scatter
more around the surface than measurements scatter. If rounds agree, the medians stay unchanged.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import Algorithm, GradientLayout, Route, TransportKind

from .landscape import Landscape

SURFACE = 6
"""Number of terms of a quadratic surface over two knobs."""

RECORDED = Path(__file__).resolve().parents[2] / "recorded"


@dataclass(kw_only=True, eq=False)
class Recorded(Landscape):
    """A landscape whose times were measured in a real job.

    Attributes:
        samples_s: measured spans by setting.
        narrow_space: the space as narrowed by the real probes.
        model: planners' model from the real probes; None if no model fitted.
    """

    samples_s: dict[Knobs, list[float]] = field(default_factory=dict)
    narrow_space: KnobSpace
    model: PlanningModel | None

    def measure_s(self, knobs: Knobs, iteration: int, noise: float, rng: np.random.Generator) -> float:
        """Draw a measurement near a random recorded one: a smoothed bootstrap (Silverman and Young, 1987).

        Plain draws would often repeat one of four or five measurements, as if there were no noise.
        """
        known = self.nearest(knobs)
        if known is None:
            return math.inf
        logs = np.log(self.samples_s[known])
        width = 1.06 * len(logs) ** -0.2  # Silverman's bandwidth, in standard deviations.
        middle, spread = float(np.median(logs)), float(np.std(logs))
        deviation = rng.choice(logs) - middle + width * spread * rng.standard_normal()
        return math.exp(middle + deviation / math.sqrt(1.0 + width**2))

    def nearest(self, knobs: Knobs) -> Knobs | None:
        """Return the recorded setting nearest to `knobs`; None if their route was not recorded."""
        if knobs in self.samples_s:
            return knobs
        route = knobs.route
        candidates = [one for one in self.samples_s if one.cuts is None and (one.transport, one.algorithm) == route]

        def distance(one: Knobs) -> tuple[float, float]:
            return abs(math.log(one.streams / knobs.streams)), abs(math.log(one.unit_bytes / knobs.unit_bytes))

        return min(candidates, key=distance, default=None)

    def probed(self, noise: float, rng: np.random.Generator) -> tuple[KnobSpace, PlanningModel | None]:
        """Return the space and the model that the real warm-up derived from probes."""
        return self.narrow_space, self.model


def estimated(samples_s: Mapping[Knobs, Sequence[float]]) -> dict[Knobs, list[float]]:
    """Return the measured spans, scaled so that each uniform setting's median is its estimated true time."""
    routes: dict[Route, list[Knobs]] = defaultdict(list)
    for knobs in samples_s:
        if knobs.cuts is None:
            routes[knobs.route].append(knobs)
    found = {knobs: list(spans_s) for knobs, spans_s in samples_s.items()}
    for settings in routes.values():
        if len(settings) <= SURFACE:
            continue
        logs = [np.log(samples_s[knobs]) for knobs in settings]
        medians = np.array([np.median(log) for log in logs])
        size, streams = np.log2([(knobs.unit_bytes, knobs.streams) for knobs in settings]).T
        terms = np.stack([size**0, size, streams, size**2, streams**2, size * streams], axis=1)
        surface = terms @ np.linalg.lstsq(terms, medians)[0]
        deviations = [np.median(abs(log - median)) for log, median in zip(logs, medians, strict=True)]
        # A median's variance is π/2 times a mean's. A normal variable's median deviation is 0.6745 standard deviations.
        error = math.pi / 2 * (np.median(deviations) / 0.6745) ** 2 / statistics.fmean(len(log) for log in logs)
        scatter = float(((medians - surface) ** 2).sum() / (len(settings) - SURFACE))
        kept = max(0.0, 1.0 - error / scatter) if scatter > 0.0 else 1.0
        for knobs, factor in zip(settings, np.exp((1.0 - kept) * (surface - medians)).tolist(), strict=True):
            found[knobs] = [span_s * factor for span_s in samples_s[knobs]]
    return found


def recorded(path: Path) -> Recorded:
    """Return the landscape of a file from `bench.sweep`."""
    data = json.loads(path.read_text())
    samples_s = estimated({Knobs.from_json(row["knobs"]): row["spans_s"] for row in data["rows"]})
    medians_s = {knobs: statistics.median(spans_s) for knobs, spans_s in samples_s.items()}
    layout = GradientLayout(sizes=tuple(data["sizes"]))
    model = None if data["model"] is None else PlanningModel.from_json(data["model"])
    profile = model.profile if model is not None else Profile(ready_s=(0.0,) * len(layout.sizes), compute_s=0.0)
    sizes = sorted({knobs.unit_bytes for knobs in samples_s if knobs.cuts is None})

    def space(routes: Any, streams: Any) -> KnobSpace:
        return KnobSpace(
            routes=tuple((TransportKind(kind), Algorithm(algorithm)) for kind, algorithm in routes),
            streams=tuple(streams),
            unit_bytes=(sizes[0], sizes[-1]),
        )

    landscape = Recorded(
        family=f"recorded: {data['job']}",
        layout=layout,
        profile=profile,
        space=space(data["routes"], data["streams"]),
        default=Knobs.from_json(data["default"]),
        truth=lambda knobs: math.inf,
        samples_s=samples_s,
        narrow_space=space(data["narrowed_routes"], data["narrowed_streams"]),
        model=model,
        steps_per_octave=1,
        presumed=[TransportKind.SHARED_MEMORY.value, Algorithm.FLAT.value]
        not in data["routes"],  # Probes mislead within one host.
    )

    def truth(knobs: Knobs) -> float:
        known = landscape.nearest(knobs)
        return math.inf if known is None else medians_s[known]

    landscape.truth = truth
    return landscape


def recordings() -> list[Path]:
    """Return the files of all recorded landscapes."""
    return sorted(RECORDED.glob("*.json"))
