"""Reproduce the figures of the dPRO paper (MLSys 2022) that one machine without GPUs can show, in one table.

    python -m bench.dpro [--quick] [--check] [--save] [--limit-s 480] [--parts accuracy overhead alignment …]

Takes 8 minutes, `--quick` 2. On a busy machine it skips jobs and notes them. A row has the paper's figure, the figure
measured here, the method, and the part of the experiment that cannot be reproduced. Jobs run by the functions of
`bench.replay`, `bench.profile` and `bench.optimize`. Rows on memory, compiled models and chosen plans quote
`bench/results`.

*accuracy* (figure 7, table 2): jobs are recorded, replayed, and compared with iterations that were not recorded, and
with Daydream's rule. *overhead* (section 7.2): a step during a recording. *alignment* (figure 8): replays of a
recording whose second rank has a wrong clock, with and without alignment. *search* (table 5): duration of a search.
*scale* (figure 10): many ranks on few cores, replayed from their own recording, and predicted from a recording of two
ranks. *speed*: time to predict a change of a job of 64 ranks.

Bars: replay error 5 % on average, 10 % at worst. After alignment, clocks differ by at most half the smallest round trip
of units, and an iteration by 5 %. A search takes 60 s, a replay of 64 ranks 2 s. Overhead has its bars in
`bench.profile`.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.lib.cluster import NETWORKS, why_unavailable
from bench.lib.harness import RESULTS, Report, finish, parser
from bench.optimize import searched
from bench.profile import INJECTED, measure_clocks, measure_cost, with_wrong_clock
from bench.replay import FinishedJob, percent, with_other_units
from bench.replay import run as run_job
from sirtaki.analysis.global_graph import (
    coarse,
    communication_s,
    global_graph,
    mean_iteration,
    play,
    replayed,
    symmetric,
)
from sirtaki.analysis.job_model import JobModel, histories, job_model
from sirtaki.analysis.recording import Recording, write_job, write_rank
from sirtaki.analysis.what_if import with_ranks
from sirtaki.autotune.model.replayer import replay

# ── figures of the dPRO paper (MLSys 2022, section 7) ────────────────────────────────────────────────────────────────

PAPER: Mapping[str, tuple[str, str, str, str]] = {
    "iteration": ("fig. 7", "iteration: error", "< 5 % mostly", "RDMA, 100 Gbit/s, GPUs"),
    "rule": ("fig. 7", "iteration by Daydream's rule: error", "up to 70.2 %", "as above"),
    "forward": ("table 2", "forward pass: error", "0.8, 1.7 %", "BERT and ResNet on GPUs"),
    "backward": ("table 2", "backward pass: error", "0.7, 1.4 %", "as above"),
    "plan": ("", "another plan, as a ratio to the one that ran: error", "not reported", ""),
    "overhead": ("sec. 7.2", "recording: overhead", "5.86 %", "GPUs, whose kernels run on"),
    "apart": ("fig. 8", "iteration, clocks not aligned: error", "up to 36.7 %", "clocks of several machines"),
    "aligned": ("fig. 8", "iteration, clocks aligned: error", "< 5 %", "as above"),
    "clock": ("sec. 4.2", "clock error after alignment", "not reported", "as above"),
    "operators": ("fig. 9", "operators fused for communication: step", "1 / 1.52 of XLA's", "XLA, GPUs"),
    "tensors": ("fig. 9", "tensors fused and cut: step", "1 / 1.19 of the default's", "Horovod, BytePS, GPUs"),
    "peak": ("table 3", "peak memory: error", "at most 5.25 %", "memory of GPUs"),
    "remedies": ("table 4", "time with re-computation, accumulation: error", "3.4, 0.8 %", "BERT on 16 GPUs"),
    "search": ("table 5", "search with all accelerations", "0.29 h (ResNet50)", "operators are not fused in it"),
    "crowd": ("fig. 10", "more ranks: error", "< 5.6 %; Daydream up to 73.8 %", "128 GPUs on 16 hosts"),
    "question": ("", "one question to 64 ranks", "not reported", ""),
    "questions": ("", "further questions, about other units", "not reported", ""),
}
"""Rows of the table: figure, subject, the paper's value, and the part that one machine without GPUs cannot show."""

KEPT = {
    "operators": ("compiled", "÷ whole"),
    "tensors": ("optimize", "chosen"),
    "peak": ("memory", "peak off by"),
    "remedies": ("memory", "time off by"),
}
"""{figure that other benchmarks measure: the benchmark, and a word in the claims of its bars}"""


MOST = 3
"""Maximum number of bars that are quoted one by one."""


def line(key: str, here: str, how: str) -> dict[str, Any]:
    """Return a row of the table: the paper's figure `key`, the figure measured here, and the method."""
    figure, what, paper, missing = PAPER[key]
    return {"figure": figure, "what": what, "the paper": paper, "here": here, "how": how, "not redone": missing}


def kept_lines(results: Path = RESULTS) -> Iterator[dict[str, Any]]:
    """Return rows that quote results of benchmarks in the folder `results`."""
    for key, (name, word) in KEPT.items():
        path = results / f"{name}.md"
        bars = kept_bars(path.read_text(encoding="utf-8")) if path.exists() else {}
        shown = [f"{claim}: {value}" for claim, value in bars.items() if word in claim]
        if len(shown) > MOST:
            worst = max((claim for claim in bars if word in claim), key=lambda claim: float(bars[claim].split()[0]))
            shown = [f"of {len(shown)} at worst {worst}: {bars[worst]}"]
        yield line(key, "; ".join(shown) or "not kept yet", f"bench.{name}")


def kept_bars(page: str) -> dict[str, str]:
    """Return the measured values of the bars on a page of `bench/results`, by claim."""
    rows = re.findall(r"^\| (.+) \| (.+) \| ≤ .+ \| (?:met|\*\*missed\*\*) \|$", page, re.MULTILINE)
    return dict(rows)


# ── The benchmark ────────────────────────────────────────────────────────────────────────────────────────────────────

PARTS = ("accuracy", "overhead", "alignment", "search", "scale", "speed")
Subject = tuple[str, str, int]
"""A job to record: (case and model as in `bench.replay`, number of ranks)."""

MAIN: Subject = ("gloo", "transformer", 2)
"""The job that is also used for alignment, search, extrapolation and speed."""

SUBJECTS: Sequence[Subject] = (
    MAIN,
    ("gloo", "conv", 2),
    ("capped", "resnet50", 4),
    ("shared_memory", "transformer", 2),
    ("straggler", "transformer", 2),
    ("gloo", "mlp", 2),
    ("equal", "resnet50", 4),
    ("mpi", "transformer", 2),
    ("gloo", "resnet50", 2),
    ("gloo", "transformer", 4),
)
"""Jobs to record. The first ones run even if time is short."""

SHARE_OF_ACCURACY = 0.5
"""Fraction of the time limit that is used to run jobs."""

SLEEPS = "resnet50"
"""Model that sleeps instead of computing.

A recording contains no operators of it, so that its passes cannot be replayed. The same holds for a straggler's forward
pass, before which the rank sleeps.
"""

CROWDS = (8, 16)
MANY_RANKS = 64
PASSES = ("iteration", "forward", "backward")
RULE = "bytes ÷ bandwidth"
Rows = Iterator[dict[str, Any]]


def run_jobs(
    report: Report, subjects: Sequence[Subject], args: Namespace, until_s: float
) -> dict[Subject, FinishedJob]:
    """Record the jobs. Skip and note those that fail, and those that would start after `until_s`."""
    found = {}
    for case, model, ranks in subjects:
        if found and time.monotonic() > until_s:
            report.notes.append(f"{case}, {model}, {ranks} ranks: skipped, the time was up")
            continue
        if case in NETWORKS and (reason := why_unavailable()) is not None:
            report.notes.append(f"{case}: no emulated cluster here, {reason}")
            continue
        try:
            found[case, model, ranks] = run_job(case, model, ranks, args)
        except RuntimeError as err:
            report.notes.append(f"{case}, {model}, {ranks} ranks: {str(err).splitlines()[0][:200]}")
    return found


def times(subject: Subject, job: FinishedJob) -> Rows:
    """Yield the measured, the replayed and Daydream's times of an iteration and its passes, as in table 2."""
    case, model, ranks = subject
    true = job.truth["base"]
    for who, times_s in (("measured", true), ("replayed", job.replayed()), (RULE, job.by_daydream())):
        known = who == "measured" or model != SLEEPS
        late = who != "measured" and case == "straggler"
        yield {
            "case": case,
            "model": model,
            "ranks": ranks,
            "who": who,
            "iteration_s": times_s[0],
            "forward_s": times_s[1] if known and not late else math.nan,
            "backward_s": times_s[2] if known else math.nan,
            "error, %": None if who == "measured" else percent(times_s[0], true[0]),
        }


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def accuracy(report: Report, jobs: Mapping[Subject, FinishedJob]) -> Rows:
    """Compare replays with measured iterations: figure 7 and table 2."""
    rows = [row for subject, job in jobs.items() for row in times(subject, job)]
    report.rows += rows
    own, rule = ([abs(row["error, %"]) for row in rows if row["who"] == who] for who in ("replayed", RULE))
    report.bar("fig. 7: error of an iteration, mean", statistics.fmean(own), 5.0, "% ")
    report.bar("fig. 7: error of an iteration, worst", max(own), 10.0, "% ")
    how = f"jobs: {len(jobs)}, against iterations that were not recorded"
    yield line("iteration", _mean_and_worst(own), how)
    yield line("rule", _mean_and_worst(rule), how)
    for name in PASSES[1:]:
        pairs = [(own[f"{name}_s"], true[f"{name}_s"]) for true, own in zip(rows[::3], rows[1::3], strict=True)]
        errors = [abs(percent(predicted_s, true_s)) for predicted_s, true_s in pairs if not math.isnan(predicted_s)]
        if errors:
            yield line(name, _mean_and_worst(errors), f"jobs with real models: {len(errors)}")
    plans = [
        percent(job.replayed(with_other_units)[0] / job.replayed()[0], job.truth["plan"][0] / job.truth["base"][0])
        for job in jobs.values()
        if "plan" in job.truth
    ]
    if plans:
        yield line("plan", _mean_and_worst([abs(error) for error in plans]), "a second optimizer in the same job")


def _mean_and_worst(errors: Sequence[float]) -> str:
    return f"mean {statistics.fmean(errors):.1f} %, worst {max(errors):.1f} %"


def overhead(report: Report, args: Namespace) -> Rows:
    """Measure the overhead of recording: section 7.2."""
    model = "transformer, 256 tokens"
    with tempfile.TemporaryDirectory() as directory:
        flags = Namespace(steps=10, rounds=args.rounds, seed=args.seed)
        ratio = measure_cost(report, flags, model, Path(directory, "recorded"))
    shown = f"{100 * (ratio['operators'] - 1):.1f} % with operators, {100 * (ratio['units'] - 1):.1f} % without"
    yield line(
        "overhead",
        shown,
        f"{model}; {args.rounds} alternating blocks of steps. Replayed steps are recorded with units only",
    )


def alignment(report: Report, job: FinishedJob) -> Rows:
    """Replay a recording in which one of two ranks has a wrong clock: figure 8."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for recorded in job.histories:
        right_s = _iteration_s(recorded.recording)
        for by_s, drift in INJECTED:
            for aligned, errors in found.items():
                shifted = with_wrong_clock(recorded.recording, by_s=by_s, drift=drift, hosts=aligned)
                errors.append(abs(percent(_iteration_s(_by_units(shifted)), right_s)))
    off, on = max(found[False]), max(found[True])
    measure_clocks(report, job.histories[0].recording)
    left_us = {row["what"]: row["figure"] for row in report.rows if row.get("unit") == "µs"}
    own_us, hta_us = (
        next(us for what, us in left_us.items() if what.startswith(f"error left {by}")) for by in ("of", "by")
    )
    report.bar("fig. 8: error of an iteration, aligned", on, 5.0, "% ")
    how = "error of ±50 ms and ±20 ppm on one of two ranks; compared with the replay with correct clocks"
    yield line("apart", f"up to {off:.1f} %", how)
    yield line("aligned", f"up to {on:.1f} %", how)
    yield line("clock", f"{own_us:.0f} µs; HolisticTraceAnalysis leaves {hta_us:.0f} µs", how)


def _by_units(shifted: Recording) -> Recording:
    """Return a recording whose clocks are aligned only by the times of units, as between hosts."""
    return replace(shifted, ranks={rank: replace(own, round_trip_s=1.0) for rank, own in shifted.ranks.items()})


def _iteration_s(recording: Recording) -> float:
    return replayed(play(job_model(histories(recording)))).iteration_s


def search(report: Report, job: FinishedJob) -> Rows:
    """Measure the duration of a search: table 5."""
    recording = job.histories[0].recording
    with tempfile.TemporaryDirectory() as directory:
        write_job(Path(directory), recording.job)
        for own in recording.ranks.values():
            write_rank(Path(directory), own)
        found = searched(Path(directory))
    report.bar("table 5: the search", found.search_s, 60.0, "s ")
    step_ms = 1e3 * found.best.answer.times.iteration_s
    shown = f"{found.search_s:.2f} s, {found.replays} replays; finds {step_ms:.4g} ms a step"
    yield line("search", shown, f"{' '.join(map(str, MAIN))} ranks, {_gradients(job)} gradients")


def _gradients(job: FinishedJob) -> int:
    return sum(len(buffer.layout.sizes) for buffer in job.models[0].buffers) - 1  # The last entry is the control flags.


def scale(report: Report, small: FinishedJob, args: Namespace) -> Rows:
    """Run more ranks than cores, replay their recording, and predict them from two ranks: figure 10."""
    few = Namespace(**{**vars(args), "turns": 2, "steps": 4})
    case, model, _ = MAIN
    for subject, job in run_jobs(report, [(case, model, ranks) for ranks in args.crowds], few, args.until_s).items():
        true, own, rule = times(subject, job)
        ranks, true_s = subject[2], true["iteration_s"]
        predicted_s = statistics.fmean(replayed(play(with_ranks(one, ranks))).iteration_s for one in small.models)
        error = percent(predicted_s, true_s)
        from_two = {**true, "who": "from 2 ranks", "iteration_s": predicted_s, "error, %": error}
        report.rows += [true, own, rule, {**from_two, "forward_s": math.nan, "backward_s": math.nan}]
        shown = (
            f"{ranks} ranks, {1e3 * true_s:.0f} ms: {own['error, %']:+.1f} %, predicted from 2 ranks {error:+.1f} %, "
            f"Daydream {rule['error, %']:+.1f} %"
        )
        yield line("crowd", shown, f"{case} {model}, all ranks on this machine's cores")


def speed(report: Report, job: FinishedJob) -> Rows:
    """Measure the time to predict a change of a job of `MANY_RANKS` ranks, and the rate of further predictions."""
    large = with_ranks(mean_iteration(job.models[0]), MANY_RANKS)
    operators = statistics.fmean(len(one.operators) for one in job.histories[0].recording.ranks[0].iterations)
    ways: Mapping[str, Callable[[JobModel], float]] = {
        "as it is": lambda model: replay(global_graph(model)).total_s,
        "coarsened": lambda model: replay(global_graph(coarse(model))).total_s,
        "symmetry, too": lambda model: replay(global_graph(coarse(symmetric(model)))).total_s,
        "units alone": lambda model: communication_s(global_graph(coarse(symmetric(model)))),
    }
    what, taken_s = f"{MANY_RANKS} ranks × {operators:.0f} operators", {}
    for name, ask in ways.items():
        begin_s = time.perf_counter()
        predicted_s = ask(large)
        taken_s[name] = time.perf_counter() - begin_s
        report.rows.append({"question": f"{what}, {name}", "takes_s": taken_s[name], "answer_s": predicted_s})
    small = symmetric(coarse(large, settled=False))
    begin_s, count = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - begin_s) < 2.0:
        replay(global_graph(coarse(with_other_units(small))))
        count += 1
    report.bar(f"one question to {MANY_RANKS} ranks", taken_s["symmetry, too"], 2.0, "s ")
    yield line("question", "; ".join(f"{name} {seconds:.2f} s" for name, seconds in taken_s.items()), what)
    yield line("questions", f"{count / passed_s:.1f} a second", f"{what}, {len(small.ranks)} ranks for all")


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def measure(report: Report, args: Namespace) -> None:
    """Run the selected parts. The table with the paper's figures is the first one."""
    wanted = {*args.parts}
    whole = "accuracy" in wanted and not args.quick
    until_s = args.until_s - (1 - SHARE_OF_ACCURACY) * args.limit_s
    jobs = run_jobs(report, SUBJECTS if whole else [MAIN] if wanted - {"overhead"} else [], args, until_s)
    table = list(accuracy(report, jobs)) if jobs and "accuracy" in wanted else []
    if "overhead" in wanted:
        table += overhead(report, args)
    if MAIN in jobs:
        parts: Mapping[str, Callable[[FinishedJob], Rows]] = {
            "alignment": lambda job: alignment(report, job),
            "search": lambda job: search(report, job),
            "speed": lambda job: speed(report, job),
            "scale": lambda job: scale(report, job, args),
        }
        for name in [name for name in parts if name in wanted]:
            table += parts[name](jobs[MAIN])
    report.rows[:0] = [*table, *kept_lines()]


def main() -> int:
    """Run the selected parts and print the table."""
    flags = parser(__doc__)
    flags.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    flags.add_argument(
        "--limit-s", type=float, default=480.0, metavar="S", help="start no job after so many seconds (%(default)s)"
    )
    args = flags.parse_args()
    report = Report(name="dpro" if {*args.parts} == {*PARTS} else "_".join(["dpro", *args.parts]))
    amount = {"rounds": 3, "turns": 2} if args.quick else {"rounds": 7, "turns": 3}
    rest = {"steps": 6, "recorded": 5, "units_only": False, "crowds": list(CROWDS[:1] if args.quick else CROWDS)}
    measure(report, Namespace(**{**vars(args), **amount, **rest, "until_s": time.monotonic() + args.limit_s}))
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
