"""Iterations whose updates are put off, replayed until they repeat: the next forward pass waits for what it reads.

The forward pass is taken for the backward pass in a mirror: what gets its gradient last is read first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from sirtaki.comm.gradients.schedule import IterationPace, ScheduledUnit
from sirtaki.measures import LinkModel

from .replayer import ALL_RANKS, Activity, Edge, Graph, Node, Phase, Work, replay
from .simulator import LINK, MESSAGES, link_servers

ITERATIONS = 5
"""That are replayed; the last two count."""


def put_off_iteration_s(
    units: Sequence[ScheduledUnit],
    come_s: Sequence[float],
    pace: IterationPace,
    *,
    forward_s: float,
    link: LinkModel,
) -> float:
    """How long an iteration takes, in seconds, if each parameter is updated when the next forward pass reads it.

    Args:
        units: in the order in which they leave, each behind the one before it on its stream.
        come_s: when each has all its gradients, after the first one has come, `(n_units,)`.
        pace: of the iteration.
        forward_s: from the end of a backward pass to the first gradient of the next, where nothing is waited for.
        link: that all units take.
    """
    cycle, read_s = _Cycle(units, link), [_read_s(unit, pace, forward_s) for unit in units]
    for iteration in range(ITERATIONS):
        cycle.forward(iteration, read_s, forward_s)
        cycle.backward(iteration, come_s, pace.backward_s)
    played = replay(cycle.graph)
    return (played.end_s[cycle.ends[-1]] - played.end_s[cycle.ends[-3]]) / 2


def _read_s(unit: ScheduledUnit, pace: IterationPace, forward_s: float) -> float:
    """When the forward pass first reads what a unit updates."""
    last_s = max((pace.ready_s[index] for index in unit.members), default=0.0)
    return forward_s * (1.0 - min(1.0, last_s / pace.backward_s)) if pace.backward_s > 0.0 else 0.0


class _Cycle:
    """The graph of several iterations, as it is made.

    Attributes:
        ends: place of the node with which each backward pass ends.
    """

    def __init__(self, units: Sequence[ScheduledUnit], link: LinkModel) -> None:
        self._units, self._link = units, link
        streams = dict.fromkeys((unit.route, unit.stream) for unit in units)
        self._lane_of = {stream: place for place, stream in enumerate(streams, start=1)}
        self._nodes, self._edges = list[Node](), list[Edge]()
        self._computed: int | None = None  # the last piece
        self._under_way: list[int] = []  # the units of the iteration before
        self.ends: list[int] = []

    @property
    def graph(self) -> Graph:
        lanes = ["computation", *(f"stream {lane}" for lane in self._lane_of.values())]
        return Graph(nodes=self._nodes, edges=self._edges, lanes=lanes, servers=link_servers(self._link))

    def forward(self, iteration: int, read_s: Sequence[float], forward_s: float) -> None:
        """Pieces between the moments in which units of the iteration before are waited for."""
        moments_s = sorted({0.0, *read_s})
        for begin_s, end_s in pairwise([*moments_s, max(forward_s, moments_s[-1])]):
            place = self._compute(iteration, Phase.FORWARD, end_s - begin_s)
            awaited = [unit for unit, moment_s in zip(self._under_way, read_s, strict=False) if moment_s == begin_s]
            self._edges += [(unit, place, 0.0) for unit in awaited]

    def backward(self, iteration: int, come_s: Sequence[float], backward_s: float) -> None:
        """Pieces between the moments in which units have their gradients, and these units."""
        moments_s = sorted({*come_s, backward_s})
        piece_of = {
            end_s: self._compute(iteration, Phase.BACKWARD, end_s - begin_s)
            for begin_s, end_s in pairwise([0.0, *moments_s])
        }
        self.ends.append(piece_of[moments_s[-1]])
        under_way, last = list[int](), dict[int, int]()
        for unit, moment_s in zip(self._units, come_s, strict=True):
            place, lane = len(self._nodes), self._lane_of[unit.route, unit.stream]
            self._nodes.append(self._sent(iteration, unit, lane))
            self._edges.append((piece_of[moment_s], place, 0.0))
            if lane in last:
                self._edges.append((last[lane], place, 0.0))
            last[lane] = place
            under_way.append(place)
        self._under_way = under_way

    def _compute(self, iteration: int, phase: Phase, seconds: float) -> int:
        place = len(self._nodes)
        self._nodes.append(
            Node(lane=0, activity=Activity.COMPUTE, phase=phase, rank=0, iteration=iteration, fixed_s=seconds)
        )
        if self._computed is not None:
            self._edges.append((self._computed, place, 0.0))
        self._computed = place
        return place

    def _sent(self, iteration: int, unit: ScheduledUnit, lane: int) -> Node:
        link = self._link
        works = [Work(server=LINK, seconds=unit.n_bytes * link.beta_s_per_byte)]
        if link.host_s > 0.0:
            works.append(Work(server=MESSAGES, seconds=link.host_s))
        return Node(
            lane=lane,
            activity=Activity.UNIT,
            phase=Phase.OTHER,
            rank=ALL_RANKS,
            iteration=iteration,
            fixed_s=link.alpha_s,
            works=tuple(works),
        )
