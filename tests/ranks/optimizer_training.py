"""Training with a DistributedOptimizer equals training in one process, in many situations."""

import copy
import math
import os
import random
import warnings
from collections.abc import Callable
from functools import partial

import torch
from conformance.ddp import dense_model
from conformance.gradient_losses import LOSSES
from conformance.training import (
    assert_same_parameters,
    assert_same_training,
    batch,
    joined,
    main,
)
from torch import nn

import sirtaki.torch as hvd


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 3)).to(dtype)


def mean_square(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(batch(rank, iteration, 5, 24, dtype=dtype)).square().mean()


def an_ordinary_loop() -> None:
    assert_same_training(mlp(), mean_square)


def gradients_that_are_never_zeroed() -> None:
    """They pile up: what is reduced is then the old mean plus the new gradient, on every rank."""

    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        loss().backward()
        optimizer.step()

    assert_same_training(mlp(), mean_square, step=step)


class Heads(nn.Module):
    """Heads that are independent of each other: the order in which they run forward is that of their gradients."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(6, 9) for _ in range(count))

    def forward(self, inputs: torch.Tensor, order: list[int]) -> torch.Tensor:
        outputs = {number: self.heads[number](inputs).square().mean() for number in order}
        return torch.stack([outputs[number] for number in sorted(outputs)]).sum()


def an_order_that_differs_between_ranks_and_iterations() -> None:
    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        order = list(range(20))
        random.Random(100 * rank + iteration).shuffle(order)
        return model(batch(rank, iteration, 5, 6), order)

    assert_same_training(Heads(20).double(), loss, steps=12)


def an_order_that_changes_for_good_is_learned_anew() -> None:
    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        # Only the last rank sees another order; its flag must be enough.
        turned = iteration >= 60 and rank == hvd.size() - 1
        return model(batch(rank, iteration, 2, 6), list(range(20))[:: -1 if turned else 1])

    optimizer = assert_same_training(Heads(20).double(), loss, steps=120, tolerance=1e-9)
    if hvd.size() > 1:
        assert optimizer._gradients.reducers[0].tuned.synchroniser._order.since > 100


def plans_that_change_in_mid_training() -> None:
    seen: set[str] = set()

    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad(set_to_none=len(seen) % 2 == 0)
        loss().backward()
        optimizer.step()
        if hvd.size() > 1 and hasattr(optimizer, "synchronize"):
            seen.add(optimizer._gradients.reducers[0].tuned.knobs.describe())

    warmup = int(os.environ["SIRTAKI_WARMUP_ITERATIONS"])
    assert_same_training(mlp(), mean_square, step=step, steps=min(warmup, 100) + 10, tolerance=1e-10)
    assert len(seen) > 2 or warmup < 40 or hvd.size() == 1


def scaled_losses_and_an_overflow_on_one_rank() -> None:
    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        bad = math.inf if iteration == 2 and rank == hvd.size() - 1 else 1.0
        return mean_square(model, rank, iteration) * bad

    scalers: dict[int, torch.amp.GradScaler] = {}

    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        scaler = scalers.setdefault(id(optimizer), torch.amp.GradScaler("cpu", init_scale=1024.0))
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()

    model = mlp(torch.float32)
    assert_same_training(model, loss, step=step, tolerance=2e-5)
    assert all(param.isfinite().all() for param in model.parameters())
    assert {scaler.get_scale() for scaler in scalers.values()} == {512.0}


def a_compiled_model() -> None:
    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        return torch.compile(model, backend="aot_eager")(batch(rank, iteration, 5, 24)).square().mean()

    assert_same_training(mlp(), loss)
    torch.compiler.reset()


def a_model_compiled_in_parts() -> None:
    backend = hvd.early_gradients("aot_eager", part_bytes=1000)

    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        return torch.compile(model, backend=backend)(batch(rank, iteration, 5, 24)).square().mean()

    assert_same_training(mlp(), loss)
    torch.compiler.reset()


def gradients_with_a_graph_of_their_own() -> None:
    """`create_graph=True` for penalties; the reduced gradients carry no graph."""

    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss().backward(create_graph=True)
        optimizer.step()

    model = mlp()
    assert_same_training(model, mean_square, step=step)
    if hvd.size() > 1:
        assert not any(param.grad.requires_grad for param in model.parameters())


def schedulers_made_before_or_after_wrapping() -> None:
    for before in (True, False):
        model = mlp()
        alone = copy.deepcopy(model)
        plain, reference = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, alone))
        if before:
            scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=2, gamma=0.3)
            optimizer = hvd.DistributedOptimizer(plain)
        else:
            optimizer = hvd.DistributedOptimizer(plain)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
        reference_scheduler = torch.optim.lr_scheduler.StepLR(reference, step_size=2, gamma=0.3)
        for iteration in range(8):
            if iteration == 4:  # a checkpoint is loaded in between; the scheduler must still reach the optimizer
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            mean_square(model, hvd.rank(), iteration).backward()
            optimizer.step()
            scheduler.step()
            reference.zero_grad()
            joined(mean_square, alone, iteration).backward()
            reference.step()
            reference_scheduler.step()
            assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        assert_same_parameters(model, alone, 1e-12)


def gradients_may_be_asked_for_through_the_output() -> None:
    """By `torch.autograd.grad`, which is no backward pass: what it passes is reduced by the pass that follows."""

    def twice(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        loss().backward()
        loss().backward()
        optimizer.step()

    for loss in LOSSES:
        assert_same_training(dense_model(), partial(loss, batch))
        assert_same_training(dense_model(), partial(loss, batch), step=twice, backward_passes_per_step=2, steps=3)


CASES = [
    an_ordinary_loop,
    gradients_may_be_asked_for_through_the_output,
    gradients_that_are_never_zeroed,
    an_order_that_differs_between_ranks_and_iterations,
    an_order_that_changes_for_good_is_learned_anew,
    plans_that_change_in_mid_training,
    scaled_losses_and_an_overflow_on_one_rank,
    a_compiled_model,
    a_model_compiled_in_parts,
    gradients_with_a_graph_of_their_own,
    schedulers_made_before_or_after_wrapping,
]

if __name__ == "__main__":
    main(CASES)
