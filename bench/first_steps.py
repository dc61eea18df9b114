"""The cost of a job's start: `init()`, optimizer and first steps, untuned, with a stored setting, and tuned anew.

    python -m bench.first_steps [--quick] [--check] [--save] [--ranks 2]

Jobs of the three kinds alternate. Each trains a network of three layers (1 M parameters), first for two steps without
Sirtaki, in which PyTorch loads its modules. Then the benchmark measures, on the slowest rank, `init()`, the creation of
the optimizer, the first five steps, and the next 45 steps. The last show whether work was only postponed. An untuned
job has `SIRTAKI_TUNE=0`. A job with a stored setting reads it from the registry of an earlier job. A fresh job has an
empty registry and writes to it when its warm-up ends, after these 50 steps. A job of one process is measured, too:
`init()` is its only cost.

Bars: from `init()` to the fifth step, a job with a stored setting takes at most 0.2 s more than an untuned one, a fresh
one at most 0.4 s more (medians of differences within rounds); `init()` of one process takes at most 0.3 s.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.lib.harness import Report, Spread, alternate, finish, parser
from bench.lib.ranks import give_result, rank_options, run_ranks

FIRST, MORE = 5, 45
KINDS = ("untuned", "remembered", "fresh")
PARTS = ("init_s", "optimizer_s", "first_steps_s", "more_steps_s")
ALONE_LIMIT_S, REMEMBERED_LIMIT_S, FRESH_LIMIT_S = 0.3, 0.2, 0.4
ENOUGH = 1000
"""Number of steps after which every warm-up has ended."""


def on_rank(options: Mapping[str, Any]) -> None:
    """Run one rank: train, and report the seconds of each part on the slowest rank. Collective."""
    import sirtaki.torch as hvd

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 896), nn.ReLU(), nn.Linear(896, 896), nn.ReLU(), nn.Linear(896, 10))
    batch, labels = torch.randn(32, 256), torch.randint(10, (32,))

    def train(optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), labels).backward()
            optimizer.step()

    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    train(plain, 2)  # Train without Sirtaki first, because PyTorch loads modules in its first steps.
    marks_s = [time.perf_counter()]
    hvd.init()
    marks_s.append(time.perf_counter())
    optimizer = hvd.DistributedOptimizer(plain)
    marks_s.append(time.perf_counter())
    for steps in (FIRST, options["more"]):
        train(optimizer, steps)
        marks_s.append(time.perf_counter())
    parts = [end_s - begin_s for begin_s, end_s in pairwise(marks_s)]
    slowest = hvd.allreduce(torch.tensor(parts, dtype=torch.float64), op=hvd.Max, name="parts")
    if hvd.rank() == 0:
        give_result(dict(zip(PARTS, slowest.tolist(), strict=True)))
    hvd.shutdown()


def run_job(ranks: int, *, registry: Path | None, tune: bool, more: int = MORE) -> dict[str, float]:
    """Run one job, and return the seconds of its parts."""
    env = {"SIRTAKI_TUNE": str(int(tune)), "SIRTAKI_REGISTRY": "off" if registry is None else str(registry)}
    return dict(run_ranks("bench.first_steps", ranks, {"more": more}, env=env))


def main() -> int:
    """Run jobs of all kinds alternately."""
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, default=2)
    flags.add_argument("--rounds", type=int, help="jobs of each kind")
    args = flags.parse_args()
    args.rounds = args.rounds or (5 if args.quick else 9)
    report = Report(name="first_steps")
    measured: dict[str, list[dict[str, float]]] = {kind: [] for kind in (*KINDS, "alone")}
    with tempfile.TemporaryDirectory(prefix="sirtaki-bench-") as folder:
        tuned_registry = Path(folder) / "tuned_registry.db"
        run_job(args.ranks, registry=tuned_registry, tune=True, more=ENOUGH)

        def job(kind: str) -> float:
            ranks, registry = args.ranks, None
            if kind == "remembered":
                registry = tuned_registry
            elif kind == "fresh":
                registry = Path(folder) / f"{len(measured[kind])}.db"
            elif kind == "alone":
                ranks = 1
            measured[kind].append(run_job(ranks, registry=registry, tune=kind != "untuned"))
            return 0.0

        alternate({kind: lambda kind=kind: job(kind) for kind in measured}, args.rounds, seed=args.seed)
    begin_s = {kind: [sum(one[part] for part in PARTS[:3]) for one in jobs] for kind, jobs in measured.items()}
    for kind, jobs in measured.items():
        report.rows.append(
            {
                "job": kind,
                "ranks": 1 if kind == "alone" else args.ranks,
                **{part: Spread.of([one[part] for one in jobs]) for part in PARTS},
                "begin_s": Spread.of(begin_s[kind]),
            }
        )
    for kind, limit_s in (("remembered", REMEMBERED_LIMIT_S), ("fresh", FRESH_LIMIT_S)):
        more_s = [ours - theirs for ours, theirs in zip(begin_s[kind], begin_s["untuned"], strict=True)]
        claim = f"a {kind} job's beginning takes so much longer than an untuned one's"
        report.bar(claim, Spread.of(more_s).median, limit_s, "s ")
    alone_s = Spread.of([one["init_s"] for one in measured["alone"]]).median
    report.bar("init() of one process", alone_s, ALONE_LIMIT_S, "s ")
    report.notes.append(f"begin = init() + optimizer + the first {FIRST} steps; more steps are the {MORE} after them")
    return finish(report, args)


if __name__ == "__main__":
    # Do not use `start`: it initialises MPI before `init()` can be measured.
    if (options := rank_options()) is not None:
        on_rank(options)
    else:
        sys.exit(main())
