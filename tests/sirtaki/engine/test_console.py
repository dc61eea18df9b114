"""While settings are tried a terminal shows one bar, below what the script writes; anything else shows lines."""

import contextlib
import io
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sirtaki.engine import console
from sirtaki.engine.console import TuningProgress, log_progress, start_logging
from sirtaki.engine.settings import Settings
from sirtaki.run.output import Console, ProgressBar

DEFAULTS = Settings(log_time=False)
PROGRESS = TuningProgress(
    used=21, at_most=100, left="at most 7 s", seen="best so far, not yet proved: 7 ms less", now="x"
)


class Terminal(io.StringIO):
    """Shows what is written to it, as a terminal of ten rows does."""

    def isatty(self) -> bool:
        return True

    @property
    def rows(self) -> list[str]:
        """From the first row to the last one with text."""
        rows, row, column, kept = [""] * 10, 0, 0, (0, 0)
        for text in re.findall(r"\x1b(?:\[\d*[A-Z]|.)|\n|\r|[^\x1b\n\r]+", self.getvalue()):
            match text:
                case "\n" | "\x1bD":
                    row, column = row + 1, 0 if text == "\n" else column
                case "\r":
                    column = 0
                case "\x1b[A":
                    row -= 1
                case "\x1b[B":
                    row += 1
                case "\x1b7":
                    kept = row, column
                case "\x1b8":
                    row, column = kept
                case "\x1b[2K":
                    rows[row] = ""
                case "\x1b[J":
                    rows[row:] = [rows[row][:column], *[""] * (9 - row)]
                case _:
                    rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + len(text) :]
                    column += len(text)
            if row == 10:
                rows, row = [*rows[1:], ""], 9
        return "\n".join(rows).rstrip().split("\n")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Yield a terminal without a configured logger."""
    stream, root = Terminal(), logging.getLogger("sirtaki")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(root, "handlers", [])
    before = root.propagate, root.level
    yield stream
    for handler in root.handlers:
        if isinstance(handler, console._RankLogHandler):
            handler.clear()
    root.propagate, root.level = before


def start(stderr: io.StringIO, settings: Settings = DEFAULTS) -> None:
    with contextlib.redirect_stderr(stderr):
        start_logging(settings, 0)


def test_a_bar_is_below_a_scripts_output_and_disappears_at_the_result(terminal: Terminal) -> None:
    start(terminal)
    logger = logging.getLogger("sirtaki.test")
    log_progress(logger, PROGRESS)
    bar = "tuning [#....] 21/100; best so far, not yet proved: 7 ms less"
    assert terminal.rows == ["", bar]
    terminal.write("epoch 1")
    log_progress(logger, PROGRESS)
    assert terminal.rows == ["epoch 1", bar]
    terminal.write(": loss 0.5\n")
    log_progress(logger, PROGRESS)
    assert terminal.rows == ["epoch 1: loss 0.5", "", bar]
    logger.info("tuned")
    assert terminal.rows == ["epoch 1: loss 0.5", "[sirtaki 0] tuned"]


def test_a_bar_stays_in_the_last_rows_of_a_full_terminal(terminal: Terminal) -> None:
    start(terminal)
    for number in range(20):
        terminal.write(f"epoch {number}\n")
        log_progress(logging.getLogger("sirtaki.test"), PROGRESS)
    assert terminal.rows[:-2] == [f"epoch {number}" for number in range(12, 20)]
    assert terminal.rows[-2:] == ["", PROGRESS.bar()]


def test_lines_that_are_printed_at_once_leave_nothing_of_the_bar(terminal: Terminal) -> None:
    start(terminal)
    with contextlib.redirect_stdout(terminal):
        for number in range(2):
            log_progress(logging.getLogger("sirtaki.test"), PROGRESS)
            print(f"epoch {number}\nloss 0.5\naccuracy 0.9")
    assert terminal.rows == ["epoch 0", "loss 0.5", "accuracy 0.9", "epoch 1", "loss 0.5", "accuracy 0.9"]


def test_a_bar_is_no_longer_than_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert console.drawn("x" * 1000).count("x") == 59


def test_no_bar_is_drawn_where_only_warnings_are_wanted(terminal: Terminal) -> None:
    for name in ("SIRTAKI_LOG", "SIRTAKI_LOG_LEVEL"):
        start(terminal, Settings.from_environ({name: "warning"}))
        log_progress(logging.getLogger("sirtaki.test"), PROGRESS)
    assert terminal.getvalue() == ""


def test_output_without_a_terminal_is_lines(terminal: Terminal) -> None:
    plain = io.StringIO()
    start(plain)
    log_progress(logging.getLogger("sirtaki.test"), PROGRESS)
    assert plain.getvalue() == f"[sirtaki 0] {PROGRESS.line()}\n"
    assert console.progress_every_s() == console.LINE_EVERY_S


def test_a_launchers_bar_stays_below_the_lines_of_both_streams(terminal: Terminal) -> None:
    bar = ProgressBar()
    stdout, stderr = Console(terminal, "stdout", bar), Console(terminal, "stderr", bar)
    stderr.show_bar("tuning")
    stdout.write(b"[0] epoch 1\n")
    stderr.write(b"[1] a warning\n[1] and")
    assert terminal.rows == ["[0] epoch 1", "[1] a warning", "[1] and", "tuning"]
    stderr.say("rank 1 failed")
    stderr.show_bar("")
    assert terminal.rows == ["[0] epoch 1", "[1] a warning", "[1] and", "sirtakirun: rank 1 failed"]


RANK = """
import logging, time
from sirtaki.engine.console import TuningProgress, log_progress, start_logging
from sirtaki.engine.settings import Settings

start_logging(Settings(), 0)
print("epoch 1", flush=True)
log_progress(logging.getLogger("sirtaki.test"), TuningProgress(used=21, at_most=100, seen="nothing", now="x"))
print("epoch 2", flush=True)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("options", [["-np", "1"], ["-np", "1", "--min-np", "1"]], ids=["fixed", "elastic"])
def test_launchers_draw_the_bar_where_their_standard_error_is_a_terminal(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    ours, theirs = pty.openpty()
    job = subprocess.Popen(
        [sys.executable, "-m", "sirtaki.run", *options, sys.executable, "rank.py"],
        env={**os.environ, "TERM": "xterm"},
        cwd=tmp_path,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # raised where nobody writes any more
        while data := terminal.read(65536):
            shown += data
    assert job.wait() == 0
    screen = Terminal()
    screen.write(shown.decode().replace("\r\n", "\n"))
    assert "tuning [#....] 21/100; nothing" in shown.decode()
    assert not any("tuning" in row for row in screen.rows)
    assert any(row.endswith("epoch 2") for row in screen.rows)
