"""Questions to a job model: another link, more ranks, no straggler, a faster data loader; answers are job models."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from sirtaki.autotune.model.graph import Activity, Phase
from sirtaki.comm.plan import Route, TransportKind
from sirtaki.errors import ReplayError

from .job_model import Iteration, JobModel, Operation, Processors
from .unit_costs import unit_cost

PAYLOAD = 0.95
"""Of a link's rate, what is not headers."""

FILLED = 0.9
"""A single unit that moves at that share of the best rate fills the link."""


def wire_bytes_per_byte(ranks: int) -> float:
    """Bytes on each link for a byte of gradients: a ring's."""
    return 2 * (ranks - 1) / ranks


def link_rate(job: JobModel) -> float | None:
    """Bytes a second that the link carries of gradients with the best number of units at a time; None = no link."""
    route = _link_route(job)
    if job.link is None or route is None:
        return None
    return max(job.link.totals) / unit_cost(job, route, job.ranks).s_per_byte


def with_link(job: JobModel, link_bytes_per_s: float) -> JobModel:
    """Links of another rate between the hosts.

    One that is slower caps what all units get together. One that is faster helps a single unit only if that filled the
    link: else it was its flow that was slow, and more units at a time are needed.

    Raises:
        ReplayError: all ranks are on one host, or the rate is none.
    """
    rate = link_rate(job)
    route = _link_route(job)
    if job.link is None or rate is None or route is None:
        raise ReplayError("all ranks are on one host, so no link between hosts can be faster or slower")
    if not (math.isfinite(link_bytes_per_s) and link_bytes_per_s > 0):
        raise ReplayError(f"a link's rate must be positive, not {link_bytes_per_s}")
    wanted = PAYLOAD * link_bytes_per_s / wire_bytes_per_byte(len(job.ranks))
    totals, alone = job.link.totals, 1 / unit_cost(job, route, job.ranks).s_per_byte
    if alone >= FILLED * rate:
        rates = [wanted / rate * alone * total for total in totals]
    elif wanted <= rate:
        rates = [min(alone * total, wanted) for total in totals]
    else:
        filling = math.ceil(wanted / alone)
        rates = [min(alone * count, wanted) for count in range(1, max(filling, len(totals)) + 1)]
    link = replace(job.link, totals=tuple(one / rates[0] for one in rates))
    return replace(_with_units(job, lambda one: replace(one, link_s=one.link_s * alone / rates[0])), link=link)


def _link_route(job: JobModel) -> Route | None:
    routes = [
        one.route
        for each in job.iterations
        for one in each.operations
        if one.route is not None and job.crosses_hosts(one.ranks)
    ]
    return statistics.mode(routes) if routes else None


def with_ranks(job: JobModel, ranks: int) -> JobModel:
    """As many ranks as given, like those that are there, on as many hosts as it takes.

    Units cost what they cost in a ring of that size: start-up and messages as N − 1, bytes as (N − 1) / N. Through
    shared memory each rank moves as many bytes however many there are. Where nodes are emulated on one machine, more of
    them share its processors.

    Raises:
        ReplayError: fewer than two, or other than a process set of all is reduced.
    """
    if ranks < 2 or len(job.ranks) < 2:
        raise ReplayError(f"a job of {len(job.ranks)} ranks cannot be carried over to {ranks}: two is the least")
    if any(len(buffer.ranks) != len(job.ranks) for buffer in job.buffers):
        raise ReplayError("gradients are averaged in process sets, so it is not known what more ranks would do")
    like = {rank: job.ranks[rank % len(job.ranks)] for rank in range(ranks)}
    hosts, processors = _places(job, like)
    everyone = tuple(like)
    hops = (ranks - 1) / (len(job.ranks) - 1)
    volume = hops * len(job.ranks) / ranks

    def rescaled(one: Operation) -> Operation:
        in_memory = one.route is not None and one.route[0] is TransportKind.SHARED_MEMORY
        return replace(
            one,
            ranks=everyone,
            fixed_s=one.fixed_s * hops,
            host_s=one.host_s * hops,
            link_s=one.link_s * volume,
            processor_s=one.processor_s * (1.0 if in_memory else volume),
        )

    return replace(
        job,
        ranks=everyone,
        hosts=hosts,
        processors=processors,
        buffers=tuple(replace(buffer, ranks=everyone) for buffer in job.buffers),
        iterations=tuple(
            Iteration(
                programs={rank: each.programs[other] for rank, other in like.items()},
                operations=tuple(map(rescaled, each.operations)),
            )
            for each in job.iterations
        ),
        begin_s={rank: job.begin_s.get(other, 0.0) for rank, other in like.items()},
        alike={},
    )


def _places(job: JobModel, like: Mapping[int, int]) -> tuple[dict[int, int], tuple[Processors, ...]]:
    """Hosts and processors of more ranks: those of the ranks that they are like, or others of the kind."""
    one_host, one_machine = len(set(job.hosts.values())) == 1, len(job.processors) == 1
    hosts: dict[int, int] = {}
    machines: dict[tuple[int, int], list[int]] = defaultdict(list)
    first_of: dict[tuple[int, int], int] = {}
    for rank, other in like.items():
        turn = rank // len(job.ranks)
        hosts[rank] = 0 if one_host else first_of.setdefault((turn, job.hosts[other]), rank)
        machines[0 if one_machine else turn, job.processors_of(other)].append(rank)
    processors = tuple(replace(job.processors[place], ranks=tuple(mine)) for (_, place), mine in machines.items())
    return hosts, processors


def without_stragglers(job: JobModel) -> JobModel:
    """No rank takes longer on the whole for a phase than the median one; how much its iterations differ stays."""
    own_s: dict[Phase, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for each in job.iterations:
        for rank, program in each.programs.items():
            for piece in program:
                own_s[piece.phase][rank] += piece.seconds
    usual_s = {
        phase: statistics.median_low([mine.get(rank, 0.0) for rank in job.ranks]) for phase, mine in own_s.items()
    }

    def factor(rank: int, phase: Phase) -> float:
        mine_s = own_s[phase].get(rank, 0.0)
        return min(1.0, usual_s[phase] / mine_s) if mine_s > 0 else 1.0

    return _with_durations(job, lambda rank, phase, _: factor(rank, phase))


def with_faster_loader(job: JobModel, factor: float) -> JobModel:
    """What ranks wait for data, divided by `factor`; infinite = they never wait.

    Raises:
        ReplayError: it is not positive.
    """
    if not factor > 0:
        raise ReplayError(f"a data loader cannot be {factor} times as fast")
    return _with_durations(job, lambda _rank, _phase, activity: 1 / factor if activity is Activity.DATA else 1.0)


def with_less_traffic(job: JobModel, factor: float) -> JobModel:
    """Gradients travel in so many times the bytes, of which nobody pays for the conversion.

    Raises:
        ReplayError: it is not positive.
    """
    if not factor > 0:
        raise ReplayError(f"gradients cannot travel in {factor} times the bytes")
    return _with_units(
        job,
        lambda one: replace(
            one,
            n_bytes=round(one.n_bytes * factor),
            link_s=one.link_s * factor,
            processor_s=one.processor_s * factor,
        ),
    )


def _with_durations(job: JobModel, factor: Callable[[int, Phase, Activity], float]) -> JobModel:
    iterations = tuple(
        replace(
            each,
            programs={
                rank: tuple(
                    replace(piece, seconds=piece.seconds * factor(rank, piece.phase, piece.activity))
                    for piece in program
                )
                for rank, program in each.programs.items()
            },
        )
        for each in job.iterations
    )
    return replace(job, iterations=iterations)


def _with_units(job: JobModel, changed: Callable[[Operation], Operation]) -> JobModel:
    iterations = tuple(
        replace(
            each,
            operations=tuple(changed(one) if one.activity is Activity.UNIT else one for one in each.operations),
        )
        for each in job.iterations
    )
    return replace(job, iterations=iterations)
