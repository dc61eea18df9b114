"""The search for a plan finds what an exhaustive one finds, in time, and says what it is worth."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
from fakes.compiled_jobs import compiled_job
from fakes.drawn_jobs import CHOICES, drawn_job
from fakes.played_jobs import GLOO, made_job, plan_of
from fakes.replays import LINK, SIZES, on_one_host, over_a_link, played, times
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.analysis import plan_search as module
from sirtaki.analysis import plan_search as other_passes
from sirtaki.analysis.global_graph import parts, replayed
from sirtaki.analysis.job_model import JobModel, Piece
from sirtaki.analysis.plan_search import (
    EVERY,
    FEW_RANKS,
    MOST_RIVALS,
    STREAMS_ON_ONE_HOST,
    Acceleration,
    Candidate,
    Change,
    Choices,
    Found,
    Pass,
    Position,
    Schedule,
    Search,
    Tensor,
    View,
    choices_of,
    fuse,
    optimize,
    passes,
    planned,
    split,
    units_of,
)
from sirtaki.analysis.what_if import WORTH_A_LINE, Baseline, with_knobs
from sirtaki.autotune.knobs import Knobs
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.errors import ConfigError, ReplayError
from sirtaki.measures import LinkModel

# ── schedule ──────────────────────────────────────────────────────────────────────────────────────────────────────

LAYOUT = GradientLayout(sizes=SIZES)

EVEN = Schedule(route=GLOO, streams=2, unit_bytes=4 * 2000)

WHOLE = replace(EVEN, tensors=(Tensor(stop=1000), Tensor(stop=4000), Tensor(stop=6500)))


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=6), st.integers(1, 4))
def test_units_cover_each_element_once_and_take_the_streams_in_turn(
    tensors: list[tuple[int, int]], streams: int
) -> None:
    stop, made = 0, []
    for size, count in tensors:
        stop += size
        made.append(Tensor(stop=stop, parts=count))
    schedule = replace(EVEN, streams=streams, tensors=tuple(made))
    plan = schedule.knobs(GradientLayout(sizes=(stop,))).to_plan(GradientLayout(sizes=(stop,)))  # checks them
    assert len(plan.units) == sum(map(min, tensors))
    assert [unit.stream for unit in plan.units] == [number % streams for number in range(len(plan.units))]
    assert [end for _, end in units_of(made)] == [unit.stop for unit in plan.units]


def test_what_was_recorded_is_taken_unit_by_unit_unless_it_is_even() -> None:
    (buffer,) = over_a_link().buffers
    assert [tensor.stop for tensor in Schedule.recorded(buffer).tensors or ()] == [1000, 4000, 6500]
    knobs = Knobs(unit_bytes=4000, streams=2, transport=GLOO[0])
    even = replace(buffer, knobs=knobs, plan=knobs.to_plan(buffer.layout))
    assert Schedule.recorded(even).tensors is None
    assert Schedule.recorded(even).knobs(buffer.layout) == knobs
    whole = replace(knobs, unit_bytes=2 * buffer.layout.total_bytes)  # one unit, smaller than its knobs say
    alone = replace(buffer, knobs=whole, plan=whole.to_plan(buffer.layout))
    assert Schedule.recorded(alone).knobs(buffer.layout) == replace(whole, streams=Schedule.recorded(alone).streams)


# ── view ──────────────────────────────────────────────────────────────────────────────────────────────────────────

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


# ── spot ──────────────────────────────────────────────────────────────────────────────────────────────────────────

SCHEDULE = Schedule(
    route=GLOO, streams=1, unit_bytes=1, tensors=(Tensor(stop=1000), Tensor(stop=4000, parts=2), Tensor(stop=6500))
)


def spot(durations_s: tuple[float, ...], schedule: Schedule = SCHEDULE, choices: Choices = CHOICES) -> Position:
    job = made_job(
        durations_s=dict.fromkeys(range(2), durations_s),
        sizes=SIZES,
        plan=plan_of(SIZES, (4,)),
        link=LINK,
        copy_s=0.0,
    )
    return Position(View(job), choices, Candidate(schedule=schedule))


def test_a_tensor_is_ready_with_its_last_gradient_and_reduced_with_its_last_unit() -> None:
    here = spot((0.1, 0.1, 0.1, 0.1))
    assert [here.n_bytes(tensor) for tensor in range(3)] == [4000, 12000, 10000]
    assert [here.ready_s(tensor) for tensor in range(3)] == pytest.approx([0.12, 0.22, 0.42])
    # One unit after the other: 2 ms, and 10 µs a byte.
    assert here.end_s(0) == pytest.approx(0.12 + 0.042)
    assert here.end_s(1) == pytest.approx(0.22 + 2 * 0.062)
    assert here.end_s(2) == pytest.approx(0.42 + 0.102)


def test_tensors_that_others_wait_for_are_critical_and_so_are_those_behind_them() -> None:
    assert spot((0.1, 0.1, 0.1, 0.1)).critical == [2]
    assert spot((0.01, 0.001, 0.001, 0.001)).critical == [0, 1, 2]


def test_parts_are_as_many_as_are_quickest_of_those_that_are_not_too_small() -> None:
    many = Schedule(route=GLOO, streams=3, unit_bytes=1, tensors=SCHEDULE.tensors)
    large = spot((0.1,) * 4, many, Choices(routes=(GLOO,), streams=(1, 2, 3), least_bytes=1))
    parts, took_s = large.best_parts(100_000)
    assert parts == 3
    assert took_s == pytest.approx(
        min(LINK.together_s(100_000 / count, streams=count) for count in (1, 2, 3)), rel=1e-4
    )
    assert spot((0.1,) * 4, many).best_parts(40_000)[0] == 2
    assert spot((0.1,) * 4, many).best_parts(1000)[0] == 1


# ── passes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tensors_are_fused_where_one_ends_later_than_waiting_for_both_takes_and_split_at_a_gradient() -> None:
    apart, close = spot((0.1, 0.1, 0.1, 0.1)), spot((0.01, 0.001, 0.001, 0.001))
    assert [list(fuse(apart, tensor)) for tensor in range(3)] == [[], [], []]
    assert list(fuse(close, 0)) == []
    (fused,) = fuse(close, 2)
    (halved,) = split(close, 2)
    for change, stops in ((fused, [1000, 6500]), (halved, [1000, 4000, 6000, 6500])):
        after = change.apply(close.candidate)
        assert after is not None
        assert [tensor.stop for tensor in after.schedule.tensors_of(close.layout)] == stops


class Mine:
    name = "mine"
    changes_numbers = False

    def changes(self, position: Position, tensor: int) -> Iterator[Change]:
        yield from ()


def test_other_packages_bring_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def brought(value: str) -> None:
        point = EntryPoint(name="mine", group=module.ENTRY_POINT_GROUP, value=value)
        monkeypatch.setattr(other_passes, "entry_points", lambda group: [point])

    monkeypatch.setattr(module, "mine", Mine, raising=False)
    brought("sirtaki.analysis.plan_search:mine")
    assert passes()[-1].name == "mine"
    brought("sirtaki.analysis.plan_search:nothing")
    with pytest.raises(ConfigError, match="'mine' could not be built"):
        passes()
    brought("builtins:object")
    with pytest.raises(ConfigError, match="'mine' is none: it has no name, changes_numbers, changes"):
        passes()


# ── search ────────────────────────────────────────────────────────────────────────────────────────────────────────

NOTHING: frozenset[Acceleration] = frozenset()


def searched(job: JobModel, accelerations: frozenset[Acceleration] = EVERY) -> Found:
    return Search(View(job, accelerations), passes(), CHOICES).run()


def whole_s(job: JobModel, found: Found) -> float:
    return times(View(job).planned(found.candidate, whole=True)).iteration_s


def accelerations_cost_less_than_a_percent(job: JobModel) -> None:
    assert whole_s(job, searched(job)) <= 1.01 * whole_s(job, searched(job, NOTHING))


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
        for count_of_streams in CHOICES.streams:
            for count in range(5):
                for ends in itertools.combinations(range(1, 5), count):
                    tensors = tuple(Tensor(stop=offsets[end]) for end in (*ends, 5))
                    schedule = Schedule(route=GLOO, streams=count_of_streams, unit_bytes=1, tensors=tensors)
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


# ── outcome ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_plan_brings_what_is_said() -> None:
    job = drawn_job(9)
    base = Baseline.of(job)
    outcome = optimize(base, least_bytes=16 * 1024)
    best = outcome.best
    assert outcome.gain > 0.05
    assert outcome.is_faster
    assert base.priced_s is not None
    factor = base.times.iteration_s / base.priced_s
    assert factor * times(with_knobs(job, best.knobs)).iteration_s == pytest.approx(best.answer.times.iteration_s)
    assert base.answer("", with_knobs(job, best.knobs), replanned=True).gain == pytest.approx(outcome.gain)
    assert outcome.without_communication_s <= best.answer.low_s < best.answer.times.iteration_s < best.answer.high_s
    assert best.plan.knobs == best.knobs
    assert (best.plan.ranks, best.plan.sizes) == (len(job.ranks), (job.buffers[0].layout.sizes,))
    assert [part.words for part in outcome.parts] == [part.words for part in parts(played(job))]
    assert sum(part.share for part in best.parts) == pytest.approx(1.0)


def test_plans_that_cannot_be_told_from_the_best_are_named_and_differ_from_it() -> None:
    outcome = optimize(Baseline.of(drawn_job(9)), least_bytes=16 * 1024)
    assert 1 <= len(outcome.rivals) <= MOST_RIVALS
    for one in outcome.rivals:
        assert one.answer.overlaps(outcome.best.answer)
        assert one.knobs != outcome.best.knobs
        assert one.plan.sizes == outcome.best.plan.sizes


def test_where_nothing_is_faster_the_recorded_plan_stays() -> None:
    first = optimize(Baseline.of(drawn_job(9)), least_bytes=16 * 1024)
    again = optimize(Baseline.of(with_knobs(drawn_job(9), first.best.knobs)), least_bytes=16 * 1024)
    assert again.gain <= 0.002
    job = made_job(durations_s={0: (0.1,), 1: (0.1,)}, sizes=(1000,), plan=plan_of((1000,), (1,)), link=LINK)
    fastest = optimize(Baseline.of(job), settings={"SIRTAKI_STREAMS": "1"}, least_bytes=10**6)
    assert fastest.gain == pytest.approx(0.0)
    assert not fastest.is_faster
    assert fastest.rivals == ()
    assert fastest.best.plan.knobs.to_plan(job.buffers[0].layout).units == job.buffers[0].plan.units


def test_what_variables_fix_is_not_changed() -> None:
    job = over_a_link()
    other = (TransportKind.MPI, Algorithm.FLAT)
    job = replace(job, links={**job.links, other: job.links[GLOO]})
    view = View(job)
    free = choices_of(job, view, {}, least_bytes=1)
    assert free.routes == (GLOO, other)
    assert free.streams[-1] == 24
    fixed = choices_of(job, view, {"SIRTAKI_TRANSPORT": "mpi", "SIRTAKI_STREAMS": "3"}, least_bytes=1)
    assert (fixed.routes, fixed.streams) == ((other,), (3,))


def test_on_one_host_there_are_as_many_streams_as_shared_memory_has() -> None:
    job = on_one_host()
    view = View(job)
    assert choices_of(job, view, {}, least_bytes=1).streams[-1] == STREAMS_ON_ONE_HOST
    assert choices_of(job, view, {"SIRTAKI_TRANSPORT": "gloo"}, least_bytes=1).streams[-1] == 24


SLOW = LinkModel(alpha_s=0.001, throughput=(2e7, 3e7, 4e7), host_s=0.0)


def test_a_compiled_model_is_advised_to_be_compiled_in_parts_where_its_gradients_could_hide() -> None:
    job = compiled_job(SLOW)
    base = Baseline.of(job)
    found, whole = optimize(base), planned(base)
    best = found.best
    size = best.plan.part_bytes
    assert size
    assert found.plan_alone == whole.best.answer
    assert best.answer.times.iteration_s < 0.8 * whole.best.answer.times.iteration_s
    assert base.priced_s is not None
    (extra,) = best.extras
    assert extra.line == f"torch.compile(model, backend=hvd.early_gradients(part_bytes={size}))"
    replayed_s = times(with_knobs(extra.apply(job), best.knobs)).iteration_s
    assert replayed_s * base.times.iteration_s / base.priced_s == pytest.approx(best.answer.times.iteration_s)


@pytest.mark.parametrize(
    "link",
    [
        LinkModel(alpha_s=1e-4, throughput=(2e9,), host_s=0.0),  # next to nothing is left to hide
        LinkModel(alpha_s=1e-3, throughput=(4e4, 8e4), host_s=0.0),  # 100 s: there is nothing to hide it behind
    ],
)
def test_where_parts_bring_nothing_the_plan_says_that_the_model_stays_whole(link: LinkModel) -> None:
    found = optimize(Baseline.of(compiled_job(link)))
    assert (found.best.plan.part_bytes, found.best.extras, found.plan_alone) == (0, (), None)


def test_of_models_that_were_not_compiled_nothing_is_said() -> None:
    assert optimize(Baseline.of(drawn_job(9)), least_bytes=16 * 1024).best.plan.part_bytes is None


@pytest.mark.slow
def test_parts_are_never_advised_for_less_than_a_line_of_code_is_worth() -> None:
    for backward_s in (0.005, 0.02, 0.1, 2.0):
        for rate in (2e7, 2e8, 1e9):
            job = compiled_job(
                LinkModel(alpha_s=2e-4, throughput=(rate, 1.5 * rate), host_s=0.0), backward_s=backward_s
            )
            found = optimize(Baseline.of(job), limit_s=0.3)
            if found.plan_alone is not None:
                whole_s = found.plan_alone.times.iteration_s
                assert found.best.answer.times.iteration_s <= (1 - WORTH_A_LINE) * whole_s
            else:
                assert found.best.plan.part_bytes == 0
