"""`sirtaki translate` shows, writes or refuses."""

from pathlib import Path

import pytest

from sirtaki.cli.__main__ import main

SCRIPT = """\
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader([1], batch_size=8):
    model(batch).mean().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_changes_are_shown_and_nothing_is_written(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", str(script)]) == 0
    shown = capsys.readouterr()
    assert "+hvd.init()" in shown.out
    assert "learning rates stay" in shown.err
    assert script.read_text() == SCRIPT


def test_the_script_is_changed_if_asked_to_and_only_once(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--write", str(script)]) == 0
    written = script.read_text()
    assert "hvd.init()" in written
    capsys.readouterr()
    assert main(["translate", "--write", str(script)]) == 0
    assert script.read_text() == written
    assert "nothing to change" in capsys.readouterr().out


def test_a_refusal_names_line_and_reason_and_writes_nothing(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(SCRIPT.replace("batch_size=8", "batch_size=1"))
    assert main(["translate", str(script), "-o", str(tmp_path / "new.py")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{script}:5: batches of one sample cannot be divided" in shown.err
    assert not (tmp_path / "new.py").exists()


def test_a_missing_script_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", str(tmp_path / "none.py")]) == 1
    assert "the training script cannot be read" in capsys.readouterr().err
