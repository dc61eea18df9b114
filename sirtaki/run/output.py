"""What ranks write, as one text on the console and in files: marked by rank, with each error shown once.

What cannot be written (a full disk, a closed pipe) is dropped: the training goes on.
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

from .rank_channel import PATTERN, UNFINISHED, Event, Message

_CLEARED = drawn("").encode()


@dataclass(slots=True)
class Bar:
    """What stands below all output while settings are tried; nothing = there is none."""

    text: str = ""


class Console:
    """Standard output or error of the launcher, for bytes as they come."""

    def __init__(self, stream: TextIO | None, name: str = "output", bar: Bar | None = None) -> None:
        """Nothing is written for None, which Python gives for a closed descriptor; `bar` is that of both streams."""
        self._stream, self._name = stream, name
        self._bar = bar if is_terminal(stream) else None
        self._has_warned = False
        self._lock = threading.RLock()
        self.at_line_start = True

    def write(self, data: bytes) -> None:
        """Writes `data` now; says once that this is not possible."""
        with self._lock:
            self.at_line_start = data.endswith(b"\n") if data else self.at_line_start
            bar = self._bar.text if self._bar is not None else ""
            try:
                self._write(_CLEARED + data + drawn(bar).encode() if bar else data)
            except (OSError, ValueError) as err:
                if isinstance(err, BrokenPipeError) or not isinstance(err, OSError):
                    self._stream = None  # whoever read has gone (`| head`)
                first, self._has_warned = not self._has_warned, True
                if first and not isinstance(err, BrokenPipeError) and self._name != "stderr":
                    say(f"{self._name} cannot be written ({err}); the job goes on")

    def show_bar(self, text: str) -> None:
        """Draws the bar anew, or removes it; nothing where this is no terminal."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._bar is not None and text != self._bar.text:
                self._bar.text = text
                self._write(drawn(text).encode())

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


def standard_consoles() -> dict[str, Console]:
    """Standard output and error, by their names; they share a bar."""
    bar = Bar()
    return {name: Console(getattr(sys, name), name, bar) for name in ("stdout", "stderr")}


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


_RULE = re.compile(r"(-{40,}|={40,})")
_LONGEST_BOX = 60  # lines; more is no box

_KILLED = re.compile(r"noticed that process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)")
_EXITED = re.compile(r"exited with non-zero status.*,(\d+)\] Exit code: (\d+)")
_ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d+).* Errorcode: (-?\d+)")
_UNREACHED = re.compile(r"daemon failed to report back.*Remote host: (\S+)")
_SILENT = re.compile(r"lost communication with a remote daemon.*Remote daemon: \S+ on node (\S+)")
_STOPPED = re.compile(r"has exited due to process rank (\d+) with PID \d+ on node (\S+) (calling|exiting)")
_HYDRA = re.compile(r"BAD TERMINATION OF ONE OF YOUR.* PID (\d+) RUNNING AT (\S+).* EXIT CODE: (\d+)")
_SAID_ALREADY = re.compile(r"Primary job terminated normally, but")
# What Hydra adds below its box.
_BELOW = (
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING", "This typically refers to a problem with your application",
    "Please see the FAQ page for debugging suggestions",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A rank that ended badly, as mpiexec saw it.

    Attributes:
        rank: None where mpiexec tells the process, or the host, only.
        host: where, "" if mpiexec does not tell.
        reason: in words.
        pid: of the rank's process, 0 if unknown.
    """

    rank: int | None
    host: str
    exit_code: int
    reason: str
    pid: int = 0


class NoticeFilter:
    """Takes the lines that are mpiexec's own, gives back what is to be shown of them."""

    def __init__(self, on_ending: Callable[[Ending], None], on_unreached: Callable[[str], None]) -> None:
        """`on_ending` hears how a rank ended, `on_unreached` of a host whose daemon did not start."""
        self._on_ending, self._on_unreached = on_ending, on_unreached
        self._box: list[bytes] = []

    def take(self, line: bytes) -> bytes:
        """The bytes to show now, none while a box is not complete."""
        text = line.decode(errors="replace").strip()
        is_rule = _RULE.fullmatch(text) is not None
        if not self._box and not is_rule:
            return b"" if text.startswith(_BELOW) else line
        self._box.append(line)
        if len(self._box) > 1 and (is_rule or len(self._box) > _LONGEST_BOX):
            return self.rest()
        return b""

    def rest(self) -> bytes:
        """The box as far as it has come, unless it says what the launcher says."""
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
        elif found := _SILENT.search(text):  # mpiexec ends with exit code 0 then
            self._on_ending(Ending(rank=None, host=found[1], exit_code=1, reason="its host cannot be reached any more"))
        else:
            return _SAID_ALREADY.search(text) is not None
        return True


def killed(rank: int, host: str, number: int) -> Ending:
    """The end of a rank by signal `number`."""
    why = ", as the system does where memory runs out" if number == signal.SIGKILL else ""
    reason = f"killed by {signal_name(number)}{why}"
    return Ending(rank=rank, host=host, exit_code=128 + number, reason=reason)


# `[1,0]<stdout>: ` and, in some versions, `[prterun-host-123@1,0]<stdout>: ` from Open MPI; `[0] ` from Hydra.
_OPEN_MPI_TAG = re.compile(rb"\[(?:[^\]@\s]*@)?\d+,(\d+)\]<std\w+>: ?")
_HYDRA_TAG = re.compile(rb"^\[(\d+)\] ")
_RETURN = re.compile(rb"\r(?!\n|\Z)")  # a carriage return within a line: what follows overwrites it


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How the ranks' output is shown.

    Attributes:
        hydra: lines are marked as Hydra does it, else as Open MPI.
        prefix: lines on the console begin with the rank.
        timestamps: and with the time.
        folder: also write `rank.N/stdout` and `rank.N/stderr` below it, None = console only.
        label: what stands in a line's prefix for the number that it is marked with.
        place: and in which folder below `folder` its file is.
    """

    hydra: bool
    prefix: bool = True
    timestamps: bool = False
    folder: Path | None = None
    label: Callable[[int], str] = str
    place: Callable[[int], str] = "rank.{}".format


class RankOutput:
    """Receives one of two streams that hold the lines of all ranks, and shows them."""

    def __init__(
        self,
        name: str,
        *,
        console: Console,
        options: OutputOptions,
        on_message: Callable[[Message], None] = lambda message: None,
        notices: NoticeFilter | None = None,
    ) -> None:
        """Shows nothing yet.

        Args:
            name: "stdout" or "stderr".
            console: where it is shown.
            options: how.
            on_message: gets the ranks' own messages.
            notices: takes lines that no rank has written; None = they are shown as they are.
        """
        self.name = name
        self.options = options
        self._console = console
        self._on_message = on_message
        self._notices = notices
        self._tag = _HYDRA_TAG if options.hydra else _OPEN_MPI_TAG
        self._files: dict[int, IO[bytes] | None] = {}
        self._places: set[Path] = set()
        self._errors: dict[int, tuple[bytes, str]] = {}  # what ranks have written of their errors, and in short
        self._shown: dict[bytes, int] = {}  # errors, by which rank first
        self._lock = threading.Lock()
        self._open: int | None = None  # the rank that wrote last
        self._returned = False  # and that line ended with a carriage return

    def pump(self, lines: Iterable[bytes]) -> None:
        """Takes all lines, as they come; several threads may, each those of a stream of its own."""
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Nothing more comes."""
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
        """Takes one line as mpiexec wrote it; without an end of line another rank's may follow in it."""
        starts = [tag.start() for tag in self._tag.finditer(line)]
        with self._lock:
            for start, stop in pairwise([0, *starts, len(line)]):
                if start < stop:
                    self._write_part(line[start:stop])

    def _write_part(self, part: bytes) -> None:
        tag = self._tag.match(part)
        text = part if tag is None else part[tag.end() :]
        for found in PATTERN.finditer(text):
            message = Message.decode(found)
            if message.event is Event.RAISES:
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
            if rank in self._errors:  # held back until it is whole
                written, brief = self._errors[rank]
                self._errors[rank] = written + text, brief
            else:
                self._show(rank, text)

    def _show_error(self, rank: int) -> None:
        """Shows what a rank has written of its error; in short where another one's says the same, or is the cause."""
        text, brief = self._errors.pop(rank, (b"", ""))
        if brief and self._shown:
            text = f"{brief}\n".encode()
        elif text and (first := self._shown.setdefault(text, rank)) != rank:
            text = f"the same error as on rank {self.options.label(first)}\n".encode()
        for line in BytesIO(text):
            self._show(rank, line)

    def _show(self, rank: int, text: bytes) -> None:
        """Shows a rank's text, which need not be a whole line; a line that another rank began is ended first."""
        if not text:
            return
        head = self._head(rank)
        overwrites = _RETURN.match(text) is not None or text == b"\r"
        continues = self._open == rank and not self._console.at_line_start
        if not continues and not overwrites and not self._returned:
            self._finish_line()
        begins = not overwrites and (not continues or self._returned)
        # A progress bar writes its line again: so the rank, too.
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
        """Writes to the rank's file; one that cannot be written is given up, the training goes on."""
        if self.options.folder is None:
            return
        try:
            file = self._files[rank] if rank in self._files else self._open_file(rank, self.options.folder)
            if file is not None:
                file.write(text)
        except OSError as err:
            say(f"--output-filename: {self.name} of rank {rank} is kept no longer ({err}); the job goes on")
            if (file := self._files.get(rank)) is not None:
                file.close()
            self._files[rank] = None

    def _open_file(self, rank: int, folder: Path) -> IO[bytes]:
        place = folder / self.options.place(rank)
        place.mkdir(parents=True, exist_ok=True)
        kept = place in self._places  # by one that has been replaced
        self._places.add(place)
        file = self._files[rank] = (place / self.name).open("ab" if kept else "wb", buffering=0)
        return file


def output_folder(path: str) -> Path:
    """The folder for `--output-filename`, made if it is not there.

    Raises:
        ConfigError: it cannot be made.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(f"--output-filename {path}: {err}; give a folder that can be written") from err
    return folder
