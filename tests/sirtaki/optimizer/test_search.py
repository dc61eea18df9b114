"""The search finds what an exhaustive one finds, with accelerations what it finds without them, and in time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fakes.drawn_jobs import CHOICES, drawn_job
from fakes.played_jobs import GLOO, made_job, plan_of
from fakes.replays import on_one_host, times
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.analysis.global_graph import replayed
from sirtaki.analysis.job_model import JobModel, Piece
from sirtaki.analysis.plan_search import (
    EVERY,
    Acceleration,
    Candidate,
    Change,
    Found,
    Pass,
    Schedule,
    Search,
    Tensor,
    View,
    passes,
)
from sirtaki.comm.plan import TransportKind
from sirtaki.measures import LinkModel

NOTHING: frozenset[Acceleration] = frozenset()


def searched(job: JobModel, accelerations: frozenset[Acceleration] = EVERY) -> Found:
    return Search(View(job, accelerations), passes(), CHOICES).run()


def whole_s(job: JobModel, found: Found) -> float:
    return times(View(job).planned(found.candidate, whole=True)).iteration_s


def accelerations_cost_less_than_a_percent(job: JobModel) -> None:
    assert whole_s(job, searched(job)) <= 1.01 * whole_s(job, searched(job, NOTHING))


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10_000))
def test_on_small_jobs_accelerations_cost_less_than_a_percent(seed: int) -> None:
    accelerations_cost_less_than_a_percent(drawn_job(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_on_many_small_jobs_too(seed: int) -> None:
    accelerations_cost_less_than_a_percent(drawn_job(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_on_jobs_of_forty_gradients_too(seed: int) -> None:
    accelerations_cost_less_than_a_percent(drawn_job(seed, gradients=40, ranks=3))


@pytest.mark.parametrize("seed", range(4))
def test_no_grouping_of_gradients_on_any_number_of_streams_is_faster(seed: int) -> None:
    job = drawn_job(seed, gradients=5, ranks=2)
    view = View(job, NOTHING)

    def all_s() -> Iterator[float]:
        offsets = view.layout.offsets
        for streams in CHOICES.streams:
            for count in range(5):
                for ends in itertools.combinations(range(1, 5), count):
                    tensors = tuple(Tensor(stop=offsets[end]) for end in (*ends, 5))
                    schedule = Schedule(route=GLOO, streams=streams, unit_bytes=1, tensors=tensors)
                    yield replayed(view.play(view.planned(Candidate(schedule=schedule)))).iteration_s

    assert whole_s(job, searched(job)) <= 1.001 * min(all_s())


def test_it_is_never_slower_than_what_was_recorded() -> None:
    for seed in range(20, 30):
        found = searched(drawn_job(seed))
        assert found.step_s <= found.recorded_s
        assert found.in_time


def test_another_route_is_taken_where_it_was_probed_and_is_faster() -> None:
    job = drawn_job(3)
    assert job.link is not None
    other = (TransportKind.MPI, GLOO[1])
    faster = replace(next(iter(job.links.values())), throughput=(1e8,), alpha_s=1e-5)
    job = replace(job, links={**job.links, other: faster})
    choices = replace(CHOICES, routes=(GLOO, other, (TransportKind.NCCL, GLOO[1])))
    found = Search(View(job), passes(), choices).run()
    assert found.candidate.schedule.route == other


def test_bf16_is_proposed_only_where_it_is_allowed() -> None:
    job = drawn_job(3)
    assert searched(job).candidate.extras == ()
    found = Search(View(job), passes(["bf16"]), CHOICES).run()
    assert [extra.words for extra in found.candidate.extras] == ["gradients travel as bf16, in half the bytes"]
    assert found.step_s < searched(job).step_s


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10_000))
def test_what_is_simpler_is_taken_if_it_is_about_as_fast(seed: int) -> None:
    job = drawn_job(seed)
    fastest = searched(job)
    search = Search(View(job), passes(), CHOICES, indifference=0.05)
    simple = search.run()
    assert simple.step_s <= 1.05 * fastest.step_s
    assert simple.candidate.schedule.streams <= fastest.candidate.schedule.streams


def test_the_replay_judges_what_passes_propose() -> None:
    even = Schedule(route=GLOO, streams=1, unit_bytes=1000)
    worst = Change(words="harm", apply=lambda candidate: replace(candidate, schedule=even))
    found = Search(View(drawn_job(3)), [Pass(name="worse", changes=lambda *_: [worst])], CHOICES).run()
    assert "harm" not in found.changes


def test_when_the_time_is_up_what_was_found_until_then_is_the_result() -> None:
    job = on_one_host()
    ticks = itertools.count()
    search = Search(View(job), passes(), CHOICES, limit_s=3.0, clock=lambda: float(next(ticks)))
    found = search.run()
    assert not found.in_time
    assert found.replays < searched(job).replays
    assert found.step_s <= found.recorded_s


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_thousand_operators_on_sixty_four_ranks_are_searched_in_a_minute() -> None:
    sizes = (10_000, 400_000, 2_000, 150_000) * 40
    job = made_job(
        durations_s={rank: (0.001 + 1e-5 * rank,) * 160 for rank in range(64)},
        sizes=sizes,
        plan=plan_of(sizes, tuple(range(2, 161, 2)), streams=4),
        link=LinkModel(alpha_s=2e-3, throughput=(5e8, 9e8, 1.2e9, 1.3e9), host_s=1e-4),
        hosts={rank: rank // 8 * 8 for rank in range(64)},
        capacity=8.0,
    )
    job = replace(job, iterations=tuple(replace(each, programs=_finer(each.programs)) for each in job.iterations))
    assert len(job.iterations[0].programs[0]) > 1000
    begin_s = time.process_time()
    found = searched(job)
    assert time.process_time() - begin_s < 60.0
    assert found.step_s < found.recorded_s


def _finer(programs: dict[int, tuple[Piece, ...]]) -> dict[int, tuple[Piece, ...]]:
    """Operators between which nothing depends on others: five of each, the last of which is what the one was."""
    return {
        rank: tuple(
            part
            for piece in program
            for part in (
                replace(piece, seconds=piece.seconds / 5, ready=(), issues=()),
                *(replace(piece, seconds=piece.seconds / 5, waits=(), ready=(), issues=()) for _ in range(3)),
                replace(piece, seconds=piece.seconds / 5, waits=()),
            )
        )
        for rank, program in programs.items()
    }
