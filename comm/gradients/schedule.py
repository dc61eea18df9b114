"""In which order gradients come and units leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from sirtaki.errors import PlanError

from ..plan import CommPlan, GradientLayout, Route
from ..router import Router
from .buffers import FLAG_COUNT, ControlFlags, GradientBuffers, GradientGroup, HasGrad, Reduction, UsageFlags

if TYPE_CHECKING:
    from ..control.plane import ControlPlane


PROFILING_ITERATIONS = 2
"""The first iteration runs with cold caches; its order is kept only if the second one cannot be had."""

DISORDERLY_ITERATIONS = 3
"""So many in a row before a rank asks for a new profile of the order."""

PATIENCE_ITERATIONS = 50
"""Each new profile doubles the time to the next one, beginning here: an order that never settles is not chased."""


def agree_on_order(arrived: Sequence[int], control: ControlPlane, *, counts: bool) -> list[int]:
    """Collective: parameters by their average place over ranks, so that no rank rules.

    Args:
        arrived: all parameters in the order in which this rank's gradients came.
        control: the ranks.
        counts: this rank has computed gradients; False on one that takes part with zeros.
    """
    places = np.zeros(len(arrived))
    if counts:
        places[list(arrived)] = np.arange(len(arrived))
    return [int(index) for index in np.argsort(control.total(places), kind="stable")]


class OrderWatch:
    """Notices that gradients come in another order than they did when it was profiled."""

    def __init__(self) -> None:
        self._profiled_from = 0
        self._not_before = 0
        self._disorderly = 0

    def profiling_begins(self, iteration: int) -> None:
        """The order is profiled from this iteration on."""
        self._profiled_from, self._disorderly = iteration, 0

    def profiled(self, iteration: int) -> None:
        """The order is known since this iteration."""
        self._not_before = iteration + 2 * (iteration - self._profiled_from + PATIENCE_ITERATIONS)

    def as_expected(self) -> None:
        """In this iteration gradients came in the order that was profiled."""
        self._disorderly = 0

    def wants_reprofile(self, iteration: int, arrived: Sequence[int], position: Sequence[int]) -> bool:
        """Whether to ask for a new profile, at the end of an iteration.

        Args:
            iteration: its number.
            arrived: parameters in the order in which their gradients came, those that came.
            position: where each parameter was expected.
        """
        limit = max(8, len(position) // 8)
        late = max((place - position[index] for place, index in enumerate(arrived)), default=0)
        self._disorderly = self._disorderly + 1 if late > limit else 0
        return self._disorderly >= DISORDERLY_ITERATIONS and iteration >= self._not_before


class OrderProfiling:
    """Whether the order is profiled in the current iteration, and whether this rank asks for that.

    Attributes:
        active: it is profiled; the same on all ranks.
        since: the iteration in which that began, the last time.
        requested: somebody wants it to be profiled again; True until that begins.
        asks: this rank asks the others for it, with a control flag of the current iteration.
    """

    def __init__(self) -> None:
        self.active, self.since = True, 0
        self.requested = self.asks = False
        self._watch = OrderWatch()

    def ends_with(self, iteration: int) -> bool:
        """Whether this is the last iteration in which it is profiled."""
        return self.active and iteration + 1 - self.since >= PROFILING_ITERATIONS

    def end(self, iteration: int) -> None:
        """The order is known since this iteration."""
        self.active = False
        self._watch.profiled(iteration)

    def begin(self, iteration: int) -> None:
        """It is profiled from this iteration on."""
        self.active, self.since = True, iteration
        self._watch.profiling_begins(iteration)
        self.requested = self.asks = False

    def watch(self, iteration: int, arrived: Sequence[int], buffers: GradientBuffers) -> None:
        """At the end of an iteration in which it was not profiled: decides whether this rank asks for it.

        Args:
            iteration: its number.
            arrived: parameters in the order in which this rank's gradients came.
            buffers: have the expected order.
        """
        late = False
        if arrived == buffers.order:
            self._watch.as_expected()
        else:
            late = self._watch.wants_reprofile(iteration, arrived, buffers.position)
        self.asks = late or buffers.outdated or self.requested


@dataclass(slots=True, eq=False)
class ScheduledUnit:
    """One unit with all that issuing it takes.

    Attributes:
        members: parameters with elements in it, of the last unit also those without any.
        due: where it stands among the units of all groups: (position of its last gradient, group, number in plan).
    """

    group: GradientGroup
    start: int
    stop: int
    stream: int
    route: Route
    threads: int | None = None
    members: tuple[int, ...] = ()
    due: tuple[int, int, int] = (0, 0, 0)

    @property
    def n_bytes(self) -> int:
        """What it moves."""
        return (self.stop - self.start) * self.group.layout.itemsize_bytes


def schedule(
    groups: Sequence[GradientGroup], plans: Sequence[CommPlan], position: Sequence[int]
) -> list[ScheduledUnit]:
    """The units of all groups, merged by the moment in which their last gradient is expected.

    The one with the control flags, at the end of the first flat buffer, is the last one, and waits for parameters
    without elements, too.

    Args:
        groups: what is reduced.
        plans: one a group.
        position: when each parameter's gradient is expected among all.
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


def _expand(number: int, group: GradientGroup, plan: CommPlan, position: Sequence[int]) -> list[ScheduledUnit]:
    """The units of one group's plan."""
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
                members=tuple(members),
                due=(last, number, serial),
            )
        )
    return units


class Schedule:
    """Units in a fixed order, counting what each still waits for in this iteration.

    Attributes:
        units: in the order in which they are to leave.
        units_of: for each parameter, the numbers of the units that have elements of it.
        missing: for each unit, gradients that have not come, and one more while the unit before it has not left; one
            entry more, never zero, stands behind the last.
        left: the numbers of the units that have left, in the order in which they did.
    """

    def __init__(
        self,
        units: Sequence[ScheduledUnit],
        n_params: int,
        *,
        held: Callable[[ScheduledUnit], bool],
        one_order: bool = True,
    ) -> None:
        """Notes which unit waits for which.

        Args:
            units: in the order in which they are to leave.
            n_params: how many gradients there are.
            held: units that leave with `take_all` only, and so do those behind them.
            one_order: each unit leaves behind the one before it; otherwise behind the one before it on its stream.
        """
        self.units = list(units)
        self._expected = [len(unit.members) + held(unit) for unit in self.units]
        self._behind = [len(self.units)] * len(self.units)
        last: dict[object, int] = {}
        units_of: list[list[int]] = [[] for _ in range(n_params)]
        for number, unit in enumerate(self.units):
            for index in unit.members:
                units_of[index].append(number)
            lane = None if one_order else (unit.route, unit.stream)
            if lane in last:
                self._behind[last[lane]] = number
                self._expected[number] += 1
            last[lane] = number
        self._expected.append(len(last) + 1)
        self.units_of = [tuple(numbers) for numbers in units_of]
        self._together: dict[tuple[int, ...], list[int]] = {}
        self.begin()

    def begin(self) -> None:
        """An iteration begins: everything is missing."""
        self.missing = list(self._expected)
        self.left: list[int] = []

    def together(self, index: int) -> list[int]:
        """The parameters that have elements in no other units than this one has; it is among them."""
        own = self.units_of[index]
        if own not in self._together:
            members = sorted({member for number in own for member in self.units[number].members})
            self._together[own] = [member for member in members if set(self.units_of[member]) <= set(own)]
        return self._together[own]

    def take(self, number: int) -> Iterator[ScheduledUnit]:
        """A unit that waits for nothing any more leaves, and those behind it that have waited for it only."""
        missing = self.missing
        while not missing[number]:
            self.left.append(number)
            yield self.units[number]
            number = self._behind[number]
            missing[number] -= 1

    def take_all(self) -> Iterator[ScheduledUnit]:
        """All that have not left, complete or not."""
        before = set(self.left)
        for number in (number for number in range(len(self.units)) if number not in before):
            self.left.append(number)
            yield self.units[number]


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


class PlannedBuffers:
    """Flat buffers in one order of the parameters, ready to be reduced.

    Attributes:
        buffers: where gradients lie.
        flags: what ranks tell each other along with them.
        usage: which gradients were computed at all, if anybody asks.
        plans: the current ones, one a layout.
        schedule: their units, in the order in which they leave.
    """

    plans: tuple[CommPlan, ...]
    schedule: Schedule

    def __init__(
        self,
        order: Sequence[int],
        params: Sequence[HasGrad],
        names: Sequence[str],
        *,
        router: Router,
        reduction: Reduction,
        default_plan: Callable[[GradientLayout], CommPlan],
        unused_as_none: bool,
        before: PlannedBuffers | None,
    ) -> None:
        """Collective.

        Args:
            order: of the parameters in the buffers, the same on all ranks.
            params: their gradients are reduced.
            names: of the parameters.
            router: allocates, and opens the plans' streams.
            reduction: tells in which dtype gradients travel.
            default_plan: the plan of a new layout; the same on all ranks.
            unused_as_none: there is a flag for each parameter that tells whether its gradient was computed.
            before: the buffers that these replace; gradients that lie there move along.
        """
        self._router, self._n_params = router, len(params)
        router.device.synchronise()  # nothing may use the old ones any more
        self.buffers = GradientBuffers(
            order,
            params,
            names,
            reduction=reduction,
            router=router,
            n_flags=FLAG_COUNT + (len(params) if unused_as_none else 0),
        )
        if before is not None:
            self.buffers.take_over(before.buffers)
        elements = self.buffers.flags
        self.flags = ControlFlags(router.device, elements[:FLAG_COUNT])
        self.usage = UsageFlags(router.device, elements[FLAG_COUNT:])
        self.install([default_plan(layout) for layout in self.buffers.layouts])

    def install(self, plans: Sequence[CommPlan]) -> None:
        """Collective, between iterations: units leave by these plans from now on.

        Raises:
            PlanError: a plan does not fit its layout, or has a route or streams that this job does not have.
            TransportError: on all ranks, streams could not be opened.
        """
        groups = self.buffers.groups
        if len(plans) != len(groups):
            raise PlanError(f"{len(plans)} plans for {len(groups)} layouts")
        for group, plan in zip(groups, plans, strict=True):
            if plan.numel != group.layout.numel:
                raise PlanError(f"a plan of {plan.numel} elements for a layout of {group.layout.numel}")
            self._router.open_plan(plan)
        # What tells of usage is known at the end only; other flags when the last gradient has come, and so their unit.
        self._schedule(schedule(groups, plans, self.buffers.position), flags_wait=self.usage.wanted)
        self.plans = tuple(plans)

    def overtake(self, pace: IterationPace) -> None:
        """Between iterations, the same on all ranks: see `Synchroniser.overtake`."""
        units, _ = self.overtaken(self.plans, pace)
        # NCCL's communicators of one device share one order; all others are on their own.
        self._schedule(units, flags_wait=True, one_order=self._router.device.streams)

    def overtaken(self, plans: Sequence[CommPlan], pace: IterationPace) -> tuple[list[ScheduledUnit], list[float]]:
        """Units as they would leave by these plans; and when each has what it waits for, after the first gradient."""
        usual = schedule(self.buffers.groups, plans, self.buffers.position)
        units = overtaking(usual, pace, held=self._has_flags)
        return units, coming_s(units, pace, held=self._has_flags)

    def _schedule(self, units: Sequence[ScheduledUnit], *, flags_wait: bool, one_order: bool = True) -> None:
        """Units leave in this order; those with flags, and those behind them, not before all is known that they say."""
        self.schedule = Schedule(
            units,
            self._n_params,
            held=lambda unit: flags_wait and self._has_flags(unit),
            one_order=one_order,
        )

    def _has_flags(self, unit: ScheduledUnit) -> bool:
        first = self.buffers.groups[0]
        return unit.group is first and unit.stop > first.layout.offsets[-2]
