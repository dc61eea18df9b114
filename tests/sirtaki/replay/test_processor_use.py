"""How much of a processor units keep busy is found again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.played_jobs import made_job, plan_of, record
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.analysis.job_model import JobModel, histories, job_model
from sirtaki.analysis.recording import Recording

SIZES = (20_000, 30_000, 10_000, 25_000)


def job(busy: float, *, ranks: int = 2, capacity: float = 2.0) -> JobModel:
    return made_job(
        durations_s={rank: (0.02, 0.01, 0.03, 0.02 + 0.01 * rank) for rank in range(ranks)},
        sizes=SIZES,
        plan=plan_of(SIZES, (1, 2, 4), streams=2),
        seconds_per_byte=2e-7,
        capacity=capacity,
        busy=busy,
        iterations=2,
    )


def found(recording: Recording) -> float:
    (busy,) = {one.busy for each in job_model(histories(recording)).iterations for one in each.operations}
    return busy


@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 1.0), st.integers(2, 5), st.sampled_from((1.0, 2.0, 3.0, 64.0)))
def test_it_follows_from_processor_time(busy: float, ranks: int, capacity: float) -> None:
    assert found(record(job(busy, ranks=ranks, capacity=capacity))) == pytest.approx(busy, rel=0.01)


def test_units_that_wait_for_messages_slow_computation_down_less() -> None:
    recording = record(job(0.4))
    whole_s, part_s = (
        sum(piece.seconds for piece in job_model(histories(each)).iterations[0].programs[0])
        for each in (without_times(recording), recording)
    )
    assert part_s > whole_s * 1.05  # what computation would take alone, of the same wall time


def test_unknown_times_are_those_of_units_that_keep_a_processor_busy() -> None:
    assert found(without_times(record(job(0.5)))) == 1.0
    several = record(job(0.5))
    placement = tuple(replace(place, threads=2) for place in several.job.placement)
    assert found(replace(several, job=replace(several.job, placement=placement))) == 1.0


def without_times(recording: Recording) -> Recording:
    ranks = {
        rank: replace(one, iterations=tuple(replace(each, beside_s=None) for each in one.iterations))
        for rank, one in recording.ranks.items()
    }
    return replace(recording, ranks=ranks)
