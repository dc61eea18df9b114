"""What a rank tells its launcher through its own output, how it writes whole lines, and how it ends on SIGTERM."""

from __future__ import annotations

import ctypes
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from sirtaki.machine import handle_signal

from .leftovers import mapped_segments, remove_segments

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_MARK = "\x1e"  # ASCII "record separator": not in the output of programs
PATTERN = re.compile(rb"\x1esirtaki (\w+) (\d+) (\d+) (\d+) ([^\s\x1e]+) ([^\s\x1e]*)\x1e\n?")

UNFINISHED = b"\x1f\x1e\n"
"""Ends text that the rank has written without an end of line."""

_LONGEST_REASON = 300


class Event(Enum):
    """What can happen to a rank."""

    STARTED = "started"
    HANDED_OVER = "handed_over"  # to a program that is not Python; how it ends is seen by mpiexec only
    FINISHED = "finished"
    RAISES = "raises"  # it writes the error that ends it until `FAILED`; a reason = it was another's error that did it
    FAILED = "failed"
    PROGRESS = "progress"  # of tuning, for the launcher's bar; no reason = it is over
    TERMINATED = "terminated"  # mpiexec ends it, since another one has failed; the reason is where it was


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One line.

    Attributes:
        pid: of the rank's process on `host`.
        exit_code: what it ends with, 0 unless it failed.
        reason: why it failed or raises, or where it was, in words.
    """

    event: Event
    rank: int
    pid: int
    host: str
    exit_code: int = 0
    reason: str = ""

    def encode(self) -> str:
        """The line, to be written at once."""
        reason = quote(self.reason[:_LONGEST_REASON], errors="replace")
        fields = (self.event.value, self.rank, self.pid, self.exit_code, self.host, reason)
        return f"{_MARK}sirtaki {' '.join(map(str, fields))}{_MARK}\n"

    @classmethod
    def decode(cls, matched: re.Match[bytes]) -> Message:
        """The message that `PATTERN` found."""
        event, rank, pid, exit_code, host, reason = (group.decode() for group in matched.groups())
        return cls(
            event=Event(event), rank=int(rank), pid=int(pid), exit_code=int(exit_code), host=host,
            reason=unquote(reason, errors="replace"),
        )  # fmt: skip


class _MarkedFile(io.FileIO):
    """A file descriptor; what is written without an end of line (a progress bar, a prompt) is marked as unfinished."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Writes all of `data`, with its mark at once, so that nobody's text comes between."""
        text = bytes(data)
        rest = memoryview(text if text.endswith(b"\n") or not text else text + UNFINISHED)
        while rest:
            rest = rest[os.write(self.fileno(), rest) :]
        return len(text)


def mark_unfinished_lines() -> None:
    """Replaces `sys.stdout` and `sys.stderr`, whose lines are written whole: else those of several ranks are mixed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.flush()
        raw = _MarkedFile(stream.fileno(), "wb", closefd=False)
        raw.name = stream.name
        utf8 = stream.encoding.replace("-", "").lower() == "utf8"
        marked = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=stream.encoding,
            # What the terminal's encoding lacks is written as an escape, not raised in the middle of training.
            errors=stream.errors if utf8 and stream.errors != "strict" else "backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, marked)
        setattr(sys, f"__{name}__", marked)


def answer_termination(tell: Callable[[str], None]) -> None:
    """From now on SIGTERM calls `tell` with what this rank does, in words, before it ends the process.

    Only Python code can be interrupted so: who hangs in C says nothing, and is killed a little later. A script may put
    a handler of its own there; processes that it forks have none.
    """

    def on_terminate(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        remove_segments(mapped_segments("self"))
        tell(doing())
        os.kill(os.getpid(), number)

    handle_signal(signal.SIGTERM, on_terminate)


def doing() -> str:
    """What this rank does and how far it is, in words; "" if its script has no job of Sirtaki's."""
    describe = getattr(sys.modules.get("sirtaki.engine.job"), "describe", None)  # not there while it is imported
    return "" if describe is None else str(describe())


def end_with_parent(number: signal.Signals) -> Callable[[], None]:
    """For a child: what it calls so that the kernel sends it this signal when its parent dies. Linux only."""
    libc = ctypes.CDLL(None)  # looked up before a fork, after which no lock may be taken
    pr_set_pdeathsig = 1

    def set_signal() -> None:
        libc.prctl(pr_set_pdeathsig, number)

    return set_signal
