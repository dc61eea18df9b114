"""Communication that no computation hides: how long each rank waits for it, and for which units."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sirtaki.autotune.model.graph import Activity
from sirtaki.replay.barriers import Barrier
from sirtaki.replay.histories import Histories, Step
from sirtaki.replay.job_model import OperationKey

from .kinds import waits_for_gradients

LEAST_S = 1e-6
"""A unit that ends so shortly after the backward pass is not late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExposure:
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
        """All of it."""
        return self.moving_s + self.held_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LateUnit:
    """A unit that ends after a backward pass. Moments are seconds after the end of that, means of ranks and iterations.

    Attributes:
        name: its gradients.
        lane: its stream.
        n_bytes: of it.
        issue_s: a rank has its gradients ready.
        begin_s: all have, and the stream is free.
        done_s: the result is there.
        late_s: of `done_s` what is after the end.
        times: in how many iterations it was late on any rank.
    """

    name: str
    lane: str
    n_bytes: int
    issue_s: float
    begin_s: float
    done_s: float
    late_s: float
    times: int


def backward_ends_s(histories: Histories, step: Step, rank: int) -> dict[tuple[int, int], float]:
    """When this rank begins to wait for the gradients of each reducer, by the job's clock."""
    reducers = {buffer.number: buffer.reducer for buffer in histories.recording.job.buffers}
    found: dict[tuple[int, int], float] = {}
    for one in step.stretches[rank]:
        if waits_for_gradients(one):
            for buffer, _, _ in one.waits:
                if buffer in reducers:
                    found[reducers[buffer]] = one.begin_s
    return found


def exposures(histories: Histories) -> tuple[RankExposure, ...]:
    """Of every rank."""
    return tuple(_of_rank(histories, rank) for rank in histories.ranks)


def _of_rank(histories: Histories, rank: int) -> RankExposure:
    moving_s = total_s = 0.0
    for step in histories.steps:
        busy = _busy(step.barriers, rank)
        for one in step.stretches[rank]:
            if waits_for_gradients(one):
                total_s += one.end_s - one.begin_s
                moving_s += sum(max(0.0, min(end_s, one.end_s) - max(begin_s, one.begin_s)) for begin_s, end_s in busy)
    count = len(histories.steps)
    return RankExposure(rank=rank, moving_s=moving_s / count, held_s=(total_s - moving_s) / count)


def _busy(barriers: Sequence[Barrier], rank: int) -> list[tuple[float, float]]:
    """When units of this rank were under way; intervals that do not overlap."""
    found: list[tuple[float, float]] = []
    mine = [one for one in barriers if one.activity is Activity.UNIT and rank in one.issued_s]
    for begin_s, end_s in sorted((one.begin_s, one.done_s[rank]) for one in mine):
        if found and begin_s <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end_s)
        else:
            found.append((begin_s, end_s))
    return found


def late_units(histories: Histories) -> tuple[LateUnit, ...]:
    """Those that end after the backward pass on some rank, in the order in which they end."""
    what: dict[OperationKey, Barrier] = {}
    moments: dict[OperationKey, list[tuple[float, float, float]]] = defaultdict(list)
    times: dict[OperationKey, set[int]] = defaultdict(set)
    reducers = {buffer.number: buffer.reducer for buffer in histories.recording.job.buffers}
    for step in histories.steps:
        ends_s = {rank: backward_ends_s(histories, step, rank) for rank in histories.ranks}
        for one in step.barriers:
            if one.activity is Activity.UNIT:
                what[one.key] = one
                found = list(_after(one, reducers[one.key[0]], ends_s))
                moments[one.key] += found
                if any(done_s > LEAST_S for _, _, done_s in found):
                    times[one.key].add(step.number)
    late = [_late_unit(what[key], moments[key], len(numbers)) for key, numbers in times.items()]
    return tuple(sorted(late, key=lambda one: one.done_s))


def _after(
    one: Barrier, reducer: tuple[int, int], ends_s: Mapping[int, Mapping[tuple[int, int], float]]
) -> Sequence[tuple[float, float, float]]:
    """Issue, begin and end on each rank, after the end of its backward pass."""
    return [
        (one.issued_s[rank] - end_s, one.begin_s - end_s, one.done_s[rank] - end_s)
        for rank in one.ranks
        if (end_s := ends_s[rank].get(reducer)) is not None
    ]


def _late_unit(one: Barrier, moments: Sequence[tuple[float, float, float]], times: int) -> LateUnit:
    issue_s, begin_s, done_s = (statistics.fmean(values) for values in zip(*moments, strict=True))
    return LateUnit(
        name=one.name,
        lane=one.lane,
        n_bytes=one.n_bytes,
        issue_s=issue_s,
        begin_s=begin_s,
        done_s=done_s,
        late_s=statistics.fmean(max(0.0, done) for _, _, done in moments),
        times=times,
    )
