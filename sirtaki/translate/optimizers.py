"""Optimizers become distributed ones, models begin alike, and gradients that a script looks at are reduced before."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from .edits import Edits
from .flows import Kind, Site
from .source import Source, argument, called_attribute, walk
from .training import Training
from .values import Over

AT_STEP = 1_000_000
"""Backward passes before a step that nobody reaches: gradients are reduced when the step is made."""

READS_GRADIENTS = {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "unscale_", "get_total_norm"}


class Optimizers:
    """Edits what makes optimizers and what uses them."""

    def __init__(self, training: Training, edits: Edits, *, hvd: str) -> None:
        self._training, self._flows, self._edits, self._hvd = training, training.flows, edits, hvd
        self._source: Source = training.source

    def distribute(self, losses: dict[Over, int]) -> None:
        """All of them; `losses` are what backward passes begin from, with a line of each."""
        options = ""
        if not self._training.passes_are_counted():
            options += f", backward_passes_per_step={AT_STEP:_}"
            self._edits.note(
                0, "gradients of several backward passes are added up, and reduced when `step()` is called"
            )
        if Over.SUM in losses:
            options += f", op={self._hvd}.Sum"
            if Over.MEAN in losses:
                self._edits.refuse(losses[Over.SUM], f"a loss is a sum here, and a mean in line {losses[Over.MEAN]}")
        for site in self._flows.made(Kind.OPTIMIZER):
            self._distribute(site, options)
        self._synchronise()

    def _distribute(self, site: Site, options: str) -> None:
        source, call = self._source, site.call
        models = list(dict.fromkeys(source.code(model) for model in self._models(call)))
        if not models:
            self._edits.refuse(source.line(call), f"cannot tell whose parameters `{source.code(call)}` has")
            return
        named = f", named_parameters={models[0]}.named_parameters()" if len(models) == 1 else ""
        statement = source.statement(call)
        target = _assigned(source, call)
        broadcasts = [f"{self._hvd}.broadcast_parameters({model}.state_dict(), root_rank=0)" for model in models]
        if target is None:
            self._edits.before(statement, *broadcasts)
            wrapped = f"{self._hvd}.DistributedOptimizer"
            extra = f"{named}{options}"
            self._edits.change(call, lambda inner: _with_arguments(wrapped, inner, extra))
        else:
            name = source.code(target)
            line = f"{name} = {self._hvd}.DistributedOptimizer({name}{named}{options})"
            self._edits.after(statement, *broadcasts, line)

    def _models(self, call: cst.Call) -> Iterator[cst.BaseExpression]:
        """Whose parameters an optimizer gets."""
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
        """`model` of `model.head`, since a part cannot be made alike without the rest."""
        while isinstance(node, cst.Attribute) and not (isinstance(node.value, cst.Name) and node.value.value == "self"):
            node = node.value
        return node

    def _origins(self, name: cst.Name) -> Iterator[cst.CSTNode]:
        """What a name was made from in its function: assigned, appended to, or looped over."""
        symbol = self._source.symbol(name)
        for assign in self._source.all(cst.Assign):
            if any(self._source.symbol(target.target) == symbol for target in assign.targets):
                yield assign.value
        for loop in self._source.all(cst.For):
            for call in self._source.all(cst.Call, loop.body):
                if called_attribute(call) in ("append", "extend") and any(
                    self._source.symbol(there) == symbol for there in self._source.all(cst.Name, call.func)
                ):
                    yield loop.iter

    # ── gradients that are looked at ─────────────────────────────────────────────────────────────────────────────

    def _synchronise(self) -> None:
        """In front of what reads gradients, and around the step that follows."""
        steps = list(self._training.steps())
        for call, optimizer in steps:
            if call.args and self._source.code(call.args[0].value) != self._source.code(optimizer):
                continue  # a closure: reduced after each call of it
            step = self._source.statement(call)
            alone = isinstance(step, cst.SimpleStatementLine) and len(step.body) == 1
            reads = self._reads_before(call) + ([] if alone else self._reads(step))
            if not reads and not call.args:
                continue
            if not alone:
                line = self._source.line(call)
                self._edits.refuse(line, "gradients are read before this step: put it on a line of its own")
                continue
            name = self._source.code(optimizer)
            self._edits.before(self._source.statement(reads[0] if reads else call), f"{name}.synchronize()")
            self._edits.put_into(step, f"with {name}.skip_synchronize()")

    def _reads_before(self, step: cst.Call) -> list[cst.CSTNode]:
        """What reads gradients in the block of a step or one inside, in front of it."""
        statement = self._source.statement(step)
        block = self._source.parent(statement)
        found: list[cst.CSTNode] = []
        for sibling in block.children:
            if sibling is statement:
                break
            if self._training.backward_passes(sibling):
                found.clear()
            found += self._reads(sibling)
        return found

    def _reads(self, part: cst.CSTNode) -> list[cst.CSTNode]:
        """What reads gradients in a part of the script, behind its last backward pass."""
        found: list[cst.CSTNode] = []
        for node in walk(part):
            if isinstance(node, cst.Call):
                if called_attribute(node) == "backward":
                    found.clear()
                elif {called_attribute(node), self._source.full_name(node.func).rpartition(".")[2]} & READS_GRADIENTS:
                    found.append(node)
            elif (
                isinstance(node, cst.Attribute) and node.attr.value == "grad" and dotted_base(node) != "torch.autograd"
            ):
                found.append(node)
        return found


def dotted_base(node: cst.Attribute) -> str:
    """What stands before the last dot, if it is a dotted name."""
    parts: list[str] = []
    there = node.value
    while isinstance(there, cst.Attribute):
        parts.append(there.attr.value)
        there = there.value
    return ".".join([there.value, *reversed(parts)]) if isinstance(there, cst.Name) else ""


def _assigned(source: Source, call: cst.Call) -> cst.BaseExpression | None:
    """What a call's value is assigned to, if it is just that."""
    assign = source.parent(call)
    if isinstance(assign, cst.Assign) and len(assign.targets) == 1:
        target = assign.targets[0].target
        return target if isinstance(target, cst.Name | cst.Attribute) else None
    return None


def _with_arguments(function: str, inner: cst.BaseExpression, extra: str) -> cst.BaseExpression:
    wrapped = cst.parse_expression(f"{function}(_{extra})")
    assert isinstance(wrapped, cst.Call)
    return wrapped.with_changes(args=[wrapped.args[0].with_changes(value=inner), *wrapped.args[1:]])
