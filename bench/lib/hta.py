"""HolisticTraceAnalysis beside our alignment: what it makes of ranks whose clocks differ.

It reads a trace file a rank (Kineto's format) and subtracts from all of them the earliest moment of all. Where the
package is not installed (it wants Jupyter; `pip install --no-deps HolisticTraceAnalysis pandas psutil` is enough here)
that rule is told again.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from sirtaki.analysis.alignment import Alignment, ClockLine, Known, trace_entries
from sirtaki.analysis.recording import Recording

PACKAGE = "HolisticTraceAnalysis"
Entries = Sequence[Mapping[str, Any]]


def version() -> str | None:
    """Of the package; None = it is not installed, or lacks what it needs."""
    try:
        import hta.common.trace  # noqa: F401

        return metadata.version(PACKAGE)
    except ImportError:
        return None


def step_ends_s(recording: Recording) -> dict[int, list[float]]:
    """When each step of each rank ended, as it sees it: after the beginning of the earliest rank's first one."""
    by_rank: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for entry in trace_entries(recording, _as_told(recording)):
        by_rank[entry["pid"]].append(entry)
    return _by_package(by_rank) if version() else _by_rule(by_rank)


def _as_told(recording: Recording) -> Alignment:
    """Nothing is added to any clock."""
    line = ClockLine(origin_s=0.0, offset_s=0.0, drift=0.0, error_s=0.0, known=Known.START)
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
            warnings.simplefilter("ignore")  # of what pandas will do without one day
            trace.load_traces(use_multiprocessing=False, use_memory_profiling=False)
    names = trace.symbol_table.get_sym_table()
    found = {}
    for rank in by_rank:
        events = trace.get_trace(rank)
        steps = events[[names[number].startswith("iteration ") for number in events["name"]]]
        found[rank] = sorted((1e-6 * (steps["ts"] + steps["dur"])).tolist())
    return found
