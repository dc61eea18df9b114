"""What has run in a warm-up: measurements by setting, the trials that arms are told, and the iterations they took."""

import logging
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import replace

from ..arms.base import Arm, expected_span_s
from ..knobs import Knobs
from ..trial import Proposal, Trial, TrialStatus
from .assignment import DEFAULT_ARM, REGISTRY_ARM, Assignment, Purpose
from .budget import Budget
from .ledger import Ledger, Setting

logger = logging.getLogger(__name__)

Run = Generator[Assignment, Sequence[float], Sequence[float]]
"""Yields what is to run, is sent the measured spans, and returns them."""


class Trials:
    """Runs settings and keeps the books.

    Attributes:
        default: the untuned setting.
        budget: of iterations.
        ledger: measurements by setting.
        all: every finished trial, in order.
        since_best: trials since the last new best.
        arm: who is told.
    """

    def __init__(
        self,
        *,
        default: Knobs,
        budget: Budget,
        identity: Callable[[Knobs], Hashable],
        arm: Arm,
        running: Knobs | None = None,
    ) -> None:
        self.default, self.budget, self.arm = default, budget, arm
        self.identity = identity
        self.ledger = Ledger(identity=identity)
        self.all: list[Trial] = []
        self.since_best = 0
        self._running = running
        self._incumbent: Setting | None = None  # the last new best, at first the default

    def run(self, knobs: Knobs, *, arm: str, purpose: Purpose, measured: int) -> Run:
        """Has a setting measured."""
        discarded = 0 if self._running == knobs else self.budget.discarded
        spans_s = yield Assignment(
            knobs=knobs, discarded_iterations=discarded, measured_iterations=measured, arm=arm, purpose=purpose
        )
        self.budget.spent += discarded + len(spans_s)
        self._running = knobs
        self.ledger.add(knobs, arm=arm, spans_s=spans_s)
        return spans_s

    def run_default(self) -> Run:
        """Has the untuned setting measured, as a trial."""
        spans_s = yield from self.run(
            self.default, arm=DEFAULT_ARM, purpose=Purpose.DEFAULT, measured=self.budget.measured
        )
        self.finish(Proposal(arm=DEFAULT_ARM, knobs=self.default))
        return spans_s

    def finish(self, proposal: Proposal) -> None:
        """Closes the books on a setting that has run, and tells the arm."""
        setting = self.setting(proposal.knobs)
        was_best = self.ledger.lead(setting, self._incumbent or setting) > 1.0
        if was_best or self._incumbent is None:
            self._incumbent = setting
        wanted = proposal.iterations or self.budget.measured
        status = TrialStatus.COMPLETE if len(setting.spans_s) >= wanted else TrialStatus.PRUNED
        trial = setting.as_trial(arm=proposal.arm, knobs=proposal.knobs, status=status, was_best=was_best)
        self.since_best = 0 if was_best else self.since_best + 1
        self.all.append(trial)
        self.tell(trial)
        logger.debug(
            "%s: %s: %.4g ms%s", trial.arm, trial.knobs.describe(), 1e3 * trial.span_s, ", new best" if was_best else ""
        )

    def tell(self, trial: Trial) -> None:
        """Tells the arm of a trial."""
        self.arm.tell([trial])

    def take_in(self, history: Sequence[Trial]) -> None:
        """Takes in an earlier session's trials, scaled by what the default took then and takes now."""
        before = [trial.span_s for trial in history if self.same(trial.knobs, self.default)]
        scale = self.setting(self.default).span_s / before[-1] if before else 1.0
        scale = scale if 0.0 < scale < float("inf") else 1.0
        latest = {self.identity(trial.knobs): trial for trial in history}  # holds all its measurements
        proposers = {self.identity(trial.knobs): trial.arm for trial in reversed(history)}  # the first of each
        budget = self.budget
        for trial in history:
            if self.same(trial.knobs, self.default):
                continue
            scaled = replace(trial, span_s=trial.span_s * scale, noise_s=trial.noise_s * scale)
            self.all.append(scaled)
            self.tell(scaled)
            identity = self.identity(trial.knobs)
            if trial is latest[identity]:
                spans_s = [scaled.span_s] * max(1, min(trial.iterations, budget.measured))
                self.ledger.add(trial.knobs, arm=proposers[identity], spans_s=spans_s, repeats=False)
                budget.spent += trial.iterations + budget.discarded
        best = self.setting(self.best_so_far())
        if self._incumbent is not None and best.spans_s:
            self._incumbent = best  # who beats only the default has not found a new best
        budget.spent = min(budget.spent, max(budget.iterations - 2 * budget.duel, budget.turn))

    def setting(self, knobs: Knobs) -> Setting:
        """What was measured of these knobs, perhaps nothing."""
        return self.ledger.find(knobs) or Setting(knobs=knobs, arm=DEFAULT_ARM)

    def believed_s(self, knobs: Knobs) -> float:
        """What a setting truly takes by the arm's surrogate, which knows its neighbours; as measured if unknown."""
        belief = expected_span_s(self.arm, knobs)
        return self.setting(knobs).span_s if belief is None else belief

    def best_so_far(self) -> Knobs:
        """The fastest, if it leads the default by more than the noise: of many settings one is fast by luck.

        What similar jobs have found was named beforehand, not picked for its luck: for that any lead will do.
        """
        ranked = self.ledger.ranked()
        default = self.setting(self.default)
        if ranked and self.ledger.lead(ranked[0], default) > 1.0:
            return ranked[0].knobs
        named = next((setting for setting in ranked if setting.arm == REGISTRY_ARM), None)
        if named is not None and self.ledger.lead(named, default) > 0.0:
            return named.knobs
        return self.default

    @property
    def left(self) -> int:
        """Iterations that trials may still use."""
        return self.budget.left_for_trials(self.ledger.noise)

    def same(self, first: Knobs, second: Knobs) -> bool:
        """Whether both are one setting."""
        return self.identity(first) == self.identity(second)
