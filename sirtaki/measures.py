"""Measures that all parts share: the link model, limits of a unit's size, and when one time is faster than another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import msgspec

from sirtaki.errors import TuningError
from sirtaki.fields import Number, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """Cost of all-reduces on one route.

    Attributes:
        alpha_s: start-up time of one all-reduce; it takes no throughput from others (ASC-WFBP eq. 9).
        throughput: the concurrency curve G(n), `(max_streams,)`: gradient bytes all-reduced per second in total
            while n = 1, 2, … streams are active. Each of them moves at G(n) / n. Beyond its end it is constant.
        host_s: processor time of one all-reduce, whatever its size. All streams share the processor, which works while
            the link transmits: an all-reduce is over when both are done with it.
        residual: relative error (root mean square) of the fit it came from; 0.0 for a description.
        busy: processors that each rank keeps busy while a unit is under way by itself; below 1 where messages are
            waited for. Counts where the ranks of one host share its processors.

    Raises:
        TuningError: the start-up or processor time is negative, or a throughput is not positive.
    """

    alpha_s: Number
    throughput: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1, max_length=1024)]
    host_s: Number = 0.0
    residual: Number = 0.0
    busy: Number = 1.0

    def __post_init__(self) -> None:
        for name, seconds in (("alpha_s", self.alpha_s), ("host_s", self.host_s)):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise TuningError(f"{name} must be finite and not negative, not {seconds}")
        if not self.throughput or not all(math.isfinite(rate) and rate > 0 for rate in self.throughput):
            raise TuningError(f"throughput must be positive for each number of streams: {self.throughput}")

    @classmethod
    def two_way(cls, *, alpha_s: float, beta_s_per_byte: float, gamma: float) -> LinkModel:
        """ASC-WFBP's link: two all-reduces at a time, each γ times slower than one alone (eq. 3 and 9)."""
        return cls(alpha_s=alpha_s, throughput=(1 / beta_s_per_byte, 2 / (gamma * beta_s_per_byte)))

    @property
    def beta_s_per_byte(self) -> float:
        """Transmission time of one byte while nothing else runs (ASC-WFBP's b)."""
        return 1 / self.throughput[0]

    @property
    def gamma(self) -> float:
        """How much slower each of two simultaneous all-reduces is than one alone (ASC-WFBP's γ)."""
        return 2 * self.throughput[0] / self.total_bytes_per_s(2)

    def total_bytes_per_s(self, active: int) -> float:
        """G(n), for n ≥ 1."""
        return self.throughput[min(active, len(self.throughput)) - 1]

    @property
    def startup_s(self) -> float:
        """The least that one all-reduce costs, to planners that know no processor but only a start-up time (a)."""
        return self.alpha_s + self.host_s

    def together_s(self, unit_bytes: float, *, streams: int) -> float:
        """Time of `streams` equal all-reduces that start together, one a stream (ASC-WFBP eq. 3, 9, n ways)."""
        return self.alpha_s + streams * max(self.host_s, unit_bytes / self.total_bytes_per_s(streams))

    def rescaled(self, *, from_ranks: int, to_ranks: int) -> LinkModel:
        """The same link under a ring of another size: a ∝ N − 1 and ĉ ∝ (N − 1) / N (LIBRA eq. 4).

        Raises:
            TuningError: a ring has fewer than two ranks.
        """
        if min(from_ranks, to_ranks) < 2:
            raise TuningError(f"a ring has at least two ranks: cannot go from {from_ranks} to {to_ranks}")
        hops = (to_ranks - 1) / (from_ranks - 1)
        volume = hops * from_ranks / to_ranks
        return replace(
            self,
            alpha_s=self.alpha_s * hops,
            throughput=tuple(rate / volume for rate in self.throughput),
            host_s=self.host_s * hops,  # 2 (N − 1) messages a rank
        )

    def differs_from(self, other: LinkModel) -> bool:
        """Return whether a parameter moved by more than either fit's own error, so that plans should be made anew."""
        tolerance = max(self.residual, other.residual, 0.01)
        width = max(len(self.throughput), len(other.throughput))
        pairs = [(self.alpha_s, other.alpha_s), (self.host_s, other.host_s)]
        pairs += [(self.total_bytes_per_s(n), other.total_bytes_per_s(n)) for n in range(1, width + 1)]
        return any(abs(mine - theirs) > tolerance * max(mine, theirs) for mine, theirs in pairs)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LinkModel:
        """The link that `to_json` described."""
        return msgspec.convert(data, cls)


SMALLEST_UNIT_BYTES, LARGEST_UNIT_BYTES = 64 * 1024, 256 * 1024**2
"""The range of the tuner; below it the start-up of a reduction is all that counts."""


def ring_bytes(n_bytes: float, ranks: int) -> float:
    """What a rank sends, and receives, in an all-reduce of a tensor of that many bytes, if it is a ring's."""
    return 2.0 * (ranks - 1) / ranks * n_bytes


def milliseconds(seconds: float) -> str:
    """`95.6`, `1120`: three digits, or all before the point."""
    value = 1e3 * seconds
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def in_ms(seconds: float) -> str:
    """`95.6 ms`, `1120 ms`."""
    return f"{milliseconds(seconds)} ms"


def faster(before_s: float, after_s: float) -> str:
    """`1.24× faster`, `1.10× slower`, or `as fast` where the difference is less than half a percent."""
    ratio = before_s / after_s
    if abs(ratio - 1.0) < 0.005:
        return "as fast"
    factor, word = (ratio, "faster") if ratio > 1.0 else (1.0 / ratio, "slower")
    return f"{factor:.2f}× {word}" if factor < 10.0 else f"{factor:.0f}× {word}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How many times as fast as another setting one is, as paired turns of both have shown.

    Attributes:
        times: the mean, 1.07 = 7 % faster.
        low, high: its 95 % interval.

    Raises:
        TuningError: they are not in this order, or not positive.
    """

    times: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0.0 < self.low <= self.times <= self.high < math.inf:
            raise TuningError(f"a gain of {self.times} does not lie in its interval from {self.low} to {self.high}")

    @property
    def proved(self) -> bool:
        """The whole interval is a gain."""
        return self.low > 1.0

    def pooled(self, other: Gain) -> Gain:
        """What both together show of the same gain, each weighted by its precision."""
        middles, halves = [], []
        for one in (self, other):
            middles.append(math.log(one.times))
            halves.append(max(math.log(one.high / one.low) / 2.0, 1e-6))
        weights = [half**-2 for half in halves]
        mean = sum(map(math.prod, zip(weights, middles, strict=True))) / sum(weights)
        half = sum(weights) ** -0.5
        return Gain(times=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half))

    def after(self, other: Gain) -> Gain:
        """Over what the other gain is over, where this one is over what has that; its interval holds both."""
        return Gain(times=self.times * other.times, low=self.low * other.low, high=self.high * other.high)

    def describe(self) -> str:
        """`7 % faster, ± 2`, or `2.31× faster, ± 0.04`."""
        half = self.times - self.low  # the other side is longer where the interval is wide
        if abs(self.times - 1.0) >= 1.0:
            return f"{self.times:.2f}× faster, ± {half:.2f}"
        digits = 0 if half >= 0.0095 else 1
        word = "faster" if self.times >= 1.0 else "slower"
        return f"{100 * abs(self.times - 1.0):.{digits}f} % {word}, ± {100 * half:.{digits}f}"


def told_gain(gain: Gain | None, before_s: float, after_s: float) -> str:
    """The gain with its interval; without one how the times compare, and that nothing is proved."""
    told = faster(before_s, after_s)
    return gain.describe() if gain is not None else told if told == "as fast" else f"{told} (not proved)"
