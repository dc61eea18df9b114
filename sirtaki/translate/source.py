"""A script as it stands: its syntax tree, with lines, parents, scopes, and what names were imported as."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import TypeVar

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from sirtaki.errors import TranslationError

Node = TypeVar("Node", bound=cst.CSTNode)

Symbol = tuple[str, str]
"""Where a name belongs to, and the name: ("", x) of the module, ("f", x) of a function, ("class C", x) of `self`."""


class Source:
    """What can be asked about the text of a script without knowing what it does."""

    def __init__(self, text: str) -> None:
        """Parses it.

        Raises:
            TranslationError: it is no Python.
        """
        try:
            wrapper = MetadataWrapper(cst.parse_module(text))
        except cst.ParserSyntaxError as err:
            raise TranslationError.of([(err.raw_line, f"is no Python: {err.message}")]) from err
        self.text, self.module = text, wrapper.module
        self._nodes = list(walk(self.module))
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._positions = wrapper.resolve(PositionProvider)
        self.imported = dict(self._imports())
        self.functions: dict[str, cst.FunctionDef] = {}
        self.classes: dict[str, cst.ClassDef] = {}
        self.methods: dict[tuple[str, str], cst.FunctionDef] = {}
        self._collect()
        self._bound = {name: set(self._bindings(function)) for name, function in self.functions.items()}

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def line(self, node: cst.CSTNode) -> int:
        """Of its first character."""
        return int(self._positions[node].start.line)

    def code(self, node: cst.CSTNode) -> str:
        """Its text."""
        return self.module.code_for_node(node).strip()

    def all(self, kind: type[Node], within: cst.CSTNode | None = None) -> Iterator[Node]:
        """Nodes of a kind, in the order of the text."""
        for node in self._nodes if within is None else walk(within):
            if isinstance(node, kind):
                yield node

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """What a node stands in, the nearest first."""
        while node is not self.module:
            node = self._parents[node]
            yield node

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """What a node stands in immediately."""
        return self._parents[node]

    def statement(self, node: cst.CSTNode) -> cst.BaseStatement:
        """The line or the compound statement that a node is a part of, before and behind which others may stand."""
        for there in (node, *self.above(node)):
            if isinstance(there, cst.BaseStatement) and not isinstance(self.parent(there), cst.If):  # no `elif`
                return there
        raise AssertionError("a node outside of all statements")

    def contains(self, outer: cst.CSTNode, inner: cst.CSTNode) -> bool:
        """Whether one stands in the other."""
        return any(there is outer for there in self.above(inner))

    # ── names ────────────────────────────────────────────────────────────────────────────────────────────────────

    def function_of(self, node: cst.CSTNode) -> str:
        """The function that a node's names belong to, as "f", "C.f" or "f.g"; empty for the module."""
        for there in self.above(node):
            if isinstance(there, cst.FunctionDef):
                return self.name_of(there)
        return ""

    def name_of(self, node: cst.FunctionDef | cst.ClassDef) -> str:
        """Its name with those of the functions and classes that it stands in."""
        around = [there.name.value for there in self.above(node) if isinstance(there, cst.FunctionDef | cst.ClassDef)]
        return ".".join([*reversed(around), node.name.value])

    def class_of(self, node: cst.CSTNode) -> str:
        """The class in one of whose methods a node stands; empty if none."""
        for there in self.above(node):
            if isinstance(there, cst.ClassDef):
                return there.name.value
        return ""

    def symbol(self, node: cst.BaseExpression) -> Symbol | None:
        """What a name or `self.name` refers to; None for anything else."""
        if isinstance(node, cst.Name):
            function = self.function_of(node)
            while function:
                if node.value in self._bound.get(function, ()):
                    return (function, node.value)
                function = function.rpartition(".")[0]
                while function and function not in self._bound:
                    function = function.rpartition(".")[0]
            return ("", node.value)
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == "self":
            return (f"class {self.class_of(node)}", node.attr.value)
        return None

    def full_name(self, node: cst.CSTNode) -> str:
        """`torch.nn.Linear` of `nn.Linear`, by the script's imports; empty where that is no dotted name."""
        if isinstance(node, cst.Name):
            return self.imported.get(node.value, node.value)
        if isinstance(node, cst.Attribute):
            base = self.full_name(node.value)
            return f"{base}.{node.attr.value}" if base else ""
        return ""

    def names(self) -> set[str]:
        """All that occur."""
        return {node.value for node in self.all(cst.Name)}

    def imports(self, package: str) -> bool:
        """Whether anything of a package is imported."""
        return any(name == package or name.startswith(package + ".") for name in self.imported.values())

    def method(self, class_name: str, name: str) -> cst.FunctionDef | None:
        """Of a class or those that it derives from in this script."""
        found = self.methods.get((class_name, name))
        if found is not None or class_name not in self.classes:
            return found
        for base in self.classes[class_name].bases:
            if isinstance(base.value, cst.Name) and (found := self.method(base.value.value, name)) is not None:
                return found
        return None

    def derives(self, class_name: str, from_name: str) -> bool:
        """Whether a class of this script derives from one whose name ends so."""
        if class_name not in self.classes:
            return False
        bases = [self.full_name(base.value) for base in self.classes[class_name].bases]
        return any(base.endswith(from_name) or self.derives(base, from_name) for base in bases)

    def is_builtin(self, name: str) -> bool:
        """Whether a name is Python's own here."""
        return hasattr(builtins, name) and name not in self.functions

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _imports(self) -> Iterator[tuple[str, str]]:
        for node in self.all(cst.Import):
            for alias in node.names:
                name = dotted(alias.name)
                if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
                    yield alias.asname.name.value, name
                else:
                    yield name.partition(".")[0], name.partition(".")[0]
        for statement in self.all(cst.ImportFrom):
            if isinstance(statement.names, cst.ImportStar) or statement.module is None:
                continue
            for alias in statement.names:
                name = dotted(alias.name)
                renamed = alias.asname is not None and isinstance(alias.asname.name, cst.Name)
                as_name = alias.asname.name.value if renamed else name  # type: ignore[union-attr]  # just asked
                yield as_name, f"{dotted(statement.module)}.{name}"

    def _collect(self) -> None:
        for node in walk(self.module):
            if isinstance(node, cst.ClassDef):
                self.classes[node.name.value] = node
            elif isinstance(node, cst.FunctionDef):
                self.functions[self.name_of(node)] = node
                around = next((t for t in self.above(node) if isinstance(t, cst.ClassDef | cst.FunctionDef)), None)
                if isinstance(around, cst.ClassDef):
                    self.methods[around.name.value, node.name.value] = node

    def _bindings(self, function: cst.FunctionDef) -> Iterator[str]:
        for param in parameters(function):
            yield param.name.value
        elsewhere = {item.name.value for node in self.all(cst.Global, function) for item in node.names}
        elsewhere |= {item.name.value for node in self.all(cst.Nonlocal, function) for item in node.names}
        own = self.name_of(function)
        for node in walk(function.body):
            for target in targets(node):
                for name in self.all(cst.Name, target):
                    if name.value not in elsewhere and self.function_of(name) == own:
                        yield name.value
            if isinstance(node, cst.FunctionDef) and self.parent(self.parent(node)) is function:
                yield node.name.value


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all below it, in the order of the text."""
    pending = [node]
    while pending:
        there = pending.pop()
        yield there
        pending.extend(reversed(there.children))


def targets(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """What a statement assigns to."""
    if isinstance(node, cst.Assign):
        return [target.target for target in node.targets]
    if isinstance(node, cst.AnnAssign | cst.AugAssign | cst.For | cst.NamedExpr | cst.CompFor):
        return [node.target]
    if isinstance(node, cst.AsName):
        return [node.name]
    return []


def parameters(function: cst.FunctionDef) -> list[cst.Param]:
    """All that can be given by position, then all by name only."""
    params = function.params
    return [*params.posonly_params, *params.params, *params.kwonly_params]


def dotted(node: cst.BaseExpression) -> str:
    """The text of a dotted name; empty if it is something else."""
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""


def called_attribute(call: cst.Call) -> str:
    """`step` of `anything.step()`; empty for a call of something else."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


def argument(call: cst.Call, keyword: str, position: int | None = None) -> cst.BaseExpression | None:
    """What is given by that keyword, or in that position (from 0); None if nothing is."""
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == keyword:
            return arg.value
    plain = [arg.value for arg in call.args if arg.keyword is None and not arg.star]
    return plain[position] if position is not None and position < len(plain) else None
