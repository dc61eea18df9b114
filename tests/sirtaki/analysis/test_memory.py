"""Memory of a step: its peak, what lowers it, and what fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from fakes import memories, recordings
from fakes.memories import FLAT, GRADIENT, LEFT, OUTPUT, PARAMETERS, TEMPORARY, THERE, chain, job
from torch import nn

from sirtaki.analysis.global_graph import play, replayed
from sirtaki.analysis.job_model import JobModel
from sirtaki.analysis.memory import (
    ADDING,
    Fitting,
    MemoryQuestion,
    MemoryRemedy,
    MemoryReplay,
    accumulation,
    both,
    fit,
    highest_rank,
    peak_words,
    recomputation,
    with_accumulation,
)
from sirtaki.analysis.recording import Holds
from sirtaki.analysis.what_if import Baseline
from sirtaki.autotune.model.replayer import Activity, Phase
from sirtaki.errors import RecordingError

# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────


def replay_of(blocks: int = 4) -> MemoryReplay:
    return MemoryReplay(chain(blocks), 0)


def test_a_curve_shows_memory_by_use() -> None:
    moments = replay_of().curve()
    assert moments[0].n_bytes == {Holds.PARAMETERS: PARAMETERS, Holds.FLAT_BUFFERS: FLAT}
    highest = max(moments, key=lambda moment: moment.total_bytes)
    assert highest.total_bytes == replay_of().peak().n_bytes
    assert highest.n_bytes[Holds.ACTIVATIONS] == 4 * (LEFT + OUTPUT)
    assert moments[-1].total_bytes == THERE


def test_recomputed_blocks_hold_their_activations_only_briefly() -> None:
    # While the last one is done again, its own is there, and all outputs; the others have left nothing.
    peak = replay_of().peak([1, 2, 3, 4])
    assert peak.n_bytes == THERE + 4 * OUTPUT + LEFT
    assert peak.at_s == 3.5  # as much as when it went forward first
    assert replay_of().peak([1]).n_bytes == THERE + 3 * LEFT + 4 * OUTPUT


def test_temporary_memory_is_needed_again() -> None:
    memory = chain(2)
    larger = tuple(one._replace(n_bytes=5000) if one.n_bytes == TEMPORARY else one for one in memory.allocations)
    peak = MemoryReplay(replace(memory, allocations=larger), 0).peak([1, 2])
    assert peak.n_bytes == THERE + OUTPUT + max(5000, LEFT) + OUTPUT
    assert peak.at_s == 4.0 - 1  # the second block's backward pass begins


def test_a_blocks_input_stays_until_it_is_recomputed() -> None:
    """The input is the preceding block's output, which no other block needs."""
    memory = chain(2)
    gone_early = tuple(
        one._replace(end_s=0.95) if one.n_bytes == OUTPUT and one.begin_s == 0.5 else one for one in memory.allocations
    )
    early = MemoryReplay(replace(memory, allocations=gone_early), 0)
    assert early.peak().n_bytes == THERE + 2 * LEFT + OUTPUT
    assert early.peak([2]).n_bytes == THERE + 2 * LEFT + 2 * OUTPUT


@pytest.mark.parametrize("passes", [2, 4])
def test_passes_over_parts_hold_parts_and_all_gradients(passes: int) -> None:
    # The last of several passes begins with all gradients of those before it, and one more comes at a time.
    forward, backward = 4 * (LEFT + OUTPUT) // passes, (4 * LEFT + 3 * OUTPUT) // passes + GRADIENT
    assert replay_of().peak(passes=passes).n_bytes == THERE + 4 * GRADIENT + max(forward, backward)


def test_a_budget_is_for_the_accelerator_where_there_is_one() -> None:
    both = replace(chain(), devices=("cpu", "cuda:0"))
    assert (MemoryReplay(chain()).device, MemoryReplay(both).device) == (0, 1)
    assert MemoryReplay(both, 1).peak().n_bytes == 0


# ── memory remedies ───────────────────────────────────────────────────────────────────────────────────────────────


def step_s(job: JobModel) -> float:
    return replayed(play(job)).iteration_s


def test_passes_share_the_memory_of_samples_and_repeat_the_rest() -> None:
    was = job(gap_s=0.02)
    program = was.iterations[0].programs[0]
    copy_s = sum(piece.seconds for piece in program if piece.activity is Activity.COPY)
    three = with_accumulation(was, 3)
    # Each pass has its gaps; the second and the third add their gradients to those that are there.
    assert step_s(three) - step_s(was) == pytest.approx(2 * 4 * 0.02 + 2 * copy_s)


def test_gradients_are_exchanged_once_in_the_last_pass() -> None:
    program = with_accumulation(job(), 4).iterations[0].programs[0]
    issues = [place for place, piece in enumerate(program) if piece.issues]
    assert len(issues) == sum(bool(piece.issues) for piece in job().iterations[0].programs[0])
    assert issues[0] > max(place for place, piece in enumerate(program) if piece.phase is Phase.FORWARD)
    assert sum(piece.name == ADDING for piece in program) == 3 * sum(
        piece.activity is Activity.COPY for piece in program
    )


# ── memory passes ─────────────────────────────────────────────────────────────────────────────────────────────────

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


def test_where_the_budget_cannot_be_met_the_nearest_peak_is_proposed() -> None:
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


def test_the_effect_on_batch_statistics_is_reported() -> None:
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


# ── budget ────────────────────────────────────────────────────────────────────────────────────────────────────────


def asked(budget_bytes: int, **job: float) -> Fitting:
    return fit(memories.recording(BLOCKS), Baseline.of(memories.job(BLOCKS, **job)), budget_bytes=budget_bytes)


@pytest.mark.parametrize(("gap_s", "by"), [(0.0, "accumulation"), (0.5, "re-computation")])
def test_the_faster_one_of_those_that_fit_is_chosen(gap_s: float, by: str) -> None:
    """Gaps between operators are repeated in each pass."""
    found = asked(WHOLE - LEFT, gap_s=gap_s)
    assert found.chosen is not None
    assert found.chosen.by == by
    assert found.remedies[0] == found.chosen
    chosen_s = found.chosen.step_s
    assert chosen_s == min(one.step_s for one in found.remedies)
    assert found.before.times.iteration_s < chosen_s == pytest.approx(found.after.times.iteration_s)


def test_several_remedies_are_a_last_resort_and_the_smallest_possible_peak_is_reported() -> None:
    found = asked(THERE + 210)
    assert found.chosen is not None
    assert found.chosen.by == "both"
    assert {one.by for one in found.remedies} == {"re-computation", "accumulation", "both"}
    never = asked(100)
    assert (never.is_met, never.chosen) == (False, None)
    assert THERE < min(one.remedy.peak_bytes for one in never.remedies) < THERE + 210


def test_the_rank_with_the_largest_peak_counts() -> None:
    recording = memories.recording(BLOCKS)
    more = replace(recording.ranks[1], memory=memories.chain(BLOCKS + 1), modules=memories.modules(BLOCKS + 1))
    assert highest_rank(recording)[0].rank == 0
    assert highest_rank(replace(recording, ranks={**recording.ranks, 1: more}))[0].rank == 1
    with pytest.raises(RecordingError, match="contains no memory use"):
        highest_rank(recordings.recording())


# ── memory words ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_peak_is_reported_with_its_time_and_uses() -> None:
    rank, replay = highest_rank(memories.recorded_job())
    assert peak_words(rank, replay, replay.peak()) == (
        "At its peak rank 0 holds 2.89 KiB of cpu, 3500 ms into the step (other): 1.72 KiB activations, "
        "1000 B parameters, 200 B flat buffers."
    )
