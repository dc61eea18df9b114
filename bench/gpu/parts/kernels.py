"""Check all-reduces with the profiler and NCCL's log: algorithm, protocol, CTAs, streams and overlap.

The name of an NCCL kernel contains its algorithm, `RING` or `TREE`, but not its protocol, because NCCL has specialised
kernels for LL only, which call the code of the remaining protocols (`best_kernel` in `src/device/generate.py`). The
protocol is in NCCL's log: rank 0 of a communicator writes a line of the subsystem TUNING for each collective.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.gpu.contenders import Optimizer
from bench.gpu.models import models_for, small_mlp
from bench.gpu.place import Kernel
from bench.gpu.runner import RankRun
from sirtaki.comm.nccl_streams.transport import ctas_for
from sirtaki.comm.plan import CommPlan, NcclWay, TransportKind, Unit
from sirtaki.comm.router import Router
from sirtaki.errors import PlanError

UNIT_BYTES = 4 << 20
WAYS = (NcclWay.RING_LL, NcclWay.RING_SIMPLE, NcclWay.TREE_SIMPLE)
THREADS = (512, 4 * 512)  # 1 and 4 CTAs
TUNING = re.compile(r"AllReduce: (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")


def overlap_s(ours: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Return the total time in which a span of `ours` and a span of `others` overlap; spans are (begin, end)."""
    edges = sorted(
        (moment, which, change)
        for which, spans in enumerate((ours, others))
        for begin, end in spans
        for moment, change in ((begin, 1), (end, -1))
    )
    running, together, last = [0, 0], 0.0, 0.0
    for moment, which, change in edges:
        if all(running):
            together += moment - last
        running[which] += change
        last = moment
    return together


def run(run: RankRun) -> None:
    """Check plans one by one, then a training step."""
    log = run.place.logs / "nccl.%p.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING", "NCCL_DEBUG_FILE": str(log)}
    path = Path(str(log).replace("%p", str(os.getpid())))
    router = run.place.router(run.control, run.place.opener(run.control))
    units = (1 << 16 if run.place.dry else UNIT_BYTES) // 4
    buffer = router.allocate(4 * units, torch.float32)
    for way in WAYS:
        with run.check(f"NCCL reduces by {way.value}") as found:
            plan = plan_of(units, way=way, threads=THREADS[1])
            kernels, lines = reduced(run, router, buffer, plan, path)
            found |= {"kernels": Counter(map(short, kernels)), "log": Counter(lines)}
            assert kernels, "the profiler recorded no NCCL kernel"
            assert all(way.algorithm.upper() in kernel.name for kernel in kernels), found
            if run.rank == 0:
                logged = {(algorithm.upper(), protocol.upper()) for algorithm, protocol, _ in lines}
                assert logged == {(way.algorithm.upper(), way.protocol.upper())}, logged
    for threads in THREADS:
        with run.check(f"{ctas_for(threads)} CTAs are the kernels' grid") as found:
            before = run.place.used_bytes()
            kernels, lines = reduced(run, router, buffer, plan_of(units, threads=threads), path)
            opened_bytes = run.place.used_bytes() - before
            found |= {"grids": Counter(kernel.grid for kernel in kernels), "log": Counter(lines)}
            found["bytes_of_a_communicator_and_rank"] = opened_bytes / 2 / run.size
            assert {kernel.grid for kernel in kernels} == {ctas_for(threads)}, found
    with run.check("all-reduces of two streams run at the same time") as found:
        kernels, _ = reduced(run, router, buffer, plan_of(units, threads=512), path)
        streams = sorted({kernel.stream for kernel in kernels})
        spans = [[(each.begin_s, each.end_s) for each in kernels if each.stream == stream] for stream in streams]
        found |= {"streams": streams, "busy_s": [sum(end - begin for begin, end in each) for each in spans]}
        assert len(streams) == 2, found
        found["together_s"] = overlap_s(*spans)
        assert found["together_s"] > 0 or run.place.dry
    run.place.device.synchronise()
    router.close()
    with run.check("all-reduces run beside the backward pass") as found:
        make = small_mlp if run.place.dry else next(iter(models_for(dry=False).values()))
        loop = Optimizer(run.place, make(run.place.torch_device))
        for _ in range(4):
            loop.step()
        with run.place.kernels() as kernels:
            loop.step()
        ours = [each for each in kernels if "nccl" in each.name.lower()]
        others = [each for each in kernels if each not in ours]
        found |= {"nccl": len(ours), "others": len(others), "streams": sorted({each.stream for each in kernels})}
        found["beside_others_s"] = overlap_s(*([(k.begin_s, k.end_s) for k in which] for which in (ours, others)))
        assert ours
        assert found["beside_others_s"] > 0 or run.place.dry
        loop.close()


def plan_of(unit: int, *, way: NcclWay | None = None, threads: int | None = None) -> CommPlan:
    """Return a plan of four units on two streams."""
    units = tuple(
        Unit(start=index * unit, stop=(index + 1) * unit, stream=index % 2, threads=threads, nccl=way)
        for index in range(4)
    )
    return CommPlan(numel=4 * unit, units=units, streams=2, transport=TransportKind.NCCL)


Line = tuple[str, str, int]
"""Algorithm, protocol and number of channels in a line of NCCL's log."""


def reduced(run: RankRun, router: Router, buffer: object, plan: CommPlan, log: Path) -> tuple[list[Kernel], list[Line]]:
    """Reduce by a plan, and return NCCL's kernels and the lines of NCCL's log. Collective.

    Raises:
        AssertionError: NCCL refuses the plan, or the sums are wrong.
    """
    device, tensor = run.place.device, buffer.tensor  # type: ignore[attr-defined]  # a FlatBuffer
    try:
        router.open_plan(plan)
    except PlanError as err:
        raise AssertionError(f"NCCL refuses the plan: {err}") from err
    tensor.fill_(1.0)
    router.wait_for(router.all_reduce_plan(buffer, plan))  # type: ignore[arg-type]  # not profiled, because it opens connections
    device.synchronise()
    read = log.stat().st_size if log.exists() else 0
    run.control.barrier()
    with run.place.kernels() as kernels:
        router.wait_for(router.all_reduce_plan(buffer, plan, scale=1.0))  # type: ignore[arg-type]
        device.synchronise()
    assert bool((tensor == run.size**2).all())
    lines = log.read_text()[read:] if log.exists() else ""
    logged = [(found[2], found[3], int(found[5]) - int(found[4]) + 1) for found in TUNING.finditer(lines)]
    return [each for each in kernels if "nccl" in each.name.lower()], logged


def short(kernel: Kernel) -> str:
    """Return the kernel's name without its arguments."""
    return kernel.name.partition("(")[0]
