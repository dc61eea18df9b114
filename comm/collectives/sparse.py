"""The sum of sparse tensors over ranks: the entries of all ranks are gathered, and those in one place add up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .engine import EagerEngine
from .requests import Kind, Signature


def start_sparse_sum(
    engine: EagerEngine, tensor: torch.Tensor, name: str | None, *, by_all: bool = False
) -> Callable[[], torch.Tensor]:
    """Collective: starts the sum of a sparse COO tensor over the engine's ranks.

    Args:
        engine: of the ranks that take part.
        tensor: of the same dense shape and dtype on all ranks; it may have any number of entries.
        name: pairs the operation across ranks; None = by the order of unnamed operations.
        by_all: ranks that have joined call this, too; otherwise it is an error while some have.

    Returns:
        A function that blocks until the result is there, and gives it: a sparse tensor, not coalesced.
    """
    coalesced = tensor.coalesce()
    parts = {"indices": coalesced.indices().t().contiguous(), "values": coalesced.values()}
    works = []
    for part, entries in parts.items():
        full = engine.unnamed("allgather") if name is None else f"allgather.{name}.{part}"
        signature = Signature.of([entries], name=full, kind=Kind.ALLGATHER, once=name is None, by_all=by_all)
        works.append(engine.submit(signature, [entries]))

    def result() -> torch.Tensor:
        for work in works:
            engine.finish(work)
        (indices,), (values,) = (work.results for work in works)
        return torch.sparse_coo_tensor(indices.t(), values, tensor.size(), check_invariants=False)

    return result
