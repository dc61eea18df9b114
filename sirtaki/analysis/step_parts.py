"""Divide the time of a training step by kind, and find exposed communication (waits for gradients) and the units
(buckets) that are waited for.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from sirtaki.autotune.model.replayer import Activity, Phase

from .job_model import Histories, OperationKey, Stretch, TimedBarrier, TimedStep


class TimeKind(Enum):
    """Kind of activity of the training thread. The bars of a plot are stacked in this order."""

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
"""Colour of each kind of time in a plot.

The colours differ on white and on black, and with common forms of colour blindness.
"""

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

    @property
    def own_s(self) -> float:
        """Return the duration of the step in seconds, without waits for gradients and other operations between
        ranks.
        """
        waits = (TimeKind.EXPOSED, TimeKind.COLLECTIVE)
        return sum(seconds for kind, seconds in self.seconds.items() if kind not in waits)


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
"""The all-reduce of a unit (bucket) may end this many seconds after the backward pass without counting as late."""


class ExposureCause(Enum):
    """Cause of a wait for gradients: the reason why the last gradient arrives so late."""

    SLOW_RANK = "slower rank computes"
    COPY = "copies of gradients"
    QUEUE = "queued behind other units"
    TRANSFER = "units in flight"
    RECEIPT = "results arrive late"


class RankExposure(NamedTuple):
    """One rank's waits for gradients, as means per iteration.

    A wait ends when the last unit (bucket) arrives. It is divided into the stages of this unit: the last rank to issue
    the unit still computes or copies, then other units use the unit's stream, then the unit is all-reduced.

    Attributes:
        rank: rank that waited.
        seconds: seconds of waiting, by cause.
        slower_s: seconds of waiting for the computation of a slower rank (`SLOW_RANK`), by that rank.
    """

    rank: int
    seconds: Mapping[ExposureCause, float]
    slower_s: Mapping[int, float]

    @property
    def exposed_s(self) -> float:
        """Return how many seconds per iteration this rank waited for gradients in total."""
        return sum(self.seconds.values())


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
        times: number of iterations in which the unit was late on at least one rank.
    """

    unit: TimedBarrier
    issue_s: float
    begin_s: float
    done_s: float
    late_s: float
    times: int


def backward_ends_s(histories: Histories, step: TimedStep, rank: int) -> dict[tuple[int, int], float]:
    """Return the moment of a step at which this rank begins to wait for gradients, for each reducer.

    A reducer is the object that all-reduces an optimizer's gradients. Moments are on the common clock of the job.
    """
    reducers = _reducers(histories)
    waits = [one for one in step.stretches[rank] if waits_for_gradients(one)]
    return {reducers[key[0]]: one.begin_s for one in waits for key in one.waits if key[0] in reducers}


def _reducers(histories: Histories) -> dict[int, tuple[int, int]]:
    return {buffer.number: buffer.reducer for buffer in histories.recording.job.buffers}


def exposures(histories: Histories) -> tuple[RankExposure, ...]:
    """Return the waits of every rank for reduced gradients, divided by cause, as means per iteration."""
    found, count = [], len(histories.steps)
    for rank in histories.ranks:
        seconds: dict[ExposureCause, float] = dict.fromkeys(ExposureCause, 0.0)
        slower_s: dict[int, float] = defaultdict(float)
        for step in histories.steps:
            barriers = {one.key: one for one in step.barriers}
            for wait in filter(waits_for_gradients, step.stretches[rank]):
                awaited = [barriers[key] for key in wait.waits if rank in barriers[key].done_s]
                last = max(awaited, key=lambda one: one.done_s[rank])
                issuer = max(last.issued_s, key=lambda other: last.issued_s[other])
                issue_s, begin_s, end_s = (
                    max(min(moment_s, wait.end_s), wait.begin_s)
                    for moment_s in (last.issued_s[issuer], last.begin_s, last.end_s)
                )
                copy_s = issue_s - wait.begin_s
                if issuer != rank:
                    copy_s = sum(
                        max(0.0, min(one.end_s, issue_s) - max(one.begin_s, wait.begin_s))
                        for one in step.stretches[issuer]
                        if kind_of(one) is TimeKind.COPY
                    )
                    slow_s = issue_s - wait.begin_s - copy_s
                    seconds[ExposureCause.SLOW_RANK] += slow_s / count
                    slower_s[issuer] += slow_s / count
                seconds[ExposureCause.COPY] += copy_s / count
                seconds[ExposureCause.QUEUE] += (begin_s - issue_s) / count
                seconds[ExposureCause.TRANSFER] += (end_s - begin_s) / count
                seconds[ExposureCause.RECEIPT] += (wait.end_s - end_s) / count
        found.append(RankExposure(rank, seconds, dict(slower_s)))
    return tuple(found)


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
