"""Clocks that are wrong by a known offset and drift are put right, from what units allow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import recordings

from sirtaki.analysis.alignment import Known, align
from sirtaki.analysis.recording import RankRecording, RecordedIteration, RecordedUnit, Recording, UnitId

OFFSETS_S = (0.05, -0.05)
DRIFT = 20e-6
LEAST_TRANSFER_S = 100e-6


def drawn(
    n_ranks: int = 2,
    *,
    ranks_per_host: int = 1,
    iterations: int = 10,
    step_s: float = 0.2,
    units: int = 6,
    seed: int = 0,
) -> Recording:
    """Right clocks. Who is last changes from unit to unit; a transfer takes 100 µs at least, and mostly more."""
    rng = np.random.default_rng(seed)
    steps: list[list[RecordedIteration]] = [[] for _ in range(n_ranks)]
    for number in range(iterations):
        begin_s = 5000.0 + number * step_s
        of_rank: list[list[RecordedUnit]] = [[] for _ in range(n_ranks)]
        for unit in range(units):
            issue_s = begin_s + step_s * (unit + 1) / (units + 2) + rng.exponential(300e-6, n_ranks)
            done_s = issue_s.max() + LEAST_TRANSFER_S + rng.exponential(50e-6, n_ranks)
            identity = UnitId(iteration=number, buffer=0, start=unit, stop=unit + 1, route=recordings.ROUTE, stream=0)
            for rank in range(n_ranks):
                of_rank[rank].append(
                    RecordedUnit(unit=identity, issue_s=float(issue_s[rank]), begin_s=None, done_s=float(done_s[rank]))
                )
        for rank in range(n_ranks):
            steps[rank].append(
                RecordedIteration(number=number, begin_s=begin_s, end_s=begin_s + step_s, units=tuple(of_rank[rank]))
            )
    ranks = {rank: replace(recordings.rank(rank), iterations=tuple(steps[rank])) for rank in range(n_ranks)}
    return Recording(job=recordings.job(n_ranks, ranks_per_host=ranks_per_host), ranks=ranks)


def wrong(recording: Recording, clocks: dict[int, tuple[float, float]]) -> Recording:
    """Of each of these ranks the clock shows so much more, and gains so much."""
    moved = {
        rank: recordings.shifted(recording.ranks[rank], by_s=by_s, drift=drift)
        for rank, (by_s, drift) in clocks.items()
    }
    return replace(recording, ranks={**recording.ranks, **moved})


def moments(rank: RankRecording) -> list[float]:
    return [moment for step in rank.iterations for unit in step.units for moment in (unit.issue_s, unit.done_s)]


def largest_error_s(true: Recording, told: Recording, rank: int) -> float:
    """After alignment, of all that the rank has recorded."""
    aligned = align(told)
    pairs = zip(moments(told.ranks[rank]), moments(true.ranks[rank]), strict=True)
    return max(abs(aligned.at(rank, moment) - wanted) for moment, wanted in pairs)


def smallest_round_trip_s(recording: Recording, one: int, other: int) -> float:
    """From the one to the other and back, each way by the quickest unit."""

    def way_s(there: int, back: int) -> float:
        issued = {u.unit: u.issue_s for step in recording.ranks[there].iterations for u in step.units}
        return min(u.done_s - issued[u.unit] for step in recording.ranks[back].iterations for u in step.units)

    return way_s(one, other) + way_s(other, one)


@pytest.mark.parametrize("by_s", OFFSETS_S)
@pytest.mark.parametrize("drift", [0.0, DRIFT, -DRIFT])
@pytest.mark.parametrize("step_s", [0.02, 0.2, 20.0])
@pytest.mark.parametrize("seed", range(3))
def test_an_injected_error_is_recovered_within_half_the_smallest_round_trip(
    by_s: float, drift: float, step_s: float, seed: int
) -> None:
    true = drawn(step_s=step_s, seed=seed)
    told = wrong(true, {1: (by_s, drift)})
    bound_s = smallest_round_trip_s(true, 0, 1) / 2
    assert largest_error_s(true, told, 1) <= bound_s
    line = align(told).lines[1]
    assert line.known is Known.UNITS
    assert line.error_s == pytest.approx(bound_s, rel=0.5)


def test_several_hosts_whose_ranks_share_clocks_are_aligned_with_each_other() -> None:
    true = drawn(6, ranks_per_host=2, step_s=2.0, seed=4)
    told = wrong(true, {2: (0.05, DRIFT), 3: (0.05, DRIFT), 4: (-0.05, -DRIFT), 5: (-0.05, -DRIFT)})
    aligned = align(told)
    assert aligned.lines[2] == aligned.lines[3]
    assert aligned.lines[4] == aligned.lines[5]
    for rank in range(2, 6):
        assert largest_error_s(true, told, rank) <= smallest_round_trip_s(true, 0, rank) / 2


def test_clocks_that_count_from_different_starts_are_aligned() -> None:
    true = drawn(seed=1)
    assert largest_error_s(true, wrong(true, {1: (86_400.0, DRIFT)}), 1) <= smallest_round_trip_s(true, 0, 1) / 2


def test_ranks_of_one_host_are_left_as_they_are() -> None:
    aligned = align(drawn(4, ranks_per_host=4))
    assert {line.known for line in aligned.lines.values()} == {Known.REFERENCE}
    assert aligned.at(3, 17.0) == 17.0
    assert aligned.error_s == 0.0


def test_two_units_are_enough_for_an_offset() -> None:
    true = drawn(iterations=1, units=2, seed=2)
    told = wrong(true, {1: (0.05, DRIFT)})
    # What one of two units leaves open is all that is known.
    assert largest_error_s(true, told, 1) <= smallest_round_trip_s(true, 0, 1) / 2 + 1e-6


def test_a_rank_without_units_is_aligned_as_when_the_recording_began() -> None:
    true = drawn(3, seed=3)
    silent = replace(
        true.ranks[2],
        offset_s=-0.05,
        round_trip_s=4e-5,
        iterations=tuple(replace(step, units=()) for step in true.ranks[2].iterations),
    )
    aligned = align(replace(true, ranks={**true.ranks, 2: silent}))
    assert aligned.lines[2].known is Known.START
    assert aligned.at(2, 1000.0) == pytest.approx(999.95)
    assert aligned.lines[2].error_s == pytest.approx(2e-5)
    assert aligned.lines[1].known is Known.UNITS


def test_ranks_that_meet_only_through_another_are_aligned() -> None:
    true = drawn(3, seed=5)

    def kept(rank: int, buffer: int) -> tuple[RecordedIteration, ...]:
        """Units of the ranks 0 and 1 are of buffer 0, those of 1 and 2 of buffer 1."""
        return tuple(
            replace(
                step,
                units=tuple(
                    replace(unit, unit=replace(unit.unit, buffer=unit.unit.start % 2))
                    for unit in step.units
                    if rank == 1 or unit.unit.start % 2 == buffer
                ),
            )
            for step in true.ranks[rank].iterations
        )

    chain = {
        rank: replace(true.ranks[rank], iterations=kept(rank, buffer)) for rank, buffer in ((0, 0), (1, 0), (2, 1))
    }
    true = replace(true, ranks=chain)
    told = wrong(true, {1: (0.03, 0.0), 2: (-0.05, 0.0)})
    bound_s = (smallest_round_trip_s(drawn(3, seed=5), 0, 1) + smallest_round_trip_s(drawn(3, seed=5), 1, 2)) / 2
    assert align(told).lines[2].known is Known.UNITS
    assert largest_error_s(true, told, 2) <= 1.5 * bound_s  # a chain knows less, and has fewer units


def test_without_rank_0_the_first_that_is_there_has_the_clock_of_all() -> None:
    true = drawn(3)
    aligned = align(replace(true, ranks={rank: true.ranks[rank] for rank in (1, 2)}))
    assert aligned.reference == 1
    assert aligned.lines[1].known is Known.REFERENCE
