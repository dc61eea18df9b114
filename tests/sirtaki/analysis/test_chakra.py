"""Recordings as Chakra traces, read back by the bytes and walked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import chakra_files, recordings
from fakes.played_jobs import record
from fakes.replays import on_one_host, over_a_link

from sirtaki.analysis.chakra import ALL_RANKS, COMM_COLL_NODE, VERSION, Written, messages, write_traces
from sirtaki.analysis.job_model import histories
from sirtaki.analysis.recording import RecordedIteration, Recording
from sirtaki.errors import RecordingError

# ── schema ────────────────────────────────────────────────────────────────────────────────────────────────────────

pytest.importorskip("google.protobuf", minversion="5.28")


def test_bytes_are_those_of_the_schema() -> None:
    kinds = messages()
    node = kinds["Node"](
        id=1, name="n", type=COMM_COLL_NODE, data_deps=[0, 300], start_time_micros=5, duration_micros=6
    )
    node.attr.add(name="a", bool_val=True)
    assert node.SerializeToString(deterministic=True) == bytes(
        [8, 1, 18, 1, *b"n", 24, 7, 42, 3, 0, 172, 2, 48, 5, 56, 6, 82, 6, 10, 1, *b"a", 216, 1, 1]
    )
    assert kinds["GlobalMetadata"](version="v").SerializeToString() == bytes([10, 1, *b"v"])


# ── nodes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def written(folder: Path, recording: Recording) -> Written:
    return write_traces(folder / "job", histories(recording))


def nodes_of(folder: Path, recording: Recording) -> list[list[chakra_files.ReadNode]]:
    return [chakra_files.read(path)[1] for path in written(folder, recording).files]


def own(nodes: list[chakra_files.ReadNode]) -> list[chakra_files.ReadNode]:
    return [node for node in nodes if node.kind == chakra_files.COMP_NODE]


def test_a_unit_has_one_number_on_all_ranks_and_waits_for_its_launch_and_its_stream(tmp_path: Path) -> None:
    ranks = nodes_of(tmp_path, record(over_a_link(streams=2)))
    units = [[node for node in nodes if node.kind == COMM_COLL_NODE] for nodes in ranks]
    assert [node.number for node in units[0]] == [node.number for node in units[1]]
    assert len(units[0]) == 6
    known = {node.number: node for node in ranks[0]}
    for unit in units[0]:
        (issued,) = own([known[other] for other in unit.data])
        assert issued.attributes["activity"] == "copy"
        assert issued.end_us <= unit.begin_us
    first, second, third = units[0][:3]
    assert (first.control, second.control, third.control) == ([], [], [first.number])
    told = [first.attributes[name] for name in ("comm_type", "comm_size", "pg_name", "is_cpu_op")]
    assert told == [0, 4000, str(ALL_RANKS), False]


def test_inputs_of_an_operator_are_dependencies_and_a_divided_operator_counts_once(tmp_path: Path) -> None:
    nodes = [node for node in nodes_of(tmp_path, recordings.recording())[0] if node.attributes["iteration"] == 102]
    named = {node.name: node for node in nodes}
    backward = [node for node in nodes if node.name == "AddmmBackward0"]
    assert len(backward) > 1
    assert [named["aten::linear"].number in node.data for node in backward] == [True] + [False] * (len(backward) - 1)


def test_a_rank_that_begins_later_has_a_node_for_it(tmp_path: Path) -> None:
    recording = record(over_a_link())
    assert chakra_files.read(written(tmp_path, recording).files[1])[0] == VERSION
    first, *others = recording.ranks[1].iterations
    late = replace(recording.ranks[1], iterations=(replace(first, begin_s=first.begin_s + 0.001), *others))
    node = nodes_of(tmp_path, replace(recording, ranks={0: recording.ranks[0], 1: late}))[1][0]
    assert (node.name, node.begin_us, node.end_us) == ("between steps", 0, 1000)


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "recording", [record(on_one_host(ranks=3)), record(over_a_link(streams=2)), recordings.recording(3)]
)
def test_walking_the_files_gives_the_recorded_steps(tmp_path: Path, recording: Recording) -> None:
    ranks = nodes_of(tmp_path, recording)
    found = chakra_files.walk(ranks)
    clocks = histories(recording).clocks
    for rank, nodes in enumerate(ranks):
        assert all(abs(found[rank, node.number] - node.end_us) <= 1 for node in nodes)
        assert all(set(node.control) <= set(node.data) for node in nodes)
        assert all(node.attributes["is_cpu_op"] is (node.kind == chakra_files.COMP_NODE) for node in nodes)
        end_s = recording.ranks[rank].iterations[-1].end_s
        assert max(node.end_us for node in own(nodes)) == pytest.approx(1e6 * clocks[rank](end_s), abs=1)


def test_groups_are_written_where_not_all_ranks_act_together(tmp_path: Path) -> None:
    alone = recordings.with_iterations(recordings.recording(3), lambda one: replace(one, units=()), 2)
    groups = written(tmp_path, alone).groups
    assert groups is not None
    assert groups.name == "job.groups.json"
    assert json.loads(groups.read_text()) == {"1": [0, 1]}


def test_a_collective_without_a_name_is_an_error(tmp_path: Path) -> None:
    def strange(one: RecordedIteration) -> RecordedIteration:
        return replace(one, collectives=tuple(call._replace(kind="gossip") for call in one.collectives))

    with pytest.raises(
        RecordingError, match="collective operation loss, because Chakra has no node type for the kind gossip"
    ):
        written(tmp_path, recordings.with_iterations(recordings.recording(), strange))
