"""How much each probe of a link may carry, so that all of them together keep to a time, however slow the link is.

Pure: it decides by times that all ranks have agreed on, so that all decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sirtaki.autotune.knobs import KIB, MIB

STREAM_BYTES = MIB
"""What each stream carries in one pass of a probe where there is time."""

PASSES = 2
"""That are timed as one, after one that is not."""

SMALL_BYTES, LEAST_LARGE_BYTES = 64 * KIB, 128 * KIB
"""What a small unit is, and no larger one is made smaller than the second: α shows in the difference."""

SOUNDING_BYTES = (4 * KIB, SMALL_BYTES)
"""Of single all-reduces that tell what probes will take."""

GOES_ON = 0.5
"""Where twice the streams have carried twice as much, four times are expected to carry so much more, as an exponent."""

LEAST_SHARE = 0.25
"""Of an all-reduce's time, what counts as transmission at least."""

OTHERS = 3
"""So many probes that need not be are to have their share of the time, too, if one could carry less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSize:
    """What one probe carries.

    Attributes:
        unit_bytes: of each all-reduce.
        rounds: all-reduces on each stream, in one pass.
    """

    unit_bytes: int
    rounds: int


class ProbeBudget:
    """Of one route's probes and what they have shown so far."""

    def __init__(self, soundings_s: tuple[float, float]) -> None:
        """Args: `soundings_s` are times of one all-reduce of `SOUNDING_BYTES` each, on one stream."""
        self._alpha_s, sounded_s = soundings_s
        self._sounded = self._rate(SOUNDING_BYTES[1], sounded_s)
        self._probed: dict[int, float] = {}  # bytes a second by number of streams

    def learn(self, *, streams: int, unit_bytes: int, round_s: float) -> None:
        """A probe has run."""
        rate = self._rate(streams * unit_bytes, round_s)
        self._probed[streams] = max(rate, self._probed.get(streams, 0.0))

    def _rate(self, size_bytes: int, seconds: float) -> float:
        """Bytes a second; a start-up time that is as long as the whole was a hiccup."""
        return size_bytes / max(seconds - self._alpha_s, LEAST_SHARE * seconds)

    def expected_s(self, size: ProbeSize, *, streams: int) -> float:
        """What a probe takes: more streams carry more together half as much as those have that were seen."""
        probed = [(count, rate) for count, rate in self._probed.items() if count <= streams]
        count, rate = max(probed, default=(1, self._sounded))
        one = self._probed.get(1, rate)
        if count > 1 and streams > count and rate > one:
            rate *= (streams / count) ** (GOES_ON * min(1.0, math.log(rate / one) / math.log(count)))
        return (1 + PASSES) * size.rounds * (self._alpha_s + streams * size.unit_bytes / rate)

    def size(self, unit_bytes: int, streams: int, *, left_s: float, needed_more: int) -> ProbeSize | None:
        """The largest probe of a shape that there is time for.

        Args:
            unit_bytes: of a unit where there is time.
            streams: that work side by side.
            left_s: until the budget ends; may be negative.
            needed_more: probes that must be taken, this one included; if it is one of them, the smallest is the least.
                0 = this one need not be.

        Returns:
            None: there is no time.
        """
        share_s = left_s / (needed_more + OTHERS)
        sizes = list(_sizes(unit_bytes))
        for size in sizes:
            if self.expected_s(size, streams=streams) <= share_s:
                return size
        return sizes[-1] if needed_more or self.expected_s(sizes[-1], streams=streams) <= left_s else None


def _sizes(unit_bytes: int) -> Iterable[ProbeSize]:
    """A probe's sizes, the largest first: fewer rounds, then smaller units."""
    least = min(unit_bytes, LEAST_LARGE_BYTES)
    stream_bytes = STREAM_BYTES
    while stream_bytes >= least:
        unit = min(unit_bytes, stream_bytes)
        yield ProbeSize(unit_bytes=unit, rounds=stream_bytes // unit)
        stream_bytes //= 2
