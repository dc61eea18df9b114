"""Accuracy of the simulator, and the tuner's winner compared with a sweep of all settings, on the emulated cluster.

    python -m bench.reality [--quick] [--check] [--save] [--scale F]

Takes 9 minutes, 3 with --quick.

Four emulated nodes (`bench.lib.cluster`: link 400 Mbit/s, 100 for a single flow), one rank each, train the emulated
ResNet-50 over Gloo, in one job:

1. Profile and probes are taken as in the warm-up, by the same functions and within the same time. The simulator uses
   only the models that are fitted to them.
2. Random plans are drawn before any measurement. Half are uniform: the unit size is log-uniform between 64 KiB and half
   the gradients, the number of streams is random. Half have cuts at random places on random streams. The plans
   alternate. The first step after a change of plan is not measured.
3. A real warm-up tunes. All settings of a coarse grid alternate. Then the winner alternates with the best settings of
   the grid, because the best of many measurements is partly luck.

A span is the time from the first ready gradient to the last reduced one, on the rank where it is shortest, as the tuner
measures it. Bars: mean error of the simulator ≤ 5 %, the winner within 5 % of the best setting of the grid.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.lib.cluster import NETWORKS, need_cluster
from bench.lib.contenders import Bare, Sirtaki
from bench.lib.harness import Report, Spread, alternate, finish, parser
from bench.lib.models import emulated_resnet50
from bench.lib.ranks import run_ranks, start
from sirtaki.autotune.knobs import KIB, MIB, Cut, Knobs
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind

SHAPE = NETWORKS["capped"]
ROUTE = (TransportKind.GLOO, Algorithm.FLAT)
STREAMS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
COMPUTE_S = 2.4  # Seconds of computation of the unscaled model. Two thirds are the backward pass.
GRID_UNITS = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
GRID_STREAMS = (1, 2, 4, 8, 16)
BEST_OF_GRID = 3
JOB_TIMEOUT_S = 1800.0


def random_settings(layout: GradientLayout, count: int, rng: np.random.Generator) -> list[Knobs]:
    """Return random settings for a layout: alternately uniform ones, and ones with explicit cuts."""
    settings = []
    for number in range(count):
        unit_bytes = int(2 ** rng.uniform(np.log2(64 * KIB), np.log2(max(128 * KIB, layout.total_bytes // 2))))
        streams = int(rng.choice(STREAMS))
        cuts = None
        if number % 2:
            places = rng.integers(1, layout.numel, size=int(rng.integers(3, 60))).tolist()
            stops = [*sorted(set(places)), layout.numel]
            cuts = tuple(Cut(stop=stop, stream=int(rng.integers(streams))) for stop in stops)
        settings.append(Knobs(unit_bytes=unit_bytes, streams=streams, transport=ROUTE[0], cuts=cuts))
    return settings


def grid_settings(layout: GradientLayout) -> list[Knobs]:
    """Return every unit size of the grid that is at most the layout's size, with every number of streams."""
    return [
        Knobs(unit_bytes=unit_bytes, streams=streams, transport=ROUTE[0])
        for unit_bytes in GRID_UNITS
        if unit_bytes <= layout.total_bytes
        for streams in GRID_STREAMS
    ]


# ── on the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def spans_s(bare: Bare, settings: Sequence[Knobs], rounds: int, seed: int) -> list[list[float]]:
    """Return `rounds` spans in seconds of each setting. The settings alternate. Collective."""
    turns = {str(number): lambda knobs=knobs: bare.measure(knobs)[0] for number, knobs in enumerate(settings)}
    return list(alternate(turns, rounds, seed=seed).values())


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: measure random plans, tune, and measure the grid and the winner. Collective."""
    from sirtaki.engine import job

    rank, scale = comm.rank, options["scale"]
    model, batch = emulated_resnet50(rank=rank, compute_s=scale * COMPUTE_S, scale=scale)
    bare = Bare(job.current(), model, batch, only=ROUTE)
    if rank == 0 and bare.known is None:
        raise RuntimeError("no model fits the probes; set SIRTAKI_LOG_LEVEL=info for the reason")
    plans = random_settings(bare.layout, options["plans"], np.random.default_rng(options["seed"]))
    plan_spans_s = spans_s(bare, plans, options["rounds"], options["seed"])

    tuned = Sirtaki(lambda: emulated_resnet50(rank=rank, compute_s=scale * COMPUTE_S, scale=scale), tune=True)
    begin_s = time.perf_counter()
    tuned.warm_up()
    warmup_s = time.perf_counter() - begin_s
    winner: Knobs = tuned.sync.knobs
    grid = [knobs for knobs in grid_settings(bare.layout) if knobs != winner]
    grid_spans_s = spans_s(bare, grid, options["grid_rounds"], options["seed"])
    order = sorted(range(len(grid)), key=lambda place: statistics.median(grid_spans_s[place]))
    places = comm.bcast(order[:BEST_OF_GRID])  # Use rank 0's choice, because medians differ between ranks.
    field = [winner, *(grid[place] for place in places)]
    field_spans_s = spans_s(bare, field, options["final_rounds"], options["seed"])
    found = {
        "model": bare.known.to_json() if bare.known is not None else None,
        "probes": [[one.unit_bytes, one.streams, one.rounds, one.seconds] for one in bare.probes[ROUTE]],
        "plans": [knobs.to_json() for knobs in plans],
        "plan_spans_s": plan_spans_s,
        "grid": [knobs.to_json() for knobs in grid],
        "grid_spans_s": grid_spans_s,
        "field": [knobs.to_json() for knobs in field],
        "field_spans_s": field_spans_s,
        "warmup_s": warmup_s,
        "warmup_steps": tuned.warmup_steps,
    }
    bare.close()
    return found


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def judge(report: Report, result: Mapping[str, Any]) -> None:
    """Add rows, bars and notes from the ranks' measurements."""
    model = PlanningModel.from_json(result["model"])
    simulator = model.simulator(ROUTE)

    def row(kind: str, knobs: Knobs, spans_s: list[float]) -> dict[str, Any]:
        simulated_s = simulator.run_knobs(knobs).span_s
        return {
            "kind": kind,
            "setting": knobs.describe(),
            "units": len(knobs.to_plan(model.layout).units),
            "measured_s": Spread.of(spans_s),
            "simulated_s": simulated_s,
            "error": simulated_s / statistics.median(spans_s) - 1,
            "samples_s": spans_s,
            "knobs": knobs.to_json(),
        }

    def rows(kind: str, settings: str, spans: str) -> list[dict[str, Any]]:
        pairs = zip(map(Knobs.from_json, result[settings]), result[spans], strict=True)
        return [row(kind, knobs, spans_s) for knobs, spans_s in pairs]

    plans = rows("random plan", "plans", "plan_spans_s")
    grid = rows("grid", "grid", "grid_spans_s")
    winner, *best = rows("best of grid, again", "field", "field_spans_s")
    winner["kind"] = "winner"
    report.rows += [*plans, *grid, winner, *best]
    link = model.links[ROUTE]
    curve = " ".join(f"{rate / 1e6:.4g}" for rate in link.throughput[:8])
    report.notes += [
        f"fitted: α {1e3 * link.alpha_s:.3g} ms, processor {1e3 * link.host_s:.3g} ms per unit, G(1 … 8) {curve} MB/s, "
        f"residual {100 * link.residual:.1f} %; backward pass {1e3 * model.profile.compute_s:.0f} ms",
        f"the simulator on the grid: mean error {100 * mean_error(grid):.1f} %; on the random plans at worst "
        f"{100 * max(abs(one['error']) for one in plans):.1f} %",
        f"warm-up: {result['warmup_steps']} steps, {result['warmup_s']:.0f} s",
    ]
    fastest = min(one["measured_s"].median for one in best)
    report.settings["model"] = result["model"]
    report.settings["probes"] = result["probes"]
    report.bar(f"simulator: mean error over {len(plans)} random plans", mean_error(plans), 0.05)
    report.bar("winner / the best of the grid", winner["measured_s"].median / fastest, 1.05)


def mean_error(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean absolute error."""
    return statistics.fmean(abs(row["error"]) for row in rows)


def main() -> int:
    """Run the job on the emulated cluster."""
    flags = parser(__doc__)
    flags.add_argument("--scale", type=float, help="scale of ResNet-50's gradients and computation of 2.4 s (0.25)")
    flags.add_argument("--plans", type=int, help="number of random plans (16)")
    flags.add_argument("--warmup-iterations", type=int, default=100, help="tuning budget in steps")
    args = flags.parse_args()
    need_cluster()
    args.scale = args.scale or (0.1 if args.quick else 0.25)
    args.plans = args.plans or (12 if args.quick else 16)
    rounds = {"rounds": 3, "grid_rounds": 1 if args.quick else 2, "final_rounds": 5 if args.quick else 7}
    options = {"scale": args.scale, "plans": args.plans, "seed": args.seed, **rounds}
    env = {"SIRTAKI_WARMUP_ITERATIONS": str(args.warmup_iterations)}
    result = run_ranks("bench.reality", SHAPE, options, env=env, timeout_s=JOB_TIMEOUT_S)
    report = Report(name="reality")
    report.notes.append(f"gradients and compute × {args.scale:g}; {SHAPE.describe()}, {SHAPE.nodes} nodes")
    judge(report, result)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank))
