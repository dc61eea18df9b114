"""MPI: each stream is a duplicated communicator with a thread that makes blocking calls.

mpi4py releases the GIL inside MPI, and Open MPI has no progress thread, so a blocking call in a thread of its own is
what makes progress. Fast between the ranks of one host; over TCP Gloo is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from sirtaki.comm.control.mpi import load_mpi
from sirtaki.errors import CommError

from ..plan import TransportKind
from .contract import (
    HALF_DTYPES,
    Agree,
    FlatBuffer,
    Parcels,
    ReduceOp,
    StreamCost,
    StreamSpec,
    StreamTransport,
    ThreadWork,
    Work,
    Worker,
    ended,
    open_together,
    scale_,
)

if TYPE_CHECKING:
    from mpi4py import MPI

MAX_STREAMS = 24


def mpi_all_reduce_(tensor: torch.Tensor, *, comm: MPI.Comm, op: ReduceOp, scale: float) -> None:
    """Collective, blocking: reduces a contiguous tensor in place; halves travel as float32, which MPI knows."""
    MPI = load_mpi()
    operation = {ReduceOp.SUM: MPI.SUM, ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX, ReduceOp.PRODUCT: MPI.PROD}[op]
    if tensor.dtype in HALF_DTYPES:
        wide = tensor.float()
        comm.Allreduce(MPI.IN_PLACE, wide.numpy(), op=operation)
        tensor.copy_(wide.mul_(scale))
    else:
        comm.Allreduce(MPI.IN_PLACE, tensor.numpy(), op=operation)
        scale_(tensor, scale)


def mpi_exchange(outgoing: torch.Tensor, parcels: Parcels, incoming: torch.Tensor, *, comm: MPI.Comm) -> None:
    """Collective, blocking: exchanges parcels; see `Transport.exchange`."""
    MPI = load_mpi()
    sent, received = parcels.sent_by(comm.rank), parcels.received_by(comm.rank)
    places = np.cumsum([0, *received[:-1]]).tolist()
    comm.Alltoallv(
        [outgoing.numpy(), [stop - start for start, stop in sent], [start for start, _ in sent], MPI.BYTE],
        [incoming.numpy(), received, places, MPI.BYTE],
    )


class _MpiStream(Worker):
    """One stream: its communicator, and the thread that makes the calls."""

    def __init__(self, comm: MPI.Comm, number: int) -> None:
        super().__init__(f"sirtaki-mpi-{number}")
        self.comm = comm


class MpiTransport(StreamTransport[_MpiStream]):
    """Streams over duplicated MPI communicators, each with a thread."""

    kind = TransportKind.MPI
    max_streams = MAX_STREAMS
    stream_cost = StreamCost(threads=1)

    def __init__(self, duplicate: Callable[[], MPI.Comm], agree: Agree) -> None:
        """Starts nothing.

        Args:
            duplicate: collective; gives a fresh communicator over the ranks that take part. Its owner frees it.
            agree: of all ranks that open streams at the same time.
        """
        super().__init__()
        self._duplicate, self._agree = duplicate, agree

    def _open(self, number: int) -> _MpiStream:
        return open_together(
            f"MPI stream {number}",
            lambda: _MpiStream(self._duplicate(), number),
            agree=self._agree,
            close=lambda stream: self._end([stream]),
        )

    def _carry(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        """Has the stream's thread reduce the range by MPI."""
        unit = buffer.tensor[start:stop]
        return self._submit(
            stream.number,
            lambda comm: mpi_all_reduce_(unit, comm=comm, op=op, scale=scale),
            f"elements [{start}, {stop})",
        )

    def prepare(self, act: Callable[[], None], *, stream: StreamSpec) -> bool:
        """Has the stream's thread do it."""
        self.streams[stream.number].put(act)
        return True

    def _exchange(self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, stream: StreamSpec) -> Work:
        """Has the stream's thread carry the parcels by MPI."""
        return self._submit(
            stream.number, lambda comm: mpi_exchange(outgoing.tensor, parcels, incoming, comm=comm), "an exchange"
        )

    def _submit(self, number: int, act: Callable[[MPI.Comm], None], what: str) -> Work:
        """Has the thread of a stream do this with its communicator."""
        work, chosen = ThreadWork(), self.streams[number]

        def task() -> None:
            work.begun_s = time.perf_counter()
            try:
                act(chosen.comm)
            except Exception as err:  # whatever it is, the waiting thread must hear of it
                work.finish(CommError(f"MPI failed in {what} on stream {number}: {err}"))
            else:
                work.finish()

        chosen.put(task)
        return work

    def _end(self, streams: list[_MpiStream]) -> bool:
        """Ends the threads after what they have to do; False if one hangs in MPI."""
        return ended(streams, within_s=1.0)
