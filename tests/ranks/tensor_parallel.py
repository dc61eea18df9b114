"""Training with DTensor parameters, on a grid of two by two ranks, equals training in one process.

Started by test_tensor_parallel.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from conformance.training import batch, main, raises
from rank_jobs import cases
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import sirtaki.torch as hvd
from sirtaki.errors import ConfigError, GradientError


@functools.cache
def grid() -> tuple[DeviceMesh, hvd.ProcessSet]:
    """Return the mesh (data-parallel × tensor-parallel), and the process set of this rank's replicas. Collective."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return mesh, [hvd.add_process_set(ranks) for ranks in mesh.mesh.T.tolist()][mesh.get_local_rank("tensor")]


class Net(nn.Module):
    """A model whose norm has partial gradients, which the tensor-parallel ranks have not summed yet."""

    def __init__(self, spares: bool = True) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 5)
        if spares:
            self.spare = nn.Linear(12, 20)
        self.double()

    def forward(self, data: torch.Tensor, spare: bool = False) -> torch.Tensor:
        hidden = (self.spare if spare else self.up)(self.norm(data))
        result: torch.Tensor = self.down(hidden.tanh())
        return result


def parallel(model: nn.Module) -> nn.Module:
    mesh, _ = grid()
    up = functools.partial(ColwiseParallel, input_layouts=Shard(0))
    plan = {"norm": SequenceParallel(sequence_dim=0), "up": up(), "spare": up(), "down": RowwiseParallel()}
    there = {name: how for name, how in plan.items() if hasattr(model, name)}
    return parallelize_module(model, mesh["tensor"], there)  # type: ignore[arg-type]


def trains_as_in_one_process(
    *,
    passes: int = 1,
    steps: int = 6,
    spare: Callable[[int], bool] = lambda step: False,
    between: Callable[[nn.Module, torch.optim.Optimizer, int], None] = lambda model, optimizer, step: None,
    late: bool = False,
    spares: bool = True,
    tolerance: float = 1e-12,
    **options: Any,
) -> None:
    mesh, replicas = grid()
    model, alone = parallel(Net(spares)), Net(spares)
    alike: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    for one in (model, alone):
        params = [param for name, param in one.named_parameters() if not (late and name.startswith("spare"))]
        alike.append((one, torch.optim.SGD(params, lr=0.1, momentum=0.9)))
    named = [item for item in model.named_parameters() if not (late and item[0].startswith("spare"))]
    options = {"backward_passes_per_step": passes, "process_set": replicas, **options}
    optimizer = hvd.DistributedOptimizer(alike[0][1], named, **options)
    if late:
        for one, its in ((model, optimizer), (alone, alike[1][1])):
            its.add_param_group({"params": list(one.spare.parameters()), "lr": 0.05})  # type: ignore[union-attr]
    row, column = mesh.get_local_rank("data"), mesh.get_local_rank("tensor")
    for step in range(steps):
        for turn in range(passes):
            data = [batch(rank, passes * step + turn, 6, 12) for rank in range(2)]
            (model(data[row].chunk(2)[column], spare(step)) ** 2).mean().backward()
            (sum((alone(one, spare(step)) ** 2).mean() for one in data) / 2).backward()  # type: ignore[union-attr]
        for one, its in ((model, optimizer), (alone, alike[1][1])):
            between(one, its, step)
            for param in one.parameters() if one is alone else ():
                if param.grad is None and param.requires_grad:
                    param.grad = torch.zeros_like(param)  # as a DistributedOptimizer does
            its.step()
            its.zero_grad(set_to_none=step % 2 == 0)
        for (name, param), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert isinstance(param, DTensor)
            whole = param.full_tensor()
            close = torch.allclose(whole, wanted, rtol=tolerance, atol=tolerance)
            assert close, f"{name} after step {step}: {(whole - wanted).abs().max()}"


def shards_train_as_in_one_process() -> None:
    trains_as_in_one_process()
    trains_as_in_one_process(passes=3)


def gradients_are_clipped_by_their_norm_over_all_shards() -> None:
    def clip(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    trains_as_in_one_process(between=clip, spares=False)


def parameters_may_have_no_gradient_or_come_later() -> None:
    trains_as_in_one_process(spare=lambda step: step % 3 == 1)
    trains_as_in_one_process(late=True, spare=lambda step: step > 2)


def parameters_may_be_frozen_and_thawed() -> None:
    def thaw(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for param in model.up.parameters():  # type: ignore[union-attr]
            param.requires_grad_(step >= 2)

    trains_as_in_one_process(between=thaw)


def gradients_may_travel_in_groups_and_in_fewer_bytes() -> None:
    trains_as_in_one_process(groups=2)
    trains_as_in_one_process(compression=hvd.Compression.bf16, tolerance=0.05)
    trains_as_in_one_process(compression=hvd.Compression.int8, tolerance=0.05)


def a_gradient_that_is_written_too_early_is_told() -> None:
    _, replicas = grid()
    model = parallel(Net())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=replicas
    )

    def one_step(*, edits: bool) -> None:
        # Without a gradient of `spare`, so that step() reduces.
        model(batch(dist.get_rank(), 0, 3, 12)).sum().backward()
        if edits:
            gradient = model.up.weight.grad  # type: ignore[union-attr]
            assert isinstance(gradient, DTensor)
            gradient.mul_(2)
        optimizer.step()
        optimizer.zero_grad()

    one_step(edits=False)
    raises(GradientError, "was written before it was reduced", lambda: one_step(edits=True))


def what_does_not_fit_is_refused() -> None:
    mesh, replicas = grid()
    model = parallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrap = functools.partial(hvd.DistributedOptimizer, optimizer, model.named_parameters(), process_set=replicas)
    raises(ConfigError, "some of its parameters are DTensors", lambda: wrap(overlap_forward=True))
    whole = distribute_tensor(torch.ones(4, 3), mesh["tensor"], [Replicate()])
    for act in (
        lambda: hvd.allreduce(whole, process_set=replicas),
        lambda: hvd.broadcast_parameters(model.state_dict(), root_rank=0),
        lambda: hvd.LocalSGD(model, optimizer, sync_every=2, process_set=replicas),
    ):
        raises(ConfigError, "DTensor", act)


CASES = cases(globals())


if __name__ == "__main__":
    dist.init_process_group("sirtaki")
    main(CASES)
    dist.destroy_process_group()
