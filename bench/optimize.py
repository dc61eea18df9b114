"""Whether the plan that `sirtaki optimize` chooses is about as fast as the best of a sweep, measured in the same job.

    python -m bench.optimize [--quick] [--check] [--save] [--cases gloo capped]

Takes 2 minutes a case. A job is tuned, so that its links are probed, goes back to its untuned default, and is recorded
for a few steps. The plan that the search makes of the recording, the default, what the warm-up had kept, and all
settings of a coarse grid (unit sizes and streams, one route) take turns; then the first three and the best of the grid
once more, since the best of many measurements is lucky. What counts is the whole step on the slowest rank, the first
one after a change aside.

"gloo" is a transformer on two ranks of this host; "capped" the emulated ResNet-50 on four emulated nodes
(`bench.lib.cluster`: link 400 Mbit/s, a flow gets 100).

Bars: chosen ÷ best of the sweep ≤ 1.03; the search ≤ 60 s.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from bench.lib.cluster import LabShape, NetLab, why_unavailable
from bench.lib.contenders import Sirtaki
from bench.lib.harness import Bar, Report, Spread, alternate, finish, parser
from bench.lib.models import emulated_resnet50, transformer
from bench.lib.ranks import give_result, main_or_rank, rank_argv, rank_env, run_ranks, take_result
from sirtaki.analysis.global_graph import recorded
from sirtaki.analysis.job_model import histories, job_model
from sirtaki.analysis.plan_search import Outcome, optimize
from sirtaki.analysis.recording import read_folder as read
from sirtaki.analysis.what_if import Baseline, with_knobs
from sirtaki.autotune.knobs import KIB, MIB, Knobs
from sirtaki.comm.plan import TransportKind

MBIT = 1_000_000
SHAPE = LabShape(nodes=4, link_bits_per_s=400 * MBIT, flow_bits_per_s=100 * MBIT)
RANKS = {"gloo": 2, "capped": SHAPE.nodes}
SCALE, COMPUTE_S = 0.1, 0.24
GRID_UNITS = (256 * KIB, MIB, 4 * MIB)
GRID_STREAMS = {"gloo": (1, 2, 4), "capped": (2, 4, 8, 16)}
BEST_OF_GRID = 3
RECORDED = 5
JOB_TIMEOUT_S = 280.0

CHOSEN, DEFAULT, TUNED = "chosen", "untuned", "warm-up"


# ── on the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def step_s(contender: Sirtaki, sync: Any, control: Any, knobs: Knobs) -> float:
    """Collective: a step of the slowest rank under these knobs, the second one after the change."""
    sync._apply(knobs)
    contender.step()
    control.barrier()
    begin_s = time.perf_counter()
    contender.step()
    return float(control.maximum(np.array([time.perf_counter() - begin_s]))[0])


def on_rank(options: Mapping[str, Any]) -> None:
    """What each rank does; the first one gives the result."""
    import sirtaki.torch as hvd
    from sirtaki.engine import job

    torch.set_num_threads(1)
    hvd.init()
    control, folder = job.current().control, Path(options["folder"])
    rank = control.rank
    made = {
        "gloo": lambda: transformer(rank=rank),
        "capped": lambda: emulated_resnet50(rank=rank, compute_s=COMPUTE_S, scale=SCALE),
    }
    contender = Sirtaki(made[options["case"]], tune=True)
    contender.warm_up()
    sync: Any = contender.sync
    tuned, default = sync.knobs, sync._default
    sync._apply(default)
    contender.step()
    control.barrier()
    contender.record(folder, iterations=RECORDED)
    control.barrier()
    chosen: Knobs = control.broadcast(searched(folder).best.knobs if rank == 0 else None)

    grid = [
        Knobs(unit_bytes=unit_bytes, streams=streams, transport=TransportKind.GLOO)
        for unit_bytes in GRID_UNITS
        for streams in GRID_STREAMS[options["case"]]
    ]
    measure = partial(step_s, contender, sync, control)
    entrants = {DEFAULT: default, CHOSEN: chosen, TUNED: tuned, **{knobs.describe(): knobs for knobs in grid}}
    sweep = alternate({name: partial(measure, knobs) for name, knobs in entrants.items()}, options["rounds"])
    order = sorted((knobs.describe() for knobs in grid), key=lambda name: median(sweep[name]))
    field = [DEFAULT, CHOSEN, TUNED, *control.broadcast(order[:BEST_OF_GRID])]
    finals = alternate({name: partial(measure, entrants[name]) for name in field}, options["final_rounds"])
    if rank == 0:
        give_result(
            {
                "sweep": sweep,
                "finals": finals,
                "knobs": {name: knobs.to_json() for name, knobs in entrants.items()},
            }
        )
    control.barrier()
    hvd.shutdown()


# ── judgement ────────────────────────────────────────────────────────────────────────────────────────────────────────


def searched(folder: Path) -> Outcome:
    """What the search makes of a recording."""
    recording = read(folder)
    found = histories(recording)
    return optimize(Baseline.of(job_model(found), recorded(found)), settings=recording.job.settings)


def judge(report: Report, case: str, result: Mapping[str, Any], outcome: Outcome) -> None:
    """Adds rows, bars and notes of what the ranks have measured and what the search and replays have said."""
    knobs = {name: Knobs.from_json(one) for name, one in result["knobs"].items()}
    base = outcome.before
    said = {name: base.answer(name, with_knobs(base.job, one), replanned=True) for name, one in knobs.items()}
    said_s = {name: one.times.iteration_s for name, one in said.items()}
    grid = [name for name in knobs if name not in (CHOSEN, DEFAULT, TUNED)]
    order = spearmanr([said_s[name] for name in grid], [median(result["sweep"][name]) for name in grid]).statistic
    for stage in ("sweep", "finals"):
        report.rows += [
            {
                "case": case,
                "stage": stage,
                "who": name if name in (CHOSEN, DEFAULT, TUNED) else "grid",
                "setting": knobs[name].describe(),
                "step_s": Spread.of(samples),
                "replayed_s": said_s[name],
                "interval, ms": said[name].interval,
                "inside": said[name].low_s <= median(samples) <= said[name].high_s,
                "samples_s": samples,
            }
            for name, samples in result[stage].items()
        ]
    medians_s = {name: median(samples) for name, samples in result["finals"].items()}
    best_s = min(medians_s.values())
    report.notes.append(
        f"{case}: the search took {outcome.search_s:.1f} s, {outcome.replays} replays; the recorded default took "
        f"{1e3 * base.times.iteration_s:.4g} ms a step; predicted gain {100 * outcome.gain:.1f} % "
        f"({outcome.best.answer.interval} ms), measured "
        f"{100 * (1 - medians_s[CHOSEN] / medians_s[DEFAULT]):.1f} %; warm-up's setting ÷ best "
        f"{medians_s[TUNED] / best_s:.3f}; rank correlation of replayed and measured steps of the grid {order:.2f}"
    )
    report.bars += [
        Bar(claim=f"{case}: chosen ÷ best of the sweep", value=medians_s[CHOSEN] / best_s, limit=1.03),
        Bar(claim=f"{case}: the search", value=outcome.search_s, limit=60.0, unit="s "),
    ]


def run(report: Report, case: str, args: Any) -> None:
    """One job."""
    with tempfile.TemporaryDirectory() as directory:
        rounds = {"rounds": 2 if args.quick else 3, "final_rounds": 6 if args.quick else 9}
        options = {"case": case, "folder": directory, **rounds}
        env = {"SIRTAKI_WARMUP_ITERATIONS": "30", "SIRTAKI_TRANSPORT": "gloo", **rank_env()}
        if case == "capped":
            with NetLab(SHAPE) as lab:
                output = lab.run_ranks(rank_argv("bench.optimize", options), env=env, timeout_s=JOB_TIMEOUT_S)
            result = take_result(output)
        else:
            result = run_ranks("bench.optimize", RANKS[case], options, env=env, timeout_s=JOB_TIMEOUT_S)
        folder = Path(directory)
        judge(report, case, result, searched(folder))


def main() -> int:
    """Runs every case."""
    flags = parser(__doc__.split("\n")[0])
    flags.add_argument("--cases", nargs="+", choices=RANKS, default=[*RANKS])
    args = flags.parse_args()
    report = Report(name="optimize" if {*args.cases} == {*RANKS} else "_".join(["optimize", *args.cases]))
    for case in args.cases:
        if case == "capped" and (reason := why_unavailable()) is not None:
            report.notes.append(f"capped: no emulated cluster here, {reason}")
            continue
        run(report, case, args)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main_or_rank(main, on_rank))
