"""The paths: each adds up the rows of all ranks, and gives every rank the same rows, bit by bit.

Rows are exactly those that some rank has, also where their values are zeros: optimizers that update only rows that are
there (SparseAdam, Adagrad) must see no others. All of them are collective and block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from .lanes import SparseLanes
from .plan import SparsePath, SparsePlan
from .rows import RowFormat, Rows, disjoint, merged


@dataclass(frozen=True, slots=True, eq=False)
class Reduced:
    """The sum, and what it tells of who touched which rows; the same on all ranks.

    Attributes:
        rows: that any rank has, with their sums.
        n_touched: rows of all ranks together, each counted on every rank that has it.
        n_hot: of these, hot ones.
        by_rank: numbers of the rows of each rank, where the path tells.
    """

    rows: Rows
    n_touched: int
    n_hot: int = 0
    by_rank: list[torch.Tensor] = field(default_factory=list)


def reduce_rows(plan: SparsePlan, rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    """Collective: the sum of these rows over all ranks, by this plan."""
    if plan.path is SparsePath.HOT_COLD:
        return _hot_cold(plan, rows, form, lanes)
    if plan.path is SparsePath.BLOCKS:
        return _blocks(plan, rows, form, lanes)
    return _PLAIN[plan.path](rows, form, lanes)


def _gather(rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    counts = [count for (count,) in lanes.gather_counts([len(rows)])]
    parcels = lanes.all_gather(form.pack(rows), [form.parcel_bytes(count) for count in counts])
    parts = [form.unpack(parcel, count) for parcel, count in zip(parcels, counts, strict=True)]
    return Reduced(merged(parts), sum(counts), by_rank=[part.indices for part in parts])


def owners_of(indices: torch.Tensor, n_ranks: int) -> torch.Tensor:
    """The rank that adds up each row: `(n,)`. Hashed, since popular rows often have numbers close to each other."""
    return ((indices * 2654435761) >> 15) % n_ranks


def _owner(rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    owners, order = owners_of(rows.indices, lanes.size).sort(stable=True)
    mine = torch.bincount(owners, minlength=lanes.size).tolist()
    counts = lanes.gather_counts(mine)
    parcels = [form.pack(rows.of(places)) for places in torch.split(order, mine)]
    lengths = [[form.parcel_bytes(count) for count in row] for row in counts]
    arrived = lanes.exchange(parcels, lengths)
    owned = merged([form.unpack(parcel, row[lanes.rank]) for parcel, row in zip(arrived, counts, strict=True)])
    sums = _gather_sums(owned, form, lanes)
    return Reduced(sums, sum(map(sum, counts)))


def _gather_sums(owned: Rows, form: RowFormat, lanes: SparseLanes) -> Rows:
    counts = [count for (count,) in lanes.gather_counts([len(owned)])]
    parcels = lanes.all_gather(form.pack(owned), [form.parcel_bytes(count) for count in counts])
    return disjoint([form.unpack(parcel, count) for parcel, count in zip(parcels, counts, strict=True)])


def _sum_in_places(
    rows: Rows, places: torch.Tensor, n_places: int, form: RowFormat, add_up_: Callable[[torch.Tensor], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective: rows of all ranks, each in its place of a dense buffer: the sums, and how many ranks have each.

    `add_up_` adds up a 1-d tensor over ranks, in place.
    """
    buffer = torch.zeros(n_places * (form.width + 1), dtype=form.dtype)
    values, touched = buffer[: n_places * form.width].view(n_places, form.width), buffer[n_places * form.width :]
    values[places] = rows.values
    touched[places] = 1
    add_up_(buffer)
    return values, touched.real if touched.is_complex() else touched


def _those_touched(values: torch.Tensor, touched: torch.Tensor, indices: torch.Tensor | None = None) -> Rows:
    present = touched.nonzero()[:, 0]
    return Rows(present if indices is None else indices[present], values[present])


def _dense(rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    values, touched = _sum_in_places(rows, rows.indices, form.n_rows, form, lanes.all_reduce_)
    return Reduced(_those_touched(values, touched), int(touched.double().sum()))


def _blocks(plan: SparsePlan, rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    per_block = plan.block_rows
    n_blocks = -(-form.n_rows // per_block)
    mine = np.zeros(n_blocks, dtype=np.bool_)
    mine[rows.indices.numpy() // per_block] = True
    bits = torch.from_numpy(np.packbits(mine))
    everybody = torch.stack(lanes.all_gather(bits, [len(bits)] * lanes.size)).numpy()
    union = np.flatnonzero(np.unpackbits(np.bitwise_or.reduce(everybody), count=n_blocks))
    blocks = torch.from_numpy(union)
    places = torch.searchsorted(blocks, rows.indices // per_block)
    if per_block == 1:
        total = torch.zeros(len(blocks), form.width, dtype=form.dtype)
        total[places] = rows.values
        lanes.all_reduce_(total)
        return Reduced(Rows(blocks, total), int(np.unpackbits(everybody).sum()))
    indices = (blocks[:, None] * per_block + torch.arange(per_block)).view(-1)
    places = places * per_block + rows.indices % per_block
    values, touched = _sum_in_places(rows, places, len(indices), form, lanes.all_reduce_)
    return Reduced(_those_touched(values, touched, indices), int(touched.double().sum()))


def _hot_cold(plan: SparsePlan, rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    hot = torch.from_numpy(plan.hot_indices)
    places = torch.searchsorted(hot, rows.indices)
    is_hot = hot[places.clamp(max=len(hot) - 1)] == rows.indices
    add_up_ = lanes.sum_hot_ if plan.aggregated else lanes.all_reduce_
    values, touched = _sum_in_places(rows.of(is_hot), places[is_hot], len(hot), form, add_up_)
    n_hot = int(touched.double().sum())
    cold = _PLAIN[plan.cold](rows.of(~is_hot), form, lanes)
    total = disjoint([_those_touched(values, touched, hot), cold.rows])
    return Reduced(total, n_hot + cold.n_touched, n_hot)


_PLAIN: dict[SparsePath, Callable[[Rows, RowFormat, SparseLanes], Reduced]] = {
    SparsePath.GATHER: _gather,
    SparsePath.OWNER: _owner,
    SparsePath.DENSE: _dense,
}
