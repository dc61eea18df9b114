"""What cannot be written is dropped and said once; the launcher's own lines begin at the beginning of one."""

import errno
import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sirtaki.run.console import Console, say


def test_bytes_reach_a_file_as_they_are_behind_what_was_printed_before(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream:
        print("before", file=stream)
        console = Console(stream)
        console.write(b"\xff\x00\n")
        console.write(b"")
        assert console.at_line_start
    assert (tmp_path / "out").read_bytes() == b"before\n\xff\x00\n"


def test_a_stream_that_is_no_file_gets_text() -> None:
    stream = io.StringIO(newline="")
    Console(stream).write("größe\n".encode() + b"\xff")
    assert stream.getvalue() == "größe\n\ufffd"


def test_an_own_line_ends_an_unfinished_one_first() -> None:
    stream = io.StringIO(newline="")
    console = Console(stream)
    console.say("one")
    console.write(b"\rstep 1")
    console.write(b"")
    console.say("two")
    console.say("lone \udcff surrogate")
    assert stream.getvalue() == ("sirtakirun: one\n\rstep 1\nsirtakirun: two\nsirtakirun: lone \\udcff surrogate\n")


class Fails(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.tried = error, 0

    def write(self, text: str) -> int:
        self.tried += 1
        raise self.error


def test_a_reader_that_has_gone_is_left_in_peace(capfd: pytest.CaptureFixture[str]) -> None:
    stream = Fails(BrokenPipeError())
    console = Console(stream)
    console.write(b"a\n")
    console.write(b"b\n")
    assert stream.tried == 1
    assert capfd.readouterr().err == ""


def test_a_full_disk_is_told_once_and_tried_again(capfd: pytest.CaptureFixture[str]) -> None:
    stream = Fails(OSError(errno.ENOSPC, "No space left on device"))
    console = Console(stream, "stdout")
    console.write(b"a\n")
    console.write(b"b\n")
    assert stream.tried == 2
    assert capfd.readouterr().err == (
        "sirtakirun: stdout cannot be written ([Errno 28] No space left on device); the job goes on\n"
    )


def test_standard_error_that_cannot_be_written_is_told_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    Console(Fails(OSError(errno.ENOSPC, "No space left")), "stderr").write(b"a\n")
    assert capfd.readouterr().err == ""


def test_a_closed_stream_takes_nothing() -> None:
    Console(None).write(b"a\n")
    stream = io.StringIO()
    console = Console(stream, "stderr")
    stream.close()
    console.write(b"a\n")
    console.write(b"b\n")
    assert console._stream is None


def test_a_terminal_that_does_not_wait_gets_everything() -> None:
    inbox, outbox = os.pipe()
    os.set_blocking(outbox, False)
    text = b"x" * 300_000
    got: list[bytes] = []

    def read() -> None:
        with open(inbox, "rb") as reader:
            got.append(reader.read())

    reading = threading.Thread(target=read)
    reading.start()
    with open(outbox, "w") as stream:
        Console(stream).write(text)
    reading.join()
    assert got == [text]


class Slow(io.StringIO):
    def write(self, text: str) -> int:
        for part in (text[:10], text[10:]):
            super().write(part)
            time.sleep(1e-4)
        return len(text)


def test_lines_of_several_threads_are_whole() -> None:
    stream = Slow(newline="")
    console = Console(stream)
    threads = [threading.Thread(target=lambda n=n: [console.say(f"line of {n}") for _ in range(20)]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(stream.getvalue().splitlines())) == [f"sirtakirun: line of {n}" for n in range(4)]
    assert stream.getvalue().count("\n") == 80


def test_an_own_line_before_the_job_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    say("no such host")
    assert capfd.readouterr().err == "sirtakirun: no such host\n"


def test_closed_descriptors_are_taken_before_files_get_their_numbers(tmp_path: Path) -> None:
    script = """
import os, sys
sys.path.insert(0, sys.argv[1])
import importlib.util
spec = importlib.util.spec_from_file_location("console", sys.argv[2])
console = importlib.util.module_from_spec(spec); spec.loader.exec_module(console)
os.close(0); os.close(2)
console.open_standard_streams()
console.open_standard_streams()
assert os.stat(0).st_rdev == os.stat(2).st_rdev == os.stat("/dev/null").st_rdev
number = os.open(sys.argv[2], os.O_RDONLY)
assert number > 2, number
print("kept")
"""
    path = Path(__file__).parents[3] / "sirtaki" / "run" / "console.py"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script, str(tmp_path), str(path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "kept\n"
