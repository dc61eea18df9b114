"""Models under `fully_shard` whose shards Sirtaki sends, compared with one process. Started by test_fsdp.py.

Each case trains on every rank, and compares each step with a model that gets all ranks' batches. Where PyTorch rounds
shards, it compares with the same model sharded without Sirtaki.
"""

import functools
import gc
import itertools
import os
import random
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from conformance.training import main, raises
from conformance.tunable import TUNABLE_CHECKS
from fakes.backward import Raises
from rank_jobs import cases
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from sirtaki.autotune.sharded import ShardKnobs
from sirtaki.comm import device
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.engine.settings import REGISTRY_OFF, Settings
from sirtaki.errors import ConfigError, MismatchError
from sirtaki.torch import fsdp
from sirtaki.torch.compression import Compression
from sirtaki.torch.fsdp import target

STEPS = 5
CARRIES = os.environ.get("SIRTAKI_TEST_CARRIES") != "0"
"""Whether Sirtaki sends the shards of the cases' models. Otherwise PyTorch sends them, and Sirtaki schedules."""

JOINS = os.environ.get("SIRTAKI_TEST_JOINS") == "1"
"""Whether modules are coalesced with others in gathers and scatters, differently in each step."""

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
Make = Callable[[], nn.Module]


def ranks() -> range:
    return range(dist.get_world_size())


def batch(rank: int, step: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7919 * step + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


class Tower(nn.Module):
    """Blocks of odd sizes between two layers of the root."""

    def __init__(self, dtype: torch.dtype = torch.float64, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 33, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(33, 17 + n, dtype=dtype), nn.Tanh(), nn.Linear(17 + n, 33, dtype=dtype))
            for n in range(blocks)
        )
        self.last = nn.Linear(33, 3, bias=False, dtype=dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = self.run(block, hidden)
        return self.last(hidden)

    def run(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + block(hidden)


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    parameter = next(model.parameters())
    inputs = batch(rank, step, 6, 5, dtype=parameter.dtype).to(parameter.device)
    return model(inputs).double().square().mean()


def sharded(model: nn.Module, *, mesh: DeviceMesh | None = None, attach: bool = True, **options: Any) -> nn.Module:
    """Shard a model and attach it. Collective."""
    mesh = mesh or init_device_mesh(DEVICE, (len(ranks()),))
    model.to(DEVICE)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if attach:
        fsdp.attach(model, carries=None if CARRIES else False)
        if JOINS:
            joining(model)
    return model


def joining(model: nn.Module) -> None:
    """Coalesce different modules in each pass."""
    found, draw = fsdp.attached(model), random.Random(5)
    if found is None:  # shards of one rank count as replicas, so nothing is gathered
        return

    def choose(module: nn.Module, args: object) -> None:
        joined = tuple(place for place in found.joinable if draw.random() < 0.7)
        setting = {"ahead": draw.randint(0, 3), "behind": draw.randint(1, 3), "scattering": draw.randint(1, 2)}
        found.apply(replace(found.knobs, joined=joined, **setting))

    model.register_forward_pre_hook(choose)


def set_clock(model: nn.Module, now_s: Callable[[], float]) -> None:
    """Let `now_s` be the clock that times the steps of an attached model, also on a GPU."""
    target.time = device.time = SimpleNamespace(perf_counter=now_s, time=time.time, monotonic=time.monotonic)
    fsdp.attached(model).connections.device = device.HOST


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def trains_alike(
    wrapped: nn.Module,
    alone: nn.Module,
    *,
    passes: int = 1,
    clip: float | None = None,
    steps: int = STEPS,
    tolerance: float = 1e-11,
    of_rank: Callable[[int], int] = lambda rank: rank,
    before_update: Callable[[], None] = lambda: None,
    between: Callable[[], None] = lambda: None,
    to_none: bool = True,
) -> None:
    """Compare parameters and gradients after each step with those of `alone`, which gets all ranks' batches."""
    seen = sorted({of_rank(rank) for rank in ranks()})
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (wrapped, alone))
    for step in range(steps):
        ours.zero_grad(set_to_none=to_none)
        theirs.zero_grad(set_to_none=to_none)
        for number in range(passes):
            wrapped.set_requires_gradient_sync(number == passes - 1)
            wrapped.set_is_last_backward(number == passes - 1)
            loss(wrapped, of_rank(dist.get_rank()), passes * step + number).backward()
            sum(loss(alone, rank, passes * step + number) for rank in seen).div(len(seen)).backward()
        if clip is not None:
            norms = [nn.utils.clip_grad_norm_(each.parameters(), clip) for each in (wrapped, alone)]
            torch.testing.assert_close(*map(whole, norms), rtol=1e-5, atol=1e-5)
        compared = zip(wrapped.named_parameters(), alone.parameters(), strict=True)
        for (name, found), wanted in compared:
            same = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
            assert (found.grad is None) == (wanted.grad is None), name
            if found.grad is not None:
                same(whole(found.grad), wanted.grad, msg=lambda text, n=name: f"gradient of {n}: {text}")
        before_update()
        ours.step()
        theirs.step()
        for (name, found), wanted in zip(wrapped.named_parameters(), alone.parameters(), strict=True):
            same(whole(found.detach()), wanted.detach(), msg=lambda text, n=name, s=step: f"{n} after step {s}: {text}")
        between()


def as_sharded_by_pytorch(make: Make, wrap: Callable[..., nn.Module], *, tolerance: float = 0.0) -> None:
    """Train with and without Sirtaki on the same batches, and compare."""
    models = [wrap(make(), attach=attach) for attach in (True, False)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss(model, dist.get_rank(), step).backward()
            optimizer.step()
        for found, wanted in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(whole(found.detach()), whole(wanted.detach()), rtol=tolerance, atol=tolerance)


def a_model_trains_as_in_one_process() -> None:
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        for blocks in (1, 4):
            trains_alike(sharded(Tower(dtype, blocks)), Tower(dtype, blocks), tolerance=tolerance)


def gradients_accumulate_in_place_and_over_passes() -> None:
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        trains_alike(sharded(Tower(dtype)), Tower(dtype), passes=3, tolerance=tolerance)
        trains_alike(sharded(Tower(dtype)), Tower(dtype), to_none=False, tolerance=tolerance)


def gradients_are_clipped_by_their_norm_over_all_shards() -> None:
    trains_alike(sharded(Tower()), Tower(), clip=0.05)


def frozen_parameters_stay() -> None:
    def partly_frozen() -> nn.Module:
        model = Tower(torch.float32)
        model.first.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        model.blocks[2][0].requires_grad_(False)
        return model

    trains_alike(sharded(partly_frozen()), partly_frozen(), tolerance=1e-5)


def parameters_are_kept_or_gathered_again() -> None:
    for keep in (False, True, *([2] if len(ranks()) == 4 else [])):
        options = {"reshard_after_forward": True if keep is True else keep}
        trains_alike(sharded(Tower(torch.float32), **options), Tower(torch.float32), tolerance=1e-5)


def precision_is_mixed_as_by_pytorch() -> None:
    for policy in (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    ):
        as_sharded_by_pytorch(
            lambda: Tower(torch.float32), functools.partial(sharded, mp_policy=policy), tolerance=1e-2
        )


def halves_are_divided_by_pytorch_itself() -> None:
    as_sharded_by_pytorch(lambda: Tower(torch.float16), sharded, tolerance=1e-2)


def shards_may_lie_in_the_hosts_memory() -> None:
    trains_alike(
        sharded(Tower(torch.float32), offload_policy=CPUOffloadPolicy(pin_memory=False)),
        Tower(torch.float32),
        tolerance=1e-5,
    )


def embeddings_may_be_tied() -> None:
    class Tied(Tower):
        def __init__(self) -> None:
            super().__init__(torch.float32)
            self.last = nn.Linear(33, 5, bias=False)
            self.first = nn.Identity()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs @ self.last.weight)

    trains_alike(sharded(Tied()), Tied(), tolerance=1e-5)


def activations_may_be_computed_again() -> None:
    class Again(Tower):
        def run(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + checkpoint(block, hidden, use_reentrant=False)

    trains_alike(sharded(Again(torch.float32)), Tower(torch.float32), tolerance=1e-5)


def replicas_of_shards_are_averaged() -> None:
    """Hybrid sharding."""
    size = len(ranks())
    for shape in ((size, 1), (1, size), *([(2, 2)] if size == 4 else [])):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        trains_alike(sharded(Tower(torch.float32), mesh=mesh), Tower(torch.float32), tolerance=1e-5)


def tensors_may_be_parallel_beside_shards() -> None:
    size = len(ranks())
    if size % 2:
        return
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # because PyTorch warns of DTensors
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = Tower(torch.float32)
    for block in model.blocks:
        if block[0].out_features % 2 == 0:
            parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    trains_alike(
        sharded(model, mesh=mesh["data"]), Tower(torch.float32), tolerance=1e-4, of_rank=lambda rank: rank // 2
    )


def modules_may_be_evaluated_between_steps_and_used_in_another_order() -> None:
    model = sharded(Tower(torch.float32))
    alone = Tower(torch.float32)

    def evaluate() -> None:
        with torch.no_grad():
            torch.testing.assert_close(loss(model, 1, 99), loss(alone, 1, 99), rtol=1e-5, atol=1e-5)

    trains_alike(model, alone, between=evaluate, tolerance=1e-5)
    for each in (model, alone):
        order = list(each.blocks)[::-1]
        each.forward = functools.partial(forward_in, each, order)
    model.reshard()  # because the root stays gathered after a forward pass without a backward pass
    trains_alike(model, alone, between=evaluate, tolerance=1e-5)
    model.reshard()
    for each in (model, alone):
        each.forward = functools.partial(forward_in, each, list(each.blocks)[:2])
    trains_alike(model, alone, steps=3, tolerance=1e-5)


def keeping(model: nn.Module) -> nn.Module:
    """Keep parameters gathered from the second forward pass on, within nodes if possible."""
    found = fsdp.attached(model)
    assert found is not None

    def choose(module: nn.Module, args: object) -> None:
        lanes = found.lanes(dist.group.WORLD)
        assert (lanes is not None) == CARRIES
        places = {"kept" if found.near is None else "near": found.dropped}
        joined = found.knobs.joined
        found.run(ShardKnobs(streams=1 if CARRIES else 2, ahead=2, scattering=2, joined=joined, **places))

    model.register_forward_pre_hook(choose)
    return model


def sharded_with_memory(model: nn.Module, **options: Any) -> nn.Module:
    """Shard a model with memory for gathered parameters, and attach it. Collective."""
    os.environ["SIRTAKI_FSDP_MEMORY"] = "1GiB"
    try:
        return sharded(model, **options)
    finally:
        del os.environ["SIRTAKI_FSDP_MEMORY"]


def parameters_that_are_kept_may_be_frozen_while_gradients_accumulate() -> None:
    def frozen() -> nn.Module:
        model = Tower()
        model.first.requires_grad_(False)
        model.blocks[0].requires_grad_(False)  # FSDP gathers it in the backward pass, although it has no gradients
        return model

    trains_alike(keeping(sharded_with_memory(frozen())), frozen(), passes=2)


def parameters_that_are_kept_are_not_gathered_for_the_backward_pass() -> None:
    model = keeping(sharded_with_memory(Tower()))
    found = fsdp.attached(model)
    assert found is not None
    lanes = found.lanes(dist.group.WORLD)
    if lanes is None or JOINS:  # PyTorch sends the shards
        return
    gather, gathered = lanes.gather, []
    lanes.gather = lambda *args, **options: (gathered.append(0), gather(*args, **options))[1]  # type: ignore[method-assign]
    counts = []
    for step in range(2):  # five modules, of which the root stays gathered; afterwards the network is measured
        gathered.clear()
        loss(model, dist.get_rank(), step).backward()
        counts.append(len(gathered))
    assert counts == [9, 7], counts  # two modules are gathered before `choose` is called


def modules_that_are_joined_travel_as_one() -> None:
    def messages(*, hooked: bool) -> tuple[int, int]:
        """Return the numbers of gathers and scatters in a step that coalesces three blocks with the first one."""
        model = sharded(Tower(torch.float32))
        found = fsdp.attached(model)
        assert found is not None
        lanes = found.lanes(dist.group.WORLD)
        loss(model, dist.get_rank(), 0).backward()  # shows the order of modules
        model.zero_grad()
        assert found.joinable == (1, 2, 3, 4)
        found.run(replace(found.knobs, joined=(2, 3, 4)))
        for parameter in model.blocks[2].parameters() if hooked else ():
            parameter.register_post_accumulate_grad_hook(lambda each: None)
        with (
            mock.patch.object(lanes, "gather", wraps=lanes.gather) as gather,
            mock.patch.object(lanes, "scatter", wraps=lanes.scatter) as scatter,
        ):
            loss(model, dist.get_rank(), 1).backward()
        return gather.call_count, scatter.call_count

    if CARRIES and not JOINS:
        # The root and the blocks. The last block is gathered separately in backward, because it is used at once.

        assert messages(hooked=False) == (2 + 2, 2)
        # A gradient that is read early does not wait for gradients of other blocks.
        assert messages(hooked=True) == (2 + 2, 4)


def with_joined(model: nn.Module, *joined: int) -> nn.Module:
    """Coalesce the modules at these positions with their predecessors, from the second forward pass on."""
    found = fsdp.attached(model)
    assert found is not None

    def choose(module: nn.Module, args: object) -> None:
        places = tuple(place for place in joined if place in found.joinable)
        found.run(replace(found.knobs, joined=places))

    model.register_forward_pre_hook(choose)
    return model


def joined_modules_may_be_frozen() -> None:
    """Check that the scatter of a bucket starts with another module's gradients if its first module has none."""
    for frozen, joined in itertools.product(range(4), ((2, 3, 4), (2,), (3, 4), (2, 4))):

        def partly_frozen(number: int = frozen) -> nn.Module:
            model = Tower(torch.float32)
            model.blocks[number].requires_grad_(False)
            return model

        trains_alike(with_joined(sharded(partly_frozen()), *joined), partly_frozen(), steps=3, tolerance=1e-5)


def joined_modules_that_the_user_gathers_are_waited_for_where_each_rank_likes() -> None:
    model, alone = with_joined(sharded(Tower(torch.float32)), 2, 3, 4), Tower(torch.float32)

    def look() -> None:
        blocks: list[Any] = [model.blocks[number] for number in (2, 0, 1)]
        handles = [blocks[0].unshard(async_op=True)]
        if dist.get_rank() == 0:
            handles[0].wait()
        handles += [block.unshard(async_op=True) for block in blocks[1:]]
        for handle in handles:
            handle.wait()
        for number in range(3):
            for found, wanted in zip(model.blocks[number].parameters(), alone.blocks[number].parameters(), strict=True):
                torch.testing.assert_close(whole(found), wanted, rtol=1e-5, atol=1e-5)
            model.blocks[number].reshard()

    trains_alike(model, alone, between=look, tolerance=1e-5)


def joined_modules_may_have_hooks_on_one_rank_alone() -> None:
    model, seen = with_joined(sharded(Tower(torch.float32)), 2, 3, 4), list[torch.Tensor]()
    watched = model.blocks[1][0].weight
    if dist.get_rank() == 0:
        watched.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.to_local().clone()))
    trains_alike(model, Tower(torch.float32), tolerance=1e-5)
    assert not seen or torch.equal(seen[-1], watched.grad.to_local())


def joined_modules_may_have_nothing_on_some_ranks_that_nobody_sets_to_zero() -> None:
    """Give each rank's optimizer only parameters of which the rank has a shard."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first, self.last = nn.Linear(5, 2), nn.Linear(2, 9)
            self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return forward_in(self, list(self.blocks), inputs)

    model, alone = with_joined(sharded(Small()), 2, 3, 4), Small()
    here = [parameter for parameter in model.parameters() if parameter.to_local().numel()]
    optimizers = [torch.optim.SGD(parameters, lr=0.05) for parameters in (here, alone.parameters())]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, dist.get_rank(), step).backward()
        torch.stack([loss(alone, rank, step) for rank in ranks()]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(found.detach()), wanted.detach(), rtol=1e-5, atol=1e-5)


def what_a_failed_backward_pass_has_scattered_is_there_before_an_update() -> None:
    if not hasattr(FSDPModule, "reset_iter_state"):
        return

    def wrap(model: nn.Module, *, attach: bool) -> nn.Module:
        return with_joined(sharded(model), 2, 3, 4) if attach else sharded(model, attach=False)

    models: list[Any] = [wrap(Tower(torch.float32), attach=attach) for attach in (True, False)]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            block = model.blocks[step % 4]
            fails = block.register_forward_hook(lambda module, args, output: Raises.apply(output)) if step % 2 else None
            with suppress(ValueError):
                loss(model, dist.get_rank(), step).backward()
            optimizer.step()
            if fails is not None:
                fails.remove()
                model.reset_iter_state()
    for found, wanted in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(whole(found.detach()), whole(wanted.detach()), rtol=1e-5, atol=1e-5)


def a_forward_pass_without_a_backward_pass_leaves_sharded_parameters() -> None:
    """Run a forward pass for logging, while modules keep their parameters gathered."""
    model, alone = keeping(sharded_with_memory(Tower())), Tower()
    losses = []

    def log_a_loss() -> None:
        losses[:] = [loss(model, dist.get_rank(), 77)]
        model.reshard()  # because the root stays gathered
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.05) for each in (model, alone)]
        torch.testing.assert_close(*map(whole, norms))

    trains_alike(model, alone, before_update=log_a_loss)


def updates_between_forward_and_backward_pass_are_seen_as_without_sirtaki() -> None:
    def wrap(model: nn.Module, *, attach: bool) -> nn.Module:
        return keeping(sharded_with_memory(model)) if attach else sharded(model, attach=False)

    models = [wrap(Tower(), attach=attach) for attach in (True, False)]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss(model, dist.get_rank(), 0).backward()
        for step in range(3):
            found = loss(model, dist.get_rank(), step)
            optimizer.step()
            optimizer.zero_grad()
            found.backward()
    for found, wanted in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(whole(found.grad), whole(wanted.grad))


def parts_that_are_called_alone_keep_nothing() -> None:
    model, alone = keeping(sharded_with_memory(Tower())), Tower()

    def evaluate_a_part() -> None:
        with torch.no_grad():
            model.blocks[0](torch.ones(2, 33, dtype=torch.float64))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

    trains_alike(model, alone, before_update=evaluate_a_part, clip=0.05)


def parameters_may_be_sharded_in_another_dimension() -> None:
    def columns(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % len(ranks()) == 0 else None

    trains_alike(keeping(sharded_with_memory(Tower(), shard_placement_fn=columns)), Tower())


def forward_in(model: nn.Module, order: list[nn.Module], inputs: torch.Tensor) -> torch.Tensor:
    hidden = model.first(inputs)
    for block in order:
        hidden = hidden + block(hidden)
    return model.last(hidden)


def knobs_of_the_user_stay() -> None:
    model = sharded(Tower(torch.float32))
    blocks: list[Any] = list(model.blocks)
    for n, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[n + 1 : n + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, n - 2) : n][::-1])
    if hasattr(model, "set_separate_reduce_scatter_group"):
        model.set_separate_reduce_scatter_group(True)
    if hasattr(model, "set_gradient_divide_factor"):
        model.set_gradient_divide_factor(float(len(ranks())))
    trains_alike(model, Tower(torch.float32), tolerance=1e-5)
    assert len(blocks[0]._get_fsdp_state()._states_to_forward_prefetch) == 2


def collectives_of_the_user_may_come_late() -> None:
    class Own:
        def allocate(self, size: tuple[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

    class Gather(Own):
        def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **other: Any) -> None:
            dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group=group)

    class Scatter(Own):
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, **other: Any
        ) -> None:
            dist.all_reduce(input_tensor, group=group)
            output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
            if op == dist.ReduceOp.AVG:
                output_tensor /= group.size()

    model = sharded_with_memory(Tower(torch.float32))
    model.blocks[0].set_custom_all_gather(Gather())
    model.blocks[1].set_custom_reduce_scatter(Scatter())
    trains_alike(model, Tower(torch.float32), tolerance=1e-5)


def scatters_have_a_group_of_their_own_whatever_other_groups_ranks_are_in() -> None:
    if CARRIES:
        return
    dist.new_group([0])
    for _ in range(4):  # also in place of an ended search
        model = keeping(sharded_with_memory(Tower()))
        trains_alike(model, Tower())
        found = fsdp.attached(model)
        assert found is not None
        found.run(ShardKnobs(streams=1))
        found.pytorch.release_unused(found.knobs)


def settings_are_agreed_on_by_all_ranks_where_blocks_are_sharded_between_more_than_the_rest() -> None:
    """Shard the root's layers within each half of the ranks. The halves measure different best settings."""
    if (size := len(ranks())) % 2 or size == 2:
        return
    mesh = init_device_mesh(DEVICE, (2, size // 2), mesh_dim_names=("replicate", "shard"))
    model, seen, now_s = Tower(blocks=2), list[str](), 0.0
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh(DEVICE, (size,)))
    fully_shard(model, mesh=mesh)
    os.environ["SIRTAKI_FSDP_MEMORY"] = "1GiB"
    fsdp.attach(model, carries=None if CARRIES else False)
    del os.environ["SIRTAKI_FSDP_MEMORY"]

    def passes() -> None:
        nonlocal now_s
        seen.append(fsdp.describe(model))
        now_s += 1.0 if ("kept" in seen[-1]) == (dist.get_rank() < size // 2) else 2.0

    set_clock(model, lambda: now_s)
    try:
        trains_alike(model, Tower(blocks=2), steps=26, between=passes)
    finally:
        target.time = device.time = time
    every: list[list[str]] = [[]] * size
    dist.all_gather_object(every, seen)
    assert all(each == seen for each in every), every


def hooks_see_gradients_as_soon_as_they_are_told() -> None:
    model, alone = sharded(Tower(torch.float32)), Tower(torch.float32)
    seen: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda each, n=name: seen.__setitem__(n, each.grad.to_local().clone())
        )
    loss(model, dist.get_rank(), 0).backward()
    del alone
    for name, parameter in model.named_parameters():
        assert torch.equal(seen[name], parameter.grad.to_local()), name


def compiled_models_train_as_in_one_process() -> None:
    model = sharded(Tower(torch.float32, blocks=2))
    for block in model.blocks:
        block.compile(backend="aot_eager")
    trains_alike(model, Tower(torch.float32, blocks=2), tolerance=1e-5, steps=3)


def packed_shards_train_nearly_as_exact_ones_and_are_the_same_on_all_ranks() -> None:
    def wide() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))

    over_sockets = os.environ.get("SIRTAKI_TRANSPORT") == "gloo" or "SIRTAKI_LOCAL_SIZE" in os.environ
    for gathers, scatters in itertools.product((Compression.int8, Compression.fp8, Compression.none), repeat=2):
        model, alone = wide(), wide()
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        fsdp.attach(model, gathers=gathers, scatters=scatters)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (model, alone)]
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(batch(dist.get_rank(), step, 8, 64, dtype=torch.float32)).square().mean().backward()
            losses = [alone(batch(rank, step, 8, 64, dtype=torch.float32)).square().mean() for rank in ranks()]
            torch.stack(losses).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        exact = not over_sockets or (gathers is scatters is Compression.none)
        for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            lost = float((whole(found.detach()) - wanted).detach().norm() / wanted.detach().norm())
            assert lost < (1e-5 if exact else 0.02), (gathers, scatters, lost)
        outputs = [torch.empty(8, 64) for _ in ranks()]
        dist.all_gather(outputs, model(batch(0, 99, 8, 64, dtype=torch.float32)).detach())
        assert all(torch.equal(outputs[0], each) for each in outputs)


def the_tuner_does_what_the_controller_of_all_tuning_expects() -> None:
    model = sharded(Tower())
    found = fsdp.attached(model)
    if found is None or found.connections.control is None or len(ranks()) != 2:
        return
    loss(model, dist.get_rank(), 0).backward()  # shows in which order modules are used
    control = found.connections.control

    def run(size: int, on_rank: Callable[[ControlPlane], Any]) -> list[Any]:
        return control.all_gather(on_rank(control))

    for check in TUNABLE_CHECKS:
        check(lambda _: target.ShardTarget(found, Settings(registry=REGISTRY_OFF, warmup_iterations=60)), run)


def models_that_are_gone_hold_nobody_up() -> None:
    begun_s = time.monotonic()
    for _ in range(4):
        model = sharded(Tower(torch.float32, blocks=1))
        loss(model, dist.get_rank(), 0).backward()
        del model
        if dist.get_rank() == 0:  # the remaining ranks do it later, if at all
            gc.collect()
    assert time.monotonic() - begun_s < 15.0  # each model that held the ranks up would take 5 s


def what_does_not_fit_is_refused() -> None:
    model = sharded(Tower(), attach=False)
    raises(ConfigError, "must be Compression.int8", lambda: fsdp.attach(model, gathers=Compression.topk()))
    packing = {"scatters": Compression.int8} if dist.get_rank() == 0 else {}
    raises(MismatchError, "how shards are packed", lambda: fsdp.attach(model, **packing))
    for wrong in ({"carries": False, "gathers": Compression.int8}, {"carries": dist.get_rank() > 0}):
        raises((ConfigError, MismatchError), "carries", functools.partial(fsdp.attach, model, **wrong))
    for other, says in ((nn.Linear(3, 3), "is not prepared for fsdp.attach"), (sharded(Tower()), "attached already")):
        raises(ConfigError, says, functools.partial(fsdp.attach, other))
    raises(MismatchError, "the sharded model", lambda: sharded(Tower(blocks=1 + (dist.get_rank() == 0))))


CASES = cases(globals())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(CASES)
    dist.destroy_process_group()
