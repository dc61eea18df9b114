"""The timeline of a step as a page shows it: lanes, exposed communication, the critical path."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from sirtaki.autotune.model.replayer import ALL_RANKS, Activity, Phase, Replay

from .global_graph import BEFORE, critical_path
from .job_model import Barrier, Histories, OperationKey, Step, Stretch


class Kind(Enum):
    """In the order in which bars are stacked; the last one is only on streams."""

    DATA = "data loading"
    FORWARD = "forward"
    BACKWARD = "backward computation"
    COPY = "copying gradients"
    EXPOSED = "exposed communication"
    UPDATE = "update"
    COLLECTIVE = "other operations between ranks"
    OTHER = "other, gaps"
    UNIT = "hidden communication"


COLORS = {
    Kind.DATA: "#e69f00",
    Kind.FORWARD: "#0072b2",
    Kind.BACKWARD: "#56b4e9",
    Kind.COPY: "#a58a3c",
    Kind.EXPOSED: "#d1366b",
    Kind.UPDATE: "#009e73",
    Kind.COLLECTIVE: "#d55e00",
    Kind.OTHER: "#8b9096",
    Kind.UNIT: "#9a78c2",
}
"""Told apart on white and on black, and by most who see few colours."""

NOT_TOLD_APART = "forward, data loading, other (told apart only where operators are recorded)"

OF_PHASE = {
    Phase.DATA: Kind.DATA,
    Phase.FORWARD: Kind.FORWARD,
    Phase.BACKWARD: Kind.BACKWARD,
    Phase.UPDATE: Kind.UPDATE,
    Phase.OTHER: Kind.OTHER,
}


def kind_of(one: Stretch) -> Kind:
    """Return the kind of what a rank's training thread does for a while."""
    if one.waits:
        return Kind.EXPOSED if waits_for_gradients(one) else Kind.COLLECTIVE
    if one.activity is Activity.COPY:
        return Kind.COPY
    return OF_PHASE[one.phase]


def waits_for_gradients(one: Stretch) -> bool:
    """Units are waited for, perhaps among other things."""
    return any(buffer >= 0 for buffer, _, _ in one.waits)


class StepParts(NamedTuple):
    """The kinds of time of one rank's step, means over its iterations.

    Attributes:
        rank: which.
        seconds: spent on each kind of thing; what is not there is left out.
    """

    rank: int
    seconds: Mapping[Kind, float]

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self.seconds.values())


def step_parts(histories: Histories) -> tuple[StepParts, ...]:
    """Return what the step of every rank is made of."""
    found, count = [], len(histories.steps)
    for rank in histories.ranks:
        total_s: dict[Kind, float] = defaultdict(float)
        for step in histories.steps:
            for one in step.stretches[rank]:
                total_s[kind_of(one)] += one.end_s - one.begin_s
        found.append(StepParts(rank, {kind: total_s[kind] / count for kind in Kind if total_s.get(kind)}))
    return tuple(found)


LEAST_S = 1e-6
"""A unit that ends so shortly after the backward pass is not late."""


class RankExposure(NamedTuple):
    """One rank's waiting for gradients; means of an iteration.

    Attributes:
        rank: which.
        moving_s: a unit was under way meanwhile.
        held_s: none was, since another rank had not come so far yet.
    """

    rank: int
    moving_s: float
    held_s: float

    @property
    def exposed_s(self) -> float:
        """All waiting."""
        return self.moving_s + self.held_s


class LateUnit(NamedTuple):
    """A unit that ends after a backward pass. Moments are seconds after the end of that, means of ranks and iterations.

    Attributes:
        unit: as it was in one iteration.
        issue_s: a rank has its gradients ready.
        begin_s: all have, and the stream is free.
        done_s: the result is there.
        late_s: of `done_s` what is after the end.
        times: in how many iterations it was late on any rank.
    """

    unit: Barrier
    issue_s: float
    begin_s: float
    done_s: float
    late_s: float
    times: int


def backward_ends_s(histories: Histories, step: Step, rank: int) -> dict[tuple[int, int], float]:
    """When this rank begins to wait for the gradients of each reducer, by the job's clock."""
    reducers = _reducers(histories)
    waits = [one for one in step.stretches[rank] if waits_for_gradients(one)]
    return {reducers[key[0]]: one.begin_s for one in waits for key in one.waits if key[0] in reducers}


def _reducers(histories: Histories) -> dict[int, tuple[int, int]]:
    return {buffer.number: buffer.reducer for buffer in histories.recording.job.buffers}


def exposures(histories: Histories) -> tuple[RankExposure, ...]:
    """Return how long every rank waits for gradients."""
    found, count = [], len(histories.steps)
    for rank in histories.ranks:
        moving_s = total_s = 0.0
        for step in histories.steps:
            busy = _busy(step.barriers, rank)
            for one in filter(waits_for_gradients, step.stretches[rank]):
                total_s += one.end_s - one.begin_s
                moving_s += sum(max(0.0, min(end_s, one.end_s) - max(begin_s, one.begin_s)) for begin_s, end_s in busy)
        found.append(RankExposure(rank, moving_s / count, (total_s - moving_s) / count))
    return tuple(found)


def _busy(barriers: Sequence[Barrier], rank: int) -> list[tuple[float, float]]:
    """When units of this rank were under way; intervals that do not overlap."""
    found: list[tuple[float, float]] = []
    mine = [one for one in barriers if one.activity is Activity.UNIT and rank in one.issued_s]
    for begin_s, end_s in sorted((one.begin_s, one.done_s[rank]) for one in mine):
        if found and begin_s <= found[-1][1]:
            begin_s, before_s = found.pop()
            end_s = max(before_s, end_s)
        found.append((begin_s, end_s))
    return found


def late_units(histories: Histories) -> tuple[LateUnit, ...]:
    """Return units that end after the backward pass on some rank, in the order in which they end."""
    units: dict[OperationKey, Barrier] = {}
    moments: dict[OperationKey, list[tuple[float, float, float]]] = defaultdict(list)
    times = Counter[OperationKey]()
    reducers = _reducers(histories)
    for step in histories.steps:
        ends_s = {rank: backward_ends_s(histories, step, rank) for rank in histories.ranks}
        for one in (one for one in step.barriers if one.activity is Activity.UNIT):
            units[one.key] = one
            after = [
                (one.issued_s[rank] - end_s, one.begin_s - end_s, one.done_s[rank] - end_s)
                for rank in one.ranks
                if (end_s := ends_s[rank].get(reducers[one.key[0]])) is not None
            ]
            moments[one.key] += after
            times[one.key] += any(done_s > LEAST_S for _, _, done_s in after)
    late = []
    for key, count in (+times).items():
        issue_s, begin_s, done_s = map(statistics.fmean, zip(*moments[key], strict=True))
        late_s = statistics.fmean(max(0.0, done) for _, _, done in moments[key])
        late.append(LateUnit(units[key], issue_s, begin_s, done_s, late_s, count))
    return tuple(sorted(late, key=lambda one: one.done_s))


COPIES = "copies"
TRAINING = "training thread"


class Span(NamedTuple):
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


class Lane(NamedTuple):
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
    return [lane for rank in ranks for lane in _lanes_of_rank(histories, step, rank)]


def _lanes_of_rank(histories: Histories, step: Step, rank: int) -> Iterator[Lane]:
    stretches, clock = step.stretches[rank], histories.clocks[rank]
    recorded, reducers = histories.recording.ranks[rank], _reducers(histories)

    def lane(name: str, spans: Iterable[Span], under: Sequence[Span] = ()) -> Lane:
        return Lane(rank, name, tuple(under), tuple(sorted(spans, key=lambda span: span.begin_s)))

    named, copies = list[Span](), list[Span]()
    for one in stretches:
        kind = kind_of(one)
        waited = "waits for gradients" if kind is Kind.EXPOSED else "waits for other ranks"
        span = Span(one.begin_s, one.end_s, kind, waited if one.waits else one.name)
        if one.activity is Activity.COPY:
            copies.append(span)
        elif span.name and span.end_s > span.begin_s:
            named.append(span)
    yield lane(TRAINING, named, _runs(stretches))
    beside: dict[int, list[Span]] = defaultdict(list)  # other threads, and streams of devices
    for operator in next(one.operators for one in recorded.iterations if one.number == step.number):
        if operator.lane:
            moments_s = clock(operator.begin_s), clock(operator.end_s)
            beside[operator.lane].append(Span(*moments_s, OF_PHASE[operator.phase], operator.name))
    for number, spans in sorted(beside.items()):
        yield lane(recorded.lanes[number] if number < len(recorded.lanes) else f"lane {number}", spans)
    if copies:
        yield lane(COPIES, copies)
    ends_s, streams = backward_ends_s(histories, step, rank), defaultdict[str, list[Span]](list)
    for each in (each for each in step.barriers if rank in each.issued_s):
        done_s, kind = each.done_s[rank], Kind.COLLECTIVE
        if each.activity is Activity.UNIT:
            backward_end_s = ends_s.get(reducers[each.key[0]], math.inf)
            kind = Kind.EXPOSED if done_s > backward_end_s + LEAST_S else Kind.UNIT
        span = Span(each.begin_s, done_s, kind, each.name, each.issued_s[rank], each.n_bytes)
        streams[each.lane].append(span)
    for name, spans in sorted(streams.items()):
        yield lane(name, spans)


def _runs(stretches: Iterable[Stretch]) -> list[Span]:
    """Phases: neighbours of one kind, waits and copies left out."""
    found: list[Span] = []
    for one in stretches:
        kind = kind_of(one)
        if one.waits or one.activity is Activity.COPY or one.end_s <= one.begin_s:
            continue
        if found and found[-1].kind is kind and found[-1].end_s == one.begin_s:
            found[-1] = found[-1]._replace(end_s=one.end_s)
        else:
            found.append(Span(one.begin_s, one.end_s, kind))
    return found


def coarsened(lanes: Sequence[Lane], least_s: float) -> list[Lane]:
    """Neighbours on a thread that are all of one kind and shorter than that become one box, with the gaps between."""
    return [lane._replace(spans=tuple(_joined(lane.spans, least_s))) for lane in lanes]


def _joined(spans: Sequence[Span], least_s: float) -> list[Span]:
    found: list[Span] = []
    count = 1  # of what the last box is made of
    for one in spans:
        before = found[-1] if found else None
        if (
            before is not None
            and before.kind is one.kind
            and one.issued_s is None
            and max(one.end_s - one.begin_s, before.end_s - before.begin_s, one.begin_s - before.end_s) < least_s
        ):
            what = one.name if before.name in (one.name, f"{count} × {one.name}") else "operators"
            count += 1
            found[-1] = before._replace(end_s=one.end_s, name=f"{count} × {what}")
        else:
            found.append(one)
            count = 1
    return found


class Leg(NamedTuple):
    """A part of the path; moments of the job's clock.

    Attributes:
        rank: on whose lane it is drawn: of what all do together, that of the one which came last.
        lane: which of its lanes.
    """

    rank: int
    lane: str
    begin_s: float
    end_s: float


def drawn_path(histories: Histories, replay: Replay) -> dict[int, tuple[Leg, ...]]:
    """The path of each iteration, by its number.

    The replay's moments are stretched so that each of its iterations lies where the recorded one does.
    """
    nodes, lanes = replay.graph.nodes, replay.graph.lanes
    ends_s, recorded_ends_s = defaultdict[int, float](float), defaultdict[int, float](float)  # of each iteration
    for place, node in enumerate(nodes):
        if node.iteration > BEFORE and node.rank != ALL_RANKS:
            ends_s[node.iteration] = max(ends_s[node.iteration], replay.end_s[place])
    for place, step in enumerate(histories.steps):
        recorded_ends_s[place] = max(mine[-1].end_s for mine in step.stretches.values())
    found: dict[int, list[Leg]] = {step.number: [] for step in histories.steps}
    rank = histories.ranks[0]
    for visit in critical_path(replay):
        node = nodes[visit.place]
        lane = lanes[node.lane]
        if node.rank != ALL_RANKS:
            rank, lane = node.rank, COPIES if node.activity is Activity.COPY else TRAINING
        (first, begin), (last, end) = (
            (ends_s[number], recorded_ends_s[number]) for number in (node.iteration - 1, node.iteration)
        )
        factor = (end - begin) / (last - first) if last > first else 1.0
        begin_s, end_s = (begin + (moment_s - first) * factor for moment_s in (visit.begin_s, visit.end_s))
        number = histories.steps[node.iteration].number
        found[number].append(Leg(rank, lane, begin_s, end_s))
    return {number: tuple(legs) for number, legs in found.items()}


TICKS_PER_S = 10_000_000
MOST_BOXES = 200_000
"""Of all iterations together: 2 to 3 MB."""

FINEST_S, COARSEST_S = 1e-6, 1.0
"""What is shorter may be put together: tried one after the other, each twice the one before."""

KINDS = tuple(Kind)


def timeline(
    histories: Histories,
    ranks: Sequence[int],
    paths: Mapping[int, Sequence[Leg]],
    *,
    kind_names: Mapping[Kind, str],
    most_boxes: int = MOST_BOXES,
) -> tuple[Mapping[str, Any], list[str]]:
    """Return what the page's script draws, and a sentence for each thing that is not in it.

    The median iteration comes first, then as many others as there is room for.

    Args:
        histories: what was recorded.
        ranks: that are drawn.
        paths: the critical path of each iteration, by its number; what is on other ranks is left out.
        kind_names: what kinds of time are called.
        most_boxes: of all iterations together.
    """
    middle = sorted(histories.steps, key=_length_s)[(len(histories.steps) - 1) // 2]
    steps = [middle, *(step for step in histories.steps if step is not middle)]
    drawn = {step.number: lanes_of(histories, step, ranks) for step in steps}
    notes = []
    if sum(map(_boxes, drawn.values())) > most_boxes and len(steps) > 3:
        notes.append(f"Of {len(steps)} iterations the median, the shortest and the longest one are drawn.")
        steps = [steps[0], *sorted(steps[1:], key=_length_s)[:: len(steps) - 2]]
    left = most_boxes
    for place, step in enumerate(steps):
        # The median one may have half of all, the others share what is left.
        most = max(left // 2, left // len(steps)) if place == 0 else left // (len(steps) - place)
        drawn[step.number], least_s = _bounded(drawn[step.number], most)
        left -= _boxes(drawn[step.number])
        if least_s:
            notes.append(
                f"In iteration {step.number} neighbouring operators that are shorter than {1e6 * least_s:.0f} µs are "
                "drawn as one box."
            )
    names: dict[str, int] = {}
    data = {
        "ticks_per_ms": TICKS_PER_S // 1000,
        "kinds": [[kind_names[kind], COLORS[kind]] for kind in KINDS],
        "hosts": {place.rank: place.host_name for place in histories.recording.job.placement},
        "iterations": [_iteration(step, drawn[step.number], paths.get(step.number, ()), names) for step in steps],
        "names": list(names),
    }
    return data, notes


def _length_s(step: Step) -> float:
    return statistics.fmean(mine[-1].end_s - mine[0].begin_s for mine in step.stretches.values())


def _boxes(lanes: Sequence[Lane]) -> int:
    return sum(len(lane.spans) + len(lane.under) for lane in lanes)


def _bounded(lanes: list[Lane], most_boxes: int) -> tuple[list[Lane], float]:
    """Lanes with few enough boxes, and how short those are that were put together; 0 = none."""
    found, least_s = lanes, 0.0
    while _boxes(found) > most_boxes and least_s < COARSEST_S:
        least_s = 2 * least_s or FINEST_S
        found = coarsened(lanes, least_s)
    return found, least_s


def _iteration(step: Step, lanes: Sequence[Lane], path: Sequence[Leg], names: dict[str, int]) -> dict[str, Any]:
    begin_s = min(mine[0].begin_s for mine in step.stretches.values())
    end_s = max(mine[-1].end_s for mine in step.stretches.values())
    places = {(lane.rank, lane.name): place for place, lane in enumerate(lanes)}

    def ticks(moment_s: float) -> int:
        return round((moment_s - begin_s) * TICKS_PER_S)

    def flat(spans: Sequence[Span]) -> list[int]:
        """Boxes one behind the other: gap before, length, kind, name; of units also bytes, and how long they waited."""
        found, now = list[int](), 0
        for span in spans:
            begin, end = ticks(span.begin_s), ticks(span.end_s)
            found += (begin - now, end - begin, KINDS.index(span.kind), names.setdefault(span.name, len(names)))
            if span.issued_s is not None:
                found += (span.n_bytes, max(0, begin - ticks(span.issued_s)))
            now = end
        return found

    return {
        "number": step.number,
        "ms": round(1e3 * _length_s(step), 3),
        "ticks": ticks(end_s),
        "lanes": [
            {
                "rank": lane.rank,
                "name": lane.name,
                "under": flat(lane.under),
                ("units" if any(span.issued_s is not None for span in lane.spans) else "boxes"): flat(lane.spans),
            }
            for lane in lanes
        ],
        "path": [
            [ticks(leg.begin_s), ticks(leg.end_s), places[leg.rank, leg.lane]]
            for leg in path
            if (leg.rank, leg.lane) in places
        ],
    }
