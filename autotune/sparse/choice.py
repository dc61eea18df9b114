"""Decides which way one parameter's rows take: it learns who touches what, has the best guesses tried, and watches.

It is pure: every rank has one, tells it the same, and so comes to the same plan without a message. What ranks measure
differently, the times of trials, they reduce to the smallest first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from sirtaki.comm.sparse.plan import GATHER, SparsePath, SparsePlan

from .coverage import TouchCounts
from .volume import VolumeModel

LEARNING_ITERATIONS = 8
N_CANDIDATES = 3
HOPELESS = 3.0
"""What is predicted to take so many times as long as the fastest is not tried."""

ROUNDS = 7
"""Of trials: each candidate runs once a round; the first round is not counted."""

CHECKS = 4
"""Rounds in which what an earlier job has kept runs in turn with gathering; the first one is not counted."""

CLEARLY_SLOWER = 1.1
"""Where it takes so many times as long as gathering, it does not hold."""

LOST_COVERAGE = 0.9
"""Hot rows are ranked anew once their part of all touches has fallen to this much of what it was."""

OTHER_VOLUME = 1.5
"""Paths are chosen anew once so many times as many rows are touched as then, or as few."""

MEMORY = 0.1
"""Weight of the newest iteration in what is watched."""

LEAST_WATCHED = 20
"""Iterations before a change is believed, at first; twice as many after each change."""


class Stage(Enum):
    """How far the choice has got."""

    LEARN = "learn"
    TRY = "try"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Seen:
    """What an iteration has shown to all ranks alike.

    Attributes:
        n_touched: rows of all ranks together.
        n_hot: of these, hot ones.
        union: rows of any rank.
        by_rank: their numbers, where the path tells.
    """

    n_touched: int
    n_hot: int
    union: int
    by_rank: Sequence[npt.NDArray[np.int64]] = ()


def learns_hot_rows(fixed: SparsePath | None, *, tries: bool) -> bool:
    """Which rows are hot is found out: where they are asked for, or where any path may be tried."""
    return fixed is SparsePath.HOT_COLD or (fixed is None and tries)


class SparseChoice:
    """Of one parameter.

    Attributes:
        plan: of the next iteration.
        stage: see above.
        candidates: that are tried, or were.
        learned: what these follow from; None before that.
        predicted_s: of each candidate.
        measured_s: of each candidate, the median of its trials; empty until they have run.
        checks: the first candidate is what an earlier job has kept, which is held against gathering.
        may_recall: what an earlier job has kept may be used.
    """

    def __init__(self, *, fixed: SparsePath | None, tries: bool) -> None:
        """Begins to learn if there is anything to choose.

        Args:
            fixed: the only path that may be used; None = any.
            tries: candidates are tried; else `GATHER`, or the fixed path, runs as the model says.
        """
        self._fixed, self._patience = fixed, LEAST_WATCHED
        self.checks, self.may_recall = False, fixed is None
        self.candidates: list[SparsePlan] = []
        self.learned: TouchCounts | None = None
        self.predicted_s: list[float] = []
        self.measured_s: list[float] = []
        if learns_hot_rows(fixed, tries=tries):
            self._learn()
        else:
            self.stage, self.plan = Stage.KEEP, GATHER if fixed is None else SparsePlan(path=fixed)
            self._counts: TouchCounts | None = None
            self._watch: _Watch | None = None

    def _learn(self) -> None:
        self.stage, self.plan = Stage.LEARN, GATHER
        self._counts = TouchCounts()
        self._left = LEARNING_ITERATIONS

    def note(self, seen: Seen) -> None:
        """One iteration by `plan` is over."""
        if self.stage is Stage.LEARN:
            assert self._counts is not None
            if seen.n_touched:  # an iteration that touches nothing teaches nothing
                self._counts.note(seen.by_rank, seen.union)
                self._left -= 1
        elif self.stage is Stage.TRY:
            self._tried += 1
            self.plan = self.candidates[self._tried % len(self.candidates)]
        elif self._watch is not None and self._watch.changed(seen):
            self._patience *= 2
            self._learn()

    @property
    def has_learned(self) -> bool:
        """`choose` is to be called before the next iteration."""
        return self.stage is Stage.LEARN and self._left <= 0

    @property
    def counts(self) -> TouchCounts:
        """What was learned, once `has_learned`."""
        assert self._counts is not None
        return self._counts

    def recall(self, plan: SparsePlan) -> None:
        """Instead of `choose`: an earlier job has kept this plan for rows that are touched like these.

        Gathering is kept at once, other ways if gathering is not clearly faster.
        """
        self.candidates = [GATHER] if plan == GATHER else [plan, GATHER]
        self.predicted_s, self.measured_s = [], []
        self._try(checks=True)

    def choose(self, model: Callable[[TouchCounts], VolumeModel]) -> None:
        """Candidates follow from what was learned; `model` makes the predictions.

        Hot rows through an aggregator are tried whatever is predicted: who names one wants to know.
        """
        assert self._counts is not None
        predicted = model(self._counts)
        aggregated = predicted.best_aggregated()
        if self._fixed is not None:
            best = aggregated or predicted.best_of(self._fixed)
            self.candidates = [GATHER if best is None else best]
        else:
            ranked = predicted.ranked()
            limit_s = HOPELESS * predicted.seconds(ranked[0])
            self.candidates = [plan for plan in ranked if predicted.seconds(plan) <= limit_s][:N_CANDIDATES]
            if aggregated is not None:
                self.candidates.append(aggregated)
        self.predicted_s, self.measured_s = [predicted.seconds(plan) for plan in self.candidates], []
        self._try(checks=False)

    def _try(self, *, checks: bool) -> None:
        self.learned, self._counts, self.checks = self._counts, None, checks
        self.stage, self._tried, self.plan = Stage.TRY, 0, self.candidates[0]
        if len(self.candidates) == 1:
            self._keep(self.candidates[0])

    def lose_aggregator(self) -> None:
        """Between iterations, on all ranks: what was chosen for its sake is chosen anew; a fixed path stays."""
        if self.stage is Stage.LEARN or not any(plan.aggregated for plan in self.candidates):
            return
        if self._fixed is not None:
            self.plan = replace(self.plan, aggregated=False)
            self.candidates, self.predicted_s = [self.plan], []
        elif self.stage is Stage.TRY or self.plan.aggregated:
            self._learn()

    @property
    def has_tried(self) -> bool:
        """`settle` is to be called before the next iteration."""
        rounds = CHECKS if self.checks else ROUNDS
        return self.stage is Stage.TRY and self._tried >= rounds * len(self.candidates)

    def settle(self, spans_s: Sequence[float]) -> None:
        """The fastest candidate is kept; what did not hold gives way to `choose`.

        Args:
            spans_s: of the trials in their order, each the smallest over ranks; the same on all.
        """
        n = len(self.candidates)
        self.measured_s = [statistics.median(spans_s[number + n :: n]) for number in range(n)]
        if self.checks and self.measured_s[0] > CLEARLY_SLOWER * self.measured_s[1]:
            self.may_recall = self.checks = False
            self.stage, self._counts, self._left = Stage.LEARN, self.learned, 0
        else:
            self._keep(self.candidates[self.measured_s.index(min(self.measured_s))])

    def _keep(self, plan: SparsePlan) -> None:
        learned = self.learned
        assert learned is not None
        covered = int(learned.of(plan.hot_rows).sum()) / max(1, int(learned.counts.sum()))
        self._watch = _Watch(covered=covered, touched=learned.touched, least=self._patience)
        self.stage, self.plan = Stage.KEEP, plan


class _Watch:
    """Notices that rows are touched otherwise than they were."""

    def __init__(self, *, covered: float, touched: float, least: int) -> None:
        """`covered`: the part of touches that hot rows had; `touched`: rows in an iteration; `least`: iterations."""
        self._covered, self._touched, self._least = covered, touched, least
        self._hot_now, self._touched_now, self._n = covered * touched, touched, 0

    def changed(self, seen: Seen) -> bool:
        """After an iteration."""
        if not seen.n_touched:
            return False
        self._n += 1
        self._hot_now += MEMORY * (seen.n_hot - self._hot_now)
        self._touched_now += MEMORY * (seen.n_touched - self._touched_now)
        if self._n < self._least:
            return False
        ratio = self._touched_now / self._touched
        lost = self._hot_now < LOST_COVERAGE * self._covered * self._touched_now
        return lost or not 1.0 / OTHER_VOLUME < ratio < OTHER_VOLUME
