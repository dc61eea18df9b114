"""The same with a GPU: run by `make gpu`. Several ranks share one, which tests results and says nothing of speed."""

import pytest
import torch
from conformance.put_off_models import FIVE_MODELS
from conftest import RunRanks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
    pytest.mark.timeout(600),
]
ON_GPU = {"TEST_GPU": "1"}


def run(run_ranks: RunRanks, ranks: int, what: str, iterations: int = 1, timeout_s: float = 240.0) -> None:
    output = run_ranks("streams.py", ranks, what, iterations, env=ON_GPU, timeout_s=timeout_s).stdout
    assert output.count("ok ") == ranks


@pytest.mark.parametrize("what", ["nccl-conform", "staged-conform"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_route_passes_the_conformance_suite(run_ranks: RunRanks, what: str, ranks: int) -> None:
    run(run_ranks, ranks, what)


@pytest.mark.parametrize("what", ["nccl-train", "staged-train"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_equal_the_mean_under_changing_plans(run_ranks: RunRanks, what: str, ranks: int) -> None:
    run(run_ranks, ranks, what, 60)


def test_whatever_nccl_is_told_units_are_summed_right(run_ranks: RunRanks) -> None:
    run(run_ranks, 2, "nccl-ways")


def test_two_optimizers_share_the_gpu(run_ranks: RunRanks) -> None:
    run(run_ranks, 2, "nccl-two", 40)


def test_many_iterations_stay_right(run_ranks: RunRanks) -> None:
    run(run_ranks, 2, "nccl-train", 500, timeout_s=540.0)


def test_memory_stays_flat_over_a_thousand_steps(run_ranks: RunRanks) -> None:
    run(run_ranks, 1, "nccl-memory", 1000, timeout_s=300.0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_collective_takes_cuda_tensors(run_ranks: RunRanks, ranks: int) -> None:
    assert run_ranks("gpu_collectives.py", ranks, timeout_s=240.0).stdout.count("done") == ranks


@pytest.mark.parametrize(("ranks", "transport"), [(1, ""), (2, ""), (2, "nccl"), (2, "staged")])
def test_training_tunes_and_is_as_on_one_process(run_ranks: RunRanks, ranks: int, transport: str) -> None:
    env = {"TEST_DEVICE": "cuda", "SIRTAKI_WARMUP_ITERATIONS": "40", "SIRTAKI_TRANSPORT": transport}
    job = run_ranks("tuning.py", ranks, 60, env=env, timeout_s=240.0)
    assert job.stdout.count("done") == ranks
    assert "tuned in" in job.stderr


@pytest.mark.parametrize("transport", ["nccl", "staged"])
def test_updates_that_are_put_off_train_five_models_equally(run_ranks: RunRanks, transport: str) -> None:
    env = {
        "TEST_DEVICE": "cuda",
        "SIRTAKI_TEST_DOUBLE": "1",
        "SIRTAKI_WARMUP_ITERATIONS": "0",
        "SIRTAKI_UNIT_BYTES": "4096",
        "SIRTAKI_STREAMS": "3",
        "SIRTAKI_TRANSPORT": transport,
    }
    names = [case.__name__ for case in FIVE_MODELS]
    output = run_ranks("forward_overlap.py", 2, *names, env=env, timeout_s=300.0).stdout
    assert output.count("passed ") == 2 * len(names)
