"""Which things, one behind the other, a step's length is made of: the critical path of the whole job, in words.

It is walked backwards over the execution graph: from what ended last to what let that start, and so on. Each moment
belongs to one thing, so the shares add up. What a rank takes longer than most ranks take for the same counts for that
rank by name: the others wait for it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sirtaki.autotune.model.graph import ALL_RANKS, Activity, Graph, Node, Phase
from sirtaki.autotune.model.replayer import START, Replay

from .global_graph import BEFORE

STRAGGLES = 0.05
"""A rank that takes longer than the median one by more than that share is called by name."""

_PHASES = {
    Phase.DATA: "loading data",
    Phase.FORWARD: "the forward pass",
    Phase.BACKWARD: "the backward pass",
    Phase.UPDATE: "the optimizer's update",
    Phase.OTHER: "what the script does besides",
}

_RANKS = {Phase.DATA: "data loader", Phase.OTHER: "script"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One cause of a step's length.

    Attributes:
        words: that name it.
        seconds: of one iteration.
        share: of the iteration.
    """

    words: str
    seconds: float
    share: float

    def describe(self) -> str:
        """`31 % of the step is the link between hosts`."""
        return f"{self.share:.0%} of the step {self.words}".replace("%", " %")


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A node on the path: when it held everything up, and how long nothing was done between it and the next one."""

    place: int
    begin_s: float
    end_s: float
    gap_s: float = 0.0


def critical_path(replay: Replay) -> tuple[Visit, ...]:
    """The nodes whose ends let each other start, from the first iteration to what ended last."""
    if not replay.end_s:
        return ()
    place = max(range(len(replay.end_s)), key=lambda place: replay.end_s[place])
    found, until_s = [], replay.end_s[place]
    while place != START and replay.graph.nodes[place].iteration > BEFORE:
        end_s = replay.end_s[place]
        found.append(Visit(place=place, begin_s=replay.start_s[place], end_s=end_s, gap_s=max(0.0, until_s - end_s)))
        until_s, place = replay.start_s[place], replay.causes[place]
    return tuple(reversed(found))


def parts(replay: Replay) -> tuple[Part, ...]:
    """What the path is made of, the largest part first; seconds are of a mean iteration."""
    seconds: dict[tuple[str, int, Phase], float] = defaultdict(float)
    graph = replay.graph
    for visit in critical_path(replay):
        node = graph.nodes[visit.place]
        for words, rank, phase, part_s in _shares(graph, node, visit.end_s - visit.begin_s):
            seconds[words, rank, phase] += part_s
        seconds[_LATE, ALL_RANKS, Phase.OTHER] += visit.gap_s
    iterations = 1 + max((node.iteration for node in graph.nodes), default=0)
    total_s = sum(seconds.values()) or 1.0
    named = _by_name(seconds, _own_s(graph))
    return tuple(
        Part(words=words, seconds=part_s / iterations, share=part_s / total_s)
        for words, part_s in sorted(named.items(), key=lambda item: -item[1])
        if part_s > 0
    )


_LATE = "is ranks that see results later than the first"
_COPIES = "is copying gradients"
_OWN = ""  # computing and loading: named by phase and rank


def _shares(graph: Graph, node: Node, length_s: float) -> Sequence[tuple[str, int, Phase, float]]:
    """What a node's time was spent on."""
    alone_s = min(node.alone_s, length_s)
    found: list[tuple[str, int, Phase, float]] = []
    if node.activity is Activity.COLLECTIVE:
        return [("is operations between ranks that a script asks for", ALL_RANKS, node.phase, length_s)]
    if node.activity is Activity.UNIT:
        link = next((work for work in node.works if graph.servers[work.server].is_link), None)
        if link is None:
            found.append(("is exchanging gradients on one host", ALL_RANKS, node.phase, alone_s))
        else:
            fixed_s = min(node.fixed_s, length_s)
            found.append(("is starting to exchange gradients", ALL_RANKS, node.phase, fixed_s))
            found.append((f"is {graph.servers[link.server].name}", ALL_RANKS, node.phase, length_s - fixed_s))
            return found
    elif node.activity is Activity.COPY:
        found.append((_COPIES, ALL_RANKS, node.phase, alone_s))
    else:
        found.append((_OWN, node.rank, node.phase, alone_s))
    if node.works and length_s > alone_s:
        shared = graph.servers[node.works[0].server].name
        found.append((f"is sharing {shared}", ALL_RANKS, node.phase, length_s - alone_s))
    return found


def _own_s(graph: Graph) -> dict[Phase, dict[int, float]]:
    """What each rank's own doings take in each phase."""
    found: dict[Phase, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for node in graph.nodes:
        if node.rank != ALL_RANKS and node.iteration > BEFORE and node.activity is not Activity.COPY:
            found[node.phase][node.rank] += node.alone_s
    return found


def _by_name(
    seconds: Mapping[tuple[str, int, Phase], float], own_s: Mapping[Phase, Mapping[int, float]]
) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for (words, rank, phase), part_s in seconds.items():
        if words != _OWN:
            found[words] += part_s
            continue
        usual_s, mine_s = statistics.median_low(own_s[phase].values()), own_s[phase][rank]
        late_s = min(part_s, mine_s - usual_s) if mine_s > (1 + STRAGGLES) * usual_s else 0.0
        found[f"waits for rank {rank}'s {_RANKS.get(phase, _PHASES[phase].removeprefix('the '))}"] += late_s
        found[f"is {_PHASES[phase]}"] += part_s - late_s
    return found
