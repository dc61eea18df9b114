"""A Chrome trace of the communication of this rank, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

All ranks of a host write to one trace file. The file is a complete JSON array after each write, so that the trace of a
killed job can be read. Recording an event appends a tuple to a list, and a thread writes the events to the file several
times a second. If the user has not asked for a trace, `current` is None and no event is recorded.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sirtaki.machine import free_in_forked_children

logger = logging.getLogger(__name__)

FLUSH_S = 0.05
"""Seconds between two writes of recorded events to the trace file."""

_END = b"\n]\n"

Event = tuple[str | None, str, float, float, Mapping[str, object]]
"""An event of the trace: (track, name, begin_s, end_s, arguments). Times by `time.perf_counter`. Track None = the event
may overlap other events of the same name, so each gets an id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Identity of a process that writes to a trace file.

    Attributes:
        job: name of the job. A trace file that a different job has written is overwritten.
        rank: rank of this process, used as process id in the trace.
        host: name of this process's host.
        clock_offset_s: seconds to add to times of this process, so that the trace has one clock for all ranks.
    """

    job: str
    rank: int
    host: str = ""
    clock_offset_s: float = 0.0


class Timeline:
    """Chrome trace of the communication events of this process. Recording an event is thread-safe and non-blocking."""

    def __init__(self, path: Path, writer: Writer, *, mark_cycles: bool = False) -> None:
        """Open the trace file, and start the thread that writes to it.

        Args:
            path: trace file, common to all ranks of a host.
            writer: identity of this process in the trace.
            mark_cycles: True to record also each cycle in which the ranks agree on eager operations.

        Raises:
            OSError: the file cannot be written.
        """
        self.mark_cycles = mark_cycles
        self._writer = writer
        self._events: list[Event] = []
        self._tracks: dict[str, int] = {}
        self._overlapping = writer.rank << 32  # Id of the last overlapping event. Ids are unique over all ranks.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._writing = free_in_forked_children(threading.Lock())
        try:
            self._append([self._metadata("process_name", {"name": f"rank {writer.rank} {writer.host}".strip()})])
        except OSError:
            self._close_file()
            raise
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sirtaki-timeline", daemon=True)
        self._thread.start()

    def span(self, track: str, name: str, begin_s: float, end_s: float, **arguments: object) -> None:
        """Record an event with a duration. Events of one track (row of the trace) must be disjoint or nested."""
        self._events.append((track, name, begin_s, end_s, arguments))

    def overlapping(self, name: str, begin_s: float, end_s: float, **arguments: object) -> None:
        """Record an event with a duration that may overlap others. Its track (row of the trace) is called `name`."""
        self._events.append((None, name, begin_s, end_s, arguments))

    def instant(self, track: str, name: str, when_s: float, **arguments: object) -> None:
        """Record an event without a duration on a track (row of the trace)."""
        self._events.append((track, name, when_s, when_s, arguments))

    def _run(self) -> None:
        while not self._closing.wait(FLUSH_S):
            self.flush()

    def flush(self) -> None:
        """Write the recorded events to the trace file. On an error, such as a full disk, warn and close the file."""
        with self._writing:
            count = len(self._events)
            events = self._events[:count]
            del self._events[:count]
            if events and self._file >= 0:
                try:
                    self._append([entry for event in events for entry in self._entries(event)])
                except OSError as err:
                    logger.warning(
                        "Sirtaki stops recording the timeline, because writing the timeline's file failed: %s",
                        err,
                    )
                    self._close_file()

    def _entries(self, event: Event) -> list[dict[str, object]]:
        track, name, begin_s, end_s, arguments = event
        begin_us = round(1e6 * (begin_s + self._writer.clock_offset_s), 1)
        if track is None:
            self._overlapping += 1
            both: dict[str, object] = {"name": name, "cat": "overlapping", "id": self._overlapping, "tid": 0}
            both["pid"] = self._writer.rank
            end_us = begin_us + round(1e6 * (end_s - begin_s), 1)
            return [{**both, "ph": "b", "ts": begin_us, "args": dict(arguments)}, {**both, "ph": "e", "ts": end_us}]
        entries: list[dict[str, object]] = []
        if track not in self._tracks:
            self._tracks[track] = len(self._tracks)
            entries.append(self._metadata("thread_name", {"name": track}, track))
        entry: dict[str, object] = {
            "name": name,
            "pid": self._writer.rank,
            "tid": self._tracks[track],
            "ts": begin_us,
            "args": dict(arguments),
        }
        if end_s > begin_s:
            entries.append({**entry, "ph": "X", "dur": round(1e6 * (end_s - begin_s), 1)})
        else:
            entries.append({**entry, "ph": "i", "s": "t"})
        return entries

    def _metadata(self, name: str, arguments: Mapping[str, object], track: str | None = None) -> dict[str, object]:
        tid = 0 if track is None else self._tracks[track]
        return {"name": name, "ph": "M", "pid": self._writer.rank, "tid": tid, "args": dict(arguments)}

    def _append(self, entries: list[dict[str, object]]) -> None:
        """Append entries to the JSON array in the trace file in one write, which replaces the array's closing bracket.

        The file is locked meanwhile, because other ranks write to it, too.
        """
        text = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries).encode()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            head = self._head()
            if os.pread(self._file, len(head), 0) != head:
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, head + _END, 0)
            self._replace_end(b",\n" + text + _END)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _replace_end(self, text: bytes) -> None:
        size = os.fstat(self._file).st_size
        try:
            if os.pwrite(self._file, text, size - len(_END)) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # Undo a partial write to the trace file, so that the earlier entries stay readable.
            os.ftruncate(self._file, size)
            os.pwrite(self._file, _END, size - len(_END))
            raise

    def _head(self) -> bytes:
        labels = {"name": "process_labels", "ph": "M", "pid": 0, "args": {"labels": f"sirtaki job {self._writer.job}"}}
        return b"[\n" + json.dumps(labels, separators=(",", ":")).encode()

    def close(self) -> None:
        """Write the remaining events, and close the trace file. May be called twice."""
        self._closing.set()
        self._thread.join(timeout=2.0)
        self.flush()
        with self._writing:
            self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


current: Timeline | None = None
"""The trace that receives the events of this process. None = no trace."""


def start(timeline: Timeline) -> None:
    """Make `timeline` the current trace, and close the previous one."""
    global current
    stop()
    current = timeline


def stop() -> None:
    """Close the current trace, if there is one."""
    global current
    timeline, current = current, None
    if timeline is not None:
        timeline.close()


def _leave_in_child() -> None:
    global current
    current = None


os.register_at_fork(after_in_child=_leave_in_child)


def path_on_host(path: Path, host_number: int) -> Path:
    """Return the path of a host's trace file: `path` itself on host 0, `trace.host1.json` on host 1, and so on.

    Hosts do not share a file, because network file systems do not lock reliably.
    """
    return path if host_number == 0 else path.with_name(f"{path.stem}.host{host_number}{path.suffix}")
