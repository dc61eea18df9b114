"""Broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from typing import Any

import torch

from sirtaki.comm.collectives.requests import Kind

from .all_reduce import allreduce
from .handles import Call, Deliver, first, into_one, synchronize
from .process_sets import ProcessSet, engine_of, global_process_set, members


def _start(call: Call, tensor: torch.Tensor, root_rank: int, deliver: Deliver) -> int:
    engine_of(call.process_set)
    call.require_strided([tensor])
    ranks = members(call.process_set)
    if root_rank not in ranks:
        call.refuse(ValueError(f"root_rank {root_rank} is not one of the ranks {list(ranks)}"))
    return call.start([tensor], deliver, root=ranks.index(root_rank))


def _call(name: str | None, process_set: ProcessSet, *, wake: bool = True) -> Call:
    return Call(kind=Kind.BROADCAST, name=name, process_set=process_set, wake=wake)


class _Broadcast(torch.autograd.Function):
    """The gradient is an averaging all-reduce on the root and zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, call: Call, root_rank: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.process_set, ctx.root_rank = call.process_set, root_rank
        result: torch.Tensor = synchronize(_start(call, tensor, root_rank, first))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = allreduce(grads[0], process_set=ctx.process_set)
        is_root = members(ctx.process_set)[engine_of(ctx.process_set).rank] == ctx.root_rank
        return None, None, gradient if is_root else torch.zeros_like(gradient)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Collective: the root's tensor on every rank, differentiable; the input is not changed.

    Args:
        tensor: of the same shape and dtype on all ranks.
        root_rank: the source, by its rank among all ranks, also within a process set.
        name: pairs the operation across ranks; None = by the order of unnamed operations.
        process_set: the ranks that take part.

    Raises:
        ValueError: the root, or this rank, is not in the process set.
        HorovodInternalError: on all ranks, if their sides do not fit together.
    """
    call = _call(name, process_set, wake=False)
    if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        differentiable: torch.Tensor = _Broadcast.apply(call, root_rank, tensor)  # type: ignore[no-untyped-call]  # torch's
        return differentiable
    result: torch.Tensor = synchronize(_start(call, tensor, root_rank, first))
    return result


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Collective: starts `broadcast`, without gradients; returns a handle."""
    return _start(_call(name, process_set), tensor, root_rank, first)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Collective: overwrites `tensor` on every rank with the root's."""
    call = _call(name, process_set, wake=False)
    result: torch.Tensor = synchronize(_start(call, tensor, root_rank, into_one(tensor)))
    return result


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Collective: starts `broadcast_`; returns a handle. The tensor is overwritten when that is synchronised."""
    return _start(_call(name, process_set), tensor, root_rank, into_one(tensor))
