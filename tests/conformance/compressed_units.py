"""Compare units that are compressed on a GPU with the same units on the host: sums and residuals, over several steps.

`tests/ranks/on_fake_gpus.py` runs this on fake GPUs, and `bench.gpu` on a GPU.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from conformance.training import batch

from sirtaki.comm.compress import CompressedUnits, Feedback, scheme_of
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import CommPlan, GradientLayout, Route, TransportKind, Unit
from sirtaki.comm.router import FLAT, Router
from sirtaki.comm.transports.contract import FlatBuffer

SHAPES = [(64, 100), (256,), (96, 128), (2048,)]  # multiples of 256 bytes, so that no gradient is padded on a GPU
EDGES = [0, 3200, 12032, 20992]  # the first unit ends within a matrix
COMPRESSORS = {"int8": 0.02, "fp8": 0.15, "topk:0.05": 1e-5, "powersgd:2": 1e-2, "bf16": 0.01}
"""Largest differences between GPU and host, relative to the largest number. Rounding may differ in the last digit."""

STEPS, WARM_UP = 5, 2


@dataclass
class Group:
    """What compression needs of a `FlatGroup`."""

    layout: GradientLayout
    buffer: FlatBuffer
    places: list[torch.Tensor]


class Units:
    """A flat buffer whose units are compressed, on one route."""

    def __init__(
        self, control: ControlPlane, router: Router, route: Route, compressor: str, dtype: torch.dtype = torch.float32
    ) -> None:
        """Open the streams. Collective."""
        sizes = tuple(math.prod(shape) for shape in SHAPES)
        layout = GradientLayout(sizes=sizes, names=tuple("abcd"), device=router.device.torch_device.type)
        units = [Unit(start=a, stop=b, stream=i % 2) for i, (a, b) in enumerate(pairwise(EDGES))]
        self.plan = CommPlan(numel=layout.numel, units=tuple(units), streams=2, transport=route[0])
        self.router, self.route, self.scale = router, route, 1.0 / control.size
        router.open_plan(self.plan)
        self.buffer, self.feedback = router.allocate(layout.numel, dtype), Feedback()
        scheme = scheme_of(compressor)
        self.compressed = CompressedUnits(router, scheme, self.feedback, rank=control.rank, size=control.size)
        parts = zip(torch.split(self.buffer.tensor, sizes), SHAPES, strict=True)
        group = Group(layout, self.buffer, [part.view(shape) for part, shape in parts])
        self.compressed.lay_out([group], [self.plan])

    def reduce(self, values: torch.Tensor) -> None:
        """Average `values` over ranks into the buffer. Collective."""
        self.buffer.tensor.copy_(values)
        works = [
            self.compressed.all_reduce(
                self.buffer, unit.start, unit.stop, route=self.route, stream=unit.stream, scale=self.scale
            )
            for unit in self.plan.units
        ]
        self.router.wait_for(works)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the sums and the residuals, on the host."""
        found = {"sums": self.buffer.tensor} | self.feedback.residuals
        return {name: each.cpu().float() for name, each in found.items()}


def check_units(
    control: ControlPlane,
    on_gpu: Router,
    steady: Callable[[], AbstractContextManager[object]],
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    exact: bool = False,
) -> list[str]:
    """Reduce equal numbers by each compressor over NCCL and over Gloo, and compare. Collective.

    Args:
        control: control plane of the ranks.
        on_gpu: router over NCCL.
        steady: returns a context manager that reports the calls in its body that make the host wait for the GPU.
        dtypes: dtypes of the gradients. All but the first are tried with int8 only.
        exact: True if GPU and host compute with the same instructions.

    Returns:
        The compressors, with the dtypes.
    """
    on_host = Router(control, timeout_s=30.0)
    cases = [(name, dtypes[0]) for name in COMPRESSORS] + [("int8", dtype) for dtype in dtypes[1:]]
    for name, dtype in cases:
        routes = {(TransportKind.NCCL, FLAT): on_gpu, (TransportKind.GLOO, FLAT): on_host}
        there, here = (Units(control, router, route, name, dtype) for route, router in routes.items())
        for step in range(STEPS):
            values = batch(control.rank, step, here.plan.numel, dtype=dtype)
            values[:64] *= 100.0
            if step == 3:
                values[[70, 15000]] = torch.tensor([math.inf, math.nan], dtype=dtype)
            given = values.to(there.buffer.tensor.device)
            with steady() if step >= WARM_UP else nullcontext():
                there.reduce(given)
            here.reduce(values)
            found, wanted = there.state(), here.state()
            assert any(bool(wanted[key].any()) for key in wanted if key != "sums"), name
            for key, numbers in wanted.items():
                largest = float(numbers.nan_to_num(posinf=0.0, neginf=0.0).abs().max())
                atol = 0.0 if exact else COMPRESSORS[name] * max(1.0, largest)
                text = f"{name} {dtype}, step {step}, {key}: "
                torch.testing.assert_close(
                    found[key], numbers, rtol=0.0, atol=atol, equal_nan=True, msg=lambda t, m=text: m + t
                )
        for units in (there, here):
            assert units.compressed.close()
    on_host.close()
    return [f"{name} {dtype}" for name, dtype in cases]
