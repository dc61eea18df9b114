"""Training on fake GPUs that check the order of streams, see fakes/cuda.py. Started by test_on_fake_gpus.py.

Each rank has a GPU, and NCCL reduces over Gloo. Each case trains as a user does and compares with one process.
"""

import copy
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from conformance.stream_order import ITERATIONS, Training
from conformance.training import assert_same_parameters, batch, main, sgd
from fakes.cuda import FakeCuda, OnStream
from rank_jobs import cases
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sirtaki.torch as hvd
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import Algorithm
from sirtaki.engine import job
from sirtaki.engine.tuning import plans
from sirtaki.torch import ddp, fsdp

# Small sizes of the contention probe, because there is no GPU to fill.
plans.MATRIX, plans.UNIT_BYTES = 64, (1 << 14, 1 << 16)
CUDA = FakeCuda(index=1)
STEPS, WARM_UP = 9, 5
TUNED = os.environ.get("SIRTAKI_WARMUP_ITERATIONS") != "0"
"""Whether settings are tried. The host waits for the GPU when a setting replaces another one."""


def model_of(*sizes: int) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(here, there, dtype=torch.float64) for here, there in itertools.pairwise(sizes)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).to("cuda")


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step, 4, 10).to("cuda")).square().mean()


def trains_as_in_one_process(
    model: nn.Module,
    wrapped: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Train and compare with one process. Nothing may be unordered, and after the first steps the host never waits."""
    alone = copy.deepcopy(model)
    reference = sgd(alone)
    batches = [[batch(rank, step, 4, 10).to("cuda") for rank in range(hvd.size())] for step in range(STEPS)]
    for step, inputs in enumerate(batches):
        CUDA.steady = step >= WARM_UP and not TUNED
        optimizer.zero_grad()
        wrapped(inputs[hvd.rank()]).square().mean().backward()
        optimizer.step()
        CUDA.steady = False
        CUDA.next_iteration()
    for inputs in batches:
        reference.zero_grad()
        total = torch.stack([alone(each).square().mean() for each in inputs]).mean()
        total.backward()
        reference.step()
    for param in model.parameters():
        param.grad  # noqa: B018  # with overlap_forward the last update is made when a parameter is read
    assert_same_parameters(model, alone, 1e-11)
    CUDA.check()


def an_optimizer_trains() -> None:
    model = model_of(10, 33, 17, 3)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    trains_as_in_one_process(model, model, optimizer)
    optimizer.close()


def gradients_may_be_computed_on_several_streams() -> None:
    """Two layers use a second and a third stream, the remaining layers the default stream."""
    model = model_of(10, 33, 17, 3, 5)
    streams = [CUDA.make_stream(), CUDA.make_stream()]

    def wrapped(inputs: torch.Tensor) -> torch.Tensor:
        hidden = OnStream.apply(model[:2](inputs), CUDA, streams[0])
        hidden = OnStream.apply(model[2:6](hidden), CUDA, streams[1])
        return OnStream.ends_with_pass(model[6:](hidden), CUDA)

    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    trains_as_in_one_process(model, wrapped, optimizer)
    optimizer.close()


def two_optimizers_train() -> None:
    model = model_of(10, 33, 17, 3)
    parts = [model[:2], model[2:]]
    optimizers = [hvd.DistributedOptimizer(sgd(part), named_parameters=part.named_parameters()) for part in parts]
    alone = copy.deepcopy(model)
    reference = sgd(alone)
    for step in range(STEPS):
        for each in (*optimizers, reference):
            each.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        sum(loss_of(alone, rank, step) for rank in range(hvd.size())).div(hvd.size()).backward()
        for each in (*optimizers, reference):
            each.step()
        CUDA.next_iteration()
    assert_same_parameters(model, alone, 1e-11)
    CUDA.check()
    for each in optimizers:
        each.close()


def updates_overlap_with_the_forward_pass() -> None:
    model = model_of(10, 33, 17, 3)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), overlap_forward=True)
    trains_as_in_one_process(model, model, optimizer)
    optimizer.close()


def a_gradient_that_is_replaced_and_clipped_after_the_reduction_counts() -> None:
    model = model_of(10, 33, 3)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    alone = copy.deepcopy(model)
    reference = sgd(alone)
    for step in range(STEPS):
        for each in (optimizer, reference):
            each.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.synchronize()
        sum(loss_of(alone, rank, step) for rank in range(hvd.size())).div(hvd.size()).backward()
        for one in (model, alone):
            nn.utils.clip_grad_norm_(one.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        reference.step()
        CUDA.next_iteration()
    assert_same_parameters(model, alone, 1e-11)
    CUDA.check()
    optimizer.close()


def a_ddp_model_is_attached() -> None:
    model = model_of(10, 33, 17, 3)
    wrapped = DistributedDataParallel(model)
    ddp.attach(wrapped)
    trains_as_in_one_process(model, wrapped, sgd(model))


def a_sharded_model_is_attached() -> None:
    model = model_of(10, 33, 17, 3)
    alone = copy.deepcopy(model)
    mesh = init_device_mesh("cuda", (hvd.size(),))
    torch.cuda.set_device(CUDA.index)  # because the mesh selects a GPU by LOCAL_RANK
    for part in model:
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp.attach(model)
    optimizer, reference = sgd(model), sgd(alone)
    for step in range(STEPS):
        for each in (optimizer, reference):
            each.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        sum(loss_of(alone, rank, step) for rank in range(hvd.size())).div(hvd.size()).backward()
        optimizer.step()
        reference.step()
        CUDA.next_iteration()
    for param, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), wanted.data, rtol=1e-11, atol=1e-11)
    CUDA.check()


def eager_operations_give_what_they_give_on_the_host() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.arange(6.0, device="cuda") + rank
    everyones = [torch.arange(6.0) + other for other in range(size)]
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum).cpu(), sum(everyones))
    for found in hvd.grouped_allreduce([mine, mine[:2]], op=hvd.Sum):
        assert torch.equal(found.cpu(), sum(everyones)[: found.numel()])
    assert torch.equal(hvd.allgather(mine).cpu(), torch.cat(everyones))
    assert torch.equal(hvd.broadcast(mine, size - 1).cpu(), everyones[-1])
    assert hvd.allreduce(mine).device == torch.device("cuda", 1)
    handles = [hvd.allreduce_async(mine * factor, op=hvd.Sum) for factor in (1.0, 2.0)]  # run by the engine's thread
    for factor, handle in enumerate(handles, 1):
        assert torch.equal(hvd.synchronize(handle).cpu(), factor * sum(everyones))
    CUDA.check()


CASES = cases(globals())


def between_nodes() -> None:
    """Four ranks act as two nodes, so that shares of a unit are sent between nodes, and all buffers are aligned."""
    control = ControlPlane(job.current().control.duplicate(), local_size=2)
    training = Training(CUDA, control=control, algorithm=Algorithm.HIERARCHICAL)
    stream = CUDA.make_stream()
    training.run(lambda index: stream, CUDA.current_stream())
    assert training.params[2][0, 0].item() == ITERATIONS * 3.0 * 0.5 * hvd.size()
    training.close()
    CUDA.check()


NODES: list[Any] = [between_nodes]


if __name__ == "__main__":
    with CUDA:
        dist.init_process_group("gloo")
        main([*CASES, *NODES])
        dist.destroy_process_group()
