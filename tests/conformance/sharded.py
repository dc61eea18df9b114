"""Training of an FSDP2 model on a GPU under every setting of PyTorch's collectives that Sirtaki tunes.

`tests/ranks/on_fake_gpus.py` runs it on fake GPUs, `bench.gpu` on a GPU.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sirtaki.autotune.sharded import ShardKnobs, ShardSpace
from sirtaki.torch import fsdp

SIZES = (64, 256, 256, 256, 256, 8)
SLACK_BYTES = 32 << 10
"""Tolerance of peak memory, for small tensors and the allocator's rounding. The largest module has 258 KiB."""

Watch = Callable[[], AbstractContextManager[object]]


def sharded(device: torch.device, **attached: str) -> nn.Module:
    """Make a model that FSDP2 shards on a GPU over all ranks, and attach it with these settings if there are any.

    Collective.
    """
    torch.manual_seed(3)
    layers = [nn.Linear(here, there) for here, there in itertools.pairwise(SIZES)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.cuda.set_device(device)  # because the mesh selects a GPU by LOCAL_RANK
    for part in model:
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if attached:
        with mock.patch.dict(os.environ, attached):
            fsdp.attach(model)
    return model


def batch(device: torch.device, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7919 * step + dist.get_rank())
    return torch.randn(4, SIZES[0], generator=generator).to(device)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def assert_same_shards(model: nn.Module, other: nn.Module) -> None:
    for found, wanted in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(found.to_local(), wanted.to_local())  # type: ignore[attr-defined]  # DTensors


@contextmanager
def calls_of(collective: Any) -> Iterator[list[dist.ProcessGroup]]:
    """Yield the process groups of all calls of FSDP's collectives of one class, in order."""
    kind, groups = type(collective), list[dist.ProcessGroup]()
    call = kind.__call__

    def record(one: Any, *args: Any, group: dist.ProcessGroup, **options: Any) -> Any:
        groups.append(group)
        return call(one, *args, group=group, **options)

    with mock.patch.object(kind, "__call__", record):
        yield groups


def trains_under_every_setting(device: torch.device, watch: Watch) -> dict[str, int]:
    """Train under each setting, and compare every shard with that of the same model without Sirtaki.

    Also compare the peak of memory with the memory that the tuner counts for the setting.

    Args:
        device: GPU of this rank.
        watch: returns a context manager in which a step runs that must not block the host.

    Returns:
        {setting: bytes of peak memory above that of the default setting}.
    """
    models = [sharded(device, SIRTAKI_TUNE="0"), sharded(device)]
    optimizers = [sgd(model) for model in models]
    found = fsdp.attached(models[0])
    assert found is not None
    steps = itertools.count()

    def both(watch: Watch) -> int:
        """Train both models for a step. Return the attached model's peak of memory."""
        inputs = batch(device, next(steps))
        train(models[1], optimizers[1], inputs)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with watch():
            train(models[0], optimizers[0], inputs)
        assert_same_shards(*models)
        return torch.cuda.max_memory_allocated() - before

    carriers = (each.carrier for each in found.groups[0].collectives)
    with calls_of(next(carriers)) as gathered, calls_of(next(carriers)) as reduced:
        both(watch)  # finds the order of the modules
        streams, scattering = found.pytorch.choices()
        default, dropped = found.knobs, found.dropped
        space = ShardSpace(
            modules=len(found.order),
            streams=streams,
            whole_bytes=found.whole_bytes,
            dropped=dropped,
            memory_bytes=1 << 30,
            scattering=scattering,
        )
        at_first: list[int] = []
        models[0][0].register_forward_hook(lambda *_: at_first.append(len(gathered)))
        peaks: dict[ShardKnobs, int] = {}
        for knobs in (
            default,
            replace(default, ahead=1),
            replace(default, ahead=3, behind=2),
            replace(default, kept=dropped),
            replace(default, scattering=2),
            replace(default, streams=2),
            replace(default, ahead=2, behind=3, kept=dropped[1:], scattering=scattering, streams=streams[-1]),
        ):
            if knobs not in space:
                continue
            found.run(knobs)
            both(watch)
            gathered.clear()
            reduced.clear()
            train(models[0], optimizers[0], inputs := batch(device, next(steps)))
            assert at_first[-1] == 1 + knobs.ahead, knobs
            assert len(gathered) == len(found.order) + len(dropped) - len(knobs.kept), knobs
            assert [each is gathered[0] for each in reduced] == [knobs.streams == 1] * len(found.order), knobs
            train(models[1], optimizers[1], inputs)
            peaks[knobs] = both(watch)
            more, counted = peaks[knobs] - peaks[default], space.extra_bytes(knobs)
            assert more <= counted + SLACK_BYTES, f"{knobs.describe()}: {more} bytes more, {counted} counted"
    assert fsdp.detach(models[0])
    both(watch)
    return {knobs.describe(): peak - peaks[default] for knobs, peak in peaks.items()}


def is_tuned_while_the_host_runs_ahead(device: torch.device, watch: Watch, steps: int = 80) -> list[str]:
    """Train during a search whose steps are timed by events, with the host up to three steps ahead of the GPU.

    Compare with the same model without Sirtaki.

    Args:
        device: GPU of this rank.
        watch: returns a context manager in which a step runs that must not block the host.
        steps: number of steps.

    Returns:
        Settings that have run, and the kept one at the end.
    """
    model = sharded(device, SIRTAKI_WARMUP_ITERATIONS="20", SIRTAKI_FSDP_MEMORY="1MiB", SIRTAKI_REGISTRY="off")
    batches = [batch(device, step) for step in range(steps)]
    settings, optimizer, ends = dict[str, None](), sgd(model), list[Any]()
    for inputs in batches:
        with watch():
            train(model, optimizer, inputs)
            ends.append(torch.cuda.current_stream().record_event())
        for end in ends[-3:-2]:
            end.synchronize()
        settings[fsdp.describe(model)] = None
    other = sharded(device)
    optimizer = sgd(other)
    for inputs in batches:
        train(other, optimizer, inputs)
    assert_same_shards(model, other)
    kept = fsdp.describe(model)
    assert fsdp.detach(model)
    return [*settings, kept]
