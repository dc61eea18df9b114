"""`GradScaler` and autocast: all ranks skip the same steps, and others equal those of one process.

Started by test_mixed_precision.py.
"""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from conformance.training import Loss, assert_equal_on_all_ranks, assert_same_parameters, batch, joined, main
from rank_jobs import cases
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sirtaki.torch as hvd
from sirtaki.engine import job
from sirtaki.torch import ddp
from sirtaki.torch.lasting_optimizers import Distributed

STEPS, OVERFLOW = 8, 3
"""Number of steps, and the step in which the loss of the last rank is infinite."""

Step = Callable[[torch.optim.Optimizer, torch.amp.GradScaler, nn.Module], None]


class Branches(nn.Module):
    """Two branches and an embedding. With `skips`, each step leaves one branch without gradients."""

    def __init__(self, *, skips: bool, sparse: bool = False) -> None:
        super().__init__()
        self.rows = nn.Embedding(30, 8, sparse=sparse)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)) for _ in range(2))
        self.skips = skips

    def forward(self, inputs: torch.Tensor, iteration: int) -> torch.Tensor:
        hidden = self.rows((inputs.abs() * 10).long() % 30)
        used = [self.branches[iteration % 2]] if self.skips else self.branches
        return sum((branch(hidden) for branch in used), torch.zeros(()))


def loss_of(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
    bad = math.inf if iteration == OVERFLOW and rank == hvd.size() - 1 else 1.0
    return model(batch(rank, iteration, 5, dtype=torch.float32), iteration).square().mean() * bad


def _dense(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.grad is not None and not param.grad.is_sparse]


def plain(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, model: nn.Module) -> None:
    scaler.step(optimizer)


def clipped(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, model: nn.Module) -> None:
    """Clip as the documentation of PyTorch does."""
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(_dense(model), 0.05)
    scaler.step(optimizer)


def synchronized(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, model: nn.Module) -> None:
    """Clip as the documentation of Horovod does."""
    if not isinstance(optimizer, Distributed):
        clipped(optimizer, scaler, model)
        return
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(_dense(model), 0.05)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], torch.Tensor],
    step: Step,
    *,
    passes: int = 1,
    scale: float = 1024.0,
) -> torch.amp.GradScaler:
    """Train with scaled losses, which grow or shrink with the scale of the returned scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    for iteration in range(STEPS):
        model.zero_grad()
        for number in range(passes):
            scaler.scale(loss(iteration * passes + number)).backward()
        if not isinstance(optimizer, Distributed):
            for param in model.parameters():  # because ranks reduce zeros for a parameter without a gradient
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        step(optimizer, scaler, model)
        scaler.update()
    return scaler


def train_here(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, **options: Any) -> torch.amp.GradScaler:
    return train(model, optimizer, lambda now: loss_of(model, hvd.rank(), now), step, **options)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trains_as_in_one_process(
    model: nn.Module,
    step: Step,
    *,
    loss: Loss = loss_of,
    make: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
    passes: int = 1,
    tolerance: float = 2e-5,
    **options: Any,
) -> None:
    """Compare parameters and the scaler's state with those of one process, in which the same steps are skipped."""
    alone, op = copy.deepcopy(model), options.get("op", hvd.Average)
    optimizer = hvd.DistributedOptimizer(make(model), backward_passes_per_step=passes, **options)
    here = train(model, optimizer, lambda now: loss(model, hvd.rank(), now), step, passes=passes)
    there = train(alone, make(alone), lambda now: joined(loss, alone, now, op=op), step, passes=passes)
    assert here.state_dict() == there.state_dict(), (here.state_dict(), there.state_dict())
    assert 0 < here.get_scale() != 1024.0
    assert_same_parameters(model, alone, tolerance)
    optimizer.close()


def model_of(*, skips: bool, sparse: bool = False) -> nn.Module:
    torch.manual_seed(3)
    return Branches(skips=skips, sparse=sparse)


def every_step_of_a_script_works_with_and_without_unused_parameters() -> None:
    for step in (plain, clipped, synchronized):
        for skips in (False, True):
            trains_as_in_one_process(model_of(skips=skips), step)


def fused_optimizers_get_reduced_gradients() -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

    for step in (plain, synchronized):
        trains_as_in_one_process(model_of(skips=True), step, make=adam, tolerance=1e-4)


def gradients_may_be_accumulated_summed_and_divided_before_the_sum() -> None:
    for step in (plain, synchronized):
        trains_as_in_one_process(model_of(skips=False), step, passes=2)
        trains_as_in_one_process(model_of(skips=True), step, op=hvd.Sum)
    trains_as_in_one_process(model_of(skips=True), plain, gradient_predivide_factor=2.0)


def fewer_passes_may_be_accumulated() -> None:
    model = model_of(skips=False)
    alone = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(momentum(model), backward_passes_per_step=3)
    here = train_here(model, optimizer, plain, passes=2)
    there = train(alone, momentum(alone), lambda now: joined(loss_of, alone, now), plain, passes=2)
    assert here.state_dict() == there.state_dict()
    assert_same_parameters(model, alone, 2e-5)
    optimizer.close()


def sparse_rows_reach_all_ranks_with_their_overflow() -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    for step in (plain, synchronized):
        trains_as_in_one_process(model_of(skips=True, sparse=True), step, make=sgd)


def autocast_in_half_precision() -> None:
    for dtype in (torch.float16, torch.bfloat16):

        def loss(model: nn.Module, rank: int, iteration: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            with torch.autocast("cpu", dtype=dtype):
                return loss_of(model, rank, iteration).float()

        trains_as_in_one_process(model_of(skips=True), clipped, loss=loss, tolerance=2e-2)


def compressed_gradients_overflow_on_all_ranks() -> None:
    compressions = (hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.int8, hvd.Compression.topk(0.5))
    for compression in compressions:
        for scale in (1024.0, 2.0**22):  # float16 overflows on the network with the second one
            model = model_of(skips=True)
            before = copy.deepcopy(model)
            optimizer = hvd.DistributedOptimizer(momentum(model), compression=compression)
            scaler = train_here(model, optimizer, plain, scale=scale)
            assert_equal_on_all_ranks(model)
            states = hvd.allgather_object(scaler.state_dict())
            assert states == states[:1] * hvd.size()
            assert all(param.isfinite().all() for param in model.parameters())
            assert any(map(torch.ne, model.rows.weight.flatten(), before.rows.weight.flatten()))
            optimizer.close()


def adasum_skips_the_same_steps_on_all_ranks() -> None:
    if hvd.size() & (hvd.size() - 1):
        return
    for step in (plain, clipped):
        model, rounds = model_of(skips=False), job.current().engine.rounds
        optimizer, before = hvd.DistributedOptimizer(momentum(model), op=hvd.Adasum), rounds.completed
        scaler = train_here(model, optimizer, step)
        updates = (STEPS - 1) * len([*model.parameters()])
        assert rounds.completed - before == STEPS + updates, "ranks compare their gradients once in each step"
        states = hvd.allgather_object(scaler.state_dict())
        assert states == states[:1] * hvd.size()
        assert all(param.isfinite().all() for param in model.parameters())
        assert_equal_on_all_ranks(model)


def ranks_of_a_process_set_agree() -> None:
    """The overflow of the last rank skips a step in its own set only."""
    if hvd.size() < 3:
        return
    evens, odds = (hvd.add_process_set(list(range(first, hvd.size(), 2))) for first in (0, 1))
    model = model_of(skips=True)
    mine = evens if evens.included() else odds
    optimizer = hvd.DistributedOptimizer(momentum(model), process_set=mine)
    scaler = train_here(model, optimizer, plain)
    states = hvd.allgather_object(scaler.state_dict())
    for rank, state in enumerate(states):
        same = rank % 2 == (hvd.size() - 1) % 2
        assert (state == states[-1]) is same, (rank, states)
    optimizer.close()
    hvd.remove_process_set(odds)
    hvd.remove_process_set(evens)


def a_step_that_the_script_skips_leaves_nothing_reduced() -> None:
    """After `synchronize()` without `step()`, the next step reduces again."""
    model = model_of(skips=True)
    alone = copy.deepcopy(model)
    optimizer, reference = hvd.DistributedOptimizer(momentum(model)), momentum(alone)

    def step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, model: nn.Module) -> None:
        if next(numbers) % 2 == 0:
            if isinstance(optimizer, Distributed):
                optimizer.synchronize()
            scaler.unscale_(optimizer)
        else:
            scaler.step(optimizer)

    numbers = itertools.count()
    here = train_here(model, optimizer, step)
    numbers = itertools.count()
    there = train(alone, reference, lambda now: joined(loss_of, alone, now), step)
    assert here.state_dict() == there.state_dict()
    assert_same_parameters(model, alone, 2e-5)
    optimizer.close()


def gradients_that_the_model_zeroes_after_a_skipped_step_are_reduced_again() -> None:
    """The scaler skips one step, and the script two. Then one rank alone has a backward pass, then no rank has one."""
    by_script, on_one_rank, by_hand = (5, 7), 6, 8
    for set_to_none in (True, False):
        model = model_of(skips=False).double()
        alone = copy.deepcopy(model)
        optimizer, reference = hvd.DistributedOptimizer(momentum(model)), momentum(alone)
        here, there = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2))
        one = (model, optimizer, here, [hvd.rank()])
        for now, (each, owner, scaler, ranks) in itertools.product(range(10), (one, (alone, reference, there, None))):
            each.zero_grad(set_to_none)
            computing = range(1 if now == on_one_rank else hvd.size())
            losses = [loss_of(each, rank, now) for rank in computing if ranks is None or rank in ranks]
            if losses:
                loss = scaler.scale(sum(losses) / (hvd.size() if ranks is None else 1))
                if now == by_hand:
                    computed = torch.autograd.grad(loss, [*each.parameters()])
                    for param, gradient in zip(each.parameters(), computed, strict=True):
                        param.grad = gradient if param.grad is None else param.grad.copy_(gradient)
                else:
                    loss.backward()
            if now % 2:
                scaler.unscale_(owner)
            if now not in by_script:
                scaler.step(owner)
            scaler.update()
        assert here.state_dict() == there.state_dict()
        assert_same_parameters(model, alone, 1e-12)
        optimizer.close()


def a_step_after_the_update_of_the_scaler_does_not_reduce_again() -> None:
    """The script skips a step after the update. Then one rank alone has a backward pass, without the scaler."""
    skipped, on_one_rank = 5, 6
    model = model_of(skips=True).double()
    alone = copy.deepcopy(model)
    optimizer, reference = hvd.DistributedOptimizer(momentum(model), op=hvd.Sum), momentum(alone)
    here, there = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
    one = (model, optimizer, here, [hvd.rank()])
    steps = [now for now in range(STEPS) if now != OVERFLOW]
    for now, (each, owner, scaler, ranks) in itertools.product(steps, (one, (alone, reference, there, None))):
        each.zero_grad(set_to_none=now != on_one_rank)
        for rank in range(1 if now == on_one_rank else hvd.size()):
            if ranks is None or rank in ranks:
                loss = loss_of(each, rank, now)
                (loss if now == on_one_rank else scaler.scale(loss)).backward()
        for param in alone.parameters():  # because ranks reduce zeros for a parameter without a gradient
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        if now != on_one_rank:
            scaler.unscale_(owner)
            scaler.update()
        if now != skipped:
            owner.step()
    assert_same_parameters(model, alone, 1e-12)
    optimizer.close()


def attached_models_need_no_change() -> None:
    for skips in (False, True):
        model = model_of(skips=skips)
        alone, wrapped = copy.deepcopy(model), DistributedDataParallel(model, find_unused_parameters=skips)
        ddp.attach(wrapped)
        optimizer, reference = momentum(model), momentum(alone)
        here = train(model, optimizer, lambda now: loss_of(wrapped, hvd.rank(), now), clipped)  # noqa: B023
        there = train(alone, reference, lambda now: joined(loss_of, alone, now), clipped)  # noqa: B023
        assert here.state_dict() == there.state_dict()
        assert_same_parameters(model, alone, 2e-5)


CASES = cases(globals())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ddp.attach(DistributedDataParallel(nn.Linear(1, 1)))  # initialises the job
    main(CASES)
    dist.destroy_process_group()
