"""Checkpoints on disk are whole or not there, and a job goes on from the newest."""

import importlib
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from conftest import RunRanks

from sirtaki.run.rank_channel import answer_termination
from sirtaki.torch.elastic import checkpoints
from sirtaki.torch.elastic.checkpoints import AGAIN_S, MANIFEST, STATE, CheckpointFolder, Checkpoints
from sirtaki.torch.elastic.state import RandomState

# ── checkpoint folder ─────────────────────────────────────────────────────────────────────────────────────────────────


def folder_with(path: Path, *numbers: int) -> CheckpointFolder:
    folder = CheckpointFolder(path)
    for number in numbers:
        folder.write(number, {"step": number, "weights": torch.full((3,), float(number))})
    return folder


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_a_written_checkpoint_is_found_and_plain_torch_opens_it(tmp_path: Path) -> None:
    found = folder_with(tmp_path / "new" / "folder", 7).newest()
    assert found is not None
    assert found.number == 7
    assert found.load()["step"] == 7
    assert torch.equal(torch.load(found.path / STATE)["weights"], torch.full((3,), 7.0))


def test_plain_values_are_read_without_running_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"values": {"step": 3, "seen": {1, 2}, "name": "a"}, "states": {"model": {"w": torch.ones(2)}}}
    CheckpointFolder(tmp_path).write(1, {**tree, "generators": [RandomState.now().plain()]})
    loads = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **how: loads(*args, **how) if how["weights_only"] else 1 / 0)
    newest = CheckpointFolder(tmp_path).newest()
    assert newest is not None
    found = newest.load()
    assert found["values"] == tree["values"]
    drawn = random.random(), np.random.rand(), torch.rand(1)
    RandomState(**found["generators"][0]).put_back()
    assert (random.random(), np.random.rand(), torch.rand(1)) == drawn


def test_the_newest_three_stay_by_number_and_not_by_name(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 99_999_998, 99_999_999, 100_000_000, 100_000_001)
    assert len(names(tmp_path)) == 3
    found = folder.newest()
    assert found is not None
    assert found.number == 100_000_001


@pytest.mark.parametrize("damage", ["cut", "changed", "no manifest", "no state", "manifest is nonsense"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_with(tmp_path, 1, 2)
    newest = tmp_path / "checkpoint-00000002"
    content = (newest / STATE).read_bytes()
    match damage:
        case "cut":
            (newest / STATE).write_bytes(content[:-1])
        case "changed":
            (newest / STATE).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "no manifest":
            (newest / MANIFEST).unlink()
        case "no state":
            (newest / STATE).unlink()
        case _:
            (newest / MANIFEST).write_text("[]")
    found = folder.newest()
    assert found is not None
    assert found.number == 1
    assert "checkpoint-00000002 is damaged" in caplog.text
    assert names(tmp_path) == ["checkpoint-00000001", "damaged-1-checkpoint-00000002"]


def test_an_unreadable_checkpoint_is_skipped_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path, 1, 2)
    read_text = Path.read_text

    def forbidden(path: Path, *args: str) -> str:  # the superuser, as whom containers run tests, may read all
        if path.parent.name == "checkpoint-00000002":
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args)

    monkeypatch.setattr(Path, "read_text", forbidden)
    found = folder.newest()
    assert found is not None
    assert found.number == 1
    assert "lacks permission to read the checkpoint" in caplog.text
    assert names(tmp_path) == ["checkpoint-00000001", "checkpoint-00000002"]


def test_where_all_are_damaged_a_fresh_job_keeps_its_checkpoints(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 7, 8, 9)
    for number in (7, 8, 9):
        (tmp_path / f"checkpoint-{number:08}" / STATE).write_bytes(b"")
    assert folder.newest() is None
    for number in (1, 2):
        folder.write(number, {"step": number})
        found = folder.newest()
        assert found is not None
        assert found.load()["step"] == number
    assert names(tmp_path)[2:] == [f"damaged-1-checkpoint-{number:08}" for number in (7, 8, 9)]


def test_the_last_written_checkpoint_is_found_beside_newer_ones_of_another_history(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_with(tmp_path, 7, 8, 9)
    folder.write(2, {"step": "mine"})
    found = folder.newest()
    assert found is not None
    assert found.load()["step"] == "mine"
    assert "superseded-1-checkpoint-00000009" in names(tmp_path)
    assert "this job did not continue from it" in caplog.text


def test_an_unreadable_checkpoint_is_not_reported_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path, 1)
    sync = checkpoints._sync

    def spoil(path: Path) -> None:
        sync(path)
        if path.name == STATE:
            path.write_bytes(b"something else")

    monkeypatch.setattr(checkpoints, "_sync", spoil)
    with pytest.raises(OSError, match="verification failed"):
        folder.write(2, {"step": 2})
    assert names(tmp_path) == ["checkpoint-00000001"]


def test_a_failed_write_keeps_the_previous_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path, 1)

    def full(tree: object, file: IO[bytes]) -> None:
        file.write(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data: No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write(2, {})
    assert names(tmp_path) == ["checkpoint-00000001"]


def test_a_partial_write_is_an_error_and_the_previous_checkpoint_stays(tmp_path: Path) -> None:
    folder, limits = folder_with(tmp_path, 1), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.write(2, {"weights": torch.zeros(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["checkpoint-00000001"]


def test_all_of_a_commit_is_on_disk_before_it_appears_and_its_name_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, fsync, rename = list[str](), os.fsync, Path.rename

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def appear(path: Path, target: Path) -> Path:
        done.append("appears")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", appear)
    folder_with(tmp_path, 1)
    assert set(done[:-2]) == {STATE, MANIFEST, f"writing-{os.getpid()}"}
    assert done[-2:] == ["appears", tmp_path.name]


def test_a_commit_may_be_written_again(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 1, 2)
    folder.write(2, {"step": "again"})
    found = folder.newest()
    assert found is not None
    assert found.load() == {"step": "again"}
    assert names(tmp_path) == ["checkpoint-00000001", "checkpoint-00000002"]


def test_files_of_a_killed_writer_are_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "writing-123").mkdir()
    (tmp_path / "writing-123" / STATE).write_bytes(b"half")
    assert CheckpointFolder(tmp_path).newest() is None
    folder_with(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-00000001"]


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    folder_with(tmp_path, 1, 2, 3, 4)
    assert {"checkpoint-best", "notes.txt"} <= set(names(tmp_path))


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_job_resumes_and_ends_as_if_it_had_not_been_killed(
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


@pytest.mark.integration
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
def test_a_repeated_termination_signal_is_handled_once(tmp_path: Path, handlers: None, number: int) -> None:
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
    assert "does not match this script" in job.stderr
    assert "separate SIRTAKI_CHECKPOINT_DIR" in job.stderr


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
    kept.write(2, {})
    kept.wait()
    assert not kept.due


def test_a_write_yields_to_training_until_a_rank_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "RESTS", 1e9)
    monkeypatch.setattr(checkpoints, "LONGEST_REST_S", 50.0)
    kept = Checkpoints(CheckpointFolder(tmp_path), every_s=1e9)
    kept.write(1, {"weights": torch.ones(1 << 20)})
    try:
        while not list(tmp_path.glob(f"writing-*/{STATE}")):
            time.sleep(0.001)
        assert CheckpointFolder(tmp_path).newest() is None
    finally:
        kept.wait()
    newest = CheckpointFolder(tmp_path).newest()
    assert newest is not None
    assert torch.equal(newest.load()["weights"], torch.ones(1 << 20))


def test_a_write_rests_for_no_longer_than_a_share_of_the_time_between_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "RESTS", 1e9)
    now_s = [0.0]
    kept = Checkpoints(CheckpointFolder(tmp_path), every_s=0.01, clock=lambda: now_s[0])
    kept.write(1, {"weights": torch.ones(1 << 20)})
    now_s[0] = 1.0
    while not kept.due:
        time.sleep(0.001)
    assert names(tmp_path) == ["checkpoint-00000001"]


@pytest.mark.lengthy
def test_a_script_that_ends_does_not_wait_for_rests(tmp_path: Path) -> None:
    code = (
        "import pathlib, torch; from sirtaki.torch.elastic import checkpoints as c; "
        "c.RESTS, c.LONGEST_REST_S = 1e9, 1.0; "
        f"c.Checkpoints(c.CheckpointFolder(pathlib.Path({str(tmp_path)!r})), every_s=1e9).write(1, "
        "{'weights': torch.ones(1 << 24)})"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    assert names(tmp_path) == ["checkpoint-00000001"]


@pytest.mark.parametrize("what", ["no folder can be made", "it cannot be pickled"])
def test_a_failed_write_is_logged_and_does_not_end_training(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / ("file" if what == "no folder can be made" else "folder")
    kept = Checkpoints(CheckpointFolder(folder), every_s=1.0)
    kept.write(3, {"value": torch.ones(2) if folder.name == "file" else threading.Lock()})
    kept.wait()
    assert "cannot write the checkpoint of state.commit() number 3" in caplog.text
    assert CheckpointFolder(folder).newest() is None


def test_a_checkpoint_with_missing_classes_is_named_on_all_ranks(
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
