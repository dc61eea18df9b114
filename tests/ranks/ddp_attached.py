"""DistributedDataParallel models that Sirtaki reduces, compared with one process in float64. Started by test_ddp.py.

There is no MPI, and the process group is not Sirtaki's. `attach()` initialises the job. Each case trains on every rank,
and compares each step with a model that gets all ranks' batches.
"""

import copy
import logging
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from conformance.ddp import (
    STEPS,
    Branches,
    Loss,
    assert_same,
    attached,
    batch,
    branches_loss,
    dense_loss,
    dense_model,
    ranks,
    sgd,
    trains_alike,
)
from conformance.gradient_losses import LOSSES, logged
from conformance.training import main, raises
from rank_jobs import cases
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sirtaki.torch as hvd
from sirtaki.errors import ConfigError, NotInitializedError
from sirtaki.torch import ddp


def gradients_alike(
    model: nn.Module, wrapped: nn.Module, alone: nn.Module, loss: Loss, step: int, **close: float
) -> None:
    """Compare one backward pass of all ranks with one process that gets all batches."""
    for one in (model, alone):
        one.zero_grad()
    loss(wrapped, dist.get_rank(), step).backward()
    sum(loss(alone, rank, step) for rank in ranks()).div(len(ranks())).backward()
    same_gradients(model, alone, **close)


def same_gradients(model: nn.Module, alone: nn.Module, **close: float) -> None:
    for param, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad.to_dense(), wanted.grad.to_dense(), **close)


def a_model_trains_as_in_one_process() -> None:
    for options in (
        {},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "to_none": False},
        {"bucket_cap_mb": 25},
        {"static_graph": True},
        {"passes": 3},
        {"clip": 0.05},
    ):
        trains_alike(dense_model(), **options)


def ddps_logging_data_has_the_times_of_sirtakis_steps() -> None:
    model = attached(dense_model())
    for step in range(3):
        dense_loss(model, dist.get_rank(), step).backward()
    known = model._get_ddp_logging_data()
    assert (known["iteration"], known["comm_hook"], known["world_size"]) == (3, "sirtaki", len(ranks()))
    for name in ("forward_compute_time", "backward_compute_time", "backward_comm_time"):
        assert 0 < known[name] < 60e9, name
        assert 0 < known[f"avg_{name}"] < 60e9, name
    assert known["backward_comm_time_end"] > known["backward_compute_time_end"] > known["backward_compute_time_start"]


def gradients_may_be_asked_for_through_the_output() -> None:
    """`torch.autograd.grad` is no backward pass. The next pass reduces the gradients that it returned."""
    for loss in LOSSES:
        trains_alike(dense_model(), partial(loss, batch), find_unused_parameters=True)
        trains_alike(dense_model(), partial(loss, batch), passes=2, steps=3)
    trains_alike(dense_model(), partial(logged, batch), static_graph=True)


def parameters_may_differ_where_a_pass_is_not_synchronised() -> None:
    """In sharpness-aware minimisation, the first pass moves each rank's parameters by local gradients. No warning."""
    said: list[logging.LogRecord] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = said.append  # type: ignore[method-assign]
    logging.getLogger("sirtaki").addHandler(listener)
    model = dense_model()
    alone, wrapped = copy.deepcopy(model), attached(model)
    optimizer, reference = sgd(model), sgd(alone)

    def moved(target: nn.Module, call: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
        before = [param.detach().clone() for param in target.parameters()]
        dense_loss(call, rank, step).backward()
        with torch.no_grad():
            for param in target.parameters():
                param.add_(param.grad, alpha=0.05)
        target.zero_grad()
        return before

    for step in range(STEPS):
        optimizer.zero_grad()
        with wrapped.no_sync():
            before = moved(model, wrapped, dist.get_rank(), step)
        dense_loss(wrapped, dist.get_rank(), step).backward()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), before)
        optimizer.step()
        gradients = []
        for rank in ranks():
            before = moved(alone, alone, rank, step)
            dense_loss(alone, rank, step).backward()
            gradients.append([param.grad for param in alone.parameters()])
            alone.zero_grad()
            with torch.no_grad():
                torch._foreach_copy_(list(alone.parameters()), before)
        for param, *each in zip(alone.parameters(), *gradients, strict=True):
            param.grad = sum(each) / len(ranks())
        reference.step()
        reference.zero_grad()
        assert_same(model, alone, step)
    logging.getLogger("sirtaki").removeHandler(listener)
    assert not said, said


def convolutions_in_channels_last_keep_their_strides() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 2)).double()

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step, 2, 3, 6, 6).contiguous(memory_format=torch.channels_last)).square().mean()

    trains_alike(model.to(memory_format=torch.channels_last), loss)


def two_models_may_be_trained_in_turns() -> None:
    models = [dense_model(), Branches().double()]
    copies = [copy.deepcopy(model) for model in models]
    wrapped = [attached(models[0]), attached(models[1], find_unused_parameters=True)]
    losses: list[Loss] = [dense_loss, lambda model, rank, step: model(batch(rank, step, 5, 6), 1).square().mean()]
    for step in range(STEPS):
        for model, alone, ours, loss in zip(models, copies, wrapped, losses, strict=True):
            for one, total in ((model, None), (alone, ranks())):
                optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
                optimizer.zero_grad()
                if total is None:
                    loss(ours, dist.get_rank(), step).backward()
                else:
                    sum(loss(alone, rank, step) for rank in total).div(len(total)).backward()
                optimizer.step()
            assert_same(model, alone, f"after step {step}")


def beside_ddp(make: Callable[[], nn.Module], loss: Loss, *, by_all: bool, **options: object) -> None:
    """Train ranks with unequal numbers of batches. Ranks that have joined contribute zeros. Collective."""
    model, peer = make(), make()
    sides = [(attached(model, **options), sgd(model)), (DistributedDataParallel(peer, **options), sgd(peer))]
    for wrapped, optimizer in sides:
        with wrapped.join(divide_by_initial_world_size=by_all):
            for step in range(4 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                loss(wrapped, dist.get_rank(), step).backward()
                optimizer.step()
    assert_same(model, peer, "after all batches")


def ranks_may_have_unequal_numbers_of_batches() -> None:
    beside_ddp(dense_model, dense_loss, by_all=True)


def those_that_have_joined_may_not_count() -> None:
    beside_ddp(dense_model, dense_loss, by_all=False)


def batches_may_be_unequal_and_parameters_unused() -> None:
    """Compare with one process, because DDP itself treats a parameter as used if it was used before a rank joined."""
    model = Branches().double()
    alone = copy.deepcopy(model)
    wrapped, optimizer, reference = attached(model, find_unused_parameters=True), sgd(model), sgd(alone)
    with wrapped.join():
        for step in range(4 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            branches_loss(wrapped, dist.get_rank(), step).backward()
            optimizer.step()
    for step in range(4 + 2 * max(ranks())):
        reference.zero_grad()
        there = [rank for rank in ranks() if step < 4 + 2 * rank]
        sum(branches_loss(alone, rank, step) for rank in there).div(len(ranks())).backward()
        reference.step()
    assert_same(model, alone, "after all batches")


class OwnOutput:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@dataclass
class Output:
    value: torch.Tensor


class SharedInCheckpoints(nn.Module):
    """A model whose backward pass runs two passes within it that compute gradients of the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.first, self.shared, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        for _ in range(3):
            hidden = checkpoint(self.shared, torch.tanh(hidden), use_reentrant=True)
        return self.last(hidden)


def gradients_may_come_several_times_where_the_graph_stays() -> None:
    trains_alike(SharedInCheckpoints().double(), static_graph=True)


def the_graph_may_become_static_until_training_begins() -> None:
    model = SharedInCheckpoints().double()
    alone, wrapped = copy.deepcopy(model), attached(model)
    wrapped._set_static_graph()
    for step in range(3):
        gradients_alike(model, wrapped, alone, dense_loss, step)
    trained_before = DistributedDataParallel(dense_model())
    dense_loss(trained_before, dist.get_rank(), 0).backward()
    ddp.attach(trained_before)
    trained_after = attached(dense_model())
    dense_loss(trained_after, dist.get_rank(), 0).backward()
    for wrapped in (trained_before, trained_after):
        raises(RuntimeError, "before training loop starts", wrapped._set_static_graph)
        assert wrapped.logger._get_ddp_logging_data().ints_map["has_error"] == 1


def gradients_that_come_several_times_are_refused_elsewhere() -> None:
    wrapped = attached(SharedInCheckpoints().double())
    raises(AssertionError, "static_graph=True", dense_loss(wrapped, dist.get_rank(), 0).backward)


def what_a_model_returns_may_be_of_any_type() -> None:
    class Wraps(nn.Module):
        def __init__(self, kind: Callable[[torch.Tensor], object]) -> None:
            super().__init__()
            self.inner, self.kind = dense_model(), kind

        def forward(self, inputs: torch.Tensor) -> object:
            return self.kind(self.inner(inputs))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        found = model(batch(rank, step, 5, 6))
        return (found["value"] if isinstance(found, dict) else found.value).square().mean()

    for kind in (OwnOutput, Output, lambda value: {"other": None, "value": value}):
        trains_alike(Wraps(kind), loss, steps=2)


def a_rank_may_use_no_parameter_at_all() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = dense_model()

        def forward(self, inputs: torch.Tensor, skip: bool) -> torch.Tensor:
            return inputs.requires_grad_() * 2 if skip else self.inner(inputs)

    def loss(model: nn.Module, rank: int, step: int, *, looks: bool = False) -> torch.Tensor:
        inputs = batch(rank, step, 5, 6).requires_grad_()
        output = model(inputs, rank > 0 and (rank + step) % 2 == 0)
        if looks:
            torch.autograd.grad(output.sum(), inputs, retain_graph=True)
        return output.square().mean()

    trains_alike(Skips(), loss, find_unused_parameters=True)
    trains_alike(Skips(), partial(loss, looks=True), find_unused_parameters=True)


def only_the_pass_that_a_forward_has_asked_for_is_synchronised() -> None:
    """As in DDP itself: forward passes without a backward pass, several before one, and a second pass over one."""
    results = []
    for model in (dense_model(), dense_model()):
        wrapped = attached(model) if not results else DistributedDataParallel(model)
        optimizer = sgd(model)
        for step in range(4):
            optimizer.zero_grad()
            dense_loss(wrapped, dist.get_rank(), 50)
            both = dense_loss(wrapped, dist.get_rank(), step) + dense_loss(wrapped, dist.get_rank(), 20 + step)
            both.backward(retain_graph=True)
            both.backward()
            for param in model.parameters():  # parameters now differ between ranks by the second pass's gradients
                dist.all_reduce(param.grad)
            optimizer.step()
        results.append(model)
    assert_same(*results, "after all steps")


def a_pass_through_outputs_of_which_some_were_made_in_no_sync_is_synchronised() -> None:
    model = dense_model()
    alone, wrapped = copy.deepcopy(model), attached(model)

    def loss(of: nn.Module, rank: int, step: int) -> torch.Tensor:
        first = dense_loss(of, rank, step)
        with wrapped.no_sync():
            return first + dense_loss(of, rank, step + STEPS)

    for step in range(STEPS):
        gradients_alike(model, wrapped, alone, loss, step)


def a_copy_of_the_model_is_pytorchs() -> None:
    wrapped = attached(dense_model())
    dense_loss(wrapped, dist.get_rank(), 0).backward()
    twin = pickle.loads(pickle.dumps(wrapped))
    twin.zero_grad()
    dense_loss(twin, dist.get_rank(), 0).backward()
    for own, other in zip(wrapped.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def a_model_may_be_compiled() -> None:
    model = dense_model()
    alone, wrapped = copy.deepcopy(model), torch.compile(attached(model, bucket_cap_mb=25), backend="eager")
    for step in range(3):
        gradients_alike(model, wrapped, alone, dense_loss, step)


def many_steps_are_tuned_and_stay_right() -> None:
    trains_alike(dense_model(), steps=130)


def what_cannot_be_attached_is_refused() -> None:
    def refused(model: object, words: str) -> None:
        raises(ConfigError, words, lambda: ddp.attach(model))  # type: ignore[arg-type]

    refused(dense_model(), "not a Sequential")
    refused(attached(dense_model()), "attached already")
    hooked = DistributedDataParallel(dense_model())
    hooked.register_comm_hook(None, allreduce_hook)
    refused(hooked, "remove register_comm_hook")
    built_in = DistributedDataParallel(dense_model())
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    refused(built_in, "remove register_comm_hook")
    for rank in ranks():
        alone = dist.new_group([rank])
        if rank == dist.get_rank() and len(ranks()) > 1:
            refused(DistributedDataParallel(dense_model(), process_group=alone), "contains all")


def a_model_whose_job_has_ended_trains_no_more_but_computes() -> None:
    wrapped = attached(dense_model())
    dense_loss(wrapped, dist.get_rank(), 0).backward()
    hvd.shutdown()
    with torch.no_grad():
        dense_loss(wrapped, dist.get_rank(), 0)
    raises(NotInitializedError, "wrap the model again", lambda: dense_loss(wrapped, dist.get_rank(), 0))
    again = DistributedDataParallel(wrapped.module)
    ddp.attach(again)
    gradients_alike(again, again, dense_model(), dense_loss, 0)


def a_detached_model_is_reduced_by_ddp_and_may_be_attached_again() -> None:
    for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        model = dense_model()
        alone, wrapped = copy.deepcopy(model), attached(model, **options)
        for step in range(8):
            gradients_alike(model, wrapped, alone, dense_loss, step)
            if step in (1, 5):
                assert ddp.detach(wrapped)
                assert type(wrapped.reducer) is dist.Reducer
                assert wrapped.find_unused_parameters == ("find_unused_parameters" in options)
            if step == 3:
                own = weakref.ref(wrapped.reducer)
                ddp.attach(wrapped)
                assert own() is None, "attach() frees DDP's reducer with its buckets"
        assert not ddp.detach(wrapped)


def a_communication_hook_detaches_the_model() -> None:
    for register in (
        lambda wrapped: wrapped.register_comm_hook(None, allreduce_hook),
        lambda wrapped: wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    ):
        model = dense_model()
        alone, wrapped = copy.deepcopy(model), attached(model)
        gradients_alike(model, wrapped, alone, dense_loss, 0)
        register(wrapped)
        assert not ddp.is_attached(wrapped)
        for step in (1, 2):
            gradients_alike(model, wrapped, alone, dense_loss, step)


def its_ranks_are_those_of_the_process_group() -> None:
    attached(dense_model())
    assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())


CASES = cases(globals())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    attached(dense_model())  # the first attach initialises the job
    main(CASES)
    dist.destroy_process_group()
