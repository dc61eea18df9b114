"""A rank's output: lines whole, what is unfinished marked, and no character ends training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sirtaki.run.rank_channel import UNFINISHED

# Loaded by its path: with the package come libraries that take long to load.
SCRIPT = """
import sys, types
sys.modules["sirtaki"] = package = types.ModuleType("sirtaki"); package.__path__ = [sys.argv[1]]
sys.modules["sirtaki.run"] = part = types.ModuleType("sirtaki.run"); part.__path__ = [sys.argv[1] + "/run"]
from sirtaki.run.rank_channel import mark_unfinished_lines
{before}
mark_unfinished_lines()
{after}
"""


def output(after: str, before: str = "", **env: str) -> tuple[bytes, bytes]:
    package = Path(__file__).parents[3] / "sirtaki"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(before=before, after=after), str(package)],
        capture_output=True,
        check=False,
        env={**os.environ, **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_whole_lines_are_as_they_were_and_unfinished_ones_have_a_mark() -> None:
    out, err = output('print("one"); print("step 1", end="", flush=True); print(); print("e", file=sys.stderr)')
    assert out == b"one\nstep 1" + UNFINISHED + b"\n"
    assert err == b"e\n"


def test_what_was_printed_before_comes_first_and_what_is_left_at_the_end_too() -> None:
    out, _ = output('sys.stdout.write("left")', before='sys.stdout.write("before ")')
    assert out == b"before left" + UNFINISHED


def test_bytes_written_below_are_marked_alike() -> None:
    out, _ = output('sys.stdout.buffer.write(b"\\xff"); sys.stdout.flush(); sys.stdout.buffer.write(b"a\\n")')
    assert out == b"\xff" + UNFINISHED + b"a\n"


def test_a_line_is_written_when_it_ends() -> None:
    out, _ = output('import os; print("one"); os.write(1, b"two\\n")')
    assert out == b"one\ntwo\n"


def test_a_long_text_is_written_whole() -> None:
    out, _ = output('print("x" * 300000)')
    assert out.replace(UNFINISHED, b"") == b"x" * 300_000 + b"\n"


@pytest.mark.parametrize(
    ("encoding", "written"),
    [("ascii", b"gr\\xf6\\xdfe \\udcff\n"), ("utf-8", "größe \\udcff\n".encode()), ("utf-8:surrogateescape", b"")],
)
def test_what_the_encoding_lacks_is_an_escape(encoding: str, written: bytes) -> None:
    out, _ = output('print("gr\\u00f6\\u00dfe \\udcff")', PYTHONIOENCODING=encoding)
    assert out == (written or "größe ".encode() + b"\xff\n")


def test_it_stays_standard_output_to_those_who_look() -> None:
    after = 'assert sys.stdout is sys.__stdout__; assert sys.stdout.name == "<stdout>"; assert sys.stdout.fileno() == 1'
    assert output(after) == (b"", b"")


def test_streams_of_other_kinds_are_left_alone() -> None:
    output(
        "assert sys.stdout is mine; assert sys.stderr is None",
        before="import io; mine = sys.stdout = io.StringIO(); sys.stderr = None",
    )
