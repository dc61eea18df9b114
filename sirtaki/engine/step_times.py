"""What this rank's training steps take besides what tuning can change, as the warm-up sees it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import median

from sirtaki.autotune.model.profile import Profile
from sirtaki.comm.gradients.iteration_report import IterationReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The parts of a step.

    Attributes:
        backward_s: the backward pass, from its first ready gradient on; it hides communication.
        between_s: from the last reduced gradient to the first ready one of the next step.
    """

    backward_s: float
    between_s: float

    def step_s(self, span_s: float) -> float:
        """The whole step, if communication takes so long."""
        return self.between_s + span_s

    def exposed_s(self, span_s: float) -> float:
        """What the backward pass does not hide of it."""
        return max(0.0, span_s - self.backward_s)

    def at_this_pace(self, cold: Profile) -> Profile:
        """A profile of the first iterations, which are slower than later ones, at the pace of those."""
        compute_s, forward_s = min(cold.compute_s, self.backward_s), min(cold.forward_s, self.between_s)
        pace = compute_s / cold.compute_s if cold.compute_s > 0.0 else 1.0
        ready_s = tuple(min(pace * moment_s, compute_s) for moment_s in cold.ready_s)
        return Profile(ready_s=ready_s, compute_s=compute_s, forward_s=forward_s)


class StepTimes:
    """Collects them.

    Attributes:
        cold_between_s: `StepTime.between_s` of the last order-profiling iteration; not a number before there is one.
    """

    def __init__(self) -> None:
        self.cold_between_s = math.nan
        self._finished_s = math.nan
        self._warm: list[StepTime] = []

    def note(self, report: IterationReport) -> None:
        """An iteration has just ended."""
        now_s = time.perf_counter()
        between_s = now_s - report.span_s - self._finished_s
        self._finished_s = now_s
        if report.ready_s:
            self.cold_between_s = between_s
        elif between_s > 0.0:
            self._warm.append(StepTime(backward_s=report.backward_s, between_s=between_s))

    def pause(self) -> None:
        """What passes until the next iteration ends belongs to tuning, not to a step."""
        self._finished_s = math.nan

    @property
    def usual(self) -> StepTime | None:
        """What each part takes, None before the first scheduled iteration.

        Of the backward pass the tenth part that is quickest counts: communication beside it slows it down.
        """
        if not self._warm:
            return None
        backward_s = sorted(time.backward_s for time in self._warm)
        return StepTime(
            backward_s=backward_s[len(backward_s) // 10],
            between_s=median(time.between_s for time in self._warm),
        )
