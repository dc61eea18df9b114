"""`sirtaki optimize` on recordings made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.drawn_jobs import drawn_job
from fakes.played_jobs import record
from fakes.replays import on_one_host

from sirtaki.cli.__main__ import main
from sirtaki.cli.optimize import worth
from sirtaki.engine.given_plan import GivenPlan
from sirtaki.optimizer.outcome import optimize
from sirtaki.profiler.folder import rank_path, write_job, write_rank
from sirtaki.profiler.recording import Recording


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "recording", record(drawn_job(0)))


def written(folder: Path, recording: Recording) -> Path:
    write_job(folder, recording.job)
    for rank in recording.ranks.values():
        write_rank(folder, rank)
    return folder


def asked(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    status = main(["optimize", str(folder), *options])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_what_is_found_is_said_and_written_for_job_and_replay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = asked(folder, capsys)
    assert (status, err) == (0, "")
    assert "A step would take" in out
    assert "Before, the step is made of:\n" in out
    assert "of the step is" in out
    assert f"SIRTAKI_PLAN={folder}/plan.json" in out
    assert "A replay is a prediction" in out
    plan = GivenPlan.read(folder)
    assert plan.ranks == len(record(drawn_job(0)).ranks)
    assert main(["replay", str(folder), "--plan", str(folder / "plan.json"), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["what_if"]
    _, told, _ = asked(folder, capsys, "--json")
    found = json.loads(told)
    assert answer["times"]["iteration_s"] == pytest.approx(found["after_s"], rel=0.01)
    assert found["gain"] == pytest.approx(1 - found["after_s"] / found["before_s"])
    assert plan.knobs.to_json() == found["knobs"]


def test_a_search_may_do_without_accelerations_take_longer_be_cut_off_and_be_written_elsewhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "other.json"
    without = [word for name in ("coarsening", "partial-replay", "symmetry") for word in ("--without", name)]
    _, out, _ = asked(folder, capsys, "--json", "-o", str(elsewhere), *without)
    slow = json.loads(out)
    quick = json.loads(asked(folder, capsys, "--json")[1])
    assert elsewhere.exists()
    assert slow["search"]["replays"] > quick["search"]["replays"]
    assert slow["search"]["ranks"] > 0
    _, out, _ = asked(folder, capsys, "--limit-s", "0.000001")
    assert "the time was up" in out


def test_what_changes_numbers_is_said_with_a_line_of_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "bf16" not in asked(folder, capsys)[1]
    _, out, _ = asked(folder, capsys, "--allow", "bf16")
    assert "hvd.DistributedOptimizer(..., compression=hvd.Compression.bf16)" in out
    status, _, err = asked(folder, capsys, "--allow", "fp4")
    assert (status, "there is no pass 'fp4'" in err) == (1, True)


def test_bad_input_gets_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(tmp_path, capsys)[0] == 1
    status, _, err = asked(folder, capsys, "-o", str(tmp_path / "no" / "where.json"))
    assert (status, err.count("\n"), "the plan cannot be written" in err) == (1, 1, True)
    recording = record(on_one_host())
    bare = {
        number: replace(rank, iterations=tuple(replace(one, units=(), ready=()) for one in rank.iterations))
        for number, rank in recording.ranks.items()
    }
    status, _, err = asked(written(tmp_path / "bare", replace(recording, ranks=bare)), capsys)
    assert (status, "no gradients were exchanged, so there is no plan to improve" in err) == (1, True)
    rank_path(folder, 1).unlink()
    _, _, err = asked(folder, capsys)
    assert "rank 1" in err
    with pytest.raises(SystemExit):
        asked(folder, capsys, "--limit-s", "soon")


def test_how_much_the_answer_is_worth_is_said() -> None:
    outcome = optimize(drawn_job(9), least_bytes=16 * 1024)
    assert outcome.gain > 0.05
    exact = outcome.as_recorded
    assert list(worth(outcome, exact)) == [
        "A replay is a prediction: the job compares the plan with its default before it keeps it."
    ]
    far = replace(exact, iteration_s=2 * exact.iteration_s)
    assert "The replay is 50.0 % shorter than the recording" in next(worth(outcome, far))
    noisy = replace(exact, spread_s=exact.iteration_s)
    assert any("differ by more than is gained" in line for line in worth(outcome, noisy))
    fitted = replace(outcome, as_recorded=replace(exact, iteration_s=exact.iteration_s * 0.8))
    assert any("worth a trial, no more" in line for line in worth(fitted, fitted.as_recorded))
