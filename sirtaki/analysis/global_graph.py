"""Build the dependency graph of a job over all ranks (dPRO's "global graph", section 4), simplify and replay (simulate)
it, and find its critical path.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sirtaki.autotune.model.replayer import (
    ALL_RANKS,
    START,
    Activity,
    Edge,
    Phase,
    Replay,
    ReplayGraph,
    ReplayNode,
    ResourceDemand,
    SharedResource,
    replay,
)

from .alignment import PathSpan
from .job_model import Histories, Iteration, JobModel, JobOperation, Processors, Program, ThreadInterval


def coarse(job: JobModel, *, plan_is_fixed: bool = True) -> JobModel:
    """Return the job with fewer, longer pieces (intervals of the training thread), to replay (simulate) it faster. Two
    consecutive pieces are merged if no other work depends on the moment between the two.

    Args:
        job: job to simplify.
        plan_is_fixed: True if the communication plan will not change. Only the ready times of gradients that complete a
            unit (bucket) are kept then.
    """

    def joined(_: int, program: Program) -> Program:
        found: list[ThreadInterval] = []
        for piece in program:
            before = found[-1] if found else None
            marked = before is not None and (before.issues or (before.ready and not plan_is_fixed))
            if before is None or marked or piece.waits or not _belong_together(before, piece):
                found.append(piece)
                continue
            larger = before if before.seconds >= piece.seconds else piece
            found[-1] = replace(
                larger,
                waits=before.waits,
                seconds=before.seconds + piece.seconds,
                ready=before.ready + piece.ready,
                issues=piece.issues,
                module=before.module,
            )
        return tuple(found)

    return job.changed(program=joined)


def _belong_together(before: ThreadInterval, piece: ThreadInterval) -> bool:
    alike = (before.activity, before.phase) == (piece.activity, piece.phase)
    # Never merge a wait as negligible, because its time counts to the phase (such as backward) in which it is.
    negligible = min(before.seconds, piece.seconds) <= 0.0 and not before.waits
    return before.computes == piece.computes and (alike or negligible)


def mean_iteration(job: JobModel) -> JobModel:
    """Return the job with a single iteration, whose durations are means over all iterations.

    A rank's iterations can be averaged if they have the same sequence of pieces (intervals of the training thread). Of
    iterations with different sequences, only those with the most frequent sequence count.
    """
    programs = {rank: _mean_program([each.programs[rank] for each in job.iterations]) for rank in job.ranks}
    operations: dict[Hashable, list[JobOperation]] = defaultdict(list)
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

    def mean(pieces: Sequence[ThreadInterval]) -> ThreadInterval:
        lags_s = (
            statistics.fmean(lag_s)
            for lag_s in zip(*([late_s for _, late_s in one.waits] for one in pieces), strict=True)
        )
        waits = tuple((key, lag_s) for (key, _), lag_s in zip(pieces[0].waits, lags_s, strict=True))
        return replace(pieces[0], seconds=statistics.fmean(piece.seconds for piece in pieces), waits=waits)

    alike = [program for program in programs if _signature(program) == usual]
    return tuple(map(mean, zip(*alike, strict=True)))


def _mean_operation(same: Sequence[JobOperation]) -> JobOperation:
    costs = ("fixed_s", "link_s", "host_s", "processor_s", "lag_s")
    means: dict[str, Any] = {cost: statistics.fmean(getattr(one, cost) for one in same) for cost in costs}
    return replace(same[0], **means)


def _signature(program: Program) -> Hashable:
    return tuple(
        (piece.activity, piece.phase, piece.computes, tuple(key for key, _ in piece.waits), piece.issues)
        for piece in program
    )


def symmetric(job: JobModel, *, tolerance: float = 0.02) -> JobModel:
    """Return a smaller job with one rank for each group of equal ranks, and one host for each group of equal hosts.

    Ranks are equal if they run the same sequence of work, and if the durations of each phase differ by at most
    `tolerance`. Hosts are equal if the same numbers of equal ranks run on each. When ranks share the processors of a
    host, a remaining rank uses them like all ranks of the host that are equal to it (`JobModel.alike`). Removed hosts
    are not represented. Costs of new units (buckets) must therefore be derived from the complete job.

    Args:
        job: complete job.
        tolerance: largest difference between equal ranks, as a fraction of the iteration time.
    """
    kinds = _equal_ranks(job, tolerance)
    hosts: dict[Hashable, tuple[Processors, Counter[int]]] = {}
    for group in job.processors:
        counts = Counter(kinds[rank] for rank in group.ranks)
        hosts.setdefault((frozenset(counts.items()), group.capacity, group.threads), (group, counts))
    kept: dict[int, int] = {}
    processors = []
    for group, counts in hosts.values():
        firsts: dict[int, int] = {}
        for rank in group.ranks:
            firsts.setdefault(kinds[rank], rank)
        mine = {rank: counts[kind] * job.alike.get(rank, 1) for kind, rank in firsts.items()}
        kept |= mine
        processors.append(replace(group, ranks=tuple(mine)))

    def only(ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank in kept)

    return replace(
        job,
        ranks=only(job.ranks),
        processors=tuple(processors),
        buffers=tuple(replace(buffer, ranks=only(buffer.ranks)) for buffer in job.buffers),
        iterations=tuple(
            Iteration(
                programs={rank: program for rank, program in each.programs.items() if rank in kept},
                operations=tuple(replace(one, ranks=ranks) for one in each.operations if (ranks := only(one.ranks))),
            )
            for each in job.iterations
        ),
        begin_s={rank: begin_s for rank, begin_s in job.begin_s.items() if rank in kept},
        alike=kept,
    )


def _equal_ranks(job: JobModel, tolerance: float) -> dict[int, int]:
    """Map each rank to the lowest rank that is equal to it: with the same sequence of work, and with durations that
    differ by at most `tolerance`, as a fraction of the iteration time.
    """
    signatures = {rank: [_signature(each.programs[rank]) for each in job.iterations] for rank in job.ranks}
    lengths = {rank: [_lengths(each.programs[rank]) for each in job.iterations] for rank in job.ranks}

    def alike(kind: int, rank: int) -> bool:
        limit_s = tolerance * min(each["all"] for each in lengths[rank])
        if signatures[kind] != signatures[rank]:
            return False
        if abs(job.begin_s.get(kind, 0.0) - job.begin_s.get(rank, 0.0)) > limit_s:
            return False
        return all(
            abs(seconds - other.get(key, 0.0)) <= tolerance * max(mine["all"], other["all"])
            for mine, other in zip(lengths[kind], lengths[rank], strict=True)
            for key, seconds in mine.items()
        )

    found: dict[int, int] = {}
    for rank in job.ranks:
        found[rank] = next((kind for kind in sorted(set(found.values())) if alike(kind, rank)), rank)
    return found


def _lengths(program: Program) -> dict[Hashable, float]:
    """Return the seconds of own work of a rank in one iteration: until it issues each operation, in each phase, and in
    total.
    """
    found: dict[Hashable, float] = defaultdict(float)
    so_far_s = 0.0
    for piece in program:
        so_far_s += piece.seconds
        found[piece.phase, piece.activity is Activity.DATA] += piece.seconds
        found |= dict.fromkeys(piece.issues, so_far_s)
    found["all"] = so_far_s
    return found


BEFORE = -1
"""Value of `ReplayNode.iteration` for the node that delays the begin of a rank's first iteration."""


def global_graph(job: JobModel) -> ReplayGraph:
    """Return the dependency graph of the work of all ranks in all iterations, which can be replayed (simulated).

    Raises:
        ReplayError: a duration is negative or not finite.
    """
    nodes: list[ReplayNode] = []
    edges: list[Edge] = []
    lanes = {f"rank {rank}": place for place, rank in enumerate(job.ranks)}
    servers = [group.server for group in job.processors]
    link, messages = len(servers), len(servers) + 1
    if job.link is not None:
        servers += [job.link, SharedResource(name="passing messages to the link", totals=(1.0,), is_link=True)]
    place_of = {rank: place for place, group in enumerate(job.processors) for rank in group.ranks}
    # {lane (queue of a transport): (its latest operation, the operation's `lag_s`)}
    last_on: dict[str, tuple[int, float]] = {}

    def count(ranks: Sequence[int]) -> int:
        return sum(job.alike.get(rank, 1) for rank in ranks)

    streams = 1 + max((len({one.lane for one in each.operations}) for each in job.iterations), default=0)
    shared = [group.capacity < count(group.ranks) * (group.threads + streams - 1) for group in job.processors]

    def add(
        one: ThreadInterval | JobOperation,
        lane: str,
        rank: int,
        number: int,
        fixed_s: float,
        works: Sequence[ResourceDemand],
    ) -> int:
        phase = one.phase if isinstance(one, ThreadInterval) else Phase.OTHER
        fields: dict[str, Any] = {"activity": one.activity, "phase": phase, "name": one.name, "works": tuple(works)}
        lane_number = lanes.setdefault(lane, len(lanes))
        nodes.append(ReplayNode(lane=lane_number, rank=rank, iteration=number, fixed_s=fixed_s, **fields))
        return len(nodes) - 1

    def add_piece(number: int, rank: int, piece: ThreadInterval) -> int:
        server = place_of[rank]
        if not (piece.computes and shared[server]):
            return add(piece, f"rank {rank}", rank, number, piece.seconds, ())
        work = ResourceDemand(
            server=server, seconds=piece.seconds, jobs=job.processors[server].threads * count((rank,))
        )
        return add(piece, f"rank {rank}", rank, number, 0.0, (work,))

    def add_operation(number: int, one: JobOperation) -> int:
        server, works = place_of[one.ranks[0]], []
        if one.link_s > 0:
            works.append(ResourceDemand(server=link, seconds=one.link_s))
        if one.host_s > 0:
            works.append(ResourceDemand(server=messages, seconds=one.host_s))
        if one.processor_s > 0 and shared[server]:
            works.append(ResourceDemand(server=server, seconds=one.processor_s, jobs=one.busy * count(one.ranks)))
        fixed_s = one.fixed_s + (0.0 if shared[server] else one.processor_s)
        place = add(one, one.lane, ALL_RANKS, number, fixed_s, works)
        if one.lane in last_on:
            before, lag_s = last_on[one.lane]
            edges.append((before, place, lag_s))
        last_on[one.lane] = place, one.lag_s
        return place

    last: dict[int, int] = {}
    for rank in job.ranks:
        delay = ThreadInterval(Activity.COMPUTE, Phase.OTHER, job.begin_s.get(rank, 0.0), computes=False)
        last[rank] = add_piece(BEFORE, rank, delay)
    for number, iteration in enumerate(job.iterations):
        places = {one.key: add_operation(number, one) for one in iteration.operations}
        for rank, program in iteration.programs.items():
            for piece in program:
                place = add_piece(number, rank, piece)
                edges.append((last[rank], place, 0.0))
                edges += [(places[key], place, lag_s) for key, lag_s in piece.waits]
                edges += [(place, places[key], 0.0) for key in piece.issues]
                last[rank] = place
    return ReplayGraph(nodes=nodes, edges=edges, lanes=list(lanes), servers=servers)


def play(job: JobModel) -> Replay:
    """Replay (simulate) all iterations of a job: compute when each node of its dependency graph begins and ends."""
    return replay(global_graph(coarse(job)))


STRAGGLER_EXCESS = 0.05
"""A rank is reported as a straggler if its work takes longer than the median rank's by this fraction."""

_PHASES = {
    Phase.DATA: "loading data",
    Phase.FORWARD: "the forward pass",
    Phase.BACKWARD: "the backward pass",
    Phase.UPDATE: "the optimizer's update",
    Phase.OTHER: "other work of the script",
}

_RANKS = {Phase.DATA: "data loader", Phase.OTHER: "script"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One cause of the duration of a step, such as the network link between hosts, with the part of the step time that
    it explains.

    Attributes:
        words: the cause, as the end of the sentence "31 % of the step …".
        seconds: seconds of an iteration that the cause explains.
        share: fraction of the iteration time.
    """

    words: str
    seconds: float
    share: float

    def describe(self) -> str:
        """Describe the cause in a sentence, such as `31 % of the step is the link between hosts`."""
        return f"{percent(self.share)} of the step {self.words}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One node of the dependency graph that is on the critical path.

    Attributes:
        place: index of the node in the graph.
        begin_s, end_s: begin and end of the node.
        gap_s: idle time between the end of this node and the begin of the next node on the path.
    """

    place: int
    begin_s: float
    end_s: float
    gap_s: float = 0.0


def critical_path(replay: Replay) -> tuple[Visit, ...]:
    """Return the critical path of a replayed (simulated) job, from the begin of the first iteration to the end of the
    last node.

    The path is searched backwards: a node is preceded by the node whose end allowed it to start.
    """
    if not replay.end_s:
        return ()
    place = max(range(len(replay.end_s)), key=lambda place: replay.end_s[place])
    found, until_s = [], replay.end_s[place]
    while place != START and replay.graph.nodes[place].iteration > BEFORE:
        end_s = replay.end_s[place]
        found.append(Visit(place=place, begin_s=replay.start_s[place], end_s=end_s, gap_s=max(0.0, until_s - end_s)))
        until_s, place = replay.start_s[place], replay.causes[place]
    return tuple(reversed(found))


def path_spans(histories: Histories, replay: Replay) -> Iterator[PathSpan]:
    """Yield the nodes of the critical path as events for a trace, with times relative to the replayed iteration. A
    replayed iteration begins when the previous one ends on the last rank.
    """
    graph, ends_s = replay.graph, defaultdict[int, float](float)
    for node, end_s in zip(graph.nodes, replay.end_s, strict=True):
        if node.iteration > BEFORE and node.rank != ALL_RANKS:
            ends_s[node.iteration] = max(ends_s[node.iteration], end_s)
    for visit in critical_path(replay):
        node = graph.nodes[visit.place]
        begin_s = ends_s[node.iteration - 1]
        length_s = (ends_s[node.iteration] - begin_s) or 1.0
        where = graph.lanes[node.lane] if node.rank == ALL_RANKS else f"rank {node.rank}"
        begin, end = (min(max((at_s - begin_s) / length_s, 0.0), 1.0) for at_s in (visit.begin_s, visit.end_s))
        yield PathSpan(histories.steps[node.iteration].number, f"{where}: {node.name or node.phase.value}", begin, end)


def parts(replay: Replay) -> tuple[Part, ...]:
    """Return the causes that explain the duration of the critical path, the largest first, as means per iteration."""
    seconds: dict[tuple[str, int, Phase], float] = defaultdict(float)
    graph = replay.graph
    for visit in critical_path(replay):
        node = graph.nodes[visit.place]
        for words, rank, phase, part_s in _shares(graph, node, visit.end_s - visit.begin_s):
            seconds[words, rank, phase] += part_s
        seconds["is delays between ranks in receiving results", ALL_RANKS, Phase.OTHER] += visit.gap_s
    iterations = 1 + max((node.iteration for node in graph.nodes), default=0)
    total_s = sum(seconds.values()) or 1.0
    named = _by_name(seconds, _own_s(graph))
    return tuple(
        Part(words=words, seconds=part_s / iterations, share=part_s / total_s)
        for words, part_s in sorted(named.items(), key=lambda item: -item[1])
        if part_s > 0
    )


MIN_SHARE = 0.005
"""Minimum fraction of the step time for which a cause is printed separately. Smaller causes are printed as one sum."""


def path_lines(replay: Replay) -> tuple[Part, ...]:
    """Return the causes of the critical path's duration to print: each that explains a large part, and the sum of all
    others.
    """
    found = parts(replay)
    rest = [part for part in found if part.share < MIN_SHARE]
    shown = tuple(part for part in found if part.share >= MIN_SHARE)
    if not rest:
        return shown
    seconds, share = sum(part.seconds for part in rest), sum(part.share for part in rest)
    return (*shown, Part(words="is everything else", seconds=seconds, share=share))


_OWN = ""  # Placeholder for the cause "own work of a rank". `_by_name` replaces it by words with phase and rank.


def _shares(graph: ReplayGraph, node: ReplayNode, length_s: float) -> Sequence[tuple[str, int, Phase, float]]:
    """Divide the duration of a node of the graph among its causes, such as the network link or shared processors.
    Return (description, rank, phase, seconds) for each cause.
    """
    alone_s, fixed_s = min(node.alone_s, length_s), min(node.fixed_s, length_s)
    link = next((work.server for work in node.works if graph.servers[work.server].is_link), None)
    words, rank = _OWN, node.rank
    if node.activity is Activity.COLLECTIVE:
        return [("is other collective operations of the script", ALL_RANKS, node.phase, length_s)]
    if node.activity is Activity.UNIT and link is not None:
        return [
            ("is starting to exchange gradients", ALL_RANKS, node.phase, fixed_s),
            (f"is {graph.servers[link].name}", ALL_RANKS, node.phase, length_s - fixed_s),
        ]
    if node.activity is Activity.UNIT:
        words = "is exchanging gradients on one host"
    elif node.activity is Activity.COPY:
        words, rank = "is copying gradients", ALL_RANKS
    found = [(words, rank, node.phase, alone_s)]
    if node.works and length_s > alone_s:
        shared = graph.servers[node.works[0].server].name
        found.append((f"is sharing {shared}", ALL_RANKS, node.phase, length_s - alone_s))
    return found


def _own_s(graph: ReplayGraph) -> dict[Phase, dict[int, float]]:
    """Return the seconds that each rank's own work takes if nothing else uses the processors, by phase and rank."""
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
        late_s = min(part_s, mine_s - usual_s) if mine_s > (1 + STRAGGLER_EXCESS) * usual_s else 0.0
        found[f"waits for rank {rank}'s {_RANKS.get(phase, _PHASES[phase].removeprefix('the '))}"] += late_s
        found[f"is {_PHASES[phase]}"] += part_s - late_s
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanStepTimes:
    """Mean step times over ranks and iterations.

    Attributes:
        iteration_s: time from the end of one step to the end of the next step.
        phases_s: time in each phase (such as forward), including waits for other ranks.
        spread_s: standard deviation of the iteration time over iterations, after averaging over ranks; 0 for a single
            iteration.
        iterations: number of iterations.
    """

    iteration_s: float
    phases_s: Mapping[Phase, float]
    spread_s: float
    iterations: int

    def scaled(self, factor: float) -> MeanStepTimes:
        """Return a copy in which all times are multiplied by `factor`."""
        phases_s = {phase: factor * seconds for phase, seconds in self.phases_s.items()}
        return replace(self, iteration_s=factor * self.iteration_s, phases_s=phases_s, spread_s=factor * self.spread_s)

    @property
    def forward_s(self) -> float:
        """Return the seconds per step of the forward pass."""
        return self.phases_s.get(Phase.FORWARD, 0.0)

    @property
    def backward_s(self) -> float:
        """Return the seconds per step of the backward pass, including the wait for reduced gradients."""
        return self.phases_s.get(Phase.BACKWARD, 0.0)


def recorded(histories: Histories) -> MeanStepTimes:
    """Return the mean step times that were recorded."""
    steps_s: list[list[float]] = []
    phases_s: dict[Phase, float] = defaultdict(float)
    for step in histories.steps:
        steps_s.append([mine[-1].end_s - mine[0].begin_s for mine in step.stretches.values()])
        for mine in step.stretches.values():
            for one in mine:
                phases_s[one.phase] += one.end_s - one.begin_s
    return _means(steps_s, phases_s)


def replayed(replay: Replay) -> MeanStepTimes:
    """Return the mean step times of a replayed (simulated) job."""
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


def _means(steps_s: Sequence[Sequence[float]], phases_s: Mapping[Phase, float]) -> MeanStepTimes:
    each_s = [statistics.fmean(ranks) for ranks in steps_s if ranks]
    count = sum(len(ranks) for ranks in steps_s)
    return MeanStepTimes(
        iteration_s=statistics.fmean(each_s) if each_s else 0.0,
        phases_s={phase: total_s / count for phase, total_s in phases_s.items()} if count else {},
        spread_s=statistics.stdev(each_s) if len(each_s) > 1 else 0.0,
        iterations=len(each_s),
    )


def _part_s(graph: ReplayGraph, activities: Collection[Activity]) -> float:
    # Leave out the delays before the first iteration, because they are no part of a step.
    kept = [place for place, node in enumerate(graph.nodes) if node.activity in activities and node.iteration > BEFORE]
    places = {place: new for new, place in enumerate(kept)}
    edges = [
        (places[before], places[after], gap_s)
        for before, after, gap_s in graph.edges
        if before in places and after in places
    ]
    return replay(replace(graph, nodes=[graph.nodes[place] for place in kept], edges=edges)).total_s


def communication_s(graph: ReplayGraph) -> float:
    """Return how long all communication of the iterations would take together if every gradient were ready at the
    start.
    """
    return _part_s(graph, {Activity.UNIT, Activity.COLLECTIVE})


def computation_s(graph: ReplayGraph) -> float:
    """Return how long the slowest rank's own work takes in all iterations together, without waits for other ranks."""
    return _part_s(graph, {Activity.COMPUTE, Activity.DATA, Activity.COPY})


def alone_s(replay: Replay) -> tuple[float, float]:
    """Return the seconds per step of the slowest rank's own work alone, and of all communication alone.

    Each is at most the mean step time of all ranks, which the slowest rank's own work can exceed.
    """
    times = replayed(replay)
    own_s, units_s = (part(replay.graph) / max(1, times.iterations) for part in (computation_s, communication_s))
    return min(own_s, times.iteration_s), min(units_s, times.iteration_s)


def ms(seconds: float) -> str:
    """Return a duration as text in milliseconds, such as `198.2 ms`."""
    return f"{1e3 * seconds:.4g} ms"


def percent(share: float) -> str:
    """Return a fraction as text in percent, such as `12 %` or `3.4 %`."""
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"
