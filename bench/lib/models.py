"""Models of the step benchmarks: emulated models that sleep instead of computing, and small real networks.

Parameters start equal on all ranks. Inputs depend on a seed and the rank.
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
"""Shorter sleeps are accumulated until this duration, because the kernel rounds each sleep up."""

AHEAD_S = 1e-3
"""Time by which the program may be ahead of the emulated device.

It hides the time of Python code between two layers.
"""


class _Sleeper:
    """Synchronous emulated device. The sum of its sleeps is exact, although single sleeps are not."""

    def __init__(self) -> None:
        self._pending_s = 0.0

    def compute(self, duration_s: float) -> None:
        self._pending_s += duration_s
        if self._pending_s >= LEAST_SLEEP_S:
            begin_s = time.perf_counter()
            time.sleep(self._pending_s)
            self._pending_s -= time.perf_counter() - begin_s


class _Layer(torch.autograd.Function):
    """Pass the input on. The backward pass sleeps and gives the parameter a constant gradient."""

    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor, parameter: torch.Tensor, owner: EmulatedModel, index: int) -> Any:
        ctx.owner, ctx.index = owner, index
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # Any, because torch does not define the type.
        owner, index = ctx.owner, ctx.index
        owner.device.compute(owner.durations_s[index])
        parameter = owner.layers[index]
        return grad, parameter.new_full(parameter.shape, owner.gradient_value), None, None


class EmulatedModel(nn.Module):
    """A model that sleeps instead of computing. Its gradients have a real network's sizes, order and ready times.

    The autograd engine, its hooks and the accumulation into `.grad` are real. A sleep does not wait for hooks, so a
    slow hook delays the next layer, as in training on CPUs. Excess sleep is compensated, because the scheduler of an
    overcommitted machine is not part of the network.

    Attributes:
        durations_s: duration of each parameter's part of the backward pass, in the order of the forward pass.
        gradient_value: value of all elements of this rank's gradients.
    """

    def __init__(self, work: Workload, *, compute_s: float, gradient_value: float) -> None:
        """Divide `compute_s`: a third for the forward pass, the rest for the backward pass."""
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(size) for size in reversed(work.layout.sizes))
        self.forward_s = compute_s / 3
        self.durations_s = [2 / 3 * compute_s * share for share in reversed(work.compute_shares)]
        self.gradient_value = gradient_value
        self.device = _Sleeper()

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Sleep for every layer, and return the input."""
        self.device.compute(self.forward_s)
        for index, parameter in enumerate(self.layers):
            activation = _Layer.apply(activation, parameter, self, index)  # type: ignore[no-untyped-call]
        return activation


class _EmulatedDevice:
    """An emulated asynchronous device, like a GPU. The program sleeps so that its lead over the device stays small."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def compute(self, duration_s: float) -> None:
        """Start work after all previous work. Return at most `AHEAD_S` before the work ends."""
        now_s = time.perf_counter()
        self._free_s = max(self._free_s, now_s) + duration_s
        left_s = self._free_s - AHEAD_S - now_s
        if left_s > LEAST_SLEEP_S:
            time.sleep(left_s)


class _EmulatedLayer(nn.Module):
    """A layer that reads its parameter and then sleeps, and sleeps in the backward pass."""

    def __init__(self, owner: LayeredModel, index: int, size: int, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self._owner, self._index, self._forward_s = [owner], index, forward_s

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Return the input. It depends on the parameter, so that the parameter must be up to date."""
        (owner,) = self._owner
        activation = activation + 0.0 * self.weight.detach()[:1]
        owner.device.compute(self._forward_s)
        return _Layer.apply(activation, self.weight, owner, self._index)  # type: ignore[no-untyped-call,no-any-return]


class LayeredModel(nn.Module):
    """An `EmulatedModel` whose layers are modules that read their parameters and have a share of the forward pass.

    Attributes:
        durations_s: duration of each layer's part of the backward pass, in the order of the forward pass.
        gradient_value: value of all elements of this rank's gradients.
        layers: the parameters.
    """

    def __init__(self, work: Workload, *, compute_s: float, gradient_value: float) -> None:
        """Divide `compute_s`: a third for the forward pass, the rest for the backward pass."""
        super().__init__()
        shares = list(reversed(work.compute_shares))
        self.durations_s = [2 / 3 * compute_s * share for share in shares]
        self.gradient_value, self.device = gradient_value, _EmulatedDevice()
        self.body = nn.Sequential(
            *(
                _EmulatedLayer(self, index, size, compute_s / 3 * share)
                for index, (size, share) in enumerate(zip(reversed(work.layout.sizes), shares, strict=True))
            )
        )
        self.layers = [layer.weight for layer in self.body]

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Run every layer."""
        return self.body(activation)  # type: ignore[no-any-return]


def emulated_resnet50(*, rank: int, compute_s: float, scale: float = 1.0) -> tuple[EmulatedModel, torch.Tensor]:
    """Return the emulated ResNet-50: 161 gradients with `scale` times their elements, all equal to `rank + 1`."""
    work = workload("resnet50").scaled(scale) if scale != 1.0 else workload("resnet50")
    return emulated(work, rank=rank, compute_s=compute_s)


def emulated(work: Workload, *, rank: int, compute_s: float) -> tuple[EmulatedModel, torch.Tensor]:
    """Return the emulated model of a workload, with gradients equal to `rank + 1`, and its input."""
    return EmulatedModel(work, compute_s=compute_s, gradient_value=rank + 1.0), torch.zeros(1, requires_grad=True)


def mlp(widths: Sequence[int], *, rank: int, batch: int, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """Return a perceptron with its input."""
    torch.manual_seed(seed)
    pairs = list(pairwise(widths))
    layers = [layer for before, after in pairs for layer in (nn.Linear(before, after), nn.ReLU())]
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    return nn.Sequential(*layers[:-1]), torch.randn(batch, widths[0], generator=generator)


def transformer(*, rank: int, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """Return a small transformer encoder, 6.4 M parameters in 72 tensors, with its input."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), torch.randn(2, 16, 256, generator=generator)


def small_conv(*, rank: int, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """Return a small convolutional network with batch normalisation and a large last layer, with its input."""
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


class _GptBlock(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.attention(self.ln_1(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.narrow(nn.functional.gelu(self.widen(self.ln_2(hidden)), approximate="tanh"))


@torch.library.custom_op("bench::elsewhere", mutates_args=())
def elsewhere(hidden: torch.Tensor, forward_s: float) -> torch.Tensor:
    """Sleep instead of computing, twice as long in the backward pass. Compilers treat it as an opaque operator."""
    time.sleep(forward_s)
    return hidden.clone()


elsewhere.register_fake(lambda hidden, forward_s: torch.empty_like(hidden))
elsewhere.register_autograd(
    lambda ctx, grad: (elsewhere(grad.contiguous(), 2 * ctx.forward_s), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "forward_s", inputs[1]),
)


class Gpt(nn.Module):
    """A small GPT-2 that returns its loss on the next token.

    Attributes:
        elsewhere_s: sleep of each block in the forward pass; twice as long in the backward pass.
    """

    def __init__(
        self, *, layers: int, width: int, heads: int, vocabulary: int, length: int, elsewhere_s: float = 0.0
    ) -> None:
        super().__init__()
        self.elsewhere_s = elsewhere_s
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_GptBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy, a scalar, of `(batch, length)` tokens."""
        hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
            if self.elsewhere_s:
                hidden = elsewhere(hidden, self.elsewhere_s)
        logits = self.head(self.norm(hidden))[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gpt(
    *, rank: int, sequences: int, elsewhere_s: float = 0.0, length: int = 128, seed: int = 0
) -> tuple[Gpt, torch.Tensor]:
    """Return a `Gpt` of four layers, 5.3 M parameters in 53 tensors, with its input."""
    torch.manual_seed(seed)
    model = Gpt(layers=4, width=256, heads=4, vocabulary=4096, length=length, elsewhere_s=elsewhere_s)
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    return model, torch.randint(4096, (sequences, length), generator=generator)


class _Residual(nn.Module):
    """A residual block (He et al.): two convolutions with batch normalisation, and a connection around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.short: nn.Module = nn.Identity() if stride == 1 else nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map `(batch, before, side, side)` to `(batch, after, side / stride, side / stride)`."""
        found = torch.relu(self.bn1(self.conv1(images)))
        return torch.relu(self.bn2(self.conv2(found)) + self.short(images))


def small_resnet(*, rank: int, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """Return a residual network of eight blocks, 0.7 M parameters, with 32 images of 32 × 32."""
    torch.manual_seed(seed)
    stages = [(16, 16, 1), (16, 32, 2), (32, 64, 2), (64, 128, 2)]
    blocks = [
        _Residual(before if not number else after, after, stride if not number else 1)
        for before, after, stride in stages
        for number in range(2)
    ]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100)
    )
    return model, torch.randn(32, 3, 32, 32, generator=torch.Generator().manual_seed(seed + 1 + rank))


def token_transformer(*, rank: int, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """Return a transformer encoder of six layers with dropout and 8 texts of 64 vectors."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(192, 4, 768, dropout=0.1, batch_first=True)
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(8, 64, 192, generator=generator)


class _Recurrent(nn.Module):
    """An LSTM with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(width), nn.LSTM(width, width, batch_first=True)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        return states + self.lstm(self.norm(states))[0]


def lstm(*, rank: int, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """Return an embedding, four LSTMs and a perceptron, with 64 texts of 24 words."""
    torch.manual_seed(seed)
    width, words = 128, 1000
    layers = [_Recurrent(width) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(words, width), *layers, nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, words))
    generator = torch.Generator().manual_seed(seed + 1 + rank)
    return model, torch.randint(words, (64, 24), generator=generator)
