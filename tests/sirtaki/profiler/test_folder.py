"""Folders of recordings: whole ones, and what is left of others."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import recordings

from sirtaki.analysis import recording_files as folder
from sirtaki.analysis.recording import FORMAT_VERSION, Recording
from sirtaki.errors import RecordingError


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write(tmp_path, recordings.recording(4, ranks_per_host=2))
    return tmp_path


def write(into: Path, recording: Recording) -> None:
    folder.write_job(into, recording.job)
    for rank in recording.ranks.values():
        folder.write_rank(into, rank)


def test_a_whole_folder_is_read_without_a_word(written: Path) -> None:
    recording = folder.read(written)
    assert recording.problems == ()
    assert sorted(recording.ranks) == [0, 1, 2, 3]
    assert recording.common_iterations == (102, 103, 104)
    assert recording.job == recordings.job(4)


def test_nothing_but_whole_files_is_left_in_it(written: Path) -> None:
    assert sorted(path.name for path in written.iterdir()) == [
        "job.json",
        *(f"rank-000{rank}.json.gz" for rank in range(4)),
    ]


def test_what_ranks_that_were_killed_leave_is_shown(written: Path) -> None:
    folder.rank_path(written, 2).unlink()
    folder.write_rank(written, replace(recordings.rank(3, n_iterations=1), complete=False))
    recording = folder.read(written)
    assert sorted(recording.ranks) == [0, 1, 3]
    assert recording.common_iterations == (102,)
    assert recording.problems == (
        "rank 2 of 4 is missing",
        "rank 3 recorded fewer iterations than the 3 wanted (1 at least)",
    )


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08nonsense", gzip.compress(b"{}")[:-9], gzip.compress(b"[1, 2")])
def test_a_damaged_file_is_named_and_left_out(written: Path, content: bytes) -> None:
    folder.rank_path(written, 1).write_bytes(content)
    recording = folder.read(written)
    assert sorted(recording.ranks) == [0, 2, 3]
    assert "rank-0001.json.gz" in recording.problems[0]


def test_fields_that_are_missing_are_a_damaged_file(written: Path) -> None:
    folder.rank_path(written, 1).write_bytes(gzip.compress(json.dumps({"format": FORMAT_VERSION, "rank": 1}).encode()))
    assert "rank-0001.json.gz is damaged" in folder.read(written).problems[0]


def test_a_folder_of_another_version_is_not_read(written: Path) -> None:
    data = json.loads((written / "job.json").read_text())
    (written / "job.json").write_text(json.dumps({**data, "format": 7}))
    with pytest.raises(RecordingError, match=r"has format 7; this version of Sirtaki reads formats 2 and 3"):
        folder.read(written)


def test_a_folder_of_the_version_before_is_read_without_modules_and_memory(written: Path) -> None:
    data = json.loads((written / "job.json").read_text())
    (written / "job.json").write_text(json.dumps({**data, "format": 2}))
    for number in range(4):
        path = folder.rank_path(written, number)
        rank = json.loads(gzip.decompress(path.read_bytes()))
        del rank["modules"], rank["memory"]
        for one in rank["iterations"]:
            one["operators"] = [row[:7] for row in one["operators"]]
        path.write_bytes(gzip.compress(json.dumps({**rank, "format": 2}).encode()))
    recording = folder.read(written)
    assert recording.problems == ()
    assert sorted(recording.ranks) == [0, 1, 2, 3]
    assert recording.ranks[0].memory is None
    assert recording.ranks[0].iterations[0].operators[0].module == -1


def test_ranks_of_another_model_or_job_are_left_out(written: Path) -> None:
    folder.write_rank(written, replace(recordings.rank(2), model="another"))
    folder.write_rank(written, replace(recordings.rank(3), job="9.9"))
    recording = folder.read(written)
    assert sorted(recording.ranks) == [0, 1]
    assert "rank-0003.json.gz is of another job, and is left out" in recording.problems
    assert "rank 2 trained another model, and what they recorded is left out" in recording.problems


def test_a_recording_without_units_is_shown_with_a_word_about_clocks(tmp_path: Path) -> None:
    whole = recordings.recording()
    bare = {
        number: replace(rank, iterations=tuple(replace(one, units=()) for one in rank.iterations))
        for number, rank in whole.ranks.items()
    }
    write(tmp_path, replace(whole, ranks=bare))
    (problem,) = folder.read(tmp_path).problems
    assert "no gradients were exchanged" in problem


def test_a_folder_with_nothing_to_show_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="is no folder"):
        folder.read(tmp_path / "nowhere")
    with pytest.raises(RecordingError, match="holds no recording"):
        folder.read(tmp_path)
    folder.write_rank(tmp_path, recordings.rank(0))
    with pytest.raises(RecordingError, match=r"recordings of 1 ranks, but no job.json"):
        folder.read(tmp_path)
    folder.rank_path(tmp_path, 0).unlink()
    folder.write_job(tmp_path, recordings.job())
    with pytest.raises(RecordingError, match="nothing of any rank"):
        folder.read(tmp_path)


def test_only_a_recording_is_cleared(written: Path) -> None:
    (written / "notes.txt").write_text("mine")
    (written / folder.REPORT_FILE).write_text("made of it")
    assert folder.holds_recording(written)
    folder.clear(written)
    assert [path.name for path in written.iterdir()] == ["notes.txt"]
    assert not folder.holds_recording(written)


def test_many_ranks_are_counted() -> None:
    assert folder.of_ranks([3]) == "rank 3"
    assert folder.of_ranks([0, 2, 5]) == "ranks 0, 2 and 5"
    assert folder.of_ranks(range(64)) == "ranks 0, 1, 2, … (64)"
