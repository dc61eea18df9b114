"""The script that is translated: its syntax tree and edits, and uses of its models, optimizers and data loaders."""

from __future__ import annotations

import ast
import bisect
import builtins
import symtable
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import libcst as cst
import libcst.helpers
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from sirtaki.errors import TranslationError

Node = TypeVar("Node", bound=cst.CSTNode)

Symbol = tuple[str, str]
"""Scope and name of a variable: ("", x) for a global variable, ("f", x) for a local variable of function f, ("class C",
x) for the attribute `self.x`.
"""


class Source:
    """Syntax tree of a script, with queries about nodes and names."""

    def __init__(self, text: str, *, as_written: bool = False) -> None:
        """Parse the script.

        Args:
            text: text of the script.
            as_written: leave several statements on one line as they are. If False, they are moved to separate lines, so
                that statements can be inserted between them.

        Raises:
            TranslationError: the text is not valid Python.
        """
        try:
            written = MetadataWrapper(cst.parse_module(text))
        except cst.ParserSyntaxError as err:
            raise TranslationError.of([(err.raw_line, f"invalid Python: {err.message}")]) from err
        apart = text if as_written else written.module.visit(_Apart()).code
        wrapper = written if apart == text else MetadataWrapper(cst.parse_module(apart))
        self._starts = list(zip(_statement_lines(wrapper), _statement_lines(written), strict=True))
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
        """Return the line of a node's first character in the original script."""
        line = int(self._positions[node].start.line)
        behind = bisect.bisect_right(self._starts, line, key=lambda start: start[0])
        return line + self._starts[behind - 1][1] - self._starts[behind - 1][0] if behind else line

    def code(self, node: cst.CSTNode) -> str:
        """Return the code of a node of the syntax tree as text."""
        return self.module.code_for_node(node).strip()

    def all(self, kind: type[Node], within: cst.CSTNode | None = None) -> Iterator[Node]:
        """Yield the nodes of type `kind` in `within` (None = in the whole script), in text order."""
        for node in self._nodes if within is None else walk(within):
            if isinstance(node, kind):
                yield node

    def above(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the ancestors of a node, nearest first."""
        while node is not self.module:
            node = self._parents[node]
            yield node

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the parent of a node."""
        return self._parents[node]

    def statement(self, node: cst.CSTNode) -> cst.BaseStatement:
        """Return the innermost statement around `node` that allows inserting lines before and after it."""
        for there in (node, *self.above(node)):
            if isinstance(there, cst.BaseStatement) and not isinstance(
                self.parent(there), cst.If
            ):  # Skip an `elif`, which libcst represents as an If inside an If.
                return there
        raise AssertionError(
            f"the translator found a {type(node).__name__} node outside of all statements of the script; please report "
            "this as a bug of Sirtaki"
        )

    def contains(self, outer: cst.CSTNode, inner: cst.CSTNode) -> bool:
        """Return whether `inner` is a descendant of `outer`."""
        return any(there is outer for there in self.above(inner))

    # ── names ────────────────────────────────────────────────────────────────────────────────────────────────────

    def function_of(self, node: cst.CSTNode) -> str:
        """Return the name of the function that contains a node, such as "f", "C.f" or "f.g"; "" if no function does."""
        return next((self.name_of(there) for there in self.above(node) if isinstance(there, cst.FunctionDef)), "")

    def name_of(self, node: cst.FunctionDef | cst.ClassDef) -> str:
        """Return the qualified name of a function or class, such as "C.f"."""
        around = [there.name.value for there in self.above(node) if isinstance(there, cst.FunctionDef | cst.ClassDef)]
        return ".".join([*reversed(around), node.name.value])

    def class_of(self, node: cst.CSTNode) -> str:
        """Return the name of the class whose method contains a node; "" outside of methods."""
        return next((there.name.value for there in self.above(node) if isinstance(there, cst.ClassDef)), "")

    def symbol(self, node: cst.BaseExpression) -> Symbol | None:
        """Return the `Symbol` (scope and name) of a variable or of `self.x`. None for other expressions."""
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
        """Resolve a dotted name with the script's imports: `nn.Linear` becomes `torch.nn.Linear`. "" for other
        expressions.
        """
        if isinstance(node, cst.Name):
            return self.imported.get(node.value, node.value)
        if isinstance(node, cst.Attribute):
            base = self.full_name(node.value)
            return f"{base}.{node.attr.value}" if base else ""
        return ""

    def names(self) -> set[str]:
        """Return all variable names that occur in the script."""
        return {node.value for node in self.all(cst.Name)}

    def imports(self, package: str) -> bool:
        """Return whether the script imports a package or one of its modules."""
        return any(name == package or name.startswith(package + ".") for name in self.imported.values())

    def method(self, class_name: str, name: str) -> cst.FunctionDef | None:
        """Return a method of a class or its base classes in this script."""
        found = self.methods.get((class_name, name))
        if found is not None or class_name not in self.classes:
            return found
        for base in self.classes[class_name].bases:
            if isinstance(base.value, cst.Name) and (found := self.method(base.value.value, name)) is not None:
                return found
        return None

    def derives(self, class_name: str, from_name: str) -> bool:
        """Return whether a class of this script derives from a class whose name ends with `from_name`."""
        if class_name not in self.classes:
            return False
        bases = [self.full_name(base.value) for base in self.classes[class_name].bases]
        return any(base.endswith(from_name) or self.derives(base, from_name) for base in bases)

    def is_builtin(self, name: str) -> bool:
        """Return whether a name is a Python builtin that the script does not redefine."""
        return hasattr(builtins, name) and name not in self.functions

    # ── used by the constructor ──────────────────────────────────────────────────────────────────────────────────

    def _imports(self) -> Iterator[tuple[str, str]]:
        for node in self.all(cst.Import):
            for alias in node.names:
                name, package = alias.evaluated_name, alias.evaluated_name.partition(".")[0]
                yield (alias.evaluated_alias, name) if alias.evaluated_alias else (package, package)
        for statement in self.all(cst.ImportFrom):
            if not isinstance(statement.names, cst.ImportStar) and statement.module is not None:
                for alias in statement.names:
                    yield bound_name(alias), f"{dotted(statement.module)}.{alias.evaluated_name}"

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
        foreign = (node for node in walk(function) if isinstance(node, cst.Global | cst.Nonlocal))
        elsewhere = {item.name.value for node in foreign for item in node.names}
        own = self.name_of(function)
        for node in walk(function.body):
            for target in targets(node):
                for name in self.all(cst.Name, target):
                    if name.value not in elsewhere and self.function_of(name) == own:
                        yield name.value
            if isinstance(node, cst.FunctionDef) and self.parent(self.parent(node)) is function:
                yield node.name.value


class _Apart(cst.CSTTransformer):
    """Transformer that moves statements to separate lines: `a; b` becomes two lines, `if x: a` a block."""

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        if len(updated_node.body) == 1:
            return updated_node
        lines = _lines_of(updated_node.body)
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.FlattenSentinel(lines)

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.BaseSuite:
        return cst.IndentedBlock(_lines_of(updated_node.body), header=updated_node.trailing_whitespace)


def _lines_of(statements: Iterable[cst.BaseSmallStatement]) -> list[cst.SimpleStatementLine]:
    alone = (statement.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for statement in statements)
    return [cst.SimpleStatementLine([statement]) for statement in alone]


def _statement_lines(wrapper: MetadataWrapper) -> list[int]:
    """Return the first line of each statement, simple or compound."""
    positions, found = wrapper.resolve(PositionProvider), (cst.BaseSmallStatement, cst.BaseCompoundStatement)
    return [int(positions[node].start.line) for node in walk(wrapper.module) if isinstance(node, found)]


def undefined_names(text: str) -> set[str]:
    """Return the names that the script `text` uses before it defines them, or never defines.

    Raises:
        SyntaxError: `text` is not valid Python.
    """
    compile(text, "script", "exec", dont_inherit=True)
    module = symtable.symtable(text, "script", "exec")
    known = {*dir(builtins), *MODULE_NAMES}
    defined, wanted, pending = set(known), set[str](), [module]
    while pending:
        table = pending.pop()
        pending += table.get_children()
        for symbol in table.get_symbols():
            binds = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
            outside = table is module or symbol.is_global()
            if outside and (binds and (table is module or symbol.is_declared_global())):
                defined.add(symbol.get_name())
            elif outside and symbol.is_referenced():
                wanted.add(symbol.get_name())
    bound, early = set[str](), set[str]()
    for statement in ast.parse(text).body:
        loads, stores = _names_at_once(statement)
        early |= loads - bound - stores
        bound |= stores
    return (wanted - defined) | (early - known)


def _names_at_once(node: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names that a statement reads when it runs, and the names that it binds. Names in function bodies do
    not count.
    """
    if isinstance(node, ast.Name):
        return ({node.id}, set()) if isinstance(node.ctx, ast.Load) else (set(), {node.id})
    loads, stores = set[str](), set[str]()
    if isinstance(node, ast.Import | ast.ImportFrom):
        stores = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    elif isinstance(node, NAMED) and node.name:
        stores = {node.name}
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        parts = [*node.decorator_list, *node.args.defaults, *(each for each in node.args.kw_defaults if each)]
    elif isinstance(node, ast.Lambda):
        parts = [*node.args.defaults, *(each for each in node.args.kw_defaults if each)]
    for part in parts:
        more_loads, more_stores = _names_at_once(part)
        loads, stores = loads | more_loads, stores | more_stores
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return loads - stores, set()
    return loads, stores


NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
"""Types of syntax nodes that bind the name in their attribute `name`."""

MODULE_NAMES = {"__file__", "__name__", "__doc__", "__spec__", "__package__", "__loader__", "__annotations__"}


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and its descendants, in text order."""
    pending = [node]
    while pending:
        there = pending.pop()
        yield there
        pending.extend(reversed(there.children))


def targets(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return the targets of an assignment."""
    if isinstance(node, cst.Assign):
        return [target.target for target in node.targets]
    if isinstance(node, cst.AnnAssign | cst.AugAssign | cst.For | cst.NamedExpr | cst.CompFor):
        return [node.target]
    if isinstance(node, cst.AsName):
        return [node.name]
    return []


def parameters(function: cst.FunctionDef) -> list[cst.Param]:
    """Return the parameters of a function: positional ones, then keyword-only ones."""
    params = function.params
    return [*params.posonly_params, *params.params, *params.kwonly_params]


def bound_name(alias: cst.ImportAlias) -> str:
    """Return the name that an import binds: `b` for `import a as b`."""
    return alias.evaluated_alias or alias.evaluated_name


def dotted(node: cst.BaseExpression) -> str:
    """Return the text of a dotted name. "" for other expressions."""
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""


def called_attribute(call: cst.Call) -> str:
    """Return the name of the called method, such as `step` for `anything.step()`. "" if `call` calls no attribute."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


def argument(call: cst.Call, keyword: str, position: int | None = None) -> cst.BaseExpression | None:
    """Return the argument of `call` with this keyword or at this position (from 0). None if the call has none."""
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == keyword:
            return arg.value
    plain = [arg.value for arg in call.args if arg.keyword is None and not arg.star]
    return plain[position] if position is not None and position < len(plain) else None


Change = Callable[[cst.BaseExpression], cst.BaseExpression]


class Edits:
    """Collection of the changes that translate a script. `applied` makes them.

    Attributes:
        notes: notes for the user, as (line, text). Line 0 stands for the whole script.
        obstacles: code that cannot be translated, as (line, reason).
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.notes: list[tuple[int, str]] = []
        self.obstacles: list[tuple[int, str]] = []
        self._changes: dict[cst.CSTNode, list[Change]] = defaultdict(list)
        self._before: dict[cst.CSTNode, list[str]] = defaultdict(list)
        self._after: dict[cst.CSTNode, list[str]] = defaultdict(list)
        self._removed: set[cst.CSTNode] = set()
        self._wrapped: set[cst.CSTNode] = set()
        self._around: dict[cst.CSTNode, str] = {}

    def replace(self, node: cst.BaseExpression, code: str) -> None:
        """Replace the code of an expression."""
        self._changes[node] = [lambda _: cst.parse_expression(code)]

    def change(self, node: cst.BaseExpression, change: Change) -> None:
        """Replace an expression by the result of `change(expression)`, called after all edits inside the expression
        were made.
        """
        self._changes[node].append(change)

    def wrap(self, node: cst.BaseExpression, template: str) -> None:
        """Wrap an expression in `template`, such as `f({it})`, where `{it}` is the expression. Idempotent."""
        if node not in self._wrapped:
            self._wrapped.add(node)
            self.change(node, lambda it: cst.helpers.parse_template_expression(template, it=it))

    def changes_in(self, node: cst.CSTNode) -> bool:
        """Return whether a recorded edit changes an expression or a part of the expression."""
        return node in self._changes or any(self.changes_in(child) for child in node.children)

    def touches(self, node: cst.CSTNode) -> bool:
        """Return whether an edit changes something in a node, or inserts lines before or after a statement in it."""
        tables = (self._changes, self._before, self._after, self._around)
        return any(any(there in table for table in tables) for there in walk(node))

    def before(self, statement: cst.BaseStatement, *lines: str) -> None:
        """Insert `lines` before a statement. Lines that are inserted there already are skipped."""
        _add(self._before[statement], lines)

    def after(self, statement: cst.BaseStatement, *lines: str) -> None:
        """Insert `lines` after a statement. Lines that are inserted there already are skipped."""
        _add(self._after[statement], lines)

    def remove(self, statement: cst.BaseStatement) -> None:
        """Remove a statement."""
        self._removed.add(statement)

    def put_into(self, statement: cst.BaseStatement, head: str) -> None:
        """Move a statement into a block that begins with `head`, such as `if hvd.rank() == 0`."""
        self._around[statement] = head

    def refuse(self, where: cst.CSTNode | int, reason: str) -> None:
        """Record that the script cannot be translated because of the code at `where`, a node or a line."""
        if (obstacle := (self._line(where), reason)) not in self.obstacles:
            self.obstacles.append(obstacle)

    def note(self, where: cst.CSTNode | int, text: str) -> None:
        """Record a note about a node, a line, or the whole script (line 0)."""
        if (note := (self._line(where), text)) not in self.notes:
            self.notes.append(note)

    def _line(self, where: cst.CSTNode | int) -> int:
        return where if isinstance(where, int) else self._source.line(where)

    def applied(self, module: cst.Module) -> str:
        """Return the script's text with all changes made."""
        return module.visit(_Applying(self)).code


class _Applying(cst.CSTTransformer):
    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self._edits = edits

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> Any:
        edits, key = self._edits, original_node
        changed: Any = super().on_leave(original_node, updated_node)
        if key in edits._changes and isinstance(changed, cst.BaseExpression):
            for change in edits._changes[key]:
                changed = change(changed)
        if not isinstance(changed, cst.BaseStatement):
            return changed
        before, after = edits._before.get(key, ()), edits._after.get(key, ())
        if not (before or after or key in edits._removed or key in edits._around):
            return changed
        leading = getattr(changed, "leading_lines", ())
        if key in edits._around:
            bare = changed.with_changes(leading_lines=())
            changed = _block(edits._around[key], [bare]).with_changes(leading_lines=leading)
        statements = [*parsed(before), *([] if key in edits._removed else [changed]), *parsed(after)]
        if not statements:
            return cst.RemoveFromParent()
        first, *rest = statements
        if before:
            first = first.with_changes(leading_lines=leading)
            rest = [node.with_changes(leading_lines=()) if node is changed else node for node in rest]
        return cst.FlattenSentinel([first, *rest])


def _add(lines: list[str], more: Iterable[str]) -> None:
    for line in more:
        if line not in lines:
            lines.append(line)


def keyword(name: str, code: str) -> cst.Arg:
    """Return a node for the keyword argument `name=code`."""
    return cst.ensure_type(cst.parse_expression(f"f({name}={code})"), cst.Call).args[0]


def with_more(call: cst.BaseExpression, *added: cst.Arg) -> cst.Call:
    """Return a call with additional arguments."""
    whole = cst.ensure_type(call, cst.Call)
    return whole.with_changes(args=[*whole.args, *added])


def parsed(lines: Iterable[str]) -> list[cst.BaseStatement]:
    """Parse lines of code to statement nodes."""
    return [cst.parse_statement(line) for line in lines]


def _block(head: str, body: Sequence[cst.BaseStatement]) -> cst.BaseStatement:
    statement = cst.parse_statement(f"{head}:\n    pass\n")
    assert isinstance(statement, cst.If | cst.With)
    return statement.with_changes(body=cst.IndentedBlock(body=body))


PASSED_ON = {
    "enumerate", "iter", "zip", "list", "reversed", "cycle", "islice", "track", "tqdm", "trange", "next", "dict",
}  # fmt: skip
"""Names of functions, without their module, that return an iterable of their argument's elements, such as
`tqdm(loader)`.
"""

SAME_OBJECT = {
    "to", "cuda", "cpu", "float", "double", "half", "train", "eval", "items", "values", "get", "requires_grad_",
}  # fmt: skip
"""Names of methods that return their own object, such as `to` of a model."""


class TrackedKind(Enum):
    """Kinds of objects that `Flows` tracks through a script, such as models and optimizers."""

    LOADER = auto()
    OPTIMIZER = auto()
    SCALER = auto()
    LOSS = auto()
    WRAPPER = auto()
    WRITER = auto()
    INSTANCE = auto()
    MODULE = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """Place in a script where a call creates an object whose uses are followed, such as a model or an optimizer.

    Attributes:
        kind: kind of the created object.
        call: the call.
        name: full name of the called function.
    """

    kind: TrackedKind
    call: cst.Call
    name: str


MOVES = (cst.Assign, cst.AnnAssign, cst.NamedExpr, cst.WithItem, cst.For, cst.Yield, cst.Return, cst.Call)
"""Types of syntax nodes that put a tracked object (such as a model) into another variable, or return it from a
function.
"""

_MAY_BE: dict[type[cst.CSTNode], tuple[str, ...]] = {
    cst.Subscript: ("value",),
    cst.Await: ("expression",),
    cst.IfExp: ("body", "orelse"),
    cst.BooleanOperation: ("left", "right"),
    cst.NamedExpr: ("value",),
    cst.ListComp: ("elt",),
    cst.GeneratorExp: ("elt",),
    cst.DictComp: ("value",),
}
"""For each type of expression, the attributes that hold its operands.

The value of the expression, or each of its elements, is the value of one of these operands.
"""

Key = TypeVar("Key")

Values = frozenset[Site]
NOTHING: Values = frozenset()


class Flows:
    """Data flow analysis of the tracked objects (models, optimizers, data loaders) that names and expressions may hold.

    Attributes:
        sites: {node of a call that creates a tracked object: its `Site`}.
        relays: loops over a data loader in generators that yield its batches.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.sites = {call: site for call in source.all(cst.Call) if (site := self._site(call)) is not None}
        self.relays: dict[cst.For, None] = {}
        self._held: dict[Symbol, Values] = {}
        self._returned: dict[str, Values] = {}
        self._returned_at: dict[tuple[str, int], Values] = {}
        self._changed = True
        moving = [node for node in walk(source.module) if isinstance(node, MOVES)]
        while self._changed:
            self._changed = False
            for node in moving:
                self._follow(node)

    def made(self, kind: TrackedKind) -> list[Site]:
        """Return all calls (sites) that create objects of a kind, such as optimizers, in text order."""
        return [site for site in self.sites.values() if site.kind is kind]

    def holds(self, node: cst.BaseExpression, kind: TrackedKind) -> list[Site]:
        """Return the calls (sites) that create the objects of a kind, such as optimizers, that an
        expression may hold.
        """
        return [site for site in self.values(node) if site.kind is kind]

    def values(self, node: cst.BaseExpression) -> Values:
        """Return the calls (sites) that create the models, optimizers and other tracked objects that an expression may
        hold.
        """
        symbol = self.source.symbol(node)
        if symbol is not None:
            return self._held.get(symbol, NOTHING)
        if isinstance(node, cst.Attribute):
            return self._union(
                self._held.get((f"class {site.name}", node.attr.value), NOTHING)
                for site in self.values(node.value)
                if site.kind is TrackedKind.INSTANCE
            ) | frozenset(site for site in self.values(node.value) if node.attr.value == "module")
        if isinstance(node, cst.Call):
            return self._of_call(node)
        if isinstance(node, cst.Tuple | cst.List | cst.Dict):
            return self._union(self.values(element.value) for element in node.elements)
        return self._union(self.values(getattr(node, part)) for part in _MAY_BE.get(type(node), ()))

    def callees(self, call: cst.Call) -> list[cst.FunctionDef]:
        """Return the functions of this script that a call may enter.

        For a call of a module, it is the module's `forward`.
        """
        source, func = self.source, call.func
        if isinstance(func, cst.Name):
            if func.value in source.classes:
                init = source.method(func.value, "__init__")
                return [] if init is None else [init]
            scopes = source.function_of(call).split(".")
            around = [".".join([*scopes[:depth], func.value]) for depth in range(len(scopes), 0, -1)]
            for name in (*around, func.value):  # Look the name up in the innermost scope first.
                if name in source.functions:
                    return [source.functions[name]]
        elif isinstance(func, cst.Attribute):
            base = func.value
            if isinstance(base, cst.Name) and base.value == "self":
                method = source.method(source.class_of(call), func.attr.value)
                if method is not None:
                    return [method]
            classes = [site.name for site in self.values(base) if site.kind is TrackedKind.INSTANCE]
            if isinstance(base, cst.Name) and base.value in source.classes:
                classes.append(base.value)
            methods = [source.method(name, func.attr.value) for name in classes]
            if found_methods := [method for method in methods if method is not None]:
                return found_methods
        forwards = [source.method(s.name, "forward") for s in self.values(func) if s.kind is TrackedKind.INSTANCE]
        return [method for method in forwards if method is not None]

    def bound(self, call: cst.Call, function: cst.FunctionDef) -> Iterator[tuple[str, cst.BaseExpression]]:
        """Yield pairs of a parameter name of `function` and the argument that `call` passes for it."""
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

    # ── the analysis, repeated until nothing changes ─────────────────────────────────────────────────────────────

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
            # The loop variable, such as `optimizer` in `for i, optimizer in enumerate(optimizers)`, may hold each
            # element.
            else:
                for each in self.source.all(cst.Name, node.target):
                    self._put(each, frozenset(self.holds(node.iter, TrackedKind.OPTIMIZER)))
        elif isinstance(node, cst.Yield):
            self._relay(node)
        elif isinstance(node, cst.Return) and node.value is not None:
            self._return(self.source.function_of(node), node.value)
        elif isinstance(node, cst.Call):
            if isinstance(node.func, cst.Attribute) and node.func.attr.value in ("append", "extend", "insert"):
                given = (frozenset(self.holds(arg.value, TrackedKind.OPTIMIZER)) for arg in node.args)
                self._put(node.func.value, self._union(given))
            for function in self.callees(node):
                scope = self.source.name_of(function)
                for name, value in self.bound(node, function):
                    self._add(self._held, (scope, name), self.values(value))

    def _relay(self, node: cst.Yield) -> None:
        """Record that calls of a generator return a loader, if the generator yields the loader's batches."""
        function = self.source.function_of(node)
        for there in self.source.above(node):
            if isinstance(there, cst.FunctionDef):
                break
            if isinstance(there, cst.For) and self.holds(there.iter, TrackedKind.LOADER):
                self.relays[there] = None
                self._add(self._returned, function, frozenset(self.holds(there.iter, TrackedKind.LOADER)))

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
        """Return the calls (sites) that may have created the tracked object, such as a model, at `position` in the
        tuple `value`.
        """
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
                if site.kind is TrackedKind.INSTANCE:
                    self._add(self._held, (f"class {site.name}", target.attr.value), values)

    def _return(self, function: str, value: cst.BaseExpression) -> None:
        self._add(self._returned, function, self.values(value))
        elements = value.elements if isinstance(value, cst.Tuple) else ()
        for position, element in enumerate(elements):
            self._add(self._returned_at, (function, position), self.values(element.value))

    def _add(self, table: dict[Key, Values], key: Key, values: Values) -> None:
        """Add `values`, calls that create tracked objects, to the entry `key` of a table.

        If one of them is new in the entry, the analysis makes another pass over the script.
        """
        known = table.get(key, NOTHING)
        if not values <= known:
            table[key] = known | values
            self._changed = True

    def _of_call(self, call: cst.Call) -> Values:
        site = self.sites.get(call)
        given = self._union(self.values(arg.value) for arg in call.args)
        if site is not None:
            return frozenset({site}) | (given if site.kind is TrackedKind.WRAPPER else NOTHING)
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
        kind: TrackedKind | None = None
        if last == "DataLoader" or self.source.derives(name, "DataLoader"):
            kind = TrackedKind.LOADER
        elif (
            package.startswith("torch.optim") and "lr_scheduler" not in package and last[:1].isupper()
        ) or self.source.derives(name, "Optimizer"):
            kind = TrackedKind.OPTIMIZER
        elif last == "GradScaler":
            kind = TrackedKind.SCALER
        elif last == "SummaryWriter":
            kind = TrackedKind.WRITER
        elif package.startswith("torch.nn") and last.endswith("Loss"):
            kind = TrackedKind.LOSS
        elif package.startswith("torch.nn") and last in ("DataParallel", "DistributedDataParallel"):
            kind = TrackedKind.WRAPPER
        elif name in self.source.classes:
            kind = TrackedKind.INSTANCE
        elif package in ("torch.nn", "torch.nn.modules", "torchvision.models") and (
            last[:1].isupper() or "vision" in name
        ):
            kind = TrackedKind.MODULE
        return None if kind is None else Site(kind, call, name)


def _is_container(node: cst.BaseExpression) -> bool:
    """Return whether an expression is a container, such as a list literal, whose elements a loop over it yields."""
    if isinstance(node, cst.Call):
        return called_attribute(node) in ("items", "values")
    return isinstance(node, cst.Tuple | cst.List | cst.Dict)
