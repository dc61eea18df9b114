"""The iterations of a recording that all ranks have, on one clock: what ranks did, and what they did together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sirtaki.autotune.model.graph import Activity
from sirtaki.errors import ReplayError
from sirtaki.profiler.alignment import Alignment, align
from sirtaki.profiler.recording import RecordedIteration, Recording

from .barriers import Barrier, Barriers
from .history import Clock, Marks, Stretch, Wait, stretches, with_waits


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
