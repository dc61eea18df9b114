"""The contract of everything that carries units: buffers, works, and the transport itself."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from .plan import TransportKind


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
    """

    tensor: torch.Tensor
    peers: tuple[torch.Tensor, ...] = ()


class Work(Protocol):
    """A reduction under way."""

    def wait(self, timeout_s: float) -> bool:
        """Blocks until the result is in the buffer, for at most `timeout_s`; False if it is not there by then.

        Raises:
            CommError: the reduction failed.
        """
        ...


class Transport(Protocol):
    """Carries units over several streams at the same time.

    Units of one stream are reduced in the order in which they were submitted, which must be the same on all ranks;
    streams are independent of each other. Submitting never blocks on other ranks.
    """

    kind: TransportKind
    max_streams: int

    def open_streams(self, count: int) -> None:
        """Collective: makes streams `[0, count)` usable; those that are open stay open."""
        ...

    def all_reduce(self, buffer: FlatBuffer, start: int, stop: int, *, stream: int, op: ReduceOp, scale: float) -> Work:
        """Reduces elements `[start, stop)` of `buffer` over all ranks in place, then multiplies them by `scale`.

        The range may be empty; it must not be touched until the work is done.
        """
        ...

    def close(self) -> None:
        """Releases threads and connections; pending works fail. May be called twice."""
        ...
