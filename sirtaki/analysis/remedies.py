"""What would help a job, each remedy with what it is predicted to gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from sirtaki.autotune.knobs import MIB, Knobs, format_bytes
from sirtaki.autotune.model.replayer import Activity, Replay, replay
from sirtaki.comm.plan import TransportKind
from sirtaki.errors import PlanError, ReplayError

from .global_graph import StepTimes, coarse, global_graph, mean_iteration, replayed
from .job_model import JobModel
from .what_if import (
    best_part_bytes,
    in_parts,
    in_words,
    line_of_code,
    link_rate,
    wire_bytes_per_byte,
    with_faster_loader,
    with_knobs,
    with_less_traffic,
    with_link,
    with_plans,
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
        is_priced: it has other units, at prices that were fitted to the recorded ones.
    """

    words: str
    times: StepTimes
    gain: float
    is_priced: bool = False

    @property
    def is_worth_saying(self) -> bool:
        """It brings something."""
        return self.gain > WORTH_SAYING


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


def remedies(job: JobModel, *, before_s: float) -> tuple[Answer, ...]:
    """See `single_remedies`: each one that would bring something."""
    return tuple(one for one in single_remedies(job, before_s=before_s) if one.is_worth_saying)


def single_remedies(job: JobModel, *, before_s: float) -> tuple[Answer, ...]:
    """Each single one that can be answered, the best first; some bring nothing.

    Args:
        job: as it was recorded.
        before_s: an iteration of it.
    """
    found = [answer(words, changed(), before_s=before_s) for words, changed in _remedies(job)]
    if (size := None if unanswered(job) else best_part_bytes(job)) is not None:
        words = f"{in_words(job, size)}: {line_of_code(size)}"
        found.append(replace(answer(words, in_parts(job, size), before_s=before_s), is_priced=True))
    for words, knobs in _other_cuts(job):
        found.append(replace(answer(words, with_knobs(job, knobs), before_s=before_s), is_priced=True))
    return tuple(sorted(found, key=lambda one: -one.gain))


def price_error(job: JobModel, *, before_s: float) -> float:
    """How much longer a step is if the recorded units, too, are cut and priced as other ones would be.

    Args:
        job: as it was recorded.
        before_s: an iteration of it.

    Returns:
        A share of the step; 0 where other units cannot be asked for.
    """
    if not job.buffers or unanswered(job) or not before_s > 0:
        return 0.0
    try:
        same = with_plans(job, {buffer.number: buffer.plan for buffer in job.buffers})
    except ReplayError:
        return 0.0
    return replayed(play(same)).iteration_s / before_s - 1


def price_notes(error: float) -> tuple[str, ...]:
    """What `price_error` means for answers, a sentence; none where it is too little to be said."""
    if abs(error) <= WORTH_SAYING:
        return ()
    change = f"{100 * abs(error):.1f} % {'longer' if error > 0 else 'shorter'}"
    return (
        f"priced as other units are, the recorded ones would make a step {change} than it was: what other units are "
        "said to bring may be wrong by as much",
    )


def unanswered(job: JobModel) -> tuple[str, ...]:
    """What cannot be asked, a sentence each."""
    numbers = {buffer.number for buffer in job.buffers}
    for each in job.iterations:
        for program in each.programs.values():
            if numbers - {number for piece in program for number, _ in piece.ready}:
                return (
                    "what other units would bring cannot be told: there is an iteration in which a rank had no "
                    "gradients of its own",
                )
    return ()


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


def _other_cuts(job: JobModel) -> Iterator[tuple[str, Knobs]]:
    """One knob changed, or both."""
    if not job.buffers or unanswered(job):
        return
    now, layout, plan = job.buffers[0].knobs, job.buffers[0].layout, job.buffers[0].plan
    cut = {plan.units}
    others: list[tuple[str, Knobs | None]] = []
    if job.buffers[0].is_cut_evenly:
        # Else units are not of one size, and another number of streams is another plan altogether.
        streams = best_knobs(job, unit_bytes=(now.unit_bytes,), streams=[n for n in STREAMS if n > now.streams])
        size = best_knobs(job, unit_bytes=[n for n in UNIT_BYTES if n != now.unit_bytes], streams=(now.streams,))
        others = [
            ("" if streams is None else f"there were {streams.streams} streams", streams),
            ("" if size is None else f"units were of {format_bytes(size.unit_bytes)}", size),
        ]
    best = best_knobs(job)
    for words, knobs in [*others, ("" if best is None else f"units were cut otherwise ({best.describe()})", best)]:
        if knobs is not None and (units := knobs.to_plan(layout).units) not in cut:
            cut.add(units)
            yield words, knobs


def best_knobs(
    job: JobModel, *, unit_bytes: Sequence[int] = UNIT_BYTES, streams: Sequence[int] = STREAMS
) -> Knobs | None:
    """The fastest of a few unit sizes and numbers of streams, on the route that is used; None if none can be told."""
    if not job.buffers:
        return None
    now = job.buffers[0].knobs
    mean = coarse(mean_iteration(job), settled=False)
    found: dict[Knobs, float] = {}
    for size in unit_bytes:
        for count in streams:
            knobs = replace(now, unit_bytes=size, streams=count, cuts=None)
            try:
                found[knobs] = replayed(play(with_knobs(mean, knobs))).iteration_s
            except (PlanError, ReplayError):
                return None
    return min(found, key=lambda knobs: found[knobs], default=None)


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
