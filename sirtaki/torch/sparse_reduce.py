"""All-reduce of sparse tensors: the entries of all ranks are gathered, and those in one place add up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sirtaki.comm.collectives.sparse import SparseSum

from .process_sets import ProcessSet, engine_of, global_process_set
from .reduction_ops import Average, Sum


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Collective: starts the reduction of a sparse COO tensor.

    Args:
        tensor: of the same dense shape and dtype on all ranks; it may have any number of entries.
        name: pairs the operation across ranks; None = by the order of unnamed operations.
        op: Average or Sum.
        process_set: the ranks that take part.

    Returns:
        A function that blocks until the result is there, and gives it: a sparse tensor, not coalesced.

    Raises:
        ValueError: the tensor is not sparse, the op is another one, or this rank is not in the process set.
    """
    if not tensor.is_sparse:
        raise ValueError(f"sparse_allreduce_async() takes a sparse COO tensor, not {tensor.layout}; use allreduce()")
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async() takes op=Average or op=Sum, not {op!r}")
    engine = engine_of(process_set)
    total = SparseSum(engine, tensor, name)
    if op == Sum:
        return total.result

    def average() -> torch.Tensor:
        summed = total.result()
        values = summed._values()
        values = values / engine.size if values.is_floating_point() else values.div(engine.size, rounding_mode="trunc")
        return torch.sparse_coo_tensor(summed._indices(), values, summed.size(), check_invariants=False)

    return average
