"""Where the launcher writes. What cannot be written (a full disk, a closed pipe) is dropped: the training goes on."""

import errno
import os
import select
import sys
import threading
from typing import TextIO


class Console:
    """Standard output or error of the launcher, for bytes as they come."""

    def __init__(self, stream: TextIO | None, name: str = "output") -> None:
        """Nothing is written for None, which Python gives for a closed descriptor."""
        self._stream, self._name = stream, name
        self._said = False
        self._lock = threading.RLock()
        self.at_line_start = True

    def write(self, data: bytes) -> None:
        """Writes `data` now; says once that this is not possible."""
        with self._lock:
            self.at_line_start = data.endswith(b"\n") if data else self.at_line_start
            try:
                self._write(data)
            except (OSError, ValueError) as err:
                if isinstance(err, BrokenPipeError) or not isinstance(err, OSError):
                    self._stream = None  # whoever read has gone (`| head`)
                first, self._said = not self._said, True
                if first and not isinstance(err, BrokenPipeError) and self._name != "stderr":
                    say(f"{self._name} cannot be written ({err}); the job goes on")

    def say(self, line: str) -> None:
        """A line of the launcher's own; an unfinished one of a rank is ended first."""
        with self._lock:
            begin = "" if self.at_line_start else "\n"
            self.write(f"{begin}sirtakirun: {line}\n".encode(errors="backslashreplace"))

    def _write(self, data: bytes) -> None:
        if self._stream is None:
            return
        try:
            descriptor = self._stream.fileno()
        except OSError:  # no file: a notebook's or a test's
            self._stream.write(data.decode(errors="replace"))
            self._stream.flush()
            return
        self._stream.flush()
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # the terminal is shared with a program that does not wait
                select.select([], [descriptor], [])


def say(line: str) -> None:
    """A line of the launcher's own on standard error, while no rank runs."""
    Console(sys.stderr, "stderr").say(line)


def open_standard_streams() -> None:
    """Gives closed descriptors 0 to 2 to /dev/null, before other files are opened under these numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError as err:
            if err.errno == errno.EBADF:
                os.open(os.devnull, os.O_RDWR)
