"""Export recordings as Chakra execution traces, for simulators such as ASTRA-sim."""

from __future__ import annotations

import io
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto

from sirtaki.autotune.model.replayer import Activity, Phase
from sirtaki.errors import RecordingError

from .job_model import Histories, OperationKey, ThreadInterval, TimedBarrier, TimedStep, pieces
from .recording import RecordedIteration, write_whole

VERSION = "0.0.4"
"""Version of the Chakra schema, stored in `GlobalMetadata.version`."""

COMP_NODE, COMM_COLL_NODE = 4, 7
"""Values of the Chakra schema's enum `NodeType`, for local work and for collectives."""

COLLECTIVES: Mapping[str, int] = {
    "allreduce": 0,
    "allgather": 2,
    "broadcast": 5,
    "alltoall": 6,
    "reducescatter": 7,
    "barrier": 9,
}
"""Values of the Chakra schema's enum `CollectiveCommType`, by `Collective.kind`."""

ALL_RANKS = 0
"""Id that ASTRA-sim reserves for the process group of all ranks."""

_PACKAGE = "ChakraProtoMsg"
_SCHEMA = {
    "AttributeProto": (
        "string name = 1",
        "oneof int64 int64_val = 9",
        "oneof uint64 uint64_val = 13",
        "oneof bool bool_val = 27",
        "oneof string string_val = 29",
    ),
    "GlobalMetadata": ("string version = 1", "repeated AttributeProto attr = 2"),
    "Node": (
        "uint64 id = 1",
        "string name = 2",
        "NodeType type = 3",
        "repeated uint64 ctrl_deps = 4",
        "repeated uint64 data_deps = 5",
        "uint64 start_time_micros = 6",
        "uint64 duration_micros = 7",
        "repeated AttributeProto attr = 10",
    ),
}
"""Fields of mlcommons/chakra's schema et_def.proto that this module writes."""


def messages() -> Mapping[str, Any]:
    """Return the protobuf message classes of a Chakra trace, by name. A trace consists of one `GlobalMetadata` message
    and `Node` messages.
    """
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=_PACKAGE, syntax="proto3")
    kinds = file.enum_type.add(name="NodeType")
    for name, number in (("INVALID_NODE", 0), ("COMP_NODE", COMP_NODE), ("COMM_COLL_NODE", COMM_COLL_NODE)):
        kinds.value.add(name=name, number=number)
    for message_name, lines in _SCHEMA.items():
        message = file.message_type.add(name=message_name)
        for line in lines:
            *label, kind, name, _, number_text = line.split()
            one = message.field.add(name=name, number=int(number_text))
            one.label = one.LABEL_REPEATED if label == ["repeated"] else one.LABEL_OPTIONAL
            if label == ["oneof"]:
                one.oneof_index = 0
            if kind.islower():
                one.type = getattr(one, f"TYPE_{kind.upper()}")
            else:
                one.type = one.TYPE_ENUM if kind == "NodeType" else one.TYPE_MESSAGE
                one.type_name = f".{_PACKAGE}.{kind}"
    file.message_type[0].oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in ("GlobalMetadata", "Node")
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Files that an export of Chakra traces has written.

    Attributes:
        files: trace file of each rank.
        groups: file that lists the process groups; None if every collective includes all ranks.
        iterations: number of iterations in the traces.
        nodes: number of nodes in the traces of all ranks.
    """

    files: tuple[Path, ...]
    groups: Path | None
    iterations: int
    nodes: int


def write_traces(prefix: Path, histories: Histories) -> Written:
    """Write a Chakra trace per rank, with the recorded ordinary iterations as consecutive steps. Ranks are renumbered
    from 0, because simulators require this.

    Raises:
        OSError: a file cannot be written.
        RecordingError: Chakra has no type for a recorded collective operation.
    """
    kinds, files, nodes = messages(), list[Path](), 0
    groups, numbers = {histories.ranks: ALL_RANKS}, dict[tuple[int, OperationKey], int]()
    for step in histories.steps:
        for one in step.barriers:
            groups.setdefault(one.ranks, len(groups))
            numbers[step.number, one.key] = len(numbers)
    for place, rank in enumerate(histories.ranks):
        out = io.BytesIO()
        proto.serialize_length_prefixed(kinds["GlobalMetadata"](version=VERSION), out)
        trace = _RankTrace(kinds["Node"], histories, rank, groups, numbers)
        for node in trace.nodes():
            proto.serialize_length_prefixed(node, out)
            nodes += 1
        files.append(prefix.with_name(f"{prefix.name}.{place}.et"))
        write_whole(files[-1], out.getvalue())
    path = None
    if len(groups) > 1:
        place_of = {rank: place for place, rank in enumerate(histories.ranks)}
        named = {str(group): [place_of[rank] for rank in ranks] for ranks, group in groups.items() if group}
        path = prefix.with_name(f"{prefix.name}.groups.json")
        write_whole(path, json.dumps(named, indent=1).encode())
    return Written(files=tuple(files), groups=path, iterations=len(histories.steps), nodes=nodes)


def _us(moment_s: float) -> int:
    return round(1e6 * moment_s)


@dataclass(slots=True)
class _RankTrace:
    """Builder of the nodes of one rank's Chakra trace: a chain of nodes for local work, and nodes for collectives. The
    node of a collective has the same id on all ranks.
    """

    kind: Any  # Protobuf class of `Node` messages.
    histories: Histories
    rank: int
    groups: Mapping[tuple[int, ...], int]
    numbers: Mapping[tuple[int, OperationKey], int]
    _own: Iterator[int] = field(init=False)
    _last: list[int] = field(default_factory=list)  # Id of the latest node for local work; empty before the first one.
    # For each lane (queue of a transport), the id of the node of its latest collective.
    _last_on: dict[str, list[int]] = field(default_factory=dict)
    # Ids of the nodes of collectives for which the rank has waited since the latest node for local work.
    _waited_for: list[int] = field(default_factory=list)
    _now_s: float = 0.0

    def nodes(self) -> Iterator[Any]:
        self._own = count(len(self.numbers))
        recorded = {one.number: one for one in self.histories.recording.ranks[self.rank].iterations}
        for step in self.histories.steps:
            yield from self._step(step, recorded[step.number])

    def _step(self, step: TimedStep, iteration: RecordedIteration) -> Iterator[Any]:
        full, clock = step.stretches[self.rank], self.histories.clocks[self.rank]
        barriers = {one.key: one for one in step.barriers if self.rank in one.ranks}
        spans = sorted(
            (clock(one.begin_s), clock(one.end_s), place)
            for place, one in enumerate(iteration.operators)
            if one.lane == 0
        )
        nodes_of: dict[int, int] = {}  # {index of an operator: id of its latest trace node}
        if (gap_s := full[0].begin_s - self._now_s) > 0:
            yield self._local_node("between steps", step, ThreadInterval(Activity.COMPUTE, Phase.OTHER, gap_s))
        for piece in pieces(full, step.marks[self.rank], lambda begin_s, end_s: end_s - begin_s):
            self._waited_for += [self.numbers[step.number, key] for key, _ in piece.waits]
            self._now_s = max([self._now_s, *(barriers[key].done_s[self.rank] for key, _ in piece.waits)])
            if piece.seconds <= 0 and not piece.issues:
                continue
            place = _place_at(spans, self._now_s + piece.seconds / 2) if piece.name else None
            reads = () if place is None or place in nodes_of else iteration.operators[place].after
            name = (
                piece.name or f"{piece.phase.value}, between operators"
            )  # Name Python code between operators after its phase.
            yield self._local_node(name, step, piece, [nodes_of[other] for other in reads if other in nodes_of])
            if place is not None:
                nodes_of[place] = self._last[0]
            for key in piece.issues:
                kind = "allreduce" if key[0] >= 0 else iteration.collectives[key[1]].kind.lower()
                yield self._collective_node(step, barriers[key], kind)
        if self._waited_for:
            yield self._local_node("the end", step, ThreadInterval(Activity.COMPUTE, Phase.OTHER, 0.0))

    def _local_node(self, name: str, step: TimedStep, piece: ThreadInterval, reads: Iterable[int] = ()) -> Any:
        before, begin_s = self._last, self._now_s
        self._last, self._now_s = [next(self._own)], begin_s + piece.seconds
        waited_for, self._waited_for = self._waited_for, []
        values = {"iteration": step.number, "activity": piece.activity.value, "phase": piece.phase.value}
        node = self._node(self._last[0], name, COMP_NODE, before, [*waited_for, *reads], begin_s, self._now_s)
        return _with_attributes(node, is_cpu_op=True, **values)

    def _collective_node(self, step: TimedStep, one: TimedBarrier, kind: str) -> Any:
        if kind not in COLLECTIVES:
            raise RecordingError(
                f"the Chakra trace cannot contain the collective operation {one.name}, because Chakra has no node type "
                f"for the kind {kind}"
            )
        before, number = self._last_on.get(one.lane, []), self.numbers[step.number, one.key]
        self._last_on[one.lane] = [number]
        node = self._node(number, one.name, COMM_COLL_NODE, before, self._last, one.begin_s, one.done_s[self.rank])
        node.attr.add(name="comm_size", uint64_val=one.n_bytes)
        return _with_attributes(
            node,
            is_cpu_op=False,  # False, because simulators require this value for collectives
            iteration=step.number,
            activity=one.activity.value,
            phase=Phase.OTHER.value,
            comm_type=COLLECTIVES[kind],
            pg_name=str(self.groups[one.ranks]),
            stream=one.lane,
        )

    def _node(
        self, number: int, name: str, kind: int, before: list[int], after: list[int], begin_s: float, end_s: float
    ) -> Any:
        times_us = {"start_time_micros": _us(begin_s), "duration_micros": _us(end_s) - _us(begin_s)}
        data = dict.fromkeys([*before, *after])
        return self.kind(id=number, name=name, type=kind, ctrl_deps=before, data_deps=data, **times_us)


def _with_attributes(node: Any, **values: bool | int | str) -> Any:
    for name, value in values.items():
        kind = {bool: "bool_val", int: "int64_val", str: "string_val"}[type(value)]
        node.attr.add(name=name, **{kind: value})
    return node


def _place_at(spans: Sequence[tuple[float, float, int]], moment_s: float) -> int | None:
    """Return the index of the operator that the training thread ran at a moment; None if it ran none."""
    found = bisect_right(spans, moment_s, key=lambda span: span[0]) - 1
    return spans[found][2] if found >= 0 and moment_s <= spans[found][1] else None
