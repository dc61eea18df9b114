"""Values that each rank has computed from its part of a batch, put together; on one rank they are what they were."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from sirtaki.torch.all_reduce import allreduce
from sirtaki.torch.basics import size
from sirtaki.torch.functions import broadcast_object
from sirtaki.torch.reduction_ops import Average, Sum

T = TypeVar("T")


def average(value: Any) -> Any:
    """Collective: the mean over the ranks of a number, of each in a container, or of a tensor, which is detached.

    For what is a mean over the samples of a rank.
    """
    return _reduced(value, Average)


def total(value: Any) -> Any:
    """Collective: the sum over the ranks of a number, of each in a container, or of a tensor, which is detached.

    For what is a sum over the samples of a rank, or counts them.
    """
    return _reduced(value, Sum)


def _reduced(value: Any, op: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach() if size() == 1 else allreduce(value.detach(), op=op)
    if size() == 1:
        return value
    if isinstance(value, dict):
        return {key: _reduced(there, op) for key, there in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(allreduce(torch.tensor(value, dtype=torch.float64), op=op).tolist())
    if op == Sum and isinstance(value, int):
        return int(allreduce(torch.tensor(value), op=op))
    return float(allreduce(torch.tensor(float(value), dtype=torch.float64), op=op))


def agreed(value: T) -> T:
    """Collective: rank 0's value; for what all ranks have computed alike, but for the last bits."""
    if size() == 1:
        return value
    shared: T = broadcast_object(value, root_rank=0)
    return shared
