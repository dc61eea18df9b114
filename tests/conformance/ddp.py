"""Train DistributedDataParallel models with `attach`, and compare with one process that gets all ranks' batches."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sirtaki.torch import ddp

STEPS = 8
SMALL_BUCKETS_MB = 0.001

Loss = Callable[[nn.Module, int, int], torch.Tensor]
"""Function (model, rank, step) that returns the rank's loss."""


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7919 * step + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def dense_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17), nn.LayerNorm(17), nn.Linear(17, 3)).double()


def dense_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step, 5, 6)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def attached(model: nn.Module, **options: object) -> DistributedDataParallel:
    """Wrap a model in DDP and attach. Collective."""
    wrapped = DistributedDataParallel(model, **{"bucket_cap_mb": SMALL_BUCKETS_MB, **options})
    ddp.attach(wrapped)
    return wrapped


def ranks() -> range:
    return range(dist.get_world_size())


def assert_same(model: nn.Module, alone: nn.Module, when: object) -> None:
    for (name, param), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            param, wanted, rtol=1e-11, atol=1e-11, msg=lambda text, n=name: f"{n} {when}: {text}"
        )


def trains_alike(
    model: nn.Module,
    loss: Loss = dense_loss,
    *,
    passes: int = 1,
    clip: float | None = None,
    to_none: bool = True,
    steps: int = STEPS,
    **options: object,
) -> None:
    """Train `model` under DDP on all ranks and a copy in one process. Compare them after each step. Collective."""
    alone = copy.deepcopy(model)
    wrapped, reference, optimizer = attached(model, **options), sgd(alone), sgd(model)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        reference.zero_grad()
        for number in range(passes):
            with wrapped.no_sync() if number < passes - 1 else nullcontext():
                loss(wrapped, dist.get_rank(), passes * step + number).backward()
            sum(loss(alone, rank, passes * step + number) for rank in ranks()).div(len(ranks())).backward()
        if clip is not None:
            norms = [nn.utils.clip_grad_norm_(one.parameters(), clip) for one in (model, alone)]
            torch.testing.assert_close(*norms)
        optimizer.step()
        reference.step()
        assert_same(model, alone, f"after step {step}")


class Branches(nn.Module):
    """A model that uses a branch that depends on rank and step. One branch is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.trunk = nn.Linear(6, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 2) for _ in range(4))
        self.frozen = nn.Linear(8, 2).requires_grad_(False)

    def forward(self, inputs: torch.Tensor, which: int) -> torch.Tensor:
        hidden = self.trunk(inputs)
        return self.branches[which](hidden) + self.frozen(hidden)


def branches_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step, 5, 6), (rank + step) % 3).square().mean()
