"""The values of `op=`, and which of them go with which tensors and ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from sirtaki.comm.collectives.requests import ADASUM

from .process_sets import ProcessSet, global_process_set, members

Average, Sum, Adasum, Min, Max, Product = range(6)

OP_NAMES = {Average: "sum", Sum: "sum", Adasum: ADASUM, Min: "min", Max: "max", Product: "product"}

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)

DTYPES = {
    Average: (*_INTEGERS, *_FLOATS, *_COMPLEX),
    Sum: (*_INTEGERS, *_FLOATS, *_COMPLEX),
    Adasum: _FLOATS,
    Min: (*_INTEGERS, *_FLOATS, torch.bool),
    Max: (*_INTEGERS, *_FLOATS, torch.bool),
    Product: (*_INTEGERS, *_FLOATS, *_COMPLEX, torch.bool),
}


def reduction(op: int | None, average: bool | None) -> int:
    """The operation that `op=` and the deprecated `average=` mean together.

    Raises:
        ValueError: both are given.
    """
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed", DeprecationWarning, stacklevel=3
        )
        return Average if average else Sum
    return Average if op is None else op


def unfit(op: int, tensors: Sequence[torch.Tensor], process_set: ProcessSet) -> Exception | None:
    """Why these tensors cannot be reduced so over these ranks, as the error to raise; None if they can."""
    if op not in OP_NAMES:
        return ValueError(f"op= takes Average, Sum, Adasum, Min, Max or Product, not {op!r}")
    for tensor in tensors:
        if tensor.dtype not in DTYPES[op]:
            names = ", ".join(str(dtype) for dtype in DTYPES[op])
            return ValueError(f"{tensor.dtype} cannot be reduced with this op; it takes {names}")
    if op == Adasum:
        count = len(members(process_set))
        if process_set is not global_process_set:
            return NotImplementedError("Adasum works on all ranks only, not on a process set")
        if count & (count - 1):
            return NotImplementedError(f"Adasum wants a number of ranks that is a power of two, not {count}")
    return None
