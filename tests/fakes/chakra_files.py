"""Read Chakra traces from their bytes, without protobuf, and replay them, to test the writer and its schema.

Field numbers are those of https://github.com/mlcommons/chakra, schema/protobuf/et_def.proto.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COMP_NODE, COMM_COLL_NODE = 4, 7
NUMBERS = {7: int, 9: int, 11: int, 13: int, 27: bool}
"""Type of an attribute's value, by field number."""


@dataclass(slots=True)
class ReadNode:
    number: int = 0
    name: str = ""
    kind: int = 0
    control: list[int] = field(default_factory=list)
    data: list[int] = field(default_factory=list)
    begin_us: int = 0
    length_us: int = 0
    attributes: dict[str, int | bool | str] = field(default_factory=dict)

    @property
    def end_us(self) -> int:
        return self.begin_us + self.length_us


def read(path: Path) -> tuple[str, list[ReadNode]]:
    """Return the version and the nodes of a trace."""
    content = path.read_bytes()
    place, messages = 0, []
    while place < len(content):
        size, place = _varint(content, place)
        messages.append(content[place : place + size])
        place += size
    first = dict(_fields(messages[0]))
    return bytes(first[1]).decode(), [_node(message) for message in messages[1:]]


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, place


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        assert key & 7 in (0, 2), "only numbers and what has a length are written"
        value, place = _varint(message, place)
        if key & 7 == 0:
            yield key >> 3, value
        else:
            yield key >> 3, message[place : place + value]
            place += value


def _node(message: bytes) -> ReadNode:
    found = ReadNode()
    for number, value in _fields(message):
        if isinstance(value, int):
            setattr(found, {1: "number", 3: "kind", 6: "begin_us", 7: "length_us"}[number], value)
        elif number == 2:
            found.name = value.decode()
        elif number in (4, 5):
            (found.control if number == 4 else found.data).extend(_packed(value))
        else:
            assert number == 10
            name, attribute = "", None
            for inner, content in _fields(value):
                if inner == 1:
                    name = bytes(content).decode()
                else:
                    attribute = NUMBERS[inner](content) if isinstance(content, int) else content.decode()
            assert attribute is not None
            found.attributes[name] = attribute
    return found


def _packed(content: bytes) -> Iterator[int]:
    place = 0
    while place < len(content):
        value, place = _varint(content, place)
        yield value


def walk(ranks: Sequence[Sequence[ReadNode]]) -> dict[tuple[int, int], int]:
    """Return the end of each node of each rank, by durations and `data_deps` only. A collective waits for its ranks."""
    nodes = {(rank, node.number): node for rank, mine in enumerate(ranks) for node in mine}
    assert len(nodes) == sum(map(len, ranks)), "a number is there twice"
    members: dict[int, list[int]] = defaultdict(list)
    children: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for (rank, number), node in nodes.items():
        if node.kind == COMM_COLL_NODE:
            members[number].append(rank)
        for parent in node.data:
            children[rank, parent].append((rank, number))
    missing = {key: len(node.data) for key, node in nodes.items()}
    ready_us, end_us = dict.fromkeys(nodes, 0), dict[tuple[int, int], int]()
    came: dict[int, int] = defaultdict(int)
    free = deque(key for key, count in missing.items() if not count)
    while free:
        rank, number = free.popleft()
        together = [rank]
        if nodes[rank, number].kind == COMM_COLL_NODE:
            came[number] += 1
            if came[number] < len(members[number]):
                continue
            together = members[number]
        begin_us = max(ready_us[other, number] for other in together)
        for other in together:
            end_us[other, number] = begin_us + nodes[other, number].length_us
            for child in children[other, number]:
                ready_us[child] = max(ready_us[child], end_us[other, number])
                missing[child] -= 1
                if not missing[child]:
                    free.append(child)
    assert len(end_us) == len(nodes), "nodes wait for each other"
    return end_us
