"""The contract of everything that carries units: buffers, works, and the transport itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from sirtaki.comm.device import Event
from sirtaki.comm.plan import TransportKind

from .parcels import Parcels
from .resources import StreamCost


class ReduceOp(Enum):
    """How elements of different ranks are combined; averages are sums with a scale."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


@dataclass(frozen=True, slots=True, eq=False)
class FlatBuffer:
    """One contiguous buffer a rank, all of one size; units are element ranges of it.

    Attributes:
        tensor: this rank's buffer, 1-d and contiguous.
        peers: where the ranks of one node share memory, the buffers of all of them by local rank (this rank's own
            among them); empty otherwise.
        mirror: where a device's buffer travels through the host, the buffer of the same size there.
    """

    tensor: torch.Tensor
    peers: tuple[torch.Tensor, ...] = ()
    mirror: FlatBuffer | None = None


class Work(Protocol):
    """A reduction under way."""

    def wait(self, timeout_s: float) -> bool:
        """Blocks until the result is in the buffer, for at most `timeout_s`; False if it is not there by then.

        On a device with streams the current stream waits instead, where the transport can have it wait.

        Raises:
            CommError: the reduction failed.
        """
        ...

    def is_done(self) -> bool:
        """Whether it is reduced, or has failed; never waits."""
        ...

    def times(self) -> tuple[Event | None, Event | None]:
        """When the transport began and when it ended, as far as it knows; after the end."""
        ...


class _NothingToDo:
    """The work of an empty range."""

    def wait(self, timeout_s: float) -> bool:
        return True

    def is_done(self) -> bool:
        return True

    def times(self) -> tuple[Event | None, Event | None]:
        return None, None


NOTHING_TO_DO = _NothingToDo()


class StreamSpec(NamedTuple):
    """What one unit travels on: a stream, with a thread allowance where the transport has any (None = its own)."""

    number: int
    threads: int | None = None


class Transport(Protocol):
    """Carries units over several streams at the same time.

    Units of one stream are reduced in the order in which they were submitted, which must be the same on all ranks;
    streams are independent of each other. Submitting never blocks on other ranks. Transports without thread
    allowances (`threads` is empty) look at the number alone.

    Attributes:
        kind: which one it is.
        max_streams: as many may be open at once.
        threads: thread allowances of a unit.
        stream_cost: what one stream takes of this process.
    """

    kind: TransportKind
    max_streams: int
    threads: tuple[int, ...]
    stream_cost: StreamCost

    def open_streams(self, streams: Sequence[StreamSpec]) -> None:
        """Collective, with nothing in flight: makes these streams usable; others may be closed.

        Raises:
            PlanError: on all ranks, if so many cannot be open at once.
            TransportError: on all ranks, if one of them could not open a stream. Those that were open before still are,
                what this call opened is closed.
            CommError: the job has failed.
        """
        ...

    def all_reduce(
        self, buffer: FlatBuffer, start: int, stop: int, *, stream: StreamSpec, op: ReduceOp, scale: float
    ) -> Work:
        """Reduces elements `[start, stop)` of `buffer` over all ranks in place, and multiplies them by `scale`.

        The range may be empty; it must not be touched until the work is done.
        """
        ...

    def keep(self, streams: int) -> None:
        """Collective, with nothing in flight on any rank: closes all but the first so many if idle ones take time."""
        ...

    def close(self) -> bool:
        """Releases threads and connections; pending works fail. May be called twice.

        Returns:
            False if a thread does not end, since it waits for other ranks: what it uses must not be freed.
        """
        ...


class Exchanger(Transport, Protocol):
    """A transport that also carries parcels, each from one rank to another."""

    def exchange(self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, *, stream: StreamSpec) -> Work:
        """Sends this rank's parcels and receives those for it; in order with all other units of the stream.

        Args:
            outgoing: bytes, with the parcels as `parcels` says; not to be written until the work is done.
            parcels: of all ranks, the same on all.
            incoming: bytes, contiguous, as many as come; the parcels lie there one behind the other, by sender.
            stream: that is open.
        """
        ...
