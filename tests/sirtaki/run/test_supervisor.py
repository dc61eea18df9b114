"""A job always ends, whatever its mpiexec does. The mpiexec here is a few lines of shell that misbehave on purpose."""

import os
import socket
import sys
import time

import pytest

from sirtaki.errors import LaunchError
from sirtaki.run import supervisor
from sirtaki.run.output import OutputOptions
from sirtaki.run.rank_channel import Event, Message
from sirtaki.run.supervisor import Supervisor


@pytest.fixture(autouse=True)
def _short_graces(monkeypatch):
    for name in ("FAILURE_GRACE_S", "VANISHED_GRACE_S", "TERMINATE_GRACE_S"):
        monkeypatch.setattr(supervisor, name, 0.2)
    monkeypatch.setattr(supervisor, "_POLL_S", 0.1)


def run(shell, *, ranks=1, start_timeout_s=20.0):
    job = Supervisor(ranks=ranks, start_timeout_s=start_timeout_s, output=OutputOptions(hydra=True))
    return job.run(["sh", "-c", shell], os.environ)


def say(event, *, rank=0, pid=1, exit_code=0, host=None, reason=""):
    host = host or socket.gethostname()
    message = Message(event=event, rank=rank, pid=pid, exit_code=exit_code, host=host, reason=reason)
    return f"printf '%s\\n' '{message.encode().removesuffix(chr(10))}' >&2\n"


def processes(marker):
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read().decode(errors="replace")
        except OSError:
            continue
        if marker in command and int(pid) != os.getpid():
            found.append(pid)
    return found


def test_a_job_that_ends_well_gives_0():
    assert run(say(Event.STARTED) + say(Event.FINISHED)) == 0


def test_the_exit_code_of_mpiexec_counts_where_no_rank_told_one():
    assert run(say(Event.STARTED) + "exit 5") == 5
    assert run(say(Event.STARTED) + "kill -9 $$") == 137


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("", "no rank has started: mpiexec ended with exit code 5"),
        (f"echo {'-' * 60} >&2; echo 'A daemon failed to report back'; echo Remote host: far", "no rank has started"),
        (
            f"(echo {'-' * 60}; echo 'A daemon failed to report back'; echo 'Remote host: far'; echo {'-' * 60}) >&2",
            "^far cannot be used.*`ssh far true`",
        ),
    ],
)
def test_an_mpiexec_that_starts_nothing_is_an_error_that_names_the_host(capfd, says, expected):
    with pytest.raises(LaunchError, match=expected):
        run(f"{says}\nexit 5")
    assert "A daemon" not in capfd.readouterr().err


def test_a_rank_that_waited_for_the_killed_one_is_heard(capfd):
    says = [(0, "runs train.py:7 in main"), (2, "waits for the gradients of iteration 7"), (3, "")]
    others = "".join(say(Event.TERMINATED, rank=rank, reason=reason) for rank, reason in says)
    box = f"(echo {'-' * 74}; echo 'prterun noticed that process rank 1 with PID 7 on node vm exited on signal 11'; "
    assert run(say(Event.STARTED) + others + box + f"echo {'-' * 74}) >&2\nexit 1") == 139
    expected = (
        "rank 1 on vm failed (killed by SIGSEGV); rank 2 waits for the gradients of iteration 7; all ranks are ended"
    )
    assert capfd.readouterr().err == f"sirtakirun: {expected}\n"


def test_the_first_failure_is_said_once_and_what_follows_from_it_is_not(capfd):
    failures = say(Event.FAILED, rank=1, exit_code=3, reason="ValueError: a bad batch") + say(Event.FAILED, exit_code=1)
    box = f"(echo {'-' * 74}; echo 'prterun detected that one or more processes exited with non-zero status,'; "
    box += f"echo 'Process name: [prterun-vm-1@1,0]'; echo 'Exit code:    1'; echo {'-' * 74}) >&2\n"
    assert run(say(Event.STARTED) + failures + box + "exit 1") == 3
    expected = f"sirtakirun: rank 1 on {socket.gethostname()} failed (ValueError: a bad batch); all ranks are ended\n"
    assert capfd.readouterr().err == expected


def test_how_many_ranks_have_started_is_said_while_some_have_not(capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "START_REPORT_S", 0.2)
    run(say(Event.STARTED, pid=os.getpid()) + "sleep 1", ranks=2)
    assert "1 of 2 ranks have started" in capfd.readouterr().err


def test_the_rank_that_failed_first_gives_the_exit_code():
    assert run(say(Event.FAILED, exit_code=3) + say(Event.FAILED, rank=1, exit_code=4) + "exit 1") == 3


def test_an_mpiexec_that_hangs_after_a_failure_is_ended_with_all_it_started():
    marker = f"71.{os.getpid()}"
    shell = f"trap '' TERM\nsleep {marker} &\n" + say(Event.FAILED, exit_code=3) + f"sleep {marker}"
    assert run(shell) == 3
    assert processes(marker) == []


def test_a_rank_killed_without_a_word_is_noticed_though_mpiexec_is_not(capfd):
    assert run(say(Event.STARTED, pid=99999999) + "sleep 60") == 137
    assert "failed (killed by SIGKILL" in capfd.readouterr().err


def test_a_rank_that_has_finished_may_be_gone():
    assert run(say(Event.STARTED, pid=99999999) + say(Event.FINISHED, pid=99999999) + "sleep 0.6") == 0


def test_a_rank_on_another_host_is_not_looked_for_here():
    assert run(say(Event.STARTED, pid=99999999, host="elsewhere") + "sleep 0.6") == 0


def test_ranks_that_do_not_start_are_named():
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"2 of 3 ranks \(1, 2\) did not start within 0\.3 s.*--start-timeout"):
        run(say(Event.STARTED, pid=os.getpid(), host="elsewhere") + "sleep 60", ranks=3, start_timeout_s=0.3)
    assert time.monotonic() - began < 10


def test_an_mpiexec_that_cannot_be_run_is_an_error():
    job = Supervisor(ranks=1, start_timeout_s=1.0, output=OutputOptions(hydra=True))
    with pytest.raises(LaunchError, match="could not be run"):
        job.run([f"{sys.executable}-nothere"], os.environ)
