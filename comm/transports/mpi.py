"""Transport over MPI. Each stream is a duplicated communicator with a thread that makes blocking calls.

Non-blocking MPI calls would not proceed in the background, because Open MPI has no progress thread. Other Python
threads run during a blocking call, because mpi4py releases the GIL. Between ranks of one host, MPI is fast. Over TCP,
Gloo is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
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
    join_workers,
    open_together,
    scale_,
)

if TYPE_CHECKING:
    from mpi4py import MPI

MAX_STREAMS = 24


def mpi_all_reduce_(tensor: torch.Tensor, *, comm: MPI.Comm, op: ReduceOp, scale: float) -> None:
    """All-reduce a contiguous tensor in place, and multiply the result by `scale`. Collective, blocking.

    16-bit floats are sent as float32, because MPI has no datatype for 16-bit floats.
    """
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
    """Send a parcel (message) to each rank, and receive a parcel from each rank: an all-to-all. Collective, blocking.

    Args:
        outgoing: parcels that this rank sends, uint8, contiguous by receiver.
        parcels: sizes of all parcels.
        incoming: tensor that receives the parcels for this rank, uint8, contiguous by sender.
        comm: communicator of the participating ranks.
    """
    MPI = load_mpi()
    sent, received = parcels.sent_by(comm.rank), parcels.received_by(comm.rank)
    places = np.cumsum([0, *received[:-1]]).tolist()
    comm.Alltoallv(
        [outgoing.numpy(), [stop - start for start, stop in sent], [start for start, _ in sent], MPI.BYTE],
        [incoming.numpy(), received, places, MPI.BYTE],
    )


class _MpiStream(Worker):
    """One stream of the transport: an MPI communicator, and the thread that makes all MPI calls on it."""

    def __init__(self, comm: MPI.Comm, number: int) -> None:
        super().__init__(f"sirtaki-mpi-{number}")
        self.comm = comm


class MpiTransport(StreamTransport[_MpiStream]):
    """Transport over MPI. Each stream is a duplicated communicator with a thread that makes blocking calls."""

    kind = TransportKind.MPI
    max_streams = MAX_STREAMS
    stream_cost = StreamCost(threads=1)

    def __init__(self, duplicate: Callable[[], MPI.Comm], agree: Agree) -> None:
        """Create the transport. `open_streams` duplicates communicators and starts threads.

        Args:
            duplicate: returns a new communicator over the participating ranks. Collective. The control plane frees it.
            agree: collective function that gets this rank's error message ("" = none), and raises on all ranks if any
                rank has passed an error message.
        """
        super().__init__()
        self._duplicate, self._agree = duplicate, agree

    def _open(self, numbers: range) -> Iterator[_MpiStream]:
        for number in numbers:
            yield open_together(
                f"MPI stream {number}",
                partial(self._make, number),
                agree=self._agree,
                close=lambda stream: self._close_streams([stream]),
            )

    def _make(self, number: int) -> _MpiStream:
        return _MpiStream(self._duplicate(), number)

    def _start(self, buffer: FlatBuffer, start: int, stop: int, stream: StreamSpec, op: ReduceOp, scale: float) -> Work:
        unit = buffer.tensor[start:stop]
        return self._submit(
            stream.number,
            lambda comm: mpi_all_reduce_(unit, comm=comm, op=op, scale=scale),
            f"elements [{start}, {stop})",
        )

    def prepare(self, act: Callable[[], None], *, stream: StreamSpec) -> bool:
        """Queue a call of `act` for the thread of `stream`. Return True, because each stream has a thread."""
        self.streams[stream.number].put(act)
        return True

    def _exchange(self, outgoing: FlatBuffer, parcels: Parcels, incoming: torch.Tensor, stream: StreamSpec) -> Work:
        return self._submit(
            stream.number, lambda comm: mpi_exchange(outgoing.tensor, parcels, incoming, comm=comm), "an exchange"
        )

    def _submit(self, number: int, act: Callable[[MPI.Comm], None], what: str) -> Work:
        """Make the thread of stream `number` call `act` with the stream's communicator. Non-blocking.

        `what` names the operation in error messages.
        """
        work, chosen = ThreadWork(), self.streams[number]

        def task() -> None:
            work.begun_s = time.perf_counter()
            try:
                act(chosen.comm)
            except Exception as err:
                # Catch every error, because otherwise the thread that waits for the work would never wake up.
                work.finish(CommError(f"MPI failed in {what} on stream {number}: {err}"))
            else:
                work.finish()

        chosen.put(task)
        return work

    def _close_streams(self, streams: list[_MpiStream]) -> bool:
        """End the threads of `streams` after their queued MPI calls. Return False if a thread hangs in an MPI call."""
        return join_workers(streams, within_s=1.0)
