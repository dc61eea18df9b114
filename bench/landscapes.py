"""Quality of the tuner on jobs that contradict its own model: other physics, formulas, and recorded sweeps.

    python -m bench.landscapes --open                    the families for development
    python -m bench.landscapes --check --save            the families held back
    python -m bench.landscapes --only "equal shares" bayesian --seeds 15 --check --save    the bandit and its parts

A landscape (`bench.lib.landscapes`) gives the true time of each setting. It shares no code with Sirtaki's simulator.
Planners get the results of probes on the landscape's idle network. All contenders have the same space, the same number
of training iterations and the same noise (4 %). Each seed is a separate job.

- *regret*: true time of the kept setting over the true time of the best uniform setting, minus one; at least zero.
- *within 3 %*: training iterations until the setting that would be kept has a regret of at most 3 %, and the share of
  runs that end with such a setting.
- *first plan*: regret of the first planner's proposal that ran, over the jobs in which one ran.
- *cost*: time of the warm-up over the time of as many untuned iterations.
- *excess*: time of a job of 10 000 iterations, less its time with the best setting, in hundredths of the latter. It is
  the sum over the parts of tuning in which a slower setting ran: trials and proof of the warm-up, the setting kept
  (outside tuning), trials and proofs of refinements. A part is negative if a planner's cuts beat all uniform settings.
- *paired*: regret minus another contender's regret on the same job with the same seed, in hundredths, and its 95 %
  interval.

Sirtaki and its arms run in a warm-up session, as in a job. The general optimisers (optuna's and scikit-optimize's) have
no model of gradients. They measure the default and then their own proposals for three iterations each, and keep the
fastest setting. The Horovod-like tuner searches only the unit size, on one stream.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.lib.harness import Bar, Report, finish, parser, processes
from bench.lib.landscapes import families, recorded
from bench.lib.landscapes.contenders import (
    ARMS,
    CLOSE,
    CONTENDERS,
    EQUAL_SHARES,
    HORIZONS,
    OTHERS,
    PARTS,
    SIRTAKI,
    SIRTAKIS,
)
from bench.lib.landscapes.landscape import Landscape

OPEN_RECORDINGS = ("two-ranks-conv", "four-ranks-transformer", "cluster-400-100")
"""Recorded jobs for the tuner's development. All other recorded jobs are held back for evaluation."""

USUAL_BUDGET = 100
"""Minimum number of iterations for all bars.

With fewer, the only bar is that Sirtaki is at least as good as the best rival.
"""

NOTHING_TO_GAIN = 1.005
"""The default counts as the best setting in a family in which it takes at most this multiple of the best time."""

BEST_ARM = "bayesian"
"""Name of the best single search technique."""

FEWER_SEEDS = {"optuna GP": 6, "scikit-optimize GP": 6, **dict.fromkeys(ARMS, 4)}
"""Number of seeds for contenders with slow proposals, and for the bandit's parts, unless `--only` names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One job and the contenders that run on it in one process."""

    family: str
    contenders: tuple[str, ...]
    seed: int
    noise: float
    budget: int


def landscape(family: str, seed: int) -> Landscape:
    """Return a family's job for that seed; a recorded job is the same for every seed."""
    for path in recorded.recordings():
        if path.stem == family:
            return recorded.recorded(path)
    make: Callable[[np.random.Generator], Landscape] = getattr(families, family)
    return make(np.random.default_rng([seed, 7]))


def run_task(task: Task) -> list[dict[str, Any]]:
    """Return one JSON-ready row per contender."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # Hide log lines about probes that fit no model.
    rows = []
    scape = landscape(task.family, task.seed)
    for name in task.contenders:
        outcome = CONTENDERS[name](scape, task.budget, task.noise, task.seed)
        ratio = scape.span_s(scape.default) / scape.span_s(scape.best)
        head = {"family": scape.family, "contender": name, "seed": task.seed, "default_over_best": ratio}
        rows.append({**head, **outcome})
    return rows


def summary(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return one contender's row over all families. Its regrets are means over families."""
    regrets = by_family(rows, name, "regret")
    mine = [row for row in rows if row["contender"] == name]
    planned = [row["first_plan"] for row in mine if row.get("first_plan") is not None]
    found = [math.inf if row["found_at"] is None else row["found_at"] for row in mine]
    return {
        "contender": name,
        "mean regret": statistics.fmean(regrets.values()),
        "worst family": max(regrets.values()),
        "ends within 3 %": statistics.fmean(row["regret"] <= CLOSE for row in mine),
        "median iterations to 3 %": statistics.median(found),
        "cost of the warm-up": statistics.fmean(row["cost"] for row in mine),
        **{
            f"job of {horizon} iterations": statistics.geometric_mean(row["cumulative"][horizon] for row in mine)
            for horizon in HORIZONS
        },
        "slower than the default": statistics.fmean(row["slower"] for row in mine),
        "false gains": statistics.fmean(row.get("false_gain", False) for row in mine),
        "regret of the first plan": statistics.fmean(planned) if planned else math.nan,
        "worst / default": max(row["over_default"] for row in mine),
        "runs": len(mine),
    }


def by_family(rows: Sequence[dict[str, Any]], name: str, what: str, *, like: str | None = None) -> dict[str, float]:
    """Return a contender's mean of a column in each family, over the seeds that the contender `like` ran."""
    seeds = {row["seed"] for row in rows if row["contender"] == (like or name)}
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["contender"] == name and row["seed"] in seeds:
            values[row["family"]].append(row[what])
    return {family: statistics.fmean(mine) for family, mine in values.items()}


def families_table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per family: the default over the best, and the mean regret of each contender."""
    regrets = {name: by_family(rows, name, "regret") for name in names}
    default = by_family(rows, SIRTAKI, "default_over_best")
    return [
        {"family": family, "default / best": ratio, **{name: regrets[name].get(family, math.nan) for name in names}}
        for family, ratio in default.items()
    ]


def excess_table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return Sirtaki's mean excess time by family and by part of tuning, in hundredths of the time of the best setting.

    The last row is the mean over all families.
    """
    flat = [
        {**row, **{part: 100.0 * row["excess"].get(part, 0.0) for part in PARTS}}
        for row in rows
        if row["contender"] == SIRTAKI
    ]
    table = [
        {"excess time of": family, "sum": sum(parts), **dict(zip(PARTS, parts, strict=True))}
        for family in by_family(flat, SIRTAKI, PARTS[0])
        for parts in [[by_family(flat, SIRTAKI, part)[family] for part in PARTS]]
    ]
    names = ("sum", *PARTS)
    return [
        *table,
        {"excess time of": "mean", **{name: statistics.fmean(row[name] for row in table) for name in names}},
    ]


def paired(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return Sirtaki's regret minus the contender's regret on the same jobs: mean and interval."""
    regrets: dict[str, dict[tuple[str, int], float]] = defaultdict(dict)
    for row in rows:
        regrets[row["contender"]][row["family"], row["seed"]] = row["regret"]
    points = [100.0 * (regrets[SIRTAKI][job] - theirs) for job, theirs in regrets[name].items()]
    half = 1.96 * statistics.stdev(points) / math.sqrt(len(points)) if len(points) > 1 else math.inf
    return {
        "sirtaki less": name,
        "points": statistics.fmean(points),
        "95 % interval, ±": half,
        "equal": statistics.fmean(point == 0.0 for point in points),
        "pairs": len(points),
    }


def bars(rows: Sequence[dict[str, Any]], *, budget: int = USUAL_BUDGET) -> list[Bar]:
    """Return the bars of a warm-up with `budget` iterations."""
    rivals = [name for name in OTHERS if any(row["contender"] == name for row in rows)]
    short = budget < USUAL_BUDGET
    return ([] if short else _bars_alone(rows)) + (_bars_beside(rows, rivals, short=short) if rivals else [])


def _bars_alone(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    ours = summary(rows, SIRTAKI)
    regrets, defaults = (by_family(rows, SIRTAKI, what) for what in ("regret", "default_over_best"))
    idle = [regrets[family] for family, ratio in defaults.items() if ratio <= NOTHING_TO_GAIN]
    asked = [
        Bar(claim="mean regret", value=ours["mean regret"], limit=0.03),
        Bar(claim="median iterations to 3 %", value=ours["median iterations to 3 %"], limit=20),
        Bar(claim="cost of the warm-up", value=ours["cost of the warm-up"], limit=1.10),
        Bar(claim="slowest setting kept over the default", value=ours["worst / default"], limit=1.02),
    ]
    if idle:
        asked.append(Bar(claim="regret where the default is the best", value=max(idle), limit=0.005))
    parts = [name for name in (EQUAL_SHARES, BEST_ARM) if any(row["contender"] == name for row in rows)]
    for pair in (paired(rows, name) for name in parts):
        claim = f"upper end of the paired difference with {pair['sirtaki less']}, points"
        asked.append(Bar(claim=claim, value=pair["points"] + pair["95 % interval, ±"], limit=0.0))
    return asked


def _bars_beside(rows: Sequence[dict[str, Any]], rivals: Sequence[str], *, short: bool) -> list[Bar]:
    best = min(rivals, key=lambda name: summary(rows, name)["mean regret"])
    theirs = {name: by_family(rows, name, "regret") for name in rivals}
    mine = {name: by_family(rows, SIRTAKI, "regret", like=name) for name in rivals}
    ratio = statistics.fmean(mine[best].values()) / statistics.fmean(theirs[best].values())
    claim = f"mean regret over that of the best other contender ({best})"
    if short:
        return [Bar(claim=claim, value=ratio, limit=1.0)]
    behind = max(mine[name][family] - regret for name in rivals for family, regret in theirs[name].items())
    return [
        Bar(claim=claim, value=ratio, limit=0.5),
        Bar(claim="regret behind the best contender in the worst family", value=behind, limit=0.03),
    ]


def main() -> int:
    """Run the benchmark and return its exit status."""
    flags = parser(__doc__)
    flags.add_argument("--open", action="store_true", help="run the families for development")
    flags.add_argument("--seeds", type=int, default=20)
    flags.add_argument("--noise", type=float, default=0.04)
    flags.add_argument("--budget", type=int, default=USUAL_BUDGET, metavar="ITERATIONS")
    flags.add_argument("--families", nargs="+", metavar="FAMILY", help="run only these families or recorded jobs")
    flags.add_argument(
        "--only", nargs="*", choices=CONTENDERS, metavar="CONTENDER", help=f"run only {SIRTAKI} and these"
    )
    flags.add_argument("--minutes", type=float, help="start no further seed after so many minutes")
    flags.add_argument("--workers", type=int, default=2, help="number of processes (%(default)s)")
    args = flags.parse_args()
    made = families.OPEN if args.open else families.HELD_BACK
    names = [family.__name__ for family in made]
    names += [path.stem for path in recorded.recordings() if (path.stem in OPEN_RECORDINGS) == args.open]
    if unknown := set(args.families or ()) - set(names):
        flags.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(names)}")
    names = args.families or names
    contenders = [name for name in CONTENDERS if args.only is None or name == SIRTAKI or name in args.only]
    n_seeds = 2 if args.quick else args.seeds
    most = FEWER_SEEDS if args.only is None else {}
    seeds = [
        [
            Task(
                family=family,
                contenders=tuple(name for name in contenders if number < most.get(name, n_seeds)),
                seed=args.seed + number,
                noise=args.noise,
                budget=args.budget,
            )
            for family in names
        ]
        for number in range(n_seeds)
    ]
    rows: list[dict[str, Any]] = []
    until_s = math.inf if args.minutes is None else time.monotonic() + 60 * args.minutes
    with processes(args.workers) as pool:
        for n_done, tasks in enumerate(seeds):
            if time.monotonic() > until_s:
                n_seeds = n_done
                break
            rows += [row for done in pool.map(run_task, tasks) for row in done]
    parts = "" if any(name in contenders for name in OTHERS) else "_parts"
    report = Report(name=f"landscapes{parts}{'_open' if args.open else ''}")
    report.settings["runs"] = rows
    report.rows += [summary(rows, name) for name in contenders]
    shown = [name for name in (*SIRTAKIS, *OTHERS) if name in contenders]
    report.rows += families_table(rows, shown)
    report.rows += excess_table(rows)
    report.rows += [paired(rows, name) for name in contenders if name != SIRTAKI]
    fewer = " (at most 6 for Gaussian processes, 4 for the bandit's parts)" if most else ""
    report.notes.append(
        f"{n_seeds} seeds{fewer}, {args.budget} iterations, noise {100 * args.noise:g} %. Second table: mean regret by "
        "family. Third table: excess time of a job of 10 000 iterations, in hundredths. Last table: paired differences"
    )
    report.bars += bars(rows, budget=args.budget)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
