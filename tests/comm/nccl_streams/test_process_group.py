"""What is asked of torch's NCCL process group, put to one that only takes notes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sirtaki.comm.nccl_streams.process_group import NcclGroup
from sirtaki.comm.transports.contract import ReduceOp


class Notes:
    """Stands where `ProcessGroupNCCL` would."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def size(self) -> int:
        return 3

    def allreduce(self, tensors: list[torch.Tensor], how: Any) -> str:
        self.asked.append(("allreduce", getattr(how, "reduceOp", how)))
        return "work"

    def shutdown(self) -> None:
        self.asked.append(("shutdown", None))


def asked_for(scale: float, dtype: torch.dtype) -> Any:
    notes = Notes()
    work = NcclGroup(notes).all_reduce_scaled(torch.zeros(4, dtype=dtype), scale)
    assert (work is None) == (not notes.asked)
    return notes.asked[0][1] if notes.asked else None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_averages_are_nccls_own(dtype: torch.dtype) -> None:
    assert asked_for(1 / 3, dtype) == dist.ReduceOp.AVG


def test_other_factors_are_multiplied_on_the_way_where_every_torch_can() -> None:
    assert asked_for(0.25, torch.float32) == dist.ReduceOp.PREMUL_SUM
    assert asked_for(0.25, torch.bfloat16) is None
    assert asked_for(1 / 3, torch.int64) is None


def test_sums_and_extremes_are_asked_for_as_they_are() -> None:
    notes = Notes()
    for op in ReduceOp:
        NcclGroup(notes).all_reduce(torch.zeros(1), op)
    assert [how for _, how in notes.asked] == [
        dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT,
    ]  # fmt: skip


def test_a_torch_that_cannot_tell_of_errors_tells_of_none() -> None:
    group = NcclGroup(Notes())
    assert group.error() == ""
    group.close()
