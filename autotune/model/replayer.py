"""Plays a graph of operations on processors and links that they share."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush

from sirtaki.errors import ReplayError, TuningError


class Phase(Enum):
    """What a part of a step is for."""

    DATA = "data"  # the data loader is waited for
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    OTHER = "other"  # between them: the script's own doings, and waiting for gradients


class Activity(Enum):
    """What a node is."""

    COMPUTE = "compute"  # an operator, or the script's own doings between them
    DATA = "data"  # the data loader is waited for
    COPY = "copy"  # of gradients into flat buffers
    UNIT = "unit"  # an all-reduce of gradients
    COLLECTIVE = "collective"  # another operation between ranks


ALL_RANKS = -1
"""`ReplayNode.rank` of what several ranks do together."""

NEVER = -1
"""`ResourceDemand.relieved_by` of what is never relieved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedResource:
    """What several nodes use at the same time, in equal shares.

    Attributes:
        name: for people.
        totals: how much n jobs get done together, as a multiple of one that is alone, for n = 1, 2, …; constant
            beyond its end. `(1, 2)` are two processors, `(1,)` a link that one flow fills.
        is_link: else processors.
        speed: of what it serves, as a function of the load that other nodes put on it; None = load does not matter.

    Raises:
        ReplayError: a total is not positive.
    """

    name: str
    totals: tuple[float, ...]
    is_link: bool = False
    speed: Callable[[float], float] | None = None

    def __post_init__(self) -> None:
        if not self.totals or not all(math.isfinite(total) and total > 0 for total in self.totals):
            raise ReplayError(f"{self.name} needs a positive throughput for each number of jobs, not {self.totals}")

    def share(self, jobs: float) -> float:
        """Speed of each of so many jobs; 1 is that of one alone. What lies between two numbers is on the line."""
        whole = int(jobs)
        if whole >= len(self.totals):
            return self.totals[-1] / jobs
        below = self.totals[whole - 1] if whole else 0.0
        return (below + (jobs - whole) * (self.totals[whole] - below)) / jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDemand:
    """What a node needs of a server.

    Attributes:
        server: its place in `ReplayGraph.servers`.
        seconds: with the server to itself.
        jobs: as how many it counts there; each takes that long. What keeps a processor busy for a part of its time
            is a part of a job.
        relieved_by: place of the node whose end makes what is left of it shorter, or `NEVER`.
        relief: by which factor.
    """

    server: int
    seconds: float
    jobs: float = 1
    relieved_by: int = NEVER
    relief: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a node does to a server that does not serve it.

    Attributes:
        server: its place in `ReplayGraph.servers`.
        amount: what `SharedResource.speed` is asked with, together with that of others.
    """

    server: int
    amount: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayNode:
    """One thing that is done.

    It lasts `fixed_s`, and then until every server is done with its work.

    Attributes:
        lane: its place in `ReplayGraph.lanes`; a lane takes up what is ready first, one at a time.
        activity: what it is.
        phase: of the step that it belongs to.
        rank: that does it, or `ALL_RANKS`.
        iteration: counted from the first that is replayed.
        name: of the operator or unit.
        fixed_s: what nothing shortens or stretches.
        works: what it needs of servers, all at the same time.
        loads: what it puts on others as long as it lasts.
    """

    lane: int
    activity: Activity
    phase: Phase
    rank: int
    iteration: int
    name: str = ""
    fixed_s: float = 0.0
    works: tuple[ResourceDemand, ...] = ()
    loads: tuple[Load, ...] = ()

    @property
    def alone_s(self) -> float:
        """How long it takes if nothing else uses its servers, itself aside."""
        return self.fixed_s + max((work.seconds for work in self.works), default=0.0)


Edge = tuple[int, int, float]
"""(before, after, gap_s): places of two nodes, and what passes at least from one's end to the other's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayGraph:
    """Nodes, and what waits for what.

    Attributes:
        nodes: in an order in which ties are broken.
        edges: between them.
        lanes: names.
        servers: that nodes share.

    Raises:
        ReplayError: a number is no place, or a time is negative or not finite.
    """

    nodes: Sequence[ReplayNode]
    edges: Sequence[Edge]
    lanes: Sequence[str]
    servers: Sequence[SharedResource] = field(default=())

    def __post_init__(self) -> None:
        count = len(self.nodes)
        for node in self.nodes:
            works = node.works
            if not 0 <= node.lane < len(self.lanes):
                raise ReplayError(f"{node.name} is on lane {node.lane} of {len(self.lanes)}")
            if not 0 <= node.fixed_s < math.inf or not all(0 <= work.seconds < math.inf for work in works):
                raise ReplayError(f"{node.name} must take a finite time that is not negative: {node}")
            if works and not all(0 <= work.server < len(self.servers) and work.jobs > 0 for work in works):
                raise ReplayError(f"{node.name} needs a server that is not there: {node}")
        for before, after, gap_s in self.edges:
            if not (0 <= before < count and 0 <= after < count and before != after and 0 <= gap_s < math.inf):
                raise ReplayError(f"an edge from node {before} to {after} of {count} with a gap of {gap_s} s")


_ROUNDING = 1e-12
"""Of moments, relative to what the clocks show; what ends that much later ends now."""


class FairShare:
    """One server at work.

    Attributes:
        next_s: when its next job ends, as things are; infinite if it has none.
    """

    __slots__ = ("_at_s", "_clock", "_ends", "_jobs", "_load", "_server", "_share", "next_s")

    def __init__(self, server: SharedResource) -> None:
        self._server = server
        self._ends: list[tuple[float, int, float]] = []  # heap of (clock at which it ends, job, as how many it counts)
        self._jobs, self._load, self._share = 0.0, 0.0, 1.0
        self._at_s = self._clock = 0.0
        self.next_s = math.inf

    def begin(self, now_s: float, job: int, seconds: float, jobs: float) -> None:
        """A job comes that would take `seconds` alone, and counts as `jobs`."""
        self._advance(now_s)
        heappush(self._ends, (self._clock + seconds, job, jobs))
        self._jobs += jobs
        self._settle()

    def take_ended(self, now_s: float) -> list[int]:
        """The jobs that have ended, which leave."""
        self._advance(now_s)
        ended, ends = [], self._ends
        limit = self._clock + _ROUNDING * max(1.0, now_s)
        while ends and ends[0][0] <= limit:
            _, job, count = heappop(ends)
            self._jobs -= count
            ended.append(job)
        self._settle()
        return ended

    def load(self, now_s: float, amount: float) -> None:
        """Something comes that is not served here, or with a negative amount leaves."""
        self._advance(now_s)
        self._load += amount
        self._settle()

    def relieve(self, now_s: float, factors: Mapping[int, float]) -> None:
        """What is left of these jobs becomes so many times what it is."""
        self._advance(now_s)
        clock = self._clock
        self._ends = [(clock + (end - clock) * factors.get(job, 1.0), job, count) for end, job, count in self._ends]
        heapify(self._ends)
        self._settle()

    def _advance(self, now_s: float) -> None:
        if self._ends:
            self._clock += (now_s - self._at_s) * self._share
        self._at_s = now_s

    def _settle(self) -> None:
        if self._ends:
            server = self._server
            self._share = server.share(self._jobs)
            if server.speed is not None:
                self._share *= server.speed(self._load)
            self.next_s = self._at_s + max(0.0, self._ends[0][0] - self._clock) / self._share
        else:
            self._jobs, self.next_s = 0.0, math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedHost:
    """All ranks of a job, on one host.

    Attributes:
        ranks: that compute at the same time, all alike.
        processors: that they may keep busy together.
        threads: that each of them computes with.

    Raises:
        TuningError: one of them is not positive.
    """

    ranks: int
    processors: float
    threads: int = 1

    def __post_init__(self) -> None:
        if not (self.ranks >= 1 and self.processors > 0 and self.threads >= 1):
            raise TuningError(f"a host needs ranks, processors and threads, not {self}")

    @property
    def server(self) -> SharedResource:
        """N jobs get n processors' work done, until there are no more."""
        whole = int(self.processors)
        totals = tuple(float(count) for count in range(1, whole + 1))
        return SharedResource(
            name="processors", totals=totals if self.processors == whole else (*totals, self.processors)
        )

    def computation(self, server: int, seconds: float) -> ResourceDemand:
        """Of each rank, what took that long while all ranks computed."""
        jobs = self.ranks * self.threads
        return ResourceDemand(server=server, seconds=seconds * self.server.share(jobs), jobs=jobs)

    def unit(self, server: int, seconds: float, busy: float) -> ResourceDemand:
        """What takes that long by itself, while each rank keeps so many processors busy."""
        # What is probed alone has had to share already where ranks are busier than there are processors.
        jobs = self.ranks * busy
        return ResourceDemand(server=server, seconds=seconds * self.server.share(max(1.0, jobs)), jobs=jobs)


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

    graph: ReplayGraph
    ready_s: tuple[float, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    causes: tuple[int, ...]

    @property
    def total_s(self) -> float:
        """When the last node was done."""
        return max(self.end_s, default=0.0)


def replay(graph: ReplayGraph) -> Replay:
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

    def __init__(self, graph: ReplayGraph) -> None:
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

    def _seconds(self, index: int, work: ResourceDemand) -> float:
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
