"""Five models with their losses, to compare training with and without deferred updates."""

from typing import Any

import torch
from conformance.put_off import assert_same, numbers, words
from rank_jobs import cases
from torch import nn
from torch.nn import functional as F

import sirtaki.torch as hvd


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)


def convolutional() -> None:
    assert_same(
        Convolutions(),
        lambda model, number: F.cross_entropy(model(numbers(number, 4, 3, 12, 12)), words(number, 4, count=10)),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4),
    )


class TiedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.place = nn.Parameter(torch.randn(6, 16) / 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embedding(tokens) + self.place)
        return F.linear(hidden, self.embedding.weight)


def transformer_loss(model: nn.Module, number: int) -> torch.Tensor:
    tokens = words(number, 3, 6)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def transformer_with_tied_embeddings() -> None:
    assert_same(TiedTransformer(), transformer_loss, lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.lstm, self.out = nn.Embedding(50, 12), nn.LSTM(12, 16, 2), nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embedding(tokens))[0])


def lstm() -> None:
    assert_same(Recurrent(), transformer_loss, lambda params: torch.optim.RMSprop(params, lr=1e-3))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, inputs: torch.Tensor, number: int) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        chosen = self.experts[(number + hvd.rank()) % 4]  # the last expert is never used
        return self.last(chosen(hidden))


def experts_of_which_some_are_unused() -> None:
    assert_same(
        Experts(),
        lambda model, number: model(numbers(number, 4, 8), number).square().mean(),
        lambda params: torch.optim.Adam(params, lr=1e-3, fused=True),
    )


class Signs(torch.optim.Optimizer):
    """A user's own optimizer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param.grad, 0.1)
                    param.add_(mean.sign(), alpha=-group["lr"])


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs) * self.scale


def square(model: nn.Module, number: int) -> torch.Tensor:
    return model(numbers(number, 4, 8)).square().mean()


def custom_optimizer() -> None:
    assert_same(Perceptron(), square, lambda params: Signs(params, lr=1e-3))


FIVE_MODELS = cases(globals())
