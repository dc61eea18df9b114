"""The graph that is replayed: what is done, on which lanes and servers, and what waits for what.

Lanes do one thing at a time; servers (a host's processors, a link) are shared by what uses them at the same time.
Between nodes there are gaps. Planners replay one backward pass of an average rank; of a recording a few iterations of
all ranks are replayed, dPRO's global graph (section 4.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from sirtaki.errors import ReplayError


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
"""`Node.rank` of what several ranks do together."""

NEVER = -1
"""`Work.relieved_by` of what is never relieved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
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
class Work:
    """What a node needs of a server.

    Attributes:
        server: its place in `Graph.servers`.
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
        server: its place in `Graph.servers`.
        amount: what `Server.speed` is asked with, together with that of others.
    """

    server: int
    amount: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One thing that is done.

    It lasts `fixed_s`, and then until every server is done with its work.

    Attributes:
        lane: its place in `Graph.lanes`; a lane takes up what is ready first, one at a time.
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
    works: tuple[Work, ...] = ()
    loads: tuple[Load, ...] = ()

    @property
    def alone_s(self) -> float:
        """How long it takes if nothing else uses its servers, itself aside."""
        return self.fixed_s + max((work.seconds for work in self.works), default=0.0)


Edge = tuple[int, int, float]
"""(before, after, gap_s): places of two nodes, and what passes at least from one's end to the other's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes, and what waits for what.

    Attributes:
        nodes: in an order in which ties are broken.
        edges: between them.
        lanes: names.
        servers: that nodes share.

    Raises:
        ReplayError: a number is no place, or a time is negative or not finite.
    """

    nodes: Sequence[Node]
    edges: Sequence[Edge]
    lanes: Sequence[str]
    servers: Sequence[Server] = field(default=())

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
