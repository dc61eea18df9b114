"""What a recording's nodes are, and what they wait for."""

from __future__ import annotations

from dataclasses import replace

from fakes import recordings
from fakes.played_jobs import record
from fakes.replays import on_one_host, over_a_link

from sirtaki.analysis.chakra import ALL_RANKS, TraceNode, Traces, traces
from sirtaki.analysis.job_model import histories
from sirtaki.analysis.recording import Recording
from sirtaki.autotune.model.replayer import Activity


def traced(recording: Recording) -> Traces:
    return traces(histories(recording))


def by_number(nodes: list[TraceNode]) -> dict[int, TraceNode]:
    return {node.number: node for node in nodes}


def test_a_ranks_own_nodes_follow_each_other_without_a_gap_but_for_waiting() -> None:
    for job in (on_one_host(), over_a_link()):
        recording = record(job)
        found = traced(recording)
        for rank, nodes in found.nodes.items():
            own = [node for node in nodes if node.collective is None]
            known = by_number(list(nodes))
            assert [node.before for node in own] == [None, *(node.number for node in own[:-1])]
            assert all(node.begin_us == max([known[other].end_us for other in node.after], default=0) for node in own)
            clock = histories(recording).clocks[rank]
            assert own[-1].end_us == round(1e6 * clock(recording.ranks[rank].iterations[-1].end_s))


def test_a_unit_is_one_number_on_all_ranks_and_waits_for_what_issued_it_and_its_stream() -> None:
    found = traced(record(over_a_link(streams=2)))
    units = [[node for node in nodes if node.collective is not None] for nodes in found.nodes.values()]
    assert [node.number for node in units[0]] == [node.number for node in units[1]]
    assert len(units[0]) == 6
    known = by_number(list(found.nodes[0]))
    for unit in units[0]:
        (issued,) = [known[other] for other in unit.after if known[other].collective is None]
        assert issued.activity is Activity.COPY
        assert issued.end_us <= unit.begin_us
    first, second, third = units[0][:3]
    assert (first.before, second.before, third.before) == (None, None, first.number)
    assert first.collective is not None
    assert (first.collective.kind, first.collective.n_bytes, first.collective.group) == ("allreduce", 4000, ALL_RANKS)


def test_what_an_operator_reads_is_waited_for_and_a_cut_operator_counts_once() -> None:
    found = traced(recordings.recording())
    named = {node.name: node for node in found.nodes[0] if node.iteration == 102}
    backward = [node for node in found.nodes[0] if node.iteration == 102 and node.name == "AddmmBackward0"]
    assert len(backward) > 1
    assert [named["aten::linear"].number in node.after for node in backward] == [True] + [False] * (len(backward) - 1)


def test_ranks_that_reduce_alone_have_a_group_and_other_collectives_their_kind() -> None:
    whole = recordings.recording(3)
    ranks = dict(whole.ranks)
    ranks[2] = replace(
        ranks[2],
        iterations=tuple(replace(one, units=(), collectives=one.collectives) for one in ranks[2].iterations),
    )
    found = traced(replace(whole, ranks=ranks))
    assert found.groups == {ALL_RANKS: (0, 1, 2), 1: (0, 1)}
    collectives = [node.collective for node in found.nodes[0] if node.collective is not None]
    assert {(one.group, one.kind) for one in collectives} == {(1, "allreduce"), (0, "allreduce")}
    assert [node.name for node in found.nodes[2] if node.collective is not None] == ["loss"] * 3


def test_a_rank_that_begins_later_has_a_node_for_it() -> None:
    recording = record(over_a_link())
    late = replace(
        recording.ranks[1],
        iterations=(
            replace(recording.ranks[1].iterations[0], begin_s=recording.ranks[1].iterations[0].begin_s + 0.001),
            *recording.ranks[1].iterations[1:],
        ),
    )
    first = traced(replace(recording, ranks={0: recording.ranks[0], 1: late})).nodes[1][0]
    assert (first.name, first.begin_us, first.end_us) == ("between steps", 0, 1000)
