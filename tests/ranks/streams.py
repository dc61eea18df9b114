"""Reduces gradients on a device with streams: one of threads, or with TEST_GPU=1 a GPU that all ranks share.

Started by test_streams.py and test_gpu.py with several ranks. Arguments: what to do, and how often.
"""

import os
import random
import sys
from typing import Any

import torch
from conformance.transport import check_route
from fakes.streams import FakeDevice, FakeOpener

from sirtaki.autotune.knobs import MIB, Knobs, NcclWays
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.device import cuda_device
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.synchroniser import Synchroniser
from sirtaki.comm.nccl_streams.transport import ask_for_launch_order, find_nccl
from sirtaki.comm.plan import CommPlan, GradientLayout, NcclWay, TransportKind
from sirtaki.comm.router import Router
from sirtaki.engine.ranks import open_ranks
from sirtaki.engine.settings import Settings
from sirtaki.engine.stream_trial import try_streams
from sirtaki.errors import PlanError

local_size = os.environ.get("TEST_LOCAL_SIZE")
control = ControlPlane(open_ranks(Settings.from_environ()), local_size=int(local_size) if local_size else None)
rank, size = control.rank, control.size
through_nccl = sys.argv[1].startswith("nccl")
device: Any
opener: Any = None
if os.environ.get("TEST_GPU") == "1":
    # Ranks that seem to be on different hosts may share a GPU; they talk over sockets, slowly.
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    ask_for_launch_order()
    device = cuda_device(0)
    if through_nccl:
        opener = find_nccl(control, device, forced=True, timeout_s=60.0)
        assert opener is not None
else:
    device = FakeDevice(seed=1000 * rank)
    if through_nccl:
        opener = FakeOpener(control, device)
place = device.torch_device
ITERATIONS = int(sys.argv[2])
SHAPES = [(30, 20), (20,), (1,), (0,), (7, 3, 5), (2500,), (), (64, 64), (3,), (999,)]


def gradient(param: torch.Tensor, index: int, iteration: int, of_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(iteration * 10_000 + index * 100 + of_rank)
    return torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)


def late(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory is used again as soon as it is let go, as that on a GPU is anyway."""
    return device.reuse_when_freed(tensor) if isinstance(device, FakeDevice) else tensor


class Training:
    """One model with its synchroniser, and the plain mean that its gradients should be."""

    def __init__(self, name: str, dtypes: list[torch.dtype]) -> None:
        self.router = Router(control, timeout_s=30.0, device=device, nccl=opener)
        self.params = [
            torch.zeros(shape, dtype=dtype, device=place, requires_grad=True)
            for shape, dtype in zip(SHAPES, dtypes, strict=True)
        ]
        self.salt = sum(map(ord, name))
        self.sync = Synchroniser(
            self.params,
            [f"{name}{index}" for index in range(len(self.params))],
            control=control,
            router=self.router,
            reduction=Reduction(postscale=1.0 / size),
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
        """Gradients appear on the default stream, late, and their memory is used again once they are let go."""
        for param in self.params:
            param.grad = None
        for index in self.order:
            if index not in self.absent(rank):
                param = self.params[index]
                param.grad = late(torch.full_like(param, 1e9))
                values = gradient(param, index, self.sync.iteration + self.salt, rank)
                device.launch(param.grad.data.copy_, values)  # as CUDA: the version is counted when it is called
                self.sync.ready(index, param.grad, param.grad._version)

    def step(self) -> None:
        """Reduces, and checks what the default stream finds in the gradients afterwards."""
        iteration = self.sync.iteration
        absent = [self.absent(other) for other in range(size)]
        report = self.sync.finish()
        assert report.span_s >= 0
        found = [torch.full_like(param, -1.0) for param in self.params]
        grads = [param.grad for param in self.params]
        for copy, grad in zip(found, grads, strict=True):
            assert grad is not None
            device.launch(copy.copy_, grad)
        if iteration % 3 == 0:  # otherwise the host runs ahead, and what is there is looked at later
            device.synchronise()
        self.check(iteration, found, absent)

    def check(self, iteration: int, found: list[torch.Tensor], absent: list[set[int]]) -> None:
        device.synchronise()
        for index, param in enumerate(self.params):
            parts = [
                gradient(param, index, iteration + self.salt, other).double() * (index not in absent[other])
                for other in range(size)
            ]
            wanted = torch.stack(parts).sum(0) / size
            tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[param.dtype]
            torch.testing.assert_close(found[index].cpu().double(), wanted, rtol=tolerance, atol=tolerance)

    def close(self) -> None:
        device.synchronise()
        self.sync.close()
        self.router.close()


def conform() -> None:
    router = Router(control, timeout_s=30.0, device=device, nccl=opener)
    for route in router.routes:
        check_route(control, router, route)
        if rank == 0:
            print(f"route {route[0].value} {route[1].value}")
    router.close()


def train() -> None:
    mixed = [torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64] * 2
    for dtypes in ([torch.float32] * len(SHAPES), mixed):
        training = Training("a", dtypes)
        for number in range(ITERATIONS):
            if number % 5 == 4:
                knobs = ((64, 3, None), (100_000, 1, 512), (4096, 2, 1024))[number % 3]
                unit_bytes, streams, threads = knobs
                threads = threads if opener is not None else None
                training.sync.set_plans(
                    [training.plan(layout, unit_bytes, streams, threads) for layout in training.sync.layouts]
                )
            if number % 4 == 3:
                random.Random(rank * 1000 + number).shuffle(training.order)
            training.backward()
            training.step()
        assert not training.sync.profiling or ITERATIONS < 4
        training.close()


def train_two() -> None:
    """Two optimizers whose gradients come in one backward pass, mixed in another way on each rank."""
    first, second = Training("a", [torch.float32] * len(SHAPES)), Training("b", [torch.float32] * len(SHAPES))
    for number in range(ITERATIONS):
        both = [first, second]
        random.Random(rank + number).shuffle(both)
        for training in both:
            training.backward()
        second.step()
        first.step()
    first.close()
    second.close()


def ways() -> None:
    """Whatever NCCL is told, sums are right; what it refuses it refuses on all ranks; the environment is as before."""
    router = Router(control, timeout_s=30.0, device=device, nccl=opener)
    before = dict(os.environ)
    for way in router.nccl_ways():
        knobs = Knobs(unit_bytes=4 * MIB, streams=2, transport=TransportKind.NCCL, nccl=NcclWays(small=way, large=way))
        layout = GradientLayout(sizes=(2 * MIB, 1000))  # two large units, and a small one
        try:
            router.open_plan(knobs.to_plan(layout))
        except PlanError as err:
            control.require_equal(str(way), "what NCCL refuses")
            print(f"refused {err}")
            continue
        buffer = router.allocate(layout.numel, torch.float32)
        buffer.tensor.fill_(rank + 1.0)
        router.wait_for(router.all_reduce_plan(buffer, knobs.to_plan(layout)))
        device.synchronise()
        assert bool((buffer.tensor == size * (size + 1) / 2).all())
        print(f"summed by {way.value}")
    assert dict(os.environ) == before
    router.close()


def gain() -> None:
    router = Router(control, timeout_s=30.0, device=device, nccl=opener)
    trial = try_streams(control, router)
    assert trial.two_s is not None
    assert trial.one_s > 0
    assert trial.max_streams >= 4
    assert "two NCCL streams" in trial.describe()
    router.close()


def memory() -> None:
    """The device's memory does not grow."""
    training = Training("a", [torch.float32] * len(SHAPES))
    used = []
    for _ in range(ITERATIONS):
        training.backward()
        training.step()
        used.append(torch.cuda.memory_allocated())
    assert max(used[20:]) <= 1.01 * max(used[:20]), (max(used[:20]), max(used[20:]))
    training.close()


PROGRAMS = {"gain": gain, "memory": memory, "conform": conform, "train": train, "two": train_two, "ways": ways}
PROGRAMS[sys.argv[1].split("-")[1]]()
if isinstance(opener, FakeOpener):
    control.require_equal(" ".join(opener.issued), "the order in which NCCL is used")
    if rank == 0:
        print(f"issued {len(opener.issued)} on {len(set(opener.opened))} communicators")
control.close()
print(f"ok {rank}")
