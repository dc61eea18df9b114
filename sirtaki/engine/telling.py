"""What watchers are told of training and of tuning; nothing where nobody watches."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from sirtaki.autotune.meta.assignment import Assignment, SessionResult
from sirtaki.comm.gradients.iteration_report import IterationReport
from sirtaki.watch import watchers
from sirtaki.watch.events import Decision, IterationEnded, TrialEnded


class IterationTeller:
    """Tells of an optimizer's iterations."""

    def __init__(self, n_bytes: int) -> None:
        """`n_bytes` are those of its gradients."""
        self._n_bytes, self._told_s = n_bytes, math.nan

    def tell(self, report: IterationReport, *, number: int, tuning: bool) -> None:
        """An iteration has ended; its step took as long as it is since the one before was told of.

        Args:
            report: what was measured in it.
            number: which it was, from 1.
            tuning: in the warm-up or a re-tune.
        """
        if not watchers.watching:
            return
        now_s = time.perf_counter()
        event = IterationEnded(
            number=number,
            step_s=now_s - self._told_s,
            communication_s=report.span_s,
            exposed_s=max(0.0, report.span_s - report.backward_s),
            n_bytes=self._n_bytes,
            tuning=tuning,
        )
        self._told_s = now_s
        watchers.tell_all(lambda watcher: watcher.iteration(event))


def tell_trial(assignment: Assignment, spans_s: Sequence[float], *, iteration: int, best_s: float) -> None:
    """A trial has ended, in `iteration`; `best_s` is what communication takes with the best setting so far."""
    if not watchers.watching:
        return
    event = TrialEnded(
        iteration=iteration,
        arm=assignment.arm,
        setting=assignment.knobs.describe(),
        knobs=assignment.knobs.to_json(),
        communication_s=min(spans_s),
        best_s=best_s,
    )
    watchers.tell_all(lambda watcher: watcher.trial(event))


def tell_decision(result: SessionResult, *, iteration: int, retune: bool) -> None:
    """The warm-up, or a re-tune, has ended in `iteration`."""
    if not watchers.watching:
        return
    event = Decision(
        iteration=iteration,
        arm=result.arm,
        setting=result.knobs.describe(),
        knobs=result.knobs.to_json(),
        default_s=result.default_span_s,
        best_s=result.best_span_s,
        n_trials=result.n_trials,
        retune=retune,
    )
    watchers.tell_all(lambda watcher: watcher.decision(event))
