"""On a GPU that two ranks share, what `bench/gpu.sh` has no time for. Run by `make gpu`."""

import pytest
import torch
from conformance.put_off_models import FIVE_MODELS
from conftest import RunRanks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("transport", ["nccl", "staged"])
def test_deferred_updates_train_five_models_equally(run_ranks: RunRanks, transport: str) -> None:
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
