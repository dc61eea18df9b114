"""What the ranks of all agents write, as one text on the console."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ..console import Console
from ..output import OutputOptions, RankOutput


class _Shown:
    """Text that no rank has written, such as ssh's, is shown as it is."""

    def take(self, text: bytes) -> bytes:
        return text

    def rest(self) -> bytes:
        return b""


class ElasticOutput:
    """Standard output and error of a job whose lines are marked with the numbers of workers."""

    def __init__(
        self,
        *,
        prefix: bool,
        timestamps: bool,
        folder: Path | None,
        label: Callable[[int], str],
        place: Callable[[int], str],
    ) -> None:
        """Shows nothing yet.

        Args:
            prefix: lines on the console begin with the rank.
            timestamps: and with the time.
            folder: also write one file a place and stream below it; None = console only.
            label: the rank, as it is now, of a worker.
            place: of a worker, as part of a path.
        """
        options = OutputOptions(
            hydra=True, prefix=prefix, timestamps=timestamps, folder=folder, label=label, place=place
        )
        self._consoles = {"stdout": Console(sys.stdout, "stdout"), "stderr": Console(sys.stderr, "stderr")}
        self._locks = {name: threading.Lock() for name in self._consoles}
        self._outputs = {
            name: RankOutput(name, console=console, on_message=lambda message: None, notices=_Shown(), options=options)
            for name, console in self._consoles.items()
        }

    def pump(self, name: str, stream: IO[bytes]) -> None:
        """Reads an agent's "stdout" or "stderr" to its end."""
        with stream:
            for line in stream:
                with self._locks[name]:
                    self._outputs[name].write(line)

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._consoles["stderr"].say(text)

    def finish(self) -> None:
        """Nothing more comes."""
        for name, output in self._outputs.items():
            with self._locks[name]:
                output.finish()
