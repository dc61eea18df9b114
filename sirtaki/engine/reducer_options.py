"""What can be chosen about the reduction of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sirtaki.autotune.arms.base import Arm
from sirtaki.comm.gradients.buffers import Reduction


@dataclass(frozen=True, kw_only=True)
class ReducerOptions:
    """How gradients are reduced, whatever the model.

    Attributes:
        reduction: what is done to every gradient.
        sparse_as_dense: sparse gradients are made dense.
        groups: parameters that go together: none of a group leaves before all are there.
        unused_as_none: gradients that no rank has are None, whatever the settings say.
        arms: search techniques to tune with, None = the usual ones.
        overlaps: iterations may end in the next forward pass.
    """

    reduction: Reduction
    sparse_as_dense: bool = False
    groups: Sequence[Sequence[torch.Tensor]] = ()
    unused_as_none: bool = False
    arms: Sequence[Arm] | None = None
    overlaps: bool = False
