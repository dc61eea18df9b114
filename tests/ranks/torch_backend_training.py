"""What trains over the backend "sirtaki", against one process. Started by test_process_group.py."""

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conformance.training import main
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sirtaki.torch.distributed  # noqa: F401


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
    """Compares each step with a model that sees all ranks' batches."""
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


def optimizer_states_may_be_sharded_under_ddp() -> None:
    with warnings.catch_warnings():  # of its own functions in TorchScript
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


def fsdp_trains_as_one_process() -> None:
    sharded = fully_sharded(network())
    trains_alike(sharded, lambda: [p.full_tensor().detach() for p in sharded.parameters()])


def fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch < 2.6
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


CASES = (
    ddp_trains_as_one_process,
    optimizer_states_may_be_sharded_under_ddp,
    fsdp_trains_as_one_process,
    checkpoints_are_saved_and_loaded,
)


if __name__ == "__main__":
    dist.init_process_group("sirtaki")
    main(CASES)
    dist.destroy_process_group()
