"""Job models made by hand, and recordings of their simulated runs. A model derived from a recording must be equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fakes.recordings import shifted

from sirtaki.analysis.global_graph import global_graph
from sirtaki.analysis.job_model import (
    Iteration,
    JobModel,
    JobOperation,
    Processors,
    Program,
    ThreadInterval,
    link_server,
    unit_fields,
)
from sirtaki.analysis.recording import (
    Buffer,
    Copy,
    Detail,
    JobInfo,
    Module,
    ModuleKey,
    Operator,
    PhaseSpan,
    Placement,
    RankRecording,
    ReadyGradient,
    RecordedIteration,
    RecordedUnit,
    Recording,
    write_job,
    write_rank,
)
from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.model.replayer import Activity, Phase, replay
from sirtaki.comm.plan import Algorithm, CommPlan, GradientLayout, Route, TransportKind, Unit
from sirtaki.measures import LinkModel

GLOO: Route = (TransportKind.GLOO, Algorithm.FLAT)


def plan_of(sizes: Sequence[int], cuts: Sequence[int], streams: int = 1) -> CommPlan:
    """Return a plan whose units end after the given numbers of gradients, on the streams in turn."""
    offsets = GradientLayout(sizes=tuple(sizes)).offsets
    starts = (0, *cuts[:-1])
    units = tuple(
        Unit(start=offsets[start], stop=offsets[stop], stream=index % streams)
        for index, (start, stop) in enumerate(zip(starts, cuts, strict=True))
    )
    return CommPlan(numel=offsets[-1], units=units, streams=streams, transport=TransportKind.GLOO)


def made_job(
    *,
    durations_s: Mapping[int, Sequence[float]],
    sizes: Sequence[int],
    plan: CommPlan,
    link: LinkModel | None = None,
    seconds_per_byte: float = 0.0,
    forward_s: Mapping[int, float] | None = None,
    data_s: Mapping[int, float] | None = None,
    update_s: float = 0.01,
    copy_s: float = 0.001,
    hosts: Mapping[int, int] | None = None,
    capacity: float = 64.0,
    busy: float = 1.0,
    iterations: int = 1,
) -> JobModel:
    """Return a job in which each rank loads data, runs forward and backward, and updates.

    Args:
        durations_s: duration of each gradient's backward computation, by rank.
        sizes: elements of each gradient.
        plan: plan of all ranks.
        link: link between hosts; None = all ranks are on one host.
        seconds_per_byte: processor time per byte of a unit on one host.
        forward_s, data_s: duration of the forward pass and of data loading, by rank.
        update_s, copy_s: duration of the update, and of the copy before each unit.
        hosts: host of each rank.
        capacity: processors per host.
        busy: see `JobOperation`.
        iterations: number of equal iterations.
    """
    ranks = tuple(durations_s)
    hosts = hosts or {rank: rank if link is not None else 0 for rank in ranks}
    route = (plan.transport, Algorithm.FLAT)
    layout = GradientLayout(sizes=tuple(sizes), names=tuple(f"w{index}" for index in range(len(sizes))))
    knobs = Knobs(unit_bytes=1, streams=plan.streams, transport=plan.transport)
    buffer = Buffer(number=0, reducer=(0, 0), ranks=ranks, layout=layout, plan=plan, knobs=knobs)

    def operation(unit: Unit) -> JobOperation:
        n_bytes = unit.numel * 4
        costs: dict[str, float] = {"processor_s": n_bytes * seconds_per_byte, "busy": busy}
        if link is not None:
            costs = {"fixed_s": link.alpha_s, "link_s": n_bytes * link.beta_s_per_byte, "host_s": link.host_s}
            costs["busy"] = busy
        fields = unit_fields((0, unit.start, unit.stop), layout, route, unit.stream)
        return JobOperation(**fields, ranks=ranks, **costs)

    def program(rank: int) -> Program:
        took_s = (data_s or {}).get(rank, 0.0), (forward_s or {}).get(rank, 0.02), copy_s, update_s
        return _program(durations_s[rank], layout, plan, *took_s)

    groups: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        groups[hosts[rank]].append(rank)
    return JobModel(
        ranks=ranks,
        hosts=hosts,
        processors=tuple(
            Processors(name=f"the processors of host{host}", capacity=capacity, ranks=tuple(mine))
            for host, mine in groups.items()
        ),
        buffers=(buffer,),
        links={route: link} if link is not None else {},
        link=link_server(link) if link is not None else None,
        iterations=(
            Iteration(programs={rank: program(rank) for rank in ranks}, operations=tuple(map(operation, plan.units))),
        )
        * iterations,
    )


def _program(
    durations_s: Sequence[float],
    layout: GradientLayout,
    plan: CommPlan,
    data_s: float,
    forward_s: float,
    copy_s: float,
    update_s: float,
) -> Program:
    found = [
        ThreadInterval(Activity.DATA, Phase.DATA, data_s, "next", computes=False),
        ThreadInterval(Activity.COMPUTE, Phase.FORWARD, forward_s, "forward"),
    ]
    for index, seconds in enumerate(durations_s):
        found.append(
            ThreadInterval(Activity.COMPUTE, Phase.BACKWARD, seconds, f"backward {index}", ready=((0, index),))
        )
        left = [(0, unit.start, unit.stop) for unit in plan.units if unit.stop == layout.offsets[index + 1]]
        found += [
            ThreadInterval(Activity.COPY, Phase.BACKWARD, copy_s, "copy gradients", issues=(key,)) for key in left
        ]
    last = {unit.stream: (0, unit.start, unit.stop) for unit in plan.units}
    waits = tuple((key, 0.0) for key in last.values())
    return (
        *found,
        ThreadInterval(Activity.COMPUTE, Phase.BACKWARD, 0.0, waits=waits),
        ThreadInterval(Activity.COMPUTE, Phase.UPDATE, update_s, "step"),
    )


def record(
    job: JobModel, *, offsets_s: Mapping[int, float] | None = None, detail: Detail = Detail.OPERATORS
) -> Recording:
    """Return the recording that the profiler would make of a job. Rank r's clock is `offsets_s[r]` behind the job's."""
    played = replay(global_graph(job))
    nodes, numbers = played.graph.nodes, list(range(len(job.iterations)))
    units = {
        (node.iteration, node.name): (played.start_s[place], played.end_s[place])
        for place, node in enumerate(nodes)
        if node.rank < 0
    }
    (buffer,) = job.buffers
    ranks = {}
    for rank in job.ranks:
        mine = [place for place, node in enumerate(nodes) if node.rank == rank]
        shift = (offsets_s or {}).get(rank, 0.0)
        now_s = played.end_s[mine[0]]
        position, iterations, keys = 1, [], dict[ModuleKey, int]()
        for number in numbers:
            begin_s, operators, copies, ready, issued = now_s, [], [], [], []
            spans: dict[Phase, list[float]] = {}
            for piece in job.iterations[number].programs[rank]:
                place = mine[position]
                position += 1
                start_s, end_s = played.start_s[place], played.end_s[place]
                spans.setdefault(piece.phase, [now_s, 0.0])[1] = end_s
                if piece.activity is Activity.COPY:
                    copies.append(Copy(begin_s=start_s, end_s=end_s, n_gradients=1))
                elif piece.name:
                    module = -1 if piece.module is None else keys.setdefault(piece.module, len(keys))
                    operators.append(Operator(piece.name, 0, start_s, end_s, piece.phase, module=module))
                ready += [ReadyGradient(0, index, end_s) for _, index in piece.ready]
                issued += [(key, end_s) for key in piece.issues]
                now_s = end_s
            recorded_units = []
            for (_, start, stop), issue_s in issued:
                unit = next(unit for unit in buffer.plan.units if unit.start == start)
                name = buffer.layout.describe(start, stop)
                done_s = units[number, name][1]
                route = (buffer.plan.transport, unit.algorithm)
                recorded_units.append(RecordedUnit(number, 0, start, stop, route, unit.stream, issue_s, None, done_s))
            iterations.append(
                RecordedIteration(
                    number=number,
                    begin_s=begin_s,
                    end_s=now_s,
                    spans=tuple(PhaseSpan(phase, *span) for phase, span in spans.items()),
                    operators=tuple(operators) if detail is Detail.OPERATORS else (),
                    ready=tuple(ready),
                    copies=tuple(copies),
                    units=tuple(recorded_units),
                    beside_s=sum(one.processor_s * one.busy for one in job.iterations[number].operations),
                )
            )
        own = RankRecording(
            rank=rank,
            job="made",
            model="made",
            detail=detail,
            offset_s=shift,
            round_trip_s=1e-4,
            lanes=("main",),
            iterations=tuple(iterations),
            modules=tuple(Module(name=name, kind="Layer", root=root) for root, name in keys),
        )
        ranks[rank] = shifted(own, by_s=-shift)
    place_of = {rank: group for group in job.processors for rank in group.ranks}
    placement = tuple(
        Placement(
            rank=rank,
            host=job.hosts[rank],
            node=job.hosts[rank],
            host_name=place_of[rank].name.removeprefix("the processors of "),
            clock=place_of[rank].name,
            processors=tuple(range(int(place_of[rank].capacity))),
            host_processors=int(place_of[rank].capacity),
            quota=None,
            threads=1,
        )
        for rank in job.ranks
    )
    record = JobInfo(
        job="made", n_iterations=len(numbers), placement=placement, buffers=job.buffers, links=dict(job.links)
    )
    return Recording(job=record, ranks=ranks)


def without(recording: Recording, rank: int) -> Recording:
    """Return the recording without one rank."""
    return replace(recording, ranks={number: one for number, one in recording.ranks.items() if number != rank})


def written(folder: Path, recording: Recording) -> Path:
    """Write a recording to a folder, and return the folder."""
    write_job(folder, recording.job)
    for rank in recording.ranks.values():
        write_rank(folder, rank)
    return folder
