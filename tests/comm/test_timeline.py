"""Recorders of communication: a timeline that is complete after every write, and custom recorders."""

import errno
import json
import os
import time
from pathlib import Path

import pytest

from sirtaki.comm import recorder, timeline
from sirtaki.comm.timeline import Timeline, Writer, path_on_host


def test_the_file_is_complete_json_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Timeline(path, Writer(job="1", rank=3, host="node", clock_offset_s=-10.0))
    assert [event["name"] for event in json.loads(path.read_text())] == ["process_labels", "process_name"]
    trace.span("units", "first", 10.5, 10.75, bytes=7)
    trace.instant("units", "mark", 10.6)
    trace.flush()
    *_, track, span, mark = json.loads(path.read_text())
    assert track == {"name": "thread_name", "ph": "M", "pid": 3, "tid": 0, "args": {"name": "units"}}
    assert (span["ph"], span["ts"], span["dur"], span["args"]) == ("X", 500_000.0, 250_000.0, {"bytes": 7})
    assert (mark["ph"], mark["ts"]) == ("i", 600_000.0)
    trace.overlapping("queue", 11.0, 11.5, unit="a")
    trace.close()
    trace.close()
    begin, end = json.loads(path.read_text())[-2:]
    assert (begin["ph"], end["ph"]) == ("b", "e")
    assert begin["id"] == end["id"]
    assert (begin["ts"], end["ts"]) == (1_000_000.0, 1_500_000.0)


def test_an_event_is_in_the_file_within_a_tenth_of_a_second(tmp_path: Path) -> None:
    assert timeline.FLUSH_S <= 0.05  # the rest is for a busy machine
    path = tmp_path / "trace.json"
    trace = Timeline(path, Writer(job="1", rank=0))
    trace.span("eager", "allreduce.loss", 1.0, 2.0)
    deadline = time.monotonic() + 5.0
    while "allreduce.loss" not in path.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "allreduce.loss" in path.read_text()
    trace.close()


def test_ranks_share_a_file_and_a_new_job_overwrites_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    first = [Timeline(path, Writer(job="1", rank=rank)) for rank in range(3)]
    for rank, trace in enumerate(first):
        trace.span("units", f"of {rank}", 1.0, 2.0)
    for trace in first:
        trace.close()
    assert {event["pid"] for event in json.loads(path.read_text()) if event["ph"] == "X"} == {0, 1, 2}
    Timeline(path, Writer(job="2", rank=0)).close()
    assert not any(event["ph"] == "X" for event in json.loads(path.read_text()))


def test_one_timeline_is_active_at_a_time(tmp_path: Path) -> None:
    assert timeline.current is None
    first, second = (Timeline(tmp_path / name, Writer(job="1", rank=0)) for name in ("a.json", "b.json"))
    timeline.start(first)
    first.instant("track", "only here", 1.0)
    timeline.start(second)
    assert timeline.current is second
    timeline.stop()
    timeline.stop()
    assert timeline.current is None
    assert "only here" in (tmp_path / "a.json").read_text()


def test_hosts_have_files_of_their_own() -> None:
    assert path_on_host(Path("/x/trace.json"), 0) == Path("/x/trace.json")
    assert path_on_host(Path("/x/trace.json"), 2) == Path("/x/trace.host2.json")


def test_a_file_that_can_be_written_no_longer_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.json"
    trace = Timeline(path, Writer(job="1", rank=0))
    trace.instant("units", "before", 1.0)
    trace.flush()
    written = json.loads(path.read_text())
    whole_write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, text, at: whole_write(file, text[:20], at))  # the disk is full
    for _ in range(2):
        trace.instant("units", "after", 2.0)
        trace.flush()
    assert json.loads(path.read_text()) == written
    assert caplog.text.count("Sirtaki stops recording the timeline") == 1
    trace.close()


def test_a_full_disk_is_an_error_at_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, text: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        Timeline(tmp_path / "trace.json", Writer(job="1", rank=0))


class Ends:
    """A recorder that counts how often it is ended."""

    def __init__(self) -> None:
        self.ended = 0

    def iteration(self, traced: recorder.TracedIteration) -> None: ...

    def operation(self, traced: recorder.TracedOperation) -> None: ...

    def end(self) -> None:
        self.ended += 1


@pytest.fixture(autouse=True)
def _nobody() -> None:
    recorder.stop()


def test_nothing_is_recorded_without_a_recorder() -> None:
    mine = Ends()
    assert recorder.current is None
    assert not recorder.times_wanted()
    recorder.start(mine)
    assert recorder.current is mine
    assert recorder.times_wanted()
    recorder.stop()
    assert recorder.current is None
    assert mine.ended == 0


def test_the_end_of_the_job_ends_a_recording_once() -> None:
    mine = Ends()
    recorder.start(mine)
    recorder.end()
    recorder.end()
    assert mine.ended == 1
    assert recorder.current is None


def test_a_timeline_wants_times_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "current", object())
    assert recorder.times_wanted()
