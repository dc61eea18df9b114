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

from scipy.stats import spearmanr

from bench.lib.cluster import NETWORKS, LabShape, why_unavailable
from bench.lib.contenders import Sirtaki
from bench.lib.harness import Report, Spread, alternate, finish, parser
from bench.lib.models import emulated_resnet50, transformer
from bench.lib.ranks import run_ranks, slowest, start
from sirtaki.analysis.global_graph import recorded
from sirtaki.analysis.job_model import histories, job_model
from sirtaki.analysis.plan_search import Outcome, optimize
from sirtaki.analysis.recording import read_folder as read
from sirtaki.analysis.what_if import Baseline, plan_refusal, with_knobs
from sirtaki.autotune.knobs import KIB, MIB, Knobs
from sirtaki.comm.plan import TransportKind

CASES: dict[str, int | LabShape] = {"gloo": 2, "capped": NETWORKS["capped"]}
SCALE, COMPUTE_S = 0.1, 0.24
GRID_UNITS = (256 * KIB, MIB, 4 * MIB)
GRID_STREAMS = {"gloo": (1, 2, 4), "capped": (2, 4, 8, 16)}
BEST_OF_GRID = 3
RECORDED = 5
JOB_TIMEOUT_S = 280.0

CHOSEN, DEFAULT, TUNED = "chosen", "untuned", "warm-up"


# ── on the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def step_s(contender: Sirtaki, comm: Any, knobs: Knobs) -> float:
    """Collective: a step of this rank under these knobs, the second one after the change."""
    contender.sync._apply(knobs)
    contender.step()
    comm.Barrier()
    begin_s = time.perf_counter()
    contender.step()
    return time.perf_counter() - begin_s


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """What each rank does: is recorded, and lets settings alternate."""
    folder = Path(options["folder"])
    made = {
        "gloo": lambda: transformer(rank=comm.rank),
        "capped": lambda: emulated_resnet50(rank=comm.rank, compute_s=COMPUTE_S, scale=SCALE),
    }
    contender = Sirtaki(made[options["case"]], tune=True)
    contender.warm_up()
    tuned, default = contender.sync.knobs, contender.sync._default
    contender.sync._apply(default)
    contender.step()
    comm.Barrier()
    contender.record(folder, iterations=RECORDED)
    comm.Barrier()
    chosen: Knobs = comm.bcast(searched(folder).best.knobs if comm.rank == 0 else None)

    grid = [
        Knobs(unit_bytes=unit_bytes, streams=streams, transport=TransportKind.GLOO)
        for unit_bytes in GRID_UNITS
        for streams in GRID_STREAMS[options["case"]]
    ]
    entrants = {DEFAULT: default, CHOSEN: chosen, TUNED: tuned, **{knobs.describe(): knobs for knobs in grid}}
    turns = {name: partial(step_s, contender, comm, knobs) for name, knobs in entrants.items()}
    sweep = slowest(alternate(turns, options["rounds"]), comm)
    best = sorted((knobs.describe() for knobs in grid), key=lambda name: median(sweep[name]))[:BEST_OF_GRID]
    finals = {name: turns[name] for name in (DEFAULT, CHOSEN, TUNED, *best)}
    return {
        "sweep": sweep,
        "finals": slowest(alternate(finals, options["final_rounds"]), comm),
        "knobs": {name: knobs.to_json() for name, knobs in entrants.items()},
    }


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
    asked = {name: with_knobs(base.job, one) for name, one in knobs.items()}
    said = {name: base.answer(name, job, replanned=True) for name, job in asked.items()}
    refused = {name: plan_refusal(base.job, job.plans) is not None for name, job in asked.items()}
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
                "inside": "refused" if refused[name] else said[name].low_s <= median(samples) <= said[name].high_s,
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
    report.bar(f"{case}: chosen ÷ best of the sweep", medians_s[CHOSEN] / best_s, 1.03)
    report.bar(f"{case}: the search", outcome.search_s, 60.0, "s ")


def run(report: Report, case: str, args: Any) -> None:
    """One job."""
    rounds = {"rounds": 2 if args.quick else 3, "final_rounds": 6 if args.quick else 9}
    env = {"SIRTAKI_WARMUP_ITERATIONS": "30", "SIRTAKI_TRANSPORT": "gloo"}
    with tempfile.TemporaryDirectory() as directory:
        options = {"case": case, "folder": directory, **rounds}
        result = run_ranks("bench.optimize", CASES[case], options, env=env, timeout_s=JOB_TIMEOUT_S)
        judge(report, case, result, searched(Path(directory)))


def main() -> int:
    """Runs every case."""
    flags = parser(__doc__)
    flags.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    args = flags.parse_args()
    report = Report(name="optimize" if {*args.cases} == {*CASES} else "_".join(["optimize", *args.cases]))
    for case in args.cases:
        if case == "capped" and (reason := why_unavailable()) is not None:
            report.notes.append(f"capped: no emulated cluster here, {reason}")
            continue
        run(report, case, args)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank))
