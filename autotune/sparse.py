"""Which algorithm suits a sparse gradient: coverage of rows by accesses, traffic, volumes, choice, summary."""

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
from sirtaki.measures import ring_bytes

from .trial import Proposal, Trial

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
        n: iterations noted.
    """

    def __init__(self) -> None:
        self.rows, self.counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self.n_samples = self.n = 0
        self.touched = self.most = self.union = 0.0
        self._totals = np.zeros(3)

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
        self.n += 1
        self.touched, self.most, self.union = (self._totals / self.n).tolist()

    def ranked(self) -> npt.NDArray[np.int64]:
        """Rows that were touched, the most touched first; of equal ones the lower number."""
        return self.rows[np.argsort(-self.counts, kind="stable")]

    def descending(self) -> npt.NDArray[np.int64]:
        """The counts of rows that were touched, the largest first."""
        return np.sort(self.counts)[::-1]

    def of(self, rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The counts of rows; 0 of one that was not touched, as a plan from an earlier job may name."""
        wanted = np.asarray(rows, dtype=np.int64)
        # What is larger than all of them finds the place behind the last, where -1 is no row.
        places = np.searchsorted(self.rows, wanted)
        return np.where(np.append(self.rows, -1)[places] == wanted, np.append(self.counts, 0)[places], 0)


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


LONG_INDEX_BYTES = 8
"""Of the number of a row as PyTorch has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One reduction, on the busiest rank.

    Attributes:
        exchanges: how many there are.
        exchanged_bytes: that the rank receives in them.
        reductions: how many all-reduces there are.
        reduced_bytes: of the tensors that are all-reduced.
        added_rows: that the rank adds up.
    """

    exchanges: int = 0
    exchanged_bytes: float = 0.0
    reductions: int = 0
    reduced_bytes: float = 0.0
    added_rows: float = 0.0

    def received_bytes(self, ranks: int) -> float:
        """By the rank, where all-reduces are rings."""
        return self.exchanged_bytes + ring_bytes(self.reduced_bytes, ranks)


def dense_bytes(form: RowFormat, ranks: int) -> float:
    """What a rank receives where the whole gradient is all-reduced."""
    return ring_bytes(form.n_rows * form.row_bytes, ranks)


def horovod_bytes(form: RowFormat, ranks: int, looked_up: float) -> float:
    """What a rank receives by Horovod's rule: two all-gathers of what each rank has looked up, nothing added up before.

    Args:
        form: of its rows.
        ranks: how many there are.
        looked_up: rows by each of them, the same one several times.
    """
    return (ranks - 1) * looked_up * (form.row_bytes + LONG_INDEX_BYTES)


def traffic(plan: SparsePlan, form: RowFormat, ranks: int, counts: TouchCounts) -> Traffic:
    """Of a parameter whose rows are touched like that, by this plan."""
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
    """Of rows that travel with their numbers."""
    row_bytes, others = form.row_bytes + form.index_dtype.itemsize, (ranks - 1) / ranks
    if path is SparsePath.GATHER:
        sent = max(touched - touched / ranks, most * others)
        return Traffic(exchanges=2, exchanged_bytes=sent * row_bytes, added_rows=touched)
    return Traffic(exchanges=4, exchanged_bytes=others * (most + union) * row_bytes, added_rows=touched / ranks + union)


def _rows_in_blocks(block_rows: int, ranks: int, counts: TouchCounts) -> float:
    """In blocks that any rank touches in an iteration."""
    chance = counts.counts / max(1, counts.n_samples)
    untouched = np.log1p(-np.minimum(chance, 1.0 - 1e-9)) * ranks
    begins = np.flatnonzero(np.diff(counts.rows // block_rows, prepend=-1))
    of_block = np.add.reduceat(untouched, begins) if len(begins) else np.zeros(0)
    return float((1.0 - np.exp(of_block)).sum()) * block_rows


BLOCK_ROWS = (1, 8, 64)
MOST_HOT_BYTES = 16 << 20
MOST_DENSE_BYTES = 1 << 30
"""Of buffers that hold hot rows, or all rows."""

HOT_SIZES = 24
"""As many sizes of the hot set are tried, beside those of the coverage curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCosts:
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


@dataclass(frozen=True, slots=True)
class VolumeModel:
    """Predicts plans for one parameter.

    Attributes:
        form: of its rows.
        ranks: how many there are.
        counts: of its rows.
        pace: of these ranks.
    """

    form: RowFormat
    ranks: int
    counts: TouchCounts
    pace: CollectiveCosts

    def seconds(self, plan: SparsePlan) -> float:
        """How long a reduction by this plan takes."""
        work, pace = traffic(plan, self.form, self.ranks, self.counts), self.pace
        parts = [
            (work.exchanges, pace.exchange_s, work.exchanged_bytes, pace.exchange_bytes_per_s),
            (work.reductions, pace.reduce_s, work.reduced_bytes, pace.reduce_bytes_per_s),
            (0, 0.0, work.added_rows * self.form.row_bytes, pace.add_bytes_per_s),
        ]
        return sum(n * start_s + (n_bytes and n_bytes / bytes_per_s) for n, start_s, n_bytes, bytes_per_s in parts)

    # ── candidates ───────────────────────────────────────────────────────────────────────────────────────────────

    def best_of(self, path: SparsePath) -> SparsePlan | None:
        """The fastest plan of a path; None if it makes no sense here."""
        plans = list(self._plans(path))
        return min(plans, key=self.seconds) if plans else None

    def ranked(self) -> list[SparsePlan]:
        """The best plan of each path, the fastest first; alike on ranks that know the same."""
        found = [plan for path in SparsePath if (plan := self.best_of(path)) is not None]
        return sorted(found, key=self.seconds)

    def candidates(self, fixed: SparsePath | None) -> list[SparsePlan]:
        """Return the plans to try, the one predicted to be fastest first.

        Args:
            fixed: the only path that may be used; None = any.
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
        """Of the coverage curve, where a row's chance makes it worth its place, and some between."""
        counts = self.counts.of(ranked)
        curve = coverage(counts)
        most = min(len(ranked), int(MOST_HOT_BYTES / self.form.flagged_bytes))
        if most < 1:
            return []
        # In a ring each rank sends a dense row 2(P-1)/P times, in an all-gather of rows P-1 times its chance.
        worth = int((counts > 2.0 / self.ranks * self.counts.n_samples).sum())
        between = np.geomspace(1, most, HOT_SIZES).astype(int).tolist()
        sizes = {knee(curve), until_little_is_gained(curve), worth, *between}
        return sorted(size for size in sizes if 1 <= size <= most)


LEARNING_ITERATIONS = 8
N_CANDIDATES = 3
HOPELESS = 3.0
"""What is predicted to take so many times as long as the fastest is not tried."""

TRIAL_BUDGET = 60
"""Iterations of a search for the fastest plan."""

LOST_COVERAGE = 0.9
"""Hot rows are ranked anew once their part of all touches has fallen to this much of what it was."""

OTHER_VOLUME = 1.5
"""Paths are chosen anew once so many times as many rows are touched as then, or as few."""

MEMORY = 0.1
"""Weight of the newest iteration in what is watched."""

LEAST_WATCHED = 20
"""Iterations before a change is believed, at first; twice as many after each change."""


@dataclass(frozen=True, slots=True)
class AccessSample:
    """What an iteration has shown to all ranks alike.

    Attributes:
        n_touched: rows of all ranks together.
        n_hot: of these, hot ones.
        union: rows of any rank.
        by_rank: their numbers, where the path tells.
    """

    n_touched: int
    n_hot: int
    union: int
    by_rank: Sequence[npt.NDArray[np.int64]] = ()


@dataclass(slots=True, kw_only=True)
class SparseDecision:
    """The plan of one parameter, and what it follows from; the same on all ranks.

    Attributes:
        plan: plan of the next iteration.
        candidates: plans that are tried, or were; the first one stays unless another is proved faster.
        learned: accesses from which the candidates follow; None before they are known.
        predicted_s: predicted time of each candidate; empty if nothing was predicted.
        measured_s: median time of each candidate, NaN if it was not measured; empty before trials.
    """

    plan: SparsePlan = GATHER
    candidates: Sequence[SparsePlan] = ()
    learned: TouchCounts | None = None
    predicted_s: Sequence[float] = ()
    measured_s: Sequence[float] = ()


class VolumeArm:
    """Proposes plans in the order in which they were predicted to be fast."""

    name = "traffic volumes"

    def __init__(self, plans: Sequence[SparsePlan]) -> None:
        self._left = list(plans)

    def ask(self, n: int = 1) -> Sequence[Proposal[SparsePlan]]:
        """Propose the next `n` plans."""
        asked, self._left = self._left[:n], self._left[n:]
        return [Proposal(arm=self.name, knobs=plan) for plan in asked]

    def tell(self, trials: Sequence[Trial[SparsePlan]]) -> None:
        """Learn nothing: the order is fixed."""


class AccessWatch:
    """Notices that accesses have changed since a plan was chosen."""

    def __init__(self, *, covered: float, touched: float, least: int) -> None:
        """Begin with the accesses from which the plan follows.

        Args:
            covered: share of accesses to frequent rows.
            touched: rows accessed in an iteration by all ranks together.
            least: iterations before a change is believed.
        """
        self._covered, self._touched, self._least = covered, touched, least
        self._hot_now, self._touched_now, self._n = covered * touched, touched, 0

    def changed(self, seen: AccessSample) -> bool:
        """Return whether accesses have changed, after another iteration."""
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
    """One way that rows could take.

    Attributes:
        plan: in words.
        predicted_s: how long a reduction takes by the model of volumes; None where nothing was predicted.
        measured_s: the median of its trials; None where it was not tried.
        n_bytes: that the busiest rank receives in an iteration, computed from the rows that were touched.
    """

    plan: str
    predicted_s: Amount | None
    measured_s: Amount | None
    n_bytes: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseSummary:
    """Of one parameter; numbers of rows and bytes are means over the iterations in which they were counted.

    Attributes:
        name: of the parameter.
        n_rows: that it has.
        width: elements of a row.
        ranks: that add up rows.
        looked_up: rows in the gradient of one rank as its backward pass leaves it, the same one several times.
        touched: rows of all ranks in an iteration, one that several ranks have counted for each.
        union: rows that any rank has.
        plan: the way that is taken, in words.
        ways: that were compared, the taken one among them; one where there was nothing to compare.
        curve: which part of all touches the most touched rows have, `(rows, part)`; empty where that was not counted.
        popular_rows: hot rows of the plan; without those, the rows before the curve's knee.
        dense_bytes: that a rank receives in an iteration where the whole gradient is all-reduced.
        horovod_bytes: the same by Horovod's rule, two all-gathers of what was looked up.
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
        """Which part of the rows any rank touches in an iteration."""
        return self.union / self.n_rows

    @property
    def popular_share(self) -> float:
        """Which part of all touches the popular rows have."""
        return dict(self.curve).get(self.popular_rows, 0.0)

    @property
    def n_bytes(self) -> float:
        """That the busiest rank receives in an iteration."""
        return next(way.n_bytes for way in self.ways if way.plan == self.plan)

    def describe(self) -> str:
        """In words."""
        popular = f", {self.popular_rows} of them are {self.popular_share:.0%} of touches" if self.curve else ""
        return (
            f"{self.name} ({self.n_rows} × {self.width}): {self.density:.2%} of rows in an iteration{popular}; by "
            f"{self.plan}, {self.n_bytes / MB:.3g} MB to a rank; dense {self.dense_bytes / MB:.3g} MB, "
            f"Horovod's rule {self.horovod_bytes / MB:.3g} MB"
        )

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SparseSummary:
        """What `to_json` has given; other keys are passed over.

        Raises:
            ValueError: something is missing, of another type or out of range, or the plan is none of the ways.
        """
        found = msgspec.convert(data, cls)
        if found.plan not in {way.plan for way in found.ways}:
            raise ValueError(f"{found.plan} is none of the ways")
        return found


def summarise(
    decision: SparseDecision, form: RowFormat, *, name: str, ranks: int, looked_up: float, counts: TouchCounts
) -> SparseSummary:
    """Summarise a decision.

    Args:
        decision: the decision.
        form: format of the parameter's rows.
        name: name of the parameter.
        ranks: number of ranks.
        looked_up: see `SparseSummary`.
        counts: accesses; the decision's own count instead, if it has any.
    """
    counts = decision.learned or counts
    popular = len(decision.plan.hot_rows) or knee(coverage(counts.descending()))
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
