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
"""The first iteration runs with cold caches; its order is kept only if the second one cannot be had."""

DISORDERLY_ITERATIONS = 3
"""Disorderly iterations in a row after which a rank asks for a new profile of the order."""

PATIENCE_ITERATIONS = 50
"""First pause between two profiles. Each profile doubles it, because an order that never settles is not worth it."""


def agree_on_order(arrived: Sequence[int], control: ControlPlane, *, counts: bool) -> list[int]:
    """Return the parameters by their average place over all ranks. Collective.

    Args:
        arrived: all parameters in the order in which this rank's gradients became ready.
        control: control plane of the ranks.
        counts: True if this rank has computed gradients; False if it takes part with zeros.
    """
    places = np.zeros(len(arrived))
    if counts:
        places[list(arrived)] = np.arange(len(arrived))
    return [int(index) for index in np.argsort(control.total(places), kind="stable")]


class OrderProfiling:
    """State of the profiling of the order, and this rank's request for a new profile.

    A rank requests one if gradients have come in another order than the profiled one in several iterations in a row.

    Attributes:
        active: True while the order is profiled; the same on all ranks.
        since: the iteration in which the last profile began.
        requested: the caller wants a new profile; True until it begins.
        asks: this rank requests a new profile with a control flag of the current iteration.
    """

    def __init__(self) -> None:
        self.active, self.since = True, 0
        self.requested = self.asks = False
        self._disorderly = self._not_before = 0

    def begin(self, iteration: int) -> None:
        """Begin a profile with this iteration."""
        self.active, self.since, self._disorderly = True, iteration, 0
        self.requested = self.asks = False

    def ends_with(self, iteration: int) -> bool:
        """Return whether this is the last iteration of the profile, and end the profile then."""
        if not self.active or iteration + 1 - self.since < PROFILING_ITERATIONS:
            return False
        self.active = False
        self._not_before = iteration + 2 * (iteration - self.since + PATIENCE_ITERATIONS)
        return True

    def watch(self, iteration: int, arrived: Sequence[int], expected: FlatBuffers) -> None:
        """Decide whether this rank requests a profile. Call at the end of an iteration that was not profiled.

        Args:
            iteration: its number.
            arrived: positions of this rank's gradients, in the order in which they became ready.
            expected: flat buffers in the profiled order.
        """
        late = 0
        if arrived != expected.numbers:
            late = max((place - position for place, position in enumerate(arrived)), default=0)
        self._disorderly = self._disorderly + 1 if late > max(8, len(expected.order) // 8) else 0
        differs = self._disorderly >= DISORDERLY_ITERATIONS and iteration >= self._not_before
        self.asks = differs or expected.outdated or self.requested


@dataclass(slots=True, eq=False)
class ScheduledUnit:
    """One unit with all that is needed to launch it.

    Attributes:
        members: parameters with elements in the unit; the last unit also has those without any elements.
        due: sort key among the units of all groups: (position of its last gradient, group, number in plan).
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
        """Size of the unit."""
        return (self.stop - self.start) * self.group.layout.itemsize_bytes


def schedule(groups: Sequence[FlatGroup], plans: Sequence[CommPlan], position: Sequence[int]) -> list[ScheduledUnit]:
    """Return the units of all groups, sorted by the position of their last gradient.

    The unit with the control flags, at the end of the first flat buffer, is the last one, and also waits for
    parameters without elements.

    Args:
        groups: groups of gradients.
        plans: plans, one a group.
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
            last = len(position)  # with the control flags, which may say something of any gradient
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

    Neighbours in a flat buffer become one unit, up to the size of the largest unit of a plan. The units take the
    streams of their plan in turn, because no other streams are open.

    Attributes:
        sizes_bytes: size of each gradient in the expected order, and 0 for flags that are negotiated, `(n_gradients,)`.
        largest_bytes: size of the largest unit.
    """

    def __init__(self, buffers: FlatBuffers, plans: Sequence[CommPlan], *, flags_apart: bool) -> None:
        """Negotiate the gradients of these buffers.

        Args:
            buffers: flat buffers.
            plans: plans, one a group of the buffers.
            flags_apart: the flags are known when the backward pass ends, not with the last gradient.
        """
        self._order, self._groups = buffers.order, list(zip(buffers.groups, plans, strict=True))
        sizes_bytes = [view.numel() * view.element_size() for view in buffers.views]
        self.sizes_bytes = np.array([*sizes_bytes, 0] if flags_apart else sizes_bytes, dtype=np.int64)
        self.largest_bytes = max(
            1, *(unit.numel * group.layout.itemsize_bytes for group, plan in self._groups for unit in plan.units)
        )
        self._pending, self._turn = len(self.sizes_bytes), 0

    def of(self, positions: Sequence[int]) -> list[ScheduledUnit]:
        """Return units for these gradients, and behind the last gradients a unit with the flags.

        Args:
            positions: positions in the expected order, ascending; each is given in one call.
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
    """Units in a fixed order, and the gradients and units that each waits for.

    Attributes:
        units: units in launch order.
        units_of: numbers of the units that have elements of each parameter.
        course: launch steps if gradients come in the expected order: (number of ready gradients, numbers of units).
        stops: numbers of ready gradients in `course`.
    """

    def __init__(
        self,
        units: Sequence[ScheduledUnit],
        order: Sequence[int],
        *,
        held: Callable[[ScheduledUnit], bool],
        one_order: bool = True,
    ) -> None:
        """Compute which unit waits for which.

        Args:
            units: units in launch order.
            order: all parameters in the expected order of their gradients.
            held: returns True for units that are launched when the backward pass ends, as are all units behind them.
            one_order: each unit waits for the unit before it; otherwise for the one before it on its stream.
        """
        self.units = list(units)
        # For each unit, how many gradients it waits for, and one more if it is to follow another unit; one entry more,
        # which never gets to zero, stands behind the last.
        self._awaited = [len(unit.members) + held(unit) for unit in self.units]
        self._behind = [len(self.units)] * len(self.units)  # the number of the unit that is to follow
        last: dict[object, int] = {}
        units_of: list[list[int]] = [[] for _ in order]
        for number, unit in enumerate(self.units):
            for index in unit.members:
                units_of[index].append(number)
            lane = None if one_order else (unit.route, unit.stream)
            if lane in last:
                self._behind[last[lane]] = number
                self._awaited[number] += 1
            last[lane] = number
        self._awaited.append(len(last) + 1)
        self.units_of = [tuple(numbers) for numbers in units_of]
        self._together: dict[tuple[int, ...], list[int]] = {}
        missing = self.missing()
        leaving = [(count, self.count(index, missing)) for count, index in enumerate(order, 1)]
        self.course = [(count, numbers) for count, numbers in leaving if numbers]
        self.stops = frozenset(count for count, _ in self.course)

    def missing(self, came: Sequence[int] = ()) -> list[int]:
        """Return the pending counts of all units, for `count`, after the gradients of these parameters."""
        missing = self._awaited.copy()
        for index in came:
            self.count(index, missing)
        return missing

    def count(self, index: int, missing: list[int]) -> list[int]:
        """Count a ready gradient in `missing`. Return the units to launch, in launch order."""
        leaving = []
        for number in self.units_of[index]:
            missing[number] -= 1
            while not missing[number]:  # and those behind it that have waited for it only
                leaving.append(number)
                number = self._behind[number]
                missing[number] -= 1
        return leaving

    def together(self, index: int) -> list[int]:
        """Return the parameters that have elements in the units of this one only, itself included."""
        own = self.units_of[index]
        if own not in self._together:
            members = sorted({member for number in own for member in self.units[number].members})
            self._together[own] = [member for member in members if set(self.units_of[member]) <= set(own)]
        return self._together[own]


SLOWER = 1.3
"""By so much more time than was measured a byte takes in the iteration that is played. If the network were the slower
one in earnest, units would begin in the order in which gradients come: nothing is hidden then. If it is the faster one,
a stream waits now and then for the gradients of its next unit."""

Lanes = tuple[Route, int | None]
"""A set of streams among which units may move: those of one route with one allowance of threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationPace:
    """Expected times of a simulated iteration; the same on all ranks.

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


def reorder_units(
    units: Sequence[ScheduledUnit], pace: IterationPace, *, held: Callable[[ScheduledUnit], bool]
) -> list[ScheduledUnit]:
    """Return the units in the order in which they begin in a simulated iteration, each on a free stream.

    Units stay as they are cut, since the order in which ranks' elements are added up, and so the last bit of a sum, may
    depend on where a unit begins. Streams that are busy share the network evenly.

    Args:
        units: in the order in which their last gradients come.
        pace: of the iteration.
        held: units that leave when the backward pass has ended, not before.
    """
    played, come_s = _StreamReplay(units, pace), complete_s(units, pace, held=held)
    for moment_s, numbers in groupby(sorted(range(len(units)), key=come_s.__getitem__), key=come_s.__getitem__):
        played.advance(moment_s)
        for number in numbers:
            played.wait_for_stream(number)
        played.begin_what_can()
    played.advance(float("inf"))
    return played.order


def complete_s(
    units: Sequence[ScheduledUnit], pace: IterationPace, *, held: Callable[[ScheduledUnit], bool]
) -> list[float]:
    """Return when each unit is complete, in seconds after the first gradient."""
    return [
        pace.backward_s if held(unit) else max((pace.ready_s[index] for index in unit.members), default=0.0)
        for unit in units
    ]


class _StreamReplay:
    """Simulation of the streams of one iteration, and of the units that wait for them."""

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
            self.begin_what_can()
        self._now_s = until_s
