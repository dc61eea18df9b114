"""Align the clocks of several ranks, and write the summary and the trace of a recording on one common clock."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from sirtaki.autotune.model.replayer import Phase
from sirtaki.measures import counted

from .recording import TRACE_FILE, Buffer, Detail, Placement, RankRecording, Recording, UnitId, write_whole

LARGEST_DRIFT = 500e-6
"""Largest drift between two clocks that the alignment of clocks assumes, in seconds per second. Clocks of real machines
drift less than a tenth of this."""

DRIFT_PRICE = 0.1
"""Weight of drift in the cost function by which clocks are aligned.

A drift is assumed only if it improves the fit to the recorded times by at least this fraction of the displacement that
it causes.
"""

_US = 1e6


class OffsetSource(Enum):
    """How the offset between a rank's clock and the reference clock was found."""

    REFERENCE = "reference"  # This clock is the reference clock itself.
    UNITS = "units"
    START = "start"  # The offset was measured when the recording began. The clock's drift is unknown.


@dataclass(frozen=True, slots=True)
class ClockLine:
    """Correction that converts readings of one clock to the reference clock. It is a linear function of time: `offset_s
    + drift * (moment_s - origin_s)`.

    Attributes:
        origin_s: middle of the recording, as a reading of the clock to correct.
        offset_s: correction at `origin_s`.
        drift: change of the correction, in seconds per second.
        error_s: largest possible error of the correction. For `START`, it holds only at the start of the recording.
        known: how the offset was found.
    """

    origin_s: float
    offset_s: float
    drift: float
    error_s: float
    known: OffsetSource

    def at(self, moment_s: float) -> float:
        """Convert a reading of this clock to a reading of the reference clock."""
        return moment_s + self.offset_s + self.drift * (moment_s - self.origin_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Corrections that convert readings of all ranks' clocks to one reference clock.

    Attributes:
        lines: correction of each rank's clock; ranks that share a clock share the correction.
        reference: rank whose clock is the reference.
    """

    lines: Mapping[int, ClockLine]
    reference: int

    def at(self, rank: int, moment_s: float) -> float:
        """Convert a reading of a rank's clock to a reading of the reference clock."""
        return self.lines[rank].at(moment_s)

    @property
    def error_s(self) -> float:
        """Return the largest possible error of any rank's clock correction."""
        return max(line.error_s for line in self.lines.values())


@dataclass(frozen=True, slots=True)
class _ClockBarrier:
    """Times of one unit (bucket) that ranks with different clocks all-reduced.

    For each clock, they are the last issue and the first completion among the ranks with this clock.
    """

    issue_s: dict[str, float] = field(default_factory=dict)
    done_s: dict[str, float] = field(default_factory=dict)


def align(recording: Recording) -> Alignment:
    """Align the clocks of all recorded ranks.

    No rank completes a unit (bucket, reduced by one all-reduce) before all ranks have issued it. This bounds offset and
    drift between the clocks of these ranks. If no chain of shared units connects a rank with the reference clock, the
    rank's clock gets the offset that was measured at the start of the recording.
    """
    reference = min(recording.ranks)
    clocks = {rank: recording.job.placement[rank].clock for rank in recording.ranks}
    barriers = _barriers(recording, clocks)
    middles = {clock: _middle_s(recording, clock, clocks) for clock in set(clocks.values())}
    first, own_clock = recording.ranks[reference], clocks[reference]
    found = {own_clock: ClockLine(middles[own_clock], 0.0, 0.0, 0.0, OffsetSource.REFERENCE)}
    found |= _fit(own_clock, barriers, middles)
    for rank, clock in clocks.items():
        if clock not in found:
            own = recording.ranks[rank]
            begin_s = own.iterations[0].begin_s if own.iterations else 0.0
            error_s = (own.round_trip_s + first.round_trip_s) / 2
            found[clock] = ClockLine(begin_s, own.offset_s - first.offset_s, 0.0, error_s, OffsetSource.START)
    return Alignment(lines={rank: found[clock] for rank, clock in clocks.items()}, reference=reference)


def _barriers(recording: Recording, clocks: Mapping[int, str]) -> list[_ClockBarrier]:
    """Return the times of those units (buckets) that were all-reduced by ranks with different clocks.

    They show how far the clocks differ, because all ranks end an all-reduce together.
    """
    found: defaultdict[UnitId, _ClockBarrier] = defaultdict(_ClockBarrier)
    for number, rank in recording.ranks.items():
        clock = clocks[number]
        for one in (one for iteration in rank.iterations for one in iteration.units):
            barrier = found[one.unit]
            barrier.issue_s[clock] = max(barrier.issue_s.get(clock, one.issue_s), one.issue_s)
            barrier.done_s[clock] = min(barrier.done_s.get(clock, one.done_s), one.done_s)
    return [barrier for barrier in found.values() if len(barrier.issue_s) > 1]


def _middle_s(recording: Recording, clock: str, clocks: Mapping[int, str]) -> float:
    ranks = [rank for number, rank in recording.ranks.items() if clocks[number] == clock]
    moments = [moment_s for rank in ranks for one in rank.iterations for moment_s in (one.begin_s, one.end_s)]
    return (min(moments) + max(moments)) / 2 if moments else 0.0


def _coarse(reference: str, barriers: Sequence[_ClockBarrier]) -> dict[str, float]:
    """Return rough offsets of clocks to the reference clock, in seconds.

    Two ranks end the all-reduce of a unit (bucket) at nearly the same moment. Hence the offset of their clocks is
    the median difference of the times that both recorded for these ends.
    """
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


def _fit(reference: str, barriers: Sequence[_ClockBarrier], middles: Mapping[str, float]) -> dict[str, ClockLine]:
    """Fit corrections of all other clocks to the reference clock, by the times of units (buckets) that ranks with
    different clocks reduced together. Clocks that no chain of such units connects to the reference clock are omitted.

    The corrections are the solution of a linear programme, with times in microseconds. For each unit there is an
    unknown moment, after all issues and before all completions of the unit. The variables are, in order: the offsets of
    all clocks except the reference; the displacements of these clocks by drift at the end of the recording; the
    absolute values of these displacements; the margins of all clocks, the reference first; the moments of all units. A
    clock's margin is the minimum distance between the unknown moments and the clock's issues and completions.
    """
    coarse = _coarse(reference, barriers)
    others = [clock for clock in coarse if clock != reference]
    if not others:
        return {}
    known = [barrier for barrier in barriers if coarse.keys() & barrier.done_s.keys()]
    moments = [(clock, moment_s) for one in known for clock, moment_s in one.done_s.items()]
    half_s = max((abs(moment_s - middles[clock]) for clock, moment_s in moments), default=0.0) or 1.0
    from scipy.optimize import linprog  # Import scipy late, because it is slow to load.
    from scipy.sparse import coo_array

    n = len(others)
    offset = {clock: number for number, clock in enumerate(others)}
    margin = {clock: 3 * n + number for number, clock in enumerate([reference, *others])}
    moment = 4 * n + 1
    entries, bounds = list[tuple[int, int, float]](), list[float]()  # `entries` of the matrix: (row, column, value)

    def at_most(terms: Iterable[tuple[int, float]], bound: float) -> None:
        entries.extend((len(bounds), column, value) for column, value in terms)
        bounds.append(bound)

    for number, barrier in enumerate(known):
        for clock, issue_s in barrier.issue_s.items():
            for moment_s, sign in ((issue_s, 1.0), (barrier.done_s[clock], -1.0)):
                line: list[tuple[int, float]] = []
                if clock != reference:
                    place, since_s = offset[clock], moment_s - middles[clock]
                    line = [(place, sign), (n + place, sign * since_s / half_s)]
                shown_us = (moment_s + coarse[clock] - middles[reference]) * _US
                at_most([*line, (moment + number, -sign), (margin[clock], 1.0)], -sign * shown_us)
    for place in range(n):
        for sign in (1.0, -1.0):
            at_most([(n + place, sign), (2 * n + place, -1.0)], 0.0)
    total = moment + len(known)
    cost = np.zeros(total)
    cost[2 * n : 3 * n] = DRIFT_PRICE
    cost[3 * n : moment] = -1.0
    largest_us = LARGEST_DRIFT * half_s * _US
    limits = [(None, None)] * n + [(-largest_us, largest_us)] * n + [(None, None)] * (total - 2 * n)
    rows, columns, values = zip(*entries, strict=True)
    matrix = coo_array((values, (rows, columns)), shape=(len(bounds), total)).tocsr()
    found = linprog(cost, A_ub=matrix, b_ub=bounds, bounds=limits)
    solved = found.x / _US if found.x is not None else np.zeros(total)

    def line_of(clock: str, place: int) -> ClockLine:
        offset_s, drift = coarse[clock] + float(solved[place]), float(solved[n + place]) / half_s
        error_s = abs(float(solved[margin[reference]]) + float(solved[margin[clock]]))
        return ClockLine(middles[clock], offset_s, drift, error_s, OffsetSource.UNITS)

    return {clock: line_of(clock, place) for clock, place in offset.items()}


# ── summary ──────────────────────────────────────────────────────────────────────────────────────────────────────────

COLUMNS = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)


def headlines(recording: Recording, alignment: Alignment) -> tuple[str, str]:
    """Return two sentences: how much was recorded, and how the clocks were aligned."""
    hosts = {recording.job.placement[rank].host for rank in recording.ranks}
    details = {rank.detail for rank in recording.ranks.values()}
    what = "with operators" if details == {Detail.OPERATORS} else "units only"
    if len(details) > 1:
        what = "with operators on some ranks"
    counts = (
        f"{counted(len(recording.usual_iterations), 'iteration')} of {counted(len(recording.ranks), 'rank')} "
        f"on {counted(len(hosts), 'host')}, {what}"
    )
    known = {line.known for line in alignment.lines.values()}
    operators_us = 1e6 * max(rank.clock_error_s for rank in recording.ranks.values())
    precision = f"; operator times within {operators_us:.1f} µs" if operators_us else ""
    if known == {OffsetSource.REFERENCE}:
        return counts, f"one clock{precision}"
    how = "units"
    if OffsetSource.START in known:
        how = "units, or (for some ranks) by the offsets measured at the start"
    if OffsetSource.UNITS not in known:
        how = "the offsets measured at the start"
    return counts, f"clocks are aligned by {how}, within {1e6 * alignment.error_s:.0f} µs{precision}"


def rank_rows(recording: Recording) -> list[dict[str, Any]]:
    """Return a table with one row per rank: mean seconds of a step, of each phase (such as forward), of exposed
    communication (waits of the training thread for reduced gradients), and of the rest of the step.

    The rest is None if no operators were recorded, because the forward pass is unknown then.
    """
    rows, usual = list[dict[str, Any]](), recording.usual_iterations
    for number, rank in sorted(recording.ranks.items()):
        steps = [iteration for iteration in rank.iterations if iteration.number in usual]
        total_s: dict[Phase, float] = defaultdict(float)
        for span in (span for step in steps for span in step.spans):
            total_s[span.phase] += span.end_s - span.begin_s
        step_s = mean(step.end_s - step.begin_s for step in steps) if steps else None
        phases_s = {f"{phase.value}_s": total_s[phase] / len(steps) if phase in total_s else None for phase in COLUMNS}
        exposed_s = mean(step.exposed_s for step in steps) if steps else None
        row: dict[str, Any] = {"rank": number, "step_s": step_s, **phases_s, "exposed_s": exposed_s, "other_s": None}
        if step_s is not None and exposed_s is not None and phases_s["forward_s"] is not None:
            row["other_s"] = max(0.0, step_s - exposed_s - sum(part_s or 0.0 for part_s in phases_s.values()))
        rows.append(row)
    return rows


# ── trace ────────────────────────────────────────────────────────────────────────────────────────────────────────────

Entry = dict[str, Any]

OPERATOR, OTHER = "cpu_op", "user_annotation"
"""Categories of the trace's events. They are those of torch.profiler, because tools skip events of other categories."""


class PathSpan(NamedTuple):
    """One part of the critical path of a replayed (simulated) job, to draw in a trace.

    Attributes:
        iteration: number of the recorded iteration.
        name: name of the operator or of the operation between ranks.
        begin: time at which the part begins, as a fraction of the iteration's duration.
        end: time at which the part ends, as a fraction of the iteration's duration.
    """

    iteration: int
    name: str
    begin: float
    end: float


def write_trace(folder: Path, recording: Recording, alignment: Alignment, path: Iterable[PathSpan] = ()) -> Path:
    """Write the trace of all ranks into the folder, and return the path of the file. In the trace, the critical path
    `path` is drawn above the ranks.

    Raises:
        OSError: the file cannot be written.
    """
    entries = trace_entries(recording, alignment, path)
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    write_whole(folder / TRACE_FILE, f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'.encode())
    return folder / TRACE_FILE


def trace_entries(recording: Recording, alignment: Alignment, path: Iterable[PathSpan] = ()) -> Iterator[Entry]:
    """Yield the events of a trace, with times in microseconds since the first recorded iteration began. In the trace,
    each rank is a process, and each kind of event, such as operators or copies, is a thread of this process.
    """
    firsts = [(number, rank.iterations[0]) for number, rank in recording.ranks.items() if rank.iterations]
    origin_s = min((alignment.at(number, first.begin_s) for number, first in firsts), default=0.0)
    buffers = {buffer.number: buffer for buffer in recording.job.buffers}
    for number, rank in sorted(recording.ranks.items()):
        yield from _rank_entries(rank, recording.job.placement[number], buffers, alignment.lines[number], origin_s)
    yield from _path_entries(recording, alignment, path, origin_s)


def _path_entries(
    recording: Recording, alignment: Alignment, path: Iterable[PathSpan], origin_s: float
) -> Iterator[Entry]:
    moments_s: dict[int, list[float]] = defaultdict(list)  # {iteration: its begin and end on every rank}
    for number, rank in recording.ranks.items():
        for one in rank.iterations:
            moments_s[one.number] += (alignment.at(number, one.begin_s), alignment.at(number, one.end_s))
    windows_s, end_s = dict[int, tuple[float, float]](), -math.inf
    for number, moments in sorted(moments_s.items()):
        # Let an iteration's time window begin no earlier than the previous window ends. The iteration on one rank may
        # overlap the previous iteration on another rank.
        windows_s[number] = begin_s, end_s = max(min(moments), end_s), max(moments)
    track = {"pid": 1 + max(recording.ranks, default=0), "tid": 1}
    for place, span in enumerate(path):
        if not place:
            yield {"name": "process_name", "ph": "M", **track, "args": {"name": "critical path"}}
            yield {"name": "process_sort_index", "ph": "M", **track, "args": {"sort_index": -1}}
        begin_s, end_s = windows_s[span.iteration]
        begin_us, end_us = (
            round(1e6 * (begin_s - origin_s + share * (end_s - begin_s)), 3) for share in (span.begin, span.end)
        )
        times = {"ts": begin_us, "dur": round(end_us - begin_us, 3)}
        yield {"name": span.name, "ph": "X", **track, "cat": OTHER, **times}


def _rank_entries(
    rank: RankRecording, place: Placement, buffers: Mapping[int, Buffer], clock: ClockLine, origin_s: float
) -> Iterator[Entry]:
    tracks: dict[str, int] = {}
    queued = rank.rank << 32  # Latest id of an asynchronous event. Ids are unique in the trace of all ranks.

    def us(moment_s: float) -> float:
        return round((clock.at(moment_s) - origin_s) * 1e6, 3)

    def on_track(name: str, track: str, kind: str) -> Entry:
        return {"name": name, "ph": kind, "pid": rank.rank, "tid": tracks.setdefault(track, len(tracks) + 1)}

    def span(track: str, name: str, begin_s: float, end_s: float, **arguments: Any) -> Entry:
        return {
            **on_track(name, track, "X"),
            "cat": OPERATOR if track.startswith("operators") else OTHER,
            "ts": us(begin_s),
            "dur": round(us(end_s) - us(begin_s), 3),
            "args": arguments,
        }

    def metadata(kind: str, track: int = 0, /, **arguments: Any) -> Entry:
        return {"name": kind, "ph": "M", "pid": rank.rank, "tid": track, "args": arguments}

    yield metadata("process_name", name=f"rank {rank.rank} on {place.host_name}")
    yield metadata("process_sort_index", sort_index=rank.rank)
    for iteration in rank.iterations:
        slowed = {"slowed": "by torch.profiler"} if iteration.slowed else {}
        exposed_ms = round(1e3 * iteration.exposed_s, 3)
        name = f"iteration {iteration.number}"
        yield span("steps", name, iteration.begin_s, iteration.end_s, exposed_ms=exposed_ms, **slowed)
        for phase in iteration.spans:
            yield span("phases", phase.phase.value, phase.begin_s, phase.end_s)
        for one in iteration.operators:
            sequence = {"sequence": one.sequence} if one.sequence >= 0 else {}
            lane = f"operators: {rank.lanes[one.lane]}"
            yield span(lane, one.name, one.begin_s, one.end_s, phase=one.phase.value, **sequence)
        for copy in iteration.copies:
            yield span("copies", f"copy {copy.n_gradients} gradients", copy.begin_s, copy.end_s)
        for ready in iteration.ready:
            names = buffers[ready.buffer].layout.names
            yield {**on_track(names[ready.place] if names else "", "gradients", "i"), "s": "t", "ts": us(ready.ready_s)}
        free_s: dict[str, float] = {}
        for done in sorted(iteration.units, key=lambda done: done.issue_s):
            layout = buffers[done.buffer].layout
            transport, algorithm = done.route
            track = f"{transport.value} stream {done.stream}"
            # Some transports do not report when the all-reduce of a unit (bucket) began. Use the end of the previous
            # unit on the same stream instead.
            begin_s = max(done.issue_s, done.begin_s or 0.0, free_s.get(track, 0.0))
            free_s[track] = end_s = max(done.done_s, begin_s)
            name = layout.describe(done.start, done.stop) if layout.names else f"[{done.start}, {done.stop})"
            if begin_s > done.issue_s:
                # Write a unit's wait in the queue as an asynchronous event, because the waits of several units
                # (buckets) overlap.
                queued += 1
                both = {"name": f"{track} queue", "cat": "queue", "id": queued, "pid": rank.rank, "tid": 0}
                yield {**both, "ph": "b", "ts": us(done.issue_s), "args": {"unit": name}}
                yield {**both, "ph": "e", "ts": us(begin_s)}
            which = f"{done.buffer}:{done.iteration}:{done.start}-{done.stop}"
            n_bytes = (done.stop - done.start) * layout.itemsize_bytes
            yield span(track, name, begin_s, end_s, unit=which, bytes=n_bytes, algorithm=algorithm.value)
        for call in iteration.collectives:
            waited_ms = round(1e3 * (call.agreed_s - call.begin_s), 3)
            arguments = {"kind": call.kind, "bytes": call.n_bytes, "waited_ms": waited_ms}
            yield span("collectives", call.name, call.agreed_s, call.end_s, **arguments)
    for track, number in tracks.items():
        yield metadata("thread_name", number, name=track)
        yield metadata("thread_sort_index", number, sort_index=number)
