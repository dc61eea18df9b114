"""Recordings as files: their JSON form, and the folder of all ranks of a job."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sirtaki.autotune.knobs import Knobs
from sirtaki.comm.plan import Route
from sirtaki.errors import RecordingError
from sirtaki.measures import LinkModel

from .recording import (
    FORMAT_VERSION,
    READABLE_VERSIONS,
    Allocation,
    Collective,
    Copy,
    JobRecord,
    Module,
    ModuleCall,
    Operator,
    PhaseSpan,
    RankRecording,
    ReadyGradient,
    RecordedIteration,
    RecordedUnit,
    Recording,
    StepMemory,
    UnitId,
)

Json = dict[str, Any]
_T = TypeVar("_T")

DIGITS = 9
"""Of seconds; clocks tell nanoseconds."""

_ROWS: Mapping[str, type] = {
    "spans": PhaseSpan,
    "operators": Operator,
    "ready": ReadyGradient,
    "copies": Copy,
    "units": RecordedUnit,
    "collectives": Collective,
    "modules": Module,
    "allocations": Allocation,
    "calls": ModuleCall,
}
"""Fields whose records are written as rows: the values of their fields, in order."""

_NAMES: Mapping[Any, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (*_ROWS.values(), UnitId, RankRecording, RecordedIteration, StepMemory)
}
_VALUES = {kind: attrgetter(*names) for kind, names in _NAMES.items()}


def job_to_json(job: JobRecord) -> Json:
    """A JSON-ready dict; `job_from_json` is its inverse."""
    return {
        "format": FORMAT_VERSION,
        **asdict(job),
        "buffers": [{**asdict(one), "plan": one.plan.to_json(), "knobs": one.knobs.to_json()} for one in job.buffers],
        "links": [
            {"route": [part.value for part in route], "link": link.to_json()} for route, link in job.links.items()
        ],
    }


def job_from_json(data: Mapping[str, Any]) -> JobRecord:
    """The job that `job_to_json` described.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    buffers = [{**one, "knobs": Knobs.from_json(one["knobs"])} for one in data["buffers"]]
    links = {msgspec.convert(one["route"], Route): LinkModel.from_json(one["link"]) for one in data["links"]}
    return msgspec.convert({**data, "buffers": buffers, "links": links}, JobRecord)


def rank_to_json(rank: RankRecording) -> Json:
    """A JSON-ready dict; `rank_from_json` is its inverse."""
    names: dict[str, int] = {}
    return {"format": FORMAT_VERSION, **_to_json(rank, names), "operator_names": list(names)}


def _to_json(value: Any, names: dict[str, int]) -> Any:
    """A record, or a value in one, in JSON's types; `names` numbers the operators' names."""
    kind = type(value)
    if kind is float:
        return round(value, DIGITS)
    if kind is tuple:
        return [_to_json(one, names) for one in value]
    if isinstance(value, Enum):
        return value.value
    if kind not in _NAMES:
        return value
    if kind is StepMemory:
        names = {}
    found: Any = [_to_json(one, names) for one in _VALUES[kind](value)]
    if kind is Operator:
        found[0] = names.setdefault(value.name, len(names))
    elif kind is Allocation:
        found[-1] = names.setdefault(value.operator, len(names))
    elif kind is RecordedUnit:
        found[:1] = found[0]
    elif kind in (RankRecording, RecordedIteration, StepMemory):
        found = dict(zip(_NAMES[kind], found, strict=True))
        return {**found, "operators": list(names)} if kind is StepMemory else found
    return found


def rank_from_json(data: Mapping[str, Any]) -> RankRecording:
    """What `rank_to_json` described.

    Raises:
        KeyError, IndexError, TypeError, ValueError: it is something else.
    """
    found, memory = _named(data), data.get("memory")
    found["iterations"] = [_named(one) for one in data["iterations"]]
    for iteration in found["iterations"]:
        for one in iteration["operators"]:
            one["name"] = data["operator_names"][one["name"]]
        for one in iteration["units"]:
            one["unit"] = dict(zip(_NAMES[UnitId], one["unit"], strict=True))
    if memory is not None:
        found["memory"] = _named({name: memory[name] for name in memory if name != "operators"})
        for one in found["memory"]["allocations"]:
            one["operator"] = memory["operators"][one["operator"]]
    return msgspec.convert(found, RankRecording)


def _named(data: Mapping[str, Any]) -> Json:
    """Rows with the names of their fields; older versions lack the last ones."""
    found = dict(data)
    for field, kind in _ROWS.items():
        if field == "units" and field in data:
            found[field] = [dict(zip(_NAMES[kind], (row[:-3], *row[-3:]), strict=True)) for row in data[field]]
        elif field in data:
            found[field] = [dict(zip(_NAMES[kind], row, strict=False)) for row in data[field]]
    return found


JOB_FILE, TRACE_FILE, REPORT_FILE = "job.json", "trace.json", "report.html"
_RANK_FILE = re.compile(r"rank-(\d+)\.json\.gz")


def rank_path(folder: Path, rank: int) -> Path:
    """Where a rank's recording is."""
    return folder / f"rank-{rank:04d}.json.gz"


def holds_recording(folder: Path) -> bool:
    """A recording, or a part of one, is there."""
    return folder.is_dir() and any(name == JOB_FILE or _RANK_FILE.fullmatch(name) for name in os.listdir(folder))


def clear(folder: Path) -> None:
    """Removes a recording that is there, what was made of it in the folder, and nothing else.

    Raises:
        OSError: it cannot be removed.
    """
    for path in folder.iterdir():
        if path.name in (JOB_FILE, TRACE_FILE, REPORT_FILE) or _RANK_FILE.fullmatch(path.name):
            path.unlink()


def write_job(folder: Path, job: JobRecord) -> None:
    """Writes what all ranks have in common; several hosts may do so, all the same.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(folder / JOB_FILE, json.dumps(job_to_json(job), indent=1).encode())


def write_rank(folder: Path, rank: RankRecording) -> None:
    """Writes what one rank has recorded.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(rank_to_json(rank), separators=(",", ":"))
    write_whole(rank_path(folder, rank.rank), gzip.compress(text.encode(), compresslevel=1))


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that nobody sees before it is whole.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read(folder: str | Path) -> Recording:
    """What a folder holds, as far as it can be read.

    Raises:
        RecordingError: there is nothing to show: no such folder, no recording in it, one of another version, or
            nothing of any rank.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RecordingError(f"{folder} is no folder: give the one that `sirtaki profile` has written")
    names = sorted(os.listdir(folder))
    files = {int(found[1]): folder / name for name in names if (found := _RANK_FILE.fullmatch(name))}
    if JOB_FILE not in names:
        what = f"it has recordings of {len(files)} ranks, but no {JOB_FILE}" if files else "it holds no recording"
        raise RecordingError(f"{folder} cannot be read: {what}")
    job = _parsed(folder / JOB_FILE, bytes, job_from_json)
    ranks, problems = dict[int, RankRecording](), list[str]()
    for number, path in files.items():
        try:
            rank = _parsed(path, gzip.decompress, rank_from_json)
        except RecordingError as err:
            problems.append(str(err))
            continue
        if rank.job != job.job or rank.rank != number or number >= job.n_ranks:
            problems.append(f"{path.name} is of another job, and is left out")
        else:
            ranks[number] = rank
    if not ranks:
        raise RecordingError("; ".join([f"{folder} has nothing of any rank", *problems]))
    if missing := [rank for rank in range(job.n_ranks) if rank not in ranks]:
        problems.append(f"{of_ranks(missing)} of {job.n_ranks} {'is' if len(missing) == 1 else 'are'} missing")
    usual, _ = Counter(rank.model for rank in ranks.values()).most_common(1)[0]
    if others := [number for number, rank in ranks.items() if rank.model != usual]:
        ranks = {number: rank for number, rank in ranks.items() if rank.model == usual}
        problems.append(f"{of_ranks(others)} trained another model, and what they recorded is left out")
    if short := [number for number, rank in ranks.items() if not rank.complete]:
        least = min(len(ranks[number].iterations) for number in short)
        problems.append(
            f"{of_ranks(short)} recorded fewer iterations than the {job.n_iterations} wanted ({least} at least)"
        )
    if not any(iteration.units for rank in ranks.values() for iteration in rank.iterations):
        problems.append(
            "no gradients were exchanged while this was recorded, so clocks of hosts are as far apart as at the start"
        )
    return Recording(job=job, ranks=ranks, problems=tuple(problems))


def _parsed(path: Path, unpack: Callable[[bytes], bytes], build: Callable[[Mapping[str, Any]], _T]) -> _T:
    try:
        data = json.loads(unpack(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error) as err:
        raise RecordingError(f"{path} cannot be read: {err}") from err
    version = data.get("format") if isinstance(data, dict) else None
    if version not in READABLE_VERSIONS:
        found = f"format {version}" if isinstance(version, int) else "no recording"
        known = " and ".join(map(str, READABLE_VERSIONS))
        raise RecordingError(f"{path} has {found}; this version of Sirtaki reads formats {known}: record the job anew")
    try:
        return build(data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as err:
        raise RecordingError(f"{path} is damaged: {err!r}") from err


def of_ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 2`, `ranks 0, 1, 2, … (64)`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        return f"ranks {', '.join(map(str, numbers[:3]))}, … ({len(numbers)})"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
