"""What each single remedy would bring, and what questions of a user come to: replays of changed job models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sirtaki.autotune.knobs import MIB, Knobs
from sirtaki.comm.plan import TransportKind
from sirtaki.errors import PlanError, ReplayError

from .coarsening import coarse, mean_iteration
from .global_graph import global_graph
from .graph import Activity
from .job_model import JobModel
from .other_plan import with_knobs
from .replayer import Replay, replay
from .step_times import StepTimes, replayed
from .what_if import (
    link_rate,
    wire_bytes_per_byte,
    with_faster_loader,
    with_less_traffic,
    with_link,
    without_stragglers,
)

UNIT_BYTES = tuple(MIB * mib for mib in (1, 4, 16, 64))
STREAMS = (1, 2, 4, 8)
WORTH_SAYING = 0.01
"""A remedy that brings less is not mentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question, answered by replay.

    Attributes:
        words: what would be different.
        times: the step then.
        gain: what share of the step it would save; negative where it would take longer.
    """

    words: str
    times: StepTimes
    gain: float


def play(job: JobModel) -> Replay:
    """All its iterations, one behind the other."""
    return replay(global_graph(coarse(job)))


def answer(words: str, job: JobModel, *, before_s: float) -> Answer:
    """Replays a changed job.

    Args:
        words: what was changed.
        job: the result.
        before_s: an iteration without the change.
    """
    times = replayed(play(job))
    return Answer(words=words, times=times, gain=1 - times.iteration_s / before_s if before_s > 0 else 0.0)


def remedies(job: JobModel) -> tuple[Answer, ...]:
    """Each single one that would bring something, the best first."""
    before_s = replayed(play(job)).iteration_s
    found = [answer(words, changed(), before_s=before_s) for words, changed in _remedies(job)]
    return tuple(sorted((one for one in found if one.gain > WORTH_SAYING), key=lambda one: -one.gain))


def _remedies(job: JobModel) -> Iterator[tuple[str, Callable[[], JobModel]]]:
    if len(job.ranks) > 2:
        yield "no rank were slower than most", lambda: without_stragglers(job)
    if any(
        piece.activity is Activity.DATA for each in job.iterations for mine in each.programs.values() for piece in mine
    ):
        yield "no rank waited for data", lambda: with_faster_loader(job, math.inf)
    rate = link_rate(job)
    if rate is not None:
        wire = wire_bytes_per_byte(len(job.ranks)) * rate
        yield "the links were twice as fast", lambda: with_link(job, 2 * wire)
    if any(one.activity is Activity.UNIT for each in job.iterations for one in each.operations):
        yield "gradients travelled in half as many bytes (bf16 for float32)", lambda: with_less_traffic(job, 0.5)
    knobs = best_knobs(job)
    if knobs is not None:
        yield f"units were cut otherwise ({knobs.describe()})", lambda: with_knobs(job, knobs)


def best_knobs(job: JobModel) -> Knobs | None:
    """The fastest of a few unit sizes and numbers of streams, on the route that is used; None if none can be told."""
    if not job.buffers:
        return None
    now = job.buffers[0].knobs
    mean = coarse(mean_iteration(job), settled=False)
    found: dict[Knobs, float] = {}
    for unit_bytes in UNIT_BYTES:
        for streams in STREAMS:
            knobs = replace(now, unit_bytes=unit_bytes, streams=streams, cuts=None)
            try:
                found[knobs] = replayed(play(with_knobs(mean, knobs))).iteration_s
            except (PlanError, ReplayError):
                return None
    return min(found, key=lambda knobs: found[knobs])


def knobs_of(
    job: JobModel, *, unit_bytes: int | None = None, streams: int | None = None, transport: TransportKind | None = None
) -> Knobs:
    """Those of the recording with what is given changed.

    Raises:
        ReplayError: no gradients were exchanged.
        PlanError: a number is not positive.
    """
    if not job.buffers:
        raise ReplayError("no gradients were exchanged, so there is no plan to change")
    now = job.buffers[0].knobs
    return replace(
        now,
        unit_bytes=unit_bytes or now.unit_bytes,
        streams=streams or now.streams,
        transport=transport or now.transport,
        cuts=None if unit_bytes or streams else now.cuts,
    )
