"""Streams, shared memory or a store that cannot be opened on one rank. Started by test_warmup.py."""

import gc
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conformance.transport import expected, values
from rank_jobs import cases

from sirtaki.comm.control import plane
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import Algorithm, CommPlan, TransportKind, Unit
from sirtaki.comm.router import Route, Router
from sirtaki.comm.transports import gloo, shared_memory
from sirtaki.comm.transports.contract import FlatBuffer, ReduceOp
from sirtaki.engine.ranks import open_ranks
from sirtaki.engine.settings import Settings
from sirtaki.errors import PlanError, TransportError

SHARED, MPI, GLOO = (
    (kind, Algorithm.FLAT) for kind in (TransportKind.SHARED_MEMORY, TransportKind.MPI, TransportKind.GLOO)
)
NUMEL = 1000

control: ControlPlane
unlucky: bool
"""Whether this is the rank on which opening fails."""


def plan_of(route: Route, streams: int) -> CommPlan:
    bounds = [NUMEL * number // streams for number in range(streams + 1)]
    units = tuple(
        Unit(start=bounds[number], stop=bounds[number + 1], stream=number, algorithm=route[1])
        for number in range(streams)
    )
    return CommPlan(numel=NUMEL, units=units, streams=streams, transport=route[0])


def reduces_right(router: Router, plan: CommPlan, buffer: FlatBuffer | None = None) -> None:
    buffer = buffer or router.allocate(NUMEL, torch.float64)
    buffer.tensor.copy_(values(control.rank, NUMEL, torch.float64))
    router.wait_for(router.all_reduce_plan(buffer, plan))
    wanted = expected(control.size, NUMEL, torch.float64, ReduceOp.SUM, 1.0)
    torch.testing.assert_close(buffer.tensor, wanted, rtol=1e-14, atol=0.0)


def descriptors() -> int:
    gc.collect()  # because exceptions hold references to what was in flight
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def limit(kind: int, value: int) -> Iterator[None]:
    """Limit a resource on the unlucky rank."""
    before = resource.getrlimit(kind)
    if unlucky:
        resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def broken(owner: Any, name: str, error: Exception, *, when: Callable[..., bool] = lambda *_: True) -> Iterator[None]:
    """Make a function raise on the unlucky rank."""
    real = getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise error
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, fail if unlucky else real):
        yield


def no_descriptors_left() -> None:
    router = Router(control, timeout_s=30.0)
    small = plan_of(GLOO, 2)
    router.open_plan(small)
    before = descriptors()
    with limit(resource.RLIMIT_NOFILE, before + 10):
        with pytest.raises(
            TransportError, match=rf"24 streams .* of transport gloo.*rank {control.size - 1}: .*descriptors"
        ):
            router.open_plan(plan_of(GLOO, 24))
        assert descriptors() == before, (before, descriptors())
        reduces_right(router, small)
    with pytest.raises(PlanError, match="could not be opened"):  # a failed plan is not tried again
        router.open_plan(plan_of(GLOO, 24))
    router.open_plan(plan_of(GLOO, 4))
    reduces_right(router, plan_of(GLOO, 4))
    router.close()


def no_threads_left() -> None:
    router = Router(control, timeout_s=30.0)
    router.open_plan(plan_of(GLOO, 2))
    before = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    threads = threading.active_count()
    with limit(resource.RLIMIT_AS, before + 100 * 2**20):  # enough for some threads
        with pytest.raises(TransportError, match=r"threads cannot be started: .*; the limit of .* ulimit -v"):
            router.open_plan(plan_of(GLOO, 24))
        assert threading.active_count() == threads
        reduces_right(router, plan_of(GLOO, 2))
    router.close()


def offers_fit_the_scarcest_rank() -> None:
    with limit(resource.RLIMIT_NOFILE, descriptors() + 2 * 3 * (control.size + gloo.OWN_DESCRIPTORS)):
        router = Router(control, timeout_s=30.0)
        assert router.max_streams([GLOO]) <= 3
        assert router.max_streams([MPI]) == 24
        router.close()


class NoRendezvous(gloo.ProcessGroupGloo):
    def __init__(self, *_: Any) -> None:
        raise RuntimeError("no rendezvous")


def half_opened_streams_are_closed() -> None:
    for route, fault in (
        (GLOO, broken(gloo.ProcessGroupGloo, "create_device", RuntimeError("no device"))),
        (GLOO, mock.patch.object(gloo, "ProcessGroupGloo", NoRendezvous if unlucky else gloo.ProcessGroupGloo)),
        (MPI, broken(threading.Thread, "start", RuntimeError("no thread"), when=lambda it: "-mpi-2" in it.name)),
        (SHARED, broken(threading.Thread, "start", RuntimeError("no thread"), when=lambda it: "-shm-2" in it.name)),
        (SHARED, broken(os, "pipe", OSError(24, "no pipe"))),
    ):
        router = Router(control, timeout_s=30.0)
        router.open_plan(plan_of(route, 1))
        before, threads = descriptors(), threading.active_count()
        if route is GLOO:
            with mock.patch.object(gloo, "RENDEZVOUS_TIMEOUT_S", 2.0), fault:
                refuses(router, plan_of(route, 4))
        else:
            with fault:
                refuses(router, plan_of(route, 4))
        assert descriptors() == before, (route, descriptors(), before)
        assert threading.active_count() == threads
        reduces_right(router, plan_of(route, 1))
        router.open_plan(plan_of(route, 2))  # half as many streams as in the rejected plan
        reduces_right(router, plan_of(route, 2))
        router.close()


def refuses(router: Router, plan: CommPlan) -> None:
    with pytest.raises(TransportError, match=f"rank {control.size - 1}.* no "):
        router.open_plan(plan)


def a_route_that_does_not_open_is_left_out() -> None:
    router = Router(control, timeout_s=30.0)
    with broken(os, "pipe", OSError(24, "no pipe")), pytest.raises(TransportError):
        router.open_plan(plan_of(SHARED, 1))
    assert router.routes == (MPI, GLOO)
    router.close()


def buffers_that_cannot_be_shared_are_not() -> None:
    router = Router(control, timeout_s=30.0)
    assert SHARED in router.routes
    with limit(resource.RLIMIT_FSIZE, 1000):
        buffer = router.allocate(NUMEL, torch.float64)
    assert SHARED not in router.routes
    router.open_plan(plan_of(MPI, 2))
    reduces_right(router, plan_of(MPI, 2), buffer)
    router.close()


def an_unreachable_store_leaves_mpi() -> None:
    apart = ControlPlane(open_ranks(Settings.from_environ()))
    with broken(plane, "reach", TransportError("rank 0 cannot be reached")):
        router = Router(apart, timeout_s=30.0)
    assert router.routes == (SHARED, MPI)
    router.open_plan(plan_of(MPI, 1))
    reduces_right(router, plan_of(MPI, 1))
    router.close()
    apart.close()


def shared_memory_needs_no_pidfd() -> None:
    said = []
    with (
        broken(os, "pidfd_open", OSError(38, "Function not implemented"), when=lambda _: True),
        mock.patch.object(shared_memory, "_warn_once", said.append),
    ):
        router = Router(control, timeout_s=30.0)
        router.open_plan(plan_of(SHARED, 2))
        reduces_right(router, plan_of(SHARED, 2))
    assert bool(said) == unlucky
    router.close()


CASES = cases(globals())

if __name__ == "__main__":
    control = ControlPlane(open_ranks(Settings.from_environ()))
    unlucky = control.rank == control.size - 1
    for case in [case for case in CASES if case.__name__ in sys.argv] or CASES:
        try:
            case()
        except BaseException:
            traceback.print_exc()
            control.comm.abort("a case has failed")
        control.barrier()
        print(f"passed {case.__name__}", flush=True)
    control.close()
