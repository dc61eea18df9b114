"""Peaks of a chain of blocks, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.memories import FLAT, GRADIENT, LEFT, OUTPUT, PARAMETERS, TEMPORARY, THERE, chain

from sirtaki.analysis.memory import MemoryReplay
from sirtaki.analysis.recording import Holds


def replay_of(blocks: int = 4) -> MemoryReplay:
    return MemoryReplay(chain(blocks), 0)


def test_as_it_was_recorded_most_is_held_when_the_last_block_has_gone_forward() -> None:
    peak = replay_of().peak()
    assert peak.n_bytes == THERE + 4 * (LEFT + OUTPUT)
    assert peak.at_s == 3.5
    assert sum(peak.held.values()) == peak.n_bytes


def test_a_curve_tells_what_for() -> None:
    moments = replay_of().curve()
    assert moments[0].n_bytes == {Holds.PARAMETERS: PARAMETERS, Holds.FLAT_BUFFERS: FLAT}
    highest = max(moments, key=lambda moment: moment.total_bytes)
    assert highest.total_bytes == replay_of().peak().n_bytes
    assert highest.n_bytes[Holds.ACTIVATIONS] == 4 * (LEFT + OUTPUT)
    assert moments[-1].total_bytes == THERE


def test_what_a_block_leaves_is_neither_its_output_nor_what_is_gone_when_it_ends() -> None:
    replay = replay_of()
    assert [replay.memory.allocations[place].n_bytes for place in replay.saved(2)] == [LEFT]
    assert replay.saved(2, needed=replay.saved(2)) == []


def test_blocks_that_compute_again_hold_what_they_leave_only_then() -> None:
    # While the last one is done again, its own is there, and all outputs; the others have left nothing.
    peak = replay_of().peak([1, 2, 3, 4])
    assert peak.n_bytes == THERE + 4 * OUTPUT + LEFT
    assert peak.at_s == 3.5  # as much as when it went forward first
    assert replay_of().peak([1]).n_bytes == THERE + 3 * LEFT + 4 * OUTPUT


def test_what_is_needed_for_a_while_is_needed_again() -> None:
    memory = chain(2)
    larger = tuple(replace(one, n_bytes=5000) if one.n_bytes == TEMPORARY else one for one in memory.allocations)
    peak = MemoryReplay(replace(memory, allocations=larger), 0).peak([1, 2])
    assert peak.n_bytes == THERE + OUTPUT + max(5000, LEFT) + OUTPUT
    assert peak.at_s == 4.0 - 1  # the second block's backward pass begins


def test_what_a_block_gets_stays_until_it_is_done_again() -> None:
    """Its predecessor's output, which nobody else needs any more."""
    memory = chain(2)
    gone_early = tuple(
        replace(one, end_s=0.95) if one.n_bytes == OUTPUT and one.begin_s == 0.5 else one for one in memory.allocations
    )
    early = MemoryReplay(replace(memory, allocations=gone_early), 0)
    assert early.peak().n_bytes == THERE + 2 * LEFT + OUTPUT
    assert early.peak([2]).n_bytes == THERE + 2 * LEFT + 2 * OUTPUT


@pytest.mark.parametrize("passes", [2, 4])
def test_passes_over_parts_hold_parts_and_all_gradients(passes: int) -> None:
    # The last of several passes begins with all gradients of those before it, and one more comes at a time.
    forward, backward = 4 * (LEFT + OUTPUT) // passes, (4 * LEFT + 3 * OUTPUT) // passes + GRADIENT
    assert replay_of().peak(passes=passes).n_bytes == THERE + 4 * GRADIENT + max(forward, backward)


def test_both_add_up() -> None:
    assert replay_of().peak([1, 2, 3, 4], 2).n_bytes == THERE + 4 * GRADIENT + (4 * OUTPUT + LEFT) // 2


def test_a_budget_is_for_the_accelerator_where_there_is_one() -> None:
    assert MemoryReplay(chain()).device == 0
    assert MemoryReplay(replace(chain(), devices=("cpu", "cuda:0"))).device == 1
    other = replace(chain(), devices=("cpu", "cuda:0"))
    assert MemoryReplay(other, 1).peak().n_bytes == 0
