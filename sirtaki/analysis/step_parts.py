"""Divide the time of a training step by kind, and find exposed communication (waits for gradients) and the units
(buckets) that are waited for.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from sirtaki.autotune.model.replayer import Activity, Phase

from .job_model import Histories, OperationKey, Stretch, TimedBarrier, TimedStep


class TimeKind(Enum):
    """Kind of activity for which the training thread uses its time. The bars of a plot are stacked in this order."""

    DATA = "data loading"
    FORWARD = "forward"
    BACKWARD = "backward computation"
    COPY = "copying gradients"
    EXPOSED = "exposed communication"
    UPDATE = "update"
    COLLECTIVE = "other operations between ranks"
    OTHER = "other, gaps"


COLORS = {
    TimeKind.DATA: "#e69f00",
    TimeKind.FORWARD: "#0072b2",
    TimeKind.BACKWARD: "#56b4e9",
    TimeKind.COPY: "#a58a3c",
    TimeKind.EXPOSED: "#d1366b",
    TimeKind.UPDATE: "#009e73",
    TimeKind.COLLECTIVE: "#d55e00",
    TimeKind.OTHER: "#8b9096",
}
"""Colour of each kind of time in a plot. The colours can be told apart on white and on black, and with common forms of
colour blindness."""

UNDIVIDED = "forward, data loading, other (divided only if operators are recorded)"

OF_PHASE = {
    Phase.DATA: TimeKind.DATA,
    Phase.FORWARD: TimeKind.FORWARD,
    Phase.BACKWARD: TimeKind.BACKWARD,
    Phase.UPDATE: TimeKind.UPDATE,
    Phase.OTHER: TimeKind.OTHER,
}


def kind_of(one: Stretch) -> TimeKind:
    """Return the kind of time (such as forward, or exposed communication) of one interval of a training thread."""
    if one.waits:
        return TimeKind.EXPOSED if waits_for_gradients(one) else TimeKind.COLLECTIVE
    if one.activity is Activity.COPY:
        return TimeKind.COPY
    return OF_PHASE[one.phase]


def waits_for_gradients(one: Stretch) -> bool:
    """Return whether the training thread waits for the all-reduce of at least one unit (bucket) in this interval."""
    return any(buffer >= 0 for buffer, _, _ in one.waits)


class StepParts(NamedTuple):
    """Time of one rank's training step, divided by kind (such as forward), as a mean over iterations.

    Attributes:
        rank: rank whose step is divided.
        seconds: seconds per step of each kind of time that occurs.
    """

    rank: int
    seconds: Mapping[TimeKind, float]

    @property
    def step_s(self) -> float:
        """Return the duration of the step in seconds."""
        return sum(self.seconds.values())


def step_parts(histories: Histories) -> tuple[StepParts, ...]:
    """Return the step time of every rank, divided by kind of time (such as forward, or exposed communication)."""
    found, count = [], len(histories.steps)
    for rank in histories.ranks:
        total_s: dict[TimeKind, float] = defaultdict(float)
        for step in histories.steps:
            for one in step.stretches[rank]:
                total_s[kind_of(one)] += one.end_s - one.begin_s
        found.append(StepParts(rank, {kind: total_s[kind] / count for kind in TimeKind if total_s.get(kind)}))
    return tuple(found)


MIN_LATE_S = 1e-6
"""Seconds after the end of the backward pass within which the all-reduce of a unit (bucket) may end without counting as
late."""


class RankExposure(NamedTuple):
    """One rank's waits for gradients, as means per iteration.

    Attributes:
        rank: rank that waited.
        moving_s: seconds of waiting while a unit (bucket) of this rank was being all-reduced.
        held_s: seconds of waiting while no unit was being all-reduced, because another rank had not issued the next
            one.
    """

    rank: int
    moving_s: float
    held_s: float

    @property
    def exposed_s(self) -> float:
        """Return how many seconds per iteration this rank waited for gradients in total."""
        return self.moving_s + self.held_s


class LateUnit(NamedTuple):
    """A unit (bucket) whose all-reduce ends after the backward pass, so that the training thread waits for it.

    Times are relative to the end of the backward pass, as means over ranks and iterations.

    Attributes:
        unit: the unit in one of the iterations.
        issue_s: time at which a rank issues the unit.
        begin_s: time at which the all-reduce begins, because all ranks have issued the unit and its stream is free.
        done_s: time at which the reduced gradients are available.
        late_s: seconds from the end of the backward pass to the end of the all-reduce; iterations in which the
            all-reduce ends before count as 0.
        times: number of iterations in which the unit was late on any rank.
    """

    unit: TimedBarrier
    issue_s: float
    begin_s: float
    done_s: float
    late_s: float
    times: int


def backward_ends_s(histories: Histories, step: TimedStep, rank: int) -> dict[tuple[int, int], float]:
    """Return the moment of a step at which this rank begins to wait for gradients, for each reducer (object that
    all-reduces an optimizer's gradients). Moments are on the common clock of the job.
    """
    reducers = _reducers(histories)
    waits = [one for one in step.stretches[rank] if waits_for_gradients(one)]
    return {reducers[key[0]]: one.begin_s for one in waits for key in one.waits if key[0] in reducers}


def _reducers(histories: Histories) -> dict[int, tuple[int, int]]:
    return {buffer.number: buffer.reducer for buffer in histories.recording.job.buffers}


def exposures(histories: Histories) -> tuple[RankExposure, ...]:
    """Return the waits of every rank for reduced gradients, as means per iteration."""
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


def _busy(barriers: Sequence[TimedBarrier], rank: int) -> list[tuple[float, float]]:
    """Return the intervals in which at least one unit (bucket) of this rank was being all-reduced. The intervals do not
    overlap.
    """
    found: list[tuple[float, float]] = []
    own = [one for one in barriers if one.activity is Activity.UNIT and rank in one.issued_s]
    for begin_s, end_s in sorted((one.begin_s, one.done_s[rank]) for one in own):
        if found and begin_s <= found[-1][1]:
            begin_s, before_s = found.pop()
            end_s = max(before_s, end_s)
        found.append((begin_s, end_s))
    return found


def late_units(histories: Histories) -> tuple[LateUnit, ...]:
    """Return the units (buckets) whose all-reduce ends after the backward pass on some rank, in the order in which they
    end.
    """
    units: dict[OperationKey, TimedBarrier] = {}
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
            times[one.key] += any(done_s > MIN_LATE_S for _, _, done_s in after)
    late = []
    for key, count in (+times).items():
        issue_s, begin_s, done_s = map(statistics.fmean, zip(*moments[key], strict=True))
        late_s = statistics.fmean(max(0.0, done) for _, _, done in moments[key])
        late.append(LateUnit(units[key], issue_s, begin_s, done_s, late_s, count))
    return tuple(sorted(late, key=lambda one: one.done_s))
