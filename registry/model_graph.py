"""The graph of a model, recorded from autograd in its first forward pass and coarsened."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel

from sirtaki.fields import MAX_LABEL_CHARS
from sirtaki.uncompiled import something_is_compiled, unless_traced

from .graph import ModelGraph, OperationLabel, model_graph, topological_order

if TYPE_CHECKING:
    import networkx as nx

# Of an operation's parameters or trailing operations, only the first characters are kept: the rest is in its size.
_MAX_DETAIL_CHARS = MAX_LABEL_CHARS // 2

_SHAPE_ONLY = {
    *("Alias", "AsStrided", "Clone", "Expand", "Permute", "Reshape", "ReshapeAlias", "Select", "Slice", "Squeeze"),
    *("T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View", "ViewAsReal"),
}

# An operation with more parameters than this hides a part of the model (a compiled region, a fused RNN):
# its parameters are strung up as a chain instead.
_OPAQUE_PARAMETERS = 16


def shapes_graph(shapes: Sequence[Sequence[int]]) -> ModelGraph:
    """The graph of a model of which only the parameters' shapes are known, in their gradients' order: a chain."""
    nodes = [_parameter_node(shape) for shape in shapes]
    return model_graph(nodes, pairwise(range(len(nodes))))


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """What was found behind an output, without a tensor.

    Attributes:
        operations: by number, in the order in which they were looked at.
        edges: from input to output, by these numbers.
        missing: shapes of parameters that were not reached.
        n_reached: parameters of interest that the output depends on.
    """

    operations: Mapping[int, AutogradNode]
    edges: Sequence[tuple[int, int]]
    missing: Sequence[tuple[int, ...]]
    n_reached: int

    @cached_property
    def graph(self) -> ModelGraph:
        """The coarsened graph, with parameters that were not reached as a chain beside it.

        It is made when it is asked for: networkx may still be loading while the model runs for the first time.
        """
        import networkx as nx

        # Its nodes bear what operations are, and `tail`, the kinds of those that have joined them. What is found first
        # comes first, among neighbours, too.
        operations = nx.DiGraph()
        for number, own in self.operations.items():
            operations.add_node(number, kind=own.kind, shapes=[*own.shapes], others=[*own.others], tail=[])
        operations.add_edges_from(self.edges)
        _fold_parameters(operations)
        _bypass_shape_only(operations)
        _collapse_chains(operations)
        return _coarse(operations, self.missing)


class AutogradNode(NamedTuple):
    """An operation, or a parameter, in autograd's graph.

    Attributes:
        kind: its name.
        shapes: of the parameters of interest that it is.
        others: of parameters that it is, of no interest.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...] = ()
    others: tuple[tuple[int, ...], ...] = ()


def capture(outputs: object, parameters: Mapping[int, tuple[int, ...]]) -> CapturedGraph:
    """The graph behind `outputs`, any nesting of tensors in dicts, sequences and objects with fields.

    Other parameters count for no size and are told apart: the same model of which less is reduced is another graph.

    Args:
        outputs: what a module returned; nothing of it is kept.
        parameters: shape of each parameter of interest by `id`. Those that no output depends on (unused ones, or
            hidden in a checkpointed block) are added as a chain, in this order.
    """
    found: dict[Any, int] = {}  # keeps autograd's nodes alive while walking, else their identities would be reused
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


def _fold_parameters(operations: nx.DiGraph) -> None:
    """A parameter, or a reshaped one, with a single user becomes part of it; a shared one stays a node."""
    waiting = [number for number, kind in operations.nodes(data="kind") if kind == "parameter"]
    while waiting:
        number = waiting.pop()
        own = operations.nodes[number]
        if operations.pred[number] or len(operations.succ[number]) != 1:
            continue
        if own["kind"] != "parameter" and own["kind"] not in _SHAPE_ONLY:
            continue
        (user,) = operations.succ[number]
        for name in ("shapes", "others"):
            operations.nodes[user][name].extend(own[name])
        operations.remove_node(number)
        if operations.nodes[user]["kind"] in _SHAPE_ONLY:
            waiting.append(user)


def _bypass_shape_only(operations: nx.DiGraph) -> None:
    for number, own in list(operations.nodes(data=True)):
        sources, targets = list(operations.pred[number]), list(operations.succ[number])
        if own["kind"] in _SHAPE_ONLY and not (own["shapes"] or own["others"]) and len(sources) <= 1:
            operations.remove_node(number)
            operations.add_edges_from(product(sources, targets))


def _collapse_chains(operations: nx.DiGraph) -> None:
    """An operation without parameters joins the one before it if each is the other's only neighbour there."""
    for number, own in reversed(
        list(operations.nodes(data=True))
    ):  # from the inputs on, so that a run grows at its end
        sources, targets = list(operations.pred[number]), list(operations.succ[number])
        if own["shapes"] or own["others"] or len(sources) != 1 or len(operations.succ[sources[0]]) != 1:
            continue
        operations.nodes[sources[0]]["tail"].extend([own["kind"], *own["tail"]])
        operations.remove_node(number)
        operations.add_edges_from(product(sources, targets))


def _coarse(operations: nx.DiGraph, missing: Sequence[tuple[int, ...]]) -> ModelGraph:
    """The model's graph from inputs to outputs, as it computes: so graphs read, and align with each other, better."""
    forward = operations.__class__()  # inputs were found last
    forward.add_nodes_from(reversed(list(operations)))
    forward.add_edges_from(operations.edges)
    nodes: list[OperationLabel] = []
    ends: dict[int, tuple[int, int]] = {}
    edges: list[tuple[int, int]] = []
    for number in topological_order(forward):
        own, start = operations.nodes[number], len(nodes)
        if len(own["shapes"]) + len(own["others"]) > _OPAQUE_PARAMETERS:
            nodes.extend(_parameter_node(shape) for shape in own["shapes"])
            nodes.extend(OperationLabel(kind="parameter", detail=_other_text(shape)) for shape in own["others"])
        else:
            nodes.append(_operation_node(**own))
        ends[number] = start, len(nodes) - 1
        edges.extend(pairwise(range(start, len(nodes))))
    edges.extend((ends[a][1], ends[b][0]) for a, b in operations.edges)
    edges.extend(pairwise(range(len(nodes), len(nodes) + len(missing))))
    return model_graph([*nodes, *map(_parameter_node, missing)], edges)


def _operation_node(
    kind: str, shapes: list[tuple[int, ...]], others: list[tuple[int, ...]], tail: Sequence[str]
) -> OperationLabel:
    # Sorted: a weight's and its bias' shape say the same in either order, and torch versions differ in it.
    texts = [*sorted(map(_shape_text, shapes)), *sorted(map(_other_text, others))]
    joined = "".join("+" + name for name in tail)
    detail = ",".join(texts)[:_MAX_DETAIL_CHARS] + joined[:_MAX_DETAIL_CHARS]
    return OperationLabel(kind=kind[:200], detail=detail, size=sum(map(prod, shapes)))


def _parameter_node(shape: Sequence[int]) -> OperationLabel:
    return OperationLabel(kind="parameter", detail=_shape_text(shape), size=prod(shape))


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
        self._shapes: list[tuple[int, ...]] | None = None
        self._name = ""
        self._calls = 0
        # Handles of hooks on all modules and on the one that is called. Any: older versions of torch do not type them.
        self._everywhere: Any = None
        self._inside: Any = None
        self._is_watching = False

    def start(self, model_parameters: Iterable[torch.Tensor]) -> None:
        """Begins to watch; `model_parameters` are those whose gradients are reduced, in the model's order."""
        self.stop()
        self._best, self._name, self._calls = None, "", 0
        self._parameters = list(model_parameters)
        self._shapes = [tuple(parameter.shape) for parameter in reversed(self._parameters)]
        # True, and of no consequence: the hook is gone before anything is compiled, or does nothing in what is.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        self._watch()

    def stop(self) -> None:
        """Takes the hooks away and lets go of the parameters; what was found stays. Idempotent."""
        self._remove_hooks()
        self._parameters = []

    @property
    def graph(self) -> ModelGraph | None:
        """The model's graph; the chain of its parameters, last first, if none was seen; None before `start()`."""
        if self._best is not None:
            try:
                return self._best.graph
            except Exception:  # of too many operations, or whatever else a model has behind its output
                logger.debug("no graph of %s: its parameters stand in for it", self._name, exc_info=True)
                self._best, self._name = None, ""
        return None if self._shapes is None else shapes_graph(self._shapes)

    @property
    def model_name(self) -> str:
        """Class name of the module whose output was used, empty if none was."""
        return self._name

    def _watch(self) -> None:
        if self._everywhere is None and not something_is_compiled():
            self._everywhere = torch_module.register_module_forward_pre_hook(unless_traced(self._before))
        self._is_watching = self._everywhere is not None

    def _remove_hooks(self) -> None:
        """Remove the hooks. One on all modules stays, and does nothing, if something may have been compiled with it.

        Dynamo compiles anew what was compiled when there were other hooks on all modules.
        """
        self._is_watching = False
        if self._inside is not None:
            self._inside.remove()
            self._inside = None
        if self._everywhere is not None and not something_is_compiled():
            self._everywhere.remove()
            self._everywhere = None

    def _before(self, module: torch.nn.Module, inputs: object) -> None:
        if not self._is_watching:
            return
        try:
            self._remove_hooks()
            self._inside = module.register_forward_hook(unless_traced(self._after), always_call=True)
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


def _name_of(module: torch.nn.Module) -> str:
    """Class name of a model, looked up inside a compiled one and inside DDP's."""
    inner = module.module if isinstance(module, DistributedDataParallel) else getattr(module, "_orig_mod", None)
    return type(module).__name__ if inner is None else _name_of(inner)
