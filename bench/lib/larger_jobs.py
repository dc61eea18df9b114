"""Turn the recorded job of a few ranks into a job of many ranks, for `bench.dpro`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from sirtaki.analysis.job_model import Iteration, JobModel, JobOperation
from sirtaki.comm.plan import TransportKind
from sirtaki.errors import ReplayError, require


def with_ranks(job: JobModel, ranks: int) -> JobModel:
    """Return the job with another number of ranks that behave like the recorded ranks, on proportionally many hosts.

    The cost of units (buckets) is scaled as for a ring all-reduce of N ranks: start-up time and number of messages are
    proportional to N − 1, bytes to (N − 1) / N. In shared memory, a rank moves the same bytes for any N. If the
    recorded nodes were emulated on one machine, the additional nodes share the processors of this machine.

    Raises:
        ReplayError: the old or the new number of ranks is below 2, or a subset of the ranks (process set) averages some
            gradients.
    """
    found = len(job.ranks), ranks
    require(min(found) >= 2, "numbers of ranks (recorded, simulated)", "at least 2", found, ReplayError)
    if any(len(buffer.ranks) != len(job.ranks) for buffer in job.buffers):
        raise ReplayError(
            "the step time on another number of ranks cannot be predicted, because the job averages some gradients "
            "only in a process set (a subset of the ranks)"
        )
    like = {rank: job.ranks[rank % len(job.ranks)] for rank in range(ranks)}
    everyone = tuple(like)
    hops = (ranks - 1) / (len(job.ranks) - 1)
    volume = hops * len(job.ranks) / ranks
    # Give each copy of the recorded ranks hosts and machines of its own, unless the recorded job has only one host or
    # machine.
    one_host, one_machine = len(set(job.hosts.values())) == 1, len(job.processors) == 1
    group_of = {rank: place for place, group in enumerate(job.processors) for rank in group.ranks}
    hosts: dict[int, int] = {}
    machines: dict[tuple[int, int], list[int]] = defaultdict(list)
    first_of: dict[tuple[int, int], int] = {}
    for rank, other in like.items():
        turn = rank // len(job.ranks)
        hosts[rank] = 0 if one_host else first_of.setdefault((turn, job.hosts[other]), rank)
        machines[0 if one_machine else turn, group_of[other]].append(rank)

    def rescaled(one: JobOperation) -> JobOperation:
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
        processors=tuple(replace(job.processors[place], ranks=tuple(mine)) for (_, place), mine in machines.items()),
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
