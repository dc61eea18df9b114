"""The graph of a model, recorded from autograd in its first forward pass and coarsened."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.nn.modules import module as torch_module

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


def shapes_graph(shapes: Sequence[Sequence[int]]) -> Graph:
    """The graph of a model of which only the parameters' shapes are known, in their gradients' order: a chain."""
    nodes = tuple(Node(kind="parameter", detail=_shape_text(shape), size=prod(shape)) for shape in shapes)
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


logger = logging.getLogger(__name__)

# A model that is called in pieces, or with parameters that it does not use, never shows a graph with all of them;
# then the fullest of so many outermost calls is taken.
_MAX_CALLS = 8


class ModelGraphRecorder:
    """Watches outermost module calls until one's output depends on all parameters of interest.

    It keeps no tensor of a forward pass, takes its hooks away by itself, and nothing it does can raise into training.
    """

    def __init__(self) -> None:
        self._parameters: list[torch.Tensor] = []
        self._best: CapturedGraph | None = None
        self._fallback: Graph | None = None
        self._name = ""
        self._calls = 0
        self._handles: list[Any] = []  # torch's RemovableHandle, which older versions do not type

    def start(self, model_parameters: Iterable[torch.Tensor]) -> None:
        """Begins to watch; `model_parameters` are those whose gradients are reduced, in the model's order."""
        self.stop()
        self._best, self._name, self._calls = None, "", 0
        self._parameters = list(model_parameters)
        self._fallback = shapes_graph([tuple(parameter.shape) for parameter in reversed(self._parameters)])
        # True, and of no consequence: the hook is gone before anything is compiled.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        self._watch()

    def stop(self) -> None:
        """Takes the hooks away and lets go of the parameters; what was found stays. Idempotent."""
        self._remove_hooks()
        self._parameters = []

    @property
    def is_watching(self) -> bool:
        """Whether hooks are installed."""
        return bool(self._handles)

    @property
    def found(self) -> bool:
        """Whether a forward pass has shown a graph."""
        return self._best is not None

    @property
    def graph(self) -> Graph | None:
        """The model's graph; the chain of its parameters, last first, if none was seen; None before `start()`."""
        return self._fallback if self._best is None else self._best.graph

    @property
    def model_name(self) -> str:
        """Class name of the module whose output was used, empty if none was."""
        return self._name

    def _watch(self) -> None:
        self._handles = [torch_module.register_module_forward_pre_hook(_untraced(self._before))]

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, module: torch.nn.Module, inputs: object) -> None:
        try:
            self._remove_hooks()
            self._handles = [module.register_forward_hook(_untraced(self._after), always_call=True)]
        except Exception:
            self._give_up(module)

    def _after(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        try:
            self._remove_hooks()
            self._look(module, output)
        except Exception:
            self._give_up(module)

    def _give_up(self, module: torch.nn.Module) -> None:
        """Whatever a module is or returns, the user's training goes on."""
        logger.debug("no graph of %s: its parameters stand in for it", type(module).__name__, exc_info=True)
        self.stop()

    def _look(self, module: torch.nn.Module, output: object) -> None:
        seen = capture(output, {id(parameter): tuple(parameter.shape) for parameter in self._parameters})
        if seen.n_reached > 0:
            self._calls += 1
        if seen.n_reached > (0 if self._best is None else self._best.n_reached):
            self._best, self._name = seen, _name_of(module)
        if seen.n_reached == len(self._parameters) or self._calls == _MAX_CALLS:
            self.stop()
        else:
            self._watch()


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    untraced: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return untraced


def _name_of(module: torch.nn.Module) -> str:
    """Class name of a model, looked up inside a compiled or wrapped one."""
    inner = getattr(module, "_orig_mod", None)
    return type(module if inner is None else inner).__name__
