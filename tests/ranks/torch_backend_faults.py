"""Ranks of a process group that call other operations than their peers. Started by test_group_lanes.py."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import sirtaki.torch.distributed  # noqa: F401
from sirtaki.comm.control.mesh import MeshCommunicator
from sirtaki.comm.transports import gloo, shared_memory
from sirtaki.comm.transports.gloo import GlooTransport
from sirtaki.comm.transports.shared_memory import SharedMemoryTransport
from sirtaki.errors import TransportError

KEEP_OPEN_S = 30.0
"""Time for which a faulty rank keeps its connections, so that peers are not notified by their end."""


def broken(*_: object, **__: object) -> NoReturn:
    raise ZeroDivisionError("a broken transport")


def broken_connection(*_: object, **__: object) -> NoReturn:
    raise TransportError("a broken connection")


def break_transport(fault: str) -> None:
    """Make this rank's transport raise at the submission of units, in its thread, or at the wait."""
    match fault:
        case "submitting":
            SharedMemoryTransport.all_reduce = GlooTransport.all_reduce = broken  # type: ignore[method-assign]
            SharedMemoryTransport.visit = GlooTransport.send_receive = broken  # type: ignore[method-assign]
        case "in_thread":
            visit = SharedMemoryTransport.visit
            SharedMemoryTransport.visit = lambda self, _, **how: visit(self, broken, **how)  # type: ignore[method-assign]
            shared_memory.reduce_share = broken
        case "waiting":
            gloo._GlooUnitWork.wait = broken_connection  # type: ignore[method-assign]
            GlooTransport.send_receive = lambda *_, **__: broken_connection  # type: ignore[method-assign]


def train(model: torch.nn.Module) -> None:
    model(torch.ones(2, 6)).sum().backward()


def act_and_tell(act: Callable[[], object]) -> None:
    begin_s = time.monotonic()
    try:
        act()
    except RuntimeError as err:
        print(f"told after {time.monotonic() - begin_s:.1f} s: {type(err).__name__}: {err}", flush=True)


def no_fault() -> None:
    """Run an error on one rank that is raised before peers wait, and destroy a group with operations in flight."""
    abort = MeshCommunicator.abort

    def told(self: MeshCommunicator, reason: str, *, fault: bool = False) -> None:
        print(f"told: {reason}", flush=True)
        abort(self, reason, fault=fault)

    MeshCommunicator.abort = told  # type: ignore[method-assign]
    dist.init_process_group("sirtaki", timeout=timedelta(seconds=60))
    ranks, big = dist.get_world_size(), torch.ones(500_000)
    gathered = [torch.empty_like(big) for _ in range(ranks)]
    for act in (lambda: dist.all_reduce(big), lambda: dist.all_gather(gathered, big), dist.barrier):
        if dist.get_rank() == 1:
            for mistake in (
                lambda: dist.reduce_scatter(torch.empty(3), [big]),
                lambda: dist.all_gather(gathered[1:], big),
                lambda: dist.all_reduce(big, op="sum"),  # type: ignore[arg-type]
            ):
                with pytest.raises((TypeError, ValueError, RuntimeError)):
                    mistake()
        act()
    assert big.eq(ranks).all()
    works = [dist.all_reduce(big, async_op=True)]
    if dist.get_rank() != 1:  # their threads wait for rank 1's operation
        works.append(dist.all_gather(gathered, big, async_op=True))
        time.sleep(0.1)
    begin_s = time.monotonic()
    dist.destroy_process_group()
    print(f"ended with {len(works)} under way within {math.ceil(time.monotonic() - begin_s)} s")


def main(fault: str, operation: str = "sum", meanwhile: str = "") -> None:
    if fault == "none":
        return no_fault()
    dist.init_process_group("sirtaki", timeout=timedelta(seconds=60))
    big = torch.ones(500_000)
    gathered = [torch.empty_like(big) for _ in range(dist.get_world_size())]
    acts: dict[str, Callable[[], object]] = {
        "sum": partial(dist.all_reduce, big),
        "gather": partial(dist.all_gather, gathered, big),
        "compiled": lambda: functional.wait_tensor(functional.all_reduce(big, "sum", dist.group.WORLD)),
        "barrier": dist.barrier,
        "small": partial(dist.all_reduce, torch.ones(3)),
        "broadcast": partial(dist.broadcast, torch.ones(3), 1),
        "gradients": partial(train, DistributedDataParallel(torch.nn.Linear(6, 3))),
    }
    operation = operation.removesuffix("_gloo")
    act = acts[operation]
    if fault != "before":
        act()
    dist.barrier()
    if fault == "stand_still":  # only now, because a busy machine may need longer for the rendezvous
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    told = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        match fault:
            case "before" | "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "destroy":
                dist.destroy_process_group()
                return
            case "stand_still":
                time.sleep(8)
                os._exit(0)
            case _:
                break_transport(fault)
                act_and_tell(act)
                others = [str(rank) for rank in range(dist.get_world_size()) if rank != 1]
                with suppress(RuntimeError):  # rank 0 has exited, and with it the store
                    told.wait(others, timedelta(seconds=KEEP_OPEN_S))
                os._exit(0)
    act_and_tell(acts[meanwhile or operation])
    told.set(str(dist.get_rank()), "")
    try:
        act()
    except RuntimeError as err:
        print(f"again: {type(err).__name__}", flush=True)
    dist.destroy_process_group()
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
