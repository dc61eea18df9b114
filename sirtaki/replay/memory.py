"""A step's memory, replayed: how much is held when, as it was recorded and with remedies that hold less.

*Re-computation* of a module: what its forward pass leaves for the backward pass goes when it ends, what it got stays
until then, and its forward pass is done again when its backward pass begins. *Accumulation*: a step is several passes
over parts of the batch; what belongs to samples gets smaller, and gradients stay from pass to pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sirtaki.autotune.model.graph import Phase
from sirtaki.profiler.step_memory import Allocation, Holds, ModuleCall, StepMemory

_OF_SAMPLES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD)
_LAST = 1 << 30

_Event = tuple[float, int, int, int]
"""(moment, order among those of one moment, +1 or -1, place of the allocation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment at which most is held.

    Attributes:
        n_bytes: held then.
        at_s: when.
        held: bytes by `StepMemory.allocations`' place.
    """

    n_bytes: int
    at_s: float
    held: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is held from a moment on."""

    at_s: float
    n_bytes: Mapping[Holds, int]

    @property
    def total_bytes(self) -> int:
        """For whatever."""
        return sum(self.n_bytes.values())


def main_device(memory: StepMemory) -> int:
    """The one that a budget is for: the first that is not the CPU, else that."""
    return next((place for place, name in enumerate(memory.devices) if not name.startswith("cpu")), 0)


class MemoryReplay:
    """Of one device.

    Attributes:
        memory: of the step as it was recorded.
        device: by place.
    """

    def __init__(self, memory: StepMemory, device: int) -> None:
        self.memory, self.device = memory, device
        own = [(place, one) for place, one in enumerate(memory.allocations) if one.device == device]
        self._there = [place for place, one in own if one.begin_s is None]
        self._came = sorted((one.begin_s, place) for place, one in own if one.begin_s is not None)
        self._gone = [(one.end_s, place) for place, one in own if one.end_s is not None]
        self._gradients = [place for _, place in self._came if memory.allocations[place].holds is Holds.GRADIENTS]

    def saved(self, number: int, *, needed: Collection[int] = ()) -> list[int]:
        """What a call leaves for its backward pass and nobody else holds, by the allocations' places.

        Args:
            number: place of the call.
            needed: allocations that other calls need.
        """
        call = self.memory.calls[number]
        begin_s, end_s = call.backward_begin_s, call.backward_end_s
        if begin_s is None or end_s is None:
            return []
        kept = {*call.outputs, *needed}
        return [
            place
            for place in self._made_in(call)
            if place not in kept and begin_s <= (self.memory.allocations[place].end_s or 0.0) <= end_s
        ]

    def peak(self, recomputed: Sequence[int] = (), passes: int = 1) -> Peak:
        """The peak of a step.

        Args:
            recomputed: calls, by place, none within another.
            passes: over parts of the batch.
        """
        events = sorted(self._events(recomputed))
        if passes == 1:
            return self._highest(self._there, events, 1)
        # From the second pass on all gradients are there, and those that come are added to them.
        there, allocations, later = [*self._there, *self._gradients], self.memory.allocations, set(self._gradients)
        added = [(allocations[place].added_s or 0.0, _LAST, -1, place) for place in self._gradients]
        last = self._highest(there, sorted([*events, *added]), passes)
        if passes == 2:
            return last
        between = [
            event
            for event in events
            if (event[2] > 0 or event[3] not in later) and allocations[event[3]].phase is not Phase.UPDATE
        ]
        return max(self._highest(there, sorted([*between, *added]), passes), last, key=lambda one: one.n_bytes)

    def curve(self) -> list[Moment]:
        """What is held when, as it was recorded."""
        held: dict[Holds, int] = defaultdict(int)
        for place in self._there:
            one = self.memory.allocations[place]
            held[one.holds] += one.n_bytes
        found = [Moment(at_s=self.memory.begin_s, n_bytes=dict(held))]
        for at_s, _, sign, place in sorted(self._events(())):
            one = self.memory.allocations[place]
            held[one.holds] += sign * one.n_bytes
            found.append(Moment(at_s=at_s, n_bytes=dict(held)))
        return found

    def _made_in(self, call: ModuleCall) -> list[int]:
        first, last = bisect_left(self._came, (call.begin_s, 0)), bisect_left(self._came, (call.end_s, 0))
        return [place for _, place in self._came[first:last]]

    def _events(self, recomputed: Sequence[int]) -> list[_Event]:
        needed_s = self._needed_until_s(recomputed)
        found = [(begin_s, 0, 1, place) for begin_s, place in self._came]
        for end_s, place in self._gone:
            later_s = needed_s.get(place, 0.0)
            found.append((later_s, _LAST, -1, place) if later_s > end_s else (end_s, 0, -1, place))
        for number in recomputed:
            others = [place for other in recomputed if other != number for place in self.memory.calls[other].inputs]
            found += self._again(self.memory.calls[number], set(self.saved(number, needed=others)))
        return found

    def _again(self, call: ModuleCall, saved: Collection[int]) -> Iterator[_Event]:
        """What a call leaves goes when it ends, and comes again with all that it needs meanwhile."""
        if call.backward_begin_s is None:
            return
        again: list[tuple[float, int, int]] = []
        for place in self._made_in(call):
            one = self.memory.allocations[place]
            assert one.begin_s is not None
            if place in saved:
                yield call.end_s, 0, -1, place
                again.append((one.begin_s, 1, place))
            elif one.end_s is not None and one.end_s <= call.end_s:
                again += ((one.begin_s, 1, place), (one.end_s, -1, place))
        for order, (_, sign, place) in enumerate(sorted(again), start=-len(again)):
            yield call.backward_begin_s, order, sign, place

    def _needed_until_s(self, recomputed: Sequence[int]) -> dict[int, float]:
        """Until when there must be what calls got, since they are done again."""
        found: dict[int, float] = {}
        for number in recomputed:
            call = self.memory.calls[number]
            for place in call.inputs:
                found[place] = max(found.get(place, 0.0), call.backward_begin_s or 0.0)
        return found

    def _highest(self, there: Sequence[int], events: Sequence[_Event], passes: int) -> Peak:
        sizes = [_size(one, passes) for one in self.memory.allocations]
        now = most = sum(sizes[place] for place in there)
        highest = 0
        for number, (_, _, sign, place) in enumerate(events, start=1):
            now += sign * sizes[place]
            if now > most:
                most, highest = now, number
        held = Counter({place: sizes[place] for place in there})
        for _, _, sign, place in events[:highest]:
            held[place] += sign * sizes[place]
        return Peak(
            n_bytes=most,
            at_s=events[highest - 1][0] if highest else self.memory.begin_s,
            held={place: n_bytes for place, n_bytes in held.items() if n_bytes},
        )


def _size(one: Allocation, passes: int) -> int:
    of_samples = one.begin_s is not None and one.phase in _OF_SAMPLES and one.holds is not Holds.GRADIENTS
    return one.n_bytes // passes if of_samples else one.n_bytes
