"""A model's graph, taken from the autograd graph behind its output, or a chain where there is none.

A node is an operation together with the parameters it uses. What says little about communication is left out, as in
dPRO's coarsened view: operations that only change a tensor's shape vanish, and runs of operations without parameters
are collapsed into the operation before them. ResNet-152 has about 400 nodes then, not 1500.

Of the registry's modules only this one looks into torch's graphs; it keeps no tensor.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from .graph import MAX_LABEL_CHARS, Graph, Node

# Of an operation's parameters or trailing operations, only the first characters are kept: the rest is in its size.
_MAX_DETAIL_CHARS = MAX_LABEL_CHARS // 2

_SHAPE_ONLY = {
    *("Alias", "AsStrided", "Clone", "Expand", "Permute", "Reshape", "ReshapeAlias", "Select", "Slice", "Squeeze"),
    *("T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View", "ViewAsReal"),
}

# An operation with more parameters than this hides a part of the model (a compiled region, a fused RNN):
# its parameters are strung up as a chain instead.
_OPAQUE_PARAMETERS = 16


def chain_graph(sizes: Sequence[int]) -> Graph:
    """The graph of a model of which only the gradients' sizes are known, `(n_gradients,)`, in their order."""
    return _chain([str(size) for size in sizes], sizes)


def shapes_graph(shapes: Sequence[Sequence[int]]) -> Graph:
    """The same where the parameters' shapes are known."""
    return _chain([_shape_text(shape) for shape in shapes], [prod(shape) for shape in shapes])


def _chain(details: Sequence[str], sizes: Sequence[int]) -> Graph:
    nodes = tuple(Node(kind="parameter", detail=detail, size=size) for detail, size in zip(details, sizes, strict=True))
    return Graph(nodes=nodes, edges=tuple((index, index + 1, "") for index in range(len(nodes) - 1)))


@dataclass(slots=True)
class _Operation:
    """A node while the graph is being coarsened; neighbours are kept in dicts, whose order is the order of finding."""

    kind: str
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    others: list[tuple[int, ...]] = field(default_factory=list)  # of parameters that are not of interest
    tail: list[str] = field(default_factory=list)
    sources: dict[int, None] = field(default_factory=dict)
    targets: dict[int, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """What was found behind an output.

    Attributes:
        graph: the coarsened graph, with parameters that were not reached as a chain beside it.
        n_reached: parameters of interest that the output depends on.
    """

    graph: Graph
    n_reached: int


def capture(outputs: object, parameters: Mapping[int, tuple[int, ...]]) -> CapturedGraph:
    """The graph behind `outputs`, any nesting of tensors in dicts, sequences and objects with fields.

    Other parameters count for no size and are told apart: the same model of which less is reduced is another graph.

    Args:
        outputs: what a module returned; nothing of it is kept.
        parameters: shape of each parameter of interest by `id`. Those that no output depends on (unused ones, or
            hidden in a checkpointed block) are added as a chain, in this order.
    """
    operations, reached = _walk(outputs, parameters)
    _fold_parameters(operations)
    _bypass_shape_only(operations)
    _collapse_chains(operations)
    missing = [shape for key, shape in parameters.items() if key not in reached]
    return CapturedGraph(graph=_to_graph(operations, missing), n_reached=len(reached))


def _walk(outputs: object, parameters: Mapping[int, tuple[int, ...]]) -> tuple[dict[int, _Operation], set[int]]:
    """All operations behind `outputs` by number, with edges from input to output, and the parameters reached."""
    found: dict[Any, int] = {}  # keeps autograd's nodes alive while walking, else their identities would be reused
    stack = []
    for function in _gradient_functions(outputs):
        if function not in found:
            found[function] = len(found)
            stack.append(function)
    operations: dict[int, _Operation] = {}
    reached: set[int] = set()
    edges: list[tuple[int, int]] = []
    while stack:
        function = stack.pop()
        number = found[function]
        variable = getattr(function, "variable", None)
        if variable is None:
            operations[number] = _Operation(re.sub(r"Backward\d*$", "", function.name().rpartition("::")[2]))
        else:
            operations[number] = operation = _Operation("parameter")
            wanted = id(variable) in parameters
            (operation.shapes if wanted else operation.others).append(tuple(variable.shape))
            if wanted:
                reached.add(id(variable))
        for source, _ in function.next_functions:
            if source is None:
                continue
            if source not in found:
                found[source] = len(found)
                stack.append(source)
            edges.append((found[source], number))
    for source_number, number in edges:
        operations[source_number].targets[number] = None
        operations[number].sources[source_number] = None
    return operations, reached


def _gradient_functions(outputs: object) -> Iterable[Any]:
    """The autograd node of every tensor in `outputs`, in the order of the nesting."""
    stack = [outputs]
    seen: set[int] = set()
    while stack:
        item = stack.pop()
        function = getattr(item, "grad_fn", None)
        if function is not None:
            yield function
            continue
        if isinstance(item, str | bytes | int | float | None) or id(item) in seen or hasattr(item, "requires_grad"):
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, list | tuple):
            stack.extend(reversed(item))
        elif hasattr(item, "__dict__"):
            stack.extend(reversed(list(vars(item).values())))


def _fold_parameters(operations: dict[int, _Operation]) -> None:
    """A parameter, or a reshaped one, with a single user becomes part of it; a shared one stays a node."""
    waiting = [number for number, operation in operations.items() if operation.kind == "parameter"]
    while waiting:
        number = waiting.pop()
        operation = operations[number]
        if operation.sources or len(operation.targets) != 1:
            continue
        (user,) = operation.targets
        if operation.kind != "parameter" and operation.kind not in _SHAPE_ONLY:
            continue
        operations[user].shapes.extend(operation.shapes)
        operations[user].others.extend(operation.others)
        del operations[user].sources[number], operations[number]
        if operations[user].kind in _SHAPE_ONLY:
            waiting.append(user)


def _bypass_shape_only(operations: dict[int, _Operation]) -> None:
    for number, operation in list(operations.items()):
        has_parameters = operation.shapes or operation.others
        if operation.kind in _SHAPE_ONLY and not has_parameters and len(operation.sources) <= 1:
            for source in operation.sources:
                del operations[source].targets[number]
                operations[source].targets.update(operation.targets)
            for target in operation.targets:
                del operations[target].sources[number]
                operations[target].sources.update(operation.sources)
            del operations[number]


def _collapse_chains(operations: dict[int, _Operation]) -> None:
    """An operation without parameters joins the one before it if each is the other's only neighbour there."""
    for number in reversed(list(operations)):  # from the inputs on, so that a run grows at its end
        operation = operations[number]
        if operation.shapes or operation.others or len(operation.sources) != 1:
            continue
        (head,) = operation.sources
        if len(operations[head].targets) != 1:
            continue
        operations[head].tail.extend([operation.kind, *operation.tail])
        operations[head].targets = operation.targets
        for target in operation.targets:
            del operations[target].sources[number]
            operations[target].sources[head] = None
        del operations[number]


def _to_graph(operations: dict[int, _Operation], missing: Sequence[tuple[int, ...]]) -> Graph:
    nodes: list[Node] = []
    edges: list[tuple[int, int, str]] = []
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number in _forward_order(operations):
        operation = operations[number]
        first[number] = len(nodes)
        if len(operation.shapes) + len(operation.others) > _OPAQUE_PARAMETERS:
            nodes.extend(_parameter_node(shape) for shape in operation.shapes)
            nodes.extend(Node(kind="parameter", detail=_other_text(shape)) for shape in operation.others)
        else:
            nodes.append(_operation_node(operation))
        last[number] = len(nodes) - 1
        edges.extend((a, b, "") for a, b in pairwise(range(first[number], len(nodes))))
    edges.extend((last[a], first[b], "") for a, operation in operations.items() for b in operation.targets)
    start = len(nodes)
    nodes.extend(_parameter_node(shape) for shape in missing)
    edges.extend((a, b, "") for a, b in pairwise(range(start, len(nodes))))
    return Graph(nodes=tuple(nodes), edges=tuple(edges))


def _forward_order(operations: dict[int, _Operation]) -> list[int]:
    """From inputs to outputs, as the model computes: graphs read better so, and align better with each other."""
    waiting = {number: len(operation.sources) for number, operation in operations.items()}
    order = [number for number in reversed(operations) if waiting[number] == 0]  # outputs were found first
    for number in order:  # grows while it is read
        for target in operations[number].targets:
            waiting[target] -= 1
            if waiting[target] == 0:
                order.append(target)
    return order


def _operation_node(operation: _Operation) -> Node:
    # Sorted: a weight's and its bias' shape say the same in either order, and torch versions differ in it.
    texts = [*sorted(map(_shape_text, operation.shapes)), *sorted(map(_other_text, operation.others))]
    shapes = ",".join(texts)[:_MAX_DETAIL_CHARS]
    tail = "".join("+" + name for name in operation.tail)[:_MAX_DETAIL_CHARS]
    return Node(kind=operation.kind[:200], detail=f"{shapes}{tail}", size=sum(map(prod, operation.shapes)))


def _parameter_node(shape: tuple[int, ...]) -> Node:
    return Node(kind="parameter", detail=_shape_text(shape), size=prod(shape))


def _other_text(shape: Sequence[int]) -> str:
    return f"other {_shape_text(shape)}"


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
