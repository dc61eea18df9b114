"""Training with a DistributedOptimizer equals training in one process, whatever the types and strides."""

from collections.abc import Callable

import torch
from conformance.training import assert_equal_on_all_ranks, assert_same_training, main
from ranks.optimizer_training import mean_square, mlp
from torch import nn

import sirtaki.torch as hvd


def bfloat16_autocast() -> None:
    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mean_square(model, rank, iteration)

    assert_same_training(mlp(torch.float32), loss, tolerance=2e-3)


def smaller_types_on_the_wire() -> None:
    for compression, tolerance in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 1e-2)):
        for clears in (True, False):

            def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor], clears: bool = clears) -> None:
                optimizer.zero_grad(set_to_none=clears)
                loss().backward()
                optimizer.step()

            model = mlp(torch.float32)
            assert_same_training(model, mean_square, step=step, compression=compression, tolerance=tolerance)
            assert_equal_on_all_ranks(model)
            assert all(param.grad.dtype == torch.float32 for param in model.parameters())


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.single = nn.Linear(24, 50).double(), nn.Linear(50, 50).float()
        self.small = nn.Linear(50, 10).bfloat16()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.single(torch.tanh(self.wide(inputs)).float())
        return self.small(torch.tanh(hidden).bfloat16()).double()


def several_dtypes_in_one_model() -> None:
    model = MixedTypes()
    assert_same_training(model, mean_square, tolerance=3e-2)
    assert_equal_on_all_ranks(model)
    model = MixedTypes()
    assert_same_training(model, mean_square, compression=hvd.Compression.bf16, tolerance=3e-2)


class ComplexTypes(nn.Module):
    """The gradient that comes first, and so has the control flags beside it, is complex."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.real, self.plane = nn.Linear(24, 12).double(), nn.Linear(6, 5, dtype=torch.complex128)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.plane(torch.view_as_complex(self.real(inputs).view(-1, 6, 2))).abs()


def complex_parameters() -> None:
    model = ComplexTypes()
    assert_same_training(model, mean_square, tolerance=1e-8)
    assert_equal_on_all_ranks(model)


CASES = [
    bfloat16_autocast,
    smaller_types_on_the_wire,
    several_dtypes_in_one_model,
    complex_parameters,
]

if __name__ == "__main__":
    main(CASES)
