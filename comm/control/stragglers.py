"""Stragglers: ranks that take longer than others for their own part of an iteration. The log names them during the job.

All ranks wait for the slowest one, so their iterations take equally long. But the slowest rank itself waits little. So
each rank reports the time of its iterations without waits to rank 0, in a short message every few seconds, outside the
collectives. Rank 0 compares the reports.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .watchdog import MessageBoard, Tag

logger = logging.getLogger(__name__)

PERIOD_S, FEWEST_ITERATIONS = 5.0, 3
"""Shortest interval between two reports of a rank, in seconds and in iterations. Both must have passed."""

FACTOR, DIFFERENCE_S = 1.5, 0.01
"""Thresholds for a slow rank: its own time (an iteration without waits) is more than `FACTOR` times that of the median
rank, and more than `DIFFERENCE_S` seconds longer."""

REPORTS = 2
"""Number of reports in a row that must agree before rank 0 logs that a rank is slow, or no longer slow."""


class _OwnTimes(NamedTuple):
    """Sums over this rank's iterations since the last search for a setting (tuning).

    Attributes:
        iterations: number of iterations.
        waited_s: seconds in which this rank waited for other ranks.
        at_s: `time.monotonic()` at the end of the last iteration.
    """

    iterations: int
    waited_s: float
    at_s: float


class StragglerWatch:
    """Reports this rank's own time per iteration. On rank 0, logs once that a rank is slow, and once that it recovered.

    Attributes:
        slow: on rank 0, `time.monotonic()` at which each slow rank became slow, by rank.
    """

    def __init__(self, courier: MessageBoard, hosts: Sequence[str]) -> None:
        """Prepare to compare ranks.

        Args:
            courier: message board that carries the reports to rank 0.
            hosts: host name of each rank, by rank.
        """
        self._courier, self._hosts = courier, hosts
        self._totals = self._reported = _OwnTimes(0, 0.0, time.monotonic())
        self._due_s = 0.0
        self._own_s: dict[int, float] = {}
        # For each rank, number of reports in a row that contradict its entry in `slow`.
        self._changes: Counter[int] = Counter()
        # For each rank, time of the first report in a row that contradicts its entry in `slow`.
        self._since_s: dict[int, float] = {}
        self.slow: dict[int, float] = {}

    def iteration_ended(self, waited_s: float, *, counts: bool) -> None:
        """Add an iteration of this rank. Called by the training thread, non-blocking.

        Args:
            waited_s: seconds in which the rank has waited for the reduction after its backward pass.
            counts: False = ignore the iteration, because it belongs to a search for a setting (tuning), in which rank 0
                has more to do than others.
        """
        iterations, total_s, _ = self._totals
        # Replace the tuple, because the watchdog's thread reads it without a lock.
        self._totals = (
            _OwnTimes(iterations + 1, total_s + waited_s, time.monotonic()) if counts else _OwnTimes(0, 0.0, 0.0)
        )

    def check(self) -> None:
        """Report this rank's times if they are due. On rank 0, compare the ranks. Called by the watchdog's thread."""
        now, before, now_s = self._totals, self._reported, time.monotonic()
        if not before.iterations or now.iterations < before.iterations:
            # Do not report the time of the first iteration, because it includes everything before training.
            self._reported = now
        elif now_s >= self._due_s and now.iterations - before.iterations >= FEWEST_ITERATIONS:
            self._reported, self._due_s = now, now_s + PERIOD_S
            own_s = (now.at_s - before.at_s - (now.waited_s - before.waited_s)) / (now.iterations - before.iterations)
            # Rank 0 sends its iteration time to itself, too, so that it compares all ranks alike.
            self._courier.send(0, Tag.OWN_TIME, own_s)
        if self._courier.rank == 0 and (reports := self._courier.receive(Tag.OWN_TIME)):
            self._own_s |= dict(reports)
            median_s = statistics.median_low(self._own_s.values())
            for rank, own_s in reports:
                self._compare(rank, own_s, median_s)

    def _compare(self, rank: int, own_s: float, median_s: float) -> None:
        if len(self._own_s) < self._courier.size:
            return
        is_slow = own_s > FACTOR * median_s and own_s - median_s > DIFFERENCE_S
        if is_slow is (rank in self.slow):
            self._changes[rank] = 0
            return
        self._changes[rank] += 1
        if self._changes[rank] == 1:
            self._since_s[rank] = time.monotonic()
        if self._changes[rank] < REPORTS:
            return
        self._changes[rank], host = 0, self._hosts[rank]
        if is_slow:
            self.slow[rank] = self._since_s[rank]
            logger.warning(
                "rank %d on host %s has been slow for %.0f s: its own part of an iteration takes %.3g s, %.1f times "
                "the median rank's %.3g s, and all ranks wait for it; check the load, temperature and data loading of "
                "this host",
                rank,
                host,
                time.monotonic() - self.slow[rank],
                own_s,
                own_s / max(median_s, 1e-6),
                median_s,
            )
        else:
            logger.warning(
                "rank %d on host %s is no longer slow, after %.0f s: its own part of an iteration takes %.3g s, the "
                "median rank's %.3g s",
                rank,
                host,
                time.monotonic() - self.slow.pop(rank),
                own_s,
                median_s,
            )

    def describe(self) -> str:
        """Return which ranks are slow now, in words. "" = none, or this is not rank 0. Thread-safe."""
        return ", ".join(f"rank {rank} on {self._hosts[rank]} is slow" for rank in list(self.slow))
