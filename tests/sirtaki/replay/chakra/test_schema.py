"""The messages that protobuf makes of our telling of the schema."""

from __future__ import annotations

import pytest

pytest.importorskip("google.protobuf", minversion="5.28")

from sirtaki.analysis.chakra import COMM_COLL_NODE, messages


def test_bytes_are_those_of_the_schema() -> None:
    kinds = messages()
    node = kinds["Node"](
        id=1, name="n", type=COMM_COLL_NODE, data_deps=[0, 300], start_time_micros=5, duration_micros=6
    )
    node.attr.add(name="a", bool_val=True)
    assert node.SerializeToString(deterministic=True) == bytes(
        [8, 1, 18, 1, *b"n", 24, 7, 42, 3, 0, 172, 2, 48, 5, 56, 6, 82, 6, 10, 1, *b"a", 216, 1, 1]
    )
    assert kinds["GlobalMetadata"](version="v").SerializeToString() == bytes([10, 1, *b"v"])


def test_an_attribute_has_one_value() -> None:
    attribute = messages()["Node"]().attr.add(name="a", int64_val=3)
    attribute.string_val = "x"
    assert attribute.WhichOneof("value") == "string_val"


def test_messages_can_be_made_twice() -> None:
    assert messages()["Node"].DESCRIPTOR.full_name == messages()["Node"].DESCRIPTOR.full_name == "ChakraProtoMsg.Node"
