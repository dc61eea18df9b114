"""Scaling in place, as Horovod scales."""

import pytest
import torch

from sirtaki.comm.transports.contract import scale_


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_tensors_are_multiplied_and_rounded_once(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, 3.0, 1000.0], dtype=dtype)
    scale_(tensor, 1 / 3)
    wanted = (torch.tensor([1.0, 3.0, 1000.0], dtype=torch.float64) / 3).to(dtype)
    torch.testing.assert_close(tensor, wanted)


def test_integers_are_truncated_towards_zero() -> None:
    tensor = torch.tensor([3, -3, 7], dtype=torch.int32)
    scale_(tensor, 0.5)
    assert tensor.tolist() == [1, -1, 3]


def test_large_integers_keep_what_a_float64_holds() -> None:
    tensor = torch.tensor([2**52 + 2], dtype=torch.int64)
    scale_(tensor, 0.5)
    assert tensor.tolist() == [2**51 + 1]


def test_non_contiguous_and_empty_tensors_are_scaled_too() -> None:
    base = torch.ones(4, 4)
    scale_(base[:, 1], 2.0)
    assert base.sum() == 20
    scale_(torch.empty(0, dtype=torch.int64), 0.5)
