"""Re-tune as often as possible: each rank observes drift at random, and now and then all ranks agree."""

from __future__ import annotations

import random

from sirtaki.autotune import drift
from sirtaki.autotune.drift import DriftWatch
from sirtaki.autotune.meta import session
from sirtaki.comm.gradients.flags import Drift
from sirtaki.engine.tuning import knob_search, pipeline_target
from sirtaki.engine.tuning.pipeline_target import PipelineTarget

WARM_UP = {"SIRTAKI_WARMUP_ITERATIONS": "7"}
"""A short warm-up, so that re-tuning begins early."""

FINDINGS = (Drift.USUAL, Drift.SLOWER, Drift.SLOWER, Drift.SLOWER, Drift.SLOWER, Drift.FASTER)


class RestlessWatch(DriftWatch):
    """A `DriftWatch` that reports drift at random."""

    dice = random.Random()

    @property
    def due(self) -> bool:
        return self._iterations >= 2

    def add(self, span_s: float) -> None:
        self._iterations += 1
        self.drift = self.dice.choice(FINDINGS) if self.due and span_s > 0.0 else Drift.USUAL


def begin(rank: int) -> None:
    """Replace the drift watch of this process. `rank` seeds it."""
    RestlessWatch.dice.seed(rank)
    knob_search.RETUNE_SEARCH_ITERATIONS = 6
    drift.FIRST_PAUSE = 6
    # Six pairs are enough here, because jobs must tune again often.
    session.MORE_PROOF_ITERATIONS = session.pair_iterations(6, 2)
    pipeline_target.DriftWatch = RestlessWatch  # type: ignore[misc]


def count(began: list[int]) -> None:
    """Append the iteration of each re-tuning of this process to `began`."""
    retune = PipelineTarget._retune

    def noting(self: PipelineTarget, drift: DriftWatch) -> None:
        began.append(self.synchroniser.iteration)
        retune(self, drift)

    PipelineTarget._retune = noting  # type: ignore[method-assign]
