"""What a pass may propose: a change to how gradients travel, or to anything else in the job model.

A pass is asked about each tensor on the critical path in turn. It proposes what may help there; whether it does is
told by a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sirtaki.comm.layout import GradientLayout
from sirtaki.comm.plan import Route
from sirtaki.replay.job_model import JobModel

from .schedule import Schedule, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What is changed besides the plan, which the user has to do.

    Attributes:
        words: such as "bf16 on the wire".
        line: of code that does it.
        apply: the job with it; of a module, so that equal extras are equal.
    """

    words: str
    line: str
    apply: Callable[[JobModel], JobModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """All that is changed."""

    schedule: Schedule
    extras: tuple[Extra, ...] = ()

    def with_schedule(self, schedule: Schedule | None) -> Candidate | None:
        """Another schedule, None = none."""
        return None if schedule is None else replace(self, schedule=schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One proposal.

    Attributes:
        words: what it changes, such as "fuse tensors".
        apply: the candidate with it; None where it does not fit any more.
        alike: changes that are equal in this are worth trying together; None = it stands alone.
    """

    words: str
    apply: Callable[[Candidate], Candidate | None]
    alike: Hashable = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a job can be asked to run.

    Attributes:
        routes: that something is known of.
        streams: how many, ascending.
        least_bytes: of a part of a tensor.
    """

    routes: tuple[Route, ...]
    streams: tuple[int, ...]
    least_bytes: int


class Position(Protocol):
    """Where the search stands: a candidate, and its replay."""

    candidate: Candidate
    layout: GradientLayout
    choices: Choices
    tensors: Sequence[Tensor]

    def n_bytes(self, tensor: int) -> int:
        """Of a tensor."""
        ...

    def ready_s(self, tensor: int) -> float:
        """When its last gradient is there (p^e)."""
        ...

    def end_s(self, tensor: int) -> float:
        """When it is reduced (q^e)."""
        ...

    def best_parts(self, n_bytes: int) -> tuple[int, float]:
        """k* of a tensor of that size, and t_sync with it."""
        ...


class Pass(Protocol):
    """One kind of change.

    Attributes:
        name: what users allow it by.
        changes_numbers: training comes out otherwise, so it is used only where it is allowed by name.
    """

    name: str
    changes_numbers: bool

    def changes(self, position: Position, tensor: int) -> Iterator[Change]:
        """What may help at a tensor that lies on the critical path, or whose neighbour does."""
        ...
