"""Checks of reductions on a device with streams.

`tests/ranks/streams.py` runs them on threads as streams, `bench.gpu` on a GPU.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from conformance.transport import check_route

from sirtaki.autotune.knobs import MIB, Knobs, NcclWays
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.nccl_streams.transport import Opener
from sirtaki.comm.plan import CommPlan, GradientLayout, NcclWay, TransportKind
from sirtaki.comm.router import Router
from sirtaki.engine.stream_trial import try_streams
from sirtaki.errors import PlanError

SHAPES = [(30, 20), (20,), (1,), (0,), (7, 3, 5), (2500,), (), (64, 64), (3,), (999,)]
MIXED = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64] * 2

GoesOn = Callable[[], bool]


def always() -> bool:
    """Return True, so that a check is not limited in time."""
    return True


@dataclass(frozen=True, eq=False)
class Streams:
    """The ranks of a job, and the device on which they reduce.

    Attributes:
        control: control plane of the ranks.
        device: a device with streams.
        opener: opens communicators; None = units are staged through host memory.
        reused: makes a tensor's memory be reused as soon as it is freed, as on a GPU.
    """

    control: ControlPlane
    device: Any  # a Device, or a fake one
    opener: Opener | None
    reused: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor

    def router(self) -> Router:
        """Create a router. Collective."""
        return Router(self.control, timeout_s=30.0, device=self.device, nccl=self.opener)


def gradient(param: torch.Tensor, index: int, iteration: int, of_rank: int) -> torch.Tensor:
    """Return a rank's gradient. Every rank can compute its peers' gradients."""
    generator = torch.Generator().manual_seed(iteration * 10_000 + index * 100 + of_rank)
    return torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)


class Training:
    """A model with its synchroniser, and the expected mean of its gradients."""

    def __init__(self, streams: Streams, name: str, dtypes: list[torch.dtype]) -> None:
        self.streams, self.router = streams, streams.router()
        self.device, self.rank, self.size = streams.device, streams.control.rank, streams.control.size
        self.params = [
            torch.zeros(shape, dtype=dtype, device=self.device.torch_device, requires_grad=True)
            for shape, dtype in zip(SHAPES, dtypes, strict=True)
        ]
        self.salt = sum(map(ord, name))
        self.sync = GradientPipeline(
            self.params,
            [f"{name}{index}" for index in range(len(self.params))],
            control=streams.control,
            router=self.router,
            reduction=Reduction(postscale=1.0 / self.size),
            default_plan=self.plan,
        )
        self.order = list(range(len(self.params)))[::-1]

    def plan(
        self, layout: GradientLayout, unit_bytes: int = 2000, streams: int = 2, threads: int | None = None
    ) -> CommPlan:
        transport, algorithm = self.router.routes[random.Random(unit_bytes).randrange(len(self.router.routes))]
        way = NcclWays.of(unit_bytes, NcclWay.RING_SIMPLE) if threads else NcclWays()
        return Knobs(
            unit_bytes=unit_bytes,
            streams=streams,
            transport=transport,
            algorithm=algorithm,
            threads=threads,
            nccl=way,
        ).to_plan(layout)

    def absent(self, of_rank: int) -> set[int]:
        shared = random.Random(self.sync.iteration * 100 + of_rank)
        return {index for index in range(len(self.params)) if shared.random() < 0.1}

    def backward(self) -> None:
        """Write gradients late on the default stream. Their memory is reused once it is freed."""
        for param in self.params:
            param.grad = None
        for index in self.order:
            if index not in self.absent(self.rank):
                param = self.params[index]
                param.grad = self.streams.reused(torch.full_like(param, 1e9))
                values = gradient(param, index, self.sync.iteration + self.salt, self.rank)
                self.device.launch(param.grad.data.copy_, values)  # like CUDA, which counts the version at the call
                self.sync.ready(index, param.grad, param.grad._version)

    def step(self) -> None:
        """Reduce the gradients, and check them on the default stream afterwards."""
        iteration = self.sync.iteration
        absent = [self.absent(other) for other in range(self.size)]
        report = self.sync.finish()
        assert report.span_s >= 0
        found = [torch.full_like(param, -1.0) for param in self.params]
        grads = [param.grad for param in self.params]
        for copy, grad in zip(found, grads, strict=True):
            assert grad is not None
            self.device.launch(copy.copy_, grad)
        if iteration % 3 == 0:  # in further iterations the host runs ahead, and values are checked later
            self.device.synchronise()
        self.check(iteration, found, absent)

    def check(self, iteration: int, found: list[torch.Tensor], absent: list[set[int]]) -> None:
        self.device.synchronise()
        for index, param in enumerate(self.params):
            parts = [
                gradient(param, index, iteration + self.salt, other).double() * (index not in absent[other])
                for other in range(self.size)
            ]
            wanted = torch.stack(parts).sum(0) / self.size
            tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[param.dtype]
            torch.testing.assert_close(found[index].cpu().double(), wanted, rtol=tolerance, atol=tolerance)

    def close(self) -> None:
        self.device.synchronise()
        self.sync.close()
        self.router.close()


def conform(streams: Streams) -> list[str]:
    """Run the conformance suite over every route. Return the routes' names. Collective."""
    router = streams.router()
    for route in router.routes:
        check_route(streams.control, router, route)
    names = [f"{route[0].value} {route[1].value}" for route in router.routes]
    router.close()
    return names


def train(streams: Streams, iterations: int, goes_on: GoesOn = always) -> int:
    """Check that gradients equal the mean under changing plans and orders. Return the iterations. Collective."""
    done = 0
    for dtypes in ([torch.float32] * len(SHAPES), MIXED):
        training = Training(streams, "a", dtypes)
        for number in range(iterations):
            if not goes_on():
                break
            if number % 5 == 4:
                knobs = ((64, 3, None), (100_000, 1, 512), (4096, 2, 1024))[number % 3]
                unit_bytes, count, threads = knobs
                threads = threads if streams.opener is not None else None
                training.sync.use(
                    [training.plan(layout, unit_bytes, count, threads) for layout in training.sync.layouts]
                )
            if number % 4 == 3:
                random.Random(training.rank * 1000 + number).shuffle(training.order)
            training.backward()
            training.step()
            done += 1
        assert not training.sync.profiling or done < 4
        training.close()
    return done


def train_two(streams: Streams, iterations: int, goes_on: GoesOn = always) -> int:
    """Train two optimizers whose gradients mix in one backward pass, differently on each rank. Collective."""
    first, second = (Training(streams, name, [torch.float32] * len(SHAPES)) for name in "ab")
    done = 0
    while done < iterations and goes_on():
        both = [first, second]
        random.Random(streams.control.rank + done).shuffle(both)
        for training in both:
            training.backward()
        second.step()
        first.step()
        done += 1
    first.close()
    second.close()
    return done


def ways(streams: Streams) -> dict[str, str]:
    """Check sums with NCCL's algorithms. All ranks must reject the same ones. The environment stays unchanged."""
    control, router, before = streams.control, streams.router(), dict(os.environ)
    became = {}
    for way in router.nccl_ways:
        knobs = Knobs(unit_bytes=4 * MIB, streams=2, transport=TransportKind.NCCL, nccl=NcclWays(small=way, large=way))
        layout = GradientLayout(sizes=(2 * MIB, 1000))  # two large units, and a small one
        try:
            router.open_plan(knobs.to_plan(layout))
        except PlanError as err:
            control.require_equal(str(way), "what NCCL refuses")
            became[way.value] = f"refused: {err}"
            continue
        buffer = router.allocate(layout.numel, torch.float32)
        buffer.tensor.fill_(control.rank + 1.0)
        router.wait_for(router.all_reduce_plan(buffer, knobs.to_plan(layout)))
        streams.device.synchronise()
        assert bool((buffer.tensor == control.size * (control.size + 1) / 2).all())
        became[way.value] = "summed"
    assert dict(os.environ) == before
    router.close()
    return became


def gain(streams: Streams) -> None:
    """Compare one stream with two. Collective."""
    router = streams.router()
    trial = try_streams(streams.control, router)
    assert trial.two_s is not None
    assert trial.one_s > 0
    assert trial.max_streams >= 4
    assert "two NCCL streams" in trial.describe()
    router.close()
