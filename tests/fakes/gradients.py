"""What gradients need of a router where nothing travels."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sirtaki.comm.device import Device
from sirtaki.comm.gradients.buffers import FlatBuffers, Reduction
from sirtaki.comm.plan import CommPlan, TransportKind, Unit
from sirtaki.comm.transports.contract import NOTHING_TO_DO, FlatBuffer, Work


class LonelyRouter:
    """Allocates on the host, opens any plan, and reduces at once among ranks that all have the same.

    Attributes:
        opened: plans.
        reduced: what was asked for: (start, stop, the other arguments).
    """

    def __init__(self, device: Device | None = None, *, ranks: int = 1) -> None:
        self.device = device or Device()
        self._ranks = ranks
        self.opened: list[CommPlan] = []
        self.reduced: list[tuple[int, int, dict[str, Any]]] = []

    def allocate(self, numel: int, dtype: torch.dtype) -> FlatBuffer:
        return FlatBuffer(torch.full((numel,), 99, dtype=dtype))

    def open_plan(self, plan: CommPlan) -> None:
        self.opened.append(plan)

    def prepare(self, act: Callable[[], None], **where: Any) -> None:
        act()

    def all_reduce(self, buffer: FlatBuffer, start: int, stop: int, **how: Any) -> Work:
        self.reduced.append((start, stop, how))
        buffer.tensor[start:stop].mul_(self._ranks * how["scale"])
        return NOTHING_TO_DO

    def wait_for(self, works: Sequence[Work], *, interrupted: Callable[[], bool] | None = None) -> bool:
        return all(work.wait(0.0) for work in works) and not (interrupted and interrupted())


def make_buffers(params: Sequence[torch.nn.Parameter], order: Sequence[int] | None = None) -> FlatBuffers:
    """Flat buffers of these parameters with two flags, full of what was there before."""
    return FlatBuffers(
        range(len(params)) if order is None else order,
        params,
        [f"p{index}" for index in range(len(params))],
        reduction=Reduction(),
        router=LonelyRouter(),  # type: ignore[arg-type]  # what is needed of one
        n_flags=2,
    )


def plan_of(numel: int, *cuts: int, streams: int = 1) -> CommPlan:
    """Units between the cuts that lie within so many elements, on the streams in turn."""
    bounds = [0, *(cut for cut in cuts if cut < numel), numel]
    units = tuple(
        Unit(start=start, stop=stop, stream=number % streams)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds))
        if stop > start
    )
    return CommPlan(numel=numel, units=units, streams=streams, transport=TransportKind.MPI)


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """One of each shape, with a gradient of its own of ascending values."""
    found = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for number, param in enumerate(found):
        param.grad = (torch.arange(param.numel()) + 100 * number).to(dtype).view(param.shape)
    return found
