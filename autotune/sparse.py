"""Choice of the algorithm that reduces the sparse gradient of an embedding.

The module has counts of accesses to the embedding's rows and their coverage curve, models of the traffic and time of
each plan (algorithm with its parameters), the search method (arm) that proposes plans, the detection of changed row
accesses, and summaries for reports.

A row of an embedding is "touched" by a rank if the rank's sparse gradient contains the row. "Hot" rows are the most
frequently touched rows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from sirtaki.comm.sparse.plan import COLD_PATHS, GATHER, SparsePath, SparsePlan
from sirtaki.comm.sparse.worker import RowFormat
from sirtaki.errors import require
from sirtaki.measures import ring_bytes

from .trial import Proposal, Trial

Curve = npt.NDArray[np.float64]

STEP_ROWS = 1000
"""Number of rows by which `saturation_size` increases the set of an embedding's most frequently accessed (hot) rows."""

LEAST_GAIN = 0.01
"""Minimum gain in coverage (fraction of all row accesses) for which `saturation_size` adds another `STEP_ROWS` rows."""

CURVE_POINTS = 24


class TouchCounts:
    """Exact counts of the accesses to an embedding's rows, from the rows of its sparse gradients.

    They are equal on all ranks if the same iterations are added on all ranks.

    Attributes:
        rows: indices of the rows that any rank's gradient contained ("touched" rows), ascending, `(n,)`.
        counts: number of accesses to each row in `rows`, counted once per rank and iteration, `(n,)`.
        n_samples: number of ranks times the number of iterations whose row indices are known.
        touched: mean number of touched rows in an iteration, summed over ranks.
        most: mean number of touched rows in an iteration on the rank that touches the most rows.
        union: mean number of distinct touched rows of all ranks in an iteration.
        n: number of added iterations.
    """

    def __init__(self) -> None:
        self.rows, self.counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self.n_samples = self.n = 0
        self.touched = self.most = self.union = 0.0
        self._totals = np.zeros(3)

    def add(self, by_rank: Sequence[npt.NDArray[np.int64]], union: int) -> None:
        """Add the row accesses of one iteration.

        Args:
            by_rank: for each rank, the distinct rows that its gradient contains.
            union: number of distinct rows of all ranks together.
        """
        sizes = [len(rows) for rows in by_rank]
        self.rows, place = np.unique(np.concatenate([self.rows, *by_rank]), return_inverse=True)
        ones = np.ones(sum(sizes), dtype=np.int64)
        counts = np.bincount(place, weights=np.concatenate([self.counts, ones]), minlength=len(self.rows))
        self.counts = counts.astype(np.int64)
        self.add_totals(sum(sizes), max(sizes), union)
        self.n_samples += len(by_rank)

    def add_totals(self, touched: float, most: float, union: float) -> None:
        """Add the row accesses of one iteration, if only the numbers of rows are known, not the rows' indices.

        Args:
            touched: number of rows in the ranks' gradients ("touched" rows), summed over ranks.
            most: number of touched rows on the rank that touches the most rows.
            union: number of distinct rows of all ranks together.
        """
        self._totals += touched, most, union
        self.n += 1
        self.touched, self.most, self.union = (self._totals / self.n).tolist()

    def ranked(self) -> npt.NDArray[np.int64]:
        """Return the rows that any gradient contained, the most frequently accessed first, then by index."""
        return self.rows[np.argsort(-self.counts, kind="stable")]

    def descending(self) -> npt.NDArray[np.int64]:
        """Return the numbers of accesses to the rows that any gradient contained, in descending order."""
        return np.sort(self.counts)[::-1]

    def of(self, rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the number of accesses to each of `rows`; 0 for rows that no gradient contained."""
        wanted = np.asarray(rows, dtype=np.int64)
        # For a row above all touched rows, `searchsorted` returns the index after the last touched row. At this index
        # is the appended -1, which matches no row.
        places = np.searchsorted(self.rows, wanted)
        return np.where(np.append(self.rows, -1)[places] == wanted, np.append(self.counts, 0)[places], 0)


def coverage(counts: npt.NDArray[np.int64]) -> Curve:
    """Return the coverage curve: the fraction of row accesses that go to the k most frequently accessed rows.

    The shape is `(n,)`, for k = 1, 2, …, n.

    Args:
        counts: numbers of accesses to the rows, in descending order, `(n,)`.
    """
    return np.cumsum(counts, dtype=np.float64) / max(1, int(counts.sum()))


def elbow(curve: Curve) -> int:
    """Return the number of rows at a coverage curve's elbow: the point farthest above the straight line to its end.

    Return 0 if the curve has no elbow.
    """
    if not len(curve):
        return 0
    chord = np.arange(1, len(curve) + 1) / len(curve)
    return int(np.argmax(curve - chord)) + 1 if (curve > chord).any() else 0


def saturation_size(curve: Curve, *, step: int = STEP_ROWS, least: float = LEAST_GAIN) -> int:
    """Return the number of rows at which a coverage curve is nearly flat.

    From there on, `step` more rows increase the coverage (fraction of all row accesses) by less than `least`.
    """
    size = 0
    while size < len(curve):
        after = min(size + step, len(curve))
        if curve[after - 1] - (curve[size - 1] if size else 0.0) < least:
            break
        size = after
    return size


def curve_points(counts: TouchCounts, *, also: int = 0) -> tuple[tuple[int, float], ...]:
    """Return points (number k of rows, coverage) of the coverage curve, equally spaced on a log scale up to coverage 1.

    Coverage is the fraction of all row accesses that go to the k most frequently accessed rows.

    Args:
        counts: counted row accesses. Without accesses, the curve has no points.
        also: number of rows at an additional point; 0 = no additional point.
    """
    curve = coverage(counts.descending())
    if not len(curve):
        return ()
    places = {*np.geomspace(1, len(curve), CURVE_POINTS).astype(int).tolist(), len(curve), *([also] if also else [])}
    return tuple((place, round(float(curve[place - 1]), 4)) for place in sorted(places))


LONG_INDEX_BYTES = 8
"""Size of a row index in PyTorch's sparse gradients (int64)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Traffic and work of reducing a sparse gradient once, on the busiest rank.

    Attributes:
        exchanges: number of exchanges (all-to-alls or all-gathers).
        exchanged_bytes: number of bytes that the rank receives in exchanges.
        reductions: number of all-reduces.
        reduced_bytes: total size of the all-reduced tensors.
        added_rows: number of rows that the rank adds into a buffer, besides the additions in all-reduces.
    """

    exchanges: int = 0
    exchanged_bytes: float = 0.0
    reductions: int = 0
    reduced_bytes: float = 0.0
    added_rows: float = 0.0

    def received_bytes(self, ranks: int) -> float:
        """Return the bytes that the busiest rank receives in total, if all-reduces use the ring algorithm."""
        return self.exchanged_bytes + ring_bytes(self.reduced_bytes, ranks)


def dense_bytes(form: RowFormat, ranks: int) -> float:
    """Return the bytes that a rank receives if a whole sparse gradient is all-reduced as a dense tensor."""
    return ring_bytes(form.n_rows * form.row_bytes, ranks)


def horovod_bytes(form: RowFormat, ranks: int, looked_up: float) -> float:
    """Return the bytes that a rank receives if it reduces as Horovod does: all-gathers of uncoalesced rows and indices.

    Args:
        form: format of the parameter's rows.
        ranks: number of ranks.
        looked_up: number of rows in each rank's sparse gradient, including duplicates.
    """
    return (ranks - 1) * looked_up * (form.row_bytes + LONG_INDEX_BYTES)


def traffic(plan: SparsePlan, form: RowFormat, ranks: int, counts: TouchCounts) -> Traffic:
    """Estimate the traffic of reducing a parameter's sparse gradient by a plan (an algorithm with its parameters).

    Args:
        plan: plan that reduces the gradient.
        form: format of the parameter's rows.
        ranks: number of ranks.
        counts: counted accesses to the parameter's rows.
    """
    touched, most, union = counts.touched, counts.most, counts.union
    if plan.path is SparsePath.DENSE:
        return Traffic(reductions=1, reduced_bytes=form.n_rows * form.flagged_bytes, added_rows=most)
    if plan.path is SparsePath.BLOCKS:
        single = plan.block_rows == 1
        rows = union if single else _rows_in_blocks(plan.block_rows, ranks, counts)
        return Traffic(
            exchanges=1,
            exchanged_bytes=(ranks - 1) * form.n_rows / plan.block_rows / 8,
            reductions=1,
            reduced_bytes=rows * (form.row_bytes if single else form.flagged_bytes),
            added_rows=most,
        )
    if plan.path is SparsePath.HOT_COLD:
        hot = counts.of(plan.hot_rows)
        share = float(hot.sum()) / max(1, int(counts.counts.sum()))
        chance = hot / max(1, counts.n_samples)
        hot_union = float((1.0 - (1.0 - chance) ** ranks).sum())
        rest = 1.0 - share
        cold = _plain(plan.cold, form, ranks, touched * rest, most * rest, max(0.0, union - hot_union))
        n_bytes, added_rows = len(hot) * form.flagged_bytes, most * share + len(hot) + cold.added_rows
        return replace(cold, reductions=1, reduced_bytes=n_bytes, added_rows=added_rows)
    return _plain(plan.path, form, ranks, touched, most, union)


def _plain(path: SparsePath, form: RowFormat, ranks: int, touched: float, most: float, union: float) -> Traffic:
    """Estimate the traffic of an algorithm that sends each row with its index (gather, owner)."""
    row_bytes, others = form.row_bytes + form.index_dtype.itemsize, (ranks - 1) / ranks
    if path is SparsePath.GATHER:
        sent = max(touched - touched / ranks, most * others)
        return Traffic(exchanges=2, exchanged_bytes=sent * row_bytes, added_rows=touched)
    return Traffic(exchanges=4, exchanged_bytes=others * (most + union) * row_bytes, added_rows=touched / ranks + union)


def _rows_in_blocks(block_rows: int, ranks: int, counts: TouchCounts) -> float:
    """Estimate the total number of rows in the blocks that are all-reduced in an iteration.

    A block is `block_rows` consecutive rows. It is all-reduced if the gradient of any rank contains one of its rows.
    """
    chance = counts.counts / max(1, counts.n_samples)
    untouched = np.log1p(-np.minimum(chance, 1.0 - 1e-9)) * ranks
    begins = np.flatnonzero(np.diff(counts.rows // block_rows, prepend=-1))
    of_block = np.add.reduceat(untouched, begins) if len(begins) else np.zeros(0)
    return float((1.0 - np.exp(of_block)).sum()) * block_rows


BLOCK_ROWS = (1, 8, 64)
"""Block sizes (numbers of consecutive rows) that are tried for the algorithm that all-reduces blocks of rows.

The algorithm all-reduces each block that has a row in any rank's gradient.
"""

MOST_HOT_BYTES = 16 << 20
"""Maximum size of the dense buffer in which an embedding's most frequently accessed (hot) rows are all-reduced."""

MOST_DENSE_BYTES = 1 << 30
"""Maximum size of an embedding whose sparse gradient may be all-reduced as a dense tensor."""

HOT_SIZES = 24
"""Number of sizes that are tried for the set of an embedding's most frequently accessed (hot) rows.

Further sizes are derived from the coverage curve.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCosts:
    """Measured costs of collectives and additions, on the slowest rank.

    Attributes:
        exchange_s: time of an exchange (all-to-all or all-gather) of a few bytes.
        exchange_bytes_per_s: bytes that a rank receives per second in an exchange.
        reduce_s: time of an all-reduce of a few bytes.
        reduce_bytes_per_s: bytes of a tensor that are all-reduced per second.
        add_bytes_per_s: bytes of rows that a rank adds to others per second.
    """

    exchange_s: float
    exchange_bytes_per_s: float
    reduce_s: float
    reduce_bytes_per_s: float
    add_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class VolumeModel:
    """Model that predicts how long each plan takes to reduce one parameter's sparse gradient, from the plan's traffic.

    A plan is an algorithm with its parameters.

    Attributes:
        form: format of the parameter's rows.
        ranks: number of ranks.
        counts: counted accesses to the parameter's rows.
        pace: measured costs of collectives and additions.
    """

    form: RowFormat
    ranks: int
    counts: TouchCounts
    pace: CollectiveCosts

    def seconds(self, plan: SparsePlan) -> float:
        """Predict the time of reducing the parameter's gradient once by a plan, in seconds."""
        work, pace = traffic(plan, self.form, self.ranks, self.counts), self.pace
        parts = [
            (work.exchanges, pace.exchange_s, work.exchanged_bytes, pace.exchange_bytes_per_s),
            (work.reductions, pace.reduce_s, work.reduced_bytes, pace.reduce_bytes_per_s),
            (0, 0.0, work.added_rows * self.form.row_bytes, pace.add_bytes_per_s),
        ]
        return sum(n * start_s + (n_bytes and n_bytes / bytes_per_s) for n, start_s, n_bytes, bytes_per_s in parts)

    # ── candidate plans ───────────────────────────────────────────────────────────────────────────────────────────────

    def best_of(self, path: SparsePath) -> SparsePlan | None:
        """Return the plan with the shortest predicted time among those of one algorithm (path).

        None if the algorithm cannot reduce the parameter.
        """
        plans = list(self._plans(path))
        return min(plans, key=self.seconds) if plans else None

    def ranked(self) -> list[SparsePlan]:
        """Return the plan with the shortest predicted time of each algorithm (path), the fastest first.

        The result is deterministic, so that it is equal on all ranks.
        """
        found = [plan for path in SparsePath if (plan := self.best_of(path)) is not None]
        return sorted(found, key=self.seconds)

    def candidates(self, fixed: SparsePath | None) -> list[SparsePlan]:
        """Return the plans to try, the one predicted to be fastest first.

        Args:
            fixed: the only permitted algorithm (path); None = all algorithms.
        """
        if fixed is not None:
            best = self.best_of(fixed)
            return [GATHER if best is None else best]
        ranked = self.ranked()
        limit_s = HOPELESS * self.seconds(ranked[0])
        return [plan for plan in ranked if self.seconds(plan) <= limit_s][:N_CANDIDATES]

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
        elif path is not SparsePath.DENSE or self.form.n_rows * self.form.flagged_bytes <= MOST_DENSE_BYTES:
            yield SparsePlan(path=path)

    def _hot_sizes(self, ranked: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[int]:
        """Return how many of the most frequently accessed (hot) rows to try to all-reduce as one dense buffer.

        The coverage curve is the share of all accesses that go to the first n rows. The numbers are the curve's elbow,
        the n from which it no longer rises, the number of rows that are cheaper to all-reduce than to gather, and
        numbers equally spaced on a log scale.
        """
        counts = self.counts.of(ranked)
        curve = coverage(counts)
        most = min(len(ranked), int(MOST_HOT_BYTES / self.form.flagged_bytes))
        if most < 1:
            return []
        # With P ranks, each rank sends a row 2(P-1)/P times in a ring all-reduce. In an all-gather, each rank that
        # touches the row sends it P-1 times. All-reducing is cheaper for rows that a rank touches with a probability
        # above 2/P.
        cheaper_dense = int((counts > 2.0 / self.ranks * self.counts.n_samples).sum())
        spaced = np.geomspace(1, most, HOT_SIZES).astype(int).tolist()
        sizes = {elbow(curve), saturation_size(curve), cheaper_dense, *spaced}
        return sorted(size for size in sizes if 1 <= size <= most)


LEARNING_ITERATIONS = 8
"""Number of iterations in which accesses to an embedding's rows are counted, before its plans are compared."""

N_CANDIDATES = 3
"""Maximum number of plans that are tried for reducing one parameter's sparse gradient."""

HOPELESS = 3.0
"""Maximum predicted time of a plan that is tried for a sparse gradient, relative to the shortest predicted time."""

TRIAL_BUDGET = 60
"""Maximum number of training iterations of the search for the fastest plan for a parameter's sparse gradient."""

LOST_COVERAGE = 0.9
"""A new plan is chosen if the coverage of the hot rows drops below this fraction of its value at the last choice.

Coverage is the fraction of all row accesses that go to an embedding's most frequently accessed (hot) rows.
"""

OTHER_VOLUME = 1.5
"""A new plan is chosen if the number of rows in the ranks' sparse gradients changes by at least this factor."""

MEMORY = 0.1
"""Weight of the newest iteration in the moving averages of row accesses by which `AccessWatch` detects changes."""

LEAST_WATCHED = 20
"""Minimum number of iterations before `AccessWatch` reports a first change. Each report doubles this number."""


@dataclass(frozen=True, slots=True)
class AccessSample:
    """Numbers of an embedding's rows that the ranks accessed in one iteration. Equal on all ranks.

    Attributes:
        n_touched: number of rows in the ranks' gradients ("touched" rows), summed over ranks.
        n_hot: number of touched rows that belong to the plan's most frequently accessed (hot) rows.
        union: number of distinct touched rows of all ranks.
        by_rank: rows that each rank touched; empty if the plan does not send row indices to all ranks.
    """

    n_touched: int
    n_hot: int
    union: int
    by_rank: Sequence[npt.NDArray[np.int64]] = ()


@dataclass(slots=True, kw_only=True)
class SparseDecision:
    """Plan that reduces one parameter's sparse gradient, with the data behind the choice. Equal on all ranks.

    Attributes:
        plan: plan for the next iteration.
        candidates: plans to compare. The first one is the default. It is used unless another plan is proved faster.
        learned: counted row accesses from which the candidates were derived; None before accesses have been counted.
        predicted_s: predicted time of each candidate; empty without predictions.
        measured_s: median measured time of each candidate, NaN for candidates without a measurement; empty before
            trials.
    """

    plan: SparsePlan = GATHER
    candidates: Sequence[SparsePlan] = ()
    learned: TouchCounts | None = None
    predicted_s: Sequence[float] = ()
    measured_s: Sequence[float] = ()


class VolumeArm:
    """Search method (arm) that proposes plans for reducing a sparse gradient, the one predicted to be fastest first."""

    name = "traffic volumes"

    def __init__(self, plans: Sequence[SparsePlan]) -> None:
        self._pending = list(plans)

    def ask(self, n: int = 1) -> Sequence[Proposal[SparsePlan]]:
        """Return up to `n` plans that have not been proposed yet, in the order of the constructor's `plans`."""
        asked, self._pending = self._pending[:n], self._pending[n:]
        return [Proposal(arm=self.name, knobs=plan) for plan in asked]

    def tell(self, trials: Sequence[Trial[SparsePlan]]) -> None:
        """Ignore the trials, because the order of proposals does not depend on them."""


class AccessWatch:
    """Detector of changes in the accesses to an embedding's rows since its plan was chosen.

    A change means that other, more or fewer rows are accessed.
    """

    def __init__(self, *, covered: float, touched: float, least: int) -> None:
        """Create a detector. The arguments describe the row accesses when the plan was chosen.

        Args:
            covered: fraction of accesses that went to the plan's most frequently accessed (hot) rows when the plan was
                chosen.
            touched: number of rows in the gradients of an iteration when the plan was chosen, summed over ranks.
            least: minimum number of iterations before a change is reported.
        """
        self._covered, self._touched, self._least = covered, touched, least
        self._hot_now, self._touched_now, self._n = covered * touched, touched, 0

    def changed(self, seen: AccessSample) -> bool:
        """Add the row accesses of an iteration, and return whether they have changed since the plan was chosen."""
        if not seen.n_touched:
            return False
        self._n += 1
        self._hot_now += MEMORY * (seen.n_hot - self._hot_now)
        self._touched_now += MEMORY * (seen.n_touched - self._touched_now)
        if self._n < self._least:
            return False
        ratio = self._touched_now / self._touched
        lost = self._hot_now < LOST_COVERAGE * self._covered * self._touched_now
        return lost or not 1.0 / OTHER_VOLUME < ratio < OTHER_VOLUME


MB = 1e6
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=sys.float_info.max)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseAlternative:
    """Summary of one candidate plan for reducing a sparse gradient.

    Attributes:
        plan: description of the plan.
        predicted_s: predicted time of one reduction; None without a prediction.
        measured_s: median time of the plan's trials; None if it was not tried.
        n_bytes: bytes that the busiest rank receives in an iteration, computed from the touched rows.
    """

    plan: str
    predicted_s: Amount | None
    measured_s: Amount | None
    n_bytes: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseSummary:
    """Summary of how one parameter's sparse gradient is reduced.

    Numbers of rows and bytes are means over the iterations in which they were counted.

    Attributes:
        name: name of the parameter.
        n_rows: number of the parameter's rows.
        width: number of elements of a row.
        ranks: number of ranks.
        looked_up: number of rows in one rank's gradient after the backward pass, including duplicates.
        touched: number of rows in the ranks' gradients in an iteration, without duplicates, summed over ranks.
        union: number of distinct rows in the gradients of all ranks in an iteration.
        plan: description of the chosen plan.
        ways: compared plans, including the chosen plan.
        curve: points (number of rows, coverage) of the coverage curve; empty if row accesses were not counted.
        popular_rows: number of hot (most frequently touched) rows in the plan. For a plan without hot rows, the number
            of rows at the coverage curve's elbow.
        dense_bytes: bytes that a rank receives in an iteration if the whole gradient is all-reduced.
        horovod_bytes: bytes that a rank receives in an iteration if rows and indices are all-gathered, as by Horovod.
    """

    name: str
    n_rows: Positive
    width: Count
    ranks: Positive
    looked_up: Amount
    touched: Amount
    union: Amount
    plan: str
    ways: tuple[SparseAlternative, ...]
    curve: tuple[tuple[Positive, Amount], ...] = ()
    popular_rows: Count = 0
    dense_bytes: Amount
    horovod_bytes: Amount

    @property
    def density(self) -> float:
        """Return the fraction of the parameter's rows that any rank's gradient contains in an iteration."""
        return self.union / self.n_rows

    @property
    def popular_share(self) -> float:
        """Return the fraction of all accesses that go to the `popular_rows` most frequently touched rows."""
        return dict(self.curve).get(self.popular_rows, 0.0)

    @property
    def n_bytes(self) -> float:
        """Return the bytes that the busiest rank receives in an iteration with the chosen plan."""
        return next(way.n_bytes for way in self.ways if way.plan == self.plan)

    def describe(self) -> str:
        """Describe the parameter, its plan and the plan's traffic in one line for logs."""
        popular = f", {self.popular_rows} of them get {self.popular_share:.0%} of accesses" if self.curve else ""
        return (
            f"{self.name} ({self.n_rows} × {self.width}): {self.density:.2%} of rows in an iteration{popular}; by "
            f"{self.plan}, {self.n_bytes / MB:.3g} MB to a rank; dense {self.dense_bytes / MB:.3g} MB, "
            f"Horovod's rule {self.horovod_bytes / MB:.3g} MB"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the summary as a JSON-serialisable dict. `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SparseSummary:
        """Create a summary from the dict that `SparseSummary.to_json` returns. Unknown keys are ignored.

        Raises:
            ValueError: a field is missing or invalid, or `plan` is not one of the compared plans (`ways`).
        """
        found = msgspec.convert(data, cls)
        plans = [way.plan for way in found.ways]
        require(found.plan in plans, "plan", f"one of {plans}", found.plan)
        return found


def summarise(
    decision: SparseDecision, form: RowFormat, *, name: str, ranks: int, looked_up: float, counts: TouchCounts
) -> SparseSummary:
    """Summarise how a parameter's sparse gradient is reduced.

    Args:
        decision: the parameter's plan, with the data behind its choice.
        form: format of the parameter's rows.
        name: name of the parameter.
        ranks: number of ranks.
        looked_up: number of rows in one rank's gradient after the backward pass, including duplicates.
        counts: counted accesses to the parameter's rows. Ignored if the decision has `learned` counts.
    """
    counts = decision.learned or counts
    popular = len(decision.plan.hot_rows) or elbow(coverage(counts.descending()))
    plans = decision.candidates or [decision.plan]

    return SparseSummary(
        name=name,
        n_rows=form.n_rows,
        width=form.width,
        ranks=ranks,
        looked_up=looked_up,
        touched=counts.touched,
        union=counts.union,
        plan=decision.plan.describe(),
        ways=tuple(
            SparseAlternative(
                plan=plan.describe(),
                predicted_s=predicted_s,
                measured_s=measured_s if measured_s is not None and math.isfinite(measured_s) else None,
                n_bytes=traffic(plan, form, ranks, counts).received_bytes(ranks),
            )
            for plan, predicted_s, measured_s in zip_longest(plans, decision.predicted_s, decision.measured_s)
        ),
        curve=curve_points(counts, also=popular),
        popular_rows=popular,
        dense_bytes=dense_bytes(form, ranks),
        horovod_bytes=horovod_bytes(form, ranks, looked_up),
    )
