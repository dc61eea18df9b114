"""Recordings as JSON, both ways. What comes many times (operators, units) is a row of values in its fields' order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.model.contention import ContentionModel
from sirtaki.autotune.model.graph import Phase
from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import Algorithm, CommPlan, Route, TransportKind
from sirtaki.link_model import LinkModel

from . import step_memory_json
from .recording import (
    FORMAT_VERSION,
    Buffer,
    Collective,
    Copy,
    Detail,
    JobRecord,
    Operator,
    PhaseSpan,
    Placement,
    RankRecording,
    ReadyGradient,
    RecordedIteration,
    RecordedUnit,
    UnitId,
)
from .step_memory import Module

Json = dict[str, Any]
_T = TypeVar("_T")

DIGITS = 9
"""Of seconds; clocks tell nanoseconds."""


def job_to_json(job: JobRecord) -> Json:
    """A JSON-ready dict; `job_from_json` is its inverse."""
    return {
        "format": FORMAT_VERSION,
        "job": job.job,
        "n_iterations": job.n_iterations,
        "placement": [asdict(place) for place in job.placement],
        "buffers": [_buffer_to_json(buffer) for buffer in job.buffers],
        "links": [{"route": _route_to_json(route), "link": link.to_json()} for route, link in job.links.items()],
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
        "rank": rank.rank,
        "job": rank.job,
        "model": rank.model,
        "detail": rank.detail.value,
        "offset_s": rank.offset_s,
        "round_trip_s": rank.round_trip_s,
        "clock_error_s": rank.clock_error_s,
        "lanes": list(rank.lanes),
        "complete": rank.complete,
        "iterations": [_iteration_to_json(iteration, names) for iteration in rank.iterations],
        "operator_names": list(names),
        "modules": [[one.name, one.kind, one.root] for one in rank.modules],
        "memory": None if rank.memory is None else step_memory_json.to_json(rank.memory),
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
        memory=None if memory is None else step_memory_json.from_json(memory),
    )


def _buffer_to_json(buffer: Buffer) -> Json:
    return {
        "number": buffer.number,
        "reducer": list(buffer.reducer),
        "ranks": list(buffer.ranks),
        "layout": asdict(buffer.layout),
        "plan": buffer.plan.to_json(),
        "knobs": buffer.knobs.to_json(),
    }


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


def _route_to_json(route: Route) -> list[str]:
    return [part.value for part in route]


def _route_from_json(data: Sequence[str]) -> Route:
    transport, algorithm = data
    return TransportKind(transport), Algorithm(algorithm)


def _iteration_to_json(iteration: RecordedIteration, names: dict[str, int]) -> Json:
    return {
        "number": iteration.number,
        "begin_s": _rounded(iteration.begin_s),
        "end_s": _rounded(iteration.end_s),
        "profiling": iteration.profiling,
        "slowed": iteration.slowed,
        "exposed_s": _rounded(iteration.exposed_s),
        "beside_s": None if iteration.beside_s is None else _rounded(iteration.beside_s),
        "spans": [[span.phase.value, _rounded(span.begin_s), _rounded(span.end_s)] for span in iteration.spans],
        "operators": [
            [
                names.setdefault(one.name, len(names)),
                one.lane,
                _rounded(one.begin_s),
                _rounded(one.end_s),
                one.phase.value,
                one.sequence,
                list(one.after),
                one.module,
            ]
            for one in iteration.operators
        ],
        "ready": [_row(one) for one in iteration.ready],
        "copies": [_row(one) for one in iteration.copies],
        "units": [
            [
                one.unit.iteration,
                one.unit.buffer,
                one.unit.start,
                one.unit.stop,
                _route_to_json(one.unit.route),
                one.unit.stream,
                _rounded(one.issue_s),
                None if one.begin_s is None else _rounded(one.begin_s),
                _rounded(one.done_s),
            ]
            for one in iteration.units
        ],
        "collectives": [_row(one) for one in iteration.collectives],
    }


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


def _rounded(moment_s: float) -> float:
    return round(moment_s, DIGITS)


def _row(record: Any) -> list[Any]:
    """The fields of a dataclass of plain values."""
    values = (getattr(record, field.name) for field in fields(record))
    return [_rounded(value) if isinstance(value, float) else value for value in values]


def _rows(kind: type[_T], rows: Sequence[Sequence[Any]]) -> tuple[_T, ...]:
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    return tuple(kind(**dict(zip(names, row, strict=True))) for row in rows)
