"""The sum of sparse tensors over ranks: the entries of all ranks are gathered, and those in one place add up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .engine import EagerEngine
from .requests import Kind, Signature


class SparseSum:
    """The sum of a sparse COO tensor over the engine's ranks, under way."""

    def __init__(self, engine: EagerEngine, tensor: torch.Tensor, name: str | None, *, by_all: bool = False) -> None:
        """Collective: starts it.

        Args:
            engine: of the ranks that take part.
            tensor: of the same dense shape and dtype on all ranks; it may have any number of entries.
            name: pairs the operation across ranks; None = by the order of unnamed operations.
            by_all: ranks that have joined call this, too; otherwise it is an error while some have.
        """
        coalesced = tensor.coalesce()
        parts = {"indices": coalesced.indices().t().contiguous(), "values": coalesced.values()}
        self._engine, self._size = engine, tensor.size()
        self._works = []
        for part, entries in parts.items():
            full = engine.unnamed("allgather") if name is None else f"allgather.{name}.{part}"
            signature = Signature.of([entries], name=full, kind=Kind.ALLGATHER, once=name is None, by_all=by_all)
            self._works.append(engine.submit(signature, [entries]))

    def wait(self, interrupted: Callable[[], bool] | None) -> bool:
        """Blocks until it is done; False if `interrupted`, which is asked now and then, says so.

        Raises:
            CommError: the operation or the job failed.
        """
        return all(self._engine.finish(work, interrupted) for work in self._works)

    def result(self) -> torch.Tensor:
        """Blocks until it is there: a sparse tensor, not coalesced."""
        self.wait(None)
        (indices,), (values,) = (work.results for work in self._works)
        return torch.sparse_coo_tensor(indices.t(), values, self._size, check_invariants=False)
