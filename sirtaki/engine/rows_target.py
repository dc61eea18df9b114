"""Tune the reduction of one sparse gradient: learn accesses, try plans, keep one, and detect changed accesses."""

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
    """Choice of the plan for one parameter's rows.

    Attributes:
        name: name of the parameter.
        form: format of its rows.
        decision: the current plan, its candidates and their times.
        kept: the plan stays until accesses change. False while accesses are learned or plans are tried.
        checks: the first candidate is the plan of an earlier job, and the second one is gathering.
        may_recall: the plan of an earlier job may be used.
        looked_up: rows in this rank's gradients, summed over the counted iterations.
        counts: accesses in the first iterations, or since the last change of accesses.
        mean: rows in a gradient, mean over iterations and ranks. None before the ranks have agreed on it.
        summarised: `summary` describes the current decision.
        summary: summary of the newest decision.
    """

    def __init__(
        self, name: str, form: RowFormat, control: ControlPlane, *, fixed: SparsePath | None, tries: bool
    ) -> None:
        """Begin to learn accesses if there is a choice.

        Args:
            name: name of the parameter.
            form: format of its rows.
            control: control plane of the job.
            fixed: path fixed by the user. None for any.
            tries: plans may be tried. If False, the fixed path or gathering is used.
        """
        self.name, self.form, self.decision = name, form, SparseDecision()
        self._control, self._fixed, self._patience = control, fixed, LEAST_WATCHED
        self.checks, self.may_recall = False, fixed is None
        self._learning: TouchCounts | None = None
        self._left = 0  # iterations until accesses are known
        self._watch: AccessWatch | None = None
        self._span_s = 0.0
        self._spans_s: dict[SparsePlan, list[float]] = {}  # on rank 0
        self.looked_up, self.counts = 0, TouchCounts()
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
        """Return the plan of the next iteration."""
        return self.decision.plan

    @property
    def learning(self) -> bool:
        """Return whether accesses are being learned."""
        return self._learning is not None

    @property
    def has_learned(self) -> bool:
        """Return whether accesses are known. Call `recall_plan` or `choose` before the next iteration if so."""
        return self._learning is not None and self._left <= 0

    @property
    def learned(self) -> TouchCounts:
        """Return the accesses, once `has_learned`."""
        assert self._learning is not None
        return self._learning

    def count_iteration(self, work: SparseWork) -> None:
        """Count an iteration, in which the rows were reduced by `plan`."""
        reduced, ranks = work.reduced, self._control.size
        self._span_s = work.span_s
        by_rank = [indices.numpy() for indices in reduced.by_rank] if self._learning is not None else ()
        self.count_accesses(AccessSample(reduced.n_touched, reduced.n_hot, len(reduced.rows), by_rank))
        if self.summarised and self._learning is not None:
            self.looked_up, self.counts, self.mean, self.summarised = 0, TouchCounts(), None, False
        elif self.counts.n < LEARNING_ITERATIONS and reduced.n_touched:
            self.counts.add_totals(reduced.n_touched, reduced.n_touched / ranks, len(reduced.rows))

    def count_accesses(self, seen: AccessSample) -> None:
        """Learn from the accesses of an iteration, or compare them with the accesses that the plan was chosen for."""
        if self._learning is not None:
            if seen.n_touched:  # an iteration without accesses teaches nothing
                self._learning.add(seen.by_rank, seen.union)
                self._left -= 1
        elif self.kept and self._watch is not None and self._watch.changed(seen):
            self._patience *= 2
            self._learn()

    def recall_plan(self, plan: SparsePlan) -> bool:
        """Use the plan of an earlier job with a similar access skew. Gathering replaces it if proved faster.

        Returns:
            Whether the plan must be tried: `TuningController.begin` must follow.
        """
        return self._take([GATHER] if plan == GATHER else [plan, GATHER], [], checks=True)

    def choose(self, predicted: VolumeModel) -> bool:
        """Use the plan that the model predicts to be fastest. Another one replaces it if proved faster.

        Returns:
            Whether there is another plan to try: `TuningController.begin` must follow.
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
        """Begin a search among the candidates. On rank 0."""
        return TuningSession(
            space=Everything(),
            default=self.default,
            arm=VolumeArm(self.decision.candidates[1:]),
            rng=np.random.default_rng(0),
            budget_iterations=TRIAL_BUDGET,
        )

    def apply(self, plan: SparsePlan) -> None:
        """Reduce rows by this plan from the next iteration on. Sends nothing."""
        self.decision.plan = plan

    def measured_s(self) -> float:
        """Return the time of this iteration's reduction."""
        return self._span_s

    def record(self, session: TuningSession[SparsePlan], spans_s: Sequence[float]) -> None:
        """Hand measurements to the session. On rank 0."""
        self._spans_s.setdefault(session.assignment.knobs, []).extend(spans_s)
        session.record(spans_s)

    def keep(self) -> None:
        """Keep the current plan. If gathering beat a plan of an earlier job, let the model choose next. Collective."""
        decision = self.decision
        measured = [statistics.median(self._spans_s.get(plan, [float("nan")])) for plan in decision.candidates]
        decision.measured_s = self._control.broadcast(measured)
        if self.checks and self.plan != decision.candidates[0]:
            self.may_recall = self.checks = False
            self._learning, self._left = decision.learned, 0
        else:
            self._keep()

    def report(self, session: TuningSession[SparsePlan]) -> None:
        """Log the result. On rank 0."""
        plans = self.decision.candidates
        if self.kept:
            others = ", ".join(plan.describe() for plan in plans if plan != self.plan)
            logger.info("sparse gradients of %s are reduced by %s; tried: %s", self.name, self.plan.describe(), others)
        else:
            logger.info("gathering rows of %s is clearly faster than %s", self.name, plans[0].describe())
