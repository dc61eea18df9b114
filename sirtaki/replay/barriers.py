"""What ranks did together in one recorded iteration: when each unit and each other operation began and was done.

A unit begins when the last of its ranks has issued it and its stream is free on all of them. It is done when the
first rank sees its result; how much later the others see it is kept apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sirtaki.autotune.model.graph import Activity
from sirtaki.comm.plan import Route
from sirtaki.profiler.recording import Buffer, RecordedIteration

from .history import Clock
from .job_model import OperationKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """One operation of several ranks; moments of the job's clock.

    Attributes:
        key: which.
        activity: `Activity.UNIT` or `Activity.COLLECTIVE`.
        lane: its stream.
        n_bytes: of a rank's input.
        name: for people.
        route: of a unit.
        issued_s: when each rank took part in it from.
        begin_s: when it began.
        done_s: when each rank saw its result; none before it began.
    """

    key: OperationKey
    activity: Activity
    lane: str
    n_bytes: int
    name: str
    route: Route | None
    issued_s: Mapping[int, float]
    begin_s: float
    done_s: Mapping[int, float]

    @property
    def ranks(self) -> tuple[int, ...]:
        """That took part."""
        return tuple(sorted(self.issued_s))

    @property
    def end_s(self) -> float:
        """When the first rank saw the result."""
        return min(self.done_s.values())

    @property
    def lags_s(self) -> dict[int, float]:
        """How much later than the first each rank saw it."""
        return {rank: done_s - self.end_s for rank, done_s in self.done_s.items()}


class Barriers:
    """Those of one iteration after the other; streams that are busy with one keep the next waiting."""

    def __init__(self, buffers: tuple[Buffer, ...]) -> None:
        self._buffers = {buffer.number: buffer for buffer in buffers}
        self._free_s: dict[str, float] = {}

    def of(self, iterations: Mapping[int, RecordedIteration], clocks: Mapping[int, Clock]) -> list[Barrier]:
        """Of one iteration of all ranks, in the order in which they began."""
        issued: dict[OperationKey, dict[int, float]] = defaultdict(dict)
        done: dict[OperationKey, dict[int, float]] = defaultdict(dict)
        what: dict[OperationKey, tuple[Activity, str, int, str, Route | None]] = {}
        for rank, iteration in iterations.items():
            clock = clocks[rank]
            for one in iteration.units:
                key = (one.unit.buffer, one.unit.start, one.unit.stop)
                issued[key][rank], done[key][rank] = clock(one.issue_s), clock(one.done_s)
                layout = self._buffers[one.unit.buffer].layout
                lane = f"{one.unit.route[0].value} stream {one.unit.stream}"
                n_bytes = (one.unit.stop - one.unit.start) * layout.itemsize_bytes
                name = layout.describe(one.unit.start, one.unit.stop) if layout.names else f"unit {one.unit.start}"
                what[key] = Activity.UNIT, lane, n_bytes, name, one.unit.route
            for place, other in enumerate(iteration.collectives):
                key = (-1, place, 0)
                issued[key][rank], done[key][rank] = clock(other.begin_s), clock(other.end_s)
                what[key] = Activity.COLLECTIVE, f"{other.kind}s", other.n_bytes, other.name, None
        found = []
        for key in sorted(issued, key=lambda key: (max(issued[key].values()), key)):
            activity, lane, n_bytes, name, route = what[key]
            begin_s = max(*issued[key].values(), self._free_s.get(lane, 0.0))
            barrier = Barrier(
                key=key,
                activity=activity,
                lane=lane,
                n_bytes=n_bytes,
                name=name,
                route=route,
                issued_s=issued[key],
                begin_s=begin_s,
                done_s={rank: max(done_s, begin_s) for rank, done_s in done[key].items()},
            )
            self._free_s[lane] = max(barrier.done_s.values())
            found.append(barrier)
        return found
