"""How a distributed optimizer's gradients are kept equal, whoever the ranks are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sirtaki.autotune.arms.base import Arm
from sirtaki.comm.collectives.rank_sets import GLOBAL, RankSet
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.engine import job
from sirtaki.engine.carried_tuning import key_of
from sirtaki.engine.optimizer_gradients import OptimizerGradients
from sirtaki.engine.reducer_options import ReducerOptions
from sirtaki.engine.warmup import NO_LOG

from .process_sets import ProcessSet, global_process_set, require_opened
from .reduction_ops import Average

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class GradientRecipe:
    """What the user has asked for; from it each generation of a job makes what its ranks need.

    Attributes:
        named: all parameters of the optimizer with their names, frozen ones too.
        wire_dtype: see `Reduction`.
        passes: backward passes whose gradients are added up.
        op: Average or Sum.
        predivide: divides before the sum and multiplies after it.
        sparse_as_dense: sparse gradients are made dense.
        groups: parameters that go together.
        arms: search techniques, None = the usual ones.
        process_set: the ranks that train together.
        overlaps: updates are put off into the next forward pass.
    """

    named: list[tuple[str, torch.Tensor]]
    wire_dtype: tuple[tuple[torch.dtype, torch.dtype], ...]
    passes: int
    op: int
    predivide: float
    sparse_as_dense: bool
    groups: Sequence[Sequence[torch.Tensor]]
    arms: Sequence[Arm] | None
    process_set: ProcessSet
    overlaps: bool = False

    @property
    def signature(self) -> str:
        """Equal on two ranks if their optimizers may belong together."""
        key = key_of([name for name, _ in self.named], [param for _, param in self.named])
        return f"{key}/{self.op}/{self.process_set.ranks if self.process_set is not global_process_set else 'all'}"

    def make(self, current: job.Job) -> OptimizerGradients | None:
        """Collective over the process set: None where there is nobody to be equal to.

        Raises:
            ConfigError: the process set is not open.
            MismatchError: on all ranks, if their models differ.
        """
        members = self._members(current)
        if members is None:
            return None
        count = len(members.ranks)
        if count == 1:
            log = NO_LOG if current.settings.trial_log else ""
            logger.info("on one rank nothing is reduced, and nothing tuned%s", log)
            return None
        reduction = Reduction(
            prescale=1.0 / self.predivide,
            postscale=self.predivide / count if self.op == Average else 1.0,
            wire_dtype=self.wire_dtype,
        )
        options = ReducerOptions(
            reduction=reduction,
            sparse_as_dense=self.sparse_as_dense,
            groups=self.groups,
            arms=self.arms,
            overlaps=self.overlaps,
        )
        return OptimizerGradients(current, members, self.named, passes=self.passes, options=options)

    def _members(self, current: job.Job) -> RankSet | None:
        """Collective over the set: its members, with their control plane; None on other ranks."""
        if self.process_set is global_process_set:
            return current.rank_sets[GLOBAL]
        there = require_opened(self.process_set)
        return current.rank_sets.members(there.number) if there.engine is not None else None
