"""Files of earlier releases can be read: registries, exports, trial logs, plans, recordings, checkpoints.

Version 0.1.0 wrote `written_by_0.1` in one job of two ranks. These files are never written again.
"""

import json
import shutil
from pathlib import Path

import pytest
from conftest import RunRanks

from sirtaki.cli.__main__ import main

WRITTEN = sorted(Path(__file__).parent.glob("written_by_*"))

GO_ON = """
import torch
import torch.nn as nn
import sirtaki.torch as hvd

hvd.init()
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), named_parameters=model.named_parameters()
)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0, note="")

@hvd.elastic.run
def train(state):
    momenta = len(optimizer.state_dict()["state"])
    print(state.batch, state.note, float(model[0].weight.double().sum()), momenta, sep="|")

train(state)
"""


@pytest.fixture(params=WRITTEN, ids=lambda folder: folder.name)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of the files, because opening a file may migrate it."""
    return Path(shutil.copytree(request.param, tmp_path / "written"))


def test_a_registry_of_an_earlier_release_is_read_exported_and_imported(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["registry", "--registry", str(written / "registry.sqlite"), "list"]) == 0
    assert "Sequential" in capsys.readouterr().out
    assert main(["registry", "--registry", str(written / "new.sqlite"), "import", str(written / "registry.json")]) == 0
    assert main(["registry", "--registry", str(written / "new.sqlite"), "list"]) == 0
    assert "Sequential" in capsys.readouterr().out


def test_a_trial_log_becomes_a_report(written: Path) -> None:
    page = written / "report.html"
    assert main(["report", str(written / "trials.jsonl"), "-o", str(page)]) == 0
    assert "<html" in page.read_text()


def test_a_recording_is_shown_replayed_and_asked_about_a_plan(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--show", str(written / "recorded")]) == 0
    assert "2 ranks" in capsys.readouterr().out
    asked = ["replay", str(written / "recorded"), "--plan", str(written / "plan.json"), "--json"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)


def test_training_resumes_from_a_checkpoint(run_ranks: RunRanks, written: Path, tmp_path: Path) -> None:
    script = tmp_path / "go_on.py"
    script.write_text(GO_ON)
    env = {"SIRTAKI_CHECKPOINT_DIR": str(written / "checkpoints"), "SIRTAKI_REGISTRY": "off"}
    done = run_ranks(script, 1, env=env)
    batch, note, weight, momenta = done.stdout.strip().splitlines()[-1].split("|")
    assert (batch, note, momenta) == ("50", "written by 0.1", "6")
    assert float(weight) == pytest.approx(-0.5226441211998463)


def test_a_checkpoint_of_a_later_format_is_refused_by_name_and_stays(
    run_ranks: RunRanks, written: Path, tmp_path: Path
) -> None:
    script = tmp_path / "go_on.py"
    script.write_text(GO_ON)
    (manifest,) = (written / "checkpoints").glob("*/manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 2}))
    env = {"SIRTAKI_CHECKPOINT_DIR": str(written / "checkpoints"), "SIRTAKI_REGISTRY": "off"}
    done = run_ranks(script, 1, env=env, check=False)
    assert done.returncode == 1
    assert f"{manifest.parent} has format 2, but this release reads formats up to 1" in done.stderr
    assert manifest.exists()
