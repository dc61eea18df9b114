"""Jobs go on from their checkpoints."""

import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import RunRanks

from sirtaki.run.rank_channel import answer_termination
from sirtaki.torch.elastic.checkpoints import AGAIN_S, CheckpointFolder, Checkpoints

STEPS = 10


def environment(folder: Path, *, every_s: float = 0.001) -> dict[str, str]:
    return {
        "SIRTAKI_REGISTRY": "off",
        "SIRTAKI_TUNE": "0",
        "SIRTAKI_CHECKPOINT_DIR": str(folder),
        "SIRTAKI_CHECKPOINT_S": str(every_s),
    }


def weights(output: str) -> set[str]:
    return set(re.findall(r"ends (\[.*\])", output))


def drawn(output: str) -> list[str]:
    return re.findall(r"draws at .*", output)


def begins_at(output: str) -> set[int]:
    return {int(step) for step in re.findall(r"begins at (\d+)", output)}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_job_that_was_killed_goes_on_where_it_was_and_ends_as_if_it_had_not_been(
    run_ranks: RunRanks, tmp_path: Path, ranks: int
) -> None:
    whole = run_ranks("elastic_checkpoints.py", ranks, STEPS, "none", 0, env=environment(tmp_path / "whole")).stdout
    assert begins_at(whole) == {0}
    env = environment(tmp_path / "killed")
    run_ranks("elastic_checkpoints.py", ranks, STEPS, "kill", 7, env=env, check=False)
    again = run_ranks("elastic_checkpoints.py", ranks, STEPS, "none", 0, env=env).stdout
    (step,) = begins_at(again)
    assert 0 < step <= 7  # as far as the thread that writes has come
    assert f"step{step} {step * ranks}" in again  # words, and what all ranks have processed
    assert set(drawn(again)) == {line for line in drawn(whole) if int(line.split()[2]) > step}
    assert weights(again) == weights(whole)
    assert len(weights(whole)) == 1


def test_sigterm_has_the_next_commit_written_and_ends_the_rank(run_ranks: RunRanks, tmp_path: Path) -> None:
    env = environment(tmp_path, every_s=3600)
    job = run_ranks("elastic_checkpoints.py", 2, STEPS, "terminate", 5, env=env, check=False)
    assert job.returncode == 128 + signal.SIGTERM, job.stderr
    again = run_ranks("elastic_checkpoints.py", 2, STEPS, "none", 0, env=env).stdout
    assert begins_at(again) == {5}


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_what_is_told_twice_at_once_is_told_once(tmp_path: Path, handlers: None, number: int) -> None:
    now_s = [10.0]
    kept = Checkpoints(CheckpointFolder(tmp_path), every_s=10.0, clock=lambda: now_s[0])
    answer_termination(lambda doing: None)  # as under sirtakirun
    kept.listen()
    assert not kept.leaving
    os.kill(os.getpid(), number)
    assert kept.leaving
    now_s[0] += AGAIN_S
    os.kill(os.getpid(), number)  # would end this process


def test_a_handler_of_the_scripts_own_stays(tmp_path: Path, handlers: None) -> None:
    signal.signal(signal.SIGTERM, own := lambda number, frame: None)
    Checkpoints(CheckpointFolder(tmp_path), every_s=10.0).listen()
    assert signal.getsignal(signal.SIGTERM) is own


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_later_sigterm_and_one_to_a_process_that_the_script_forks_end_it(
    tmp_path: Path, handlers: None, is_forked: bool
) -> None:
    now_s = [10.0]
    kept = Checkpoints(CheckpointFolder(tmp_path), every_s=10.0, clock=lambda: now_s[0])
    kept.listen()
    if (child := os.fork()) == 0:
        if not is_forked:
            kept.listen()
            os.kill(os.getpid(), signal.SIGTERM)
            now_s[0] += AGAIN_S + 0.1
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_checkpoint_of_another_script_is_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    env = environment(tmp_path)
    run_ranks("elastic_checkpoints.py", 1, 3, "none", 0, env=env)
    job = run_ranks("elastic_checkpoints.py", 1, 3, "another script", 0, env=env, check=False)
    assert job.returncode == 1
    assert "does not fit this script" in job.stderr
    assert "SIRTAKI_CHECKPOINT_DIR of its own" in job.stderr


def test_one_is_due_after_a_while_and_not_while_another_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, may_end = [0.0], threading.Event()
    monkeypatch.setattr(CheckpointFolder, "write", lambda *_: may_end.wait())
    kept = Checkpoints(CheckpointFolder(tmp_path), every_s=10.0, clock=lambda: now_s[0])
    assert not kept.due
    now_s[0] = 10.0
    assert kept.due
    kept.write(1, {})
    now_s[0] = 30.0
    assert not kept.due
    may_end.set()
    kept.wait()
    assert kept.due


@pytest.mark.parametrize("what", ["no folder can be made", "it cannot be pickled"])
def test_what_cannot_be_written_is_told_and_does_not_end_training(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / ("file" if what == "no folder can be made" else "folder")
    kept = Checkpoints(CheckpointFolder(folder), every_s=1.0)
    kept.write(3, {"value": torch.ones(2) if folder.name == "file" else threading.Lock()})
    kept.wait()
    assert "commit 3 could not be written" in caplog.text
    assert CheckpointFolder(folder).newest() is None


def test_a_checkpoint_whose_classes_are_gone_is_named_on_all_ranks(
    run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone_by_then.py").write_text("class Thing:\n    pass\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        thing = importlib.import_module("gone_by_then").Thing()
        CheckpointFolder(tmp_path / "kept").write(4, {"thing": thing})
    sys.modules.pop("gone_by_then")
    job = run_ranks("elastic_checkpoints.py", 2, STEPS, "none", 0, env=environment(tmp_path / "kept"), check=False)
    assert job.returncode not in (0, 124)
    assert re.search(r"checkpoint-00000004 cannot be loaded \(ModuleNotFoundError: .*gone_by_then", job.stderr)
    assert CheckpointFolder(tmp_path / "kept").newest() is not None  # it stays where it is
