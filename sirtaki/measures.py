"""Quantities that all packages use: a cost model of all-reduces, limits of bucket sizes, and measured speed-ups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import msgspec

from sirtaki.errors import TuningError, require
from sirtaki.fields import Number, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """Cost model of all-reduces over one route (a transport with a flat or hierarchical algorithm).

    Attributes:
        alpha_s: start-up time of one all-reduce. It takes no throughput from concurrent all-reduces (equation 9 of the
            ASC-WFBP paper).
        throughput: the concurrency curve G(n), `(max_streams,)`: total gradient bytes all-reduced per second while
            n = 1, 2, … streams are active. Each stream gets G(n) / n. G is constant beyond `max_streams`.
        host_s: processor time of one all-reduce, independent of its size. All streams share one processor, which works
            while the link transmits. An all-reduce ends when both processor and link have finished it.
        residual: relative error (root mean square) of the fit to measured times. 0.0 if the model was not measured.
        busy: number of processors that a rank keeps busy during a single all-reduce. It is below 1 if the rank sleeps
            while it waits for messages. Relevant only if ranks of one host share its processors.

    Raises:
        TuningError: `alpha_s` or `host_s` is negative, or a throughput is not positive.
    """

    alpha_s: Number
    throughput: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1, max_length=1024)]
    host_s: Number = 0.0
    residual: Number = 0.0
    busy: Number = 1.0

    def __post_init__(self) -> None:
        for name, seconds in (("alpha_s", self.alpha_s), ("host_s", self.host_s)):
            valid = math.isfinite(seconds) and seconds >= 0
            require(valid, name, "a finite number of seconds, at least 0", seconds, TuningError)
        valid = bool(self.throughput) and all(math.isfinite(rate) and rate > 0 for rate in self.throughput)
        require(valid, "throughput", "positive, finite numbers", self.throughput, TuningError)

    @property
    def beta_s_per_byte(self) -> float:
        """Return the transmission time of one byte in a single all-reduce (b in the ASC-WFBP paper)."""
        return 1 / self.throughput[0]

    @property
    def gamma(self) -> float:
        """Return the factor by which two concurrent all-reduces are each slower than one alone (γ in ASC-WFBP)."""
        return 2 * self.throughput[0] / self.total_bytes_per_s(2)

    def total_bytes_per_s(self, active: int) -> float:
        """Return the total throughput of `active` ≥ 1 streams (parallel connections) that all-reduce concurrently."""
        return self.throughput[min(active, len(self.throughput)) - 1]

    @property
    def startup_s(self) -> float:
        """Return the time of an all-reduce of zero bytes, for planners whose model has a single start-up time (a)."""
        return self.alpha_s + self.host_s

    def together_s(self, unit_bytes: float, *, streams: int) -> float:
        """Return the time of `streams` equal all-reduces that start together, each on its own stream (connection).

        The formula extends equations 3 and 9 of the ASC-WFBP paper from two streams to n.
        """
        return self.alpha_s + streams * max(self.host_s, unit_bytes / self.total_bytes_per_s(streams))

    def rescaled(self, *, from_ranks: int, to_ranks: int) -> LinkModel:
        """Return the model of this link for a ring all-reduce over another number of ranks, N.

        Start-up time scales with N − 1, and time per byte with (N − 1) / N (equation 4 of the LIBRA paper).

        Raises:
            TuningError: one of the rings has fewer than two ranks.
        """
        hops, volume = ring_ratios(from_ranks, to_ranks)
        return replace(
            self,
            alpha_s=self.alpha_s * hops,
            throughput=tuple(rate / volume for rate in self.throughput),
            host_s=self.host_s * hops,  # In a ring of N ranks, each rank sends 2 (N − 1) messages.
        )

    def differs_from(self, other: LinkModel) -> bool:
        """Return whether a parameter of this model differs from that of `other` by more than the error of their fits.

        In this case, plans that were computed with one of the models must be computed again with the other model.
        """
        tolerance = max(self.residual, other.residual, 0.01)
        width = max(len(self.throughput), len(other.throughput))
        pairs = [(self.alpha_s, other.alpha_s), (self.host_s, other.host_s)]
        pairs += [(self.total_bytes_per_s(n), other.total_bytes_per_s(n)) for n in range(1, width + 1)]
        return any(abs(one - another) > tolerance * max(one, another) for one, another in pairs)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict. `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LinkModel:
        """Create a link model from the result of `to_json`."""
        return msgspec.convert(data, cls)


SMALLEST_UNIT_BYTES, LARGEST_UNIT_BYTES = 64 * 1024, 256 * 1024**2
"""Minimum and maximum unit (bucket) size that the tuner tries. The time of a smaller unit is almost only start-up time,
so that still smaller units are no faster.
"""


def ring_ratios(from_ranks: int, to_ranks: int) -> tuple[float, float]:
    """Return the factors by which hops and bytes per link of a ring all-reduce change with the number of ranks.

    Raises:
        TuningError: one of the rings has fewer than two ranks.
    """
    found = from_ranks, to_ranks
    require(min(found) >= 2, "number of ranks of a ring all-reduce", "at least 2", found, TuningError)
    hops = (to_ranks - 1) / (from_ranks - 1)
    return hops, hops * from_ranks / to_ranks


def ring_bytes(n_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends, and receives, in a ring all-reduce of a tensor of `n_bytes` bytes."""
    return 2.0 * (ranks - 1) / ranks * n_bytes


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, which gets an "s" unless the number is 1: `1 step`, `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with three significant digits and no exponent: `95.6`, `1120`."""
    value = 1e3 * seconds
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def in_ms(seconds: float) -> str:
    """Format seconds as milliseconds with their unit: `95.6 ms`, `1120 ms`."""
    return f"{milliseconds(seconds)} ms"


def faster(before_s: float, after_s: float) -> str:
    """Format a speed-up: `1.24× faster`, `1.10× slower`, or `as fast` if times differ by less than 0.5 %."""
    ratio = before_s / after_s
    if abs(ratio - 1.0) < 0.005:
        return "as fast"
    factor, word = (ratio, "faster") if ratio > 1.0 else (1.0 / ratio, "slower")
    return f"{factor:.2f}× {word}" if factor < 10.0 else f"{factor:.0f}× {word}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Speed-up of one setting over another, measured by a paired comparison.

    Attributes:
        times: mean of old time divided by new time. 1.07 means 7 % faster.
        low, high: 95 % confidence interval of `times`.

    Raises:
        TuningError: 0 < `low` ≤ `times` ≤ `high` does not hold.
    """

    times: float
    low: float
    high: float

    def __post_init__(self) -> None:
        valid = 0.0 < self.low <= self.times <= self.high < math.inf
        require(valid, "Gain", "0 < low <= times <= high", self, TuningError)

    @property
    def proved(self) -> bool:
        """Return whether the speed-up is proved: the whole confidence interval is above 1."""
        return self.low > 1.0

    def pooled(self, other: Gain) -> Gain:
        """Combine two measurements of the same speed-up. Each is weighted by its inverse variance."""
        middles, halves = [], []
        for one in (self, other):
            middles.append(math.log(one.times))
            halves.append(max(math.log(one.high / one.low) / 2.0, 1e-6))
        weights = [half**-2 for half in halves]
        mean = sum(map(math.prod, zip(weights, middles, strict=True))) / sum(weights)
        half = sum(weights) ** -0.5
        return Gain(times=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half))

    def multiplied(self, other: Gain) -> Gain:
        """Multiply two successive speed-ups. If `other` is B over A, and this one is C over B, the product is C over A.

        The product's interval is conservative: its limits are the products of the limits.
        """
        return Gain(times=self.times * other.times, low=self.low * other.low, high=self.high * other.high)

    def describe(self) -> str:
        """Format the gain: `7 % faster, ± 2`, or `2.31× faster, ± 0.04`."""
        # Half the interval's width below the estimate. In a wide interval, the part above it is longer.
        half = self.times - self.low
        if abs(self.times - 1.0) >= 1.0:
            return f"{self.times:.2f}× faster, ± {half:.2f}"
        digits = 0 if half >= 0.0095 else 1
        word = "faster" if self.times >= 1.0 else "slower"
        return f"{100 * abs(self.times - 1.0):.{digits}f} % {word}, ± {100 * half:.{digits}f}"


def describe_gain(gain: Gain | None, before_s: float, after_s: float) -> str:
    """Format a measured gain with its interval. If `gain` is None, format the times' ratio, marked as not proved."""
    if gain is not None:
        return gain.describe()
    ratio = faster(before_s, after_s)
    return ratio if ratio == "as fast" else f"{ratio} (not proved)"
