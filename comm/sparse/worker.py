"""A worker thread that sums the rows of sparse gradients over all ranks. A plan states the algorithm per parameter."""

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
from sirtaki.comm.control.waiting import start_thread
from sirtaki.comm.plan import Algorithm, Route, TransportKind
from sirtaki.comm.router import Router
from sirtaki.comm.sparse.plan import SparsePath, SparsePlan
from sirtaki.comm.transports.contract import HALF_DTYPES, FlatBuffer, Parcels, ThreadWork, Work
from sirtaki.comm.transports.shared_memory import share_memory
from sirtaki.errors import CommError, ConfigError, TransportError
from sirtaki.machine import free_in_forked_children

# ── streams for rows ──────────────────────────────────────────────────────────────────────────────────────────────────

FIRST_REGION_BYTES = 1 << 20
MAX_REGION_BYTES = 1 << 28
"""Largest size in bytes of the shared-memory region through which the ranks of a node exchange rows. Larger data are
cut into several parts, which are sent one after another."""

MAX_MESSAGE_BYTES = 1 << 28
"""Largest number of bytes that one all-to-all sends over one stream (connection). There is a limit, because MPI counts
bytes with 32 bits."""

MIN_PIECE_BYTES = 1 << 15
"""Smallest size in bytes of the parts of a message that are sent over different streams (connections)."""


class Closed(Exception):
    """Raised by a pending or later collective of `SparseLanes` when this rank stops or closes it."""


class SparseLanes:
    """Streams (connections) that carry rows of sparse gradients, and blocking collectives over them.

    One thread must call the collectives, in the same order on all ranks.

    Attributes:
        rank, size: rank of this process, and number of participating ranks.
        route: transport and algorithm of all streams. The algorithm is flat (not hierarchical).
        streams: number of open streams.
        exchange_streams, reduce_streams: largest numbers of streams that an all-to-all and an all-reduce may use.
    """

    def __init__(self, control: ControlPlane, *, timeout_s: float, kind: TransportKind | None, streams: int) -> None:
        """Open streams (connections) over the fastest transport that can be opened. Collective.

        Args:
            control: control plane of the participating ranks (small messages between them).
            timeout_s: seconds after which an operation without progress fails.
            kind: the only transport to use. None = any transport may be used.
            streams: largest number of streams to open. With shared memory, only one is opened.

        Raises:
            ConfigError: this job has no such transport. Raised on all ranks.
            TransportError: no transport can be opened. Raised on all ranks.
        """
        self._control = control.scope()
        self.rank, self.size = control.rank, control.size
        self._router = Router(self._control, timeout_s=timeout_s)
        self._region: FlatBuffer | None = None
        self._closing = False
        self._needed_bytes = 0
        self.route, self.streams = self._open_best(kind, streams)
        self.exchange_streams = self.reduce_streams = self.streams
        if self._uses_shared_memory:
            self._share(FIRST_REGION_BYTES)

    @property
    def _uses_shared_memory(self) -> bool:
        return self.route[0] is TransportKind.SHARED_MEMORY

    # ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _open_best(self, kind: TransportKind | None, streams: int) -> tuple[Route, int]:
        routes = [route for route in self._router.routes if route[1] is Algorithm.FLAT and kind in (None, route[0])]
        if not routes:
            raise ConfigError(
                "Sirtaki has no transport for sparse gradients between these ranks (requested transport: "
                f"{kind.value if kind else 'any'}); unset SIRTAKI_TRANSPORT or choose another value"
            )
        problem: TransportError | None = None
        for route in routes:
            try:
                return route, self._open(route, streams)
            except TransportError as err:
                problem = err
        assert problem is not None
        raise problem

    def _open(self, route: Route, streams: int) -> int:
        count = (
            1
            if route[0] is TransportKind.SHARED_MEMORY
            else min(streams, self._router.max_streams([route], fixed=True))
        )
        self._router.open_streams(route, count)
        return count

    def open_streams(self, streams: int) -> int:
        """Open up to `streams` streams (connections), and return how many are open. Collective.

        No operation may be in flight.
        """
        try:
            self.streams = max(self.streams, self._open(self.route, streams))
        except TransportError:
            # Continue with the streams that were open before, because a failure to open more does not close them.
            self.streams = max(1, self.streams)
        return self.streams

    # ── the shared region ────────────────────────────────────────────────────────────────────────────────────────

    def grow(self) -> None:
        """Enlarge the shared-memory region if the data of an earlier operation did not fit. Collective.

        No operation may be in flight.
        """
        region = self._region
        if region is None or self._needed_bytes <= region.tensor.numel() or self._needed_bytes > MAX_REGION_BYTES:
            return
        self._share(1 << (self._needed_bytes - 1).bit_length())

    def _share(self, size_bytes: int) -> None:
        try:
            regions = tuple(share_memory(self._control, size_bytes))
        except TransportError:
            if self._region is None:
                raise
            # Keep the smaller region. Do not try to enlarge it again until later data are also too large for it.
            self._needed_bytes = 0
            return
        self._region = FlatBuffer(regions[self._control.local_rank], regions)

    # ── exchanges ────────────────────────────────────────────────────────────────────────────────────────────────

    def all_gather(self, parcel: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """All-gather byte tensors (parcels), and return them by rank. Collective, blocking.

        Args:
            parcel: byte tensor of this rank.
            lengths: size in bytes of each rank's parcel, by rank.
        """
        return self._transfer([parcel], Parcels.to_all(lengths))

    def gather_counts(self, counts: Sequence[int]) -> list[list[int]]:
        """All-gather lists of integers of equal length, and return the list of each rank. Collective."""
        own = torch.tensor(counts, dtype=torch.int64, device="cpu").view(torch.uint8)
        return [part.view(torch.int64).tolist() for part in self.all_gather(own, [own.numel()] * self.size)]

    def exchange(self, parcels: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Send a byte tensor (parcel) to each rank, and return the parcels for this rank, by sender. Collective.

        Args:
            parcels: byte tensors to send, by receiver.
            lengths: length of each parcel in bytes, by sender and receiver.
        """
        return self._transfer(parcels, Parcels(np.asarray(lengths, dtype=np.int64)))

    def _transfer(self, parcels: Sequence[torch.Tensor], layout: Parcels) -> list[torch.Tensor]:
        received = layout.received_by(self.rank)
        rounds, width = self._split(layout)
        if rounds * width == 1:
            incoming = torch.empty(sum(received), dtype=torch.uint8, device="cpu")
            self._wait([self._send(parcels, layout, incoming, 0)])
            return list(torch.split(incoming, received))
        whole = [torch.empty(length, dtype=torch.uint8, device="cpu") for length in received]
        filled = [0] * self.size
        for round_number in range(rounds):
            pieces = [layout.piece(round_number * width + number, rounds * width) for number in range(width)]
            arriving = [
                torch.empty(sum(piece.received_by(self.rank)), dtype=torch.uint8, device="cpu") for piece in pieces
            ]
            sent = [_part(parcels, round_number * width + number, rounds * width) for number in range(width)]
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

    def _split(self, layout: Parcels) -> tuple[int, int]:
        """Return the number of rounds, one after another, in which data are sent, and the number of streams per round.

        Both numbers are equal on all ranks.
        """
        largest = layout.largest_outgoing_bytes
        if self._region is not None:
            self._needed_bytes = max(self._needed_bytes, largest)
            # Leave one byte free per rank, because the pieces of a parcel may differ in length by a byte.
            room = self._region.tensor.numel() - self.size
            return max(1, -(-largest // room)), 1
        width = max(1, min(self.exchange_streams, int(layout.lengths.max()) // MIN_PIECE_BYTES))
        return max(1, -(-largest * self.size // (width * MAX_MESSAGE_BYTES))), width

    def _send(self, parcels: Sequence[torch.Tensor], layout: Parcels, incoming: torch.Tensor, stream: int) -> Work:
        outgoing = FlatBuffer(parcels[0] if len(parcels) == 1 else torch.cat(list(parcels)))
        if self._region is not None:
            self._region.tensor[: outgoing.tensor.numel()] = outgoing.tensor
            outgoing = self._region
        return self._router.exchange(outgoing, layout, incoming, route=self.route, stream=stream)

    # ── all-reduces ──────────────────────────────────────────────────────────────────────────────────────────────

    def all_reduce_(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous CPU tensor over all ranks, in place. Collective, blocking."""
        flat = torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor.view(-1)
        if self._region is None:
            self._reduce_in_place(flat)
            return
        self._needed_bytes = max(self._needed_bytes, flat.numel() * flat.dtype.itemsize)
        room = self._region.tensor.numel() // flat.dtype.itemsize
        region = FlatBuffer(self._region.tensor.view(flat.dtype), tuple(p.view(flat.dtype) for p in self._region.peers))
        for part in torch.split(flat, room):
            region.tensor[: len(part)] = part
            self._wait([self._router.all_reduce(region, 0, len(part), route=self.route, stream=0)])
            part.copy_(region.tensor[: len(part)])

    def _reduce_in_place(self, flat: torch.Tensor) -> None:
        n, width = flat.numel(), self.reduce_streams
        width = max(1, min(width, n * flat.dtype.itemsize // MIN_PIECE_BYTES))
        buffer = FlatBuffer(flat)
        edges = [n * number // width for number in range(width + 1)]
        self._wait(
            [
                self._router.all_reduce(buffer, start, stop, route=self.route, stream=number)
                for number, (start, stop) in enumerate(pairwise(edges))
            ]
        )

    # ── waiting and closing ──────────────────────────────────────────────────────────────────────────────────────

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
        """Make pending and later collectives raise `Closed` in the thread that calls them. Thread-safe."""
        self._closing = True

    def close(self) -> None:
        """Close this rank's streams (connections). Call it once, when no thread uses them. Not collective."""
        self._closing = True
        if self._router.release():
            self._control.release(self._router.close)
        self._region = None


def _part(parcels: Sequence[torch.Tensor], number: int, of: int) -> list[torch.Tensor]:
    """Cut each parcel (byte tensor) into `of` pieces, and return piece `number` of each.

    The sizes of the pieces must equal those that `Parcels.piece` computes.
    """
    return [parcel[len(parcel) * number // of : len(parcel) * (number + 1) // of] for parcel in parcels]


# ── rows and algorithms ───────────────────────────────────────────────────────────────────────────────────────────────

ALIGNMENT_BYTES = 16
"""Alignment of parcels (byte tensors with packed rows). Their sizes are multiples of it, so that the values of all
parcels in a buffer are aligned."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of one parameter's sparse gradient, without duplicates.

    Attributes:
        indices: indices of the rows, ascending, int64, `(n,)`.
        values: elements of the rows, `(n, width)`.
    """

    indices: torch.Tensor
    values: torch.Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def of(self, positions: torch.Tensor) -> Rows:
        """Return the rows at `positions` (not row indices) in this object, in the order of `positions`."""
        return Rows(self.indices[positions], self.values[positions])


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: float32 for 16-bit floats, else `dtype` itself."""
    return torch.float32 if dtype in HALF_DTYPES else dtype


def coalesced(gradient: torch.Tensor) -> Rows:
    """Return copies of the rows of a sparse COO tensor on the CPU, which must have one sparse dimension.

    Rows with equal indices are summed. 16-bit floats are summed in float32 and rounded once.
    """
    indices, values = gradient._indices()[0], gradient._values()
    values = values.flatten(1) if gradient.dim() > 1 else values[:, None]
    if gradient.is_coalesced():
        return Rows(indices.clone(), values.clone())
    present, position = torch.unique(indices, return_inverse=True)
    total = torch.zeros(len(present), values.shape[1], dtype=wide(values.dtype), device="cpu")
    total.index_add_(0, position, values.to(total.dtype))
    return Rows(present, total.to(values.dtype))


def merged(parts: Sequence[Rows]) -> Rows:
    """Sum sets of rows, one set per rank, and return all rows that are in any set.

    Rows are added in the order of `parts`. If this is the order of ranks, results are bitwise equal on all ranks.
    """
    dtype = parts[0].values.dtype
    present, position = torch.unique(torch.cat([part.indices for part in parts]), return_inverse=True)
    total = torch.zeros(len(present), parts[0].values.shape[1], dtype=wide(dtype), device="cpu")
    for part, positions in zip(parts, torch.split(position, [len(part) for part in parts]), strict=True):
        total.index_add_(0, positions, part.values.to(total.dtype))
    return Rows(present, total.to(dtype))


def disjoint(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all `parts`, sorted by row index. No two parts may have a row in common."""
    indices, order = torch.cat([part.indices for part in parts]).sort()
    return Rows(indices, torch.cat([part.values for part in parts])[order])


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Format of a message with rows of one parameter: all row indices, then all values.

    The indices and the values are each padded to a multiple of `ALIGNMENT_BYTES`.

    Attributes:
        n_rows: number of rows of the parameter.
        width: number of elements per row.
        dtype: dtype of the values.
    """

    n_rows: int
    width: int
    dtype: torch.dtype

    @property
    def index_dtype(self) -> torch.dtype:
        """Return the dtype of row indices in messages: int32 if the largest index fits, else int64."""
        return torch.int32 if self.n_rows <= 2**31 else torch.int64

    @property
    def row_bytes(self) -> int:
        """Return the size in bytes of the values of one row, without its index."""
        return self.width * self.dtype.itemsize

    @property
    def flagged_bytes(self) -> int:
        """Return the size in bytes of one row with an additional element, which marks the row as present on a rank."""
        return self.row_bytes + self.dtype.itemsize

    def parcel_bytes(self, n: int) -> int:
        """Return the size in bytes of a parcel (message) with `n` packed rows."""
        return _padded(n * self.index_dtype.itemsize) + _padded(n * self.row_bytes)

    def pack(self, rows: Rows) -> torch.Tensor:
        """Return a new byte tensor (parcel) that contains the rows."""
        parcel = torch.empty(self.parcel_bytes(len(rows)), dtype=torch.uint8, device=rows.values.device)
        indices, values = self._views(parcel, len(rows))
        indices.copy_(rows.indices)
        values.copy_(rows.values)
        return parcel

    def unpack(self, parcel: torch.Tensor, n: int) -> Rows:
        """Return the `n` rows that a parcel (byte tensor) contains. Their values share the parcel's memory."""
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
    """Sum of a sparse gradient over ranks, and counts of the rows that ranks had. Equal on all ranks.

    Attributes:
        rows: sums of all rows that at least one rank had.
        n_touched: sum over ranks of the number of rows. A row counts once for each rank that had it.
        n_hot: number of hot (frequent) rows counted in `n_touched`.
        by_rank: row indices of each rank. Empty if the algorithm does not send them to all ranks.
    """

    rows: Rows
    n_touched: int
    n_hot: int = 0
    by_rank: list[torch.Tensor] = field(default_factory=list)


def reduce_rows(plan: SparsePlan, rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    """Sum the rows of a sparse gradient over ranks, by the algorithm of `plan`. Collective, blocking."""
    if plan.path is SparsePath.HOT_COLD:
        return _hot_cold(plan, rows, form, lanes)
    if plan.path is SparsePath.BLOCKS:
        return _blocks(plan, rows, form, lanes)
    return _PLAIN[plan.path](rows, form, lanes)


def _gathered(rows: Rows, form: RowFormat, lanes: SparseLanes) -> list[Rows]:
    """All-gather rows of a sparse gradient. Return the rows of each rank, by rank. Collective, blocking."""
    counts = [count for (count,) in lanes.gather_counts([len(rows)])]
    parcels = lanes.all_gather(form.pack(rows), [form.parcel_bytes(count) for count in counts])
    return [form.unpack(parcel, count) for parcel, count in zip(parcels, counts, strict=True)]


def _gather(rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    parts = _gathered(rows, form, lanes)
    return Reduced(merged(parts), sum(map(len, parts)), by_rank=[part.indices for part in parts])


def owners_of(indices: torch.Tensor, n_ranks: int) -> torch.Tensor:
    """Return the rank that sums each row (its owner), `(n,)`.

    Owners are chosen by a hash of the row index, so that frequent rows, which are often adjacent, have different
    owners.
    """
    return ((indices * 2654435761) >> 15) % n_ranks


def _owner(rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    owners, order = owners_of(rows.indices, lanes.size).sort(stable=True)
    own = torch.bincount(owners, minlength=lanes.size).tolist()
    counts = lanes.gather_counts(own)
    parcels = [form.pack(rows.of(positions)) for positions in torch.split(order, own)]
    lengths = [[form.parcel_bytes(count) for count in row] for row in counts]
    arrived = lanes.exchange(parcels, lengths)
    owned = merged([form.unpack(parcel, row[lanes.rank]) for parcel, row in zip(arrived, counts, strict=True)])
    return Reduced(disjoint(_gathered(owned, form, lanes)), sum(map(sum, counts)))


def _dense_sum(
    rows: Rows, positions: torch.Tensor, n: int, form: RowFormat, lanes: SparseLanes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum rows over all ranks by one all-reduce of a dense buffer of `n` rows. Collective.

    `positions[i]` is the position of this rank's row number i in the buffer.

    Returns:
        The sums, and for each row of the buffer the number of ranks that had the row.
    """
    buffer = torch.zeros(n * (form.width + 1), dtype=form.dtype, device="cpu")
    values, touched = buffer[: n * form.width].view(n, form.width), buffer[n * form.width :]
    values[positions] = rows.values
    touched[positions] = 1
    lanes.all_reduce_(buffer)
    return values, touched.real if touched.is_complex() else touched


def _present_rows(values: torch.Tensor, touched: torch.Tensor, indices: torch.Tensor | None = None) -> Rows:
    present = touched.nonzero()[:, 0]
    return Rows(present if indices is None else indices[present], values[present])


def _dense(rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    values, touched = _dense_sum(rows, rows.indices, form.n_rows, form, lanes)
    return Reduced(_present_rows(values, touched), int(touched.double().sum()))


def _blocks(plan: SparsePlan, rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    per_block = plan.block_rows
    n_blocks = -(-form.n_rows // per_block)
    own = np.zeros(n_blocks, dtype=np.bool_)
    own[rows.indices.numpy() // per_block] = True
    bits = torch.from_numpy(np.packbits(own))
    gathered = torch.stack(lanes.all_gather(bits, [len(bits)] * lanes.size)).numpy()
    union = np.flatnonzero(np.unpackbits(np.bitwise_or.reduce(gathered), count=n_blocks))
    blocks = torch.from_numpy(union)
    positions = torch.searchsorted(blocks, rows.indices // per_block)
    if per_block == 1:
        total = torch.zeros(len(blocks), form.width, dtype=form.dtype, device="cpu")
        total[positions] = rows.values
        lanes.all_reduce_(total)
        return Reduced(Rows(blocks, total), int(np.unpackbits(gathered).sum()))
    indices = (blocks[:, None] * per_block + torch.arange(per_block, device="cpu")).view(-1)
    positions = positions * per_block + rows.indices % per_block
    values, touched = _dense_sum(rows, positions, len(indices), form, lanes)
    return Reduced(_present_rows(values, touched, indices), int(touched.double().sum()))


def _hot_cold(plan: SparsePlan, rows: Rows, form: RowFormat, lanes: SparseLanes) -> Reduced:
    hot = torch.from_numpy(plan.hot_indices)
    positions = torch.searchsorted(hot, rows.indices)
    is_hot = hot[positions.clamp(max=len(hot) - 1)] == rows.indices
    values, touched = _dense_sum(rows.of(is_hot), positions[is_hot], len(hot), form, lanes)
    n_hot = int(touched.double().sum())
    cold = _PLAIN[plan.cold](rows.of(~is_hot), form, lanes)
    total = disjoint([_present_rows(values, touched, hot), cold.rows])
    return Reduced(total, n_hot + cold.n_touched, n_hot)


_PLAIN: dict[SparsePath, Callable[[Rows, RowFormat, SparseLanes], Reduced]] = {
    SparsePath.GATHER: _gather,
    SparsePath.OWNER: _owner,
    SparsePath.DENSE: _dense,
}


END_S = 2.0
"""Seconds for which `SparseWorker.close` waits for the end of its thread."""


class RowsWork(ThreadWork):
    """Work that `SparseWorker` performs over its streams (connections).

    Attributes:
        name: place of the work in the order of `SparseWorker.begin`: the name of a parameter.
    """

    name: str

    def perform(self, lanes: SparseLanes) -> None:
        """Run the collectives of the work. Called by the worker's thread."""
        raise NotImplementedError


class CountsWork(RowsWork):
    """An all-gather of integers, in flight."""

    def __init__(self, name: str, counts: Sequence[int], gathered: Callable[[list[list[int]]], None]) -> None:
        """Create the work. The worker's thread calls `gathered` with the `counts` of each rank, by rank."""
        super().__init__()
        self.name, self._counts, self._gathered = name, counts, gathered

    def perform(self, lanes: SparseLanes) -> None:
        """All-gather the integers, and pass them on."""
        self._gathered(lanes.gather_counts(self._counts))


class SparseWork(RowsWork):
    """Sum over ranks of one parameter's sparse gradient, in flight.

    Attributes:
        name: name of the parameter.
        rows: rows of this rank.
        form: format of messages with the rows.
        plan: algorithm that sums the rows, with its settings.
        submitted_s: time at which this object was created, by `time.perf_counter`.
        reduced: the sum, once the work is done.
    """

    reduced: Reduced

    def __init__(self, name: str, rows: Rows, form: RowFormat, plan: SparsePlan) -> None:
        super().__init__()
        self.name, self.rows, self.form, self.plan = name, rows, form, plan
        self.submitted_s = time.perf_counter()

    def perform(self, lanes: SparseLanes) -> None:
        """Sum the rows over ranks."""
        self.reduced = reduce_rows(self.plan, self.rows, self.form, lanes)

    @property
    def span_s(self) -> float:
        """Return the seconds that the completed sum took, without its time in the queue."""
        return self.done_s - self.begun_s


class SparseWorker:
    """Thread that sums the sparse gradients of each iteration over ranks, in an order that `begin` sets.

    A gradient that is submitted early waits for the gradients before it in the order. So all ranks sum the gradients in
    the same order, without messages about which gradients the backward pass has computed.

    Attributes:
        lanes: streams (connections) that the thread uses, and `close` closes. Between iterations, other threads may use
            them to measure their speed.
    """

    def __init__(self, lanes: SparseLanes, failures: FailureBoard, *, prefix: str = "") -> None:
        """Start the thread.

        Args:
            lanes: streams (connections) for the thread.
            failures: record of the job's failure, to which the thread adds its errors.
            prefix: text before the names of parameters in traces.
        """
        self.lanes, self._failures, self._prefix = lanes, failures, prefix
        self._lock = free_in_forked_children(threading.Lock())
        self._order: list[str] = []
        self._next = 0
        self._early: dict[str, RowsWork] = {}
        self._works: queue.SimpleQueue[RowsWork | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sirtaki-sparse", daemon=True)
        start_thread(self._thread)

    def begin(self, order: Sequence[str]) -> None:
        """Set the order, by parameter name, in which the next iteration's sparse gradients are summed.

        The order must be equal on all ranks. Call this between iterations.
        """
        with self._lock:
            self._order, self._next = list(order), 0
            self._early.clear()

    def submit(self, work: RowsWork) -> None:
        """Queue a sparse gradient. It is summed after the gradients before it in the order of `begin`.

        Thread-safe, non-blocking.
        """
        with self._lock:
            self._early[work.name] = work
            while self._next < len(self._order) and self._order[self._next] in self._early:
                self._works.put(self._early.pop(self._order[self._next]))
                self._next += 1

    def _run(self) -> None:
        failed: CommError | None = None
        while (work := self._works.get()) is not None:
            # After an error, fail all later works, because this rank's operations no longer match those of its peers.
            if failed is not None:
                work.finish(failed)
                continue
            work.begun_s = time.perf_counter()
            try:
                work.perform(self.lanes)
            except Closed:
                return
            except CommError as err:
                failed = err
            except Exception as err:
                # Report any error, because other threads and ranks wait for the sum.
                failed = CommError(f"failed to reduce the rows of {work.name}: {err!r}")
                self._failures.report(failed)
            else:
                if isinstance(work, SparseWork):
                    self._record(work)
            work.finish(failed)

    def _record(self, work: SparseWork) -> None:
        """Report the times of a completed sum to the timeline (Chrome trace) and the recorder, if they are in use."""
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
        """Stop the thread, even if it waits for peers, and close its connections. Call it once. Not collective.

        Returns:
            False if the thread did not stop within `END_S`. The streams stay open in that case.
        """
        self.lanes.stop()
        self._works.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(END_S)
        if self._thread.is_alive():
            return False
        self.lanes.close()
        return True
