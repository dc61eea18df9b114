"""What memory was for in a step: torch.profiler's events of memory, told apart by what was known when it began."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sirtaki.autotune.model.graph import Phase

from .kineto import ACCUMULATING, Event, MemoryEvent, Seen
from .live_tensors import UNSEEN, LiveStorage
from .module_calls import Address, ModuleCalls, SeenCall
from .operators import BACKWARD
from .recording import PhaseSpan
from .step_memory import Allocation, Holds, ModuleCall, StepMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedStep:
    """The step, and what was noted of it beside torch.profiler's events.

    Attributes:
        number: of the iteration.
        spans: its phases.
        storages: that were there when it began.
    """

    number: int
    begin_s: float
    end_s: float
    spans: Sequence[PhaseSpan]
    storages: Sequence[LiveStorage]


def memory_of_step(seen: Seen, step: WatchedStep, calls: ModuleCalls | None) -> StepMemory:
    """All of it.

    Args:
        seen: torch.profiler was on when it began, and for a step before it.
        step: which.
        calls: of modules; None = not known.
    """
    return _Builder(seen, step, calls).built()


class _Builder:
    def __init__(self, seen: Seen, step: WatchedStep, calls: ModuleCalls | None) -> None:
        self._step, self._calls = step, calls
        inside = [event for event in seen.events if step.begin_s <= event.begin_s <= step.end_s]
        # Those of the engine's threads count, too: a device has its own.
        self._backward = sorted(
            (event for event in inside if event.name.startswith(BACKWARD)), key=lambda event: event.begin_s
        )
        self._added_s = [(one.begin_s, one.end_s) for one in self._backward if one.name.endswith(ACCUMULATING)]
        self._spans = sorted(step.spans, key=lambda span: span.begin_s)
        self._devices: dict[str, int] = {}
        self._found: list[Allocation] = []
        self._live: dict[Address, int] = {}
        self._there: defaultdict[Address, list[int]] = defaultdict(list)
        self._short_lived: set[int] = set()  # asked for while a gradient was added
        self._accumulated: set[int] = set()  # others that were given back then
        self._called = [
            (place, call)
            for place, call in enumerate([] if calls is None else calls.calls)
            if step.begin_s <= call.begin_s and call.end_s <= step.end_s
        ]
        self._places = {place: number for number, (place, _) in enumerate(self._called)}
        self._take(seen.memory)

    def built(self) -> StepMemory:
        allocations = tuple(self._told_apart(place, one) for place, one in enumerate(self._found))
        first = next((call for _, call in self._called), None)
        return StepMemory(
            iteration=self._step.number,
            begin_s=self._step.begin_s,
            end_s=self._step.end_s,
            devices=tuple(self._devices),
            batch=0 if first is None else first.batch,
            allocations=allocations,
            calls=tuple(self._module_calls()),
        )

    # ── allocations ──────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, events: Iterable[MemoryEvent]) -> None:
        before: dict[Address, MemoryEvent] = {}
        rest = []
        for event in events:
            if event.at_s >= self._step.begin_s:
                rest.append(event)
            elif event.n_bytes > 0:
                before[event.device, event.address] = event
            else:
                before.pop((event.device, event.address), None)
        for storage in self._step.storages:
            before.pop((storage.device, storage.address), None)
        for event in before.values():
            self._there_before(event.device, event.address, event.n_bytes, Holds.OTHER)
        for storage in self._step.storages:
            n_bytes = storage.n_bytes
            if storage.address == UNSEEN:
                n_bytes -= sum(event.n_bytes for event in before.values() if event.device == storage.device)
            if n_bytes > 0:
                self._there_before(storage.device, storage.address, n_bytes, storage.holds)
        for event in rest:
            if event.at_s > self._step.end_s:
                break
            self._given_out(event) if event.n_bytes > 0 else self._given_back(event)

    def _there_before(self, device: str, address: int, n_bytes: int, holds: Holds) -> None:
        self._add(device, address, Allocation(device=self._device(device), n_bytes=n_bytes, holds=holds))

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
            self._short_lived.add(len(self._found) - 1)

    def _given_back(self, event: MemoryEvent) -> None:
        place = self._live.pop((event.device, event.address), None)
        if place is None:
            return  # a device tells of what nobody had seen, and which is a part of what is left there
        self._found[place] = replace(self._found[place], end_s=event.at_s)
        if event.accumulating and place not in self._short_lived:
            self._accumulated.add(place)

    def _add(self, device: str, address: int, one: Allocation) -> None:
        self._live[device, address] = len(self._found)
        self._there[device, address].append(len(self._found))
        self._found.append(one)

    def _device(self, name: str) -> int:
        return self._devices.setdefault(name, len(self._devices))

    def _told_apart(self, place: int, one: Allocation) -> Allocation:
        if one.begin_s is None:
            return one
        end_s = one.end_s if one.end_s is not None else float("inf")
        outlives = end_s > self._step.end_s
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

    def _module_calls(self) -> Iterable[ModuleCall]:
        if self._calls is None:
            return
        backward: defaultdict[int, list[float]] = defaultdict(list)
        for event in self._backward:
            place = self._made_by(event)
            while place >= 0:
                backward[place] += (event.begin_s, event.end_s)
                place = self._calls.calls[place].parent
        _, modules = self._calls.modules()
        for place, call in self._called:
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
                one = self._found[place]
                if one.begin_s is None or one.begin_s <= call.end_s:
                    if one.end_s is None or one.end_s >= call.end_s:
                        yield place
                    break
