"""What is read from a recording replays as it was recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.played_jobs import made_job, plan_of, record
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.analysis.global_graph import StepTimes, global_graph, recorded, replayed
from sirtaki.analysis.job_model import JobModel, histories, job_model, without_dents
from sirtaki.analysis.recording import Detail
from sirtaki.autotune.model.replayer import replay
from sirtaki.errors import ReplayError
from sirtaki.measures import LinkModel

SIZES = (1000, 3000, 2000, 500)
LINK = LinkModel(alpha_s=0.002, throughput=(1e5, 1.6e5, 2e5), host_s=0.003)


def times(job: JobModel) -> StepTimes:
    return replayed(replay(global_graph(job)))


def check_same(job: JobModel, *, detail: Detail = Detail.OPERATORS, offsets_s: dict[int, float] | None = None) -> None:
    recording = record(job, detail=detail, offsets_s=offsets_s)
    again, was = times(job_model(histories(recording))), recorded(histories(recording))
    assert again.iteration_s == pytest.approx(was.iteration_s, rel=1e-6)
    assert was.iteration_s == pytest.approx(times(job).iteration_s, rel=1e-9)
    for phase, seconds in was.phases_s.items():
        assert again.phases_s.get(phase, 0.0) == pytest.approx(seconds, rel=1e-6, abs=1e-7), phase


def test_a_job_over_a_link_is_the_same_again() -> None:
    job = made_job(
        durations_s={0: (0.02, 0.01, 0.03, 0.02), 1: (0.02, 0.02, 0.03, 0.04)},
        sizes=SIZES,
        plan=plan_of(SIZES, (1, 2, 4), streams=2),
        link=LINK,
        iterations=3,
    )
    check_same(job)


def test_clocks_of_ranks_may_differ() -> None:
    job = made_job(
        durations_s={0: (0.02, 0.01, 0.03, 0.02), 1: (0.02, 0.02, 0.03, 0.04)},
        sizes=SIZES,
        plan=plan_of(SIZES, (2, 4)),
        link=LINK,
        iterations=2,
    )
    check_same(job, offsets_s={1: 5.0})


def test_units_alone_say_as_much_of_the_step() -> None:
    job = made_job(
        durations_s={0: (0.02, 0.01, 0.03, 0.02), 1: (0.02, 0.02, 0.03, 0.04)},
        sizes=SIZES,
        plan=plan_of(SIZES, (1, 3, 4)),
        link=LINK,
        iterations=2,
    )
    check_same(job, detail=Detail.UNITS)


def test_ranks_that_share_two_processors_are_the_same_again() -> None:
    job = made_job(
        durations_s={rank: (0.02, 0.01 + 0.01 * rank, 0.03, 0.02) for rank in range(4)},
        sizes=SIZES,
        plan=plan_of(SIZES, (1, 2, 4), streams=2),
        seconds_per_byte=2e-6,
        capacity=2,
        iterations=2,
    )
    alone = replace(job, processors=tuple(replace(group, capacity=64.0) for group in job.processors))
    assert times(job).iteration_s > 1.5 * times(alone).iteration_s
    check_same(job)


seconds = st.floats(0.001, 0.05)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=2, max_size=4),
    st.sampled_from([(4,), (1, 4), (2, 3, 4), (1, 2, 3, 4)]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([1.0, 2.0, 64.0]),
)
def test_whatever_was_played_is_played_again(
    durations_s: list[tuple[float, ...]], cuts: tuple[int, ...], streams: int, between_hosts: bool, capacity: float
) -> None:
    job = made_job(
        durations_s=dict(enumerate(durations_s)),
        sizes=SIZES,
        plan=plan_of(SIZES, cuts, streams=streams),
        link=LINK if between_hosts else None,
        seconds_per_byte=2e-6,
        data_s={0: 0.01},
        capacity=capacity,
        iterations=2,
    )
    check_same(job)


def test_a_recording_without_a_common_iteration_is_refused() -> None:
    job = made_job(durations_s={0: (0.1,), 1: (0.1,)}, sizes=(10,), plan=plan_of((10,), (1,)), seconds_per_byte=1e-6)
    recording = record(job)
    late = recording.ranks[1]
    others = {**recording.ranks, 1: replace(late, iterations=(replace(late.iterations[0], number=7),))}
    with pytest.raises(ReplayError, match="no iteration was recorded on all ranks"):
        histories(replace(recording, ranks=others))


def test_dents_of_a_probed_link_are_filled_and_nothing_else_changes() -> None:
    assert without_dents((8.0, 15.0, 30.0, 20.0, 17.0, 27.0)) == pytest.approx((8.0, 15.0, 30.0, 29.0, 28.0, 27.0))
    assert without_dents((8.0, 20.0, 10.0, 40.0)) == pytest.approx((8.0, 20.0, 30.0, 40.0))
    for whole in ((8.0,), (8.0, 15.0, 22.0), (8.0, 30.0, 20.0, 17.0)):
        assert without_dents(whole) == whole
