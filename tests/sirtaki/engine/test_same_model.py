"""Parameters that differ between ranks are named: their shapes before training, their values at its first step."""

import pytest
import torch
from conftest import RunRanks

from sirtaki.engine.reducing.checks import checksums


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_the_first_parameter_that_differs_is_named_with_the_remedy(run_ranks: RunRanks, ranks: int) -> None:
    job = run_ranks("same_model.py", ranks, env={"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "0"})
    assert job.stdout.count("named") == ranks
    assert job.stderr.count("the ranks begin with different parameters (the first that differs is") == 1
    assert "first that differs is '1.weight'); " in job.stderr
    assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in job.stderr


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_checksums_depend_on_every_bit_of_any_dtype_and_layout(dtype: torch.dtype) -> None:
    for shape in ((), (1,), (3, 4, 5, 6), (1000,)):
        param = torch.rand(shape, dtype=torch.float64).to(dtype)
        other = param.clone()
        other.view(-1)[0] = other.view(-1)[0] * (1 + (2**-7 if dtype is torch.bfloat16 else 2**-10)) + 2**-8
        assert checksums([param]) == checksums([param.clone()])
        assert checksums([param]) != checksums([other])
    image = torch.rand(2, 3, 4, 5).to(dtype)
    assert checksums([image.to(memory_format=torch.channels_last), image]).shape == (2,)


def test_checksums_accept_empty_tensors_and_views() -> None:
    matrix = torch.rand(6, 8)
    assert checksums([torch.empty(0), matrix[:, ::2]])[1] == checksums([matrix[:, ::2].clone()])[0]
