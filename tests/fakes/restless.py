"""Re-tunes at every opportunity: ranks find at random that reductions have changed, and agree now and then."""

from __future__ import annotations

import random

from sirtaki.autotune.drift import DriftWatch
from sirtaki.comm.gradients.flags import Drift
from sirtaki.engine.tuning import knob_search, pipeline_target
from sirtaki.engine.tuning.pipeline_target import PipelineTarget

WARM_UP = {"SIRTAKI_WARMUP_ITERATIONS": "7"}
"""Short, so that there is something after it."""

FINDINGS = (Drift.USUAL, Drift.SLOWER, Drift.SLOWER, Drift.SLOWER, Drift.SLOWER, Drift.FASTER)


class RestlessWatch(DriftWatch):
    """Finds what the dice say."""

    dice = random.Random()

    @property
    def due(self) -> bool:
        return self._iterations >= 2

    def note(self, span_s: float) -> None:
        self._iterations += 1
        self.pace = self.dice.choice(FINDINGS) if self.due and span_s > 0.0 else Drift.USUAL


def begin(rank: int) -> None:
    """From now on in this process."""
    RestlessWatch.dice.seed(rank)
    knob_search.RETUNE_ITERATIONS = 16
    pipeline_target.DriftWatch = RestlessWatch  # type: ignore[misc]


def count(began: list[int]) -> None:
    """Notes the iteration of each re-tune of this process."""
    retune = PipelineTarget._retune

    def noting(self: PipelineTarget, drift: DriftWatch) -> None:
        began.append(self.synchroniser.iteration)
        retune(self, drift)

    PipelineTarget._retune = noting  # type: ignore[method-assign]
