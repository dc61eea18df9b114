"""What a rank tells its launcher through its own output, which every mpiexec forwards from any host.

Marked lines on standard error tell what happens to the rank; the launcher takes them out again. Since an mpiexec
forwards whole lines only, a rank ends text without an end of line by a mark, which the launcher takes out, too.
"""

import re
from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote, unquote

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
    def decode(cls, matched: re.Match[bytes]) -> "Message":
        """The message that `PATTERN` found."""
        event, rank, pid, exit_code, host, reason = (group.decode() for group in matched.groups())
        return cls(
            event=Event(event), rank=int(rank), pid=int(pid), exit_code=int(exit_code), host=host,
            reason=unquote(reason, errors="replace"),
        )  # fmt: skip
