"""How often rows are touched, and how many of them carry most touches (LIBRA's switch paper, § 3.3: hot parameters).

The coverage curve says which part of all touches the k most touched rows have. Few carry most of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Curve = npt.NDArray[np.float64]

STEP_ROWS = 1000
"""By so many rows at a time the hot set grows."""

LEAST_GAIN = 0.01
"""A step that covers less than this more is the last."""

CURVE_POINTS = 24


class TouchCounts:
    """Exact counts, the same on all ranks if they note the same; of rows that nobody touched there is nothing.

    Attributes:
        rows: that were touched, ascending: `(n,)`.
        counts: how many ranks touched each of them, over all iterations noted: `(n,)`.
        n_samples: ranks times iterations noted.
        touched: rows touched in an iteration by all ranks together, mean.
        most: rows touched by the rank that touched the most, mean.
        union: rows touched by any rank in an iteration, mean.
    """

    def __init__(self) -> None:
        self.rows, self.counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self.n_samples = 0
        self._totals = np.zeros(3)
        self._n = 0

    def note(self, by_rank: Sequence[npt.NDArray[np.int64]], union: int) -> None:
        """One iteration: the rows that each rank touched, each once, and how many rows that are."""
        sizes = [len(rows) for rows in by_rank]
        self.rows, place = np.unique(np.concatenate([self.rows, *by_rank]), return_inverse=True)
        ones = np.ones(sum(sizes), dtype=np.int64)
        counts = np.bincount(place, weights=np.concatenate([self.counts, ones]), minlength=len(self.rows))
        self.counts = counts.astype(np.int64)
        self.note_totals(sum(sizes), max(sizes), union)
        self.n_samples += len(by_rank)

    def note_totals(self, touched: float, most: float, union: float) -> None:
        """One iteration of which rows are not known: only how many; see above."""
        self._totals += touched, most, union
        self._n += 1

    @property
    def touched(self) -> float:
        """See above."""
        return float(self._totals[0]) / max(1, self._n)

    @property
    def most(self) -> float:
        """See above."""
        return float(self._totals[1]) / max(1, self._n)

    @property
    def union(self) -> float:
        """See above."""
        return float(self._totals[2]) / max(1, self._n)

    def ranked(self) -> npt.NDArray[np.int64]:
        """Rows that were touched, the most touched first; of equal ones the lower number."""
        return self.rows[np.argsort(-self.counts, kind="stable")]

    def descending(self) -> npt.NDArray[np.int64]:
        """The counts of rows that were touched, the largest first."""
        return np.sort(self.counts)[::-1]

    def of(self, rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The counts of rows that were touched."""
        return self.counts[np.searchsorted(self.rows, np.asarray(rows, dtype=np.int64))]


def coverage(counts: npt.NDArray[np.int64]) -> Curve:
    """Which part of all touches the first k rows have, k = 1 …: `(n,)`; of counts that descend."""
    return np.cumsum(counts, dtype=np.float64) / max(1, int(counts.sum()))


def knee(curve: Curve) -> int:
    """How many rows lie before the point of the curve that is farthest above its chord; 0 = there is none."""
    if not len(curve):
        return 0
    chord = np.arange(1, len(curve) + 1) / len(curve)
    return int(np.argmax(curve - chord)) + 1 if (curve > chord).any() else 0


def until_little_is_gained(curve: Curve, *, step: int = STEP_ROWS, least: float = LEAST_GAIN) -> int:
    """How many rows there are when `step` more would cover less than `least` more (§ 5.3)."""
    size = 0
    while size < len(curve):
        after = min(size + step, len(curve))
        if curve[after - 1] - (curve[size - 1] if size else 0.0) < least:
            break
        size = after
    return size


def curve_points(counts: TouchCounts, *, also: int = 0) -> tuple[tuple[int, float], ...]:
    """A few points of the coverage curve, `(rows, part)`, evenly spread by the logarithm of the rows, the last at 1.

    Args:
        counts: of the rows; where there are none, there is no point.
        also: a number of rows that has a point, too; 0 = none.
    """
    curve = coverage(counts.descending())
    if not len(curve):
        return ()
    places = {*np.geomspace(1, len(curve), CURVE_POINTS).astype(int).tolist(), len(curve), *([also] if also else [])}
    return tuple((place, round(float(curve[place - 1]), 4)) for place in sorted(places))
