"""Records that TensorBoard, Weights & Biases and MLflow keep of a job."""

import math
from pathlib import Path

import pytest
from integrations.launching import losses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def iterations() -> int:
    """Return the number of iterations of the script on two ranks."""
    return 3 * (math.ceil(1797 / 2) // 32)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a job with all three watchers."""
    folder = tmp_path_factory.mktemp("watched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        assert sorted(losses("sirtakirun", "watched_digits.py", folder=folder)) == [1, 2, 3]
    return folder


def test_tensorboard_has_kept_all_iterations(kept: Path, iterations: int) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = event_accumulator.EventAccumulator(str(kept / "runs"))
    found.Reload()
    times = found.Scalars("sirtaki/communication_s")
    assert [scalar.step for scalar in times] == list(range(1, iterations + 1))
    assert all(scalar.value > 0.0 for scalar in times)


def test_weights_and_biases_has_kept_all_iterations_and_the_decision(kept: Path, iterations: int) -> None:
    pytest.importorskip("wandb")
    (path,) = kept.glob("wandb/offline-run-*/*.wandb")
    records = path.read_bytes()  # in blocks of 32 KiB, whose ends may cut a name
    assert records.count(b"sirtaki/communication_s") >= iterations - len(records) // 2**15
    assert b"sirtaki/setting" in records


@pytest.mark.filterwarnings("ignore")  # of MLflow's own
def test_mlflow_has_kept_all_iterations_and_the_decision(kept: Path, iterations: int) -> None:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{kept}/mlflow.db")
    (run,) = client.search_runs(["0"])
    times = client.get_metric_history(run.info.run_id, "sirtaki.communication_s")
    assert sorted(metric.step for metric in times) == list(range(1, iterations + 1))
    assert "units" in run.data.tags["sirtaki.setting"]
    assert run.info.status == "FINISHED"
