"""How gradients travel, as the search changes it: tensors that follow each other, each in one or more equal parts."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sirtaki.autotune.knobs import Cut, Knobs
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import Route
from sirtaki.profiler.recording import Buffer
from sirtaki.unit_sizes import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Gradients that leave together.

    Attributes:
        stop: element behind its last.
        parts: units that it travels as.
    """

    stop: int
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A way to send one flat buffer; further buffers of the same optimizer are cut evenly.

    Attributes:
        route: of all units.
        streams: that units take in turn.
        unit_bytes: of units where they are even.
        tensors: one behind the other; None = even units.
    """

    route: Route
    streams: int
    unit_bytes: int
    tensors: tuple[Tensor, ...] | None = None

    @classmethod
    def recorded(cls, buffer: Buffer) -> Schedule:
        """What a buffer was sent by: its units take the streams in turn, and GPU threads are left to the transport."""
        plan, knobs = buffer.plan, buffer.knobs
        return cls(
            route=(plan.transport, plan.units[0].algorithm),
            streams=plan.streams,
            unit_bytes=knobs.unit_bytes,
            tensors=None if buffer.is_cut_evenly else tuple(Tensor(stop=unit.stop) for unit in plan.units),
        )

    def tensors_of(self, layout: GradientLayout) -> tuple[Tensor, ...]:
        """Its tensors; an even unit is one."""
        if self.tensors is not None:
            return self.tensors
        return tuple(Tensor(stop=unit.stop) for unit in self.knobs(layout).to_plan(layout).units)

    def knobs(self, layout: GradientLayout) -> Knobs:
        """What a job runs."""
        even = Knobs(unit_bytes=self.unit_bytes, streams=self.streams, transport=self.route[0], algorithm=self.route[1])
        if self.tensors is None:
            return even
        stops = [stop for _, stop in units_of(self.tensors)]
        cuts = tuple(Cut(stop=stop, stream=number % self.streams) for number, stop in enumerate(stops))
        sizes = [stop - start for start, stop in pairwise((0, *stops))]
        typical = int(statistics.median(sizes)) * layout.itemsize_bytes
        return replace(even, unit_bytes=min(max(typical, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES), cuts=cuts)

    def fused(self, layout: GradientLayout, stop: int) -> Schedule | None:
        """The tensor that ends there and the next one are one tensor; None if no two meet there."""
        tensors = self.tensors_of(layout)
        place = place_of(tensors, stop)
        if place is None or place + 1 == len(tensors):
            return None
        one = Tensor(stop=tensors[place + 1].stop, parts=max(tensors[place].parts, tensors[place + 1].parts))
        return replace(self, tensors=(*tensors[:place], one, *tensors[place + 2 :]))

    def parted(self, layout: GradientLayout, stop: int, parts: int) -> Schedule | None:
        """The tensor that ends there travels as so many units; None if there is no such tensor, or it does so."""
        tensors = self.tensors_of(layout)
        place = place_of(tensors, stop)
        if place is None or tensors[place].parts == parts:
            return None
        return replace(self, tensors=(*tensors[:place], Tensor(stop=stop, parts=parts), *tensors[place + 1 :]))

    def split(self, layout: GradientLayout, stop: int, at: int) -> Schedule | None:
        """The tensor that ends at `stop` is two, of which one ends at `at`; None if it does not reach over that."""
        tensors = self.tensors_of(layout)
        place = place_of(tensors, stop)
        if place is None or not (tensors[place - 1].stop if place else 0) < at < stop:
            return None
        halves = Tensor(stop=at), Tensor(stop=stop)
        return replace(self, tensors=(*tensors[:place], *halves, *tensors[place + 1 :]))


def place_of(tensors: Sequence[Tensor], stop: int) -> int | None:
    """Of the tensor that ends there."""
    place = bisect_left(tensors, stop, key=lambda one: one.stop)
    return place if place < len(tensors) and tensors[place].stop == stop else None


def units_of(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """(place of the tensor, end) of each unit, none of which is empty."""
    start = 0
    for place, tensor in enumerate(tensors):
        size = tensor.stop - start
        parts = min(tensor.parts, size)
        yield from ((place, start + size * (part + 1) // parts) for part in range(parts))
        start = tensor.stop
