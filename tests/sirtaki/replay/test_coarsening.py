"""Smaller jobs that take as long."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from fakes.played_jobs import made_job, plan_of
from fakes.replays import LINK, SIZES, on_one_host, over_a_link, played, times
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.analysis.global_graph import coarse, global_graph, mean_iteration, symmetric
from sirtaki.analysis.job_model import JobModel, Piece
from sirtaki.analysis.what_if import with_plans
from sirtaki.autotune.model.replayer import replay


def finer(job: JobModel, parts: int) -> JobModel:
    """Each piece cut into so many."""

    def cut(piece: Piece) -> list[Piece]:
        part = replace(piece, seconds=piece.seconds / parts)
        return [
            replace(
                part,
                waits=piece.waits if index == 0 else (),
                ready=piece.ready if index == parts - 1 else (),
                issues=piece.issues if index == parts - 1 else (),
            )
            for index in range(parts)
        ]

    return replace(
        job,
        iterations=tuple(
            replace(
                each,
                programs={
                    rank: tuple(part for piece in program for part in cut(piece))
                    for rank, program in each.programs.items()
                },
            )
            for each in job.iterations
        ),
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.sampled_from([2.0, 64.0]), st.booleans())
def test_chains_become_one_and_take_as_long(parts: int, capacity: float, between_hosts: bool) -> None:
    job = over_a_link(ranks=3) if between_hosts else on_one_host(ranks=3, capacity=capacity)
    fine = finer(job, parts)
    small = coarse(fine)
    assert sum(len(program) for program in small.iterations[0].programs.values()) <= sum(
        len(program) for program in job.iterations[0].programs.values()
    )
    assert times(small).iteration_s == pytest.approx(times(fine).iteration_s)
    assert times(small).backward_s == pytest.approx(times(fine).backward_s)


def test_when_gradients_come_stays_known_until_the_plan_is_settled() -> None:
    job = finer(over_a_link(cuts=(4,)), 3)
    plan = plan_of(SIZES, (1, 2, 4), streams=2)
    small = coarse(job, settled=False)
    assert len(small.iterations[0].programs[0]) < len(job.iterations[0].programs[0]) / 2
    asked = times(with_plans(small, {0: plan}))
    assert asked.iteration_s == pytest.approx(times(with_plans(job, {0: plan})).iteration_s)


def test_the_mean_iteration_takes_what_iterations_take_on_average() -> None:
    job = over_a_link(iterations=2)
    slow = {
        rank: tuple(replace(piece, seconds=3 * piece.seconds) for piece in program)
        for rank, program in job.iterations[0].programs.items()
    }
    uneven = replace(job, iterations=(job.iterations[0], replace(job.iterations[1], programs=slow)))
    mean = mean_iteration(uneven)
    assert len(mean.iterations) == 1
    forward = next(piece for piece in mean.iterations[0].programs[1] if piece.name == "forward")
    assert forward.seconds == pytest.approx(0.04)


def test_an_iteration_that_went_otherwise_counts_for_the_others() -> None:
    job = over_a_link(iterations=3)
    odd = {**job.iterations[0].programs, 1: tuple(p for p in job.iterations[0].programs[1] if p.name != "step")}
    mixed = replace(job, iterations=(replace(job.iterations[0], programs=odd), *job.iterations[1:]))
    assert times(mean_iteration(mixed)).iteration_s == pytest.approx(times(job).iteration_s)


@pytest.mark.parametrize("capacity", [3.0, 64.0])
def test_ranks_that_are_alike_are_replayed_once(capacity: float) -> None:
    job = on_one_host(ranks=6, capacity=capacity)
    one = symmetric(job)
    assert one.ranks == (0,)
    assert times(one).iteration_s == pytest.approx(times(job).iteration_s)


def test_a_straggler_stays_a_rank_of_its_own() -> None:
    durations = (0.02, 0.01, 0.03, 0.02)
    job = made_job(
        durations_s={0: durations, 1: durations, 2: durations, 3: tuple(2 * seconds for seconds in durations)},
        sizes=SIZES,
        plan=plan_of(SIZES, (1, 4)),
        link=LINK,
        hosts={0: 0, 1: 0, 2: 2, 3: 2},
        capacity=2.0,
    )
    assert symmetric(job).ranks == (0, 2, 3)
    assert times(symmetric(job)).iteration_s == pytest.approx(times(job).iteration_s)


@pytest.mark.slow
def test_a_thousand_operators_on_sixty_four_ranks_replay_in_two_seconds() -> None:
    sizes = (10_000,) * 160
    plan = plan_of(sizes, tuple(range(2, 161, 2)), streams=4)
    job = made_job(
        durations_s={rank: (0.001 + 1e-5 * rank,) * 160 for rank in range(64)},
        sizes=sizes,
        plan=plan,
        link=LINK,
        hosts={rank: rank // 8 * 8 for rank in range(64)},
        capacity=4.0,
    )
    fine = finer(job, 4)
    assert sum(len(program) for program in fine.iterations[0].programs.values()) > 60_000
    begin_s = time.process_time()
    found = replay(global_graph(coarse(fine)))
    assert time.process_time() - begin_s < 2.0
    assert found.total_s == pytest.approx(played(job).total_s)
