"""Recorded sweeps of real jobs (`bench.sweep`) as landscapes: a measurement is drawn from those that were taken.

What is between the recorded settings counts as the nearest of its route; of explicit cuts only what the planners
proposed in the real job is known, and everything else cannot be run.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sirtaki.autotune.knobs import Knobs, KnobSpace
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.profile import Profile
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import Algorithm, TransportKind

from .landscape import Landscape

RECORDED = Path(__file__).resolve().parents[2] / "recorded"


@dataclass(kw_only=True, eq=False)
class Recorded(Landscape):
    """A landscape that was measured.

    Attributes:
        samples_s: measured spans by setting.
        narrow_space: what the real probes left of the space.
        model: of the real probes.
    """

    samples_s: dict[Knobs, list[float]] = field(default_factory=dict)
    narrow_space: KnobSpace
    model: PlanningModel | None

    def measure_s(self, knobs: Knobs, iteration: int, noise: float, rng: np.random.Generator) -> float:
        """One of the recorded measurements; the noise is theirs."""
        known = self.nearest(knobs)
        return math.inf if known is None else float(rng.choice(self.samples_s[known]))

    def nearest(self, knobs: Knobs) -> Knobs | None:
        """The recorded setting that these count as."""
        if knobs in self.samples_s or knobs.cuts is not None:
            return knobs if knobs in self.samples_s else None
        route = (knobs.transport, knobs.algorithm)
        candidates = [one for one in self.samples_s if one.cuts is None and (one.transport, one.algorithm) == route]

        def distance(one: Knobs) -> tuple[float, float]:
            return abs(math.log(one.streams / knobs.streams)), abs(math.log(one.unit_bytes / knobs.unit_bytes))

        return min(candidates, key=distance, default=None)

    def probed(self, noise: float, rng: np.random.Generator) -> tuple[KnobSpace, PlanningModel | None]:
        """What the real warm-up would have known."""
        return self.narrow_space, self.model


def recorded(path: Path) -> Recorded:
    """The landscape of a file that `bench.sweep` wrote."""
    data = json.loads(path.read_text())
    samples_s = {Knobs.from_json(row["knobs"]): row["spans_s"] for row in data["rows"]}
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
    )

    def truth(knobs: Knobs) -> float:
        known = landscape.nearest(knobs)
        return math.inf if known is None else medians_s[known]

    landscape.truth = truth
    return landscape


def recordings() -> list[Path]:
    """All files that there are."""
    return sorted(RECORDED.glob("*.json"))
