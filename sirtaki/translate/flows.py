"""Where loaders, optimizers and wrapped models go: from the call that makes them to where they are used.

A flow-insensitive fixpoint over the script's own functions and classes. What a container holds is not told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

import libcst as cst

from .source import Source, Symbol, called_attribute, parameters, walk

PASSED_ON = {
    "enumerate",
    "iter",
    "zip",
    "list",
    "reversed",
    "cycle",
    "islice",
    "track",
    "tqdm",
    "trange",
    "next",
    "dict",
}
"""Functions that hand on what they are given, by the last part of their names."""

SAME_OBJECT = {
    "to",
    "cuda",
    "cpu",
    "float",
    "double",
    "half",
    "train",
    "eval",
    "items",
    "values",
    "get",
    "requires_grad_",
}
"""Methods after which it is still the same object."""


class Kind(Enum):
    """What is followed."""

    LOADER = auto()
    OPTIMIZER = auto()
    SCALER = auto()
    LOSS = auto()
    WRAPPER = auto()
    WRITER = auto()
    INSTANCE = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A call that makes something that is followed; `name` is the full name of what is called."""

    kind: Kind
    call: cst.Call
    name: str


MOVES = (cst.Assign, cst.AnnAssign, cst.NamedExpr, cst.WithItem, cst.For, cst.Yield, cst.Return, cst.Call)
"""Syntax by which what is followed gets somewhere."""

Key = TypeVar("Key")

Values = frozenset[Site]
NOTHING: Values = frozenset()


class Flows:
    """What each name and expression of a script may hold.

    Attributes:
        sites: by the id of the call.
        relays: loops over a loader in generators that yield its batches, by id.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.sites = {id(call): site for call in source.all(cst.Call) if (site := self._site(call)) is not None}
        self.relays: dict[int, cst.For] = {}
        self._held: dict[Symbol, Values] = {}
        self._returned: dict[str, Values] = {}
        self._returned_at: dict[tuple[str, int], Values] = {}
        self._changed = True
        moving = [node for node in walk(source.module) if isinstance(node, MOVES)]
        while self._changed:
            self._changed = False
            for node in moving:
                self._follow(node)

    def made(self, kind: Kind) -> list[Site]:
        """All of a kind, in the order of the text."""
        return [site for site in self.sites.values() if site.kind is kind]

    def holds(self, node: cst.BaseExpression, kind: Kind) -> list[Site]:
        """What of a kind an expression may be."""
        return [site for site in self.values(node) if site.kind is kind]

    def values(self, node: cst.BaseExpression) -> Values:
        """All that is followed that an expression may be."""
        symbol = self.source.symbol(node)
        if symbol is not None:
            return self._held.get(symbol, NOTHING)
        if isinstance(node, cst.Attribute):
            return self._union(
                self._held.get((f"class {site.name}", node.attr.value), NOTHING)
                for site in self.values(node.value)
                if site.kind is Kind.INSTANCE
            ) | frozenset(site for site in self.values(node.value) if node.attr.value == "module")
        if isinstance(node, cst.Call):
            return self._of_call(node)
        if isinstance(node, cst.Subscript | cst.Await):
            return self.values(node.value if isinstance(node, cst.Subscript) else node.expression)
        if isinstance(node, cst.IfExp):
            return self.values(node.body) | self.values(node.orelse)
        if isinstance(node, cst.BooleanOperation):
            return self.values(node.left) | self.values(node.right)
        if isinstance(node, cst.NamedExpr):
            return self.values(node.value)
        if isinstance(node, cst.Tuple | cst.List):
            return self._union(self.values(element.value) for element in node.elements)
        if isinstance(node, cst.Dict):
            return self._union(self.values(element.value) for element in node.elements)
        if isinstance(node, cst.ListComp | cst.GeneratorExp):
            return self.values(node.elt)
        return self.values(node.value) if isinstance(node, cst.DictComp) else NOTHING

    def callees(self, call: cst.Call) -> list[cst.FunctionDef]:
        """The functions of this script that a call may enter; `forward` for a call of a module."""
        source, func = self.source, call.func
        if isinstance(func, cst.Name):
            if func.value in source.classes:
                init = source.method(func.value, "__init__")
                return [] if init is None else [init]
            scope = source.function_of(call)
            while True:  # the nearest function of that name
                found = source.functions.get(f"{scope}.{func.value}" if scope else func.value)
                if found is not None or not scope:
                    break
                scope = scope.rpartition(".")[0]
            if found is not None:
                return [found]
        elif isinstance(func, cst.Attribute):
            base = func.value
            if isinstance(base, cst.Name) and base.value == "self":
                method = source.method(source.class_of(call), func.attr.value)
                if method is not None:
                    return [method]
            classes = [site.name for site in self.values(base) if site.kind is Kind.INSTANCE]
            if isinstance(base, cst.Name) and base.value in source.classes:
                classes.append(base.value)
            methods = [source.method(name, func.attr.value) for name in classes]
            if found_methods := [method for method in methods if method is not None]:
                return found_methods
        forwards = [source.method(s.name, "forward") for s in self.values(func) if s.kind is Kind.INSTANCE]
        return [method for method in forwards if method is not None]

    def bound(self, call: cst.Call, function: cst.FunctionDef) -> Iterator[tuple[str, cst.BaseExpression]]:
        """Which parameter of a function gets which argument of a call."""
        names = [param.name.value for param in parameters(function)]
        decorated = {self.source.code(decorator.decorator) for decorator in function.decorators}
        if self.source.class_of(function) and "staticmethod" not in decorated:
            names = names[1:]
        positional = iter(names)
        for arg in call.args:
            if arg.star:
                continue
            name = next(positional, None) if arg.keyword is None else arg.keyword.value
            if name is not None:
                yield name, arg.value

    # ── the fixpoint ─────────────────────────────────────────────────────────────────────────────────────────────

    def _follow(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.Assign):
            for target in node.targets:
                self._assign(target.target, node.value)
        elif isinstance(node, cst.AnnAssign | cst.NamedExpr) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, cst.WithItem) and node.asname is not None:
            self._assign(node.asname.name, node.item)
        elif isinstance(node, cst.For):
            if _is_container(node.iter):
                self._assign(node.target, node.iter)
        elif isinstance(node, cst.Yield):
            self._relay(node)
        elif isinstance(node, cst.Return) and node.value is not None:
            self._return(self.source.function_of(node), node.value)
        elif isinstance(node, cst.Call):
            for function in self.callees(node):
                scope = self.source.name_of(function)
                for name, value in self.bound(node, function):
                    self._add(self._held, (scope, name), self.values(value))

    def _relay(self, node: cst.Yield) -> None:
        """A generator that yields what it gets from a loader counts as that loader."""
        function = self.source.function_of(node)
        for there in self.source.above(node):
            if isinstance(there, cst.FunctionDef):
                break
            if isinstance(there, cst.For) and self.holds(there.iter, Kind.LOADER):
                self.relays[id(there)] = there
                self._add(self._returned, function, frozenset(self.holds(there.iter, Kind.LOADER)))

    def _assign(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        if isinstance(target, cst.Tuple | cst.List):
            targets = [element.value for element in target.elements]
            if isinstance(value, cst.Tuple | cst.List) and len(value.elements) == len(targets):
                for one, element in zip(targets, value.elements, strict=True):
                    self._assign(one, element.value)
                return
            for position, one in enumerate(targets):
                self._put(one, self._at(value, position))
            return
        self._put(target, self.values(value))

    def _at(self, value: cst.BaseExpression, position: int) -> Values:
        """What the element of a tuple may be that an expression gives."""
        if isinstance(value, cst.Call) and (functions := self.callees(value)):
            return self._union(
                self._returned_at.get((self.source.name_of(function), position), NOTHING) for function in functions
            )
        return self.values(value)

    def _put(self, target: cst.BaseExpression, values: Values) -> None:
        symbol = self.source.symbol(target)
        if symbol is not None:
            self._add(self._held, symbol, values)
        elif isinstance(target, cst.Subscript):
            self._put(target.value, values)
        elif isinstance(target, cst.Attribute):
            for site in self.values(target.value):
                if site.kind is Kind.INSTANCE:
                    self._add(self._held, (f"class {site.name}", target.attr.value), values)

    def _return(self, function: str, value: cst.BaseExpression) -> None:
        self._add(self._returned, function, self.values(value))
        elements = value.elements if isinstance(value, cst.Tuple) else ()
        for position, element in enumerate(elements):
            self._add(self._returned_at, (function, position), self.values(element.value))

    def _add(self, table: dict[Key, Values], key: Key, values: Values) -> None:
        """Into one of the tables; what is new in any of them has the script followed once more."""
        known = table.get(key, NOTHING)
        if not values <= known:
            table[key] = known | values
            self._changed = True

    def _of_call(self, call: cst.Call) -> Values:
        site = self.sites.get(id(call))
        given = self._union(self.values(arg.value) for arg in call.args)
        if site is not None:
            return frozenset({site}) | (given if site.kind is Kind.WRAPPER else NOTHING)
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in SAME_OBJECT:
            return self.values(call.func.value)
        if functions := [function for function in self.callees(call) if function.name.value != "__init__"]:
            return self._union(self._returned.get(self.source.name_of(function), NOTHING) for function in functions)
        last = self.source.full_name(call.func).rpartition(".")[2]
        handed_on = last in PASSED_ON or "progress" in last.lower() or last.lower().endswith("bar")
        return given if handed_on or last in ("compile", "deepcopy") else NOTHING

    @staticmethod
    def _union(values: Iterable[Values]) -> Values:
        return frozenset().union(*values)

    def _site(self, call: cst.Call) -> Site | None:
        name = self.source.full_name(call.func)
        package, _, last = name.rpartition(".")
        kind: Kind | None = None
        if last == "DataLoader" or self.source.derives(name, "DataLoader"):
            kind = Kind.LOADER
        elif (
            package.startswith("torch.optim") and "lr_scheduler" not in package and last[:1].isupper()
        ) or self.source.derives(name, "Optimizer"):
            kind = Kind.OPTIMIZER
        elif last == "GradScaler":
            kind = Kind.SCALER
        elif last == "SummaryWriter":
            kind = Kind.WRITER
        elif package.startswith("torch.nn") and last.endswith("Loss"):
            kind = Kind.LOSS
        elif package.startswith("torch.nn") and last in ("DataParallel", "DistributedDataParallel"):
            kind = Kind.WRAPPER
        elif name in self.source.classes:
            kind = Kind.INSTANCE
        return None if kind is None else Site(kind, call, name)


def _is_container(node: cst.BaseExpression) -> bool:
    """Whether looping over an expression yields what it holds, as a literal does, and not batches."""
    if isinstance(node, cst.Call):
        return called_attribute(node) in ("items", "values")
    return isinstance(node, cst.Tuple | cst.List | cst.Dict)
