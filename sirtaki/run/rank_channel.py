"""What a rank tells its launcher: one marked line each on standard error, which every mpiexec forwards from any host.

A module of its own because both ends use it: the launcher takes the lines out again before a user sees them.
"""

import re
from dataclasses import dataclass
from enum import Enum

_MARK = "\x1e"  # ASCII "record separator": not in the output of programs
PATTERN = re.compile(rb"\x1esirtaki (\w+) (\d+) (\d+) (\d+) ([^\s\x1e]+)\x1e\n?")


class Event(Enum):
    """What can happen to a rank."""

    STARTED = "started"
    HANDED_OVER = "handed_over"  # to a program that is not Python; how it ends is seen by mpiexec only
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One line.

    Attributes:
        pid: of the rank's process on `host`.
        exit_code: what it ends with, 0 unless it failed.
    """

    event: Event
    rank: int
    pid: int
    host: str
    exit_code: int = 0

    def encode(self) -> str:
        """The line, to be written at once."""
        return f"{_MARK}sirtaki {self.event.value} {self.rank} {self.pid} {self.exit_code} {self.host}{_MARK}\n"

    @classmethod
    def decode(cls, matched: re.Match[bytes]) -> "Message":
        """The message that `PATTERN` found."""
        event, rank, pid, exit_code, host = (group.decode() for group in matched.groups())
        return cls(event=Event(event), rank=int(rank), pid=int(pid), exit_code=int(exit_code), host=host)
