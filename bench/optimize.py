"""Speed of the plan that `sirtaki optimize` chooses, compared with the best setting of a sweep in the same job.

    python -m bench.optimize [--quick] [--check] [--save] [--jobs two-ranks-transformer …]

Takes 1 to 2 minutes per job. `python -m bench.sweep --list` lists the jobs. A job is tuned first, so that its links are
probed. It returns to its untuned default and is recorded for a few steps. Then these settings alternate: the plan that
the search finds in the recording, the default, the setting that the warm-up kept, and a coarse grid of unit sizes and
numbers of streams on the default's route. In a second series the first three alternate with the best settings of the
grid, because the best of many measurements is partly luck. A sample is a whole step on the slowest rank. The first step
after a change is not measured.

Bars: chosen ÷ best of the sweep ≤ 1.03 in four of five jobs; the search ≤ 60 s.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from math import isnan, nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

from scipy.stats import spearmanr

from bench.lib.cluster import why_unavailable
from bench.lib.contenders import Sirtaki
from bench.lib.harness import Report, Spread, alternate, finish, parser
from bench.lib.ranks import run_ranks, slowest, start
from bench.sweep import JOBS
from sirtaki.analysis.global_graph import recorded
from sirtaki.analysis.job_model import histories, job_model
from sirtaki.analysis.plan_search import SearchOutcome, optimize
from sirtaki.analysis.recording import read_folder as read
from sirtaki.analysis.what_if import Baseline, plan_refusal, with_knobs
from sirtaki.autotune.knobs import KIB, MIB, Knobs

CHOSEN_JOBS = (
    "two-ranks-transformer",
    "two-ranks-conv",
    "four-ranks-resnet",
    "asked-two-ranks-bert",
    "cluster-400-100",
    "cluster-200-200",
    "asked-cluster-vgg-300-150",
    "asked-cluster-bert-500-100",
    "asked-cluster-gpt2-400-200-two",
    "asked-cluster-densenet-200-100-three",
)
GRID_UNITS = (256 * KIB, MIB, 4 * MIB)
GRID_STREAMS = {"one host": (1, 2, 4), "between hosts": (2, 4, 8, 16)}
ALIKE = 1.03
BEST_OF_GRID = 3
RECORDED = 5
JOB_TIMEOUT_S = 280.0

CHOSEN, DEFAULT, TUNED, RIVAL = "chosen", "untuned", "warm-up", "rival "


# ── on the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def step_s(contender: Sirtaki, comm: Any, knobs: Knobs) -> float:
    """Return this rank's seconds of the second step after a change to `knobs`. Collective."""
    contender.sync.apply(knobs)
    contender.step()
    comm.Barrier()
    begin_s = time.perf_counter()
    contender.step()
    return time.perf_counter() - begin_s


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: record, search, and time steps of all settings alternately. Collective."""
    folder, job = Path(options["folder"]), JOBS[options["job"]]
    contender = Sirtaki(lambda: job.make(rank=comm.rank), tune=True)
    contender.warm_up()
    tuned, default = contender.sync.knobs, contender.sync.default
    contender.sync.apply(default)
    contender.step()
    comm.Barrier()
    contender.record(folder, iterations=RECORDED)
    comm.Barrier()
    outcome = searched(folder) if comm.rank == 0 else None
    named = None if outcome is None else [outcome.best.knobs, *(rival.knobs for rival in outcome.rivals)]
    chosen, *rivals = comm.bcast(named)

    grid = [
        default.but(unit_bytes=unit_bytes, streams=streams, cuts=None)
        for unit_bytes in GRID_UNITS
        for streams in GRID_STREAMS["one host" if job.cluster is None else "between hosts"]
    ]
    entrants = {DEFAULT: default, CHOSEN: chosen, TUNED: tuned}
    entrants |= {f"{RIVAL}{number}": knobs for number, knobs in enumerate(rivals)}
    entrants |= {knobs.describe(): knobs for knobs in grid}
    turns = {name: partial(step_s, contender, comm, knobs) for name, knobs in entrants.items()}
    sweep = slowest(alternate(turns, options["rounds"]), comm)
    best = sorted((knobs.describe() for knobs in grid), key=lambda name: median(sweep[name]))[:BEST_OF_GRID]
    also = [name for name in entrants if name in (DEFAULT, CHOSEN, TUNED) or name.startswith(RIVAL)]
    finals = {name: turns[name] for name in (*also, *best)}
    return {
        "sweep": sweep,
        "finals": slowest(alternate(finals, options["final_rounds"]), comm),
        "knobs": {name: knobs.to_json() for name, knobs in entrants.items()},
    }


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def searched(folder: Path) -> SearchOutcome:
    """Search the best plan for a recording."""
    recording = read(folder)
    found = histories(recording)
    return optimize(Baseline.of(job_model(found), recorded(found)), settings=recording.job.settings)


def judge(report: Report, name: str, result: Mapping[str, Any], outcome: SearchOutcome) -> float:
    """Add a row with measured and predicted steps. Return the chosen plan's step over the best step."""
    knobs = {who: Knobs.from_json(one) for who, one in result["knobs"].items()}
    base = outcome.before
    asked = {who: with_knobs(base.job, one) for who, one in knobs.items() if one.route in base.job.links}
    predicted = {
        who: base.answer(who, job, replanned=True)
        for who, job in asked.items()
        if plan_refusal(base.job, job.plans) is None
    }
    sweep_s, finals_s = ({who: median(each) for who, each in result[stage].items()} for stage in ("sweep", "finals"))
    best = min(finals_s, key=lambda who: finals_s[who])
    true_s = {who: sweep_s[who] / sweep_s[DEFAULT] * base.times.iteration_s for who in predicted}
    inside = [one.low_s <= true_s[who] <= one.high_s for who, one in predicted.items() if who != DEFAULT]
    predicted_s = {who: one.times.iteration_s for who, one in predicted.items()}
    differ = min(len(set(predicted_s.values())), len(set(true_s.values()))) > 1
    order = spearmanr([*predicted_s.values()], [*true_s.values()]).statistic if differ else nan
    ratio = finals_s[CHOSEN] / finals_s[best]
    trials_s = [seconds for who, seconds in finals_s.items() if who == CHOSEN or who.startswith(RIVAL)]
    report.rows.append(
        {
            "job": name,
            "untuned_s": Spread.of(result["finals"][DEFAULT]),
            "chosen": knobs[CHOSEN].describe(),
            "chosen / best": round(ratio, 3),
            "it or another named / best": round(min(trials_s) / finals_s[best], 3),
            "warm-up's / best": round(finals_s[TUNED] / finals_s[best], 3),
            "untuned / best": round(finals_s[DEFAULT] / finals_s[best], 3),
            "best": knobs[best].describe(),
            "gain promised, %": round(100 * outcome.gain, 1),
            "measured, %": round(100 * (1 - finals_s[CHOSEN] / finals_s[DEFAULT]), 1),
            "others named": len(outcome.rivals),
            "told of the sweep": f"{len(predicted)} of {len(knobs)}",
            "inside": round(sum(inside) / len(inside), 2) if inside else None,
            "rank correlation": None if isnan(order) else round(float(order), 2),
            "search_s": outcome.search_s,
        }
    )
    return ratio


def run(report: Report, name: str, args: Any) -> float:
    """Run one job and add its row. Return the chosen plan's step over the best step."""
    rounds = {"rounds": 2 if args.quick else 3, "final_rounds": 6 if args.quick else 9}
    job = JOBS[name]
    with tempfile.TemporaryDirectory() as directory:
        options = {"job": name, "folder": directory, **rounds}
        env = {"SIRTAKI_WARMUP_ITERATIONS": "30"}
        where = job.cluster or job.ranks
        result = run_ranks("bench.optimize", where, options, env=env, timeout_s=JOB_TIMEOUT_S)
        return judge(report, name, result, searched(Path(directory)))


def main() -> int:
    """Run every job."""
    flags = parser(__doc__)
    flags.add_argument("--jobs", nargs="+", choices=JOBS, default=[*CHOSEN_JOBS])
    args = flags.parse_args()
    report = Report(name="optimize" if {*args.jobs} == {*CHOSEN_JOBS} else "_".join(["optimize", *args.jobs]))
    ratios = []
    for name in args.jobs:
        if JOBS[name].cluster is not None and (reason := why_unavailable()) is not None:
            report.notes.append(f"{name}: no emulated cluster here, {reason}")
            continue
        ratios.append(run(report, name, args))
    report.bar(
        "part of the jobs whose chosen plan takes over 1.03 of the best", fmean([r > ALIKE for r in ratios]), 0.2
    )
    report.bar("the longest search", max(row["search_s"] for row in report.rows), 60.0, "s ")
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank))
