"""A benchmark's findings as a page that a person can read: what is kept in `bench/results`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]  # Any: what JSON can hold


def summary(found: Found) -> str:
    """Markdown of `Report.to_json()`: how it was taken, the bars, a table of the rows; no raw series."""
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
        yield f"| {_escaped(bar['claim'])} | {measured} | ≤ {limit} | {'met' if bar['met'] else '**missed**'} |"


def _tables(found: Found) -> Iterator[str]:
    """One for all rows that have the same columns; a spread is its median and quartiles."""
    columns: tuple[str, ...] = ()
    for row in found["rows"]:
        shown = {key: value for key, value in row.items() if not _is_series(value)}
        if tuple(shown) != columns:
            columns = tuple(shown)
            yield from ("", f"| {' | '.join(map(_heading, columns))} |", "|---" * len(columns) + "|")
        yield f"| {' | '.join(_cell(key, value) for key, value in shown.items())} |"


def _is_short(value: Any) -> bool:
    """Settings may hold whole models and runs, too."""
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
