"""Moments that torch.profiler tells, which has a clock of its own, as seconds of `time.perf_counter`.

Marks are recorded in both clocks: each was made between two moments of ours. All of them together bound what lies
between the clocks from both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sirtaki.errors import RecordingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One mark in both clocks.

    Attributes:
        before_s, after_s: of `time.perf_counter`, around it.
        start_ns, duration_ns: of the other clock.
    """

    before_s: float
    after_s: float
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockMap:
    """From that clock to ours.

    Attributes:
        origin_ns: a moment of that clock.
        origin_s: the same of ours.
        error_s: by which it may be wrong.
    """

    origin_ns: int
    origin_s: float
    error_s: float

    def at(self, moment_ns: int) -> float:
        """The moment in seconds of our clock."""
        return self.origin_s + (moment_ns - self.origin_ns) * 1e-9


def map_clock(marks: Sequence[Mark]) -> ClockMap:
    """What all marks allow, or what contradicts them least.

    Raises:
        RecordingError: there is no mark.
    """
    if not marks:
        raise RecordingError("torch.profiler has recorded none of our marks, so its times cannot be told")
    origin_ns = marks[0].start_ns
    earliest_s, latest_s = float("-inf"), float("inf")
    for mark in marks:
        since_s = (mark.start_ns - origin_ns) * 1e-9
        earliest_s = max(earliest_s, mark.before_s - since_s)
        latest_s = min(latest_s, mark.after_s - mark.duration_ns * 1e-9 - since_s)
    return ClockMap(origin_ns=origin_ns, origin_s=(earliest_s + latest_s) / 2, error_s=abs(latest_s - earliest_s) / 2)
