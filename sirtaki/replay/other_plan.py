"""The same job under another plan: units leave when their gradients have come, and cost what such units cost."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.model.graph import Activity
from sirtaki.comm.plan import CommPlan, Route
from sirtaki.errors import ReplayError
from sirtaki.profiler.recording import Buffer

from .job_model import GradientKey, Iteration, JobModel, Operation, OperationKey, Piece, Program
from .unit_costs import UnitCost, unit_cost


def with_knobs(job: JobModel, knobs: Knobs) -> JobModel:
    """All buffers cut by these knobs.

    Raises:
        PlanError: their cuts do not fit a buffer.
        ReplayError: nothing is known of their route, or of when gradients come.
    """
    return with_plans(job, {buffer.number: knobs.to_plan(buffer.layout) for buffer in job.buffers})


def with_plans(
    job: JobModel, plans: Mapping[int, CommPlan], *, costs: Mapping[Route, UnitCost] | None = None
) -> JobModel:
    """These buffers cut by these plans.

    Args:
        job: as it was recorded, or with fewer ranks that stand for all (`symmetric`).
        plans: by buffer.
        costs: of units on each route; has to be given for a job with fewer ranks, which no longer shows them.

    Raises:
        ReplayError: a plan is of another layout, or nothing is known of its route or of when gradients come.
    """
    buffers = tuple(
        replace(buffer, plan=plans[buffer.number]) if buffer.number in plans else buffer for buffer in job.buffers
    )
    for buffer in buffers:
        if buffer.plan.numel != buffer.layout.numel:
            raise ReplayError(
                f"the plan is of {buffer.plan.numel} elements, buffer {buffer.number} has {buffer.layout.numel}"
            )
    changed = [buffer for buffer in buffers if buffer.number in plans]
    routes = {(buffer.plan.transport, unit.algorithm) for buffer in changed for unit in buffer.plan.units}
    if costs is None:
        costs = {route: unit_cost(job, route, job.ranks) for route in routes}
    iterations = tuple(_replanned(each, changed, costs) for each in job.iterations)
    return replace(job, buffers=buffers, iterations=iterations)


def _replanned(iteration: Iteration, buffers: Sequence[Buffer], costs: Mapping[Route, UnitCost]) -> Iteration:
    numbers = {buffer.number for buffer in buffers}
    units = [unit for buffer in buffers for unit in _units(buffer, costs)]
    others = [one for one in iteration.operations if one.key[0] not in numbers]
    programs = {rank: _Reissue(program, buffers, units).program() for rank, program in iteration.programs.items()}
    return Iteration(programs=programs, operations=(*others, *units))


def _units(buffer: Buffer, costs: Mapping[Route, UnitCost]) -> list[Operation]:
    layout = buffer.layout
    found = []
    for unit in buffer.plan.units:
        route = (buffer.plan.transport, unit.algorithm)
        bare = Operation(
            key=(buffer.number, unit.start, unit.stop),
            activity=Activity.UNIT,
            lane=f"{buffer.plan.transport.value} stream {unit.stream}",
            ranks=buffer.ranks,
            n_bytes=unit.numel * layout.itemsize_bytes,
            name=layout.describe(unit.start, unit.stop) if layout.names else f"unit {unit.start}",
            route=route,
        )
        found.append(costs[route].applied_to(bare))
    return found


class _Reissue:
    """One rank's iteration with other units of some buffers."""

    def __init__(self, program: Program, buffers: Sequence[Buffer], units: Sequence[Operation]) -> None:
        self._program, self._units = program, {one.key: one for one in units}
        self._numbers = {buffer.number for buffer in buffers}
        come = {gradient for piece in program for gradient in piece.ready}
        self._missing: dict[OperationKey, int] = {}
        self._of: dict[GradientKey, list[OperationKey]] = defaultdict(list)
        for buffer in buffers:
            there = [index for number, index in come if number == buffer.number]
            if not there:
                raise ReplayError(f"when the gradients of buffer {buffer.number} come was not recorded on every rank")
            self._wait_for_gradients(buffer, set(there))
        self._queues = {
            buffer.number: [(buffer.number, unit.start, unit.stop) for unit in buffer.plan.units] for buffer in buffers
        }
        self._left = {number: sum(1 for one, _ in come if one == number) for number in self._numbers}
        copied_s = sum(piece.seconds for piece in program if piece.activity is Activity.COPY)
        copied = sum(buffer.layout.total_bytes for buffer in buffers)
        self._copy_s_per_byte = copied_s / copied
        self._copy = next((piece for piece in program if piece.activity is Activity.COPY), None)

    def _wait_for_gradients(self, buffer: Buffer, there: set[int]) -> None:
        offsets = buffer.layout.offsets
        for unit in buffer.plan.units:
            key = (buffer.number, unit.start, unit.stop)
            first, last = bisect_right(offsets, unit.start) - 1, bisect_left(offsets, unit.stop)
            mine = [index for index in range(first, last) if index in there]
            self._missing[key] = len(mine)
            for index in mine:
                self._of[buffer.number, index].append(key)

    def program(self) -> Program:
        found: list[Piece] = []
        for piece in self._program:
            found += self._replaced(piece)
        return tuple(found)

    def _replaced(self, piece: Piece) -> list[Piece]:
        issues = tuple(key for key in piece.issues if key[0] not in self._numbers)
        bare = replace(piece, waits=self._waits(piece), issues=issues)
        if piece.activity is Activity.COPY:
            bare = replace(bare, seconds=0.0)
        leaving = [key for gradient in piece.ready for key in self._come(gradient)]
        if not leaving:
            return [bare] if bare.seconds or bare.is_joint or bare.ready else []
        copy_s = self._copy_s_per_byte * sum(self._units[key].n_bytes for key in leaving)
        return [
            bare,
            Piece(
                activity=Activity.COPY,
                phase=piece.phase if self._copy is None else self._copy.phase,
                name="copy gradients",
                seconds=copy_s,
                issues=tuple(leaving),
            ),
        ]

    def _waits(self, piece: Piece) -> tuple[tuple[OperationKey, float], ...]:
        """For the last unit on each stream instead of the units that it waited for."""
        found = [(key, lag_s) for key, lag_s in piece.waits if key[0] not in self._numbers]
        lag_s = dict.fromkeys(self._numbers, 0.0)
        waited = set()
        for key, late_s in piece.waits:
            if key[0] in self._numbers:
                waited.add(key[0])
                lag_s[key[0]] = max(lag_s[key[0]], late_s)
        last = {self._units[key].lane: key for key in self._units if key[0] in waited}
        return (*found, *((key, lag_s[key[0]]) for key in last.values()))

    def _come(self, gradient: GradientKey) -> list[OperationKey]:
        """Units that leave once it is there: in their order, and all that is left with the last one."""
        number = gradient[0]
        if number not in self._numbers:
            return []
        for key in self._of[gradient]:
            self._missing[key] -= 1
        self._left[number] -= 1
        queue = self._queues[number]
        count = next((place for place, key in enumerate(queue) if self._missing[key] > 0), len(queue))
        if self._left[number] > 0:
            while count and not self._of_any_gradient(queue[count - 1]):
                count -= 1  # what has no gradient that comes leaves with the last one
        leaving, self._queues[number] = queue[:count], queue[count:]
        return leaving

    def _of_any_gradient(self, key: OperationKey) -> bool:
        return any(key in keys for keys in self._of.values())
