"""Shortcuts to replay small jobs made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fakes.played_jobs import made_job, plan_of

from sirtaki.analysis.global_graph import MeanStepTimes, global_graph, replayed
from sirtaki.analysis.job_model import JobModel
from sirtaki.autotune.model.replayer import Replay, replay
from sirtaki.measures import LinkModel

SIZES = (1000, 3000, 2000, 500)
DURATIONS = (0.02, 0.01, 0.03, 0.02)
LINK = LinkModel(alpha_s=0.002, throughput=(1e5, 1.6e5, 2e5), host_s=0.003)


def played(job: JobModel) -> Replay:
    return replay(global_graph(job))


def times(job: JobModel) -> MeanStepTimes:
    return replayed(played(job))


def over_a_link(*, link: LinkModel = LINK, streams: int = 2, **options: Any) -> JobModel:
    """Return a small job with one rank per host. `options` are those of `small_job`."""
    return small_job(link=link, streams=streams, **options)


def on_one_host(*, seconds_per_byte: float = 2e-6, **options: Any) -> JobModel:
    """Return a small job on one host. `options` are those of `small_job`."""
    return small_job(seconds_per_byte=seconds_per_byte, **options)


def small_job(
    *,
    ranks: int = 2,
    slow: Mapping[int, float] = MappingProxyType({}),
    durations_s: Mapping[int, Sequence[float]] | None = None,
    cuts: Sequence[int] = (1, 2, 4),
    streams: int = 1,
    iterations: int = 2,
    **options: Any,
) -> JobModel:
    """Return a job of four gradients.

    Args:
        ranks: number of ranks.
        slow: factor on the duration of a rank's backward pass, by rank.
        durations_s: durations of each rank's gradients, instead of the default ones.
        cuts, streams: see `plan_of`.
        iterations: number of iterations.
        options: further arguments of `made_job`.
    """
    usual_s = {rank: [slow.get(rank, 1.0) * seconds for seconds in DURATIONS] for rank in range(ranks)}
    plan = plan_of(SIZES, cuts, streams=streams)
    return made_job(durations_s=durations_s or usual_s, sizes=SIZES, plan=plan, iterations=iterations, **options)
