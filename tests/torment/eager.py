"""The eager operations that a program makes in between: what a rank gives, how it is done, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Handle = Callable[[], torch.Tensor]


def given(rank: int, number: int, rows: int = 4) -> torch.Tensor:
    """What a rank gives to operation `number`, `(rows, 3)`."""
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(31 * number + rank + 1), dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Operation:
    """One eager operation.

    Attributes:
        start: (hvd, rank, number) → a function that waits for the result.
        result: (rank, ranks, number) → what it must be.
    """

    start: Callable[[Any, int, int], Handle]
    result: Callable[[int, int, int], torch.Tensor]


def _all(ranks: int, number: int) -> torch.Tensor:
    return torch.stack([given(rank, number) for rank in range(ranks)])


def _handle(hvd: Any, handle: int) -> Handle:
    return lambda: hvd.synchronize(handle)


def _object(hvd: Any, rank: int, number: int) -> Handle:
    found = hvd.broadcast_object({"value": given(rank, number)}, root_rank=0)
    return lambda: found["value"]


OPERATIONS: dict[str, Operation] = {
    "allreduce": Operation(
        lambda hvd, rank, number: _handle(hvd, hvd.allreduce_async(given(rank, number))),
        lambda rank, ranks, number: _all(ranks, number).mean(0),
    ),
    "named": Operation(
        lambda hvd, rank, number: _handle(
            hvd, hvd.allreduce_async(given(rank, number), name=f"torment.{number}", op=hvd.Sum)
        ),
        lambda rank, ranks, number: _all(ranks, number).sum(0),
    ),
    "allgather": Operation(
        lambda hvd, rank, number: _handle(hvd, hvd.allgather_async(given(rank, number, rank + 1))),
        lambda rank, ranks, number: torch.cat([given(each, number, each + 1) for each in range(ranks)]),
    ),
    "broadcast": Operation(
        lambda hvd, rank, number: _handle(hvd, hvd.broadcast_async(given(rank, number), hvd.size() - 1)),
        lambda rank, ranks, number: given(ranks - 1, number),
    ),
    "reducescatter": Operation(
        lambda hvd, rank, number: _handle(hvd, hvd.reducescatter_async(given(rank, number, hvd.size()))),
        lambda rank, ranks, number: torch.stack([given(each, number, ranks) for each in range(ranks)]).mean(0)[
            rank : rank + 1
        ],
    ),
    "object": Operation(_object, lambda rank, ranks, number: given(0, number)),
}
