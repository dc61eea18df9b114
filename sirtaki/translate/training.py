"""Which loops train, which loaders they read, and how backward passes and steps follow each other."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from .flows import Flows, Kind
from .source import called_attribute, walk

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
        self.relays = list(flows.relays.values())
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
            if id(node) in self.flows.sites:
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
            ifs = {id(there): there for there in self.source.above(call) if isinstance(there, cst.If)}
            apart = any(
                id(there) in ifs and self._in_body(there, call) != self._in_body(there, other)
                for other in alone
                for there in self.source.above(other)
                if isinstance(there, cst.If)
            )
            if not apart:
                alone.append(call)
        return alone

    def _in_body(self, branch: cst.If, call: cst.Call) -> bool:
        return self.source.contains(branch.body, call)

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
