"""What a reduction of rows consists of: bytes that are exchanged and all-reduced, and rows that are added up."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sirtaki.comm.sparse.plan import SparsePath, SparsePlan

from .coverage import TouchCounts

LONG_INDEX_BYTES = 8
"""Of the number of a row as PyTorch has it."""


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

    @property
    def flagged_bytes(self) -> int:
        """Of a row that travels with an element that says whether it was touched."""
        return self.row_bytes + self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One reduction, on the busiest rank.

    Attributes:
        exchanges: how many there are.
        exchanged_bytes: that the rank receives in them.
        reductions: how many all-reduces there are.
        reduced_bytes: of the tensors that are all-reduced.
        aggregations: how many sums an aggregator makes.
        aggregated_bytes: of the tensors that it sums.
        added_rows: that the rank adds up.
    """

    exchanges: int = 0
    exchanged_bytes: float = 0.0
    reductions: int = 0
    reduced_bytes: float = 0.0
    aggregations: int = 0
    aggregated_bytes: float = 0.0
    added_rows: float = 0.0

    def received_bytes(self, ranks: int) -> float:
        """By the rank, where all-reduces are rings; an aggregator sends it each sum once."""
        return self.exchanged_bytes + ring_bytes(self.reduced_bytes, ranks) + self.aggregated_bytes


def ring_bytes(n_bytes: float, ranks: int) -> float:
    """What a rank receives in an all-reduce of a tensor of that many bytes."""
    return 2.0 * (ranks - 1) / ranks * n_bytes


def dense_bytes(shape: Shape, ranks: int) -> float:
    """What a rank receives where the whole gradient is all-reduced."""
    return ring_bytes(shape.n_rows * shape.row_bytes, ranks)


def horovod_bytes(shape: Shape, ranks: int, looked_up: float) -> float:
    """What a rank receives by Horovod's rule: two all-gathers of what each rank has looked up, nothing added up before.

    Args:
        shape: of the parameter.
        ranks: how many there are.
        looked_up: rows by each of them, the same one several times.
    """
    return (ranks - 1) * looked_up * (shape.row_bytes + LONG_INDEX_BYTES)


def traffic(plan: SparsePlan, shape: Shape, ranks: int, counts: TouchCounts) -> Traffic:
    """Of a parameter whose rows are touched like that, by this plan."""
    touched, most, union = counts.touched, counts.most, counts.union
    if plan.path is SparsePath.DENSE:
        return Traffic(reductions=1, reduced_bytes=shape.n_rows * shape.flagged_bytes, added_rows=most)
    if plan.path is SparsePath.BLOCKS:
        single = plan.block_rows == 1
        rows = union if single else _rows_in_blocks(plan.block_rows, ranks, counts)
        return Traffic(
            exchanges=1,
            exchanged_bytes=(ranks - 1) * shape.n_rows / plan.block_rows / 8,
            reductions=1,
            reduced_bytes=rows * (shape.row_bytes if single else shape.flagged_bytes),
            added_rows=most,
        )
    if plan.path is SparsePath.HOT_COLD:
        hot = counts.of(plan.hot_rows)
        share = float(hot.sum()) / max(1, int(counts.counts.sum()))
        chance = hot / max(1, counts.n_samples)
        hot_union = float((1.0 - (1.0 - chance) ** ranks).sum())
        rest = 1.0 - share
        cold = _plain(plan.cold, shape, ranks, touched * rest, most * rest, max(0.0, union - hot_union))
        n_bytes, added_rows = len(hot) * shape.flagged_bytes, most * share + len(hot) + cold.added_rows
        if plan.aggregated:
            return replace(cold, aggregations=1, aggregated_bytes=n_bytes, added_rows=added_rows)
        return replace(cold, reductions=1, reduced_bytes=n_bytes, added_rows=added_rows)
    return _plain(plan.path, shape, ranks, touched, most, union)


def _plain(path: SparsePath, shape: Shape, ranks: int, touched: float, most: float, union: float) -> Traffic:
    """Of rows that travel with their numbers."""
    row_bytes, others = shape.row_bytes + shape.index_bytes, (ranks - 1) / ranks
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
