"""`sirtaki optimize` on recordings made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import memories
from fakes.compiled_jobs import compiled_job
from fakes.drawn_jobs import drawn_job
from fakes.played_jobs import record
from fakes.replays import on_one_host

from sirtaki.analysis.plan_search import optimize
from sirtaki.analysis.recording import Recording
from sirtaki.analysis.recording_files import rank_path, write_job, write_rank
from sirtaki.cli.__main__ import main
from sirtaki.cli.optimize import worth
from sirtaki.engine.tuning.plans import GivenPlan
from sirtaki.measures import LinkModel


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


def test_a_compiled_model_gets_its_line_of_code_in_text_plan_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = written(tmp_path / "slow", record(compiled_job(LinkModel(alpha_s=1e-3, throughput=(2e7, 4e7), host_s=0.0))))
    status, out, err = asked(slow, capsys)
    assert (status, err) == (0, "")
    size = GivenPlan.read(slow).part_bytes
    assert size
    assert f"parts: torch.compile(model, backend=hvd.early_gradients(part_bytes={size}))\n" in out
    assert "(without parts the best plan makes it " in out
    found = json.loads(asked(slow, capsys, "--json")[1])
    assert found["part_bytes"] == size
    assert found["after_s"] < found["plan_alone_s"]
    fast = written(tmp_path / "fast", record(compiled_job(LinkModel(alpha_s=1e-4, throughput=(2e9,), host_s=0.0))))
    assert "The compiled model stays whole" in asked(fast, capsys)[1]
    assert GivenPlan.read(fast).part_bytes == 0


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


@pytest.fixture
def with_memory(tmp_path: Path) -> Path:
    return written(tmp_path / "memory", memories.recorded_job())


def test_what_meets_a_budget_is_said_and_written_beside_the_plan(
    with_memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = asked(with_memory, capsys, "--memory-budget", "2.5K")
    assert (status, err) == (0, "")
    assert out.startswith("At its peak rank 0 holds 2.89 KiB (cpu), more than 2.5 KiB.")
    assert "backward_passes_per_step=2" in out
    assert "do not believe" not in out
    memory = json.loads((with_memory / "plan.json").read_text())["memory"]
    assert memory["remedies"][memory["chosen"]]["peak_bytes"] <= memory["budget_bytes"] == 2560
    assert GivenPlan.read(with_memory).ranks == 2
    _, told, _ = asked(with_memory, capsys, "--memory-budget", "2.5K", "--json")
    assert json.loads(told)["memory"] == memory


def test_without_a_budget_nothing_is_said_of_memory(with_memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asked(with_memory, capsys)
    assert "peak" not in out
    assert "memory" not in json.loads((with_memory / "plan.json").read_text())


def test_a_budget_that_cannot_be_met_is_one_sentence_and_no_plan(
    with_memory: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = asked(with_memory, capsys, "--memory-budget", "1K")
    assert (status, out) == (1, "")
    assert "a budget of 1 KiB cannot be met" in err
    assert not (with_memory / "plan.json").exists()
    status, out, err = asked(folder, capsys, "--memory-budget", "1K")
    assert (status, out) == (1, "")
    assert "memory is not in this recording" in err
