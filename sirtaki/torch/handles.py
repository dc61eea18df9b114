"""Handles: operations under way, what makes the user's results of theirs, and how one is started or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from sirtaki.comm.collectives.eager_work import EagerWork
from sirtaki.comm.collectives.engine import EagerEngine
from sirtaki.comm.collectives.requests import Kind, Signature

from .process_sets import ProcessSet, engine_of

Deliver = Callable[[list[torch.Tensor]], Any]
"""Makes of an operation's results what the user gets (Any: a tensor, a list of them, a pair, or nothing)."""


@dataclass(slots=True, eq=False)
class _Pending:
    engine: EagerEngine
    work: EagerWork
    deliver: Deliver


_pending: dict[int, _Pending] = {}
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What every operation is called with.

    Attributes:
        name: the user's, None = the next of the unnamed ones.
        grouped: several tensors that travel together.
        wake: False = the calling thread synchronises next.
    """

    kind: Kind
    name: str | None
    process_set: ProcessSet
    grouped: bool = False
    wake: bool = True

    def start(self, tensors: Sequence[torch.Tensor], deliver: Deliver, **rest: Any) -> int:
        """Submits this rank's side; `rest` are further fields of `Signature` (hence Any). Returns a handle."""
        engine = engine_of(self.process_set)
        signature = Signature.of(tensors, name=self._full_name(engine), kind=self.kind, once=self.name is None, **rest)
        work = engine.submit(signature, tensors, wake=self.wake)
        handle = next(_numbers)
        _pending[handle] = _Pending(engine, work, deliver)
        return handle

    def refuse(self, error: Exception) -> NoReturn:
        """Raises `error`, after telling the other ranks, which get an error instead of waiting for this one."""
        engine = engine_of(self.process_set)
        engine.submit(
            Signature(name=self._full_name(engine), once=self.name is None, kind=self.kind, problem=str(error)), []
        )
        raise error

    def require_strided(self, tensors: Sequence[torch.Tensor]) -> None:
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

    def _full_name(self, engine: EagerEngine) -> str:
        prefix = ("grouped_" if self.grouped else "") + self.kind.value.lower()
        return engine.unnamed(prefix) if self.name is None else f"{prefix}.{self.name}"


def forget_all() -> None:
    """No handle is known any more: the ranks that they were of have parted."""
    _pending.clear()


def poll(handle: int) -> bool:
    """True if `synchronize(handle)` would not block."""
    pending = _pending.get(handle)
    return pending is None or pending.work.is_done()


def synchronize(handle: int) -> Any:
    """Blocks until the operation is done; its result (of in-place forms: the tensor), None for an unknown handle.

    Raises:
        HorovodInternalError: the operation failed, or ranks disagreed about it.
    """
    pending = _pending.pop(handle, None)
    if pending is None:
        return None
    pending.engine.finish(pending.work)
    return pending.deliver(pending.work.results)


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


def first(results: list[torch.Tensor]) -> torch.Tensor:
    """The new tensor."""
    return results[0]


def everything(results: list[torch.Tensor]) -> list[torch.Tensor]:
    """The new tensors of a group."""
    return results


def into(tensors: Sequence[torch.Tensor]) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The given tensors, overwritten."""

    def deliver(results: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            for tensor, result in zip(tensors, results, strict=True):
                tensor.copy_(result)
        return list(tensors)

    return deliver


def into_one(tensor: torch.Tensor) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """The given tensor, overwritten."""
    deliver = into([tensor])
    return lambda results: deliver(results)[0]
