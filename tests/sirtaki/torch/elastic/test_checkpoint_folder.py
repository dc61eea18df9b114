"""Checkpoints on disk are whole or not there."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from sirtaki.torch.elastic import checkpoints
from sirtaki.torch.elastic.checkpoints import MANIFEST, STATE, CheckpointFolder


def folder_with(path: Path, *numbers: int) -> CheckpointFolder:
    folder = CheckpointFolder(path)
    for number in numbers:
        folder.write(number, {"step": number, "weights": torch.full((3,), float(number))})
    return folder


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_an_empty_or_absent_folder_has_none(tmp_path: Path) -> None:
    assert CheckpointFolder(tmp_path / "absent").newest() is None
    assert CheckpointFolder(tmp_path).newest() is None


def test_what_is_written_is_found_and_plain_torch_opens_it(tmp_path: Path) -> None:
    found = folder_with(tmp_path / "new" / "folder", 7).newest()
    assert found is not None
    assert found.number == 7
    assert found.load()["step"] == 7
    assert torch.equal(torch.load(found.path / STATE)["weights"], torch.full((3,), 7.0))


def test_the_newest_three_stay_by_number_and_not_by_name(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 99_999_998, 99_999_999, 100_000_000, 100_000_001)
    assert len(names(tmp_path)) == 3
    found = folder.newest()
    assert found is not None
    assert found.number == 100_000_001


@pytest.mark.parametrize("damage", ["cut", "changed", "no manifest", "no state", "manifest is nonsense"])
def test_a_damaged_one_is_passed_over_for_the_one_before(
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
    assert "checkpoint-00000002 is not used" in caplog.text
    assert names(tmp_path) == ["checkpoint-00000001", "damaged-1-checkpoint-00000002"]


def test_one_that_may_not_be_read_is_passed_over_and_stays_as_it_is(
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
    assert "checkpoint-00000002 is passed over" in caplog.text
    assert names(tmp_path) == ["checkpoint-00000001", "checkpoint-00000002"]


def test_where_all_are_damaged_a_job_that_begins_anew_keeps_what_it_writes(tmp_path: Path) -> None:
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


def test_what_is_written_last_is_found_though_newer_ones_of_another_line_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_with(tmp_path, 7, 8, 9)
    folder.write(2, {"step": "mine"})
    found = folder.newest()
    assert found is not None
    assert found.load()["step"] == "mine"
    assert "superseded-1-checkpoint-00000009" in names(tmp_path)
    assert "this job did not go on from it" in caplog.text


def test_what_cannot_be_read_back_is_not_said_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path, 1)
    sync = checkpoints._sync

    def spoil(path: Path) -> None:
        sync(path)
        if path.name == STATE:
            path.write_bytes(b"something else")

    monkeypatch.setattr(checkpoints, "_sync", spoil)
    with pytest.raises(OSError, match="read back"):
        folder.write(2, {"step": 2})
    assert names(tmp_path) == ["checkpoint-00000001"]


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path, 1)

    def full(tree: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data: No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write(2, {})
    assert names(tmp_path) == ["checkpoint-00000001"]


def test_what_a_killed_writer_has_left_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "writing-123").mkdir()
    (tmp_path / "writing-123" / STATE).write_bytes(b"half")
    assert CheckpointFolder(tmp_path).newest() is None
    folder_with(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-00000001"]


def test_a_number_that_is_there_is_replaced(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, 1)
    folder.write(1, {"step": "another"})
    found = folder.newest()
    assert found is not None
    assert found.load()["step"] == "another"


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    folder_with(tmp_path, 1, 2, 3, 4)
    assert {"checkpoint-best", "notes.txt"} <= set(names(tmp_path))


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    folder_with(tmp_path, 5)
    manifest = json.loads((tmp_path / "checkpoint-00000005" / MANIFEST).read_text())
    assert manifest["number"] == 5
    assert manifest["bytes"] == (tmp_path / "checkpoint-00000005" / STATE).stat().st_size
    shutil.rmtree(tmp_path / "checkpoint-00000005")
