"""Recordings as Chakra execution traces."""

from __future__ import annotations

import io
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto

from sirtaki.autotune.model.replayer import Activity, Phase
from sirtaki.errors import RecordingError

from .job_model import Barrier, Histories, OperationKey, Piece, Step, pieces
from .recording import Operator, RecordedIteration
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
_Field = descriptor_pb2.FieldDescriptorProto

_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint64": _Field.TYPE_UINT64,
}

_FIELDS: Mapping[str, Sequence[tuple[int, str, str]]] = {
    "AttributeProto": (
        (1, "name", "string"),
        (9, "int64_val", "oneof int64"),
        (13, "uint64_val", "oneof uint64"),
        (27, "bool_val", "oneof bool"),
        (29, "string_val", "oneof string"),
    ),
    "GlobalMetadata": ((1, "version", "string"), (2, "attr", "repeated AttributeProto")),
    "Node": (
        (1, "id", "uint64"),
        (2, "name", "string"),
        (3, "type", "NodeType"),
        (4, "ctrl_deps", "repeated uint64"),
        (5, "data_deps", "repeated uint64"),
        (6, "start_time_micros", "uint64"),
        (7, "duration_micros", "uint64"),
        (10, "attr", "repeated AttributeProto"),
    ),
}
"""Number, name and type of each message's fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Classes, made by protobuf."""

    Node: Any
    GlobalMetadata: Any


def messages() -> Messages:
    """Those that a trace consists of: first a `GlobalMetadata`, then `Node`s."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())

    def made(name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))

    return Messages(Node=made("Node"), GlobalMetadata=made("GlobalMetadata"))


def _file() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=_PACKAGE, syntax="proto3")
    kinds = file.enum_type.add(name="NodeType")
    for name, number in (("INVALID_NODE", 0), ("COMP_NODE", COMP_NODE), ("COMM_COLL_NODE", COMM_COLL_NODE)):
        kinds.value.add(name=name, number=number)
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        if any(kind.startswith("oneof") for _, _, kind in fields):
            message.oneof_decl.add(name="value")
        for number, field_name, kind in fields:
            *how, what = kind.split()
            added = message.field.add(
                name=field_name,
                number=number,
                label=_Field.LABEL_REPEATED if "repeated" in how else _Field.LABEL_OPTIONAL,
            )
            if what in _SCALARS:
                added.type = _SCALARS[what]
            else:
                added.type = _Field.TYPE_ENUM if what == "NodeType" else _Field.TYPE_MESSAGE
                added.type_name = f".{_PACKAGE}.{what}"
            if "oneof" in how:
                added.oneof_index = 0
    return file


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
    """Of all ranks.

    Attributes:
        nodes: by rank, each after what it waits for.
        groups: ranks by `Collective.group`; all of them have `ALL_RANKS`, and stand here, too.
    """

    nodes: Mapping[int, Sequence[TraceNode]]
    groups: Mapping[int, tuple[int, ...]]


def traces(histories: Histories) -> Traces:
    """Those of all iterations that are replayed, one behind the other."""
    groups = {histories.ranks: ALL_RANKS}
    for step in histories.steps:
        for one in step.barriers:
            groups.setdefault(one.ranks, len(groups))
    numbers: dict[tuple[int, OperationKey], int] = {}
    for step in histories.steps:
        numbers |= {(step.number, one.key): len(numbers) + place for place, one in enumerate(step.barriers)}
    found = {rank: _RankTrace(histories, rank, groups, numbers) for rank in histories.ranks}
    return Traces(
        nodes={rank: trace.nodes() for rank, trace in found.items()},
        groups={group: ranks for ranks, group in groups.items()},
    )


def _us(moment_s: float) -> int:
    return round(1e6 * moment_s)


@dataclass(slots=True)
class _RankTrace:
    """One rank's nodes while they are found.

    `seen` are results that the thread has waited for since its last node.
    """

    histories: Histories
    rank: int
    groups: Mapping[tuple[int, ...], int]
    numbers: Mapping[tuple[int, OperationKey], int]
    found: list[TraceNode] = field(default_factory=list)
    count: int = 0
    now_s: float = 0.0
    last: int | None = None
    seen: list[int] = field(default_factory=list)
    last_on: dict[str, int] = field(default_factory=dict)

    def nodes(self) -> Sequence[TraceNode]:
        self.count = len(self.numbers)
        recorded = {one.number: one for one in self.histories.recording.ranks[self.rank].iterations}
        for step in self.histories.steps:
            self._step(step, recorded[step.number])
        if self.seen:
            self._own("the end", step.number, Activity.COMPUTE, Phase.OTHER, 0.0)
        return self.found

    def _step(self, step: Step, iteration: RecordedIteration) -> None:
        barriers = {one.key: one for one in step.barriers if self.rank in one.ranks}
        operators = _Operators(iteration.operators, self.histories.clocks[self.rank])
        own: dict[int, int] = {}  # by place of an operator: the last node of it
        gap_s = step.stretches[self.rank][0].begin_s - self.now_s
        if gap_s > 0:
            self._own("between steps", step.number, Activity.COMPUTE, Phase.OTHER, gap_s)
        for piece in pieces(step.stretches[self.rank], step.marks[self.rank], lambda begin_s, end_s: end_s - begin_s):
            self.seen += [self.numbers[step.number, key] for key, _ in piece.waits]
            self.now_s = max([self.now_s, *(barriers[key].done_s[self.rank] for key, _ in piece.waits)])
            if piece.seconds <= 0 and not piece.issues:
                continue
            place = operators.at(self.now_s + piece.seconds / 2) if piece.name else None
            reads = () if place is None or place in own else iteration.operators[place].after
            self._own(
                _name(piece),
                step.number,
                piece.activity,
                piece.phase,
                piece.seconds,
                reads=[own[other] for other in reads if other in own],
            )
            if place is not None and self.last is not None:
                own[place] = self.last
            for key in piece.issues:
                kind = "allreduce" if key[0] >= 0 else iteration.collectives[key[1]].kind.lower()
                self._collective(step.number, barriers[key], kind)

    def _own(
        self,
        name: str,
        iteration: int,
        activity: Activity,
        phase: Phase,
        seconds: float,
        *,
        reads: Sequence[int] = (),
    ) -> None:
        before = self.last
        end_s = self.now_s + seconds
        self.found.append(
            TraceNode(
                number=self.count,
                name=name,
                iteration=iteration,
                activity=activity,
                phase=phase,
                begin_us=_us(self.now_s),
                end_us=_us(end_s),
                before=before,
                after=_once([*([] if before is None else [before]), *self.seen, *reads]),
            )
        )
        self.last, self.now_s, self.seen = self.count, end_s, []
        self.count += 1

    def _collective(self, iteration: int, one: Barrier, kind: str) -> None:
        number, before = self.numbers[iteration, one.key], self.last_on.get(one.lane)
        issued = [] if self.last is None else [self.last]
        self.found.append(
            TraceNode(
                number=number,
                name=one.name,
                iteration=iteration,
                activity=one.activity,
                phase=Phase.OTHER,
                begin_us=_us(one.begin_s),
                end_us=_us(one.done_s[self.rank]),
                before=before,
                after=_once([*([] if before is None else [before]), *issued]),
                collective=Collective(kind=kind, n_bytes=one.n_bytes, group=self.groups[one.ranks], stream=one.lane),
            )
        )
        self.last_on[one.lane] = number


def _once(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(numbers))


def _name(piece: Piece) -> str:
    """The script's own doings have none."""
    return piece.name or f"{piece.phase.value}, between operators"


class _Operators:
    """Those of the thread that trains, by when they ran."""

    def __init__(self, operators: Sequence[Operator], clock: Callable[[float], float]) -> None:
        own = [(clock(one.begin_s), clock(one.end_s), place) for place, one in enumerate(operators) if one.lane == 0]
        self._spans = sorted(own)
        self._begins_s = [begin_s for begin_s, _, _ in self._spans]

    def at(self, moment_s: float) -> int | None:
        """The place of the one that ran then; None = there was none."""
        found = bisect_right(self._begins_s, moment_s) - 1
        if found < 0:
            return None
        _, end_s, place = self._spans[found]
        return place if moment_s <= end_s else None


def write_traces(prefix: Path, found: Traces) -> list[Path]:
    """Writes them, and returns where they are: ranks are counted from 0 on, as simulators count them.

    Raises:
        OSError: a file cannot be written.
        RecordingError: a collective has no name in Chakra.
    """
    kinds, written = messages(), list[Path]()
    for place, nodes in enumerate(found.nodes.values()):
        out = io.BytesIO()
        proto.serialize_length_prefixed(kinds.GlobalMetadata(version=VERSION), out)
        for node in nodes:
            proto.serialize_length_prefixed(_message(node, kinds), out)
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


def _message(node: TraceNode, kinds: Messages) -> Any:
    own = node.collective
    message = kinds.Node(
        id=node.number,
        name=node.name,
        type=COMP_NODE if own is None else COMM_COLL_NODE,
        ctrl_deps=[] if node.before is None else [node.before],
        data_deps=node.after,
        start_time_micros=node.begin_us,
        duration_micros=node.end_us - node.begin_us,
    )
    attributes: dict[str, bool | int | str] = {
        "is_cpu_op": own is None,  # of collectives simulators want to hear no
        "iteration": node.iteration,
        "activity": node.activity.value,
        "phase": node.phase.value,
    }
    if own is not None:
        if own.kind not in COLLECTIVES:
            raise RecordingError(f"{node.name} is {own.kind}, for which Chakra has no name")
        attributes |= {"comm_type": COLLECTIVES[own.kind], "pg_name": str(own.group), "stream": own.stream}
        message.attr.add(name="comm_size", uint64_val=own.n_bytes)
    for name, value in attributes.items():
        message.attr.add(name=name, **_value(value))
    return message


def _value(value: bool | int | str) -> Mapping[str, Any]:
    if isinstance(value, bool):
        return {"bool_val": value}
    return {"int64_val": value} if isinstance(value, int) else {"string_val": value}
