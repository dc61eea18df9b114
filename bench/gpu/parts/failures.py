"""Capture a CUDA graph while Sirtaki's events are alive, which must stay valid; abort communicators; then kill rank 1.

Rank 0 must end by itself within `EXIT_S` seconds, with an error that names rank 1.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch

import sirtaki.torch as hvd
from bench.gpu.contenders import Optimizer
from bench.gpu.models import small_mlp
from bench.gpu.runner import ProcessEnd, RankRun
from sirtaki.comm.nccl_streams.transport import CommunicatorKey, CommunicatorPool
from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.engine.job import DEVICE_S

EXIT_S = 10.0
"""Maximum number of seconds from rank 1's death to rank 0's exit."""


def run(run: RankRun) -> None:
    """Train, capture a graph, and train on. Then rank 1 kills itself, and rank 0 trains on until Sirtaki ends it."""
    place = run.place
    torch.manual_seed(0)
    loop = Optimizer(place, small_mlp(place.torch_device))
    for _ in range(4):
        loop.step()
    with run.check("a CUDA graph is captured while Sirtaki's events and threads are alive"):
        inside = torch.zeros_like(loop.batch)
        outside = torch.zeros(len(inside), 16, device=place.torch_device)

        def infer() -> None:
            with torch.no_grad():
                outside.copy_(loop.model(inside))

        # Train first, so that events were recorded just before the capture.
        loop.forward(loop.batch).square().mean().backward()
        replay = place.capture(infer)
        inside.copy_(loop.batch)
        replay()
        place.device.synchronise()
        torch.testing.assert_close(outside, loop.model(loop.batch).detach(), rtol=1e-4, atol=1e-5)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    with run.check("training goes on after the capture"):
        for _ in range(4):
            loop.step()
        place.device.synchronise()
        sums = hvd.allgather(torch.stack([param.detach().sum() for param in loop.model.parameters()]).view(1, -1))
        assert torch.equal(sums[0], sums[1]), "the ranks' parameters differ"
    with run.check("aborted communicators free the GPU, and new ones reduce") as found:
        pool = CommunicatorPool(place.opener(run.control), limit=2, worst=lambda value: value)
        keys = [CommunicatorKey(stream) for stream in range(2)]
        pool.require(keys)
        tensor = torch.ones(1 << 20, device=place.torch_device)
        if run.rank == 0 and not place.dry:
            for group in pool.open.values():
                group.all_reduce(tensor, ReduceOp.SUM)  # Rank 1 does not join this all-reduce.
        begin_s = time.perf_counter()
        pool.abort()
        place.device.synchronise()
        found["abort_s"] = time.perf_counter() - begin_s
        assert found["abort_s"] <= DEVICE_S, found
        run.control.barrier()
        pool.require(keys)
        tensor.fill_(1.0)
        pool.open[keys[1]].all_reduce(tensor, ReduceOp.SUM)
        assert bool((tensor == 2.0).all())
        pool.close()
    hvd.barrier()
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    print("rank 1 is killed now", flush=True)
    end_s = time.monotonic() + 2 * EXIT_S
    while time.monotonic() < end_s:
        loop.step()
        time.sleep(0.01)
    print("rank 0 goes on training without rank 1", flush=True)


def judge(line: dict[str, Any], ends: Sequence[ProcessEnd]) -> None:
    """Add a check: rank 0 ended with an error that names rank 1, at most `EXIT_S` after rank 1 was killed."""
    first, second = ends
    seconds, message = first.at_s - second.at_s, first.output.partition("rank 1 is killed now")[2]
    ok = second.status == -signal.SIGKILL and first.status not in (0, -signal.SIGKILL) and seconds <= EXIT_S
    line["checks"].append(
        {
            "check": "rank 0 ends, and names rank 1, soon after rank 1 was killed",
            "ok": ok and "rank 1" in message,
            "exit_s": round(seconds, 3),
            "exit_statuses": [first.status, second.status],
            "message": message[-1500:],
        }
    )
    line["rows"] = [*line.get("rows", []), {"what": "time to exit after a rank's death", "exit_s": seconds}]
