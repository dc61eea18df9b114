"""What a person at a terminal is told: lines of the log, each with its rank, and one bar while settings are tried.

The bar stands below the line in which the cursor is, so that what a script prints, or its own bar, stays whole; what
this process prints removes it until it is drawn again, as the launcher does for all its ranks. Where standard error is
no terminal there are lines every few seconds instead.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from sirtaki.engine.settings import Settings
from sirtaki.machine import at_exit

LINE_EVERY_S, BAR_EVERY_S = 5.0, 0.2
"""Between two lines of progress, and between two states of the bar."""

CELLS = 5

NO_LOG = "; no trial log is written"
"""Ends a line of a job that has been asked for one."""

_BELOW = "\x1bD\x1b[A\x1b7\x1b[B\r\x1b[2K"  # makes room below the cursor, remembers where it was, goes there
_BACK, _CLEAR = "\x1b8", "\x1b[J"

to_launcher: Callable[[str], None] | None = None
"""Has a launcher whose standard error is a terminal draw the bar; "" removes it. None = nobody does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far trying settings has come.

    Attributes:
        used, at_most: steps of training.
        left: `at most 7 s`; "" = unknown.
        seen: what is known until now; "" = nothing.
        aside: what belongs to `seen`, where there is room.
        now: what runs.
    """

    used: int
    at_most: int
    left: str = ""
    seen: str = ""
    aside: str = ""
    now: str

    def line(self) -> str:
        """For the log."""
        more = f", {self.left} more" if self.left else ""
        seen = f"{self.seen}{self.aside}; " if self.seen else ""
        return f"tuning, step {self.used} of at most {self.at_most}{more}: {seen}now {self.now}"

    def bar(self) -> str:
        """For a line of a terminal, the most important things first."""
        done = min(CELLS, CELLS * self.used // max(1, self.at_most))
        told = self.seen or f"now {self.now}"
        return f"tuning [{'#' * done}{'.' * (CELLS - done)}] {self.used}/{self.at_most}; {told}"


def drawn(text: str) -> str:
    """What has a terminal show that text below the cursor's line, in the place of what is there."""
    return f"{_CLEAR}{_BELOW}{text[: shutil.get_terminal_size().columns - 1]}{_BACK}" if text else _CLEAR


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a bar can be drawn there."""
    return stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class _RankFormatter(logging.Formatter):
    """`[12:30:01 sirtaki 0] message`: the rank stands in every line, once."""

    def __init__(self, rank: int, *, with_time: bool) -> None:
        super().__init__(f"[{'%(asctime)s ' if with_time else ''}sirtaki {rank}] %(message)s", datefmt="%H:%M:%S")


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines to standard error; of progress, where that is a terminal, the bar."""

    def __init__(self, rank: int, *, with_time: bool) -> None:
        super().__init__()
        self.setFormatter(_RankFormatter(rank, with_time=with_time))
        self.draws = is_terminal(self.stream)
        self._shown = False
        self._watched: list[TextIO] = []
        at_exit(self.clear)

    @property
    def has_bar(self) -> bool:
        """Progress is drawn, here or by the launcher."""
        return self.draws or to_launcher is not None

    def emit(self, record: logging.LogRecord) -> None:
        progress = getattr(record, "progress", None)
        if isinstance(progress, Progress) and self.has_bar:
            self._draw(progress.bar())
        else:
            self.clear()
            super().emit(record)

    def clear(self) -> None:
        """Removes the bar."""
        if self._shown:
            self._draw("")

    def _draw(self, text: str) -> None:
        self._shown = bool(text)
        try:
            if to_launcher is not None:
                to_launcher(text)
                return
            self._stop_watching()
            self.stream.write(drawn(text))
            self.flush()
            if text:
                for stream in (sys.stdout, sys.stderr):
                    self._watch(stream)
        except (OSError, ValueError):  # the terminal has gone
            self._shown = False

    def _watch(self, stream: TextIO) -> None:
        """Has the next text of this process remove the bar, of which lines that are shorter would leave a part."""
        attributes = getattr(stream, "__dict__", None)
        if attributes is None or "write" in attributes or not is_terminal(stream):
            return

        write = stream.write

        def clear_and_write(text: str) -> int:
            self.clear()
            return write(text)

        attributes["write"] = clear_and_write
        self._watched.append(stream)

    def _stop_watching(self) -> None:
        for stream in self._watched:
            vars(stream).pop("write", None)
        self._watched.clear()


def start_logging(settings: Settings, rank: int) -> None:
    """Rank 0 tells what is decided, the others only what is wrong; a handler of the user's own stays alone."""
    root = logging.getLogger("sirtaki")
    for handler in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        handler.clear()
        root.removeHandler(handler)
    if not root.handlers:
        root.addHandler(_Handler(rank, with_time=settings.log_time))
        root.propagate = False
    root.setLevel(settings.log_level if rank == 0 else max(settings.log_level, logging.WARNING))
    if rank == 0:
        for note in settings.notes:
            root.info("%s", note)
        for warning in settings.warnings:
            root.warning("%s", warning)


def tuning_ahead(settings: Settings) -> str:
    """What a job that tunes will do, and how to switch that off, as a part of a line."""
    return (
        f"other settings are tried in the first {settings.warmup_iterations} steps, and one is kept if it is proved to "
        "be faster (SIRTAKI_TUNE=0: none)"
    )


def tuning_off(settings: Settings) -> str:
    """Why a job does not tune, as a part of a line."""
    return f"tuning is off ({'SIRTAKI_WARMUP_ITERATIONS' if settings.tune else 'SIRTAKI_TUNE'}=0)"


def at_most(left_s: float) -> str:
    """How much longer something may take: `less than 1 s`, `at most 7 s`, `at most 3 minutes`."""
    if left_s < 1.0:
        return "less than 1 s"
    return f"at most {left_s:.0f} s" if left_s < 100.0 else f"at most {left_s / 60.0:.0f} minutes"


def progress_every_s() -> float:
    """How often progress is to be told."""
    handlers = logging.getLogger("sirtaki").handlers
    return BAR_EVERY_S if any(isinstance(each, _Handler) and each.has_bar for each in handlers) else LINE_EVERY_S


def tell_progress(logger: logging.Logger, progress: Progress) -> None:
    """A state of the bar, or a line; what is told next, be it what was found, takes the bar's place."""
    logger.info("%s", progress.line(), extra={"progress": progress})
