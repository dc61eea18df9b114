"""Detection of a lasting change of communication time."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from sirtaki.comm.gradients.flags import Drift

SKIPPED = 2
"""Iterations after a change of the setting that are not like later ones."""

REFERENCE = 24
"""Iterations whose median is the reference, and whose spread is the noise."""

ALLOWANCE = math.log(1.25)
LIMIT = 0.3
ENOUGH = 1.8
"""Thresholds for the logarithm of a span: ignored deviation, largest share of an iteration, sum for drift."""

USUAL_NOISE = 0.12
"""Standard deviation of the logarithms of spans above which the three thresholds grow in proportion."""

COOL_DOWN = 50
"""Iterations after a first re-tune in which there is no second one; doubled by each that follows soon."""

LONG = 10
"""Number of cool-downs after which the next re-tune counts as the first one again."""

_DEVIATIONS_BETWEEN_TENTHS = 2.56


class DriftWatch:
    """Compares the iterations of one setting with its first ones.

    Attributes:
        pace: what this rank finds.
    """

    def __init__(self) -> None:
        self.pace = Drift.USUAL
        self._cool_down = 0
        self._forget()

    def _forget(self) -> None:
        self.pace = Drift.USUAL
        self._iterations = 0
        self._reference: list[float] = []
        self._usual, self._scale = math.nan, 1.0
        self._slower = self._faster = 0.0
        self._recent: deque[float] = deque(maxlen=7)

    def retuned(self) -> None:
        """A setting was chosen anew because of what this watch has found."""
        soon = self._cool_down > 0 and self._iterations < LONG * self._cool_down
        self._cool_down = 2 * self._cool_down if soon else COOL_DOWN
        self._forget()

    def reordered(self) -> None:
        """Gradients travel in another order from now on, which takes its own time."""
        self._forget()

    @property
    def due(self) -> bool:
        """There may be a re-tune now; the same on all ranks."""
        return self._iterations >= max(SKIPPED + REFERENCE, self._cool_down)

    @property
    def ratio(self) -> float:
        """Ratio of the present communication time to that of the search; NaN if this rank does not know it."""
        return math.exp(median(self._recent) - self._usual) if self._recent else math.nan

    def note(self, span_s: float) -> None:
        """Count an ended iteration. Its span is NaN on a rank in `join()`."""
        self._iterations += 1
        if self._iterations <= SKIPPED or not span_s > 0.0:
            return
        moment = math.log(span_s)
        if len(self._reference) < REFERENCE:
            self._reference.append(moment)
            if len(self._reference) == REFERENCE:
                self._learn()
            return
        self._recent.append(moment)
        excess = (moment - self._usual) / self._scale
        self._slower = min(max(0.0, self._slower + min(excess - ALLOWANCE, LIMIT)), ENOUGH)
        self._faster = min(max(0.0, self._faster + min(-excess - ALLOWANCE, LIMIT)), ENOUGH)
        self.pace = Drift.USUAL
        if self.due and max(self._slower, self._faster) >= ENOUGH:
            self.pace = Drift.SLOWER if self._slower >= ENOUGH else Drift.FASTER

    def _learn(self) -> None:
        ordered = sorted(self._reference)
        tenth = REFERENCE // 10
        noise = (ordered[-1 - tenth] - ordered[tenth]) / _DEVIATIONS_BETWEEN_TENTHS
        self._usual, self._scale = median(ordered), max(1.0, noise / USUAL_NOISE)
