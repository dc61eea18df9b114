"""What passes propose for a chain of blocks, and that the lines of code that they print do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
import torch
from fakes import memories
from fakes.memories import LEFT, OUTPUT, THERE
from torch import nn

from sirtaki.analysis import plan_search as other_passes
from sirtaki.analysis.memory import (
    MemoryQuestion,
    MemoryRemedy,
    MemoryReplay,
    accumulation,
    both,
    memory_passes,
    recomputation,
)
from sirtaki.errors import ConfigError

BLOCKS = 4
WHOLE = THERE + BLOCKS * (LEFT + OUTPUT)
LEAST = THERE + BLOCKS * OUTPUT + LEFT


def question(budget_bytes: int, *, kind: str = "Block", batch: int = 8) -> MemoryQuestion:
    return MemoryQuestion(
        replay=MemoryReplay(memories.chain(BLOCKS, batch=batch), 0),
        modules=memories.modules(BLOCKS, kind=kind),
        budget_bytes=budget_bytes,
    )


def only(one: Callable[[MemoryQuestion], Iterable[MemoryRemedy]], asked: MemoryQuestion) -> MemoryRemedy:
    (found,) = one(asked)
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_more_modules_compute_again_than_the_budget_asks_for(count: int) -> None:
    remedy = only(recomputation, question(WHOLE - count * LEFT))
    assert remedy.peak_bytes == WHOLE - count * LEFT
    assert remedy.words.startswith(f"re-computation of {count} module")


def test_where_the_budget_cannot_be_met_it_comes_as_near_as_it_can() -> None:
    assert only(recomputation, question(100)).peak_bytes == LEAST
    assert only(accumulation, question(100)).words.startswith("8 passes")
    least = only(both, question(100))
    assert least.peak_bytes < min(LEAST, only(accumulation, question(100)).peak_bytes)
    assert len(least.lines) == 7


def test_passes_divide_the_batch_and_are_as_few_as_do() -> None:
    assert only(accumulation, question(WHOLE - 500)).words.startswith("2 passes")
    assert only(accumulation, question(WHOLE - 500, batch=9)).words.startswith("3 passes")
    assert list(accumulation(question(WHOLE - 500, batch=1))) == []
    remedy = only(accumulation, question(WHOLE - 500))
    assert "backward_passes_per_step=2" in remedy.lines[0]
    assert "4 samples instead of 8" in remedy.lines[1]


def test_a_step_that_has_several_passes_gets_so_many_times_as_many() -> None:
    once = question(WHOLE - 500)
    memory = once.replay.memory
    twice = replace(memory, calls=(*memory.calls, memory.calls[0]))
    remedy = only(accumulation, replace(once, replay=MemoryReplay(twice, 0)))
    assert remedy.words == "4 passes over parts of the batch before each step instead of 2"
    assert "backward_passes_per_step=4" in remedy.lines[0]
    assert "4 samples instead of 8; for each step 4 times: (loss(model(part)) / 4)" in remedy.lines[1]


def test_what_a_batchs_statistics_come_to_is_said() -> None:
    for one in (recomputation, accumulation):
        assert only(one, question(WHOLE - 500)).notes == ()
        (note,) = only(one, question(WHOLE - 500, kind="BatchNorm2d")).notes
        assert "BatchNorm" in note


def test_the_lines_have_modules_compute_again() -> None:
    remedy = only(recomputation, question(WHOLE - 2 * LEFT))
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(BLOCKS))
    forwards = list[int]()
    for number, block in enumerate(model.blocks):
        block[0].register_forward_hook(lambda *_, number=number: forwards.append(number))
    exec("\n".join(remedy.lines), {"model": model})
    found = torch.ones(2, 4)
    for block in model.blocks:
        found = block(found)
    found.sum().backward()
    again = [number for number in range(BLOCKS) if forwards.count(number) == 2]
    assert len(again) == 2
    assert all(f'"blocks.{number}"' in "".join(remedy.lines) for number in again)
    assert all(one.grad is not None for one in model.parameters())


class Theirs:
    name, last_resort = "theirs", False

    def remedies(self, _: MemoryQuestion) -> Iterator[MemoryRemedy]:
        yield from ()


def test_passes_of_other_packages_come_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(value: str) -> None:
        point = EntryPoint("theirs", value, "sirtaki.optimizer_memory_passes")
        monkeypatch.setattr(other_passes, "entry_points", lambda *, group: [point] if group == point.group else [])

    offered(f"{__name__}:Theirs")
    assert [one.name for one in memory_passes()] == ["re-computation", "accumulation", "both", "theirs"]
    offered("builtins:dict")
    with pytest.raises(ConfigError, match="'theirs' is none: it has no name, last_resort, remedies"):
        memory_passes()
    offered("nowhere:Theirs")
    with pytest.raises(ConfigError, match="'theirs' could not be built"):
        memory_passes()
