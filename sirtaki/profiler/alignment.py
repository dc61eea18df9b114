"""All ranks on one clock: the offset and the drift of each host's clock, found from units, which are barriers.

No rank has the result of a unit before every rank has issued it: θᵢ + issueᵢ ≤ θⱼ + doneⱼ for any two ranks of a unit,
where θ is what must be added to a rank's clock: a straight line of time, and one for all ranks of a host. Of all lines
that satisfy this, those in the middle are taken: the least slack is made as large as it can be, by a linear programme.
A drift is believed in where that gains room for it.

dPRO (§4.2) fits offsets only, under constraints that an all-reduce cannot satisfy; docs/decisions/0148.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

import numpy as np

from .recording import Recording, UnitId

LARGEST_DRIFT = 500e-6
"""Of one clock against another; those of computers stay below a tenth of it."""

DRIFT_PRICE = 0.1
"""Slack that a drift must gain, as a part of what it moves the clock by until the recording ends."""

_US = 1e6


class Known(Enum):
    """How a clock's offset was found."""

    REFERENCE = "reference"  # it is the clock of all
    UNITS = "units"
    START = "start"  # asked for when the recording began; nothing is known of a drift


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockLine:
    """What must be added to a clock: `offset_s + drift * (moment_s - origin_s)`.

    Attributes:
        origin_s: the middle of what was recorded, by this clock.
        offset_s: then.
        drift: seconds a second.
        error_s: by which the offset may be wrong; for `START` when the recording began.
        known: how it was found.
    """

    origin_s: float
    offset_s: float
    drift: float
    error_s: float
    known: Known

    def at(self, moment_s: float) -> float:
        """The moment by the clock of all."""
        return moment_s + self.offset_s + self.drift * (moment_s - self.origin_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """The clock of every rank.

    Attributes:
        lines: by rank; ranks of one clock have the same.
        reference: the rank whose clock is that of all.
    """

    lines: Mapping[int, ClockLine]
    reference: int

    def at(self, rank: int, moment_s: float) -> float:
        """A moment of a rank's clock by that of all."""
        return self.lines[rank].at(moment_s)

    @property
    def error_s(self) -> float:
        """The largest of all."""
        return max(line.error_s for line in self.lines.values())


@dataclass(frozen=True, slots=True)
class _Barrier:
    """One unit, by clock: the last issue and the first end of its ranks there."""

    issue_s: Mapping[str, float]
    done_s: Mapping[str, float]


def align(recording: Recording) -> Alignment:
    """Finds the clocks of all ranks that were recorded."""
    reference = min(recording.ranks)
    clocks = {rank: recording.job.placement[rank].clock for rank in recording.ranks}
    barriers = _barriers(recording, clocks)
    middles = {clock: _middle_s(recording, clock, clocks) for clock in set(clocks.values())}
    found = {
        clocks[reference]: ClockLine(
            origin_s=middles[clocks[reference]], offset_s=0.0, drift=0.0, error_s=0.0, known=Known.REFERENCE
        )
    }
    found |= _fit(clocks[reference], barriers, middles)
    first = recording.ranks[reference]
    for rank, clock in clocks.items():
        if clock not in found:
            own = recording.ranks[rank]
            found[clock] = ClockLine(
                origin_s=own.iterations[0].begin_s if own.iterations else 0.0,
                offset_s=own.offset_s - first.offset_s,
                drift=0.0,
                error_s=(own.round_trip_s + first.round_trip_s) / 2,
                known=Known.START,
            )
    return Alignment(lines={rank: found[clock] for rank, clock in clocks.items()}, reference=reference)


def _barriers(recording: Recording, clocks: Mapping[int, str]) -> list[_Barrier]:
    """Units with ranks of several clocks."""
    issue_s: defaultdict[UnitId, dict[str, float]] = defaultdict(dict)
    done_s: defaultdict[UnitId, dict[str, float]] = defaultdict(dict)
    for number, rank in recording.ranks.items():
        clock = clocks[number]
        for iteration in rank.iterations:
            for one in iteration.units:
                issued, done = issue_s[one.unit], done_s[one.unit]
                issued[clock] = max(issued.get(clock, one.issue_s), one.issue_s)
                done[clock] = min(done.get(clock, one.done_s), one.done_s)
    return [_Barrier(issue_s[unit], done_s[unit]) for unit in issue_s if len(issue_s[unit]) > 1]


def _middle_s(recording: Recording, clock: str, clocks: Mapping[int, str]) -> float:
    moments = [
        moment_s
        for number, rank in recording.ranks.items()
        if clocks[number] == clock
        for iteration in rank.iterations
        for moment_s in (iteration.begin_s, iteration.end_s)
    ]
    return (min(moments) + max(moments)) / 2 if moments else 0.0


def _coarse(reference: str, barriers: Sequence[_Barrier]) -> dict[str, float]:
    """What to add to each clock that units join with the reference, so that their ends fall together in the median."""
    apart: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for barrier in barriers:
        for one, one_s in barrier.done_s.items():
            for other, other_s in barrier.done_s.items():
                if one != other:
                    apart[one, other].append(one_s - other_s)
    found, fresh = {reference: 0.0}, [reference]
    while fresh:
        one = fresh.pop()
        for (near, far), differences in apart.items():
            if near == one and far not in found:
                found[far] = found[one] + median(differences)
                fresh.append(far)
    return found


def _fit(reference: str, barriers: Sequence[_Barrier], middles: Mapping[str, float]) -> dict[str, ClockLine]:
    """The lines of all clocks that units join with the reference, itself left out."""
    coarse = _coarse(reference, barriers)
    others = [clock for clock in coarse if clock != reference]
    if not others:
        return {}
    known = [barrier for barrier in barriers if reference in coarse and coarse.keys() & barrier.done_s.keys()]
    half_s = (
        max((abs(moment_s - middles[clock]) for one in known for clock, moment_s in one.done_s.items()), default=0.0)
        or 1.0
    )
    offsets, shifts, margins = _solve(reference, others, known, coarse, middles, half_s)
    return {
        clock: ClockLine(
            origin_s=middles[clock],
            offset_s=coarse[clock] + offsets[clock],
            drift=shifts[clock] / half_s,
            error_s=abs(margins[reference] + margins[clock]),
            known=Known.UNITS,
        )
        for clock in others
    }


def _solve(
    reference: str,
    others: Sequence[str],
    barriers: Sequence[_Barrier],
    coarse: Mapping[str, float],
    middles: Mapping[str, float],
    half_s: float,
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """The linear programme, in microseconds. Every barrier has a moment of its own, between all issues and all ends.

    Variables: of each clock but the reference's, an offset, what its drift adds by the end, and the size of that; of
    each clock, its margin; of each barrier, its moment.

    Returns:
        Offsets, what the drifts add by the end, and margins, in seconds, by clock.
    """
    from scipy.optimize import linprog  # slow to load
    from scipy.sparse import coo_array

    clocks = [reference, *others]
    n, n_all = len(others), len(clocks)
    offset = {clock: number for number, clock in enumerate(others)}
    margin = {clock: 3 * n + number for number, clock in enumerate(clocks)}
    moment = 3 * n + n_all
    rows, columns, values, bounds = list[int](), list[int](), list[float](), list[float]()

    def at_most(terms: Sequence[tuple[int, float]], bound: float) -> None:
        for column, value in terms:
            rows.append(len(bounds))
            columns.append(column)
            values.append(value)
        bounds.append(bound)

    base_s = middles[reference]
    for number, barrier in enumerate(barriers):
        for clock, issue_s in barrier.issue_s.items():
            done_s = barrier.done_s[clock]
            for moment_s, sign in ((issue_s, 1.0), (done_s, -1.0)):
                line: list[tuple[int, float]] = []
                if clock != reference:
                    place = offset[clock]
                    line = [(place, sign), (n + place, sign * (moment_s - middles[clock]) / half_s)]
                told_us = (moment_s + coarse[clock] - base_s) * _US
                at_most([*line, (moment + number, -sign), (margin[clock], 1.0)], -sign * told_us)
    for place in range(n):
        at_most([(n + place, 1.0), (2 * n + place, -1.0)], 0.0)
        at_most([(n + place, -1.0), (2 * n + place, -1.0)], 0.0)
    total = moment + len(barriers)
    cost = np.zeros(total)
    cost[2 * n : 3 * n] = DRIFT_PRICE
    cost[3 * n : moment] = -1.0
    largest_us = LARGEST_DRIFT * half_s * _US
    limits = [(None, None)] * n + [(-largest_us, largest_us)] * n + [(None, None)] * (total - 2 * n)
    found = linprog(
        cost, A_ub=coo_array((values, (rows, columns)), shape=(len(bounds), total)).tocsr(), b_ub=bounds, bounds=limits
    )
    solved = found.x / _US if found.x is not None else np.zeros(total)
    return (
        {clock: float(solved[place]) for clock, place in offset.items()},
        {clock: float(solved[n + place]) for clock, place in offset.items()},
        {clock: float(solved[place]) for clock, place in margin.items()},
    )
