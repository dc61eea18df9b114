"""Lightning trains over Sirtaki as over Gloo, started by anything, and goes on from its checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from integrations.launching import losses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SCRIPT = "lightning_digits.py"


def fit(launcher: str, folder: Path, *args: object, epochs: int = 3, over_sirtaki: bool = True) -> dict[int, float]:
    options = ("fit", "--trainer.max_epochs", epochs, *args)
    return losses(launcher, SCRIPT, *options, folder=folder, over_sirtaki=over_sirtaki)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses with Lightning's own strategy."""
    found = fit("torchrun", tmp_path_factory.mktemp("ddp"), "--trainer.strategy", "ddp", over_sirtaki=False)
    assert sorted(found) == [1, 2, 3]
    assert found[3] < 0.5
    return found


@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [("sirtakirun", "sirtaki"), ("torchrun", "sirtaki_tuned"), ("itself", "sirtaki")],
)
def test_losses_are_those_of_lightnings_own_strategy(
    tmp_path: Path, expected: dict[int, float], launcher: str, strategy: str
) -> None:
    assert fit(launcher, tmp_path, "--trainer.strategy", strategy) == pytest.approx(expected, abs=2e-4)


def test_training_resumes_from_a_checkpoint_and_accumulates_passes(tmp_path: Path) -> None:
    accumulate = ("--trainer.accumulate_grad_batches", 2)
    first = fit("sirtakirun", tmp_path, *accumulate, epochs=2)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    later = fit("sirtakirun", tmp_path, *accumulate, "--ckpt_path", checkpoint, epochs=4)
    assert (sorted(first), sorted(later)) == ([1, 2], [3, 4])
    assert later[4] < later[3] < first[2]


@pytest.mark.parametrize("place", [{}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}])
@pytest.mark.parametrize("strategy", ["'sirtaki'", "sirtaki.lightning.SirtakiStrategy()"])
def test_mpi_is_not_loaded_to_find_the_launcher(place: dict[str, str], strategy: str) -> None:
    program = (
        "import sys, lightning, sirtaki.lightning\n"
        f"lightning.Trainer(strategy={strategy}, accelerator='cpu', devices=1, logger=False)\n"
        "assert 'mpi4py.MPI' not in sys.modules\n"
    )
    place = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} if place else {}
    # As where mpiexec has started it: only the variables of torch's place may count then.
    environ = {**os.environ, **place, **({"OMPI_COMM_WORLD_SIZE": "1"} if place else {})}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=300)


def test_a_communication_hook_excludes_tuning() -> None:
    from sirtaki.errors import ConfigError
    from sirtaki.lightning import SirtakiStrategy

    with pytest.raises(ConfigError, match="remove ddp_comm_hook"):
        SirtakiStrategy(tuned=True, ddp_comm_hook=lambda state, bucket: bucket)
