"""What passes between a warm-up session and who runs it: what to run now, why, and what was found in the end."""

from dataclasses import dataclass
from enum import Enum

from ..knobs import Knobs

DEFAULT_ARM = "default"  # whose trial the untuned default is
REGISTRY_ARM = "registry"  # whose trials remembered settings are
PLAN_ARM = "plan"  # whose trial a plan is that the user has given
REFINEMENT_ARM = "refinement"  # whose trials the neighbours of the fastest setting are
FINALS_ARM = "finals"  # whose trials repeated measurements are


class Purpose(Enum):
    """Why an assignment is run."""

    DEFAULT = "default"
    """To know what there is to beat."""
    TRIAL = "trial"
    """Somebody proposes it."""
    FINALS = "finals"
    """The fastest settings and the default run in turns."""
    SEARCH = "search"
    """Nothing is run: the session waits for `begin_search`."""
    KEPT = "kept"
    """The warm-up is over: run these from now on."""

    @property
    def description(self) -> str:
        """For log lines."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    Purpose.DEFAULT: "measuring the default",
    Purpose.TRIAL: "trying",
    Purpose.FINALS: "comparing in turns",
    Purpose.SEARCH: "preparing a search",
    Purpose.KEPT: "keeping",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What to run now.

    Attributes:
        knobs: the setting.
        discarded_iterations: iterations to run first and not to measure; 0 where the knobs are running already.
        measured_iterations: iterations to measure then; 0 once the warm-up is over, or where nothing is run.
        arm: who proposed it.
        purpose: why it is run.
    """

    knobs: Knobs
    discarded_iterations: int
    measured_iterations: int
    arm: str
    purpose: Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """What the warm-up found, or has found so far.

    Attributes:
        knobs: the setting to keep.
        default_span_s: median span of the untuned default; infinite if not measured yet.
        best_span_s: median span of `knobs`.
        noise_s: standard deviation of one measured span of `knobs`.
        arm: who proposed `knobs`.
        n_trials: settings that were measured, the default among them.
        iterations_used: training iterations spent, discarded ones included.
        reason: why it ended so, in words.
        tuned: `knobs` are not the untuned default.
    """

    knobs: Knobs
    default_span_s: float
    best_span_s: float
    noise_s: float
    arm: str
    n_trials: int
    iterations_used: int
    reason: str
    tuned: bool
