"""Checks that training on several ranks equals training in one process, for programs in tests/ranks."""

import copy
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import sirtaki.torch as hvd

Loss = Callable[[torch.nn.Module, int, int], torch.Tensor]
"""Function (model, rank, iteration) that returns the rank's loss."""

Step = Callable[[torch.optim.Optimizer, Callable[[], torch.Tensor]], None]
"""Function (optimizer, loss) that runs one training step in a user's style."""

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plain_step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def batch(rank: int, iteration: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return this rank's share of the joined batch. Every rank can compute its peers' shares."""
    generator = torch.Generator().manual_seed(7919 * iteration + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def joined(loss: Loss, model: torch.nn.Module, iteration: int, *, op: int = hvd.Average) -> torch.Tensor:
    """Return the loss of the joined batch in one process."""
    total = sum((loss(model, rank, iteration) for rank in range(hvd.size())), torch.zeros(()))
    return total / hvd.size() if op == hvd.Average else total


def assert_same_training(
    model: torch.nn.Module,
    loss: Loss,
    *,
    steps: int = 6,
    make_optimizer: MakeOptimizer = sgd,
    step: Step = plain_step,
    tolerance: float = 1e-12,
    **options: Any,
) -> torch.optim.Optimizer:
    """Train `model` on all ranks, and a copy in one process, and compare the parameters after each step. Collective.

    Returns:
        The distributed optimizer.
    """
    alone = copy.deepcopy(model)
    reference = make_optimizer(alone)
    named = [(name, param) for name, param in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), named_parameters=named, **options)
    op = options.get("op", hvd.Average)
    for iteration in range(steps):
        torch.manual_seed(1)
        step(optimizer, lambda now=iteration: loss(model, hvd.rank(), now))
        torch.manual_seed(1)
        step(reference, lambda now=iteration: joined(loss, alone, now, op=op))
        assert_same_parameters(model, alone, tolerance, f"after step {iteration}")
    return optimizer


def assert_same_parameters(model: torch.nn.Module, alone: torch.nn.Module, tolerance: float, when: str = "") -> None:
    wanted = dict(alone.named_parameters())
    for name, param in model.named_parameters():
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(param, wanted[name], **close, msg=lambda text, n=name: f"{n} {when}: {text}")


def assert_equal_on_all_ranks(model: torch.nn.Module) -> None:
    """Check that parameters are equal on all ranks. Collective."""
    for name, param in model.named_parameters():
        root = hvd.broadcast(param.detach(), 0, name=f"compared.{name}")
        assert torch.equal(root, param), f"{name} differs between ranks"


def raises(kind: type[Exception], words: str, act: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        act()


def main(cases: Sequence[Callable[..., None]]) -> None:
    """Run the cases that the command line names, or all. Each rank prints the cases that it has passed. Collective.

    Cases with parameters `rank` and `size` get their values.
    """
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", r"`torch\.cpu\.amp\.autocast", FutureWarning)  # PyTorch 2.4 warns of its own code
    hvd.init()
    chosen = [case for case in cases if case.__name__ in sys.argv] or cases
    for case in chosen:
        given = {"rank": hvd.rank(), "size": hvd.size()}
        case(**{name: given[name] for name in inspect.signature(case).parameters if name in given})
        print(f"passed {case.__name__}", flush=True)
    hvd.shutdown()
