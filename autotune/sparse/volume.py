"""How long each path would take: what it sends, at the pace that was measured, and what it adds up (α, β, γ)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sirtaki.comm.sparse.plan import COLD_PATHS, SparsePath, SparsePlan

from .coverage import TouchCounts, coverage, knee, until_little_is_gained

BLOCK_ROWS = (1, 8, 64)
MOST_HOT_BYTES = 16 << 20
MOST_DENSE_BYTES = 1 << 30
"""Of buffers that hold hot rows, or all rows."""

HOT_SIZES = 24
"""As many sizes of the hot set are tried, beside those of the coverage curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What was measured between these ranks, the slowest of them.

    Attributes:
        exchange_s: of an exchange of next to nothing.
        exchange_bytes_per_s: that one rank receives.
        reduce_s: of an all-reduce of next to nothing.
        reduce_bytes_per_s: of the tensor that is reduced.
        add_bytes_per_s: of rows that one rank adds up.
    """

    exchange_s: float
    exchange_bytes_per_s: float
    reduce_s: float
    reduce_bytes_per_s: float
    add_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of one parameter.

    Attributes:
        n_rows: rows.
        row_bytes: of one.
        item_bytes: of one element.
        index_bytes: of the number of a row as it travels.
    """

    n_rows: int
    row_bytes: int
    item_bytes: int
    index_bytes: int


@dataclass(frozen=True, slots=True)
class VolumeModel:
    """Predicts plans for one parameter.

    Attributes:
        shape: of it.
        ranks: how many there are.
        counts: of its rows.
        pace: of these ranks.
    """

    shape: Shape
    ranks: int
    counts: TouchCounts
    pace: Pace

    def seconds(self, plan: SparsePlan) -> float:
        """How long a reduction by this plan takes."""
        touched, most, union = self.counts.touched, self.counts.most, self.counts.union
        if plan.path is SparsePath.DENSE:
            return self._reduce(self.shape.n_rows * self._flagged) + self._add(most)
        if plan.path is SparsePath.BLOCKS:
            bits = self._exchange((self.ranks - 1) * self.shape.n_rows / plan.block_rows / 8)
            rows = union if plan.block_rows == 1 else self._rows_in_blocks(plan.block_rows)
            row_bytes = self.shape.row_bytes if plan.block_rows == 1 else self._flagged
            return bits + self._reduce(rows * row_bytes) + self._add(most)
        if plan.path is SparsePath.HOT_COLD:
            hot = self.counts.of(plan.hot_rows)
            share = float(hot.sum()) / max(1, int(self.counts.counts.sum()))
            chance = hot / max(1, self.counts.n_samples)
            hot_union = float((1.0 - (1.0 - chance) ** self.ranks).sum())
            rest = 1.0 - share
            cold = self._cold(plan.cold, touched * rest, most * rest, max(0.0, union - hot_union))
            return self._reduce(len(hot) * self._flagged) + self._add(most * share + len(hot)) + cold
        return self._cold(plan.path, touched, most, union)

    @property
    def _flagged(self) -> float:
        """Bytes of a row that travels with an element that says whether it was touched."""
        return self.shape.row_bytes + self.shape.item_bytes

    def _cold(self, path: SparsePath, touched: float, most: float, union: float) -> float:
        row = self.shape.row_bytes + self.shape.index_bytes
        if path is SparsePath.GATHER:
            sent = max(touched - touched / self.ranks, most * (self.ranks - 1) / self.ranks)
            return self._exchange(0.0) + self._exchange(sent * row) + self._add(touched)
        others = (self.ranks - 1) / self.ranks
        rounds = 2 * self._exchange(0.0) + self._exchange(others * most * row) + self._exchange(others * union * row)
        return rounds + self._add(touched / self.ranks + union)

    def _rows_in_blocks(self, block_rows: int) -> float:
        chance = self.counts.counts / max(1, self.counts.n_samples)
        untouched = np.log1p(-np.minimum(chance, 1.0 - 1e-9)) * self.ranks
        begins = np.flatnonzero(np.diff(self.counts.rows // block_rows, prepend=-1))
        of_block = np.add.reduceat(untouched, begins) if len(begins) else np.zeros(0)
        return float((1.0 - np.exp(of_block)).sum()) * block_rows

    def _exchange(self, n_bytes: float) -> float:
        return self.pace.exchange_s + n_bytes / self.pace.exchange_bytes_per_s

    def _reduce(self, n_bytes: float) -> float:
        return self.pace.reduce_s + n_bytes / self.pace.reduce_bytes_per_s

    def _add(self, n_rows: float) -> float:
        return n_rows * self.shape.row_bytes / self.pace.add_bytes_per_s

    # ── candidates ───────────────────────────────────────────────────────────────────────────────────────────────

    def best_of(self, path: SparsePath) -> SparsePlan | None:
        """The fastest plan of a path; None if it makes no sense here."""
        plans = list(self._plans(path))
        return min(plans, key=self.seconds) if plans else None

    def ranked(self) -> list[SparsePlan]:
        """The best plan of each path, the fastest first; the same on all ranks that know the same."""
        found = [plan for path in SparsePath if (plan := self.best_of(path)) is not None]
        return sorted(found, key=self.seconds)

    def _plans(self, path: SparsePath) -> Iterator[SparsePlan]:
        if path is SparsePath.BLOCKS:
            for block_rows in BLOCK_ROWS:
                yield SparsePlan(path=path, block_rows=block_rows)
        elif path is SparsePath.HOT_COLD:
            ranked = self.counts.ranked()
            for size in self._hot_sizes(ranked):
                hot = tuple(np.sort(ranked[:size]).tolist())
                for cold in COLD_PATHS:
                    yield SparsePlan(path=path, hot_rows=hot, cold=cold)
        elif path is not SparsePath.DENSE or self.shape.n_rows * self._flagged <= MOST_DENSE_BYTES:
            yield SparsePlan(path=path)

    def _hot_sizes(self, ranked: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
        """Of the coverage curve, where a row's chance makes it worth its place, and some between."""
        counts = self.counts.of(ranked)
        curve = coverage(counts)
        most = min(len(ranked), int(MOST_HOT_BYTES / self._flagged))
        if most < 1:
            return []
        # In a ring each rank sends a dense row 2(P-1)/P times, in an all-gather of rows P-1 times its chance.
        worth = int((counts > 2.0 / self.ranks * self.counts.n_samples).sum())
        between = np.geomspace(1, most, HOT_SIZES).astype(int).tolist()
        sizes = {knee(curve), until_little_is_gained(curve), worth, *between}
        return sorted(size for size in sizes if 1 <= size <= most)
