"""What each rank knows only of its own part of a batch, and where such a value leaves the computation.

An abstract interpretation of the script in the order of its text. A value is a mean or a sum over the samples of a
batch, a number of samples, or something else that depends on the rank. Where one is shown, collected or decided upon,
the mean or sum over all ranks takes its place.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import libcst as cst

from .calls import Calls
from .edits import Edits
from .expressions import Expressions
from .source import Symbol, called_attribute, dotted, parameters, targets, walk
from .training import Training
from .values import ALL, BATCH, Over, Value, combined, either


class RankValues:
    """Follows values through a script, and notes in `edits` where those of all ranks have to be put together."""

    def __init__(self, training: Training, edits: Edits, *, ranks: str) -> None:
        """`ranks` is the name that `sirtaki.torch.ranks` has in the script."""
        self._training, self._edits, self._source = training, edits, training.source
        self._expressions = Expressions(training, edits, ranks=ranks)
        self._calls = Calls(training, edits, self._expressions, enter=self._function)
        self._expressions.of_call = self._calls.value
        self._fresh: set[Symbol] = set()
        self._in_loop: list[cst.For] = []  # that train
        self._branches = 0
        self._called: dict[tuple[str, tuple[Value, ...]], Value] = {}
        self._returned: list[Value] = []

    @property
    def batches(self) -> set[int]:
        """The ids of expressions that are a rank's part of a batch; others may be added before `follow()`."""
        return self._expressions.batches

    @property
    def losses(self) -> dict[Over, int]:
        """What the losses are over a batch from which backward passes begin, each with the line of one."""
        return self._calls.losses

    def follow(self) -> None:
        """The whole script."""
        self._block(self._source.module)
        called = {name for name, _ in self._called}
        for name, function in self._source.functions.items():
            if name not in called and self._training.trains(function.body):
                self._function(function, {})

    def _block(self, node: cst.CSTNode) -> None:
        for child in node.children:
            self._statement(child)

    def _statement(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.FunctionDef):
            if any(isinstance(there, cst.FunctionDef | cst.For | cst.While) for there in self._source.above(node)):
                self._closure(node)
            return
        if isinstance(node, cst.ClassDef | cst.Import | cst.ImportFrom):
            return
        if isinstance(node, cst.For):
            self._for(node)
        elif isinstance(node, cst.While):
            self._expressions.decision(node.test)
            for _ in range(2):
                self._block(node.body)
        elif isinstance(node, cst.If):
            self._if(node)
        elif isinstance(node, cst.Assign):
            self._assign(node)
        elif isinstance(node, cst.AnnAssign):
            if node.value is not None:
                self._expressions.put(node.target, self._expressions.value(node.value))
        elif isinstance(node, cst.AugAssign):
            self._add(node)
        elif isinstance(node, cst.Return):
            self._returned.append(ALL if node.value is None else self._expressions.value(node.value))
        elif isinstance(node, cst.Expr):
            self._expressions.value(node.value)
        elif isinstance(node, cst.Assert):
            self._expressions.decision(node.test)
        elif isinstance(node, cst.With):
            for item in node.items:
                self._expressions.value(item.item)
            self._block(node.body)
        elif not isinstance(node, cst.BaseExpression):
            self._block(node)

    def _closure(self, node: cst.FunctionDef) -> None:
        """A function within a function or loop, which knows what is known there."""
        if self._training.trains(node.body):
            kept, self._returned = self._returned, []
            self._block(node.body)
            self._returned = kept

    def _for(self, loop: cst.For) -> None:
        trains = loop in self._training.loops
        value = self._expressions.value(loop.iter)
        for _ in range(2):  # what one turn leaves behind is there in the next
            self._expressions.put(loop.target, BATCH if trains else replace(value, items=()))
            if isinstance(loop.target, cst.Tuple) and (_is_enumerated(loop.iter) or _are_items(loop.iter)):
                self._expressions.put(loop.target.elements[0].value, ALL)
            if trains:
                self._in_loop.append(loop)
                outer, self._fresh, branches, self._branches = self._fresh, set(), self._branches, 0
                self._block(loop.body)
                self._fresh, self._branches = outer, branches
                self._in_loop.pop()
            else:
                self._block(loop.body)
        if loop.orelse is not None:
            self._block(loop.orelse)

    def _if(self, node: cst.If) -> None:
        self._expressions.decision(node.test)
        before = dict(self._expressions.env)
        self._branches += 1
        self._block(node.body)
        taken, self._expressions.env = self._expressions.env, before
        if node.orelse is not None:
            self._statement(node.orelse)
        self._branches -= 1
        for symbol, value in taken.items():
            self._expressions.env[symbol] = either(value, self._expressions.env.get(symbol, ALL))

    def _assign(self, node: cst.Assign) -> None:
        value = self._expressions.value(node.value)
        for target in node.targets:
            symbol = self._source.symbol(target.target)
            if symbol is not None and not self._branches:
                self._fresh.add(symbol)
            lasts = isinstance(target.target, cst.Attribute) or (
                isinstance(target.target, cst.Subscript) and not self._expressions.value(target.target.value).own
            )
            if lasts and value.number and not value.count:
                value = ALL if self._expressions.share(node.value) else BATCH
            self._expressions.put(target.target, value)

    def _add(self, node: cst.AugAssign) -> None:
        value, symbol = self._expressions.value(node.value), self._source.symbol(node.target)
        there = self._expressions.value(node.target)
        if not value.own:
            return
        of_this_batch = symbol is not None and symbol in self._fresh
        in_callee = bool(self._calls.calling) and not self._in_loop and isinstance(node.target, cst.Name)
        if there.own or of_this_batch or in_callee or self._expressions.is_differentiated(node.target):
            joined = combined(node.operator, there, value) if there.own else replace(value, items=())
            self._expressions.put(node.target, joined)
            return
        if value.over in (Over.MEAN, Over.SUM) and (loop := self._sums_up_in(node)) is not None:
            name, function = self._source.code(node.target), self._expressions.function_for(value.over)
            self._edits.after(loop, f"{name} = {function}({name})")
            return
        if not self._expressions.share(node.value):
            line = self._source.line(node)
            self._edits.refuse(line, f"cannot tell whether `{self._source.code(node.value)}` is a mean or a sum")

    def _sums_up_in(self, node: cst.AugAssign) -> cst.For | None:
        """The loop behind which a sum may be put together: it begins before that, and nobody reads it inside."""
        if not self._in_loop or not isinstance(node.target, cst.Name):
            return None
        loop, name = self._in_loop[-1], node.target.value
        if not self._source.contains(loop, node) or not isinstance(node.operator, cst.AddAssign):
            return None
        uses = [there for there in self._source.all(cst.Name, loop) if there.value == name]
        if uses != [node.target]:
            return None
        siblings = list(self._source.parent(loop).children)
        for sibling in siblings[: siblings.index(loop)]:
            for statement in sibling.children:
                if isinstance(statement, cst.Assign) and any(_assigns(target, name) for target in targets(statement)):
                    return loop
        return None

    def _function(self, function: cst.FunctionDef, given: dict[str, Value]) -> Value:
        """What a function returns for such arguments."""
        scope = self._source.name_of(function)
        names = [param.name.value for param in parameters(function)]
        key = (scope, tuple(given.get(name, ALL) for name in names))
        if scope in self._calls.calling:
            return BATCH if any(value.own for value in given.values()) else ALL
        if key in self._called:
            return self._called[key]
        for name in names:
            self._expressions.env[scope, name] = given.get(name, ALL)
        own = any(value.own for value in given.values())
        kept = (self._returned, self._fresh, self._in_loop, self._branches)
        self._returned, self._fresh, self._branches = [], set(), 0
        self._in_loop = []
        if own:
            self._calls.calling.append(scope)
        self._block(function.body)
        if own:
            self._calls.calling.pop()
        returned = self._returned
        self._returned, self._fresh, self._in_loop, self._branches = kept
        result = functools.reduce(either, returned) if returned else ALL
        self._called[key] = result
        return result


def _assigns(target: cst.BaseExpression, name: str) -> bool:
    return any(isinstance(node, cst.Name) and node.value == name for node in walk(target))


def _are_items(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Call) and called_attribute(node) == "items"


def _is_enumerated(node: cst.BaseExpression) -> bool:
    """Whether the first of what a loop yields is a number that counts."""
    if not isinstance(node, cst.Call) or not node.args:
        return False
    return dotted(node.func) == "enumerate" or (dotted(node.func) != "zip" and _is_enumerated(node.args[0].value))
