"""Detection of a lasting change of communication time."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from sirtaki.comm.gradients.flags import Drift

SKIPPED = 2
"""Number of iterations ignored after a change of the setting, because they are slower than later ones."""

REFERENCE = 24
"""Number of iterations from which the reference (their median) and the noise (their spread) are computed."""

ALLOWANCE = math.log(1.25)
LIMIT = 0.3
ENOUGH = 1.8
"""CUSUM thresholds, in logarithms of spans.

`ALLOWANCE` is the ignored deviation, `LIMIT` the largest contribution of one iteration, and `ENOUGH` the sum at which
drift is reported.
"""

USUAL_NOISE = 0.12
"""Standard deviation of logarithms of spans. Above it, the three thresholds grow in proportion."""

COOL_DOWN = 50
"""Minimum number of iterations between two re-tunes. Each re-tune that follows within `LONG` cool-downs doubles it."""

LONG = 10
"""Number of cool-downs after which the next re-tune resets the cool-down to `COOL_DOWN`."""

_DEVIATIONS_BETWEEN_TENTHS = 2.56
"""Standard deviations between the 10th and the 90th percentile of a normal distribution."""


class DriftWatch:
    """Detector that compares the spans of a setting's iterations with those of its first iterations (two-sided CUSUM).

    Attributes:
        drift: trend of the communication time as seen by this rank.
    """

    def __init__(self) -> None:
        self._cool_down = 0
        self._reset()

    def _reset(self) -> None:
        self.drift = Drift.USUAL
        self._iterations = 0
        self._reference: list[float] = []
        self._usual, self._scale = math.nan, 1.0
        self._slower = self._faster = 0.0
        self._recent: deque[float] = deque(maxlen=7)

    def retuned(self) -> None:
        """Start again after a re-tune that this detector caused, and set the cool-down."""
        soon = self._cool_down > 0 and self._iterations < LONG * self._cool_down
        self._cool_down = 2 * self._cool_down if soon else COOL_DOWN
        self._reset()

    def reordered(self) -> None:
        """Start again after a change of the gradients' order, because spans change with the order."""
        self._reset()

    @property
    def due(self) -> bool:
        """Return whether a re-tune is permitted now. Equal on all ranks."""
        return self._iterations >= max(SKIPPED + REFERENCE, self._cool_down)

    @property
    def ratio(self) -> float:
        """Return the ratio of the recent communication time to the reference; NaN before it has been measured."""
        return math.exp(median(self._recent) - self._usual) if self._recent else math.nan

    def add(self, span_s: float) -> None:
        """Add a finished iteration.

        Args:
            span_s: communication time of the iteration; NaN on a rank in `join()`.
        """
        self._iterations += 1
        if self._iterations <= SKIPPED or not span_s > 0.0:
            return
        log_span = math.log(span_s)
        if len(self._reference) < REFERENCE:
            self._reference.append(log_span)
            if len(self._reference) == REFERENCE:
                self._fit_reference()
            return
        self._recent.append(log_span)
        excess = (log_span - self._usual) / self._scale
        self._slower = min(max(0.0, self._slower + min(excess - ALLOWANCE, LIMIT)), ENOUGH)
        self._faster = min(max(0.0, self._faster + min(-excess - ALLOWANCE, LIMIT)), ENOUGH)
        self.drift = Drift.USUAL
        if self.due and max(self._slower, self._faster) >= ENOUGH:
            self.drift = Drift.SLOWER if self._slower >= ENOUGH else Drift.FASTER

    def _fit_reference(self) -> None:
        ordered = sorted(self._reference)
        tenth = REFERENCE // 10
        noise = (ordered[-1 - tenth] - ordered[tenth]) / _DEVIATIONS_BETWEEN_TENTHS
        self._usual, self._scale = median(ordered), max(1.0, noise / USUAL_NOISE)
