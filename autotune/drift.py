"""Decide when a tuned job is tuned again: after a lasting change of communication time, or to refine its setting."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from sirtaki.comm.gradients.flags import Drift

SKIPPED = 2
"""Number of training iterations that are ignored after a change of the setting: they are slower than later ones."""

REFERENCE = 24
"""Number of training iterations from which the usual communication time (the reference) and its noise are computed."""

ALLOWANCE = math.log(1.25)
LIMIT = 0.3
ENOUGH = 1.8
"""Thresholds of the CUSUM test for drift, which sums deviations of communication times from the usual time. All are in
logarithms of times. `ALLOWANCE`: deviation that is ignored. `LIMIT`: largest contribution of one iteration to the sum.
`ENOUGH`: sum at which drift (a lasting change) is reported.
"""

USUAL_NOISE = 0.12
"""Noise of communication times up to which the thresholds of the CUSUM test for drift are constant.

With more noise, the thresholds are proportional to it. The noise is the standard deviation of the times' logarithms.
"""

COOL_DOWN = 50
"""Minimum number of training iterations before the job may be tuned again ("re-tune"): the cool-down.

If a re-tune begins less than `LONG` cool-downs after the previous re-tune, the cool-down is doubled.
"""

LONG = 10
"""A re-tune at least this many cool-downs after the previous one resets the cool-down to `COOL_DOWN`.

A cool-down is the minimum number of iterations between two re-tunes.
"""

FIRST_PAUSE = 50
"""Number of training iterations between the end of tuning and the first refinement."""

LONGER = 1.5
"""Factor by which the pause before the next refinement grows after a refinement that found no faster setting."""

MOST_FAILURES = 6
"""Number of successive refinements without a faster setting after which there are no more."""

_DEVIATIONS_BETWEEN_TENTHS = 2.56
"""Distance between the 10th and the 90th percentile of a normal distribution, in standard deviations."""


class DriftWatch:
    """Detector of a lasting change of the communication time (drift), by a two-sided CUSUM test.

    The communication time of each training iteration is compared with the usual time (the reference), which is the
    median of the first iterations with the same setting.

    Attributes:
        drift: whether communication has become slower or faster, as this rank has measured it.
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
        """Restart after drift has caused a re-tune: begin a cool-down, and measure the usual time anew."""
        soon = self._cool_down > 0 and self._iterations < LONG * self._cool_down
        self._cool_down = 2 * self._cool_down if soon else COOL_DOWN
        self._reset()

    def reordered(self) -> None:
        """Restart after the gradients' order has changed: measure the usual communication time anew."""
        self._reset()

    @property
    def due(self) -> bool:
        """Return whether enough iterations have run since the last re-tune (the cool-down has ended).

        The result is equal on all ranks.
        """
        return self._iterations >= max(SKIPPED + REFERENCE, self._cool_down)

    @property
    def ratio(self) -> float:
        """Return the recent communication time divided by the usual one (the reference); NaN before both are known."""
        return math.exp(median(self._recent) - self._usual) if self._recent else math.nan

    def add(self, span_s: float) -> None:
        """Add the communication time of a finished training iteration, and update `drift`.

        Args:
            span_s: communication time of the iteration in seconds; NaN on a rank that has no more data and waits in
                `join()`.
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


class RefinementSchedule:
    """Times at which a tuned job tries more settings near its own ("refinement"). The same on all ranks.

    Refinements are frequent while they find faster settings. Each one without success makes the next pause longer, and
    after `MOST_FAILURES` of them in a row there are no more.

    Args:
        last_iteration: number of training iterations after which there are no more refinements.

    Attributes:
        left: number of training iterations in which a refinement may still begin; 0 after `MOST_FAILURES` refinements
            without success.
    """

    def __init__(self, last_iteration: int) -> None:
        self.left, self._pause, self._until_next = last_iteration, float(FIRST_PAUSE), FIRST_PAUSE
        self._failures = 0

    def add(self) -> bool:
        """Count a training iteration outside tuning, and return whether a refinement must begin now."""
        self.left -= 1
        self._until_next -= 1
        return self._until_next <= 0 < self.left

    def ended(self, iterations: int, *, improved: bool) -> None:
        """Plan the next refinement.

        Args:
            iterations: number of training iterations that the last refinement took.
            improved: whether the last refinement found a faster setting.
        """
        self.left -= iterations
        self._failures = 0 if improved else self._failures + 1
        if self._failures == MOST_FAILURES:
            self.left = 0
        self._pause *= 1.0 if improved else LONGER
        self._until_next = round(self._pause)
