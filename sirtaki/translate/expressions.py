"""The values of a script's expressions, and how those of all ranks are put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import libcst as cst

from .edits import Edits
from .source import Symbol
from .training import Training
from .values import ALL, BATCH, COUNT, Over, Value, all_alike, collected, combined, either

SAME_VALUE = {
    "item", "detach", "cpu", "cuda", "to", "clone", "float", "double", "half", "numpy", "tolist", "squeeze",
    "contiguous", "data", "mean_", "requires_grad_", "int", "long", "bfloat16", "type",
}  # fmt: skip
STRUCTURE = {"ndim", "dtype", "device", "is_cuda", "requires_grad", "is_sparse", "grad_fn"}


class Expressions:
    """What is known of names and expressions at one place of a script.

    Attributes:
        env: what names hold there.
        batches: ids of expressions that are a rank's part of a batch.
        of_call: the value of a call; set by who follows calls.
    """

    of_call: Callable[[cst.Call], Value]

    def __init__(self, training: Training, edits: Edits, *, ranks: str) -> None:
        """`ranks` is the name that `sirtaki.torch.ranks` has in the script."""
        self._training, self._source = training, training.source
        self._edits, self._ranks = edits, ranks
        self.env: dict[Symbol, Value] = {}
        self.batches: set[int] = set()
        self._wrapped: dict[int, Over] = {}
        self._losses = {
            name.value
            for call in training.backward_passes()
            if isinstance(call.func, cst.Attribute)
            for name in self._source.all(cst.Name, call.func.value)
        }

    def put(self, target: cst.BaseExpression, value: Value) -> None:
        """Something is assigned."""
        if isinstance(target, cst.Tuple | cst.List):
            for position, element in enumerate(target.elements):
                if value.shape:
                    self.put(element.value, ALL if position else COUNT)
                    continue
                known = len(value.items) == len(target.elements)
                self.put(element.value, value.items[position] if known else replace(value, items=()))
        elif isinstance(target, cst.Subscript):
            if value.own:
                self.put(target.value, Value(over=Over.UNKNOWN))
        else:
            symbol = self._source.symbol(target)
            if symbol is not None:
                is_loss = value.over is Over.UNKNOWN and self.is_differentiated(target)
                self.env[symbol] = replace(value, over=Over.MEAN) if is_loss else value

    def is_differentiated(self, node: cst.BaseExpression) -> bool:
        """Whether backward passes begin from what has this name."""
        return isinstance(node, cst.Name) and node.value in self._losses

    def decision(self, test: cst.BaseExpression) -> None:
        """What all ranks must find alike."""
        value = self.value(test)
        if value.own and not self.share(test):
            text = self._source.code(test)
            self._edits.refuse(self._source.line(test), f"ranks may decide differently, each by its own data: `{text}`")

    def share(self, node: cst.BaseExpression) -> bool:
        """Puts together the largest parts of an expression that are means or sums; False if anything else is left."""
        value = self.value(node)
        if not value.own:
            return True
        literal = isinstance(node, cst.List | cst.Dict | cst.Tuple | cst.FormattedString)
        if value.over in (Over.MEAN, Over.SUM) and not value.items and not literal:
            self._wrap(node, value.over)
            return True
        parts = [child for child in _parts(node) if self.value(child).own]
        if isinstance(node, cst.Name | cst.Lambda) or not parts:
            return False
        left = [part for part in parts if not self.share(part)]
        return not left

    def _wrap(self, node: cst.BaseExpression, over: Over) -> None:
        earlier = self._wrapped.setdefault(id(node), over)
        if earlier is not over:
            self._edits.refuse(self._source.line(node), "is once a mean and once a sum, depending on the caller")
        self._edits.wrap(node, self.function_for(over))

    def function_for(self, over: Over) -> str:
        """What puts such values of all ranks together."""
        return f"{self._ranks}.average" if over is Over.MEAN else f"{self._ranks}.total"

    def value(self, node: cst.BaseExpression) -> Value:
        """Of an expression."""
        if id(node) in self.batches:
            return BATCH
        if isinstance(node, cst.Name):
            symbol = self._source.symbol(node)
            return ALL if symbol is None else self.env.get(symbol, ALL)
        if isinstance(node, cst.Attribute):
            return self._of_attribute(node)
        if isinstance(node, cst.Call):
            return self.of_call(node)
        if isinstance(node, cst.Subscript):
            return self._of_subscript(node)
        if isinstance(node, cst.BinaryOperation):
            return combined(node.operator, self.value(node.left), self.value(node.right))
        if isinstance(node, cst.UnaryOperation):
            inner = self.value(node.expression)
            return inner if isinstance(node.operator, cst.Minus | cst.Plus) or not inner.own else BATCH
        if isinstance(node, cst.IfExp):
            self.decision(node.test)
            return either(self.value(node.body), self.value(node.orelse))
        if isinstance(node, cst.Tuple | cst.List):
            items = tuple(self.value(element.value) for element in node.elements)
            return Value(items=items) if isinstance(node, cst.Tuple) else all_alike(items)
        if isinstance(node, cst.Dict):
            return all_alike([self.value(element.value) for element in node.elements])
        if isinstance(node, cst.Comparison):
            structural = all(isinstance(there.operator, cst.Is | cst.IsNot) for there in node.comparisons)
            parts = [self.value(part) for part in _parts(node)]
            return ALL if structural else self.any(*parts)
        if isinstance(node, cst.NamedExpr):
            value = self.value(node.value)
            self.put(node.target, value)
            return value
        if isinstance(node, cst.Lambda):
            return ALL
        if isinstance(node, cst.ListComp | cst.GeneratorExp | cst.SetComp | cst.DictComp):
            return self._of_comprehension(node)
        value = self.any(*(self.value(part) for part in _parts(node)))
        return replace(value, number=isinstance(node, cst.FormattedString))

    def any(self, *values: Value) -> Value:
        """Of what is computed from such values in a way that is not known."""
        return BATCH if any(value.own for value in values) else ALL

    def _of_comprehension(self, node: cst.BaseComp) -> Value:
        element = node.for_in
        self.put(element.target, BATCH if element in self._training.loops else self.any(self.value(element.iter)))
        if isinstance(node, cst.DictComp):
            return self.any(self.value(node.key), self.value(node.value))
        assert isinstance(node, cst.ListComp | cst.GeneratorExp | cst.SetComp)
        return collected(self.value(node.elt))

    def _of_attribute(self, node: cst.Attribute) -> Value:
        symbol = self._source.symbol(node)
        if symbol is not None:
            return self.env.get(symbol, ALL)
        base, name = self.value(node.value), node.attr.value
        if not base.own or name in STRUCTURE:
            return ALL
        if name == "shape":
            return Value(over=Over.UNKNOWN, shape=True)
        if name == "loss":
            return Value(over=Over.MEAN)
        return base if name in SAME_VALUE else BATCH

    def _of_subscript(self, node: cst.Subscript) -> Value:
        base = self.value(node.value)
        index = node.slice[0].slice if len(node.slice) == 1 else None
        if base.shape and isinstance(index, cst.Index):
            return COUNT if self._source.code(index) == "0" else ALL
        if base.items and isinstance(index, cst.Index) and self._source.code(index).isdigit():
            position = int(self._source.code(index))
            return base.items[position] if position < len(base.items) else ALL
        if base.own:
            return base
        return self.any(*(self.value(there) for there in self._source.all(cst.Name, node) if there is not node.value))


def _parts(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """The expressions that one consists of immediately."""
    if isinstance(node, cst.Attribute | cst.Arg):  # not the name behind the dot, or before the `=`
        return [node.value]
    found: list[cst.BaseExpression] = []
    for child in node.children:
        if isinstance(child, cst.BaseExpression):
            found.append(child)
        else:
            found += _parts(child)
    return found
