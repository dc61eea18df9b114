"""What a script's names mean in training: expressions, calls, and which values differ between ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import libcst as cst

from .source import (
    ALL,
    BATCH,
    COUNT,
    Edits,
    Flows,
    Kind,
    Over,
    Symbol,
    Value,
    all_alike,
    argument,
    called_attribute,
    collected,
    combined,
    dotted,
    either,
    parameters,
    targets,
    walk,
)

Loop = cst.For | cst.CompFor


class Training:
    """The parts of a script that train.

    Attributes:
        loops: loops over loaders whose body computes gradients, comprehensions too, in the order of the text.
        other_loops: those over loaders whose body does not.
        relays: those of generators that yield a loader's batches to a loop elsewhere.
        divided: the loaders that the former read.
    """

    def __init__(self, flows: Flows) -> None:
        self.flows = flows
        source = self.source = flows.source
        self._functions = self._that_train()
        self.loops: list[Loop] = []
        self.other_loops: list[Loop] = []
        self.relays = list(flows.relays)
        for loop in walk(source.module):
            if not isinstance(loop, cst.For | cst.CompFor) or loop in self.relays:
                continue
            if flows.holds(loop.iter, Kind.LOADER) and not _counts(loop.iter):
                body = loop.body if isinstance(loop, cst.For) else source.parent(loop)
                (self.loops if self.trains(body) else self.other_loops).append(loop)
        self.reads = [call for call in self._calls_of("next") if self._is_read_in_training(call)]
        loaders = [site for loop in self.loops for site in flows.holds(loop.iter, Kind.LOADER)]
        loaders += [site for call in self.reads for site in flows.holds(call, Kind.LOADER)]
        self.divided = list(dict.fromkeys(loaders))

    def trains(self, node: cst.CSTNode) -> bool:
        """Whether a backward pass happens in a part of the script, or in a function that it calls."""
        return any(
            called_attribute(call) == "backward"
            or any(self.source.name_of(function) in self._functions for function in self.flows.callees(call))
            for call in self.source.all(cst.Call, node)
        )

    def backward_passes(self, within: cst.CSTNode | None = None) -> list[cst.Call]:
        """All calls of `backward()`."""
        return [call for call in self.source.all(cst.Call, within) if called_attribute(call) == "backward"]

    def steps(self) -> Iterator[tuple[cst.Call, cst.BaseExpression]]:
        """Calls that let an optimizer step, itself or by a scaler, and the optimizer."""
        for call in self.source.all(cst.Call):
            if called_attribute(call) != "step" or not isinstance(call.func, cst.Attribute):
                continue
            if self.flows.holds(call.func.value, Kind.OPTIMIZER):
                yield call, call.func.value
            elif call.args and self.flows.holds(call.args[0].value, Kind.OPTIMIZER):
                yield call, call.args[0].value

    def passes_are_counted(self) -> bool:
        """Whether each step follows one backward pass: if not, gradients are to be reduced in `step()`."""
        steps = [call for call, _ in self.steps()]
        for loop in self.loops:
            if len(self._one_after_the_other(self.backward_passes(loop))) > 1:
                return False
            inside = [step for step in steps if self.source.contains(loop, step)]
            if not all(self._in_each_pass(step, loop) for step in inside):
                return False
        bodies = [function.body for function in self.source.functions.values()]
        return all(len(self._one_after_the_other(self.backward_passes(body))) <= 1 for body in bodies) and not any(
            isinstance(there, cst.For | cst.While) and there not in self.loops and not self._has_step(there, steps)
            for call in self.backward_passes()
            for there in self.source.above(call)
        )

    def loader_names(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """The names of loaders in what a loop runs over: `loader` in `enumerate(tqdm(loader))`."""
        if isinstance(node, cst.Call) and node.args:
            if node in self.flows.sites:
                return [node]
            return [name for arg in node.args for name in self.loader_names(arg.value)]
        return [node] if self.flows.holds(node, Kind.LOADER) else []

    def is_divided(self, node: cst.BaseExpression) -> bool:
        """Whether an expression may be a loader that is divided."""
        return bool(set(self.flows.holds(node, Kind.LOADER)) & set(self.divided))

    def epoch(self, loop: cst.CSTNode) -> str:
        """The variable that counts passes around a loop; empty if there is none."""
        counters = []
        for there in self.source.above(loop):
            if isinstance(there, cst.FunctionDef):
                names = [param.name.value for param in there.params.params]
                counters += [name for name in names if name == "epoch"]
                break
            if isinstance(there, cst.For) and isinstance(there.target, cst.Name) and _counts(there.iter):
                counters.append(there.target.value)
        counters = [name for name in counters if name != "_"]
        return next((name for name in counters if "epoch" in name.lower()), counters[0] if counters else "")

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _that_train(self) -> set[str]:
        found: set[str] = set()
        self._functions = found
        while True:
            more = {name for name, function in self.source.functions.items() if self.trains(function.body)}
            if more == found:
                return found
            found |= more

    def _calls_of(self, name: str) -> Iterator[cst.Call]:
        for call in self.source.all(cst.Call):
            if isinstance(call.func, cst.Name) and call.func.value == name and self.flows.holds(call, Kind.LOADER):
                yield call

    def _is_read_in_training(self, call: cst.Call) -> bool:
        around = [there for there in self.source.above(call) if isinstance(there, cst.For | cst.While)]
        return any(self.trains(loop) for loop in around)

    def _one_after_the_other(self, calls: list[cst.Call]) -> list[cst.Call]:
        """Without those that stand in an `else` of an `if` that holds one of the others."""
        alone: list[cst.Call] = []
        for call in calls:
            ifs = {there for there in self.source.above(call) if isinstance(there, cst.If)}
            apart = any(
                there in ifs and self.source.contains(there.body, call) != self.source.contains(there.body, other)
                for other in alone
                for there in self.source.above(other)
                if isinstance(there, cst.If)
            )
            if not apart:
                alone.append(call)
        return alone

    def _in_each_pass(self, step: cst.Call, loop: Loop) -> bool:
        """Whether a step happens whenever its backward pass does: both stand under the same conditions."""
        return not any(
            isinstance(there, cst.If)
            and self.source.contains(loop, there)
            and not self.backward_passes(there)
            and any(isinstance(node, cst.Modulo | cst.FloorDivide) for node in self._deciding(there))
            for there in self.source.above(step)
        )

    def _deciding(self, branch: cst.If) -> Iterator[cst.CSTNode]:
        """What a condition is computed from, one name deep."""
        yield from walk(branch.test)
        names = {name.value for name in self.source.all(cst.Name, branch.test)}
        for assign in self.source.all(cst.Assign):
            if any(isinstance(t.target, cst.Name) and t.target.value in names for t in assign.targets):
                yield from walk(assign.value)

    def _has_step(self, node: cst.CSTNode, steps: list[cst.Call]) -> bool:
        return any(self.source.contains(node, step) for step in steps) or not any(
            self.source.function_of(step) == self.source.function_of(node) for step in steps
        )


def _counts(node: cst.BaseExpression) -> bool:
    """Whether that is a range, or a bar around one."""
    if not isinstance(node, cst.Call):
        return False
    name = node.func.value if isinstance(node.func, cst.Name) else called_attribute(node)
    return name in ("range", "trange", "count") or (
        name in ("tqdm", "track") and any(_counts(a.value) for a in node.args)
    )


SAME_VALUE = {
    "item", "detach", "cpu", "cuda", "to", "clone", "float", "double", "half", "numpy", "tolist", "squeeze",
    "contiguous", "data", "mean_", "requires_grad_", "int", "long", "bfloat16", "type",
}  # fmt: skip
STRUCTURE = {"ndim", "dtype", "device", "is_cuda", "requires_grad", "is_sparse", "grad_fn"}

SHOWS = {
    "print", "format", "info", "debug", "warning", "error", "log", "add_scalar", "add_scalars", "set_postfix", "write",
    "set_postfix_str", "set_description", "append", "extend", "update", "put",
}  # fmt: skip
"""Functions and methods that take what they are given out of the computation."""

ABOUT = {"isinstance", "type", "hasattr", "id", "callable", "range", "issubclass"}


class RankValues:
    r"""Follows values through a script, and notes in `edits` where those of all ranks have to be put together.

    An abstract interpreter: it runs the script with a `Value` for every name and expression, each branch of an `if`,
    each loop twice (what one turn leaves behind is there in the next), and each function once for each combination of
    arguments. What is known of a value is one of four kinds, from sure to nothing; where branches meet, kinds that
    differ give the least upper one:

                 UNKNOWN              differs between ranks, and nothing is known of it: `x.max()`, a batch itself
                /       \
             MEAN       SUM           over the samples of a rank's part: a loss; `(a == b).sum()`, `x.size(0)`
                \       /
                  ALL                 the same on all ranks: `epoch`, `len(loader)`, the parameters

    Arithmetic keeps kinds apart: a MEAN times a count of samples is a SUM, a SUM by such a count a MEAN, MEAN + ALL a
    MEAN, and SUM + ALL is UNKNOWN, since the other term would be added once for each rank. What leaves the computation
    has to be the same for all. In

        for x, y in loader:                  x, y: UNKNOWN
            loss = criterion(model(x), y)    MEAN
            total += loss.item() * len(x)    MEAN * SUM = SUM, which nobody reads in the loop
        print(total / len(data))             ALL

    `total = ranks.total(total)` is put behind the loop. An UNKNOWN that is shown is noted, and one that decides (`if
    x.max() > 3: break`) is refused.

    Attributes:
        batches: expressions that are a rank's part of a batch; others may be added before `follow()`.
        losses: what the losses are over a batch from which backward passes begin, each with the line of one.
    """

    def __init__(self, training: Training, edits: Edits, *, ranks: str) -> None:
        """`ranks` is the name that `sirtaki.torch.ranks` has in the script."""
        self._training, self._flows, self._source = training, training.flows, training.source
        self._edits, self._ranks = edits, ranks
        self.batches: set[cst.CSTNode] = set()
        self.losses: dict[Over, int] = {}
        self._env: dict[Symbol, Value] = {}  # what names hold at the place that is looked at
        self._wrapped: dict[cst.CSTNode, Over] = {}
        self._losses = {
            name.value
            for call in training.backward_passes()
            if isinstance(call.func, cst.Attribute)
            for name in self._source.all(cst.Name, call.func.value)
        }
        self._calling: list[str] = []  # the functions under way that were given values of one rank
        self._fresh: set[Symbol] = set()
        self._in_loop: list[cst.For] = []  # that train
        self._branches = 0
        self._called: dict[tuple[str, tuple[Value, ...]], Value] = {}
        self._returned: list[Value] = []

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
            self._decide(node.test)
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
            self._decide(node.test)
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
            if isinstance(loop.target, cst.Tuple) and (_is_enumerated(loop.iter) or _are_items(loop.iter)):
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
        self._decide(node.test)
        before = dict(self._env)
        self._branches += 1
        self._block(node.body)
        taken, self._env = self._env, before
        if node.orelse is not None:
            self._statement(node.orelse)
        self._branches -= 1
        for symbol, value in taken.items():
            self._env[symbol] = either(value, self._env.get(symbol, ALL))

    def _assign(self, node: cst.Assign) -> None:
        value = self._value(node.value)
        for target in node.targets:
            symbol = self._source.symbol(target.target)
            if symbol is not None and not self._branches:
                self._fresh.add(symbol)
            lasts = isinstance(target.target, cst.Attribute) or (
                isinstance(target.target, cst.Subscript) and not self._value(target.target.value).own
            )
            if lasts and value.number and not value.count:
                value = ALL if self._share(node.value) else BATCH
            self._put(target.target, value)

    def _add(self, node: cst.AugAssign) -> None:
        value, symbol = self._value(node.value), self._source.symbol(node.target)
        there = self._value(node.target)
        if not value.own:
            return
        of_this_batch = symbol is not None and symbol in self._fresh
        in_callee = bool(self._calling) and not self._in_loop and isinstance(node.target, cst.Name)
        if there.own or of_this_batch or in_callee or self._is_differentiated(node.target):
            joined = combined(node.operator, there, value) if there.own else replace(value, items=())
            self._put(node.target, joined)
            return
        if value.over in (Over.MEAN, Over.SUM) and (loop := self._sums_up_in(node)) is not None:
            name, function = self._source.code(node.target), self._function_for(value.over)
            self._edits.after(loop, f"{name} = {function}({name})")
            return
        if not self._share(node.value):
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
        result = functools.reduce(either, returned) if returned else ALL
        self._called[key] = result
        return result

    # ── expressions ──────────────────────────────────────────────────────────────────────────────────────────────

    def _put(self, target: cst.BaseExpression, value: Value) -> None:
        """Something is assigned."""
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

    def _is_differentiated(self, node: cst.BaseExpression) -> bool:
        """Whether backward passes begin from what has this name."""
        return isinstance(node, cst.Name) and node.value in self._losses

    def _decide(self, test: cst.BaseExpression) -> None:
        """What all ranks must find alike."""
        value = self._value(test)
        if value.own and not self._share(test):
            text = self._source.code(test)
            self._edits.refuse(test, f"ranks may decide differently, each by its own data: `{text}`")

    def _share(self, node: cst.BaseExpression) -> bool:
        """Puts together the largest parts of an expression that are means or sums; False if anything else is left."""
        value = self._value(node)
        if not value.own:
            return True
        literal = isinstance(node, cst.List | cst.Dict | cst.Tuple | cst.FormattedString)
        if value.over in (Over.MEAN, Over.SUM) and not value.items and not literal:
            self._wrap(node, value.over)
            return True
        parts = [child for child in _parts(node) if self._value(child).own]
        if isinstance(node, cst.Name | cst.Lambda) or not parts:
            return False
        left = [part for part in parts if not self._share(part)]
        return not left

    def _wrap(self, node: cst.BaseExpression, over: Over) -> None:
        earlier = self._wrapped.setdefault(node, over)
        if earlier is not over:
            self._edits.refuse(node, "is once a mean and once a sum, depending on the caller")
        self._edits.wrap(node, self._function_for(over))

    def _function_for(self, over: Over) -> str:
        """What puts such values of all ranks together."""
        return f"{self._ranks}.average" if over is Over.MEAN else f"{self._ranks}.total"

    def _value(self, node: cst.BaseExpression) -> Value:
        """Of an expression."""
        if node in self.batches:
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
            return combined(node.operator, self._value(node.left), self._value(node.right))
        if isinstance(node, cst.UnaryOperation):
            inner = self._value(node.expression)
            return inner if isinstance(node.operator, cst.Minus | cst.Plus) or not inner.own else BATCH
        if isinstance(node, cst.IfExp):
            self._decide(node.test)
            return either(self._value(node.body), self._value(node.orelse))
        if isinstance(node, cst.Tuple | cst.List):
            items = tuple(self._value(element.value) for element in node.elements)
            return Value(items=items) if isinstance(node, cst.Tuple) else all_alike(items)
        if isinstance(node, cst.Dict):
            return all_alike([self._value(element.value) for element in node.elements])
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
        """Of what is computed from such values in a way that is not known."""
        return BATCH if any(value.own for value in values) else ALL

    def _of_comprehension(self, node: cst.BaseComp) -> Value:
        element = node.for_in
        self._put(element.target, BATCH if element in self._training.loops else self._any(self._value(element.iter)))
        if isinstance(node, cst.DictComp):
            return self._any(self._value(node.key), self._value(node.value))
        assert isinstance(node, cst.ListComp | cst.GeneratorExp | cst.SetComp)
        return collected(self._value(node.elt))

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
        if base.own:
            return base
        return self._any(*(self._value(there) for there in self._source.all(cst.Name, node) if there is not node.value))

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _of_call(self, call: cst.Call) -> Value:
        """What a call returns."""
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
        if name == "zip" and len(values) == 1 and call.args[0].star:  # columns of rows
            return values[0]
        if name == "scale" and isinstance(call.func, cst.Attribute) and self._flows.holds(call.func.value, Kind.SCALER):
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
        if any(value.number and not value.count for value in values):  # what is computed of numbers, outlives the batch
            pairs = zip(call.args, values, strict=True)
            left = [arg for arg, value in pairs if value.own and not self._share(arg.value)]
            return BATCH if left else ALL
        return BATCH

    def _of_method(self, call: cst.Call, name: str, base: Value) -> Value:
        """Of a method of something that differs between ranks."""
        if name in ("items", "values", "get", "keys"):  # a container of such values
            return base
        if name in ("format", "append", "extend"):  # no tensor's
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
        is_torchs = full.startswith("torch.nn.functional.") and (
            "loss" in name or "entropy" in name or name == "kl_div"
        )
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
        if (
            all(value.number for value in own)
            and not is_module
            and not any(self._training.trains(function.body) for function in functions)
        ):
            for arg, value in zip(call.args, values, strict=True):
                if value.own and not self._share(arg.value):
                    self._edits.note(call, f"`{self._source.code(arg.value)}` is each rank's own")
            return ALL
        results = []
        for function in functions:
            given = {name: self._value(arg) for name, arg in self._flows.bound(call, function)}
            if any(arg.star and self._value(arg.value).own for arg in call.args):
                for param in parameters(function):
                    if param.default is None and param.name.value != "self":
                        given.setdefault(param.name.value, BATCH)
            results.append(self._function(function, given))
        result = functools.reduce(either, results)
        return BATCH if is_module and not result.own else result

    def _shown(self, call: cst.Call, name: str, values: list[Value]) -> Value:
        for arg, value in zip(call.args, values, strict=True):
            if not value.own or self._share(arg.value):
                continue
            text = self._source.code(arg.value)
            if name in ("append", "extend", "update", "put") and isinstance(call.func, cst.Attribute):
                self._put(call.func.value, BATCH)
            else:
                self._edits.note(call, f"`{text}` is shown as rank 0 has it")
        return ALL


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


def _assigns(target: cst.BaseExpression, name: str) -> bool:
    return any(isinstance(node, cst.Name) and node.value == name for node in walk(target))


def _are_items(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Call) and called_attribute(node) == "items"


def _is_enumerated(node: cst.BaseExpression) -> bool:
    """Whether the first of what a loop yields is a number that counts."""
    if not isinstance(node, cst.Call) or not node.args:
        return False
    return dotted(node.func) == "enumerate" or (dotted(node.func) != "zip" and _is_enumerated(node.args[0].value))
