"""Replays a global graph: dPRO's modified Kahn algorithm (section 4.3), with servers that are shared.

Each lane has a queue and works through it in the order in which nodes become ready. What has become ready waits for
its lane, then lasts its fixed time, and then as long as its servers take. The next event is always the earliest of all
lanes and servers, so times are exact.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from sirtaki.errors import ReplayError

from .fair_share import FairShare
from .graph import NEVER, Graph, Work

START = -1
"""`Replay.causes` of a node that nothing held back."""

_READY, _FIXED, _SERVER = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """When everything was done.

    Attributes:
        graph: that was replayed.
        ready_s: when nothing but the lane held a node back, `(n_nodes,)`.
        start_s: when its lane took it up, `(n_nodes,)`.
        end_s: when it was done, `(n_nodes,)`.
        causes: of each node the one whose end let it start, `(n_nodes,)`: the last of those that it waits for, or the
            one before it on its lane; `START` = none.
    """

    graph: Graph
    ready_s: tuple[float, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    causes: tuple[int, ...]

    @property
    def total_s(self) -> float:
        """When the last node was done."""
        return max(self.end_s, default=0.0)


def replay(graph: Graph) -> Replay:
    """Plays the graph from time 0 on.

    Raises:
        ReplayError: nodes wait for each other in a circle.
    """
    run = _Run(graph)
    run.play()
    if run.left:
        waiting = next(index for index, end_s in enumerate(run.end_s) if end_s < 0)
        raise ReplayError(f"{run.left} of {len(graph.nodes)} nodes wait for each other, such as {graph.nodes[waiting]}")
    return Replay(
        graph=graph,
        ready_s=tuple(run.ready_s),
        start_s=tuple(run.start_s),
        end_s=tuple(run.end_s),
        causes=tuple(run.causes),
    )


class _Run:
    """The event loop's state; `left` counts nodes that have not ended."""

    def __init__(self, graph: Graph) -> None:
        count = len(graph.nodes)
        self.graph, self.left = graph, count
        self.ready_s, self.start_s, self.end_s = [0.0] * count, [-1.0] * count, [-1.0] * count
        self.causes = [START] * count
        self._missing = [0] * count  # nodes that it still waits for
        self._after: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        for before, after, gap_s in graph.edges:
            self._after[before].append((after, gap_s))
            self._missing[after] += 1
        self._parts = [len(node.works) for node in graph.nodes]  # servers that are not done with it
        self._queues: list[deque[int]] = [deque() for _ in graph.lanes]
        self._busy = [False] * len(graph.lanes)
        self._last = [START] * len(graph.lanes)  # what the lane has done last
        self._servers = [FairShare(server) for server in graph.servers]
        self._relieved: dict[int, dict[int, dict[int, float]]] = {}  # by node, then server: what its end relieves
        self._events: list[tuple[float, int, int]] = []  # (when, kind, node or server)

    def play(self) -> None:
        events = self._events
        for index, missing in enumerate(self._missing):
            if not missing:
                heappush(events, (0.0, _READY, index))
        while events:
            now_s, kind, index = heappop(events)
            if kind == _READY:
                self._enqueue(now_s, index)
            elif kind == _FIXED:
                self._serve(now_s, index)
            elif self._servers[index].next_s <= now_s:  # else something has come or gone since, and it is another time
                self._take_served(now_s, index)

    def _enqueue(self, now_s: float, index: int) -> None:
        lane = self.graph.nodes[index].lane
        if self._busy[lane]:
            self._queues[lane].append(index)
        else:
            self._start(now_s, index, lane)

    def _start(self, now_s: float, index: int, lane: int) -> None:
        self._busy[lane] = True
        self.start_s[index] = now_s
        node = self.graph.nodes[index]
        for load in node.loads:
            self._load(now_s, load.server, load.amount)
        heappush(self._events, (now_s + node.fixed_s, _FIXED, index))

    def _serve(self, now_s: float, index: int) -> None:
        works = self.graph.nodes[index].works
        if not works:
            self._end(now_s, index)
        for work in works:
            server = self._servers[work.server]
            server.begin(now_s, index, self._seconds(index, work), work.jobs)
            self._expect(work.server)

    def _seconds(self, index: int, work: Work) -> float:
        if work.relieved_by == NEVER:
            return work.seconds
        if self.end_s[work.relieved_by] >= 0:
            return work.seconds * work.relief
        self._relieved.setdefault(work.relieved_by, {}).setdefault(work.server, {})[index] = work.relief
        return work.seconds

    def _load(self, now_s: float, number: int, amount: float) -> None:
        self._servers[number].load(now_s, amount)
        self._expect(number)

    def _expect(self, number: int) -> None:
        next_s = self._servers[number].next_s
        if next_s < math.inf:
            heappush(self._events, (next_s, _SERVER, number))

    def _take_served(self, now_s: float, number: int) -> None:
        server = self._servers[number]
        ended = server.take_ended(now_s)
        self._expect(number)
        for index in ended:
            self._parts[index] -= 1
            if not self._parts[index]:
                self._end(now_s, index)

    def _end(self, now_s: float, index: int) -> None:
        self.end_s[index] = now_s
        self.left -= 1
        for load in self.graph.nodes[index].loads:
            self._load(now_s, load.server, -load.amount)
        for number, factors in self._relieved.pop(index, {}).items():
            self._servers[number].relieve(now_s, factors)
            self._expect(number)
        ready_s, missing, events = self.ready_s, self._missing, self._events
        for after, gap_s in self._after[index]:
            at_s = now_s + gap_s
            if at_s >= ready_s[after]:
                ready_s[after] = at_s
                self.causes[after] = index
            missing[after] -= 1
            if not missing[after]:
                heappush(events, (ready_s[after], _READY, after))
        lane = self.graph.nodes[index].lane
        self._busy[lane] = False
        queue = self._queues[lane]
        if queue:
            waiting = queue.popleft()
            self.causes[waiting] = index
            self._start(now_s, waiting, lane)
