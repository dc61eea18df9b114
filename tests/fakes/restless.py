"""Re-tunes at every opportunity: ranks find at random that reductions have changed, and agree now and then."""

from __future__ import annotations

import random

from sirtaki.comm.gradients.flags import Drift
from sirtaki.engine.tuning import warmup
from sirtaki.engine.tuning.warmup import DriftWatch

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
    warmup.RETUNE_ITERATIONS = 16
    warmup.DriftWatch = RestlessWatch  # type: ignore[misc]


def count(began: list[int]) -> None:
    """Notes the iteration of each re-tune of this process."""
    retune = warmup.TunedSynchroniser._retune

    def noting(self: warmup.TunedSynchroniser, drift: DriftWatch, span_s: float) -> None:
        began.append(self.synchroniser.iteration)
        retune(self, drift, span_s)

    warmup.TunedSynchroniser._retune = noting  # type: ignore[method-assign]
