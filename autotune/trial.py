"""Interface of search methods ("arms") for the fastest setting of a training job.

An arm proposes settings to measure (`ask`), and receives the results of these measurements, the trials (`tell`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Generic, Protocol

import msgspec
from typing_extensions import TypeVar

from sirtaki.errors import PlanError, TuningError
from sirtaki.fields import Count, Number, Text

from .knobs import Knobs


class Describable(Protocol):
    """Type of a setting that a tuning session may choose: hashable, with a description for logs."""

    def __hash__(self) -> int: ...

    def describe(self) -> str:
        """Return the setting in words, for logs."""
        ...


S = TypeVar("S", bound=Describable, default=Knobs)
"""Type of the settings that a search chooses from; `Knobs` by default."""


_Accepted = TypeVar("_Accepted", contravariant=True)


class Space(Protocol[_Accepted]):
    """Set of the settings that a search may choose from.

    Three more methods are optional:
    `around(setting, tried)` yields permitted settings that differ from `setting` in one knob, and skips those that
    nearly equal a setting in `tried`,
    `every()` returns all settings, or `()` if there are too many to enumerate,
    `loses(setting)` returns whether gradients lose precision with the setting.
    """

    def __contains__(self, setting: _Accepted) -> bool: ...


class Everything:
    """Space that permits every setting, for searches whose search method (arm) proposes only permitted settings."""

    def __contains__(self, setting: object) -> bool:
        return True


class TrialStatus(Enum):
    """Outcome of a trial, in which a setting was measured for a few training iterations."""

    COMPLETE = "complete"
    PRUNED = (
        "pruned"  # The trial was stopped early, because its first iterations were clearly slower than the best setting.
    )
    FAILED = "failed"  # The setting could not be applied.


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal(Generic[S]):
    """A setting that a search method (arm) proposes to measure.

    Attributes:
        arm: name of the arm that proposes the setting.
        knobs: the proposed setting.
        iterations: number of training iterations to measure (what Hyperband calls the resource). None = the usual
            number of the tuning session.
        reason: why the arm proposes the setting, in one line for the log. May be empty.
    """

    arm: str
    knobs: S
    iterations: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Generic[S]):
    """Measurement of a setting that a search method (arm) has proposed.

    The span of a training iteration is its communication time: the time from the first ready gradient to the last
    reduced gradient, on the rank where this time is the shortest.

    Attributes:
        arm: name of the arm that proposed the setting.
        knobs: the measured setting.
        iterations: number of measured iterations.
        span_s: Hodges-Lehmann estimate (median of all pairwise means) of the iterations' spans; `math.inf` for a failed
            trial.
        noise_s: median absolute deviation of the iterations' spans; 0.0 for a single iteration.
        status: outcome of the trial.
        was_best: whether `span_s` was shorter than in all earlier trials, by more than the measurement noise.
    """

    arm: Text
    knobs: S
    iterations: Count
    span_s: Annotated[float, msgspec.Meta(gt=0)]
    noise_s: Number = 0.0
    status: TrialStatus = TrialStatus.COMPLETE
    was_best: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the trial as a JSON-serialisable dict.

        An infinite communication time (`span_s`) becomes None, because JSON has no infinity.
        """
        data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trial[Knobs]:
        """Create a trial from the dict that `Trial.to_json` returns.

        Raises:
            TuningError: a field is missing or invalid.
        """
        try:
            finite = {**data, "span_s": math.inf if data["span_s"] is None else data["span_s"]}
            return msgspec.convert(finite, Trial[Knobs])
        except (msgspec.ValidationError, KeyError, TypeError, PlanError) as err:
            raise TuningError(f"a tuning trial, stored in a trial log or in the registry, is damaged: {err!r}") from err


class Arm(Protocol[S]):
    """A search method, which proposes settings and receives their measurements.

    It has no threads, files, process groups or clocks of its own.

    Three more methods are optional. Each may return None for "no estimate":
    `expected_improvement()` returns the largest expected gain of an untried setting, as a fraction of the shortest
    measured communication time, divided by the relative time of the setting's trial,
    `expected_span_s(knobs)` returns the communication time of a measured setting, estimated with the measurements of
    similar settings,
    `promise(candidates)` returns the expected gain of each candidate, as a fraction of the shortest measured
    communication time, `(n_candidates,)`. The gain is infinite if the arm has no data about the candidate.

    Attributes:
        name: unique name of the arm, for logs and records.
    """

    name: str

    def ask(self, n: int = 1) -> Sequence[Proposal[S]]:
        """Return up to `n` settings to measure, or none if the search method (arm) has nothing to propose now.

        `ask` must not change the arm's estimates, because only `tell` brings measurements.
        """
        ...

    def tell(self, trials: Sequence[Trial[S]]) -> None:
        """Update the search method (arm) with finished trials, including those of settings that other arms proposed."""
        ...
