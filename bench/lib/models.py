"""The networks that the step benchmarks train: one that only sleeps where a GPU would compute, and real small ones.

All parameters start equal on all ranks, and inputs come from a seed and the rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from bench.lib.workloads import Workload, workload

LEAST_SLEEP_S = 0.3e-3
"""Shorter sleeps are saved up: the kernel would round each of them up."""


class _Sleeper:
    """Sleeps for durations that add up, however coarse the clock is."""

    def __init__(self) -> None:
        self._owed_s = 0.0

    def sleep(self, duration_s: float) -> None:
        self._owed_s += duration_s
        if self._owed_s >= LEAST_SLEEP_S:
            begin_s = time.perf_counter()
            time.sleep(self._owed_s)
            self._owed_s -= time.perf_counter() - begin_s


class _Layer(torch.autograd.Function):
    """Passes its input on; backward it sleeps and gives the parameter a gradient of one constant value."""

    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor, parameter: torch.Tensor, owner: EmulatedModel, index: int) -> Any:
        ctx.owner, ctx.index = owner, index
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # Any: torch leaves it open
        owner, index = ctx.owner, ctx.index
        owner.sleeper.sleep(owner.durations_s[index])
        parameter = owner.layers[index]
        return grad, parameter.new_full(parameter.shape, owner.gradient_value), None, None


class EmulatedModel(nn.Module):
    """Gradients as a real network gives them, in size, order and time; the processor sleeps meanwhile.

    The autograd engine, its hooks and the accumulation into `.grad` are real. A sleep does not wait for hooks, so a
    slow hook delays the next layer, as in training on CPUs; sleeping too long is made up for, as the scheduler of an
    overcommitted machine is no part of the network.

    Attributes:
        durations_s: of each parameter's part of the backward pass, in the order of the forward pass.
        gradient_value: what all elements of this rank's gradients are.
    """

    def __init__(self, work: Workload, *, compute_s: float, gradient_value: float) -> None:
        """A third of `compute_s` is spent forward, the rest backward."""
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(size) for size in reversed(work.layout.sizes))
        self.forward_s = compute_s / 3
        self.durations_s = [2 / 3 * compute_s * share for share in reversed(work.compute_shares)]
        self.gradient_value = gradient_value
        self.sleeper = _Sleeper()

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Sleeps, and returns its input, through every layer."""
        self.sleeper.sleep(self.forward_s)
        for index, parameter in enumerate(self.layers):
            activation = _Layer.apply(activation, parameter, self, index)  # type: ignore[no-untyped-call]
        return activation


def emulated_resnet50(*, rank: int, compute_s: float, scale: float = 1.0) -> tuple[EmulatedModel, torch.Tensor]:
    """The 161 gradients of ResNet-50, each `scale` times its elements; gradients are `rank + 1` everywhere."""
    work = workload("resnet50").scaled(scale) if scale != 1.0 else workload("resnet50")
    return EmulatedModel(work, compute_s=compute_s, gradient_value=rank + 1.0), torch.zeros(1, requires_grad=True)


def mlp(widths: Sequence[int], *, rank: int, batch: int, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """A perceptron with its input."""
    torch.manual_seed(seed)
    pairs = list(pairwise(widths))
    layers = [layer for before, after in pairs for layer in (nn.Linear(before, after), nn.ReLU())]
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    return nn.Sequential(*layers[:-1]), torch.randn(batch, widths[0], generator=generator)


def transformer(*, rank: int, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """A small transformer encoder, 6.4 M parameters in 72 tensors, with its input."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), torch.randn(2, 16, 256, generator=generator)


def small_conv(*, rank: int, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """A small convolutional network with batch normalisation and a large last layer, with its input."""
    torch.manual_seed(seed)
    channels = [3, 32, 64, 128]
    blocks = [
        layer
        for before, after in pairwise(channels)
        for layer in (nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2))
    ]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 16, 512), nn.ReLU(), nn.Linear(512, 10))
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    return model, torch.randn(8, 3, 32, 32, generator=generator)
