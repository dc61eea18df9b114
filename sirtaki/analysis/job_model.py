"""Build the model of a recorded job for replays (simulations).

The model contains the timelines of all ranks on one clock, and the time that each operation would take with processors
and network for itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sirtaki.autotune.model.replayer import Activity, Phase, SharedResource
from sirtaki.comm.plan import CommPlan, GradientLayout, Route
from sirtaki.errors import ReplayError
from sirtaki.measures import LinkModel

from .alignment import align
from .recording import Buffer, Module, ModuleKey, Operator, PhaseSpan, Placement, RecordedIteration, Recording

GradientKey = tuple[int, int]
"""Key of a gradient: (number of the flat buffer of contiguous gradients, index of the gradient in this buffer)."""

OperationKey = tuple[int, int, int]
"""Key of an operation between ranks. For a unit (bucket): (buffer, start, stop), in elements. For other collective
operations: (-1, index in the iteration, 0)."""


@dataclass(frozen=True, slots=True)
class ThreadInterval:
    """Work of a rank's training thread between two moments on which other work depends (a "piece").

    Such a moment is, for example, the moment at which a gradient is ready. Pieces are nodes of the graph that is
    replayed (simulated).

    Attributes:
        activity: kind of work.
        phase: phase of the step, such as forward or backward.
        seconds: duration if no other work shares the processors.
        name: name of the operator.
        computes: True if the work uses processors, so that other work on them slows it. False = its duration is
            constant.
        waits: all-reduces and other operations whose results the work needs: (key, delay of this rank after the first
            rank's completion).
        ready: gradients that become ready at the end of the work.
        issues: all-reduces and other operations that this rank issues at the end of the work.
        module: module whose forward or backward pass contains the operator; None = unknown.
    """

    activity: Activity
    phase: Phase
    seconds: float
    name: str = ""
    computes: bool = True
    waits: tuple[tuple[OperationKey, float], ...] = ()
    ready: tuple[GradientKey, ...] = ()
    issues: tuple[OperationKey, ...] = ()
    module: ModuleKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOperation:
    """One operation between ranks: the all-reduce of a unit (bucket), or another collective operation.

    Attributes:
        key: key of the operation, which is equal on all ranks.

        activity: `Activity.UNIT` or `Activity.COLLECTIVE`.
        lane: name of the queue, such as a stream, that runs the operation. A lane runs one operation at a time.
        ranks: participating ranks.
        n_bytes: size of one rank's input.
        name: name for display.
        route: transport and algorithm of a unit.
        fixed_s: start-up time, which depends neither on the size nor on other work.
        link_s: time on the network link between hosts if nothing else uses it; 0 = all ranks are on one host.
        host_s: processor time to pass messages to the link. Messages are passed one at a time, even those of different
            streams.
        processor_s: time on the ranks' processors if nothing else uses them; 0 unless all ranks are on one host.
        busy: processors that each rank occupies during `processor_s`; below 1 if the transport sleeps while it waits.
        lag_s: delay between the first and the last rank's completion of the operation.
    """

    key: OperationKey
    activity: Activity
    lane: str
    ranks: tuple[int, ...]
    n_bytes: int
    name: str = ""
    route: Route | None = None
    fixed_s: float = 0.0
    link_s: float = 0.0
    host_s: float = 0.0
    processor_s: float = 0.0
    busy: float = 1.0
    lag_s: float = 0.0


Program = tuple[ThreadInterval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One step of all ranks.

    Attributes:
        programs: work of each training thread, as a sequence of pieces (intervals), by rank.
        operations: all-reduces and other operations between ranks, in the order in which they are issued.
    """

    programs: Mapping[int, Program]
    operations: tuple[JobOperation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """Processors that the ranks of one machine share.

    Attributes:
        name: name for display.
        capacity: number of processors that the ranks may use together.
        ranks: ranks on the machine.
        threads: number of compute threads per rank.
    """

    name: str
    capacity: float
    ranks: tuple[int, ...]
    threads: int = 1

    @property
    def server(self) -> SharedResource:
        """Return the processors as a resource that threads share.

        Each thread has full speed unless there are more threads than processors.
        """
        whole = [float(count) for count in range(1, int(self.capacity) + 1)]
        return SharedResource(name=self.name, totals=tuple(dict.fromkeys((*whole, self.capacity))))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """Model of a job: the complete input of a replay (simulation) of its steps.

    Attributes:
        ranks: ranks, ascending.
        hosts: lowest rank on the same host, by rank.
        processors: processors of each machine.
        buffers: flat buffers of contiguous gradients, with their communication plans.
        links: measured latency and bandwidth, by route (transport and algorithm).
        link: network link between hosts, as a resource that units (buckets) share; None if all ranks are on one host.
        iterations: consecutive steps.
        begin_s: time at which each rank begins, in seconds after the first rank, by rank.
        alike: {rank: number of equal ranks that it represents}, if `symmetric` has removed ranks; 1 for ranks without
            an entry.
        notes: one sentence for each property of the job that was not recorded and is assumed.
    """

    ranks: tuple[int, ...]
    hosts: Mapping[int, int]
    processors: tuple[Processors, ...]
    buffers: tuple[Buffer, ...]
    links: Mapping[Route, LinkModel]
    link: SharedResource | None
    iterations: tuple[Iteration, ...]
    begin_s: Mapping[int, float] = field(default_factory=dict)
    alike: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def plans(self) -> dict[int, CommPlan]:
        """Return the communication plan of each flat buffer (of contiguous gradients), by number of the buffer."""
        return {buffer.number: buffer.plan for buffer in self.buffers}

    @property
    def units(self) -> list[JobOperation]:
        """Return the all-reduces of units (buckets) in all iterations."""
        return [one for each in self.iterations for one in each.operations if one.activity is Activity.UNIT]

    def crosses_hosts(self, ranks: tuple[int, ...]) -> bool:
        """Return whether an operation between these ranks uses the network link between hosts."""
        return len({self.hosts[rank] for rank in ranks}) > 1

    def changed(
        self,
        *,
        program: Callable[[int, Program], Program] = lambda _, same: same,
        operation: Callable[[JobOperation], JobOperation] = lambda same: same,
    ) -> JobModel:
        """Return a copy of the job, with each rank's work and each operation between ranks replaced by a function's
        result.

        Args:
            program: maps (rank, sequence of work of this rank) to a new sequence of work.
            operation: maps an operation between ranks to a new operation.
        """
        iterations = [
            Iteration(
                programs={rank: program(rank, mine) for rank, mine in each.programs.items()},
                operations=tuple(map(operation, each.operations)),
            )
            for each in self.iterations
        ]
        return replace(self, iterations=tuple(iterations))


Clock = Callable[[float], float]
"""Function that converts a reading of a rank's clock to a time on the common clock of the job."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One interval of a training thread, in which it runs one operator, copies gradients, or waits. Times are on the
    common clock of the job.

    Attributes:
        begin_s, end_s: first and last moment.
        activity: kind of work.
        phase: phase of the step, such as forward or backward.
        name: name of the operator; "" = no operator was recorded.
        waits: all-reduces and other operations between ranks for which the thread waits; empty if the thread works.
        module: module whose forward or backward pass contains the operator; None = unknown.
    """

    begin_s: float
    end_s: float
    activity: Activity
    phase: Phase
    name: str = ""
    waits: tuple[OperationKey, ...] = ()
    module: ModuleKey | None = None

    @property
    def computes(self) -> bool:
        """Return whether the training thread uses a processor in this interval.

        A wait uses no processors, because the thread sleeps. Loading data is treated as a wait of constant duration.
        """
        return not self.waits and self.activity is not Activity.DATA


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitInterval:
    """A wait of the training thread for all-reduces or other operations between ranks.

    Attributes:
        begin_s, end_s: first and last moment of the wait; equal if the results were already available.
        keys: keys of the operations for which the thread waits.
        until_backward_ends: True if the wait is for gradients, and so cannot begin before `backward()` has returned.
    """

    begin_s: float
    end_s: float
    keys: tuple[OperationKey, ...]
    until_backward_ends: bool = False


def stretches(iteration: RecordedIteration, clock: Clock, modules: Sequence[Module] = ()) -> list[Stretch]:
    """Divide the timeline of one rank in one iteration into intervals without gaps. Waits for other ranks are not yet
    marked; `with_waits` inserts them.
    """

    def stretch(one: Operator | PhaseSpan, name: str = "", module: ModuleKey | None = None) -> Stretch:
        activity = Activity.DATA if one.phase is Phase.DATA else Activity.COMPUTE
        return Stretch(clock(one.begin_s), clock(one.end_s), activity, one.phase, name, module=module)

    begin_s, end_s = clock(iteration.begin_s), clock(iteration.end_s)
    spans = [stretch(one) for one in iteration.spans]
    known = [
        stretch(one, one.name, modules[one.module].key if one.module >= 0 else None)
        for one in iteration.operators
        if one.lane == 0
    ]
    for copy in iteration.copies:
        at_s = clock(copy.begin_s)
        phase = next((span.phase for span in spans if span.begin_s <= at_s < span.end_s), Phase.OTHER)
        known.append(Stretch(at_s, clock(copy.end_s), Activity.COPY, phase, "copy gradients"))
    full: list[Stretch] = []
    now_s = begin_s
    for one in sorted(known, key=lambda one: one.begin_s):
        # Cut off overlaps: operators and copies may overlap slightly, because their times come from different clocks.
        from_s, to_s = max(now_s, min(one.begin_s, end_s)), min(one.end_s, end_s)
        if to_s >= from_s:
            full += (*_between(spans, now_s, from_s), replace(one, begin_s=from_s, end_s=to_s))
            now_s = to_s
    return [*full, *_between(spans, now_s, end_s)]


def _between(spans: Sequence[Stretch], begin_s: float, end_s: float) -> Iterator[Stretch]:
    """Fill a period without operators with intervals, one for each phase (such as forward) in the period."""
    now_s = begin_s
    for span in spans:
        if now_s < span.end_s and span.begin_s < end_s:
            if span.begin_s > now_s:
                yield Stretch(now_s, span.begin_s, Activity.COMPUTE, Phase.OTHER)
            now_s, from_s = min(span.end_s, end_s), max(span.begin_s, now_s)
            yield replace(span, begin_s=from_s, end_s=now_s)
    if end_s > now_s:
        yield Stretch(now_s, end_s, Activity.COMPUTE, Phase.OTHER)


def with_waits(full: Sequence[Stretch], waits: Iterable[WaitInterval]) -> list[Stretch]:
    """Divide the intervals of one rank further, so that each wait for other ranks is an interval of its own.

    Only time in which no operator ran can be a wait.
    """
    found = list(full)
    for wait in sorted(waits, key=lambda wait: wait.end_s):
        _insert_wait(found, wait)
    return found


def _insert_wait(full: list[Stretch], wait: WaitInterval) -> None:
    place = min(bisect_left(full, wait.end_s, key=lambda one: one.end_s), len(full) - 1)
    one = full[place]
    backward = [at for at, each in enumerate(full) if each.name and each.phase is Phase.BACKWARD]
    backward_end = 1 + backward[-1] if backward and wait.until_backward_ends else 0
    if wait.until_backward_ends and backward_end < place:
        # The recorded time at which another rank issued a unit (bucket) may be too late. This rank's wait then seems to
        # end after its next operators. In truth, its thread waited in the long gap before these operators.
        gaps = [at for at in range(backward_end, place) if not (full[at].name or full[at].waits)]
        longest = max(gaps, key=lambda at: full[at].end_s - max(full[at].begin_s, wait.begin_s), default=place)
        gap = full[longest]
        if gap.end_s - max(gap.begin_s, wait.begin_s) > wait.end_s - gap.end_s > 0:
            place, one, wait = longest, gap, replace(wait, end_s=gap.end_s)
    if one.name or one.waits or place < backward_end:
        # Move the wait after the operator that ran when the wait ended, because operators do not wait. Move a wait for
        # gradients after the whole backward pass.
        place = max(place + 1, backward_end)
        before = full[place - 1]
        begin_s = end_s = before.end_s
        one = Stretch(end_s, end_s, Activity.COMPUTE, before.phase)
        full.insert(place, one)
    else:
        begin_s = min(max(one.begin_s, wait.begin_s), wait.end_s)
        end_s = min(max(begin_s, wait.end_s), one.end_s)
    phase = Phase.BACKWARD if wait.until_backward_ends else one.phase
    parts = [
        replace(one, end_s=begin_s),
        replace(one, begin_s=begin_s, end_s=end_s, activity=Activity.COMPUTE, phase=phase, waits=wait.keys),
        replace(one, begin_s=end_s),
    ]
    full[place : place + 1] = [part for part in parts if part.waits or part.end_s > part.begin_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Moments in one rank's iteration on which other work depends. Times are on the common clock of the job.

    Attributes:
        ready: moment at which each gradient was ready.
        issued: moment at which this rank issued each all-reduce or other operation between ranks.
        seen: {key of an operation: delay between the first rank's and this rank's completion}.
    """

    ready: Sequence[tuple[float, GradientKey]]
    issued: Sequence[tuple[float, OperationKey]]
    seen: dict[OperationKey, float]


def pieces(full: Sequence[Stretch], marks: Marks, work_s: Callable[[float, float], float]) -> Program:
    """Split the intervals of one rank's iteration at the moments on which other work depends, and return the parts
    ("pieces").

    Args:
        full: intervals of one rank's iteration, without gaps.
        marks: moments at which to split.
        work_s: maps (begin, end) of a computation to the seconds that it would take on processors that nothing else
            uses.
    """
    ready: dict[float | None, list[GradientKey]] = defaultdict(list)
    issued: dict[float | None, list[OperationKey]] = defaultdict(list)
    for moment_s, gradient in marks.ready:
        ready[moment_s].append(gradient)
    for moment_s, key in marks.issued:
        issued[moment_s].append(key)
    cuts = sorted({moment_s for moment_s, _ in (*marks.ready, *marks.issued)})
    found: list[ThreadInterval] = []
    place = 0
    for one in full:
        now_s = one.begin_s
        waits = tuple((key, marks.seen.get(key, 0.0)) for key in one.waits)

        def piece(from_s: float, to_s: float, cut_s: float | None, one: Stretch = one) -> ThreadInterval:
            seconds = 0.0 if one.waits else work_s(from_s, to_s) if one.computes else to_s - from_s
            return ThreadInterval(
                activity=one.activity,
                phase=one.phase,
                seconds=seconds,
                name=one.name,
                computes=one.computes,
                waits=waits,  # noqa: B023  piece() is called only within this loop pass
                ready=tuple(ready.get(cut_s, ())),
                issues=tuple(issued.get(cut_s, ())),
                module=one.module,
            )

        while place < len(cuts) and (cuts[place] <= one.end_s or one.end_s >= full[-1].end_s):
            until_s = max(now_s, min(cuts[place], one.end_s))
            found.append(piece(now_s, until_s, cuts[place]))
            now_s, waits = until_s, ()
            place += 1
        if one.end_s > now_s or waits:
            found.append(piece(now_s, one.end_s, None))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBarrier(JobOperation):
    """One recorded operation between ranks (all-reduce of a unit (bucket), or another collective operation), with its
    times on the common clock of the job.

    Attributes:
        issued_s: moment at which each rank issued the operation.
        begin_s: moment at which the operation began, after all ranks had issued it.
        done_s: moment at which each rank had the result; at least `begin_s`.
    """

    issued_s: Mapping[int, float]
    begin_s: float
    done_s: Mapping[int, float]

    @property
    def end_s(self) -> float:
        """Return the moment at which the first rank had the result."""
        return min(self.done_s.values())


def barriers(
    iterations: Mapping[int, RecordedIteration],
    clocks: Mapping[int, Clock],
    buffers: Iterable[Buffer],
    free_s: dict[str, float],
) -> list[TimedBarrier]:
    """Return the operations between ranks in one iteration, sorted by begin.

    Each operation is merged from the recordings of all ranks.

    Args:
        iterations: the iteration as recorded by each rank.
        clocks: conversion of each rank's clock to the common clock of the job.
        buffers: flat buffers (of contiguous gradients) of the job.
        free_s: {lane (queue of a transport): moment at which it becomes idle}. This function updates the dict.
    """
    layouts = {buffer.number: buffer.layout for buffer in buffers}
    issued: dict[OperationKey, dict[int, float]] = defaultdict(dict)
    done: dict[OperationKey, dict[int, float]] = defaultdict(dict)
    what: dict[OperationKey, dict[str, Any]] = {}
    for rank, iteration in iterations.items():
        clock = clocks[rank]
        for one in iteration.units:
            key = (one.buffer, one.start, one.stop)
            issued[key][rank], done[key][rank] = clock(one.issue_s), clock(one.done_s)
            what[key] = unit_fields(key, layouts[one.buffer], one.route, one.stream)
        for place, other in enumerate(iteration.collectives):
            key = (-1, place, 0)
            issued[key][rank], done[key][rank] = clock(other.begin_s), clock(other.end_s)
            fields = {"lane": f"{other.kind}s", "n_bytes": other.n_bytes, "name": other.name}
            what[key] = {"key": key, "activity": Activity.COLLECTIVE, **fields}
    found = []
    for key in sorted(issued, key=lambda key: (max(issued[key].values()), key)):
        lane = what[key]["lane"]
        begin_s = max(*issued[key].values(), free_s.get(lane, 0.0))
        done_s = {rank: max(moment_s, begin_s) for rank, moment_s in done[key].items()}
        free_s[lane] = max(done_s.values())
        lag_s, ranks = free_s[lane] - min(done_s.values()), tuple(sorted(issued[key]))
        found.append(
            TimedBarrier(**what[key], ranks=ranks, issued_s=issued[key], begin_s=begin_s, done_s=done_s, lag_s=lag_s)
        )
    return found


def unit_fields(key: OperationKey, layout: GradientLayout, route: Route, stream: int) -> dict[str, Any]:
    """Return the fields of a unit's (bucket's) `JobOperation` that do not depend on the duration of its all-reduce."""
    _, start, stop = key
    return {
        "key": key,
        "activity": Activity.UNIT,
        "lane": f"{route[0].value} stream {stream}",
        "n_bytes": (stop - start) * layout.itemsize_bytes,
        "name": layout.describe(start, stop) if layout.names else f"unit {start}",
        "route": route,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """Timelines of all ranks in one iteration, on the common clock of the job.

    Attributes:
        number: number of the iteration (`RecordedIteration.number`).
        barriers: operations between ranks, in the order in which they began.
        stretches: intervals of each rank's training thread, without gaps.
        marks: moments of each rank's iteration on which other work depends, such as ready gradients.
    """

    number: int
    barriers: Sequence[TimedBarrier]
    stretches: Mapping[int, Sequence[Stretch]]
    marks: Mapping[int, Marks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histories:
    """Timelines of all ranks in the iterations to analyse: consecutive ordinary steps (`Recording.usual_iterations`).

    Attributes:
        recording: recording from which the timelines were built.
        steps: timelines of each iteration, in order.

        begin_s: time at which each rank begins the first step, in seconds after the first rank.
        clocks: conversion of each rank's clock to the job's clock.
        hosts: lowest rank on the same host, by rank.
    """

    recording: Recording
    steps: Sequence[TimedStep]
    begin_s: Mapping[int, float]
    clocks: Mapping[int, Clock]
    hosts: Mapping[int, int]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the recorded ranks, ascending."""
        return tuple(self.begin_s)

    def crosses_hosts(self, barrier: TimedBarrier) -> bool:
        """Return whether the operation uses the network link between hosts."""
        return len({self.hosts[rank] for rank in barrier.ranks}) > 1


def histories(recording: Recording) -> Histories:
    """Build the timelines of all ranks in the iterations to analyse: consecutive ordinary steps
    (`Recording.usual_iterations`).

    Raises:
        ReplayError: no iteration was recorded on all ranks.
    """
    ranks, buffers = tuple(sorted(recording.ranks)), recording.job.buffers
    known = {rank: {one.number: one for one in recording.ranks[rank].iterations} for rank in ranks}
    if not (numbers := recording.usual_iterations):
        raise ReplayError(
            "the recording contains no iteration that was recorded on all ranks, so no step can be simulated; record "
            "more iterations, with `sirtaki profile --iterations N`"
        )
    iterations = [{rank: known[rank][number] for rank in ranks} for number in numbers]
    clocks = _clocks(recording, iterations[0])
    reducers = {buffer.number: buffer.reducer for buffer in buffers}
    free_s: dict[str, float] = {}
    steps = []
    for number, each in zip(numbers, iterations, strict=True):
        found = barriers(each, clocks, buffers, free_s)
        full: dict[int, list[Stretch]] = {}
        marks: dict[int, Marks] = {}
        for rank, one in each.items():
            own = [barrier for barrier in found if rank in barrier.ranks]
            bare = stretches(one, clocks[rank], recording.ranks[rank].modules)
            full[rank] = with_waits(bare, _waits(rank, one, own, reducers))
            marks[rank] = Marks(
                ready=[(clocks[rank](ready.ready_s), (ready.buffer, ready.place)) for ready in one.ready],
                issued=[(barrier.issued_s[rank], barrier.key) for barrier in own],
                seen={barrier.key: barrier.done_s[rank] - barrier.end_s for barrier in own},
            )
        steps.append(TimedStep(number=number, barriers=found, stretches=full, marks=marks))
    return Histories(
        recording=recording,
        steps=steps,
        begin_s={rank: clocks[rank](one.begin_s) for rank, one in iterations[0].items()},
        clocks=clocks,
        hosts={place.rank: place.host for place in recording.job.placement if place.rank in ranks},
    )


def _waits(
    rank: int, iteration: RecordedIteration, own: Sequence[TimedBarrier], reducers: Mapping[int, tuple[int, int]]
) -> Iterator[WaitInterval]:
    by_reducer: dict[tuple[int, int], list[TimedBarrier]] = defaultdict(list)
    for one in own:
        if one.activity is Activity.UNIT:
            by_reducer[reducers[one.key[0]]].append(one)
        else:
            yield WaitInterval(begin_s=one.issued_s[rank], end_s=one.done_s[rank], keys=(one.key,))
    for units in by_reducer.values():
        end_s = max(one.done_s[rank] for one in units)
        begin_s = max(one.issued_s[rank] for one in units)
        if len(by_reducer) == 1 and iteration.exposed_s > 0:
            begin_s = max(begin_s, end_s - iteration.exposed_s)
        last = {one.lane: one.key for one in units}
        yield WaitInterval(begin_s=begin_s, end_s=end_s, keys=tuple(last.values()), until_backward_ends=True)


def _clocks(recording: Recording, first: Mapping[int, RecordedIteration]) -> dict[int, Clock]:
    """Return conversions of each rank's clock to the common clock of the job, which reads 0 when the first rank begins.

    Offset and drift of a clock are derived from the times at which ranks issue and complete units (buckets). Their
    error is as large as the duration of the shortest units. If the offset measured at the start of the recording has a
    smaller error bound, it is used instead.
    """
    found = align(recording)
    by_units = found.error_s <= max(one.round_trip_s for one in recording.ranks.values()) / 2

    def clock(rank: int, origin_s: float) -> Clock:
        line, offset_s = found.lines[rank], recording.ranks[rank].offset_s
        if by_units:
            return lambda moment_s: line.at(moment_s) - origin_s
        return lambda moment_s: moment_s + offset_s - origin_s

    origin_s = min(clock(rank, 0.0)(one.begin_s) for rank, one in first.items())
    return {rank: clock(rank, origin_s) for rank in first}


Use = tuple[float, float, float]
"""Use of a shared resource, such as processors: (begin_s, end_s, number of concurrent tasks that the use counts as)."""


class ShareClock:
    """Clock that measures the work of one task on a shared resource (processors, or network link between hosts).

    The clock has speed 1 while at most one task uses the resource. Otherwise it has the speed that each task gets.
    """

    def __init__(self, server: SharedResource, uses: Iterable[Use]) -> None:
        changes: dict[float, float] = defaultdict(float)
        for begin_s, end_s, jobs in uses:
            if end_s > begin_s:
                changes[begin_s] += jobs
                changes[end_s] -= jobs
        self._moments_s, self._shown_s, self._speeds = [0.0], [0.0], [1.0]
        jobs = 0.0
        for moment_s in sorted(changes):
            shown_s = self.at(moment_s)
            jobs += changes[moment_s]
            self._moments_s.append(moment_s)
            self._shown_s.append(shown_s)
            self._speeds.append(server.share(max(1.0, jobs)))

    def at(self, moment_s: float) -> float:
        """Return the reading of this clock at a moment of the job."""
        place = max(0, bisect_right(self._moments_s, moment_s) - 1)
        return self._shown_s[place] + (moment_s - self._moments_s[place]) * self._speeds[place]

    def between(self, begin_s: float, end_s: float) -> float:
        """Return the work that one task completed from `begin_s` to `end_s`, as the seconds that it takes alone on the
        resource.
        """
        return max(0.0, self.at(end_s) - self.at(begin_s))


MAX_ROUNDS = 20
TOLERANCE = 1e-4
MIN_BUSY = 0.02


def processor_use(group: Processors, histories: Histories) -> tuple[ShareClock, float]:
    """Measure how the ranks of one machine used its processors in the recorded iterations.

    Returns:
        (clock that measures how long computations on the machine would take if nothing else used the processors, number
        of processors that each rank occupies during the all-reduce of a unit (bucket)). The number is
        `JobOperation.busy`, and 1 if processor time was not recorded.
    """
    units = [
        one
        for step in histories.steps
        for one in step.barriers
        if one.activity is Activity.UNIT and one.ranks[0] in group.ranks and not histories.crosses_hosts(one)
    ]
    computation = [
        (one.begin_s, one.end_s, float(group.threads))
        for step in histories.steps
        for rank in group.ranks
        for one in step.stretches[rank]
        if one.computes
    ]

    def clock(busy: float) -> ShareClock:
        uses = [(one.begin_s, one.end_s, busy * len(one.ranks)) for one in units]
        return ShareClock(group.server, [*computation, *uses])

    spent_s = _spent_s(group, histories) if units else None
    if spent_s is None:
        return clock(1.0), 1.0
    busy = 1.0
    for _ in range(MAX_ROUNDS):
        alone = clock(busy)
        alone_s = sum(len(one.ranks) * alone.between(one.begin_s, one.end_s) for one in units)
        before, busy = busy, min(1.0, max(MIN_BUSY, spent_s / alone_s)) if alone_s > 0 else 1.0
        if abs(busy - before) <= TOLERANCE:
            break
    return clock(busy), busy


def _spent_s(group: Processors, histories: Histories) -> float | None:
    """Return the processor time that communication used on the machine. Return None if it is unknown, because processor
    time was not recorded or because operators use several threads.
    """
    numbers = {step.number for step in histories.steps}
    recorded = [one for rank in group.ranks for one in histories.recording.ranks[rank].iterations]
    spent_s = [one.beside_s for one in recorded if one.number in numbers and one.beside_s is not None]
    complete = len(spent_s) == sum(one.number in numbers for one in recorded)
    return sum(spent_s) if complete and group.threads == 1 else None


LINK = "the link between hosts"


def job_model(histories: Histories) -> JobModel:
    """Build the model of the recorded job: the work of all ranks.

    The durations are those that work has if it shares neither processors nor network.
    """
    job, hosts = histories.recording.job, histories.hosts
    recorded = [one for step in histories.steps for one in step.barriers]

    def probed_of(one: JobOperation) -> LinkModel | None:
        return None if one.route is None else job.links.get(one.route)

    def startup_s(one: TimedBarrier) -> float:
        known = probed_of(one)
        return 0.0 if known is None else min(known.alpha_s, one.end_s - one.begin_s)

    processors = _processors([place for place in job.placement if place.rank in hosts])
    used_by = {rank: use for group in processors for use in [processor_use(group, histories)] for rank in group.ranks}
    across = [one for one in recorded if one.activity is Activity.UNIT and histories.crosses_hosts(one)]
    probed = [known for one in across if (known := probed_of(one)) is not None]
    link, notes = None, list[str]()
    if probed:
        link = link_server(replace(probed[0], throughput=without_dents(probed[0].throughput)))
    elif across:
        link = SharedResource(name=LINK, totals=(1.0,), is_link=True)
        notes.append(
            "the bandwidth of the network between hosts was not measured, because the job was not tuned; the "
            "simulation assumes that a single unit (bucket) uses all of it"
        )
    on_link = None
    if link is not None:
        on_link = ShareClock(link, [(one.begin_s + startup_s(one), one.end_s, 1) for one in across])

    def exclusive(one: TimedBarrier) -> JobOperation:
        length_s = one.end_s - one.begin_s
        if one.activity is not Activity.UNIT:
            return replace(one, fixed_s=length_s)
        if on_link is None or not histories.crosses_hosts(one):
            clock, busy = used_by[one.ranks[0]]
            return replace(one, processor_s=clock.between(one.begin_s, one.end_s), busy=busy)
        fixed_s, known = startup_s(one), probed_of(one)
        link_s = on_link.between(one.begin_s + fixed_s, one.end_s)
        host_s = 0.0 if known is None else min(known.host_s, length_s - fixed_s)
        return replace(one, fixed_s=fixed_s, link_s=link_s, host_s=host_s)

    def programs(step: TimedStep) -> Mapping[int, Program]:
        return {rank: pieces(mine, step.marks[rank], used_by[rank][0].between) for rank, mine in step.stretches.items()}

    used = {one.key[0] for one in recorded}
    return JobModel(
        ranks=histories.ranks,
        hosts=hosts,
        processors=processors,
        buffers=tuple(
            replace(buffer, ranks=tuple(rank for rank in buffer.ranks if rank in hosts))
            for buffer in job.buffers
            if buffer.number in used
        ),
        links=job.links,
        link=link,
        iterations=tuple(
            Iteration(programs=programs(step), operations=tuple(map(exclusive, step.barriers)))
            for step in histories.steps
        ),
        begin_s=histories.begin_s,
        notes=tuple(notes),
    )


def without_dents(throughput: Sequence[float]) -> tuple[float, ...]:
    """Return the measured throughput G(n) of a network link with n concurrent units (buckets), without dents.

    A dent is a value that is lower than some value for fewer units and some value for more units. It means that other
    work kept the machine busy during the measurement. The value is raised to the line between the two higher values. A
    decline towards the largest n is not changed.
    """
    found = list(throughput)
    places = range(len(found))
    for place in places:
        before = max(places[: place + 1], key=lambda other: throughput[other])
        behind = max(places[place:], key=lambda other: throughput[other])
        if before < place < behind:
            slope = (throughput[behind] - throughput[before]) / (behind - before)
            found[place] = max(found[place], throughput[before] + slope * (place - before))
    return tuple(found)


def link_server(link: LinkModel) -> SharedResource:
    """Return a measured network link as a resource that units (buckets) share. With n concurrent units, its total rate
    relative to a single unit is G(n) / G(1), for the measured throughput G.
    """
    alone = link.throughput[0]
    return SharedResource(name=LINK, totals=tuple(rate / alone for rate in link.throughput), is_link=True)


def _processors(places: Sequence[Placement]) -> tuple[Processors, ...]:
    """Return the processors of each machine. Ranks with the same clock are on one machine, even if it emulates several
    hosts.
    """
    machines: dict[str, list[Placement]] = defaultdict(list)
    for place in places:
        machines[place.clock].append(place)
    groups = []
    for mine in machines.values():
        usable = float(len({number for place in mine for number in place.processors}) or mine[0].host_processors)
        limits = {place.host: float("inf") if place.quota is None else place.quota for place in mine}
        groups.append(
            Processors(
                name=f"the processors of {mine[0].host_name}",
                capacity=min(usable, sum(limits.values())),
                ranks=tuple(place.rank for place in mine),
                threads=max(1, min(place.threads for place in mine)),
            )
        )
    return tuple(groups)
