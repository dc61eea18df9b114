"""Terminal output: log lines with the rank, and one progress bar during tuning.

The bar is drawn below the cursor's line, so that output of the script, including the script's own bar, stays intact.
Any output of this process erases the bar. If a launcher draws the bar, any output of its ranks erases it. The next
update of the progress draws the bar again. If standard error is not a terminal, progress is logged every few seconds
instead.
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
"""Seconds between two progress log lines, and seconds between two updates of the progress bar."""

CELLS = 5

NO_LOG = "; no trial log is written"
"""Suffix of a log line if the user has asked for a trial log, and none can be written for this model or optimizer."""

# Escape sequences that add a line below the cursor, save the cursor position, and move to the added line.
_BELOW = "\x1bD\x1b[A\x1b7\x1b[B\r\x1b[2K"
_BACK, _CLEAR = "\x1b8", "\x1b[J"

to_launcher: Callable[[str], None] | None = None
"""Function that sends the text of the progress bar ("": no bar) to the launcher, which draws it on its terminal. None
if no launcher draws the bar.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningProgress:
    """Progress of the search for a faster setting in the first training steps.

    Attributes:
        used, at_most: number of training steps used, and their limit.
        left: remaining time of tuning, such as `at most 7 s`. "" if unknown.
        seen: description of the best result so far. "" if there is none.
        aside: details of `seen`, shown where there is room.
        now: description of the setting that is being measured.
    """

    used: int
    at_most: int
    left: str = ""
    seen: str = ""
    aside: str = ""
    now: str

    def line(self) -> str:
        """Return the progress as a log line."""
        more = f", {self.left} more" if self.left else ""
        seen = f"{self.seen}{self.aside}; " if self.seen else ""
        return f"tuning, step {self.used} of at most {self.at_most}{more}: {seen}now {self.now}"

    def bar(self) -> str:
        """Return the progress as one terminal line. The most important facts are first, because a narrow terminal cuts
        the end.
        """
        done = min(CELLS, CELLS * self.used // max(1, self.at_most))
        best_or_now = self.seen or f"now {self.now}"
        return f"tuning [{'#' * done}{'.' * (CELLS - done)}] {self.used}/{self.at_most}; {best_or_now}"


def drawn(text: str) -> str:
    """Return the escape sequences that draw `text` as the progress bar, on the line below the cursor.

    They replace the earlier bar. If `text` is "", they only remove it.
    """
    return f"{_CLEAR}{_BELOW}{text[: shutil.get_terminal_size().columns - 1]}{_BACK}" if text else _CLEAR


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether `stream` is a terminal that can show a progress bar."""
    return stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class _RankFormatter(logging.Formatter):
    """Formatter of log records: `[12:30:01 sirtaki 0] message`, where 0 is the rank."""

    def __init__(self, rank: int, *, with_time: bool) -> None:
        super().__init__(f"[{'%(asctime)s ' if with_time else ''}sirtaki {rank}] %(message)s", datefmt="%H:%M:%S")


class _RankLogHandler(logging.StreamHandler[TextIO]):
    """Handler that writes log lines to standard error, and draws progress as a bar if standard error is a terminal."""

    def __init__(self, rank: int, *, with_time: bool) -> None:
        super().__init__()
        self.setFormatter(_RankFormatter(rank, with_time=with_time))
        self.draws = is_terminal(self.stream)
        self._shown = False
        self._watched: list[TextIO] = []
        at_exit(self.clear)

    @property
    def has_bar(self) -> bool:
        """Whether this process or the launcher draws a progress bar."""
        return self.draws or to_launcher is not None

    def emit(self, record: logging.LogRecord) -> None:
        progress = getattr(record, "progress", None)
        if isinstance(progress, TuningProgress) and self.has_bar:
            self._draw(progress.bar())
        else:
            self.clear()
            super().emit(record)

    def clear(self) -> None:
        """Remove the progress bar from the terminal."""
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
        except (OSError, ValueError):  # Writing to a terminal that is closed raises these errors.
            self._shown = False

    def _watch(self, stream: TextIO) -> None:
        """Wrap `stream.write`, so that the next write erases the progress bar first.

        The written text may not cover all of the bar.
        """
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
    """Set up logging. Rank 0 logs decisions, and all ranks log warnings.

    Keep handlers that the user has added.
    """
    root = logging.getLogger("sirtaki")
    for handler in [handler for handler in root.handlers if isinstance(handler, _RankLogHandler)]:
        handler.clear()
        root.removeHandler(handler)
    if not root.handlers:
        root.addHandler(_RankLogHandler(rank, with_time=settings.log_time))
        root.propagate = False
    root.setLevel(settings.log_level if rank == 0 else max(settings.log_level, logging.WARNING))
    if rank == 0:
        for note in settings.notes:
            root.info("%s", note)
        for warning in settings.warnings:
            root.warning("%s", warning)


def tuning_off(settings: Settings) -> str:
    """Return a clause for a log line: the reason why the job does not tune."""
    return f"tuning is off ({'SIRTAKI_WARMUP_ITERATIONS' if settings.tune else 'SIRTAKI_TUNE'}=0)"


def at_most(left_s: float) -> str:
    """Return a remaining time in seconds as words: `less than 1 s`, `at most 7 s`, `at most 3 minutes`."""
    if left_s < 1.0:
        return "less than 1 s"
    return f"at most {left_s:.0f} s" if left_s < 100.0 else f"at most {left_s / 60.0:.0f} minutes"


def progress_every_s() -> float:
    """Return the seconds between two reports of tuning progress: shorter for a bar than for log lines."""
    handlers = logging.getLogger("sirtaki").handlers
    return BAR_EVERY_S if any(isinstance(each, _RankLogHandler) and each.has_bar for each in handlers) else LINE_EVERY_S


def log_progress(logger: logging.Logger, progress: TuningProgress) -> None:
    """Log the progress of tuning. A terminal shows it as a bar, which the next log line removes."""
    logger.info("%s", progress.line(), extra={"progress": progress})
