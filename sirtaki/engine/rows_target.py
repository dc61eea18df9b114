"""Tune the reduction of one parameter's sparse gradients: count which rows have gradients (row accesses), try reduction
algorithms, keep the fastest, and detect when accesses change.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence

import numpy as np

from sirtaki.autotune.meta.session import TuningSession
from sirtaki.autotune.sparse import (
    LEARNING_ITERATIONS,
    LEAST_WATCHED,
    TRIAL_BUDGET,
    AccessSample,
    AccessWatch,
    SparseDecision,
    SparseSummary,
    TouchCounts,
    VolumeArm,
    VolumeModel,
)
from sirtaki.autotune.trial import Everything
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.sparse.plan import GATHER, SparsePath, SparsePlan
from sirtaki.comm.sparse.worker import RowFormat, SparseWork

from .tuning.target import TunableTarget

logger = logging.getLogger(__name__)


class RowsTarget(TunableTarget[SparsePlan]):
    """Chooses the reduction algorithm (`SparsePlan`) for one parameter's sparse gradients.

    A row access means: a row of the parameter has a gradient on some rank in some iteration.

    Attributes:
        name: name of the parameter.
        form: number, size and dtype of the parameter's rows.
        decision: current plan, and the plans to choose from, with their measured times.
        kept: True if the plan stays until row accesses change. False while accesses are counted or plans are tried.
        checks: True while an earlier job's plan is compared with gathering (an all-gather of all rows).
        may_recall: True if an earlier job's plan may be used.
        looked_up: number of rows in this rank's gradients, summed over the counted iterations.
        counts: row accesses in the first iterations, or since accesses have changed.
        mean: number of rows in a gradient, averaged over iterations and ranks. None until ranks have exchanged their
            numbers.
        summarised: True if `summary` describes the current `decision`.
        summary: summary of the newest decision, for the log and the report.
    """

    def __init__(
        self, name: str, form: RowFormat, control: ControlPlane, *, fixed: SparsePath | None, tries: bool
    ) -> None:
        """Create the object. It first counts the rows that have gradients if there are several algorithms to choose
        from.

        Args:
            name: name of the parameter.
            form: number, size and dtype of the parameter's rows.
            control: control plane of the job.
            fixed: algorithm that the user has fixed. None if any algorithm may be chosen.
            tries: True if several algorithms may be tried. If False, the fixed algorithm or gathering (an all-gather of
                all rows) is used.
        """
        self.name, self.form, self.decision = name, form, SparseDecision()
        self._control, self._fixed, self._patience = control, fixed, LEAST_WATCHED
        self.checks, self.may_recall = False, fixed is None
        self._learning: TouchCounts | None = None
        self._left = 0  # number of iterations in which row accesses must still be counted
        self._watch: AccessWatch | None = None
        self._span_s = 0.0
        self._spans_s: dict[SparsePlan, list[float]] = {}  # measured times of each plan, filled on rank 0 only
        self.looked_up, self.counts = 0.0, TouchCounts()
        self.mean: float | None = None
        self.summarised = False
        self.summary: SparseSummary | None = None
        self.default = GATHER
        self.kept = not (fixed is SparsePath.HOT_COLD or (fixed is None and tries))
        if not self.kept:
            self._learn()
        elif fixed is not None:
            self.decision.plan = SparsePlan(path=fixed)

    def _learn(self) -> None:
        self.kept, self.decision.plan = False, GATHER
        self._learning, self._left = TouchCounts(), LEARNING_ITERATIONS

    @property
    def plan(self) -> SparsePlan:
        """Return the plan (reduction algorithm) by which the next iteration reduces the sparse gradients."""
        return self.decision.plan

    @property
    def learning(self) -> bool:
        """Return whether row accesses are still being counted before a reduction algorithm is chosen."""
        return self._learning is not None

    @property
    def has_learned(self) -> bool:
        """Return whether row accesses were counted in enough iterations to choose a reduction algorithm.

        If True, the caller must call `recall_plan` or `choose` before the next iteration.
        """
        return self._learning is not None and self._left <= 0

    @property
    def learned(self) -> TouchCounts:
        """Return the counted row accesses. Call only if `has_learned` is True."""
        assert self._learning is not None
        return self._learning

    def count_iteration(self, work: SparseWork) -> None:
        """Record the time and the row accesses of an iteration. `work` is its completed reduction of the sparse
        gradients.
        """
        reduced, ranks = work.reduced, self._control.size
        self._span_s = work.span_s
        by_rank = [indices.numpy() for indices in reduced.by_rank] if self._learning is not None else ()
        self.count_accesses(AccessSample(reduced.n_touched, reduced.n_hot, len(reduced.rows), by_rank))
        if self.summarised and self._learning is not None:
            self.looked_up, self.counts, self.mean, self.summarised = 0.0, TouchCounts(), None, False
        elif self.counts.n < LEARNING_ITERATIONS and reduced.n_touched:
            self.counts.add_totals(reduced.n_touched, reduced.n_touched / ranks, len(reduced.rows))

    def count_totals(self, touched: int, union: int, *, looked_up: int) -> None:
        """Add the numbers of rows of an iteration, if the first iterations are still counted.

        Args:
            touched: number of rows in the ranks' gradients, summed over ranks.
            union: number of distinct rows of all ranks together.
            looked_up: number of rows of all ranks, including duplicates.
        """
        if self.counts.n < LEARNING_ITERATIONS and touched:
            self.counts.add_totals(touched, touched / self._control.size, union)
            self.looked_up += looked_up / self._control.size

    def count_accesses(self, seen: AccessSample) -> None:
        """Add the row accesses of an iteration to the counts. If the plan was chosen already, detect whether accesses
        have changed since.
        """
        if self._learning is not None:
            if seen.n_touched:  # skips iterations without row accesses, which say nothing about their distribution
                self._learning.add(seen.by_rank, seen.union)
                self._left -= 1
        elif self.kept and self._watch is not None and self._watch.changed(seen):
            self._patience *= 2
            self._learn()

    def recall_plan(self, plan: SparsePlan) -> bool:
        """Use the plan (reduction algorithm) of an earlier job with similarly skewed row accesses. Gathering (an
        all-gather of all rows) replaces the plan if proved faster.

        Returns:
            True if `plan` must be compared with gathering. The caller must then call `TuningController.begin`.
        """
        return self._take([GATHER] if plan == GATHER else [plan, GATHER], [], checks=True)

    def choose(self, predicted: VolumeModel) -> bool:
        """Use the plan (reduction algorithm) that the cost model `predicted` expects to be fastest. Another plan
        replaces it if proved faster.

        Returns:
            True if other plans must be tried. The caller must then call `TuningController.begin`.
        """
        plans = predicted.candidates(self._fixed)
        return self._take(plans, [predicted.seconds(plan) for plan in plans], checks=False)

    def _take(self, candidates: Sequence[SparsePlan], predicted_s: Sequence[float], *, checks: bool) -> bool:
        self.default, self.checks, self._spans_s = candidates[0], checks, {}
        self.decision = SparseDecision(
            plan=candidates[0], candidates=candidates, learned=self._learning, predicted_s=predicted_s
        )
        self._learning = None
        if len(candidates) == 1:
            self._keep()
        return not self.kept

    def _keep(self) -> None:
        learned, plan = self.decision.learned, self.plan
        assert learned is not None
        covered = int(learned.of(plan.hot_rows).sum()) / max(1, int(learned.counts.sum()))
        self._watch = AccessWatch(covered=covered, touched=learned.touched, least=self._patience)
        self.kept = True

    # ── as a target of the controller ────────────────────────────────────────────────────────────────────────────

    def search(self, session: TuningSession[SparsePlan] | None) -> TuningSession[SparsePlan]:
        """Begin a search for the fastest of the candidate plans (reduction algorithms). Called on rank 0 only."""
        return TuningSession(
            space=Everything(),
            default=self.default,
            arm=VolumeArm(self.decision.candidates[1:]),
            rng=np.random.default_rng(0),
            budget_iterations=TRIAL_BUDGET,
        )

    def apply(self, plan: SparsePlan) -> None:
        """Make `plan` (a reduction algorithm) reduce this parameter's sparse gradients from the next iteration on. Not
        collective.
        """
        self.decision.plan = plan

    def measured_s(self) -> float:
        """Return the seconds that this iteration's reduction of the sparse gradient took on this rank."""
        return self._span_s

    def record(self, session: TuningSession[SparsePlan], spans_s: Sequence[float]) -> None:
        """Pass the times measured on all ranks to the search `session`, and keep a copy of them.

        Called on rank 0 only.
        """
        self._spans_s.setdefault(session.assignment.knobs, []).extend(spans_s)
        session.record(spans_s)

    def keep(self) -> None:
        """End the search and keep the current plan (reduction algorithm). Collective.

        If gathering (an all-gather of all rows) was faster than an earlier job's plan, the cost model chooses the next
        plan.
        """
        decision = self.decision
        measured = [statistics.median(self._spans_s.get(plan, [float("nan")])) for plan in decision.candidates]
        decision.measured_s = self._control.broadcast(measured)
        if self.checks and self.plan != decision.candidates[0]:
            self.may_recall = self.checks = False
            self._learning, self._left = decision.learned, 0
        else:
            self._keep()

    def report(self, session: TuningSession[SparsePlan]) -> None:
        """Log the result of the search. Called on rank 0 only."""
        plans = self.decision.candidates
        if self.kept:
            others = ", ".join(plan.describe() for plan in plans if plan != self.plan)
            logger.info(
                "sparse gradients of %s are reduced by the algorithm %s from now on; measured alternatives: %s",
                self.name,
                self.plan.describe(),
                others,
            )
        else:
            logger.info(
                "for the sparse gradients of %s, an all-gather is clearly faster than the algorithm %s, which an "
                "earlier job had chosen; Sirtaki searches for the fastest algorithm again",
                self.name,
                plans[0].describe(),
            )
