"""Models under `replicate()` whose gradients Sirtaki reduces, compared with one process. Started by test_replicated.py.

Covers FSDP2's implementation, and the older one on DDP.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from conformance.ddp import Branches, assert_same, batch, branches_loss, dense_loss, dense_model, ranks, sgd
from conformance.training import main, raises
from fakes.backward import Raises
from rank_jobs import cases
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from sirtaki.errors import ConfigError
from sirtaki.torch import ddp, fsdp

STEPS = 6
Loss = Callable[[nn.Module, int, int], torch.Tensor]


def replicated(model: nn.Module, *, attach: bool = True, **options: Any) -> nn.Module:
    """Wrap blocks separately and the rest with the root, and attach. Collective."""
    for block in list(model.children())[:2]:
        if not isinstance(block, nn.ModuleList):
            replicate(block, **options)
    replicate(model, **options)
    if attach:
        fsdp.attach(model)
    return model


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same_everywhere(model: nn.Module, alone: nn.Module, when: object, **close: float) -> None:
    close = close or {"rtol": 1e-11, "atol": 1e-11}
    for (name, param), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
        say = functools.partial("{0} {1}: {2}".format, name, when)
        torch.testing.assert_close(local(param), wanted, msg=say, **close)
        if wanted.grad is not None:
            torch.testing.assert_close(local(param.grad), wanted.grad, msg=say, **close)


def backward_alone(alone: nn.Module, loss: Loss, step: int) -> None:
    sum(loss(alone, rank, step) for rank in ranks()).div(len(ranks())).backward()


def trains_alike(
    model: nn.Module,
    loss: Loss = dense_loss,
    *,
    passes: int = 1,
    of_all: bool = False,
    clip: float | None = None,
    to_none: bool = True,
    **options: Any,
) -> None:
    """Train and compare. Collective.

    All `passes` but the last one are not synchronised. With `of_all` they are reduced within nodes, without an
    all-reduce.
    """
    alone = copy.deepcopy(model)
    reference, optimizer = sgd(alone), sgd(replicated(model, **options))
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=to_none)
        reference.zero_grad()
        for number in range(passes):
            last = number == passes - 1
            model.set_requires_all_reduce(last) if of_all else model.set_requires_gradient_sync(last)
            loss(model, dist.get_rank(), passes * step + number).backward()
            backward_alone(alone, loss, passes * step + number)
        if clip is not None:
            norms = [local(nn.utils.clip_grad_norm_(one.parameters(), clip)) for one in (model, alone)]
            torch.testing.assert_close(*norms)
        optimizer.step()
        reference.step()
        same_everywhere(model, alone, f"after step {step} with {passes} passes, {options}")


def a_model_trains_as_in_one_process() -> None:
    for options in ({}, {"to_none": False}, {"passes": 3}, {"passes": 2, "of_all": True}, {"clip": 0.05}):
        trains_alike(dense_model(), **options)


def pytorch_reduces_nothing_of_an_attached_model() -> None:
    for attach in (False, True):
        model = replicated(dense_model(), attach=attach)
        for step in range(2):
            lost = dense_loss(model, dist.get_rank(), step)
            with CommDebugMode() as seen:
                lost.backward()
            assert (seen.get_total_counts() == 0) == attach


def parameters_that_some_ranks_or_none_use_get_what_they_should() -> None:
    trains_alike(Branches().double(), branches_loss)


def gradients_of_synchronised_passes_add_up() -> None:
    alone = dense_model()
    model = replicated(copy.deepcopy(alone))
    for step in range(4):
        dense_loss(model, dist.get_rank(), step).backward()
        backward_alone(alone, dense_loss, step)
        same_everywhere(model, alone, f"after pass {step}")


def mixed_precision_reduces_in_its_own_dtype() -> None:
    """As in FSDP, each rank's gradients are cast to the reduction's dtype."""
    for param_dtype, reduce_dtype in ((torch.bfloat16, torch.float32), (torch.bfloat16, None)):
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        ours, theirs = (dense_model().float() for _ in range(2))
        replicated(ours, mp_policy=policy)
        replicated(theirs, attach=False, mp_policy=policy)
        for step in range(3):
            for passes in range(2):
                for model in (ours, theirs):
                    model.set_requires_gradient_sync(passes == 1)
                    dense_loss_in(torch.float32, model, dist.get_rank(), 2 * step + passes).backward()
            close = {"rtol": 1e-5, "atol": 1e-7} if reduce_dtype else {"rtol": 2e-2, "atol": 1e-4}
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert local(one.grad).dtype is torch.float32
                torch.testing.assert_close(local(one.grad), local(other.grad), **close)


def dense_loss_in(dtype: torch.dtype, model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step, 5, 6).to(dtype)).float().square().mean()


def compiled_models_train_as_in_one_process() -> None:
    alone = dense_model()
    model = replicated(copy.deepcopy(alone))
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(3):
        for one in (model, alone):
            one.zero_grad()
        dense_loss(compiled, dist.get_rank(), step).backward()
        backward_alone(alone, dense_loss, step)
        same_everywhere(model, alone, f"after compiled step {step}")


def shards_of_one_rank_each_are_replicas() -> None:
    alone = dense_model()
    model = copy.deepcopy(alone)
    fully_shard(model, mesh=init_device_mesh("cpu", (len(ranks()), 1), mesh_dim_names=("replicate", "shard")))
    fsdp.attach(model)
    for step in range(2):
        lost = dense_loss(model, dist.get_rank(), step)
        with CommDebugMode() as seen:
            lost.backward()
        backward_alone(alone, dense_loss, step)
        same_everywhere(model, alone, f"after pass {step}")
        assert seen.get_total_counts() == 0


def a_factor_to_divide_by_is_the_users() -> None:
    alone = dense_model()
    model = replicated(copy.deepcopy(alone))
    model.set_gradient_divide_factor(8.0)
    for child in list(model.children())[:2]:
        child.set_gradient_divide_factor(8.0)
    dense_loss(model, dist.get_rank(), 0).backward()
    sum(dense_loss(alone, rank, 0) for rank in ranks()).div(8.0).backward()
    same_everywhere(model, alone, "divided by 8")


def hooks_on_parameters_see_reduced_gradients() -> None:
    alone, seen = dense_model(), {}
    model = replicated(copy.deepcopy(alone))
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(
            lambda each, name=name: seen.__setitem__(name, local(each.grad).clone())
        )
    dense_loss(model, dist.get_rank(), 0).backward()
    backward_alone(alone, dense_loss, 0)
    for name, param in alone.named_parameters():
        torch.testing.assert_close(seen[name], param.grad)


def a_pass_that_has_raised_is_left_behind() -> None:
    alone = dense_model()
    model = replicated(copy.deepcopy(alone))
    fails = False
    model[2].register_forward_hook(lambda module, inputs, output: Raises.apply(output) if fails else None)
    for step in range(3):
        fails = True
        raises(ValueError, "half-way", lambda step=step: dense_loss(model, dist.get_rank(), step).backward())
        fails = False
        model.reset_iter_state() if hasattr(model, "reset_iter_state") else model._get_fsdp_state()._reset_iter_state()
        for one in (model, alone):
            one.zero_grad()
        dense_loss(model, dist.get_rank(), step).backward()
        backward_alone(alone, dense_loss, step)
        same_everywhere(model, alone, f"after a pass that raised, {step}")


def the_older_replicate_is_attached_too() -> None:
    for loss, make in ((dense_loss, dense_model), (branches_loss, lambda: Branches().double())):
        model = make()
        alone = copy.deepcopy(model)
        replicate_by_ddp(model, find_unused_parameters=True)
        ddp.attach(model)
        raises(ConfigError, "attached already", functools.partial(ddp.attach, model))
        optimizer, reference = sgd(model), sgd(alone)
        for step in range(STEPS):
            for one in (optimizer, reference):
                one.zero_grad()
            for number in range(2):
                model.set_requires_gradient_sync(number == 1)
                loss(model, dist.get_rank(), 2 * step + number).backward()
                backward_alone(alone, loss, 2 * step + number)
            for one in (optimizer, reference):
                one.step()
            assert_same(model, alone, f"after step {step}")


def what_does_not_fit_is_refused() -> None:
    model = replicated(dense_model())
    raises(ConfigError, "attached already", lambda: fsdp.attach(model))
    left = replicated(dense_model(), attach=False)
    raises(ConfigError, "nor carries=False", lambda: fsdp.attach(left, carries=False))
    left.set_all_reduce_hook(lambda _: None)
    raises(ConfigError, "set_all_reduce_hook", lambda: fsdp.attach(left))
    with torch.device("meta"):
        empty = dense_model()
    replicated(empty, attach=False)
    raises(ConfigError, "before the parameters were initialised", lambda: fsdp.attach(empty))


def modules_may_be_sharded_beside_replicated_ones() -> None:
    alone = nn.Sequential(dense_model(), nn.Linear(3, 4).double())
    model = copy.deepcopy(alone)
    fully_shard(model[1])
    replicate(model[0])
    fsdp.attach(model)
    for step in range(2):
        dense_loss(model, dist.get_rank(), step).backward()
        backward_alone(alone, dense_loss, step)
    for param, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), wanted.grad)


CASES = cases(globals())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    replicated(dense_model())  # the first attach initialises the job
    main(CASES)
    dist.destroy_process_group()
