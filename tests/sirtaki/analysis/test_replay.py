"""Jobs replayed: their graph, their critical path, and what would happen if something were different."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from fakes.compiled_jobs import compiled_job
from fakes.drawn_jobs import drawn_job
from fakes.played_jobs import GLOO, made_job, plan_of, record
from fakes.replays import DURATIONS, LINK, SIZES, on_one_host, over_a_link, played, times
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sirtaki.analysis.global_graph import (
    BEFORE,
    alone_s,
    coarse,
    communication_s,
    computation_s,
    global_graph,
    mean_iteration,
    parts,
    play,
    replayed,
    symmetric,
)
from sirtaki.analysis.job_model import JobModel, Program, ThreadInterval, histories, job_model
from sirtaki.analysis.what_if import (
    BETWEEN_HOSTS,
    COMPILED,
    COST_S,
    COST_SHARE,
    MIN_GAIN,
    ON_ONE_HOST,
    PAYLOAD,
    Answer,
    Baseline,
    ModelError,
    backward_order,
    bandwidth,
    best_knobs,
    compiled_backwards,
    daydream,
    in_parts,
    knobs_of,
    limitations,
    nominal_link_rate,
    plan_refusal,
    sizes_worth_trying,
    unit_cost,
    with_batches,
    with_faster_loader,
    with_knobs,
    with_less_traffic,
    with_link,
    with_plans,
    with_ranks,
    without_stragglers,
)
from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.model.replayer import Activity, SharedHost, replay
from sirtaki.autotune.model.simulator import Profile, Simulator
from sirtaki.comm.plan import Algorithm, CommPlan, GradientLayout, TransportKind
from sirtaki.errors import ReplayError
from sirtaki.measures import LinkModel, ring_bytes

# ── global graph ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_ranks_begin_as_far_apart_as_they_did_and_a_streams_next_unit_waits_for_the_last_rank() -> None:
    found = played(replace(over_a_link(), begin_s={0: 0.0, 1: 0.25}))
    begins = {node.rank: found.end_s[place] for place, node in enumerate(found.graph.nodes) if node.iteration == BEFORE}
    assert begins == {0: 0.0, 1: 0.25}
    found = played(on_one_host(cuts=(1, 4), streams=1).changed(operation=lambda one: replace(one, lag_s=0.5)))
    first, second, *_ = [p for p, node in enumerate(found.graph.nodes) if node.activity is Activity.UNIT]
    assert found.start_s[second] - found.end_s[first] == pytest.approx(0.5)


# ── coarsening ────────────────────────────────────────────────────────────────────────────────────────────────────


def finer(job: JobModel, parts: int) -> JobModel:
    """Each piece cut into so many."""

    def cut(piece: ThreadInterval) -> list[ThreadInterval]:
        part = replace(piece, seconds=piece.seconds / parts, waits=(), ready=(), issues=())
        found = [part] * parts
        found[0] = replace(part, waits=piece.waits)
        found[-1] = replace(found[-1], ready=piece.ready, issues=piece.issues)
        return found

    return job.changed(program=lambda _, program: tuple(part for piece in program for part in cut(piece)))


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


def test_ready_times_are_kept_until_the_plan_is_final() -> None:
    job = finer(over_a_link(cuts=(4,)), 3)
    plan = plan_of(SIZES, (1, 2, 4), streams=2)
    small = coarse(job, plan_is_fixed=False)
    assert len(small.iterations[0].programs[0]) < len(job.iterations[0].programs[0]) / 2
    asked = times(with_plans(small, {0: plan}))
    assert asked.iteration_s == pytest.approx(times(with_plans(job, {0: plan})).iteration_s)


def test_the_mean_iteration_takes_the_average_of_most_iterations() -> None:
    job = over_a_link(iterations=2)
    slow = job.changed(program=lambda _, mine: tuple(replace(piece, seconds=3 * piece.seconds) for piece in mine))
    mean = mean_iteration(replace(job, iterations=(job.iterations[0], slow.iterations[1])))
    assert len(mean.iterations) == 1
    forward = next(piece for piece in mean.iterations[0].programs[1] if piece.name == "forward")
    assert forward.seconds == pytest.approx(0.04)
    # An iteration that went otherwise counts for the others.
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
    job = over_a_link(ranks=4, slow={3: 2.0}, hosts={0: 0, 1: 0, 2: 2, 3: 2}, capacity=2.0)
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


# ── critical path ─────────────────────────────────────────────────────────────────────────────────────────────────


def shares(job: JobModel) -> dict[str, float]:
    return {part.words: part.share for part in parts(played(job))}


def test_a_slow_link_is_most_of_the_step() -> None:
    job = over_a_link(iterations=1)
    found = shares(job)
    assert next(iter(found)) == "is the link between hosts"
    assert found["is the link between hosts"] > 0.4
    assert found["is the forward pass"] == pytest.approx(0.02 / played(job).total_s)


def test_a_straggler_and_a_loader_that_one_rank_waits_for_are_called_by_name() -> None:
    fast, data_s = LinkModel(alpha_s=0.0, throughput=(1e9,)), dict.fromkeys(range(3), 0.01)
    job = over_a_link(ranks=3, slow={2: 2.0}, cuts=(4,), link=fast, data_s=data_s, iterations=1)
    share = pytest.approx(0.08 / played(job).total_s, rel=1e-3)
    assert shares(job)["waits for rank 2's backward pass"] == share
    assert shares(job)["is the backward pass"] == share
    loader, *_ = parts(played(over_a_link(ranks=4, cuts=(4,), data_s={3: 0.5})))
    assert loader.describe().endswith("% of the step waits for rank 3's data loader")
    assert loader.seconds == pytest.approx(0.5)


def test_ranks_that_share_processors_are_reported() -> None:
    found = shares(on_one_host(ranks=4, capacity=2))
    assert found["is sharing the processors of host0"] > 0.3
    assert "is sharing the processors of host0" not in shares(on_one_host(ranks=4))


def test_results_that_ranks_see_late_are_named() -> None:
    def late(rank: int, program: Program) -> Program:
        return tuple(replace(one, waits=tuple((key, 0.5 * rank) for key, _ in one.waits)) for one in program)

    found = parts(played(over_a_link(iterations=1).changed(program=late)))
    assert (found[0].words, found[0].seconds) == ("is delays between ranks in receiving results", pytest.approx(0.5))


# ── partial ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_computation_and_communication_alone() -> None:
    one = global_graph(over_a_link(cuts=(4,), streams=1, iterations=2))
    # 20 ms forward, 80 ms backward, 1 ms to copy, 10 ms update; 2 ms to start, 260 ms on the link
    assert computation_s(one) == pytest.approx(2 * 0.111)
    assert communication_s(one) == pytest.approx(2 * 0.262)
    assert replay(one).total_s == pytest.approx(2 * (0.111 + 0.262))


# ── planners simulator ────────────────────────────────────────────────────────────────────────────────────────────

rates = st.floats(1e4, 1e6)

seconds = st.floats(0.0, 0.05)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.001, 0.05), min_size=4, max_size=4),
    st.sampled_from([(4,), (1, 4), (2, 3, 4), (1, 2, 3, 4)]),
    st.integers(1, 3),
    st.tuples(rates, rates, rates),
    seconds,
    seconds,
)
def test_one_rank_equals_all_others(
    durations_s: list[float],
    cuts: tuple[int, ...],
    streams: int,
    throughput: tuple[float, ...],
    alpha_s: float,
    host_s: float,
) -> None:
    link = LinkModel(alpha_s=alpha_s, throughput=throughput, host_s=host_s)
    job = over_a_link(
        durations_s={0: durations_s, 1: durations_s}, cuts=cuts, streams=streams, link=link, copy_s=0.0, update_s=0.0,
        iterations=1,
    )  # fmt: skip
    (buffer,), profile = job.buffers, Profile.from_durations(durations_s, forward_s=0.02)
    simulated = Simulator(layout=buffer.layout, profile=profile, link=link).run(buffer.plan)
    assert times(job).iteration_s == pytest.approx(simulated.iteration_s)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.001, 0.05), min_size=4, max_size=4),
    st.sampled_from([(4,), (1, 4), (2, 3, 4), (1, 2, 3, 4)]),
    st.integers(1, 3),
    st.integers(2, 4),
    st.sampled_from((1.0, 2.0, 64.0)),
    st.floats(0.1, 1.0),
)
def test_ranks_that_share_a_host(
    durations_s: list[float], cuts: tuple[int, ...], streams: int, ranks: int, capacity: float, busy: float
) -> None:
    host, s_per_byte = SharedHost(ranks=ranks, processors=capacity), 2e-6
    job = on_one_host(
        durations_s=dict.fromkeys(range(ranks), durations_s), cuts=cuts, streams=streams, seconds_per_byte=s_per_byte,
        capacity=capacity, busy=busy, forward_s=dict.fromkeys(range(ranks), 0.0), copy_s=0.0, update_s=0.0,
        iterations=1,
    )  # fmt: skip
    (buffer,) = job.buffers
    # The profile and the probe were taken where all ranks were at work.
    measured_s = [seconds / host.server.share(ranks) for seconds in durations_s]
    alone = host.server.share(max(1.0, ranks * busy)) / s_per_byte
    link = LinkModel(alpha_s=0.0, throughput=tuple(n * alone for n in (1, 2, 3)), busy=busy)
    simulator = Simulator(layout=buffer.layout, profile=Profile.from_durations(measured_s), link=link, host=host)
    simulated = simulator.run(buffer.plan)
    assert times(job).iteration_s == pytest.approx(simulated.iteration_s)


# ── unit costs ────────────────────────────────────────────────────────────────────────────────────────────────────


PROBED = LinkModel(alpha_s=0.001, throughput=(1e6,))
SCALE = 26_000 * 2e-6 / (26_000 * 1e-6 + 3 * 0.001)  # of what was recorded to what was probed
UNPROBED, LINKED = on_one_host(cuts=(1, 2, 4)), over_a_link()


@pytest.mark.parametrize(
    ("job", "cost"),
    [
        (UNPROBED.changed(operation=lambda one: replace(one, processor_s=one.processor_s + 0.004)), (0.004, 2e-6, 0.0)),
        (LINKED.changed(operation=lambda one: replace(one, link_s=2 * one.link_s)), (LINK.alpha_s, 2e-5, LINK.host_s)),
        (LINKED.changed(operation=lambda one: replace(one, link_s=0.0)), (LINK.alpha_s, 1e-5, LINK.host_s)),
        (replace(on_one_host(), links={GLOO: PROBED}), (0.001 * SCALE, 1e-6 * SCALE, 0.0)),
    ],
    ids=[
        "recorded sizes alone",
        "how fast a link is, and by probes how it starts",
        "clocks that tell nothing",
        "probes scaled to what was recorded",
    ],
)
def test_the_cost_of_a_unit_follows_from_probes_and_recorded_units(job: JobModel, cost: tuple[float, ...]) -> None:
    found = unit_cost(job, GLOO, (0, 1))
    assert (found.startup_s, found.s_per_byte, found.host_s) == pytest.approx(cost)
    assert found.across is (job.link is not None)


# ── other plan ────────────────────────────────────────────────────────────────────────────────────────────────────

CUTS = [(4,), (1, 4), (2, 3, 4), (1, 2, 3, 4)]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CUTS), st.integers(1, 3), st.sampled_from(CUTS), st.integers(1, 3), st.booleans())
def test_a_replayed_plan_takes_as_long_as_a_job_with_it(
    cuts: tuple[int, ...], streams: int, others: tuple[int, ...], other_streams: int, recorded: bool
) -> None:
    durations_s = {0: DURATIONS, 1: (0.03, 0.01, 0.01, 0.02)}
    was = over_a_link(durations_s=durations_s, cuts=cuts, streams=streams, copy_s=0.0)
    if recorded:
        was = job_model(histories(record(was)))
    asked = with_plans(was, {0: plan_of(SIZES, others, streams=other_streams)})
    expected = times(over_a_link(durations_s=durations_s, cuts=others, streams=other_streams, copy_s=0.0))
    assert times(asked).iteration_s == pytest.approx(expected.iteration_s, rel=1e-3)
    assert times(asked).backward_s == pytest.approx(expected.backward_s, rel=1e-3)


def test_copies_take_equal_time_per_byte_at_every_position() -> None:
    asked = with_plans(over_a_link(cuts=(1, 2, 4)), {0: plan_of(SIZES, (4,))})
    copies = [piece for piece in asked.iterations[0].programs[0] if piece.activity.value == "copy"]
    assert sum(piece.seconds for piece in copies) == pytest.approx(0.003)
    assert [piece.issues for piece in copies if piece.issues] == [((0, 0, 6500),)]


def test_units_may_end_within_gradients_and_units_without_ready_gradients_are_launched_last() -> None:
    job = over_a_link(cuts=(4,))
    plan = Knobs(unit_bytes=4 * 1500, streams=2, transport=TransportKind.GLOO).to_plan(job.buffers[0].layout)
    dropped = job.changed(
        program=lambda _, mine: tuple(
            replace(piece, ready=tuple(key for key in piece.ready if key != (0, 3))) for piece in mine
        )
    )
    for one in (job, dropped):
        asked = with_plans(one, {0: plan})
        issued = [key for piece in asked.iterations[0].programs[1] for key in piece.issues]
        assert issued == [(0, unit.start, unit.stop) for unit in plan.units]
        assert times(asked).iteration_s > 0


def test_an_unknown_route_another_layout_and_missing_gradients_are_refused() -> None:
    job = over_a_link()
    with pytest.raises(ReplayError, match=r"cost of transport mpi with algorithm flat is unknown.*: gloo flat"):
        with_knobs(job, Knobs(unit_bytes=4000, streams=1, transport=TransportKind.MPI))
    with pytest.raises(ReplayError, match="sends 10 gradient elements, but the job has 6500"):
        with_plans(job, {0: plan_of((10,), (1,))})
    bare = job.changed(program=lambda _, mine: tuple(replace(piece, ready=()) for piece in mine))
    with pytest.raises(ReplayError, match="did not record when its gradients became ready"):
        with_plans(bare, {0: plan_of(SIZES, (4,))})


def test_a_probed_route_can_be_asked_for_though_nothing_used_it() -> None:
    job = over_a_link()
    other = (TransportKind.MPI, GLOO[1])
    probed = replace(job, links={**job.links, other: replace(LINK, throughput=(1e4,))})
    knobs = Knobs(unit_bytes=40000, streams=1, transport=TransportKind.MPI)
    assert times(with_knobs(probed, knobs)).iteration_s > 2 * times(job).iteration_s


# ── what if ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_link_that_one_unit_fills_scales(factor: float) -> None:
    link = LinkModel(alpha_s=0.001, throughput=(1e5, 1e5))
    other = replace(link, throughput=(1e5 * factor, 1e5 * factor))
    asked = with_link(over_a_link(link=link), 1e5 * factor / PAYLOAD * ring_bytes(1.0, 2))
    assert times(asked).iteration_s == pytest.approx(times(over_a_link(link=other)).iteration_s)


def test_a_faster_link_helps_flows_only_side_by_side() -> None:
    link = LinkModel(alpha_s=0.001, throughput=(1e5, 1.2e5))
    faster = with_link(over_a_link(link=link), 4e5 / PAYLOAD * ring_bytes(1.0, 2))
    expected = LinkModel(alpha_s=0.001, throughput=(1e5, 2e5, 3e5, 4e5))
    assert times(faster).iteration_s == pytest.approx(times(over_a_link(link=expected)).iteration_s)
    alone = over_a_link(link=link, streams=1)
    unchanged = with_link(alone, 4e5 / PAYLOAD * ring_bytes(1.0, 2))
    assert times(unchanged).iteration_s == pytest.approx(times(alone).iteration_s)


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda: with_link(on_one_host(), 1e9), "all recorded ranks ran on one host"),
        (lambda: with_link(over_a_link(), 0.0), "expected a positive, finite number"),
        (lambda: with_ranks(over_a_link(), 1), "expected at least 2"),
        (lambda: with_faster_loader(over_a_link(), 0), "loader's speed: expected a positive number, found 0"),
        (lambda: with_less_traffic(on_one_host(), 0), "expected a positive number, found 0"),
        (lambda: with_batches(on_one_host(), -1), "batch size: expected a positive number, found -1"),
        (lambda: knobs_of(replace(over_a_link(), buffers=()), streams=2), "exchanged no gradients"),
        (lambda: unit_cost(on_one_host(), (TransportKind.NCCL, Algorithm.FLAT), (0, 1)),
         r"cost of transport nccl with algorithm flat is unknown, .*: gloo flat"),
    ],
)  # fmt: skip
def test_an_unanswerable_question_is_rejected_with_the_reason(ask: Callable[[], object], reason: str) -> None:
    with pytest.raises(ReplayError, match=reason):
        ask()


def test_more_ranks_on_more_hosts_reduce_in_a_larger_ring() -> None:
    asked = with_ranks(over_a_link(), 4)
    expected = over_a_link(link=LINK.rescaled(from_ranks=2, to_ranks=4), ranks=4)
    assert times(asked).iteration_s == pytest.approx(times(expected).iteration_s, rel=1e-6)
    assert len(set(asked.hosts.values())) == 4
    assert len(asked.processors) == 4


def test_more_ranks_on_one_host_and_nodes_emulated_on_one_machine_share_its_processors() -> None:
    asked = with_ranks(on_one_host(ranks=2, capacity=2.0), 4)
    assert asked.hosts == {0: 0, 1: 0, 2: 0, 3: 0}
    assert asked.processors[0].ranks == (0, 1, 2, 3)
    assert times(asked).forward_s == pytest.approx(2 * times(on_one_host(ranks=2)).forward_s)
    job = over_a_link()
    asked = with_ranks(replace(job, processors=(replace(job.processors[0], ranks=(0, 1), capacity=2.0),)), 4)
    assert asked.processors[0].ranks == (0, 1, 2, 3)
    assert len(set(asked.hosts.values())) == 4


def test_without_its_straggler_a_job_is_one_that_has_none() -> None:
    slow, even = over_a_link(ranks=3, slow={1: 3.0}), over_a_link(ranks=3)
    assert times(slow).iteration_s > 1.3 * times(even).iteration_s
    assert times(without_stragglers(slow)).iteration_s == pytest.approx(times(even).iteration_s)


def test_data_that_is_ready_at_once_is_not_awaited() -> None:
    slow, none = over_a_link(data_s={0: 0.3}), over_a_link()
    assert times(with_faster_loader(slow, math.inf)).iteration_s == pytest.approx(times(none).iteration_s)
    less_s = times(over_a_link(data_s={0: 0.1})).iteration_s
    assert times(with_faster_loader(slow, 3.0)).iteration_s == pytest.approx(less_s)


def test_larger_batches_take_longer_to_compute_and_no_longer_to_exchange() -> None:
    def durations_s(factor: float) -> dict[int, list[float]]:
        return {rank: [factor * seconds for seconds in (0.02, 0.03, 0.01, 0.04)] for rank in (0, 1)}

    once, thrice = over_a_link(durations_s=durations_s(1.0)), over_a_link(durations_s=durations_s(3.0))
    forward_s = {factor: times(with_batches(once, factor)).forward_s for factor in (1.0, 3.0)}
    assert forward_s[3.0] == pytest.approx(3 * forward_s[1.0])
    grown, wanted = times(with_batches(once, 3.0)), times(thrice)
    assert grown.iteration_s - grown.forward_s == pytest.approx(wanted.iteration_s - wanted.forward_s)


def test_half_the_bytes_take_half_the_link() -> None:
    link, fast = (LinkModel(alpha_s=0.001, throughput=(rate, rate)) for rate in (1e5, 2e5))
    half_s = times(with_less_traffic(over_a_link(link=link), 0.5)).iteration_s
    assert half_s == pytest.approx(times(over_a_link(link=fast)).iteration_s)


# ── early gradients ───────────────────────────────────────────────────────────────────────────────────────────────

MB = 1_000_000

SLOW = LinkModel(alpha_s=0.001, throughput=(2e7, 3e7, 4e7), host_s=0.0)

FAST = LinkModel(alpha_s=1e-6, throughput=(1e12,), host_s=0.0)


def computed_s(job: JobModel) -> float:
    return sum(piece.seconds for piece in job.iterations[0].programs[0] if piece.activity is Activity.COMPUTE)


def ready(job: JobModel) -> list[list[int]]:
    """Return the gradients that follow each compiled operator of a rank."""
    found: list[list[int]] = []
    for piece in job.iterations[0].programs[0]:
        if piece.name == COMPILED:
            found.append([])
        if found:
            found[-1] += [index for _, index in piece.ready]
    return found


def test_parts_have_their_share_of_the_time_and_cuts_their_price() -> None:
    job = compiled_job(SLOW)
    cut = in_parts(job, 2 * MB)
    assert ready(job) == [list(range(8))]
    assert ready(cut) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert computed_s(cut) == pytest.approx(computed_s(job) + 3 * (COST_S + COST_SHARE * 0.4))
    parts = [piece.seconds for piece in cut.iterations[0].programs[0] if piece.name == COMPILED]
    assert parts[0] == pytest.approx(0.1)
    assert parts[1] == pytest.approx(0.1 + COST_S + COST_SHARE * 0.4)
    assert computed_s(in_parts(job, 8 * MB)) == pytest.approx(computed_s(job))


def test_communication_is_hidden_behind_later_parts() -> None:
    job = compiled_job(SLOW)
    whole_s, early_s = times(in_parts(job, 8 * MB)).iteration_s, times(in_parts(job, 2 * MB)).iteration_s
    # 8 MB at 40 MB/s take 0.2 s, of which a part of four can be left at the end.
    assert early_s < whole_s - 0.1
    assert early_s > whole_s - 0.2


def test_the_layout_follows_the_predicted_order_of_readiness() -> None:
    job = compiled_job(SLOW, out_of_place=True)
    before, after = job.buffers[0].layout, in_parts(job, 2 * MB).buffers[0].layout
    assert before.names[0] == "blocks.0.weight"
    in_order = [f"blocks.{number}.{kind}" for number in (3, 2, 1) for kind in ("bias", "weight")]
    assert after.names[:-1] == (*in_order, "blocks.0.weight", "blocks.0.bias")
    assert sorted(before.sizes) == sorted(after.sizes)
    assert after.names[-1] == before.names[-1]  # the flags stay where they are


def test_gradients_return_to_their_block() -> None:
    names = ("emb.weight", "h.0.b", "norm.weight", "h.1.c", "h.1.b", "h.1.a", "h.0.c", "h.0.a", "emb.bias")
    layout = GradientLayout(sizes=(1,) * len(names), names=names)
    order = backward_order(layout, range(len(names)))
    assert [names[index] for index in order][1:] == [
        "h.1.c", "h.1.b", "h.1.a", "h.0.b", "h.0.c", "h.0.a", "emb.weight", "emb.bias",
    ]  # fmt: skip
    assert backward_order(replace(layout, names=()), [3, 1]) == [3, 1]


def test_theorem_1_ignores_communication_shorter_than_the_cost_of_a_cut() -> None:
    job = compiled_job(SLOW)
    (one,) = compiled_backwards(job)
    assert sizes_worth_trying(job) == (500_000, 666_667, 1_000_000, 1_333_334, 2_000_000, 2_666_667, 4_000_000)
    # In a backward pass of a 25 s a cut costs 0.1 s, in which four MB travel over that link, and no less.
    assert sizes_worth_trying(compiled_job(SLOW, backward_s=25.0)) == (4_000_000,)
    assert one.cost_s < 0.002
    assert sizes_worth_trying(compiled_job(FAST)) == ()


def test_ranks_that_differ_are_not_cut() -> None:
    def renamed(rank: int, program: Program) -> Program:
        return tuple(replace(one, name="Addmm") if rank and one.name == COMPILED else one for one in program)

    assert compiled_backwards(compiled_job(SLOW).changed(program=renamed)) == ()


def test_each_graph_is_cut_by_itself() -> None:
    job = compiled_job(SLOW, graphs=2)
    assert ready(in_parts(job, 4 * MB)) == ready(job) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ready(in_parts(job, 2 * MB)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_on_one_host_forwarding_messages_costs_processor_time_per_unit() -> None:
    link = LinkModel(alpha_s=0.001, throughput=(1e6,), host_s=0.002)
    job = replace(on_one_host(), links={GLOO: link})
    small, large = (
        unit_cost(replace(job, links={GLOO: one}), GLOO, job.ranks) for one in (link, replace(link, host_s=0.0))
    )
    assert small.startup_s / small.s_per_byte == pytest.approx(3 * large.startup_s / large.s_per_byte)
    assert small.host_s == 0.0


# ── remedies ──────────────────────────────────────────────────────────────────────────────────────────────────────


def remedies(job: JobModel) -> tuple[Answer, ...]:
    return tuple(one for one in Baseline.of(job).single_remedies() if one.is_worth_reporting)


def test_possible_remedies_are_listed_best_first() -> None:
    job = over_a_link(ranks=3, slow={2: 9.0}, cuts=(4,), data_s=dict.fromkeys(range(3), 0.03))
    found = remedies(job)
    words = [one.words for one in found]
    assert words[0] == "no rank were slower than most"
    assert "no rank waited for data" in words
    assert not any("the links were twice as fast" in word for word in words)
    assert [one.gain for one in found] == sorted((one.gain for one in found), reverse=True)
    before_s = times(job).iteration_s
    for one in found:
        assert one.gain == pytest.approx(1 - one.times.iteration_s / before_s)


def scattered_job(seed: int) -> JobModel:
    """Return a random job whose ranks begin at different times, and whose work takes another time in each iteration."""
    rng = random.Random(seed)
    job = drawn_job(seed)
    job = replace(job, begin_s={rank: rng.choice([0.0, 0.02]) for rank in job.ranks})
    return job.changed(
        program=lambda _, program: tuple(replace(one, seconds=one.seconds * rng.uniform(0.5, 1.5)) for one in program)
    )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), factor=st.floats(0.1, 1.0))
@example(seed=166, factor=0.5)
@example(seed=310, factor=0.5)
def test_less_work_never_makes_a_step_longer(seed: int, factor: float) -> None:
    job = scattered_job(seed)
    step_s = replayed(play(job)).iteration_s
    smaller = {
        "straggler": without_stragglers(job),
        "loader": with_faster_loader(job, 1 / factor),
        "bytes": with_less_traffic(job, factor),
        "batch": with_batches(job, factor),
    }
    if (nominal := nominal_link_rate(job)) is not None:
        smaller["link"] = with_link(job, nominal / factor)
    steps_s = {words: replayed(play(one)).iteration_s for words, one in smaller.items()}
    own_s, units_s = alone_s(play(job))
    assert max(own_s, units_s, *steps_s.values()) <= step_s * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
@example(29)  # the recorded rate of its link is rounded up
def test_a_remedy_is_the_answer_to_the_same_question_and_an_interval_without_todays_step_is_a_change(seed: int) -> None:
    job = scattered_job(seed)
    base = Baseline.of(job, replayed(play(job)))
    found = {one.words.partition(" (")[0]: one for one in base.single_remedies()}
    questions = {
        "no rank were slower than most": without_stragglers(job),
        "no rank waited for data": with_faster_loader(job, math.inf),
    }
    if (nominal := nominal_link_rate(job)) is not None:
        questions["the links were twice as fast"] = with_link(job, 2 * nominal)
        same = base.answer("", with_link(job, nominal))
        assert same.times.iteration_s == pytest.approx(base.times.iteration_s, rel=1e-3)
    for words, changed in questions.items():
        answer = base.answer(words, changed)
        assert (found[words].times, found[words].interval) == (answer.times, answer.interval)
    for one in found.values():
        excluded = not one.low_s <= base.times.iteration_s <= one.high_s
        assert one.is_sure == excluded
        if excluded and one.high_s < (1 - 2 * MIN_GAIN) * base.times.iteration_s:
            assert one.is_worth_reporting


def test_two_ranks_with_a_slow_one_are_told_so_although_the_gain_is_uncertain() -> None:
    job = on_one_host(slow={1: 4.0}, cuts=(4,), seconds_per_byte=1e-9)
    (first, *_) = remedies(job)
    assert first.words == "no rank were slower than most"
    assert first.high_s < times(job).iteration_s
    assert not first.is_precise
    assert first.describe().endswith("ms a step: shorter than now, but only a trial can show by how much")


def test_a_compiled_model_in_parts_is_one_with_the_line_that_does_it() -> None:
    job = compiled_job(LinkModel(alpha_s=1e-3, throughput=(2e7, 4e7), host_s=0.0))
    (one,) = (one for one in remedies(job) if "early_gradients" in one.words)
    assert one.words.startswith("the model was compiled in ")
    assert one.gain > 0.1
    for other in (on_one_host(), compiled_job(LinkModel(alpha_s=1e-4, throughput=(2e9,), host_s=0.0))):
        answers = Baseline.of(other).single_remedies()
        assert not [one for one in answers if "early_gradients" in one.words]


def test_each_knob_is_asked_for_by_itself_and_both_together() -> None:
    job = over_a_link(streams=1)
    (buffer,) = job.buffers
    knobs = Knobs(unit_bytes=8000, streams=1, transport=TransportKind.GLOO)
    plan = knobs.to_plan(buffer.layout)
    job = with_plans(replace(job, buffers=(replace(buffer, knobs=knobs),)), {0: plan})
    words = [one.words for one in Baseline.of(job).single_remedies()]
    assert [word for word in words if word.startswith("there were")] in (
        [f"there were {count} streams"] for count in (2, 4, 8)
    )
    assert "units were of 1 MiB" in words
    assert not any("otherwise" in word for word in words)  # one unit of 1 MiB is all there is, on any stream


def test_where_units_are_not_of_one_size_there_is_another_plan_only() -> None:
    words = [one.words for one in Baseline.of(over_a_link()).single_remedies()]
    assert [word for word in words if "units" in word or "streams" in word] == [
        "units were cut otherwise (gloo flat, 1 MiB units, 1 stream)"
    ]


def test_no_other_plan_is_asked_for_where_a_rank_had_no_gradients() -> None:
    job = over_a_link()
    assert limitations(job) == ()
    idle = job.changed(program=lambda rank, mine: tuple(replace(one, ready=() if rank else one.ready) for one in mine))
    job = replace(job, iterations=(job.iterations[0], idle.iterations[-1]))
    (sentence,) = limitations(job)
    assert "a rank had no gradients of its own" in sentence
    words = [one.words for one in remedies(job)]
    assert words
    assert not any("units" in one for one in words)


@pytest.mark.parametrize(("job", "error"), [(over_a_link(), BETWEEN_HOSTS), (on_one_host(cuts=(4,)), ON_ONE_HOST)])
def test_an_interval_is_as_wide_as_replays_were_found_to_miss(job: JobModel, error: ModelError) -> None:
    base = Baseline.of(job)
    same = base.answer("nothing", job)
    assert math.log(same.high_s / same.times.iteration_s) == pytest.approx(error.any_question)
    assert same.low_s < base.times.iteration_s < same.high_s
    assert not same.is_sure
    half = with_faster_loader(with_less_traffic(job, 0.5), 2.0)
    asked = base.answer("half", half)
    change = abs(math.log(asked.times.iteration_s / base.times.iteration_s))
    assert math.log(asked.high_s / asked.times.iteration_s) == pytest.approx(error.any_question + error.step * change)
    knobs = Knobs(unit_bytes=4000, streams=2, transport=TransportKind.GLOO)
    other = base.answer("units", with_knobs(job, knobs), replanned=True)
    units = math.log(7 / len(job.buffers[0].plan.units))
    change = abs(math.log(other.times.iteration_s / base.times.iteration_s))
    width = error.any_question + error.step * change + error.units * units
    assert math.log(other.high_s / other.times.iteration_s) == pytest.approx(width, rel=0.01)


SMALL_UNITS = Knobs(unit_bytes=2000, streams=2, transport=TransportKind.GLOO)


@pytest.mark.parametrize(
    ("job", "asked", "why"),
    [
        (on_one_host(cuts=(2, 4)), plan_of(SIZES, (1, 2, 3, 4)), "so much smaller units"),
        (replace(over_a_link(cuts=(4,)), links={}), SMALL_UNITS, "so much smaller units"),
        (over_a_link(cuts=(4,), link=replace(LINK, host_s=0.01)), SMALL_UNITS, "this small take processor time"),
        (
            over_a_link(cuts=(2, 4), link=replace(LINK, residual=0.13)),
            plan_of(SIZES, (4,)),
            "contradict each other",
        ),
        (on_one_host(ranks=3, capacity=2.0), plan_of(SIZES, (4,)), "more compute threads"),
        (on_one_host(), replace(plan_of(SIZES, (4,)), transport=TransportKind.SHARED_MEMORY), "another transport"),
        (on_one_host(), plan_of(SIZES, (4,)), "only through shared memory"),
    ],
)
def test_questions_that_replays_cannot_answer_are_rejected(job: JobModel, asked: CommPlan | Knobs, why: str) -> None:
    (buffer,) = job.buffers
    plan = asked if isinstance(asked, CommPlan) else asked.to_plan(buffer.layout)
    assert why in (plan_refusal(job, {0: plan}) or "")
    assert plan_refusal(job, {0: buffer.plan}) is None
    larger = with_plans(over_a_link(cuts=(1, 2, 4)), {0: plan_of(SIZES, (4,), streams=2)})
    assert plan_refusal(over_a_link(cuts=(1, 2, 4)), {0: larger.buffers[0].plan}) is None


def test_larger_units_through_shared_memory_and_between_hosts_are_predicted() -> None:
    larger = plan_of(SIZES, (4,))
    assert plan_refusal(over_a_link(cuts=(2, 4)), {0: larger}) is None
    job = on_one_host()
    (buffer,) = job.buffers
    shared = replace(buffer, plan=replace(buffer.plan, transport=TransportKind.SHARED_MEMORY))
    job = replace(job, buffers=(shared,))
    assert plan_refusal(job, {0: replace(larger, transport=TransportKind.SHARED_MEMORY)}) is None


def test_units_dominated_by_forwarding_are_rejected_unless_the_job_ran_them() -> None:
    job = over_a_link(link=replace(LINK, host_s=0.1))
    assert "this small take processor time" in (plan_refusal(job, {0: plan_of(SIZES, (4,))}) or "")
    assert plan_refusal(job, job.plans) is None


def test_knobs_that_are_refused_are_not_among_the_best() -> None:
    job = on_one_host(cuts=(4,), seconds_per_byte=1e-4)
    many = [4000, 26_000]
    assert best_knobs(job, unit_bytes=many, streams=(1,)) == job.buffers[0].knobs.but(
        unit_bytes=26_000, streams=1, cuts=None
    )
    assert best_knobs(job, unit_bytes=many[:1], streams=(1,)) is None


def test_scatter_of_the_recording_and_a_replay_that_is_off_widen_every_interval() -> None:
    job = over_a_link()
    exact = times(job)
    sure = Baseline.of(job, replace(exact, iterations=10)).answer("", job)
    noisy = Baseline.of(job, replace(exact, spread_s=0.3 * exact.iteration_s, iterations=10)).answer("", job)
    off = Baseline.of(job, exact.scaled(0.8)).answer("", job)
    assert sure.high_s < off.high_s
    assert sure.high_s < noisy.high_s
    more = Baseline.of(job, replace(exact, spread_s=0.3 * exact.iteration_s, iterations=1000)).answer("", job)
    assert more.high_s < noisy.high_s


def test_between_hosts_no_interval_is_below_the_jobs_computation() -> None:
    job = over_a_link()
    answer = Baseline.of(job, times(job).scaled(0.2)).answer("", job)
    assert answer.low_s == pytest.approx(computation_s(global_graph(job)) / 2)
    assert math.log(answer.high_s / answer.times.iteration_s) > 1.6


def test_on_one_host_an_interval_does_since_fewer_units_leave_more_of_the_processors() -> None:
    job = on_one_host()
    answer = Baseline.of(job, times(job).scaled(0.2)).answer("", job)
    assert answer.low_s < 0.5 * computation_s(global_graph(job)) / 2


def test_another_plan_is_compared_with_the_recorded_units_at_the_same_prices() -> None:
    job = over_a_link()
    dear = job.changed(operation=lambda one: replace(one, link_s=one.link_s * (1.0 if one.key[1] else 2.0)))
    base = Baseline.of(dear)
    assert base.priced_s is not None
    assert base.priced_s != pytest.approx(base.times.iteration_s, rel=0.01)
    same = base.answer("", with_plans(dear, {0: dear.buffers[0].plan}), replanned=True)
    assert same.gain == pytest.approx(0.0)
    assert same.high_s / same.times.iteration_s > math.exp(abs(math.log(base.times.iteration_s / base.priced_s)))
    assert Baseline.of(replace(job, buffers=())).priced_s is None


def test_answers_are_reported_with_interval_and_doubt() -> None:
    step = times(over_a_link()).scaled(0.32 / times(over_a_link()).iteration_s)
    sure = Answer(words="x", times=step, gain=0.22, low_s=0.298, high_s=0.344, is_sure=True)
    assert sure.describe() == "320 ms a step (298 to 344), 22 % less"
    unsure = replace(sure, gain=-0.02, high_s=0.39, is_sure=False)
    assert unsure.describe() == "320 ms a step (298 to 390), 2 % more, which is within the error"
    assert sure.overlaps(unsure)
    wide = replace(sure, low_s=0.2, high_s=0.5)
    assert wide.describe() == "200 to 500 ms a step: shorter than now, but only a trial can show by how much"
    wide_and_unsure = replace(wide, is_sure=False)
    assert wide_and_unsure.describe() == "200 to 500 ms a step: too uncertain to predict, only a trial can show it"
    found = [(one.is_worth_reporting, one.is_open) for one in (sure, wide, wide_and_unsure, unsure)]
    assert found == [(True, False), (True, False), (False, True), (False, False)]
    assert not sure.overlaps(replace(sure, low_s=0.4, high_s=0.5))


def test_a_job_without_gradients_has_no_plan_to_change() -> None:
    assert best_knobs(replace(over_a_link(), buffers=())) is None


# ── daydream ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tensors_follow_each_other_at_bytes_by_bandwidth() -> None:
    found = histories(record(over_a_link(cuts=(4,), streams=1)))
    job = job_model(found)
    assert bandwidth(job) == pytest.approx(2e5)
    times = daydream(found, job)
    # Ready 20, 30, 60 and 80 ms into the pass; 20, 60, 40 and 10 ms each: the last is through at 150 ms.
    assert times.forward_s == pytest.approx(0.02)
    assert times.backward_s == pytest.approx(0.15)
    assert times.iteration_s == pytest.approx(0.02 + 0.15 + 0.01)


def test_without_units_there_is_no_bandwidth() -> None:
    found = histories(record(over_a_link()))
    job = replace(job_model(found), link=None)
    bare = replace(job, iterations=tuple(replace(each, operations=()) for each in job.iterations))
    with pytest.raises(ReplayError, match="contains no all-reduce of gradients"):
        daydream(found, bare)
