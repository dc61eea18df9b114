"""What the gradients of one reducer are reduced with, whatever its parameters are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from .nan_check import NanCheck
from .reducer_options import ReducerOptions
from .same_model import Named, StartCheck
from .sparse_carrier import SparseCarrier
from .sparse_gradients import SparseReductions
from .thawed import reduce_thawed
from .warmup import TunedSynchroniser

if TYPE_CHECKING:
    from sirtaki.comm.collectives.rank_sets import RankSet

    from .job import Job


class ReducerResources:
    """The ranks, and means to reduce dense, sparse and thawed gradients over them.

    Attributes:
        control: of the ranks that take part.
        options: how gradients are reduced.
        sparse: sparse gradients, which are known from one set of parameters to the next.
        carrier: what these travel by; closed by the caller.
        nan_check: looks at each complete gradient; None = nobody does.
        start_check: looks at the parameters before the first update.
    """

    def __init__(
        self, job: Job, members: RankSet, options: ReducerOptions, *, prefix: str, known_sparse: Iterable[str]
    ) -> None:
        """Starts nothing.

        Args:
            job: of this process.
            members: the ranks that take part, with their control plane.
            options: how to reduce.
            prefix: of the operations' names.
            known_sparse: parameters of which all ranks know that their gradients are sparse.
        """
        assert members.control is not None
        assert members.engine is not None
        self.control, self._engine = members.control, members.engine
        unused_as_none = options.unused_as_none or job.settings.unused_as_none
        settings = self._settings = replace(job.settings, unused_as_none=unused_as_none)
        self.options, self._prefix = options, prefix
        self._carried = None if job.elastic is None else job.elastic.tuning
        self.carrier = SparseCarrier(members.control, settings, prefix=f"{prefix}.")
        self.sparse = SparseReductions(
            options.reduction,
            self.carrier,
            known_sparse,
            as_dense=options.sparse_as_dense,
            unused_as_none=settings.unused_as_none,
        )
        self.nan_check = NanCheck(members.control) if settings.check_nan else None
        self.start_check = StartCheck()

    def make_tuned(self, dense: Sequence[Named]) -> TunedSynchroniser:
        """Collective: what reduces the dense gradients of these parameters; closed by the caller."""
        return TunedSynchroniser(
            self.control,
            self._settings,
            [param for _, param in dense],
            [name for name, _ in dense],
            reduction=self.options.reduction,
            arms=self.options.arms,
            carried=self._carried,
            overlaps=self.options.overlaps,
        )

    def reduce_thawed(self, params: Sequence[torch.Tensor]) -> None:
        """Collective: reduces gradients of parameters that have no hook yet, the same on all ranks."""
        reduce_thawed(
            params,
            prefix=f"{self._prefix}.thawed",
            reduction=self.options.reduction,
            engine=self._engine,
            unused_as_none=self._settings.unused_as_none,
        )
