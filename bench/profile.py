"""Overhead of recording a job, and accuracy of the alignment of clocks.

    python -m bench.profile [--quick] [--check] [--save]

*Overhead*: one job trains a model. Blocks of steps alternate: without a recording, with recorded units, and with
recorded operators as well, as by `sirtakirun profile`. The figure is the mean step of a block with a recording, from
the step that starts the recording, divided by the mean step of the block without one in the same round. Processor time
is measured on the training thread, because recording runs there during steps, and because other load on the machine
disturbs it less. Writing the files at the end of a recording is not part of a step. It is reported separately.
*Clocks*: the two recorded ranks have the same clock. The times of rank 1 are shifted by ±50 ms and ±20 ppm as if it
were on another host. The figure is the error after alignment, compared with HolisticTraceAnalysis.

Bars, for the mean over models: a step ≤ 1.01 with recorded units, ≤ 1.05 with recorded operators. Clocks agree within
half the smallest round trip of units.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from bench.lib.contenders import Sirtaki
from bench.lib.harness import Report, Spread, alternate, finish, parser, ratios
from bench.lib.models import small_conv, transformer
from bench.lib.ranks import run_ranks, start
from sirtaki.analysis.alignment import Alignment, ClockLine, OffsetSource, trace_entries
from sirtaki.analysis.recording import Recording

# ── HolisticTraceAnalysis, for comparison ────────────────────────────────────────────────────────────────────────────

PACKAGE = "HolisticTraceAnalysis"
Entries = Sequence[Mapping[str, Any]]


def version() -> str | None:
    """Return the version of HolisticTraceAnalysis; None if it or a requirement is not installed."""
    try:
        import hta.common.trace  # noqa: F401

        return metadata.version(PACKAGE)
    except ImportError:
        return None


def step_ends_s(recording: Recording) -> dict[int, list[float]]:
    """Return when each step of each rank ended, relative to the start of the earliest rank's first step."""
    by_rank: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in trace_entries(recording, _unaligned(recording)):
        by_rank[entry["pid"]].append(entry)
    return _by_package(by_rank) if version() else _by_rule(by_rank)


def _unaligned(recording: Recording) -> Alignment:
    """Return an alignment that leaves all clocks unchanged."""
    line = ClockLine(origin_s=0.0, offset_s=0.0, drift=0.0, error_s=0.0, known=OffsetSource.START)
    return Alignment(lines=dict.fromkeys(recording.ranks, line), reference=min(recording.ranks))


def _by_rule(by_rank: Mapping[int, Entries]) -> dict[int, list[float]]:
    spans = {rank: [entry for entry in entries if entry["ph"] == "X"] for rank, entries in by_rank.items()}
    earliest_us = min(entry["ts"] for mine in spans.values() for entry in mine)
    return {
        rank: sorted(
            1e-6 * (entry["ts"] + entry["dur"] - earliest_us)
            for entry in mine
            if entry["name"].startswith("iteration ")
        )
        for rank, mine in spans.items()
    }


def _by_package(by_rank: Mapping[int, Entries]) -> dict[int, list[float]]:
    from hta.common.trace import Trace

    logging.getLogger("hta").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        files = {}
        for rank, entries in by_rank.items():
            files[rank] = str(Path(directory, f"rank-{rank}.json"))
            content = {
                "schemaVersion": 1,
                "distributedInfo": {"rank": rank, "world_size": len(by_rank)},
                "traceEvents": entries,
            }
            Path(files[rank]).write_text(json.dumps(content))
        trace = Trace(trace_files=files, trace_dir=directory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Hide pandas' deprecation warnings.
            trace.load_traces(use_multiprocessing=False, use_memory_profiling=False)
    names = trace.symbol_table.get_sym_table()
    found = {}
    for rank in by_rank:
        events = trace.get_trace(rank)
        steps = events[[names[number].startswith("iteration ") for number in events["name"]]]
        found[rank] = sorted((1e-6 * (steps["ts"] + steps["dur"])).tolist())
    return found


# ── The benchmark ────────────────────────────────────────────────────────────────────────────────────────────────────

RANKS = 2
STEPS = 16
"""Iterations of a default recording: the starting one, ten kept ones without operators, three kept ones with operators.
One iteration is discarded after torch.profiler is switched on, and one after it is switched off.
"""

WAYS: Mapping[str, bool | None] = {"off": None, "units": False, "operators": True}
"""{variant of a block: whether operators are recorded}; None = no recording"""

LENGTHS = ("exposed_s", "beside_s")
"""Fields of a recorded iteration that are durations. All other fields in seconds are times."""

INJECTED = ((0.05, 20e-6), (-0.05, -20e-6), (0.05, -20e-6), (-0.05, 20e-6))


def long_transformer(*, rank: int) -> tuple[nn.Module, torch.Tensor]:
    """Return `transformer` with 256 tokens instead of 32, because operators of real models take longer."""
    model, _ = transformer(rank=rank)
    return model, torch.randn(2, 128, 256, generator=torch.Generator().manual_seed(1 + rank))


def wide_conv(*, rank: int) -> tuple[nn.Module, torch.Tensor]:
    """Return `small_conv` with 64 images instead of 8."""
    model, _ = small_conv(rank=rank)
    return model, torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(1 + rank))


MODELS: Mapping[str, Callable[..., tuple[nn.Module, torch.Tensor]]] = {
    "transformer, 32 tokens": transformer,
    "transformer, 256 tokens": long_transformer,
    "conv, 64 images": wide_conv,
}


def on_rank(comm: Any, options: dict[str, Any]) -> Any:
    """Return seconds per step of each variant; blocks alternate. Leave one recording in the folder. Collective."""
    from sirtaki.profiler import profile

    contender = Sirtaki(lambda: MODELS[options["model"]](rank=comm.rank), tune=False)
    folder = Path(options["folder"])
    found: dict[str, list[float]] = {}

    def steps(way: str) -> float:
        worked_before_s, begin_s = time.thread_time(), time.perf_counter()
        for _ in range(STEPS):
            contender.step()
        taken_s = (time.perf_counter() - begin_s) / STEPS
        found.setdefault(f"{way}, processor time", []).append((time.thread_time() - worked_before_s) / STEPS)
        return taken_s

    def sample(way: str) -> Callable[[], float]:
        def take() -> float:
            contender.step()
            if (operators := WAYS[way]) is None:
                return steps(way)
            with profile(folder, iterations=10_000, operators=operators):
                step_s = steps(way)
                begin_s = time.perf_counter()
            found.setdefault(f"{way}, writing", []).append(time.perf_counter() - begin_s)
            return step_s

        return take

    for way in WAYS:
        sample(way)()
    found.clear()
    samples = alternate({way: sample(way) for way in WAYS}, options["rounds"], seed=options["seed"])
    result = {"samples": samples, **{what: list(values) for what, values in found.items()}}
    sample("operators")()
    return result


def measure_cost(report: Report, args: Any, model: str, folder: Path) -> dict[str, float]:
    """Measure the overhead of recording one model and add a row. Return the median ratios by variant."""
    from sirtaki.analysis.recording import read_folder as read

    options = {"model": model, "folder": str(folder), "rounds": args.rounds, "seed": args.seed}
    found = run_ranks("bench.profile", RANKS, options)
    samples = found["samples"]
    spreads = {way: ratios(samples[way], samples["off"]) for way in ("units", "operators")}
    row: dict[str, Any] = {"model": model, "step_s": Spread.of(samples["off"])}
    for way, spread in spreads.items():
        row[f"{way} / off"] = spread
    for way in spreads:
        times = (found[f"{one}, processor time"] for one in (way, "off"))
        row[f"{way} / off, processor time"] = ratios(*times)
    kept = [len(step.operators) for step in read(folder).ranks[0].iterations]
    report.rows.append(
        {**row, "operators a step": round(median(kept)), "writing_s": Spread.of(found["operators, writing"])}
    )
    return {way: spread.median for way, spread in spreads.items()}


def moved(value: Any, by_s: float, drift: float, since_s: float) -> Any:
    """Return the value with all times (`…_s`, except durations) as a wrong clock would show them.

    Args:
        value: recorded iterations, or a part of one.
        by_s: error of the clock at `since_s`.
        drift: growth of the error per second.
        since_s: time on the true clock.
    """
    names = [each.name for each in fields(value)] if is_dataclass(value) else getattr(value, "_fields", ())
    if not names:
        return tuple(moved(each, by_s, drift, since_s) for each in value) if isinstance(value, tuple) else value
    changed = {}
    for name in names:
        inside = getattr(value, name)
        if isinstance(inside, float) and name.endswith("_s") and name not in LENGTHS:
            changed[name] = inside + by_s + drift * (inside - since_s)
        elif isinstance(inside, tuple):
            changed[name] = moved(inside, by_s, drift, since_s)
    return value._replace(**changed) if hasattr(value, "_replace") else replace(value, **changed)


def with_wrong_clock(true: Recording, *, by_s: float, drift: float, hosts: bool = True) -> Recording:
    """Return the recording as if rank 1 were on another host with a wrong clock.

    Args:
        true: recording of two ranks.
        by_s: error of rank 1's clock at the begin of the recording.
        drift: growth of the error per second.
        hosts: declare the hosts different. Otherwise the ranks count as one host's, whose clocks are not aligned.
    """
    own = true.ranks[1]
    shifted = replace(
        own,
        iterations=moved(own.iterations, by_s, drift, own.iterations[0].begin_s),
        offset_s=own.offset_s - by_s if hosts else own.offset_s,
    )
    placement = list(true.job.placement)
    if hosts:
        placement[1] = replace(placement[1], host=1, node=1, clock="another")
    return replace(true, job=replace(true.job, placement=tuple(placement)), ranks={0: true.ranks[0], 1: shifted})


def left_by_hta_s(true: Recording, shifted: Recording) -> float:
    """Return the largest error of rank 1's step ends in HolisticTraceAnalysis, in seconds."""
    was, found = (
        {rank: [one.end_s for one in own.iterations] for rank, own in true.ranks.items()},
        step_ends_s(shifted),
    )
    origin_s = was[0][0] - found[0][0]
    return max(abs(end_s + origin_s - right_s) for end_s, right_s in zip(found[1], was[1], strict=True))


def measure_clocks(report: Report, true: Recording) -> None:
    """Shift rank 1's clock, align it, and add the remaining error, and HolisticTraceAnalysis' for comparison."""
    from sirtaki.analysis.alignment import align

    own = true.ranks[1]
    worst_us, bound_us, hta_us = 0.0, 0.0, 0.0
    for by_s, drift in INJECTED:
        shifted = with_wrong_clock(true, by_s=by_s, drift=drift)
        aligned = align(shifted)
        pairs = [
            (there.done_s, here.done_s)
            for one, other in zip(shifted.ranks[1].iterations, own.iterations, strict=True)
            for there, here in zip(one.units, other.units, strict=True)
        ]
        worst_us = max(worst_us, *(1e6 * abs(aligned.at(1, there_s) - here_s) for there_s, here_s in pairs))
        bound_us = 1e6 * aligned.lines[1].error_s
        hta_us = max(hta_us, 1e6 * left_by_hta_s(true, shifted))
    peer = f"{PACKAGE} {found}" if (found := version()) else f"{PACKAGE}'s rule, re-implemented (not installed)"
    report.figure("error left of ±50 ms and ±20 ppm, at most", worst_us, "µs")
    report.figure("half the smallest round trip of units", bound_us, "µs")
    report.figure("half the quickest round trip of a question", 5e5 * own.round_trip_s, "µs")
    report.figure(f"error left by {peer}, at most", hta_us, "µs")
    report.figure("times of operators are known within", 1e6 * own.clock_error_s, "µs")
    claim = "error left of ±50 ms and ±20 ppm as a part of half the smallest round trip of units"
    report.bar(claim, worst_us / bound_us, 1.0)


def main() -> int:
    """Run both parts."""
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int)
    flags.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    args = flags.parse_args()
    args.rounds = args.rounds or (7 if args.quick else 21)
    from sirtaki.analysis.recording import read_folder as read

    report = Report(name="profile")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory, "recorded")
        costs = [measure_cost(report, args, model, folder) for model in args.models]
        for way, most in {"units": 1.01, "operators": 1.05}.items():
            report.bar(f"{way} recorded / nothing recorded, step", fmean([cost[way] for cost in costs]), most)
        measure_clocks(report, read(folder))
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(start(main, on_rank))
