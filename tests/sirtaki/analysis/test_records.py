"""`sirtaki.analysis.read` gives flat records of recordings, trial logs and timelines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import memories, recordings
from fakes.played_jobs import written
from fakes.trial_logs import JOB

from sirtaki.analysis import read
from sirtaki.errors import ConfigError, RecordingError


def test_a_recording_is_a_table_of_each_kind_on_one_clock(tmp_path: Path) -> None:
    recording = recordings.recording()
    late = recordings.shifted(recording.ranks[1], by_s=7.0)
    place = replace(recording.job.placement[1], host=1, clock="other")
    job = replace(recording.job, placement=(recording.job.placement[0], place))
    tables = read(written(tmp_path, replace(recording, job=job, ranks={**recording.ranks, 1: late})))
    counts = {
        "iterations": 6,
        "phases": 18,
        "operators": 12,
        "gradients": 12,
        "units": 12,
        "collectives": 6,
        "memory": 0,
    }
    assert {name: len(rows) for name, rows in tables.items()} == counts
    for rows in tables.values():
        assert all(isinstance(value, (int, float, str, type(None))) for row in rows for value in row.values())
        assert len({tuple(row) for row in rows}) <= 1  # each row has the same columns
    first = tables["iterations"][0]
    assert (first["rank"], first["iteration"], first["slowed"], first["usual"]) == (0, 102, False, True)
    assert (first["begin_s"], first["step_s"], first["exposed_s"]) == (0.0, pytest.approx(0.1), 0.01)
    begins = {row["rank"]: row["begin_s"] for row in tables["iterations"] if row["iteration"] == 103}
    assert begins == {0: pytest.approx(0.1), 1: pytest.approx(0.1, abs=0.03)}  # 7 s apart by their own clocks
    unit = tables["units"][1]
    assert (unit["name"], unit["bytes"], unit["transport"], unit["stream"]) == (
        "body.weight", 832, "gloo", 1,
    )  # fmt: skip
    assert (unit["issue_s"], unit["begin_s"], unit["done_s"]) == (pytest.approx(0.052), None, pytest.approx(0.09))
    assert {row["name"] for row in tables["gradients"]} == {"head.weight", "body.weight"}


def test_memory_is_recorded_with_the_module_that_allocated_it(tmp_path: Path) -> None:
    tables = read(written(tmp_path, memories.recorded_job()))
    made = [row for row in tables["memory"] if row["holds"] == "activations"]
    assert {row["module"] for row in made} == {f"blocks.{number}" for number in range(4)}
    assert {row["device"] for row in made} == {"cpu"}
    assert tables["operators"][1]["module"] == "blocks.0.linear"


def test_a_trial_log_is_a_table_of_trials(log_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    retune = {"event": "retune", "iteration": 112, "ratio": 4.0, "running": JOB[0]["knobs"]}
    again = {**JOB[0], "iteration": 115}
    (trials,) = read(log_of(*({**record, "version": 2, "tuner": "a"} for record in (*JOB, retune, again)))).values()
    assert [row["search"] for row in trials] == ["warm-up"] * 4 + ["re-tune"]
    assert (trials[1]["setting"], trials[1]["span_s"], trials[1]["arm"]) == (
        "gloo flat, 512 KiB units, 4 streams", pytest.approx(0.1), "grid",
    )  # fmt: skip
    assert trials[3]["span_s"] is None  # it has failed
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "nowhere")


def test_a_timeline_is_a_table_of_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "gloo stream 0"}},
        {"name": "w1", "ph": "X", "pid": 1, "tid": 2, "ts": 1500.0, "dur": 500.0, "args": {"bytes": 8}},
        {"name": "CYCLE", "ph": "i", "pid": 1, "tid": 9, "ts": 2000.0},
    ]
    path.write_text(json.dumps(events))
    assert read(path) == {
        "events": [
            {"bytes": 8, "rank": 1, "track": "gloo stream 0", "name": "w1", "begin_s": 0.0015, "end_s": 0.002},
            {"rank": 1, "track": None, "name": "CYCLE", "begin_s": 0.002, "end_s": 0.002},
        ]
    }
    path.write_text("[1")
    with pytest.raises(ConfigError, match="is not a timeline"):
        read(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordingError, match="it is not a recording"):
        read(tmp_path / "empty")
