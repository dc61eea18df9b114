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

SETTLING_S = 20.0


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


def a_shared_encoder() -> None:
    trains_like_one_process([(0, 1)] * 6, count=2)
    trains_like_one_process([(0, 1), (1, 0)] * 3, count=2, op=hvd.Sum, momentum=0.0)


def a_shared_encoder_in_turns() -> None:
    trains_like_one_process([(0,), (1,)] * 4, count=2)
    trains_like_one_process([(0,), (1,), (1,), (0,), (0,)] * 2, count=2, op=hvd.Sum)


def drawn_turns_of_three_optimizers(seeds: Sequence[int] = (1, 2)) -> None:
    for seed in seeds:
        drawn = random.Random(seed)
        turns = [drawn.sample(range(3), drawn.randint(1, 3)) for _ in range(10)]
        trains_like_one_process(
            turns, count=3, momentum=drawn.choice([0.0, 0.9]), op=drawn.choice([hvd.Average, hvd.Sum])
        )


def only_one_rank_reaches_the_shared_layer() -> None:
    model = Trunk()
    alone = copy.deepcopy(model)
    ours, theirs = [hvd.DistributedOptimizer(each) for each in make(model, 2)], make(alone, 2)

    def loss(net: nn.Module, rank: int, iteration: int) -> torch.Tensor:
        if rank == iteration % hvd.size():
            return loss_of(1)(net, rank, iteration)
        return net.heads[1](batch(rank, iteration, 4, 12)).square().mean()

    for iteration in range(6):
        turn(ours, loss_of(0)(model, hvd.rank(), iteration), [0])
        turn(theirs, joined(loss_of(0), alone, iteration), [0])
        turn(ours, loss(model, hvd.rank(), iteration), [1])
        turn(theirs, joined(loss, alone, iteration), [1])
        assert_same_parameters(model, alone, 1e-11, f"after turn {iteration}")


def clipping_before_the_first_of_two_steps() -> None:
    model = Trunk()
    alone = copy.deepcopy(model)
    ours, theirs = [hvd.DistributedOptimizer(each) for each in make(model, 2)], make(alone, 2)
    both = [loss_of(0), loss_of(1)]
    for iteration in range(4):
        for each in (*ours, *theirs):
            each.zero_grad()
        sum(loss(model, hvd.rank(), iteration) for loss in both).backward()
        for each in ours:
            each.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for each in ours:
            with each.skip_synchronize():
                each.step()
        sum(joined(loss, alone, iteration) for loss in both).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        for each in theirs:
            each.step()
        assert_same_parameters(model, alone, 1e-11, f"after step {iteration}")


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


def wrapping_the_same_model_again() -> None:
    model = mlp()
    for _ in range(3):  # nothing is left of the one before
        assert_same_training(model, mean_square, steps=4)
    alone = copy.deepcopy(model)
    for stage in range(3):  # the one before is still there when the new one is made
        reference, optimizer = sgd(alone), hvd.DistributedOptimizer(sgd(model))
        for iteration in range(4 * stage, 4 * stage + 4):
            for each, loss in (
                (optimizer, mean_square(model, hvd.rank(), iteration)),
                (reference, joined(mean_square, alone, iteration)),
            ):
                each.zero_grad()
                loss.backward()
                each.step()
            assert_same_parameters(model, alone, 1e-11, f"in stage {stage}")


def stages_with_other_parameters_and_options() -> None:
    model = mlp()
    alone = copy.deepcopy(model)
    optimizer = None
    for stage, (layers, passes) in enumerate([((4,), 1), ((2, 4), 1), ((0, 2, 4), 1), ((0,), 2), ((0, 2), 2)]):
        for net in (model, alone):
            net.requires_grad_(False)
            for layer in layers:
                net[layer].requires_grad_(True)
        if passes == 2 and optimizer is not None:
            optimizer.close()  # what comes has other options
        made = [torch.optim.Adam([p for layer in layers for p in net[layer].parameters()]) for net in (model, alone)]
        optimizer, reference = hvd.DistributedOptimizer(made[0], backward_passes_per_step=passes), made[1]
        for iteration in range(3):
            for each in (optimizer, reference):
                each.zero_grad()
            for part in range(passes):
                mean_square(model, hvd.rank(), 2 * iteration + part).backward()
                joined(mean_square, alone, 2 * iteration + part).backward()
            for each in (optimizer, reference):
                each.step()
            assert_same_parameters(model, alone, 1e-9, f"in stage {stage}")


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
            assert not any(reducer.sharing.active for reducer in borrower._gradients.reducers)


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
    a_shared_encoder,
    a_shared_encoder_in_turns,
    drawn_turns_of_three_optimizers,
    only_one_rank_reaches_the_shared_layer,
    clipping_before_the_first_of_two_steps,
    shared_with_other_options_is_an_error_on_all_ranks,
    wrapping_twice_is_an_error,
    wrapping_the_same_model_again,
    stages_with_other_parameters_and_options,
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
