"""A process of a rank: its output, its end, and what it leaves behind."""

import sys
import time
from pathlib import Path

import pytest

from sirtaki.launchers import AGENT
from sirtaki.run.elastic.agent import RankProcess
from sirtaki.run.elastic.job_members import RankEnd
from sirtaki.run.rank_channel import Event, Message

Capture = pytest.CaptureFixture[bytes]


def run(code: str) -> RankProcess:
    return RankProcess(7, [sys.executable, "-c", code], {"PATH": "/usr/bin:/bin"}, hosts="one")


def end_of(rank: RankProcess) -> RankEnd:
    deadline_s = time.monotonic() + 20.0
    while not rank.has_ended():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    end = rank.bury()
    rank.drain(5.0)
    return end


def test_lines_are_marked_with_the_worker_and_unfinished_ones_as_such(capfdbinary: Capture) -> None:
    assert end_of(run("import sys; print('a'); print('b'); sys.stdout.write('c')")) == RankEnd(exit_code=0)
    assert capfdbinary.readouterr().out == b"[7] a\n[7] b\n[7] c\x1f\x1e\n"


@pytest.mark.parametrize(
    ("code", "exit_code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_how_it_ended(code: str, exit_code: int) -> None:
    assert end_of(run(code)).exit_code == exit_code


def test_what_it_has_said_of_its_end_is_kept_and_marked_as_its_own(capfdbinary: Capture) -> None:
    text = Message(event=Event.FAILED, rank=0, pid=1, host="h", exit_code=1, reason="ValueError: x").encode()
    end = end_of(run(f"import sys; sys.stderr.write({text!r}); sys.exit(1)"))
    assert end == RankEnd(exit_code=1, reason="ValueError: x")
    assert b"failed 7 1 1 h " in capfdbinary.readouterr().err


def test_what_it_has_started_ends_with_it(capfdbinary: Capture) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '300']).pid, flush=True)"
    end_of(run(code))
    pid = int(capfdbinary.readouterr().out.split()[-1])
    deadline_s = time.monotonic() + 5.0
    while Path(f"/proc/{pid}").exists() and "sleep" in Path(f"/proc/{pid}/cmdline").read_text(errors="ignore"):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_it_talks_through_a_socket_of_its_own() -> None:
    code = f"""
import os, socket
from sirtaki.json_channel import JsonChannel
channel = JsonChannel(socket.socket(fileno=int(os.environ["{AGENT}"].split(",")[0])))
channel.send({{"ask": "finished"}})
"""
    rank = run(code)
    deadline_s = time.monotonic() + 20.0
    while not (messages := rank.channel.receive()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert messages == [{"ask": "finished"}]
    end_of(rank)
