"""Accelerate and the Trainer train over Sirtaki as over Gloo, started by anything, and go on from where they were."""

from pathlib import Path

import pytest
from integrations.launching import losses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ACCELERATE, TRAINER = "accelerate_digits.py", "transformers_trainer.py"


def test_accelerate_has_the_same_losses_as_over_gloo(tmp_path: Path) -> None:
    expected = losses("torchrun", ACCELERATE, "--epochs", 3, "--backend", "gloo", folder=tmp_path, over_sirtaki=False)
    assert sorted(expected) == [1, 2, 3]
    for launcher in ("sirtakirun", "accelerate"):
        assert losses(launcher, ACCELERATE, "--epochs", 3, folder=tmp_path) == pytest.approx(expected, abs=2e-4)


def test_accelerate_resumes_in_halves(tmp_path: Path) -> None:
    options = ("--precision", "bf16")
    first = losses("sirtakirun", ACCELERATE, "--epochs", 2, "--save", tmp_path / "state", *options, folder=tmp_path)
    later = losses("torchrun", ACCELERATE, "--epochs", 4, "--resume", tmp_path / "state", *options, folder=tmp_path)
    assert (sorted(first), sorted(later)) == ([1, 2], [3, 4])
    assert later[4] < first[1] / 2


def test_the_trainer_has_the_same_losses_as_over_gloo_and_resumes(tmp_path: Path) -> None:
    expected = losses("torchrun", TRAINER, "--steps", 20, "--backend", "gloo", folder=tmp_path, over_sirtaki=False)
    found = losses("sirtakirun", TRAINER, "--steps", 20, "--folder", tmp_path / "ours", folder=tmp_path)
    assert sorted(found) == [10, 20]
    assert found == pytest.approx(expected, abs=2e-3)
    later = losses("torchrun", TRAINER, "--steps", 40, "--folder", tmp_path / "ours", "--resume", folder=tmp_path)
    assert later[40] < found[10] / 2
