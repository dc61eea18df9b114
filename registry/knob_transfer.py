"""How knobs that were good on one link and model are changed for another: the arithmetic of a warm start.

Knobs are as `Knobs.to_json` gives them.

It is the planners' model: an all-reduce of b bytes takes α + β·b, and n streams together move G(n) bytes a second. M
bytes in units of u cost (M/u)·α to start up, and the last unit, whose transfer nothing hides, u·β; together they are
least at u = √(M·α/β), so unit sizes go with that root. Of n streams, those that are starting up move nothing: to keep K
of them moving, K where G(n) stops growing, takes K + α·G(K)/u.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from sirtaki.link_model import LinkModel
from sirtaki.unit_sizes import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES

from .topology import LinkClass

# Sizes and speeds are taken for alike where they differ by less than this factor: α and β are noisy.
_ALIKE = 1.25

# Another stream that adds less than this part to the throughput is not worth its cost.
_LEAST_GAIN = 0.05

# A fit may give almost no latency, and the ratio of two such is noise: nothing starts up faster than this.
_LEAST_STARTUP_S = 1e-6

RouteNames = tuple[str, str]
"""Transport and algorithm, by their names in knobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permitted:
    """What a job may choose.

    Attributes:
        routes: the default one first.
        streams: ascending.
        unit_bytes: smallest and largest.
        threads: ascending, or a single None.
    """

    routes: tuple[RouteNames, ...]
    streams: tuple[int, ...]
    unit_bytes: tuple[int, int] = (SMALLEST_UNIT_BYTES, LARGEST_UNIT_BYTES)
    threads: tuple[int | None, ...] = (None,)

    def nearest(self, knobs: Mapping[str, Any]) -> dict[str, Any]:
        """The knobs with unit size, streams and threads moved to the nearest permitted values, by ratio."""
        low, high = self.unit_bytes
        return {
            **knobs,
            "unit_bytes": max(low, min(high, knobs["unit_bytes"])),
            "streams": min(self.streams, key=lambda n: abs(math.log(n / knobs["streams"]))),
            "threads": self._threads(knobs["threads"]),
        }

    def _threads(self, wanted: int | None) -> int | None:
        counts = [count for count in self.threads if count is not None]
        if wanted is None or not counts:
            return wanted if wanted in self.threads else self.threads[0]
        return min(counts, key=lambda n: abs(math.log(n / wanted)))


def route_of(knobs: Mapping[str, Any]) -> RouteNames:
    """What carries the units."""
    return knobs["transport"], knobs["algorithm"]


def alike(factor: float) -> bool:
    """Whether a ratio is near enough to one not to be acted on."""
    return 1 / _ALIKE < factor < _ALIKE


def link_class(link: LinkModel) -> LinkClass:
    """The class of a measured link: of its throughput on as many streams as it takes, and its start-up time."""
    return LinkClass.of(bandwidth_bytes_per_s=max(link.throughput), latency_s=_startup_s(link))


def link_ratios(there: LinkModel, here: LinkModel) -> tuple[float, float]:
    """How many times there's start-up time and throughput of one stream here's are."""
    return _startup_s(here) / _startup_s(there), here.throughput[0] / there.throughput[0]


def unit_factor(latency_ratio: float, bandwidth_ratio: float, size_ratio: float) -> float:
    """How many times as large units should be: the ratio of √(M·α/β)."""
    return math.sqrt(latency_ratio * bandwidth_ratio * size_ratio)


def with_uniform_units(knobs: Mapping[str, Any], itemsize_bytes: int) -> dict[str, Any]:
    """Explicit cuts replaced by uniform ones like the unit in which the middle byte travels.

    Large units count for what they carry, and so they should: small ones at either end are there for their place.
    """
    if not knobs["cuts"]:
        return {**knobs, "cuts": None}
    stops = [0, *(cut[0] for cut in knobs["cuts"])]
    units = [(stop - start, cut[2]) for (start, stop), cut in zip(pairwise(stops), knobs["cuts"], strict=True)]
    units.sort(key=lambda unit: unit[0])
    carried = accumulate(size for size, _ in units)
    size, threads = next(unit for unit, sum_ in zip(units, carried, strict=True) if 2 * sum_ >= stops[-1])
    uniform = {"cuts": None, "unit_bytes": bounded(size * itemsize_bytes), "threads": threads or knobs["threads"]}
    return {**knobs, **uniform}


def scaled_streams(knobs: Mapping[str, Any], there: LinkModel, here: LinkModel, *, unit_bytes: int) -> int:
    """As many times what keeps the link busy here as it was there; unchanged where a G(n) was not measured."""
    streams: int = knobs["streams"]
    wanted_there, wanted_here = _streams_wanted(there, knobs["unit_bytes"]), _streams_wanted(here, unit_bytes)
    if wanted_there is None or wanted_here is None or alike(wanted_here / wanted_there):
        return streams
    most = max(len(here.throughput), streams)
    return max(1, min(most, round(streams * wanted_here / wanted_there)))


def bounded(unit_bytes: float) -> int:
    """A unit size that any job may have."""
    return max(SMALLEST_UNIT_BYTES, min(LARGEST_UNIT_BYTES, round(unit_bytes)))


def _startup_s(link: LinkModel) -> float:
    return max(link.startup_s, _LEAST_STARTUP_S)


def _streams_wanted(link: LinkModel, unit_bytes: int) -> float | None:
    rates = link.throughput
    if len(rates) < 2:
        return None
    knee = next((n for n in range(1, len(rates)) if rates[n] < rates[n - 1] * (1 + _LEAST_GAIN)), len(rates))
    return knee + _startup_s(link) * rates[knee - 1] / unit_bytes
