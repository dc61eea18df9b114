"""In which order units leave so that the network never rests and the next forward pass waits least.

ByteScheduler's priority queue decides that at run time; here it is decided once, by playing an iteration, since the
order must be the same on all ranks: whenever a stream is free, of the units whose gradients are there the one goes
first that the next forward pass reads first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import groupby

from sirtaki.comm.plan import Route

from .schedule import ScheduledUnit

SLOWER = 1.3
"""By so much more time than was measured a byte takes in the iteration that is played. If the network were the slower
one in earnest, units would begin in the order in which gradients come: nothing is hidden then. If it is the faster one,
a stream waits now and then for the gradients of its next unit."""

Lanes = tuple[Route, int | None]
"""What units may change streams among: those of one route with one allowance of threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationPace:
    """What an iteration is like that is played; the same on all ranks.

    Attributes:
        needed: for each parameter, its place in the order in which the forward pass reads them.
        ready_s: when each parameter's gradient comes, after the first.
        backward_s: when the backward pass ends, after the first gradient.
        s_per_byte: what a byte takes while the network is busy, all streams together.
    """

    needed: Sequence[float]
    ready_s: Sequence[float]
    backward_s: float
    s_per_byte: float


def overtaking(
    units: Sequence[ScheduledUnit], pace: IterationPace, *, held: Callable[[ScheduledUnit], bool]
) -> list[ScheduledUnit]:
    """The units in the order in which they begin in the iteration that is played, each on the stream that was free.

    Units stay as they are cut, since the order in which ranks' elements are added up, and so the last bit of a sum, may
    depend on where a unit begins. Streams that are busy share the network evenly.

    Args:
        units: in the order in which their last gradients come.
        pace: of the iteration.
        held: units that leave when the backward pass has ended, not before.
    """
    played, come_s = _Played(units, pace), coming_s(units, pace, held=held)
    for moment_s, numbers in groupby(sorted(range(len(units)), key=come_s.__getitem__), key=come_s.__getitem__):
        played.advance(moment_s)
        for number in numbers:
            played.wait_for_stream(number)
        played.begin_what_can()
    played.advance(float("inf"))
    return played.order


def coming_s(
    units: Sequence[ScheduledUnit], pace: IterationPace, *, held: Callable[[ScheduledUnit], bool]
) -> list[float]:
    """When each unit has all that it waits for, after the first gradient."""
    return [
        pace.backward_s if held(unit) else max((pace.ready_s[index] for index in unit.members), default=0.0)
        for unit in units
    ]


class _Played:
    """The streams of an iteration, and what waits for them."""

    def __init__(self, units: Sequence[ScheduledUnit], pace: IterationPace) -> None:
        self._units, self._now_s, self._s_per_byte = units, 0.0, max(SLOWER * pace.s_per_byte, 1e-15)
        never = float(len(pace.needed))
        self._urgency = [min((pace.needed[member] for member in unit.members), default=never) for unit in units]
        self._waiting: dict[Lanes, list[tuple[float, int]]] = {}
        self._free: dict[Lanes, list[int]] = {}
        for unit in units:
            streams = self._free.setdefault((unit.route, unit.threads), [])
            if unit.stream not in streams:
                streams.append(unit.stream)
        for streams in self._free.values():
            streams.sort()
        self._left_bytes: dict[tuple[Lanes, int], float] = {}
        self.order = list[ScheduledUnit]()

    def wait_for_stream(self, number: int) -> None:
        unit = self._units[number]
        heappush(self._waiting.setdefault((unit.route, unit.threads), []), (self._urgency[number], number))

    def begin_what_can(self) -> None:
        for lanes, waiting in self._waiting.items():
            free = self._free[lanes]
            while waiting and free:
                unit, stream = self._units[heappop(waiting)[1]], heappop(free)
                self._left_bytes[lanes, stream] = float(unit.n_bytes)
                self.order.append(replace(unit, stream=stream))

    def advance(self, until_s: float) -> None:
        """Units end, and others begin in their places, until then."""
        while self._left_bytes:
            least = min(self._left_bytes.values())
            ends_s = self._now_s + least * len(self._left_bytes) * self._s_per_byte
            if ends_s > until_s:
                sent = (until_s - self._now_s) / (len(self._left_bytes) * self._s_per_byte)
                self._left_bytes = {key: left - sent for key, left in self._left_bytes.items()}
                break
            self._now_s = ends_s
            ended = [key for key, left in self._left_bytes.items() if left <= least]
            self._left_bytes = {key: left - least for key, left in self._left_bytes.items() if left > least}
            for lanes, stream in ended:
                heappush(self._free[lanes], stream)
            self.begin_what_can()
        self._now_s = until_s
