"""Recordings as Chakra execution traces."""

from __future__ import annotations

import io
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, proto

from sirtaki.autotune.model.replayer import Activity, Phase
from sirtaki.errors import RecordingError

from .job_model import Barrier, Clock, Histories, OperationKey, Step, pieces
from .recording import Operator
from .recording_files import write_whole

VERSION = "0.0.4"
"""Of the schema, for `GlobalMetadata.version`."""

COMP_NODE, COMM_COLL_NODE = 4, 7
"""Of `NodeType`."""

COLLECTIVES: Mapping[str, int] = {
    "allreduce": 0,
    "allgather": 2,
    "broadcast": 5,
    "alltoall": 6,
    "reducescatter": 7,
    "barrier": 9,
}
"""Of `CollectiveCommType`, by what we call them."""

_PACKAGE = "ChakraProtoMsg"


def _field(number: int, name: str, kind: str, **more: Any) -> dict[str, Any]:
    """One field of a message; a kind that is no scalar is an enumeration's name, or a message's."""
    if kind.islower():
        return {"number": number, "name": name, "type": f"TYPE_{kind.upper()}", **more}
    what = "TYPE_ENUM" if kind == "NodeType" else "TYPE_MESSAGE"
    return {"number": number, "name": name, "type": what, "typeName": f".{_PACKAGE}.{kind}", **more}


_MANY, _ONE_OF = {"label": "LABEL_REPEATED"}, {"oneofIndex": 0}

_FILE = {
    "name": "et_def.proto",
    "package": _PACKAGE,
    "syntax": "proto3",
    "enumType": [
        {
            "name": "NodeType",
            "value": [
                {"name": "INVALID_NODE", "number": 0},
                {"name": "COMP_NODE", "number": COMP_NODE},
                {"name": "COMM_COLL_NODE", "number": COMM_COLL_NODE},
            ],
        }
    ],
    "messageType": [
        {
            "name": "AttributeProto",
            "oneofDecl": [{"name": "value"}],
            "field": [
                _field(1, "name", "string"),
                _field(9, "int64_val", "int64", **_ONE_OF),
                _field(13, "uint64_val", "uint64", **_ONE_OF),
                _field(27, "bool_val", "bool", **_ONE_OF),
                _field(29, "string_val", "string", **_ONE_OF),
            ],
        },
        {
            "name": "GlobalMetadata",
            "field": [_field(1, "version", "string"), _field(2, "attr", "AttributeProto", **_MANY)],
        },
        {
            "name": "Node",
            "field": [
                _field(1, "id", "uint64"),
                _field(2, "name", "string"),
                _field(3, "type", "NodeType"),
                _field(4, "ctrl_deps", "uint64", **_MANY),
                _field(5, "data_deps", "uint64", **_MANY),
                _field(6, "start_time_micros", "uint64"),
                _field(7, "duration_micros", "uint64"),
                _field(10, "attr", "AttributeProto", **_MANY),
            ],
        },
    ],
}
"""What we write of the schema, as protobuf's own description of a file has it."""


def messages() -> Mapping[str, Any]:
    """The classes that a trace consists of, by name: first a `GlobalMetadata`, then `Node`s."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(json_format.ParseDict(_FILE, descriptor_pb2.FileDescriptorProto()))
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in ("GlobalMetadata", "Node")
    }


ALL_RANKS = 0
"""`Collective.group` of all of them, as ASTRA-sim has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What a node does with other ranks.

    Attributes:
        kind: such as "allreduce".
        n_bytes: of this rank's input.
        group: which ranks take part (`Traces.groups`).
        stream: what it runs on, one at a time.
    """

    kind: str
    n_bytes: int
    group: int
    stream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNode:
    """One thing that a rank did.

    Attributes:
        number: within its rank; collectives have the same on all ranks that take part.
        iteration: `RecordedIteration.number`.
        begin_us, end_us: of the job's clock, which shows 0 when the first rank begins.
        before: the node before it on its thread or stream; None = there is none.
        after: all that it waits for, `before` included.
        collective: None = the rank does it alone.
    """

    number: int
    name: str
    iteration: int
    activity: Activity
    phase: Phase
    begin_us: int
    end_us: int
    before: int | None
    after: tuple[int, ...]
    collective: Collective | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """The traces of all ranks.

    Attributes:
        nodes: by rank, each after what it waits for.
        groups: ranks by `Collective.group`; all of them have `ALL_RANKS`, and stand here, too.
    """

    nodes: Mapping[int, Sequence[TraceNode]]
    groups: Mapping[int, tuple[int, ...]]


def traces(histories: Histories) -> Traces:
    """Return the traces of all iterations that are replayed, one behind the other."""
    groups = {histories.ranks: ALL_RANKS}
    for step in histories.steps:
        for one in step.barriers:
            groups.setdefault(one.ranks, len(groups))
    numbers: dict[tuple[int, OperationKey], int] = {}
    for step in histories.steps:
        numbers |= {(step.number, one.key): len(numbers) + place for place, one in enumerate(step.barriers)}
    return Traces(
        nodes={rank: _nodes(histories, rank, groups, numbers) for rank in histories.ranks},
        groups={group: ranks for ranks, group in groups.items()},
    )


def _us(moment_s: float) -> int:
    return round(1e6 * moment_s)


def _nodes(
    histories: Histories,
    rank: int,
    groups: Mapping[tuple[int, ...], int],
    numbers: Mapping[tuple[int, OperationKey], int],
) -> Sequence[TraceNode]:
    """One rank's: what it does alone follows each other, collectives are numbered as on other ranks."""
    found, last_on = list[TraceNode](), dict[str, int]()
    seen: list[int] = []  # results that the thread has waited for since its last node
    own_numbers = count(len(numbers))
    last: int | None = None
    now_s = 0.0

    def alone(
        name: str, step: Step, activity: Activity, phase: Phase, seconds: float, reads: Iterable[int] = ()
    ) -> None:
        nonlocal last, now_s
        before, begin_s = last, now_s
        last, now_s = next(own_numbers), now_s + seconds
        found.append(
            TraceNode(
                number=last,
                name=name,
                iteration=step.number,
                activity=activity,
                phase=phase,
                begin_us=_us(begin_s),
                end_us=_us(now_s),
                before=before,
                after=tuple(dict.fromkeys([*([] if before is None else [before]), *seen, *reads])),
            )
        )
        seen.clear()

    def together(step: Step, one: Barrier, kind: str) -> None:
        before, number = last_on.get(one.lane), numbers[step.number, one.key]
        last_on[one.lane] = number
        found.append(
            TraceNode(
                number=number,
                name=one.name,
                iteration=step.number,
                activity=one.activity,
                phase=Phase.OTHER,
                begin_us=_us(one.begin_s),
                end_us=_us(one.done_s[rank]),
                before=before,
                after=tuple(dict.fromkeys(number for number in (before, last) if number is not None)),
                collective=Collective(kind=kind, n_bytes=one.n_bytes, group=groups[one.ranks], stream=one.lane),
            )
        )

    recorded = {one.number: one for one in histories.recording.ranks[rank].iterations}
    for step in histories.steps:
        iteration = recorded[step.number]
        barriers = {one.key: one for one in step.barriers if rank in one.ranks}
        operator_at = _operator_at(iteration.operators, histories.clocks[rank])
        own: dict[int, int] = {}  # by place of an operator: the last node of it
        gap_s = step.stretches[rank][0].begin_s - now_s
        if gap_s > 0:
            alone("between steps", step, Activity.COMPUTE, Phase.OTHER, gap_s)
        for piece in pieces(step.stretches[rank], step.marks[rank], lambda begin_s, end_s: end_s - begin_s):
            seen += [numbers[step.number, key] for key, _ in piece.waits]
            now_s = max([now_s, *(barriers[key].done_s[rank] for key, _ in piece.waits)])
            if piece.seconds <= 0 and not piece.issues:
                continue
            place = operator_at(now_s + piece.seconds / 2) if piece.name else None
            reads = () if place is None or place in own else iteration.operators[place].after
            name = piece.name or f"{piece.phase.value}, between operators"  # the script's own doings have none
            known = [own[other] for other in reads if other in own]
            alone(name, step, piece.activity, piece.phase, piece.seconds, known)
            if place is not None and last is not None:
                own[place] = last
            for key in piece.issues:
                kind = "allreduce" if key[0] >= 0 else iteration.collectives[key[1]].kind.lower()
                together(step, barriers[key], kind)
    if seen:
        alone("the end", step, Activity.COMPUTE, Phase.OTHER, 0.0)
    return found


def _operator_at(operators: Sequence[Operator], clock: Clock) -> Callable[[float], int | None]:
    """Tells the place of the training thread's operator that ran at a moment; None = there was none."""
    own = [(clock(one.begin_s), clock(one.end_s), place) for place, one in enumerate(operators) if one.lane == 0]
    spans = sorted(own)

    def at(moment_s: float) -> int | None:
        found = bisect_right(spans, moment_s, key=lambda span: span[0]) - 1
        return spans[found][2] if found >= 0 and moment_s <= spans[found][1] else None

    return at


def write_traces(prefix: Path, found: Traces) -> list[Path]:
    """Writes them, and returns where they are: ranks are counted from 0 on, as simulators count them.

    Raises:
        OSError: a file cannot be written.
        RecordingError: a collective has no name in Chakra.
    """
    kinds, written = messages(), list[Path]()
    for place, nodes in enumerate(found.nodes.values()):
        out = io.BytesIO()
        proto.serialize_length_prefixed(kinds["GlobalMetadata"](version=VERSION), out)
        for node in nodes:
            proto.serialize_length_prefixed(_message(node, kinds["Node"]), out)
        written.append(prefix.with_name(f"{prefix.name}.{place}.et"))
        write_whole(written[-1], out.getvalue())
    places = {rank: place for place, rank in enumerate(found.nodes)}
    groups = {
        str(group): [places[rank] for rank in ranks] for group, ranks in found.groups.items() if group != ALL_RANKS
    }
    if groups:
        written.append(prefix.with_name(f"{prefix.name}.groups.json"))
        write_whole(written[-1], json.dumps(groups, indent=1).encode())
    return written


def _message(node: TraceNode, kind: Any) -> Any:
    own = node.collective
    message = kind(
        id=node.number,
        name=node.name,
        type=COMP_NODE if own is None else COMM_COLL_NODE,
        ctrl_deps=[] if node.before is None else [node.before],
        data_deps=node.after,
        start_time_micros=node.begin_us,
        duration_micros=node.end_us - node.begin_us,
    )
    attributes: list[tuple[str, str, bool | int | str]] = [
        ("is_cpu_op", "bool_val", own is None),  # of collectives simulators want to hear no
        ("iteration", "int64_val", node.iteration),
        ("activity", "string_val", node.activity.value),
        ("phase", "string_val", node.phase.value),
    ]
    if own is not None:
        if own.kind not in COLLECTIVES:
            raise RecordingError(f"{node.name} is {own.kind}, for which Chakra has no name")
        attributes = [
            ("comm_size", "uint64_val", own.n_bytes),
            *attributes,
            ("comm_type", "int64_val", COLLECTIVES[own.kind]),
            ("pg_name", "string_val", str(own.group)),
            ("stream", "string_val", own.stream),
        ]
    for name, field, value in attributes:
        message.attr.add(name=name, **{field: value})
    return message
