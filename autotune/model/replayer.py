"""Discrete-event simulation of a graph of operations that share processors and network links."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush

from sirtaki.errors import ReplayError, TuningError, require


class Phase(Enum):
    """Phase of a training step to which an operation of the simulated graph belongs."""

    DATA = "data"  # Waiting of the training thread for the data loader.
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    OTHER = "other"  # All other time, such as other code of the training script, and waiting for gradients.


class Activity(Enum):
    """Kind of operation that a graph's node stands for."""

    COMPUTE = "compute"  # An operator, or other code of the training script between operators.
    DATA = "data"  # Waiting for the data loader.
    COPY = "copy"  # A copy of gradients into flat buffers.
    UNIT = "unit"  # An all-reduce of a communication unit (bucket).
    COLLECTIVE = "collective"  # Any other collective operation.


ALL_RANKS = -1
"""Value of `ReplayNode.rank` for a collective operation, in which all ranks take part."""

NEVER = -1
"""Value of `ResourceDemand.relieved_by` for work that does not become shorter when another node ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedResource:
    """Resource that concurrent operations share equally: a network link or processors.

    A "job" is one operation's use of the resource.

    Attributes:
        name: name of the resource in messages and charts.
        totals: total throughput of n concurrent jobs relative to a single job, for n = 1, 2, … Beyond the end, it is
            constant. `(1, 2)` describes two processors, `(1,)` a link that one flow saturates.
        is_link: whether the resource is a link; otherwise it is processors.
        speed: function that returns the relative speed of all jobs under a sum of loads (`Load`). None = loads have no
            effect.

    Raises:
        ReplayError: a total is not positive.
    """

    name: str
    totals: tuple[float, ...]
    is_link: bool = False
    speed: Callable[[float], float] | None = None

    def __post_init__(self) -> None:
        valid = self.totals and all(math.isfinite(total) and total > 0 for total in self.totals)
        require(valid, f"totals of {self.name!r}", "positive, finite throughputs", self.totals, ReplayError)

    def share(self, jobs: float) -> float:
        """Return the speed of each of `jobs` concurrent uses (jobs) of the resource, relative to a single one.

        For a fractional number of jobs, the throughput is interpolated linearly.
        """
        whole = int(jobs)
        if whole >= len(self.totals):
            return self.totals[-1] / jobs
        below = self.totals[whole - 1] if whole else 0.0
        return (below + (jobs - whole) * (self.totals[whole] - below)) / jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDemand:
    """Work that an operation (a node of the simulated graph) does on one shared resource ("server").

    Attributes:
        server: index of the resource in `ReplayGraph.servers`.
        seconds: time of the work if no other node uses the resource.
        jobs: number of concurrent jobs that the work consists of. Each takes `seconds`. Work that keeps a processor
            busy for a fraction of the time is that fraction of a job.
        relieved_by: index of the node whose end shortens the remaining work; `NEVER` = no such node.
        relief: factor by which the remaining work is multiplied when the node `relieved_by` ends.
    """

    server: int
    seconds: float
    jobs: float = 1
    relieved_by: int = NEVER
    relief: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Slow-down of a shared resource ("server") by an operation (node) that does no work on the resource.

    An example is an all-reduce that slows down the processors that compute.

    Attributes:
        server: index of the resource in `ReplayGraph.servers`.
        amount: the operation's part of the load. The sum over concurrent operations determines the resource's speed.
    """

    server: int
    amount: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayNode:
    """One operation of the simulated graph, such as an operator or an all-reduce.

    It takes the constant time `fixed_s`, followed by the time until its work on all shared resources has ended.

    Attributes:
        lane: index in `ReplayGraph.lanes` of the queue that runs the operation. A queue runs one operation at a time,
            in the order in which operations become ready.
        activity: kind of operation.
        phase: phase of the training step to which the operation belongs.
        rank: rank that runs the operation, or `ALL_RANKS`.
        iteration: index of the training iteration, counted from the first replayed iteration.
        name: name of the operator or unit (bucket).
        fixed_s: time that does not depend on shared resources.
        works: work on shared resources, which starts on all of them after `fixed_s`.
        loads: loads on shared resources for the whole duration of the operation.
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
        """Return the duration of the operation if no other node uses the same shared resources."""
        return self.fixed_s + max((work.seconds for work in self.works), default=0.0)


Edge = tuple[int, int, float]
"""Dependency between two operations: (index of the first, index of the second, gap in seconds).

The second operation cannot start before the gap has passed since the end of the first.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayGraph:
    """Graph of the operations of training iterations, their dependencies, and the resources that they share.

    Attributes:
        nodes: operations. Of operations that are ready at the same time, the first one in this list starts first.
        edges: dependencies between operations.
        lanes: names of the queues that run the operations, each one at a time.
        servers: resources that operations share: network links and processors.

    Raises:
        ReplayError: an index is out of range, or a time is negative or not finite.
    """

    nodes: Sequence[ReplayNode]
    edges: Sequence[Edge]
    lanes: Sequence[str]
    servers: Sequence[SharedResource] = field(default=())

    def __post_init__(self) -> None:
        count = len(self.nodes)
        for node in self.nodes:
            if not (
                0 <= node.lane < len(self.lanes)
                and 0 <= node.fixed_s < math.inf
                and all(
                    0 <= work.seconds < math.inf and 0 <= work.server < len(self.servers) and work.jobs > 0
                    for work in node.works
                )
            ):
                raise ReplayError(f"internal error of Sirtaki: simulated operation {node} is invalid; please report it")
        for before, after, gap_s in self.edges:
            if not (0 <= before < count and 0 <= after < count and before != after and 0 <= gap_s < math.inf):
                raise ReplayError(
                    f"internal error of Sirtaki: the simulated operation {after} has an invalid dependency on "
                    f"operation {before} (delay {gap_s} s); please report it"
                )


_ROUNDING = 1e-12
"""Relative tolerance of simulated times: jobs on a resource end at the same time if their end times differ by less."""


class FairShare:
    """State of one shared resource (link or processors) during a simulation.

    A job is an operation's use of the resource. All jobs have equal speeds. The resource's clock advances at this
    speed, so that the start or end of a job does not change the clock value at which other jobs end.

    Attributes:
        next_s: simulated time at which the next job ends if no job starts before; infinite without jobs.
    """

    __slots__ = ("_at_s", "_clock", "_ends", "_jobs", "_load", "_server", "_share", "next_s")

    def __init__(self, server: SharedResource) -> None:
        self._server = server
        # Heap of (clock value at the job's end, job, number of concurrent jobs as which it counts).
        self._ends: list[tuple[float, int, float]] = []
        self._jobs, self._load, self._share = 0.0, 0.0, 1.0
        self._at_s = self._clock = 0.0
        self.next_s = math.inf

    def add(self, now_s: float, job: int, seconds: float, jobs: float) -> None:
        """Add a job (use of the resource) that would take `seconds` alone, and counts as `jobs` concurrent jobs."""
        self._advance(now_s)
        heappush(self._ends, (self._clock + seconds, job, jobs))
        self._jobs += jobs
        self._update()

    def pop_ended(self, now_s: float) -> list[int]:
        """Remove the jobs (uses of the resource) that have ended by `now_s`, and return their ids."""
        self._advance(now_s)
        ended, ends = [], self._ends
        limit = self._clock + _ROUNDING * max(1.0, now_s)
        while ends and ends[0][0] <= limit:
            _, job, count = heappop(ends)
            self._jobs -= count
            ended.append(job)
        self._update()
        return ended

    def add_load(self, now_s: float, amount: float) -> None:
        """Add an operation's load, which slows the resource down. A negative amount removes the load again."""
        self._advance(now_s)
        self._load += amount
        self._update()

    def scale_remaining(self, now_s: float, factors: Mapping[int, float]) -> None:
        """Multiply the remaining work of jobs (uses of the resource) by `factors`, {job id: factor of the job}."""
        self._advance(now_s)
        clock = self._clock
        self._ends = [(clock + (end - clock) * factors.get(job, 1.0), job, count) for end, job, count in self._ends]
        heapify(self._ends)
        self._update()

    def _advance(self, now_s: float) -> None:
        if self._ends:
            self._clock += (now_s - self._at_s) * self._share
        self._at_s = now_s

    def _update(self) -> None:
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
    """Host whose processors all ranks of a training job use, for computation and for communication.

    Attributes:
        ranks: number of ranks, which compute simultaneously.
        processors: number of processors that the ranks may keep busy together.
        threads: number of threads with which each rank computes.

    Raises:
        TuningError: an attribute is not positive.
    """

    ranks: int
    processors: float
    threads: int = 1

    def __post_init__(self) -> None:
        valid = self.ranks >= 1 and self.processors > 0 and self.threads >= 1
        require(valid, "SharedHost", "positive numbers", self, TuningError)

    @property
    def server(self) -> SharedResource:
        """Return the host's processors as a resource that concurrent operations share.

        n concurrent uses (jobs) have the throughput of n processors, up to `processors`.
        """
        whole = int(self.processors)
        totals = tuple(float(count) for count in range(1, whole + 1))
        return SharedResource(
            name="processors", totals=totals if self.processors == whole else (*totals, self.processors)
        )

    def computation(self, server: int, seconds: float) -> ResourceDemand:
        """Return the processors' work for a computation that took `seconds` while all ranks computed."""
        jobs = self.ranks * self.threads
        return ResourceDemand(server=server, seconds=seconds * self.server.share(jobs), jobs=jobs)

    def unit(self, server: int, seconds: float, busy: float) -> ResourceDemand:
        """Return the processors' work for an all-reduce of a unit (bucket).

        Args:
            server: number of the processors among the shared resources.
            seconds: duration of the all-reduce without computation.
            busy: number of processors that the all-reduce keeps busy on each rank.
        """
        # The measured `seconds` include a slow-down by the ranks themselves if they keep more processors busy than the
        # host has. Multiply by `share` to remove it.
        jobs = self.ranks * busy
        return ResourceDemand(server=server, seconds=seconds * self.server.share(max(1.0, jobs)), jobs=jobs)


START = -1
"""Value in `Replay.causes` of an operation (node) that waited for no other operation."""

_READY, _FIXED, _SERVER = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Result of a simulation: the times of all nodes (operations).

    Attributes:
        graph: the simulated graph.
        ready_s: time at which all dependencies of each node had ended, `(n_nodes,)`.
        start_s: time at which each node started, `(n_nodes,)`.
        end_s: time at which each node ended, `(n_nodes,)`.
        causes: for each node, the node whose end allowed it to start, `(n_nodes,)`: the last dependency to end, or the
            node before it in its queue (lane). `START` = no such node.
    """

    graph: ReplayGraph
    ready_s: tuple[float, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    causes: tuple[int, ...]

    @property
    def total_s(self) -> float:
        """Return the time at which the last operation of the simulation ended."""
        return max(self.end_s, default=0.0)


def replay(graph: ReplayGraph) -> Replay:
    """Simulate the operations of a graph from time 0 on, and return their times.

    Raises:
        ReplayError: the dependencies between operations have a cycle.
    """
    run = _Run(graph)
    run.simulate()
    if run.n_pending:
        waiting = next(index for index, end_s in enumerate(run.end_s) if end_s < 0)
        raise ReplayError(
            f"internal error of Sirtaki: {run.n_pending} of {len(graph.nodes)} simulated operations cannot start, "
            f"because their dependencies have a cycle, such as {graph.nodes[waiting]}; please report it"
        )
    return Replay(
        graph=graph,
        ready_s=tuple(run.ready_s),
        start_s=tuple(run.start_s),
        end_s=tuple(run.end_s),
        causes=tuple(run.causes),
    )


class _Run:
    """Event loop that simulates a graph of operations.

    Attributes:
        n_pending: number of operations (nodes) that have not ended.
    """

    def __init__(self, graph: ReplayGraph) -> None:
        count = len(graph.nodes)
        self.graph, self.n_pending = graph, count
        self.ready_s, self.start_s, self.end_s = [0.0] * count, [-1.0] * count, [-1.0] * count
        self.causes = [START] * count
        self._n_unmet = [0] * count  # Per node: number of dependencies that have not ended.
        self._after: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        for before, after, gap_s in graph.edges:
            self._after[before].append((after, gap_s))
            self._n_unmet[after] += 1
        self._n_works = [
            len(node.works) for node in graph.nodes
        ]  # Per node: number of resources on which its work has not ended.
        self._queues: list[deque[int]] = [deque() for _ in graph.lanes]
        self._busy = [False] * len(graph.lanes)
        self._servers = [FairShare(server) for server in graph.servers]
        # {node: {server: {job: factor of the job's remaining work when the node ends}}}
        self._relieved: dict[int, dict[int, dict[int, float]]] = {}
        self._events: list[tuple[float, int, int]] = []  # Heap of (time, kind, node or server).

    def simulate(self) -> None:
        events = self._events
        for index, n_unmet in enumerate(self._n_unmet):
            if not n_unmet:
                heappush(events, (0.0, _READY, index))
        while events:
            now_s, kind, index = heappop(events)
            if kind == _READY:
                self._enqueue(now_s, index)
            elif kind == _FIXED:
                self._serve(now_s, index)
            # Skip an outdated event: a later change of the resource's jobs or load has delayed the end of its next job.
            elif self._servers[index].next_s <= now_s:
                self._end_works(now_s, index)

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
            self._add_load(now_s, load.server, load.amount)
        heappush(self._events, (now_s + node.fixed_s, _FIXED, index))

    def _serve(self, now_s: float, index: int) -> None:
        works = self.graph.nodes[index].works
        if not works:
            self._end(now_s, index)
        for work in works:
            server = self._servers[work.server]
            server.add(now_s, index, self._seconds(index, work), work.jobs)
            self._schedule(work.server)

    def _seconds(self, index: int, work: ResourceDemand) -> float:
        if work.relieved_by == NEVER:
            return work.seconds
        if self.end_s[work.relieved_by] >= 0:
            return work.seconds * work.relief
        self._relieved.setdefault(work.relieved_by, {}).setdefault(work.server, {})[index] = work.relief
        return work.seconds

    def _add_load(self, now_s: float, server: int, amount: float) -> None:
        self._servers[server].add_load(now_s, amount)
        self._schedule(server)

    def _schedule(self, server: int) -> None:
        next_s = self._servers[server].next_s
        if next_s < math.inf:
            heappush(self._events, (next_s, _SERVER, server))

    def _end_works(self, now_s: float, server: int) -> None:
        ended = self._servers[server].pop_ended(now_s)
        self._schedule(server)
        for index in ended:
            self._n_works[index] -= 1
            if not self._n_works[index]:
                self._end(now_s, index)

    def _end(self, now_s: float, index: int) -> None:
        self.end_s[index] = now_s
        self.n_pending -= 1
        for load in self.graph.nodes[index].loads:
            self._add_load(now_s, load.server, -load.amount)
        for server, factors in self._relieved.pop(index, {}).items():
            self._servers[server].scale_remaining(now_s, factors)
            self._schedule(server)
        ready_s, n_unmet, events = self.ready_s, self._n_unmet, self._events
        for after, gap_s in self._after[index]:
            at_s = now_s + gap_s
            if at_s >= ready_s[after]:
                ready_s[after] = at_s
                self.causes[after] = index
            n_unmet[after] -= 1
            if not n_unmet[after]:
                heappush(events, (ready_s[after], _READY, after))
        lane = self.graph.nodes[index].lane
        self._busy[lane] = False
        queue = self._queues[lane]
        if queue:
            waiting = queue.popleft()
            self.causes[waiting] = index
            self._start(now_s, waiting, lane)
