"""Changes to a script, collected by node and made in one go: the rest of the text stays as it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import libcst as cst

Change = Callable[[cst.BaseExpression], cst.BaseExpression]


class Edits:
    """What is to change.

    Attributes:
        notes: (line, text) of what a reader should know; line 0 is the whole script.
        obstacles: (line, reason) of what is not understood.
    """

    def __init__(self) -> None:
        self.notes: list[tuple[int, str]] = []
        self.obstacles: list[tuple[int, str]] = []
        self._changes: dict[int, list[Change]] = defaultdict(list)
        self._before: dict[int, list[str]] = defaultdict(list)
        self._after: dict[int, list[str]] = defaultdict(list)
        self._removed: set[int] = set()
        self._around: dict[int, str] = {}
        self._kept: list[cst.CSTNode] = []

    def replace(self, node: cst.BaseExpression, code: str) -> None:
        """By other code."""
        self._keep(node, self._changes)[:] = [lambda _: cst.parse_expression(code)]

    def change(self, node: cst.BaseExpression, change: Change) -> None:
        """By a function of what stands there once what is inside has changed."""
        self._keep(node, self._changes).append(change)

    def wrap(self, node: cst.BaseExpression, function: str) -> None:
        """In a call: `function(node)`, or what `function` says with `_` for the node. A second time does nothing."""
        if id(node) not in self._changes:
            self.change(node, lambda inner: _call(function, inner))

    def changes_in(self, node: cst.CSTNode) -> bool:
        """Whether something in an expression changes."""
        return id(node) in self._changes or any(self.changes_in(child) for child in node.children)

    def before(self, statement: cst.BaseStatement, *lines: str) -> None:
        """Statements in front of one; what is there already does not come again."""
        _add(self._keep(statement, self._before), lines)

    def after(self, statement: cst.BaseStatement, *lines: str) -> None:
        """Statements behind one; what is there already does not come again."""
        _add(self._keep(statement, self._after), lines)

    def remove(self, statement: cst.BaseStatement) -> None:
        """A statement."""
        self._kept.append(statement)
        self._removed.add(id(statement))

    def put_into(self, statement: cst.BaseStatement, head: str) -> None:
        """A statement into a block: `if hvd.rank() == 0`."""
        self._kept.append(statement)
        self._around[id(statement)] = head

    def refuse(self, line: int, reason: str) -> None:
        """The script cannot be translated."""
        self.obstacles.append((line, reason))

    def note(self, line: int, text: str) -> None:
        """What a reader should know."""
        if (line, text) not in self.notes:
            self.notes.append((line, text))

    def applied(self, module: cst.Module) -> str:
        """The text with all changes."""
        return module.visit(_Applying(self)).code

    def _keep(self, node: cst.CSTNode, table: dict[int, list[cst.CSTNode]] | dict[int, list]) -> list:  # type: ignore[type-arg]
        self._kept.append(node)  # so that its id stays its own
        return table[id(node)]


class _Applying(cst.CSTTransformer):
    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self._edits = edits

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> Any:
        edits, key = self._edits, id(original_node)
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
    """`name=code`, as an argument of a call."""
    plain = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(cst.parse_expression(code), keyword=cst.Name(name), equal=plain)


def with_more(call: cst.BaseExpression, *added: cst.Arg) -> cst.Call:
    """A call with more arguments behind its own."""
    assert isinstance(call, cst.Call)
    return call.with_changes(args=[*call.args, *added])


def parsed(lines: Iterable[str]) -> list[cst.BaseStatement]:
    """Statements."""
    return [cst.parse_statement(line) for line in lines]


def _block(head: str, body: Sequence[cst.BaseStatement]) -> cst.BaseStatement:
    statement = cst.parse_statement(f"{head}:\n    pass\n")
    assert isinstance(statement, cst.If | cst.With)
    return statement.with_changes(body=cst.IndentedBlock(body=body))


def _call(function: str, inner: cst.BaseExpression) -> cst.Call:
    """`function(inner)`, or what `function` says with `_` for it."""
    if function.endswith(", _)"):
        call = cst.parse_expression(function)
        assert isinstance(call, cst.Call)
        return call.with_changes(args=[*call.args[:-1], cst.Arg(inner)])
    return cst.Call(func=cst.parse_expression(function), args=[cst.Arg(inner)])
