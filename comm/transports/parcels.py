"""Who sends how many bytes to whom in one exchange; known to all ranks before it begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]
"""`(n_ranks, n_ranks)` bytes, by sender and receiver."""


@dataclass(frozen=True, slots=True, eq=False)
class Parcels:
    """The parcels of one exchange; those of one sender lie one behind the other in its outgoing buffer.

    Attributes:
        lengths: see `Lengths`.
        shared: each sender has one parcel only, which goes to all; then the rows of `lengths` are constant.
    """

    lengths: Lengths
    shared: bool = False

    @classmethod
    def to_all(cls, lengths: npt.ArrayLike) -> Parcels:
        """Each rank sends its one parcel to all: `(n_ranks,)` bytes."""
        each = np.asarray(lengths, dtype=np.int64)
        return cls(np.repeat(each[:, None], len(each), axis=1), shared=True)

    def piece(self, number: int, of: int) -> Parcels:
        """One of so many pieces, about equal, that each parcel is cut into."""
        return Parcels(self.lengths * (number + 1) // of - self.lengths * number // of, self.shared)

    def sent_by(self, rank: int) -> list[tuple[int, int]]:
        """Where in its outgoing buffer the parcels lie, by receiver: `[start, stop)`."""
        lengths = self.lengths[rank].tolist()
        if self.shared:
            return [(0, length) for length in lengths]
        stops = np.cumsum(self.lengths[rank]).tolist()
        return [(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)]

    def received_by(self, rank: int) -> list[int]:
        """Bytes by sender."""
        received: list[int] = self.lengths[:, rank].tolist()
        return received

    @property
    def largest_outgoing_bytes(self) -> int:
        """What the rank with the most to send has in its outgoing buffer."""
        return int((self.lengths.max(1) if self.shared else self.lengths.sum(1)).max())

    @property
    def empty(self) -> bool:
        """Nobody sends anything."""
        return not self.lengths.any()
