"""A recorded job's best plan as far as the replay can tell: what it is, and what it would bring."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.model.graph import Activity
from sirtaki.autotune.model.replayer import replay
from sirtaki.comm.plan import TransportKind
from sirtaki.engine.given_plan import GivenPlan
from sirtaki.engine.knob_choices import STREAM_COUNTS
from sirtaki.replay.coarsening import coarse
from sirtaki.replay.critical_path import Part, parts
from sirtaki.replay.early_gradients import (
    WORTH_A_LINE,
    best_part_bytes,
    compiled_backwards,
    in_parts,
    in_words,
    line_of_code,
)
from sirtaki.replay.global_graph import global_graph
from sirtaki.replay.job_model import JobModel
from sirtaki.replay.other_plan import with_knobs
from sirtaki.replay.partial import computation_s
from sirtaki.replay.step_times import StepTimes, replayed
from sirtaki.unit_sizes import SMALLEST_UNIT_BYTES

from .change import Candidate, Choices, Extra
from .passes import passes
from .search import Found, Search
from .view import EVERY, Acceleration, Subject, View

SEARCH_LIMIT_S = 60.0

STREAMS_ON_ONE_HOST = 4
"""As many streams as shared memory has, so as many a job on one host may run."""

INDIFFERENCE = 0.01
"""Share of the step that no replay can be sure of; what is simpler is taken if it is longer by no more."""

WORTH_A_CHANGE = 0.001
"""Share of the step; what gains less leaves the recorded plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was found.

    Attributes:
        recorded_knobs: what ran.
        knobs: what to run; equal if nothing is faster.
        plan: the same as a file holds it.
        extras: what else has to be done.
        as_recorded: the step with the recorded units at their recorded times.
        before: the step with the recorded plan at the prices that the search goes by.
        after: the step with what was found.
        parts_before, parts_after: of their critical paths.
        without_communication_s: no plan makes a step shorter than that.
        found: by the search.
        plan_alone: the step with the best plan if the model is not compiled in parts; None where it need not be.
        n_ranks: that were replayed in it.
        search_s: that it took.
    """

    recorded_knobs: Knobs
    knobs: Knobs
    plan: GivenPlan
    extras: tuple[Extra, ...]
    as_recorded: StepTimes
    before: StepTimes
    after: StepTimes
    parts_before: tuple[Part, ...]
    parts_after: tuple[Part, ...]
    without_communication_s: float
    found: Found
    n_ranks: int
    search_s: float
    plan_alone: StepTimes | None = None

    @property
    def gain(self) -> float:
        """Share of the step that is saved."""
        return 1 - self.after.iteration_s / self.before.iteration_s if self.before.iteration_s > 0 else 0.0

    @property
    def price_error(self) -> float:
        """How far the recorded plan, at the search's prices, is from itself as it was recorded."""
        return self.before.iteration_s / self.as_recorded.iteration_s - 1 if self.as_recorded.iteration_s > 0 else 0.0


def optimize(job: JobModel, *, limit_s: float = SEARCH_LIMIT_S, **options: Any) -> Outcome:
    """The best plan, and with it, if that is worth a line of code, the compiled model in parts.

    That is dPRO's operator fusion: what was compiled as a whole is all operators fused, so parts are tried, where
    theorem 1 leaves any. Each size that may be best, under the recorded plan and under the best one for the whole
    model, has a search of its own.

    Args:
        job: that was recorded.
        limit_s: of all searches together.
        options: see `planned`.

    Raises:
        ReplayError: no gradients were exchanged, or when they come is not known.
        ConfigError: a pass is allowed that does not exist.
    """
    whole = planned(job, limit_s=limit_s, **options)
    if not compiled_backwards(job):
        return whole
    best, spent_s = replace(whole, plan=replace(whole.plan, part_bytes=0)), whole.search_s
    sizes = dict.fromkeys(best_part_bytes(one) for one in (job, with_knobs(job, whole.knobs)))
    for size in sizes:
        if size is None:
            continue
        early = _with_parts(job, size, whole, limit_s=max(0.0, limit_s - spent_s), **options)
        spent_s += early.search_s
        worth_it = WORTH_A_LINE if best.plan.part_bytes == 0 else INDIFFERENCE
        if early.after.iteration_s <= (1 - worth_it) * best.after.iteration_s:
            best = early
    return replace(best, search_s=spent_s)


def _with_parts(job: JobModel, part_bytes: int, whole: Outcome, **options: Any) -> Outcome:
    """The best plan for the job in parts, told as a change of the job as it was recorded."""
    found = planned(in_parts(job, part_bytes), **options)
    apply = partial(in_parts, part_bytes=part_bytes)
    extra = Extra(words=in_words(job, part_bytes), line=line_of_code(part_bytes), apply=apply)
    return replace(
        whole,
        knobs=found.knobs,
        plan=replace(found.plan, part_bytes=part_bytes),
        extras=(extra, *found.extras),
        after=found.after,
        parts_after=found.parts_after,
        plan_alone=whole.after,
        found=found.found,
        search_s=found.search_s,
    )


def planned(
    job: JobModel,
    *,
    settings: Mapping[str, str] | None = None,
    allowed: Iterable[str] = (),
    accelerations: frozenset[Acceleration] = EVERY,
    least_bytes: int = SMALLEST_UNIT_BYTES,
    limit_s: float = SEARCH_LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Searches for a plan, and replays the result for all ranks and iterations.

    Args:
        job: that was recorded.
        settings: variables that were in force; what they fix stays.
        allowed: passes that change numbers.
        accelerations: of the search.
        least_bytes: of a part of a tensor.
        limit_s: of the search.
        clock: shows seconds.

    Raises:
        ReplayError: no gradients were exchanged, or when they come is not known.
        ConfigError: a pass is allowed that does not exist.
    """
    subject = Subject.of(job)
    view = View(job, subject, accelerations)
    choices = choices_of(job, subject, settings or {}, least_bytes=least_bytes)
    begin_s = clock()
    found = Search(view, passes(allowed), choices, limit_s=limit_s, indifference=INDIFFERENCE, clock=clock).run()
    search_s = clock() - begin_s
    recorded = Candidate(schedule=subject.recorded)
    before, parts_before, alone_s = _judged(subject.planned(job, recorded))
    after, parts_after, _ = _judged(subject.planned(job, found.candidate))
    best = found.candidate
    if after.iteration_s > (1 - WORTH_A_CHANGE) * before.iteration_s:
        best, after, parts_after = recorded, before, parts_before
    knobs = best.schedule.knobs(subject.layout)
    return Outcome(
        recorded_knobs=subject.buffers[0].knobs,
        knobs=knobs,
        plan=GivenPlan(
            source="",
            knobs=knobs,
            ranks=len(subject.buffers[0].ranks),
            sizes=tuple(buffer.layout.sizes for buffer in subject.buffers),
        ),
        extras=best.extras,
        as_recorded=_judged(job)[0],
        before=before,
        after=after,
        parts_before=parts_before,
        parts_after=parts_after,
        without_communication_s=alone_s,
        found=found,
        n_ranks=view.n_ranks,
        search_s=search_s,
    )


def _judged(job: JobModel) -> tuple[StepTimes, tuple[Part, ...], float]:
    """A step, what it is made of, and what it would be if nothing were exchanged."""
    graph = global_graph(coarse(job))
    played = replay(graph)
    times = replayed(played)
    return times, parts(played), computation_s(graph) / max(1, times.iterations)


def choices_of(job: JobModel, subject: Subject, settings: Mapping[str, str], *, least_bytes: int) -> Choices:
    """What can be chosen: routes of which something is known, and what no variable has fixed."""
    now = subject.recorded.route
    used = {one.route for each in job.iterations for one in each.operations if one.activity is Activity.UNIT}
    known = dict.fromkeys([now, *(route for route in used if route is not None), *job.links])
    transport, algorithm = settings.get("SIRTAKI_TRANSPORT"), settings.get("SIRTAKI_ALGORITHM")
    routes = tuple(
        route for route in known if transport in (None, route[0].value) and algorithm in (None, route[1].value)
    ) or (now,)
    one_host = not job.crosses_hosts(subject.buffers[0].ranks)
    most = STREAMS_ON_ONE_HOST if one_host and transport in (None, TransportKind.SHARED_MEMORY.value) else 24
    fixed = settings.get("SIRTAKI_STREAMS", "")
    counts = (int(fixed),) if fixed.isdecimal() else tuple(n for n in STREAM_COUNTS if n <= most)
    return Choices(routes=routes, streams=counts, least_bytes=least_bytes)
