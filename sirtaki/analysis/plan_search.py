"""Search for a faster communication plan of a recorded job.

Plans are compared by their step times in a replay (simulation). Some plans divide the flat buffer (contiguous
gradients) evenly. Planners (algorithms that compute a plan) propose the others.

The search uses three ideas of section 5 of dPRO (Hu et al., 2022): evaluation by replay, coarsening of the dependency
graph, and symmetry (only one of several equal ranks is replayed). One of the planners, `dpro`, follows the critical
path as dPRO does. The division of a compiled model into parts (`what_if.in_parts`) corresponds to dPRO's operator
fusion.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sirtaki.autotune.arms.planners import make_planners
from sirtaki.autotune.knobs import Cut, Knobs, KnobSpace
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.replayer import Phase, SharedHost
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import TransportKind
from sirtaki.engine.tuning.plans import STREAM_COUNTS, GivenPlan, plans_for
from sirtaki.errors import ConfigError, PlanError, ReplayError
from sirtaki.measures import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES, LinkModel

from .global_graph import Part, alone_s, coarse, mean_iteration, parts, play, replayed, symmetric
from .job_model import JobModel
from .recording import Buffer
from .what_if import (
    WORTH_A_LINE,
    Answer,
    Baseline,
    best_part_bytes,
    compiled_backwards,
    in_parts,
    in_words,
    line_of_code,
    plan_refusal,
    unit_cost,
    with_knobs,
    with_less_traffic,
    with_plans,
)

SEARCH_LIMIT_S = 60.0

MAX_UNITS, OCTAVE = 256, 2
"""Largest number of units (buckets) into which the search divides the gradients evenly, and ratio between two
successive unit sizes that it tries."""

FEW_RANKS = 8
TOLERANCES = (0.02, 0.05, 0.1, 0.2)
"""Largest differences between ranks, as fractions of the iteration time, up to which ranks count as equal, so that only
one of them is replayed. The next larger one is used only if more than `FEW_RANKS` ranks remain."""

STREAMS_ON_ONE_HOST = 4
"""Largest number of streams (parallel connections) that is tried for a job on one host, because the shared-memory
transport has no more."""

INDIFFERENCE = 0.01
"""A simpler plan is preferred if it is slower than the fastest one by at most this fraction of the step time, because a
replay (simulation) cannot predict such small differences.
"""

WORTH_A_CHANGE = 0.001
"""A new communication plan is preferred to the recorded one only for a predicted gain of at least this fraction of the
step time.
"""

MAX_RIVALS = 2
"""Maximum number of reported communication plans whose predicted step time does not differ significantly from the best
plan's.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """A change of the training script that the user must make in addition to using the communication plan.

    Attributes:
        words: description of the change for users.
        line: line of code that makes the change.
        apply: maps the model of a job to the model with the change.
    """

    words: str
    line: str
    apply: Callable[[JobModel], JobModel]


BF16 = Extra(
    words="gradients are sent as bf16, in half the bytes",
    line="hvd.DistributedOptimizer(..., compression=hvd.Compression.bf16)",
    apply=partial(with_less_traffic, factor=0.5),
)
"""Compression of gradients to bf16. The time for the conversion is unknown and is not counted."""

CHANGES_NUMBERS = {"bf16": BF16}
"""Changes of the training script that alter the results of training, by name. The search uses a change only if the user
allows it by this name."""


def recorded_knobs_of(buffer: Buffer) -> Knobs:
    """Return the knobs (tuned settings) of a recorded flat buffer (of contiguous gradients).

    They have no number of GPU threads, so that the transport chooses it.
    """
    plan, knobs = buffer.plan, buffer.knobs
    even = Knobs(
        unit_bytes=knobs.unit_bytes,
        streams=plan.streams,
        transport=plan.transport,
        algorithm=plan.units[0].algorithm,
    )
    if buffer.is_cut_evenly:
        return even
    typical = int(statistics.median(unit.numel for unit in plan.units)) * buffer.layout.itemsize_bytes
    cuts = tuple(Cut(stop=unit.stop, stream=unit.stream) for unit in plan.units)
    return even.but(unit_bytes=min(max(typical, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES), cuts=cuts)


class PlanSearch:
    """Search for the knobs (tuned settings of the communication plan) with the shortest step time in a replay
    (simulation).

    Attributes:
        buffers: flat buffers (contiguous gradients) of the optimizer with most bytes of gradients. Planners (algorithms
            that compute a plan) divide the first buffer; the other buffers are divided evenly.
        recorded: knobs of the plan that the recorded job used.
        small: smaller model of the job, which is replayed for each proposal: one mean iteration, and one rank for each
            group of equal ranks.
        routes: routes (transport and algorithm) to try: those whose cost is known and that no environment variable
            excludes.
        streams: numbers of streams (parallel communicators) to try, ascending.
        step_s: replayed step time, by knobs; infinite if the knobs do not fit or cannot be predicted.
        by: name of the planner that first proposed the knobs, by knobs; "" for even divisions and the recorded knobs.
        in_time: True if all proposals were replayed within the time limit.
        refused: number of proposals whose step time cannot be predicted, by reason.
    """

    def __init__(self, job: JobModel, settings: Mapping[str, str], extras: tuple[Extra, ...] = ()) -> None:
        """Build the smaller model of the job (`small`), which replays (simulations) use, and the search space.

        Args:
            job: recorded job.
            settings: environment variables of the recorded job. Settings that one of them fixes are not varied.
            extras: changes of the training script that are applied together with every plan.

        Raises:
            ReplayError: no gradients were exchanged, or the cost of the recorded route (transport, algorithm) is
                unknown.
        """
        if not job.buffers:
            raise ReplayError(
                "the ranks exchanged no gradients while the job was recorded, so there is no communication plan "
                "(buckets and transport) to improve; record a job of at least two ranks whose gradients Sirtaki reduces"
            )
        total = Counter[tuple[int, int]]()
        for buffer in job.buffers:
            total[buffer.reducer] += buffer.layout.total_bytes
        largest = max(total, key=lambda reducer: total[reducer])
        self.buffers = tuple(buffer for buffer in job.buffers if buffer.reducer == largest)
        self.recorded, self._job, self._extras = recorded_knobs_of(self.buffers[0]), job, extras
        mean = coarse(mean_iteration(job), plan_is_fixed=False)
        for tolerance in TOLERANCES:
            self.small = symmetric(mean, tolerance=tolerance)
            if len(self.small.ranks) <= FEW_RANKS:
                break
        transport, algorithm = settings.get("SIRTAKI_TRANSPORT"), settings.get("SIRTAKI_ALGORITHM")
        now = self.recorded.route
        used = [one.route for one in job.units if one.route is not None]
        self.routes = tuple(
            route
            for route in dict.fromkeys([now, *used, *job.links])
            if transport in (None, route[0].value) and algorithm in (None, route[1].value)
        ) or (now,)
        self._costs = {route: unit_cost(job, route, job.ranks) for route in {now, *self.routes}}
        one_host = not job.crosses_hosts(self.buffers[0].ranks)
        most = STREAMS_ON_ONE_HOST if one_host and transport in (None, TransportKind.SHARED_MEMORY.value) else 24
        fixed = settings.get("SIRTAKI_STREAMS", "")
        self.streams = (int(fixed),) if fixed.isdecimal() else tuple(n for n in STREAM_COUNTS if n <= most)
        self.step_s: dict[Knobs, float] = {}
        self.by: dict[Knobs, str] = {}
        self.in_time = True
        self.refused = Counter[str]()

    def run(self, *, limit_s: float = SEARCH_LIMIT_S, least_bytes: int = SMALLEST_UNIT_BYTES) -> Knobs:
        """Replay (simulate) the job with all proposed knobs (tuned settings), and return the simplest knobs whose step
        time is within `INDIFFERENCE` of the shortest.

        Args:
            limit_s: time limit in seconds. If it is reached, only the proposals that were replayed before are compared.
            least_bytes: smallest unit (bucket) size that is tried for even divisions.
        """
        until_s = time.monotonic() + limit_s
        for name, knobs in self._proposals(least_bytes):
            if time.monotonic() > until_s:
                self.in_time = False
                break
            if knobs not in self.step_s:
                self.by[knobs] = name
                self.step_s[knobs] = math.inf
                with suppress(PlanError, ReplayError):  # The settings do not fit. Leave their step time infinite.
                    planned = self.planned(knobs)
                    why = plan_refusal(self._job, planned.plans)
                    if why is None or knobs == self.recorded:
                        self.step_s[knobs] = replayed(play(planned)).iteration_s
                    else:
                        self.refused[why] += 1
        least_s = min(self.step_s.values(), default=math.inf)
        near = [knobs for knobs, step_s in self.step_s.items() if step_s <= (1 + INDIFFERENCE) * least_s]
        return min(
            near or [self.recorded],
            key=lambda one: (one.streams, one.cuts is not None, self._units(one), self.step_s.get(one, math.inf)),
        )

    def planned(self, knobs: Knobs, *, whole: bool = False) -> JobModel:
        """Return a model of the job with these knobs (tuned settings) and with the changes in `extras`.

        It is derived from the smaller model `small`, or from that of the complete job if `whole`.

        Raises:
            PlanError: the boundaries of units (buckets) in the knobs do not fit the buffer.
            ReplayError: the cost of the route (transport, algorithm) is unknown, or the recording lacks the times at
                which gradients were ready.
        """
        plans = plans_for(knobs, [buffer.layout for buffer in self.buffers])
        numbers = [buffer.number for buffer in self.buffers]
        job = with_plans(
            self._job if whole else self.small,
            dict(zip(numbers, plans, strict=True)),
            costs=None if whole else self._costs,
        )
        for extra in self._extras:
            job = extra.apply(job)
        return job

    def rivals(self, best: Knobs) -> list[Knobs]:
        """Return the fastest knobs (tuned settings) of each kind other than the kind of `best`, by ascending step time.

        Knobs are of one kind if they have the same route (transport and algorithm), the same number of streams, and
        about the same number of units (buckets).
        """
        fastest = dict[Hashable, Knobs]()
        for knobs in sorted(self.step_s, key=lambda one: self.step_s[one]):
            if knobs != self.recorded and math.isfinite(self.step_s[knobs]):
                fastest.setdefault(self._kind(knobs), knobs)
        fastest.pop(self._kind(best), None)
        return list(fastest.values())[:MAX_RIVALS]

    def _kind(self, knobs: Knobs) -> Hashable:
        return knobs.route, knobs.streams, self._units(knobs).bit_length()

    def _units(self, knobs: Knobs) -> int:
        return len(knobs.cuts or ()) or -(-self.buffers[0].layout.total_bytes // knobs.unit_bytes)

    def _proposals(self, least_bytes: int) -> Iterator[tuple[str, Knobs]]:
        total = self.buffers[0].layout.total_bytes
        yield "", self.recorded
        for transport, algorithm in self.routes:
            for streams in self.streams:
                unit_bytes = max(least_bytes, 1 << (total // MAX_UNITS).bit_length())
                while unit_bytes < OCTAVE * total:
                    yield "", Knobs(unit_bytes=unit_bytes, streams=streams, transport=transport, algorithm=algorithm)
                    unit_bytes *= OCTAVE
        space = KnobSpace(routes=self.routes, streams=self.streams)
        for planner in make_planners(space=space, model=self._model()):
            yield from ((planner.name, one.knobs) for one in planner.ask(len(self.routes)))

    def _model(self) -> PlanningModel:
        """Return the input of planners (algorithms that compute a plan): the gradients of the first flat buffer, when
        each is ready, and the cost of units (buckets), with the values that replays (simulations) use.
        """
        buffer, job = self.buffers[0], self.small
        end_s, backward_s = dict[int, float](), 0.0
        for program in job.iterations[0].programs.values():
            now_s = 0.0
            for piece in program:
                now_s += piece.seconds if piece.phase is Phase.BACKWARD else 0.0
                end_s |= {i: max(now_s, end_s.get(i, 0.0)) for number, i in piece.ready if number == buffer.number}
            backward_s = max(backward_s, now_s)
        # The layout ends with flags, which are no gradients and have no time. They are sent with the last gradient.
        last_s = max(end_s.values(), default=0.0)
        ready_s = tuple(end_s.get(index, last_s) for index in range(len(buffer.layout.sizes)))
        totals = (1.0,) if job.link is None else job.link.totals
        links = {
            route: LinkModel(
                alpha_s=cost.startup_s,
                throughput=tuple(total / max(cost.s_per_byte, 1e-15) for total in totals),
                host_s=cost.host_s,
                busy=cost.busy,
            )
            for route, cost in self._costs.items()
        }
        group = self._job.processors[0]
        host = SharedHost(ranks=len(self._job.ranks), processors=group.capacity, threads=group.threads)
        profile = Profile(ready_s=ready_s, compute_s=backward_s)
        return PlanningModel(
            layout=buffer.layout, profile=profile, links=links, host=host if job.link is None else None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedPlan:
    """A communication plan with its predicted step time.

    Attributes:
        knobs: tuned settings of which the plan consists.
        plan: content of the plan file for the next job.
        by: name of the planner (algorithm) that proposed the plan; "" = an even division or the recorded plan.
        extras: changes of the training script that the user must make in addition.
        answer: predicted step time, by a replay (simulation) of the complete job.
        parts: causes of the predicted step time, with the part that each explains.
    """

    knobs: Knobs
    plan: GivenPlan
    by: str
    extras: tuple[Extra, ...]
    answer: Answer
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """Result of a search for a faster communication plan.

    Attributes:
        recorded_knobs: knobs (tuned settings) of the plan that the recorded job used.
        before: replay (simulation) of the recorded job.
        parts: causes of the step time of the recorded job, with the part that each explains.
        without_communication_s: step time without any communication, which no plan can beat.
        best: fastest plan; the recorded plan if no plan is faster.
        rivals: plans whose step time does not differ significantly from the best.
        replays: number of replayed proposals.
        in_time: True if all proposals were replayed within the time limit.
        refused: number of proposals whose step time cannot be predicted, by reason.
        n_ranks: number of ranks in each replay of the search.
        search_s: duration of the search in seconds.
        plan_alone: predicted step time with the best plan for an undivided model; None unless `best` divides the
            compiled model into parts.
    """

    recorded_knobs: Knobs
    before: Baseline
    parts: tuple[Part, ...]
    without_communication_s: float
    best: ProposedPlan
    rivals: tuple[ProposedPlan, ...]
    replays: int
    in_time: bool
    refused: Mapping[str, int]
    n_ranks: int
    search_s: float
    plan_alone: Answer | None = None

    @property
    def gain(self) -> float:
        """Return the fraction of the step time that the best plan is predicted to save."""
        return self.best.answer.gain

    @property
    def is_faster(self) -> bool:
        """Return whether the best plan is predicted to be faster than the recorded one."""
        return self.gain > WORTH_A_CHANGE


def optimize(before: Baseline, *, limit_s: float = SEARCH_LIMIT_S, **options: Any) -> SearchOutcome:
    """Search for the fastest communication plan. Divide a compiled model into parts if this saves enough time to
    justify a change of the training script.

    The division corresponds to the operator fusion of dPRO (Hu et al., 2022): a model compiled as a whole has all
    operators fused, and in parts fewer. One search runs for the undivided model. Up to two more searches run for the
    part sizes that are best with the recorded plan and with the plan that the first search found.

    Args:
        before: replay of the recorded job.
        limit_s: time limit for all searches together.
        options: further arguments of `planned`.

    Raises:
        ReplayError: no gradients were exchanged, or the recording lacks the times at which gradients were ready.
        ConfigError: `allowed` contains an unknown name.
    """
    job = before.job
    whole = planned(before, limit_s=limit_s, **options)
    if not compiled_backwards(job):
        return whole
    best, spent_s = _in_parts(whole, 0), whole.search_s
    for size in dict.fromkeys(best_part_bytes(one) for one in (job, with_knobs(job, whole.best.knobs))):
        if size is not None:
            early = planned(before, part_bytes=size, limit_s=max(0.0, limit_s - spent_s), **options)
            spent_s += early.search_s
            worth_it = WORTH_A_LINE if best.best.plan.part_bytes == 0 else INDIFFERENCE
            if early.best.answer.times.iteration_s <= (1 - worth_it) * best.best.answer.times.iteration_s:
                best = replace(_in_parts(early, size), plan_alone=whole.best.answer)
    return replace(best, search_s=spent_s)


def _in_parts(outcome: SearchOutcome, part_bytes: int) -> SearchOutcome:
    """Return a copy of the search result, in whose plans the part size of the compiled model is set to `part_bytes`."""

    def with_part_bytes(one: ProposedPlan) -> ProposedPlan:
        return replace(one, plan=replace(one.plan, part_bytes=part_bytes))

    return replace(outcome, best=with_part_bytes(outcome.best), rivals=tuple(map(with_part_bytes, outcome.rivals)))


def planned(
    before: Baseline,
    *,
    part_bytes: int | None = None,
    settings: Mapping[str, str] | None = None,
    allowed: Collection[str] = (),
    least_bytes: int = SMALLEST_UNIT_BYTES,
    limit_s: float = SEARCH_LIMIT_S,
) -> SearchOutcome:
    """Search for the fastest communication plan, with one part size of the compiled model. Replay (simulate) the best
    plan with all ranks and iterations.

    Args:
        before: replay of the recorded job.
        part_bytes: bytes of gradients in each part of a compiled model; None = the model is not divided.
        settings: environment variables of the recorded job. The search does not vary a setting that one of them fixes.
        allowed: names of those changes of training results (`CHANGES_NUMBERS`) that the user allows.
        least_bytes: smallest unit (bucket) size that is tried for even divisions.
        limit_s: time limit of the search in seconds.

    Raises:
        ReplayError: no gradients were exchanged, or the times of ready gradients are missing.
        ConfigError: `allowed` contains an unknown name.
    """
    if unknown := sorted({*allowed} - {*CHANGES_NUMBERS}):
        raise ConfigError(f"the value of --allow must be one of {', '.join(CHANGES_NUMBERS)}, found {unknown[0]!r}")
    job, early, begin_s = before.job, tuple[Extra, ...](), time.monotonic()
    if part_bytes is not None:
        apply = partial(in_parts, part_bytes=part_bytes)
        early = (Extra(words=in_words(job, part_bytes), line=line_of_code(part_bytes), apply=apply),)
        job = apply(job)
    is_float32 = all(buffer.layout.dtype == "float32" for buffer in job.buffers)
    late = tuple(CHANGES_NUMBERS[name] for name in dict.fromkeys(allowed)) if is_float32 else ()
    search = PlanSearch(job, settings or {}, late)
    fastest = search.run(limit_s=limit_s, least_bytes=least_bytes)
    search_s = time.monotonic() - begin_s

    def proposal(knobs: Knobs) -> ProposedPlan:
        changed = search.planned(knobs, whole=True)
        return ProposedPlan(
            knobs=knobs,
            plan=GivenPlan(
                source="",
                knobs=knobs,
                ranks=len(search.buffers[0].ranks),
                sizes=tuple(buffer.layout.sizes for buffer in search.buffers),
            ),
            by=search.by.get(knobs, ""),
            extras=(*early, *late),
            answer=before.answer(knobs.describe(), changed, replanned=True),
            parts=parts(play(changed)),
        )

    best = proposal(fastest)
    rivals = [one for one in map(proposal, search.rivals(fastest)) if one.answer.overlaps(best.answer)]
    if not best.answer.gain > WORTH_A_CHANGE:
        best, rivals = proposal(search.recorded), []
    replay_before = play(before.job)
    return SearchOutcome(
        recorded_knobs=search.buffers[0].knobs,
        before=before,
        parts=parts(replay_before),
        without_communication_s=alone_s(replay_before)[0],
        best=best,
        rivals=tuple(rivals),
        replays=len(search.step_s) - search.refused.total(),
        in_time=search.in_time,
        refused=search.refused,
        n_ranks=len(search.small.ranks),
        search_s=search_s,
    )
