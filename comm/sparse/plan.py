"""Which way the rows of one sparse gradient take."""

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
    """How rows of all ranks are added up."""

    GATHER = "gather"  # every rank gets every rank's rows, and adds them up
    OWNER = "owner"  # each row has an owner, who gets it from all, adds up, and sends the sum to all
    HOT_COLD = "hot_cold"  # rows that most ranks touch travel dense, without numbers; the others as above
    BLOCKS = "blocks"  # which blocks of rows any rank has touched is told first; those travel dense
    DENSE = "dense"  # all rows travel


COLD_PATHS = (SparsePath.GATHER, SparsePath.OWNER)


@dataclass(frozen=True, kw_only=True)
class SparsePlan:
    """The way of one parameter's sparse gradient, the same on all ranks.

    Attributes:
        path: see above.
        hot_rows: ascending; of `HOT_COLD` only.
        cold: how the other rows travel then.
        block_rows: consecutive rows in a block; of `BLOCKS` only.

    Raises:
        PlanError: hot rows are missing, out of order or out of place; the cold path is none; a block is empty.
    """

    path: SparsePath
    hot_rows: tuple[int, ...] = ()
    cold: SparsePath = SparsePath.GATHER
    block_rows: int = 1

    def __post_init__(self) -> None:
        if bool(self.hot_rows) is not (self.path is SparsePath.HOT_COLD):
            raise PlanError(f"hot rows belong to the path hot_cold, which has {len(self.hot_rows)} of them")
        if any(low >= high for low, high in pairwise(self.hot_rows)):
            raise PlanError("hot rows must ascend")
        if self.cold not in COLD_PATHS:
            raise PlanError(f"cold rows travel by gather or owner, not by {self.cold.value}")
        if self.block_rows < 1:
            raise PlanError(f"a block has at least one row, not {self.block_rows}")

    @cached_property
    def hot_indices(self) -> npt.NDArray[np.int64]:
        """The hot rows: `(n_hot,)`."""
        return np.array(self.hot_rows, dtype=np.int64)

    def fingerprint(self) -> str:
        """A digest that is equal on two ranks exactly if their plans are."""
        text = repr((self.path.value, self.hot_rows, self.cold.value, self.block_rows))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """In words."""
        if self.path is SparsePath.HOT_COLD:
            return f"hot_cold ({len(self.hot_rows)} hot rows, the others by {self.cold.value})"
        if self.path is SparsePath.BLOCKS:
            return f"blocks (of {self.block_rows})"
        return str(self.path.value)


GATHER = SparsePlan(path=SparsePath.GATHER)
