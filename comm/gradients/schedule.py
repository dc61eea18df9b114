"""The order in which gradients become ready, and the order in which units are launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import groupby

import numpy as np

from ..control.plane import ControlPlane
from ..plan import CommPlan, NcclWay, Route
from .buffers import FlatBuffers, FlatGroup

PROFILING_ITERATIONS = 2
"""Iterations of a profile. The order of the last one is used, because the first one runs with cold caches."""

DISORDERLY_ITERATIONS = 3
"""Iterations in a row in another order after which a rank requests a new profile."""

PATIENCE_ITERATIONS = 50
"""Shortest pause between two profiles. It doubles with each profile, because some models have no stable order."""


def agree_on_order(ready_order: Sequence[int], control: ControlPlane, *, counts: bool) -> list[int]:
    """Return the parameters in the order of their average place over all ranks. Collective.

    Args:
        ready_order: all parameters in the order in which this rank's gradients became ready.
        control: control plane of the ranks.
        counts: True if this rank has computed gradients; False if it takes part with zeros.
    """
    places = np.zeros(len(ready_order))
    if counts:
        places[list(ready_order)] = np.arange(len(ready_order))
    return [int(index) for index in np.argsort(control.total(places), kind="stable")]


class OrderProfiling:
    """Profiles of the order in which gradients become ready, and this rank's requests for new ones.

    A rank requests a new profile if several iterations in a row had another order than the profiled one.

    Attributes:
        active: True while the order is profiled; the same on all ranks.
        since: iteration in which the last profile began.
        requested: True if the caller has requested a new profile that has not begun yet.
        asks: True if this rank's control flags of the current iteration request a new profile.
    """

    def __init__(self) -> None:
        self.active, self.since = True, 0
        self.requested = self.asks = False
        self._disorderly = self._not_before = 0

    def begin(self, iteration: int) -> None:
        """Begin a profile with the given iteration."""
        self.active, self.since, self._disorderly = True, iteration, 0
        self.requested = self.asks = False

    def ends_with(self, iteration: int) -> bool:
        """Return whether a profile ends with the given iteration, and record its end."""
        if not self.active or iteration + 1 - self.since < PROFILING_ITERATIONS:
            return False
        self.active = False
        self._not_before = iteration + 2 * (iteration - self.since + PATIENCE_ITERATIONS)
        return True

    def watch(self, iteration: int, ready_order: Sequence[int], expected: FlatBuffers) -> None:
        """Decide whether this rank requests a profile. Call at the end of an iteration that was not profiled.

        Args:
            iteration: number of the iteration.
            ready_order: positions of this rank's gradients, in the order in which they became ready.
            expected: flat buffers in the profiled order.
        """
        late = 0
        if ready_order != expected.numbers:
            late = max((place - position for place, position in enumerate(ready_order)), default=0)
        self._disorderly = self._disorderly + 1 if late > max(8, len(expected.order) // 8) else 0
        differs = self._disorderly >= DISORDERLY_ITERATIONS and iteration >= self._not_before
        self.asks = differs or expected.outdated or self.requested


@dataclass(slots=True, eq=False)
class ScheduledUnit:
    """A unit with the arguments of its launch.

    Attributes:
        group: group of gradients in whose flat buffer the unit is.
        start: first element of the unit in the buffer.
        stop: end of the unit in the buffer, exclusive.
        stream: number of the stream.
        route: transport and algorithm.
        threads: threads of the transport for the unit; None = all.
        nccl: NCCL's algorithm for the unit; None = NCCL chooses.
        members: indices of the parameters with elements in the unit. The last unit also has those without elements.
        due: sort key among the units of all groups: (position of the unit's last gradient, group, number in the plan).
    """

    group: FlatGroup
    start: int
    stop: int
    stream: int
    route: Route
    threads: int | None = None
    nccl: NcclWay | None = None
    members: tuple[int, ...] = ()
    due: tuple[int, int, int] = (0, 0, 0)

    @property
    def n_bytes(self) -> int:
        """Size of the unit in bytes."""
        return (self.stop - self.start) * self.group.layout.itemsize_bytes


def schedule(groups: Sequence[FlatGroup], plans: Sequence[CommPlan], position: Sequence[int]) -> list[ScheduledUnit]:
    """Return the units of all groups, sorted by the position of their last gradient.

    The unit at the end of the first flat buffer contains the control flags. It is the last unit, and also waits for
    parameters without elements.

    Args:
        groups: groups of gradients.
        plans: one plan for each group.
        position: position of each parameter in the expected order.
    """
    units = [
        unit
        for number, (group, plan) in enumerate(zip(groups, plans, strict=True))
        for unit in _expand(number, group, plan, position)
    ]
    units.sort(key=lambda unit: unit.due)
    units[-1].members += tuple(
        index for group in groups for index, numel in zip(group.indices, group.layout.sizes, strict=False) if not numel
    )
    return units


def _expand(number: int, group: FlatGroup, plan: CommPlan, position: Sequence[int]) -> list[ScheduledUnit]:
    """Return the units of one group's plan."""
    offsets, units, first = group.layout.offsets, list[ScheduledUnit](), 0
    for serial, unit in enumerate(plan.units):
        while offsets[first + 1] <= unit.start:
            first += 1
        place, members = first, list[int]()
        while place < len(group.indices) and offsets[place] < unit.stop:
            if offsets[place + 1] > offsets[place]:
                members.append(group.indices[place])
            place += 1
        last = max((position[index] for index in members), default=len(position))
        if number == 0 and unit.stop == group.layout.numel:
            last = len(position)  # because the control flags may depend on any gradient
        units.append(
            ScheduledUnit(
                group,
                unit.start,
                unit.stop,
                unit.stream,
                (plan.transport, unit.algorithm),
                threads=unit.threads,
                nccl=unit.nccl,
                members=tuple(members),
                due=(last, number, serial),
            )
        )
    return units


class AgreedUnits:
    """Units of an iteration in which the ranks negotiate which gradients are ready.

    Agreed gradients that are adjacent in a flat buffer become one unit, up to `largest_bytes`. The units use the
    streams of their plan in turn, because no other streams are open.

    Attributes:
        sizes_bytes: size of each gradient in the expected order, then 0 if the flags are negotiated separately.
        largest_bytes: size of the largest unit of the plans.
    """

    def __init__(self, buffers: FlatBuffers, plans: Sequence[CommPlan], *, flags_apart: bool) -> None:
        """Begin with all gradients pending.

        Args:
            buffers: flat buffers.
            plans: one plan for each group of the buffers.
            flags_apart: True if the flags are known only when the backward pass ends, not with the last gradient.
        """
        self._order, self._groups = buffers.order, list(zip(buffers.groups, plans, strict=True))
        sizes_bytes = [view.numel() * view.element_size() for view in buffers.views]
        self.sizes_bytes = np.array([*sizes_bytes, 0] if flags_apart else sizes_bytes, dtype=np.int64)
        self.largest_bytes = max(
            1, *(unit.numel * group.layout.itemsize_bytes for group, plan in self._groups for unit in plan.units)
        )
        self._pending, self._turn = len(self.sizes_bytes), 0

    def of(self, positions: Sequence[int]) -> list[ScheduledUnit]:
        """Return units for these gradients. Once no gradient is pending, the last unit contains the flags.

        Args:
            positions: newly agreed positions in the expected order, ascending. Pass each position once.
        """
        agreed = {self._order[position] for position in positions if position < len(self._order)}
        units = [unit for group, plan in self._groups for unit in self._of_group(group, plan, agreed)]
        self._pending -= len(positions)
        if not self._pending:
            group, plan = self._groups[0]
            start, stop = group.layout.offsets[-2:]
            route = (plan.transport, plan.units[0].algorithm)
            units.append(ScheduledUnit(group, start, stop, plan.units[0].stream, route))
        return units

    def _of_group(self, group: FlatGroup, plan: CommPlan, agreed: set[int]) -> list[ScheduledUnit]:
        offsets, limit = group.layout.offsets, max(1, self.largest_bytes // group.layout.itemsize_bytes)
        runs = list[tuple[int, int]]()
        for place, index in enumerate(group.indices):
            if index in agreed:
                start, stop = offsets[place], offsets[place + 1]
                if runs and runs[-1][1] == start and stop - runs[-1][0] <= limit:
                    start = runs.pop()[0]
                runs.append((start, stop))
        parts = [(low, min(low + limit, stop)) for start, stop in runs for low in range(start, stop, limit)]
        if not parts:  # the plan of a group without elements has no units
            return []
        algorithm = plan.units[0].algorithm
        streams = sorted({unit.stream for unit in plan.units if unit.algorithm is algorithm})
        turns = range(self._turn, self._turn + len(parts))
        self._turn += len(parts)
        return [
            ScheduledUnit(group, start, stop, streams[turn % len(streams)], (plan.transport, algorithm))
            for turn, (start, stop) in zip(turns, parts, strict=True)
        ]


class LaunchSchedule:
    """Units in a fixed launch order, with the gradients and units for which each of them waits.

    Attributes:
        units: units in launch order.
        units_of: for each parameter, the numbers of the units that contain elements of its gradient.
        launch_steps: pairs of a number of ready gradients in the expected order, and the units to launch then.
        launch_points: the numbers of ready gradients in `launch_steps`.
    """

    def __init__(
        self,
        units: Sequence[ScheduledUnit],
        order: Sequence[int],
        *,
        held: Callable[[ScheduledUnit], bool],
        one_order: bool = True,
    ) -> None:
        """Compute the dependencies of the units.

        Args:
            units: units in launch order.
            order: all parameters in the expected order of their gradients.
            held: returns True for a unit that must not be launched before the backward pass ends.
            one_order: True if a unit waits for the previous unit; False if for the previous unit on the same stream.
        """
        self.units = list(units)
        # For each unit, the number of gradients and of previous units for which it waits. A last entry, which never
        # reaches zero, is the successor of units without one.
        self._awaited = [len(unit.members) + held(unit) for unit in self.units]
        self._next_unit = [len(self.units)] * len(self.units)
        last: dict[object, int] = {}
        units_of: list[list[int]] = [[] for _ in order]
        for number, unit in enumerate(self.units):
            for index in unit.members:
                units_of[index].append(number)
            lane = None if one_order else (unit.route, unit.stream)
            if lane in last:
                self._next_unit[last[lane]] = number
                self._awaited[number] += 1
            last[lane] = number
        self._awaited.append(len(last) + 1)
        self.units_of = [tuple(numbers) for numbers in units_of]
        self._reduced_with: dict[tuple[int, ...], list[int]] = {}
        pending = self.pending_counts()
        steps = [(count, self.count(index, pending)) for count, index in enumerate(order, 1)]
        self.launch_steps = [(count, numbers) for count, numbers in steps if numbers]
        self.launch_points = frozenset(count for count, _ in self.launch_steps)

    def pending_counts(self, ready: Sequence[int] = ()) -> list[int]:
        """Return for each unit how many gradients and units it still waits for, once these gradients are ready."""
        pending = self._awaited.copy()
        for index in ready:
            self.count(index, pending)
        return pending

    def count(self, index: int, pending: list[int]) -> list[int]:
        """Count one ready gradient in the pending counts. Return the units to launch, in launch order."""
        complete = []
        for number in self.units_of[index]:
            pending[number] -= 1
            while not pending[number]:  # then also the next units that have waited only for this one
                complete.append(number)
                number = self._next_unit[number]
                pending[number] -= 1
        return complete

    def reduced_with(self, index: int) -> list[int]:
        """Return the parameters whose gradients are reduced once all units of parameter `index` are."""
        own = self.units_of[index]
        if own not in self._reduced_with:
            members = sorted({member for number in own for member in self.units[number].members})
            self._reduced_with[own] = [member for member in members if set(self.units_of[member]) <= set(own)]
        return self._reduced_with[own]


SLOWER = 1.3
"""Time of a byte in the simulation, divided by its measured time. If the simulated network were faster than the real
one, units would begin in the order of their gradients, and nothing would be hidden in the next forward pass. If it is
slower, a stream sometimes waits for the gradients of its next unit, which costs less."""

Lanes = tuple[Route, int | None]
"""Key of a set of streams among which a unit may be moved: route, and threads of the transport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationPace:
    """Expected times of a simulated iteration; the same on all ranks.

    Attributes:
        needed: for each parameter, its place in the order in which the forward pass reads parameters.
        ready_s: time from the first ready gradient until each parameter's gradient is ready.
        backward_s: time from the first ready gradient until the backward pass ends.
        s_per_byte: time of one byte while the network is busy, with all streams in use.
    """

    needed: Sequence[float]
    ready_s: Sequence[float]
    backward_s: float
    s_per_byte: float


def reorder_units(
    units: Sequence[ScheduledUnit], pace: IterationPace, *, held: Callable[[ScheduledUnit], bool]
) -> list[ScheduledUnit]:
    """Return the units in an order that serves the next forward pass first, from a simulation of one iteration.

    When a stream is free, it runs the complete unit that the forward pass reads first. Busy streams share the network
    evenly. Units keep their boundaries, because the rounding of a sum may depend on where a unit begins.

    Args:
        units: units in the order of their last gradients.
        pace: expected times of the iteration.
        held: returns True for a unit that must not be launched before the backward pass ends.
    """
    simulation, ready_s = _StreamReplay(units, pace), complete_s(units, pace, held=held)
    for moment_s, numbers in groupby(sorted(range(len(units)), key=ready_s.__getitem__), key=ready_s.__getitem__):
        simulation.advance(moment_s)
        for number in numbers:
            simulation.enqueue(number)
        simulation.begin_units()
    simulation.advance(float("inf"))
    return simulation.order


def complete_s(
    units: Sequence[ScheduledUnit], pace: IterationPace, *, held: Callable[[ScheduledUnit], bool]
) -> list[float]:
    """Return the time from the first ready gradient until each unit is complete, in seconds."""
    return [
        pace.backward_s if held(unit) else max((pace.ready_s[index] for index in unit.members), default=0.0)
        for unit in units
    ]


class _StreamReplay:
    """Simulation of the streams of one iteration, with queues of the units that wait for a stream."""

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

    def enqueue(self, number: int) -> None:
        unit = self._units[number]
        heappush(self._waiting.setdefault((unit.route, unit.threads), []), (self._urgency[number], number))

    def begin_units(self) -> None:
        for lanes, waiting in self._waiting.items():
            free = self._free[lanes]
            while waiting and free:
                unit, stream = self._units[heappop(waiting)[1]], heappop(free)
                self._left_bytes[lanes, stream] = float(unit.n_bytes)
                self.order.append(replace(unit, stream=stream))

    def advance(self, until_s: float) -> None:
        """Advance the simulation to this time: units end, and waiting units begin."""
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
            self.begin_units()
        self._now_s = until_s
