"""How long a step and its phases take: as recorded, and as replayed."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sirtaki.autotune.model.graph import Phase
from sirtaki.autotune.model.replayer import Replay

from .global_graph import BEFORE
from .histories import Histories


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Means over ranks and iterations.

    Attributes:
        iteration_s: from the end of one step to the end of the next.
        phases_s: of it in each phase, waiting in it included.
        spread_s: standard deviation of iterations, each a mean over ranks; 0 of a single one.
        iterations: how many there are.
    """

    iteration_s: float
    phases_s: Mapping[Phase, float]
    spread_s: float
    iterations: int

    @property
    def forward_s(self) -> float:
        """Of the forward pass."""
        return self.phases_s.get(Phase.FORWARD, 0.0)

    @property
    def backward_s(self) -> float:
        """Of the backward pass, until gradients are reduced: `backward()` waits for them."""
        return self.phases_s.get(Phase.BACKWARD, 0.0)


def recorded(histories: Histories) -> StepTimes:
    """What was recorded."""
    steps_s: list[list[float]] = []
    phases_s: dict[Phase, float] = defaultdict(float)
    for step in histories.steps:
        steps_s.append([mine[-1].end_s - mine[0].begin_s for mine in step.stretches.values()])
        for mine in step.stretches.values():
            for one in mine:
                phases_s[one.phase] += one.end_s - one.begin_s
    return _means(steps_s, phases_s)


def replayed(replay: Replay) -> StepTimes:
    """What was replayed."""
    graph = replay.graph
    steps_s: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    phases_s: dict[Phase, float] = defaultdict(float)
    last_s: dict[int, float] = {}
    for place, node in enumerate(graph.nodes):
        if node.rank < 0:
            continue
        end_s = replay.end_s[place]
        if node.iteration > BEFORE:
            passed_s = end_s - last_s.get(node.rank, 0.0)
            steps_s[node.iteration][node.rank] += passed_s
            phases_s[node.phase] += passed_s
        last_s[node.rank] = end_s
    return _means([list(each.values()) for each in steps_s.values()], phases_s)


def _means(steps_s: Sequence[Sequence[float]], phases_s: Mapping[Phase, float]) -> StepTimes:
    each_s = [statistics.fmean(ranks) for ranks in steps_s if ranks]
    count = sum(len(ranks) for ranks in steps_s)
    return StepTimes(
        iteration_s=statistics.fmean(each_s) if each_s else 0.0,
        phases_s={phase: total_s / count for phase, total_s in phases_s.items()} if count else {},
        spread_s=statistics.stdev(each_s) if len(each_s) > 1 else 0.0,
        iterations=len(each_s),
    )
