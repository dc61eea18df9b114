"""What each rank knows only of its own part of a batch, and where such a value leaves the computation.

An abstract interpretation of the script in the order of its text. A value is a mean or a sum over the samples of a batch, a
number of samples, or something else that depends on the rank. Where one is shown, collected or decided upon, the mean or
sum over all ranks takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import libcst as cst

from .edits import Edits
from .flows import Kind
from .source import Symbol, argument, called_attribute, dotted, parameters, targets, walk
from .training import Training


class Over(Enum):
    """What a value of a rank is over the samples of its part."""

    ALL = "the same on all ranks"
    MEAN = "a mean"
    SUM = "a sum"
    UNKNOWN = "something else"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What is known of an expression.

    Attributes:
        over: see there.
        number: it is Python's, not a tensor.
        count: it counts samples, as `x.size(0)` does.
        shape: it is the shape of a batch.
        items: of a tuple.
    """

    over: Over = Over.ALL
    number: bool = False
    count: bool = False
    shape: bool = False
    items: tuple["Value", ...] = ()

    @property
    def own(self) -> bool:
        """It differs between ranks."""
        return self.over is not Over.ALL or any(item.own for item in self.items)


ALL = Value()
BATCH = Value(over=Over.UNKNOWN)
COUNT = Value(over=Over.SUM, number=True, count=True)

SHOWS = {
    "print", "format", "info", "debug", "warning", "error", "log", "add_scalar", "add_scalars", "set_postfix", "write",
    "set_postfix_str", "set_description", "append", "extend", "update", "put",
}  # fmt: skip
"""Functions and methods that take what they are given out of the computation."""

SAME_VALUE = {
    "item", "detach", "cpu", "cuda", "to", "clone", "float", "double", "half", "numpy", "tolist", "squeeze", "contiguous",
    "data", "mean_", "requires_grad_", "int", "long", "bfloat16", "type",
}  # fmt: skip
STRUCTURE = {"ndim", "dtype", "device", "is_cuda", "requires_grad", "is_sparse", "grad_fn"}
ABOUT = {"isinstance", "type", "hasattr", "id", "callable", "range", "enumerate", "zip", "issubclass"}


class RankValues:
    """Follows values through a script, and notes in `edits` where those of all ranks have to be put together.

    Attributes:
        batches: ids of expressions that are a rank's part of a batch.
        losses: what the losses are over a batch from which backward passes begin, each with the line of one.
    """

    def __init__(self, training: Training, edits: Edits, *, ranks: str) -> None:
        """`ranks` is the name that `sirtaki.torch.ranks` has in the script."""
        self._training, self._flows, self._edits, self._ranks = training, training.flows, edits, ranks
        self._source = training.source
        self._env: dict[Symbol, Value] = {}
        self._fresh: set[Symbol] = set()
        self._in_loop: list[cst.For] = []
        self._branches = 0
        self._calling: list[str] = []
        self._called: dict[tuple[str, tuple[Value, ...]], Value] = {}
        self._returned: list[Value] = []
        self._wrapped: dict[int, Over] = {}
        self.losses: dict[Over, int] = {}
        self.batches: set[int] = set()
        self._lost = {
            name.value
            for call in training.backward_passes()
            if isinstance(call.func, cst.Attribute)
            for name in self._source.all(cst.Name, call.func.value)
        }

    def follow(self) -> None:
        """The whole script."""
        self._block(self._source.module)
        called = {name for name, _ in self._called}
        for name, function in self._source.functions.items():
            if name not in called and self._training.trains(function.body):
                self._function(function, {})

    # ── statements ───────────────────────────────────────────────────────────────────────────────────────────────

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
            self._decision(node.test)
            for _ in range(2):
                self._block(node.body)
        elif isinstance(node, cst.If):
            self._if(node)
        elif isinstance(node, cst.Assign):
            self._assign(node)
        elif isinstance(node, cst.AnnAssign):
            if node.value is not None:
                self._put(node.target, self._value(node.value))
        elif isinstance(node, cst.AugAssign):
            self._add(node)
        elif isinstance(node, cst.Return):
            self._returned.append(ALL if node.value is None else self._value(node.value))
        elif isinstance(node, cst.Expr):
            self._value(node.value)
        elif isinstance(node, cst.Assert):
            self._decision(node.test)
        elif isinstance(node, cst.With):
            for item in node.items:
                self._value(item.item)
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
        value = self._value(loop.iter)
        for _ in range(2):  # what one turn leaves behind is there in the next
            self._put(loop.target, BATCH if trains else replace(value, items=()))
            if isinstance(loop.target, cst.Tuple) and _is_enumerated(loop.iter):
                self._put(loop.target.elements[0].value, ALL)
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
        self._decision(node.test)
        before = dict(self._env)
        self._branches += 1
        self._block(node.body)
        taken, self._env = self._env, before
        if node.orelse is not None:
            self._statement(node.orelse)
        self._branches -= 1
        for symbol, value in taken.items():
            self._env[symbol] = _either(value, self._env.get(symbol, ALL))

    def _assign(self, node: cst.Assign) -> None:
        value = self._value(node.value)
        for target in node.targets:
            symbol = self._source.symbol(target.target)
            if symbol is not None and not self._branches:
                self._fresh.add(symbol)
            if isinstance(target.target, cst.Attribute) or (
                isinstance(target.target, cst.Subscript) and not self._value(target.target.value).own
            ):
                if value.number and not value.count:  # it stays there longer than the batch
                    self._share(node.value)
                    value = ALL
            self._put(target.target, value)

    def _put(self, target: cst.BaseExpression, value: Value) -> None:
        if isinstance(target, cst.Tuple | cst.List):
            for position, element in enumerate(target.elements):
                if value.shape:
                    self._put(element.value, ALL if position else COUNT)
                    continue
                known = len(value.items) == len(target.elements)
                self._put(element.value, value.items[position] if known else replace(value, items=()))
        elif isinstance(target, cst.Subscript):
            if value.own:
                self._put(target.value, Value(over=Over.UNKNOWN))
        else:
            symbol = self._source.symbol(target)
            if symbol is not None:
                is_loss = value.over is Over.UNKNOWN and self._is_differentiated(target)
                self._env[symbol] = replace(value, over=Over.MEAN) if is_loss else value

    def _add(self, node: cst.AugAssign) -> None:
        value, symbol = self._value(node.value), self._source.symbol(node.target)
        there = self._value(node.target)
        if not value.own:
            return
        of_this_batch = symbol is not None and symbol in self._fresh
        in_callee = bool(self._calling) and not self._in_loop and isinstance(node.target, cst.Name)
        if there.own or of_this_batch or in_callee or self._is_differentiated(node.target):
            joined = self._combined(node.operator, there, value) if there.own else replace(value, items=())
            self._put(node.target, joined)
            return
        if value.over in (Over.MEAN, Over.SUM) and (loop := self._sums_up_in(node)) is not None:
            name, function = self._source.code(node.target), self._function_for(value.over)
            self._edits.after(loop, f"{name} = {function}({name})")
            return
        if not self._share(node.value):
            line = self._source.line(node)
            self._edits.refuse(line, f"cannot tell whether `{self._source.code(node.value)}` is a mean or a sum")

    def _is_differentiated(self, node: cst.BaseExpression) -> bool:
        return isinstance(node, cst.Name) and node.value in self._lost

    def _sums_up_in(self, node: cst.AugAssign) -> cst.For | None:
        """The loop behind which a sum may be put together: it begins at nothing before it, and nobody reads it inside."""
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

    # ── where values leave ───────────────────────────────────────────────────────────────────────────────────────

    def _decision(self, test: cst.BaseExpression) -> None:
        """What all ranks must find alike."""
        value = self._value(test)
        if value.own and not self._share(test):
            text = self._source.code(test)
            self._edits.refuse(self._source.line(test), f"ranks may decide differently, each by its own data: `{text}`")

    def _share(self, node: cst.BaseExpression) -> bool:
        """Puts together the largest parts of an expression that are means or sums; False if anything else is left."""
        value = self._value(node)
        if not value.own:
            return True
        if value.over in (Over.MEAN, Over.SUM) and not value.items:
            self._wrap(node, value.over)
            return True
        parts = [child for child in _parts(node) if self._value(child).own]
        if isinstance(node, cst.Name | cst.Lambda) or not parts:
            return False
        return all([self._share(part) for part in parts])

    def _wrap(self, node: cst.BaseExpression, over: Over) -> None:
        earlier = self._wrapped.setdefault(id(node), over)
        if earlier is not over:
            self._edits.refuse(self._source.line(node), "is once a mean and once a sum, depending on the caller")
        self._edits.wrap(node, self._function_for(over))

    def _function_for(self, over: Over) -> str:
        return f"{self._ranks}.average" if over is Over.MEAN else f"{self._ranks}.total"

    # ── expressions ──────────────────────────────────────────────────────────────────────────────────────────────

    def _value(self, node: cst.BaseExpression) -> Value:
        if id(node) in self.batches:
            return BATCH
        if isinstance(node, cst.Name):
            symbol = self._source.symbol(node)
            return ALL if symbol is None else self._env.get(symbol, ALL)
        if isinstance(node, cst.Attribute):
            return self._of_attribute(node)
        if isinstance(node, cst.Call):
            return self._of_call(node)
        if isinstance(node, cst.Subscript):
            return self._of_subscript(node)
        if isinstance(node, cst.BinaryOperation):
            return self._combined(node.operator, self._value(node.left), self._value(node.right))
        if isinstance(node, cst.UnaryOperation):
            inner = self._value(node.expression)
            return inner if isinstance(node.operator, cst.Minus | cst.Plus) or not inner.own else BATCH
        if isinstance(node, cst.IfExp):
            self._decision(node.test)
            return _either(self._value(node.body), self._value(node.orelse))
        if isinstance(node, cst.Tuple | cst.List):
            items = tuple(self._value(element.value) for element in node.elements)
            return Value(items=items) if isinstance(node, cst.Tuple) else self._any(*items)
        if isinstance(node, cst.Comparison):
            structural = all(isinstance(there.operator, cst.Is | cst.IsNot) for there in node.comparisons)
            parts = [self._value(part) for part in _parts(node)]
            return ALL if structural else self._any(*parts)
        if isinstance(node, cst.NamedExpr):
            value = self._value(node.value)
            self._put(node.target, value)
            return value
        if isinstance(node, cst.Lambda):
            return ALL
        if isinstance(node, cst.ListComp | cst.GeneratorExp | cst.SetComp | cst.DictComp):
            return self._of_comprehension(node)
        value = self._any(*(self._value(part) for part in _parts(node)))
        return replace(value, number=isinstance(node, cst.FormattedString))

    def _any(self, *values: Value) -> Value:
        return BATCH if any(value.own for value in values) else ALL

    def _of_comprehension(self, node: cst.BaseComp) -> Value:
        element = node.for_in
        self._put(element.target, self._any(self._value(element.iter)))
        if isinstance(node, cst.DictComp):
            return self._any(self._value(node.key), self._value(node.value))
        assert isinstance(node, cst.ListComp | cst.GeneratorExp | cst.SetComp)
        return self._any(self._value(node.elt))

    def _of_attribute(self, node: cst.Attribute) -> Value:
        symbol = self._source.symbol(node)
        if symbol is not None:
            return self._env.get(symbol, ALL)
        base, name = self._value(node.value), node.attr.value
        if not base.own or name in STRUCTURE:
            return ALL
        if name == "shape":
            return Value(over=Over.UNKNOWN, shape=True)
        if name == "loss":
            return Value(over=Over.MEAN)
        return base if name in SAME_VALUE else BATCH

    def _of_subscript(self, node: cst.Subscript) -> Value:
        base = self._value(node.value)
        index = node.slice[0].slice if len(node.slice) == 1 else None
        if base.shape and isinstance(index, cst.Index):
            return COUNT if self._source.code(index) == "0" else ALL
        if base.items and isinstance(index, cst.Index) and self._source.code(index).isdigit():
            position = int(self._source.code(index))
            return base.items[position] if position < len(base.items) else ALL
        inside = [self._value(there) for there in self._source.all(cst.Name, node) if there is not node.value]
        return self._any(base, *inside)

    def _combined(self, operator: cst.CSTNode, left: Value, right: Value) -> Value:
        """Of an arithmetical operation."""
        if not left.own and not right.own:
            return ALL
        over = Over.UNKNOWN
        kinds = (left.over, right.over)
        if isinstance(operator, cst.Add | cst.Subtract | cst.AddAssign | cst.SubtractAssign):
            if left.over is right.over or (Over.MEAN in kinds and Over.ALL in kinds):
                over = Over.MEAN if Over.MEAN in kinds else left.over
        elif isinstance(operator, cst.Multiply | cst.MultiplyAssign):
            if Over.ALL in kinds:
                over = left.over if right.over is Over.ALL else right.over
            elif set(kinds) == {Over.MEAN, Over.SUM}:
                over = Over.SUM
        elif isinstance(operator, cst.Divide | cst.DivideAssign):
            if right.over is Over.ALL:
                over = left.over
            elif kinds == (Over.SUM, Over.SUM):
                over = Over.MEAN
        number = all(value.number for value in (left, right) if value.own)
        return Value(over=over, number=number, count=left.count and right.count)

    def _of_call(self, call: cst.Call) -> Value:
        if call in self._training.reads:
            return BATCH
        name = called_attribute(call) or (call.func.value if isinstance(call.func, cst.Name) else "")
        values = [self._value(arg.value) for arg in call.args]
        own = any(value.own for value in values)
        if isinstance(call.func, cst.Attribute):
            base = self._value(call.func.value)
            if base.own and not self._flows.callees(call):
                return self._of_method(call, name, base)
        if not own:
            for function in self._flows.callees(call):
                if self._training.trains(function.body) or not self._calling:
                    return self._function(function, {})
            return ALL
        if name in SHOWS and not self._flows.holds(call.func, Kind.INSTANCE):
            return self._shown(call, name, values)
        full = self._source.full_name(call.func)
        if name in ABOUT:
            return ALL
        if name == "scale" and self._flows.holds(call.func.value, Kind.SCALER):  # type: ignore[union-attr]  # a method
            return values[0]
        if name == "len" and values:
            return COUNT if values[0].own else ALL
        if name in ("float", "int", "round", "sum") and self._source.is_builtin(full):
            return replace(values[0], number=True)
        if name in ("mean", "sum") and full.startswith("torch.") and len(call.args) == 1:
            return Value(over=Over.MEAN if name == "mean" else Over.SUM)
        loss = self._of_loss(call, full, name)
        if loss is not None:
            return loss
        functions = self._flows.callees(call)
        if functions:
            return self._of_own_function(call, functions, values)
        is_torchs = full.startswith(("torch.", "numpy.")) and not any(value.number and not value.count for value in values)
        if not is_torchs and any(value.number and not value.count for value in values):
            if not isinstance(call.func, cst.Attribute) or not self._value(call.func.value).own:
                left = [arg for arg, v in zip(call.args, values, strict=True) if v.own and not self._share(arg.value)]
                return BATCH if left else ALL
        return BATCH

    def _of_method(self, call: cst.Call, name: str, base: Value) -> Value:
        """Of a method of something that differs between ranks."""
        if name == "format":  # no tensor's
            return self._shown(call, name, [self._value(arg.value) for arg in call.args])
        if name in ("item", "tolist", "numpy"):
            return replace(base, number=True, items=())
        if name in SAME_VALUE:
            return base
        if name in ("mean", "sum") and not call.args:
            return Value(over=Over.MEAN if name == "mean" else Over.SUM)
        if name in ("size", "numel", "nelement"):
            first = self._source.code(call.args[0].value) if call.args else ""
            if name == "size" and not call.args:
                return Value(over=Over.UNKNOWN, shape=True)
            return COUNT if first in ("", "0") else ALL
        if name == "backward":
            self.losses.setdefault(base.over, self._source.line(call))
        return ALL if name in ("dim", "backward", "ndimension", "is_floating_point", "get_device") else BATCH

    def _of_loss(self, call: cst.Call, full: str, name: str) -> Value | None:
        """Of a call of a loss, whose reduction is a mean unless it says otherwise."""
        made = self._flows.holds(call.func, Kind.LOSS)
        is_torchs = full.startswith("torch.nn.functional.") and ("loss" in name or "entropy" in name or name == "kl_div")
        if not made and not is_torchs:
            named = "loss" in name.lower() or "criterion" in name.lower()
            return Value(over=Over.MEAN) if named and not self._flows.callees(call) else None
        reductions = {self._reduction(site.call) for site in made} or {self._reduction(call)}
        if reductions <= {"mean", "batchmean"}:
            return Value(over=Over.MEAN)
        return Value(over=Over.SUM) if reductions == {"sum"} else BATCH

    def _reduction(self, call: cst.Call) -> str:
        given = argument(call, "reduction")
        return "mean" if given is None else self._source.code(given).strip("\"'")

    def _of_own_function(self, call: cst.Call, functions: list[cst.FunctionDef], values: list[Value]) -> Value:
        """Of the script's own: it is followed inside, unless all it gets is numbers to remember."""
        is_module = any(self._source.derives(self._source.class_of(function), "Module") for function in functions)
        own = [value for value in values if value.own]
        if all(value.number for value in own) and not is_module and not self._trains(functions):
            for arg, value in zip(call.args, values, strict=True):
                if value.own and not self._share(arg.value):
                    self._edits.note(self._source.line(call), f"`{self._source.code(arg.value)}` is each rank's own")
            return ALL
        results = []
        for function in functions:
            bound = dict(self._flows.bound(call, function))
            results.append(self._function(function, {name: self._value(arg) for name, arg in bound.items()}))
        result = results[0]
        for other in results[1:]:
            result = _either(result, other)
        return BATCH if is_module and not result.own else result

    def _trains(self, functions: list[cst.FunctionDef]) -> bool:
        return any(self._training.trains(function.body) for function in functions)

    def _function(self, function: cst.FunctionDef, given: dict[str, Value]) -> Value:
        """What a function returns for such arguments."""
        scope = self._source.name_of(function)
        names = [param.name.value for param in parameters(function)]
        key = (scope, tuple(given.get(name, ALL) for name in names))
        if scope in self._calling:
            return BATCH if any(value.own for value in given.values()) else ALL
        if key in self._called:
            return self._called[key]
        for name in names:
            self._env[scope, name] = given.get(name, ALL)
        own = any(value.own for value in given.values())
        kept = (self._returned, self._fresh, self._in_loop, self._branches)
        self._returned, self._fresh, self._branches = [], set(), 0
        self._in_loop = []
        if own:
            self._calling.append(scope)
        self._block(function.body)
        if own:
            self._calling.pop()
        returned = self._returned
        self._returned, self._fresh, self._in_loop, self._branches = kept
        result = ALL
        for value in returned:
            result = value if value is returned[0] else _either(result, value)
        self._called[key] = result
        return result

    def _shown(self, call: cst.Call, name: str, values: list[Value]) -> Value:
        for arg, value in zip(call.args, values, strict=True):
            if not value.own or self._share(arg.value):
                continue
            text = self._source.code(arg.value)
            if name in ("append", "extend", "update", "put") and isinstance(call.func, cst.Attribute):
                self._put(call.func.value, BATCH)
            else:
                self._edits.note(self._source.line(call), f"`{text}` is shown as rank 0 has it")
        return ALL


def _assigns(target: cst.BaseExpression, name: str) -> bool:
    return any(isinstance(node, cst.Name) and node.value == name for node in walk(target))


def _parts(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """The expressions that one consists of immediately."""
    if isinstance(node, cst.Attribute | cst.Arg):  # not the name behind the dot, or before the `=`
        return [node.value]
    parts: list[cst.BaseExpression] = []
    for child in node.children:
        if isinstance(child, cst.BaseExpression):
            parts.append(child)
        else:
            parts += _parts(child)
    return parts


def _is_enumerated(node: cst.BaseExpression) -> bool:
    """Whether the first of what a loop yields is a number that counts."""
    if not isinstance(node, cst.Call) or not node.args:
        return False
    return dotted(node.func) == "enumerate" or (dotted(node.func) != "zip" and _is_enumerated(node.args[0].value))


def _either(one: Value, other: Value) -> Value:
    """What is one or the other."""
    if one == other or not other.own:
        return one
    if not one.own:
        return other
    if len(one.items) == len(other.items) > 0:
        return Value(items=tuple(_either(a, b) for a, b in zip(one.items, other.items, strict=True)))
    over = one.over if one.over is other.over else Over.UNKNOWN
    return Value(over=over, number=one.number and other.number, count=one.count and other.count)

