"""`sirtaki profile`, `replay`, `optimize` and `trace` on recorded jobs."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
from fakes import memories, recordings
from fakes.compiled_jobs import compiled_job
from fakes.drawn_jobs import drawn_job
from fakes.played_jobs import made_job, plan_of, record, without, written
from fakes.replays import SIZES, on_one_host, over_a_link

from sirtaki.analysis import recording as folders
from sirtaki.analysis.recording import TRACE_FILE, rank_path
from sirtaki.autotune.sharded import SHARDED_FILE, RecordedStep, ShardedStep, ShardKnobs, ShardLink, ShardSpace
from sirtaki.cli import optimize as optimize_command
from sirtaki.cli.__main__ import main
from sirtaki.cli.output import memory_bytes
from sirtaki.engine.tuning.plans import GivenPlan
from sirtaki.measures import LinkModel

# ── profile ───────────────────────────────────────────────────────────────────────────────────────────────────────

TRAINS = """
import os, signal, torch, sirtaki.torch as hvd
hvd.init()
model = torch.nn.Linear(8, 8)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
for step in range(12):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    if step == 6 and hvd.rank() == int(os.environ.get("SIRTAKI_TEST_KILL", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def recorded_folder(tmp_path: Path) -> Path:
    """Return the folder of an existing recording."""
    return written(tmp_path / "recorded", recordings.recording())


@pytest.fixture
def record_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs the command on a training script, on two ranks."""

    def run(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "train.py"
        script.write_text(TRAINS)
        started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
        return subprocess.run(
            [sys.executable, "-m", "sirtaki.cli", "profile", *options, *started],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "SIRTAKI_REGISTRY": "off",
                "SIRTAKI_WARMUP_ITERATIONS": "0",
                **env,
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run


@pytest.mark.slow
def test_a_job_is_recorded_and_shown(
    record_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = record_script("-o", "here", "--iterations", "3")
    assert done.returncode == 0, done.stderr
    assert "3 iterations of 2 ranks on 1 host, with operators" in done.stdout
    assert (tmp_path / "here" / "trace.json").exists()
    assert folders.read_folder(tmp_path / "here").problems == ()
    again = record_script("-o", "here")
    assert again.returncode == 1
    assert "already contains a recording" in again.stderr
    assert record_script("-o", "here", "--overwrite", "--units-only").returncode == 0
    assert folders.read_folder(tmp_path / "here").ranks[0].iterations[0].operators == ()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_the_recording_of_the_only_remaining_rank_is_shown(
    record_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, killed: int
) -> None:
    done = record_script("-o", "here", SIRTAKI_TEST_KILL=str(killed))
    assert done.returncode == 1
    assert f"but: rank {killed} of 2 is missing" in done.stdout
    assert list(folders.read_folder(tmp_path / "here").ranks) == [1 - killed]


def test_an_existing_recording_is_shown_with_its_trace(
    recorded_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--show", str(recorded_folder)]) == 0
    assert "3 iterations of 2 ranks on 1 host, with operators" in capsys.readouterr().out
    assert (recorded_folder / "trace.json").exists()


def test_the_jobs_exit_code_is_the_commands_where_something_was_recorded(recorded_folder: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "new")
    asked = f"{folder}?iterations=7&operators=0&edges=0"
    copies = f"cp {recorded_folder}/* {folder}; test $SIRTAKI_PROFILE = '{asked}' || exit 6; exit 5"
    words = ["profile", "-o", folder, "--iterations", "7", "--units-only", "sh", "-c", copies]
    assert main(words) == 5


def test_a_script_may_be_named_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "says.py"
    script.write_text("import os; print('to', os.environ['SIRTAKI_PROFILE'])")
    assert main(["profile", "-o", str(tmp_path / "new"), str(script)]) == 1
    told = capfd.readouterr()
    assert f"to {tmp_path / 'new'}" in told.out
    assert "nothing was recorded: no gradients of several ranks" in told.err


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("the command that starts the job is missing", []),
        ("already contains a recording; choose another folder", ["-o", "{recorded}", "true"]),
        ("--edges records data dependencies between operators", ["--edges", "--units-only", "true"]),
        (": File exists; choose another folder with -o", ["-o", "{file}", "true"]),
        ("no-such-command of the job cannot be started", ["-o", "{empty}", "no-such-command"]),
        ("the job has failed (exit code 3)", ["-o", "{empty}", "sh", "-c", "exit 3"]),
        ("there is no folder", ["--show", "{file}/nowhere"]),
        ("cannot be read as a recording: it is not a recording", ["--show", "{empty}"]),
        ("runs no job; remove the command 'true' or --show", ["--show", "{recorded}", "true"]),
    ],
)
def test_an_error_is_reported_in_one_sentence(
    sentence: str, words: list[str], tmp_path: Path, recorded_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    there = {"recorded": recorded_folder, "file": tmp_path / "file", "empty": tmp_path / "empty"}
    assert main(["profile", *(word.format(**there) for word in words)]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert sentence in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert main(["profile", "-o", str(tmp_path / "new"), "true"]) == 1
    assert ": Permission denied; choose another folder with -o" in capfd.readouterr().err


# ── replay ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "recording", record(over_a_link(ranks=3)))


def told(command: str, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    status = main([command, str(folder), *options])
    found = capsys.readouterr()
    return status, found.out, found.err


asked, optimized = partial(told, "replay"), partial(told, "optimize")


def test_recorded_and_replayed_times_the_path_and_remedies_are_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = asked(folder, capsys)
    assert (status, err) == (0, "")
    assert out.startswith(
        "The job had 3 ranks on 3 hosts; 2 iterations were recorded.\n"
        "The job's communication plan was: gloo flat, 1 B units, 2 streams.\n"
    )
    lines = {line.split()[0]: line for line in out.splitlines() if line and line.split()[0] in ("iteration", "forward")}
    assert "0.0 %" in lines["iteration"]
    assert "of the step is the link between hosts" in out
    assert "the links were twice as fast" in out


def test_all_questions_are_answered_together(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asked(folder, capsys, "--streams", "1", "--unit-mib", "1", "--no-straggler")
    assert "the plan were units of 1 MiB, 1 streams, no rank were slower than most: " in out
    assert "% more" in out or "% less" in out


@pytest.mark.parametrize("question", [("--ranks", "6"), ("--link-gbit", "1", "--batches", "2")])
def test_questions_about_other_clusters_are_for_plan(
    question: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = asked(folder, capsys, *question)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "`sirtaki plan LOG --ranks N --link-gbit G` predicts other numbers of ranks and other networks" in err


def test_throughput_is_reported_for_batches_of_other_sizes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = asked(folder, capsys, "--batches", "8", "0.5")
    assert (status, err) == (0, "")
    assert re.findall(r"([\d.]+) × +\S+ ms ", out) == ["0.5", "1", "8"]
    _, out, _ = asked(folder, capsys, "--batches", "0.5", "8", "1000", "--json")
    rows = json.loads(out)["batches"]
    assert rows[1]["throughput"] == pytest.approx(1.0)
    through, exposed = ([row[what] for row in rows] for what in ("throughput", "exposed"))
    assert through == sorted(through)
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[0] > 0.1
    assert exposed[-1] < 0.01
    assert all(row["low_s"] <= row["iteration_s"] <= row["high_s"] for row in rows)
    _, out, _ = asked(folder, capsys, "--batches", "1", "--no-straggler", "--json")
    told = json.loads(out)
    assert told["changed"] == "no rank were slower than most"
    assert told["batches"][0]["throughput"] >= 1.0
    with pytest.raises(SystemExit):
        asked(folder, capsys, "--batches", "0")


def test_for_batches_beyond_all_replays_only_the_interval_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = asked(written(tmp_path / "one", record(on_one_host())), capsys, "--batches", "8")
    rows = [line.split() for line in out.splitlines() if "× " in line]
    assert rows[0][:2] == ["1", "×"]
    assert rows[0][-4] == "1.00"
    assert rows[1][3] == "to"
    assert "only a trial tells" in out


def test_a_plan_can_be_asked_for(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_of(SIZES, (4,)).to_json()))
    status, out, _ = asked(folder, capsys, "--plan", str(path))
    assert (status, "the plan were" in out) == (0, True)
    path.write_text("{}")
    status, _, err = asked(folder, capsys, "--plan", str(path))
    assert (status, "cannot be read (KeyError" in err) == (1, True)


def test_a_plan_that_cannot_be_replayed_is_rejected_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = written(tmp_path / "one", record(on_one_host(cuts=(4,))))
    status, out, err = asked(one, capsys, "--unit-mib", "0.002")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "the step time cannot be simulated if the plan were units of 0.002 MiB: " in err
    assert "smaller units" in err
    status, out, err = optimized(one, capsys)
    assert (status, err) == (0, "")
    assert re.search(
        r"Note: the step time of \d+ more plans cannot be predicted, because the recording does not show the cost of",
        out,
    )
    assert sum(json.loads(optimized(one, capsys, "--json")[1])["search"]["refused"].values()) > 1


@pytest.mark.parametrize("missing", [0, 2])
def test_missing_parts_are_reported_and_the_rest_is_shown(
    folder: Path, missing: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rank_path(folder, missing).unlink()
    status, out, err = asked(folder, capsys, "--streams", "1", "--unit-mib", "1")
    assert (status, "What if" in out, "2 ranks on 2 hosts" in out) == (0, True, True)
    assert f"rank {missing} of 3 is missing" in err


def test_a_recording_without_units_is_shown_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = recordings.with_iterations(record(on_one_host()), lambda one: replace(one, units=()))
    folder = written(tmp_path / "bare", bare)
    status, out, err = asked(folder, capsys)
    assert status == 0
    assert "no gradients were exchanged" in err
    assert "of the step is the backward pass" in out
    assert "bytes ÷ bandwidth" in out
    status, _, err = asked(folder, capsys, "--streams", "2")
    assert (status, "so there is no communication plan" in err) == (1, True)


def test_nonsense_gets_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(tmp_path, capsys)[0] == 1
    status, _, err = asked(folder, capsys, "--transport", "mpi")
    assert (status, err.count("\n")) == (1, 1)
    assert "cost of transport mpi with algorithm flat is unknown" in err
    with pytest.raises(SystemExit):
        asked(folder, capsys, "--ranks", "none")


# ── optimize ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    return written(tmp_path / "recording", record(drawn_job(0)))


def test_the_found_plan_is_printed_and_written_for_job_and_replay(
    drawn: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = optimized(drawn, capsys)
    assert (status, err) == (0, "")
    assert out.splitlines()[1].startswith("Instead of ")
    assert "Before, the step is made of:\n" in out
    assert "of the step is" in out
    assert f"SIRTAKI_PLAN={drawn}/plan.json" in out
    assert "A job compares it with its default" in out
    plan = GivenPlan.read(drawn)
    assert plan.ranks == len(record(drawn_job(0)).ranks)
    assert main(["replay", str(drawn), "--plan", str(drawn / "plan.json"), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["what_if"]
    _, told, _ = optimized(drawn, capsys, "--json")
    found = json.loads(told)
    assert answer["times"]["iteration_s"] == pytest.approx(found["after_s"], rel=0.01)
    assert answer["gain"] == pytest.approx(found["gain"], abs=0.001)
    assert found["gain"] == pytest.approx(1 - found["after_s"] / found["before_s"])
    path = found["critical_path_before"]
    assert main(["replay", str(drawn), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["critical_path"][0]["share"] == pytest.approx(path[0]["share"])
    assert plan.knobs.to_json() == found["knobs"]


def test_a_search_may_be_cut_off_and_its_plan_be_written_elsewhere(
    drawn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "other.json"
    _, out, _ = optimized(drawn, capsys, "--json", "-o", str(elsewhere))
    assert elsewhere.exists()
    assert json.loads(out)["search"]["in_time"]
    _, out, _ = optimized(drawn, capsys, "--limit-s", "0.000001")
    assert "the time limit (--limit-s) ended it early" in out


def test_a_change_that_affects_results_is_printed_with_a_line_of_code(
    drawn: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "bf16" not in optimized(drawn, capsys)[1]
    _, out, _ = optimized(drawn, capsys, "--allow", "bf16")
    assert "hvd.DistributedOptimizer(..., compression=hvd.Compression.bf16)" in out
    status, _, err = optimized(drawn, capsys, "--allow", "fp4")
    assert (status, "the value of --allow must be one of bf16, found 'fp4'" in err) == (1, True)


@pytest.mark.lengthy
def test_a_compiled_model_gets_its_line_of_code_in_text_plan_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = written(tmp_path / "slow", record(compiled_job(LinkModel(alpha_s=1e-3, throughput=(2e7, 4e7), host_s=0.0))))
    status, out, err = optimized(slow, capsys)
    assert (status, err) == (0, "")
    size = GivenPlan.read(slow).part_bytes
    assert size
    assert f"parts: torch.compile(model, backend=hvd.early_gradients(part_bytes={size}))\n" in out
    assert "(without parts the best plan makes it " in out
    found = json.loads(optimized(slow, capsys, "--json")[1])
    assert found["part_bytes"] == size
    assert found["after_s"] < found["plan_alone_s"]
    fast = written(tmp_path / "fast", record(compiled_job(LinkModel(alpha_s=1e-4, throughput=(2e9,), host_s=0.0))))
    assert "The compiled model stays whole" in optimized(fast, capsys)[1]
    assert GivenPlan.read(fast).part_bytes == 0


def test_a_traced_step_of_sharded_training_is_asked_for_the_worth_of_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = (8_000_000,) * 5
    step = ShardedStep(
        forward_s=(0.01,) * 5,
        backward_s=(0.02,) * 5,
        rest_s=0.01,
        gathered_bytes=sizes,
        scattered_bytes=sizes,
        link=ShardLink(latency_s=0.001, gathered={1: 2e7, 4: 5e7}),
    )
    space = ShardSpace(modules=5, streams=(1, 4), whole_bytes=sizes, dropped=(1, 2, 3, 4))
    recorded = RecordedStep(step=step, space=space, setting=ShardKnobs(streams=4, ahead=2))
    path = tmp_path / SHARDED_FILE
    path.write_bytes(msgspec.json.encode(recorded))
    status, out, _ = optimized(tmp_path, capsys)
    assert status == 0
    lines = [re.split(" {2,}", line.strip()) for line in out.splitlines() if "MiB" in line]
    assert [line[0] for line in lines] == ["0 MiB", "8 MiB", "15 MiB", "23 MiB", "31 MiB"]
    spans_ms = [float(line[1].split()[0]) for line in lines]
    assert spans_ms == sorted(spans_ms, reverse=True)
    assert spans_ms[-1] < 0.85 * spans_ms[0]
    assert lines[-1][3] == "4 streams, gathers 2 ahead and 1 behind, 4 kept"
    told = json.loads(optimized(tmp_path, capsys, "--json")[1])
    assert told["by_memory"][0]["step_s"] == told["step_s"], "nothing is kept without memory"
    for damaged in (b"{", b"[]", path.read_bytes().replace(b'"forward_s":[0.01,', b'"forward_s":[')):
        path.write_bytes(damaged)
        status, _, err = optimized(tmp_path, capsys)
        assert status == 1
        assert f"{path} does not contain a training step that" in err


def test_bad_input_gets_one_sentence(drawn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert optimized(tmp_path, capsys)[0] == 1
    status, _, err = optimized(drawn, capsys, "-o", str(tmp_path / "no" / "where.json"))
    assert (status, err.count("\n"), "the plan cannot be written to the output file" in err) == (1, 1, True)
    bare = recordings.with_iterations(record(on_one_host()), lambda one: replace(one, units=(), ready=()))
    status, _, err = optimized(written(tmp_path / "bare", bare), capsys)
    assert (status, "so there is no communication plan" in err) == (1, True)
    rank_path(drawn, 1).unlink()
    _, _, err = optimized(drawn, capsys)
    assert "rank 1" in err
    with pytest.raises(SystemExit):
        optimized(drawn, capsys, "--limit-s", "soon")


def test_a_replay_far_from_the_recording_is_reported(
    drawn: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimize_command, "DOUBTFUL", -1.0)
    assert "the simulated step is 0.0 % " in optimized(drawn, capsys)[1]


def test_an_undecided_alternative_gets_a_plan_file_and_a_trial_is_proposed(
    drawn: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = json.loads(optimized(drawn, capsys, "--json")[1])["plans"]
    assert len(plans) >= 2
    for one in plans:
        assert GivenPlan.read(Path(one["plan"])).knobs.to_json() == one["knobs"]
        assert one["low_s"] <= one["iteration_s"] <= one["high_s"]
    assert plans[1]["plan"] == f"{drawn}/plan-2.json"
    _, out, _ = optimized(drawn, capsys)
    assert f"so try each:\n  {drawn}/plan-2.json: " in out
    rows = list(csv.DictReader(io.StringIO(optimized(drawn, capsys, "--csv")[1])))
    assert [row["words"] for row in rows] == [one["words"] for one in plans]


def test_where_nothing_is_faster_no_plan_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = LinkModel(alpha_s=1e-3, throughput=(1e6,))
    job = made_job(durations_s={0: (0.1,), 1: (0.1,)}, sizes=(1000,), plan=plan_of((1000,), (1,)), link=link)
    folder = written(tmp_path / "best", record(job))
    _, out, _ = optimized(folder, capsys)
    assert "No plan is faster than the recorded one" in out
    assert "No plan is written." in out
    told = json.loads(optimized(folder, capsys, "--json")[1])
    assert (told["faster"], told["plans"], (folder / "plan.json").exists()) == (False, [], False)


@pytest.fixture
def with_memory(tmp_path: Path) -> Path:
    return written(tmp_path / "memory", memories.recorded_job())


def test_a_remedy_that_meets_a_budget_is_reported(with_memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = optimized(with_memory, capsys, "--memory-budget", "2.5K")
    assert (status, err) == (0, "")
    assert out.startswith(
        "The job exceeds the memory budget of 2.5 KiB (--memory-budget): rank 0 uses 2.89 KiB of memory at its peak "
        "(cpu).\n"
    )
    assert "backward_passes_per_step=2" in out
    memory = json.loads(optimized(with_memory, capsys, "--memory-budget", "2.5K", "--json")[1])["memory"]
    assert memory["remedies"][memory["chosen"]]["peak_bytes"] <= memory["budget_bytes"] == 2560


def test_with_a_remedy_no_unproved_time_is_reported(with_memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = optimized(with_memory, capsys, "--memory-budget", "2.5K")
    assert "The step time with these changes is not predicted; to measure it, run a job with one of them." in out
    assert " ms" not in out.split("\nNote: ")[0]
    assert "% of the step" not in out
    found = json.loads(optimized(with_memory, capsys, "--memory-budget", "2.5K", "--json")[1])
    assert {found[name] for name in ("before_s", "after_s", "gain", "without_communication_s")} == {None}
    assert not any(name.endswith("_s") for one in found["memory"]["remedies"] for name in one)
    assert all(one["iteration_s"] is one["low_s"] is one["gain"] is None for one in found["plans"])
    assert json.loads(optimized(with_memory, capsys, "--memory-budget", "1M", "--json")[1])["before_s"] > 0


def test_without_a_budget_memory_is_not_reported(with_memory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "peak" not in optimized(with_memory, capsys)[1]
    assert "memory" not in json.loads(optimized(with_memory, capsys, "--json")[1])


def test_a_budget_that_cannot_be_met_is_one_sentence_and_no_plan(
    with_memory: Path, drawn: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = optimized(with_memory, capsys, "--memory-budget", "1K")
    assert (status, out) == (1, "")
    assert "a budget of 1 KiB cannot be met" in err
    assert not (with_memory / "plan.json").exists()
    status, out, err = optimized(drawn, capsys, "--memory-budget", "1K")
    assert (status, out) == (1, "")
    assert "the recording contains no memory use" in err


# ── quantities ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_amounts_of_memory_are_read_in_powers_of_1024() -> None:
    texts = ("512", "2K", "1.5M", "6G", "6GiB", "6 gb", "1T")
    assert [memory_bytes(text) for text in texts] == [512, 2048, 3 << 19, 6 << 30, 6 << 30, 6 << 30, 1 << 40]


@pytest.mark.parametrize("text", ["", "much", "-1G", "0", "0.1", "6X", "1e9", "nan"])
def test_an_invalid_amount_of_memory_is_reported(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"must be an amount of memory, such as 6G or 512M, found {text!r}"):
        memory_bytes(text)


# ── trace ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_trace_for_perfetto_is_written_into_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(written(tmp_path, record(over_a_link())))]) == 0
    assert str(tmp_path / TRACE_FILE) in capsys.readouterr().out
    assert (tmp_path / TRACE_FILE).exists()


def test_chakra_traces_are_numbered_from_0_and_their_ranks_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("google.protobuf", minversion="5.28")
    folder = written(tmp_path / "recorded", without(record(over_a_link(ranks=3)), 1))
    assert main(["trace", str(folder), "--chakra", str(tmp_path / "out" / "job")]) == 0
    told = capsys.readouterr()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["job.0.et", "job.1.et"]
    assert "2 iterations of 2 ranks" in told.out
    assert "the files are those of ranks 0 and 2" in told.out
    assert "rank 1 of 3 is missing" in told.err
    assert not (folder / TRACE_FILE).exists()


def test_an_impossible_request_is_reported_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["trace", str(tmp_path / "nothing")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    folder = written(tmp_path / "recorded", record(over_a_link()))
    (tmp_path / "file").write_text("")
    assert main(["trace", str(folder), "--chakra", str(tmp_path / "file" / "job")]) == 1
    assert capsys.readouterr().err.startswith("sirtaki trace: ")
    for name in [name for name in sys.modules if name.startswith("sirtaki.analysis.chakra")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    assert main(["trace", str(folder), "--chakra", str(tmp_path / "job")]) == 1
    assert "pip install 'sirtaki[chakra]'" in capsys.readouterr().err
