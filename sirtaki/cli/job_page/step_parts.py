"""What each rank's step is made of; the parts add up to the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sirtaki.replay.histories import Histories

from .kinds import Kind, kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Of one rank, means over its iterations.

    Attributes:
        rank: which.
        seconds: spent on each kind of thing; what is not there is left out.
    """

    rank: int
    seconds: Mapping[Kind, float]

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self.seconds.values())


def step_parts(histories: Histories) -> tuple[StepParts, ...]:
    """Of every rank."""
    return tuple(_of_rank(histories, rank) for rank in histories.ranks)


def _of_rank(histories: Histories, rank: int) -> StepParts:
    total_s: dict[Kind, float] = defaultdict(float)
    for step in histories.steps:
        for one in step.stretches[rank]:
            total_s[kind_of(one)] += one.end_s - one.begin_s
    count = len(histories.steps)
    return StepParts(rank=rank, seconds={kind: total_s[kind] / count for kind in Kind if total_s.get(kind)})
