"""Job models that are derived from recordings."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fakes.played_jobs import GLOO, made_job, plan_of, record
from fakes.recordings import with_iterations
from fakes.replays import on_one_host, over_a_link, times
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.analysis.global_graph import recorded
from sirtaki.analysis.job_model import (
    JobModel,
    Marks,
    Stretch,
    WaitInterval,
    barriers,
    histories,
    job_model,
    pieces,
    stretches,
    with_waits,
    without_dents,
)
from sirtaki.analysis.recording import (
    Collective,
    Copy,
    Detail,
    Operator,
    PhaseSpan,
    RecordedIteration,
    RecordedUnit,
    Recording,
)
from sirtaki.autotune.model.replayer import Activity, Phase
from sirtaki.errors import ReplayError

# ── history ───────────────────────────────────────────────────────────────────────────────────────────────────────

UNIT = (0, 0, 100)


def same(moment_s: float) -> float:
    return moment_s


def operator(name: str, begin_s: float, end_s: float, phase: Phase = Phase.BACKWARD, lane: int = 0) -> Operator:
    return Operator(name=name, lane=lane, begin_s=begin_s, end_s=end_s, phase=phase)


def iteration(*operators: Operator, copies: tuple[Copy, ...] = ()) -> RecordedIteration:
    spans = (
        PhaseSpan(phase=Phase.DATA, begin_s=0.0, end_s=1.0),
        PhaseSpan(phase=Phase.BACKWARD, begin_s=2.0, end_s=8.0),
    )
    return RecordedIteration(number=0, begin_s=0.0, end_s=10.0, spans=spans, operators=operators, copies=copies)


def test_neighbours_that_seem_to_overlap_and_other_lanes_leave_no_hole() -> None:
    full = stretches(
        iteration(
            operator("mm", 3.0, 4.0),
            operator("add", 3.9, 5.0),
            operator("inside", 4.1, 4.2),
            operator("elsewhere", 0.0, 9.0, lane=1),
            copies=(Copy(begin_s=4.95, end_s=5.5, n_gradients=1),),
        ),
        same,
    )
    assert all(before.end_s == after.begin_s for before, after in pairwise(full))
    assert (full[0].begin_s, full[-1].end_s) == (0.0, 10.0)
    assert [one.name for one in full if one.name] == ["mm", "add", "copy gradients"]
    copied = next(one for one in full if one.activity is Activity.COPY)
    assert (copied.begin_s, copied.end_s, copied.phase) == (5.0, 5.5, Phase.BACKWARD)


def test_a_gap_in_which_a_result_comes_is_waiting_until_then() -> None:
    full = stretches(iteration(operator("mm", 3.0, 4.0)), same)
    wait = WaitInterval(begin_s=4.5, end_s=7.0, keys=(UNIT,), until_backward_ends=True)
    found = [(one.begin_s, one.end_s) for one in with_waits(full, [wait]) if one.waits]
    assert found == [(4.5, 7.0)]
    outside = WaitInterval(begin_s=8.5, end_s=9.0, keys=(UNIT,), until_backward_ends=True)
    assert [one.phase for one in with_waits(full, [outside]) if one.waits] == [Phase.BACKWARD]
    assert sum(one.end_s - one.begin_s for one in with_waits(full, [wait])) == pytest.approx(10.0)


def test_a_result_that_comes_while_something_is_done_is_needed_when_backward_returns() -> None:
    full = stretches(iteration(operator("mm", 3.0, 4.0), operator("add", 5.0, 7.0)), same)
    for end_s in (3.5, 4.5, 6.0):
        found = with_waits(full, [WaitInterval(begin_s=3.2, end_s=end_s, keys=(UNIT,), until_backward_ends=True)])
        (seen,) = (one for one in found if one.waits)
        assert seen.begin_s == seen.end_s == 7.0


def test_marks_beyond_the_iteration_are_at_its_edges() -> None:
    full = [Stretch(begin_s=1.0, end_s=2.0, activity=Activity.COMPUTE, phase=Phase.BACKWARD)]
    marks = Marks(ready=[(0.5, (0, 0)), (2.5, (0, 1))], issued=[], seen={})
    found = pieces(full, marks, lambda begin_s, end_s: end_s - begin_s)
    assert [(one.seconds, one.ready) for one in found] == [(0.0, ((0, 0),)), (1.0, ((0, 1),))]


# ── histories ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_iterations_that_negotiate_are_left_out() -> None:
    recording = with_iterations(record(over_a_link(iterations=3)), lambda one: replace(one, profiling=one.number == 0))
    assert len(histories(recording).steps) == 2


# ── barriers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def unit(start: int, stop: int, issue_s: float, done_s: float, stream: int = 0) -> RecordedUnit:
    return RecordedUnit(0, 0, start, stop, GLOO, stream, issue_s, None, done_s)


def iteration_of(*units: RecordedUnit, collectives: tuple[Collective, ...] = ()) -> RecordedIteration:
    return RecordedIteration(number=0, begin_s=0.0, end_s=10.0, units=units, collectives=collectives)


def test_a_unit_begins_with_its_last_rank_and_its_stream() -> None:
    free_s: dict[str, float] = {}
    found = barriers(
        {
            0: iteration_of(unit(0, 1000, 1.0, 4.0), unit(1000, 4000, 1.5, 6.0), unit(4000, 6500, 2.0, 3.0, 1)),
            1: iteration_of(unit(0, 1000, 2.0, 4.5), unit(1000, 4000, 2.5, 5.5), unit(4000, 6500, 2.6, 3.0, 1)),
        },
        {0: same, 1: same},
        over_a_link().buffers,
        free_s,
    )
    assert [(one.key[1], one.begin_s, one.end_s) for one in found] == [
        (0, 2.0, 4.0),
        (1000, 4.5, 5.5),
        (4000, 2.6, 3.0),
    ]
    assert found[0].lag_s == 0.5
    (later,) = barriers({0: iteration_of(unit(0, 1000, 5.0, 7.0))}, {0: same}, over_a_link().buffers, free_s)
    assert later.begin_s == 6.0


def test_nothing_is_done_before_it_began_though_clocks_differ() -> None:
    (one,) = barriers(
        {0: iteration_of(unit(0, 6500, 1.0, 1.5)), 1: iteration_of(unit(0, 6500, 2.0, 3.0))},
        {0: same, 1: lambda moment_s: moment_s + 1.0},
        over_a_link().buffers,
        {},
    )
    assert (one.begin_s, one.end_s) == (3.0, 3.0)


def test_other_operations_are_barriers_too() -> None:
    loss = Collective(name="loss", kind="allreduce", begin_s=1.0, agreed_s=1.5, end_s=2.0, n_bytes=4)
    (one,) = barriers({0: iteration_of(collectives=(loss,))}, {0: same}, (), {})
    assert (one.activity, one.name, one.ranks, one.end_s) == (Activity.COLLECTIVE, "loss", (0,), 2.0)


# ── processor use ─────────────────────────────────────────────────────────────────────────────────────────────────

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


def without_times(recording: Recording) -> Recording:
    return with_iterations(recording, lambda one: replace(one, beside_s=None))


def test_units_that_wait_for_messages_slow_computation_down_less_but_unknown_times_are_those_of_busy_ones() -> None:
    recording = record(job(0.4))
    whole_s, part_s = (
        sum(piece.seconds for piece in job_model(histories(each)).iterations[0].programs[0])
        for each in (without_times(recording), recording)
    )
    assert part_s > whole_s * 1.05  # what computation would take alone, of the same wall time
    several = replace(recording.job, placement=tuple(replace(place, threads=2) for place in recording.job.placement))
    assert found(without_times(recording)) == found(replace(recording, job=several)) == 1.0


# ── from recording ────────────────────────────────────────────────────────────────────────────────────────────────


def check_same(job: JobModel, *, detail: Detail = Detail.OPERATORS, offsets_s: dict[int, float] | None = None) -> None:
    recording = record(job, detail=detail, offsets_s=offsets_s)
    again, was = times(job_model(histories(recording))), recorded(histories(recording))
    assert again.iteration_s == pytest.approx(was.iteration_s, rel=1e-6)
    assert was.iteration_s == pytest.approx(times(job).iteration_s, rel=1e-9)
    for phase, seconds in was.phases_s.items():
        assert again.phases_s.get(phase, 0.0) == pytest.approx(seconds, rel=1e-6, abs=1e-7), phase


def test_ranks_that_share_two_processors_are_the_same_again() -> None:
    durations_s = {rank: (0.02, 0.01 + 0.01 * rank, 0.03, 0.02) for rank in range(4)}
    job = on_one_host(durations_s=durations_s, streams=2, capacity=2)
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
    st.sampled_from([{}, {"offsets_s": {1: 5.0}}, {"detail": Detail.UNITS}]),
)
def test_a_simulated_job_is_reproduced_from_its_recording(
    durations_s: list[tuple[float, ...]],
    cuts: tuple[int, ...],
    streams: int,
    between_hosts: bool,
    capacity: float,
    recorded_as: dict[str, Any],
) -> None:
    """By whichever clock, and with what was recorded; ranks of one host have one clock."""
    job = over_a_link if between_hosts else on_one_host
    played = job(
        durations_s=dict(enumerate(durations_s)), cuts=cuts, streams=streams, data_s={0: 0.01}, capacity=capacity
    )
    check_same(played, **(recorded_as if between_hosts else {}))


def test_a_recording_without_a_common_iteration_is_refused() -> None:
    later = with_iterations(record(on_one_host()), lambda one: replace(one, number=one.number + 7), 1)
    with pytest.raises(ReplayError, match="no iteration that was recorded on all ranks"):
        histories(later)


def test_dents_of_a_probed_link_are_filled_and_nothing_else_changes() -> None:
    assert without_dents((8.0, 15.0, 30.0, 20.0, 17.0, 27.0)) == pytest.approx((8.0, 15.0, 30.0, 29.0, 28.0, 27.0))
    assert without_dents((8.0, 20.0, 10.0, 40.0)) == pytest.approx((8.0, 20.0, 30.0, 40.0))
    for whole in ((8.0,), (8.0, 15.0, 22.0), (8.0, 30.0, 20.0, 17.0)):
        assert without_dents(whole) == whole
