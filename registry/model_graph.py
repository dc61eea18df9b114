"""Capture a model's graph from autograd in its first forward pass, and merge small operations into larger nodes."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel

from sirtaki.fields import MAX_LABEL_CHARS
from sirtaki.uncompiled import something_is_compiled, unless_traced

from .graph import ModelGraph, OperationLabel, model_graph, topological_order

# Maximum length of the text that describes an operation's parameters, and of the text that names the operations merged
# into it. Longer texts are cut, but the label's `size` counts all parameters.
_MAX_DETAIL_CHARS = MAX_LABEL_CHARS // 2

_SHAPE_ONLY = {
    *("Alias", "AsStrided", "Clone", "Expand", "Permute", "Reshape", "ReshapeAlias", "Select", "Slice", "Squeeze"),
    *("T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View", "ViewAsReal"),
}

# An operation with more parameters is represented by a chain of its parameters, because it hides a part of the model (a
# compiled region, a fused RNN).
_OPAQUE_PARAMETERS = 16


def shapes_graph(shapes: Sequence[Sequence[int]]) -> ModelGraph:
    """Return a substitute for a model's graph: a chain of its parameters, in the order of their gradients.

    Args:
        shapes: shape of each parameter.
    """
    nodes = [_parameter_node(shape) for shape in shapes]
    return model_graph(nodes, pairwise(range(len(nodes))))


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """Copy of the autograd graph of a model's output, without tensors.

    Attributes:
        operations: {number: operation}, in the order of discovery.
        edges: (number of the input, number of the output).
        missing: shapes of parameters that the output does not depend on.
        n_reached: number of parameters with reduced gradients that the output depends on.
    """

    operations: Mapping[int, AutogradNode]
    edges: Sequence[tuple[int, int]]
    missing: Sequence[tuple[int, ...]]
    n_reached: int

    @cached_property
    def graph(self) -> ModelGraph:
        """Return a coarser graph: small operations are merged, and parameters not reached form a separate chain."""
        operations = _Operations(self.operations, self.edges)
        _fold_parameters(operations)
        _bypass_shape_only(operations)
        _collapse_chains(operations)
        return _coarse(operations, self.missing)


class AutogradNode(NamedTuple):
    """One operation or parameter of autograd's graph.

    Attributes:
        kind: name of the operation, or "parameter".
        shapes: shapes of this node's parameters whose gradients are reduced.
        others: shapes of this node's other parameters.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...] = ()
    others: tuple[tuple[int, ...], ...] = ()


def capture(outputs: object, parameters: Mapping[int, tuple[int, ...]]) -> CapturedGraph:
    """Return the autograd graph of `outputs`, a nesting of tensors in dicts, sequences and objects with fields.

    Nodes of parameters whose gradients are not reduced (frozen ones) are labelled as such. So two models that differ in
    which parameters are frozen have different graphs.

    Args:
        outputs: output of a module. No reference to it is kept.
        parameters: shape of each parameter whose gradient is reduced, by `id`. Parameters that no output depends on
            (unused, or hidden in a checkpointed block) are appended as a chain, in this order.
    """
    # A dict, because it keeps autograd's nodes alive: ids of dead nodes are reused.
    found: dict[Any, int] = {}
    stack = []
    for function in _gradient_functions(outputs):
        if function not in found:
            found[function] = len(found)
            stack.append(function)
    operations: dict[int, AutogradNode] = {}
    edges: list[tuple[int, int]] = []
    reached: set[int] = set()
    while stack:
        function = stack.pop()
        number = found[function]
        variable = getattr(function, "variable", None)
        if variable is None:
            operations[number] = AutogradNode(re.sub(r"Backward\d*$", "", function.name().rpartition("::")[2]))
        elif id(variable) in parameters:
            operations[number] = AutogradNode("parameter", shapes=(tuple(variable.shape),))
            reached.add(id(variable))
        else:
            operations[number] = AutogradNode("parameter", others=(tuple(variable.shape),))
        for source, _ in function.next_functions:
            if source is None:
                continue
            if source not in found:
                found[source] = len(found)
                stack.append(source)
            edges.append((found[source], number))
    missing = [shape for key, shape in parameters.items() if key not in reached]
    return CapturedGraph(operations=operations, edges=edges, missing=missing, n_reached=len(reached))


def _gradient_functions(outputs: object) -> Iterable[Any]:
    """Yield the autograd node of each tensor in `outputs`, in the order in which the tensors are nested."""
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


@dataclass(slots=True)
class _Operation:
    """A node of `_Operations`: the fields of `AutogradNode`, and the kinds of operations that were merged into it."""

    kind: str
    shapes: list[tuple[int, ...]]
    others: list[tuple[int, ...]]
    tail: list[str]


class _Operations:
    """A graph of operations that are merged step by step. Nodes and their neighbours keep the order of discovery.

    Attributes:
        nodes: operations by number.
        sources: numbers of the operations whose output an operation reads, by its number. The values are dicts, because
            these keep the order of insertion.
        targets: numbers of the operations that read an operation's output, by its number.
    """

    def __init__(self, operations: Mapping[int, AutogradNode], edges: Iterable[tuple[int, int]]) -> None:
        self.nodes = {
            number: _Operation(own.kind, [*own.shapes], [*own.others], []) for number, own in operations.items()
        }
        self.sources: dict[int, dict[int, None]] = {number: {} for number in operations}
        self.targets: dict[int, dict[int, None]] = {number: {} for number in operations}
        self.connect(edges)

    def connect(self, edges: Iterable[tuple[int, int]]) -> None:
        """Add edges. Edges that exist are ignored."""
        for source, target in edges:
            self.targets[source][target] = None
            self.sources[target][source] = None

    def remove(self, number: int) -> None:
        """Remove an operation with its edges."""
        for source in self.sources.pop(number):
            del self.targets[source][number]
        for target in self.targets.pop(number):
            del self.sources[target][number]
        del self.nodes[number]


def _fold_parameters(operations: _Operations) -> None:
    """Merge each parameter into the operation that uses it, also through reshapes.

    A parameter that several operations use stays a separate node.
    """
    waiting = [number for number, own in operations.nodes.items() if own.kind == "parameter"]
    while waiting:
        number = waiting.pop()
        own = operations.nodes[number]
        if operations.sources[number] or len(operations.targets[number]) != 1:
            continue
        if own.kind != "parameter" and own.kind not in _SHAPE_ONLY:
            continue
        (target,) = operations.targets[number]
        user = operations.nodes[target]
        user.shapes.extend(own.shapes)
        user.others.extend(own.others)
        operations.remove(number)
        if user.kind in _SHAPE_ONLY:
            waiting.append(target)


def _bypass_shape_only(operations: _Operations) -> None:
    for number, own in list(operations.nodes.items()):
        sources, targets = operations.sources[number], operations.targets[number]
        if own.kind in _SHAPE_ONLY and not (own.shapes or own.others) and len(sources) <= 1:
            operations.remove(number)
            operations.connect(product(sources, targets))


def _collapse_chains(operations: _Operations) -> None:
    """Merge each operation without parameters into the operation before it, if both form a chain.

    That is, the operation has one predecessor, and this predecessor has one successor.
    """
    # Go from inputs to outputs, so that a chain of operations grows at its end.
    for number, own in reversed(list(operations.nodes.items())):
        sources, targets = operations.sources[number], operations.targets[number]
        if own.shapes or own.others or len(sources) != 1:
            continue
        (source,) = sources
        if len(operations.targets[source]) != 1:
            continue
        operations.nodes[source].tail.extend([own.kind, *own.tail])
        operations.remove(number)
        operations.connect(product(sources, targets))


def _coarse(operations: _Operations, missing: Sequence[tuple[int, ...]]) -> ModelGraph:
    """Return the graph with its nodes in the order of computation, which is easier to read and to match."""
    nodes: list[OperationLabel] = []
    ends: dict[int, tuple[int, int]] = {}
    edges: list[tuple[int, int]] = []
    # Reverse the order of the nodes, because they were discovered from outputs to inputs.
    for number in topological_order({number: operations.targets[number] for number in reversed(operations.nodes)}):
        own, start = operations.nodes[number], len(nodes)
        if len(own.shapes) + len(own.others) > _OPAQUE_PARAMETERS:
            nodes.extend(_parameter_node(shape) for shape in own.shapes)
            nodes.extend(OperationLabel(kind="parameter", detail=_other_text(shape)) for shape in own.others)
        else:
            nodes.append(_operation_node(own))
        ends[number] = start, len(nodes) - 1
        edges.extend(pairwise(range(start, len(nodes))))
    edges.extend((ends[a][1], ends[b][0]) for a, targets in operations.targets.items() for b in targets)
    edges.extend(pairwise(range(len(nodes), len(nodes) + len(missing))))
    return model_graph([*nodes, *map(_parameter_node, missing)], edges)


def _operation_node(own: _Operation) -> OperationLabel:
    # Sort the shapes, because the order of weight and bias depends on the version of torch.
    texts = [*sorted(map(_shape_text, own.shapes)), *sorted(map(_other_text, own.others))]
    joined = "".join("+" + name for name in own.tail)
    detail = ",".join(texts)[:_MAX_DETAIL_CHARS] + joined[:_MAX_DETAIL_CHARS]
    return OperationLabel(kind=own.kind[:200], detail=detail, size=sum(map(prod, own.shapes)))


def _parameter_node(shape: Sequence[int]) -> OperationLabel:
    return OperationLabel(kind="parameter", detail=_shape_text(shape), size=prod(shape))


def _other_text(shape: Sequence[int]) -> str:
    return f"other {_shape_text(shape)}"


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


logger = logging.getLogger(__name__)

# Maximum number of calls of outermost modules whose graphs are captured. If no call's output depends on all parameters
# (some are unused, or the model is called in pieces), the graph with the most parameters is used.
_MAX_CALLS = 8

_NO_GRAPH = "Sirtaki cannot capture the graph of the model %s: the registry compares only the shapes of its parameters"


class ModelGraphRecorder:
    """Recorder of the graph of the first outermost module call whose output depends on all parameters with reduced
    gradients.

    It keeps no tensor of a forward pass, removes its hooks by itself, and never raises an error into training.
    """

    def __init__(self) -> None:
        self._parameters: list[torch.Tensor] = []
        self._best: CapturedGraph | None = None
        self._shapes: list[tuple[int, ...]] | None = None
        self._name = ""
        self._calls = 0
        # Handles of the global hook and of the hook on the called module. Any, because older torch does not type them.
        self._global_hook: Any = None
        self._module_hook: Any = None
        self._is_watching = False

    def start(self, model_parameters: Iterable[torch.Tensor]) -> None:
        """Register the hook that captures the graph in the next forward passes.

        Args:
            model_parameters: parameters whose gradients are reduced, in the model's order.
        """
        self.stop()
        self._best, self._name, self._calls = None, "", 0
        self._parameters = list(model_parameters)
        self._shapes = [tuple(parameter.shape) for parameter in reversed(self._parameters)]
        # Ignore torch.compile's warning about global hooks. The hook is removed before compilation, or has no effect in
        # compiled code.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        self._watch()

    def stop(self) -> None:
        """Remove the hooks, and drop the references to the parameters. Keep the captured graph. Idempotent."""
        self._remove_hooks()
        self._parameters = []

    @property
    def graph(self) -> ModelGraph | None:
        """Return the model's graph; None before `start()`.

        If no graph was captured, return a chain of the parameters, the last parameter first.
        """
        if self._best is not None:
            try:
                return self._best.graph
            except Exception:
                # Continue without the graph, which may be too large or have an unexpected form.
                logger.debug(_NO_GRAPH, self._name, exc_info=True)
                self._best, self._name = None, ""
        return None if self._shapes is None else shapes_graph(self._shapes)

    @property
    def model_name(self) -> str:
        """Return the class name of the module whose graph was captured; "" if no graph was captured."""
        return self._name

    def _watch(self) -> None:
        if self._global_hook is None and not something_is_compiled():
            self._global_hook = torch_module.register_module_forward_pre_hook(unless_traced(self._before))
        self._is_watching = self._global_hook is not None

    def _remove_hooks(self) -> None:
        """Remove the hooks on modules.

        If code may have been compiled, the global hook is disabled, but stays registered, because Dynamo recompiles
        when the set of global hooks changes.
        """
        self._is_watching = False
        if self._module_hook is not None:
            self._module_hook.remove()
            self._module_hook = None
        if self._global_hook is not None and not something_is_compiled():
            self._global_hook.remove()
            self._global_hook = None

    def _before(self, module: torch.nn.Module, inputs: object) -> None:
        if not self._is_watching:
            return
        try:
            self._remove_hooks()
            self._module_hook = module.register_forward_hook(unless_traced(self._after), always_call=True)
        except Exception:
            self._give_up(module)

    def _after(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        try:
            self._remove_hooks()
            self._capture(module, output)
        except Exception:
            self._give_up(module)

    def _give_up(self, module: torch.nn.Module) -> None:
        """Stop the capture after an error, because training must continue."""
        logger.debug(_NO_GRAPH, type(module).__name__, exc_info=True)
        self.stop()

    def _capture(self, module: torch.nn.Module, output: object) -> None:
        captured = capture(output, {id(parameter): tuple(parameter.shape) for parameter in self._parameters})
        if captured.n_reached > 0:
            self._calls += 1
        if captured.n_reached > (0 if self._best is None else self._best.n_reached):
            self._best, self._name = captured, _name_of(module)
        if captured.n_reached == len(self._parameters) or self._calls == _MAX_CALLS:
            self.stop()
        else:
            self._watch()


def _name_of(module: torch.nn.Module) -> str:
    """Return the class name of a model, without the wrappers of `torch.compile` and DDP."""
    inner = module.module if isinstance(module, DistributedDataParallel) else getattr(module, "_orig_mod", None)
    return type(module).__name__ if inner is None else _name_of(inner)
