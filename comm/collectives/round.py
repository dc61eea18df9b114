"""What the ranks tell each other in one round of eager operations: bits, or everything that they have pending."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sirtaki.comm.control.failure import FailureBoard, poll_until
from sirtaki.comm.control.plane import gather, load_mpi

from .requests import DIGEST_BYTES, Presence

if TYPE_CHECKING:
    from mpi4py import MPI

ALL_BITS = (1 << 8 * DIGEST_BYTES) - 1

Bits = npt.NDArray[np.bool_]


class Round:
    """The messages of rounds. All methods are collective, but for `close`."""

    def __init__(self, comm: MPI.Comm, failures: FailureBoard) -> None:
        """Keeps `comm`, which nobody else uses."""
        self._comm, self._failures = comm, failures
        self._and = load_mpi().BAND

    def agree(self, digest: int, bits: Bits) -> tuple[bool, Bits]:
        """Collective: whether all ranks have this digest (0 = it equals none), and which bits all have set.

        Next to the digest goes its complement: the AND of both is what one rank sent only if all sent the same.
        """
        complement = digest ^ ALL_BITS if digest else 0
        mine = digest.to_bytes(DIGEST_BYTES, "big") + complement.to_bytes(DIGEST_BYTES, "big")
        sent = np.concatenate([np.frombuffer(mine, dtype=np.uint8), np.packbits(bits)])
        received = np.empty_like(sent)
        poll_until(self._comm.Iallreduce(sent, received, op=self._and).Test, failures=self._failures)
        all_equal = bool(digest) and received[: 2 * DIGEST_BYTES].tobytes() == mine
        return all_equal, np.unpackbits(received[2 * DIGEST_BYTES :], count=bits.size).view(np.bool_)

    def exchange(self, mine: Presence) -> list[Presence]:
        """Collective: what every rank has pending."""
        return gather(mine, comm=self._comm, failures=self._failures)

    def close(self) -> None:
        """Frees the communicator; when all ranks do."""
        self._comm.Free()
