"""Measures how all-reduces and computation slow each other down on one GPU, by the threads that the all-reduces get.

LIBRA's samples (above eq. 5 and 6): communication alone, computation alone, and both at once, for several thread
allowances, and for none, which is NCCL's own choice. Taken where threads can be allotted; the tuner is offered threads
only where they make a difference that is more than noise.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.autotune.knobs import MIB
from sirtaki.autotune.model.contention import ContentionModel
from sirtaki.autotune.model.fits import ComputeSample, TransmissionSample, fit_contention
from sirtaki.comm.plan import CommPlan, Unit
from sirtaki.errors import TuningError

if TYPE_CHECKING:
    from sirtaki.comm.control.plane import ControlPlane
    from sirtaki.comm.device import Device
    from sirtaki.comm.plan import Route
    from sirtaki.comm.router import Router
    from sirtaki.comm.transports.contract import FlatBuffer

logger = logging.getLogger(__name__)

UNIT_BYTES = (2 * MIB, 16 * MIB)
MATRIX = 2048
COMPUTE_STEPS = 16
"""Matrix products that are computed beside the all-reduces: some milliseconds on a current GPU."""

MOST_REDUCTIONS = 64

REPETITIONS = 3
CLEAR = 3.0
"""Threads are offered where their effect is so many times what repeated measurements differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadProbe:
    """One allowance, measured `REPETITIONS` times; each time the slowest rank's.

    Attributes:
        threads: of each all-reduce; None = as many as NCCL takes by itself.
        unit_bytes: of each all-reduce.
        alone_s: an all-reduce with nothing beside it, `(REPETITIONS,)`.
        beside_s: an all-reduce beside computation, `(REPETITIONS,)`.
        compute_s: the computation beside all-reduces, `(REPETITIONS,)`.
        undisturbed_s: the computation with nothing beside it, `(REPETITIONS,)`.
    """

    threads: int | None
    unit_bytes: int
    alone_s: tuple[float, ...]
    beside_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    undisturbed_s: tuple[float, ...]


def probe_threads(control: ControlPlane, router: Router, route: Route) -> list[ThreadProbe]:
    """Collective: measures no allowance and every one that the router offers, on one stream of `route`."""
    device = router.device
    buffer = router.allocate(max(UNIT_BYTES) // 4, torch.float32)
    matrix = torch.zeros(MATRIX, MATRIX, device=device.torch_device)
    product = torch.empty_like(matrix)
    probes = []
    for threads in (None, *router.threads()):
        for unit_bytes in UNIT_BYTES:
            plan = _one_unit(route, unit_bytes, threads)
            router.open_plan(plan)
            rounds = [_round(control, router, plan, buffer, matrix, product) for _ in range(REPETITIONS + 1)][1:]
            worst = control.maximum(np.array(rounds))  # (REPETITIONS, 4)
            alone_s, beside_s, compute_s, undisturbed_s = (tuple(column.tolist()) for column in worst.T)
            probes.append(
                ThreadProbe(
                    threads=threads,
                    unit_bytes=unit_bytes,
                    alone_s=alone_s,
                    beside_s=beside_s,
                    compute_s=compute_s,
                    undisturbed_s=undisturbed_s,
                )
            )
    return probes


def _one_unit(route: Route, unit_bytes: int, threads: int | None) -> CommPlan:
    unit = Unit(start=0, stop=unit_bytes // 4, threads=threads, algorithm=route[1])
    return CommPlan(numel=unit.stop, units=(unit,), streams=1, transport=route[0])


def _round(
    control: ControlPlane,
    router: Router,
    plan: CommPlan,
    buffer: FlatBuffer,
    matrix: torch.Tensor,
    product: torch.Tensor,
) -> tuple[float, float, float, float]:
    """Collective: seconds of an all-reduce alone, beside computation, of the computation beside it, and of it alone."""
    device = router.device
    device.synchronise()
    begin = device.record_event()
    router.wait_for(router.all_reduce_plan(buffer, plan, scale=0.0))
    reduced = device.record_event()
    _compute(device, matrix, product)
    computed = device.record_event()
    device.synchronise()
    alone_s, undisturbed_s = device.elapsed_s(begin, reduced), device.elapsed_s(reduced, computed)
    # As many all-reduces as fill the computation's time on every rank, one behind the other beside it.
    wanted = control.maximum(np.array([undisturbed_s / max(alone_s, 1e-6)]))[0]
    count = min(MOST_REDUCTIONS, max(1, round(float(wanted))))
    beside = device.make_stream()
    begin = device.record_event()
    works = [work for _ in range(count) for work in router.all_reduce_plan(buffer, plan, scale=0.0)]
    with device.on(beside):
        router.wait_for(works)
        reduced = device.record_event()
    _compute(device, matrix, product)
    computed = device.record_event()
    device.synchronise()
    return alone_s, device.elapsed_s(begin, reduced) / count, device.elapsed_s(begin, computed), undisturbed_s


def _compute(device: Device, matrix: torch.Tensor, product: torch.Tensor) -> None:
    for _ in range(COMPUTE_STEPS):
        device.launch(_multiply, matrix, product)


def _multiply(matrix: torch.Tensor, product: torch.Tensor) -> None:
    torch.mm(matrix, matrix, out=product)


def threads_matter(probes: list[ThreadProbe]) -> bool:
    """Whether allowances differ in the time of all-reduces or of the computation by clearly more than repetitions do.

    Medians by allowance are compared with the spread of repetitions of one allowance, unit size by unit size.
    """
    for unit_bytes in UNIT_BYTES:
        for quantity in ("beside_s", "compute_s"):
            rows = np.array([getattr(probe, quantity) for probe in probes if probe.unit_bytes == unit_bytes])
            if len(rows) < 2:
                return False
            noise = float(np.median(np.ptp(rows, axis=1)))
            if float(np.ptp(np.median(rows, axis=1))) > CLEAR * noise:
                return True
    return False


def contention_model(probes: list[ThreadProbe], *, alpha_s: float) -> ContentionModel | None:
    """LIBRA's g, p and q from the probes; None, and a line in the log, where they do not fit.

    Args:
        probes: of none and of at least two allowances.
        alpha_s: the start-up time of an all-reduce on the same route.
    """
    counted = [(probe.threads, probe) for probe in probes if probe.threads is not None]
    compute = [
        ComputeSample(alone_s=alone_s, seconds=seconds, threads=threads)
        for threads, probe in counted
        for alone_s, seconds in zip(probe.undisturbed_s, probe.compute_s, strict=True)
    ]
    transmissions = [
        TransmissionSample(unit_bytes=probe.unit_bytes, seconds=seconds, threads=threads, overlapped=overlapped)
        for threads, probe in counted
        for overlapped, column in ((True, probe.beside_s), (False, probe.alone_s))
        for seconds in column
    ]
    try:
        return fit_contention(compute, transmissions, alpha_s=alpha_s, default_threads=_most_like_none(probes))
    except TuningError as err:
        logger.info("no model of contention: %s", err)
        return None


def _most_like_none(probes: list[ThreadProbe]) -> int:
    """The allowance whose times are nearest to those without one, as ratios."""
    log_s = {
        (probe.threads, probe.unit_bytes): np.log(np.median([probe.alone_s, probe.beside_s, probe.compute_s], axis=1))
        for probe in probes
    }
    off = {
        threads: sum(float(np.abs(log_s[threads, size] - log_s[None, size]).sum()) for size in UNIT_BYTES)
        for threads, _ in log_s
        if threads is not None
    }
    return min(off, key=lambda threads: off[threads])
