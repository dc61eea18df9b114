"""The thread that exchanges rows of sparse gradients by the algorithm that a plan names."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sirtaki.errors import CommError

from .. import recorder, timeline
from ..control.failure import FailureBoard
from ..transports.contract import HALF_DTYPES, ThreadWork
from .lanes import Closed, SparseLanes
from .plan import SparsePath, SparsePlan

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

    @property
    def flagged_bytes(self) -> int:
        """Of a row that travels with an element that says whether it was touched."""
        return self.row_bytes + self.dtype.itemsize

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


def _gathered(rows: Rows, form: RowFormat, lanes: SparseLanes) -> list[Rows]:
    """Collective: the rows of each rank."""
    counts = [count for (count,) in lanes.gather_counts([len(rows)])]
    parcels = lanes.all_gather(form.pack(rows), [form.parcel_bytes(count) for count in counts])
    return [form.unpack(parcel, count) for parcel, count in zip(parcels, counts, strict=True)]


def _gather(rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    parts = _gathered(rows, form, lanes)
    return Reduced(merged(parts), sum(map(len, parts)), by_rank=[part.indices for part in parts])


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
    return Reduced(disjoint(_gathered(owned, form, lanes)), sum(map(sum, counts)))


def _sum_in_places(
    rows: Rows, places: torch.Tensor, n_places: int, form: RowFormat, lanes: SparseLanes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective: rows of all ranks, each in its place of a dense buffer: the sums, and how many ranks have each."""
    buffer = torch.zeros(n_places * (form.width + 1), dtype=form.dtype)
    values, touched = buffer[: n_places * form.width].view(n_places, form.width), buffer[n_places * form.width :]
    values[places] = rows.values
    touched[places] = 1
    lanes.all_reduce_(buffer)
    return values, touched.real if touched.is_complex() else touched


def _those_touched(values: torch.Tensor, touched: torch.Tensor, indices: torch.Tensor | None = None) -> Rows:
    present = touched.nonzero()[:, 0]
    return Rows(present if indices is None else indices[present], values[present])


def _dense(rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    values, touched = _sum_in_places(rows, rows.indices, form.n_rows, form, lanes)
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
    values, touched = _sum_in_places(rows, places, len(indices), form, lanes)
    return Reduced(_those_touched(values, touched, indices), int(touched.double().sum()))


def _hot_cold(plan: SparsePlan, rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    hot = torch.from_numpy(plan.hot_indices)
    places = torch.searchsorted(hot, rows.indices)
    is_hot = hot[places.clamp(max=len(hot) - 1)] == rows.indices
    values, touched = _sum_in_places(rows.of(is_hot), places[is_hot], len(hot), form, lanes)
    n_hot = int(touched.double().sum())
    cold = _PLAIN[plan.cold](rows.of(~is_hot), form, lanes)
    total = disjoint([_those_touched(values, touched, hot), cold.rows])
    return Reduced(total, n_hot + cold.n_touched, n_hot)


_PLAIN: dict[SparsePath, Callable[[Rows, RowFormat, SparseLanes], Reduced]] = {
    SparsePath.GATHER: _gather,
    SparsePath.OWNER: _owner,
    SparsePath.DENSE: _dense,
}


END_S = 2.0
"""How long the thread may take to end."""


class SparseWork(ThreadWork):
    """The sum of one parameter's rows, under way.

    Attributes:
        name: of the parameter.
        rows: of this rank.
        form: how they travel.
        plan: how they are added up.
        submitted_s: when the rows came, as of `time.perf_counter`.
        reduced: the sum, once it is done.
    """

    reduced: Reduced

    def __init__(self, name: str, rows: Rows, form: RowFormat, plan: SparsePlan) -> None:
        super().__init__()
        self.name, self.rows, self.form, self.plan = name, rows, form, plan
        self.submitted_s = time.perf_counter()

    @property
    def span_s(self) -> float:
        """How long it took from when its turn came; after the end."""
        return self.done_s - self.begun_s


class SparseWorker:
    """Performs the reductions of each iteration in an order that is fixed before it begins.

    What comes early waits for what is before it in the order: no rank tells another what it has.

    Attributes:
        lanes: its own until `close`; between iterations they may be probed.
    """

    def __init__(self, lanes: SparseLanes, failures: FailureBoard, *, prefix: str = "") -> None:
        """Starts the thread. `prefix`: of operations' names in recordings."""
        self.lanes, self._failures, self._prefix = lanes, failures, prefix
        self._lock = threading.Lock()
        self._order: list[str] = []
        self._next = 0
        self._early: dict[str, SparseWork] = {}
        self._works: queue.SimpleQueue[SparseWork | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sirtaki-sparse", daemon=True)
        self._thread.start()

    def begin(self, order: Sequence[str]) -> None:
        """Between iterations: these are reduced in the next one, in this order, the same on all ranks."""
        with self._lock:
            self._order, self._next = list(order), 0
            self._early.clear()

    def submit(self, work: SparseWork) -> None:
        """Any thread: starts a reduction once all before it in the order are there; never waits."""
        with self._lock:
            self._early[work.name] = work
            while self._next < len(self._order) and self._order[self._next] in self._early:
                self._works.put(self._early.pop(self._order[self._next]))
                self._next += 1

    def _run(self) -> None:
        failed: CommError | None = None
        while (work := self._works.get()) is not None:
            if failed is not None:  # streams are out of step
                work.finish(failed)
                continue
            work.begun_s = time.perf_counter()
            try:
                work.reduced = reduce_rows(work.plan, work.rows, work.form, self.lanes)
            except Closed:
                return
            except CommError as err:
                failed = err
            except Exception as err:  # whatever it is, those who wait must hear of it, and the other ranks, too
                failed = CommError(f"rows of {work.name} are not added up: {err!r}")
                self._failures.report(failed)
            else:
                self._record(work)
            work.finish(failed)

    def _record(self, work: SparseWork) -> None:
        """Tells the timeline and the recorder, if there are any, of a reduction that has just ended."""
        done_s, name = time.perf_counter(), f"{self._prefix}{work.name}"
        if (trace := timeline.current) is not None:
            trace.span(f"sparse {self._prefix}".strip(" ."), name, work.begun_s, done_s, path=work.plan.path.value)
        if (recording := recorder.current) is not None:
            recording.operation(
                recorder.TracedOperation(
                    name=name,
                    kind="SPARSE",
                    submitted_s=work.submitted_s,
                    agreed_s=work.begun_s,
                    done_s=done_s,
                    n_bytes=work.form.parcel_bytes(len(work.rows)),
                )
            )

    def close(self) -> bool:
        """Ends the thread, whatever it waits for, then the lanes; False if it has not ended. Not collective, once."""
        self.lanes.stop()
        self._works.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(END_S)
        if self._thread.is_alive():
            return False
        self.lanes.close()
        return True
