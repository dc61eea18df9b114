"""Optimizers that come, go and share parameters: wrapped again, dropped, closed, one encoder in several of them."""

import copy
import gc
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from conformance.training import (
    assert_equal_on_all_ranks,
    assert_same_parameters,
    assert_same_training,
    batch,
    joined,
    main,
    sgd,
)
from fakes.backward import Raises
from torch import nn

import sirtaki.torch as hvd
from sirtaki.errors import NotInitializedError


class Trunk(nn.Module):
    """Two layers that every head stands on, and three heads."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.low, self.high = nn.Linear(width, width), nn.Linear(width, width)
        self.heads = nn.ModuleList(nn.Linear(width, 3) for _ in range(3))
        self.double()

    def parts(self, *names: str) -> list[nn.Parameter]:
        modules = dict(self.named_modules())
        return [param for name in names for param in modules[name].parameters()]


SETS = (("low", "high", "heads.0"), ("low", "high", "heads.1"), ("high", "heads.2", "heads.0"))
"""What each of three optimizers has: the second shares a trunk with the first, the third parts of both."""


def loss_of(number: int) -> Callable[[nn.Module, int, int], torch.Tensor]:
    """What optimizer `number` minimises; it reaches all its parameters."""

    def loss(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        hidden = batch(rank, 10 * iteration + number, 4, 12)
        low = torch.tanh(model.low(hidden))
        hidden = torch.tanh(model.high(low.detach() if number == 2 else low))
        total = model.heads[number](hidden).square().mean()
        return total + model.heads[0](hidden).square().mean() if number == 2 else total

    return loss


def make(model: Trunk, count: int, *, momentum: float = 0.0) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parts(*names), lr=0.05, momentum=momentum) for names in SETS[:count]]


def turn(optimizers: Sequence[torch.optim.Optimizer], loss: torch.Tensor, order: Sequence[int]) -> None:
    for number in order:
        optimizers[number].zero_grad()
    loss.backward()
    for number in order:
        optimizers[number].step()


def trains_like_one_process(
    turns: Sequence[Sequence[int]], *, count: int, momentum: float = 0.9, op: int = hvd.Average
) -> None:
    model = Trunk()
    alone = copy.deepcopy(model)
    theirs = make(alone, count, momentum=momentum)
    ours = [hvd.DistributedOptimizer(each, op=op) for each in make(model, count, momentum=momentum)]
    for iteration, order in enumerate(turns):
        losses = [loss_of(number) for number in order]

        def total(net: nn.Module, rank: int, now: int, losses: list = losses) -> torch.Tensor:
            return sum((loss(net, rank, now) for loss in losses), torch.zeros(()))

        turn(ours, total(model, hvd.rank(), iteration), order)
        turn(theirs, joined(total, alone, iteration, op=op), order)
        assert_same_parameters(model, alone, 1e-11, f"after turn {iteration} of {turns}")
    assert_equal_on_all_ranks(model)


def drawn_turns_of_three_optimizers(seeds: Sequence[int] = (1, 2)) -> None:
    for seed in seeds:
        drawn = random.Random(seed)
        turns = [drawn.sample(range(3), drawn.randint(1, 3)) for _ in range(10)]
        trains_like_one_process(
            turns, count=3, momentum=drawn.choice([0.0, 0.9]), op=drawn.choice([hvd.Average, hvd.Sum])
        )


def shared_with_other_options_is_an_error_on_all_ranks() -> None:
    if hvd.size() == 1:  # nothing is reduced
        return
    model = Trunk()
    first = hvd.DistributedOptimizer(make(model, 2)[0])
    for options, words in (
        ({"backward_passes_per_step": 2}, "backward_passes_per_step=1"),
        ({"op": hvd.Sum}, "op or gradient_predivide_factor"),
        ({"compression": hvd.Compression.bf16}, "compression"),
        ({"sparse_as_dense": True}, "sparse_as_dense"),
    ):
        with pytest.raises(ValueError, match=rf"low\.weight.*{words}.*close\(\)"):
            hvd.DistributedOptimizer(make(model, 2)[1], named_parameters=model.named_parameters(), **options)
    first.close()
    hvd.DistributedOptimizer(make(model, 2)[1], backward_passes_per_step=2)


def wrapping_twice_is_an_error() -> None:
    optimizer = hvd.DistributedOptimizer(sgd(Trunk()))
    with pytest.raises(ValueError, match=r"SGD is a DistributedOptimizer already.*torch\.optim\.SGD"):
        hvd.DistributedOptimizer(optimizer)
    if hvd.size() & (hvd.size() - 1) == 0:
        with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
            hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd(Trunk()), op=hvd.Adasum))


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def mean_square(model: nn.Module, rank: int, iteration: int) -> torch.Tensor:
    return model(batch(rank, iteration, 5, 24)).square().mean()


def a_closed_optimizer_says_so() -> None:
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    train(model, optimizer, 2)
    optimizer.close()
    optimizer.close()
    for use in (optimizer.step, optimizer.synchronize, lambda: optimizer.add_param_group({"params": []})):
        with pytest.raises(NotInitializedError, match=r"closed by close\(\).*make a new one"):
            use()
    mean_square(model, 0, 0).backward()  # hooks are gone: nobody waits, nothing is counted
    mean_square(model, 0, 0).backward()
    optimizer.zero_grad()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for iteration in range(steps):
        optimizer.zero_grad()
        mean_square(model, hvd.rank(), iteration).backward()
        optimizer.step()


def the_borrower_trains_on_when_the_owner_is_gone() -> None:
    for closes in (True, False):
        model = Trunk()
        alone = copy.deepcopy(model)
        theirs = make(alone, 2)
        owner, borrower = [hvd.DistributedOptimizer(each) for each in make(model, 2)]
        if closes:
            owner.close()
        del owner
        gc.collect()
        for iteration in range(5):
            turn([borrower], loss_of(1)(model, hvd.rank(), iteration), [0])
            turn(theirs, joined(loss_of(1), alone, iteration), [1])
            assert_same_parameters(model, alone, 1e-11, f"after step {iteration}")
        if hvd.size() > 1:
            assert not any(reducer.shared for reducer in borrower._gradients.reducers)


def dropped_on_one_rank_only() -> None:
    """Garbage collection happens at different times: what one rank has no more can't be used on the others."""
    model = Trunk()
    kept = [hvd.DistributedOptimizer(make(model, 1)[0])]
    if hvd.rank() == 0:
        kept.clear()
    gc.collect()
    alone = copy.deepcopy(model)
    optimizer, reference = hvd.DistributedOptimizer(make(model, 2)[1]), make(alone, 2)[1]
    for iteration in range(4):
        turn([optimizer], loss_of(1)(model, hvd.rank(), iteration), [0])
        turn([reference], joined(loss_of(1), alone, iteration), [0])
        assert_same_parameters(model, alone, 1e-11, f"after step {iteration}")
    if kept and hvd.size() > 1:
        with pytest.raises(NotInitializedError, match="another rank has dropped it"):
            kept[0].step()
        kept[0].zero_grad()
        assert all(param.grad is None for group in kept[0].param_groups for param in group["params"])


def dropped_between_backward_and_step() -> None:
    """In the first iteration ranks negotiate, in the fourth units may have left; rank 0 has computed nothing then."""
    for steps in (0, 3):
        model = mlp()
        optimizer = hvd.DistributedOptimizer(sgd(model))
        train(model, optimizer, steps)
        if hvd.rank() > 0:
            model[4](torch.ones(1, 40, dtype=torch.float64)).sum().backward()  # some of the gradients, on some ranks
        del optimizer
        gc.collect()
        model = mlp(seed=1)
        assert_same_training(model, mean_square, steps=3)
    model = mlp()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    model[4](batch(hvd.rank(), 0, 1, 40)).sum().backward()
    optimizer = hvd.DistributedOptimizer(sgd(model))  # takes over what is under way
    optimizer.step()
    assert_equal_on_all_ranks(model)


def fail(model: Trunk, *heads: int) -> None:
    """One backward pass that raises when it has come through these heads and the upper layer."""
    hidden = model.high(Raises.apply(model.low(batch(hvd.rank(), 0, 4, 12))))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="half-way"):
        sum((model.heads[head](hidden).sum() for head in heads), torch.zeros(())).backward()


def goes_on_alone(model: Trunk, optimizer: torch.optim.Optimizer, number: int) -> None:
    """After a failed pass, that optimizer, and as plain ones its like in one process."""
    model.zero_grad()
    alone = copy.deepcopy(model)
    reference = make(alone, number + 1)[number]
    for iteration in range(3):
        loss_of(number)(model, hvd.rank(), iteration).backward()
        optimizer.step()
        model.zero_grad()
        turn([reference], joined(loss_of(number), alone, iteration), [0])
        assert_same_parameters(model, alone, 1e-11, f"after step {iteration}")


def one_that_has_failed_is_dropped_on_one_rank_only_before_another_fails() -> None:
    models = [Trunk() for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(make(model, 1)[0]) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        goes_on_alone(model, optimizer, 0)
    fail(models[0], 0)
    if hvd.rank() == 0:
        del optimizers[0], optimizer
        gc.collect()
    fail(models[1], 0)
    goes_on_alone(models[1], optimizers[-1], 0)


def of_two_that_fail_in_one_pass_one_is_dropped_and_collected_on_one_rank_only() -> None:
    models = [Trunk() for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(make(model, 1)[0]) for model in models]
    hidden = Raises.apply(models[0].low(batch(hvd.rank(), 0, 4, 12)))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="half-way"):
        sum((model.heads[0](model.high(hidden)).sum() for model in models), torch.zeros(())).backward()
    trainer: dict[str, object] = {"optimizer": optimizers.pop(0)}
    trainer["callback"] = trainer  # only a collection of garbage ends it
    gc.disable()
    try:
        del trainer
        if hvd.rank() == 0:
            gc.collect()
        goes_on_alone(models[1], optimizers[0], 0)
    finally:
        gc.enable()


def one_that_has_failed_waits_while_another_goes_on() -> None:
    models = [Trunk() for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(make(model, 1)[0]) for model in models]
    for number in (0, 1):
        fail(models[number], 0)
    for number in (1, 0, 1):
        goes_on_alone(models[number], optimizers[number], 0)


def drawn_failures_of_three_optimizers(seeds: Sequence[int] = (1,)) -> None:
    """Passes of one or several of them raise, one after another, before they train on together or in turns."""
    for seed in seeds:
        drawn = random.Random(seed)
        model = Trunk()
        alone = copy.deepcopy(model)
        ours, theirs = [hvd.DistributedOptimizer(each) for each in make(model, 3)], make(alone, 3)
        for iteration in range(8):
            for _ in range(drawn.randint(0, 3)):
                fail(model, *drawn.sample(range(3), drawn.randint(1, 3)))
                if drawn.random() < 0.5:
                    ours[drawn.randrange(3)].zero_grad()
            order = drawn.sample(range(3), drawn.randint(1, 3))
            losses = [loss_of(number) for number in order]

            def total(net: nn.Module, rank: int, now: int, losses: list = losses) -> torch.Tensor:
                return sum((loss(net, rank, now) for loss in losses), torch.zeros(()))

            model.zero_grad()
            total(model, hvd.rank(), iteration).backward()
            for number in order:
                ours[number].step()
            turn(theirs, joined(total, alone, iteration), order)
            assert_same_parameters(model, alone, 1e-11, f"seed {seed}, after turn {iteration}")


CASES = [
    drawn_turns_of_three_optimizers,
    shared_with_other_options_is_an_error_on_all_ranks,
    wrapping_twice_is_an_error,
    a_closed_optimizer_says_so,
    the_borrower_trains_on_when_the_owner_is_gone,
    dropped_on_one_rank_only,
    dropped_between_backward_and_step,
    one_that_has_failed_is_dropped_on_one_rank_only_before_another_fails,
    of_two_that_fail_in_one_pass_one_is_dropped_and_collected_on_one_rank_only,
    one_that_has_failed_waits_while_another_goes_on,
    drawn_failures_of_three_optimizers,
]


def drawn_turns_of_three_optimizers_many_times() -> None:
    drawn_turns_of_three_optimizers(range(100, 140))


def drawn_failures_of_three_optimizers_many_times() -> None:
    drawn_failures_of_three_optimizers(range(100, 130))


MANY = [drawn_turns_of_three_optimizers_many_times, drawn_failures_of_three_optimizers_many_times]

if __name__ == "__main__":
    main([*CASES, *MANY])
