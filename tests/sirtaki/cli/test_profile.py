"""`sirtaki profile`: a job is run, recorded and shown, and what is wrong is one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import recordings

from sirtaki.analysis import recording_files as folders
from sirtaki.cli.__main__ import main

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
def written(tmp_path: Path) -> Path:
    """A recording that is there."""
    recording = recordings.recording()
    folders.write_job(tmp_path / "recorded", recording.job)
    for rank in recording.ranks.values():
        folders.write_rank(tmp_path / "recorded", rank)
    return tmp_path / "recorded"


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command on a script that trains, on two ranks."""

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
def test_a_job_is_recorded_and_shown(record: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    done = record("-o", "here", "--iterations", "3")
    assert done.returncode == 0, done.stderr
    assert "3 iterations of 2 ranks on 1 host, with operators" in done.stdout
    assert (tmp_path / "here" / "trace.json").exists()
    assert folders.read(tmp_path / "here").problems == ()
    again = record("-o", "here")
    assert again.returncode == 1
    assert "holds a recording" in again.stderr
    assert record("-o", "here", "--overwrite", "--units-only").returncode == 0
    assert folders.read(tmp_path / "here").ranks[0].iterations[0].operators == ()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_what_the_rank_that_is_left_has_recorded_is_shown(
    record: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, killed: int
) -> None:
    done = record("-o", "here", SIRTAKI_TEST_KILL=str(killed))
    assert done.returncode == 1
    assert f"but: rank {killed} of 2 is missing" in done.stdout
    assert list(folders.read(tmp_path / "here").ranks) == [1 - killed]


def test_a_recording_that_is_there_is_shown_with_its_trace(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--show", str(written)]) == 0
    assert "3 iterations of 2 ranks on 1 host, with operators" in capsys.readouterr().out
    assert (written / "trace.json").exists()


def test_the_jobs_exit_code_is_the_commands_where_something_was_recorded(written: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "new")
    asked = f"{folder}?iterations=7&operators=0&edges=0"
    copies = f"cp {written}/* {folder}; test $SIRTAKI_PROFILE = '{asked}' || exit 6; exit 5"
    words = ["profile", "-o", folder, "--iterations", "7", "--units-only", "sh", "-c", copies]
    assert main(words) == 5


def test_a_script_may_be_named_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "says.py"
    script.write_text("import os; print('to', os.environ['SIRTAKI_PROFILE'])")
    assert main(["profile", "-o", str(tmp_path / "new"), str(script)]) == 1
    told = capfd.readouterr()
    assert f"to {tmp_path / 'new'}" in told.out
    assert "nothing was recorded: no gradients of several ranks" in told.err


def wrong(tmp_path: Path, written: Path) -> dict[str, list[str]]:
    (tmp_path / "file").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    return {
        "what is to be recorded?": [],
        "holds a recording: give another folder": ["-o", str(written), "true"],
        "must be 1 at least": ["--iterations", "0", "true"],
        "--edges is about operators": ["--edges", "--units-only", "true"],
        "cannot be recorded into: File exists": ["-o", str(tmp_path / "file"), "true"],
        "no-such-command cannot be started": ["-o", str(empty), "no-such-command"],
        "the job has failed (exit code 3)": ["-o", str(empty), "sh", "-c", "exit 3"],
        "is no folder": ["--show", str(tmp_path / "nowhere")],
        "holds no recording": ["--show", str(empty)],
        "runs nothing: leave out true": ["--show", str(written), "true"],
    }


def test_what_is_wrong_is_said_in_one_sentence(
    tmp_path: Path, written: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for sentence, words in wrong(tmp_path, written).items():
        assert main(["profile", *words]) == 1
        (line,) = capfd.readouterr().err.splitlines()
        assert sentence in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert main(["profile", "-o", str(tmp_path / "new"), "true"]) == 1
    assert "cannot be recorded into: Permission denied" in capfd.readouterr().err
