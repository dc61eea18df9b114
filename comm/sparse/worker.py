"""The thread that exchanges rows of sparse gradients by the algorithm that a plan names."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from sirtaki.comm import recorder, timeline
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import Algorithm, Route, TransportKind
from sirtaki.comm.router import Router
from sirtaki.comm.sparse.plan import SparsePath, SparsePlan
from sirtaki.comm.transports.contract import HALF_DTYPES, FlatBuffer, Parcels, ThreadWork, Work
from sirtaki.comm.transports.shared_memory import share_memory
from sirtaki.errors import CommError, ConfigError, TransportError
from sirtaki.machine import free_in_forked_children

# ── what carries rows ─────────────────────────────────────────────────────────────────────────────────────────────────

FIRST_REGION_BYTES = 1 << 20
LARGEST_REGION_BYTES = 1 << 28
"""Of the memory that the ranks of a node share for rows; what is larger goes in several turns."""

LARGEST_MESSAGE_BYTES = 1 << 28
"""Of one exchange on one stream: MPI counts with 32 bits."""

WORTH_A_STREAM_BYTES = 1 << 15
"""What goes to one rank is cut into no smaller pieces."""


class Closed(Exception):
    """This rank has closed its lanes meanwhile."""


class SparseLanes:
    """Streams over one flat route. Its collectives block; one thread calls them, in the same order on all ranks.

    Attributes:
        rank, size: this process among those that take part.
        route: that is used.
        streams: how many are open.
        exchange_streams, reduce_streams: of these, how many an exchange and an all-reduce use.
    """

    def __init__(self, control: ControlPlane, *, timeout_s: float, kind: TransportKind | None, streams: int) -> None:
        """Collective: opens the best route that can be opened.

        Args:
            control: the ranks.
            timeout_s: after this long a reduction that does not get on fails.
            kind: the only transport that may be used; None = any.
            streams: as many at most; where memory is shared, one.

        Raises:
            ConfigError: on all ranks, this job has no such transport.
            TransportError: on all ranks, nothing can be opened.
        """
        self._control = control.scope()
        self.rank, self.size = control.rank, control.size
        self._router = Router(self._control, timeout_s=timeout_s)
        self._region: FlatBuffer | None = None
        self._closing = False
        self._wanted_bytes = 0
        self.route, self.streams = self._open_best(kind, streams)
        self.exchange_streams = self.reduce_streams = self.streams
        if self._shares:
            self._share(FIRST_REGION_BYTES)

    @property
    def _shares(self) -> bool:
        return self.route[0] is TransportKind.SHARED_MEMORY

    # ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _open_best(self, kind: TransportKind | None, streams: int) -> tuple[Route, int]:
        routes = [route for route in self._router.routes if route[1] is Algorithm.FLAT and kind in (None, route[0])]
        if not routes:
            raise ConfigError(f"{kind.value if kind else 'nothing'} cannot carry sparse gradients between these ranks")
        problem: TransportError | None = None
        for route in routes:
            try:
                return route, self._open(route, streams)
            except TransportError as err:
                problem = err
        assert problem is not None
        raise problem

    def _open(self, route: Route, streams: int) -> int:
        count = 1 if route[0] is TransportKind.SHARED_MEMORY else min(streams, self._router.max_streams([route]))
        self._router.open_streams(route, count)
        return count

    def open_streams(self, streams: int) -> int:
        """Collective, with nothing under way: opens up to so many, and returns how many there are then."""
        try:
            self.streams = max(self.streams, self._open(self.route, streams))
        except TransportError:
            self.streams = max(1, self.streams)  # those that were open still are
        return self.streams

    # ── the shared region ────────────────────────────────────────────────────────────────────────────────────────

    def grow(self) -> None:
        """Collective, with nothing under way: gives what was too large for the shared memory room the next time."""
        region = self._region
        if region is None or self._wanted_bytes <= region.tensor.numel() or self._wanted_bytes > LARGEST_REGION_BYTES:
            return
        self._share(1 << (self._wanted_bytes - 1).bit_length())

    def _share(self, size_bytes: int) -> None:
        try:
            regions = tuple(share_memory(self._control, size_bytes))
        except TransportError:
            if self._region is None:
                raise
            self._wanted_bytes = 0  # what there is has to do
            return
        self._region = FlatBuffer(regions[self._control.local_rank], regions)

    # ── exchanges ────────────────────────────────────────────────────────────────────────────────────────────────

    def all_gather(self, parcel: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Collective: the parcels of all ranks, by rank; bytes, of these lengths."""
        return self._transfer([parcel], Parcels.to_all(lengths))

    def gather_counts(self, counts: Sequence[int]) -> list[list[int]]:
        """Collective: some whole numbers, as many on each rank, of all ranks."""
        mine = torch.tensor(counts, dtype=torch.int64, device="cpu").view(torch.uint8)
        return [part.view(torch.int64).tolist() for part in self.all_gather(mine, [mine.numel()] * self.size)]

    def exchange(self, parcels: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Collective: sends a parcel to each rank, and returns those for this one, by rank.

        Args:
            parcels: bytes, by receiver.
            lengths: by sender and receiver.
        """
        return self._transfer(parcels, Parcels(np.asarray(lengths, dtype=np.int64)))

    def _transfer(self, parcels: Sequence[torch.Tensor], layout: Parcels) -> list[torch.Tensor]:
        received = layout.received_by(self.rank)
        turns, width = self._cut(layout)
        if turns * width == 1:
            incoming = torch.empty(sum(received), dtype=torch.uint8, device="cpu")
            self._wait([self._send(parcels, layout, incoming, 0)])
            return list(torch.split(incoming, received))
        whole = [torch.empty(length, dtype=torch.uint8, device="cpu") for length in received]
        filled = [0] * self.size
        for turn in range(turns):
            pieces = [layout.piece(turn * width + number, turns * width) for number in range(width)]
            arriving = [
                torch.empty(sum(piece.received_by(self.rank)), dtype=torch.uint8, device="cpu") for piece in pieces
            ]
            sent = [_part(parcels, turn * width + number, turns * width) for number in range(width)]
            works = [
                self._send(out, piece, into, number)
                for number, (out, piece, into) in enumerate(zip(sent, pieces, arriving, strict=True))
            ]
            self._wait(works)
            for piece, into in zip(pieces, arriving, strict=True):
                for sender, part in enumerate(torch.split(into, piece.received_by(self.rank))):
                    whole[sender][filled[sender] : filled[sender] + len(part)] = part
                    filled[sender] += len(part)
        return whole

    def _cut(self, layout: Parcels) -> tuple[int, int]:
        """How often one after the other, and how many at a time; the same on all ranks."""
        largest = layout.largest_outgoing_bytes
        if self._region is not None:
            self._wanted_bytes = max(self._wanted_bytes, largest)
            room = self._region.tensor.numel() - self.size  # a piece may be a byte longer than another
            return max(1, -(-largest // room)), 1
        width = max(1, min(self.exchange_streams, int(layout.lengths.max()) // WORTH_A_STREAM_BYTES))
        return max(1, -(-largest * self.size // (width * LARGEST_MESSAGE_BYTES))), width

    def _send(self, parcels: Sequence[torch.Tensor], layout: Parcels, incoming: torch.Tensor, stream: int) -> Work:
        outgoing = FlatBuffer(parcels[0] if len(parcels) == 1 else torch.cat(list(parcels)))
        if self._region is not None:
            self._region.tensor[: outgoing.tensor.numel()] = outgoing.tensor
            outgoing = self._region
        return self._router.exchange(outgoing, layout, incoming, route=self.route, stream=stream)

    # ── all-reduces ──────────────────────────────────────────────────────────────────────────────────────────────

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """Collective: adds up a contiguous tensor on the host over all ranks, in place."""
        flat = torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor.view(-1)
        if self._region is None:
            self._reduce_in_place(flat)
            return
        self._wanted_bytes = max(self._wanted_bytes, flat.numel() * flat.dtype.itemsize)
        room = self._region.tensor.numel() // flat.dtype.itemsize
        region = FlatBuffer(self._region.tensor.view(flat.dtype), tuple(p.view(flat.dtype) for p in self._region.peers))
        for part in torch.split(flat, room):
            region.tensor[: len(part)] = part
            self._wait([self._router.all_reduce(region, 0, len(part), route=self.route, stream=0)])
            part.copy_(region.tensor[: len(part)])

    def _reduce_in_place(self, flat: torch.Tensor) -> None:
        n, width = flat.numel(), self.reduce_streams
        width = max(1, min(width, n * flat.dtype.itemsize // WORTH_A_STREAM_BYTES))
        buffer = FlatBuffer(flat)
        edges = [n * number // width for number in range(width + 1)]
        self._wait(
            [
                self._router.all_reduce(buffer, start, stop, route=self.route, stream=number)
                for number, (start, stop) in enumerate(pairwise(edges))
            ]
        )

    # ── waits, and the end ───────────────────────────────────────────────────────────────────────────────────────

    def _wait(self, works: Sequence[Work]) -> None:
        try:
            done = self._router.wait_for(works, interrupted=lambda: self._closing)
        except CommError:
            if self._closing:
                raise Closed from None
            raise
        if not done:
            raise Closed

    def stop(self) -> None:
        """Any thread: waits of another one end with `Closed`."""
        self._closing = True

    def close(self) -> None:
        """Ends threads and connections of this rank; not collective, once, when no thread uses them any more."""
        self._closing = True
        if self._router.release():
            self._control.release(self._router.close)
        self._region = None


def _part(parcels: Sequence[torch.Tensor], number: int, of: int) -> list[torch.Tensor]:
    """One piece of each parcel, as `Parcels.piece` cuts them."""
    return [parcel[len(parcel) * number // of : len(parcel) * (number + 1) // of] for parcel in parcels]


# ── the thread that exchanges rows of sparse gradients by the algorithm that a plan names ─────────────────────────────

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
    total = torch.zeros(len(present), values.shape[1], dtype=wide(values.dtype), device="cpu")
    total.index_add_(0, place, values.to(total.dtype))
    return Rows(present, total.to(values.dtype))


def merged(parts: Sequence[Rows]) -> Rows:
    """The sum of rows of several ranks, in the order of the ranks, so that it is the same wherever it is made."""
    dtype = parts[0].values.dtype
    present, place = torch.unique(torch.cat([part.indices for part in parts]), return_inverse=True)
    total = torch.zeros(len(present), parts[0].values.shape[1], dtype=wide(dtype), device="cpu")
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
        parcel = torch.empty(self.parcel_bytes(len(rows)), dtype=torch.uint8, device="cpu")
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
    buffer = torch.zeros(n_places * (form.width + 1), dtype=form.dtype, device="cpu")
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
        total = torch.zeros(len(blocks), form.width, dtype=form.dtype, device="cpu")
        total[places] = rows.values
        lanes.all_reduce_(total)
        return Reduced(Rows(blocks, total), int(np.unpackbits(everybody).sum()))
    indices = (blocks[:, None] * per_block + torch.arange(per_block, device="cpu")).view(-1)
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
        self._lock = free_in_forked_children(threading.Lock())
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
