"""What calls return, and which take values out of the computation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import libcst as cst

from .edits import Edits
from .expressions import SAME_VALUE, Expressions
from .flows import Kind
from .source import argument, called_attribute, parameters
from .training import Training
from .values import ALL, BATCH, COUNT, Over, Value, either

SHOWS = {
    "print", "format", "info", "debug", "warning", "error", "log", "add_scalar", "add_scalars", "set_postfix", "write",
    "set_postfix_str", "set_description", "append", "extend", "update", "put",
}  # fmt: skip
"""Functions and methods that take what they are given out of the computation."""

ABOUT = {"isinstance", "type", "hasattr", "id", "callable", "range", "issubclass"}


class Calls:
    """Follows calls.

    Attributes:
        losses: what the losses are over a batch from which backward passes begin, each with the line of one.
        calling: the functions under way that were given values of one rank.
    """

    def __init__(
        self,
        training: Training,
        edits: Edits,
        expressions: Expressions,
        *,
        enter: Callable[[cst.FunctionDef, dict[str, Value]], Value],
    ) -> None:
        """`enter` follows a function of the script with arguments, and says what it returns."""
        self._training, self._flows, self._source = training, training.flows, training.source
        self._edits, self._expressions, self.enter = edits, expressions, enter
        self.losses: dict[Over, int] = {}
        self.calling: list[str] = []

    def value(self, call: cst.Call) -> Value:
        """What a call returns."""
        if call in self._training.reads:
            return BATCH
        name = called_attribute(call) or (call.func.value if isinstance(call.func, cst.Name) else "")
        values = [self._expressions.value(arg.value) for arg in call.args]
        own = any(value.own for value in values)
        if isinstance(call.func, cst.Attribute):
            base = self._expressions.value(call.func.value)
            if base.own and not self._flows.callees(call):
                return self._of_method(call, name, base)
        if not own:
            for function in self._flows.callees(call):
                if self._training.trains(function.body) or not self.calling:
                    return self.enter(function, {})
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
            left = [arg for arg, value in pairs if value.own and not self._expressions.share(arg.value)]
            return BATCH if left else ALL
        return BATCH

    def _of_method(self, call: cst.Call, name: str, base: Value) -> Value:
        """Of a method of something that differs between ranks."""
        if name in ("items", "values", "get", "keys"):  # a container of such values
            return base
        if name in ("format", "append", "extend"):  # no tensor's
            return self._shown(call, name, [self._expressions.value(arg.value) for arg in call.args])
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
        if all(value.number for value in own) and not is_module and not self._trains(functions):
            for arg, value in zip(call.args, values, strict=True):
                if value.own and not self._expressions.share(arg.value):
                    self._edits.note(self._source.line(call), f"`{self._source.code(arg.value)}` is each rank's own")
            return ALL
        results = []
        for function in functions:
            given = {name: self._expressions.value(arg) for name, arg in self._flows.bound(call, function)}
            if any(arg.star and self._expressions.value(arg.value).own for arg in call.args):
                for param in parameters(function):
                    if param.default is None and param.name.value != "self":
                        given.setdefault(param.name.value, BATCH)
            results.append(self.enter(function, given))
        result = functools.reduce(either, results)
        return BATCH if is_module and not result.own else result

    def _trains(self, functions: list[cst.FunctionDef]) -> bool:
        return any(self._training.trains(function.body) for function in functions)

    def _shown(self, call: cst.Call, name: str, values: list[Value]) -> Value:
        for arg, value in zip(call.args, values, strict=True):
            if not value.own or self._expressions.share(arg.value):
                continue
            text = self._source.code(arg.value)
            if name in ("append", "extend", "update", "put") and isinstance(call.func, cst.Attribute):
                self._expressions.put(call.func.value, BATCH)
            else:
                self._edits.note(self._source.line(call), f"`{text}` is shown as rank 0 has it")
        return ALL
