"""Short ways to replay jobs made by hand."""

from __future__ import annotations

from fakes.played_jobs import made_job, plan_of

from sirtaki.analysis.global_graph import StepTimes, global_graph, replayed
from sirtaki.analysis.job_model import JobModel
from sirtaki.autotune.model.replayer import Replay, replay
from sirtaki.measures import LinkModel

SIZES = (1000, 3000, 2000, 500)
LINK = LinkModel(alpha_s=0.002, throughput=(1e5, 1.6e5, 2e5), host_s=0.003)


def played(job: JobModel) -> Replay:
    return replay(global_graph(job))


def times(job: JobModel) -> StepTimes:
    return replayed(played(job))


def over_a_link(
    *, cuts: tuple[int, ...] = (1, 2, 4), streams: int = 2, ranks: int = 2, iterations: int = 2
) -> JobModel:
    return made_job(
        durations_s=dict.fromkeys(range(ranks), (0.02, 0.01, 0.03, 0.02)),
        sizes=SIZES,
        plan=plan_of(SIZES, cuts, streams=streams),
        link=LINK,
        iterations=iterations,
    )


def on_one_host(
    *, cuts: tuple[int, ...] = (1, 2, 4), streams: int = 1, ranks: int = 2, capacity: float = 64.0
) -> JobModel:
    return made_job(
        durations_s=dict.fromkeys(range(ranks), (0.02, 0.01, 0.03, 0.02)),
        sizes=SIZES,
        plan=plan_of(SIZES, cuts, streams=streams),
        seconds_per_byte=2e-6,
        capacity=capacity,
        iterations=2,
    )
