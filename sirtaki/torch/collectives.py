"""Horovod's collectives on tensors, synchronous and asynchronous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sirtaki.comm.collectives.engine import SparseSum
from sirtaki.comm.collectives.operations import Kind
from sirtaki.engine import job

from .compression import Compression, Compressor
from .process_sets import (
    OP_NAMES,
    Adasum,
    Average,
    Call,
    Deliver,
    ProcessSet,
    Sum,
    engine_of,
    everything,
    first,
    global_process_set,
    into,
    into_one,
    members,
    reduction,
    synchronize,
    unfit,
)


def _start_all_reduce(
    call: Call, tensors: Sequence[torch.Tensor], deliver: Deliver, op: int, prescale: float, postscale: float
) -> int:
    call.require_strided(tensors)
    if (error := unfit(op, tensors, call.process_set)) is not None:
        call.refuse(error)
    count = engine_of(call.process_set).size if op == Average else 1
    factors = (float(prescale), float(postscale) / count)
    return call.start(tensors, deliver, op=OP_NAMES[op], factors=factors)


def _call(kind: Kind, name: str | None, process_set: ProcessSet, *, grouped: bool = False, wake: bool = True) -> Call:
    return Call(kind=kind, name=name, process_set=process_set, grouped=grouped, wake=wake)


def _differentiable(
    function: type[torch.autograd.Function],
    start: Callable[..., int],
    call: Call,
    tensors: Sequence[torch.Tensor],
    *how: float,
) -> list[torch.Tensor]:
    """The results of a collective on several tensors, through its autograd function where a gradient is wanted."""
    if torch.is_grad_enabled() and any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
        return list(function.apply(call, *how, *tensors))  # type: ignore[no-untyped-call]  # torch's
    results: list[torch.Tensor] = synchronize(start(call, tensors, everything, *how))
    return results


class _AllReduce(torch.autograd.Function):
    """The gradient of an all-reduce is an all-reduce with the same operation and factors."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, op: int, prescale: float, postscale: float, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.how = (call, op, prescale, postscale)
        return tuple(synchronize(_start_all_reduce(call, tensors, everything, op, prescale, postscale)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, op, prescale, postscale = ctx.how
        again = _call(Kind.ALLREDUCE, None, call.process_set, grouped=call.grouped, wake=False)
        return None, None, None, None, *_AllReduce.apply(again, op, prescale, postscale, *grads)  # type: ignore[no-untyped-call]  # torch's


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
    call = _call(Kind.ALLREDUCE, name, process_set, wake=False)
    result = _differentiable(
        _AllReduce, _start_all_reduce, call, [compressed], reduction(op, average), prescale_factor, postscale_factor
    )[0]
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
    return _start_all_reduce(
        _call(Kind.ALLREDUCE, name, process_set), [tensor], first, operation, prescale_factor, postscale_factor
    )


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
    call, operation = _call(Kind.ALLREDUCE, name, process_set, wake=False), reduction(op, average)
    result: torch.Tensor = synchronize(
        _start_all_reduce(call, [tensor], into_one(tensor), operation, prescale_factor, postscale_factor)
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
    return _start_all_reduce(
        _call(Kind.ALLREDUCE, name, process_set),
        [tensor],
        into_one(tensor),
        operation,
        prescale_factor,
        postscale_factor,
    )


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
    call = _call(Kind.ALLREDUCE, name, process_set, grouped=True, wake=False)
    inputs = [tensor for tensor, _ in compressed]
    results = _differentiable(
        _AllReduce, _start_all_reduce, call, inputs, reduction(op, average), prescale_factor, postscale_factor
    )
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
    call, operation = _call(Kind.ALLREDUCE, name, process_set, grouped=True), reduction(op, average)
    return _start_all_reduce(call, list(tensors), everything, operation, prescale_factor, postscale_factor)


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
    call, operation = _call(Kind.ALLREDUCE, name, process_set, grouped=True, wake=False), reduction(op, average)
    results: list[torch.Tensor] = synchronize(
        _start_all_reduce(call, list(tensors), into(tensors), operation, prescale_factor, postscale_factor)
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
    call, operation = _call(Kind.ALLREDUCE, name, process_set, grouped=True), reduction(op, average)
    return _start_all_reduce(call, list(tensors), into(tensors), operation, prescale_factor, postscale_factor)


def _start_all_gather(call: Call, tensors: Sequence[torch.Tensor], deliver: Deliver) -> int:
    call.require_strided(tensors)
    if any(tensor.dim() == 0 for tensor in tensors):
        call.refuse(IndexError("allgather joins tensors along their first dimension, and one of these has none"))
    return call.start(tensors, deliver)


class _AllGather(torch.autograd.Function):
    """The gradient is this rank's rows of the averaged gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.process_set, ctx.rows = call.process_set, [tensor.shape[0] for tensor in tensors]
        return tuple(synchronize(_start_all_gather(call, tensors, everything)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        averaged = grouped_allreduce(grads, process_set=ctx.process_set)
        rank = engine_of(ctx.process_set).rank
        rows_of = allgather(torch.tensor([ctx.rows]), process_set=ctx.process_set)
        before = rows_of[:rank].sum(0).tolist()
        own = [grad[start : start + count] for grad, start, count in zip(averaged, before, ctx.rows, strict=True)]
        return None, *own


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
    return _differentiable(
        _AllGather, _start_all_gather, _call(Kind.ALLGATHER, name, process_set, wake=False), [tensor]
    )[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Collective: starts `allgather`, without gradients; returns a handle."""
    return _start_all_gather(_call(Kind.ALLGATHER, name, process_set), [tensor], first)


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Collective: `allgather` of several tensors in one operation."""
    return _differentiable(
        _AllGather, _start_all_gather, _call(Kind.ALLGATHER, name, process_set, grouped=True, wake=False), list(tensors)
    )


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Collective: starts `grouped_allgather`, without gradients; returns one handle."""
    return _start_all_gather(_call(Kind.ALLGATHER, name, process_set, grouped=True), list(tensors), everything)


Splits = torch.Tensor | Sequence[int]


def _start_all_to_all(call: Call, tensor: torch.Tensor, splits: Splits | None, deliver: Deliver) -> int:
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


class _AllToAll(torch.autograd.Function):
    """The gradient goes back the way the rows came."""

    @staticmethod
    def forward(ctx: Any, call: Call, splits: Splits | None, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.process_set, ctx.rows = call.process_set, tensor.shape[0] if tensor.dim() else 0
        received, received_splits = synchronize(_start_all_to_all(call, tensor, splits, tuple))
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
    call, deliver = _call(Kind.ALLTOALL, name, process_set, wake=False), _deliver_to(tensor, splits)
    if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        return deliver(list(_AllToAll.apply(call, splits, tensor)))  # type: ignore[no-untyped-call]  # torch's
    return synchronize(_start_all_to_all(call, tensor, splits, deliver))


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Collective: starts `alltoall`, without gradients; returns a handle."""
    return _start_all_to_all(_call(Kind.ALLTOALL, name, process_set), tensor, splits, _deliver_to(tensor, splits))


def _start_broadcast(call: Call, tensor: torch.Tensor, root_rank: int, deliver: Deliver) -> int:
    engine_of(call.process_set)
    call.require_strided([tensor])
    ranks = members(call.process_set)
    if root_rank not in ranks:
        call.refuse(ValueError(f"root_rank {root_rank} is not one of the ranks {list(ranks)}"))
    return call.start([tensor], deliver, root=ranks.index(root_rank))


class _Broadcast(torch.autograd.Function):
    """The gradient is an averaging all-reduce on the root and zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, call: Call, root_rank: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.process_set, ctx.root_rank = call.process_set, root_rank
        result: torch.Tensor = synchronize(_start_broadcast(call, tensor, root_rank, first))
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
    call = _call(Kind.BROADCAST, name, process_set, wake=False)
    if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        differentiable: torch.Tensor = _Broadcast.apply(call, root_rank, tensor)  # type: ignore[no-untyped-call]  # torch's
        return differentiable
    result: torch.Tensor = synchronize(_start_broadcast(call, tensor, root_rank, first))
    return result


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Collective: starts `broadcast`, without gradients; returns a handle."""
    return _start_broadcast(_call(Kind.BROADCAST, name, process_set), tensor, root_rank, first)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Collective: overwrites `tensor` on every rank with the root's."""
    call = _call(Kind.BROADCAST, name, process_set, wake=False)
    result: torch.Tensor = synchronize(_start_broadcast(call, tensor, root_rank, into_one(tensor)))
    return result


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Collective: starts `broadcast_`; returns a handle. The tensor is overwritten when that is synchronised."""
    return _start_broadcast(_call(Kind.BROADCAST, name, process_set), tensor, root_rank, into_one(tensor))


def _start_reduce_scatter(
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


class _ReduceScatter(torch.autograd.Function):
    """The gradient is an all-gather: of the gradient times the number of ranks for Sum, and times the factors."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, op: int, prescale: float, postscale: float, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.process_set = call.process_set
        ctx.factor = prescale * postscale * (engine_of(call.process_set).size if op == Sum else 1)
        return tuple(synchronize(_start_reduce_scatter(call, tensors, everything, op, prescale, postscale)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [grad * ctx.factor if ctx.factor != 1.0 else grad for grad in grads]
        return None, None, None, None, *grouped_allgather(scaled, process_set=ctx.process_set)


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
    call = _call(Kind.REDUCESCATTER, name, process_set, wake=False)
    return compression.decompress(
        _differentiable(
            _ReduceScatter, _start_reduce_scatter, call, [compressed], op, prescale_factor, postscale_factor
        )[0],
        context,
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
    return _start_reduce_scatter(
        _call(Kind.REDUCESCATTER, name, process_set), [tensor], first, op, prescale_factor, postscale_factor
    )


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
    call = _call(Kind.REDUCESCATTER, name, process_set, grouped=True, wake=False)
    results = _differentiable(
        _ReduceScatter,
        _start_reduce_scatter,
        call,
        [tensor for tensor, _ in compressed],
        op,
        prescale_factor,
        postscale_factor,
    )
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
    call = _call(Kind.REDUCESCATTER, name, process_set, grouped=True)
    return _start_reduce_scatter(call, list(tensors), everything, op, prescale_factor, postscale_factor)


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


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Collective: returns once all ranks of the set have called it.

    Raises:
        ValueError: this rank is not in the process set.
        HorovodInternalError: a rank has joined, or the job has failed.
    """
    call = Call(kind=Kind.BARRIER, name=None, process_set=process_set, wake=False)
    synchronize(call.start([], lambda results: None))


def join(device: int = -1) -> int:
    """Collective: this rank has no more data; until all ranks have joined it takes part in all-reduces with zeros.

    Other collectives are an error meanwhile. Afterwards all ranks start anew together.

    Args:
        device: accepted for Horovod's sake; zeros are made where they are needed.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: the job has failed.
    """
    engine_of(global_process_set)  # which says what is wrong
    return job.current().joining.join()
