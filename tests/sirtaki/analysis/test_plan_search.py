"""The search for a plan is never slower than the current plan, proposes permitted plans, and predicts their gain."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
from fakes.compiled_jobs import compiled_job
from fakes.drawn_jobs import drawn_job
from fakes.played_jobs import GLOO, made_job, plan_of
from fakes.replays import LINK, SIZES, on_one_host, over_a_link, times
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.analysis.global_graph import parts, play, replayed
from sirtaki.analysis.job_model import JobModel, Program
from sirtaki.analysis.plan_search import (
    FEW_RANKS,
    INDIFFERENCE,
    MAX_RIVALS,
    STREAMS_ON_ONE_HOST,
    PlanSearch,
    optimize,
    planned,
    recorded_knobs_of,
)
from sirtaki.analysis.what_if import WORTH_A_LINE, Baseline, with_knobs, with_plans
from sirtaki.autotune.knobs import Cut, Knobs
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.errors import ReplayError
from sirtaki.measures import LinkModel

SMALL = 16 * 1024
MPI = (TransportKind.MPI, Algorithm.FLAT)


@pytest.mark.parametrize("unit_bytes", [4000, 1 << 20, None])
def test_knobs_that_ran_cut_a_buffer_as_it_was_cut(unit_bytes: int | None) -> None:
    (buffer,) = over_a_link().buffers
    if unit_bytes is not None:
        knobs = Knobs(unit_bytes=unit_bytes, streams=2, transport=GLOO[0])
        buffer = replace(buffer, knobs=knobs, plan=knobs.to_plan(buffer.layout))
    assert recorded_knobs_of(buffer).to_plan(buffer.layout) == buffer.plan
    assert (recorded_knobs_of(buffer).cuts is None) is (unit_bytes is not None)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(14, 20), st.integers(1, 4))
def test_the_smaller_job_predicts_the_same_effect_of_a_plan_as_the_whole_one(
    seed: int, octave: int, streams: int
) -> None:
    job = drawn_job(seed)
    search = PlanSearch(job, {})
    knobs = Knobs(unit_bytes=1 << octave, streams=streams, transport=job.buffers[0].plan.transport)
    whole_s = times(search.planned(knobs, whole=True)).iteration_s
    assert replayed(play(search.planned(knobs))).iteration_s == pytest.approx(whole_s, rel=0.02)


@pytest.mark.parametrize("ranks", [2, 6])
def test_ranks_that_are_alike_are_replayed_once_and_of_many_different_ones_few_are_left(ranks: int) -> None:
    assert len(PlanSearch(over_a_link(ranks=ranks), {}).small.ranks) == 1
    durations = {rank: tuple((1 + rank / 40) * seconds for seconds in (0.02, 0.01, 0.03, 0.02)) for rank in range(20)}
    job = made_job(durations_s=durations, sizes=SIZES, plan=plan_of(SIZES, (4,)), link=LINK)
    assert len(PlanSearch(job, {}).small.ranks) <= FEW_RANKS


def test_the_optimizer_with_the_most_gradients_is_planned_and_others_stay_unchanged() -> None:
    job = on_one_host()
    (buffer,) = job.buffers
    small = replace(buffer, number=1, reducer=(0, 1), layout=replace(buffer.layout, sizes=(10,), names=("b",)))
    assert PlanSearch(replace(job, buffers=(small, buffer)), {}).buffers == (buffer,)
    with pytest.raises(ReplayError, match="exchanged no gradients"):
        PlanSearch(replace(job, buffers=()), {})


def fastest_grouping_s(job: JobModel) -> float:
    """Return the step with the best grouping of gradients on one to four streams, one unit per group."""
    (buffer,) = job.buffers
    count, steps_s = len(buffer.layout.sizes), []
    for streams in range(1, 5):
        for ends in (e for n in range(count) for e in itertools.combinations(range(1, count), n)):
            stops = [buffer.layout.offsets[end] for end in (*ends, count)]
            cuts = tuple(Cut(stop=stop, stream=place % streams) for place, stop in enumerate(stops))
            knobs = Knobs(unit_bytes=1, streams=streams, transport=buffer.plan.transport, cuts=cuts)
            steps_s.append(times(with_knobs(job, knobs)).iteration_s)
    return min(steps_s)


@pytest.mark.lengthy
@pytest.mark.parametrize("seed", range(8))
def test_the_plan_is_never_slower_than_the_current_one_and_hardly_than_the_best_grouping(seed: int) -> None:
    job = drawn_job(seed, gradients=5, ranks=2)
    search = PlanSearch(job, {})
    knobs = search.run(least_bytes=SMALL)
    assert search.in_time
    assert search.step_s[knobs] <= (1 + INDIFFERENCE) * min(search.step_s.values())
    assert search.step_s[knobs] <= (1 + INDIFFERENCE) * search.step_s[search.recorded]
    assert times(search.planned(knobs, whole=True)).iteration_s <= 1.05 * fastest_grouping_s(job)


@pytest.mark.lengthy
def test_planners_are_asked_and_named() -> None:
    searches = [PlanSearch(drawn_job(seed), {}) for seed in range(6)]
    found = [optimize(Baseline.of(drawn_job(seed)), least_bytes=SMALL) for seed in range(6)]
    for search in searches:
        search.run(least_bytes=SMALL)
    assert {"dpro", "asc_wfbp_n", "mg_wfbp"} <= {name for search in searches for name in search.by.values()}
    assert all(one.best.by == "" or one.best.knobs.cuts is not None for one in found)


def test_another_route_is_taken_where_it_was_probed_and_is_faster() -> None:
    job = drawn_job(3)
    assert job.link is not None
    faster = replace(next(iter(job.links.values())), throughput=(1e8,), alpha_s=1e-5)
    assert PlanSearch(replace(job, links={**job.links, MPI: faster}), {}).run(least_bytes=SMALL).route == MPI


@pytest.mark.parametrize(
    ("variables", "routes", "streams"),
    [
        ({}, (GLOO, MPI), 24),
        ({"SIRTAKI_TRANSPORT": "mpi", "SIRTAKI_STREAMS": "3"}, (MPI,), 3),
        ({"SIRTAKI_TRANSPORT": "nccl"}, (GLOO,), 24),  # what ran is known, at least
    ],
)
def test_knobs_fixed_by_variables_are_not_changed(variables: Mapping[str, str], routes: object, streams: int) -> None:
    job = over_a_link()
    search = PlanSearch(replace(job, links={**job.links, MPI: job.links[GLOO]}), variables)
    assert (search.routes, search.streams[-1]) == (routes, streams)
    assert all(knobs.streams in search.streams or knobs == search.recorded for knobs in search.step_s)


def test_on_one_host_there_are_as_many_streams_as_shared_memory_has() -> None:
    assert PlanSearch(on_one_host(), {}).streams[-1] == STREAMS_ON_ONE_HOST
    assert PlanSearch(on_one_host(), {"SIRTAKI_TRANSPORT": "gloo"}).streams[-1] == 24


def test_at_the_time_limit_the_best_plan_so_far_is_the_result() -> None:
    found = planned(Baseline.of(drawn_job(0)), limit_s=0.0)
    assert not found.in_time
    assert (found.replays, found.is_faster) == (0, False)


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
    job = job.changed(program=lambda _, program: _finer(program))
    assert len(job.iterations[0].programs[0]) > 1000
    begin_s = time.process_time()
    search = PlanSearch(job, {})
    search.run()
    assert time.process_time() - begin_s < 60.0
    assert min(search.step_s.values()) < search.step_s[search.recorded]


def _finer(program: Program) -> Program:
    """Each operator as five, the last of which is what the one was."""
    return tuple(
        part
        for piece in program
        for part in (
            replace(piece, seconds=piece.seconds / 5, ready=(), issues=()),
            *(replace(piece, seconds=piece.seconds / 5, waits=(), ready=(), issues=()) for _ in range(3)),
            replace(piece, seconds=piece.seconds / 5, waits=()),
        )
    )


def test_the_result_is_the_step_of_the_whole_job_beside_the_recorded_plan_at_the_same_prices() -> None:
    job = drawn_job(0)
    base = Baseline.of(job)
    found = optimize(base, least_bytes=SMALL)
    assert (found.best.extras, found.best.plan.part_bytes) == ((), None)  # nothing else was allowed, or compiled
    assert base.priced_s is not None
    best = with_plans(job, {0: found.best.plan.knobs.to_plan(job.buffers[0].layout)})
    assert found.is_faster
    assert found.gain == pytest.approx(1 - times(best).iteration_s / base.priced_s)
    assert found.without_communication_s <= found.best.answer.times.iteration_s
    assert sum(part.share for part in parts(play(best))) == pytest.approx(1.0)
    assert len(found.rivals) <= MAX_RIVALS
    assert all(one.answer.overlaps(found.best.answer) and one.knobs != found.best.knobs for one in found.rivals)


def test_where_nothing_is_faster_the_recorded_plan_stays() -> None:
    job = made_job(durations_s={0: (0.1,), 1: (0.1,)}, sizes=(1000,), plan=plan_of((1000,), (1,)), link=LINK)
    found = optimize(Baseline.of(job), settings={"SIRTAKI_STREAMS": "1"}, least_bytes=10**6)
    assert (found.gain, found.is_faster, found.rivals) == (pytest.approx(0.0), False, ())
    assert found.best.plan.knobs.to_plan(job.buffers[0].layout).units == job.buffers[0].plan.units


SLOW = LinkModel(alpha_s=0.001, throughput=(2e7, 3e7, 4e7), host_s=0.0)


def test_a_compiled_model_is_advised_to_be_compiled_in_parts_where_its_gradients_could_hide() -> None:
    base = Baseline.of(compiled_job(SLOW))
    found, whole = optimize(base), planned(base)
    best, size = found.best, found.best.plan.part_bytes
    assert size
    assert found.plan_alone == whole.best.answer
    assert best.answer.times.iteration_s < 0.8 * whole.best.answer.times.iteration_s
    assert base.priced_s is not None
    (extra,) = best.extras
    assert extra.line == f"torch.compile(model, backend=hvd.early_gradients(part_bytes={size}))"
    replayed_s = times(with_knobs(extra.apply(base.job), best.knobs)).iteration_s
    assert replayed_s * base.times.iteration_s / base.priced_s == pytest.approx(best.answer.times.iteration_s)


@pytest.mark.parametrize(
    "link",
    [
        LinkModel(alpha_s=1e-4, throughput=(2e9,), host_s=0.0),  # next to nothing is left to hide
        LinkModel(alpha_s=1e-3, throughput=(4e4, 8e4), host_s=0.0),  # 100 s: there is nothing to hide it behind
    ],
)
def test_where_parts_gain_nothing_the_plan_keeps_the_model_whole(link: LinkModel) -> None:
    found = optimize(Baseline.of(compiled_job(link)))
    assert (found.best.plan.part_bytes, found.best.extras, found.plan_alone) == (0, (), None)


@pytest.mark.slow
@pytest.mark.parametrize("backward_s", [0.005, 0.02, 0.1, 2.0])
@pytest.mark.parametrize("rate", [2e7, 2e8, 1e9])
def test_parts_are_never_advised_for_less_than_a_line_of_code_is_worth(backward_s: float, rate: float) -> None:
    link = LinkModel(alpha_s=2e-4, throughput=(rate, 1.5 * rate), host_s=0.0)
    found = optimize(Baseline.of(compiled_job(link, backward_s=backward_s)), limit_s=5.0)
    if found.plan_alone is not None:
        whole_s = found.plan_alone.times.iteration_s
        assert found.best.answer.times.iteration_s <= (1 - WORTH_A_LINE) * whole_s
    else:
        assert found.best.plan.part_bytes == 0
