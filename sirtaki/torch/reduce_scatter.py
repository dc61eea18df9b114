"""Reduce-scatter: each rank gets its share of the rows of the reduction of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sirtaki.comm.collectives.requests import Kind

from .all_gather import grouped_allgather
from .compression import Compression, Compressor
from .handles import Call, Deliver, everything, first, synchronize
from .process_sets import ProcessSet, engine_of, global_process_set
from .reduction_ops import OP_NAMES, Adasum, Average, Sum, unfit


def _start(
    call: Call, tensors: Sequence[torch.Tensor], deliver: Deliver, op: int, prescale: float, postscale: float
) -> int:
    call.require_strided(tensors)
    if op == Adasum:
        call.refuse(NotImplementedError("reducescatter takes op=Average or op=Sum; Adasum is for allreduce only"))
    if op not in (Average, Sum):
        call.refuse(ValueError(f"reducescatter takes op=Average or op=Sum, not {op!r}"))
    if (error := unfit(op, tensors, call.process_set)) is not None:
        call.refuse(error)
    if any(tensor.dim() == 0 for tensor in tensors):
        call.refuse(ValueError("reducescatter deals out rows, and a tensor without dimensions has none"))
    count = engine_of(call.process_set).size if op == Average else 1
    return call.start(tensors, deliver, op=OP_NAMES[op], factors=(float(prescale), float(postscale) / count))


def _call(name: str | None, process_set: ProcessSet, *, grouped: bool = False, wake: bool = True) -> Call:
    return Call(kind=Kind.REDUCESCATTER, name=name, process_set=process_set, grouped=grouped, wake=wake)


class _ReduceScatter(torch.autograd.Function):
    """The gradient is an all-gather: of the gradient times the number of ranks for Sum, and times the factors."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, op: int, prescale: float, postscale: float, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.process_set = call.process_set
        ctx.factor = prescale * postscale * (engine_of(call.process_set).size if op == Sum else 1)
        return tuple(synchronize(_start(call, tensors, everything, op, prescale, postscale)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [grad * ctx.factor if ctx.factor != 1.0 else grad for grad in grads]
        return None, None, None, None, *grouped_allgather(scaled, process_set=ctx.process_set)


def _differentiable(
    call: Call, tensors: Sequence[torch.Tensor], op: int, prescale: float, postscale: float
) -> list[torch.Tensor]:
    if torch.is_grad_enabled() and any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
        return list(_ReduceScatter.apply(call, op, prescale, postscale, *tensors))  # type: ignore[no-untyped-call]  # torch's
    results: list[torch.Tensor] = synchronize(_start(call, tensors, everything, op, prescale, postscale))
    return results


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Collective: this rank's rows of the reduction, differentiable; the first `rows % size` ranks get one more.

    Raises:
        ValueError: the tensor has no dimension, the op is not Average or Sum, or this rank is not in the process set.
        NotImplementedError: the op is Adasum.
        HorovodInternalError: on all ranks, if their sides do not fit together.
    """
    compressed, context = compression.compress(tensor)
    call = _call(name, process_set, wake=False)
    return compression.decompress(
        _differentiable(call, [compressed], op, prescale_factor, postscale_factor)[0], context
    )


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Collective: starts `reducescatter`, without gradients; returns a handle."""
    return _start(_call(name, process_set), [tensor], first, op, prescale_factor, postscale_factor)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Collective: `reducescatter` of several tensors in one operation."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    call = _call(name, process_set, grouped=True, wake=False)
    results = _differentiable(call, [tensor for tensor, _ in compressed], op, prescale_factor, postscale_factor)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, compressed, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Collective: starts `grouped_reducescatter`, without gradients; returns one handle."""
    call = _call(name, process_set, grouped=True)
    return _start(call, list(tensors), everything, op, prescale_factor, postscale_factor)
