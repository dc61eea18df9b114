"""Which modules run when, seen by PyTorch's global hooks on modules, and which of autograd's nodes they make."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from .live_tensors import address_of
from .step_memory import Module

Address = tuple[str, int]
"""(device, address) of a storage."""

LARGEST_NODE = 1 << 62
"""Autograd's numbers are below; nodes that have none bear the largest number there is."""


def model_is_compiled() -> bool:
    """Something was compiled by now; hooks on modules would have it compiled anew, or run twice."""
    from torch._dynamo.utils import counters

    return counters["frames"]["total"] > 0


@dataclass(slots=True)
class SeenCall:
    """A forward pass of a module.

    Attributes:
        parent: by place; -1 = none.
        first_node: autograd's number of what it makes first.
        inputs, outputs: where tensors lie, if they were asked for.
        batch: length of the first dimension of its first input, likewise.
    """

    module: nn.Module
    parent: int
    begin_s: float
    end_s: float
    first_node: int
    inputs: tuple[Address, ...] = ()
    outputs: tuple[Address, ...] = ()
    batch: int = 0


class ModuleCalls:
    """Those of this thread, while it watches.

    Attributes:
        calls: in their order; one that has not ended yet ends when it began.
        with_tensors: where inputs and outputs lie is asked for.
    """

    def __init__(self) -> None:
        """Watches from now on."""
        self.calls: list[SeenCall] = []
        self.with_tensors = False
        self._stack: list[int] = []
        self._changes_s: list[float] = []
        self._changes_at_node: list[int] = []
        self._inside: list[int] = []  # after each change
        self._thread = threading.get_ident()
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def stop(self) -> None:
        """Watches no more."""
        for hook in self._hooks:
            hook.remove()

    def at(self, moment_s: float) -> int:
        """The innermost call then, by place; -1 = none."""
        return self._found(bisect_right(self._changes_s, moment_s))

    def of_node(self, number: int) -> int:
        """The innermost call that has made a node of autograd's graph; -1 = none."""
        known = 0 <= number < LARGEST_NODE
        return self._found(bisect_right(self._changes_at_node, number)) if known else -1

    def modules(self) -> tuple[tuple[Module, ...], list[int]]:
        """All modules that ran, and which one each call is of, by place."""
        places: dict[int, int] = {}
        found: list[Module] = []
        names: dict[int, dict[int, str]] = {}
        roots = list[int]()
        for call in self.calls:
            root = self.calls[roots[call.parent]].module if call.parent >= 0 else call.module
            roots.append(roots[call.parent] if call.parent >= 0 else len(roots))
            if id(call.module) not in places:
                known = names.setdefault(id(root), {id(module): name for name, module in root.named_modules()})
                places[id(call.module)] = len(found)
                name = known.get(id(call.module), f"({type(call.module).__name__})")  # made on the way, by no name
                found.append(Module(name=name, kind=type(call.module).__name__, root=places[id(root)]))
        return tuple(found), [places[id(call.module)] for call in self.calls]

    def _found(self, changes: int) -> int:
        return self._inside[changes - 1] if changes else -1

    def _before(self, module: nn.Module, _: Any) -> None:  # Any: torch's hook
        if threading.get_ident() != self._thread:
            return
        place, now_s, node = len(self.calls), time.perf_counter(), _next_node()
        parent = self._stack[-1] if self._stack else -1
        self.calls.append(SeenCall(module, parent, now_s, now_s, node))
        self._stack.append(place)
        self._change(now_s, node, place)

    def _after(self, module: nn.Module, args: Any, *rest: Any) -> None:  # Any: torch's hook
        """`rest` is keyword arguments and output; where the module has failed PyTorch leaves out the former."""
        if threading.get_ident() != self._thread or not self._stack:
            return
        call = self.calls[self._stack.pop()]
        call.end_s = time.perf_counter()
        self._change(call.end_s, _next_node(), call.parent)
        if self.with_tensors:
            inputs = tree_leaves((args, rest[:-1]))
            call.inputs, call.outputs = tuple(_addresses(inputs)), tuple(_addresses(tree_leaves(rest[-1])))
            shaped = [value.shape[0] for value in inputs if isinstance(value, torch.Tensor) and value.dim()]
            call.batch = shaped[0] if shaped else 0

    def _change(self, now_s: float, node: int, inside: int) -> None:
        self._changes_s.append(now_s)
        self._changes_at_node.append(node)
        self._inside.append(inside)


def _next_node() -> int:
    return int(torch._C._autograd._get_sequence_nr())


def _addresses(values: Iterable[object]) -> Iterable[Address]:
    for value in values:
        found = address_of(value) if isinstance(value, torch.Tensor) else None
        if found is not None:
            yield found
