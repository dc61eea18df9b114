"""Once the launcher is gone without a word, nothing of its job stays; with a word, nothing is touched."""

import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sirtaki.run import janitor, leftovers


@pytest.fixture
def left() -> Iterator[subprocess.Popen[bytes]]:
    """A process of a session of its own that nobody ends."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(leftovers, "_SEGMENTS", tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, mpiexec: int, *lines: str) -> float:
    """How long it took, in seconds."""
    monkeypatch.setattr(sys, "argv", ["janitor", str(mpiexec)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    begin_s = time.monotonic()
    janitor.main()
    return time.monotonic() - begin_s


def test_a_launcher_that_has_seen_to_everything_leaves_nothing_to_do(
    left: subprocess.Popen[bytes], folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders / f"ompi.{left.pid}"
    folder.mkdir()
    run(monkeypatch, left.pid, "4711", "done")
    assert left.poll() is None
    assert folder.is_dir()


def test_what_is_left_is_killed_after_a_while_and_its_files_are_removed(
    left: subprocess.Popen[bytes], folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "END_S", 0.3)
    segment = folders / "sm_segment.x"
    segment.touch()
    monkeypatch.setattr(janitor, "mapped_segments", lambda pid: {segment} if pid == left.pid else set())
    mpiexec = 2**22 + 1  # which has ended
    (folders / f"ompi.{mpiexec}").mkdir()
    reaper = subprocess.Popen.wait
    monkeypatch.setattr(os, "kill", lambda pid, number: (kill(pid, number), reaper(left)))
    assert run(monkeypatch, mpiexec, str(left.pid)) >= 0.3
    assert left.returncode == -signal.SIGKILL
    assert list(folders.iterdir()) == []


kill = os.kill


def test_what_ends_by_itself_in_time_is_not_killed(
    left: subprocess.Popen[bytes], folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[int]] = []

    def members(sessions: set[int]) -> list[int]:
        asked.append(sessions)
        return [left.pid] if len(asked) < 3 else []

    monkeypatch.setattr(janitor, "session_members", members)
    run(monkeypatch, 5, str(left.pid))
    assert asked == [{5, left.pid}] * 3
    assert left.poll() is None
