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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from enum import Enum
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.model.fits import ContentionModel
from sirtaki.autotune.model.replayer import Phase
from sirtaki.comm.plan import Algorithm, CommPlan, GradientLayout, Route, TransportKind
from sirtaki.errors import RecordingError
from sirtaki.measures import LinkModel

from .recording import (
    FORMAT_VERSION,
    READABLE_VERSIONS,
    Allocation,
    Buffer,
    Collective,
    Copy,
    Detail,
    Holds,
    JobRecord,
    Module,
    ModuleCall,
    Operator,
    PhaseSpan,
    Placement,
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

_ROWS = ("spans", "ready", "copies", "collectives")
"""Records of an iteration whose rows are their fields and nothing else."""

_BARE = (int, str, bool, type(None))


def job_to_json(job: JobRecord) -> Json:
    """A JSON-ready dict; `job_from_json` is its inverse."""
    return {
        "format": FORMAT_VERSION,
        "job": job.job,
        "n_iterations": job.n_iterations,
        "placement": [asdict(place) for place in job.placement],
        "buffers": [
            {
                **_plain(buffer),
                "layout": asdict(buffer.layout),
                "plan": buffer.plan.to_json(),
                "knobs": buffer.knobs.to_json(),
            }
            for buffer in job.buffers
        ],
        "links": [{"route": _value(route), "link": link.to_json()} for route, link in job.links.items()],
        "contention": None if job.contention is None else job.contention.to_json(),
        "settings": dict(job.settings),
        "versions": dict(job.versions),
    }


def job_from_json(data: Mapping[str, Any]) -> JobRecord:
    """The job that `job_to_json` described.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    contention = data["contention"]
    return JobRecord(
        job=data["job"],
        n_iterations=data["n_iterations"],
        placement=tuple(
            Placement(**{**place, "processors": tuple(place["processors"])}) for place in data["placement"]
        ),
        buffers=tuple(_buffer_from_json(buffer) for buffer in data["buffers"]),
        links={_route_from_json(entry["route"]): LinkModel.from_json(entry["link"]) for entry in data["links"]},
        contention=None if contention is None else ContentionModel.from_json(contention),
        settings=data["settings"],
        versions=data["versions"],
    )


def rank_to_json(rank: RankRecording) -> Json:
    """A JSON-ready dict; `rank_from_json` is its inverse."""
    names: dict[str, int] = {}
    return {
        "format": FORMAT_VERSION,
        **_plain(rank, but=("iterations", "modules", "memory")),
        "iterations": [_iteration_to_json(iteration, names) for iteration in rank.iterations],
        "operator_names": list(names),
        "modules": [_row(one) for one in rank.modules],
        "memory": None if rank.memory is None else _memory_to_json(rank.memory),
    }


def rank_from_json(data: Mapping[str, Any]) -> RankRecording:
    """What `rank_to_json` described.

    Raises:
        KeyError, IndexError, TypeError, ValueError: it is something else.
    """
    names, memory = data["operator_names"], data.get("memory")
    return RankRecording(
        rank=data["rank"],
        job=data["job"],
        model=data["model"],
        detail=Detail(data["detail"]),
        offset_s=data["offset_s"],
        round_trip_s=data["round_trip_s"],
        clock_error_s=data["clock_error_s"],
        lanes=tuple(data["lanes"]),
        complete=data["complete"],
        iterations=tuple(_iteration_from_json(iteration, names) for iteration in data["iterations"]),
        modules=_rows(Module, data.get("modules", ())),
        memory=None if memory is None else _memory_from_json(memory),
    )


def _buffer_from_json(data: Mapping[str, Any]) -> Buffer:
    layout, (process_set, serial) = data["layout"], data["reducer"]
    return Buffer(
        number=data["number"],
        reducer=(process_set, serial),
        ranks=tuple(data["ranks"]),
        layout=GradientLayout(**{**layout, "sizes": tuple(layout["sizes"]), "names": tuple(layout["names"])}),
        plan=CommPlan.from_json(data["plan"]),
        knobs=Knobs.from_json(data["knobs"]),
    )


def _route_from_json(data: Sequence[str]) -> Route:
    transport, algorithm = data
    return TransportKind(transport), Algorithm(algorithm)


def _iteration_to_json(iteration: RecordedIteration, names: dict[str, int]) -> Json:
    found = _plain(iteration, but=(*_ROWS, "operators", "units"), digits=DIGITS)
    for kind in _ROWS:
        found[kind] = [_row(one) for one in getattr(iteration, kind)]
    found["operators"] = [[names.setdefault(one.name, len(names)), *_row(one)[1:]] for one in iteration.operators]
    found["units"] = [[*_row(one.unit), *_row(one)[1:]] for one in iteration.units]
    return found


def _iteration_from_json(data: Mapping[str, Any], names: Sequence[str]) -> RecordedIteration:
    return RecordedIteration(
        number=data["number"],
        begin_s=data["begin_s"],
        end_s=data["end_s"],
        profiling=data["profiling"],
        slowed=data["slowed"],
        exposed_s=data["exposed_s"],
        beside_s=data.get("beside_s"),  # recordings that were made before it was known
        spans=tuple(
            PhaseSpan(phase=Phase(phase), begin_s=begin_s, end_s=end_s) for phase, begin_s, end_s in data["spans"]
        ),
        operators=tuple(
            Operator(
                name=names[name],
                lane=lane,
                begin_s=begin_s,
                end_s=end_s,
                phase=Phase(phase),
                sequence=sequence,
                after=tuple(after),
                module=module[0] if module else -1,  # version 2 has none
            )
            for name, lane, begin_s, end_s, phase, sequence, after, *module in data["operators"]
        ),
        ready=_rows(ReadyGradient, data["ready"]),
        copies=_rows(Copy, data["copies"]),
        units=tuple(
            RecordedUnit(
                unit=UnitId(
                    iteration=number,
                    buffer=buffer,
                    start=start,
                    stop=stop,
                    route=_route_from_json(route),
                    stream=stream,
                ),
                issue_s=issue_s,
                begin_s=begin_s,
                done_s=done_s,
            )
            for number, buffer, start, stop, route, stream, issue_s, begin_s, done_s in data["units"]
        ),
        collectives=_rows(Collective, data["collectives"]),
    )


def _memory_to_json(memory: StepMemory) -> Json:
    names: dict[str, int] = {}
    return {
        **_plain(memory, but=("allocations", "calls")),
        "allocations": [[*_row(one)[:-1], names.setdefault(one.operator, len(names))] for one in memory.allocations],
        "calls": [_row(one) for one in memory.calls],
        "operators": list(names),
    }


def _memory_from_json(data: Mapping[str, Any]) -> StepMemory:
    names = _fields(ModuleCall)
    return StepMemory(
        iteration=data["iteration"],
        begin_s=data["begin_s"],
        end_s=data["end_s"],
        devices=tuple(data["devices"]),
        batch=data["batch"],
        allocations=tuple(
            Allocation(
                device=device,
                n_bytes=n_bytes,
                holds=Holds(holds),
                phase=Phase(phase),
                begin_s=begin_s,
                end_s=end_s,
                added_s=added_s,
                call=call,
                operator=data["operators"][operator],
            )
            for device, n_bytes, holds, phase, begin_s, end_s, added_s, call, operator in data["allocations"]
        ),
        calls=tuple(
            ModuleCall(**{**call, "inputs": tuple(call["inputs"]), "outputs": tuple(call["outputs"])})
            for call in (dict(zip(names, row, strict=True)) for row in data["calls"])
        ),
    )


# ── records and their fields ──────────────────────────────────────────────────────────────────────────────────────────


@cache
def _fields(kind: Hashable) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cast(Any, kind)))


@cache
def _values(kind: Hashable) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*_fields(kind))


def _value(value: Any, digits: int | None = DIGITS) -> Any:
    if isinstance(value, float):
        return value if digits is None else round(value, digits)
    if isinstance(value, tuple):
        return [_value(each, digits) for each in value]
    return value.value if isinstance(value, Enum) else value


def _row(record: Any) -> list[Any]:
    values = _values(cast(Hashable, type(record)))(record)
    return [value if type(value) in _BARE else _value(value) for value in values]


def _plain(record: Any, *, but: Sequence[str] = (), digits: int | None = None) -> Json:
    """Fields by name, seconds rounded if `digits` says so."""
    names = _fields(cast(Hashable, type(record)))
    return {name: _value(getattr(record, name), digits) for name in names if name not in but}


def _rows(kind: type[_T], rows: Sequence[Sequence[Any]]) -> tuple[_T, ...]:
    names = _fields(cast(Hashable, kind))
    return tuple(kind(**dict(zip(names, row, strict=True))) for row in rows)


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
    job = _parsed(folder / JOB_FILE, json.loads, job_from_json)
    ranks, problems = dict[int, RankRecording](), list[str]()
    for number, path in files.items():
        try:
            rank = _parsed(path, _unpacked, rank_from_json)
        except RecordingError as err:
            problems.append(str(err))
            continue
        if rank.job != job.job or rank.rank != number or number >= job.n_ranks:
            problems.append(f"{path.name} is of another job, and is left out")
        else:
            ranks[number] = rank
    if not ranks:
        raise RecordingError("; ".join([f"{folder} has nothing of any rank", *problems]))
    problems += _missing(job, ranks)
    ranks, different = _of_one_model(ranks)
    return Recording(job=job, ranks=ranks, problems=(*problems, *different, *_incomplete(job, ranks)))


def _parsed(path: Path, load: Callable[[bytes], Any], build: Callable[[Mapping[str, Any]], _T]) -> _T:
    try:
        data = load(path.read_bytes())
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


def _unpacked(content: bytes) -> Any:
    return json.loads(gzip.decompress(content))


def _missing(job: JobRecord, ranks: Mapping[int, RankRecording]) -> Iterator[str]:
    missing = [rank for rank in range(job.n_ranks) if rank not in ranks]
    if missing:
        yield f"{of_ranks(missing)} of {job.n_ranks} {'is' if len(missing) == 1 else 'are'} missing"


def _of_one_model(ranks: Mapping[int, RankRecording]) -> tuple[dict[int, RankRecording], list[str]]:
    """Those that train what most do."""
    usual, _ = Counter(rank.model for rank in ranks.values()).most_common(1)[0]
    others = [number for number, rank in ranks.items() if rank.model != usual]
    kept = {number: rank for number, rank in ranks.items() if rank.model == usual}
    return kept, [f"{of_ranks(others)} trained another model, and what they recorded is left out"] if others else []


def _incomplete(job: JobRecord, ranks: Mapping[int, RankRecording]) -> Iterator[str]:
    short = [number for number, rank in ranks.items() if not rank.complete]
    if short:
        least = min(len(ranks[number].iterations) for number in short)
        yield f"{of_ranks(short)} recorded fewer iterations than the {job.n_iterations} wanted ({least} at least)"
    if not any(iteration.units for rank in ranks.values() for iteration in rank.iterations):
        yield "no gradients were exchanged while this was recorded, so clocks of hosts are as far apart as at the start"


def of_ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 2`, `ranks 0, 1, 2, … (64)`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        return f"ranks {', '.join(map(str, numbers[:3]))}, … ({len(numbers)})"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
