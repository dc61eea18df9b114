"""Nodes, lanes and servers of a job model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.replays import on_one_host, over_a_link, played

from sirtaki.analysis.global_graph import BEFORE, global_graph
from sirtaki.autotune.model.replayer import ALL_RANKS, Activity


def test_there_is_a_lane_for_each_rank_and_one_for_each_stream_of_all() -> None:
    graph = global_graph(over_a_link(streams=2, ranks=3))
    assert list(graph.lanes) == ["rank 0", "rank 1", "rank 2", "gloo stream 0", "gloo stream 1"]
    assert [server.name for server in graph.servers if server.is_link] == [
        "the link between hosts",
        "handing messages to the link",
    ]


def test_a_unit_is_one_node_of_all_ranks_that_all_of_them_hold_up() -> None:
    graph = global_graph(over_a_link(cuts=(4,), ranks=3, iterations=1))
    (unit,) = (place for place, node in enumerate(graph.nodes) if node.activity is Activity.UNIT)
    assert graph.nodes[unit].rank == ALL_RANKS
    assert sorted(graph.nodes[before].rank for before, after, _ in graph.edges if after == unit) == [0, 1, 2]
    assert sorted(graph.nodes[after].rank for before, after, _ in graph.edges if before == unit) == [0, 1, 2]


def test_processors_that_suffice_are_nobodys_bottleneck() -> None:
    assert not any(node.works for node in global_graph(on_one_host(ranks=2, capacity=4.0)).nodes)
    shared = [node for node in global_graph(on_one_host(ranks=2, capacity=2.0)).nodes if node.works]
    assert {work.jobs for node in shared if node.activity is Activity.UNIT for work in node.works} == {2}


def test_loading_data_needs_no_processor() -> None:
    nodes = global_graph(on_one_host(ranks=4, capacity=1.0)).nodes
    assert all(not node.works for node in nodes if node.activity is Activity.DATA)


def test_ranks_begin_as_far_apart_as_they_did() -> None:
    job = replace(over_a_link(), begin_s={0: 0.0, 1: 0.25})
    found = played(job)
    begins = {node.rank: found.end_s[place] for place, node in enumerate(found.graph.nodes) if node.iteration == BEFORE}
    assert begins == {0: 0.0, 1: 0.25}


def test_the_next_unit_of_a_stream_waits_for_the_last_rank() -> None:
    job = on_one_host(cuts=(1, 4), streams=1)
    late = replace(
        job,
        iterations=tuple(
            replace(each, operations=tuple(replace(one, lag_s=0.5) for one in each.operations))
            for each in job.iterations
        ),
    )
    found = played(late)
    units = [place for place, node in enumerate(found.graph.nodes) if node.activity is Activity.UNIT]
    assert found.start_s[units[1]] - found.end_s[units[0]] == pytest.approx(0.5)
