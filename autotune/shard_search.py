"""The search for the fastest setting of a sharded model, in step times."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .meta.session import Remembered, TuningSession
from .sharded import ShardedStep, ShardKnobs, ShardSpace
from .trial import Proposal, Trial

WORTHWHILE = 0.01
"""Share of a step that a setting must gain."""


class ShardArm:
    """Proposes the setting that is expected to be fastest, then settings that differ from the best in one thing."""

    name = "shards"

    def __init__(self, space: ShardSpace, default: ShardKnobs, step: ShardedStep | None = None) -> None:
        """Begin with the default.

        Args:
            space: settings that may be chosen.
            default: setting without tuning.
            step: model of a step of this job; None = nothing can be predicted.
        """
        self._space, self._best, self._step = space, default, step
        self._tried = {default}
        self._fastest: dict[ShardKnobs, ShardKnobs] = {}  # as is expected, from another one on
        self._hoped: set[ShardKnobs] = set()  # expected to win

    def ask(self, n: int = 1) -> Sequence[Proposal[ShardKnobs]]:
        """Propose the next setting."""
        knobs = self._next()
        if knobs is None:
            return []
        if self._step is not None:
            new_s, best_s = (self._step.expected_s(self._space, one) for one in (knobs, self._best))
            if new_s < (1.0 - WORTHWHILE) * best_s:
                self._hoped.add(knobs)
        return [Proposal(arm=self.name, knobs=knobs)]

    def _next(self) -> ShardKnobs | None:
        beside = list(self._space.around(self._best, self._tried))
        if (step := self._step) is None:
            return next(iter(beside), None)
        if self._best not in self._fastest:
            self._fastest[self._best] = step.fastest(self._space, self._best)
        fastest = self._fastest[self._best]
        if fastest not in self._tried:
            return fastest
        return min(beside, key=lambda one: step.expected_s(self._space, one), default=None)

    def tell(self, trials: Sequence[Trial[ShardKnobs]]) -> None:
        """Learn which setting is best. A model whose prediction was wrong is not used any more."""
        for trial in trials:
            is_new = trial.knobs not in self._tried
            self._tried.add(trial.knobs)
            if trial.was_best:
                self._best = trial.knobs
            elif is_new and trial.knobs in self._hoped:
                self._step = None


def shard_session(
    space: ShardSpace,
    default: ShardKnobs,
    *,
    budget: int,
    first: ShardKnobs | None = None,
    step: ShardedStep | None = None,
) -> TuningSession[ShardKnobs]:
    """Begin a search in step times.

    Args:
        space: settings that may be chosen.
        default: setting without tuning.
        budget: number of steps.
        first: setting that an earlier job has kept; a search follows only if it is not proved faster. None = none.
        step: model of a step of this job; None = nothing can be predicted.
    """
    exact = None if first is None else Remembered(knobs=first, best_s=math.inf, default_s=math.inf)
    return TuningSession(
        space=space,
        default=default,
        arm=None if exact is not None else ShardArm(space, default, step),
        rng=np.random.default_rng(0),
        budget_iterations=budget,
        exact=exact,
        refine=False,
        least_gain=WORTHWHILE,
    )
