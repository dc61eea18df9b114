"""The global graph of a job model: lanes of each rank, streams that all ranks share, and servers."""

from __future__ import annotations

from sirtaki.autotune.model.graph import ALL_RANKS, Activity, Edge, Graph, Node, Phase, Server, Work

from .job_model import Iteration, JobModel, Operation, OperationKey, Piece

BEFORE = -1
"""`Node.iteration` of what delays a rank's first iteration."""


def global_graph(job: JobModel) -> Graph:
    """Nodes and edges of all its iterations, one behind the other.

    Raises:
        ReplayError: a time is negative or not finite.
    """
    return _Builder(job).build()


class _Builder:
    def __init__(self, job: JobModel) -> None:
        self._job = job
        self._nodes: list[Node] = []
        self._edges: list[Edge] = []
        self._lanes = [f"rank {rank}" for rank in job.ranks]
        self._lane_places = {name: place for place, name in enumerate(self._lanes)}
        self._servers = [group.server for group in job.processors]
        self._link, self._messages = len(self._servers), len(self._servers) + 1
        if job.link is not None:
            self._servers += [job.link, Server(name="handing messages to the link", totals=(1.0,), is_link=True)]
        self._place_of = {rank: place for place, group in enumerate(job.processors) for rank in group.ranks}
        streams = 1 + max((len({one.lane for one in each.operations}) for each in job.iterations), default=0)
        self._shared = [
            group.capacity < self._count(group.ranks) * (group.threads + streams - 1) for group in job.processors
        ]
        self._last_on: dict[str, tuple[int, float]] = {}  # by lane: the last operation, and how late its last rank is

    def build(self) -> Graph:
        last: dict[int, int] = {}
        for rank in self._job.ranks:
            delay_s = self._job.begin_s.get(rank, 0.0)
            last[rank] = self._add(
                Node(
                    lane=self._lane(f"rank {rank}"),
                    activity=Activity.COMPUTE,
                    phase=Phase.OTHER,
                    rank=rank,
                    iteration=BEFORE,
                    fixed_s=delay_s,
                )
            )
        for number, iteration in enumerate(self._job.iterations):
            self._iteration(number, iteration, last)
        return Graph(nodes=self._nodes, edges=self._edges, lanes=self._lanes, servers=self._servers)

    def _iteration(self, number: int, iteration: Iteration, last: dict[int, int]) -> None:
        places = {operation.key: self._operation(number, operation) for operation in iteration.operations}
        for rank, program in iteration.programs.items():
            before = last[rank]
            for piece in program:
                place = self._piece(number, rank, piece)
                self._edges.append((before, place, 0.0))
                self._connect(place, piece, places)
                before = place
            last[rank] = before

    def _connect(self, place: int, piece: Piece, places: dict[OperationKey, int]) -> None:
        self._edges += [(places[key], place, lag_s) for key, lag_s in piece.waits]
        self._edges += [(place, places[key], 0.0) for key in piece.issues]

    def _piece(self, number: int, rank: int, piece: Piece) -> int:
        server = self._place_of[rank]
        on_server = piece.computes and self._shared[server]
        threads = self._job.processors[server].threads
        return self._add(
            Node(
                lane=self._lane_places[f"rank {rank}"],
                activity=piece.activity,
                phase=piece.phase,
                rank=rank,
                iteration=number,
                name=piece.name,
                fixed_s=0.0 if on_server else piece.seconds,
                works=(Work(server=server, seconds=piece.seconds, jobs=threads * self._count((rank,))),)
                if on_server
                else (),
            )
        )

    def _operation(self, number: int, operation: Operation) -> int:
        works, fixed_s = [], operation.fixed_s
        if operation.link_s > 0:
            works.append(Work(server=self._link, seconds=operation.link_s))
        if operation.host_s > 0:
            works.append(Work(server=self._messages, seconds=operation.host_s))
        if operation.processor_s > 0:
            server = self._place_of[operation.ranks[0]]
            if self._shared[server]:
                works.append(
                    Work(
                        server=server, seconds=operation.processor_s, jobs=operation.busy * self._count(operation.ranks)
                    )
                )
            else:
                fixed_s += operation.processor_s
        place = self._add(
            Node(
                lane=self._lane(operation.lane),
                activity=operation.activity,
                phase=Phase.OTHER,
                rank=ALL_RANKS,
                iteration=number,
                name=operation.name,
                fixed_s=fixed_s,
                works=tuple(works),
            )
        )
        if operation.lane in self._last_on:
            before, lag_s = self._last_on[operation.lane]
            self._edges.append((before, place, lag_s))
        self._last_on[operation.lane] = place, operation.lag_s
        return place

    def _count(self, ranks: tuple[int, ...]) -> int:
        return sum(self._job.alike.get(rank, 1) for rank in ranks)

    def _lane(self, name: str) -> int:
        if name not in self._lane_places:
            self._lane_places[name] = len(self._lanes)
            self._lanes.append(name)
        return self._lane_places[name]

    def _add(self, node: Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1
