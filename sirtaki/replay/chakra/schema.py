"""Chakra's protobuf messages, as far as our traces use them.

Told after `schema/protobuf/et_def.proto` of https://github.com/mlcommons/chakra (package `ChakraProtoMsg`, version
0.0.4; ASTRA-sim's copy has the same numbers): the `chakra` package, which would bring them, is on no package index.
Names and numbers are the schema's. They live in a pool of their own, so they do not collide with that package's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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
        for number, field, kind in fields:
            *how, what = kind.split()
            added = message.field.add(
                name=field, number=number, label=_Field.LABEL_REPEATED if "repeated" in how else _Field.LABEL_OPTIONAL
            )
            if what in _SCALARS:
                added.type = _SCALARS[what]
            else:
                added.type = _Field.TYPE_ENUM if what == "NodeType" else _Field.TYPE_MESSAGE
                added.type_name = f".{_PACKAGE}.{what}"
            if "oneof" in how:
                added.oneof_index = 0
    return file
