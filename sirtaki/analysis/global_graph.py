"""The global graph of a job (dPRO, section 4): coarsened, replayed, with its critical path."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from sirtaki.autotune.model.replayer import (
    ALL_RANKS,
    START,
    Activity,
    Edge,
    Graph,
    Node,
    Phase,
    Replay,
    Server,
    Work,
    replay,
)

from .job_model import Histories, Iteration, JobModel, Operation, OperationKey, Piece, Processors, Program


def coarse(job: JobModel, *, settled: bool = True) -> JobModel:
    """Chains of pieces that nothing else depends on become one.

    Args:
        job: what is to become smaller.
        settled: its plan stays, so when gradients come that complete no unit need no longer be known.
    """
    iterations = tuple(
        replace(
            each,
            programs={rank: _coarse_program(program, settled) for rank, program in each.programs.items()},
        )
        for each in job.iterations
    )
    return replace(job, iterations=iterations)


def _coarse_program(program: Program, settled: bool) -> Program:
    found: list[Piece] = []
    for piece in program:
        before = found[-1] if found else None
        marked = before is not None and (before.issues or (before.ready and not settled))
        if before is None or marked or piece.waits or not _join(before, piece):
            found.append(piece)
            continue
        larger = before if before.seconds >= piece.seconds else piece
        found[-1] = replace(
            before,
            activity=larger.activity,
            phase=larger.phase,
            name=larger.name,
            seconds=before.seconds + piece.seconds,
            ready=before.ready + piece.ready,
            issues=piece.issues,
        )
    return tuple(found)


def _join(before: Piece, piece: Piece) -> bool:
    alike = (before.activity, before.phase) == (piece.activity, piece.phase)
    negligible = min(before.seconds, piece.seconds) <= 0.0 and not before.waits  # waiting has a phase, too
    return before.computes == piece.computes and (alike or negligible)


def mean_iteration(job: JobModel) -> JobModel:
    """One iteration of mean durations. An iteration in which a rank did other things than in most counts for others."""
    programs = {rank: _mean_program([each.programs[rank] for each in job.iterations]) for rank in job.ranks}
    operations: dict[Hashable, list[Operation]] = defaultdict(list)
    for each in job.iterations:
        for one in each.operations:
            operations[one.key].append(one)
    named = {key for program in programs.values() for piece in program for key in piece.issues}
    usual = max(job.iterations, key=lambda each: len(named & {one.key for one in each.operations}))
    mean = Iteration(
        programs=programs,
        operations=tuple(_mean_operation(operations[one.key]) for one in usual.operations if one.key in named),
    )
    return replace(job, iterations=(mean,))


def _mean_program(programs: Sequence[Program]) -> Program:
    usual, _ = Counter(_signature(program) for program in programs).most_common(1)[0]
    alike = [program for program in programs if _signature(program) == usual]
    return tuple(
        replace(
            pieces[0],
            seconds=statistics.fmean(piece.seconds for piece in pieces),
            waits=tuple(
                (key, statistics.fmean(piece.waits[place][1] for piece in pieces))
                for place, (key, _) in enumerate(pieces[0].waits)
            ),
        )
        for pieces in zip(*alike, strict=True)
    )


def _mean_operation(same: Sequence[Operation]) -> Operation:
    return replace(
        same[0],
        fixed_s=statistics.fmean(one.fixed_s for one in same),
        link_s=statistics.fmean(one.link_s for one in same),
        host_s=statistics.fmean(one.host_s for one in same),
        processor_s=statistics.fmean(one.processor_s for one in same),
        lag_s=statistics.fmean(one.lag_s for one in same),
    )


def _signature(program: Program) -> Hashable:
    return tuple(
        (piece.activity, piece.phase, piece.computes, tuple(key for key, _ in piece.waits), piece.issues)
        for piece in program
    )


def symmetric(job: JobModel, *, tolerance: float = 0.02) -> JobModel:
    """One rank for each kind of them: ranks that do the same, and take as long for each phase within `tolerance`.

    Hosts whose ranks are of the same kinds are alike, too; one of them stays, and on it one rank of each kind, which
    counts as many on the processors that they share. Hosts that are not there any more are not counted, so what units
    cost that nobody has run is to be asked of the whole job.
    """
    kinds = _kinds(job, tolerance)
    hosts: dict[Hashable, Processors] = {}
    for group in job.processors:
        counts = Counter(kinds[rank] for rank in group.ranks)
        hosts.setdefault((frozenset(counts.items()), group.capacity, group.threads), group)
    kept: dict[int, int] = {}
    processors = []
    for group in hosts.values():
        counts = Counter(kinds[rank] for rank in group.ranks)
        mine: dict[int, int] = {}
        for rank in group.ranks:
            if kinds[rank] not in {kinds[other] for other in mine}:
                mine[rank] = counts[kinds[rank]] * job.alike.get(rank, 1)
        kept |= mine
        processors.append(replace(group, ranks=tuple(mine)))
    return replace(
        job,
        ranks=tuple(rank for rank in job.ranks if rank in kept),
        processors=tuple(processors),
        buffers=tuple(
            replace(buffer, ranks=tuple(rank for rank in buffer.ranks if rank in kept)) for buffer in job.buffers
        ),
        iterations=tuple(_only(each, kept) for each in job.iterations),
        begin_s={rank: begin_s for rank, begin_s in job.begin_s.items() if rank in kept},
        alike=kept,
    )


def _only(iteration: Iteration, kept: Mapping[int, int]) -> Iteration:
    operations = [
        replace(one, ranks=ranks)
        for one in iteration.operations
        if (ranks := tuple(rank for rank in one.ranks if rank in kept))
    ]
    there = {one.key for one in operations}
    programs = {rank: program for rank, program in iteration.programs.items() if rank in kept}
    assert all(key in there for program in programs.values() for piece in program for key in piece.issues)
    return Iteration(programs=programs, operations=tuple(operations))


def _kinds(job: JobModel, tolerance: float) -> dict[int, int]:
    """The lowest rank of each one's kind."""
    found: dict[int, int] = {}
    signatures = {rank: tuple(_signature(each.programs[rank]) for each in job.iterations) for rank in job.ranks}
    lengths = {rank: [_lengths(each.programs[rank]) for each in job.iterations] for rank in job.ranks}
    for rank in job.ranks:
        found[rank] = next(
            (
                kind
                for kind in sorted(set(found.values()))
                if signatures[kind] == signatures[rank]
                and abs(job.begin_s.get(kind, 0.0) - job.begin_s.get(rank, 0.0)) <= tolerance * _total(lengths[rank])
                and all(_close(*pair, tolerance) for pair in zip(lengths[kind], lengths[rank], strict=True))
            ),
            rank,
        )
    return found


def _lengths(program: Program) -> dict[Hashable, float]:
    """Of a rank's iteration: what it does up to each operation, and in each phase."""
    found: dict[Hashable, float] = defaultdict(float)
    so_far_s = 0.0
    for piece in program:
        so_far_s += piece.seconds
        found[piece.phase, piece.activity is Activity.DATA] += piece.seconds
        for key in piece.issues:
            found[key] = so_far_s
    found["all"] = so_far_s
    return found


def _total(lengths: Sequence[Mapping[Hashable, float]]) -> float:
    return min(each["all"] for each in lengths)


def _close(mine: Mapping[Hashable, float], other: Mapping[Hashable, float], tolerance: float) -> bool:
    limit_s = tolerance * max(mine["all"], other["all"])
    return all(abs(seconds - other.get(key, 0.0)) <= limit_s for key, seconds in mine.items())


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


TOGETHER = frozenset({Activity.UNIT, Activity.COLLECTIVE})


def part(graph: Graph, kept: Callable[[Node], bool]) -> Graph:
    """The nodes that are kept, the edges between them, all lanes and servers."""
    places = {place: new for new, place in enumerate(place for place, node in enumerate(graph.nodes) if kept(node))}
    return replace(
        graph,
        nodes=[graph.nodes[place] for place in places],
        edges=[
            (places[before], places[after], gap_s)
            for before, after, gap_s in graph.edges
            if before in places and after in places
        ],
    )


def communication_s(graph: Graph) -> float:
    """What ranks do together, as if nobody had to wait for gradients."""
    return replay(part(graph, lambda node: node.activity in TOGETHER)).total_s


def computation_s(graph: Graph) -> float:
    """What the slowest rank does by itself, as if nobody waited for others."""
    return replay(part(graph, lambda node: node.activity not in TOGETHER)).total_s
