"""The units of all flat buffers in the order in which they leave, and which of them have all their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sirtaki.comm.plan import CommPlan, Route

from .buffers import GradientGroup


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
