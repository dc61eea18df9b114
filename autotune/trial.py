"""The interface of search algorithms: an arm proposes settings (`ask`) and learns from trials (`tell`)."""

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
    """A setting: hashable, and able to describe itself."""

    def __hash__(self) -> int: ...

    def describe(self) -> str:
        """Return the setting in words, for logs."""
        ...


S = TypeVar("S", bound=Describable, default=Knobs)
"""A kind of setting. Without another one named, `Knobs`."""


_Accepted = TypeVar("_Accepted", contravariant=True)


class Space(Protocol[_Accepted]):
    """The settings that may be chosen.

    Three more methods are optional: `around(setting, tried)` yields permitted settings that differ in one thing, but
    none that is close to one of `tried`. `every()` returns all settings, or `()` if they are many. `loses(setting)`
    returns whether gradients lose precision with the setting.
    """

    def __contains__(self, setting: _Accepted) -> bool: ...


class Everything:
    """The space of a search whose arm proposes permitted settings only."""

    def __contains__(self, setting: object) -> bool:
        return True


class TrialStatus(Enum):
    """How a trial ended."""

    COMPLETE = "complete"
    PRUNED = "pruned"  # given up early: its first iterations were clearly slower than the best
    FAILED = "failed"  # the knobs could not be run


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal(Generic[S]):
    """A setting that an arm would like to see measured.

    Attributes:
        arm: name of the arm.
        knobs: the setting.
        iterations: measured iterations it asks for (Hyperband's resource), None = the session's usual number.
        reason: one line for the log, may be empty.
    """

    arm: str
    knobs: S
    iterations: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Generic[S]):
    """A proposal that has run.

    Attributes:
        arm: who proposed it.
        knobs: the setting.
        iterations: measured iterations.
        span_s: middle (the median of all pairs' means) over those iterations of the smallest span over ranks, from
            the first ready gradient to the last reduced one; `math.inf` where it failed.
        noise_s: half the spread of the measured spans (median absolute deviation), 0.0 if there was one.
        was_best: it beat the best span so far by more than the noise.
    """

    arm: Text
    knobs: S
    iterations: Count
    span_s: Annotated[float, msgspec.Meta(gt=0)]
    noise_s: Number = 0.0
    status: TrialStatus = TrialStatus.COMPLETE
    was_best: bool = False

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; an infinite span is None, since JSON knows no infinity. `from_json` is its inverse."""
        data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trial[Knobs]:
        """The trial that `to_json` described.

        Raises:
            TuningError: a field is missing or has a value that is invalid.
        """
        try:
            finite = {**data, "span_s": math.inf if data["span_s"] is None else data["span_s"]}
            return msgspec.convert(finite, Trial[Knobs])
        except (msgspec.ValidationError, KeyError, TypeError, PlanError) as err:
            raise TuningError(f"this is not a trial: {err!r}") from err


class Arm(Protocol[S]):
    """Proposes settings and learns from trials. No threads, files, process groups or clocks of its own.

    Three more methods are optional; each may answer None for "no opinion":
    `expected_improvement()` is the largest share of the best span that an untried setting is expected to save,
    `expected_span_s(knobs)` what a measured setting truly takes, from its neighbours' measurements too, and
    `promise(candidates)` the share of the best span that each of several settings is expected to save,
    `(n_candidates,)`, infinite for what the arm knows nothing of.
    """

    name: str

    def ask(self, n: int = 1) -> Sequence[Proposal[S]]:
        """Up to `n` proposals; learns nothing. Empty = nothing to propose (now)."""
        ...

    def tell(self, trials: Sequence[Trial[S]]) -> None:
        """Learns from finished trials, whoever asked for them; proposes nothing."""
        ...
