"""All-gather: every rank gets the rows of all ranks, in the order of the ranks; they may have different numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sirtaki.comm.collectives.requests import Kind

from .all_reduce import grouped_allreduce
from .handles import Call, Deliver, everything, first, synchronize
from .process_sets import ProcessSet, engine_of, global_process_set


def _start(call: Call, tensors: Sequence[torch.Tensor], deliver: Deliver) -> int:
    call.require_strided(tensors)
    if any(tensor.dim() == 0 for tensor in tensors):
        call.refuse(IndexError("allgather joins tensors along their first dimension, and one of these has none"))
    return call.start(tensors, deliver)


def _call(name: str | None, process_set: ProcessSet, *, grouped: bool = False, wake: bool = True) -> Call:
    return Call(kind=Kind.ALLGATHER, name=name, process_set=process_set, grouped=grouped, wake=wake)


class _AllGather(torch.autograd.Function):
    """The gradient is this rank's rows of the averaged gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.process_set, ctx.rows = call.process_set, [tensor.shape[0] for tensor in tensors]
        return tuple(synchronize(_start(call, tensors, everything)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        averaged = grouped_allreduce(grads, process_set=ctx.process_set)
        rank = engine_of(ctx.process_set).rank
        rows_of = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set)
        before = rows_of[:rank].sum(0).tolist()
        own = [grad[start : start + count] for grad, start, count in zip(averaged, before, ctx.rows, strict=True)]
        return None, *own


def _differentiable(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if torch.is_grad_enabled() and any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
        return list(_AllGather.apply(call, *tensors))  # type: ignore[no-untyped-call]  # torch's
    results: list[torch.Tensor] = synchronize(_start(call, tensors, everything))
    return results


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Collective: the rows of all ranks, differentiable.

    Args:
        tensor: dimension 0 may differ by rank, the others must not.
        name: pairs the operation across ranks; None = by the order of unnamed operations.
        process_set: the ranks that take part.

    Raises:
        IndexError: the tensor has no dimension.
        ValueError: this rank is not in the process set.
        HorovodInternalError: on all ranks, if their sides do not fit together.
    """
    return _differentiable(_call(name, process_set, wake=False), [tensor])[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Collective: starts `allgather`, without gradients; returns a handle."""
    return _start(_call(name, process_set), [tensor], first)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Collective: `allgather` of several tensors in one operation."""
    return _differentiable(_call(name, process_set, grouped=True, wake=False), list(tensors))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Collective: starts `grouped_allgather`, without gradients; returns one handle."""
    return _start(_call(name, process_set, grouped=True), list(tensors), everything)
