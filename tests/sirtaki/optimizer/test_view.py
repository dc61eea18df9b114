"""The smaller job says of plans what the whole one says, and what a tensor takes is what its units take alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.drawn_jobs import drawn_job
from fakes.played_jobs import GLOO, made_job, plan_of
from fakes.replays import LINK, SIZES, on_one_host, over_a_link, times
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.analysis.global_graph import replayed
from sirtaki.analysis.plan_search import EVERY, FEW_RANKS, Acceleration, Candidate, Schedule, View
from sirtaki.errors import ReplayError

KINDS = st.frozensets(st.sampled_from(list(Acceleration)))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(14, 20), st.integers(1, 4), KINDS)
def test_a_view_tells_of_another_plan_what_the_whole_job_does(
    seed: int, octave: int, streams: int, accelerations: frozenset[Acceleration]
) -> None:
    job = drawn_job(seed)
    view = View(job, accelerations)
    candidate = Candidate(schedule=Schedule(route=GLOO, streams=streams, unit_bytes=1 << octave))
    told = replayed(view.play(view.planned(candidate)))
    whole = times(view.planned(candidate, whole=True))
    assert told.iteration_s == pytest.approx(whole.iteration_s, rel=0.02)


@pytest.mark.parametrize("ranks", [2, 6])
def test_ranks_that_are_alike_are_replayed_once_also_where_units_leave_their_host(ranks: int) -> None:
    job = over_a_link(ranks=ranks)
    view = View(job)
    assert len(view.small.ranks) == 1
    candidate = Candidate(schedule=Schedule(route=GLOO, streams=2, unit_bytes=8000))
    assert replayed(view.play(view.planned(candidate))).iteration_s == pytest.approx(
        times(view.planned(candidate, whole=True)).iteration_s
    )


def test_few_of_many_different_ranks_are_left() -> None:
    durations = {rank: tuple((1 + rank / 40) * seconds for seconds in (0.02, 0.01, 0.03, 0.02)) for rank in range(20)}
    job = made_job(durations_s=durations, sizes=SIZES, plan=plan_of(SIZES, (4,)), link=LINK)
    assert len(View(job).small.ranks) <= FEW_RANKS
    assert len(View(job, EVERY - {Acceleration.SYMMETRY}).small.ranks) == 20


@pytest.mark.parametrize("accelerations", [EVERY, EVERY - {Acceleration.PARTIAL_REPLAY}])
def test_what_a_tensor_takes_as_so_many_units(accelerations: frozenset[Acceleration]) -> None:
    job = over_a_link()
    view = View(job, accelerations)
    candidate = Candidate(schedule=Schedule(route=GLOO, streams=2, unit_bytes=8000))
    assert view.sync_s(candidate, 4000, 1) == pytest.approx(LINK.together_s(4000, streams=1))
    assert view.sync_s(candidate, 4000, 2) == pytest.approx(LINK.together_s(2000, streams=2))
    on_one = Candidate(schedule=replace(candidate.schedule, streams=1))
    assert view.sync_s(on_one, 4000, 2) == pytest.approx(2 * LINK.together_s(2000, streams=1))
    replays = view.replays
    view.sync_s(candidate, 4000, 1)
    assert (view.replays == replays) is (Acceleration.PARTIAL_REPLAY in accelerations)


def test_the_optimizer_with_the_most_gradients_is_planned_and_others_stay() -> None:
    job = on_one_host()
    (buffer,) = job.buffers
    small = replace(buffer, number=1, reducer=(0, 1), layout=replace(buffer.layout, sizes=(10,), names=("b",)))
    assert View(replace(job, buffers=(small, buffer))).buffers == (buffer,)
    with pytest.raises(ReplayError, match="no gradients were exchanged"):
        View(replace(job, buffers=()))
