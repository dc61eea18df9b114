"""A job as the replayer knows it: what each rank does in each of a few iterations, and what is done together.

All durations are those with the servers to oneself: what processors and links took longer since others used them, too,
is not in them but comes out of the replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sirtaki.autotune.model.graph import Activity, Phase, Server
from sirtaki.comm.plan import Route
from sirtaki.link_model import LinkModel
from sirtaki.profiler.recording import Buffer
from sirtaki.profiler.step_memory import ModuleKey

GradientKey = tuple[int, int]
"""(buffer, place in its layout)."""

OperationKey = tuple[int, int, int]
"""(buffer, start, stop) of a unit, elements of the flat buffer; (-1, place in the iteration, 0) of anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What the thread that trains does between two moments at which something else depends on it.

    Attributes:
        activity: what it is.
        phase: of the step.
        name: of the operator.
        seconds: on as many processors as it uses.
        computes: it uses processors; else it lasts as long whatever they do.
        waits: operations whose results it needs, and how much later than the first rank this one sees each.
        ready: gradients that have come at its end.
        issues: operations that this rank takes part in from its end on.
        module: whose forward or backward pass an operator belongs to; None = none is known.
    """

    activity: Activity
    phase: Phase
    seconds: float
    name: str = ""
    computes: bool = True
    waits: tuple[tuple[OperationKey, float], ...] = ()
    ready: tuple[GradientKey, ...] = ()
    issues: tuple[OperationKey, ...] = ()
    module: ModuleKey | None = None

    @property
    def is_joint(self) -> bool:
        """Something other than its rank's next piece depends on it, or it on something other than the one before."""
        return bool(self.waits or self.issues)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What several ranks do together: a unit, or another collective operation.

    Attributes:
        key: which.
        activity: `Activity.UNIT` or `Activity.COLLECTIVE`.
        lane: what it runs on, one at a time; equal for those that wait for each other.
        ranks: that take part.
        n_bytes: of one rank's input.
        name: for people.
        route: of a unit.
        fixed_s: start-up.
        link_s: on the link between hosts, which it shares; 0 = none is used.
        host_s: of what hands messages to the link, one after the other on all streams (`LinkModel.host_s`).
        processor_s: on the processors of its ranks, where all are on one host.
        busy: processors that each of its ranks keeps busy meanwhile; below 1 where messages are waited for.
        lag_s: how much later than the first the last rank is done.
    """

    key: OperationKey
    activity: Activity
    lane: str
    ranks: tuple[int, ...]
    n_bytes: int
    name: str = ""
    route: Route | None = None
    fixed_s: float = 0.0
    link_s: float = 0.0
    host_s: float = 0.0
    processor_s: float = 0.0
    busy: float = 1.0
    lag_s: float = 0.0


Program = tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One step of all ranks.

    Attributes:
        programs: of each rank.
        operations: in the order in which they are issued.
    """

    programs: Mapping[int, Program]
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """What the ranks of one machine share.

    Attributes:
        name: for people.
        capacity: how many processors they may use together.
        ranks: that run there.
        threads: that a rank computes with.
    """

    name: str
    capacity: float
    ranks: tuple[int, ...]
    threads: int = 1

    @property
    def server(self) -> Server:
        """N jobs get n processors' work done, until there are no more."""
        whole = int(self.capacity)
        totals = [float(count) for count in range(1, whole + 1)]
        return Server(name=self.name, totals=(*totals, self.capacity) if self.capacity > whole else tuple(totals))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """All that is replayed.

    Attributes:
        ranks: by number.
        hosts: of each rank, by the lowest rank there.
        processors: of each machine.
        buffers: the gradients and how they are reduced.
        links: of each route that was probed.
        link: the server that units between hosts share; None where all is on one host.
        iterations: one behind the other.
        begin_s: how much later than the first rank each one begins.
        alike: as how many ranks one counts that stands for others of its host, too; else 1.
        notes: what is not known, a sentence each.
    """

    ranks: tuple[int, ...]
    hosts: Mapping[int, int]
    processors: tuple[Processors, ...]
    buffers: tuple[Buffer, ...]
    links: Mapping[Route, LinkModel]
    link: Server | None
    iterations: tuple[Iteration, ...]
    begin_s: Mapping[int, float] = field(default_factory=dict)
    alike: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def crosses_hosts(self, ranks: tuple[int, ...]) -> bool:
        """Whether an operation of these ranks needs the link."""
        return len({self.hosts[rank] for rank in ranks}) > 1

    def processors_of(self, rank: int) -> int:
        """The place in `processors` of those that a rank uses."""
        return next(place for place, group in enumerate(self.processors) if rank in group.ranks)
