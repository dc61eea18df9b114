"""Time of torch.compile for a training step over DDP, with and without Sirtaki attached.

    python -m bench.compile_time [--quick] [--check] [--save] [--ranks 2] [--rounds 8]

Each job compiles a function with forward, loss and backward of a GPT of 5.3 M parameters and calls it twice. Jobs with
plain DDP (Gloo) alternate with jobs that call `sirtaki.torch.ddp.attach`. Inductor's caches are off. A sample is the
processor time, and the wall time, of both calls on the slowest rank.

Bar: attached DDP takes at most 1.10 times the processor time of plain DDP (median of the ratios within pairs).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.lib.harness import Report, alternate, finish, parser
from bench.lib.models import gpt
from bench.lib.ranks import run_ranks, start

KINDS = ("ddp", "attached")
ENVIRONMENT = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Compile the step and return wall and processor seconds of the slowest rank. Collective."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = gpt(rank=comm.rank, sequences=1, elsewhere_s=0.0)
    wrapped = DistributedDataParallel(model)
    if options["kind"] == "attached":
        from sirtaki.torch import ddp

        ddp.attach(wrapped)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = wrapped(batch)
        loss.backward()
        return loss.detach()

    compiled = torch.compile(step, backend=options["backend"])
    comm.Barrier()
    wall_s, processor_s = time.perf_counter(), time.process_time()
    for _ in range(2):
        compiled(batch)
    times_s = time.perf_counter() - wall_s, time.process_time() - processor_s
    return [max(each) for each in zip(*comm.allgather(times_s), strict=True)]


def main() -> int:
    """Run both kinds of jobs alternately."""
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, default=2)
    flags.add_argument("--rounds", type=int, help="jobs of each kind")
    args = flags.parse_args()
    rounds = args.rounds or (6 if args.quick else 12)
    report = Report(name="compile_time", settings={"ranks": args.ranks})
    walls: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def job(kind: str) -> float:
        options = {"kind": kind, "backend": "aot_eager" if args.quick else "inductor"}
        wall_s, processor_s = run_ranks("bench.compile_time", args.ranks, options, env=ENVIRONMENT)
        walls[kind].append(wall_s)
        return float(processor_s)

    samples = alternate({kind: lambda kind=kind: job(kind) for kind in KINDS}, rounds, seed=args.seed)
    report.compare(samples, "ddp", time="processor_s")
    report.compare(walls, "ddp", time="wall_s")
    report.bar_of_pairs("processor time to compile a step, attached ÷ DDP", samples, "attached", "ddp", 1.10)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank, gloo=True))
