"""All-reduce of one flat buffer by size, streams and transport, against plain Gloo and plain MPI in the same run.

    python -m bench.allreduce [--quick] [--check] [--save] [--ranks 2 4] [--sizes-kib 64 1024 25600]

Sirtaki's transports get the buffer in as many equal units as there are streams, all at once; the peers get it whole,
as one call. A sample is the slowest rank's time from a barrier to the last result. Bus bandwidth is
`2(P-1)/P * bytes / time`, what every rank's link would have to carry. `--local-size` simulates nodes, which adds the
hierarchical routes. Bar: with 25 MiB the best transport takes at most plain Gloo's time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench.lib.contenders import join_gloo
from bench.lib.harness import (
    Bar,
    Report,
    Spread,
    alternate,
    finish,
    give_result,
    main_or_rank,
    parser,
    ratios,
    run_ranks,
)
from bench.step import slowest
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import CommPlan, Route, Unit
from sirtaki.comm.router import Router
from sirtaki.comm.transports.contract import FlatBuffer

KIB, MIB = 1024, 1024 * 1024
WAIT_S = 120.0
PLAIN_GLOO, PLAIN_MPI = "plain gloo", "plain mpi"


def on_rank(options: Mapping[str, Any]) -> None:
    """What each rank does: every size over every route, with the peers in between."""
    from mpi4py import MPI

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    control = ControlPlane(comm, local_size=options["local_size"])
    router = Router(control, timeout_s=WAIT_S)
    join_gloo(comm)
    results = []
    for size_bytes in options["sizes_bytes"]:
        buffer = router.allocate(size_bytes // 4, torch.float32)
        plain = torch.zeros(size_bytes // 4)
        calls: dict[str, Callable[[], None]] = {
            PLAIN_GLOO: partial(dist.all_reduce, plain),
            PLAIN_MPI: partial(comm.Allreduce, MPI.IN_PLACE, plain.numpy()),
        }
        for route in router.routes:
            for streams in options["streams"]:
                plan = equal_units(size_bytes // 4, route, streams)
                router.open_plan(plan)
                name = f"{route[0].value} {route[1].value}, {streams}"
                calls[name] = partial(run_plan, router, buffer, plan, scale=1 / comm.size)
                buffer.tensor.fill_(comm.rank + 1.0)
                comm.Barrier()  # with shared memory the others write to this buffer
                calls[name]()
                mean = (comm.size + 1) / 2
                if not bool(torch.all(buffer.tensor == mean)):
                    raise RuntimeError(f"{name}: rank {comm.rank} has wrong sums of {size_bytes} bytes")
                comm.Barrier()
        timed = {name: partial(timed_call, call, comm, options["repeats"]) for name, call in calls.items()}
        samples = slowest(alternate(timed, options["rounds"], seed=options["seed"]), comm)
        results.append({"size_bytes": size_bytes, "samples": samples})
    if comm.rank == 0:
        give_result(results)
    comm.Barrier()
    router.close()
    dist.destroy_process_group()


def equal_units(numel: int, route: Route, streams: int) -> CommPlan:
    """One unit a stream."""
    transport, algorithm = route
    bounds = [numel * index // streams for index in range(streams + 1)]
    units = tuple(
        Unit(start=bounds[stream], stop=bounds[stream + 1], stream=stream, algorithm=algorithm)
        for stream in range(streams)
    )
    return CommPlan(numel=numel, units=units, streams=streams, transport=transport)


def run_plan(router: Router, buffer: FlatBuffer, plan: CommPlan, *, scale: float) -> None:
    """Collective: submits all units at once and waits for them."""
    for work in router.all_reduce_plan(buffer, plan, scale=scale):
        if not work.wait(WAIT_S):
            raise RuntimeError(f"{plan.transport.value} did not end within {WAIT_S:g} s")


def timed_call(call: Callable[[], None], comm: Any, repeats: int) -> float:
    """Collective: this rank's mean seconds of a few calls from one barrier on."""
    comm.Barrier()
    begin_s = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin_s) / repeats


def main() -> int:
    """Runs every number of ranks."""
    flags = parser(__doc__.split("\n")[0])
    flags.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    flags.add_argument("--sizes-kib", type=int, nargs="+")
    flags.add_argument("--streams", type=int, nargs="+")
    flags.add_argument("--rounds", type=int)
    flags.add_argument("--local-size", type=int, help="simulate nodes of so many ranks")
    args = flags.parse_args()
    args.sizes_kib = args.sizes_kib or ([64, 25 * 1024] if args.quick else [4, 64, 1024, 4096, 25 * 1024, 100 * 1024])
    args.streams = args.streams or ([1, 2] if args.quick else [1, 2, 4])
    args.rounds = args.rounds or (7 if args.quick else 15)
    report = Report(name="allreduce")
    for ranks in args.ranks:
        options = {
            "sizes_bytes": [kib * KIB for kib in args.sizes_kib],
            "streams": args.streams,
            "rounds": args.rounds,
            "repeats": 2,
            "local_size": args.local_size,
            "seed": args.seed,
        }
        for result in run_ranks("bench.allreduce", ranks, options):
            add_size(report, ranks, result["size_bytes"], result["samples"])
    return finish(report, args)


def add_size(report: Report, ranks: int, size_bytes: int, samples: Mapping[str, list[float]]) -> None:
    """Adds the rows of one size, and the bar if it is 25 MiB."""
    medians = {name: Spread.of(times_s).median for name, times_s in samples.items()}
    for name, times_s in samples.items():
        report.rows.append(
            {
                "ranks": ranks,
                "size_KiB": size_bytes // KIB,
                "route_and_streams": name,
                "time_s": Spread.of(times_s),
                "bus_MB_per_second": round(2 * (ranks - 1) / ranks * size_bytes / medians[name] / 1e6),
                "ratio_to_plain_gloo": ratios(times_s, samples[PLAIN_GLOO]),
                "samples_s": times_s,
            }
        )
    if size_bytes == 25 * MIB:
        best = min((name for name in samples if name not in (PLAIN_GLOO, PLAIN_MPI)), key=medians.__getitem__)
        ratio = ratios(samples[best], samples[PLAIN_GLOO]).median
        report.bars.append(Bar(claim=f"{ranks} ranks, 25 MiB: {best} / plain Gloo", value=ratio, limit=1.0))


if __name__ == "__main__":
    sys.exit(main_or_rank(main, on_rank))
