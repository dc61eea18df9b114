"""Eager operations on tensors over the control plane, in the thread that agreed on them.

Requests are non-blocking and tested in a loop, so that a lost job ends the wait. Tensors on other devices than the
CPU are copied to it and back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sirtaki.comm.control.communicator import Communicator, Op, Test
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.transports.scaling import HALF_DTYPES, scale_

from .adasum import adasum_
from .requests import ADASUM, Kind, Signature

Tensors = list[torch.Tensor]

SPIN_S = 3e-3
"""All ranks are here when a transfer begins, so most end within this."""

NAP_S = 50e-6
"""Between tests of a longer one: it moves only while it is tested, so naps are short."""

TESTS_A_YIELD = 8


class Ranks:
    """The ranks that take part, and how to wait for them."""

    def __init__(self, comm: Communicator, failures: FailureBoard) -> None:
        """Keeps `comm`, which nobody else uses at the same time."""
        self.comm, self._failures = comm, failures
        self.rank, self.size = comm.rank, comm.size

    def wait(self, test: Test) -> None:
        """Returns once the operation is complete.

        Raises:
            CommError: the job failed meanwhile.
        """
        if test():
            return
        give_up_spinning = time.perf_counter() + SPIN_S
        while time.perf_counter() < give_up_spinning:
            for _ in range(TESTS_A_YIELD):
                if test():
                    return
            os.sched_yield()
        while not test():
            self._failures.check()
            time.sleep(NAP_S)

    def all_gather(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Collective: the small arrays of all ranks, `(size, *values.shape)`."""
        gathered = np.empty((self.size, *values.shape), dtype=np.int64)
        self.wait(self.comm.all_gather(values, gathered))
        return gathered


Batch = Sequence[tuple[Signature, Sequence[torch.Tensor]]]
"""Operations of this rank, with tensors in the signatures' shapes."""


def perform(batch: Batch, ranks: Ranks) -> list[Tensors]:
    """Collective: runs one operation, or several all-reduces (as `requests.batches` joins them) in one message.

    The inputs are not changed.

    Returns:
        For each operation, new tensors on the inputs' device, contiguous.
    """
    signature = batch[0][0]
    inputs = [[_on_host(tensor) for tensor in tensors] for _, tensors in batch]
    if len(batch) == 1:
        results = [PERFORMERS[signature.kind](signature, inputs[0], ranks)]
    else:
        everything = iter(_all_reduce(signature, list(chain.from_iterable(inputs)), ranks))
        results = [list(islice(everything, len(tensors))) for tensors in inputs]
    return [_on_device_of(tensors, result) for (_, tensors), result in zip(batch, results, strict=True)]


def zeros_for(signature: Signature) -> Tensors:
    """What a rank that has joined contributes."""
    return [
        torch.zeros(shape, dtype=getattr(torch, dtype))
        for shape, dtype in zip(signature.shapes, signature.dtypes, strict=True)
    ]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()


def _on_device_of(tensors: Sequence[torch.Tensor], results: Tensors) -> Tensors:
    if not tensors or tensors[0].device.type == "cpu":
        return results
    device = tensors[0].device
    moved = [result.to(device) for result in results]
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # the waiting thread uses another stream
    return moved


def _all_reduce(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """All tensors of one dtype travel in one message."""
    if signature.op == ADASUM:
        return _adasum(signature, inputs, ranks)
    if len(inputs) == 1:
        return [_reduced(inputs[0].reshape(-1), signature, ranks).view(inputs[0].shape)]
    results: Tensors = [torch.empty(0)] * len(inputs)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(inputs):
        by_dtype.setdefault(tensor.dtype, []).append(number)
    for numbers in by_dtype.values():
        flat = _reduced(torch.cat([inputs[number].reshape(-1) for number in numbers]), signature, ranks)
        sizes = [inputs[number].numel() for number in numbers]
        for number, part in zip(numbers, torch.split(flat, sizes), strict=True):
            # Members of a group get memory of their own: one that is kept must not keep all.
            results[number] = part.clone().view(inputs[number].shape)
    return results


def _reduced(flat: torch.Tensor, signature: Signature, ranks: Ranks) -> torch.Tensor:
    """Collective: a 1-d tensor, scaled, reduced and scaled."""
    received = _work_copy(flat, signature.factors[0])
    if received.numel():
        ranks.wait(ranks.comm.all_reduce(_reducible(received), Op(signature.op)))
    scale_(received, signature.factors[1])
    return received.to(flat.dtype)


def _work_copy(flat: torch.Tensor, prescale: float) -> torch.Tensor:
    """A scaled copy in a dtype that every backend knows: halves as float32."""
    copy = flat.float() if flat.dtype in HALF_DTYPES else flat.clone()
    scale_(copy, prescale)
    return copy


def _reducible(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor as it is reduced: bool as the bytes 0 and 1."""
    array: npt.NDArray[Any] = (tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor).numpy()
    return array


def _adasum(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """Each tensor by itself: its direction decides how it is combined."""
    results = []
    for tensor in inputs:
        flat = _work_copy(tensor.reshape(-1), signature.factors[0])
        adasum_(flat, comm=ranks.comm, wait=ranks.wait)
        scale_(flat, signature.factors[1])
        results.append(flat.to(tensor.dtype).view(tensor.shape))
    return results


def _broadcast(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    results = [tensor.clone() for tensor in inputs]
    for result in results:
        ranks.wait(ranks.comm.broadcast(_bytes(result), signature.root))
    return results


def _barrier(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    ranks.wait(ranks.comm.barrier())
    return []


def _all_gather(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """Dimension 0 may differ between ranks."""
    rows = ranks.all_gather(np.array([tensor.shape[0] for tensor in inputs], dtype=np.int64))
    results = []
    for tensor, rows_of in zip(inputs, rows.T, strict=True):
        result = tensor.new_empty((int(rows_of.sum()), *tensor.shape[1:]))
        counts = (rows_of * _row_bytes(tensor)).tolist()
        ranks.wait(ranks.comm.all_gather(_bytes(tensor), _bytes(result), counts))
        results.append(result)
    return results


def _all_to_all(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """Inputs: the tensor, and how many of its rows go to each rank (int32); the results are of the same form."""
    tensor, splits = inputs
    sent = splits.numpy().astype(np.int64)
    received = np.empty_like(sent)
    ranks.wait(ranks.comm.all_to_all(sent, received))
    result = tensor.new_empty((int(received.sum()), *tensor.shape[1:]))
    row_bytes = _row_bytes(tensor)
    counts = (sent * row_bytes).tolist(), (received * row_bytes).tolist()
    ranks.wait(ranks.comm.all_to_all(_bytes(tensor), _bytes(result), counts))
    return [result, torch.from_numpy(received.astype(np.int32))]


def _reduce_scatter(signature: Signature, inputs: Tensors, ranks: Ranks) -> Tensors:
    """Rows over ranks; the first `rows % size` ranks get one more."""
    results = []
    for tensor in inputs:
        bounds = row_bounds(tensor.shape[0], ranks.size)
        row_numel = tensor.shape[1:].numel()
        counts = [(stop - start) * row_numel for start, stop in pairwise(bounds)]
        sent = _work_copy(tensor.reshape(-1), signature.factors[0])
        part = sent.new_empty(counts[ranks.rank])
        if sent.numel():
            ranks.wait(ranks.comm.reduce_scatter(_reducible(sent), _reducible(part), counts, Op(signature.op)))
        scale_(part, signature.factors[1])
        own_rows = bounds[ranks.rank + 1] - bounds[ranks.rank]
        results.append(part.to(tensor.dtype).view(own_rows, *tensor.shape[1:]))
    return results


def row_bounds(rows: int, size: int) -> list[int]:
    """First row of each rank's part and, last, the number of rows: `(size + 1,)`."""
    return [rank * (rows // size) + min(rank, rows % size) for rank in range(size + 1)]


def _row_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.dtype.itemsize


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous CPU tensor, as it travels, whatever its dtype."""
    if tensor.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    # Not reshape(-1): dimensions of length 1 may have any stride, and the result would inherit it.
    array: npt.NDArray[np.uint8] = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return array


PERFORMERS: dict[Kind, Callable[[Signature, Tensors, Ranks], Tensors]] = {
    Kind.ALLREDUCE: _all_reduce,
    Kind.BROADCAST: _broadcast,
    Kind.BARRIER: _barrier,
    Kind.ALLGATHER: _all_gather,
    Kind.ALLTOALL: _all_to_all,
    Kind.REDUCESCATTER: _reduce_scatter,
}
