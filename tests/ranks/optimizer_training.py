"""Training with a DistributedOptimizer equals training in one process, in many situations."""

import copy
import math
import os
import random
import warnings
from collections.abc import Callable

import torch
from conformance.training import (
    assert_same_parameters,
    assert_same_training,
    batch,
    joined,
    main,
    plain_step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import sirtaki.torch as hvd


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 3)).to(dtype)


def mean_square(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(batch(rank, iteration, 5, 24, dtype=dtype)).square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def an_ordinary_loop() -> None:
    assert_same_training(mlp(), mean_square)
    assert_same_training(mlp(), mean_square, make_optimizer=adam, tolerance=1e-9)


def zero_grad_that_keeps_the_tensors() -> None:
    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad(set_to_none=False)
        loss().backward()
        optimizer.step()

    assert_same_training(mlp(), mean_square, step=step)


def gradients_that_are_never_zeroed() -> None:
    """They pile up: what is reduced is then the old mean plus the new gradient, on every rank."""

    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        loss().backward()
        optimizer.step()

    assert_same_training(mlp(), mean_square, step=step)


class Branches(nn.Module):
    """Some parameters are used by nobody, some by a few ranks, one by two layers, some are frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(24, 40)
        self.branches = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
        self.unused = nn.Linear(7, 300)
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        hidden = self.branches[branch](torch.tanh(self.branches[branch](hidden)))
        return self.frozen(hidden) * self.scalar + self.empty.sum()


def parameters_that_are_unused_or_shared_or_frozen() -> None:
    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        return model(batch(rank, iteration, 5, 24), (rank * (iteration + 1)) % 3).square().mean()

    def reference_step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.zeros_like(param)  # what nobody uses counts as zeros, as in Horovod
        loss().backward()
        optimizer.step()

    model = Branches().double()
    frozen = model.frozen.weight.clone()
    step = plain_step if hvd.size() > 1 else reference_step
    assert_same_training(model, loss, steps=8, step=step, reference_step=reference_step)
    assert torch.equal(model.frozen.weight, frozen)
    if hvd.size() > 1:
        assert model.unused.weight.grad is not None
        assert not model.unused.weight.grad.any()


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


def windows_of_accumulation_that_end_early() -> None:
    windows = [3, 3, 1, 3, 2, 3, 1, 1, 3]

    def steps(optimizer: torch.optim.Optimizer, loss_of: Callable[[int], torch.Tensor]) -> None:
        done = 0
        for window in windows:
            optimizer.zero_grad(set_to_none=window != 2)
            for _ in range(window):
                loss_of(done).backward()
                done += 1
            optimizer.step()

    model = mlp()
    alone = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), backward_passes_per_step=3)
    steps(optimizer, lambda now: mean_square(model, hvd.rank(), now))
    steps(torch.optim.SGD(alone.parameters(), lr=0.05), lambda now: joined(mean_square, alone, now))
    assert_same_parameters(model, alone, 1e-12)
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    mean_square(model, hvd.rank(), 0).backward()
    if hvd.size() > 1:
        assert optimizer._gradients.pending
    optimizer.step()


def clipping_by_the_norm_of_the_reduced_gradients() -> None:
    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        optimizer.zero_grad()
        loss().backward()
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        params = [param for group in optimizer.param_groups for param in group["params"]]
        norm = nn.utils.clip_grad_norm_(params, 1e-3)
        assert norm > 1e-3
        if hasattr(optimizer, "synchronize"):
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()

    assert_same_training(mlp(), mean_square, step=step)


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


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.2), nn.Tanh()) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.requires_grad_()
        for block in self.blocks:
            inputs = checkpoint(block, inputs, use_reentrant=self.reentrant)
        return inputs


def checkpointed_activations() -> None:
    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        torch.manual_seed(100 * rank + iteration)  # dropout
        return mean_square(model, rank, iteration)

    for reentrant in (False, True):
        assert_same_training(Checkpointed(reentrant=reentrant).double(), loss)


def closures() -> None:
    def step(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        optimizer.step(closure)

    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def always_the_same(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        return (model(batch(rank, 0, 5, 24)) - 0.3).square().mean()

    assert_same_training(mlp(), always_the_same, make_optimizer=lbfgs, step=step, steps=4, tolerance=1e-7)
    assert_same_training(mlp(), mean_square, step=step)


def sums_and_factors() -> None:
    assert_same_training(mlp(), mean_square, op=hvd.Sum)
    assert_same_training(mlp(), mean_square, gradient_predivide_factor=3.0)
    assert_same_training(
        mlp(torch.float32),
        mean_square,
        gradient_predivide_factor=float(hvd.size()),
        compression=hvd.Compression.fp16,
        tolerance=2e-3,
    )


def two_optimizers_that_play_against_each_other() -> None:
    torch.manual_seed(0)
    pair = nn.ModuleDict(
        {"generator": nn.Linear(24, 24), "critic": nn.Sequential(nn.Linear(24, 30), nn.Tanh(), nn.Linear(30, 1))}
    ).double()
    alone = copy.deepcopy(pair)

    def play(pair: nn.ModuleDict, optimizers: list[torch.optim.Optimizer], mean: Callable[..., torch.Tensor]) -> None:
        for iteration in range(8):
            optimizers[1].zero_grad()
            mean(lambda rank, now=iteration: critic_loss(pair, rank, now)).backward()
            optimizers[1].step()
            pair["critic"].requires_grad_(False)
            optimizers[0].zero_grad()
            mean(lambda rank, now=iteration: generator_loss(pair, rank, now)).backward()
            optimizers[0].step()
            pair["critic"].requires_grad_(True)

    def critic_loss(pair: nn.ModuleDict, rank: int, iteration: int) -> torch.Tensor:
        noise, real = batch(rank, iteration, 5, 24), batch(rank, 1000 + iteration, 5, 24)
        return (pair["critic"](pair["generator"](noise).detach()) - pair["critic"](real)).mean()

    def generator_loss(pair: nn.ModuleDict, rank: int, iteration: int) -> torch.Tensor:
        return -pair["critic"](pair["generator"](batch(rank, iteration, 5, 24))).mean()

    def two(pair: nn.ModuleDict) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(pair[name].parameters(), lr=0.05) for name in ("generator", "critic")]

    play(pair, [hvd.DistributedOptimizer(each) for each in two(pair)], lambda loss: loss(hvd.rank()))
    play(alone, two(alone), lambda loss: torch.stack([loss(rank) for rank in range(hvd.size())]).mean())
    assert_same_parameters(pair, alone, 1e-12)


def two_optimizers_after_one_backward_pass() -> None:
    model = mlp()
    alone = copy.deepcopy(model)
    halves = [[module.parameters() for module in (net[:2], net[2:])] for net in (model, alone)]
    ours = [hvd.DistributedOptimizer(torch.optim.SGD(half, lr=0.05)) for half in halves[0]]
    theirs = [torch.optim.SGD(half, lr=0.05) for half in halves[1]]
    for iteration in range(6):
        for optimizers, loss in (
            (ours, lambda now=iteration: mean_square(model, hvd.rank(), now)),
            (theirs, lambda now=iteration: joined(mean_square, alone, now)),
        ):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss().backward()
            for optimizer in optimizers[:: 1 if iteration % 2 else -1]:
                optimizer.step()
    assert_same_parameters(model, alone, 1e-12)


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


CASES = [
    an_ordinary_loop,
    zero_grad_that_keeps_the_tensors,
    gradients_that_are_never_zeroed,
    parameters_that_are_unused_or_shared_or_frozen,
    an_order_that_differs_between_ranks_and_iterations,
    an_order_that_changes_for_good_is_learned_anew,
    plans_that_change_in_mid_training,
    windows_of_accumulation_that_end_early,
    clipping_by_the_norm_of_the_reduced_gradients,
    scaled_losses_and_an_overflow_on_one_rank,
    a_compiled_model,
    a_model_compiled_in_parts,
    checkpointed_activations,
    closures,
    sums_and_factors,
    two_optimizers_that_play_against_each_other,
    two_optimizers_after_one_backward_pass,
    gradients_with_a_graph_of_their_own,
    schedulers_made_before_or_after_wrapping,
]

if __name__ == "__main__":
    main(CASES)
