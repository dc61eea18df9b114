"""Graphs of operations played on shared processors and links, by hand-made cases and against brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.graphs import brute_force, drawn_graphs, graph, longest_path_s, node
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sirtaki.autotune.model.replayer import (
    START,
    FairShare,
    Load,
    ReplayGraph,
    ResourceDemand,
    SharedHost,
    SharedResource,
    replay,
)
from sirtaki.errors import ReplayError, TuningError

LINK = SharedResource(name="link", totals=(1.0, 1.5), is_link=True)


def test_two_ranks_meet_at_a_barrier_and_continue_after_gaps() -> None:
    nodes = [node(0, 3.0), node(1, 5.0), node(2, 2.0), node(0, 1.0), node(1, 1.0)]
    found = replay(graph(nodes, [(0, 2, 0.0), (1, 2, 0.5), (2, 3, 0.0), (2, 4, 0.25)]))
    assert found.end_s == (3.0, 5.0, 7.5, 8.5, 8.75)
    assert found.causes == (START, START, 1, 2, 2)
    assert found.total_s == 8.75


def test_a_lane_runs_ready_nodes_one_at_a_time_in_the_order_of_readiness() -> None:
    nodes = [node(0, 2.0), node(1, 1.0), node(2, 4.0), node(2, 1.0)]
    found = replay(graph(nodes, [(0, 2, 0.0), (1, 3, 0.5)]))
    assert found.start_s == (0.0, 0.0, 2.5, 1.5)
    assert found.ready_s[2] == 2.0
    assert found.causes[2] == 3  # the lane was busy with it


def test_units_share_a_link_after_their_start_up() -> None:
    # Both move from 1 to 3 at 0.75; then the first, which needs 1.5, is done, and the other has 1.5 of 3 to go.
    nodes = [node(0, 1.0, ResourceDemand(server=0, seconds=1.5)), node(1, 1.0, ResourceDemand(server=0, seconds=3.0))]
    assert replay(graph(nodes, servers=[LINK])).end_s == pytest.approx((3.0, 4.5))


def test_load_on_a_server_slows_down_its_nodes() -> None:
    slow = SharedResource(name="processors", totals=(1.0,), speed=lambda load: 1 / (1 + load))
    loading = replace(node(1, 2.0), loads=(Load(server=0, amount=1.0),))
    # Half the speed for 2, in which half of 2 is done; two of 3 come later.
    found = replay(graph([node(0, 0.0, ResourceDemand(server=0, seconds=3.0)), loading], servers=[slow]))
    assert found.end_s == pytest.approx((4.0, 2.0))


def test_an_end_relieves_running_and_later_nodes() -> None:
    relieved = ResourceDemand(server=0, seconds=3.0, relieved_by=0, relief=0.5)
    nodes = [node(0, 1.0), node(1, 0.0, relieved), node(2, 2.0, relieved)]
    alone = SharedResource(name="link", totals=(1.0, 2.0))
    assert replay(graph(nodes, servers=[alone])).end_s == pytest.approx((1.0, 2.0, 3.5))


def test_nodes_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ReplayError, match="2 of 3 simulated operations cannot start"):
        replay(graph([node(0, 1.0), node(1, 1.0), node(2, 1.0)], [(1, 2, 0.0), (2, 1, 0.0)]))


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ([node(0, -1.0)], [], "simulated operation .* is invalid"),
        ([node(0, 1.0)], [(0, 0, 0.0)], "operation 0 has an invalid dependency on operation 0"),
        ([node(0, 1.0), node(0, 1.0)], [(0, 1, float("nan"))], "delay nan s"),
        ([node(0, 1.0, ResourceDemand(server=1, seconds=1.0))], [], "server=1.* is invalid"),
    ],
)
def test_graphs_that_make_no_sense_are_refused(nodes: list[object], edges: list[object], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        graph(nodes, edges, [LINK])  # type: ignore[arg-type]


def test_a_server_needs_a_throughput() -> None:
    with pytest.raises(ReplayError, match="positive, finite throughputs"):
        SharedResource(name="none", totals=(1.0, 0.0))


@pytest.mark.lengthy
@settings(max_examples=30, deadline=None)
@given(drawn_graphs(chained=True, slowed=True))
def test_brute_force_in_small_steps_has_the_same_result(one: ReplayGraph) -> None:
    dt_s = 1 / 64
    expected = brute_force(one, dt_s)
    assert replay(one).end_s == pytest.approx(expected, abs=dt_s * 4 * (len(one.nodes) + 1))


@settings(max_examples=60, deadline=None)
@given(drawn_graphs())
def test_nothing_is_faster_than_the_longest_path_nor_slower_than_all_in_turn(one: ReplayGraph) -> None:
    found = replay(one)
    assert found.total_s >= longest_path_s(one) - 1e-9
    in_turn_s = sum(each.fixed_s + sum(work.seconds * max(1, work.jobs) for work in each.works) for each in one.nodes)
    assert found.total_s <= in_turn_s + sum(gap_s for _, _, gap_s in one.edges) + 1e-9
    for before, after, gap_s in one.edges:
        assert found.start_s[after] >= found.end_s[before] + gap_s - 1e-9
    for place, each in enumerate(one.nodes):
        assert found.end_s[place] - found.start_s[place] >= each.alone_s - 1e-9
        cause = found.causes[place]
        if cause == START:
            assert found.start_s[place] == 0.0
        else:
            gaps = [gap_s for before, after, gap_s in one.edges if (before, after) == (cause, place)]
            on_lane = one.nodes[cause].lane == each.lane
            assert any(found.start_s[place] == pytest.approx(found.end_s[cause] + gap_s) for gap_s in gaps) or (
                on_lane and found.start_s[place] == found.end_s[cause]
            )


@settings(max_examples=40, deadline=None)
@given(drawn_graphs(), st.integers(1, 50))
def test_time_has_no_unit(one: ReplayGraph, factor: int) -> None:
    nodes = [
        replace(
            each,
            fixed_s=each.fixed_s * factor,
            works=tuple(replace(work, seconds=work.seconds * factor) for work in each.works),
        )
        for each in one.nodes
    ]
    slower = replace(one, nodes=nodes, edges=[(before, after, gap_s * factor) for before, after, gap_s in one.edges])
    assume(replay(one).total_s > 0)
    assert replay(slower).total_s == pytest.approx(factor * replay(one).total_s)


def test_parts_of_jobs_leave_nothing_behind() -> None:
    share = FairShare(SharedResource(name="processors", totals=(1.0, 2.0)))
    for turn in range(100):
        for job in range(7):
            share.add(float(turn), job, 0.1, 0.1 * (job + 1))
        share.pop_ended(share.next_s)
    share.add(200.0, 1, 1.0, 0.3)
    assert share.next_s == 201.0


def test_rounding_late_in_a_job_holds_nothing_up() -> None:
    share = FairShare(SharedResource(name="processors", totals=(1.0,)))
    now_s = 1e6 + 1 / 3
    share.add(now_s, 1, 0.1, 3)
    assert share.pop_ended(share.next_s) == [1]


def test_shares_of_a_server_beyond_the_known_range() -> None:
    link = SharedResource(name="link", totals=(1.0, 1.5))
    assert [link.share(jobs) for jobs in (1, 2, 3)] == [1.0, 0.75, 0.5]


def test_a_part_of_a_job_is_on_the_line_between() -> None:
    processors = SharedResource(name="processors", totals=(1.0, 2.0))
    assert [processors.share(jobs) for jobs in (0.5, 1.5, 2.5)] == [1.0, 1.0, 0.8]
    assert SharedResource(name="link", totals=(1.0, 1.5)).share(1.5) == pytest.approx(1.25 / 1.5)


def test_computation_was_measured_while_all_ranks_computed() -> None:
    host = SharedHost(ranks=4, processors=2.0)
    work = host.computation(2, 1.0)
    assert (work.seconds, work.jobs) == (0.5, 4)
    assert host.server.share(4) == 0.5  # so it takes 1 s again


def test_probes_of_units_have_shared_processors_already() -> None:
    assert SharedHost(ranks=4, processors=2.0).unit(2, 1.0, 1.0).seconds == 0.5
    work = SharedHost(ranks=2, processors=2.0).unit(2, 1.0, 0.3)
    assert (work.seconds, work.jobs) == (1.0, 0.6)


@pytest.mark.parametrize("fields", [{"ranks": 0}, {"processors": 0.0}, {"threads": 0}])
def test_a_host_of_nothing_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(TuningError, match="SharedHost: expected positive numbers"):
        SharedHost(**{"ranks": 2, "processors": 2.0, **fields})  # type: ignore[arg-type]
