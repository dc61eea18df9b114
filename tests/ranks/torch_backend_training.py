"""Training over the backend "sirtaki", compared with one process. Started by test_process_group.py."""

import copy
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conformance.training import main
from rank_jobs import cases
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

import sirtaki.torch.distributed  # noqa: F401
from sirtaki.torch.ddp import IdleReducer


def me() -> int:
    return dist.get_rank()


def ranks() -> range:
    return range(dist.get_world_size())


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 170), nn.LayerNorm(170), nn.Linear(170, 3)
    ).double()


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7919 * step + rank)
    return model(torch.randn(5, 6, generator=generator, dtype=torch.float64)).square().mean()


def trains_alike(wrapped: nn.Module, full: Callable[[], list[torch.Tensor]]) -> None:
    """Compare each step with a model that gets all ranks' batches."""
    alone = network()
    ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (wrapped, alone))
    for step in range(4):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        loss(wrapped, me(), step).backward()
        sum(loss(alone, rank, step) for rank in ranks()).div(len(ranks())).backward()
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.05) for model in (wrapped, alone)]
        torch.testing.assert_close(*(getattr(norm, "full_tensor", lambda norm=norm: norm)() for norm in norms))
        for optimizer in (ours, theirs):
            optimizer.step()
        for found, wanted in zip(full(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, wanted.detach(), rtol=1e-11, atol=1e-11)


def ddp_trains_as_one_process() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.05}):
        model = network()
        trains_alike(
            DistributedDataParallel(model, **options), lambda model=model: [p.detach() for p in model.parameters()]
        )


class Branches(nn.Module):
    """A model whose caller selects the parameters of a pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.parts = nn.ModuleList(nn.Linear(6, 3) for _ in range(3)).double()

    def forward(self, inputs: torch.Tensor, used: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        return sum(self.parts[number](inputs) for number in used)


ATTACHES = os.environ.get("SIRTAKI_ATTACH") != "0" and os.environ.get("WORLD_SIZE") != "1"

_gloo: dist.ProcessGroup | None = None


Play = Callable[[DistributedDataParallel, torch.optim.Optimizer], None]


def beside_gloo(play: Play, **options: object) -> nn.Module:
    """Train a model over the backend and one over Gloo, and compare. Return the first one."""
    global _gloo
    _gloo = _gloo or dist.new_group(backend="gloo")
    models = [
        DistributedDataParallel(Branches(), process_group=group, **options) for group in (dist.group.WORLD, _gloo)
    ]
    for model in models:
        play(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for found, wanted in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    assert not isinstance(models[1].reducer, IdleReducer)
    return models[0]


def batch(step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(31 * step + me()), dtype=torch.float64)


def steps(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, used: Callable = lambda step: (0, 1, 2)):
    """Train for some steps, of which some have passes without synchronisation, and are attached in the middle."""
    for step in range(7):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with model.no_sync() if step in (1, 2, 5) else nullcontext():
            model(batch(step), used(step)).square().mean().backward()
        if step in (1, 2, 5):
            model(batch(100 + step), used(step)).square().mean().backward()
        optimizer.step()


def ddp_models_attach_themselves() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        model = beside_gloo(steps, **options)
        assert isinstance(model.reducer, IdleReducer) == ATTACHES, options
    model = beside_gloo(
        lambda *each: steps(*each, used=lambda step: (0, (me() + step) % 3)), find_unused_parameters=True
    )
    assert isinstance(model.reducer, IdleReducer) == ATTACHES


def one_rank_may_look_at_a_model_first() -> None:
    def play(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2 if me() == 0 else 0):
            model(batch(0))
        with torch.no_grad():
            model(batch(1))
        steps(model, optimizer)
        twin = copy.deepcopy(model.module)
        assert len(list(twin.parameters())) == 6

    assert isinstance(beside_gloo(play).reducer, IdleReducer) == ATTACHES


def one_rank_may_look_at_a_model_while_another_one_trains() -> None:
    def play(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        other = DistributedDataParallel(Branches(), process_group=model.process_group)
        against = torch.optim.SGD(other.parameters(), lr=0.1)
        if me() == 0:
            other(batch(0))
        steps(model, optimizer)
        steps(other, against)
        if model.process_group is dist.group.WORLD:
            assert isinstance(other.reducer, IdleReducer) == ATTACHES

    assert isinstance(beside_gloo(play).reducer, IdleReducer) == ATTACHES


def one_rank_may_look_at_a_model_between_steps_that_others_do_not_wait_for() -> None:
    def play(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            optimizer.zero_grad()
            model(batch(step), (step % 3,)).square().mean().backward()
            optimizer.step()
            if me() == 0:
                model(batch(100 + step))
            dist.barrier()

    assert isinstance(beside_gloo(play, find_unused_parameters=True).reducer, IdleReducer) == ATTACHES


def two_ddp_models_attach_themselves_in_turns() -> None:
    def play(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        other = DistributedDataParallel(Branches(), process_group=model.process_group)
        against = torch.optim.SGD(other.parameters(), lr=0.1)
        for step in range(5):
            against.zero_grad()
            (other(batch(step)) - model(batch(step)).detach()).square().mean().backward()
            against.step()
            optimizer.zero_grad()
            # Adds to the other model's gradients, too.
            model(other(batch(step)).repeat(1, 2)).square().mean().backward()
            optimizer.step()

    assert isinstance(beside_gloo(play).reducer, IdleReducer) == ATTACHES


def ranks_that_join_from_the_beginning_are_attached_afterwards() -> None:
    def play(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        with model.join():
            for step in range(2 * me()):  # rank 0 has no data
                optimizer.zero_grad()
                model(batch(step)).square().mean().backward()
                optimizer.step()
        for parameter in model.parameters():  # ranks that have joined have not stepped
            dist.broadcast(parameter.data, len(ranks()) - 1)
        optimizer.state.clear()
        steps(model, optimizer)

    assert isinstance(beside_gloo(play).reducer, IdleReducer) == ATTACHES


def parameters_may_be_frozen_in_the_first_step() -> None:
    def play(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        for step in range(6):
            model.module.parts[0].requires_grad_(step >= 2)
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()

    assert isinstance(beside_gloo(play, find_unused_parameters=True).reducer, IdleReducer) == ATTACHES


def attached_models_may_join() -> None:
    def play(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        steps(model, optimizer)
        with model.join():
            for step in range(1 + me()):
                optimizer.zero_grad()
                model(batch(step)).square().mean().backward()
                optimizer.step()

    assert isinstance(beside_gloo(play).reducer, IdleReducer) == ATTACHES


def models_with_a_communication_hook_keep_ddp() -> None:
    def play(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)
        steps(model, optimizer)

    def play_built_in(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        steps(model, optimizer)

    for each in (play, play_built_in):
        assert not isinstance(beside_gloo(each).reducer, IdleReducer)


def models_may_be_compiled_with_ddp() -> None:
    def play(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        compiled = torch.compile(model, backend="eager")
        for step in range(4):
            optimizer.zero_grad()
            compiled(batch(step)).square().mean().backward()
            optimizer.step()

    with warnings.catch_warnings():  # because PyTorch warns
        warnings.simplefilter("ignore")
        assert isinstance(beside_gloo(play).reducer, IdleReducer) == ATTACHES


def optimizer_states_may_be_sharded_under_ddp() -> None:
    with warnings.catch_warnings():  # because PyTorch warns of its TorchScript functions
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    for as_views in (False, True):
        model, alone = network(), network()
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_views)
        ours = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.Adam, parameters_as_bucket_view=as_views, lr=0.01
        )
        theirs = torch.optim.Adam(alone.parameters(), lr=0.01)
        for step in range(4):
            for optimizer in (ours, theirs):
                optimizer.zero_grad()
            loss(wrapped, me(), step).backward()
            sum(loss(alone, rank, step) for rank in ranks()).div(len(ranks())).backward()
            for optimizer in (ours, theirs):
                optimizer.step()
            for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        ours.consolidate_state_dict(to=0)
        if me() == 0:
            assert len(ours.state_dict()["state"]) == len(list(alone.parameters()))


CASES = cases(globals())


def fsdp_trains_as_one_process() -> None:
    sharded = fully_sharded(network())
    trains_alike(sharded, lambda: [p.full_tensor().detach() for p in sharded.parameters()])


def fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch 2.5
        from torch.distributed._composable.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (len(ranks()),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def checkpoints_are_saved_and_loaded() -> None:
    folder = [tempfile.mkdtemp() if me() == 0 else ""]
    dist.broadcast_object_list(folder)
    saved, loaded = fully_sharded(network()), fully_sharded(copy.deepcopy(network()).requires_grad_(True))
    for parameter in loaded.parameters():
        parameter.data.zero_()
    dcp.save({"model": saved.state_dict()}, checkpoint_id=Path(folder[0]) / "one")
    state = {"model": loaded.state_dict()}
    dcp.load(state, checkpoint_id=Path(folder[0]) / "one")
    loaded.load_state_dict(state["model"])
    for found, wanted in zip(loaded.parameters(), network().parameters(), strict=True):
        assert torch.equal(found.full_tensor(), wanted)


if TorchVersion(torch.__version__) >= "2.5":  # `fully_shard` of PyTorch 2.4 wants CUDA's streams
    CASES += cases(globals())


if __name__ == "__main__":
    dist.init_process_group("sirtaki")
    main(CASES)
    dist.destroy_process_group()
