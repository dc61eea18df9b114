"""What an eager operation is, and what may differ between the ranks that submit it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

DIGEST_BYTES = 16
FUSED_BYTES = 8 * 1024**2
"""All-reduces that one round brings travel together up to this size."""
FUSIBLE_BYTES = 256 * 1024
"""A tensor larger than this gains nothing from company."""


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

ADASUM = "adasum"
"""The `op` that is no element-wise reduction, so tensors cannot travel joined together."""


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
        by_all: ranks that have joined submit it, too; of other operations they take part in all-reduces, with zeros.
        problem: why this rank cannot take part; the operation then fails on all ranks.
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
    by_all: bool = False
    problem: str = ""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], *, name: str, kind: Kind, **rest: Any) -> Signature:
        """This rank's side of an operation on these tensors; `rest` are further fields (hence Any)."""
        return cls(
            name=name,
            kind=kind,
            shapes=tuple([tuple(tensor.shape) for tensor in tensors]),
            dtypes=tuple([str(tensor.dtype)[len("torch.") :] for tensor in tensors]),
            device=tensors[0].device.type if tensors else "cpu",
            **rest,
        )

    def digest(self) -> int:
        """Equal on two ranks if and only if `mismatch` finds nothing between them (up to a chance of 2**-128)."""
        what = (
            self.name,
            self.kind.value,
            tuple(map(self._fixed, self.shapes)),
            self.dtypes,
            self.op,
            self.root,
            self.factors,
            self.device,
            self.problem,
        )
        return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=DIGEST_BYTES).digest(), "big")

    def _fixed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The part of a shape that must be the same on all ranks; -1 = any number of rows."""
        return (-1, *shape[1:]) if self.kind in RAGGED and shape else shape

    @property
    def needs_data(self) -> bool:
        """A rank that has joined cannot take part."""
        return self.kind is not Kind.ALLREDUCE and not self.by_all

    @property
    def size_bytes(self) -> int:
        """Of all tensors together."""
        return sum(
            math.prod(shape) * getattr(torch, dtype).itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


Progress = tuple[int, ...]
"""How far a rank has got; of those that join between the same two rounds, the one that has got farthest joins last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """What one rank says of itself when the ranks exchange what they have pending; picklable.

    Attributes:
        signatures: of its pending operations.
        joined: it has no more data since it has got so far; None = it has data.
        closing: it shuts down.
        unnamed: how many unnamed operations it has submitted.
    """

    signatures: list[Signature]
    joined: Progress | None
    closing: bool
    unnamed: int


def mismatch(by_rank: Mapping[int, Signature]) -> str | None:
    """What differs between the ranks' sides of one operation, in words; None if they fit together."""
    first, *others = (by_rank[rank] for rank in sorted(by_rank))
    kind = first.kind.value
    for rank in sorted(by_rank):
        if by_rank[rank].problem:
            return f"Rank {rank} cannot take part in {by_rank[rank].kind.value}: {by_rank[rank].problem}"
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
        if [other._fixed(shape) for shape in other.shapes] != [first._fixed(shape) for shape in first.shapes]:
            return (
                f"Mismatched {kind} tensor shapes: One rank sent a tensor of shape {_words(first.shapes)}, "
                f"but another rank sent a tensor of shape {_words(other.shapes)}."
            )
    return None


def batches(ready: Mapping[str, Signature]) -> Iterator[list[str]]:
    """Names that go in one message, in the order in which to perform them; the same on all ranks.

    Small all-reduces with the same operation and factors share a message; anything else goes alone.
    """
    open_batches: dict[object, list[str]] = {}
    filled_bytes: dict[object, int] = {}
    for name in sorted(ready):
        signature = ready[name]
        size_bytes = signature.size_bytes if signature.kind is Kind.ALLREDUCE and signature.op != ADASUM else None
        if size_bytes is None or size_bytes > FUSIBLE_BYTES:
            yield [name]
            continue
        key = (signature.op, signature.factors)
        if filled_bytes.get(key, 0) + size_bytes > FUSED_BYTES:
            yield open_batches.pop(key)
            filled_bytes[key] = 0
        open_batches.setdefault(key, []).append(name)
        filled_bytes[key] = filled_bytes.get(key, 0) + size_bytes
    yield from open_batches.values()


def _words(parts: tuple[object, ...]) -> str:
    """`((3, 4),)` → `[3, 4]`, `("float32",)` → `float32`."""
    return ", ".join(str(list(part)) if isinstance(part, tuple) else str(part) for part in parts)
