"""Training on fake GPUs that check the order of streams, see fakes/cuda.py. Started by test_on_fake_gpus.py.

Each rank has a GPU, and NCCL reduces over Gloo. Each case trains as a user does and compares with one process.
"""

import copy
import gc
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from conformance import sharded
from conformance.compressed_units import check_units
from conformance.stream_order import ITERATIONS, Training
from conformance.training import assert_equal_on_all_ranks, assert_same_parameters, batch, main, raises, sgd
from fakes.cuda import FakeCuda, GraphedLinear, OnStream, mark_empty_on_gpu
from rank_jobs import cases
from ranks.compressed import SCHEMES, Given, owed_by
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sirtaki.torch as hvd
from sirtaki import attach
from sirtaki.comm.collectives import engine
from sirtaki.comm.compress import Blockwise
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.device import cuda_device, nccl_owners
from sirtaki.comm.nccl_streams.transport import find_nccl
from sirtaki.comm.plan import Algorithm
from sirtaki.comm.router import Router
from sirtaki.comm.transports.contract import HALF_DTYPES
from sirtaki.engine import job
from sirtaki.engine.tuning import plans
from sirtaki.errors import ConfigError
from sirtaki.torch import collectives, ddp

# Small sizes of the contention probe, because there is no GPU to fill.
plans.MATRIX, plans.UNIT_BYTES = 64, (1 << 14, 1 << 16)
CUDA = FakeCuda(index=1)
STEPS, WARM_UP = 9, 5
STAGED = os.environ.get("SIRTAKI_TRANSPORT") == "staged"
"""Whether Sirtaki copies units through host memory. This does not change sharded models."""

TUNED = os.environ.get("SIRTAKI_WARMUP_ITERATIONS") != "0"
"""Whether settings are tried. The host waits for the GPU when a setting replaces another one."""


all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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


def scaled_losses_skip_the_same_steps_on_all_ranks() -> None:
    """Two optimizers, the second one without gradients in odd steps, and an overflow on one rank.

    With fused optimizers, `GradScaler` does not make the host wait, and Sirtaki neither. Else it waits once for each.
    """
    for fused in (False, True):
        parts = nn.ModuleList([model_of(10, 33, 3), model_of(10, 17, 3)])
        alone = copy.deepcopy(parts)

        def makes(part: nn.Module, fused: bool = fused) -> torch.optim.Optimizer:
            return torch.optim.Adam(part.parameters(), lr=0.01, fused=fused)

        optimizers = [hvd.DistributedOptimizer(makes(part)) for part in parts]
        references = [makes(part) for part in alone]
        scaler, expected = (torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3) for _ in range(2))

        def loss(parts: nn.ModuleList, rank: int, step: int) -> torch.Tensor:
            bad = math.inf if step == 6 and rank == hvd.size() - 1 else 1.0
            return sum(loss_of(part, rank, step) for part in parts[: 2 - step % 2]) * bad

        for step in range(STEPS):
            for each in optimizers:
                each.zero_grad()
            value = loss(parts, hvd.rank(), step)  # copies its batch to the GPU
            CUDA.steady = step >= WARM_UP and not TUNED
            scaler.scale(value).backward()
            for each in optimizers:
                scaler.step(each)
            scaler.update()
            CUDA.steady = False
            CUDA.next_iteration()
            for each in references:
                each.zero_grad(set_to_none=False)
            total = sum(loss(alone, rank, step) for rank in range(hvd.size())).div(hvd.size())
            expected.scale(total).backward()
            for param in alone.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            for each in references:
                expected.step(each)
            expected.update()
        # PyTorch's fused optimizers take the device of `found_inf` from C++, for which the fake GPU is the CPU.
        own = "copy_ between the GPU and pageable" if fused else "_local_scalar_dense"
        CUDA.blocking[:] = [each for each in CUDA.blocking if not each.startswith(own)]
        CUDA.check()
        assert scaler.state_dict() == expected.state_dict()
        assert_same_parameters(parts, alone, 1e-6)
        for each in optimizers:
            each.close()


def gradients_in_the_memory_of_a_cuda_graph_train() -> None:
    """The next replay writes to the memory that is copied into the flat buffers now."""
    model = model_of(10, 33, 17, 3)
    graphs = [GraphedLinear(layer, 4) for layer in model if isinstance(layer, nn.Linear)]

    def graphed(inputs: torch.Tensor) -> torch.Tensor:
        for graph in graphs:
            inputs = graph(inputs).tanh()
        return inputs

    graphed(batch(0, 0, 4, 10).to("cuda")).sum().backward()
    assert model[0].weight.grad.data_ptr() == graphs[0].gradients[0].data_ptr()
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    trains_as_in_one_process(model, graphed, optimizer)
    optimizer.close()


def captured_steps_are_refused() -> None:
    model, plain = model_of(10, 33, 3), model_of(10, 33, 3)
    wrapped = DistributedDataParallel(model)
    ddp.attach(wrapped)
    optimizer = hvd.DistributedOptimizer(sgd(plain), named_parameters=plain.named_parameters())
    acts = (
        lambda: loss_of(wrapped, hvd.rank(), 0).backward(),
        lambda: loss_of(plain, hvd.rank(), 0).backward(),
        optimizer.synchronize,
        optimizer.step,
    )
    for act in acts:
        CUDA.initialized, CUDA.capturing = True, threading.current_thread()
        try:
            raises(ConfigError, "cannot be captured in a CUDA graph", act)
        finally:
            CUDA.initialized, CUDA.capturing = False, None
    plain.zero_grad()
    trains_as_in_one_process(plain, plain, optimizer)
    optimizer.close()
    model.zero_grad()
    trains_as_in_one_process(model, wrapped, sgd(model))


class GivenOnGpu(Given):
    """`Given` with parameters on the GPU. Its gradients are copied there before the steps."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.to("cuda")
        params = list(self.parameters())
        mark_empty_on_gpu(params)
        self.truth = [
            [
                [torch.empty_like(param.data).copy_(self.gradient(i, rank, step)) for i, param in enumerate(params)]
                for rank in range(hvd.size())
            ]
            for step in range(STEPS)
        ]

    def forward(self, rank: int, step: int) -> torch.Tensor:
        products = zip(self.parameters(), self.truth[step][rank], strict=True)
        return sum((param * gradient).sum().float() for param, gradient in products)

    def trained(self, wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Train with a learning rate of 1. Return the sum over steps and ranks of each parameter's gradients."""
        for step in range(STEPS):
            CUDA.steady = step >= WARM_UP and not TUNED
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):  # which backward passes should not, but may be run under
                wrapped(hvd.rank(), step).backward()
            optimizer.step()
            CUDA.steady = False
            CUDA.next_iteration()
        CUDA.check()
        assert_equal_on_all_ranks(self)
        return [
            torch.stack([one.double() for each in self.truth for one in (rank[i] for rank in each)]).sum(0).cpu()
            for i in range(len(self.truth[0][0]))
        ]


class OfVectors(Blockwise):
    """A user's codec that packs vectors only, unlike the codec that it extends."""

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        assert values.dim() == 1
        return super().pack(values)

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        assert packed.dim() == 1
        return super().unpack(packed, count)


def compressed_gradients_and_residuals_add_up_to_all_gradients() -> None:
    """What the applied gradients lack are the last residuals, which are on the GPU and survive a load."""
    schemes = SCHEMES | {"of vectors": OfVectors()}
    for name in ("int8",) if STAGED else ("int8", "topk", "powersgd", "own", "of vectors"):
        model, scheme = GivenOnGpu(), schemes[name]
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), scheme)
        truth = model.trained(model, optimizer)
        assert STAGED or any(bool(owed.any()) for owed in owed_by(optimizer).values()), name
        for (key, param), exact in zip(model.named_parameters(), truth, strict=True):
            owed = owed_by(optimizer).get(key, torch.zeros(param.numel(), device="cuda"))
            assert STAGED or owed.is_cuda
            mine = torch.as_strided(owed[: param.numel()].cpu().double(), param.shape, param.stride())
            found = hvd.allreduce(mine, op=hvd.Sum, name=f"{name} {key}") - param.data.cpu().double() * hvd.size()
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-3, msg=lambda t, m=f"{name} {key} ": m + t)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        model(hvd.rank(), 0).backward()
        optimizer.step()
        optimizer.close()
        CUDA.check()


def gradients_of_an_attached_model_are_compressed() -> None:
    model = GivenOnGpu()
    wrapped = DistributedDataParallel(model)
    ddp.attach(wrapped, compression=hvd.Compression.powersgd(2))
    truth = model.trained(wrapped, torch.optim.SGD(model.parameters(), lr=1.0))
    off = (
        float((-param.data.cpu().double() * hvd.size() - exact).abs().max())
        for param, exact in zip(model.parameters(), truth, strict=True)
        if param.numel()
    )
    assert (max(off) > 1e-2) == (not STAGED)


def half_precision_on_the_wire_averages_without_overflow() -> None:
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        weight = nn.Parameter(torch.zeros(3000, device="cuda"))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], compression)
        for step in range(STEPS):
            CUDA.steady = step >= WARM_UP and not TUNED and not STAGED
            optimizer.zero_grad()
            (weight * 40_000.0).sum().backward()  # the sum of two exceeds the range of float16
            optimizer.step()
            CUDA.steady = False
            CUDA.next_iteration()
        torch.testing.assert_close(weight.data.cpu(), torch.full((3000,), -40_000.0 * STEPS), rtol=5e-3, atol=0.0)
        optimizer.close()
        CUDA.check()


def units_are_compressed_as_on_the_host() -> None:
    if not STAGED:
        control, device = ControlPlane(job.current().control.duplicate()), cuda_device(CUDA.index)
        opener = find_nccl(control, device, forced=False, timeout_s=30.0)
        router = Router(control, timeout_s=30.0, device=device, nccl=opener)
        check_units(control, router, steady, dtypes=(torch.float32, torch.float64, *HALF_DTYPES), exact=True)
        router.close()
        CUDA.check()


class OnHost:
    """A user's codec that computes on the host."""

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        return values.cpu().half().view(torch.uint8)

    def unpack(self, packed: torch.Tensor, count: int) -> torch.Tensor:
        return packed.clone().view(torch.float16).float()


def a_codec_that_computes_on_the_host_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(3000, device="cuda"))
    plain = torch.optim.SGD([weight], lr=1.0)
    raises(
        ConfigError,
        "cannot compress gradients on cuda:1: it returned a tensor on cpu",
        lambda: hvd.DistributedOptimizer(plain, [("w", weight)], OnHost()),
    )


def a_ddp_model_is_attached() -> None:
    model = model_of(10, 33, 17, 3)
    wrapped = DistributedDataParallel(model)
    ddp.attach(wrapped)
    trains_as_in_one_process(model, wrapped, sgd(model))


def a_ddp_model_is_attached_without_a_call() -> None:
    attach.install()
    model = model_of(10, 33, 17, 3)
    wrapped = DistributedDataParallel(model)
    loss_of(wrapped, hvd.rank(), 0).backward()
    CUDA.next_iteration()
    assert ddp.is_attached(wrapped)
    trains_as_in_one_process(model, wrapped, sgd(model))


@contextmanager
def steady() -> Iterator[None]:
    """Report calls in the body that block the host."""
    CUDA.steady = True
    try:
        yield
    finally:
        CUDA.steady = False
        CUDA.next_iteration()


def a_model_over_the_backend_is_attached_after_its_first_step() -> None:
    group = dist.new_group(backend="sirtaki")
    model = model_of(10, 33, 17, 3)
    n_launched, number = len(CUDA.nccl.launches), group._on_cuda._number
    wrapped = DistributedDataParallel(model, process_group=group)
    side = CUDA.make_stream()
    side.wait_stream(CUDA.current_stream())
    with torch.cuda.stream(side):
        loss_of(wrapped, hvd.rank(), 0).backward()
    torch.zeros(
        1000, device="cuda"
    )  # may reuse the memory of DDP's buckets, before this stream waits for the other one
    CUDA.current_stream().wait_stream(side)
    CUDA.next_iteration()
    assert (number, "all-reduce") in {launch[:2] for launch in CUDA.nccl.launches[n_launched:]}, "DDP reduces over NCCL"
    assert ddp.is_attached(wrapped)
    n_launched = len(CUDA.nccl.launches)
    trains_as_in_one_process(model, wrapped, sgd(model))
    assert number not in {launch[0] for launch in CUDA.nccl.launches[n_launched:]}, "Sirtaki has its own communicators"
    ddp.detach(wrapped)
    dist.destroy_process_group(group)


def collectives_of_the_backend_use_nccl_and_do_not_block_the_host() -> None:
    group = dist.new_group(backend="sirtaki")
    rank, size, number = hvd.rank(), hvd.size(), group._on_cuda._number
    mine = torch.arange(4.0 * size, device="cuda") + rank
    total = sum(torch.arange(4.0 * size) + other for other in range(size))
    n_launched, CUDA.steady = len(CUDA.nccl.launches), True
    dist.all_reduce(summed := mine.clone(), group=group)
    dist.all_reduce(mean := mine.clone(), op=dist.ReduceOp.AVG, group=group, async_op=True).wait()
    dist.broadcast(roots := mine.clone(), 0, group=group)
    all_gather_single(gathered := torch.empty(4 * size, device="cuda"), mine[:4].clone(), group=group)
    reduce_scatter_single(share := torch.empty(4, device="cuda"), mine, group=group)
    CUDA.steady = False
    wanted = ("all-reduce", "all-reduce", "broadcast", "all-gather", "reduce-scatter")
    assert [launch[:2] for launch in CUDA.nccl.launches[n_launched:]] == [(number, name) for name in wanted]
    assert torch.equal(summed.cpu(), total)
    torch.testing.assert_close(mean.cpu(), total / size)
    assert torch.equal(roots.cpu(), torch.arange(4.0 * size))
    assert torch.equal(gathered.cpu(), torch.cat([torch.arange(4.0) + other for other in range(size)]))
    assert torch.equal(share.cpu(), total[4 * rank : 4 * rank + 4])
    CUDA.check()
    dist.destroy_process_group(group)


def an_attached_model_needs_less_memory_than_ddp_until_it_is_detached() -> None:
    model = model_of(10, 100, 100, 3)
    n_bytes = sum(param.numel() * param.element_size() for param in model.parameters())
    wrapped, used = DistributedDataParallel(model, process_group=dist.new_group(backend="sirtaki")), []
    ddp.detach(wrapped)  # so that DDP keeps the model
    for change in (lambda _: None, ddp.attach, ddp.detach):
        change(wrapped)
        trains_as_in_one_process(model, wrapped, optimizer := sgd(model))
        gc.collect()
        used.append(CUDA.allocated_bytes)
        optimizer.zero_grad()
        del optimizer
    assert used[0] - used[1] >= 0.9 * n_bytes, used  # DDP has gradients and buckets, Sirtaki one buffer
    assert abs(used[2] - used[0]) < 0.1 * n_bytes, used


def a_sharded_model_trains_as_pytorchs_under_every_setting() -> None:
    if STAGED:
        return
    more = sharded.trains_under_every_setting(torch.device("cuda", CUDA.index), steady)
    assert len(more) == 7, more
    CUDA.check()


def a_sharded_model_is_tuned_while_the_host_runs_ahead() -> None:
    if STAGED:
        return
    settings = sharded.is_tuned_while_the_host_runs_ahead(torch.device("cuda", CUDA.index), steady)
    assert "5 kept" in settings[-1], settings  # it launches the fewest operations, by which the fake GPU counts time
    CUDA.check()


EXACT = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def over_nccl() -> bool:
    """Return whether eager operations run over NCCL, and not through host memory."""
    return job.current().engine.rounds.nccl is not None


def results_of_all_operations(place: str, dtype: torch.dtype) -> list[torch.Tensor]:
    rank, size = hvd.rank(), hvd.size()
    mine = (torch.arange(5 * (size + 1)) % 3 + rank + 1).view(size + 1, 5).to(dtype).to(place)
    ops = [op for op, dtypes in collectives.DTYPES.items() if dtype in dtypes and op != hvd.Adasum]
    results = [hvd.allreduce(mine, op=op) for op in ops]
    results += [hvd.allreduce(part, op=ops[-1]) for part in (mine.t(), mine[:, 1], mine[1:, 1:3], mine[:0], mine[0, 0])]
    results += hvd.grouped_allreduce([mine, mine[:2], mine[1, 3:]], op=ops[0])
    results += [hvd.allgather(part) for part in (mine, mine[:rank], mine[1:2, 1:], mine[:0])]
    results += hvd.grouped_allgather([mine[1:], mine[: 2 - rank % 2]])
    results += [hvd.broadcast(mine.t(), size - 1), hvd.alltoall(mine[:size]), hvd.alltoall(mine[:0])]
    results += hvd.alltoall(mine, splits=[(rank + other) % 2 for other in range(size)])
    results += [hvd.alltoall(mine, splits=[0] * rank + [2] + [0] * (size - rank - 1))[0]]
    if hvd.Sum in ops:
        results += [hvd.reducescatter(part, op=op) for part in (mine, mine[:size]) for op in (hvd.Sum, hvd.Average)]
        results += [hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)]
        in_place = mine.clone()
        hvd.allreduce_(in_place, op=hvd.Sum)
        results += [in_place, hvd.synchronize(hvd.broadcast_async_(mine, 0))]
    if dtype in FLOATS and size & (size - 1) == 0:
        results += [hvd.allreduce(mine, op=hvd.Adasum), hvd.allreduce(mine * 0, op=hvd.Adasum)]
    return results


def eager_operations_give_what_they_give_on_the_host() -> None:
    for dtype in (*EXACT, *FLOATS):
        wanted = results_of_all_operations("cpu", dtype)
        with torch.cuda.stream(CUDA.make_stream()):  # the caller need not use the default stream
            for found, expected in zip(results_of_all_operations("cuda", dtype), wanted, strict=True):
                assert found.dtype is expected.dtype
                torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-9 if dtype in FLOATS else 0)
            torch.cuda.current_stream().synchronize()
    assert hvd.allreduce(torch.ones(3, device="cuda")).device == torch.device("cuda", 1)
    assert over_nccl() == (os.environ.get("SIRTAKI_TRANSPORT") != "staged")
    assert len(job.current().engine.pending) == 0
    CUDA.check()


@patch.object(engine, "DEFERRED_S", 60.0)
def eager_operations_never_block_the_host() -> None:
    hvd.allreduce(torch.ones(3, device="cuda"))
    norm = hvd.SyncBatchNorm(5, dtype=torch.float64).to("cuda")
    CUDA.steady = over_nccl()
    for _ in range(3):
        mine = torch.full((4 * hvd.size(), 5), float(hvd.rank()), dtype=torch.float64, device="cuda")
        handle = hvd.allreduce_async(mine + 1, name="freed before it is reduced")
        results = [hvd.allgather(mine), hvd.broadcast(mine, 0), hvd.alltoall(mine), hvd.reducescatter(mine)]
        results += [*hvd.grouped_allreduce([mine, mine[:1]], op=hvd.Max), hvd.synchronize(handle)]
        side = CUDA.make_stream()
        side.wait_stream(CUDA.current_stream())
        with torch.cuda.stream(side):
            results.append(norm(hvd.allreduce(mine).requires_grad_()))
            results[-1].square().mean().backward()
        CUDA.current_stream().wait_stream(side)
        if hvd.size() == 2:
            results.append(hvd.allreduce(mine, op=hvd.Adasum))
        del results, mine
    CUDA.steady = False
    torch.cuda.synchronize()
    CUDA.check()


def a_handle_is_done_when_the_gpu_has_finished() -> None:
    size = hvd.size()
    first, second = (hvd.allreduce_async(torch.ones(6, device="cuda") * factor, op=hvd.Sum) for factor in (1.0, 2.0))
    assert torch.equal(hvd.synchronize(second), torch.full((6,), 2.0 * size, device="cuda"))
    written = torch.cuda.Event()
    written.record()
    with patch.object(engine, "DEFERRED_S", 60.0):
        third = hvd.allreduce_async_(torch.ones(6, device="cuda"), op=hvd.Sum, name="third")
    if over_nccl():
        hvd.allreduce(torch.ones(2, device="cuda"))  # also launches the third one, for which the GPU waits now
        written.synchronize()
        assert not hvd.poll(third)
    torch.cuda.synchronize()
    while not hvd.poll(first) or not hvd.poll(third):
        pass
    assert hvd.synchronize(first).tolist() == hvd.synchronize(third).tolist() == [size] * 6
    polled = hvd.allreduce_async(torch.ones(6, device="cuda"), op=hvd.Sum, name="polled")  # by the engine's thread
    while not hvd.poll(polled):
        pass
    kept = hvd.allreduce_async(torch.ones(6, device="cuda"), op=hvd.Sum, name="awaited on one rank only")
    for handle in (polled, kept)[: 2 - bool(hvd.rank())]:
        assert hvd.synchronize(handle).tolist() == [size] * 6
    hvd.barrier()
    assert hvd.synchronize(kept) is None or hvd.rank()
    CUDA.check()


def the_watchdog_sees_for_what_a_gpu_waits() -> None:
    eager, written = job.current().engine, torch.cuda.Event()
    torch.cuda.synchronize()
    assert eager.oldest_wait() is None
    for _ in range(20):  # an operation runs through host memory if the machine delays a rank by 0.1 s
        mine = torch.ones(3, device="cuda")
        written.record()
        hvd.allreduce(mine, name="stalled")
        written.synchronize()
        wait = eager.oldest_wait()
        is_seen = wait is not None and "allreduce.stalled" in wait.what
        torch.cuda.synchronize()
        assert eager.oldest_wait() is None
        if all(hvd.allgather_object(is_seen)) or not over_nccl():
            break
    assert is_seen == over_nccl()
    CUDA.check()


def a_rank_that_has_joined_contributes_zeros() -> None:
    if hvd.rank():
        assert hvd.allreduce(torch.ones(3, device="cuda"), op=hvd.Sum).tolist() == [hvd.size() - 1] * 3
    hvd.join()
    assert hvd.allreduce(torch.ones(3, device="cuda"), op=hvd.Sum).tolist() == [hvd.size()] * 3
    CUDA.check()


def a_process_set_has_a_communicator_of_its_own() -> None:
    ranks = list(range(1, hvd.size()))
    but_one = hvd.add_process_set(ranks)
    if hvd.rank():
        found = hvd.allreduce(torch.full((3,), 1.0 * hvd.rank(), device="cuda"), op=hvd.Sum, process_set=but_one)
        assert found.tolist() == [sum(ranks)] * 3
        eager = job.current().rank_sets[but_one.process_set_id].engine
        assert eager is not None
        assert (eager.rounds.nccl is not None) == over_nccl()
    hvd.remove_process_set(but_one)
    CUDA.check()


def an_eager_operation_runs_over_nccl_if_all_ranks_have_launched_the_same_gradients() -> None:
    """One more unit of the first optimizer on one rank, and of the second on the others, would be another order."""
    if STAGED:
        return
    models = [model_of(10, 33, 3), model_of(10, 17, 3)]
    optimizers = [hvd.DistributedOptimizer(sgd(model)) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        loss_of(model, hvd.rank(), 0).backward()
        optimizer.step()
    counted = sorted((owner for owner in nccl_owners() if owner.launched), key=lambda owner: owner.number)
    first, *others = counted[:: -1 if hvd.rank() else 1]

    def runs_over_nccl() -> bool:
        n_launched = len(CUDA.nccl.launches)
        assert hvd.allreduce(torch.ones(3, device="cuda"), op=hvd.Sum).tolist() == [hvd.size()] * 3
        return len(CUDA.nccl.launches) > n_launched

    assert runs_over_nccl()
    first.launched += 1
    assert not runs_over_nccl()
    for owner in others:
        owner.launched += 1
    assert runs_over_nccl()
    CUDA.check()
    for optimizer in optimizers:
        optimizer.close()


def batches_are_normalised_together() -> None:
    torch.manual_seed(3)
    layers = [nn.Linear(10, 6, dtype=torch.float64), nn.BatchNorm1d(6, dtype=torch.float64), nn.Linear(6, 3).double()]
    alone = nn.Sequential(*layers).to("cuda")
    model = copy.deepcopy(alone)
    model[1] = hvd.SyncBatchNorm(6, dtype=torch.float64).to("cuda")
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    reference = sgd(alone)
    batches = [[batch(rank, step, 4, 10).to("cuda") for rank in range(hvd.size())] for step in range(STEPS)]
    for step, inputs in enumerate(batches):
        CUDA.steady = step >= WARM_UP and not TUNED and over_nccl()
        optimizer.zero_grad()
        model(inputs[hvd.rank()]).square().mean().backward()
        optimizer.step()
        CUDA.steady = False
        CUDA.next_iteration()
        reference.zero_grad()
        alone(torch.cat(inputs)).square().mean().backward()
        reference.step()
    assert_same_parameters(model, alone, 1e-9)
    CUDA.check()
    optimizer.close()


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


NODES: list[Any] = [between_nodes, units_are_compressed_as_on_the_host]


def one_rank_packs_sends_and_times_nothing() -> None:
    """The only rank of a job trains as without Sirtaki, with the optimizer and with an attached DDP model."""
    model = model_of(10, 33, 17, 3)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    with patch.object(torch.cuda, "Event", side_effect=AssertionError("an event is recorded")):
        trains_as_in_one_process(model, model, optimizer)
    assert all(param.grad is not None and param.grad._base is None for param in model.parameters())
    wrapped = DistributedDataParallel(model_of(10, 33, 3))
    ddp.attach(wrapped)
    assert not ddp.is_attached(wrapped)
    assert not CUDA.nccl.groups
    assert not CUDA.nccl.launches


ALONE: list[Any] = [one_rank_packs_sends_and_times_nothing]


if __name__ == "__main__":
    with CUDA:
        dist.init_process_group("gloo")
        main(list(dict.fromkeys([*CASES, *NODES, *ALONE])))
        dist.destroy_process_group()
