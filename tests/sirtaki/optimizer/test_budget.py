"""The fastest remedy that fits is chosen, on a chain of blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import memories, recordings
from fakes.memories import LEFT, OUTPUT, THERE

from sirtaki.analysis.memory import Fitting, fit, highest_rank, memory_passes
from sirtaki.errors import RecordingError

BLOCKS = 4
WHOLE = THERE + BLOCKS * (LEFT + OUTPUT)


def asked(budget_bytes: int, **job: float) -> Fitting:
    return fit(memories.recording(BLOCKS), memories.job(BLOCKS, **job), memory_passes(), budget_bytes=budget_bytes)


def test_a_job_that_fits_stays_as_it_is() -> None:
    found = asked(WHOLE)
    assert (found.peak_bytes, found.remedies, found.chosen, found.is_met) == (WHOLE, (), None, True)
    job = memories.job(BLOCKS)
    assert found.applied_to(job) is job


@pytest.mark.parametrize(("gap_s", "by"), [(0.0, "accumulation"), (0.5, "re-computation")])
def test_the_faster_one_of_those_that_fit_is_chosen(gap_s: float, by: str) -> None:
    """Gaps between operators are repeated in each pass."""
    found = asked(WHOLE - LEFT, gap_s=gap_s)
    assert found.chosen is not None
    assert found.chosen.by == by
    assert found.remedies[0] == found.chosen
    assert found.chosen.times.iteration_s == min(one.times.iteration_s for one in found.remedies)
    assert found.chosen.times.iteration_s > found.times.iteration_s
    assert found.applied_to(memories.job(BLOCKS, gap_s=gap_s)) != memories.job(BLOCKS, gap_s=gap_s)


def test_several_at_once_are_a_last_resort() -> None:
    found = asked(THERE + 210)
    assert found.chosen is not None
    assert found.chosen.by == "both"
    assert {one.by for one in found.remedies} == {"re-computation", "accumulation", "both"}


def test_a_budget_below_all_is_not_met_and_the_least_is_known() -> None:
    found = asked(100)
    assert not found.is_met
    assert found.chosen is None
    assert THERE < found.least_bytes < THERE + 210


def test_the_rank_that_holds_most_is_looked_at() -> None:
    recording = memories.recording(BLOCKS)
    more = replace(recording.ranks[1], memory=memories.chain(BLOCKS + 1), modules=memories.modules(BLOCKS + 1))
    assert highest_rank(recording).rank == 0
    assert highest_rank(replace(recording, ranks={**recording.ranks, 1: more})).rank == 1


def test_without_memory_in_the_recording_there_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RecordingError, match="record the job anew"):
        highest_rank(recordings.recording())
