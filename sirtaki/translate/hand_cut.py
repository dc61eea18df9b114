"""Batches that a script cuts itself, without a loader: each rank takes its part of each."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from .edits import Edits
from .flows import Kind
from .rank_values import RankValues
from .source import Source, called_attribute, parameters, targets, walk
from .training import Training

DRAWS = {"torch.randint", "numpy.random.randint", "numpy.random.choice", "random.sample", "random.choices"}
SPLITS = {"split", "chunk", "array_split"}


class HandCut:
    """Finds what a batch is cut from, and divides it among the ranks."""

    def __init__(self, training: Training, edits: Edits, *, ranks: str) -> None:
        """`ranks` is the name that `sirtaki.torch.ranks` has in the script."""
        self._training, self._edits, self._ranks = training, edits, ranks
        self._source: Source = training.source
        self._functions = self._called_in_training()

    def divide(self, values: RankValues) -> None:
        """Tells `values` which expressions are parts of batches from now on."""
        for site in self._training.flows.made(Kind.LOADER):
            self._edits.refuse(self._source.line(site.call), "cannot see which loop trains on this loader")
        cut = [*self._slices(), *self._draws()]
        for loop in self._split_loops():
            self._edits.wrap(loop.iter, f"map({self._ranks}.share, _)")
            values.batches.add(id(loop.iter))
        found = bool(cut or values.batches)
        if not found:
            cut = list(self._whole_sets())
        for node in cut:
            self._edits.wrap(node, f"{self._ranks}.share")
            values.batches.add(id(node))
        if not cut and not found:
            first = self._training.backward_passes()[0]
            self._edits.refuse(
                self._source.line(first), "cannot find the loader or the batches that are trained on here"
            )
            return
        for call in self._source.all(cst.Call):
            if self._source.full_name(call.func) in ("torch.randperm", "numpy.random.permutation") and self._trains(
                call
            ):
                self._edits.wrap(call, f"{self._ranks}.agreed")
        self._edits.note(0, "each batch is divided among the ranks; learning rates stay as they are")

    def _trains(self, node: cst.CSTNode) -> bool:
        """Whether a node is run while the script trains."""
        if self._source.function_of(node) in self._functions:
            return True
        around = (there for there in self._source.above(node) if isinstance(there, cst.For | cst.While))
        return any(self._training.trains(loop) for loop in around)

    def _called_in_training(self) -> set[str]:
        """The functions that loops which train call, or that train themselves."""
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
        """`X[i : i + size]`, where `i` is counted by a loop around."""
        for node in self._source.all(cst.Subscript):
            if not self._trains(node) or not isinstance(node.slice[0].slice, cst.Slice):
                continue
            used = {name.value for name in self._source.all(cst.Name, node.slice[0])}
            if used & self._stepped(node):
                yield node

    def _stepped(self, node: cst.CSTNode) -> set[str]:
        """Variables of the loops around a node, and names that are computed from these in them."""
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
            if full in DRAWS and self._trains(call) and len(call.args) > 1:
                yield call

    def _split_loops(self) -> Iterator[cst.For]:
        for loop in self._source.all(cst.For):
            if isinstance(loop.iter, cst.Call) and self._training.trains(loop.body):
                name = called_attribute(loop.iter)
                if name in SPLITS and isinstance(loop.target, cst.Name):
                    yield loop

    def _whole_sets(self) -> Iterator[cst.Name]:
        """All data in one batch: what a model or a loss gets that is not made in the loop."""
        models = {
            self._source.code(call.func.value)
            for call in self._source.all(cst.Call)
            if called_attribute(call) == "parameters" and isinstance(call.func, cst.Attribute)
        }
        for call in self._source.all(cst.Call):
            if not self._trains_here(call):
                continue
            is_model = self._source.code(call.func) in models
            name = self._source.full_name(call.func)
            is_loss = bool(self._training.flows.holds(call.func, Kind.LOSS)) or name.startswith("torch.nn.functional.")
            if is_model or (
                is_loss and ("loss" in name or "entropy" in name or self._training.flows.values(call.func))
            ):
                for arg in call.args:
                    if isinstance(arg.value, cst.Name) and not self._made_around(arg.value):
                        yield arg.value

    def _trains_here(self, node: cst.CSTNode) -> bool:
        """Whether a backward pass stands in the same function, or loop."""
        for there in self._source.above(node):
            if isinstance(there, cst.FunctionDef | cst.For | cst.While):
                return bool(self._training.backward_passes(there.body))
        return False

    def _made_around(self, name: cst.Name) -> bool:
        """Whether the loop or closure around assigns to a name."""
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
