"""Search for the setting of a sharded model (FSDP) with the shortest step time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .meta.session import Remembered, TuningSession
from .sharded import ShardedStep, ShardKnobs, ShardSpace
from .trial import Proposal, Trial

WORTHWHILE = 0.01
"""Minimum gain for which the job switches to another setting, as a fraction of the step time."""


class ShardArm:
    """Search method (arm) for sharded models (FSDP).

    It proposes the setting that is predicted to be fastest, then settings that differ from the fastest measured one in
    one knob.
    """

    name = "shards"

    def __init__(self, space: ShardSpace, default: ShardKnobs, step: ShardedStep | None = None) -> None:
        """Create the search method. Its best setting is `default` until a trial of another setting is faster.

        Args:
            space: permitted settings.
            default: setting that the job uses without tuning.
            step: model that predicts the time of a step of this job; None = step times cannot be predicted.
        """
        self._space, self._best, self._step = space, default, step
        self._tried = {default}
        # {setting at the start of a local search: setting that the search found}
        self._fastest: dict[ShardKnobs, ShardKnobs] = {}
        self._expected_to_win: set[ShardKnobs] = set()

    def ask(self, n: int = 1) -> Sequence[Proposal[ShardKnobs]]:
        """Propose one setting, or none if no permitted setting is left to try."""
        knobs = self._next()
        if knobs is None:
            return []
        if self._step is not None:
            new_s, best_s = (self._step.expected_s(self._space, one) for one in (knobs, self._best))
            if new_s < (1.0 - WORTHWHILE) * best_s:
                self._expected_to_win.add(knobs)
        return [Proposal(arm=self.name, knobs=knobs)]

    def _next(self) -> ShardKnobs | None:
        neighbours = list(self._space.around(self._best, self._tried))
        if (step := self._step) is None:
            return next(iter(neighbours), None)
        if self._best not in self._fastest:
            self._fastest[self._best] = step.fastest(self._space, self._best)
        fastest = self._fastest[self._best]
        if fastest not in self._tried:
            return fastest
        return min(neighbours, key=lambda one: step.expected_s(self._space, one), default=None)

    def tell(self, trials: Sequence[Trial[ShardKnobs]]) -> None:
        """Update the fastest setting with the results of trials.

        Discard the model of step times if it predicted that a setting would be faster, and the setting's trial was not.
        """
        for trial in trials:
            is_new = trial.knobs not in self._tried
            self._tried.add(trial.knobs)
            if trial.was_best:
                self._best = trial.knobs
            elif is_new and trial.knobs in self._expected_to_win:
                self._step = None


def shard_session(
    space: ShardSpace,
    default: ShardKnobs,
    *,
    budget: int,
    first: ShardKnobs | None = None,
    step: ShardedStep | None = None,
    discarded_iterations: int = 1,
) -> TuningSession[ShardKnobs]:
    """Create a tuning session that compares the step times of settings of a sharded model.

    Args:
        space: permitted settings.
        default: setting that the job uses without tuning.
        budget: number of training steps that the session may use.
        first: setting that an earlier job chose. The session only compares it with the default. None = search for a
            setting.
        step: model that predicts the time of a step of this job; None = step times cannot be predicted.
        discarded_iterations: training steps that are not measured after each change of the setting.
    """
    exact = None if first is None else Remembered(knobs=first, best_s=math.inf, default_s=math.inf)
    return TuningSession(
        space=space,
        default=default,
        arm=None if exact is not None else ShardArm(space, default, step),
        rng=np.random.default_rng(0),
        budget_iterations=budget,
        exact=exact,
        discarded_iterations=discarded_iterations,
        refine=False,
        least_gain=WORTHWHILE,
    )
