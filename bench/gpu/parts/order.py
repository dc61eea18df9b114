"""Stress test of the order of CUDA streams. Every stream is delayed before it writes, so that a missing wait shows.

Gradients hold a sentinel until a delayed write on the backward pass's stream replaces it. The optimizer's stream is
delayed before it reads. An operation that packs, reduces or reads too early finds the sentinel, or freed memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.gpu.runner import RankRun
from sirtaki.autotune.knobs import Knobs
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.gradients.pipeline import GradientPipeline
from sirtaki.comm.nccl_streams.transport import Opener
from sirtaki.comm.plan import TransportKind

SHAPES = ((1 << 18,), (300, 200), (20,), (64, 64), (3,), (9999,), (50,))
SENTINEL = 1e9
SCALE = 0.5
"""Factor on the sums. It is not 1, so that NCCL launches a kernel although there is one rank."""

BUSY_S = (0.0, 3e-4, 5e-3)
"""Delays of a stream before a write, used in turn."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Streams that a backward pass and the optimizer use; 0 is the default stream.

    Attributes:
        name: description of the scenario.
        writes: maps the index of a parameter to the number of the stream that writes its gradient.
        steps: number of the optimizer's stream.
        dtype: dtype of the parameters.
        absent: indices of parameters without a gradient.
        staged: whether units travel through host memory instead of NCCL.
        options: further arguments of `GradientPipeline`.
    """

    name: str
    writes: Callable[[int], int]
    steps: int = 0
    dtype: torch.dtype = torch.float32
    absent: tuple[int, ...] = ()
    staged: bool = False
    options: dict[str, Any] = field(default_factory=dict)


SCENARIOS = (
    Scenario(name="all on the default stream", writes=lambda index: 0),
    Scenario(name="all on another stream, the update there", writes=lambda index: 1, steps=1),
    Scenario(name="all on another stream, the update on the default one", writes=lambda index: 1),
    Scenario(name="default stream first, then another", writes=lambda index: 0 if index >= 4 else 1),
    Scenario(name="another stream first, then the default one", writes=lambda index: 1 if index >= 4 else 0),
    Scenario(name="default stream, the update on another", writes=lambda index: 0, steps=2),
    Scenario(name="two other streams mixed", writes=lambda index: 1 + index % 2),
    Scenario(name="three streams mixed, the update on one of them", writes=lambda index: index % 3, steps=2),
    Scenario(name="bfloat16, where NCCL does not scale", writes=lambda index: index % 2, dtype=torch.bfloat16),
    Scenario(name="a parameter without a gradient", writes=lambda index: 1, absent=(2,)),
    Scenario(
        name="unused gradients are None",
        writes=lambda index: index % 2,
        absent=(4,),
        options={"unused_as_none": True},
    ),
    Scenario(name="through host memory, two streams", writes=lambda index: index % 2, staged=True),
)


class Backward:
    """A backward pass of one scenario: writes gradients late, reduces them, and copies them late."""

    def __init__(self, run: RankRun, scenario: Scenario, opener: Opener) -> None:
        """Open a synchroniser."""
        self.place, self.device, self.scenario = run.place, run.place.device, scenario
        self.router = run.place.router(run.control, None if scenario.staged else opener)
        self.streams = [None, *(self.device.make_stream() for _ in range(2))]
        where = {"dtype": scenario.dtype, "device": self.place.torch_device}
        self.params = [torch.zeros(shape, requires_grad=True, **where) for shape in SHAPES]
        kind = TransportKind.STAGED if scenario.staged else TransportKind.NCCL
        knobs = Knobs(unit_bytes=40_000, streams=3, transport=kind)
        self.sync = GradientPipeline(
            self.params,
            [f"p{index}" for index in range(len(self.params))],
            control=run.control,
            router=self.router,
            reduction=Reduction(postscale=SCALE),
            default_plan=knobs.to_plan,
            **scenario.options,
        )
        for stream in range(1, len(self.streams)):
            self.follow(stream, {0})  # Wait for stream 0, on which the buffers were allocated.

    def on(self, number: int) -> contextlib.AbstractContextManager[object]:
        """Run the body on stream `number`."""
        stream = self.streams[number]
        return contextlib.nullcontext() if stream is None else self.device.on(stream)

    def follow(self, number: int, others: set[int]) -> None:
        """Make a stream wait for further streams, as autograd does for the caller's stream after a backward pass."""
        for other in others - {number}:
            with self.on(other):
                event = self.device.record_event()
            with self.on(number):
                self.device.order_after(event)

    def iteration(self, number: int) -> tuple[list[torch.Tensor | None], list[float]]:
        """Run one backward pass and one update. Return copies of gradients, still in flight, and expected values."""
        scenario, wanted = self.scenario, list[float]()
        used: set[int] = set()
        for param in self.params:
            param.grad = None
        for index in reversed(range(len(self.params))):
            value = float(1 + (number * 7 + index) % 50)
            wanted.insert(0, SCALE * value)
            if index in scenario.absent:
                wanted[0] = 0.0
                continue
            stream, param = scenario.writes(index), self.params[index]
            used.add(stream)
            with self.on(stream):
                param.grad = torch.full_like(param, SENTINEL)
                self.place.sleep(BUSY_S[(number + index) % len(BUSY_S)])
                self.device.launch(param.grad.data.fill_, value)
                self.sync.ready(index, param.grad, param.grad._version)
        self.follow(scenario.steps, used)
        found: list[torch.Tensor | None] = []
        with self.on(scenario.steps):
            if self.sync.can_reduce:
                self.sync.reduce(None)
            self.sync.finish()
            self.place.sleep(BUSY_S[number % len(BUSY_S)])
            for param in self.params:
                copy = None if param.grad is None else torch.full_like(param, -1.0)
                found.append(copy)
                if copy is not None:
                    self.device.launch(copy.copy_, param.grad)
        for other in range(len(self.streams)):
            self.follow(other, {scenario.steps})
        return found, wanted

    def check(self, found: list[torch.Tensor | None], wanted: list[float], number: int) -> None:
        """Compare the copies of an iteration's gradients with the expected values. Wait for the GPU first."""
        for index, (copy, value) in enumerate(zip(found, wanted, strict=True)):
            if copy is None:
                assert index in self.scenario.absent, f"iteration {number}: gradient {index} is None"
                continue
            low, high = float(copy.min()), float(copy.max())
            assert low == high == value, f"iteration {number}, gradient {index}: [{low}, {high}], not {value}"

    def close(self) -> None:
        """Free buffers and communicators."""
        self.device.synchronise()
        self.sync.close()
        self.router.close()


def run(run: RankRun) -> None:
    """Run all scenarios, each for its share of the part's time."""
    opener = run.place.opener(run.control)
    for position, scenario in enumerate(SCENARIOS):
        with run.check(scenario.name) as details:
            backward = Backward(run, scenario, opener)
            goes_on = run.until(1 / (len(SCENARIOS) - position))
            pending, number = list[tuple[list[torch.Tensor | None], list[float], int]](), 0
            while number < 6 or (goes_on() and number < (12 if run.place.dry else 400)):
                pending.append((*backward.iteration(number), number))
                if number % 3 == 2:  # In further iterations, the host runs ahead of the GPU.
                    run.place.device.synchronise()
                    while pending:
                        backward.check(*pending.pop(0))
                number += 1
            run.place.device.synchronise()
            for each in pending:
                backward.check(*each)
            backward.close()
            details["iterations"] = number
