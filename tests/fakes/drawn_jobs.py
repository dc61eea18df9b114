"""Random job models: numbers of gradients, links that one stream fills or does not fill, and stragglers."""

from __future__ import annotations

import random
from dataclasses import replace

from fakes.played_jobs import made_job, plan_of

from sirtaki.analysis.job_model import JobModel
from sirtaki.comm.plan import TransportKind
from sirtaki.measures import LinkModel


def drawn_job(seed: int, *, gradients: int | None = None, ranks: int | None = None) -> JobModel:
    rng = random.Random(seed)
    count = gradients or rng.randint(4, 12)
    sizes = [rng.choice([500, 2000, 10_000, 40_000, 100_000]) for _ in range(count)]
    ranks = ranks or rng.randint(2, 4)
    durations_s = [rng.uniform(0.001, 0.01) for _ in range(count)]
    straggler = rng.choice([None, 1])
    link = None
    if rng.random() < 0.75:
        growth = rng.choice([(1.0,), (1.0, 1.5, 1.6), (1.0, 1.9, 2.7, 3.5)])
        link = LinkModel(
            alpha_s=rng.choice([1e-4, 1e-3, 5e-3]),
            throughput=tuple(1e7 * times for times in growth),
            host_s=rng.choice([0.0, 2e-4]),
        )
    cuts = sorted({*rng.sample(range(1, count), min(3, count - 1)), count})
    plan = plan_of(sizes, cuts, streams=rng.choice([1, 2]))
    return made_job(
        durations_s={
            rank: [(1.3 if rank == straggler else 1.0) * seconds for seconds in durations_s] for rank in range(ranks)
        },
        sizes=sizes,
        plan=plan if link is not None else replace(plan, transport=TransportKind.SHARED_MEMORY),
        link=link,
        seconds_per_byte=rng.choice([1e-8, 1e-7]),
        hosts=None if link is None or ranks == 2 else {rank: rank // 2 * 2 for rank in range(ranks)},
        capacity=rng.choice([2.0, 64.0]),
        copy_s=1e-4,
        iterations=2,
    )
