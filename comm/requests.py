"""What an eager operation is, and what may differ between the ranks that submit it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Eager operations."""

    ALLREDUCE = "ALLREDUCE"
    ALLGATHER = "ALLGATHER"
    BROADCAST = "BROADCAST"
    ALLTOALL = "ALLTOALL"
    REDUCESCATTER = "REDUCESCATTER"
    BARRIER = "BARRIER"


RAGGED = (Kind.ALLGATHER, Kind.ALLTOALL)
"""Operations whose tensors may differ between ranks in their first dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One rank's side of an operation; picklable. Several tensors under one name are a group: all or none.

    Attributes:
        name: pairs the operation across ranks.
        shapes: of each tensor.
        dtypes: of each tensor.
        op: reduction, empty where there is none.
        root: source of a broadcast, -1 where there is none.
        factors: (prescale, postscale).
        device: "cpu" or "cuda".
        once: the name will not come again, so it is not worth a bit of its own.
    """

    name: str
    kind: Kind
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    op: str = ""
    root: int = -1
    factors: tuple[float, float] = (1.0, 1.0)
    device: str = "cpu"
    once: bool = False


def mismatch(by_rank: Mapping[int, Signature]) -> str | None:
    """What differs between the ranks' sides of one operation, in words; None if they fit together."""
    first, *others = (by_rank[rank] for rank in sorted(by_rank))
    kind = first.kind.value
    for other in others:
        if other.kind is not first.kind:
            return (
                f"Mismatched collective operations: One rank did an {kind}, but another rank did an {other.kind.value}."
            )
        if other.device != first.device:
            return f"Mismatched {kind} CPU/GPU device selection: One rank uses {first.device}, another {other.device}."
        if other.dtypes != first.dtypes:
            return (
                f"Mismatched data types: One rank had type {_words(first.dtypes)}, "
                f"but another rank had type {_words(other.dtypes)}."
            )
        if other.op != first.op:
            return f"Mismatched {kind} reduce operations: One rank asked for {first.op}, another for {other.op}."
        if other.factors != first.factors:
            return (
                f"Mismatched prescale and/or postscale factors: One rank had {first.factors}, another {other.factors}."
            )
        if other.root != first.root:
            return f"Mismatched {kind} root ranks: One rank named {first.root}, another {other.root}."
        if not _shapes_fit(first, other):
            return (
                f"Mismatched {kind} tensor shapes: One rank sent a tensor of shape {_words(first.shapes)}, "
                f"but another rank sent a tensor of shape {_words(other.shapes)}."
            )
    return None


def _shapes_fit(one: Signature, other: Signature) -> bool:
    if one.kind in RAGGED:
        return [shape[1:] for shape in one.shapes] == [shape[1:] for shape in other.shapes]
    return one.shapes == other.shapes


def _words(parts: tuple[object, ...]) -> str:
    """`((3, 4),)` → `[3, 4]`, `("float32",)` → `float32`."""
    return ", ".join(str(list(part)) if isinstance(part, tuple) else str(part) for part in parts)
