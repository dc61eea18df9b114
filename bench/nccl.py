"""Times of all-reduces by NCCL's algorithm, protocol and number of channels, and the tuner's choice on such a table.

    python -m bench.nccl [--quick] [--check] [--save]                   modelled times, needs no GPU
    sirtakirun -np 8 python -m bench.nccl --measure TABLE [--quick]     measure these ranks' GPUs, write TABLE, and tune
    python -m bench.nccl --table TABLE                                  tune on a measured table

Without a GPU, `modelled` computes a table for nodes of eight H100. It uses NCCL's own model, `ncclTopoTuneModel` and
`ncclTopoGetAlgoTime` in `src/graph/tuning.cc`, with the constants and corrections of PyTorch's copy
(`torch/_inductor/comm_analysis.py`, torch 2.13). For up to two nodes, NCCL decides with the bandwidth of the links
within a node. PyTorch's authors corrected the bandwidth by profiles of H100 over RoCE. Here, all-reduces take the times
of the corrected model. Hence NCCL's decisions are right on one node and not always right between two. Only a measured
table shows how wrong they are on real machines.

"fastest_s" is the fastest of a lattice of settings with every algorithm and protocol. Bar: the setting that the tuner
keeps is on average at most 1 % slower than the setting that it keeps without NCCL's knobs.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.harness import Report, finish, parser
from bench.lib.landscapes.landscape import Landscape, Message, Physics, replay
from sirtaki.autotune.arms.techniques import OUR_ARMS
from sirtaki.autotune.knobs import KIB, MIB, KnobLattice, Knobs, KnobSpace, NcclWays
from sirtaki.autotune.meta.bandit import default_arms
from sirtaki.autotune.meta.session import SessionResult, TuningSession
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.nccl_streams.transport import ALLOWANCES, ctas_for
from sirtaki.comm.plan import Algorithm, CommPlan, GradientLayout, NcclWay, TransportKind, Unit
from sirtaki.engine.tuning.plans import WAY_BYTES, for_each_class, promising_ways
from sirtaki.errors import PlanError
from sirtaki.measures import SMALLEST_UNIT_BYTES

ROUTE = (TransportKind.NCCL, Algorithm.FLAT)
THREADS = (None, *ALLOWANCES)
CTAS = tuple(map(ctas_for, THREADS))
ALL_WAYS = for_each_class(tuple(NcclWay))
SIZES = tuple(1 << power for power in range(10, 29))
"""Sizes of all-reduces in the table, in bytes."""

# ── A table of all-reduces ───────────────────────────────────────────────────────────────────────────────────────────

Row = tuple[NcclWay | None, int | None]
"""Row of the table: NCCL's algorithm and protocol, and the number of CTAs (channels); None = NCCL's own choice."""


@dataclass(frozen=True, eq=False, kw_only=True)
class NcclTimes:
    """Times of all-reduces, in seconds.

    Attributes:
        source: origin of the times.
        ranks: number of ranks.
        nodes: number of nodes.
        times_s: seconds by row and size in bytes. A row is missing if NCCL refused it.
    """

    source: str
    ranks: int
    nodes: int
    times_s: Mapping[Row, Mapping[int, float]]

    def of(self, size_bytes: int, way: NcclWay | None, ctas: int | None) -> float:
        """Return seconds, interpolated between sizes on a logarithmic scale; infinite if NCCL refused the row."""
        row = self.times_s.get((way, ctas))
        if row is None:
            return math.inf
        sizes = sorted(row)
        high = min(max(1, bisect_left(sizes, size_bytes)), len(sizes) - 1)
        places = np.log2([sizes[high - 1], sizes[high]])
        at = (math.log2(size_bytes) - places[0]) / (places[1] - places[0])
        first, last = math.log2(row[sizes[high - 1]]), math.log2(row[sizes[high]])
        return float(2.0 ** (first + max(0.0, at) * (last - first)))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict; `from_json` is its inverse."""
        return {
            "source": self.source,
            "ranks": self.ranks,
            "nodes": self.nodes,
            "times_s": [
                [None if way is None else way.value, ctas, {str(size): seconds for size, seconds in row.items()}]
                for (way, ctas), row in self.times_s.items()
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> NcclTimes:
        """Return the table from a dict of `to_json`."""
        times_s = {
            (None if way is None else NcclWay(way), ctas): {int(size): float(seconds) for size, seconds in row.items()}
            for way, ctas, row in data["times_s"]
        }
        return cls(source=data["source"], ranks=data["ranks"], nodes=data["nodes"], times_s=times_s)


# ── NCCL's own model: tuning.cc, for Hopper ──────────────────────────────────────────────────────────────────────────

TREE, RING = "Tree", "Ring"
LL, LL128, SIMPLE = "LL", "LL128", "Simple"
BASE_US = {
    TREE: {LL: 6.8, LL128: 14.0, SIMPLE: 8.4},
    RING: {LL: 6.6, LL128: 14.0, SIMPLE: 8.4},
}  # NCCL's baseLat.
WITHIN_US = {TREE: {LL: 0.6, LL128: 1.25, SIMPLE: 4.0}, RING: {LL: 0.6, LL128: 1.9, SIMPLE: 3.4}}  # hwLat, NVLINK
BETWEEN_US = {TREE: {LL: 5.0, LL128: 8.5, SIMPLE: 14.0}, RING: {LL: 2.7, LL128: 4.0, SIMPLE: 14.0}}  # hwLat, NET
MOST_LL_WITHIN, MOST_LL_BETWEEN = 141.0, (39.0, 20.4)  # llMaxBws: of Hopper within a node, of Volta between nodes
MOST_A_CHANNEL = {LL128: 36.7, SIMPLE: (38.7, 41.4, 36.0)}  # perChMax…Bws
TREE_CORRECTION = {
    LL: "1 1 1 1 .9 .8 .7 .7 .7 .7 .6 .5 .4 .4 .5 .6 .7 .8 .9 1 1 1 1 1",
    LL128: "1 1 1 1 1 .9 .8 .8 .8 .7 .6 .6 .6 .6 .6 .6 .8 .9 .9 .9 .9 1 1 1",
    SIMPLE: ".9 .9 .9 .9 .9 .9 .9 .8 .7 .6 .6 .5 .5 .5 .5 .6 .7 .8 .7 .7 .8 .9 .9 .9",
}  # NCCL's treeCorrectionFactor, by log2(bytes / 64).
GPUS, CHANNELS, NVLINK, NIC = 8, 16, 370.0, 50.0
"""Properties of a node: number of GPUs and of channels, GB/s of NVLink, and GB/s of each GPU's network interface."""


def modelled_s(size_bytes: int, way: NcclWay, *, nodes: int, channels: int, gb_per_s: float) -> float:
    """Return seconds of an all-reduce by `ncclTopoTuneModel` and `ncclTopoGetAlgoTime`, for given bandwidths."""
    algorithm, protocol = way.algorithm, way.protocol
    ranks, scale = GPUS * nodes, min(nodes, 3) - 1
    bus = min(gb_per_s, channels * NVLINK / CHANNELS)
    most_ll = MOST_LL_WITHIN if nodes == 1 else MOST_LL_BETWEEN[scale - 1]
    if protocol == LL:
        bus = min(most_ll, bus / (2.0 if algorithm == RING else 3.8))
    elif protocol == LL128:
        factor = 7 / 9 if algorithm == TREE and nodes == 1 else 120 / 128
        bus = min(bus * factor, channels * float(MOST_A_CHANNEL[LL128]))  # type: ignore[arg-type]
    elif algorithm == TREE:
        bus = min(bus * 0.92, channels * float(MOST_A_CHANNEL[SIMPLE][scale]))  # type: ignore[index]
    overhead_us = 0.0 if nodes == 1 else 3.0 if protocol == SIMPLE else 1.0
    within_us, between_us = max(WITHIN_US[algorithm][protocol], overhead_us), BETWEEN_US[algorithm][protocol]
    if algorithm == RING:
        steps, between = 2 * (ranks - 1), 2 * (nodes - 1)
        latency_us = (steps - between) * within_us + between * between_us
        rate = bus * ranks / steps
    else:
        latency_us = 2 * ((GPUS - 1) * within_us + int(math.log2(nodes)) * between_us)
        corrections = TREE_CORRECTION[protocol].split()
        place = int(math.log2(max(64, size_bytes) / 64))
        rate = bus / 2 * (float(corrections[place]) if place < len(corrections) else 1.0)
    return 1e-6 * (BASE_US[algorithm][protocol] + latency_us + size_bytes / (1e3 * rate))


@cache
def modelled(nodes: int) -> NcclTimes:
    """Return the table for `nodes` nodes of eight H100.

    NCCL's own choice follows its own model. All times follow PyTorch's corrected model.
    """
    believed = NVLINK if nodes <= 2 else NIC

    def true_gb_per_s(size_bytes: int) -> float:
        if nodes == 1:
            return NVLINK
        rails = (max(size_bytes, 5e7) / 5e7) ** 0.17 if nodes > 2 else 1.0
        return NIC * (0.77 + 0.23 * min(1.0, (nodes - 1) / 7)) * rails

    # Skip LL128, which needs links within a node.
    ways = [way for way in NcclWay if nodes == 1 or way.protocol != LL128]
    times_s: dict[Row, dict[int, float]] = {}
    for ctas in CTAS:
        channels = CHANNELS if ctas is None else ctas
        for size in SIZES:
            taken_s = {
                way: modelled_s(size, way, nodes=nodes, channels=channels, gb_per_s=true_gb_per_s(size)) for way in ways
            }
            by_belief_s = {
                way: modelled_s(size, way, nodes=nodes, channels=channels, gb_per_s=believed) for way in ways
            }
            decided = min(ways, key=by_belief_s.__getitem__)
            for way, seconds in [(None, taken_s[decided]), *taken_s.items()]:
                times_s.setdefault((way, ctas), {})[size] = seconds
    source = "ncclTopoTuneModel, with the corrections of torch/_inductor/comm_analysis.py of torch 2.13"
    return NcclTimes(source=source, ranks=GPUS * nodes, nodes=nodes, times_s=times_s)


# ── a job with the times of a table, and the tuner on this job ───────────────────────────────────────────────────────

JOBS: Mapping[str, tuple[int, int, float]] = {
    "small gradients": (64, 2 * KIB, 0.2e-3),
    "large gradients": (16, 4 * MIB, 4e-3),
}
"""Number of gradients, bytes of each, and seconds of the backward pass."""


def job(table: NcclTimes, name: str) -> Landscape:
    """Return a job whose all-reduces take the table's times. Concurrent all-reduces share the links."""
    count, size_bytes, backward_s = JOBS[name]
    layout = GradientLayout(sizes=(size_bytes // 4,) * count)
    profile = Profile.from_durations([backward_s / count] * count)
    largest = max(SMALLEST_UNIT_BYTES, 1 << (layout.total_bytes - 1).bit_length())
    probed = {
        (way, size): table.of(size, way, None)
        for sizes in WAY_BYTES
        for size in sizes
        if size <= largest
        for way in (None, *NcclWay)
    }
    space = KnobSpace(
        routes=(ROUTE,),
        unit_bytes=(SMALLEST_UNIT_BYTES, largest),
        streams=(1, 2, 4),
        threads=tuple(threads for threads in THREADS if (None, ctas_for(threads)) in table.times_s),
        nccl=promising_ways(ALL_WAYS, probed),
    )
    default = Knobs(
        unit_bytes=min(max(4 * MIB, space.unit_bytes[0]), largest), streams=1, transport=ROUTE[0], algorithm=ROUTE[1]
    )
    start_s = {row: table.of(SIZES[0], *row) for row in table.times_s}
    peak = max(
        size / max(seconds - start_s[row], 1e-9)
        for row, of_row in table.times_s.items()
        for size, seconds in of_row.items()
        if size >= MIB
    )

    def span_s(knobs: Knobs) -> float:
        units = knobs.to_plan(layout).units
        if any((unit.nccl, ctas_for(unit.threads)) not in table.times_s for unit in units):
            return math.inf
        rows = {4 * unit.numel: (unit.nccl, ctas_for(unit.threads)) for unit in units}

        def moves_s(size: float) -> float:
            return max(table.of(int(size), *rows[int(size)]) - start_s[rows[int(size)]], 1e-9)

        physics = Physics(
            capacity=lambda n, computing: peak,
            latency_s=lambda size: start_s[rows[int(size)]],
            quality=lambda size: min(1.0, size / moves_s(size) / peak),
        )
        ready_s = profile.issuable_s
        messages = [
            Message(ready_s[bisect_left(layout.offsets, unit.stop) - 1], 4 * unit.numel, unit.stream) for unit in units
        ]
        return replay(messages, compute_s=profile.compute_s, physics=physics)[0] - profile.ready_s[0]

    return Landscape(family=name, layout=layout, profile=profile, space=space, default=default, truth=span_s)


def in_every_way(landscape: Landscape) -> Iterator[Knobs]:
    """Yield all settings of the lattice, each with NCCL's own choice and with every algorithm and protocol."""
    for knobs in KnobLattice(landscape.space, steps_per_octave=1).points:
        yield knobs
        yield from (knobs.but(nccl=NcclWays.of(knobs.unit_bytes, way)) for way in NcclWay)


def tune(landscape: Landscape, *, noise: float, seed: int, budget: int = 100, one_node: bool = False) -> SessionResult:
    """Run a warm-up session on the job, as in a job on GPUs."""
    ends_early = one_node and not landscape.space.nccl
    arm = default_arms(
        space=landscape.space, rng=np.random.default_rng(seed), budget_iterations=budget, names=list(OUR_ARMS)
    )
    session = TuningSession(
        space=landscape.space,
        default=landscape.default,
        arm=arm,
        rng=np.random.default_rng(seed),
        budget_iterations=budget,
        discarded_iterations=2,
        identity=lambda knobs: knobs.to_plan(landscape.layout).fingerprint(),
        contrasts=landscape.space.contrasts(landscape.default) if ends_early else (),
    )
    luck = np.random.default_rng([seed, 1])
    while not session.done:
        now = session.assignment
        spans_s = [landscape.measure_s(now.knobs, 0, noise, luck) for _ in range(now.measured_iterations)]
        session.record(spans_s)
    return session.result


def judge(report: Report, table: NcclTimes, *, noise: float, seeds: int) -> None:
    """Tune each job on the table, and add a row and a bar."""
    for name in JOBS:
        landscape = job(table, name)
        without = replace(landscape, space=replace(landscape.space, nccl=()))
        best_s = min(map(landscape.span_s, in_every_way(landscape)))
        one_node = table.nodes == 1
        kept, kept_without = (
            [tune(each, noise=noise, seed=seed, one_node=one_node).knobs for seed in range(seeds)]
            for each in (landscape, without)
        )
        kept_s, without_s = (statistics.fmean(map(landscape.span_s, each)) for each in (kept, kept_without))
        report.rows.append(
            {
                "nodes": table.nodes,
                "ranks": table.ranks,
                "job": name,
                "offered": ", ".join(ways.describe() for ways in landscape.space.nccl),
                "default_s": landscape.span_s(landscape.default),
                "kept_without_s": without_s,
                "kept_s": kept_s,
                "fastest_s": best_s,
                "told_nccl": f"{sum(bool(knobs.nccl) for knobs in kept)} of {seeds}",
            }
        )
        where = f"{table.source.partition(',')[0]}, {table.ranks} ranks"
        report.bar(f"{where}, {name}: kept, of what is kept without NCCL's knobs", kept_s / without_s, 1.01)


# ── a table measured on GPUs ─────────────────────────────────────────────────────────────────────────────────────────


def measured(sizes: Sequence[int], allowances: Sequence[int | None], *, rounds: int) -> NcclTimes:
    """Measure NCCL's times between these ranks' GPUs. Collective. Needs `hvd.init()` and at least two ranks."""
    import torch

    from sirtaki.engine import job as jobs
    from sirtaki.engine.tuning.pipeline_target import open_router

    current = jobs.current()
    control = current.control
    place = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
    router = open_router(control, replace(current.settings, transport=TransportKind.NCCL), [place])
    buffer = router.allocate(max(sizes) // 4, torch.float32)
    device = router.device
    times_s: dict[Row, dict[int, float]] = {}
    for threads in allowances:
        for way in (None, *router.nccl_ways):
            for size in sizes:
                unit = Unit(start=0, stop=size // 4, threads=threads, nccl=way)
                plan = CommPlan(numel=unit.stop, units=(unit,), streams=1, transport=ROUTE[0])
                try:
                    router.open_plan(plan)
                except PlanError as err:  # This is raised on all ranks.
                    if control.rank == 0:
                        print(err, flush=True)
                    break
                for _ in range(2):  # Discard the first time.
                    control.barrier()
                    begin = device.record_event(timed=True)
                    router.wait_for([work for _ in range(rounds) for work in router.all_reduce_plan(buffer, plan)])
                    end = device.record_event(timed=True)
                    device.wait_for(end)
                    seconds = device.elapsed_s(begin, end) / rounds
                slowest_s = float(control.maximum(np.array([seconds]))[0])
                times_s.setdefault((way, ctas_for(threads)), {})[size] = slowest_s
    device.synchronise()
    router.close()
    source = f"{torch.cuda.get_device_name()}, NCCL {torch.cuda.nccl.version()}"  # type: ignore[no-untyped-call]
    nodes = len(set(control.hosts))
    return NcclTimes(source=source, ranks=control.size, nodes=nodes, times_s=times_s)


def measure(path: Path, *, quick: bool) -> NcclTimes | None:
    """Measure these ranks' GPUs. Rank 0 writes and returns the table, the other ranks return None. Collective.

    Without a GPU, print that nothing was measured and return None.
    """
    import os

    import torch

    import sirtaki.torch as hvd

    if not torch.cuda.is_available():
        print("bench.nccl: PyTorch finds no GPU; nothing was measured")
        return None
    hvd.init()
    if hvd.size() < 2:
        raise SystemExit(
            "bench.nccl --measure needs two or more ranks: sirtakirun -np 2 python -m bench.nccl --measure …"
        )
    gpus = torch.cuda.device_count()
    if hvd.local_size() > gpus:  # NCCL lets ranks share a GPU only if they appear to be on different hosts.
        os.environ["NCCL_HOSTID"] = f"rank{hvd.rank()}"
    torch.cuda.set_device(hvd.local_rank() % gpus)
    # Use fewer sizes with --quick: ranks that share a GPU communicate over slow sockets, and each row needs a
    # communicator.
    table = measured(SIZES[:15:2], THREADS[::2], rounds=5) if quick else measured(SIZES[:17], THREADS, rounds=20)
    if not table.times_s:
        raise SystemExit("bench.nccl: NCCL cannot reduce between these ranks; see the log")
    if hvd.rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table.to_json()))
    return table if hvd.rank() == 0 else None


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--measure", type=Path, metavar="TABLE", help="measure these ranks' GPUs and write TABLE")
    flags.add_argument("--table", type=Path, metavar="TABLE", help="tune on a measured table")
    flags.add_argument("--noise", type=float, default=0.02, help="relative noise of a measured iteration (%(default)s)")
    args = flags.parse_args()
    tables: Sequence[NcclTimes] = [modelled(nodes) for nodes in (1, 2, 4)]
    if args.measure:
        there = measure(args.measure, quick=args.quick)
        if there is None:
            return 0
        tables = [there]
    elif args.table:
        tables = [NcclTimes.from_json(json.loads(args.table.read_text()))]
    report = Report(name="nccl", settings={"noise": args.noise}, notes=[table.source for table in tables[:1]])
    for table in tables:
        judge(report, table, noise=args.noise, seeds=3 if args.quick else 9)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
