"""Horovod's collectives on tensors, synchronous and asynchronous.

Each function checks its arguments, submits this rank's side to the engine of the process set, and then waits for the
result or returns a handle. A rank whose arguments are no good tells the others before it raises, so that they get an
error, too, instead of waiting for it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch

from sirtaki.comm.collectives.engine import EagerEngine, EagerWork, SparseSum
from sirtaki.comm.collectives.operations import ADASUM, Kind, Signature
from sirtaki.engine import job
from sirtaki.errors import CommError

from .compression import Compression, Compressor
from .process_sets import ProcessSet, engine_of, global_process_set, members

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

Tensors = Sequence[torch.Tensor]
Deliver = Callable[[list[torch.Tensor]], Any]
"""Makes of an operation's results what the user gets (Any: a tensor, a list of them, a pair, or nothing)."""


class Started(NamedTuple):
    """An operation under way."""

    engine: EagerEngine
    work: EagerWork
    deliver: Deliver

    def result(self) -> Any:
        """Blocks until the operation is done, and gives what the user gets.

        Raises:
            CommError: the operation failed, or ranks disagreed about it.
        """
        self.engine.finish(self.work)
        return self.deliver(self.work.results)

    def handle(self) -> int:
        """The number by which the user waits for it."""
        number = next(_numbers)
        _under_way[number] = self
        return number


_under_way: dict[int, Started] = {}
_numbers = itertools.count(1)


class Call:
    """One operation as the user has asked for it."""

    def __init__(
        self, kind: Kind, name: str | None, process_set: ProcessSet, *, grouped: bool = False, wake: bool = True
    ) -> None:
        """Numbers it if it has no name.

        Args:
            kind: of operation.
            name: the user's, None = the next of the unnamed ones.
            process_set: the ranks that take part.
            grouped: several tensors that travel together.
            wake: False = the calling thread waits for the result next.

        Raises:
            ConfigError: this rank is not in the process set.
        """
        self.engine, self.kind, self.process_set, self.wake = engine_of(process_set), kind, process_set, wake
        prefix = ("grouped_" if grouped else "") + kind.value.lower()
        self.once = name is None
        self.name = self.engine.pending.next_name(prefix) if name is None else f"{prefix}.{name}"

    def start(self, tensors: Tensors, deliver: Deliver, **rest: Any) -> Started:
        """Submits this rank's side; `rest` are further fields of `Signature` (hence Any)."""
        signature = Signature.of(tensors, name=self.name, kind=self.kind, once=self.once, **rest)
        return Started(self.engine, self.engine.submit(signature, tensors, wake=self.wake), deliver)

    def refuse(self, error: Exception) -> NoReturn:
        """Raises `error`, after telling the other ranks, which get an error instead of waiting for this one."""
        self.engine.submit(Signature(name=self.name, once=self.once, kind=self.kind, problem=str(error)), [])
        raise error

    def require_strided(self, tensors: Tensors) -> None:
        """Refuses what is no dense tensor.

        Raises:
            ValueError: one of them is none.
        """
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                self.refuse(ValueError(f"a torch.Tensor is wanted, not {type(tensor).__name__}"))
            if tensor.layout is not torch.strided or tensor.is_quantized:
                self.refuse(
                    ValueError(
                        f"a dense tensor is wanted, not {tensor.layout}; see sparse_allreduce_async() for sparse"
                    )
                )


def forget_all() -> None:
    """No handle is known any more: the ranks that they were of have parted."""
    _under_way.clear()


def poll(handle: int) -> bool:
    """True if `synchronize(handle)` would not block; tensors of in-place forms are overwritten by then."""
    started = _under_way.get(handle)
    if started is None:
        return True
    if not started.work.is_done():
        return False
    with suppress(CommError):  # which `synchronize` will raise
        result = started.result()
        _under_way[handle] = started._replace(deliver=lambda _: result)
    return True


def synchronize(handle: int) -> Any:
    """Blocks until the operation is done; its result (of in-place forms: the tensor), None for an unknown handle.

    Raises:
        HorovodInternalError: the operation failed, or ranks disagreed about it.
    """
    started = _under_way.pop(handle, None)
    return None if started is None else started.result()


def synchronize_all(handles: Sequence[int]) -> list[Any]:
    """The results of several operations; all have ended when this returns or raises the first error."""
    results, errors = [], []
    for handle in handles:
        try:
            results.append(synchronize(handle))
        except Exception as err:
            errors.append(err)
    if errors:
        raise errors[0]
    return results


# ── what to make of results ──────────────────────────────────────────────────────────────────────────────────────


def _first(results: list[torch.Tensor]) -> torch.Tensor:
    return results[0]


def _all(results: list[torch.Tensor]) -> list[torch.Tensor]:
    return results


def _into(tensors: Tensors) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The given tensors, overwritten."""

    def deliver(results: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            for tensor, result in zip(tensors, results, strict=True):
                tensor.copy_(result)
        return list(tensors)

    return deliver


def _into_one(tensor: torch.Tensor) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """The given tensor, overwritten."""
    deliver = _into([tensor])
    return lambda results: deliver(results)[0]


class _Differentiable(torch.autograd.Function):
    """A collective as a step of autograd."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.gradient(grads)


def _differentiable(
    tensors: Tensors, run: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
) -> list[torch.Tensor]:
    """What `run` gives, whose gradient is computed by `gradient` where one is wanted."""
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors):
        return list(_Differentiable.apply(run, gradient, *tensors))  # type: ignore[no-untyped-call]  # torch's
    return list(run(tensors))


# ── reductions ───────────────────────────────────────────────────────────────────────────────────────────────────

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


def unfit(op: int, tensors: Tensors, process_set: ProcessSet) -> Exception | None:
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


KNOWN_OPERATIONS = 4096
"""Of so many reductions of one tensor it is remembered that they are all right."""


class Scaling(NamedTuple):
    """A reduction's operator, and what its input and its result are multiplied by."""

    op: int
    prescale: float = 1.0
    postscale: float = 1.0


def _start_reduction(call: Call, tensors: Tensors, how: Scaling, deliver: Deliver) -> Started:
    """Starts an all-reduce or a reduce-scatter."""
    how = Scaling(how.op, float(how.prescale), float(how.postscale))
    key = known = None
    if len(tensors) == 1 and type(tensor := tensors[0]) is torch.Tensor:
        # What was all right of a tensor like this one is so again; a name that comes once is not worth a place.
        key = call.kind, None if call.once else call.name, how, tensor.shape, tensor.dtype, tensor.layout, tensor.device
        known = call.engine.known.get(key)
        if known is not None:
            signature = known.renamed(call.name) if call.once else known
            return Started(call.engine, call.engine.submit(signature, tensors, wake=call.wake), deliver)
    call.require_strided(tensors)
    if call.kind is Kind.REDUCESCATTER:
        if how.op == Adasum:
            call.refuse(NotImplementedError("reducescatter takes op=Average or op=Sum; Adasum is for allreduce only"))
        if how.op not in (Average, Sum):
            call.refuse(ValueError(f"reducescatter takes op=Average or op=Sum, not {how.op!r}"))
        if any(tensor.dim() == 0 for tensor in tensors):
            call.refuse(ValueError("reducescatter deals out rows, and a tensor without dimensions has none"))
    if (error := unfit(how.op, tensors, call.process_set)) is not None:
        call.refuse(error)
    count = call.engine.size if how.op == Average else 1
    started = call.start(tensors, deliver, op=OP_NAMES[how.op], factors=(how.prescale, how.postscale / count))
    if key is not None:
        if len(call.engine.known) >= KNOWN_OPERATIONS:
            call.engine.known.clear()
        call.engine.known[key] = started.work.signature
    return started


def _reduced(
    kind: Kind,
    tensors: Tensors,
    name: str | None,
    how: Scaling,
    process_set: ProcessSet,
    compression: type[Compressor] = Compression.none,
    *,
    grouped: bool = False,
) -> list[torch.Tensor]:
    """Collective: new tensors with the reduction of the given ones, or with this rank's rows of it; differentiable."""

    def run(inputs: Tensors) -> list[torch.Tensor]:
        call = Call(kind, name, process_set, grouped=grouped, wake=False)
        results: list[torch.Tensor] = _start_reduction(call, inputs, how, _all).result()
        return results

    def gradient(grads: Tensors) -> Tensors:
        if kind is Kind.ALLREDUCE:
            return _reduced(kind, grads, None, how, process_set, grouped=grouped)
        factor = how.prescale * how.postscale * (engine_of(process_set).size if how.op == Sum else 1)
        return grouped_allgather([grad * factor if factor != 1.0 else grad for grad in grads], process_set=process_set)

    if compression is Compression.none:
        return _differentiable(tensors, run, gradient)
    compressed = [compression.compress(tensor) for tensor in tensors]
    results = _differentiable([tensor for tensor, _ in compressed], run, gradient)
    return [compression.decompress(result, context) for result, (_, context) in zip(results, compressed, strict=True)]


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
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    return _reduced(Kind.ALLREDUCE, [tensor], name, how, process_set, compression)[0]


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
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    return _start_reduction(Call(Kind.ALLREDUCE, name, process_set), [tensor], how, _first).handle()


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
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    call = Call(Kind.ALLREDUCE, name, process_set, wake=False)
    result: torch.Tensor = _start_reduction(call, [tensor], how, _into_one(tensor)).result()
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
    """Collective: starts `allreduce_`; returns a handle. The tensor is overwritten once that has been waited for."""
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    return _start_reduction(Call(Kind.ALLREDUCE, name, process_set), [tensor], how, _into_one(tensor)).handle()


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Collective: `allreduce` of several tensors in one operation: all are reduced, or none."""
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    return _reduced(Kind.ALLREDUCE, tensors, name, how, process_set, compression, grouped=True)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Collective: starts `grouped_allreduce` into new tensors, without gradients; returns one handle."""
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    return _start_reduction(Call(Kind.ALLREDUCE, name, process_set, grouped=True), list(tensors), how, _all).handle()


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Collective: `grouped_allreduce` in place."""
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    call = Call(Kind.ALLREDUCE, name, process_set, grouped=True, wake=False)
    results: list[torch.Tensor] = _start_reduction(call, list(tensors), how, _into(tensors)).result()
    return results


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Collective: starts `grouped_allreduce_`; returns one handle."""
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    call = Call(Kind.ALLREDUCE, name, process_set, grouped=True)
    return _start_reduction(call, list(tensors), how, _into(tensors)).handle()


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
    how = Scaling(op, prescale_factor, postscale_factor)
    return _reduced(Kind.REDUCESCATTER, [tensor], name, how, process_set, compression)[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Collective: starts `reducescatter`, without gradients; returns a handle."""
    how = Scaling(op, prescale_factor, postscale_factor)
    return _start_reduction(Call(Kind.REDUCESCATTER, name, process_set), [tensor], how, _first).handle()


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Collective: `reducescatter` of several tensors in one operation."""
    how = Scaling(op, prescale_factor, postscale_factor)
    return _reduced(Kind.REDUCESCATTER, tensors, name, how, process_set, compression, grouped=True)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Collective: starts `grouped_reducescatter`, without gradients; returns one handle."""
    how = Scaling(op, prescale_factor, postscale_factor)
    call = Call(Kind.REDUCESCATTER, name, process_set, grouped=True)
    return _start_reduction(call, list(tensors), how, _all).handle()


# ── gathering ────────────────────────────────────────────────────────────────────────────────────────────────────


def _start_all_gather(call: Call, tensors: Tensors, deliver: Deliver) -> Started:
    call.require_strided(tensors)
    if any(tensor.dim() == 0 for tensor in tensors):
        call.refuse(IndexError("allgather joins tensors along their first dimension, and one of these has none"))
    return call.start(tensors, deliver)


def _gathered(
    tensors: Tensors, name: str | None, process_set: ProcessSet, *, grouped: bool = False
) -> list[torch.Tensor]:
    """Collective: the rows of all ranks, differentiable: by this rank's rows of the averaged gradients of all ranks."""
    rows: list[int] = []

    def run(inputs: Tensors) -> Tensors:
        call = Call(Kind.ALLGATHER, name, process_set, grouped=grouped, wake=False)
        results: list[torch.Tensor] = _start_all_gather(call, inputs, _all).result()
        rows.extend(tensor.shape[0] for tensor in inputs)
        return results

    def gradient(grads: Tensors) -> Tensors:
        averaged = grouped_allreduce(grads, process_set=process_set)
        rows_of = allgather(torch.tensor([rows], dtype=torch.int64, device="cpu"), process_set=process_set)
        before = rows_of[: engine_of(process_set).rank].sum(0).tolist()
        return [grad[start : start + count] for grad, start, count in zip(averaged, before, rows, strict=True)]

    return _differentiable(tensors, run, gradient)


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
    return _gathered([tensor], name, process_set)[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Collective: starts `allgather`, without gradients; returns a handle."""
    return _start_all_gather(Call(Kind.ALLGATHER, name, process_set), [tensor], _first).handle()


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Collective: `allgather` of several tensors in one operation."""
    return _gathered(list(tensors), name, process_set, grouped=True)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Collective: starts `grouped_allgather`, without gradients; returns one handle."""
    return _start_all_gather(Call(Kind.ALLGATHER, name, process_set, grouped=True), list(tensors), _all).handle()


# ── exchanging rows ──────────────────────────────────────────────────────────────────────────────────────────────

Splits = torch.Tensor | Sequence[int]


def _start_all_to_all(call: Call, tensor: torch.Tensor, splits: Splits | None, deliver: Deliver) -> Started:
    call.require_strided([tensor])
    return call.start([tensor, _rows_for_each(call, tensor, splits)], deliver)


def _with_splits(splits: Splits | None) -> Deliver:
    """The received rows, and with splits how many came from each rank."""

    def deliver(results: list[torch.Tensor]) -> Any:
        received, received_splits = results
        if splits is None:
            return received
        return received, received_splits.to(splits.device if isinstance(splits, torch.Tensor) else "cpu")

    return deliver


def _rows_for_each(call: Call, tensor: torch.Tensor, splits: Splits | None) -> torch.Tensor:
    """How many rows go to each rank, `(size,)` int32 on the CPU."""
    size = call.engine.size
    if tensor.dim() == 0:
        call.refuse(ValueError("alltoall deals out rows, and a tensor without dimensions has none"))
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            call.refuse(ValueError(f"alltoall without splits: {rows} rows cannot be dealt out evenly to {size} ranks"))
        return torch.full((size,), rows // size, dtype=torch.int32, device="cpu")
    try:
        given = torch.as_tensor(splits, device="cpu")
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
    rows, received_splits = 0, torch.empty(0, dtype=torch.int32, device="cpu")

    def run(inputs: Tensors) -> Tensors:
        nonlocal rows, received_splits
        call = Call(Kind.ALLTOALL, name, process_set, wake=False)
        received, received_splits = _start_all_to_all(call, inputs[0], splits, tuple).result()
        rows = inputs[0].shape[0]
        return [received]

    def gradient(grads: Tensors) -> Tensors:
        """The gradient goes back the way the rows came."""
        back, _ = alltoall(grads[0], splits=received_splits.cpu(), process_set=process_set)
        if back.shape[0] < rows:  # rows that went nowhere
            back = torch.cat([back, back.new_zeros(rows - back.shape[0], *back.shape[1:])])
        return [back]

    return _with_splits(splits)([*_differentiable([tensor], run, gradient), received_splits])


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Collective: starts `alltoall`, without gradients; returns a handle."""
    return _start_all_to_all(Call(Kind.ALLTOALL, name, process_set), tensor, splits, _with_splits(splits)).handle()


# ── broadcasting ─────────────────────────────────────────────────────────────────────────────────────────────────


def _start_broadcast(call: Call, tensor: torch.Tensor, root_rank: int, deliver: Deliver) -> Started:
    call.require_strided([tensor])
    ranks = members(call.process_set)
    if root_rank not in ranks:
        call.refuse(ValueError(f"root_rank {root_rank} is not one of the ranks {list(ranks)}"))
    return call.start([tensor], deliver, root=ranks.index(root_rank))


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

    def run(inputs: Tensors) -> Tensors:
        call = Call(Kind.BROADCAST, name, process_set, wake=False)
        results: list[torch.Tensor] = _start_broadcast(call, inputs[0], root_rank, _all).result()
        return results

    def gradient(grads: Tensors) -> Tensors:
        """The averaged gradient on the root, zeros elsewhere."""
        averaged = allreduce(grads[0], process_set=process_set)
        is_root = members(process_set)[engine_of(process_set).rank] == root_rank
        return [averaged if is_root else torch.zeros_like(averaged)]

    return _differentiable([tensor], run, gradient)[0]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Collective: starts `broadcast`, without gradients; returns a handle."""
    return _start_broadcast(Call(Kind.BROADCAST, name, process_set), tensor, root_rank, _first).handle()


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Collective: overwrites `tensor` on every rank with the root's."""
    call = Call(Kind.BROADCAST, name, process_set, wake=False)
    result: torch.Tensor = _start_broadcast(call, tensor, root_rank, _into_one(tensor)).result()
    return result


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Collective: starts `broadcast_`; returns a handle. The tensor is overwritten once that has been waited for."""
    return _start_broadcast(Call(Kind.BROADCAST, name, process_set), tensor, root_rank, _into_one(tensor)).handle()


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────


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
        return torch.sparse_coo_tensor(
            summed._indices(), values, summed.size(), device=values.device, check_invariants=False
        )

    return average


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Collective: returns once all ranks of the set have called it.

    Raises:
        ValueError: this rank is not in the process set.
        HorovodInternalError: a rank has joined, or the job has failed.
    """
    Call(Kind.BARRIER, None, process_set, wake=False).start([], _all).result()


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
