"""PyTorch's operations in terms of sums, smallest and largest elements and products."""

import pytest
import torch
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import ReduceOp as TorchOp

from sirtaki.comm.transports.contract import ReduceOp
from sirtaki.torch.distributed.process_group import ReduceRecipe


@pytest.mark.parametrize(
    ("op", "lane_op"),
    [
        (TorchOp.SUM, ReduceOp.SUM),
        (TorchOp.AVG, ReduceOp.SUM),
        (TorchOp.MIN, ReduceOp.MIN),
        (TorchOp.MAX, ReduceOp.MAX),
        (TorchOp.PRODUCT, ReduceOp.PRODUCT),
        (TorchOp.BAND, None),
        (_make_nccl_premul_sum(0.5), ReduceOp.SUM),
    ],
)
def test_lanes_do_what_they_can(op: TorchOp, lane_op: ReduceOp | None) -> None:
    assert ReduceRecipe.of(op, 3).lane_op is lane_op


def test_an_average_is_a_sum_that_is_divided_and_integers_lose_their_fraction() -> None:
    recipe = ReduceRecipe.of(TorchOp.AVG, 4)
    for dtype, wanted in ((torch.float64, [1.75, -1.75]), (torch.int64, [1, -1])):
        tensor = torch.tensor([7, -7], dtype=dtype)
        recipe.prepare_(tensor)
        recipe.divide_(tensor)
        assert tensor.tolist() == wanted


def test_a_scaled_sum_is_one_of_scaled_tensors() -> None:
    for factor in (0.5, torch.tensor(0.5)):
        recipe = ReduceRecipe.of(_make_nccl_premul_sum(factor), 4)
        recipe.prepare_(tensor := torch.tensor([3.0]))
        recipe.divide_(tensor)
        assert tensor.tolist() == [1.5]


def test_a_plain_sum_leaves_tensors_alone() -> None:
    recipe = ReduceRecipe.of(TorchOp.SUM, 4)
    recipe.prepare_(tensor := torch.tensor([3.0]))
    recipe.divide_(tensor)
    assert tensor.tolist() == [3.0]
