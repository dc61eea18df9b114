"""Training under defaults of the process and modes of the script. Started by test_defaults.py.

Each case runs under each default and mode. Training must equal one process in float64, and operations must return the
same as without. The script's own tensors name their device and dtype, as in loaders of large models.
"""

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conformance.defaults import default_dtype
from conformance.training import main
from rank_jobs import cases
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import sirtaki
import sirtaki.torch as hvd
import sirtaki.torch.distributed
from sirtaki.torch import ddp

Context = Callable[[], AbstractContextManager[object]]

STEPS = 3
FLOAT64 = {"dtype": torch.float64, "device": "cpu"}


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


PACKAGE = f"{Path(sirtaki.__file__).parent}/"


class Seeing(TorchFunctionMode):
    """Counts the PyTorch functions that Sirtaki calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(PACKAGE):
            self.seen[f"{caller}: {getattr(func, '__name__', func)}"] += 1
        return func(*args, **(kwargs or {}))


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


DEFAULTS: dict[str, Context] = {
    "meta": partial(default_device, "meta"),
    "device": partial(torch.device, "meta"),
    "float16": partial(default_dtype, torch.float16),
    "bfloat16": partial(default_dtype, torch.bfloat16),
    "float64": partial(default_dtype, torch.float64),
    "deterministic": deterministic,
    "anomaly": partial(torch.autograd.set_detect_anomaly, True),
    "function mode": Seeing,
    "dispatch mode": Watching,
}
AUTOCAST = {"autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16)}
NO_GRADIENTS: dict[str, Context] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
EVERYWHERE = {**DEFAULTS, **AUTOCAST, **NO_GRADIENTS}


def each(contexts: dict[str, Context]) -> Iterator[str]:
    """Enter each of the contexts in turn. An error contains the context's name."""
    for name, make in contexts.items():
        try:
            with make():
                yield name
        except Exception as err:
            err.add_note(f"within {name}")
            raise


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(7919 * step + rank)
    return torch.randn(*shape, generator=generator, **FLOAT64)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 33, **FLOAT64), nn.Tanh(), nn.Linear(33, 3, **FLOAT64))


def plain(parameter: Any) -> torch.Tensor:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


def trains_alike(
    model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    alone = network()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        forward(batch(dist.get_rank(), step, 5, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses = [alone(batch(rank, step, 5, 6)).square().mean() for rank in range(dist.get_world_size())]
        torch.stack(losses).mean().backward()
        reference.step()
        reference.zero_grad()
        with torch.device("cpu"):  # otherwise the compared tensors would be on the default device
            for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
                assert plain(found).device.type == "cpu"
                torch.testing.assert_close(plain(found), wanted.detach(), rtol=1e-9, atol=1e-9)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def jobs_begin_and_end() -> None:
    for _ in each(EVERYWHERE):
        hvd.shutdown()
        hvd.init()
        assert hvd.size() == dist.get_world_size()


def a_distributed_optimizer_trains() -> None:
    for _ in each({**DEFAULTS, **AUTOCAST}):
        model = network()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = sgd(model)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
            trains_alike(model, model, hvd.DistributedOptimizer(optimizer, model.named_parameters()))


class Products(nn.Module):
    """A float32 model of operations that autocast does not change."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(3)
        self.weight = nn.Parameter(torch.randn(40, 30, generator=generator, dtype=torch.float32, device="cpu"))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs[:, None, :] * self.weight).tanh().sum(-1)


def compressed_gradients_are_as_precise_as_ever() -> None:
    """Residuals and decompressed gradients are in float32 under every default dtype."""
    for compression in (hvd.Compression.int8, hvd.Compression.powersgd(2), hvd.Compression.topk(0.3)):
        found = list[tuple[str, list[torch.Tensor]]]()
        for name in each({"none": nullcontext, **DEFAULTS, **AUTOCAST}):
            model = Products()
            optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression)
            for step in range(STEPS):
                model(batch(hvd.rank(), step, 5, 30).float()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.close()
            found.append((name, [parameter.detach() for parameter in model.parameters()]))
        for name, parameters in found[1:]:
            for one, wanted in zip(parameters, found[0][1], strict=True):
                torch.testing.assert_close(one, wanted, rtol=1e-6, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}")


def an_attached_model_trains() -> None:
    for name in each({**DEFAULTS, "sirtaki": nullcontext}):
        model = network()
        group = dist.new_group(backend="sirtaki") if name == "sirtaki" else None
        wrapped = DistributedDataParallel(model, process_group=group)
        ddp.attach(wrapped)
        trains_alike(model, wrapped, sgd(model))


def a_process_group_of_ours_carries_tensors() -> None:
    for _ in each(EVERYWHERE):
        group = dist.new_group(backend="sirtaki")
        large = torch.full((300_000,), float(dist.get_rank() + 1), **FLOAT64)
        total = sum(range(1, dist.get_world_size() + 1))
        dist.all_reduce(large, group=group)
        assert large.tolist()[:2] == [total, total]
        parts = [torch.empty(200_000, **FLOAT64) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, large[:200_000], group=group)
        assert all(part.tolist()[-1] == total for part in parts)
        dist.destroy_process_group(group)


def a_sharded_model_trains() -> None:
    if TorchVersion(torch.__version__) < "2.7":
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from sirtaki.torch import fsdp

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for _ in each(DEFAULTS):
        model = network()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        fsdp.attach(model)
        trains_alike(model, model, sgd(model))


def tensors_and_objects_are_exchanged() -> None:
    size, me = dist.get_world_size(), dist.get_rank()
    for _ in each(EVERYWHERE):
        ones = torch.full((3,), 1.0 + me, **FLOAT64)
        assert hvd.allreduce(ones, op=hvd.Sum).tolist() == [sum(range(1, size + 1))] * 3
        assert hvd.allgather(ones).shape == (3 * size,)
        assert hvd.broadcast(ones, 1).tolist() == [2.0] * 3
        assert hvd.allgather_object({"rank": me}) == [{"rank": rank} for rank in range(size)]
        assert hvd.broadcast_object([me] * 1000, root_rank=1) == [1] * 1000
        received, splits = hvd.alltoall(torch.arange(size, device="cpu"), splits=[1] * size)
        assert (received.tolist(), splits.tolist()) == ([me] * size, [1] * size)
        assert [part.tolist() for part in hvd.grouped_allreduce([ones, ones], op=hvd.Max)] == [[float(size)] * 3] * 2
        assert hvd.reducescatter(torch.ones(2 * size, **FLOAT64), op=hvd.Sum).tolist() == [size] * 2


def batches_are_normalised_together() -> None:
    for _ in each(DEFAULTS):
        layer = hvd.SyncBatchNorm(4, **FLOAT64)
        alone = nn.BatchNorm1d(4, **FLOAT64)
        mine = batch(dist.get_rank(), 0, 5, 4).requires_grad_()
        whole = torch.cat([batch(rank, 0, 5, 4) for rank in range(dist.get_world_size())]).requires_grad_()
        layer(mine).pow(3).sum().backward()
        alone(whole).pow(3).sum().backward()
        wanted = whole.grad[5 * dist.get_rank() :][:5]
        assert (mine.grad - wanted).abs().max().item() < 1e-9
        assert (layer.running_var - alone.running_var).abs().max().item() < 1e-9


def ranks_train_by_themselves_in_between() -> None:
    for _ in each(DEFAULTS):
        model = network().to(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        alone = [copy.deepcopy(model) for _ in range(dist.get_world_size())]
        with hvd.LocalSGD(model, optimizer, 2):
            for step in range(2):
                model(batch(dist.get_rank(), step, 5, 6).float()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for rank, one in enumerate(alone):
            theirs = torch.optim.SGD(one.parameters(), lr=0.1)
            for step in range(2):
                theirs.zero_grad()
                one(batch(rank, step, 5, 6).float()).square().mean().backward()
                theirs.step()
        for found, *wanted in zip(model.parameters(), *(one.parameters() for one in alone), strict=True):
            average = sum(one.detach() for one in wanted) / len(wanted)
            assert (found.detach() - average).abs().max().item() < 1e-6


def states_are_committed_and_restored() -> None:
    for _ in each({**DEFAULTS, **NO_GRADIENTS}):
        model = network()
        optimizer = sgd(model)
        state = hvd.elastic.TorchState(model, optimizer, epoch=3)
        state.sync()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        state.epoch = 4
        state.restore()
        assert state.epoch == 3
        assert all(bool((now == then).all()) for now, then in zip(model.parameters(), before, strict=True))


def modes_of_the_script_do_not_see_gradients_being_reduced() -> None:
    with Seeing() as mode:
        model = network()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        mode.seen.clear()
        for step in range(STEPS):
            model(batch(hvd.rank(), step, 5, 6)).square().mean().backward()
            optimizer.synchronize()
        assert not mode.seen, mode.seen


def floating_point_operations_are_the_scripts_own() -> None:
    counts = []
    for distributed in (False, True):
        model = network()
        optimizer = sgd(model)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        with FlopCounterMode(display=False) as counter:
            for step in range(STEPS):
                model(batch(hvd.rank(), step, 5, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


CASES = cases(globals())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(CASES)
    dist.destroy_process_group()
