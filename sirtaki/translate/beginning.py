"""The beginning of a translated script: what it imports, and what it does before anything else."""

from __future__ import annotations

import libcst as cst

from .edits import Edits
from .source import Source


def free_name(source: Source, wanted: str) -> str:
    """`wanted`, or another where the script has something of that name."""
    return wanted if wanted not in source.names() else f"sirtaki_{wanted}"


def import_lines(*, hvd: str, ranks: str) -> list[str]:
    """The imports, under these names."""
    as_ranks = "" if ranks == "ranks" else f" as {ranks}"
    return [f"import sirtaki.torch as {hvd}", f"from sirtaki.torch import ranks{as_ranks}"]


def begin(source: Source, edits: Edits, *, imports: list[str], lines: list[str]) -> None:
    """Puts imports behind the script's own, and lines where it begins to do something."""
    last = _last_import(source)
    guard = _guard(source)
    if guard is not None and not _does_something(source, guard):
        edits.after(last, *imports)
        first = guard.body.body[0]
        assert isinstance(first, cst.BaseStatement)
        edits.before(first, *lines)
    else:
        edits.after(last, *imports, *lines)


def _last_import(source: Source) -> cst.BaseStatement:
    """The last of those at the top, which may stand in a `try`."""
    found: cst.BaseStatement | None = None
    for statement in source.module.body:
        if isinstance(statement, cst.FunctionDef | cst.ClassDef | cst.For | cst.While | cst.With):
            break
        if isinstance(statement, cst.If) and _is_guard(statement):
            break
        if any(True for _ in source.all(cst.Import, statement)) or any(
            True for _ in source.all(cst.ImportFrom, statement)
        ):
            found = statement
    if found is None:
        first = source.module.body[0]
        assert isinstance(first, cst.BaseStatement)
        return first
    return found


def _guard(source: Source) -> cst.If | None:
    for statement in source.module.body:
        if isinstance(statement, cst.If) and _is_guard(statement):
            return statement
    return None


def _is_guard(statement: cst.If) -> bool:
    test = statement.test
    return (
        isinstance(test, cst.Comparison)
        and isinstance(test.left, cst.Name)
        and test.left.value == "__name__"
        and isinstance(statement.body, cst.IndentedBlock)
    )


def _does_something(source: Source, guard: cst.If) -> bool:
    """Whether code at the top level needs to know its rank: it makes, shows or trains something."""
    for statement in source.module.body:
        if statement is guard or isinstance(statement, cst.FunctionDef | cst.ClassDef):
            continue
        for call in source.all(cst.Call, statement):
            name = source.full_name(call.func)
            last = name.rpartition(".")[2]
            if last in ("print", "DataLoader", "main", "run", "open") or name.startswith(
                ("torch.optim.", "torch.save")
            ):
                return True
            if name in source.functions:
                return True
    return False
