"""What the ranks write: from mpiexec's marked lines to the console and, where wanted, one file a rank."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import IO, TextIO

from sirtaki.errors import ConfigError

from .rank_channel import PATTERN, Message

# `[1,0]<stdout>: ` and, in some versions, `[prterun-host-123@1,0]<stdout>: ` from Open MPI; `[0] ` from Hydra.
_OPEN_MPI_TAG = re.compile(rb"\[(?:[^\]@\s]*@)?\d+,(\d+)\]<std\w+>: ?")
_HYDRA_TAG = re.compile(rb"^\[(\d+)\] ")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How the ranks' output is shown.

    Attributes:
        hydra: lines are marked as Hydra does it, else as Open MPI.
        prefix: lines on the console begin with the rank.
        timestamps: and with the time.
        folder: also write `rank.N/stdout` and `rank.N/stderr` below it, None = console only.
    """

    hydra: bool
    prefix: bool = True
    timestamps: bool = False
    folder: Path | None = None


class RankOutput:
    """Receives one of mpiexec's two streams and hands its lines on; `on_message` gets the ranks' own messages."""

    def __init__(
        self, name: str, *, console: TextIO, on_message: Callable[[Message], None], options: OutputOptions
    ) -> None:
        self.name = name
        self.options = options
        self._console: TextIO | None = console
        self._on_message = on_message
        self._tag = _HYDRA_TAG if options.hydra else _OPEN_MPI_TAG
        self._files: dict[int, IO[bytes]] = {}

    def pump(self, stream: IO[bytes]) -> None:
        """Reads `stream` to its end, line by line, and closes it."""
        with stream:
            for line in stream:
                self.write(line)
        for file in self._files.values():
            file.close()

    def write(self, line: bytes) -> None:
        """Takes one line as mpiexec wrote it; without an end of line another rank's may follow in it."""
        starts = [tag.start() for tag in self._tag.finditer(line)]
        for start, stop in pairwise([0, *starts, len(line)]):
            if start < stop:
                self._write_part(line[start:stop])

    def _write_part(self, part: bytes) -> None:
        tag = self._tag.match(part)
        text = part if tag is None else part[tag.end() :]
        for message in PATTERN.finditer(text):
            self._on_message(Message.decode(message))
        text, messages = PATTERN.subn(b"", text)
        if messages and not text:
            return
        if tag is not None and not text.endswith(b"\n"):
            text += b"\n"
        rank = None if tag is None else int(tag[1])
        if rank is not None and self.options.folder is not None:
            file = self._file(rank)
            file.write(text)
            file.flush()
        head = b"" if rank is None or not self.options.prefix else b"[%d] " % rank
        if self.options.timestamps:
            head = datetime.now().astimezone().isoformat(timespec="milliseconds").encode() + b" " + head
        self._to_console(head + text)

    def _to_console(self, line: bytes) -> None:
        if self._console is None:
            return
        try:
            self._console.write(line.decode(errors="replace"))
            self._console.flush()
        except BrokenPipeError:  # whoever read has gone (`| head`); the training goes on
            self._console = None

    def _file(self, rank: int) -> IO[bytes]:
        if rank not in self._files:
            folder = Path(self.options.folder or ".") / f"rank.{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            self._files[rank] = (folder / self.name).open("wb")
        return self._files[rank]


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
