"""The order in which gradients become ready, and the order in which units (buckets) are launched."""

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
"""Number of iterations in which the order of ready gradients is measured. Only the order of the last iteration is used,
because the first runs with cold caches."""

DISORDERLY_ITERATIONS = 3
"""Number of consecutive iterations with another order of gradients after which a rank requests a new measurement."""

PATIENCE_ITERATIONS = 50
"""Smallest number of iterations between two measurements of the order of ready gradients.

The number doubles with each measurement, because some models have no stable order.
"""


def agree_on_order(ready_order: Sequence[int], control: ControlPlane, *, counts: bool) -> list[int]:
    """Return the parameters in the order in which their gradients became ready, averaged over ranks. Collective.

    Args:
        ready_order: all parameters in the order in which this rank's gradients became ready.
        control: control plane of the ranks.
        counts: True if the order of this rank counts, because the rank has computed gradients.
    """
    places = np.zeros(len(ready_order))
    if counts:
        places[list(ready_order)] = np.arange(len(ready_order))
    return [int(index) for index in np.argsort(control.total(places), kind="stable")]


class OrderProfiling:
    """Decides when this rank requests a measurement (profile) of the order of ready gradients, and when a profile ends.

    A rank requests a new profile if several consecutive iterations had another order than the profiled one.

    Attributes:
        active: True while the order is profiled; the same on all ranks.
        since: iteration in which the last profile began.
        requested: True if the caller has requested a new profile that has not begun yet.
        asks: True if this rank requests a new profile from all ranks, by a control flag of the current iteration.
    """

    def __init__(self) -> None:
        self.active, self.since = True, 0
        self.requested = self.asks = False
        self._disorderly = self._not_before = 0

    def begin(self, iteration: int) -> None:
        """Begin a profile of the order in which gradients become ready. `iteration` is its first iteration."""
        self.active, self.since, self._disorderly = True, iteration, 0
        self.requested = self.asks = False

    def ends_with(self, iteration: int) -> bool:
        """Return whether the current profile ends with this iteration. If so, end it.

        A profile records the order in which gradients become ready, over several iterations.
        """
        if not self.active or iteration + 1 - self.since < PROFILING_ITERATIONS:
            return False
        self.active = False
        self._not_before = iteration + 2 * (iteration - self.since + PATIENCE_ITERATIONS)
        return True

    def watch(self, iteration: int, ready_order: Sequence[int], expected: FlatBuffers) -> None:
        """Decide whether this rank requests a new profile of the order. Call after each iteration without a profile.

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
    """A unit (bucket: part of a flat buffer that one all-reduce reduces), with the arguments of its all-reduce.

    Attributes:
        group: group of gradients in whose flat buffer the unit is.
        start: first element of the unit in the buffer.
        stop: end of the unit in the buffer, exclusive.
        stream: number of the stream (parallel connection, or NCCL communicator) that sends the unit.
        route: transport, and all-reduce algorithm.
        threads: number of the transport's threads that work on the unit; None = all.
        nccl: NCCL's algorithm for the unit; None = NCCL chooses.
        members: indices of the parameters with elements in the unit. The last unit also has those without elements.
        due: sort key among the units of all groups: (position of the unit's last gradient, number of the group, number
            of the unit in the group's plan).
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
        """Size of the unit (bucket) in bytes."""
        return (self.stop - self.start) * self.group.layout.itemsize_bytes


def schedule(groups: Sequence[FlatGroup], plans: Sequence[CommPlan], position: Sequence[int]) -> list[ScheduledUnit]:
    """Return the units (buckets) of all groups, sorted by the position of their last gradient.

    The unit at the end of the first flat buffer contains the control flags. It is launched last, and also waits for the
    gradients of parameters without elements.

    Args:
        groups: groups of gradients, each in one flat buffer.
        plans: for each group, how its flat buffer is cut into units and how they are sent.
        position: position of each parameter in the expected order of ready gradients.
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
    """Return the units (buckets) into which `plan` cuts the flat buffer of `group`."""
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
            last = len(position)  # launch this bucket last, because its control flags may depend on any gradient
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
    """Units (buckets) of an iteration in which the ranks negotiate which gradients are ready on all ranks.

    Gradients that are agreed to be ready and adjacent in a flat buffer become one unit, up to `largest_bytes`. The
    units are sent in turn over the streams (connections) of the plan, because no others are open.

    Attributes:
        sizes_bytes: size of each gradient in the expected order, then 0 for the control flags if the ranks agree
            separately that these are ready.
        largest_bytes: size of the largest unit of the plans.
    """

    def __init__(self, buffers: FlatBuffers, plans: Sequence[CommPlan], *, flags_apart: bool) -> None:
        """Begin with all gradients pending.

        Args:
            buffers: flat buffers.
            plans: one plan for each group of the buffers.
            flags_apart: True if the control flags are known only at the end of the backward pass, not with the last
                gradient.
        """
        self._order = buffers.order
        groups = list(zip(buffers.groups, plans, strict=True))
        self._groups = [
            (group, plan, sorted({unit.stream for unit in plan.units if unit.algorithm is plan.units[0].algorithm}))
            for group, plan in groups
        ]
        sizes_bytes = [view.numel() * view.element_size() for view in buffers.views]
        self.sizes_bytes = np.array([*sizes_bytes, 0] if flags_apart else sizes_bytes, dtype=np.int64)
        self.largest_bytes = max(
            [1, *(unit.numel * group.layout.itemsize_bytes for group, plan in groups for unit in plan.units)]
        )
        self._pending, self._turn = len(self.sizes_bytes), 0

    def of(self, positions: Sequence[int]) -> list[ScheduledUnit]:
        """Return units (buckets) with these gradients. Add a unit with the control flags once no gradient is pending.

        Args:
            positions: positions, in the expected order, of gradients that are now ready on all ranks, ascending. Pass
                each position once.
        """
        agreed = {self._order[position] for position in positions if position < len(self._order)}
        units = [unit for group, plan, streams in self._groups for unit in self._of_group(group, plan, streams, agreed)]
        self._pending -= len(positions)
        if not self._pending:
            group, plan, _ = self._groups[0]
            start, stop = group.layout.offsets[-2:]
            route = (plan.transport, plan.units[0].algorithm)
            units.append(ScheduledUnit(group, start, stop, plan.units[0].stream, route))
        return units

    def _of_group(
        self, group: FlatGroup, plan: CommPlan, streams: Sequence[int], agreed: set[int]
    ) -> list[ScheduledUnit]:
        offsets, limit = group.layout.offsets, max(1, self.largest_bytes // group.layout.itemsize_bytes)
        runs = list[tuple[int, int]]()
        for place, index in enumerate(group.indices):
            if index in agreed:
                start, stop = offsets[place], offsets[place + 1]
                if runs and runs[-1][1] == start and stop - runs[-1][0] <= limit:
                    start = runs.pop()[0]
                runs.append((start, stop))
        parts = [(low, min(low + limit, stop)) for start, stop in runs for low in range(start, stop, limit)]
        turns = range(self._turn, self._turn + len(parts))
        self._turn += len(parts)
        return [
            ScheduledUnit(group, start, stop, streams[turn % len(streams)], (plan.transport, plan.units[0].algorithm))
            for turn, (start, stop) in zip(turns, parts, strict=True)
        ]


class LaunchSchedule:
    """Units (buckets) in a fixed launch order, with the gradients and units for which each unit waits.

    Attributes:
        units: units in launch order.
        units_of: for each parameter, the numbers of the units that contain elements of its gradient.
        launch_steps: pairs (n, units): once n gradients have become ready in the expected order, launch these units.
        launch_points: the numbers n of `launch_steps`.
    """

    def __init__(
        self,
        units: Sequence[ScheduledUnit],
        order: Sequence[int],
        *,
        held: Callable[[ScheduledUnit], bool],
        one_order: bool = True,
    ) -> None:
        """Compute for which gradients and units each unit (bucket) waits.

        Args:
            units: units in launch order.
            order: all parameters in the expected order of their gradients.
            held: returns True for a unit that must not be launched before the backward pass ends.
            one_order: True to launch all units in one order; False to keep the order of units on each stream only.
        """
        self.units = list(units)
        # Store for each unit (bucket) the number of gradients and of previous units for which it waits. The list ends
        # with a sentinel, the successor of units without a next unit. Its count never reaches zero.
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
        """Return for each unit (bucket) the number of gradients and units for which it waits.

        `ready` are the parameters whose gradients are ready already.
        """
        pending = self._awaited.copy()
        for index in ready:
            self.count(index, pending)
        return pending

    def count(self, index: int, pending: list[int]) -> list[int]:
        """Count one ready gradient in `pending` (see `pending_counts`). Return the buckets to launch now, in order."""
        complete = []
        for number in self.units_of[index]:
            pending[number] -= 1
            while not pending[number]:  # launch this bucket, then the next ones if they have waited only for it
                complete.append(number)
                number = self._next_unit[number]
                pending[number] -= 1
        return complete

    def reduced_with(self, index: int) -> list[int]:
        """Return the parameters whose gradients are reduced no later than that of parameter `index`.

        Each bucket of their gradients also contains a part of the gradient of parameter `index`.
        """
        own = self.units_of[index]
        if own not in self._reduced_with:
            members = sorted({member for number in own for member in self.units[number].members})
            self._reduced_with[own] = [member for member in members if set(self.units_of[member]) <= set(own)]
        return self._reduced_with[own]


SLOWER = 1.3
"""Safety factor by which the simulation that chooses the launch order of units (buckets) multiplies the time per byte.

If the simulated network were faster than the real one, units would be sent in the order in which backward computes
them, and the next forward pass would wait for them. A network that is simulated too slow costs less: a stream sometimes
waits for the gradients of its next unit.
"""

Lanes = tuple[Route, int | None]
"""Key of a set of streams: route, and number of transport threads. A unit (bucket) may use any stream of its set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationPace:
    """Expected times of one iteration, from which the launch order of units (buckets) is simulated; equal on all ranks.

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
    """Return the units (buckets) in a launch order with which the next forward pass waits least, by simulation.

    In the simulation, a free stream sends, of the units whose gradients are all ready, the one that the forward pass
    reads first. Busy streams share the network evenly. Units keep their boundaries, because the rounding of a sum may
    depend on where a unit begins.

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
    """Return, for each unit (bucket), the seconds from the first ready gradient until all its gradients are ready.

    For units that are held until the backward pass ends, return the time of its end.
    """
    return [
        pace.backward_s if held(unit) else max((pace.ready_s[index] for index in unit.members), default=0.0)
        for unit in units
    ]


class _StreamReplay:
    """Simulation of the streams (connections) in one iteration, with the units (buckets) that wait for a stream."""

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
        """Advance the simulation to `until_s`. Whenever a stream has sent a unit (bucket), it begins a waiting unit."""
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
