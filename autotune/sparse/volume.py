"""How long each path would take: what it sends, at the pace that was measured, and what it adds up (α, β, γ)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from sirtaki.comm.sparse.plan import COLD_PATHS, SparsePath, SparsePlan

from .coverage import TouchCounts, coverage, knee, until_little_is_gained
from .traffic import Shape, Traffic, traffic

BLOCK_ROWS = (1, 8, 64)
MOST_HOT_BYTES = 16 << 20
MOST_DENSE_BYTES = 1 << 30
"""Of buffers that hold hot rows, or all rows."""

HOT_SIZES = 24
"""As many sizes of the hot set are tried, beside those of the coverage curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPace:
    """What was measured of sums through an aggregator, of the slowest rank.

    Attributes:
        start_s: of a sum of next to nothing.
        bytes_per_s: of the tensor that is summed.
    """

    start_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What was measured between these ranks, the slowest of them.

    Attributes:
        exchange_s: of an exchange of next to nothing.
        exchange_bytes_per_s: that one rank receives.
        reduce_s: of an all-reduce of next to nothing.
        reduce_bytes_per_s: of the tensor that is reduced.
        add_bytes_per_s: of rows that one rank adds up.
        aggregator: None = there is none.
    """

    exchange_s: float
    exchange_bytes_per_s: float
    reduce_s: float
    reduce_bytes_per_s: float
    add_bytes_per_s: float
    aggregator: HotPace | None = None


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
        work, pace = self.traffic(plan), self.pace
        aggregated_s = 0.0
        if work.aggregations:
            assert pace.aggregator is not None
            hot = pace.aggregator
            aggregated_s = work.aggregations * hot.start_s + work.aggregated_bytes / hot.bytes_per_s
        return (
            aggregated_s
            + work.exchanges * pace.exchange_s
            + work.exchanged_bytes / pace.exchange_bytes_per_s
            + work.reductions * pace.reduce_s
            + work.reduced_bytes / pace.reduce_bytes_per_s
            + work.added_rows * self.shape.row_bytes / pace.add_bytes_per_s
        )

    def traffic(self, plan: SparsePlan) -> Traffic:
        """What a reduction by this plan consists of."""
        return traffic(plan, self.shape, self.ranks, self.counts)

    # ── candidates ───────────────────────────────────────────────────────────────────────────────────────────────

    def best_of(self, path: SparsePath) -> SparsePlan | None:
        """The fastest plan of a path without an aggregator; None if it makes no sense here."""
        plans = list(self._plans(path))
        return min(plans, key=self.seconds) if plans else None

    def best_aggregated(self) -> SparsePlan | None:
        """The fastest plan whose hot rows an aggregator sums; None without one, or without hot rows.

        It has at least the rows up to the knee of the coverage curve, as the paper's switch: with a single row, which
        is the fastest where an aggregator is slow, it would be there in name only.
        """
        if self.pace.aggregator is None:
            return None
        plans = [replace(plan, aggregated=True) for plan in self._plans(SparsePath.HOT_COLD)]
        bend = knee(coverage(self.counts.descending()))
        least = min(bend, max((len(plan.hot_rows) for plan in plans), default=0))
        return min((plan for plan in plans if len(plan.hot_rows) >= least), key=self.seconds, default=None)

    def ranked(self) -> list[SparsePlan]:
        """The best plan of each path without an aggregator, the fastest first; alike on ranks that know the same."""
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
        elif path is not SparsePath.DENSE or self.shape.n_rows * self.shape.flagged_bytes <= MOST_DENSE_BYTES:
            yield SparsePlan(path=path)

    def _hot_sizes(self, ranked: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
        """Of the coverage curve, where a row's chance makes it worth its place, and some between."""
        counts = self.counts.of(ranked)
        curve = coverage(counts)
        most = min(len(ranked), int(MOST_HOT_BYTES / self.shape.flagged_bytes))
        if most < 1:
            return []
        # In a ring each rank sends a dense row 2(P-1)/P times, in an all-gather of rows P-1 times its chance.
        worth = int((counts > 2.0 / self.ranks * self.counts.n_samples).sum())
        between = np.geomspace(1, most, HOT_SIZES).astype(int).tolist()
        sizes = {knee(curve), until_little_is_gained(curve), worth, *between}
        return sorted(size for size in sizes if 1 <= size <= most)
