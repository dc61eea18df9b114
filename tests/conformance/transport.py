"""Checks of the contract that every transport must meet. `tests/ranks/transports.py` runs them on every rank."""

import itertools
import random
from functools import partial

import torch

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.device import CudaDevice, Device
from sirtaki.comm.plan import CommPlan, Route, Unit
from sirtaki.comm.router import Router
from sirtaki.comm.transports.contract import ReduceOp, Work

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
SIZES = (0, 1, 7, 1021, 32769)
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 1e-6, torch.float64: 1e-14}


def values(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Return the values of `rank`. Every rank can compute its peers' values."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        return torch.rand(numel, generator=generator, dtype=torch.float64).add_(0.5).to(dtype)
    return torch.randint(1, 5, (numel,), generator=generator, dtype=dtype)


def expected(size: int, numel: int, dtype: torch.dtype, op: ReduceOp, scale: float, salt: int = 0) -> torch.Tensor:
    """Return the expected reduction in float64 (int64 for integers)."""
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    parts = torch.stack([values(rank, numel, dtype, salt).to(wide) for rank in range(size)])
    result = {
        ReduceOp.SUM: lambda: parts.sum(0),
        ReduceOp.PRODUCT: lambda: parts.prod(0),
        ReduceOp.MIN: lambda: parts.amin(0),
        ReduceOp.MAX: lambda: parts.amax(0),
    }[op]()
    return result * scale if scale != 1.0 else result


def finish(router: Router, work: Work) -> None:
    if not work.wait(timeout_s=20.0):
        raise AssertionError("the reduction did not end within 20 s")
    router.device.synchronise()


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, size: int) -> None:
    found = found.cpu()
    if dtype.is_floating_point:
        tolerance = TOLERANCE[dtype] * size
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    else:
        assert torch.equal(found.long(), wanted)


def reduces_every_dtype_size_and_operation(control: ControlPlane, router: Router, route: Route) -> None:
    for dtype in DTYPES:
        for numel in SIZES:
            buffer = router.allocate(numel, dtype)
            for salt, op in enumerate(ReduceOp):
                scale = 1.0 / control.size if op is ReduceOp.SUM and dtype.is_floating_point else 1.0
                buffer.tensor.copy_(values(control.rank, numel, dtype, salt))
                finish(router, router.all_reduce(buffer, 0, numel, route=route, stream=0, op=op, scale=scale))
                assert_close(buffer.tensor, expected(control.size, numel, dtype, op, scale, salt), dtype, control.size)


def touches_nothing_outside_the_range(control: ControlPlane, router: Router, route: Route, *, stream: int = 0) -> None:
    buffer = router.allocate(1000, torch.float32)
    buffer.tensor.fill_(float(control.rank))
    finish(router, router.all_reduce(buffer, 333, 667, route=route, stream=stream))
    total = float(sum(range(control.size)))
    assert torch.all(buffer.tensor[333:667] == total)
    assert torch.all(buffer.tensor[:333] == control.rank)
    assert torch.all(buffer.tensor[667:] == control.rank)


def reduces_twenty_five_megabytes(control: ControlPlane, router: Router, route: Route) -> None:
    period = 4093  # a prime, so that a misplaced part is detected
    repetitions = 25 * 1024 * 1024 // 4 // period
    numel = period * repetitions
    buffer = router.allocate(numel, torch.float32)
    buffer.tensor.copy_(values(control.rank, period, torch.float32).repeat(repetitions))
    finish(router, router.all_reduce(buffer, 0, numel, route=route, stream=0))
    wanted = expected(control.size, period, torch.float32, ReduceOp.SUM, 1.0)
    for found in (buffer.tensor.view(repetitions, period).amin(0), buffer.tensor.view(repetitions, period).amax(0)):
        assert_close(found, wanted, torch.float32, control.size)


def keeps_many_units_on_many_streams_apart(control: ControlPlane, router: Router, route: Route) -> None:
    """Check units of random sizes on random streams, awaited in an order that differs between ranks."""
    streams = min(4, router.max_streams())
    for repetition in range(5):
        shared = random.Random(repetition)
        cuts = sorted({0, 200_000, *(shared.randrange(200_000) for _ in range(60))})
        buffer = router.allocate(200_000, torch.float32)
        buffer.tensor.copy_(values(control.rank, 200_000, torch.float32, repetition))
        works = [
            router.all_reduce(buffer, start, stop, route=route, stream=shared.randrange(streams))
            for start, stop in itertools.pairwise(cuts)
        ]
        random.Random(control.rank).shuffle(works)
        for work in works:
            finish(router, work)
        wanted = expected(control.size, 200_000, torch.float32, ReduceOp.SUM, 1.0, repetition)
        assert_close(buffer.tensor, wanted, torch.float32, control.size)


def does_first_what_units_need(control: ControlPlane, router: Router, route: Route) -> None:
    """Write elements just before their units are reduced, in the streams' threads if there are any."""
    streams, numel = min(4, router.max_streams()), 60_000
    for repetition in range(20):
        shared, mine = random.Random(repetition), random.Random(control.rank)
        cuts = sorted({0, numel, *(shared.randrange(numel) for _ in range(30))})
        buffer = router.allocate(numel, torch.float32)
        given, works = values(control.rank, numel, torch.float32, repetition), list[Work]()
        for start, stop in itertools.pairwise(cuts):
            stream = shared.randrange(streams)
            write = partial(buffer.tensor[start:stop].copy_, given[start:stop])
            if mine.random() < 0.7:
                router.prepare(write, route=route, stream=stream)
            else:
                write()
            works.append(router.all_reduce(buffer, start, stop, route=route, stream=stream))
        for work in works:
            finish(router, work)
        wanted = expected(control.size, numel, torch.float32, ReduceOp.SUM, 1.0, repetition)
        assert_close(buffer.tensor, wanted, torch.float32, control.size)


def plan_on(streams: int, route: Route) -> CommPlan:
    transport, algorithm = route
    units = tuple(Unit(start=i, stop=i + 1, stream=i, algorithm=algorithm) for i in range(streams))
    return CommPlan(numel=streams, streams=streams, transport=transport, units=units)


def goes_on_with_fewer_streams_and_with_more_again(control: ControlPlane, router: Router, route: Route) -> None:
    streams = min(4, router.max_streams())
    for _ in range(3):
        for kept in sorted({streams, max(1, streams - 1), 1}, reverse=True):
            router.keep_only([plan_on(kept, route)])
            touches_nothing_outside_the_range(control, router, route, stream=kept - 1)
        router.keep_only([])
        router.open_plan(plan_on(streams, route))


def check_route(control: ControlPlane, router: Router, route: Route) -> None:
    """Run the whole suite over one route. Collective."""
    router.open_plan(plan_on(min(4, router.max_streams()), route))
    reduces_every_dtype_size_and_operation(control, router, route)
    touches_nothing_outside_the_range(control, router, route)
    if isinstance(router.device, Device | CudaDevice):  # fake devices with threads as streams get fewer units
        reduces_twenty_five_megabytes(control, router, route)
    goes_on_with_fewer_streams_and_with_more_again(control, router, route)
    keeps_many_units_on_many_streams_apart(control, router, route)
    if not router.device.streams:
        does_first_what_units_need(control, router, route)
