"""A router that sends nothing, and flat buffers on it, for tests of `comm.gradients`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sirtaki.comm.device import Device
from sirtaki.comm.gradients.buffers import FlatBuffers, Reduction
from sirtaki.comm.plan import CommPlan, TransportKind, Unit
from sirtaki.comm.transports.contract import NOTHING_TO_DO, FlatBuffer, Work


class LonelyRouter:
    """Router that allocates host memory, accepts every plan, and sums at once as if all ranks had equal values.

    Attributes:
        opened: plans that were opened, in order.
        reduced: arguments of the all-reduces: (start, stop, further arguments).
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

    def wait_for_device(self) -> None:
        self.device.synchronise()

    def wait_for(self, works: Sequence[Work], *, interrupted: Callable[[], bool] | None = None) -> bool:
        return all(work.wait(0.0) for work in works) and not (interrupted and interrupted())


def make_buffers(params: Sequence[torch.nn.Parameter], order: Sequence[int] | None = None) -> FlatBuffers:
    """Return flat buffers of the parameters with two flags. Their memory is not zero initially."""
    return FlatBuffers(
        range(len(params)) if order is None else order,
        params,
        [f"p{index}" for index in range(len(params))],
        reduction=Reduction(),
        router=LonelyRouter(),  # type: ignore[arg-type]  # what is needed of one
        n_flags=2,
    )


def plan_of(numel: int, *cuts: int, streams: int = 1) -> CommPlan:
    """Return a plan with units between the cuts below `numel`, assigned to the streams in turn."""
    bounds = [0, *(cut for cut in cuts if cut < numel), numel]
    units = tuple(
        Unit(start=start, stop=stop, stream=number % streams)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds))
        if stop > start
    )
    return CommPlan(numel=numel, units=units, streams=streams, transport=TransportKind.MPI)


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Return one parameter per shape, each with a gradient of ascending values."""
    found = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for number, param in enumerate(found):
        param.grad = (torch.arange(param.numel()) + 100 * number).to(dtype).view(param.shape)
    return found
