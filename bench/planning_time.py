"""How long the planners think: a plan is made on one rank in mid-training, while the others wait.

    python -m bench.planning_time [--quick] [--check] [--save]

Takes seconds. Processor time, so that other programs do not count. Bars: LIBRA's dynamic programme ≤ 2 s at the
paper's size (160 layers, 10 groups, 150 chunks, 6 thread counts) and ≤ 5 s with 1000 layers, coarsened; ASC-WFBP's
listing ≤ 50 ms with 1000 layers; dPRO's search ≤ 10 s on BERT-Base's layers. Every planner's time on BERT-Base is
shown beside them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from bench.lib.harness import Bar, Report, Spread, finish, parser
from bench.lib.workloads import cluster, workload
from sirtaki.autotune.arms.asc_wfbp import layer_types
from sirtaki.autotune.arms.catalogue import OUR_PLANNERS
from sirtaki.autotune.arms.libra import StageModel, coarsen, fuse_and_allocate
from sirtaki.autotune.knobs import KnobSpace
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.comm.plan import Algorithm, TransportKind

ROUTE = (TransportKind.GLOO, Algorithm.FLAT)
SIX_ALLOCATIONS = StageModel(
    alpha_s=1e-3,
    overlapped_J=np.array([2, 3, 4, 5, 5.5, 6]) * 1e8,
    alone_J=np.array([3, 4, 5, 6, 6.5, 7]) * 1e8,
    speed_J=np.array([0.98, 0.97, 0.95, 0.9, 0.8, 0.65]),
)


def random_layers(count: int, seed: int) -> tuple[list[float], list[int]]:
    """Compute times that add up to about 0.2 s, and about 90 MB of gradients."""
    rng = np.random.default_rng(seed)
    return rng.exponential(0.2 / count, count).tolist(), rng.integers(1000, 180_000_000 // count, count).tolist()


def libra(count: int, *, chunks: int, coarse: bool, seed: int) -> Callable[[], object]:
    """LIBRA's programme on random layers, coarsened first or not."""
    compute_s, sizes = random_layers(count, seed)

    def plan() -> object:
        ends = coarsen(compute_s, sizes) if coarse else list(range(1, count + 1))
        bounds = list(zip([0, *ends], ends, strict=False))
        return fuse_and_allocate(
            [sum(compute_s[begin:end]) for begin, end in bounds],
            [sum(sizes[begin:end]) for begin, end in bounds],
            SIX_ALLOCATIONS,
            chunks=chunks,
            max_groups=10,
        )

    return plan


def asc_wfbp(count: int) -> Callable[[], object]:
    """ASC-WFBP's listing 1 on equal layers."""
    ready_s = [number * 1e-4 for number in range(count)]
    return lambda: layer_types(ready_s, [10_000] * count, alpha_s=1e-3, beta_s_per_byte=1.7e-9, gamma=1.5)


def tasks(seed: int) -> dict[str, tuple[Callable[[], object], float | None]]:
    """What is timed, and its bar in seconds if it has one."""
    bert = workload("bert_base")
    model = PlanningModel(
        layout=bert.layout, profile=bert.profile(), links={ROUTE: cluster("10 Gbit/s TCP", 64).link()}
    )
    space = KnobSpace(routes=(ROUTE,))
    planners = {
        f"{planner.name} on BERT-Base": (
            lambda planner=planner: planner(space=space, model=model).ask(),
            10.0 if planner.name == "dpro" else None,
        )
        for planner in OUR_PLANNERS
    }
    return {
        "LIBRA's programme, 160 layers, 10 groups, 150 chunks, 6 allocations": (
            libra(160, chunks=150, coarse=False, seed=seed),
            2.0,
        ),
        "LIBRA's programme, 1000 layers coarsened": (libra(1000, chunks=150, coarse=True, seed=seed), 5.0),
        "ASC-WFBP's listing 1, 1000 layers": (asc_wfbp(1000), 0.05),
        **planners,
    }


def main() -> int:
    """Times every task."""
    args = parser(__doc__.split("\n")[0]).parse_args()
    report = Report(name="planning_time")
    for name, (task, limit_s) in tasks(args.seed).items():
        samples_s = []
        for _ in range(1 if args.quick else 5):
            begin_s = time.process_time()
            task()
            samples_s.append(time.process_time() - begin_s)
        spread = Spread.of(samples_s)
        report.rows.append({"task": name, "processor_s": spread})
        if limit_s is not None:
            report.bars.append(Bar(claim=name, value=spread.median, limit=limit_s, unit="s "))
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
