"""Plans of sparse gradients: the algorithm that sums the rows of one gradient over ranks, and its settings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sirtaki.errors import PlanError


class SparsePath(Enum):
    """Algorithm that sums the rows of a sparse gradient over all ranks."""

    GATHER = "gather"  # all-gather the rows; each rank adds up all of them
    OWNER = "owner"  # send each row to the rank that owns it and adds it up; all-gather the sums
    HOT_COLD = "hot_cold"  # all-reduce frequent ("hot") rows as a dense block; use GATHER or OWNER for the others
    BLOCKS = "blocks"  # agree on the blocks of consecutive rows that any rank has; all-reduce these blocks
    DENSE = "dense"  # all-reduce all rows of the parameter, with zeros for missing rows


COLD_PATHS = (SparsePath.GATHER, SparsePath.OWNER)


@dataclass(frozen=True, kw_only=True)
class SparsePlan:
    """Algorithm for one parameter's sparse gradient, with its settings. Equal on all ranks.

    Attributes:
        path: the algorithm.
        hot_rows: indices of the frequent (hot) rows, ascending. Only used with `SparsePath.HOT_COLD`.
        cold: algorithm for the other (cold) rows. Only used with `SparsePath.HOT_COLD`.
        block_rows: number of consecutive rows in a block. Only used with `SparsePath.BLOCKS`.

    Raises:
        PlanError: the values of the attributes are not possible together.
    """

    path: SparsePath
    hot_rows: tuple[int, ...] = ()
    cold: SparsePath = SparsePath.GATHER
    block_rows: int = 1

    def __post_init__(self) -> None:
        if bool(self.hot_rows) is not (self.path is SparsePath.HOT_COLD):
            raise PlanError(
                f"a sparse gradient has {len(self.hot_rows)} hot rows (often used rows of an embedding) and the "
                f"algorithm {self.path.value}; hot_cold needs at least one hot row, and other algorithms must have none"
            )
        if any(low >= high for low, high in pairwise(self.hot_rows)):
            raise PlanError("the indices of hot rows (often used rows of an embedding) must ascend, without duplicates")
        if self.cold not in COLD_PATHS:
            raise PlanError(
                "the algorithm for cold rows (rarely used rows of an embedding) must be gather (all-gather) or owner "
                f"(one rank sums each row), found {self.cold.value}"
            )
        if self.block_rows < 1:
            raise PlanError(
                f"block_rows (rows per block of a sparse gradient) must be at least 1, found {self.block_rows}"
            )

    @cached_property
    def hot_indices(self) -> npt.NDArray[np.int64]:
        """Return the indices of the hot (frequent) rows as an array, `(n_hot,)`."""
        return np.array(self.hot_rows, dtype=np.int64)

    def fingerprint(self) -> str:
        """Return a hash of the plan. Plans of two ranks are equal if and only if their hashes are equal."""
        text = repr((self.path.value, self.hot_rows, self.cold.value, self.block_rows))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Return the plan as text for messages."""
        if self.path is SparsePath.HOT_COLD:
            return f"hot_cold ({len(self.hot_rows)} hot rows, the others by {self.cold.value})"
        if self.path is SparsePath.BLOCKS:
            return f"blocks (of {self.block_rows})"
        return str(self.path.value)


GATHER = SparsePlan(path=SparsePath.GATHER)
