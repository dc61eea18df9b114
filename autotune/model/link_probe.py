"""What is measured of a link, and what fits are made of."""

import math
from dataclasses import dataclass

from sirtaki.errors import TuningError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbe:
    """Equal all-reduces, as many on each of `streams` streams, all submitted at once.

    Several in a row show the pace that an iteration's units keep; a single one profits from whatever credit an idle
    link grants (shapers and clouds let short bursts pass).

    Attributes:
        unit_bytes: size of each.
        streams: that work side by side.
        seconds: from the start until the last was done.
        rounds: all-reduces on each stream.
        busy: processors that each rank has kept busy meanwhile; None = not measured.
    """

    unit_bytes: int
    streams: int
    seconds: float
    rounds: int = 1
    busy: float | None = None

    def __post_init__(self) -> None:
        positive = min(self.unit_bytes, self.streams, self.rounds) >= 1
        if not (positive and math.isfinite(self.seconds) and self.seconds > 0):
            raise TuningError(f"a probe needs positive bytes, streams, rounds and seconds, not {self}")

    @property
    def round_s(self) -> float:
        """Seconds that one all-reduce on each stream took."""
        return self.seconds / self.rounds
