"""Translate a script for one process, for DistributedDataParallel or for Horovod into a script for Sirtaki."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst
import libcst.helpers
import libcst.matchers as m

from sirtaki.errors import TranslationError
from sirtaki.integrations.translate.meaning import Loop, Over, RankValues, Training
from sirtaki.integrations.translate.source import (
    Edits,
    Flows,
    Site,
    Source,
    TrackedKind,
    argument,
    bound_name,
    called_attribute,
    dotted,
    keyword,
    parameters,
    targets,
    undefined_names,
    walk,
    with_more,
)

# ── changes that make a script train on several ranks ─────────────────────────────────────────────────────────────────


def free_name(source: Source, wanted: str) -> str:
    """Return `wanted`, or a similar name if the script uses `wanted` already."""
    return wanted if wanted not in source.names() else f"sirtaki_{wanted}"


def import_lines(source: Source, place: cst.BaseStatement, *, hvd: str, ranks: str = "") -> list[str]:
    """Return the lines to insert after the statement `place`: imports of Sirtaki, and a line that sets SIRTAKI_UNUSED.

    With SIRTAKI_UNUSED=none, the gradient of a parameter that no rank has used stays None.
    """
    as_ranks = "" if ranks == "ranks" else f" as {ranks}"
    return [
        *(["import os"] if "os" not in _imported_until(source, place) else []),
        f"import sirtaki.torch as {hvd}",
        *([f"from sirtaki.torch import ranks{as_ranks}"] if ranks else []),
        'os.environ.setdefault("SIRTAKI_UNUSED", "none")',
    ]


def begin(source: Source, edits: Edits, *, hvd: str, ranks: str, lines: list[str]) -> None:
    """Insert Sirtaki's imports after the script's imports, and `lines` before the first code that trains or prints."""
    guard = next((there for there in source.module.body if m.matches(there, GUARD)), None)
    in_guard = isinstance(guard, cst.If) and not _does_something(source, guard)
    last = _last_import(source, edits, "" if in_guard else "\n".join(lines))
    imports = import_lines(source, last, hvd=hvd, ranks=ranks)
    if isinstance(guard, cst.If) and in_guard:
        edits.after(last, *imports)
        first = guard.body.body[0]
        assert isinstance(first, cst.BaseStatement)
        edits.before(first, *lines)
    else:
        edits.after(last, *imports, *lines)


def _last_import(source: Source, edits: Edits, lines: str) -> cst.BaseStatement:
    """Return the statement after which imports are inserted: the last import before functions, classes and edited code.

    If `lines` need a name that a later import binds, it is that import. An import may be inside a `try`.
    """
    found: cst.BaseStatement | None = None
    for statement in (body := _until_first_change(source, edits)):
        does = isinstance(statement, cst.FunctionDef | cst.ClassDef | cst.For | cst.While | cst.With)
        if does or m.matches(statement, GUARD):
            break
        if any(isinstance(node, cst.Import | cst.ImportFrom) for node in walk(statement)):
            found = statement
    first = found or body[0]
    used = {name.value for name in walk(cst.parse_module(lines)) if isinstance(name, cst.Name)}
    for statement in body[body.index(first) + 1 :]:
        missing = used & source.imported.keys() - _imported_until(source, first)
        if missing & _imported_by(statement):
            first = statement
    return first


def _until_first_change(source: Source, edits: Edits) -> list[cst.BaseStatement]:
    """Return the top-level statements before the first one that is edited or prints something; at least one."""
    body: list[cst.BaseStatement] = list(source.module.body)
    for index, statement in enumerate(body):
        if isinstance(statement, cst.FunctionDef | cst.ClassDef) or m.matches(statement, GUARD):
            continue
        shows = any(source.full_name(call.func) == "print" for call in source.all(cst.Call, statement))
        if edits.touches(statement) or shows:
            return body[: max(1, index)]
    return body


def _imported_until(source: Source, last: cst.BaseStatement) -> set[str]:
    body: list[cst.BaseStatement] = list(source.module.body)
    return set[str]().union(*map(_imported_by, body[: body.index(last) + 1] if last in body else body))


def _imported_by(statement: cst.CSTNode) -> set[str]:
    """Return the names that a top-level statement imports."""
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        return set()
    found = set[str]()
    for node in walk(statement):
        if isinstance(node, cst.Import | cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
            found |= {bound_name(alias).partition(".")[0] for alias in node.names}
    return found


GUARD = m.If(test=m.Comparison(left=m.Name("__name__")), body=m.IndentedBlock())


def _does_something(source: Source, guard: cst.If) -> bool:
    """Return whether top-level code outside of `guard` (`if __name__ == …`) creates, prints or trains something."""
    for statement in source.module.body:
        if statement is guard or isinstance(statement, cst.FunctionDef | cst.ClassDef):
            continue
        for call in source.all(cst.Call, statement):
            name = source.full_name(call.func)
            told = name.rpartition(".")[2] in ("print", "DataLoader", "main", "run", "open")
            if told or name.startswith(("torch.optim.", "torch.save")) or name in source.functions:
                return True
    return False


def place(source: Source, flows: Flows, edits: Edits, *, hvd: str) -> list[str]:
    """Edit code that chooses a GPU, so that each rank uses its own GPU.

    Returns:
        Lines to insert at the beginning of the script.
    """
    for text in source.all(cst.SimpleString):
        if re.fullmatch(r"""["']cuda:0["']""", text.value):
            edits.replace(text, f'f"cuda:{{{hvd}.local_rank()}}"')
        elif re.fullmatch(r"""["']cuda:\d+["']""", text.value):
            edits.refuse(text, f"names one device for all ranks: {text.value}")
    for call in source.all(cst.Call):
        numbered = called_attribute(call) == "cuda" and call.args and isinstance(call.args[0].value, cst.Integer)
        if numbered or source.full_name(call.func) == "torch.cuda.set_device":
            edits.replace(call.args[0].value, f"{hvd}.local_rank()")
    for node in source.all(cst.Subscript):
        visible = source.full_name(node.value) == "os.environ" and "CUDA_VISIBLE_DEVICES" in source.code(node)
        if visible and isinstance(source.parent(node), cst.AssignTarget):
            edits.refuse(node, "chooses the devices that all ranks see: leave that to who starts the script")
    for site in flows.made(TrackedKind.WRAPPER):
        if site.name.endswith(".DataParallel"):
            undo_wrapper(source, flows, edits, site.call)
    uses_cuda = source.imported.get("torch") == "torch" and "cuda" in source.text
    return [f"if torch.cuda.is_available():\n    torch.cuda.set_device({hvd}.local_rank())"] if uses_cuda else []


def undo_wrapper(source: Source, flows: Flows, edits: Edits, call: cst.Call) -> None:
    """Remove the wrapper of a model, such as DataParallel: replace `Wrapper(model, …)` by `model`, and `wrapped.module`
    by `wrapped`.
    """
    inner = call.args[0].value
    assign = source.parent(call)
    same = isinstance(assign, cst.Assign) and len(assign.targets) == 1
    if same and source.code(assign.targets[0].target) == source.code(inner):  # type: ignore[attr-defined]  # an Assign
        edits.remove(source.statement(call))
    else:
        edits.change(call, lambda node: node.args[0].value)  # type: ignore[attr-defined]  # a call
    for node in source.all(cst.Attribute):
        wrapped = node.attr.value == "module" and flows.holds(node.value, TrackedKind.WRAPPER)
        if wrapped and not isinstance(source.parent(node), cst.AssignTarget):
            edits.change(node, lambda there: there.value)  # type: ignore[attr-defined]  # an attribute
    edits.note(call, "the model is not wrapped: its states have no `module.` before each name any more")


AT_STEP = 1_000_000
"""Value for `backward_passes_per_step` that no script reaches, so that gradients are reduced only in `step()`."""

READS_GRADIENTS = {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "unscale_", "get_total_norm"}


class Optimizers:
    """Editor of the code that creates and uses optimizers, so that they average gradients over ranks."""

    def __init__(self, training: Training, edits: Edits, *, hvd: str, ranks: str) -> None:
        """Store the names `hvd` and `ranks` that `sirtaki.torch` and `sirtaki.torch.ranks` have in the script.

        Attributes:
            uses_ranks: the translated script calls a function of `sirtaki.torch.ranks`.
        """
        self._training, self._flows, self._edits, self._hvd = training, training.flows, edits, hvd
        self._ranks, self.uses_ranks = ranks, False
        self._source: Source = training.source

    def distribute(self, losses: dict[Over, int]) -> None:
        """Wrap all optimizers in `DistributedOptimizer`.

        Args:
            losses: {kind of loss (mean or sum over a batch): number of a line that calls `backward()` on such a loss}.
                The kind determines whether the optimizer averages or sums gradients.
        """
        options, counted = "", self._training.passes_are_counted()
        if not counted:
            options += f", backward_passes_per_step={AT_STEP:_}"
            self._edits.note(
                0, "gradients of several backward passes are added up, and reduced when `step()` is called"
            )
        if Over.SUM in losses:
            options += f", op={self._hvd}.Sum"
            if not counted:
                self._require_cleared()
            if Over.MEAN in losses:
                self._edits.refuse(losses[Over.SUM], f"a loss is a sum here, and a mean in line {losses[Over.MEAN]}")
        for site in self._flows.made(TrackedKind.OPTIMIZER):
            self._distribute(site, options)
        self._synchronise(sums=Over.SUM in losses)

    def _distribute(self, site: Site, options: str) -> None:
        source, call = self._source, site.call
        given = list(self._models(call))
        models = list(dict.fromkeys(source.code(model) for model in given))
        if not models:
            self._edits.refuse(call, f"cannot tell whose parameters `{source.code(call)}` has")
            return
        # Skip optimizers in a lambda or comprehension, into which no statement can be inserted.
        if _binder(source, call) is not None:
            self.uses_ranks = True
            self._edits.wrap(call, f"{self._ranks}.distributed({{it}}, {', '.join(models)}{options})")
            return
        loops = {source.code(model): self._loops_around(model) for model in given}
        if any(loop is None for loop in loops.values()):
            self._edits.refuse(call, f"cannot tell whose parameters `{source.code(call)}` has")
            return
        alone = len(models) == 1 and not loops[models[0]]
        named = f", named_parameters={models[0]}.named_parameters()" if alone else ""
        statement = source.statement(call)
        target = _assigned(source, call)
        lines = {model: f"{self._hvd}.broadcast_parameters({model}.state_dict(), root_rank=0)" for model in models}
        broadcasts = [f"[{lines[model]} {loops[model]}]" if loops[model] else lines[model] for model in models]
        if target is None:
            self._edits.before(statement, *broadcasts)
            self._edits.wrap(call, f"{self._hvd}.DistributedOptimizer({{it}})")
            more = cst.ensure_type(cst.parse_expression(f"f(_{named}{options})"), cst.Call).args[1:]
            self._edits.change(call, lambda node: with_more(node, *more))
        else:
            name = source.code(target)
            line = f"{name} = {self._hvd}.DistributedOptimizer({name}{named}{options})"
            self._edits.after(statement, *broadcasts, line)

    def _loops_around(self, model: cst.BaseExpression) -> str | None:
        """Return the code of the `for` clauses of the comprehension that binds the model's name.

        "" if no comprehension binds the name. None if a lambda binds it.
        """
        binder = _binder(self._source, model)
        if binder is None:
            return ""
        return self._source.code(binder.for_in) if isinstance(binder, cst.BaseComp) else None

    def _require_cleared(self) -> None:
        """Refuse scripts that do not clear gradients after a step.

        Their next reduction would sum gradients over ranks that are already sums over ranks.
        """
        clears = [call for call in self._source.all(cst.Call) if called_attribute(call) in ("zero_grad", "zero_")]
        by_hand = any(
            isinstance(node.target, cst.Attribute) and _is_gradient(node.target)
            for node in self._source.all(cst.AssignTarget)
        )
        of_modules = by_hand or any(not self._cleared_by(call) for call in clears)
        for call, optimizer in self._training.steps():
            mine = set(self._flows.holds(optimizer, TrackedKind.OPTIMIZER))
            if not of_modules and not any(mine & self._cleared_by(clear) for clear in clears):
                self._edits.refuse(call, "gradients of sums are added up over steps: clear them, or take means")

    def _cleared_by(self, call: cst.Call) -> set[Site]:
        func = call.func
        return set(self._flows.holds(func.value, TrackedKind.OPTIMIZER)) if isinstance(func, cst.Attribute) else set()

    def _models(self, call: cst.Call) -> Iterator[cst.BaseExpression]:
        """Yield the models whose parameters are passed to an optimizer."""
        given = argument(call, "params", 0)
        if given is None:
            return
        yield from self._receivers(given, set())

    def _receivers(self, node: cst.CSTNode, seen: set[str]) -> Iterator[cst.BaseExpression]:
        source = self._source
        for call in source.all(cst.Call, node):
            if called_attribute(call) in ("parameters", "named_parameters") and isinstance(call.func, cst.Attribute):
                yield self._root(call.func.value)
        for name in source.all(cst.Name, node):
            symbol = source.symbol(name)
            if symbol is None or name.value in seen or source.parent(name).__class__ is cst.Attribute:
                continue
            seen.add(name.value)
            for origin in self._origins(name):
                yield from self._receivers(origin, seen)

    def _root(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """Return `model` for `model.head`: initial weights of all parts of a model must be broadcast."""
        while isinstance(node, cst.Attribute) and not (isinstance(node.value, cst.Name) and node.value.value == "self"):
            made = self._flows.holds(node.value, TrackedKind.INSTANCE)
            if made and not any(self._source.derives(site.name, "Module") for site in made):
                break  # Stop here, because an object that is no Module has no weights of its own.
            node = node.value
        return node

    def _origins(self, name: cst.Name) -> Iterator[cst.CSTNode]:
        """Yield the expressions from which a name gets its value or elements.

        These are the expressions that are assigned to the name, and the iterables of loops that append to it.
        """
        source, symbol = self._source, self._source.symbol(name)
        for assign in source.all(cst.Assign):
            if any(source.symbol(target.target) == symbol for target in assign.targets):
                yield assign.value
        for loop in source.all(cst.For):
            for call in source.all(cst.Call, loop.body):
                grows = called_attribute(call) in ("append", "extend")
                if grows and any(source.symbol(there) == symbol for there in source.all(cst.Name, call.func)):
                    yield loop.iter

    # ── code that reads gradients ─────────────────────────────────────────────────────────────────────────────────────

    def _synchronise(self, *, sums: bool) -> None:
        """Insert `synchronize()` before code that reads gradients, and `skip_synchronize()` around the next step."""
        steps, seen = list(self._training.steps()), set[cst.CSTNode]()
        for call, optimizer in steps:
            if call.args and self._source.code(call.args[0].value) != self._source.code(optimizer):
                continue  # The step's argument is a closure. The optimizer itself reduces gradients after the closure.
            step = self._source.statement(call)
            alone = isinstance(step, cst.SimpleStatementLine) and len(step.body) == 1
            reads = self._reads_before(call) + ([] if alone else self._reads(step))
            for read in reads:
                seen.update([read], *(walk(function) for function in self._called_by(read)))
            if not reads and not call.args:
                continue
            if any(self._source.parent(step) not in self._source.above(read) for read in reads) and sums:
                self._edits.refuse(
                    call, "gradients of sums are read where no step may follow: read them in front of the step"
                )
            if not alone:
                line = self._source.line(call)
                self._edits.refuse(line, "gradients are read before this step: put it on a line of its own")
                continue
            name = self._source.code(optimizer)
            place = self._in_front_of(reads[0], step) if reads else step
            self._edits.before(place, self._for_each(call, place, f"{name}.synchronize()"))
            self._edits.put_into(step, f"with {name}.skip_synchronize()")
        if self._training.passes_are_counted():
            return
        for node in self._source.all(cst.Attribute):
            tested = isinstance(self._source.parent(node), cst.Comparison | cst.AssignTarget)
            if _is_gradient(node) and node not in seen and not tested:
                self._edits.note(node, f"`{self._source.code(node)}` is each rank's own until a step is made")

    def _for_each(self, call: cst.Call, place: cst.BaseStatement, line: str) -> str:
        """Return code to insert at `place`: `line`, inside copies of the loops around `call` that bind the optimizer's
        name.

        Loops that contain `place` are not copied.
        """
        names = {node.value for node in self._source.all(cst.Name, call)}
        for there in self._source.above(call):
            if there is place or self._source.contains(there, place):
                break
            if isinstance(there, cst.For) and names & {node.value for node in self._source.all(cst.Name, there.target)}:
                head = f"for {self._source.code(there.target)} in {self._source.code(there.iter)}:\n"
                line = head + "".join(f"    {part}\n" for part in line.splitlines())
        return line

    def _called_by(self, node: cst.CSTNode) -> list[cst.FunctionDef]:
        return self._flows.callees(node) if isinstance(node, cst.Call) else []

    def _reads_before(self, step: cst.Call, within: tuple[cst.CSTNode, ...] = ()) -> list[cst.CSTNode]:
        """Return the nodes between a backward pass and `step`, in the same function, that read gradients."""
        source, found = self._source, list[cst.CSTNode]()
        here: cst.CSTNode = source.statement(step)
        while not isinstance(here, cst.FunctionDef):
            siblings = list(source.parent(here).children)
            for sibling in reversed(siblings[: siblings.index(here)]):
                found[:0] = self._reads(sibling)
                if self._training.trains(sibling):
                    return found
            if source.parent(here) is source.module:
                return found
            here = source.statement(source.parent(here))
        for call in source.all(cst.Call):
            if here in self._flows.callees(call) and here not in within and self._reads_before(call, (*within, here)):
                self._edits.refuse(call, "gradients are read before a step that a function makes: put both into one")
        return found

    def _in_front_of(self, read: cst.CSTNode, step: cst.BaseStatement) -> cst.BaseStatement:
        """Return the statement before which gradients must be reduced, because `read` reads them.

        The statement is the outermost branch or loop that contains `read`, but not `step`.
        """
        here = self._source.statement(read)
        for there in self._source.above(here):
            if self._source.contains(there, step) or self._training.trains(there):
                break
            here = self._source.statement(there)
        return here

    def _reads(self, part: cst.CSTNode, within: tuple[cst.FunctionDef, ...] = ()) -> list[cst.CSTNode]:
        """Return the nodes in `part`, or in functions it calls, that read gradients after the last backward pass."""
        found: list[cst.CSTNode] = []
        for node in walk(part):
            if isinstance(node, cst.Call):
                if self._training.trains(node):
                    found.clear()
                elif {called_attribute(node), self._source.full_name(node.func).rpartition(".")[2]} & READS_GRADIENTS:
                    found.append(node)
                for function in self._flows.callees(node):
                    if function in within or not self._reads(function.body, (*within, function)):
                        continue
                    if not self._training.trains(function.body):
                        found.append(node)
                    elif not any(self._source.contains(function, step) for step, _ in self._training.steps()):
                        self._edits.refuse(
                            node, "computes and reads gradients, and makes no step: put it into one function"
                        )
            elif _is_gradient(node):
                found.append(node)
        return found


def _binder(source: Source, node: cst.BaseExpression) -> cst.BaseComp | cst.Lambda | None:
    """Return the comprehension or lambda around an expression that binds a name in it; None if there is none."""
    names, statement = {name.value for name in source.all(cst.Name, node)}, source.statement(node)
    for there in source.above(node):
        if there is statement:
            break
        bound: Iterator[cst.CSTNode] = iter(())
        if isinstance(there, cst.BaseComp):
            bound = (name for part in walk(there.for_in) for t in targets(part) for name in walk(t))
        elif isinstance(there, cst.Lambda):
            bound = (param.name for param in walk(there.params) if isinstance(param, cst.Param))
        if any(isinstance(name, cst.Name) and name.value in names for name in bound):
            assert isinstance(there, cst.BaseComp | cst.Lambda)
            return there
    return None


def _is_gradient(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Attribute) and node.attr.value == "grad" and dotted(node.value) != "torch.autograd"


def _assigned(source: Source, call: cst.Call) -> cst.BaseExpression | None:
    """Return the target if the value of `call` is assigned to exactly one target. Otherwise return None."""
    assign = source.parent(call)
    alone = isinstance(assign, cst.Assign) and len(assign.targets) == 1
    target = assign.targets[0].target if alone else None  # type: ignore[attr-defined]  # an Assign
    return target if isinstance(target, cst.Name | cst.Attribute) else None


WRITES = {
    "torch.save", "pickle.dump", "json.dump", "yaml.dump", "joblib.dump", "numpy.save", "numpy.savez", "numpy.savetxt",
    "numpy.savez_compressed", "os.remove", "os.unlink", "os.rename", "os.replace", "os.rmdir", "torch.onnx.export",
    "torch.jit.save", "torchvision.utils.save_image", "safetensors.torch.save_file", "sys.stdout.write",
    "sys.stderr.write",
    "matplotlib.pyplot.savefig", "matplotlib.pyplot.show",
}  # fmt: skip
"""Names of functions whose calls only rank 0 executes in the translated script."""

WRITING_METHODS = {
    "savefig", "save_pretrained", "to_csv", "to_json", "write_text", "write_bytes", "unlink", "rmdir", "touch",
}  # fmt: skip
WRITING_PACKAGES = ("shutil.", "wandb.", "mlflow.")
FOLDERS = {"os.makedirs", "os.mkdir", "mkdir", "makedirs"}
READS = {"torch.load", "numpy.load", "json.load", "pickle.load", "joblib.load"}


class Output:
    """Editor of the code that prints and writes files, so that only rank 0 does this."""

    def __init__(self, source: Source, flows: Flows, edits: Edits, *, hvd: str, ranks: str) -> None:
        """Prepare to edit a script.

        Args:
            source: the script.
            flows: values of its variables.
            edits: list that receives the edits.
            hvd: name under which the translated script imports `sirtaki.torch`.
            ranks: name under which it imports `sirtaki.torch.ranks`.
        """
        self._source, self._flows, self._edits, self._hvd, self._ranks = source, flows, edits, hvd, ranks
        self._writes = False

    def keep(self) -> None:
        """Edit all code of the script that prints or writes files, so that only rank 0 does this."""
        for call in self._source.all(cst.Call):
            name, method = self._source.full_name(call.func), called_attribute(call)
            if name in WRITES or name.startswith(WRITING_PACKAGES) or method in WRITING_METHODS:
                self._writes = self._writes or not name.startswith("sys.")
                self._on_root(call)
            elif name in FOLDERS or method == "mkdir":
                self._folder(call)
            elif name == "open" or method == "open":
                self._open(call)
            elif name.rpartition(".")[2] in ("tqdm", "trange"):
                self._bar(call)
            elif call in self._flows.sites and self._flows.sites[call].kind is TrackedKind.WRITER:
                self._edits.wrap(call.func, f"{self._ranks}.on_root({{it}})")
        for call in self._source.all(cst.Call):
            if self._writes and self._source.full_name(call.func) in READS:
                self._edits.before(self._source.statement(call), f"{self._hvd}.barrier()  # rank 0 may be writing it")

    @property
    def begins_with(self) -> list[str]:
        """Return lines to insert at the beginning of the script. They disable output on ranks other than 0."""
        lines = []
        if "print" in self._source.names():
            lines.append(f"print = {self._ranks}.on_root(print)")
        if self._source.imports("logging"):
            lines.append(f"if {self._hvd}.rank() != 0:\n    logging.disable(logging.INFO)")
        return lines

    def _on_root(self, call: cst.Call) -> None:
        """Make only rank 0 execute `call`.

        A call that is a whole statement is moved into an `if` block. A call whose value is used, or that may
        communicate, is wrapped in a function of `sirtaki.torch.ranks`.
        """
        parent = self._source.parent(call)
        line = self._source.parent(parent) if isinstance(parent, cst.Expr) else None
        calls_own = any(self._flows.callees(inner) for inner in self._source.all(cst.Call, call))
        communicates = calls_own or self._edits.changes_in(call)
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 and not communicates:
            self._edits.put_into(line, f"if {self._hvd}.rank() == 0")
        else:
            self._edits.wrap(call.func, f"{self._ranks}.on_root({{it}})")

    def _folder(self, call: cst.Call) -> None:
        if argument(call, "exist_ok") is None:
            self._on_root(call)

    def _open(self, call: cst.Call) -> None:
        """Edit a call of `open` for writing, so that ranks other than 0 open /dev/null."""
        receiver = call.func.value if isinstance(call.func, cst.Attribute) else None
        if (
            isinstance(receiver, cst.Name) and receiver.value in self._source.imported
        ):  # Exclude a module's function, such as gzip.open.
            receiver = None
        mode = argument(call, "mode", 1 if receiver is None else 0)
        text = "" if mode is None else self._source.code(mode).strip("\"'")
        if not set(text) & set("wax+"):
            return
        self._writes = True
        if receiver is not None:  # `call` is the method `open` of a pathlib.Path
            where = cst.parse_expression(f'{self._source.code(receiver)} if {self._hvd}.rank() == 0 else "/dev/null"')
            self._edits.change(call, lambda node: _opened(node, where))
        elif not call.args or call.args[0].keyword is not None:
            self._edits.refuse(call, f"all ranks would write: `{self._source.code(call)}`")
        else:
            path = self._source.code(call.args[0].value)
            self._edits.replace(call.args[0].value, f'{path} if {self._hvd}.rank() == 0 else "/dev/null"')

    def _bar(self, call: cst.Call) -> None:
        if argument(call, "disable") is None:
            silent = keyword("disable", f"{self._hvd}.rank() != 0")
            self._edits.change(call, lambda node: with_more(node, silent))


def _opened(call: cst.BaseExpression, where: cst.BaseExpression) -> cst.Call:
    """Turn the call `path.open(…)` into `open(where, …)`. On ranks other than 0, `where` is another path."""
    assert isinstance(call, cst.Call)
    return call.with_changes(func=cst.Name("open"), args=[cst.Arg(where), *call.args])


FRAMEWORKS = {
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "fairscale": "FairScale",
    "tensorflow": "TensorFlow",
    "jax": "JAX",
    "ignite": "Ignite",
    "fastai": "fastai",
    "catalyst": "Catalyst",
}
INNER_LOOPS = {"higher", "learn2learn", "torchopt", "torchmeta"}
"""Packages for meta-learning.

Scripts with them cannot be translated, because their inner loops train a copy of a model on the data of one rank.
"""

FUNCTIONAL = ("torch.func.", "functorch.", "torch.autograd.functional.")
STARTS_PROCESSES = {"torch.multiprocessing.spawn", "multiprocessing.Process", "torch.multiprocessing.Process"}
CLOCKS = {"time.time", "time.perf_counter", "time.monotonic", "datetime.datetime.now", "time.process_time"}


def look_for_what_cannot_be(training: Training, edits: Edits) -> None:
    """Record, in `edits`, the code of a script that cannot be translated, with the reasons."""
    source = training.source
    for name, title in FRAMEWORKS.items():
        if source.imports(name):
            edits.refuse(1, f"{title} has its own ways of training on several processes")
    for name in sorted(INNER_LOOPS):
        if source.imports(name):
            edits.refuse(
                1, f"`{name}` trains in inner loops, in which each rank would see its own part of the data only"
            )
    if source.imported.get("torch") != "torch":
        edits.refuse(1, "`import torch` is missing")
    if not training.backward_passes():
        edits.refuse(1, "nowhere is `backward()` called: there is nothing to average")
    elif not training.flows.made(TrackedKind.OPTIMIZER):
        edits.refuse(training.backward_passes()[0], "no optimizer of torch.optim is made for these gradients")
    for call in source.all(cst.Call):
        name = source.full_name(call.func)
        if name in STARTS_PROCESSES or name.startswith("torch.distributed.fsdp"):
            edits.refuse(call, f"`{name}` starts or divides work itself")
        elif name in ("torch.autograd.backward", "exec", "eval") or called_attribute(call) == "manual_backward":
            edits.refuse(call, f"cannot look into `{source.code(call)}`")
        elif name.startswith(FUNCTIONAL):
            edits.refuse(call, f"computes gradients apart from `backward()`: `{source.code(call)}`")
    _look_for_unknown_steps(training, edits)
    _look_for_updates_by_hand(source, edits)
    _look_for_clocks(training, edits)


def _look_for_unknown_steps(training: Training, edits: Edits) -> None:
    """Refuse steps of an optimizer that the script creates in an unknown place: its gradients would not be reduced."""
    source, known = training.source, {call for call, _ in training.steps()}
    clears = {
        source.code(call.func.value)
        for call in source.all(cst.Call)
        if called_attribute(call) == "zero_grad" and isinstance(call.func, cst.Attribute)
    }
    for call in source.all(cst.Call):
        if called_attribute(call) != "step" or call in known or not isinstance(call.func, cst.Attribute):
            continue
        stepped = call.func.value
        if training.flows.holds(stepped, TrackedKind.SCALER) and call.args:
            stepped = call.args[0].value
        text = source.code(stepped)
        if text in clears or re.search(r"optim(?!\w*sched)|(?<![a-z])opt(?![a-z])", text, re.IGNORECASE):
            edits.refuse(call, f"cannot tell which optimizer of torch.optim `{text}` is")


IN_PLACE = {
    "add_", "sub_", "copy_", "addcmul_", "addcdiv_", "mul_", "lerp_", "_foreach_add_", "_foreach_sub_",
    "_foreach_copy_",
}  # fmt: skip


def _look_for_updates_by_hand(source: Source, edits: Edits) -> None:
    """Refuse updates such as `p -= lr * p.grad`, because each rank would use the gradient of its own part of the
    batch.
    """

    def has_gradient(node: cst.CSTNode) -> bool:
        return any(_is_gradient(there) for there in source.all(cst.Attribute, node))

    named = {
        source.symbol(target)
        for assign in source.all(cst.Assign)
        if has_gradient(assign.value)
        for target in _names(assign)
    }

    def uses_gradient(node: cst.CSTNode) -> bool:
        return has_gradient(node) or any(source.symbol(name) in named for name in source.all(cst.Name, node))

    # Each change is a tuple (statement or call, changed tensor, operand).
    changes: list[tuple[cst.CSTNode, cst.BaseExpression, cst.CSTNode]]
    changes = [
        (aug, aug.target, aug.value)
        for aug in source.all(cst.AugAssign)
        if has_gradient(aug.value) and not re.search(COUNTS, source.code(aug.target), re.IGNORECASE)
    ]
    for assign in source.all(cst.Assign):
        changes += [(assign, each, assign.value) for each in targets(assign) if dotted(each).endswith(".data")]
    for call in source.all(cst.Call):
        if called_attribute(call) in IN_PLACE and isinstance(call.func, cst.Attribute):
            changes += [(call, call.func.value, arg) for arg in call.args]
    for node, what, value in changes:
        if uses_gradient(value) and not uses_gradient(what) and not source.derives(source.class_of(node), "Optimizer"):
            edits.refuse(node, f"changes a parameter by its gradient without an optimizer: `{source.code(node)}`")


COUNTS = r"grad|norm|total|sum|loss|count"
"""Pattern of names of variables, such as `grad_norm`, that are probably sums over gradients and not parameters."""


def _look_for_clocks(training: Training, edits: Edits) -> None:
    """Refuse loops that end after a time limit, because they would end at different iterations on different ranks."""
    source = training.source
    timed = {
        node.value for assign in source.all(cst.Assign) if _reads_clock(source, assign.value) for node in _names(assign)
    }
    ends: list[cst.If | cst.While] = [
        branch for branch in source.all(cst.If) if _leaves(branch) and _trains_around(training, branch)
    ]
    ends += [loop for loop in source.all(cst.While) if training.trains(loop.body)]
    for node in ends:
        if _reads_clock(source, node.test) or any(name.value in timed for name in source.all(cst.Name, node.test)):
            text = source.code(node.test)
            edits.refuse(node, f"ranks may decide differently, each by its own clock: `{text}`")


def _leaves(branch: cst.If) -> bool:
    return any(isinstance(node, cst.Break | cst.Return | cst.Continue) for node in walk(branch.body))


def _reads_clock(source: Source, node: cst.CSTNode) -> bool:
    return any(source.full_name(call.func) in CLOCKS for call in source.all(cst.Call, node))


def _names(assign: cst.Assign) -> list[cst.Name]:
    return [target.target for target in assign.targets if isinstance(target.target, cst.Name)]


def _trains_around(training: Training, node: cst.CSTNode) -> bool:
    around = training.source.above(node)
    return any(isinstance(there, cst.For | cst.While) and training.trains(there) for there in around)


DRAWS = {"torch.randint", "numpy.random.randint", "numpy.random.choice", "random.sample", "random.choices"}
SPLITS = {"split", "chunk", "array_split"}


class HandCut:
    """Editor of scripts that cut batches themselves, without a data loader. It divides the data among the ranks."""

    def __init__(self, training: Training, edits: Edits, *, ranks: str) -> None:
        """Store the name `ranks` that `sirtaki.torch.ranks` has in the script."""
        self._training, self._edits, self._ranks = training, edits, ranks
        self._source: Source = training.source
        self._functions = self._called_in_training()

    def divide(self, values: RankValues) -> None:
        """Record the edits that divide the data among the ranks.

        Add each expression that becomes a rank's part of a batch to `values`.
        """
        flows = self._training.flows
        read = {site for loop in self._training.other_loops for site in flows.holds(loop.iter, TrackedKind.LOADER)}
        for site in flows.made(TrackedKind.LOADER):
            if site not in read:
                self._edits.refuse(site.call, "cannot see which loop trains on this loader")
        cut = [*self._slices(), *self._draws()]
        for loop in self._split_loops():
            self._edits.wrap(loop.iter, f"map({self._ranks}.share, {{it}})")
            values.batches.add(loop.iter)
        found = bool(cut or values.batches)
        if not found:
            cut = list(self._whole_sets())
            if cut:
                names = ", ".join(dict.fromkeys(f"`{self._source.code(node)}`" for node in cut))
                others = f"other tensors of a row for each sample need `{self._ranks}.share(…)`, too"
                self._edits.note(cut[0], f"taken for all the data, and divided: {names}; {others}")
        for node in cut:
            self._edits.wrap(node, f"{self._ranks}.share({{it}})")
            values.batches.add(node)
        if not cut and not found:
            first = self._training.backward_passes()[0]
            self._edits.refuse(first, "cannot find the loader or the batches that are trained on here")
            return
        for call in self._source.all(cst.Call):
            if self._source.full_name(call.func) in ("torch.randperm", "numpy.random.permutation") and self._trains(
                call
            ):
                self._edits.wrap(call, f"{self._ranks}.agreed({{it}})")
        self._edits.note(0, "each batch is divided among the ranks; learning rates stay as they are")

    def _trains(self, node: cst.CSTNode) -> bool:
        """Return whether this part of the script (syntax node) runs during training."""
        if self._source.function_of(node) in self._functions:
            return True
        around = (there for there in self._source.above(node) if isinstance(there, cst.For | cst.While))
        return any(self._training.trains(loop) for loop in around)

    def _called_in_training(self) -> set[str]:
        """Return the functions that training loops call, and the functions that contain training loops."""
        found: set[str] = set()
        loops = [
            loop
            for loop in walk(self._source.module)
            if isinstance(loop, cst.For | cst.While) and self._training.trains(loop)
        ]
        pending: list[cst.CSTNode] = [loop.body for loop in loops]
        while pending:
            for call in self._source.all(cst.Call, pending.pop()):
                for function in self._training.flows.callees(call):
                    name = self._source.name_of(function)
                    if name not in found and function.name.value not in ("forward", "__init__"):
                        found.add(name)
                        pending.append(function.body)
        return found

    def _slices(self) -> Iterator[cst.Subscript]:
        """Yield batches that are slices such as `X[i : i + size]`, where an enclosing loop counts `i`."""
        for node in self._source.all(cst.Subscript):
            if not self._trains(node) or not isinstance(node.slice[0].slice, cst.Slice):
                continue
            used = {name.value for name in self._source.all(cst.Name, node.slice[0])}
            if used & self._stepped(node):
                yield node

    def _stepped(self, node: cst.CSTNode) -> set[str]:
        """Return the variables of the loops around a node, and the variables that these loops compute from them."""
        names: set[str] = set()
        for there in self._source.above(node):
            if isinstance(there, cst.FunctionDef):
                break
            if isinstance(there, cst.For) and isinstance(there.iter, cst.Call) and self._training.trains(there.body):
                inner = {name.value for name in self._source.all(cst.Name, there.target)}
                for assign in self._source.all(cst.Assign, there.body):
                    if {name.value for name in self._source.all(cst.Name, assign.value)} & inner:
                        inner |= {name.value for t in targets(assign) for name in self._source.all(cst.Name, t)}
                names |= inner
        return names

    def _draws(self) -> Iterator[cst.Call]:
        for call in self._source.all(cst.Call):
            full = self._source.full_name(call.func)
            draws = full in DRAWS and self._trains(call) and len(call.args) > 1
            if draws and (not full.endswith(".randint") or self._is_index(call)):
                yield call

    def _is_index(self, call: cst.Call) -> bool:
        """Return whether `call` chooses random samples: its result is used as an index, or a loop iterates over it."""
        source = self._source
        assign = source.parent(call)
        drawn = {source.symbol(target) for target in targets(assign)} - {None}
        for there in walk(source.module):
            picks: list[cst.CSTNode] = []
            if isinstance(there, cst.SubscriptElement):
                picks = [there]
            elif isinstance(there, cst.For | cst.CompFor):
                picks = [there.iter]
            for pick in picks:
                names = (source.symbol(name) for name in source.all(cst.Name, pick))
                if pick is call or source.contains(pick, call) or any(symbol in drawn for symbol in names):
                    return True
        return False

    def _split_loops(self) -> Iterator[cst.For]:
        for loop in self._source.all(cst.For):
            if isinstance(loop.iter, cst.Call) and self._training.trains(loop.body):
                name = called_attribute(loop.iter)
                if name in SPLITS and isinstance(loop.target, cst.Name):
                    yield loop

    def _whole_sets(self) -> Iterator[cst.Name]:
        """Yield the names of data that each iteration uses whole, as one batch.

        The script assigns such data outside the training loop, and passes them to a model or a loss inside the loop.
        """
        found = {self._source.symbol(name) for name in self._whole_arguments()}
        made = {name for node in walk(self._source.module) for t in targets(node) for name in walk(t)}
        for name in self._source.all(cst.Name):
            if name in made:
                continue
            parent = self._source.parent(name)
            label = isinstance(parent, cst.Arg) and parent.keyword is name
            part = isinstance(parent, cst.Attribute) and parent.attr is name
            if self._source.symbol(name) in found and not label and not part and self._trains_here(name):
                if isinstance(parent, cst.Subscript) and not _takes_all_rows(parent):
                    text = self._source.code(parent)
                    self._edits.refuse(name, f"cannot tell which rows of all the data each rank should take: `{text}`")
                yield name

    def _whole_arguments(self) -> Iterator[cst.Name]:
        """Yield arguments of models, and first two arguments of losses, that the training loop does not create."""
        models = {
            self._source.code(call.func.value)
            for call in self._source.all(cst.Call)
            if called_attribute(call) == "parameters" and isinstance(call.func, cst.Attribute)
        }
        to_models, to_losses = list[cst.Name](), list[cst.Name]()
        for call in self._source.all(cst.Call):
            if not self._trains_here(call):
                continue
            given, into = call.args, to_models
            if self._source.code(call.func) not in models:
                name = self._source.full_name(call.func)
                made = bool(self._training.flows.holds(call.func, TrackedKind.LOSS))
                is_named = any(word in name.lower() for word in ("loss", "entropy", "criterion"))
                given, into = given[:2] if made or is_named else (), to_losses
            for arg in given:
                data = _receiver(arg.value)
                if data is not None and data.value not in self._source.imported and not self._made_around(data):
                    into.append(data)
        if to_losses and not to_models:
            return  # Yield nothing: if no model gets the whole data, no loss gets all targets.
        yield from (*to_models, *to_losses)

    def _trains_here(self, node: cst.CSTNode) -> bool:
        """Return whether the enclosing function or loop contains a backward pass."""
        for there in self._source.above(node):
            if isinstance(there, cst.FunctionDef | cst.For | cst.While):
                return bool(self._training.backward_passes(there.body))
        return False

    def _made_around(self, name: cst.Name) -> bool:
        """Return whether the enclosing loop or closure assigns to a name."""
        symbol = self._source.symbol(name)
        for there in self._source.above(name):
            if isinstance(there, cst.FunctionDef) and any(p.name.value == name.value for p in parameters(there)):
                return True
            if isinstance(there, cst.FunctionDef | cst.For | cst.While):
                for node in walk(there):
                    names = (name for target in targets(node) for name in self._source.all(cst.Name, target))
                    if any(self._source.symbol(name) == symbol for name in names):
                        return True
                if not isinstance(there, cst.FunctionDef):
                    return False
        return False


def _takes_all_rows(node: cst.Subscript) -> bool:
    """Return whether a subscript keeps all elements of the first axis: `x[:, 0]`, `x[...]`, `x[None]`."""
    first = node.slice[0].slice
    if isinstance(first, cst.Slice):
        return first.lower is None and first.upper is None
    inner = first.value if isinstance(first, cst.Index) else None
    return isinstance(inner, cst.Ellipsis) or (isinstance(inner, cst.Name) and inner.value == "None")


def _receiver(node: cst.BaseExpression) -> cst.Name | None:
    """Return the name `Y` of the expression `Y`, `Y[:, 0]` or `Y.flip(1)`. None for other expressions."""
    if isinstance(node, cst.Call):
        return _receiver(node.func.value) if isinstance(node.func, cst.Attribute) else None
    if isinstance(node, cst.Attribute | cst.Subscript):
        return _receiver(node.value)
    return node if isinstance(node, cst.Name) else None


# ── translations of scripts for one process, for DistributedDataParallel and for Horovod ──────────────────────────────

CALLS = {
    "get_rank": "rank",
    "get_world_size": "size",
    "is_initialized": "is_initialized",
    "barrier": "barrier",
    "destroy_process_group": "shutdown",
}
"""{function of torch.distributed: function of Sirtaki that a translated script calls instead, without the arguments}"""

OPERATIONS = {"SUM": "Sum", "AVG": "Average", "MIN": "Min", "MAX": "Max", "PRODUCT": "Product"}
VARIABLES = {
    "RANK": "rank",
    "WORLD_SIZE": "size",
    "LOCAL_RANK": "local_rank",
    "LOCAL_WORLD_SIZE": "local_size",
}
PLACES = (("num_replicas", "size"), ("rank", "rank"))
"""{argument of DistributedSampler that describes the ranks: function of `sirtaki.torch` that returns its value}"""

PACKAGE = "torch.distributed."


class FromDdp:
    """Translator of one script that uses DistributedDataParallel."""

    def __init__(self, source: Source, edits: Edits) -> None:
        self._source, self._edits, self._hvd = source, edits, free_name(source, "hvd")
        self._flows = Flows(source)
        self._training = Training(self._flows)

    def change(self) -> None:
        """Record, in `edits`, the changes that translate the script, and the code that cannot be translated."""
        look_for_what_cannot_be(self._training, self._edits)
        if self._edits.obstacles:
            return
        for call in self._source.all(cst.Call):
            self._call(call)
        for node in self._source.all(cst.Subscript):
            self._variable(node, self._source.code(node.slice[0].slice))
        for site in self._flows.made(TrackedKind.WRAPPER):
            undo_wrapper(self._source, self._flows, self._edits, site.call)
        ranks = free_name(self._source, "ranks")
        optimizers = Optimizers(self._training, self._edits, hvd=self._hvd, ranks=ranks)
        optimizers.distribute({})
        self._imports(ranks if optimizers.uses_ranks else "")

    def _call(self, call: cst.Call) -> None:
        name = self._source.full_name(call.func)
        method = called_attribute(call)
        if name == "torch.utils.data.distributed.DistributedSampler" or name == "torch.utils.data.DistributedSampler":
            self._sampler(call)
        elif method == "no_sync":
            self._edits.replace(call, "contextlib.nullcontext()")
        elif name in ("os.environ.get", "os.getenv"):
            if call.args and re.fullmatch(r"""["'](\w+)["']""", self._source.code(call.args[0].value)):
                self._variable(call, self._source.code(call.args[0].value))
        elif name.startswith(PACKAGE):
            self._of_package(call, name.removeprefix(PACKAGE))
        elif name.endswith("convert_sync_batchnorm"):
            self._edits.refuse(call, f"use `{self._hvd}.SyncBatchNorm` where the model is made")

    def _of_package(self, call: cst.Call, name: str) -> None:
        hvd = self._hvd
        if argument(call, "group") is not None:
            self._edits.refuse(call, "groups of ranks are `process_set=` here")
        elif name == "init_process_group":
            self._edits.replace(call, f"{hvd}.init()")
        elif name in CALLS:
            self._edits.replace(call, f"{hvd}.{CALLS[name]}()")
        elif name == "all_reduce" and call.args:
            self._all_reduce(call)
        elif name == "broadcast" and len(call.args) > 1:
            tensor, root = (
                self._source.code(argument(call, key, at) or call) for key, at in (("tensor", 0), ("src", 1))
            )
            self._edits.replace(call, f"{hvd}.broadcast_({tensor}, root_rank={root})")
        else:
            self._edits.refuse(call, f"has no counterpart that is sure: `{self._source.code(call)}`")

    def _all_reduce(self, call: cst.Call) -> None:
        op = argument(call, "op", 1)
        operation = "SUM" if op is None else self._source.code(op).rpartition(".")[2]
        if operation not in OPERATIONS or argument(call, "async_op") is not None:
            self._edits.refuse(call, f"has no counterpart that is sure: `{self._source.code(call)}`")
            return
        tensor = self._source.code(call.args[0].value)
        self._edits.replace(call, f"{self._hvd}.allreduce_({tensor}, op={self._hvd}.{OPERATIONS[operation]})")

    def _sampler(self, call: cst.Call) -> None:
        for position, (name, function) in enumerate(PLACES, start=1):
            given = argument(call, name, position)
            if given is not None:
                self._edits.replace(given, f"{self._hvd}.{function}()")
        if argument(call, "num_replicas", 1) is None:
            added = [keyword(name, f"{self._hvd}.{function}()") for name, function in PLACES]
            self._edits.change(call, lambda node: with_more(node, *added))
        if "set_epoch" not in self._source.text:
            self._edits.note(call, "nobody calls this sampler's `set_epoch`: all epochs have one order")

    def _variable(self, node: cst.BaseExpression, text: str) -> None:
        """Replace `node`, which reads an environment variable (`int(os.environ["LOCAL_RANK"])`), by a call of Sirtaki's
        function.
        """
        name = text.strip("\"'")
        if name not in VARIABLES or (
            "environ" not in self._source.code(node) and "getenv" not in self._source.code(node)
        ):
            return
        around = self._source.parent(self._source.parent(node))
        whole = node
        if isinstance(around, cst.Call) and self._source.code(around.func) == "int":
            whole = around
        if isinstance(self._source.parent(node), cst.AssignTarget):
            self._edits.refuse(node, "sets what the launcher sets")
            return
        self._edits.replace(whole, f"{self._hvd}.{VARIABLES[name]}()")

    def _imports(self, ranks: str) -> None:
        """Replace the imports of torch.distributed and of DistributedDataParallel."""
        gone, placed = {"torch.distributed", "torch.nn.parallel.DistributedDataParallel"}, False
        for statement in self._source.module.body:
            if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
                continue
            node = statement.body[0]
            if not isinstance(node, cst.Import | cst.ImportFrom) or isinstance(node.names, cst.ImportStar):
                continue
            brought = [self._source.imported.get(bound_name(alias), "") for alias in node.names]
            if not set(brought) <= gone or (
                "torch.distributed" not in brought and "DistributedDataParallel" not in str(brought)
            ):
                continue
            if not placed:
                self._edits.after(statement, *import_lines(self._source, statement, hvd=self._hvd, ranks=ranks))
                placed = True
            self._edits.remove(statement)
        if not placed:
            first = self._first_import()
            self._edits.after(first, *import_lines(self._source, first, hvd=self._hvd, ranks=ranks))
        if "no_sync" in self._source.text and "contextlib" not in self._source.imported:
            self._edits.before(self._first_import(), "import contextlib")

    def _first_import(self) -> cst.BaseStatement:
        first = next(statement for statement in self._source.module.body if _is_import(statement))
        assert isinstance(first, cst.BaseStatement)
        return first


def _is_import(statement: cst.CSTNode) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Import | cst.ImportFrom)
        and (not isinstance(statement.body[0], cst.ImportFrom) or "__future__" not in cst.Module([statement]).code)
    )


def change_imports(source: Source, edits: Edits) -> None:
    """Record, in `edits`, the changes of imports that translate a Horovod script, and code that
    cannot be translated.
    """
    for node in walk(source.module):
        if isinstance(node, cst.ImportAlias) and _is_horovod(node.name):
            _change(source, edits, node, node.name)
        elif isinstance(node, cst.ImportFrom) and node.module is not None and _is_horovod(node.module):
            _change(source, edits, node, node.module)


def _is_horovod(name: cst.BaseExpression) -> bool:
    return dotted(name).split(".")[0] == "horovod"


def _change(source: Source, edits: Edits, node: cst.CSTNode, name: cst.BaseExpression) -> None:
    package = dotted(name)
    if package == "horovod.torch" or package.startswith("horovod.torch.") or package == "horovod.run":
        edits.replace(name, package.replace("horovod", "sirtaki", 1))
    else:
        edits.refuse(node, f"`{package}` has no counterpart: Sirtaki speaks PyTorch")


def distribute(source: Source, edits: Edits) -> None:
    """Record, in `edits`, the changes that translate a script for one process, and code that cannot be translated."""
    flows = Flows(source)
    training = Training(flows)
    hvd, ranks = free_name(source, "hvd"), free_name(source, "ranks")
    look_for_what_cannot_be(training, edits)
    if edits.obstacles:
        return
    values = RankValues(training, edits, ranks=ranks)
    if training.divided:
        _divide(training, edits, ranks)
    else:
        HandCut(training, edits, ranks=ranks).divide(values)
    for loop in training.other_loops:
        _agree(training, edits, loop, ranks)
    if training.other_loops:
        edits.note(0, "loops that do not train see all of their data on every rank")
    values.follow()
    Optimizers(training, edits, hvd=hvd, ranks=ranks).distribute(values.losses)
    output = Output(source, flows, edits, hvd=hvd, ranks=ranks)
    output.keep()
    lines = [f"{hvd}.init()", *place(source, flows, edits, hvd=hvd), *output.begins_with, *_seeds(source, ranks)]
    begin(source, edits, hvd=hvd, ranks=ranks, lines=lines)
    if "BatchNorm" in source.text:
        edits.note(0, f"batch norm sees a rank's part of a batch; `{hvd}.SyncBatchNorm` sees all of it")


def _divide(training: Training, edits: Edits, ranks: str) -> None:
    source = training.source
    for site in training.divided:
        call = site.call
        if argument(call, "batch_sampler", 5) is not None:
            edits.refuse(call, "the loader has a batch sampler of its own, which cannot be divided")
        size = argument(call, "batch_size", 1)
        starred = any(arg.star for arg in call.args)
        if (size is None and not starred) or (size is not None and source.code(size) in ("1", "None")):
            edits.refuse(call, "batches of one sample cannot be divided among ranks")
        edits.wrap(call, f"{ranks}.divided({{it}})")
        if size is not None:
            _refuse_batch_size(training, edits, size)
    for loop in training.loops:
        for name in training.loader_names(loop.iter):
            if name not in training.flows.sites:
                text = source.code(name)
                epoch = training.epoch(loop) or f"{text}.sampler.epoch + 1"
                edits.before(source.statement(loop), f"{text}.sampler.set_epoch({epoch})")
    for relay in training.relays:
        _relay(training, edits, relay)
    for call in source.all(cst.Call):
        if isinstance(call.func, cst.Name) and call.func.value == "iter" and call.args:
            _begin_pass(training, edits, call, ranks)
    for other in training.other_loops:
        for name in training.loader_names(other.iter):
            if training.is_divided(name) and name not in training.flows.sites:
                edits.wrap(name, f"{ranks}.whole({{it}})")
    edits.note(0, "each batch is divided among the ranks, which must divide its size; learning rates stay as they are")


def _begin_pass(training: Training, edits: Edits, call: cst.Call, ranks: str) -> None:
    loader, source = call.args[0].value, training.source
    if not training.is_divided(loader):
        return
    is_read = any(source.contains(read, call) or training.flows.values(read.args[0].value) for read in training.reads)
    if is_read:
        text = source.code(loader)
        edits.before(source.statement(call), f"{text}.sampler.set_epoch({text}.sampler.epoch + 1)")
    else:
        edits.wrap(loader, f"{ranks}.whole({{it}})")


def _relay(training: Training, edits: Edits, relay: cst.For) -> None:
    """Insert code before `relay`, so that each pass over the data has its own random order.

    `relay` is a loop over a data loader, in a generator that repeats the data endlessly. In other generators, nothing
    is inserted: each pass begins in the loop that consumes the generator.
    """
    source = training.source
    if not any(isinstance(there, cst.While) for there in source.above(relay)):
        return
    for name in training.loader_names(relay.iter):
        text = source.code(name)
        edits.before(relay, f"{text}.sampler.set_epoch({text}.sampler.epoch + 1)")
        if not set(training.flows.holds(name, TrackedKind.LOADER)) <= set(training.divided):
            edits.refuse(relay, "yields batches of a loader that is trained on, and of one that is not")


def _agree(training: Training, edits: Edits, loop: Loop, ranks: str) -> None:
    """Insert code that sums, over all ranks, the sums that an evaluation loop computes.

    Does nothing for loops that train.
    """
    source = training.source
    if not isinstance(loop, cst.For):
        return
    sums = [node.target for node in source.all(cst.AugAssign, loop.body)]
    names = dict.fromkeys(source.code(node) for node in sums if isinstance(node, cst.Name | cst.Attribute))
    for name in names:
        edits.after(loop, f"{name} = {ranks}.agreed({name})")


def _refuse_batch_size(training: Training, edits: Edits, size: cst.BaseExpression) -> None:
    """Refuse uses of the batch size outside the data loader, because a rank's part of a batch has fewer rows."""
    source = training.source
    text = source.code(size)
    if isinstance(size, cst.Integer):
        return
    for loop in training.loops:
        for call in source.all(cst.Call, source.statement(loop)):
            name = source.full_name(call.func)
            if name.startswith("torch.") and any(source.code(arg.value) == text for arg in call.args):
                edits.refuse(call, f"`{text}` is the size of all ranks' parts; take that of the data, `x.size(0)`")


def _seeds(source: Source, ranks: str) -> list[str]:
    """Return code lines that set the same seed on all ranks; no lines if the script sets a seed itself.

    Ranks need equal seeds to divide the data and to initialise weights in the same way.
    """
    lines = []
    names = {source.full_name(call.func) for call in source.all(cst.Call)}
    seeded = any(name.rpartition(".")[2] in ("manual_seed", "seed_everything", "set_seed") for name in names)
    if not seeded:
        lines.append(f"torch.manual_seed({ranks}.agreed(torch.initial_seed()))")
    numpy = next((name for name, what in source.imported.items() if what == "numpy"), "")
    uses_numpy = any(name.startswith("numpy.random.") and "default_rng" not in name for name in names)
    if uses_numpy and "numpy.random.seed" not in names and numpy:
        lines.append(f"{numpy}.random.seed({ranks}.agreed({numpy}.random.randint(2**31)))")
    if any(name.startswith("random.") and name[7:8].islower() for name in names) and "random.seed" not in names:
        lines.append(f"random.seed({ranks}.agreed(random.getrandbits(32)))")
    return lines if source.imported.get("torch") == "torch" else [line for line in lines if "torch." not in line[:6]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Result of a translation.

    Attributes:
        before: original text.
        after: translated text, which trains on several ranks. Equal to `before` if the script does so already.
        notes: notes for the user, as (line, text). Line 0 stands for the whole script.
    """

    before: str
    after: str
    notes: tuple[tuple[int, str], ...]

    def diff(self, name: str) -> str:
        """Return the changes of the script `name` as a unified diff. "" if nothing was changed."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(before, after, fromfile=name, tofile=name))


def translate(text: str) -> Translation:
    """Translate a script for one process, for DistributedDataParallel or for Horovod into a script for Sirtaki.

    Raises:
        TranslationError: the script contains code that cannot be translated.
    """
    source = Source(text)
    edits = Edits(source)
    if source.imports("sirtaki"):
        return Translation(before=text, after=text, notes=((0, "it uses Sirtaki already"),))
    if source.imports("horovod"):
        source = Source(text, as_written=True)
        edits = Edits(source)
        change_imports(source, edits)
    elif source.imports("torch.distributed") or "DistributedDataParallel" in text:
        FromDdp(source, edits).change()
    else:
        distribute(source, edits)
    if edits.obstacles:
        raise TranslationError.of(edits.obstacles)
    after = edits.applied(source.module)
    _require_sound(text, after)
    return Translation(before=text, after=after, notes=tuple(sorted(edits.notes)))


def _require_sound(before: str, after: str) -> None:
    """Refuse a translated text that Python cannot compile, or that uses an undefined name.

    Raises:
        TranslationError: the text is refused. The error has the line of the original script, or line 1 if the
            translation has added the name.
    """
    try:
        known = undefined_names(before)
    except SyntaxError as err:
        raise TranslationError.of([(err.lineno or 1, f"invalid Python: {err.msg}")]) from err
    try:
        new = undefined_names(after) - known
    except SyntaxError as err:
        raise TranslationError.of([(1, f"its translation would be no Python, in `{err.text}`: {err.msg}")]) from err
    if new:
        lines = before.splitlines()
        uses = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in sorted(new)))
        line = next((number for number, text in enumerate(lines, 1) if uses.search(text)), 1)
        names = ", ".join(f"`{name}`" for name in sorted(new))
        raise TranslationError.of([(line, f"its translation would use {names} where the script does not define it")])
