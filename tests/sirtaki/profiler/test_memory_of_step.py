"""What memory was for, of a real step and of events made by hand."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from torch import nn

from sirtaki.analysis.memory import MemoryReplay
from sirtaki.analysis.operators import ACCUMULATING, BACKWARD, ClockMap, Event, Kineto, MemoryEvent, Seen
from sirtaki.analysis.recording import Allocation, Holds, PhaseSpan, StepMemory
from sirtaki.analysis.step_tensors import UNSEEN, LiveStorage, ModuleCalls, WatchedStep, live_storages, memory_of_step
from sirtaki.autotune.model.replayer import Phase

CLOCK = ClockMap(origin_ns=0, origin_s=0.0, error_s=0.0)
SPANS = (
    PhaseSpan(phase=Phase.FORWARD, begin_s=1.0, end_s=3.0),
    PhaseSpan(phase=Phase.BACKWARD, begin_s=4.0, end_s=7.0),
    PhaseSpan(phase=Phase.UPDATE, begin_s=8.0, end_s=9.0),
)
ADDING = Event(BACKWARD + ACCUMULATING, 1, 5.5, 6.0)


def event(at_s: float, address: int, n_bytes: int, *, accumulating: bool = False) -> MemoryEvent:
    return MemoryEvent(at_s, "cpu", address, n_bytes, "aten::mm", accumulating)


def of(*memory: MemoryEvent, storages: tuple[LiveStorage, ...] = ()) -> StepMemory:
    step = WatchedStep(number=7, begin_s=0.0, end_s=10.0, spans=SPANS, storages=storages)
    return memory_of_step(Seen(events=[ADDING], thread=1, clock=CLOCK, memory=memory), step, None)


def test_it_is_told_apart_by_when_it_comes_and_goes() -> None:
    events = [
        event(2.0, 1, 10), event(2.5, 1, -10),  # soon gone
        event(2.6, 2, 20), event(4.5, 2, -20),  # the backward pass takes it
        event(5.0, 3, 30), event(5.9, 3, -30, accumulating=True),  # copied into a flat buffer by a hook
        event(5.0, 4, 40), event(5.2, 4, -40),
        event(5.6, 5, 50, accumulating=True), event(5.7, 5, -50, accumulating=True),  # the hook's own
        event(6.5, 6, 60),  # stays
        event(8.5, 7, 70),
    ]  # fmt: skip
    holds = {one.n_bytes: one.holds for one in of(*sorted(events, key=lambda one: one.at_s)).allocations}
    assert holds == {
        10: Holds.OTHER, 20: Holds.ACTIVATIONS, 30: Holds.GRADIENTS, 40: Holds.OTHER, 50: Holds.OTHER,
        60: Holds.GRADIENTS, 70: Holds.OPTIMIZER,
    }  # fmt: skip


def test_a_gradient_has_been_added_when_autograd_is_done_with_it() -> None:
    (one,) = of(event(5.0, 3, 30), event(6.8, 3, -30, accumulating=True)).allocations
    assert (one.begin_s, one.added_s, one.end_s, one.operator) == (5.0, 6.0, 6.8, "aten::mm")


def test_what_was_there_before_is_known_from_tensors_and_from_events() -> None:
    events = (event(-3.0, 1, 10), event(-2.0, 2, 20), event(-1.0, 2, -20), event(-0.5, 3, 33), event(1.5, 1, -10))
    found = of(*events, storages=(LiveStorage("cpu", 3, 33, Holds.PARAMETERS),)).allocations
    there = Allocation(device=0, n_bytes=33, holds=Holds.PARAMETERS)
    assert found == (Allocation(device=0, n_bytes=10, holds=Holds.OTHER, end_s=1.5), there)
    assert of(event(1.5, 9, -10)).allocations == ()  # of something that nobody has seen


def test_what_is_known_by_its_sum_only_counts_but_for_what_events_tell_of() -> None:
    unseen = LiveStorage("cpu", UNSEEN, 100, Holds.OTHER)
    assert [one.n_bytes for one in of(event(-3.0, 1, 10), storages=(unseen,)).allocations] == [10, 90]


def test_an_address_is_used_again() -> None:
    found = of(event(1.0, 1, 10), event(2.0, 1, -10), event(2.5, 1, 11), event(11.0, 1, -11)).allocations
    assert [(one.n_bytes, one.end_s) for one in found] == [(10, 2.0), (11, None)]


@pytest.mark.slow
def test_the_peak_of_a_real_step_is_the_allocators() -> None:
    kineto, calls = Kineto(), ModuleCalls()
    base = sum(one.n_bytes for one in live_storages() if one.device == "cpu")
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    batch = torch.ones(128, 64)
    for _ in range(2):
        storages = live_storages()
        calls.with_tensors = True
        begin_s = time.perf_counter()
        loss = model(batch).square().mean()
        backward_s = time.perf_counter()
        loss.backward()
        backward_end_s = time.perf_counter()
        for one in model.parameters():
            one.grad = None
        end_s = time.perf_counter()
    results = kineto._profiler.profiler
    seen = kineto.stop()
    calls.stop()
    spans = (
        PhaseSpan(phase=Phase.FORWARD, begin_s=begin_s, end_s=backward_s),
        PhaseSpan(phase=Phase.BACKWARD, begin_s=backward_s, end_s=backward_end_s),
    )
    step = WatchedStep(number=1, begin_s=begin_s, end_s=end_s, spans=spans, storages=storages)
    memory = memory_of_step(seen, step, calls)
    left, totals = list(results.kineto_results.experimental_event_tree()), []
    while left:
        one = left.pop()
        left += one.children
        if hasattr(one.extra_fields, "total_allocated"):
            totals.append(one.extra_fields.total_allocated)
    assert MemoryReplay(memory, 0).peak().n_bytes - base == pytest.approx(max(totals), rel=0.01)
    assert memory.batch == 128
    modules, _ = calls.modules()
    activations = Counter[str]()
    for one in memory.allocations:
        if one.holds is Holds.ACTIVATIONS and one.call >= 0:
            activations[modules[memory.calls[one.call].module].name] += one.n_bytes
    assert activations == {"1": 128 * 256 * 4, "2": 128 * 64 * 4}
    gradients = [one.n_bytes for one in memory.allocations if one.holds is Holds.GRADIENTS and one.begin_s]
    assert sorted(gradients) == sorted(one.nbytes for one in model.parameters())
    first = next(call for call in memory.calls if modules[call.module].name == "0")
    assert [memory.allocations[place].n_bytes for place in first.inputs] == [batch.nbytes]
    assert first.end_s < first.backward_begin_s < first.backward_end_s
