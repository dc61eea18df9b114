"""Files, read back by the bytes and walked: the recorded steps come out again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import chakra_files, recordings
from fakes.played_jobs import record
from fakes.replays import on_one_host, over_a_link

from sirtaki.analysis.chakra import traces
from sirtaki.analysis.job_model import histories
from sirtaki.analysis.recording import Recording
from sirtaki.errors import RecordingError

pytest.importorskip("google.protobuf", minversion="5.28")

from sirtaki.analysis.chakra import write_traces


def written(folder: Path, recording: Recording) -> list[Path]:
    return write_traces(folder / "job", traces(histories(recording)))


@pytest.mark.parametrize(
    "recording", [record(on_one_host(ranks=3)), record(over_a_link(streams=2)), recordings.recording(3)]
)
def test_walking_the_files_gives_the_recorded_steps(tmp_path: Path, recording: Recording) -> None:
    ranks = [chakra_files.read(path)[1] for path in written(tmp_path, recording)]
    found = chakra_files.walk(ranks)
    clocks = histories(recording).clocks
    for rank, nodes in enumerate(ranks):
        assert all(abs(found[rank, node.number] - node.end_us) <= 1 for node in nodes)
        own = [node for node in nodes if node.kind == chakra_files.COMP_NODE]
        end_s = recording.ranks[rank].iterations[-1].end_s
        assert max(node.end_us for node in own) == pytest.approx(1e6 * clocks[rank](end_s), abs=1)


def test_a_file_has_a_version_nodes_and_what_simulators_ask_for(tmp_path: Path) -> None:
    paths = written(tmp_path, record(over_a_link()))
    assert [path.name for path in paths] == ["job.0.et", "job.1.et"]
    version, nodes = chakra_files.read(paths[0])
    assert version == "0.0.4"
    assert {node.kind for node in nodes} == {chakra_files.COMP_NODE, chakra_files.COMM_COLL_NODE}
    for node in nodes:
        assert set(node.control) <= set(node.data)
        assert node.attributes["is_cpu_op"] is (node.kind == chakra_files.COMP_NODE)
    unit = next(node for node in nodes if node.kind == chakra_files.COMM_COLL_NODE)
    assert (unit.attributes["comm_type"], unit.attributes["comm_size"], unit.attributes["pg_name"]) == (0, 4000, "0")


def test_groups_are_written_where_not_all_ranks_act_together(tmp_path: Path) -> None:
    whole = recordings.recording(3)
    alone = replace(whole.ranks[2], iterations=tuple(replace(one, units=()) for one in whole.ranks[2].iterations))
    paths = written(tmp_path, replace(whole, ranks={0: whole.ranks[0], 1: whole.ranks[1], 2: alone}))
    assert paths[-1].name == "job.groups.json"
    assert json.loads(paths[-1].read_text()) == {"1": [0, 1]}


def test_a_collective_without_a_name_is_an_error(tmp_path: Path) -> None:
    whole = recordings.recording()
    strange = {
        rank: replace(
            own,
            iterations=tuple(
                replace(one, collectives=tuple(replace(call, kind="gossip") for call in one.collectives))
                for one in own.iterations
            ),
        )
        for rank, own in whole.ranks.items()
    }
    with pytest.raises(RecordingError, match="loss is gossip"):
        written(tmp_path, replace(whole, ranks=strange))
