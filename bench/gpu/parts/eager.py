"""Latency of eager operations on GPU tensors between two ranks that share the GPU, compared with PyTorch over NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import numpy as np
import torch
import torch.distributed as dist

import sirtaki.torch as hvd
from bench.gpu.contenders import open_group
from bench.gpu.runner import RankRun
from sirtaki.engine import job

SIZES = (64, 1 << 18)
"""Sizes of the tensors in floats."""


def run(run: RankRun) -> None:
    """Time calls alternately. A sample is the slowest rank's time until the result is on the GPU."""
    place, control, numbers = run.place, run.control, count()
    open_group(place, run.rank, run.size)
    mine = torch.ones(2 * run.size, 4, device=place.torch_device)

    def everything() -> list[torch.Tensor]:
        handle = hvd.allreduce_async(mine, op=hvd.Sum)
        calls = (hvd.allgather(mine), hvd.broadcast(mine, 0), hvd.alltoall(mine), hvd.reducescatter(mine))
        return [*calls, hvd.synchronize(handle)]

    with run.check("operations run over NCCL and do not make the host wait for the GPU") as found:
        everything()
        assert job.current().engine.rounds.nccl is not None, "NCCL could not be used; see the log"
        with place.synchronisations() as waits:
            # Keep the GPU busy, so that operations launched now begin only after their calls have returned.
            place.sleep(0.2)
            begin_s = time.perf_counter()
            results = everything()
            found["host_s"] = time.perf_counter() - begin_s
        assert not waits, "\n".join(waits)
        assert all(bool(result.eq(1.0).all()) for result in results[:-1])
        assert bool(results[-1].eq(run.size).all())
        assert place.dry or found["host_s"] < 0.2, "the host waited for the GPU"
    for position, numel in enumerate(SIZES):
        tensor = torch.ones(numel, device=place.torch_device)
        calls: dict[str, Callable[[], object]] = {
            "torch all_reduce": lambda tensor=tensor: dist.all_reduce(tensor),  # type: ignore[misc]
            "named": lambda tensor=tensor: hvd.allreduce(tensor, name=f"named {tensor.numel()}"),  # type: ignore[misc]
            "unnamed": lambda tensor=tensor: hvd.allreduce(tensor),  # type: ignore[misc]
            "a new name each": lambda tensor=tensor: hvd.allreduce(tensor, name=f"new {next(numbers)}"),  # type: ignore[misc]
            "broadcast": lambda tensor=tensor: hvd.broadcast(tensor, root_rank=0, name=f"b {tensor.numel()}"),  # type: ignore[misc]
        }
        with run.check(f"{numel} floats are timed") as found:
            for call in calls.values():
                for _ in range(3):
                    call()
                    tensor.fill_(1.0)
            samples: dict[str, list[float]] = {name: [] for name in calls}
            names, rounds, goes_on = list(calls), 0, run.until(1 / (len(SIZES) - position))
            while rounds < 5 or (goes_on() and rounds < (5 if place.dry else 400)):
                turn = rounds % len(names)
                for name in names[turn:] + names[:turn]:
                    tensor.fill_(1.0)
                    place.device.synchronise()
                    control.barrier()
                    begin_s = time.perf_counter()
                    calls[name]()
                    place.device.synchronise()
                    seconds = time.perf_counter() - begin_s
                    samples[name].append(float(control.maximum(np.array([seconds]))[0]))
                rounds += 1
            found["rounds"] = rounds
            run.report.compare(
                samples, "torch all_reduce", time="call_s", ratio="ratio_to_torch", where={"floats": numel}
            )
