"""Some rows of a parameter with their numbers: added up on one rank, and as they travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sirtaki.comm.transports.scaling import HALF_DTYPES

ALIGNMENT_BYTES = 16
"""Parcels are as long as a multiple of this, so that what lies behind one another can be read in place."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of one parameter, each once.

    Attributes:
        indices: ascending, int64, `(n,)`.
        values: `(n, width)`.
    """

    indices: torch.Tensor
    values: torch.Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def of(self, places: torch.Tensor) -> Rows:
        """Those in these places, which keep their order."""
        return Rows(self.indices[places], self.values[places])


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of `dtype` are added up."""
    return torch.float32 if dtype in HALF_DTYPES else dtype


def coalesced(gradient: torch.Tensor) -> Rows:
    """The rows of a sparse COO tensor on the host with one sparse dimension; never its own memory.

    What is there several times is added up, halves in float32 and rounded once.
    """
    indices, values = gradient._indices()[0], gradient._values().flatten(1) if gradient.dim() > 1 else None
    if values is None:
        values = gradient._values()[:, None]
    if gradient.is_coalesced():
        return Rows(indices.clone(), values.clone())
    present, place = torch.unique(indices, return_inverse=True)
    total = torch.zeros(len(present), values.shape[1], dtype=wide(values.dtype))
    total.index_add_(0, place, values.to(total.dtype))
    return Rows(present, total.to(values.dtype))


def merged(parts: Sequence[Rows]) -> Rows:
    """The sum of rows of several ranks, in the order of the ranks, so that it is the same wherever it is made."""
    dtype = parts[0].values.dtype
    present, place = torch.unique(torch.cat([part.indices for part in parts]), return_inverse=True)
    total = torch.zeros(len(present), parts[0].values.shape[1], dtype=wide(dtype))
    for part, places in zip(parts, torch.split(place, [len(part) for part in parts]), strict=True):
        total.index_add_(0, places, part.values.to(total.dtype))
    return Rows(present, total.to(dtype))


def disjoint(parts: Sequence[Rows]) -> Rows:
    """Rows of which no two parts have the same."""
    indices, order = torch.cat([part.indices for part in parts]).sort()
    return Rows(indices, torch.cat([part.values for part in parts])[order])


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How rows of one parameter travel: all numbers, then all values, each padded.

    Attributes:
        n_rows: of the parameter.
        width: elements of a row.
        dtype: of the values.
    """

    n_rows: int
    width: int
    dtype: torch.dtype

    @property
    def index_dtype(self) -> torch.dtype:
        """Of numbers of rows: the short one where they fit."""
        return torch.int32 if self.n_rows <= 2**31 else torch.int64

    @property
    def row_bytes(self) -> int:
        """Of one row without its number."""
        return self.width * self.dtype.itemsize

    def parcel_bytes(self, n: int) -> int:
        """Of a parcel with `n` rows."""
        return _padded(n * self.index_dtype.itemsize) + _padded(n * self.row_bytes)

    def pack(self, rows: Rows) -> torch.Tensor:
        """A parcel of these rows: bytes."""
        parcel = torch.empty(self.parcel_bytes(len(rows)), dtype=torch.uint8)
        indices, values = self._views(parcel, len(rows))
        indices.copy_(rows.indices)
        values.copy_(rows.values)
        return parcel

    def unpack(self, parcel: torch.Tensor, n: int) -> Rows:
        """The `n` rows of a parcel; the values are in its memory."""
        indices, values = self._views(parcel, n)
        return Rows(indices.long(), values)

    def _views(self, parcel: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        index_bytes = n * self.index_dtype.itemsize
        begin = _padded(index_bytes)
        indices = parcel[:index_bytes].view(self.index_dtype)
        values = parcel[begin : begin + n * self.row_bytes].view(self.dtype)
        return indices, values.view(n, self.width)


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
