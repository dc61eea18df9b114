"""Send messages from a rank to its launcher within the output of the rank, write whole lines, and handle SIGTERM."""

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


_MARK = "\x1e"  # First byte of a message in the output: ASCII "record separator", which programs do not print.
PATTERN = re.compile(rb"\x1esirtaki (\w+) (\d+) (\d+) (\d+) ([^\s\x1e]+) ([^\s\x1e]*)\x1e\n?")

UNFINISHED = b"\x1f\x1e\n"
"""Bytes that a rank adds to text without a line end, so that the launcher can tell where the text ends."""

_LONGEST_REASON = 300


class RankEvent(Enum):
    """Kind of a message from a rank to its launcher."""

    STARTED = "started"
    HANDED_OVER = "handed_over"  # A program that is not Python replaced the process, so only mpiexec sees its end.
    FINISHED = "finished"
    # The lines that follow, up to the message `FAILED`, are the rank's error. `reason` is set if another rank caused
    # the error.
    RAISES = "raises"
    FAILED = "failed"
    PROGRESS = "progress"  # `reason` is the text of the progress bar for the launcher; "" = no bar.
    # mpiexec ends this rank, because another rank has failed. `reason` is what this rank was doing.
    TERMINATED = "terminated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLine:
    """A message of a rank to its launcher, encoded as one line.

    Attributes:
        pid: process id of the rank on `host`.
        exit_code: exit code; 0 unless the rank failed.
        reason: why the rank failed or raises, or what it was doing.
    """

    event: RankEvent
    rank: int
    pid: int
    host: str
    exit_code: int = 0
    reason: str = ""

    def encode(self) -> str:
        """Return the message as one line. The caller must write the line with a single call."""
        reason = quote(self.reason[:_LONGEST_REASON], errors="replace")
        fields = (self.event.value, self.rank, self.pid, self.exit_code, self.host, reason)
        return f"{_MARK}sirtaki {' '.join(map(str, fields))}{_MARK}\n"

    @classmethod
    def decode(cls, matched: re.Match[bytes]) -> ChannelLine:
        """Decode a message from a match of `PATTERN` in an output line."""
        event, rank, pid, exit_code, host, reason = (group.decode() for group in matched.groups())
        return cls(
            event=RankEvent(event), rank=int(rank), pid=int(pid), exit_code=int(exit_code), host=host,
            reason=unquote(reason, errors="replace"),
        )  # fmt: skip


class _MarkedFile(io.FileIO):
    """Output file that appends `UNFINISHED` to text without a line end, such as a progress bar or a prompt."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write `data`, and `UNFINISHED` if it ends within a line, in one call, so that no other output is mixed in."""
        text = bytes(data)
        rest = memoryview(text if text.endswith(b"\n") or not text else text + UNFINISHED)
        while rest:
            rest = rest[os.write(self.fileno(), rest) :]
        return len(text)


def mark_unfinished_lines() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that write whole lines, so that lines of different ranks are not
    mixed.
    """
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
            # Escape characters that the terminal's encoding lacks: an exception would end the training.
            errors=stream.errors if utf8 and stream.errors != "strict" else "backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, marked)
        setattr(sys, f"__{name}__", marked)


def answer_termination(report: Callable[[str], None]) -> None:
    """Handle SIGTERM: call `report` with a description of what this rank does, then end the process.

    Only Python code can be interrupted. A rank that hangs in C code is killed later without a message. A
    script may replace the handler. Child processes that were forked do not have it.
    """

    def on_terminate(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        remove_segments(mapped_segments("self"))
        report(doing())
        os.kill(os.getpid(), number)

    handle_signal(signal.SIGTERM, on_terminate)


def doing() -> str:
    """Describe what this rank is doing now. "" if the script has not called `init()`."""
    # The module is not imported, or is just being imported.
    describe = getattr(sys.modules.get("sirtaki.engine.job"), "describe", None)
    return "" if describe is None else str(describe())


def end_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return a function that makes the kernel send a child process the signal `number` when the parent dies.

    Linux only.

    The child calls the function after the fork.
    """
    # Load libc before the fork. Loading takes a lock, which could deadlock after the fork.
    libc = ctypes.CDLL(None)
    pr_set_pdeathsig = 1

    def set_signal() -> None:
        libc.prctl(pr_set_pdeathsig, number)

    return set_signal
