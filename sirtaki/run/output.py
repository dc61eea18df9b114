"""Output of ranks on the console and in files: prefixed with the rank, and with each error printed once.

Write errors (a full disk, a closed pipe) never stop the training. The output is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import IO, TextIO

from sirtaki.engine.console import drawn, is_terminal
from sirtaki.errors import ConfigError
from sirtaki.machine import signal_name

from .rank_channel import PATTERN, UNFINISHED, ChannelLine, RankEvent

_CLEARED = drawn("").encode()


@dataclass(slots=True)
class ProgressBar:
    """Progress bar below all output while tuning. "" for none."""

    text: str = ""


class Console:
    """Standard output or error of the launcher. Writes bytes immediately."""

    def __init__(self, stream: TextIO | None, name: str = "output", bar: ProgressBar | None = None) -> None:
        """`stream`: None for a closed descriptor, then nothing is written. `bar`: shared by both streams."""
        self._stream, self._name = stream, name
        self._bar = bar if is_terminal(stream) else None
        self._has_warned = False
        self._lock = threading.RLock()
        self.at_line_start = True

    def write(self, data: bytes) -> None:
        """Write `data` immediately. Report the first error."""
        with self._lock:
            self.at_line_start = data.endswith(b"\n") if data else self.at_line_start
            bar = self._bar.text if self._bar is not None else ""
            try:
                self._write(_CLEARED + data + drawn(bar).encode() if bar else data)
            except (OSError, ValueError) as err:
                if isinstance(err, BrokenPipeError) or not isinstance(err, OSError):
                    self._stream = None  # the reader has exited (`| head`)
                first, self._has_warned = not self._has_warned, True
                if first and not isinstance(err, BrokenPipeError) and self._name != "stderr":
                    say(f"cannot write {self._name} ({err}); the job continues")

    def show_bar(self, text: str) -> None:
        """Draw the bar, or remove it. Does nothing if the stream is not a terminal."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._bar is not None and text != self._bar.text:
                self._bar.text = text
                self._write(drawn(text).encode())

    def say(self, line: str) -> None:
        """Write a line of the launcher. Ends an unfinished line of a rank first."""
        with self._lock:
            begin = "" if self.at_line_start else "\n"
            self.write(f"{begin}sirtakirun: {line}\n".encode(errors="backslashreplace"))

    def _write(self, data: bytes) -> None:
        if self._stream is None:
            return
        try:
            descriptor = self._stream.fileno()
        except OSError:  # because the stream of a notebook or a test has no descriptor
            self._stream.write(data.decode(errors="replace"))
            self._stream.flush()
            return
        self._stream.flush()
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # the terminal is shared with a program that set it to non-blocking
                select.select([], [descriptor], [])


def standard_consoles() -> dict[str, Console]:
    """Return standard output and error by name, with a common bar."""
    bar = ProgressBar()
    return {name: Console(getattr(sys, name), name, bar) for name in ("stdout", "stderr")}


def say(line: str) -> None:
    """Write a line of the launcher to standard error, while no rank runs."""
    Console(sys.stderr, "stderr").say(line)


def open_standard_streams() -> None:
    """Open /dev/null for closed descriptors 0 to 2, so that other files do not get these numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError as err:
            if err.errno == errno.EBADF:
                os.open(os.devnull, os.O_RDWR)


_RULE = re.compile(r"(-{40,}|={40,})")
_LONGEST_BOX = 60  # lines; longer blocks are not boxes

_KILLED = re.compile(r"noticed that process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)")
_EXITED = re.compile(r"exited with non-zero status.*,(\d+)\] Exit code: (\d+)")
_ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d+).* Errorcode: (-?\d+)")
_UNREACHED = re.compile(r"daemon failed to report back.*Remote host: (\S+)")
_SILENT = re.compile(r"lost communication with a remote daemon.*Remote daemon: \S+ on node (\S+)")
_STOPPED = re.compile(r"has exited due to process rank (\d+) with PID \d+ on node (\S+) (calling|exiting)")
_HYDRA = re.compile(r"BAD TERMINATION OF ONE OF YOUR.* PID (\d+) RUNNING AT (\S+).* EXIT CODE: (\d+)")
_REDUNDANT = re.compile(r"Primary job terminated normally, but")
# Lines that Hydra prints below its box.
_BELOW = (
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING", "This typically refers to a problem with your application",
    "Please see the FAQ page for debugging suggestions",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A failed rank, as reported by mpiexec.

    Attributes:
        rank: rank. None if mpiexec reports only the process or the host.
        host: host. "" if mpiexec does not report it.
        reason: reason in words.
        pid: process of the rank. 0 if unknown.
    """

    rank: int | None
    host: str
    exit_code: int
    reason: str
    pid: int = 0


class NoticeFilter:
    """Parses mpiexec's own messages, and removes those that the launcher prints in its own words."""

    def __init__(self, on_ending: Callable[[Ending], None], on_unreached: Callable[[str], None]) -> None:
        """Report a failed rank to `on_ending`, and a host whose daemon did not start to `on_unreached`."""
        self._on_ending, self._on_unreached = on_ending, on_unreached
        self._box: list[bytes] = []

    def take(self, line: bytes) -> bytes:
        """Process one line. Return the bytes to print now, empty while a box is incomplete."""
        text = line.decode(errors="replace").strip()
        is_rule = _RULE.fullmatch(text) is not None
        if not self._box and not is_rule:
            return b"" if text.startswith(_BELOW) else line
        self._box.append(line)
        if len(self._box) > 1 and (is_rule or len(self._box) > _LONGEST_BOX):
            return self.rest()
        return b""

    def rest(self) -> bytes:
        """Return the incomplete box, unless the launcher prints the same fact."""
        box, self._box = b"".join(self._box), []
        return b"" if self._understood(" ".join(box.decode(errors="replace").split())) else box

    def _understood(self, text: str) -> bool:
        if found := _KILLED.search(text):
            rank, host, number = found.groups()
            self._on_ending(killed(int(rank), host, int(number)))
        elif found := _EXITED.search(text):
            rank, code = found.groups()
            self._on_ending(Ending(rank=int(rank), host="", exit_code=int(code), reason=f"exit code {code}"))
        elif found := _ABORTED.search(text):
            rank, code = found.groups()
            reason = f"it called MPI_Abort with {code}"
            self._on_ending(Ending(rank=int(rank), host="", exit_code=int(code) & 0xFF or 1, reason=reason))
        elif found := _STOPPED.search(text):
            rank, host, how = found.groups()
            reason = "it called MPI_Abort" if how == "calling" else "it ended without MPI_Finalize"
            self._on_ending(Ending(rank=int(rank), host=host, exit_code=1, reason=reason))
        elif found := _HYDRA.search(text):
            pid, host, code = found.groups()
            self._on_ending(Ending(rank=None, host=host, exit_code=int(code), reason=f"exit code {code}", pid=int(pid)))
        elif found := _UNREACHED.search(text):
            self._on_unreached(found[1])
        elif found := _SILENT.search(text):  # because mpiexec ends with exit code 0 in this case
            self._on_ending(Ending(rank=None, host=found[1], exit_code=1, reason="its host cannot be reached any more"))
        else:
            return _REDUNDANT.search(text) is not None
        return True


def killed(rank: int, host: str, number: int) -> Ending:
    """Return the end of a rank by signal `number`."""
    why = ", as the system does if memory runs out" if number == signal.SIGKILL else ""
    reason = f"killed by {signal_name(number)}{why}"
    return Ending(rank=rank, host=host, exit_code=128 + number, reason=reason)


# Tags: `[1,0]<stdout>: ` and, in some versions, `[prterun-host-123@1,0]<stdout>: ` from Open MPI; `[0] ` from Hydra.
_OPEN_MPI_TAG = re.compile(rb"\[(?:[^\]@\s]*@)?\d+,(\d+)\]<std\w+>: ?")
_HYDRA_TAG = re.compile(rb"^\[(\d+)\] ")
_RETURN = re.compile(rb"\r(?!\n|\Z)")  # a carriage return within a line: the text after it overwrites the line


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Format of the ranks' output.

    Attributes:
        hydra: lines have tags of Hydra, otherwise of Open MPI.
        prefix: console lines begin with the rank.
        timestamps: console lines begin with the time.
        folder: also write `rank.N/stdout` and `rank.N/stderr` below this folder. None for console only.
        label: returns the prefix for the number in a line's tag.
        place: returns the folder below `folder` for this number.
    """

    hydra: bool
    prefix: bool = True
    timestamps: bool = False
    folder: Path | None = None
    label: Callable[[int], str] = str
    place: Callable[[int], str] = "rank.{}".format


class RankOutput:
    """Receives one of two streams that contain the lines of all ranks, and prints them."""

    def __init__(
        self,
        name: str,
        *,
        console: Console,
        options: OutputOptions,
        on_message: Callable[[ChannelLine], None] = lambda message: None,
        notices: NoticeFilter | None = None,
    ) -> None:
        """Begin without output.

        Args:
            name: "stdout" or "stderr".
            console: output stream.
            options: format.
            on_message: called with messages of ranks to the launcher.
            notices: processes lines without a rank. None to print them unchanged.
        """
        self.name = name
        self.options = options
        self._console = console
        self._on_message = on_message
        self._notices = notices
        self._tag = _HYDRA_TAG if options.hydra else _OPEN_MPI_TAG
        self._files: dict[int, IO[bytes] | None] = {}
        self._places: set[Path] = set()
        self._errors: dict[int, tuple[bytes, str]] = {}  # by rank: text of its error, and the reason in short
        self._shown: dict[bytes, int] = {}  # printed errors, and the first rank of each
        self._lock = threading.Lock()
        self._open: int | None = None  # the rank that wrote last
        self._returned = False  # the last line ended with a carriage return

    def pump(self, lines: Iterable[bytes]) -> None:
        """Process all lines of a stream as they arrive. Each stream may have its own thread."""
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Print what was held back, and close the files."""
        with self._lock:
            self._finish()

    def _finish(self) -> None:
        for rank in list(self._errors):
            self._show_error(rank)
        if self._notices is not None:
            self._show_own(self._notices.rest())
        if self.options.prefix:
            self._finish_line()
        for file in filter(None, self._files.values()):
            file.close()

    def write(self, line: bytes) -> None:
        """Process one line of mpiexec. A part without a line end may be followed by another rank's text."""
        starts = [tag.start() for tag in self._tag.finditer(line)]
        with self._lock:
            for start, stop in pairwise([0, *starts, len(line)]):
                if start < stop:
                    self._write_part(line[start:stop])

    def _write_part(self, part: bytes) -> None:
        tag = self._tag.match(part)
        text = part if tag is None else part[tag.end() :]
        for found in PATTERN.finditer(text):
            message = ChannelLine.decode(found)
            if message.event is RankEvent.RAISES:
                self._errors.setdefault(message.rank, (b"", message.reason))
            else:
                self._show_error(message.rank)
            self._on_message(message)
        text, messages = PATTERN.subn(b"", text)
        if messages and not text:
            return
        if tag is None:
            self._show_own(text if self._notices is None else self._notices.take(text))
        else:
            text = text.removesuffix(UNFINISHED)
            rank = int(tag[1])
            self._keep(rank, text)
            if rank in self._errors:  # hold back until the error is complete
                written, brief = self._errors[rank]
                self._errors[rank] = written + text, brief
            else:
                self._show(rank, text)

    def _show_error(self, rank: int) -> None:
        """Print the error text of a rank. Prints one line instead if another rank printed the same error, or caused
        this one.
        """
        text, brief = self._errors.pop(rank, (b"", ""))
        if brief and self._shown:
            text = f"{brief}\n".encode()
        elif text and (first := self._shown.setdefault(text, rank)) != rank:
            text = f"the same error as on rank {self.options.label(first)}\n".encode()
        for line in BytesIO(text):
            self._show(rank, line)

    def _show(self, rank: int, text: bytes) -> None:
        """Print text of a rank, possibly part of a line. Ends an unfinished line of another rank first."""
        if not text:
            return
        head = self._head(rank)
        overwrites = _RETURN.match(text) is not None or text == b"\r"
        continues = self._open == rank and not self._console.at_line_start
        if not continues and not overwrites and not self._returned:
            self._finish_line()
        begins = not overwrites and (not continues or self._returned)
        # A progress bar rewrites its line, so the prefix must be repeated.
        self._console.write((head if begins else b"") + _RETURN.sub(b"\r" + head, text))
        self._open = rank
        self._returned = text.endswith(b"\r")

    def _show_own(self, text: bytes) -> None:
        if text:
            self._finish_line()
            self._console.write(self._time() + text)

    def _finish_line(self) -> None:
        if not self._console.at_line_start:
            self._console.write(b"\n")
        self._returned = False

    def _head(self, rank: int) -> bytes:
        return self._time() + (f"[{self.options.label(rank)}] ".encode() if self.options.prefix else b"")

    def _time(self) -> bytes:
        if not self.options.timestamps:
            return b""
        return datetime.now().astimezone().isoformat(timespec="milliseconds").encode() + b" "

    def _keep(self, rank: int, text: bytes) -> None:
        """Write to the file of a rank. After a write error, the file is closed and the training continues."""
        if self.options.folder is None:
            return
        try:
            file = self._files[rank] if rank in self._files else self._open_file(rank, self.options.folder)
            if file is not None:
                file.write(text)
        except OSError as err:
            say(f"--output-filename: cannot write {self.name} of rank {rank} ({err}); the job continues")
            if (file := self._files.get(rank)) is not None:
                file.close()
            self._files[rank] = None

    def _open_file(self, rank: int, folder: Path) -> IO[bytes]:
        place = folder / self.options.place(rank)
        place.mkdir(parents=True, exist_ok=True)
        kept = place in self._places  # a replaced rank has written here
        self._places.add(place)
        file = self._files[rank] = (place / self.name).open("ab" if kept else "wb", buffering=0)
        return file


def output_folder(path: str) -> Path:
    """Return the folder for `--output-filename`. Creates it if needed.

    Raises:
        ConfigError: the folder cannot be created.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(f"--output-filename {path}: {err}; choose a writable folder") from err
    return folder
