"""The model of a job from its recordings."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sirtaki.autotune.model.replayer import Activity, Server
from sirtaki.measures import LinkModel

from .job_model import Barrier, Histories, Iteration, JobModel, Operation, Processors, pieces
from .recording import Placement

Use = tuple[float, float, float]
"""(begin_s, end_s, as how many jobs it counts)."""


class ShareClock:
    """The clock of a server's jobs: it runs at each one's share, and at 1 while there is none or one."""

    def __init__(self, server: Server, uses: Iterable[Use]) -> None:
        changes: dict[float, float] = defaultdict(float)
        for begin_s, end_s, jobs in uses:
            if end_s > begin_s:
                changes[begin_s] += jobs
                changes[end_s] -= jobs
        self._moments_s, self._shown_s, self._speeds = [0.0], [0.0], [1.0]
        jobs = 0.0
        for moment_s in sorted(changes):
            shown_s = self.at(moment_s)
            jobs += changes[moment_s]
            self._moments_s.append(moment_s)
            self._shown_s.append(shown_s)
            self._speeds.append(server.share(max(1.0, jobs)))

    def at(self, moment_s: float) -> float:
        """What it shows."""
        place = max(0, bisect_right(self._moments_s, moment_s) - 1)
        return self._shown_s[place] + (moment_s - self._moments_s[place]) * self._speeds[place]

    def between(self, begin_s: float, end_s: float) -> float:
        """What a job got done, in seconds of a server of its own."""
        return max(0.0, self.at(end_s) - self.at(begin_s))


TURNS = 20
CLOSE = 1e-4
LEAST_BUSY = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse:
    """Of one machine.

    Attributes:
        clock: of what computes there.
        busy: see `Operation`; 1 where it cannot be told.
    """

    clock: ShareClock
    busy: float


def processor_use(group: Processors, histories: Histories) -> ProcessorUse:
    """What the ranks of this machine did in all recorded iterations."""
    units = [one for step in histories.steps for one in step.barriers if _is_there(one, group, histories)]
    computation = [
        (one.begin_s, one.end_s, float(group.threads))
        for step in histories.steps
        for rank in group.ranks
        for one in step.stretches[rank]
        if one.computes
    ]

    def clock(busy: float) -> ShareClock:
        uses: list[Use] = [(one.begin_s, one.end_s, busy * len(one.ranks)) for one in units]
        return ShareClock(group.server, [*computation, *uses])

    spent_s = _spent_s(group, histories) if units else None
    if spent_s is None:
        return ProcessorUse(clock=clock(1.0), busy=1.0)
    busy = 1.0
    for _ in range(TURNS):
        alone = clock(busy)
        alone_s = sum(len(one.ranks) * alone.between(one.begin_s, one.end_s) for one in units)
        before, busy = busy, min(1.0, max(LEAST_BUSY, spent_s / alone_s)) if alone_s > 0 else 1.0
        if abs(busy - before) <= CLOSE:
            break
    return ProcessorUse(clock=clock(busy), busy=busy)


def _is_there(one: Barrier, group: Processors, histories: Histories) -> bool:
    return one.activity is Activity.UNIT and one.ranks[0] in group.ranks and not histories.crosses_hosts(one)


def _spent_s(group: Processors, histories: Histories) -> float | None:
    """Processor time of communication; None = it was not recorded, or operators use other threads, too."""
    if group.threads > 1:
        return None
    numbers = {step.number for step in histories.steps}
    spent_s = [
        one.beside_s
        for rank in group.ranks
        for one in histories.recording.ranks[rank].iterations
        if one.number in numbers
    ]
    known = [seconds for seconds in spent_s if seconds is not None]
    return sum(known) if len(known) == len(spent_s) else None


LINK = "the link between hosts"


def job_model(histories: Histories) -> JobModel:
    """What the recorded iterations are made of."""
    job, hosts = histories.recording.job, histories.hosts
    processors = _processors([place for place in job.placement if place.rank in hosts])
    across = [
        one
        for step in histories.steps
        for one in step.barriers
        if one.activity is Activity.UNIT and histories.crosses_hosts(one)
    ]
    link = _link(across, histories) if across else None
    used_by = [processor_use(group, histories) for group in processors]
    shares = _Shares(
        histories=histories,
        processors={rank: use for group, use in zip(processors, used_by, strict=True) for rank in group.ranks},
        link=None if link is None else ShareClock(link, [_link_use(one, histories) for one in across]),
    )
    used = {one.key[0] for step in histories.steps for one in step.barriers}
    notes = []
    if across and not any(one.route in job.links for one in across):
        notes.append(
            "the link between hosts was not probed (the job was not tuned), so it is taken for one that a single unit "
            "fills"
        )
    return JobModel(
        ranks=histories.ranks,
        hosts=hosts,
        processors=processors,
        buffers=tuple(
            replace(buffer, ranks=tuple(rank for rank in buffer.ranks if rank in hosts))
            for buffer in job.buffers
            if buffer.number in used
        ),
        links=job.links,
        link=link,
        iterations=tuple(
            Iteration(
                programs={
                    rank: pieces(mine, step.marks[rank], shares.processors[rank].clock.between)
                    for rank, mine in step.stretches.items()
                },
                operations=tuple(map(shares.operation, step.barriers)),
            )
            for step in histories.steps
        ),
        begin_s=histories.begin_s,
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """What of the time between two moments a rank had of its processors, and a unit of the link."""

    histories: Histories
    processors: dict[int, ProcessorUse]
    link: ShareClock | None

    def operation(self, one: Barrier) -> Operation:
        length_s = one.end_s - one.begin_s
        fixed_s = link_s = host_s = processor_s = 0.0
        busy = 1.0
        if one.activity is not Activity.UNIT:
            fixed_s = length_s
        elif self.link is not None and self.histories.crosses_hosts(one):
            fixed_s = _startup_s(one, self.histories)
            link_s = self.link.between(one.begin_s + fixed_s, one.end_s)
            known = _probed(one, self.histories)
            host_s = min(known.host_s, length_s - fixed_s) if known is not None else 0.0
        else:
            use = self.processors[one.ranks[0]]
            processor_s, busy = use.clock.between(one.begin_s, one.end_s), use.busy
        return Operation(
            key=one.key,
            activity=one.activity,
            lane=one.lane,
            ranks=one.ranks,
            n_bytes=one.n_bytes,
            name=one.name,
            route=one.route,
            fixed_s=fixed_s,
            link_s=link_s,
            host_s=host_s,
            processor_s=processor_s,
            busy=busy,
            lag_s=max(one.lags_s.values()),
        )


def _probed(one: Barrier, histories: Histories) -> LinkModel | None:
    return None if one.route is None else histories.recording.job.links.get(one.route)


def _startup_s(one: Barrier, histories: Histories) -> float:
    known = _probed(one, histories)
    return min(known.alpha_s, one.end_s - one.begin_s) if known is not None else 0.0


def _link_use(one: Barrier, histories: Histories) -> Use:
    return one.begin_s + _startup_s(one, histories), one.end_s, 1


def _link(across: Sequence[Barrier], histories: Histories) -> Server:
    """What units between hosts share."""
    known = [probed for one in across if (probed := _probed(one, histories)) is not None]
    if not known:
        return Server(name=LINK, totals=(1.0,), is_link=True)
    return link_server(replace(known[0], throughput=without_dents(known[0].throughput)))


def without_dents(throughput: Sequence[float]) -> tuple[float, ...]:
    """G(n) of probes; what lies below the line between a higher value before it and one behind it is put on that line.

    A link that carries more with fewer units at a time, and with more of them, carries no less between: something else
    kept the machine busy while that was probed. What falls to the end stays.
    """
    found = list(throughput)
    places = range(len(found))
    for place in places:
        before = max(places[: place + 1], key=lambda other: throughput[other])
        behind = max(places[place:], key=lambda other: throughput[other])
        if before < place < behind:
            slope = (throughput[behind] - throughput[before]) / (behind - before)
            found[place] = max(found[place], throughput[before] + slope * (place - before))
    return tuple(found)


def link_server(link: LinkModel) -> Server:
    """The link as it was probed: G(n) / G(1)."""
    alone = link.throughput[0]
    return Server(name=LINK, totals=tuple(rate / alone for rate in link.throughput), is_link=True)


def _processors(places: Sequence[Placement]) -> tuple[Processors, ...]:
    """Of each machine: hosts with one clock are on one."""
    machines: dict[str, list[Placement]] = defaultdict(list)
    for place in places:
        machines[place.clock].append(place)
    groups = []
    for mine in machines.values():
        usable = float(len({number for place in mine for number in place.processors}) or mine[0].host_processors)
        quotas = {place.host: place.quota for place in mine}
        limits = [quota for quota in quotas.values() if quota is not None]
        groups.append(
            Processors(
                name=f"the processors of {mine[0].host_name}",
                capacity=min(usable, sum(limits)) if len(limits) == len(quotas) else usable,
                ranks=tuple(place.rank for place in mine),
                threads=max(1, min(place.threads for place in mine)),
            )
        )
    return tuple(groups)
