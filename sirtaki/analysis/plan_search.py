"""Looks along the critical path for a plan with which a recorded job would be faster (dPRO, section 5)."""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Any, cast

from sirtaki.autotune.knobs import Cut, Knobs
from sirtaki.autotune.model.replayer import ALL_RANKS, Activity, Replay, replay
from sirtaki.comm.plan import GradientLayout, Route, TransportKind
from sirtaki.engine.tuning.plans import STREAM_COUNTS, GivenPlan, plans_for
from sirtaki.errors import ConfigError, PlanError, ReplayError
from sirtaki.measures import LARGEST_UNIT_BYTES, SMALLEST_UNIT_BYTES

from .global_graph import (
    Part,
    coarse,
    computation_s,
    critical_path,
    global_graph,
    mean_iteration,
    parts,
    play,
    replayed,
    symmetric,
)
from .job_model import Iteration, JobModel, Operation
from .recording import Buffer
from .what_if import (
    WORTH_A_LINE,
    Answer,
    Baseline,
    UnitCost,
    best_part_bytes,
    compiled_backwards,
    in_parts,
    in_words,
    line_of_code,
    unit_cost,
    with_knobs,
    with_less_traffic,
    with_plans,
)


def others(group: str, parts: Sequence[str]) -> list[object]:
    """Build what other packages bring by entry point.

    Args:
        group: of the entry points.
        parts: that each one must have.

    Raises:
        ConfigError: one cannot be made, or lacks a part.
    """
    found: list[object] = []
    for point in entry_points(group=group):
        try:
            one: object = point.load()()
        except Exception as err:  # somebody else's code may raise anything
            raise ConfigError(f"the optimizer's pass {point.name!r} could not be built: {err!r}") from err
        missing = [part for part in parts if not hasattr(one, part)]
        if missing:
            raise ConfigError(f"the optimizer's pass {point.name!r} is none: it has no {', '.join(missing)}")
        found.append(one)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Gradients that leave together.

    Attributes:
        stop: element behind its last.
        parts: units that it travels as.
    """

    stop: int
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A way to send one flat buffer; further buffers of the same optimizer are cut evenly.

    Attributes:
        route: of all units.
        streams: that units take in turn.
        unit_bytes: of units where they are even.
        tensors: one behind the other; None = even units.
    """

    route: Route
    streams: int
    unit_bytes: int
    tensors: tuple[Tensor, ...] | None = None

    @classmethod
    def recorded(cls, buffer: Buffer) -> Schedule:
        """Return a recorded buffer's schedule: units take the streams in turn, the transport chooses GPU threads."""
        plan, knobs = buffer.plan, buffer.knobs
        return cls(
            route=(plan.transport, plan.units[0].algorithm),
            streams=plan.streams,
            unit_bytes=knobs.unit_bytes,
            tensors=None if buffer.is_cut_evenly else tuple(Tensor(stop=unit.stop) for unit in plan.units),
        )

    def tensors_of(self, layout: GradientLayout) -> tuple[Tensor, ...]:
        """Its tensors; an even unit is one."""
        if self.tensors is not None:
            return self.tensors
        return tuple(Tensor(stop=unit.stop) for unit in self.knobs(layout).to_plan(layout).units)

    def knobs(self, layout: GradientLayout) -> Knobs:
        """Return the knobs with which a job runs it."""
        even = Knobs(unit_bytes=self.unit_bytes, streams=self.streams, transport=self.route[0], algorithm=self.route[1])
        if self.tensors is None:
            return even
        stops = [stop for _, stop in units_of(self.tensors)]
        cuts = tuple(Cut(stop=stop, stream=number % self.streams) for number, stop in enumerate(stops))
        sizes = [stop - start for start, stop in pairwise((0, *stops))]
        typical = int(statistics.median(sizes)) * layout.itemsize_bytes
        return replace(even, unit_bytes=min(max(typical, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES), cuts=cuts)

    def fused(self, layout: GradientLayout, stop: int) -> Schedule | None:
        """The tensor that ends there and the next one are one tensor; None if no two meet there."""
        tensors = self.tensors_of(layout)
        place = place_of(tensors, stop)
        if place is None or place + 1 == len(tensors):
            return None
        one, other = tensors[place : place + 2]
        return self._with(tensors, place, 2, Tensor(stop=other.stop, parts=max(one.parts, other.parts)))

    def parted(self, layout: GradientLayout, stop: int, parts: int) -> Schedule | None:
        """The tensor that ends there travels as so many units; None if there is no such tensor, or it does so."""
        tensors = self.tensors_of(layout)
        place = place_of(tensors, stop)
        if place is None or tensors[place].parts == parts:
            return None
        return self._with(tensors, place, 1, Tensor(stop=stop, parts=parts))

    def split(self, layout: GradientLayout, stop: int, at: int) -> Schedule | None:
        """The tensor that ends at `stop` is two, of which one ends at `at`; None if it does not reach over that."""
        tensors = self.tensors_of(layout)
        place = place_of(tensors, stop)
        if place is None or not (tensors[place - 1].stop if place else 0) < at < stop:
            return None
        return self._with(tensors, place, 1, Tensor(stop=at), Tensor(stop=stop))

    def _with(self, tensors: tuple[Tensor, ...], place: int, count: int, *new: Tensor) -> Schedule:
        return replace(self, tensors=(*tensors[:place], *new, *tensors[place + count :]))


def place_of(tensors: Sequence[Tensor], stop: int) -> int | None:
    """The place of the tensor that ends there."""
    place = bisect_left(tensors, stop, key=lambda one: one.stop)
    return place if place < len(tensors) and tensors[place].stop == stop else None


def units_of(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """(place of the tensor, end) of each unit, none of which is empty."""
    start = 0
    for place, tensor in enumerate(tensors):
        size = tensor.stop - start
        parts = min(tensor.parts, size)
        yield from ((place, start + size * (part + 1) // parts) for part in range(parts))
        start = tensor.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """What is changed besides the plan, which the user has to do.

    Attributes:
        words: such as "bf16 on the wire".
        line: of code that does it.
        apply: the job with it; of a module, so that equal extras are equal.
    """

    words: str
    line: str
    apply: Callable[[JobModel], JobModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """All that is changed."""

    schedule: Schedule
    extras: tuple[Extra, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One proposal.

    Attributes:
        words: what it changes, such as "fuse tensors".
        apply: the candidate with it; None where it does not fit any more.
        alike: changes that are equal in this are worth trying together; None = it stands alone.
    """

    words: str
    apply: Callable[[Candidate], Candidate | None]
    alike: Hashable = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a job can be asked to run.

    Attributes:
        routes: that something is known of.
        streams: how many, ascending.
        least_bytes: of a part of a tensor.
    """

    routes: tuple[Route, ...]
    streams: tuple[int, ...]
    least_bytes: int


FEW_RANKS = 8
TOLERANCES = (0.02, 0.05, 0.1, 0.2)
"""How much ranks that count as alike may differ, more of it where too many would be left."""


class Acceleration(Enum):
    """What makes the search quicker."""

    COARSENING = "coarsening"  # chains are one piece, and gradients that come together start as one tensor
    PARTIAL_REPLAY = "partial-replay"  # what a tensor takes is told by a replay of its units alone
    SYMMETRY = "symmetry"  # ranks that are alike are replayed once, changes that are alike are tried at once


EVERY = frozenset(Acceleration)


class View:
    """What is planned, and a smaller job that is replayed for each candidate.

    Attributes:
        buffers: of the optimizer with the most gradients; the first one is planned unit by unit.
        recorded: how that one travelled.
        accelerations: that are in force.
        small: the smaller job, with the units that were recorded.
        replays: how many graphs have been played, parts of them included.
    """

    def __init__(self, job: JobModel, accelerations: frozenset[Acceleration] = EVERY) -> None:
        """Makes the smaller job.

        Raises:
            ReplayError: no gradients were exchanged.
        """
        if not job.buffers:
            raise ReplayError("no gradients were exchanged, so there is no plan to improve")
        total = Counter[tuple[int, int]]()
        for buffer in job.buffers:
            total[buffer.reducer] += buffer.layout.total_bytes
        largest = max(total, key=lambda reducer: total[reducer])
        self.buffers = tuple(buffer for buffer in job.buffers if buffer.reducer == largest)
        self.layout, self.recorded = self.buffers[0].layout, Schedule.recorded(self.buffers[0])
        self.accelerations, self.replays = accelerations, 0
        self._job, self._costs = job, dict[Route, UnitCost]()
        self._sync_s: dict[tuple[Route, int, int, int], float] = {}
        self.small = mean = mean_iteration(job)
        if Acceleration.COARSENING in accelerations:
            self.small = mean = coarse(mean, settled=False)
        for tolerance in TOLERANCES if Acceleration.SYMMETRY in accelerations else ():
            self.small = symmetric(mean, tolerance=tolerance)
            if len(self.small.ranks) <= FEW_RANKS:
                break

    def cost(self, route: Route) -> UnitCost:
        """Return what units cost on a route, as the whole job shows it.

        Raises:
            ReplayError: nothing is known of it.
        """
        if route not in self._costs:
            self._costs[route] = unit_cost(self._job, route, self._job.ranks)
        return self._costs[route]

    def planned(self, candidate: Candidate, *, whole: bool = False) -> JobModel:
        """The smaller job, or the whole one, with a candidate's units, and whatever else that changes.

        Raises:
            ReplayError: nothing is known of its route.
        """
        plans = plans_for(candidate.schedule.knobs(self.layout), [buffer.layout for buffer in self.buffers])
        numbers = [buffer.number for buffer in self.buffers]
        costs = None if whole else {candidate.schedule.route: self.cost(candidate.schedule.route)}
        job = with_plans(self._job if whole else self.small, dict(zip(numbers, plans, strict=True)), costs=costs)
        for extra in candidate.extras:
            job = extra.apply(job)
        return job

    def play(self, job: JobModel) -> Replay:
        """Replays the smaller job."""
        self.replays += 1
        return play(job) if Acceleration.COARSENING in self.accelerations else replay(global_graph(job))

    def sync_s(self, candidate: Candidate, n_bytes: int, parts: int) -> float:
        """t_sync(s, k): what a tensor takes as so many units, from when they leave until the last one is there."""
        schedule, cost = candidate.schedule, self.cost(candidate.schedule.route)
        ranks = tuple(rank for rank in self.buffers[0].ranks if rank in self.small.ranks)
        units = [
            cost.applied_to(
                Operation(
                    key=(-2, number, number + 1),
                    activity=Activity.UNIT,
                    lane=f"probe {number % schedule.streams}",
                    ranks=ranks,
                    n_bytes=-(-n_bytes // parts),
                    route=schedule.route,
                )
            )
            for number in range(parts)
        ]
        if Acceleration.PARTIAL_REPLAY in self.accelerations:
            key = (schedule.route, schedule.streams, n_bytes, parts)
            if key not in self._sync_s:
                alone = Iteration(programs=dict.fromkeys(self.small.ranks, ()), operations=tuple(units))
                self.replays += 1
                job = replace(self.small, iterations=(alone,), begin_s={})
                self._sync_s[key] = replay(global_graph(job)).total_s
            return self._sync_s[key]
        # The same by a replay of everything, in which nobody waits for these units.
        job = self.planned(candidate)
        (iteration,) = job.iterations
        among_all = replace(iteration, operations=(*iteration.operations, *units))
        played = self.play(replace(job, iterations=(among_all,), begin_s={}))
        first = len(job.ranks) + len(iteration.operations)
        return max(played.end_s[first : first + parts])


class Position:
    """Where the search stands: a candidate, and its replay.

    Attributes:
        candidate: which.
        layout: of the buffer that is planned unit by unit.
        choices: what the job can run.
        tensors: of the candidate.
    """

    def __init__(self, view: View, choices: Choices, candidate: Candidate) -> None:
        """Replays the candidate.

        Raises:
            ReplayError: nothing is known of its route.
        """
        job = view.planned(candidate)
        self._view, self._played = view, view.play(job)
        self.candidate, self.choices, self.layout = candidate, choices, view.layout
        self.tensors: Sequence[Tensor] = candidate.schedule.tensors_of(self.layout)
        places = {one.key: len(job.ranks) + number for number, one in enumerate(job.iterations[0].operations)}
        number, start = view.buffers[0].number, 0
        self._units: list[list[int]] = [[] for _ in self.tensors]
        for tensor, stop in units_of(self.tensors):
            self._units[tensor].append(places[number, start, stop])
            start = stop
        graph = self._played.graph
        self._issued_s = [0.0] * len(graph.nodes)
        for before, after, _ in graph.edges:
            if graph.nodes[before].rank != ALL_RANKS:  # else it is the unit before it on its stream
                self._issued_s[after] = max(self._issued_s[after], self._played.end_s[before])

    def n_bytes(self, tensor: int) -> int:
        """Bytes of a tensor."""
        start = self.tensors[tensor - 1].stop if tensor else 0
        return (self.tensors[tensor].stop - start) * self.layout.itemsize_bytes

    def ready_s(self, tensor: int) -> float:
        """When a tensor's last gradient is there (p^e)."""
        return max(self._issued_s[place] for place in self._units[tensor])

    def end_s(self, tensor: int) -> float:
        """When a tensor is reduced (q^e)."""
        return max(self._played.end_s[place] for place in self._units[tensor])

    def best_parts(self, n_bytes: int) -> tuple[int, float]:
        """k* of a tensor of that size, and t_sync with it."""
        most = max(1, min(self.candidate.schedule.streams, n_bytes // self.choices.least_bytes))
        took_s = {parts: self._view.sync_s(self.candidate, n_bytes, parts) for parts in range(1, most + 1)}
        best = min(took_s, key=lambda parts: (took_s[parts], parts))
        return best, took_s[best]

    @property
    def critical(self) -> list[int]:
        """Tensors on the critical path, and those beside them, in their order."""
        tensor_of = {place: tensor for tensor, places in enumerate(self._units) for place in places}
        visited = {tensor_of[visit.place] for visit in critical_path(self._played) if visit.place in tensor_of}
        beside = {tensor + 1 for tensor in visited if tensor + 1 < len(self.tensors)}
        return sorted(visited | beside)


ENTRY_POINT_GROUP = "sirtaki.optimizer_passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One kind of change; those of other packages are of any class that has the same attributes.

    Attributes:
        name: what users allow it by.
        changes_numbers: training comes out otherwise, so it is used only where it is allowed by name.
        changes: what may help at a tensor that lies on the critical path, or whose neighbour does, by its place.
    """

    name: str
    changes_numbers: bool = False
    changes: Callable[[Position, int], Iterable[Change]]


def _on_schedule(change: Callable[[Schedule], Schedule | None]) -> Callable[[Candidate], Candidate | None]:
    """The change of a candidate that changes its schedule so."""

    def apply(candidate: Candidate) -> Candidate | None:
        schedule = change(candidate.schedule)
        return None if schedule is None else replace(candidate, schedule=schedule)

    return apply


def fuse(position: Position, tensor: int) -> Iterator[Change]:
    """Theorem 2: a tensor joins the one before it where that ends later than it takes to wait for both."""
    if tensor == 0:
        return
    before, own = position.n_bytes(tensor - 1), position.n_bytes(tensor)
    parts, both_s = position.best_parts(before + own)
    _, own_s = position.best_parts(own)
    if position.end_s(tensor - 1) <= position.ready_s(tensor) + both_s - own_s:
        return
    layout, at, stop = position.layout, position.tensors[tensor - 1].stop, position.tensors[tensor].stop

    def fused(schedule: Schedule) -> Schedule | None:
        both = schedule.fused(layout, at)
        return None if both is None else both.parted(layout, stop, parts) or both

    yield Change(words="fuse tensors", apply=_on_schedule(fused), alike=(before, own))


def partition(position: Position, tensor: int) -> Iterator[Change]:
    """A tensor travels as its best number of units (k*), found by grid, or as a whole."""
    n_bytes, now, layout = position.n_bytes(tensor), position.tensors[tensor], position.layout
    best, _ = position.best_parts(n_bytes)
    for n_parts in dict.fromkeys((best, 1)):
        if n_parts != now.parts:
            parted = _on_schedule(partial(Schedule.parted, layout=layout, stop=now.stop, parts=n_parts))
            yield Change(words="partition tensors", apply=parted, alike=(n_bytes, n_parts))


def split(position: Position, tensor: int) -> Iterator[Change]:
    """A tensor of several gradients is cut where one ends, nearest to its middle: what fusion does, undone."""
    stop, layout = position.tensors[tensor].stop, position.layout
    start = position.tensors[tensor - 1].stop if tensor else 0
    inside = layout.offsets[bisect_right(layout.offsets, start) : bisect_left(layout.offsets, stop)]
    if inside:
        middle = min(inside, key=lambda offset: abs(2 * offset - start - stop))
        halves = _on_schedule(partial(Schedule.split, layout=layout, stop=stop, at=middle))
        yield Change(words="split tensors", apply=halves, alike=position.n_bytes(tensor))


def streams(position: Position, _: int) -> Iterator[Change]:
    """Every other number of streams is tried."""
    for count in position.choices.streams:
        yield Change(words="use another number of streams", apply=_on_schedule(partial(replace, streams=count)))


def routes(position: Position, _: int) -> Iterator[Change]:
    """Another transport or algorithm that something is known of."""
    for route in position.choices.routes:
        yield Change(words="take another route", apply=_on_schedule(partial(replace, route=route)))


def _in_half(job: JobModel) -> JobModel:
    return with_less_traffic(job, 0.5)


BF16 = Extra(
    words="gradients travel as bf16, in half the bytes",
    line="hvd.DistributedOptimizer(..., compression=hvd.Compression.bf16)",
    apply=_in_half,
)


def bf16(position: Position, _: int) -> Iterator[Change]:
    """Float32 gradients travel in half the bytes; what converting them costs is not known and not counted."""
    if position.layout.dtype == "float32":
        yield Change(
            words="send bf16",
            apply=lambda candidate: (
                None if BF16 in candidate.extras else replace(candidate, extras=(*candidate.extras, BF16))
            ),
        )


OUR_PASSES = (
    Pass(name="tensor-fusion", changes=fuse),
    Pass(name="tensor-partition", changes=partition),
    Pass(name="tensor-split", changes=split),
    Pass(name="streams", changes=streams),
    Pass(name="route", changes=routes),
    Pass(name="bf16", changes=bf16, changes_numbers=True),
)


def passes(allowed: Iterable[str] = ()) -> tuple[Pass, ...]:
    """Return passes that change no numbers, and those that are allowed; others' behind ours.

    Raises:
        ConfigError: one is allowed that does not exist, or one that another package brings is none.
    """
    found = [*OUR_PASSES, *cast(list[Pass], others(ENTRY_POINT_GROUP, ("name", "changes_numbers", "changes")))]
    wanted = set(allowed)
    if unknown := sorted(wanted - {one.name for one in found}):
        raise ConfigError(f"there is no pass {unknown[0]!r}; there are {', '.join(one.name for one in found)}")
    return tuple(one for one in found if not one.changes_numbers or one.name in wanted)


FEW_WALKS, LITTLE = 5, 0.002
"""When so many walks have made the step shorter by less than that share, the search ends."""

SURELY = 1e-6
"""Share of the step; what is less is rounding."""

OCTAVE = 2

FEW_GRADIENTS = 32
"""With so few, what accelerations leave out is looked at, too: it costs little."""

MOST_UNITS = 256
"""Of even cuts that the search begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has come to.

    Attributes:
        candidate: the fastest.
        step_s: with it, in the view.
        recorded_s: with the units that were recorded, cut and priced in the same way, in the view.
        changes: how often each kind of change was kept, after the start.
        walks: along critical paths.
        replays: of graphs and parts of them.
        in_time: it ended by itself.
        rivals: the fastest candidates on other routes, other numbers of streams or of units, the fastest first.
    """

    candidate: Candidate
    step_s: float
    recorded_s: float
    changes: Counter[str] = field(default_factory=Counter)
    walks: int
    replays: int
    in_time: bool
    rivals: tuple[Candidate, ...] = ()


class Search:
    """One search over one view."""

    def __init__(
        self,
        view: View,
        passes: Sequence[Pass],
        choices: Choices,
        *,
        limit_s: float = float("inf"),
        indifference: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to count time.

        Args:
            view: of the job.
            passes: propose changes.
            choices: what the job can run.
            limit_s: after it what has been found until then is the result.
            indifference: share of the step that the result may be longer if it is simpler: on fewer streams, in even
                units, in fewer of them.
            clock: shows seconds.
        """
        self._view, self._passes, self._choices, self._clock = view, passes, choices, clock
        self._until_s, self._indifference = clock() + limit_s, indifference
        self._step_s: dict[Candidate, float] = {}

    def run(self) -> Found:
        """The fastest candidate."""
        recorded = Candidate(schedule=self._view.recorded)
        recorded_s = self._judged(recorded)
        fastest: dict[str, Candidate] = {}
        for kind, candidate in self._starts():
            if self._late:
                break
            fastest[kind] = self._faster(candidate, fastest.get(kind, recorded))
        best, changes, walks = recorded, Counter[str](), 0
        manners: Sequence[bool] = (False,)  # whether walks try changes that are alike together
        if Acceleration.SYMMETRY in self._view.accelerations:
            manners = (True, False) if self._is_small else (True,)
        for start in sorted(dict.fromkeys(fastest.values()) or [recorded], key=self._judged):
            for together in manners:
                found, kept, took = self._refined(start, together=together)
                walks += took
                if self._faster(found, best) is found:
                    best, changes = found, kept
        best = self._simplest(best)
        return Found(
            candidate=best,
            step_s=self._judged(best),
            recorded_s=recorded_s,
            changes=changes,
            walks=walks,
            replays=self._view.replays,
            in_time=not self._late,
            rivals=self._rivals(best, recorded),
        )

    def _rivals(self, best: Candidate, recorded: Candidate) -> tuple[Candidate, ...]:
        """Those that differ from the best in more than where they are cut: of each kind the fastest."""
        layout, fastest = self._view.layout, dict[Hashable, Candidate]()

        def kind(candidate: Candidate) -> Hashable:
            schedule = candidate.schedule
            units = sum(min(tensor.parts, tensor.stop) for tensor in schedule.tensors_of(layout))
            return schedule.route, schedule.streams, units.bit_length()

        for candidate in sorted(self._step_s, key=self._judged):
            if candidate.extras == best.extras and candidate != recorded and math.isfinite(self._judged(candidate)):
                fastest.setdefault(kind(candidate), candidate)
        fastest.pop(kind(best), None)
        return tuple(fastest.values())[:MOST_RIVALS]

    def _refined(self, start: Candidate, *, together: bool) -> tuple[Candidate, Counter[str], int]:
        """Walks from there on; the changes that were kept, and how many walks it took."""
        best, kept, lengths_s = start, Counter[str](), [self._judged(start)]
        while not self._late:
            best = self._walk(best, kept, together=together)
            lengths_s.append(self._judged(best))
            if lengths_s[-1] == lengths_s[-2]:
                break
            if len(lengths_s) > FEW_WALKS and lengths_s[-1] > (1 - LITTLE) * lengths_s[-1 - FEW_WALKS]:
                break
        return best, kept, len(lengths_s) - 1

    def _simplest(self, best: Candidate) -> Candidate:
        """Return the simplest of all that were replayed, have the same extras, and are about as fast."""
        near = [
            candidate
            for candidate, step_s in self._step_s.items()
            if step_s <= (1 + self._indifference) * self._judged(best) and candidate.extras == best.extras
        ]
        layout = self._view.layout

        def complexity(candidate: Candidate) -> tuple[int, bool, int, float]:
            schedule = candidate.schedule
            units = sum(min(tensor.parts, tensor.stop) for tensor in schedule.tensors_of(layout))
            return schedule.streams, schedule.tensors is not None, units, self._judged(candidate)

        return min(near, key=complexity) if self._indifference else best

    @property
    def _late(self) -> bool:
        return self._clock() > self._until_s

    # ── where it begins ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_small(self) -> bool:
        return len(self._view.layout.sizes) <= FEW_GRADIENTS

    def _starts(self) -> Iterator[tuple[str, Candidate]]:
        """Yield candidates with their kind; the fastest of each kind is where walks begin."""
        layout = self._view.layout
        coarse = Acceleration.COARSENING in self._view.accelerations
        for route in self._choices.routes:
            for streams in self._choices.streams:
                unit_bytes = max(self._choices.least_bytes, 1 << (layout.total_bytes // MOST_UNITS).bit_length())
                while unit_bytes < OCTAVE * layout.total_bytes:
                    yield "even", Candidate(schedule=Schedule(route=route, streams=streams, unit_bytes=unit_bytes))
                    unit_bytes *= OCTAVE
                ends = {"gradients": list(range(len(layout.sizes)))} if not coarse or self._is_small else {}
                if coarse:
                    ends["coarsened"] = _groups(self._view, streams)
                for kind, indices in ends.items():
                    stops = {layout.offsets[index + 1] for index in indices} - {0} | {layout.numel}
                    tensors = tuple(Tensor(stop=stop) for stop in sorted(stops))
                    schedule = Schedule(route=route, streams=streams, unit_bytes=unit_bytes, tensors=tensors)
                    yield kind, Candidate(schedule=schedule)

    # ── walks ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _walk(self, best: Candidate, kept: Counter[str], *, together: bool) -> Candidate:
        """Once along the critical path; what helps is kept at once."""
        spot = Position(self._view, self._choices, best)
        proposed: list[Change] = []
        for tensor in spot.critical:
            if not self._late:
                proposed += [change for each in self._passes for change in each.changes(spot, tensor)]
        for changes in _tries(proposed, together=together):
            if self._late:
                break
            tried: Candidate | None = best
            applied = 0
            for change in changes:
                after = None if tried is None else change.apply(tried)
                if after is not None:
                    tried, applied = after, applied + 1
            if not applied or tried is None or tried == best:
                continue
            faster = self._faster(tried, best)
            if faster is not best:
                best = faster
                kept[changes[0].words] += applied
        return best

    # ── the judge ────────────────────────────────────────────────────────────────────────────────────────────────

    def _faster(self, candidate: Candidate, best: Candidate) -> Candidate:
        return candidate if self._judged(candidate) < (1 - SURELY) * self._judged(best) else best

    def _judged(self, candidate: Candidate) -> float:
        if candidate not in self._step_s:
            try:
                played = self._view.play(self._view.planned(candidate))
                self._step_s[candidate] = replayed(played).iteration_s
            except (PlanError, ReplayError):  # it does not fit, or nothing is known of its route
                self._step_s[candidate] = float("inf")
        return self._step_s[candidate]


def _tries(proposed: Sequence[Change], *, together: bool) -> Iterator[Sequence[Change]]:
    """Each change; before that, if asked for, those that are alike together."""
    groups: dict[Hashable, list[Change]] = defaultdict(list)
    for change in proposed if together else ():
        if change.alike is not None:
            groups[change.words, change.alike].append(change)
    yield from (group for group in groups.values() if len(group) > 1)
    yield from ([change] for change in proposed)


def _groups(view: View, streams: int) -> list[int]:
    """Numbers of the gradients behind which a tensor ends: gradients come together if they do within a start-up time.

    Those of one operation never come at one moment, since hooks run one after the other. Start-ups on several streams
    overlap, so one counts for less there.
    """
    number, startup_s = view.buffers[0].number, view.cost(view.recorded.route).startup_s / streams
    come_s: dict[int, float] = {}
    for program in view.small.iterations[0].programs.values():
        now_s = 0.0
        for piece in program:
            now_s += piece.seconds
            for buffer, index in piece.ready:
                if buffer == number:
                    come_s[index] = max(now_s, come_s.get(index, 0.0))
    ends, first_s = [], None
    for index in sorted(come_s):
        if first_s is not None and come_s[index] - first_s > startup_s:
            ends.append(index - 1)
            first_s = None
        first_s = come_s[index] if first_s is None else first_s
    return ends


SEARCH_LIMIT_S = 60.0

STREAMS_ON_ONE_HOST = 4
"""As many streams as shared memory has, so as many a job on one host may run."""

INDIFFERENCE = 0.01
"""Share of the step that no replay can be sure of; what is simpler is taken if it is longer by no more."""

WORTH_A_CHANGE = 0.001
"""Share of the step; what gains less leaves the recorded plan."""

MOST_RIVALS = 2
"""Other plans that are named, since they cannot be told from the best one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan, and what a step would take with it.

    Attributes:
        knobs: what to run.
        plan: the same as a file holds it.
        extras: what else has to be done.
        answer: a step then, judged by the whole job.
        parts: of the critical path.
    """

    knobs: Knobs
    plan: GivenPlan
    extras: tuple[Extra, ...]
    answer: Answer
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a search.

    Attributes:
        recorded_knobs: what ran.
        before: the job as it was recorded.
        parts: of its critical path.
        without_communication_s: no plan makes a step shorter than that.
        best: the fastest; the recorded plan if nothing is faster.
        rivals: others that cannot be told from it.
        plan_alone: the step with the best plan if the model is not compiled in parts; None where it need not be.
        found: by the search.
        n_ranks: that were replayed in it.
        search_s: that it took.
    """

    recorded_knobs: Knobs
    before: Baseline
    parts: tuple[Part, ...]
    without_communication_s: float
    best: Proposal
    rivals: tuple[Proposal, ...]
    found: Found
    n_ranks: int
    search_s: float
    plan_alone: Answer | None = None

    @property
    def gain(self) -> float:
        """Share of the step that is saved; 0 where nothing is faster."""
        return self.best.answer.gain

    @property
    def is_faster(self) -> bool:
        """Something is faster than what ran, as far as a replay can tell."""
        return self.gain > WORTH_A_CHANGE


def optimize(before: Baseline, *, limit_s: float = SEARCH_LIMIT_S, **options: Any) -> Outcome:
    """The best plan, and with it, if that is worth a line of code, the compiled model in parts.

    That is dPRO's operator fusion: what was compiled as a whole is all operators fused, so parts are tried, where
    theorem 1 leaves any. Each size that may be best, under the recorded plan and under the best one for the whole
    model, has a search of its own.

    Args:
        before: the job that was recorded.
        limit_s: of all searches together.
        options: see `planned`.

    Raises:
        ReplayError: no gradients were exchanged, or when they come is not known.
        ConfigError: a pass is allowed that does not exist.
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


def _in_parts(outcome: Outcome, part_bytes: int) -> Outcome:
    """The outcome whose plans say in how many parts the model is compiled."""

    def told(one: Proposal) -> Proposal:
        return replace(one, plan=replace(one.plan, part_bytes=part_bytes))

    return replace(outcome, best=told(outcome.best), rivals=tuple(map(told, outcome.rivals)))


def planned(
    before: Baseline,
    *,
    part_bytes: int | None = None,
    settings: Mapping[str, str] | None = None,
    allowed: Iterable[str] = (),
    accelerations: frozenset[Acceleration] = EVERY,
    least_bytes: int = SMALLEST_UNIT_BYTES,
    limit_s: float = SEARCH_LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Searches for a plan, and replays the result for all ranks and iterations.

    Args:
        before: the job that was recorded.
        part_bytes: of gradients in each part in which the model is compiled; None = it stays as it is.
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
    job, early = before.job, tuple[Extra, ...]()
    if part_bytes is not None:
        apply = partial(in_parts, part_bytes=part_bytes)
        early = (Extra(words=in_words(job, part_bytes), line=line_of_code(part_bytes), apply=apply),)
        job = apply(job)
    view = View(job, accelerations)
    choices = choices_of(job, view, settings or {}, least_bytes=least_bytes)
    begin_s = clock()
    found = Search(view, passes(allowed), choices, limit_s=limit_s, indifference=INDIFFERENCE, clock=clock).run()
    search_s = clock() - begin_s

    def proposal(candidate: Candidate) -> Proposal:
        knobs, changed = candidate.schedule.knobs(view.layout), view.planned(candidate, whole=True)
        return Proposal(
            knobs=knobs,
            plan=GivenPlan(
                source="",
                knobs=knobs,
                ranks=len(view.buffers[0].ranks),
                sizes=tuple(buffer.layout.sizes for buffer in view.buffers),
            ),
            extras=(*early, *candidate.extras),
            answer=before.answer(knobs.describe(), changed, replanned=True),
            parts=parts(play(changed)),
        )

    best, recorded = proposal(found.candidate), Candidate(schedule=view.recorded)
    rivals = [one for one in map(proposal, found.rivals) if one.answer.overlaps(best.answer)]
    if not best.answer.gain > WORTH_A_CHANGE:
        best, rivals = proposal(recorded), []
    played = play(before.job)
    return Outcome(
        recorded_knobs=view.buffers[0].knobs,
        before=before,
        parts=parts(played),
        without_communication_s=computation_s(played.graph) / max(1, before.times.iterations),
        best=best,
        rivals=tuple(rivals),
        found=found,
        n_ranks=len(view.small.ranks),
        search_s=search_s,
    )


def choices_of(job: JobModel, view: View, settings: Mapping[str, str], *, least_bytes: int) -> Choices:
    """Return what can be chosen: routes of which something is known, and what no variable has fixed."""
    now = view.recorded.route
    used = {one.route for each in job.iterations for one in each.operations if one.activity is Activity.UNIT}
    known = dict.fromkeys([now, *(route for route in used if route is not None), *job.links])
    transport, algorithm = settings.get("SIRTAKI_TRANSPORT"), settings.get("SIRTAKI_ALGORITHM")
    routes = tuple(
        route for route in known if transport in (None, route[0].value) and algorithm in (None, route[1].value)
    ) or (now,)
    one_host = not job.crosses_hosts(view.buffers[0].ranks)
    most = STREAMS_ON_ONE_HOST if one_host and transport in (None, TransportKind.SHARED_MEMORY.value) else 24
    fixed = settings.get("SIRTAKI_STREAMS", "")
    counts = (int(fixed),) if fixed.isdecimal() else tuple(n for n in STREAM_COUNTS if n <= most)
    return Choices(routes=routes, streams=counts, least_bytes=least_bytes)
