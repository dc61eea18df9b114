"""Daydream's rule, beside the replayer: one rank's operators, and for each gradient bytes ÷ bandwidth on one lane.

After dPRO's section 7.1: communication is one operation for each tensor, one after the other from when it is ready, of
size / bandwidth. No start-up, no units, no other ranks.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence

from sirtaki.autotune.model.graph import Activity, Phase
from sirtaki.errors import ReplayError
from sirtaki.profiler.recording import Buffer

from .histories import Histories, Step
from .history import Stretch
from .job_model import JobModel
from .step_times import StepTimes
from .what_if import link_rate


def daydream(histories: Histories, job: JobModel) -> StepTimes:
    """Its prediction, a mean over ranks and iterations.

    Raises:
        ReplayError: no units were recorded, so no bandwidth is known.
    """
    rate = bandwidth(job)
    found = [_times(step, rank, job.buffers, rate) for step in histories.steps for rank in histories.ranks]
    iteration_s, forward_s, backward_s = (statistics.fmean(times) for times in zip(*found, strict=True))
    return StepTimes(
        iteration_s=iteration_s,
        phases_s={Phase.FORWARD: forward_s, Phase.BACKWARD: backward_s},
        spread_s=0.0,
        iterations=len(histories.steps),
    )


def _times(step: Step, rank: int, buffers: Sequence[Buffer], rate: float) -> tuple[float, float, float]:
    """Iteration, forward and backward pass of one rank."""
    at = _without_waits(step.stretches[rank])
    layouts = {buffer.number: buffer.layout for buffer in buffers}
    sent_s = 0.0
    for moment_s, (buffer, index) in sorted(step.marks[rank].ready):
        layout = layouts[buffer]
        sent_s = max(sent_s, at(moment_s)) + layout.sizes[index] * layout.itemsize_bytes / rate
    whole_s = at(step.stretches[rank][-1].end_s)
    spans = {
        phase: [(at(one.begin_s), at(one.end_s)) for one in step.stretches[rank] if one.phase is phase]
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    backward = spans[Phase.BACKWARD] or [(whole_s, whole_s)]
    exposed_s = max(0.0, sent_s - backward[-1][1])
    forward_s, backward_s = (sum(end_s - begin_s for begin_s, end_s in mine) for mine in spans.values())
    return whole_s + exposed_s, forward_s, backward_s + exposed_s


def _without_waits(stretches: Sequence[Stretch]) -> Callable[[float], float]:
    """From the job's clock to one that begins with these and stands while the rank waits for others."""
    begins_s = [one.begin_s for one in stretches]
    shown_s, now_s = [], 0.0
    for one in stretches:
        shown_s.append(now_s)
        now_s += 0.0 if one.waits else one.end_s - one.begin_s

    def at(moment_s: float) -> float:
        place = max(0, bisect_right(begins_s, moment_s) - 1)
        one = stretches[place]
        return shown_s[place] + (0.0 if one.waits else min(moment_s, one.end_s) - one.begin_s)

    return at


def bandwidth(job: JobModel) -> float:
    """Bytes of gradients a second: the link's best rate, or that of the fastest unit."""
    rate = link_rate(job)
    if rate is not None:
        return rate
    rates = [
        one.n_bytes / one.processor_s
        for each in job.iterations
        for one in each.operations
        if one.activity is Activity.UNIT and one.processor_s > 0
    ]
    if not rates:
        raise ReplayError("no units were recorded, so no bandwidth is known")
    return max(rates)
