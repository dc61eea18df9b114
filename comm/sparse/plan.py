"""Plans of sparse gradients: the algorithm that sums the rows of one gradient over ranks, and its settings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sirtaki.errors import PlanError, require


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
        rule = "at least one row with the algorithm hot_cold, and none with other algorithms"
        require(bool(self.hot_rows) is (self.path is SparsePath.HOT_COLD), "hot_rows", rule, self.hot_rows, PlanError)
        ascending = all(low < high for low, high in pairwise(self.hot_rows))
        require(ascending, "hot_rows", "ascending indices", self.hot_rows, PlanError)
        require(self.cold in COLD_PATHS, "cold", "gather or owner", self.cold.value, PlanError)
        require(self.block_rows >= 1, "block_rows", "at least 1", self.block_rows, PlanError)

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
