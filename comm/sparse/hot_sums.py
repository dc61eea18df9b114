"""What lanes may hand hot rows to, in the place of an all-reduce of their own."""

from __future__ import annotations

from typing import Protocol

import torch


class HotSums(Protocol):
    """Sums over ranks outside of the lanes, which may end for good: then lanes make them.

    Attributes:
        is_open: sums are made; False, from the same step on all ranks, once they are not any more.
    """

    @property
    def is_open(self) -> bool:
        """See above."""
        ...

    def sum(self, values: torch.Tensor) -> torch.Tensor | None:
        """Collective: the sum over ranks of a contiguous 1-d tensor on the host, which is not changed.

        Returns:
            A tensor like it, bit by bit the same on all ranks; or, on all of them, None: such a tensor is not summed
            here, or not any more.
        """
        ...

    def close(self) -> None:
        """Not collective, once no thread uses it: leaves."""
        ...
