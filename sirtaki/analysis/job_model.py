"""The model of a recorded job: histories of its ranks, made comparable."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sirtaki.autotune.model.replayer import Activity, Phase, Server
from sirtaki.comm.plan import Route
from sirtaki.errors import ReplayError
from sirtaki.measures import LinkModel

from .alignment import Alignment, align
from .recording import Buffer, Module, ModuleKey, RecordedIteration, Recording

GradientKey = tuple[int, int]
"""(buffer, place in its layout)."""

OperationKey = tuple[int, int, int]
"""(buffer, start, stop) of a unit, elements of the flat buffer; (-1, place in the iteration, 0) of anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What the thread that trains does between two moments at which something else depends on it.

    Attributes:
        activity: what it is.
        phase: of the step.
        name: of the operator.
        seconds: on as many processors as it uses.
        computes: it uses processors; else it lasts as long whatever they do.
        waits: operations whose results it needs, and how much later than the first rank this one sees each.
        ready: gradients that have come at its end.
        issues: operations that this rank takes part in from its end on.
        module: whose forward or backward pass an operator belongs to; None = none is known.
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

    @property
    def is_joint(self) -> bool:
        """Something other than its rank's next piece depends on it, or it on something other than the one before."""
        return bool(self.waits or self.issues)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What several ranks do together: a unit, or another collective operation.

    Attributes:
        key: which.
        activity: `Activity.UNIT` or `Activity.COLLECTIVE`.
        lane: what it runs on, one at a time; equal for those that wait for each other.
        ranks: that take part.
        n_bytes: of one rank's input.
        name: for people.
        route: of a unit.
        fixed_s: start-up.
        link_s: on the link between hosts, which it shares; 0 = none is used.
        host_s: of what hands messages to the link, one after the other on all streams (`LinkModel.host_s`).
        processor_s: on the processors of its ranks, where all are on one host.
        busy: processors that each of its ranks keeps busy meanwhile; below 1 where messages are waited for.
        lag_s: how much later than the first the last rank is done.
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


Program = tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One step of all ranks.

    Attributes:
        programs: of each rank.
        operations: in the order in which they are issued.
    """

    programs: Mapping[int, Program]
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """What the ranks of one machine share.

    Attributes:
        name: for people.
        capacity: how many processors they may use together.
        ranks: that run there.
        threads: that a rank computes with.
    """

    name: str
    capacity: float
    ranks: tuple[int, ...]
    threads: int = 1

    @property
    def server(self) -> Server:
        """N jobs get n processors' work done, until there are no more."""
        whole = int(self.capacity)
        totals = [float(count) for count in range(1, whole + 1)]
        return Server(name=self.name, totals=(*totals, self.capacity) if self.capacity > whole else tuple(totals))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobModel:
    """All that is replayed.

    Attributes:
        ranks: by number.
        hosts: of each rank, by the lowest rank there.
        processors: of each machine.
        buffers: the gradients and how they are reduced.
        links: of each route that was probed.
        link: the server that units between hosts share; None where all is on one host.
        iterations: one behind the other.
        begin_s: how much later than the first rank each one begins.
        alike: as how many ranks one counts that stands for others of its host, too; else 1.
        notes: what is not known, a sentence each.
    """

    ranks: tuple[int, ...]
    hosts: Mapping[int, int]
    processors: tuple[Processors, ...]
    buffers: tuple[Buffer, ...]
    links: Mapping[Route, LinkModel]
    link: Server | None
    iterations: tuple[Iteration, ...]
    begin_s: Mapping[int, float] = field(default_factory=dict)
    alike: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def crosses_hosts(self, ranks: tuple[int, ...]) -> bool:
        """Whether an operation of these ranks needs the link."""
        return len({self.hosts[rank] for rank in ranks}) > 1

    def processors_of(self, rank: int) -> int:
        """The place in `processors` of those that a rank uses."""
        return next(place for place, group in enumerate(self.processors) if rank in group.ranks)


Clock = Callable[[float], float]
"""From a rank's clock to the job's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One kind of thing for a while; moments of the job's clock.

    Attributes:
        waits: the thread waits for these, and for nothing else; empty if it does something.
        module: as `Piece.module`.
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
        """Processors are used: a loader's time is its own, and who waits sleeps."""
        return not self.waits and self.activity is not Activity.DATA


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """From when on a thread waited for operations, and when they were done; both moments may turn out to be one.

    Attributes:
        until_backward_ends: their results are not looked at before.
    """

    begin_s: float
    end_s: float
    keys: tuple[OperationKey, ...]
    until_backward_ends: bool = False

    @property
    def phase(self) -> Phase | None:
        """That the waiting belongs to; None = the one in which it is done."""
        return Phase.BACKWARD if self.until_backward_ends else None


def stretches(iteration: RecordedIteration, clock: Clock, modules: Sequence[Module] = ()) -> list[Stretch]:
    """The whole iteration, waiting not told apart yet."""
    begin_s, end_s = clock(iteration.begin_s), clock(iteration.end_s)
    known = [
        Stretch(
            begin_s=clock(one.begin_s),
            end_s=clock(one.end_s),
            activity=Activity.DATA if one.phase is Phase.DATA else Activity.COMPUTE,
            phase=one.phase,
            name=one.name,
            module=modules[one.module].key if one.module >= 0 else None,
        )
        for one in iteration.operators
        if one.lane == 0
    ]
    spans = [
        Stretch(begin_s=clock(one.begin_s), end_s=clock(one.end_s), activity=_usual(one.phase), phase=one.phase)
        for one in iteration.spans
    ]
    copies = [
        Stretch(
            begin_s=clock(one.begin_s),
            end_s=clock(one.end_s),
            activity=Activity.COPY,
            phase=_phase_at(spans, clock(one.begin_s)),
            name="copy gradients",
        )
        for one in iteration.copies
    ]
    full: list[Stretch] = []
    now_s = begin_s
    for one in sorted([*known, *copies], key=lambda one: one.begin_s):
        # Operators are told by another clock, so neighbours may seem to overlap a little.
        from_s, to_s = max(now_s, min(one.begin_s, end_s)), min(one.end_s, end_s)
        if to_s < from_s:
            continue
        full += _between(spans, now_s, from_s)
        full.append(replace(one, begin_s=from_s, end_s=to_s))
        now_s = to_s
    return [*full, *_between(spans, now_s, end_s)]


def _usual(phase: Phase) -> Activity:
    return Activity.DATA if phase is Phase.DATA else Activity.COMPUTE


def _phase_at(spans: Sequence[Stretch], moment_s: float) -> Phase:
    return next((one.phase for one in spans if one.begin_s <= moment_s < one.end_s), Phase.OTHER)


def _between(spans: Sequence[Stretch], begin_s: float, end_s: float) -> list[Stretch]:
    """Time in which nothing is recorded but, perhaps, the phase."""
    found: list[Stretch] = []
    now_s = begin_s
    for span in spans:
        if span.end_s <= now_s or span.begin_s >= end_s:
            continue
        if span.begin_s > now_s:
            found.append(_other(now_s, span.begin_s))
        now_s, from_s = min(span.end_s, end_s), max(span.begin_s, now_s)
        found.append(replace(span, begin_s=from_s, end_s=now_s))
    return [*found, _other(now_s, end_s)] if end_s > now_s else found


def _other(begin_s: float, end_s: float) -> Stretch:
    return Stretch(begin_s=begin_s, end_s=end_s, activity=Activity.COMPUTE, phase=Phase.OTHER)


def with_waits(full: Sequence[Stretch], waits: Sequence[Wait]) -> list[Stretch]:
    """Stretches, those in which the thread waited told apart; only time that nothing was recorded in is waiting."""
    found = list(full)
    for wait in sorted(waits, key=lambda wait: wait.end_s):
        found = _with_wait(found, wait)
    return found


def _with_wait(full: list[Stretch], wait: Wait) -> list[Stretch]:
    place = min(bisect_left([one.end_s for one in full], wait.end_s), len(full) - 1)
    one = full[place]
    backward_end = max(
        (at + 1 for at, each in enumerate(full) if each.name and each.phase is Phase.BACKWARD), default=0
    )
    if one.name or one.waits or (wait.until_backward_ends and place < backward_end):
        # Something was done then, so nobody waited: the result is needed later, when backward() returns at the soonest.
        place = max(place + 1, backward_end if wait.until_backward_ends else 0)
        moment_s = full[place - 1].end_s
        seen = Stretch(
            begin_s=moment_s,
            end_s=moment_s,
            activity=Activity.COMPUTE,
            phase=wait.phase or full[place - 1].phase,
            waits=wait.keys,
        )
        return [*full[:place], seen, *full[place:]]
    begin_s = min(max(one.begin_s, wait.begin_s), wait.end_s)
    end_s = min(max(begin_s, wait.end_s), one.end_s)
    parts = [
        replace(one, end_s=begin_s),
        replace(
            one,
            begin_s=begin_s,
            end_s=end_s,
            activity=Activity.COMPUTE,
            phase=wait.phase or one.phase,
            waits=wait.keys,
        ),
        replace(one, begin_s=end_s),
    ]
    return [*full[:place], *(part for part in parts if part.waits or part.end_s > part.begin_s), *full[place + 1 :]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Moments on which others depend, of the job's clock.

    Attributes:
        ready: when each gradient came.
        issued: when this rank took part in each operation from.
        seen: how much later than the first rank this one saw each operation's result.
    """

    ready: Sequence[tuple[float, GradientKey]]
    issued: Sequence[tuple[float, OperationKey]]
    seen: dict[OperationKey, float]


def pieces(full: Sequence[Stretch], marks: Marks, work_s: Callable[[float, float], float]) -> tuple[Piece, ...]:
    """The program: stretches cut at marks.

    Args:
        full: of one iteration.
        marks: cut it.
        work_s: how much a thread got done from one moment to another, in seconds on a processor of its own.
    """
    at: dict[float, tuple[list[GradientKey], list[OperationKey]]] = {}
    for moment_s, gradient in marks.ready:
        at.setdefault(moment_s, ([], []))[0].append(gradient)
    for moment_s, key in marks.issued:
        at.setdefault(moment_s, ([], []))[1].append(key)
    cuts = sorted(at)
    found: list[Piece] = []
    place = 0
    last_s = full[-1].end_s
    for one in full:
        now_s = one.begin_s
        waits = tuple((key, marks.seen.get(key, 0.0)) for key in one.waits)
        while place < len(cuts) and (cuts[place] <= one.end_s or one.end_s >= last_s):
            until_s = max(now_s, min(cuts[place], one.end_s))
            ready, issued = at[cuts[place]]
            found.append(_piece(one, now_s, until_s, work_s, waits, tuple(ready), tuple(issued)))
            now_s, waits = until_s, ()
            place += 1
        if one.end_s > now_s or waits:
            found.append(_piece(one, now_s, one.end_s, work_s, waits))
    return tuple(found)


def _piece(
    one: Stretch,
    begin_s: float,
    end_s: float,
    work_s: Callable[[float, float], float],
    waits: tuple[tuple[OperationKey, float], ...],
    ready: tuple[GradientKey, ...] = (),
    issues: tuple[OperationKey, ...] = (),
) -> Piece:
    seconds = 0.0 if one.waits else work_s(begin_s, end_s) if one.computes else end_s - begin_s
    return Piece(
        activity=one.activity,
        phase=one.phase,
        name=one.name,
        seconds=seconds,
        computes=one.computes,
        waits=waits,
        ready=ready,
        issues=issues,
        module=one.module,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """One operation of several ranks; moments of the job's clock.

    Attributes:
        key: which.
        activity: `Activity.UNIT` or `Activity.COLLECTIVE`.
        lane: its stream.
        n_bytes: of a rank's input.
        name: for people.
        route: of a unit.
        issued_s: when each rank took part in it from.
        begin_s: when it began.
        done_s: when each rank saw its result; none before it began.
    """

    key: OperationKey
    activity: Activity
    lane: str
    n_bytes: int
    name: str
    route: Route | None
    issued_s: Mapping[int, float]
    begin_s: float
    done_s: Mapping[int, float]

    @property
    def ranks(self) -> tuple[int, ...]:
        """That took part."""
        return tuple(sorted(self.issued_s))

    @property
    def end_s(self) -> float:
        """When the first rank saw the result."""
        return min(self.done_s.values())

    @property
    def lags_s(self) -> dict[int, float]:
        """How much later than the first each rank saw it."""
        return {rank: done_s - self.end_s for rank, done_s in self.done_s.items()}


class Barriers:
    """Those of one iteration after the other; streams that are busy with one keep the next waiting."""

    def __init__(self, buffers: tuple[Buffer, ...]) -> None:
        self._buffers = {buffer.number: buffer for buffer in buffers}
        self._free_s: dict[str, float] = {}

    def of(self, iterations: Mapping[int, RecordedIteration], clocks: Mapping[int, Clock]) -> list[Barrier]:
        """Of one iteration of all ranks, in the order in which they began."""
        issued: dict[OperationKey, dict[int, float]] = defaultdict(dict)
        done: dict[OperationKey, dict[int, float]] = defaultdict(dict)
        what: dict[OperationKey, tuple[Activity, str, int, str, Route | None]] = {}
        for rank, iteration in iterations.items():
            clock = clocks[rank]
            for one in iteration.units:
                key = (one.unit.buffer, one.unit.start, one.unit.stop)
                issued[key][rank], done[key][rank] = clock(one.issue_s), clock(one.done_s)
                layout = self._buffers[one.unit.buffer].layout
                lane = f"{one.unit.route[0].value} stream {one.unit.stream}"
                n_bytes = (one.unit.stop - one.unit.start) * layout.itemsize_bytes
                name = layout.describe(one.unit.start, one.unit.stop) if layout.names else f"unit {one.unit.start}"
                what[key] = Activity.UNIT, lane, n_bytes, name, one.unit.route
            for place, other in enumerate(iteration.collectives):
                key = (-1, place, 0)
                issued[key][rank], done[key][rank] = clock(other.begin_s), clock(other.end_s)
                what[key] = Activity.COLLECTIVE, f"{other.kind}s", other.n_bytes, other.name, None
        found = []
        for key in sorted(issued, key=lambda key: (max(issued[key].values()), key)):
            activity, lane, n_bytes, name, route = what[key]
            begin_s = max(*issued[key].values(), self._free_s.get(lane, 0.0))
            barrier = Barrier(
                key=key,
                activity=activity,
                lane=lane,
                n_bytes=n_bytes,
                name=name,
                route=route,
                issued_s=issued[key],
                begin_s=begin_s,
                done_s={rank: max(done_s, begin_s) for rank, done_s in done[key].items()},
            )
            self._free_s[lane] = max(barrier.done_s.values())
            found.append(barrier)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration; moments of the job's clock.

    Attributes:
        number: `RecordedIteration.number`.
        barriers: in the order in which they began.
        stretches: of each rank's training thread, without a gap.
        marks: of each rank.
    """

    number: int
    barriers: Sequence[Barrier]
    stretches: Mapping[int, Sequence[Stretch]]
    marks: Mapping[int, Marks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histories:
    """All of them.

    Attributes:
        recording: that they are of.
        steps: one behind the other.
        begin_s: how much later than the first rank each one begins.
        clocks: of each rank, to the job's.
    """

    recording: Recording
    steps: Sequence[Step]
    begin_s: Mapping[int, float]
    clocks: Mapping[int, Clock]

    @property
    def ranks(self) -> tuple[int, ...]:
        """That there is something of."""
        return tuple(self.begin_s)

    @property
    def hosts(self) -> dict[int, int]:
        """Of each rank, by the lowest rank there."""
        return {place.rank: place.host for place in self.recording.job.placement if place.rank in self.begin_s}

    def crosses_hosts(self, barrier: Barrier) -> bool:
        """Whether it needs the link."""
        hosts = self.hosts
        return len({hosts[rank] for rank in barrier.ranks}) > 1


def histories(recording: Recording) -> Histories:
    """Reads them: `Recording.usual_iterations`.

    Raises:
        ReplayError: no iteration is there of all ranks.
    """
    ranks = tuple(sorted(recording.ranks))
    known = {rank: {one.number: one for one in recording.ranks[rank].iterations} for rank in ranks}
    if not (numbers := recording.usual_iterations):
        raise ReplayError("no iteration was recorded on all ranks, so there is nothing to replay")
    iterations = [{rank: known[rank][number] for rank in ranks} for number in numbers]
    clocks = _clocks(recording, iterations[0])
    barriers = Barriers(recording.job.buffers)
    reducers = {buffer.number: buffer.reducer for buffer in recording.job.buffers}
    steps = []
    for number, each in zip(numbers, iterations, strict=True):
        found = barriers.of(each, clocks)
        steps.append(
            Step(
                number=number,
                barriers=found,
                stretches={
                    rank: with_waits(
                        stretches(one, clocks[rank], recording.ranks[rank].modules), _waits(rank, one, found, reducers)
                    )
                    for rank, one in each.items()
                },
                marks={rank: _marks(rank, one, found, clocks[rank]) for rank, one in each.items()},
            )
        )
    begins_s = {rank: clocks[rank](one.begin_s) for rank, one in iterations[0].items()}
    return Histories(recording=recording, steps=steps, begin_s=begins_s, clocks=clocks)


def _waits(
    rank: int,
    iteration: RecordedIteration,
    barriers: Sequence[Barrier],
    reducers: Mapping[int, tuple[int, int]],
) -> list[Wait]:
    mine = [one for one in barriers if rank in one.ranks]
    waits = [
        Wait(begin_s=one.issued_s[rank], end_s=one.done_s[rank], keys=(one.key,))
        for one in mine
        if one.activity is Activity.COLLECTIVE
    ]
    by_reducer: dict[tuple[int, int], list[Barrier]] = defaultdict(list)
    for one in mine:
        if one.activity is Activity.UNIT:
            by_reducer[reducers[one.key[0]]].append(one)
    for units in by_reducer.values():
        end_s = max(one.done_s[rank] for one in units)
        begin_s = max(one.issued_s[rank] for one in units)
        if len(by_reducer) == 1 and iteration.exposed_s > 0:
            begin_s = max(begin_s, end_s - iteration.exposed_s)
        last = {one.lane: one.key for one in units}
        waits.append(Wait(begin_s=begin_s, end_s=end_s, keys=tuple(last.values()), until_backward_ends=True))
    return waits


def _marks(rank: int, iteration: RecordedIteration, barriers: Sequence[Barrier], clock: Clock) -> Marks:
    mine = [one for one in barriers if rank in one.ranks]
    return Marks(
        ready=[(clock(one.ready_s), (one.buffer, one.index)) for one in iteration.ready],
        issued=[(one.issued_s[rank], one.key) for one in mine],
        seen={one.key: one.lags_s[rank] for one in mine},
    )


def _clocks(recording: Recording, first: Mapping[int, RecordedIteration]) -> dict[int, Clock]:
    """To the job's clock, which shows 0 when the first rank begins.

    Units tell of drift, but leave as much room as they take; where that is more than what the question at the start of
    the recording may be wrong by, its answer holds.
    """
    found = align(recording)
    asked_s = max(one.round_trip_s for one in recording.ranks.values()) / 2
    clocks = {
        rank: _by_units(found, rank) if found.error_s <= asked_s else _by_start(recording, rank) for rank in first
    }
    origin_s = min(clocks[rank](one.begin_s) for rank, one in first.items())
    return {rank: _since(origin_s, clock) for rank, clock in clocks.items()}


def _by_units(found: Alignment, rank: int) -> Clock:
    return lambda moment_s: found.at(rank, moment_s)


def _by_start(recording: Recording, rank: int) -> Clock:
    offset_s = recording.ranks[rank].offset_s
    return lambda moment_s: moment_s + offset_s


def _since(origin_s: float, clock: Clock) -> Clock:
    return lambda moment_s: clock(moment_s) - origin_s
