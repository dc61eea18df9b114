"""What carries rows: lanes of several connections, and sums of frequent rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.errors import CommError, ConfigError, TransportError

from ..plan import Algorithm, CommPlan, Route, TransportKind, Unit
from ..router import Router
from ..transports.contract import FlatBuffer, Parcels, Work
from ..transports.shared_memory import share_memory

if TYPE_CHECKING:
    from ..control.plane import ControlPlane


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
        units = tuple(Unit(start=number, stop=number + 1, stream=number) for number in range(count))
        self._router.open_plan(CommPlan(numel=count, units=units, streams=count, transport=route[0]))
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
        mine = torch.tensor(counts, dtype=torch.int64).view(torch.uint8)
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
            incoming = torch.empty(sum(received), dtype=torch.uint8)
            self._wait([self._send(parcels, layout, incoming, 0)])
            return list(torch.split(incoming, received))
        whole = [torch.empty(length, dtype=torch.uint8) for length in received]
        filled = [0] * self.size
        for turn in range(turns):
            pieces = [layout.piece(turn * width + number, turns * width) for number in range(width)]
            arriving = [torch.empty(sum(piece.received_by(self.rank)), dtype=torch.uint8) for piece in pieces]
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
