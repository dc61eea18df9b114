"""The nodes of Chakra execution traces: what each rank did in the recorded iterations, and what each thing waited for.

Times are those of the recording, whole microseconds of the job's clock. Both ends of a node are rounded, not its
length, so the lengths of a chain add up to the recorded time however short its operators are. A collective node lasts
from when its last rank has come, and its stream is free, until this rank sees the result: whoever lets it begin then
gets the recorded step back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sirtaki.autotune.model.graph import Activity, Phase
from sirtaki.profiler.recording import Operator, RecordedIteration

from ..barriers import Barrier
from ..histories import Histories, Step
from ..history import pieces
from ..job_model import OperationKey, Piece

ALL_RANKS = 0
"""`Collective.group` of all of them, as ASTRA-sim has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What a node does with other ranks.

    Attributes:
        kind: such as "allreduce".
        n_bytes: of this rank's input.
        group: which ranks take part (`Traces.groups`).
        stream: what it runs on, one at a time.
    """

    kind: str
    n_bytes: int
    group: int
    stream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceNode:
    """One thing that a rank did.

    Attributes:
        number: within its rank; collectives have the same on all ranks that take part.
        iteration: `RecordedIteration.number`.
        begin_us, end_us: of the job's clock, which shows 0 when the first rank begins.
        before: the node before it on its thread or stream; None = there is none.
        after: all that it waits for, `before` included.
        collective: None = the rank does it alone.
    """

    number: int
    name: str
    iteration: int
    activity: Activity
    phase: Phase
    begin_us: int
    end_us: int
    before: int | None
    after: tuple[int, ...]
    collective: Collective | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Of all ranks.

    Attributes:
        nodes: by rank, each after what it waits for.
        groups: ranks by `Collective.group`; all of them have `ALL_RANKS`, and stand here, too.
    """

    nodes: Mapping[int, Sequence[TraceNode]]
    groups: Mapping[int, tuple[int, ...]]


def traces(histories: Histories) -> Traces:
    """Those of all iterations that are replayed, one behind the other."""
    groups = {histories.ranks: ALL_RANKS}
    for step in histories.steps:
        for one in step.barriers:
            groups.setdefault(one.ranks, len(groups))
    numbers: dict[tuple[int, OperationKey], int] = {}
    for step in histories.steps:
        numbers |= {(step.number, one.key): len(numbers) + place for place, one in enumerate(step.barriers)}
    found = {rank: _RankTrace(histories, rank, groups, numbers) for rank in histories.ranks}
    return Traces(
        nodes={rank: trace.nodes() for rank, trace in found.items()},
        groups={group: ranks for ranks, group in groups.items()},
    )


def _us(moment_s: float) -> int:
    return round(1e6 * moment_s)


@dataclass(slots=True)
class _RankTrace:
    """One rank's nodes while they are found.

    `seen` are results that the thread has waited for since its last node.
    """

    histories: Histories
    rank: int
    groups: Mapping[tuple[int, ...], int]
    numbers: Mapping[tuple[int, OperationKey], int]
    found: list[TraceNode] = field(default_factory=list)
    count: int = 0
    now_s: float = 0.0
    last: int | None = None
    seen: list[int] = field(default_factory=list)
    last_on: dict[str, int] = field(default_factory=dict)

    def nodes(self) -> Sequence[TraceNode]:
        self.count = len(self.numbers)
        recorded = {one.number: one for one in self.histories.recording.ranks[self.rank].iterations}
        for step in self.histories.steps:
            self._step(step, recorded[step.number])
        if self.seen:
            self._own("the end", step.number, Activity.COMPUTE, Phase.OTHER, 0.0)
        return self.found

    def _step(self, step: Step, iteration: RecordedIteration) -> None:
        barriers = {one.key: one for one in step.barriers if self.rank in one.ranks}
        operators = _Operators(iteration.operators, self.histories.clocks[self.rank])
        own: dict[int, int] = {}  # by place of an operator: the last node of it
        gap_s = step.stretches[self.rank][0].begin_s - self.now_s
        if gap_s > 0:
            self._own("between steps", step.number, Activity.COMPUTE, Phase.OTHER, gap_s)
        for piece in pieces(step.stretches[self.rank], step.marks[self.rank], lambda begin_s, end_s: end_s - begin_s):
            self.seen += [self.numbers[step.number, key] for key, _ in piece.waits]
            self.now_s = max([self.now_s, *(barriers[key].done_s[self.rank] for key, _ in piece.waits)])
            if piece.seconds <= 0 and not piece.issues:
                continue
            place = operators.at(self.now_s + piece.seconds / 2) if piece.name else None
            reads = () if place is None or place in own else iteration.operators[place].after
            self._own(
                _name(piece),
                step.number,
                piece.activity,
                piece.phase,
                piece.seconds,
                reads=[own[other] for other in reads if other in own],
            )
            if place is not None and self.last is not None:
                own[place] = self.last
            for key in piece.issues:
                kind = "allreduce" if key[0] >= 0 else iteration.collectives[key[1]].kind.lower()
                self._collective(step.number, barriers[key], kind)

    def _own(
        self,
        name: str,
        iteration: int,
        activity: Activity,
        phase: Phase,
        seconds: float,
        *,
        reads: Sequence[int] = (),
    ) -> None:
        before = self.last
        end_s = self.now_s + seconds
        self.found.append(
            TraceNode(
                number=self.count,
                name=name,
                iteration=iteration,
                activity=activity,
                phase=phase,
                begin_us=_us(self.now_s),
                end_us=_us(end_s),
                before=before,
                after=_once([*([] if before is None else [before]), *self.seen, *reads]),
            )
        )
        self.last, self.now_s, self.seen = self.count, end_s, []
        self.count += 1

    def _collective(self, iteration: int, one: Barrier, kind: str) -> None:
        number, before = self.numbers[iteration, one.key], self.last_on.get(one.lane)
        issued = [] if self.last is None else [self.last]
        self.found.append(
            TraceNode(
                number=number,
                name=one.name,
                iteration=iteration,
                activity=one.activity,
                phase=Phase.OTHER,
                begin_us=_us(one.begin_s),
                end_us=_us(one.done_s[self.rank]),
                before=before,
                after=_once([*([] if before is None else [before]), *issued]),
                collective=Collective(kind=kind, n_bytes=one.n_bytes, group=self.groups[one.ranks], stream=one.lane),
            )
        )
        self.last_on[one.lane] = number


def _once(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(numbers))


def _name(piece: Piece) -> str:
    """The script's own doings have none."""
    return piece.name or f"{piece.phase.value}, between operators"


class _Operators:
    """Those of the thread that trains, by when they ran."""

    def __init__(self, operators: Sequence[Operator], clock: Callable[[float], float]) -> None:
        own = [(clock(one.begin_s), clock(one.end_s), place) for place, one in enumerate(operators) if one.lane == 0]
        self._spans = sorted(own)
        self._begins_s = [begin_s for begin_s, _, _ in self._spans]

    def at(self, moment_s: float) -> int | None:
        """The place of the one that ran then; None = there was none."""
        found = bisect_right(self._begins_s, moment_s) - 1
        if found < 0:
            return None
        _, end_s, place = self._spans[found]
        return place if moment_s <= end_s else None
