"""What each operator reads: which ones have made it, by an execution trace of one step.

PyTorch's ExecutionTraceObserver notes the tensors that go into an operator and come out of it, each with a number of
its own and that of its storage. Here these become edges between the operators that nobody has called but the script.
Numbers are given again once a tensor is gone. Who makes one is then known anew; one that no operator has made, such as
a number in Python, is told apart by what else is known of it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from torch.profiler import ExecutionTraceObserver

from .recording import Operator

logger = logging.getLogger(__name__)

Node = Mapping[str, Any]  # Any: JSON
Tensor = tuple[int, int, int, int, int, str]
"""Its number, its storage's, offset, elements, bytes of one, device."""

Storage = tuple[int, int]
"""Its number, and bytes of an element."""

_USER_SCOPE = 7
"""Of what somebody has named: no operator."""

_BACKWARD = "autograd::engine::evaluate_function: "
_MUTABLE = re.compile(r"\(\w+!\)")


@dataclass(frozen=True, slots=True)
class Reader:
    """One operator, and the places of those whose results it reads."""

    name: str
    after: tuple[int, ...]


class TensorWatch:
    """Watches one step of the calling process."""

    def __init__(self) -> None:
        """From now on; a step takes about three times as long."""
        number, self._path = tempfile.mkstemp(prefix="sirtaki-", suffix=".json")
        os.close(number)
        self._observer = ExecutionTraceObserver()
        self._observer.register_callback(self._path)
        self._observer.start()

    def stop(self) -> None:
        """The step has ended."""
        self._observer.stop()
        self._observer.unregister_callback()

    def readers(self) -> tuple[Reader, ...]:
        """What it has seen; takes a second for 5,000 operators, those inside others counted. Once only."""
        try:
            with open(self._path, encoding="utf-8") as file:
                return readers(json.load(file)["nodes"])
        except (OSError, ValueError, KeyError, TypeError, IndexError) as err:
            logger.warning("what operators read cannot be told: %r", err)
            return ()
        finally:
            os.unlink(self._path)


def readers(nodes: Sequence[Node]) -> tuple[Reader, ...]:
    """Of the thread with the most operators, in the order in which they began.

    Raises:
        KeyError, TypeError, IndexError: an execution trace looks otherwise.
    """
    ordered = sorted(nodes, key=lambda node: node["id"])
    attributes = {node["id"]: {each["name"]: each["value"] for each in node["attrs"]} for node in ordered}
    outermost: dict[int, int] = {}  # by number of a node, that of the operator which nobody but the script has called
    threads: dict[int, list[Node]] = {}
    for node in ordered:
        own = attributes[node["id"]]
        if own["scope"] == _USER_SCOPE:
            continue
        number = int(node["id"])
        outermost[number] = outermost.get(node["ctrl_deps"], number)
        threads.setdefault(own["tid"], []).append(node)
    flow = _Flow()
    for node in max(threads.values(), key=len, default=[]):
        flow.add(node, outermost[node["id"]], str(attributes[node["id"]].get("op_schema", "")))
    return tuple(flow.readers())


@dataclass(slots=True)
class _Flow:
    """Who has made, or changed, what; operators by their number in the trace."""

    names: dict[int, str] = field(default_factory=dict)
    reads: dict[int, dict[int, None]] = field(default_factory=dict)
    made: dict[Tensor, int] = field(default_factory=dict)
    changed: dict[Storage, int] = field(default_factory=dict)  # who has made it, or written into it, last

    def add(self, node: Node, operator: int, schema: str) -> None:
        if node["id"] == operator:
            self.names[operator] = node["name"].removeprefix(_BACKWARD).removeprefix("torch::autograd::")
            self.reads[operator] = {}
        taken = list(_tensors(node["inputs"]["values"]))
        for tensor in taken:
            for maker in (self.made.get(tensor), self.changed.get(_storage(tensor))):
                if maker is not None and maker != operator:
                    self.reads[operator][maker] = None
        known = {_storage(tensor) for tensor in taken}
        for tensor in _tensors(node["outputs"]["values"]):
            if tensor not in taken:
                self.made[tensor] = operator
            if _storage(tensor) not in known:
                self.changed[_storage(tensor)] = operator
        for storage in _written(node["inputs"]["values"], schema):
            self.changed[storage] = operator

    def readers(self) -> Iterator[Reader]:
        places = {operator: place for place, operator in enumerate(self.names)}
        for operator, name in self.names.items():
            yield Reader(name, tuple(sorted(places[maker] for maker in self.reads[operator])))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:  # Any: JSON
    """Also those in lists."""
    for value in values:
        if isinstance(value, list):
            if len(value) == 6 and isinstance(value[5], str):
                if value[0] and value[1]:  # one that is not there has 0
                    yield value[0], value[1], value[2], value[3], value[4], value[5]
            else:
                yield from _tensors(value)


def _storage(tensor: Tensor) -> Storage:
    return tensor[1], tensor[4]


def _written(values: Sequence[Any], schema: str) -> Iterator[Storage]:
    """Storages of arguments that an operator writes into, by its schema."""
    inside = schema[schema.find("(") + 1 : schema.rfind(" -> ")]
    for place, argument in enumerate(inside.split(", ")):
        if _MUTABLE.search(argument) and place < len(values):
            yield from map(_storage, _tensors([values[place]]))


def with_edges(pieces: Sequence[tuple[int, Operator]], found: Sequence[Reader]) -> tuple[Operator, ...]:
    """Operators of a step with what they read, as far as it was seen in the step that was watched.

    Args:
        pieces: by their begin; where an operator is cut its parts have one number, and these ascend in a lane.
        found: of the step that was watched; what another one does otherwise reads nothing.
    """
    first, last = dict[int, int](), dict[int, int]()
    for place, (operator, piece) in enumerate(pieces):
        if piece.lane == 0:
            first.setdefault(operator, place)
            last[operator] = place
    operators = [piece for _, piece in pieces]
    own = sorted(first)
    pairs = _pairs([one.name for one in found], [operators[first[operator]].name for operator in own]) if found else {}
    for place, other in pairs.items():
        reader = first[own[other]]
        after = tuple(last[own[pairs[maker]]] for maker in found[place].after if maker in pairs)
        operators[reader] = replace(operators[reader], after=after)
    return tuple(operators)


def _pairs(watched: Sequence[str], names: Sequence[str]) -> dict[int, int]:
    """By place in the one, that in the other: mostly, all of them."""
    if watched == names:
        return {place: place for place in range(len(names))}
    blocks = SequenceMatcher(None, watched, names, autojunk=False).get_matching_blocks()
    return {block.a + count: block.b + count for block in blocks for count in range(block.size)}
