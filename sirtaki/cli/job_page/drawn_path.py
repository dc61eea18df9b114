"""The critical path on the timeline: which lane holds the step up from when to when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sirtaki.autotune.model.graph import ALL_RANKS, Activity
from sirtaki.autotune.model.replayer import Replay
from sirtaki.replay.critical_path import critical_path
from sirtaki.replay.global_graph import BEFORE
from sirtaki.replay.histories import Histories

from .lanes import COPIES, TRAINING


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A part of the path; moments of the job's clock.

    Attributes:
        rank: on whose lane it is drawn: of what all do together, that of the one which came last.
        lane: which of its lanes.
    """

    rank: int
    lane: str
    begin_s: float
    end_s: float


def drawn_path(histories: Histories, replay: Replay) -> dict[int, tuple[Leg, ...]]:
    """The path of each iteration, by its number.

    The replay's moments are stretched so that each of its iterations lies where the recorded one does.
    """
    nodes, lanes = replay.graph.nodes, replay.graph.lanes
    to = _recorded_ends_s(histories)
    of = _replayed_ends_s(replay)
    found: dict[int, list[Leg]] = {step.number: [] for step in histories.steps}
    rank = histories.ranks[0]
    for visit in critical_path(replay):
        node = nodes[visit.place]
        lane = lanes[node.lane]
        if node.rank != ALL_RANKS:
            rank, lane = node.rank, COPIES if node.activity is Activity.COPY else TRAINING
        first, last = of.get(node.iteration - 1, 0.0), of[node.iteration]
        begin, end = to.get(node.iteration - 1, 0.0), to[node.iteration]
        factor = (end - begin) / (last - first) if last > first else 1.0
        leg = Leg(
            rank=rank,
            lane=lane,
            begin_s=begin + (visit.begin_s - first) * factor,
            end_s=begin + (visit.end_s - first) * factor,
        )
        found[histories.steps[node.iteration].number].append(leg)
    return {number: tuple(legs) for number, legs in found.items()}


def _recorded_ends_s(histories: Histories) -> Mapping[int, float]:
    """When the last rank has ended each iteration, by its place."""
    return {
        place: max(mine[-1].end_s for mine in step.stretches.values()) for place, step in enumerate(histories.steps)
    }


def _replayed_ends_s(replay: Replay) -> Mapping[int, float]:
    found: dict[int, float] = {}
    for place, node in enumerate(replay.graph.nodes):
        if node.iteration > BEFORE and node.rank != ALL_RANKS:
            found[node.iteration] = max(found.get(node.iteration, 0.0), replay.end_s[place])
    return found
