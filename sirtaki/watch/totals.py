"""What an iteration takes, added up: for Prometheus and for `sirtaki top`."""

from __future__ import annotations

import math
from collections import deque

from .events import Decision, GenerationBegun, IterationEnded, TrialEnded, Watcher

RECENT = 50
"""Iterations whose times are shown as what they take now."""


class Totals(Watcher):
    """Adds up; any thread may read.

    Attributes:
        iterations: that have ended, of all optimizers.
        step_s, communication_s, exposed_s: seconds in all.
        n_bytes: of gradients in all.
        trials, decisions: counts.
        generation_number: 0 at first.
        setting: what was decided for, in words; empty before.
        gain: how many times faster communication became by the last decision; not a number before.
    """

    def __init__(self) -> None:
        self.iterations = self.n_bytes = self.trials = self.decisions = self.generation_number = 0
        self.step_s = self.communication_s = self.exposed_s = 0.0
        self.setting, self.gain = "", math.nan
        self._recent: deque[IterationEnded] = deque(maxlen=RECENT)

    def iteration(self, event: IterationEnded) -> None:
        """See `Watcher`."""
        self.iterations += 1
        self.step_s += 0.0 if math.isnan(event.step_s) else event.step_s
        self.communication_s += 0.0 if math.isnan(event.communication_s) else event.communication_s
        self.exposed_s += 0.0 if math.isnan(event.exposed_s) else event.exposed_s
        self.n_bytes += event.n_bytes
        self._recent.append(event)

    def trial(self, event: TrialEnded) -> None:
        """See `Watcher`."""
        self.trials += 1

    def decision(self, event: Decision) -> None:
        """See `Watcher`."""
        self.decisions += 1
        self.setting = event.setting
        self.gain = event.default_s / event.best_s if event.best_s > 0.0 else math.nan

    def generation(self, event: GenerationBegun) -> None:
        """See `Watcher`."""
        self.generation_number = event.number

    def now(self) -> dict[str, float]:
        """What the last iterations took on average, in seconds; what is not known is left out."""
        recent = list(self._recent)
        means = {}
        for name in ("step_s", "communication_s", "exposed_s"):
            known = [value for event in recent if not math.isnan(value := getattr(event, name))]
            if known:
                means[name] = sum(known) / len(known)
        return means
