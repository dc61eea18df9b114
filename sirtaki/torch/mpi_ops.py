"""Collectives on single tensors: Horovod's functions, their handles and their gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sirtaki.comm.eager import EagerWork
from sirtaki.comm.requests import Kind, Signature
from sirtaki.errors import CommError

from . import runtime
from .compression import Compression, Compressor

Average, Sum, Adasum, Min, Max, Product = range(6)
"""Reduction operations for `op=`."""

OP_NAMES = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}

HorovodInternalError = CommError
"""Horovod's name for failed communication."""

WAIT_SLICE_S = 1.0


def rank() -> int:
    """This process among all."""
    return runtime.current().control.rank


def size() -> int:
    """Number of processes."""
    return runtime.current().control.size


def local_rank() -> int:
    """This process among those of its node."""
    return runtime.current().control.local_rank


def local_size() -> int:
    """Number of processes on this node."""
    return runtime.current().control.local_size


def cross_rank() -> int:
    """This node among the nodes that have this local rank."""
    return runtime.current().control.cross_rank


def cross_size() -> int:
    """Number of nodes that have this local rank."""
    return runtime.current().control.cross_size


def is_homogeneous() -> bool:
    """Every node has the same number of processes."""
    return runtime.current().control.is_homogeneous


# ── handles ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class _Pending:
    """An operation under way, and what makes the user's result of its results."""

    work: EagerWork
    deliver: Callable[[list[torch.Tensor]], Any]  # Any: a tensor, a list of them, or a pair


_pending: dict[int, _Pending] = {}
_last_handle = 0


def _submit(signature: Signature, tensors: Sequence[torch.Tensor], deliver: Callable[[list[torch.Tensor]], Any]) -> int:
    global _last_handle
    work = runtime.current().engine.submit(signature, tensors)
    _last_handle += 1
    _pending[_last_handle] = _Pending(work, deliver)
    return _last_handle


def poll(handle: int) -> bool:
    """True if `synchronize(handle)` would not block."""
    return handle not in _pending or _pending[handle].work.is_done


def synchronize(handle: int) -> Any:
    """Blocks until the operation is done; its result (of in-place forms: the tensor), None for an unknown handle.

    Raises:
        HorovodInternalError: the operation failed, or ranks disagreed about it.
    """
    if handle not in _pending:
        return None
    pending = _pending.pop(handle)
    failures = runtime.current().control.failures
    while not pending.work.wait(WAIT_SLICE_S):
        failures.check()
    return pending.deliver(pending.work.results)


def _name(kind: Kind, name: str | None) -> tuple[str, bool]:
    """The operation's name, and whether it will not come again."""
    if name is not None:
        return f"{kind.value.lower()}.{name}", False
    current = runtime.current()
    current.unnamed += 1
    return f"{kind.value.lower()}.noname.{current.unnamed}", True


def _signature(
    kind: Kind, tensors: Sequence[torch.Tensor], name: str | None, **rest: Any
) -> Signature:  # Any: fields of Signature
    full_name, once = _name(kind, name)
    return Signature(
        name=full_name,
        once=once,
        kind=kind,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        device=tensors[0].device.type if tensors else "cpu",
        **rest,
    )


# ── all-reduce ───────────────────────────────────────────────────────────────────────────────────────────────────


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


def _allreduce(
    tensors: Sequence[torch.Tensor],
    deliver: Callable[[list[torch.Tensor]], Any],
    *,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
) -> int:
    if op not in OP_NAMES:
        raise ValueError(f"allreduce takes Average, Sum, Min, Max or Product as op, not {op!r}")
    count = size()
    factors = (float(prescale_factor), float(postscale_factor) / (count if op == Average else 1))
    signature = _signature(Kind.ALLREDUCE, tensors, name, op=OP_NAMES[op], factors=factors)
    return _submit(signature, tensors, deliver)


def _copy_into(tensor: torch.Tensor) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    def deliver(results: list[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            tensor.copy_(results[0])
        return tensor

    return deliver


def _first(results: list[torch.Tensor]) -> torch.Tensor:
    return results[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Collective: starts the reduction of `tensor` over all ranks into a new tensor; returns a handle."""
    return _allreduce(
        [tensor],
        _first,
        name=name,
        op=reduction(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Collective: like `allreduce_async`, in place."""
    return _allreduce(
        [tensor],
        _copy_into(tensor),
        name=name,
        op=reduction(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


class _AllReduce(torch.autograd.Function):
    """The gradient of an all-reduce is an all-reduce with the same operation and factors."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: int, prescale_factor: float, postscale_factor: float
    ) -> torch.Tensor:
        ctx.arguments = (op, prescale_factor, postscale_factor)
        handle = allreduce_async(
            tensor, name=name, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor
        )
        result: torch.Tensor = synchronize(handle)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        op, prescale_factor, postscale_factor = ctx.arguments
        gradient = allreduce(grads[0], op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor)
        return gradient, None, None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Collective: `tensor` reduced over all ranks, differentiable; the input is not changed."""
    compressed, context = compression.compress(tensor)
    result: torch.Tensor = _AllReduce.apply(  # type: ignore[no-untyped-call]  # torch's decorator
        compressed, name, reduction(op, average), prescale_factor, postscale_factor
    )
    return compression.decompress(result, context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Collective: reduces `tensor` over all ranks in place."""
    result: torch.Tensor = synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor))
    return result


# ── broadcast ────────────────────────────────────────────────────────────────────────────────────────────────────


def _broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None, deliver: Callable[[list[torch.Tensor]], Any]
) -> int:
    if not 0 <= root_rank < size():
        raise ValueError(f"root_rank {root_rank} is not one of the {size()} ranks")
    return _submit(_signature(Kind.BROADCAST, [tensor], name, root=root_rank), [tensor], deliver)


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Collective: starts sending the root's tensor to all ranks, into a new tensor; returns a handle."""
    return _broadcast(tensor, root_rank, name, _first)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Collective: like `broadcast_async`, in place."""
    return _broadcast(tensor, root_rank, name, _copy_into(tensor))


class _Broadcast(torch.autograd.Function):
    """The gradient of a broadcast is an averaging all-reduce on the root and zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        ctx.root_rank = root_rank
        result: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = allreduce(grads[0], op=Average)
        return gradient if rank() == ctx.root_rank else torch.zeros_like(gradient), None, None


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Collective: the root's tensor on every rank, differentiable; the input is not changed."""
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name)  # type: ignore[no-untyped-call]
    return result


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Collective: overwrites `tensor` on every rank with the root's."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name))
    return result
