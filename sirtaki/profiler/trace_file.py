"""A recording as one trace of all ranks on one clock, for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .alignment import Alignment, ClockLine
from .folder import TRACE_FILE, write_whole
from .recording import Buffer, JobRecord, RankRecording, RecordedIteration, RecordedUnit, Recording

Entry = dict[str, Any]

STEPS, PHASES, COPIES, GRADIENTS, COLLECTIVES = "steps", "phases", "copies", "gradients", "collectives"
OPERATORS = "operators"
OPERATOR, OTHER = "cpu_op", "user_annotation"
"""Categories, as torch.profiler has them: tools that read its traces skip what has none."""


def write_trace(folder: Path, recording: Recording, alignment: Alignment) -> Path:
    """Writes it into the folder, and returns where it is.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / TRACE_FILE
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in trace_entries(recording, alignment))
    write_whole(path, f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'.encode())
    return path


def trace_entries(recording: Recording, alignment: Alignment) -> Iterator[Entry]:
    """Its events: a process is a rank, and a thread what happens one after the other there. Times in µs, from 0 on."""
    begins = [
        alignment.at(number, iteration.begin_s)
        for number, rank in recording.ranks.items()
        for iteration in rank.iterations[:1]
    ]
    origin_s = min(begins, default=0.0)
    for number, rank in sorted(recording.ranks.items()):
        yield from _RankTrace(recording.job, rank, alignment.lines[number], origin_s).entries()


class _RankTrace:
    """The events of one rank."""

    def __init__(self, job: JobRecord, rank: RankRecording, clock: ClockLine, origin_s: float) -> None:
        self._job, self._rank, self._clock, self._origin_s = job, rank, clock, origin_s
        self._buffers: dict[int, Buffer] = {buffer.number: buffer for buffer in job.buffers}
        self._tracks: dict[str, int] = {}
        self._queued = rank.rank << 32  # numbers of what may overlap, which no other rank uses

    def entries(self) -> Iterator[Entry]:
        """All of them, the names of processes and threads among them."""
        place = self._job.placement[self._rank.rank]
        yield self._metadata("process_name", {"name": f"rank {self._rank.rank} on {place.host_name}"})
        yield self._metadata("process_sort_index", {"sort_index": self._rank.rank})
        for iteration in self._rank.iterations:
            yield from self._iteration(iteration)
        for track, number in self._tracks.items():
            yield self._metadata("thread_name", {"name": track}, number)
            yield self._metadata("thread_sort_index", {"sort_index": number}, number)

    def _iteration(self, iteration: RecordedIteration) -> Iterator[Entry]:
        arguments: Entry = {
            "exposed_ms": round(1e3 * iteration.exposed_s, 3),
            **({"slowed": "by torch.profiler"} if iteration.slowed else {}),
        }
        yield self._span(STEPS, f"iteration {iteration.number}", iteration.begin_s, iteration.end_s, arguments)
        for span in iteration.spans:
            yield self._span(PHASES, span.phase.value, span.begin_s, span.end_s)
        for one in iteration.operators:
            arguments = {"phase": one.phase.value, **({"sequence": one.sequence} if one.sequence >= 0 else {})}
            yield self._span(f"{OPERATORS}: {self._rank.lanes[one.lane]}", one.name, one.begin_s, one.end_s, arguments)
        for copy in iteration.copies:
            yield self._span(COPIES, f"copy {copy.n_gradients} gradients", copy.begin_s, copy.end_s)
        for ready in iteration.ready:
            layout = self._buffers[ready.buffer].layout
            yield self._instant(GRADIENTS, layout.names[ready.index] if layout.names else "", ready.ready_s)
        yield from self._units(iteration)
        for call in iteration.collectives:
            waited_ms = round(1e3 * (call.agreed_s - call.begin_s), 3)
            arguments = {"kind": call.kind, "bytes": call.n_bytes, "waited_ms": waited_ms}
            yield self._span(COLLECTIVES, call.name, call.agreed_s, call.end_s, arguments)

    def _units(self, iteration: RecordedIteration) -> Iterator[Entry]:
        free_s: dict[str, float] = {}
        for one in sorted(iteration.units, key=lambda one: one.issue_s):
            unit = one.unit
            transport, algorithm = unit.route
            track = f"{transport.value} stream {unit.stream}"
            # A transport that does not tell when it began takes a stream's units one after the other.
            begin_s = max(one.issue_s, one.begin_s or 0.0, free_s.get(track, 0.0))
            free_s[track] = end_s = max(one.done_s, begin_s)
            layout = self._buffers[unit.buffer].layout
            name = layout.describe(unit.start, unit.stop) if layout.names else f"[{unit.start}, {unit.stop})"
            arguments = {
                "unit": f"{unit.buffer}:{unit.iteration}:{unit.start}-{unit.stop}",
                "bytes": (unit.stop - unit.start) * layout.itemsize_bytes,
                "algorithm": algorithm.value,
            }
            if begin_s > one.issue_s:
                yield from self._queue(f"{track} queue", name, one, begin_s)
            yield self._span(track, name, begin_s, end_s, arguments)

    def _queue(self, track: str, name: str, one: RecordedUnit, begin_s: float) -> Iterator[Entry]:
        """Units that wait may overlap, so they are no spans of a thread."""
        self._queued += 1
        both = {"name": track, "cat": "queue", "id": self._queued, "pid": self._rank.rank, "tid": 0}
        yield {**both, "ph": "b", "ts": self._us(one.issue_s), "args": {"unit": name}}
        yield {**both, "ph": "e", "ts": self._us(begin_s)}

    def _us(self, moment_s: float) -> float:
        return round((self._clock.at(moment_s) - self._origin_s) * 1e6, 3)

    def _track(self, name: str) -> int:
        return self._tracks.setdefault(name, len(self._tracks) + 1)

    def _span(
        self, track: str, name: str, begin_s: float, end_s: float, arguments: dict[str, Any] | None = None
    ) -> Entry:
        begin_us = self._us(begin_s)
        return {
            "name": name,
            "cat": OPERATOR if track.startswith(OPERATORS) else OTHER,
            "ph": "X",
            "pid": self._rank.rank,
            "tid": self._track(track),
            "ts": begin_us,
            "dur": round(self._us(end_s) - begin_us, 3),
            "args": arguments or {},
        }

    def _instant(self, track: str, name: str, moment_s: float) -> Entry:
        return {
            "name": name,
            "ph": "i",
            "s": "t",
            "pid": self._rank.rank,
            "tid": self._track(track),
            "ts": self._us(moment_s),
        }

    def _metadata(self, name: str, arguments: dict[str, Any], track: int = 0) -> Entry:
        return {"name": name, "ph": "M", "pid": self._rank.rank, "tid": track, "args": arguments}
