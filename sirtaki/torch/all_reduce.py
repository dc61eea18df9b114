"""All-reduce: every rank gets the reduction of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sirtaki.comm.collectives.requests import Kind

from .compression import Compression, Compressor
from .handles import Call, Deliver, everything, first, into, into_one, synchronize
from .process_sets import ProcessSet, engine_of, global_process_set
from .reduction_ops import OP_NAMES, Average, reduction, unfit


def _start(
    call: Call, tensors: Sequence[torch.Tensor], deliver: Deliver, op: int, prescale: float, postscale: float
) -> int:
    call.require_strided(tensors)
    if (error := unfit(op, tensors, call.process_set)) is not None:
        call.refuse(error)
    count = engine_of(call.process_set).size if op == Average else 1
    factors = (float(prescale), float(postscale) / count)
    return call.start(tensors, deliver, op=OP_NAMES[op], factors=factors)


def _call(name: str | None, process_set: ProcessSet, *, grouped: bool = False, wake: bool = True) -> Call:
    return Call(kind=Kind.ALLREDUCE, name=name, process_set=process_set, grouped=grouped, wake=wake)


class _AllReduce(torch.autograd.Function):
    """The gradient of an all-reduce is an all-reduce with the same operation and factors."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, op: int, prescale: float, postscale: float, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.how = (call, op, prescale, postscale)
        return tuple(synchronize(_start(call, tensors, everything, op, prescale, postscale)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, op, prescale, postscale = ctx.how
        again = _call(None, call.process_set, grouped=call.grouped, wake=False)
        return None, None, None, None, *_AllReduce.apply(again, op, prescale, postscale, *grads)  # type: ignore[no-untyped-call]  # torch's


def _differentiable(
    call: Call, tensors: Sequence[torch.Tensor], op: int, prescale: float, postscale: float
) -> list[torch.Tensor]:
    if torch.is_grad_enabled() and any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
        return list(_AllReduce.apply(call, op, prescale, postscale, *tensors))  # type: ignore[no-untyped-call]  # torch's
    results: list[torch.Tensor] = synchronize(_start(call, tensors, everything, op, prescale, postscale))
    return results


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Collective: `tensor` reduced over the ranks, differentiable; the input is not changed.

    Args:
        tensor: of the same shape and dtype on all ranks.
        average: deprecated; True = Average, False = Sum.
        name: pairs the operation across ranks; None = by the order of unnamed operations.
        compression: how the tensor travels.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.

    Raises:
        ValueError: an argument is invalid, or this rank is not in the process set.
        HorovodInternalError: on all ranks, if their sides do not fit together.
    """
    compressed, context = compression.compress(tensor)
    call = _call(name, process_set, wake=False)
    result = _differentiable(call, [compressed], reduction(op, average), prescale_factor, postscale_factor)[0]
    return compression.decompress(result, context)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Collective: starts `allreduce` into a new tensor, without gradients; returns a handle."""
    operation = reduction(op, average)
    return _start(_call(name, process_set), [tensor], first, operation, prescale_factor, postscale_factor)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Collective: reduces `tensor` in place; see `allreduce`."""
    call, operation = _call(name, process_set, wake=False), reduction(op, average)
    result: torch.Tensor = synchronize(
        _start(call, [tensor], into_one(tensor), operation, prescale_factor, postscale_factor)
    )
    return result


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Collective: starts `allreduce_`; returns a handle. The tensor is overwritten when that is synchronised."""
    operation = reduction(op, average)
    return _start(_call(name, process_set), [tensor], into_one(tensor), operation, prescale_factor, postscale_factor)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Collective: `allreduce` of several tensors in one operation: all are reduced, or none."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    call = _call(name, process_set, grouped=True, wake=False)
    inputs = [tensor for tensor, _ in compressed]
    results = _differentiable(call, inputs, reduction(op, average), prescale_factor, postscale_factor)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, compressed, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Collective: starts `grouped_allreduce` into new tensors, without gradients; returns one handle."""
    call, operation = _call(name, process_set, grouped=True), reduction(op, average)
    return _start(call, list(tensors), everything, operation, prescale_factor, postscale_factor)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Collective: `grouped_allreduce` in place."""
    call, operation = _call(name, process_set, grouped=True, wake=False), reduction(op, average)
    results: list[torch.Tensor] = synchronize(
        _start(call, list(tensors), into(tensors), operation, prescale_factor, postscale_factor)
    )
    return results


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Collective: starts `grouped_allreduce_`; returns one handle."""
    call, operation = _call(name, process_set, grouped=True), reduction(op, average)
    return _start(call, list(tensors), into(tensors), operation, prescale_factor, postscale_factor)
