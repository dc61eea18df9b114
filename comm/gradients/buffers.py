"""The gradients of one optimizer, grouped by dtype: their flat buffers, and who owns which range of them.

A module of its own because it says what is reduced; the synchroniser says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import CommPlan
from sirtaki.comm.router import Route, Router
from sirtaki.comm.transports.contract import FlatBuffer, ReduceOp

from .control_flags import FLAG_COUNT


class HasGrad(Protocol):
    """What is needed of a parameter."""

    grad: torch.Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def numel(self) -> int:
        """Elements."""
        ...


def dense_strides(param: HasGrad) -> tuple[int, ...]:
    """The strides of a parameter's gradient: the parameter's own, without holes."""
    return torch.empty_like(param, device="meta").stride()  # type: ignore[arg-type]  # a tensor in truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """What happens to every gradient: `postscale * op over ranks of (prescale * gradient)`.

    Attributes:
        wire_dtype: the type in which gradients of each dtype travel; those not named travel as they are.
    """

    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    wire_dtype: tuple[tuple[torch.dtype, torch.dtype], ...] = ()

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype on the wire of gradients of `dtype`."""
        return dict(self.wire_dtype).get(dtype, dtype)


class GradientGroup:
    """The gradients of one dtype: their flat buffer, and a view of it for each."""

    def __init__(
        self, indices: list[int], params: Sequence[HasGrad], layout: GradientLayout, buffer: FlatBuffer
    ) -> None:
        self.indices, self.layout, self.buffer = indices, layout, buffer
        # A gradient has its parameter's strides (torch's layout contract, on which fused optimizers rely).
        self.views = [
            buffer.tensor.as_strided(params[index].shape, dense_strides(params[index]), offset)
            for index, offset in zip(indices, layout.offsets, strict=False)
        ]


@dataclass(slots=True, eq=False)
class ScheduledUnit:
    """One unit with all that issuing it takes.

    Attributes:
        members: parameters with elements in it.
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


def group_by_dtype(
    order: Sequence[int], params: Sequence[HasGrad], names: Sequence[str], *, reduction: Reduction, router: Router
) -> list[GradientGroup]:
    """Collective: flat buffers for all gradients in the given order, one a dtype; the first has the votes, too."""
    by_dtype: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index in order:
        dtype = params[index].dtype
        by_dtype.setdefault((reduction.travels_as(dtype), dtype), []).append(index)
    groups: list[GradientGroup] = []
    for (wire, _), indices in by_dtype.items():
        votes = () if groups else (FLAG_COUNT,)
        layout = GradientLayout(
            sizes=(*(params[index].numel() for index in indices), *votes),
            itemsize_bytes=wire.itemsize,
            dtype=str(wire).removeprefix("torch."),
            device=router.device.torch_device.type,
            names=(*(names[index] for index in indices), *("sirtaki.control_flags" for _ in votes)),
        )
        groups.append(GradientGroup(indices, params, layout, router.allocate(layout.numel, wire)))
    return groups


def schedule(
    groups: Sequence[GradientGroup], plans: Sequence[CommPlan], position: dict[int, int]
) -> list[ScheduledUnit]:
    """The units of all groups, merged by the moment in which their last gradient is expected.

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
    return sorted(units, key=lambda unit: unit.due)


def _expand(number: int, group: GradientGroup, plan: CommPlan, position: dict[int, int]) -> list[ScheduledUnit]:
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
