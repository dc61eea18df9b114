"""Horovod's collectives on tensors, synchronous and asynchronous.

Each function checks its arguments, and submits this rank's tensors to the engine, the object that runs collectives over
the ranks of a process set. Then it waits for the result, or returns a handle. A rank with invalid arguments notifies
the other ranks before it raises an exception. Then the other ranks raise an exception too, instead of waiting.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch

from sirtaki.comm.collectives.engine import EagerEngine, EagerWork, SparseSum
from sirtaki.comm.collectives.operations import ADASUM, CollectiveKind, Signature
from sirtaki.comm.device import refuse_capture
from sirtaki.engine import job
from sirtaki.errors import CommError

from .compression import Compression, Compressor
from .process_sets import ProcessSet, engine_of, global_process_set, require_opened

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
"""Function that converts the result tensors of a collective to the return value of the public function.

The value is a tensor, a list of tensors, a pair, or None."""


class Started(NamedTuple):
    """A collective operation that was submitted to the engine, and the function that converts its results.

    Attributes:
        engine: object that runs the collectives of a process set.
        work: the operation, as the engine's object to wait for.
        deliver: function that converts the result tensors to the return value of the public function.
    """

    engine: EagerEngine
    work: EagerWork
    deliver: Deliver

    def result(self) -> Any:
        """Wait for the collective operation, and return its result.

        Raises:
            CommError: the operation failed, or ranks called it with different arguments.
        """
        self.engine.finish(self.work)
        return self.deliver(self.work.results)

    def handle(self) -> int:
        """Register this operation, so that `poll` and `synchronize` find it. Return its handle."""
        number = next(_numbers)
        _under_way[number] = self
        return number


_under_way: dict[int, Started] = {}
_numbers = itertools.count(1)


class Call:
    """One collective operation that the user has requested, before its tensors are submitted."""

    def __init__(
        self,
        kind: CollectiveKind,
        name: str | None,
        process_set: ProcessSet,
        *,
        grouped: bool = False,
        wake: bool = True,
    ) -> None:
        """Create an operation. If the user has not named it, generate a name that contains a number.

        Args:
            kind: kind of collective, for example an all-reduce.
            name: name that the user has chosen, which must be equal on all ranks. None to match unnamed operations by
                their order.
            process_set: ranks that take part.
            grouped: whether the operation consists of several tensors that are sent together.
            wake: whether to wake the thread that runs operations in the background. False if the calling thread will
                wait for the result at once.

        Raises:
            ConfigError: this rank is not in the process set.
        """
        self.engine, self.kind, self.process_set, self.wake = engine_of(process_set), kind, process_set, wake
        prefix = ("grouped_" if grouped else "") + kind.value.lower()
        self.once = name is None
        self.name = self.engine.pending.next_name(prefix) if name is None else f"{prefix}.{name}"

    def start(self, tensors: Tensors, deliver: Deliver, **rest: Any) -> Started:
        """Submit this rank's tensors to the engine, which runs the operation.

        Args:
            tensors: tensors that this rank contributes.
            deliver: function that converts the result tensors to the return value of the public function.
            rest: further fields of `Signature`, which describes the operation and which ranks compare (of any type).
        """
        signature = Signature.of(tensors, name=self.name, kind=self.kind, once=self.once, **rest)
        return Started(self.engine, self.submit(signature, tensors), deliver)

    def submit(self, signature: Signature, tensors: Tensors) -> EagerWork:
        """Submit this rank's tensors to the engine, which runs the operation.

        Raises:
            ConfigError: a CUDA graph captures the current stream.
        """
        if signature.device != "cpu":
            refuse_capture(f"the operation {self.name}")
        return self.engine.submit(signature, tensors, wake=self.wake, may_defer=True)

    def refuse(self, error: Exception) -> NoReturn:
        """Raise `error`. First notify the other ranks, so that they raise an exception, too, instead of waiting."""
        self.engine.submit(Signature(name=self.name, once=self.once, kind=self.kind, problem=str(error)), [])
        raise error

    def require_strided(self, tensors: Tensors) -> None:
        """Reject tensors that are not dense.

        Raises:
            ValueError: an item of `tensors` is not a dense tensor.
        """
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                self.refuse(ValueError(f"the argument must be a torch.Tensor, not {type(tensor).__name__}"))
            if tensor.layout is not torch.strided or tensor.is_quantized:
                self.refuse(
                    ValueError(
                        f"a dense tensor is wanted, not {tensor.layout}; see sparse_allreduce_async() for sparse"
                    )
                )


def forget_all() -> None:
    """Forget the handles of all asynchronous operations, because their connections are closed."""
    _under_way.clear()


def poll(handle: int) -> bool:
    """Return whether the operation has ended, on the GPU, too, so that `synchronize(handle)` would not block.

    If an in-place operation has ended, this call has overwritten the operation's tensors.
    """
    started = _under_way.get(handle)
    if started is None:
        return True
    if not started.engine.poll(started.work):
        return False
    with suppress(CommError):  # Ignore an error of the operation here, because `synchronize` raises it.
        result = started.result()
        _under_way[handle] = started._replace(deliver=lambda _: result)
    return True


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation, and return its result.

    Args:
        handle: handle that an asynchronous function has returned.

    Returns:
        The result. An in-place operation returns its input tensor. None for an unknown handle.

    Raises:
        HorovodInternalError: the operation failed, or ranks called it with different arguments.
    """
    started = _under_way.pop(handle, None)
    return None if started is None else started.result()


def synchronize_all(handles: Sequence[int]) -> list[Any]:
    """Wait for several asynchronous operations, and return their results.

    If operations fail, wait for all others, then raise the first error.
    """
    results, errors = [], []
    for handle in handles:
        try:
            results.append(synchronize(handle))
        except Exception as err:
            errors.append(err)
    if errors:
        raise errors[0]
    return results


# ── conversion of results ──────────────────────────────────────────────────────────────────────────────────────


def _first(results: list[torch.Tensor]) -> torch.Tensor:
    return results[0]


def _all(results: list[torch.Tensor]) -> list[torch.Tensor]:
    return results


def _into(tensors: Tensors) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Return a function that copies the results of an in-place operation into `tensors`, and returns `tensors`."""

    def deliver(results: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            for tensor, result in zip(tensors, results, strict=True):
                tensor.copy_(result)
        return list(tensors)

    return deliver


def _into_one(tensor: torch.Tensor) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Return a function that copies the result tensor of an in-place operation into `tensor`, and returns `tensor`."""
    deliver = _into([tensor])
    return lambda results: deliver(results)[0]


class _Differentiable(torch.autograd.Function):
    """Autograd function that runs one collective in the forward pass, and another collective in the backward pass."""

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
    """Call `run` with the tensors, and return the results. In the backward pass, autograd calls `gradient`.

    Args:
        tensors: input tensors.
        run: function that runs a collective.
        gradient: function that computes the gradients of the inputs from those of the results, by another collective.
    """
    if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors):
        return list(_Differentiable.apply(run, gradient, *tensors))  # type: ignore[no-untyped-call]  # untyped in PyTorch
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
    """Return the reduction that the arguments `op=` and `average=` (deprecated) request.

    Raises:
        ValueError: both arguments are set.
    """
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is not None:
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed; pass op=Average or op=Sum instead",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    return Average if op is None else op


def unfit(op: int, tensors: Tensors, process_set: ProcessSet) -> Exception | None:
    """Return an exception if `tensors` cannot be reduced with the operator `op` over the process set.

    Otherwise return None.
    """
    if op not in OP_NAMES:
        return ValueError(f"op= must be Average, Sum, Adasum, Min, Max or Product, not {op!r}")
    for tensor in tensors:
        if tensor.dtype not in DTYPES[op]:
            names = ", ".join(str(dtype) for dtype in DTYPES[op])
            return ValueError(f"{tensor.dtype} cannot be reduced with this op; it takes {names}")
    if op == Adasum:
        count = len(require_opened(process_set).ranks)
        if process_set is not global_process_set:
            return NotImplementedError("Adasum works on all ranks only, not on a process set")
        if count & (count - 1):
            return NotImplementedError(f"Adasum wants a number of ranks that is a power of two, not {count}")
    return None


KNOWN_OPERATIONS = 4096
"""Maximum number of cached descriptions (`Signature`) of reductions whose arguments were found valid.

An equal later reduction skips the checks.
"""


class Scaling(NamedTuple):
    """Operator of a reduction, the factor that multiplies its input, and the factor that multiplies its result."""

    op: int
    prescale: float = 1.0
    postscale: float = 1.0


def _start_reduction(call: Call, tensors: Tensors, how: Scaling, deliver: Deliver) -> Started:
    """Check the arguments of an all-reduce or a reduce-scatter, and submit the operation to the engine."""
    how = Scaling(how.op, float(how.prescale), float(how.postscale))
    key = known = None
    if len(tensors) == 1 and type(tensor := tensors[0]) is torch.Tensor:
        # If a reduction with equal properties was valid before, skip the checks and reuse its description. The key
        # contains the name only if the user has chosen it, because generated names differ between operations.
        key = call.kind, None if call.once else call.name, how, tensor.shape, tensor.dtype, tensor.layout, tensor.device
        known = call.engine.known.get(key)
        if known is not None:
            signature = known.renamed(call.name) if call.once else known
            return Started(call.engine, call.submit(signature, tensors), deliver)
    call.require_strided(tensors)
    if call.kind is CollectiveKind.REDUCESCATTER:
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
    kind: CollectiveKind,
    tensors: Tensors,
    name: str | None,
    how: Scaling,
    process_set: ProcessSet,
    compression: type[Compressor] = Compression.none,
    *,
    grouped: bool = False,
) -> list[torch.Tensor]:
    """All-reduce tensors, or reduce-scatter their rows, into new tensors. Collective. Differentiable.

    Args:
        kind: all-reduce or reduce-scatter.
        tensors: tensors that this rank contributes.
        name: name of the operation, or None.
        how: operator of the reduction, and the factors that multiply its input and its result.
        process_set: ranks that take part.
        compression: compression of the tensors for communication.
        grouped: whether the tensors form one operation, which is named `grouped_…`.
    """

    def run(inputs: Tensors) -> list[torch.Tensor]:
        call = Call(kind, name, process_set, grouped=grouped, wake=False)
        results: list[torch.Tensor] = _start_reduction(call, inputs, how, _all).result()
        return results

    def gradient(grads: Tensors) -> Tensors:
        if kind is CollectiveKind.ALLREDUCE:
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
    """Reduce `tensor` over the ranks into a new tensor. Collective. Differentiable.

    Args:
        tensor: tensor with equal shape and dtype on all ranks.
        average: deprecated, use `op`. True for Average, False for Sum.
        name: name of the operation, equal on all ranks. None to match unnamed operations by their order.
        compression: compression of the tensor for communication.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: number by which the tensor is multiplied before the reduction.
        postscale_factor: number by which the result is multiplied after the reduction.
        process_set: ranks that take part.

    Raises:
        ValueError: an argument is invalid, or this rank is not in the process set.
        HorovodInternalError: ranks pass different arguments. Raised on all ranks.
    """
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    return _reduced(CollectiveKind.ALLREDUCE, [tensor], name, how, process_set, compression)[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `allreduce`. The result is not differentiable. Return a handle for `synchronize`. Collective."""
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    return _start_reduction(Call(CollectiveKind.ALLREDUCE, name, process_set), [tensor], how, _first).handle()


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` over the ranks in place. Collective. The arguments are those of `allreduce`."""
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    call = Call(CollectiveKind.ALLREDUCE, name, process_set, wake=False)
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
    """Start `allreduce_`. Return a handle. `synchronize(handle)` overwrites `tensor` with the result. Collective."""
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    return _start_reduction(
        Call(CollectiveKind.ALLREDUCE, name, process_set), [tensor], how, _into_one(tensor)
    ).handle()


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
    """Reduce several tensors over the ranks in one operation. If it fails, no tensor is reduced. Collective.

    The arguments are those of `allreduce`.
    """
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    return _reduced(CollectiveKind.ALLREDUCE, tensors, name, how, process_set, compression, grouped=True)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `grouped_allreduce`. The results are not differentiable. Return one handle for `synchronize`.

    Collective.
    """
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    return _start_reduction(
        Call(CollectiveKind.ALLREDUCE, name, process_set, grouped=True), list(tensors), how, _all
    ).handle()


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors over the ranks in place, in one operation. Collective."""
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    call = Call(CollectiveKind.ALLREDUCE, name, process_set, grouped=True, wake=False)
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
    """Start `grouped_allreduce_`. Return one handle. `synchronize(handle)` overwrites the tensors. Collective."""
    how = Scaling(reduction(op, average), prescale_factor, postscale_factor)
    call = Call(CollectiveKind.ALLREDUCE, name, process_set, grouped=True)
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
    """Reduce `tensor` over the ranks, and return this rank's rows of the result. Collective. Differentiable.

    Rows are distributed over the ranks in rank order. If their number is not a multiple of the number of ranks, the
    first ranks get one row more.

    Raises:
        ValueError: the tensor has no dimension, the op is not Average or Sum, or this rank is not in the process set.
        NotImplementedError: the op is Adasum.
        HorovodInternalError: ranks pass different arguments. Raised on all ranks.
    """
    how = Scaling(op, prescale_factor, postscale_factor)
    return _reduced(CollectiveKind.REDUCESCATTER, [tensor], name, how, process_set, compression)[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `reducescatter`. The result is not differentiable. Return a handle for `synchronize`. Collective."""
    how = Scaling(op, prescale_factor, postscale_factor)
    return _start_reduction(Call(CollectiveKind.REDUCESCATTER, name, process_set), [tensor], how, _first).handle()


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors over the ranks in one operation, and return this rank's rows of each result.

    Collective.

    The arguments are those of `reducescatter`.
    """
    how = Scaling(op, prescale_factor, postscale_factor)
    return _reduced(CollectiveKind.REDUCESCATTER, tensors, name, how, process_set, compression, grouped=True)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start `grouped_reducescatter`. The results are not differentiable. Return one handle for `synchronize`.

    Collective.
    """
    how = Scaling(op, prescale_factor, postscale_factor)
    call = Call(CollectiveKind.REDUCESCATTER, name, process_set, grouped=True)
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
    """All-gather each tensor of a list: concatenate the tensors of all ranks along dimension 0. Collective.

    Differentiable.

    The backward pass averages the gradients of all ranks, and returns the rows that belong to this rank's tensor.
    """
    rows: list[int] = []

    def run(inputs: Tensors) -> Tensors:
        call = Call(CollectiveKind.ALLGATHER, name, process_set, grouped=grouped, wake=False)
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
    """Concatenate the tensors of all ranks along dimension 0, in rank order. Collective. Differentiable.

    Args:
        tensor: tensor of this rank. Dimension 0 may differ between ranks, further dimensions must be equal.
        name: name of the operation, equal on all ranks. None to match unnamed operations by their order.
        process_set: ranks that take part.

    Raises:
        IndexError: the tensor has no dimension.
        ValueError: this rank is not in the process set.
        HorovodInternalError: ranks pass different arguments. Raised on all ranks.
    """
    return _gathered([tensor], name, process_set)[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start `allgather`. The result is not differentiable. Return a handle for `synchronize`. Collective."""
    return _start_all_gather(Call(CollectiveKind.ALLGATHER, name, process_set), [tensor], _first).handle()


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """All-gather several tensors in one operation. Each result concatenates the tensors of all ranks. Collective.

    The arguments are those of `allgather`.
    """
    return _gathered(list(tensors), name, process_set, grouped=True)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `grouped_allgather`. The results are not differentiable. Return one handle for `synchronize`.

    Collective.
    """
    return _start_all_gather(
        Call(CollectiveKind.ALLGATHER, name, process_set, grouped=True), list(tensors), _all
    ).handle()


# ── exchanging rows ──────────────────────────────────────────────────────────────────────────────────────────────

Splits = torch.Tensor | Sequence[int]


def _start_all_to_all(call: Call, tensor: torch.Tensor, splits: Splits | None, deliver: Deliver) -> Started:
    call.require_strided([tensor])
    return call.start([tensor, _rows_for_each(call, tensor, splits)], deliver)


def _with_splits(splits: Splits | None) -> Deliver:
    """Return a function that converts result tensors to the return value of `alltoall`.

    The value is the received rows. If `splits` is set, it is a pair: the rows, and the number of rows from each rank.
    """

    def deliver(results: list[torch.Tensor]) -> Any:
        received, received_splits = results
        if splits is None:
            return received
        return received, received_splits.to(splits.device if isinstance(splits, torch.Tensor) else "cpu")

    return deliver


def _rows_for_each(call: Call, tensor: torch.Tensor, splits: Splits | None) -> torch.Tensor:
    """Check `splits`, the numbers of rows that this rank sends to each rank.

    Return them as a tensor `(size,)` int32 on the CPU.
    """
    size = call.engine.size
    if tensor.dim() == 0:
        call.refuse(ValueError("alltoall sends rows, but a tensor without dimensions has none"))
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
) -> Any:  # Returns a tensor, or a pair of tensors if `splits` is set.
    """Send rows to each rank, and return the rows that all ranks send to this rank. Collective. Differentiable.

    Args:
        tensor: rows to send. Dimension 0 may differ between ranks, further dimensions must be equal.
        splits: number of rows to send to each rank, in rank order, `(size,)`. None for equal numbers.
        name: name of the operation, equal on all ranks. None to match unnamed operations by their order.
        process_set: ranks that take part.

    Returns:
        The received rows. With `splits`, a pair: the rows, and the number of rows from each rank, `(size,)` int32.

    Raises:
        ValueError: the splits do not match the tensor, or this rank is not in the process set.
        HorovodInternalError: ranks pass different arguments. Raised on all ranks.
    """
    rows, received_splits = 0, torch.empty(0, dtype=torch.int32, device="cpu")

    def run(inputs: Tensors) -> Tensors:
        nonlocal rows, received_splits
        call = Call(CollectiveKind.ALLTOALL, name, process_set, wake=False)
        received, received_splits = _start_all_to_all(call, inputs[0], splits, tuple).result()
        rows = inputs[0].shape[0]
        return [received]

    def gradient(grads: Tensors) -> Tensors:
        """Send the gradient of the received rows back to the ranks that sent the rows."""
        back, _ = alltoall(grads[0], splits=received_splits.cpu(), process_set=process_set)
        if back.shape[0] < rows:  # Rows beyond the sum of `splits` were sent to no rank, so their gradient is zero.
            back = torch.cat([back, back.new_zeros(rows - back.shape[0], *back.shape[1:])])
        return [back]

    return _with_splits(splits)([*_differentiable([tensor], run, gradient), received_splits])


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start `alltoall`. The result is not differentiable. Return a handle for `synchronize`. Collective."""
    return _start_all_to_all(
        Call(CollectiveKind.ALLTOALL, name, process_set), tensor, splits, _with_splits(splits)
    ).handle()


# ── broadcasting ─────────────────────────────────────────────────────────────────────────────────────────────────


def _start_broadcast(call: Call, tensor: torch.Tensor, root_rank: int, deliver: Deliver) -> Started:
    call.require_strided([tensor])
    ranks = require_opened(call.process_set).ranks
    if root_rank not in ranks:
        call.refuse(ValueError(f"root_rank {root_rank} is not one of the ranks {list(ranks)}"))
    return call.start([tensor], deliver, root=ranks.index(root_rank))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of the root rank on every rank, as a new tensor. Collective. Differentiable.

    Args:
        tensor: tensor with equal shape and dtype on all ranks.
        root_rank: rank whose tensor is sent. Its rank in the job, not in the process set.
        name: name of the operation, equal on all ranks. None to match unnamed operations by their order.
        process_set: ranks that take part.

    Raises:
        ValueError: the root or this rank is not in the process set.
        HorovodInternalError: ranks pass different arguments. Raised on all ranks.
    """

    def run(inputs: Tensors) -> Tensors:
        call = Call(CollectiveKind.BROADCAST, name, process_set, wake=False)
        results: list[torch.Tensor] = _start_broadcast(call, inputs[0], root_rank, _all).result()
        return results

    def gradient(grads: Tensors) -> Tensors:
        """Return the average of all ranks' gradients on the root rank, and zeros on other ranks."""
        averaged = allreduce(grads[0], process_set=process_set)
        is_root = require_opened(process_set).ranks[engine_of(process_set).rank] == root_rank
        return [averaged if is_root else torch.zeros_like(averaged)]

    return _differentiable([tensor], run, gradient)[0]


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `broadcast`. The result is not differentiable. Return a handle for `synchronize`. Collective."""
    return _start_broadcast(Call(CollectiveKind.BROADCAST, name, process_set), tensor, root_rank, _first).handle()


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite `tensor` on every rank with the tensor of the root rank. Collective."""
    call = Call(CollectiveKind.BROADCAST, name, process_set, wake=False)
    result: torch.Tensor = _start_broadcast(call, tensor, root_rank, _into_one(tensor)).result()
    return result


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start `broadcast_`. Return a handle. `synchronize(handle)` overwrites `tensor` with the result. Collective."""
    return _start_broadcast(
        Call(CollectiveKind.BROADCAST, name, process_set), tensor, root_rank, _into_one(tensor)
    ).handle()


# ── further operations ───────────────────────────────────────────────────────────────────────────────────────────────


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the reduction of a sparse COO tensor. Collective.

    Args:
        tensor: sparse tensor with equal dense shape and dtype on all ranks, and any number of nonzero entries.
        name: name of the operation, equal on all ranks. None to match unnamed operations by their order.
        op: Average or Sum.
        process_set: ranks that take part.

    Returns:
        A function that waits for the result and returns it: a sparse tensor, not coalesced.

    Raises:
        ValueError: the tensor is not sparse, the op is invalid, or this rank is not in the process set.
    """
    if not tensor.is_sparse:
        raise ValueError(
            f"sparse_allreduce_async() requires a sparse COO tensor, not {tensor.layout}; use allreduce() for a dense "
            "tensor, or call to_sparse_coo()"
        )
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async() requires op=Average or op=Sum, not {op!r}")
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
    """Wait until all ranks of the process set have called this function. Collective.

    Raises:
        ValueError: this rank is not in the process set.
        HorovodInternalError: a rank has called `join()`, or the job has failed.
    """
    Call(CollectiveKind.BARRIER, None, process_set, wake=False).start([], _all).result()


def join(device: int = -1) -> int:
    """Report that this rank has no more data.

    Until all ranks have called `join`, this rank contributes zeros to the all-reduces of the other ranks.

    Collective. While a rank waits in `join`, collectives other than all-reduces raise an error. When `join` returns,
    all ranks can continue to train.

    Args:
        device: ignored, for compatibility with Horovod.

    Returns:
        The rank that has called this function last.

    Raises:
        HorovodInternalError: the job has failed.
    """
    engine_of(global_process_set)  # Raise an error if Sirtaki is not initialised.
    return job.current().joining.join()
