"""All-to-all: every rank sends some of its rows to each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sirtaki.comm.collectives.requests import Kind

from .handles import Call, Deliver, synchronize
from .process_sets import ProcessSet, engine_of, global_process_set

Splits = torch.Tensor | Sequence[int]


def _start(call: Call, tensor: torch.Tensor, splits: Splits | None, deliver: Deliver) -> int:
    call.require_strided([tensor])
    return call.start([tensor, _rows_for_each(call, tensor, splits)], deliver)


def _rows_for_each(call: Call, tensor: torch.Tensor, splits: Splits | None) -> torch.Tensor:
    """How many rows go to each rank, `(size,)` int32 on the CPU."""
    size = engine_of(call.process_set).size
    if tensor.dim() == 0:
        call.refuse(ValueError("alltoall deals out rows, and a tensor without dimensions has none"))
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            call.refuse(ValueError(f"alltoall without splits: {rows} rows cannot be dealt out evenly to {size} ranks"))
        return torch.full((size,), rows // size, dtype=torch.int32)
    try:
        given = torch.as_tensor(splits)
        if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
            raise TypeError(f"they are {given.dtype}")
        counts = given.detach().to("cpu", torch.int32)
    except (TypeError, ValueError, RuntimeError) as err:
        call.refuse(ValueError(f"splits takes whole numbers of rows, not {splits!r} ({err})"))
    if counts.shape != (size,) or bool((counts < 0).any()):
        call.refuse(ValueError(f"splits takes {size} numbers of rows, one for each rank, not {splits!r}"))
    if int(counts.sum()) > rows:
        call.refuse(
            ValueError(
                f"Sum of splits entries is greater than the first dimension of tensor: {splits!r} of {rows} rows"
            )
        )
    return counts


def _deliver_to(tensor: torch.Tensor, splits: Splits | None) -> Deliver:
    def deliver(results: list[torch.Tensor]) -> Any:
        received, received_splits = results
        if splits is None:
            return received
        device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")
        return received, received_splits.to(device)

    return deliver


def _call(name: str | None, process_set: ProcessSet, *, wake: bool = True) -> Call:
    return Call(kind=Kind.ALLTOALL, name=name, process_set=process_set, wake=wake)


class _AllToAll(torch.autograd.Function):
    """The gradient goes back the way the rows came."""

    @staticmethod
    def forward(ctx: Any, call: Call, splits: Splits | None, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.process_set, ctx.rows = call.process_set, tensor.shape[0] if tensor.dim() else 0
        received, received_splits = synchronize(_start(call, tensor, splits, tuple))
        ctx.received_splits = received_splits.cpu()
        ctx.mark_non_differentiable(received_splits)
        return received, received_splits

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back, _ = alltoall(grads[0], splits=ctx.received_splits, process_set=ctx.process_set)
        if back.shape[0] < ctx.rows:  # rows that went nowhere
            back = torch.cat([back, back.new_zeros(ctx.rows - back.shape[0], *back.shape[1:])])
        return None, None, back


def alltoall(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # Any: a tensor, or a pair, as Horovod
    """Collective: the rows that all ranks send to this one, differentiable.

    Args:
        tensor: dimension 0 may differ by rank, the others must not.
        splits: how many rows go to each rank, in order, `(size,)`; None = the same number to each.
        name: pairs the operation across ranks; None = by the order of unnamed operations.
        process_set: the ranks that take part.

    Returns:
        The received rows; with splits a pair of them and of how many came from each rank, `(size,)` int32.

    Raises:
        ValueError: the splits do not fit the tensor, or this rank is not in the process set.
        HorovodInternalError: on all ranks, if their sides do not fit together.
    """
    call, deliver = _call(name, process_set, wake=False), _deliver_to(tensor, splits)
    if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        return deliver(list(_AllToAll.apply(call, splits, tensor)))  # type: ignore[no-untyped-call]  # torch's
    return synchronize(_start(call, tensor, splits, deliver))


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Collective: starts `alltoall`, without gradients; returns a handle."""
    return _start(_call(name, process_set), tensor, splits, _deliver_to(tensor, splits))
