"""Eager operations on tensors over MPI, blocking, in the thread of the engine that agreed on them.

Tensors on other devices than the CPU are copied to it and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .mpi_lanes import mpi_all_reduce_
from .requests import Kind, Signature
from .scaling import scale_
from .transport import ReduceOp

if TYPE_CHECKING:
    from mpi4py import MPI

Tensors = list[torch.Tensor]


def perform(signature: Signature, tensors: Sequence[torch.Tensor] | None, comm: MPI.Comm) -> Tensors:
    """Collective: runs one operation; the inputs are not changed.

    Args:
        signature: of this rank.
        tensors: this rank's, in the signature's shapes; None = take part with zeros (all-reduce only).
        comm: the ranks that take part.

    Returns:
        New tensors on the inputs' device, contiguous.
    """
    if tensors is None:
        tensors = [
            torch.zeros(shape, dtype=getattr(torch, dtype))
            for shape, dtype in zip(signature.shapes, signature.dtypes, strict=True)
        ]
    inputs = [tensor.detach().to("cpu").contiguous() for tensor in tensors]
    results = PERFORMERS[signature.kind](signature, inputs, comm)
    device = tensors[0].device if tensors else torch.device("cpu")
    return [result.to(device) for result in results]


def _all_reduce(signature: Signature, inputs: Tensors, comm: MPI.Comm) -> Tensors:
    """All tensors of one dtype travel in one message."""
    results: Tensors = [torch.empty(0)] * len(inputs)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(inputs):
        by_dtype.setdefault(tensor.dtype, []).append(number)
    prescale, postscale = signature.factors
    for numbers in by_dtype.values():
        flat = torch.cat([inputs[number].reshape(-1) for number in numbers])
        scale_(flat, prescale)
        mpi_all_reduce_(flat, comm=comm, op=ReduceOp(signature.op), scale=postscale)
        sizes = [inputs[number].numel() for number in numbers]
        for number, part in zip(numbers, torch.split(flat, sizes), strict=True):
            # Members of a group get memory of their own: one that is kept must not keep all.
            results[number] = (part if len(numbers) == 1 else part.clone()).view(inputs[number].shape)
    return results


def _broadcast(signature: Signature, inputs: Tensors, comm: MPI.Comm) -> Tensors:
    results = [tensor.clone() for tensor in inputs]
    for result in results:
        comm.Bcast(_bytes(result), root=signature.root)
    return results


def _barrier(signature: Signature, inputs: Tensors, comm: MPI.Comm) -> Tensors:
    comm.Barrier()
    return []


def _all_gather(signature: Signature, inputs: Tensors, comm: MPI.Comm) -> Tensors:
    """Dimension 0 may differ between ranks."""
    results = []
    for tensor in inputs:
        rows = np.array(comm.allgather(tensor.shape[0]), dtype=np.int64)
        result = torch.empty((int(rows.sum()), *tensor.shape[1:]), dtype=tensor.dtype)
        row_bytes = tensor[:0].new_empty(tensor.shape[1:]).nbytes
        comm.Allgatherv(_bytes(tensor), [_bytes(result), (rows * row_bytes).tolist()])
        results.append(result)
    return results


def _all_to_all(signature: Signature, inputs: Tensors, comm: MPI.Comm) -> Tensors:
    """Inputs: the tensor, and how many of its rows go to each rank (int32); the results are of the same form."""
    tensor, splits = inputs
    sent = splits.numpy().astype(np.int64)
    received = np.empty_like(sent)
    comm.Alltoall(sent, received)
    result = torch.empty((int(received.sum()), *tensor.shape[1:]), dtype=tensor.dtype)
    row_bytes = tensor[:0].new_empty(tensor.shape[1:]).nbytes
    comm.Alltoallv([_bytes(tensor), (sent * row_bytes).tolist()], [_bytes(result), (received * row_bytes).tolist()])
    return [result, torch.from_numpy(received.astype(np.int32))]


def _reduce_scatter(signature: Signature, inputs: Tensors, comm: MPI.Comm) -> Tensors:
    """Rows over ranks; the first `rows % size` ranks get one more."""
    results = []
    prescale, postscale = signature.factors
    for tensor in inputs:
        flat = tensor.clone()
        scale_(flat, prescale)
        mpi_all_reduce_(flat, comm=comm, op=ReduceOp(signature.op), scale=postscale)
        bounds = row_bounds(tensor.shape[0], comm.size)
        results.append(flat[bounds[comm.rank] : bounds[comm.rank + 1]].clone())
    return results


def row_bounds(rows: int, size: int) -> list[int]:
    """First row of each rank's part and, last, the number of rows: `(size + 1,)`."""
    return [rank * (rows // size) + min(rank, rows % size) for rank in range(size + 1)]


def _bytes(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous CPU tensor, as MPI takes it, whatever its dtype."""
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, dtype=np.uint8)


PERFORMERS = {
    Kind.ALLREDUCE: _all_reduce,
    Kind.BROADCAST: _broadcast,
    Kind.BARRIER: _barrier,
    Kind.ALLGATHER: _all_gather,
    Kind.ALLTOALL: _all_to_all,
    Kind.REDUCESCATTER: _reduce_scatter,
}
