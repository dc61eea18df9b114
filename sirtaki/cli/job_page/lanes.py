"""What each rank did in one iteration, lane by lane, in ticks since it began: what the timeline draws."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sirtaki.autotune.model.graph import Activity
from sirtaki.profiler.recording import Operator
from sirtaki.replay.histories import Histories, Step
from sirtaki.replay.history import Clock, Stretch

from .exposure import LEAST_S, backward_ends_s
from .kinds import OF_PHASE, Kind, kind_of

COPIES = "copies"
TRAINING = "training thread"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One box; moments of the job's clock.

    Attributes:
        name: empty of a phase.
        issued_s: of a unit: from when on this rank waited for it to begin.
        n_bytes: of a unit or another operation between ranks.
    """

    begin_s: float
    end_s: float
    kind: Kind
    name: str = ""
    issued_s: float | None = None
    n_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row.

    Attributes:
        rank: whose.
        name: what it is.
        under: phases, behind the boxes.
        spans: boxes in their order.
    """

    rank: int
    name: str
    under: tuple[Span, ...] = ()
    spans: tuple[Span, ...] = ()


def lanes_of(histories: Histories, step: Step, ranks: Sequence[int]) -> list[Lane]:
    """The lanes of these ranks, those of a rank together."""
    return [lane for rank in ranks for lane in _of_rank(histories, step, rank)]


def _of_rank(histories: Histories, step: Step, rank: int) -> Iterator[Lane]:
    stretches = step.stretches[rank]
    named = [
        one
        for one in stretches
        if (one.name or one.waits) and one.end_s > one.begin_s and one.activity is not Activity.COPY
    ]
    yield Lane(rank=rank, name=TRAINING, under=tuple(_runs(stretches)), spans=tuple(map(_span, named)))
    yield from _other_threads(histories, step, rank)
    copies = [one for one in stretches if one.activity is Activity.COPY]
    if copies:
        yield Lane(rank=rank, name=COPIES, spans=tuple(map(_span, copies)))
    yield from _streams(histories, step, rank)


def _span(one: Stretch) -> Span:
    kind = kind_of(one)
    waited = "waits for gradients" if kind is Kind.EXPOSED else "waits for other ranks"
    return Span(begin_s=one.begin_s, end_s=one.end_s, kind=kind, name=waited if one.waits else one.name)


def _runs(stretches: Iterable[Stretch]) -> list[Span]:
    """Phases: neighbours of one kind, waits and copies left out."""
    found: list[Span] = []
    for one in stretches:
        kind = kind_of(one)
        if one.waits or one.activity is Activity.COPY or one.end_s <= one.begin_s:
            continue
        if found and found[-1].kind is kind and found[-1].end_s == one.begin_s:
            found[-1] = replace(found[-1], end_s=one.end_s)
        else:
            found.append(Span(begin_s=one.begin_s, end_s=one.end_s, kind=kind))
    return found


def _other_threads(histories: Histories, step: Step, rank: int) -> Iterator[Lane]:
    """Threads beside the one that trains, and streams of devices."""
    recorded, clock = histories.recording.ranks[rank], histories.clocks[rank]
    (iteration,) = (one for one in recorded.iterations if one.number == step.number)
    beside: dict[int, list[Span]] = {}
    for one in iteration.operators:
        if one.lane:
            beside.setdefault(one.lane, []).append(_operator(one, clock))
    for number, spans in sorted(beside.items()):
        name = recorded.lanes[number] if number < len(recorded.lanes) else f"lane {number}"
        yield Lane(rank=rank, name=name, spans=tuple(sorted(spans, key=lambda span: span.begin_s)))


def _operator(one: Operator, clock: Clock) -> Span:
    return Span(begin_s=clock(one.begin_s), end_s=clock(one.end_s), kind=OF_PHASE[one.phase], name=one.name)


def _streams(histories: Histories, step: Step, rank: int) -> Iterator[Lane]:
    ends_s = backward_ends_s(histories, step, rank)
    reducers = {buffer.number: buffer.reducer for buffer in histories.recording.job.buffers}
    found: dict[str, list[Span]] = {}
    for one in step.barriers:
        if rank not in one.issued_s:
            continue
        kind = Kind.COLLECTIVE
        if one.activity is Activity.UNIT:
            end_s = ends_s.get(reducers[one.key[0]])
            late = end_s is not None and one.done_s[rank] > end_s + LEAST_S
            kind = Kind.EXPOSED if late else Kind.UNIT
        span = Span(
            begin_s=one.begin_s,
            end_s=one.done_s[rank],
            kind=kind,
            name=one.name,
            issued_s=one.issued_s[rank],
            n_bytes=one.n_bytes,
        )
        found.setdefault(one.lane, []).append(span)
    for name, spans in sorted(found.items()):
        yield Lane(rank=rank, name=name, spans=tuple(sorted(spans, key=lambda span: span.begin_s)))


def coarsened(lanes: Sequence[Lane], least_s: float) -> list[Lane]:
    """Neighbours on a thread that are all of one kind and shorter than that become one box, with the gaps between."""
    return [replace(lane, spans=tuple(_joined(lane.spans, least_s))) for lane in lanes]


def _joined(spans: Sequence[Span], least_s: float) -> list[Span]:
    found: list[Span] = []
    counts: list[int] = []
    for one in spans:
        before = found[-1] if found else None
        short = one.end_s - one.begin_s < least_s and one.issued_s is None
        if (
            before is not None
            and short
            and before.kind is one.kind
            and before.end_s - before.begin_s < least_s
            and one.begin_s - before.end_s < least_s
        ):
            counts[-1] += 1
            what = one.name if before.name in (one.name, f"{counts[-1] - 1} × {one.name}") else "operators"
            found[-1] = replace(before, end_s=one.end_s, name=f"{counts[-1]} × {what}")
        else:
            found.append(one)
            counts.append(1)
    return found
