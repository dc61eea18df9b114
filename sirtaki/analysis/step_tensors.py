"""Memory of a step: tensors alive, calls of modules, and which operators allocate and free them."""

from __future__ import annotations

import gc
import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from sirtaki.autotune.model.replayer import Phase

from .operators import ACCUMULATING, BACKWARD, Event, MemoryEvent, Seen
from .recording import Allocation, Holds, Module, ModuleCall, PhaseSpan, StepMemory

UNSEEN = 0
"""The address of all that is known by its sum only."""


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """What one or several tensors lie in."""

    device: str
    address: int
    n_bytes: int
    holds: Holds


def address_of(tensor: torch.Tensor) -> tuple[str, int] | None:
    """(device, address) of its storage; None if it has none of its own, such as a sparse or a fake one."""
    try:
        storage = tensor.untyped_storage()
        return (str(storage.device), storage.data_ptr()) if storage.nbytes() else None
    except Exception:  # classes of others may raise anything
        return None


def live_storages() -> list[LiveStorage]:
    """Return all live storages; one that is several things counts for the first of the kinds below.

    Of a CUDA device also what no tensor of Python's shows, as one. Files that are mapped are left out.
    """
    tensors, modules, optimizers = list[torch.Tensor](), list[nn.Module](), list[torch.optim.Optimizer]()
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance, which may run code of proxies
        if issubclass(kind, torch.Tensor):
            tensors.append(thing)
        elif issubclass(kind, nn.Module):
            modules.append(thing)
        elif issubclass(kind, torch.optim.Optimizer):
            optimizers.append(thing)
    parameters = [one for one in tensors if issubclass(type(one), nn.Parameter)]
    gradients = [one.grad for one in parameters if one.grad is not None]
    states = [state for each in optimizers for state in vars(each).get("state", {}).values()]
    kinds: tuple[tuple[Holds, Iterable[torch.Tensor]], ...] = (
        (Holds.PARAMETERS, parameters),
        (Holds.FLAT_BUFFERS, (one for one in gradients if _is_part(one))),
        (Holds.GRADIENTS, gradients),
        (Holds.MODULE_BUFFERS, _tensors((vars(module).get("_buffers") or {}).values() for module in modules)),
        (Holds.OPTIMIZER, _tensors(state.values() for state in states if isinstance(state, dict))),
        (Holds.OTHER, tensors),
    )
    found: dict[tuple[str, int], LiveStorage] = {}
    for holds, some in kinds:
        for one in some:
            address = address_of(one)
            if address is None or address[0] == "meta" or address in found:
                continue
            if holds is not Holds.OTHER or not _is_mapped(one):
                found[address] = LiveStorage(*address, one.untyped_storage().nbytes(), holds)
    return [*found.values(), *_unseen(found.values())]


def _is_mapped(tensor: torch.Tensor) -> bool:
    """It lies in a file, or in memory that other ranks share, whose own it may be."""
    return getattr(tensor.untyped_storage(), "filename", None) is not None


def _is_part(tensor: torch.Tensor) -> bool:
    """Others lie in its storage, too."""
    return address_of(tensor) is not None and tensor.untyped_storage().nbytes() > tensor.nbytes


def _unseen(known: Iterable[LiveStorage]) -> Iterator[LiveStorage]:
    """Yield what the allocators of CUDA devices have given out beyond what is known."""
    for number in range(torch.cuda.device_count()):
        device = f"cuda:{number}"
        left = torch.cuda.memory_allocated(number) - sum(one.n_bytes for one in known if one.device == device)
        if left > 0:
            yield LiveStorage(device, UNSEEN, left, Holds.OTHER)


def _tensors(groups: Iterable[Iterable[object]]) -> Iterator[torch.Tensor]:
    return (one for group in groups for one in group if isinstance(one, torch.Tensor))


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
    """Calls of modules on this thread, while it watches.

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


def memory_of_step(
    seen: Seen,
    calls: ModuleCalls | None,
    *,
    number: int,
    begin_s: float,
    end_s: float,
    spans: Iterable[PhaseSpan],
    storages: Sequence[LiveStorage],
) -> StepMemory:
    """Return the allocations and the module calls of a step.

    Args:
        seen: torch.profiler was on when it began, and for a step before it.
        calls: of modules; None = not known.
        number: of the iteration.
        begin_s: when it began.
        end_s: when it ended.
        spans: its phases.
        storages: that were there when it began.
    """
    found = _Memory(seen, calls, begin_s, end_s, spans)
    found.take(seen.memory, storages)
    return StepMemory(
        iteration=number,
        begin_s=begin_s,
        end_s=end_s,
        devices=tuple(found.devices),
        batch=found.called[0][1].batch if found.called else 0,
        allocations=tuple(found.told_apart(place, one) for place, one in enumerate(found.allocations)),
        calls=tuple(found.module_calls()),
    )


class _Memory:
    """The memory of a step while its events are taken."""

    def __init__(
        self, seen: Seen, calls: ModuleCalls | None, begin_s: float, end_s: float, spans: Iterable[PhaseSpan]
    ) -> None:
        self._begin_s, self._end_s, self._calls = begin_s, end_s, calls
        inside = [event for event in seen.events if begin_s <= event.begin_s <= end_s]
        # Those of the engine's threads count, too: a device has its own.
        self._backward = sorted(
            (event for event in inside if event.name.startswith(BACKWARD)), key=lambda event: event.begin_s
        )
        self._added_s = [(one.begin_s, one.end_s) for one in self._backward if one.name.endswith(ACCUMULATING)]
        self._spans = sorted(spans, key=lambda span: span.begin_s)
        self.devices: dict[str, int] = {}
        self.allocations: list[Allocation] = []
        self._live: dict[Address, int] = {}
        self._there: defaultdict[Address, list[int]] = defaultdict(list)
        self._short_lived: set[int] = set()  # asked for while a gradient was added
        self._accumulated: set[int] = set()  # others that were given back then
        self.called = [
            (place, call)
            for place, call in enumerate([] if calls is None else calls.calls)
            if begin_s <= call.begin_s and call.end_s <= end_s
        ]
        self._places = {place: number for number, (place, _) in enumerate(self.called)}

    # ── allocations ──────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, events: Iterable[MemoryEvent], storages: Sequence[LiveStorage]) -> None:
        before: dict[Address, MemoryEvent] = {}
        rest = []
        for event in events:
            if event.at_s >= self._begin_s:
                rest.append(event)
            elif event.n_bytes > 0:
                before[event.device, event.address] = event
            else:
                before.pop((event.device, event.address), None)
        for storage in storages:
            before.pop((storage.device, storage.address), None)
        for event in before.values():
            one = Allocation(device=self._device(event.device), n_bytes=event.n_bytes, holds=Holds.OTHER)
            self._add(event.device, event.address, one)
        for storage in storages:
            n_bytes = storage.n_bytes
            if storage.address == UNSEEN:
                n_bytes -= sum(event.n_bytes for event in before.values() if event.device == storage.device)
            if n_bytes > 0:
                one = Allocation(device=self._device(storage.device), n_bytes=n_bytes, holds=storage.holds)
                self._add(storage.device, storage.address, one)
        for event in rest:
            if event.at_s > self._end_s:
                break
            self._given_out(event) if event.n_bytes > 0 else self._given_back(event)

    def _given_out(self, event: MemoryEvent) -> None:
        call = -1 if self._calls is None else self._call_at(event.at_s)
        self._add(
            event.device,
            event.address,
            Allocation(
                device=self._device(event.device),
                n_bytes=event.n_bytes,
                holds=Holds.OTHER,
                phase=self._phase_at(event.at_s),
                begin_s=event.at_s,
                call=call,
                operator=event.operator,
            ),
        )
        if event.accumulating:
            self._short_lived.add(len(self.allocations) - 1)

    def _given_back(self, event: MemoryEvent) -> None:
        place = self._live.pop((event.device, event.address), None)
        if place is None:
            return  # a device tells of what nobody had seen, and which is a part of what is left there
        self.allocations[place] = replace(self.allocations[place], end_s=event.at_s)
        if event.accumulating and place not in self._short_lived:
            self._accumulated.add(place)

    def _add(self, device: str, address: int, one: Allocation) -> None:
        self._live[device, address] = len(self.allocations)
        self._there[device, address].append(len(self.allocations))
        self.allocations.append(one)

    def _device(self, name: str) -> int:
        return self.devices.setdefault(name, len(self.devices))

    def told_apart(self, place: int, one: Allocation) -> Allocation:
        if one.begin_s is None:
            return one
        end_s = one.end_s if one.end_s is not None else float("inf")
        outlives = end_s > self._end_s
        if one.phase is Phase.BACKWARD and (outlives or place in self._accumulated):
            at = bisect_left(self._added_s, (one.begin_s, 0.0))
            added_s = self._added_s[at][1] if at < len(self._added_s) else one.begin_s
            return replace(one, holds=Holds.GRADIENTS, added_s=max(added_s, one.begin_s))
        if one.phase is Phase.UPDATE and outlives:
            return replace(one, holds=Holds.OPTIMIZER)
        backward = any(span.phase is Phase.BACKWARD and one.begin_s < span.begin_s < end_s for span in self._spans)
        if one.phase in (Phase.DATA, Phase.FORWARD) and backward:
            return replace(one, holds=Holds.ACTIVATIONS)
        return one

    def _phase_at(self, moment_s: float) -> Phase:
        return next((span.phase for span in self._spans if span.begin_s <= moment_s <= span.end_s), Phase.OTHER)

    # ── modules ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _call_at(self, moment_s: float) -> int:
        assert self._calls is not None
        place = self._calls.at(moment_s)
        if place < 0:
            at = bisect_right(self._backward, moment_s, key=lambda event: event.begin_s) - 1
            if at >= 0 and moment_s <= self._backward[at].end_s:
                place = self._made_by(self._backward[at])
        return self._places.get(place, -1)

    def _made_by(self, event: Event) -> int:
        assert self._calls is not None
        return self._calls.of_node(event.sequence)

    def module_calls(self) -> Iterable[ModuleCall]:
        if self._calls is None:
            return
        backward: defaultdict[int, list[float]] = defaultdict(list)
        for event in self._backward:
            place = self._made_by(event)
            while place >= 0:
                backward[place] += (event.begin_s, event.end_s)
                place = self._calls.calls[place].parent
        _, modules = self._calls.modules()
        for place, call in self.called:
            yield ModuleCall(
                module=modules[place],
                parent=self._places.get(call.parent, -1),
                begin_s=call.begin_s,
                end_s=call.end_s,
                backward_begin_s=min(backward[place], default=None),
                backward_end_s=max(backward[place], default=None),
                inputs=tuple(self._lying_at(call.inputs, call)),
                outputs=tuple(self._lying_at(call.outputs, call)),
            )

    def _lying_at(self, addresses: Sequence[Address], call: SeenCall) -> Iterable[int]:
        for address in dict.fromkeys(addresses):
            for place in reversed(self._there[address]):
                one = self.allocations[place]
                if one.begin_s is None or one.begin_s <= call.end_s:
                    if one.end_s is None or one.end_s >= call.end_s:
                        yield place
                    break
