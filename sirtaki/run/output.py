"""Print the output of ranks on the console and in files. Each line is prefixed with the rank, and equal errors of
several ranks are printed once.

Write errors (a full disk, a closed pipe) never stop the training. Output that cannot be written is dropped.
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
from sirtaki.machine import memory_limits, signal_name

from .hosts import Host
from .rank_channel import PATTERN, UNFINISHED, ChannelLine, RankEvent

_CLEARED = drawn("").encode()


@dataclass(slots=True)
class ProgressBar:
    """Text of the progress bar that the launcher draws below all output while a rank tunes. "" if there is no bar."""

    text: str = ""


class Console:
    """Standard output or standard error of the launcher, without a buffer."""

    def __init__(self, stream: TextIO | None, name: str = "output", bar: ProgressBar | None = None) -> None:
        """Create a console.

        Args:
            stream: output stream. None if its descriptor is closed; then nothing is written.
            name: name of the stream, for messages.
            bar: progress bar, shared by standard output and error.
        """
        self._stream, self._name = stream, name
        self._bar = bar if is_terminal(stream) else None
        self._has_warned = False
        self._lock = threading.RLock()
        self.at_line_start = True

    def write(self, data: bytes) -> None:
        """Write `data` immediately. Report only the first write error."""
        with self._lock:
            self.at_line_start = data.endswith(b"\n") if data else self.at_line_start
            bar = self._bar.text if self._bar is not None else ""
            try:
                self._write(_CLEARED + data + drawn(bar).encode() if bar else data)
            except (OSError, ValueError) as err:
                if isinstance(err, BrokenPipeError) or not isinstance(err, OSError):
                    self._stream = None  # Stop writing: the reader (`| head`) has exited.
                first, self._has_warned = not self._has_warned, True
                if first and not isinstance(err, BrokenPipeError) and self._name != "stderr":
                    say(f"cannot write {self._name} ({err}); the job continues")

    def show_bar(self, text: str) -> None:
        """Draw `text` as the progress bar; "" removes the bar. Does nothing if the stream is not a terminal."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._bar is not None and text != self._bar.text:
                self._bar.text = text
                self._write(drawn(text).encode())

    def say(self, line: str) -> None:
        """Write a line of the launcher. If a rank's line is unfinished, end this line first."""
        with self._lock:
            begin = "" if self.at_line_start else "\n"
            self.write(f"{begin}sirtakirun: {line}\n".encode(errors="backslashreplace"))

    def _write(self, data: bytes) -> None:
        if self._stream is None:
            return
        try:
            descriptor = self._stream.fileno()
        except OSError:  # The stream of a notebook or a test has no descriptor.
            self._stream.write(data.decode(errors="replace"))
            self._stream.flush()
            return
        self._stream.flush()
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            # Another program has set the terminal to non-blocking. Wait until the terminal accepts output.
            except BlockingIOError:
                select.select([], [descriptor], [])


def standard_consoles() -> dict[str, Console]:
    """Return the consoles of standard output and error by name. Both share one progress bar."""
    bar = ProgressBar()
    return {name: Console(getattr(sys, name), name, bar) for name in ("stdout", "stderr")}


def say(line: str) -> None:
    """Write a line of the launcher to standard error. Called only while no rank runs."""
    Console(sys.stderr, "stderr").say(line)


def open_standard_streams() -> None:
    """Open /dev/null for closed descriptors 0 to 2, so that files that are opened later do not get these
    descriptors.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError as err:
            if err.errno == errno.EBADF:
                os.open(os.devnull, os.O_RDWR)


_RULE = re.compile(r"(-{40,}|={40,})")
# Maximum number of lines of an error that mpiexec prints in a box. A longer block is ordinary output.
_LONGEST_BOX = 60

_KILLED = re.compile(r"noticed that process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)")
_EXITED = re.compile(r"exited with non-zero status.*,(\d+)\] Exit code: (\d+)")
_ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d+).* Errorcode: (-?\d+)")
_UNREACHED = re.compile(r"daemon failed to report back.*Remote host: (\S+)")
_SILENT = re.compile(r"lost communication with a remote daemon.*Remote daemon: \S+ on node (\S+)")
_STOPPED = re.compile(r"has exited due to process rank (\d+) with PID \d+ on node (\S+) (calling|exiting)")
_HYDRA = re.compile(r"BAD TERMINATION OF ONE OF YOUR.* PID (\d+) RUNNING AT (\S+).* EXIT CODE: (\d+)")
_REDUNDANT = re.compile(r"Primary job terminated normally, but")
# Beginnings of lines that Hydra (MPICH's mpiexec) prints below its error box.
_BELOW = (
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING", "This typically refers to a problem with your application",
    "Please see the FAQ page for debugging suggestions",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A failed rank, as reported by mpiexec.

    Attributes:
        rank: the failed rank. None if mpiexec reports only the process or the host.
        host: host of the failed rank. "" if mpiexec does not report the host.
        reason: why the rank failed, in words.
        pid: process id of the rank. 0 if unknown.
    """

    rank: int | None
    host: str
    exit_code: int
    reason: str
    pid: int = 0


class NoticeFilter:
    """Filter that parses mpiexec's own messages, and removes messages that the launcher prints in its own words."""

    def __init__(self, on_ending: Callable[[Ending], None], on_unreached: Callable[[str], None]) -> None:
        """Create a filter.

        Args:
            on_ending: called with each failed rank that mpiexec reports.
            on_unreached: called with each host on which mpiexec could not start its daemon.
        """
        self._on_ending, self._on_unreached = on_ending, on_unreached
        self._box: list[bytes] = []

    def take(self, line: bytes) -> bytes:
        """Process one line of mpiexec. Return the bytes to print now; empty while an error box is incomplete."""
        text = line.decode(errors="replace").strip()
        is_rule = _RULE.fullmatch(text) is not None
        if not self._box and not is_rule:
            return b"" if text.startswith(_BELOW) else line
        self._box.append(line)
        if len(self._box) > 1 and (is_rule or len(self._box) > _LONGEST_BOX):
            return self.rest()
        return b""

    def rest(self) -> bytes:
        """Return the lines of an error box of mpiexec that was cut off by the end of the output.

        Return nothing if the launcher itself reports the error.
        """
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
        # Report a lost host as a failure, because mpiexec ends with exit code 0 in this case.
        elif found := _SILENT.search(text):
            self._on_ending(Ending(rank=None, host=found[1], exit_code=1, reason="its host cannot be reached any more"))
        else:
            return _REDUNDANT.search(text) is not None
        return True


def killed(rank: int, host: str, number: int) -> Ending:
    """Return the report of a rank that was killed by signal `number`."""
    reason = f"killed by {signal_name(number)}"
    if number == signal.SIGKILL:
        reason += ", as the system does if memory runs out"
        if Host(name=host, slots=1).is_local and (limit := memory_limits()):  # ranks have the launcher's limit
            reason += f" (the limit is {limit})"
    return Ending(rank=rank, host=host, exit_code=128 + number, reason=reason)


# Pattern of the tag that mpiexec puts in front of a rank's line. For rank 0, Open MPI writes `[1,0]<stdout>: ` or, in
# some versions, `[prterun-host-123@1,0]<stdout>: `. Hydra writes `[0] `.
_OPEN_MPI_TAG = re.compile(rb"\[(?:[^\]@\s]*@)?\d+,(\d+)\]<std\w+>: ?")
_HYDRA_TAG = re.compile(rb"^\[(\d+)\] ")
# Pattern of a carriage return within a line, after which the text overwrites the line.
_RETURN = re.compile(rb"\r(?!\n|\Z)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Format of the ranks' output.

    Attributes:
        hydra: True if lines have the tags of Hydra (MPICH), False for the tags of Open MPI.
        prefix: True if console lines begin with the rank.
        timestamps: True if console lines begin with the time.
        folder: folder in which `rank.N/stdout` and `rank.N/stderr` are written, too. None to print only on the console.
        label: function that returns the prefix of a console line for the number in the line's tag: the rank, or in
            elastic jobs the number of its process.
        place: function that returns the subfolder of `folder` for the number in a line's tag.
    """

    hydra: bool
    prefix: bool = True
    timestamps: bool = False
    folder: Path | None = None
    label: Callable[[int], str] = str
    place: Callable[[int], str] = "rank.{}".format


class RankOutput:
    """Printer of one stream, standard output or error, that contains the lines of all ranks."""

    def __init__(
        self,
        name: str,
        *,
        console: Console,
        options: OutputOptions,
        on_message: Callable[[ChannelLine], None] = lambda message: None,
        notices: NoticeFilter | None = None,
    ) -> None:
        """Create a printer for one stream.

        Args:
            name: "stdout" or "stderr".
            console: console on which lines are printed.
            options: format of the output.
            on_message: called with each message from a rank to the launcher.
            notices: filter for lines without a rank tag. None to print these lines unchanged.
        """
        self.name = name
        self.options = options
        self._console = console
        self._on_message = on_message
        self._notices = notices
        self._tag = _HYDRA_TAG if options.hydra else _OPEN_MPI_TAG
        self._files: dict[int, IO[bytes] | None] = {}
        self._places: set[Path] = set()
        # {rank that is printing an error: the text until now, and the short reason}
        self._errors: dict[int, tuple[bytes, str]] = {}
        self._shown: dict[bytes, int] = {}  # {error text: the first rank that printed it}
        self._lock = threading.Lock()
        self._open: int | None = None  # Rank whose text was last written to the console.
        self._returned = False  # True if the last line ended with a carriage return.

    def pump(self, lines: Iterable[bytes]) -> None:
        """Process all lines of the ranks' standard output or standard error as they arrive. Each of the two may have
        its own thread.
        """
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Print error texts that were held back, and close the output files."""
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
        """Process one output line of mpiexec. If the line has no line end, text of another rank may follow."""
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
            if rank in self._errors:  # Hold the line back until the rank's error text is complete.
                written, brief = self._errors[rank]
                self._errors[rank] = written + text, brief
            else:
                self._show(rank, text)

    def _show_error(self, rank: int) -> None:
        """Print the error text of a rank. If another rank printed the same error, or caused this error, print
        only one line.
        """
        text, brief = self._errors.pop(rank, (b"", ""))
        if brief and self._shown:
            text = f"{brief}\n".encode()
        elif text and (first := self._shown.setdefault(text, rank)) != rank:
            text = f"the same error as on rank {self.options.label(first)}\n".encode()
        for line in BytesIO(text):
            self._show(rank, line)

    def _show(self, rank: int, text: bytes) -> None:
        """Print text of a rank, which may be part of a line. If another rank's line is unfinished, end that line
        first.
        """
        if not text:
            return
        head = self._head(rank)
        overwrites = _RETURN.match(text) is not None or text == b"\r"
        continues = self._open == rank and not self._console.at_line_start
        if not continues and not overwrites and not self._returned:
            self._finish_line()
        begins = not overwrites and (not continues or self._returned)
        # Repeat the prefix after each carriage return, because the text after it overwrites the line.
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
        """Write text to the output file of a rank. After a write error, close the file; the training continues."""
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
        # Append to the file in an elastic job: this rank may replace an earlier rank that has written to it.
        kept = place in self._places
        self._places.add(place)
        file = self._files[rank] = (place / self.name).open("ab" if kept else "wb", buffering=0)
        return file


def output_folder(path: str) -> Path:
    """Return the folder that `--output-filename` names, and create it if needed.

    Raises:
        ConfigError: the folder cannot be created.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(
            f"the folder {path} given with --output-filename cannot be created ({err}); choose another folder"
        ) from err
    return folder
