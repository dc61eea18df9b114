"""What an arm proposes and what comes back: the two records that pass through every arm."""

from dataclasses import dataclass
from enum import Enum

from .knobs import Knobs


class TrialStatus(Enum):
    """How a trial ended."""

    COMPLETE = "complete"
    PRUNED = "pruned"  # given up early: its first iterations were clearly slower than the best
    FAILED = "failed"  # the knobs could not be run


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Knobs that an arm would like to see measured.

    Attributes:
        arm: name of the arm.
        knobs: the setting.
        iterations: measured iterations it asks for (Hyperband's resource), None = the session's usual number.
        reason: one line for the log, may be empty.
    """

    arm: str
    knobs: Knobs
    iterations: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A proposal that has run.

    Attributes:
        arm: who proposed it.
        knobs: the setting.
        iterations: measured iterations.
        span_s: median over those iterations of the smallest span over ranks, from the first ready gradient to
            the last reduced one; `math.inf` where it failed.
        noise_s: half the spread of the measured spans (median absolute deviation), 0.0 if there was one.
        was_best: it beat the best span so far by more than the noise.
    """

    arm: str
    knobs: Knobs
    iterations: int
    span_s: float
    noise_s: float = 0.0
    status: TrialStatus = TrialStatus.COMPLETE
    was_best: bool = False
