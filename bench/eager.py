"""Latency of a small eager all-reduce: `hvd.allreduce` of 64 floats, by kind of name, compared with plain MPI.

Scripts call it once per step. Horovod takes about its cycle time of 1 ms.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import count
from typing import Any

from bench.lib.harness import Report, Spread, finish, parser
from bench.lib.ranks import in_turns, run_ranks, start

NUMEL = 64
FIRST_CALLS = 20  # Calls that are not measured.
BARS_US = {2: 40.0, 4: 120.0}


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: time calls of each kind alternately. Collective."""
    import torch
    from mpi4py import MPI

    import sirtaki.torch as hvd

    tensor, numbers = torch.ones(NUMEL), count()
    kinds = {
        "named": lambda: hvd.allreduce(tensor, name="named"),
        "unnamed": lambda: hvd.allreduce(tensor),
        "a new name each": lambda: hvd.allreduce(tensor, name=f"new.{next(numbers)}"),
        "plain MPI": lambda: comm.Allreduce(MPI.IN_PLACE, tensor.numpy()),
    }
    samples = in_turns(kinds, comm, rounds=FIRST_CALLS + options["calls"], before=0)
    return {kind: times_s[FIRST_CALLS:] for kind, times_s in samples.items()}


def main() -> int:
    """Measure with two and with four ranks on this host."""
    args = parser(__doc__).parse_args()
    report = Report(name="eager")
    for ranks in (2, 4):
        times_s = run_ranks("bench.eager", ranks, {"calls": 200 if args.quick else 1000})
        for kind, seconds in times_s.items():
            spread = Spread.of([1e6 * one for one in seconds])
            report.rows.append({"ranks": ranks, "operation": kind, "time_us": spread})
            if kind in ("named", "unnamed"):
                report.bar(f"{ranks} ranks, {kind}", spread.median, BARS_US[ranks], "µs ")
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank))
