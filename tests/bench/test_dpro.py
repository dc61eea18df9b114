"""What the table says of jobs that are known exactly; nothing is measured here."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.played_jobs import record, written
from fakes.replays import on_one_host

from bench.dpro import MAIN, accuracy, alignment, speed, times
from bench.lib.harness import Report
from bench.replay import Job
from sirtaki.analysis.global_graph import recorded


@pytest.fixture
def job(tmp_path: Path) -> Job:
    written(tmp_path / "0", record(on_one_host()))
    found = Job({"truth": {"base": [1.0, 0.5, 0.5]}}, tmp_path)
    step = recorded(found.histories[0])
    found.truth["base"] = [step.iteration_s, step.forward_s, 2 * step.backward_s]
    return found


def test_errors_are_those_of_the_replay_against_what_was_measured(job: Job) -> None:
    report = Report(name="dpro")
    rows = {row["what"]: row for row in accuracy(report, {MAIN: job})}
    assert rows["iteration: error"]["here"] == "mean 0.0 %, worst 0.0 %"
    assert rows["backward pass: error"]["here"] == "mean 50.0 %, worst 50.0 %"
    assert all(bar.met for bar in report.bars)
    assert [row["who"] for row in times(MAIN, job)] == ["measured", "replayed", "bytes ÷ bandwidth"]


def test_a_wrong_clock_is_felt_and_put_right(job: Job) -> None:
    report = Report(name="dpro")
    rows = {row["what"]: row["here"] for row in alignment(report, job)}
    assert float(rows["iteration, clocks not aligned: error"].split()[2]) > 2
    assert float(rows["iteration, clocks aligned: error"].split()[2]) < 1
    left = next(row["figure"] for row in report.rows if "HolisticTraceAnalysis" in row["what"])
    assert left == pytest.approx(50_000, rel=0.01)


def test_a_question_to_many_ranks_has_one_answer_however_it_is_made_smaller(job: Job) -> None:
    report = Report(name="dpro")
    list(speed(report, job))
    answers = [row["answer_s"] for row in report.rows if "units alone" not in row["question"]]
    assert answers == pytest.approx([answers[0]] * 3, rel=0.02)
