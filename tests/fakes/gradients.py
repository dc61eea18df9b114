"""What gradients need of a router where nothing travels."""

from collections.abc import Sequence

import torch

from sirtaki.comm.device import HostDevice
from sirtaki.comm.gradients.buffers import GradientBuffers, Reduction
from sirtaki.comm.transports.contract import FlatBuffer


class LonelyRouter:
    """Allocates on the host, for one rank."""

    def __init__(self) -> None:
        self.device = HostDevice()

    def allocate(self, numel: int, dtype: torch.dtype) -> FlatBuffer:
        return FlatBuffer(torch.full((numel,), 99, dtype=dtype))


def make_buffers(params: Sequence[torch.nn.Parameter], order: Sequence[int] | None = None) -> GradientBuffers:
    """Flat buffers of these parameters with two flags, full of what was there before."""
    return GradientBuffers(
        range(len(params)) if order is None else order,
        params,
        [f"p{index}" for index in range(len(params))],
        reduction=Reduction(),
        router=LonelyRouter(),  # type: ignore[arg-type]  # what is needed of one
        n_flags=2,
    )


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """One of each shape, with a gradient of its own of ascending values."""
    found = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for number, param in enumerate(found):
        param.grad = torch.arange(param.numel(), dtype=dtype).view(param.shape) + 100 * number
    return found
