"""Units over several NCCL communicators at once, each on a CUDA stream of its own.

Nothing here waits: a unit is put on its communicator's stream after what was packed so far, and whoever waits for it
makes *its stream* wait. NCCL needs the same order of operations on all ranks, over all communicators of a GPU, and one
thread at a time that puts them there; the synchroniser keeps the order, a lock the rest.

A stream has a communicator for each number of CTAs. They are one stream all the same: a unit waits for the one before
it on its stream, whichever communicator carried that (LIBRA's stages follow one another, and so does the simulator).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from sirtaki.comm import recorder
from sirtaki.comm.device import Device, Event
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.transports.contract import NOTHING_TO_DO, FlatBuffer, ReduceOp, StreamSpec, Work
from sirtaki.comm.transports.resources import StreamCost
from sirtaki.comm.transports.scaling import scale_
from sirtaki.errors import CommError

from .communicators import CommunicatorKey, CommunicatorPool, Group, GroupWork, Opener, Scope
from .support import ctas_for

ISSUING = threading.Lock()
"""One thread at a time gives work to NCCL, whichever communicators it uses."""


class NcclWork:
    """A unit on its way; the current stream waits for it, not the thread.

    Attributes:
        done_event: when it is reduced; None unless `note_end` was called.
    """

    def __init__(self, work: GroupWork, device: Device, unit: torch.Tensor, scale: float, what: str) -> None:
        """Args: `scale` is what the unit has still to be multiplied by."""
        self._work, self._device, self._unit, self._scale, self._what = work, device, unit, scale, what
        self._waited_for = False
        self.done_event: Event | None = None

    def note_end(self, stream: Any) -> None:
        """Has a stream that is used for nothing else wait for the unit, and notes the moment."""
        with self._device.on(stream):
            self._work.wait()
            self.done_event = self._device.record_event()

    def is_done(self) -> bool:
        """See `Work`."""
        return self._work.is_completed()

    def times(self) -> tuple[Event | None, Event | None]:
        """See `Work`."""
        return None, self.done_event

    def wait(self, timeout_s: float) -> bool:
        """See `Work`: always True, since it is the stream that waits."""
        if not self._waited_for:
            try:
                self._work.wait()
            except RuntimeError as err:
                raise CommError(f"NCCL failed in {self._what}: {err}") from err
            self._device.launch(scale_, self._unit, self._scale)
            self._waited_for = True
        return True


class _Chain:
    """Operations of several communicators one after the other on a stream that leads from one to the next."""

    def __init__(self, device: Device, end: Event, last: GroupWork) -> None:
        self._device, self._end, self._last = device, end, last

    def wait(self) -> None:
        self._device.order_after(self._end)

    def is_completed(self) -> bool:
        return self._last.is_completed() and self._device.is_reached(self._end)


class NcclTransport:
    """The flat algorithm: each unit is one all-reduce on the communicator of its stream and CTAs."""

    kind = TransportKind.NCCL
    scopes: tuple[Scope, ...] = (Scope.ALL,)

    def __init__(self, pool: CommunicatorPool, device: Device, *, opener: Opener) -> None:
        """Starts nothing.

        Args:
            pool: the communicators; other algorithms share it, and whoever owns it closes it.
            device: where the buffers are.
            opener: knows how many streams and which thread allowances there may be.
        """
        self._pool, self._device = pool, device
        self.max_streams = min(opener.max_streams, pool.limit // len(self.scopes))
        self.threads = opener.threads
        self.stream_cost = StreamCost()  # NCCL's own; the pool looks after the device's memory
        self._leads: dict[int, Any] = {}

    def keys(self, streams: Sequence[StreamSpec]) -> list[CommunicatorKey]:
        """The communicators that these streams need."""
        return [
            CommunicatorKey(stream.number, ctas_for(stream.threads), scope)
            for stream in streams
            for scope in self.scopes
        ]

    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        """Collective: see `Transport`."""
        keys = self.keys(streams)
        if not set(keys) <= set(self._pool.keys()):
            self._device.synchronise()  # what is closed for the new ones must have nothing in flight
        self._pool.require(keys)

    def all_reduce(
        self, buffer: FlatBuffer, start: int, stop: int, *, stream: StreamSpec, op: ReduceOp, scale: float
    ) -> Work:
        """See `Transport`. Waits for what is on the current stream, not for what is put there later."""
        unit = buffer.tensor[start:stop]
        if unit.numel() == 0:
            return NOTHING_TO_DO
        with ISSUING:
            work, left = self._issue_in_turn(unit, stream, op, scale)
        unit_work = NcclWork(work, self._device, unit, left, f"elements [{start}, {stop}) on stream {stream.number}")
        if recorder.times_wanted():
            unit_work.note_end(self._lead(stream.number))
        return unit_work

    def _lead(self, number: int) -> Any:  # Any: a stream of the device
        """A stream of the device for this stream that is not NCCL's."""
        if number not in self._leads:
            self._leads[number] = self._device.make_stream()
        return self._leads[number]

    def _issue_in_turn(
        self, unit: torch.Tensor, stream: StreamSpec, op: ReduceOp, scale: float
    ) -> tuple[GroupWork, float]:
        """As `_issue`, behind the stream's last unit, which another communicator may have carried."""
        if self._pool.count(stream.number, Scope.ALL) == 1:
            return self._issue(unit, stream, op, scale)
        packed = self._device.record_event()
        with self._device.on(self._lead(stream.number)):
            self._device.order_after(packed)
            work, left = self._issue(unit, stream, op, scale)
            work.wait()
        return work, left

    def _group(self, stream: StreamSpec, scope: Scope) -> Group:
        return self._pool[CommunicatorKey(stream.number, ctas_for(stream.threads), scope)]

    def _issue(self, unit: torch.Tensor, stream: StreamSpec, op: ReduceOp, scale: float) -> tuple[GroupWork, float]:
        """Returns the work and the factor that has still to be applied."""
        return _all_reduce(self._group(stream, Scope.ALL), unit, op, scale)

    def keep(self, streams: int) -> None:
        """See `Transport`; the pool is its owner's."""

    def close(self) -> bool:
        """See `Transport`; the pool is its owner's."""
        return True


def _all_reduce(group: Group, unit: torch.Tensor, op: ReduceOp, scale: float) -> tuple[GroupWork, float]:
    if op is ReduceOp.SUM and scale != 1.0:
        work = group.all_reduce_scaled(unit, scale)
        if work is not None:
            return work, 1.0
    return group.all_reduce(unit, op), scale


class NcclHierarchicalTransport(NcclTransport):
    """The hierarchical algorithm: reduce-scatter inside the node, all-reduce across nodes, all-gather inside.

    Each rank carries its share of a unit across nodes, so all network interfaces of a node work. Elements that are
    too few for a share go the flat way.
    """

    scopes = (Scope.ALL, Scope.NODE, Scope.ACROSS)

    def __init__(
        self,
        pool: CommunicatorPool,
        device: Device,
        *,
        opener: Opener,
        local_size: int,
        local_rank: int,
    ) -> None:
        """Starts nothing. Args: as `NcclTransport`, and this rank's place in its node; all nodes are of one size."""
        super().__init__(pool, device, opener=opener)
        self._local_size, self._local_rank = local_size, local_rank

    def _issue(self, unit: torch.Tensor, stream: StreamSpec, op: ReduceOp, scale: float) -> tuple[GroupWork, float]:
        share_numel = unit.numel() // self._local_size
        whole, rest = unit[: share_numel * self._local_size], unit[share_numel * self._local_size :]
        packed = self._device.record_event()
        works: list[GroupWork] = []
        left = scale
        with self._device.on(self._lead(stream.number)):
            self._device.order_after(packed)
            if rest.numel():
                work, rest_left = _all_reduce(self._group(stream, Scope.ALL), rest, op, scale)
                works.append(work)
                work.wait()
                if rest_left != 1.0:
                    self._device.launch(scale_, rest, rest_left)
            if share_numel:
                share = whole[self._local_rank * share_numel : (self._local_rank + 1) * share_numel]
                node = self._group(stream, Scope.NODE)
                works.append(node.reduce_scatter(share, whole, op))
                works[-1].wait()
                work, left = _all_reduce(self._group(stream, Scope.ACROSS), share, op, scale)
                works.append(work)
                work.wait()
                if left != 1.0:
                    self._device.launch(scale_, share, left)
                works.append(node.all_gather(whole, share))
                works[-1].wait()
            end = self._device.record_event()
        return _Chain(self._device, end, works[-1]), 1.0
