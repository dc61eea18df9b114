"""Latency of a small eager all-reduce: `hvd.allreduce` of 64 floats, by kind of name, beside plain MPI's.

Scripts call these once a step, and Horovod's 1 ms cycle is the floor that users know.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from bench.lib.harness import Bar, Report, Spread, finish, parser
from bench.lib.ranks import give_result, main_or_rank, run_ranks

NUMEL = 64
FIRST_CALLS = 20  # not counted
BAR_US = 500.0


def on_rank(options: Mapping[str, Any]) -> None:
    """Collective: seconds of each call, of the slowest rank, by kind of operation."""
    import torch

    import sirtaki.torch as hvd
    from sirtaki.comm.control.mpi import load_mpi

    hvd.init()
    mpi, tensor = load_mpi(), torch.ones(NUMEL)
    buffer = tensor.numpy()
    kinds: dict[str, Callable[[int], object]] = {
        "named": lambda number: hvd.allreduce(tensor, name="named"),
        "unnamed": lambda number: hvd.allreduce(tensor),
        "a new name each": lambda number: hvd.allreduce(tensor, name=f"new.{number}"),
        "plain MPI": lambda number: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, buffer),
    }
    times_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(options["calls"] + FIRST_CALLS):
        for kind, call in kinds.items():
            mpi.COMM_WORLD.Barrier()
            begin_s = time.perf_counter()
            call(number)
            slowest_s = mpi.COMM_WORLD.allreduce(time.perf_counter() - begin_s, op=mpi.MAX)
            if number >= FIRST_CALLS:
                times_s[kind].append(slowest_s)
    is_first = hvd.rank() == 0
    hvd.shutdown()
    if is_first:
        give_result(times_s)


def main() -> int:
    """Two and four ranks of this host."""
    args = parser(__doc__.split("\n")[0]).parse_args()
    report = Report(name="eager")
    for ranks in (2, 4):
        times_s = run_ranks("bench.eager", ranks, {"calls": 200 if args.quick else 1000})
        for kind, seconds in times_s.items():
            spread = Spread.of([1e6 * one for one in seconds])
            report.rows.append({"ranks": ranks, "operation": kind, "time_us": spread})
            if kind in ("named", "unnamed"):
                report.bars.append(Bar(claim=f"{ranks} ranks, {kind}", value=spread.median, limit=BAR_US, unit="µs "))
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main_or_rank(main, on_rank))
