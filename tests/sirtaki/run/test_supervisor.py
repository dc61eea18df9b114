"""The supervisor of a running mpiexec ends it completely, itself or by a process that outlives it."""

import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sirtaki.errors import LaunchError
from sirtaki.run import leftovers, supervisor
from sirtaki.run.leftovers import (
    makes_way_for_mpiexec,
    mapped_segments,
    session_members,
)
from sirtaki.run.output import OutputOptions
from sirtaki.run.rank_channel import ChannelLine, RankEvent
from sirtaki.run.supervisor import Supervisor

# ── supervisor ────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    message = ChannelLine(event=event, rank=rank, pid=pid, exit_code=exit_code, host=host, reason=reason)
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


def test_the_exit_code_of_mpiexec_counts_where_no_rank_reported_one():
    assert run(say(RankEvent.STARTED) + "exit 5") == 5
    assert run(say(RankEvent.STARTED) + "kill -9 $$") == 137


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


def test_a_message_of_a_rank_that_waited_for_the_killed_one_is_received(capfd):
    says = [(0, "runs train.py:7 in main"), (2, "waits for the gradients of iteration 7"), (3, "")]
    others = "".join(say(RankEvent.TERMINATED, rank=rank, reason=reason) for rank, reason in says)
    box = f"(echo {'-' * 74}; echo 'prterun noticed that process rank 1 with PID 7 on node vm exited on signal 11'; "
    assert run(say(RankEvent.STARTED) + others + box + f"echo {'-' * 74}) >&2\nexit 1") == 139
    expected = (
        "rank 1 on vm failed (killed by SIGSEGV); rank 2 waits for the gradients of iteration 7; ending all ranks"
    )
    assert capfd.readouterr().err == f"sirtakirun: {expected}\n"


def test_the_first_failure_is_reported_once_and_its_consequences_are_not(capfd):
    failures = say(RankEvent.FAILED, rank=1, exit_code=3, reason="ValueError: a bad batch") + say(
        RankEvent.FAILED, exit_code=1
    )
    box = f"(echo {'-' * 74}; echo 'prterun detected that one or more processes exited with non-zero status,'; "
    box += f"echo 'Process name: [prterun-vm-1@1,0]'; echo 'Exit code:    1'; echo {'-' * 74}) >&2\n"
    assert run(say(RankEvent.STARTED) + failures + box + "exit 1") == 3
    expected = f"sirtakirun: rank 1 on {socket.gethostname()} failed (ValueError: a bad batch); ending all ranks\n"
    assert capfd.readouterr().err == expected


@pytest.mark.lengthy
def test_the_number_of_started_ranks_is_reported_while_some_are_missing(capfd, monkeypatch):
    monkeypatch.setattr(supervisor, "START_REPORT_S", 0.2)
    run(say(RankEvent.STARTED, pid=os.getpid()) + "sleep 1", ranks=2)
    assert "1 of 2 ranks have started" in capfd.readouterr().err


@pytest.fixture
def stopped_pid():
    """Yield the id of a stopped process."""
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        yield process.pid
        process.kill()


@pytest.mark.parametrize("kind", ["StallError", "PeerLostError"])
def test_a_stopped_rank_is_blamed_for_the_failures_of_others(capfd, stopped_pid, kind):
    told = say(RankEvent.STARTED, pid=os.getpid()) + say(RankEvent.STARTED, rank=1, pid=stopped_pid)
    failure = say(RankEvent.FAILED, exit_code=1, reason=f"{kind}: rank 0 has waited 7 s")
    assert run(told + failure + "exit 1", ranks=2) == 1
    expected = (
        f"sirtakirun: rank 1 on {socket.gethostname()} failed (it is stopped, by SIGSTOP or a debugger; on rank 0: "
        f"{kind}: rank 0 has waited 7 s); ending all ranks\n"
    )
    assert capfd.readouterr().err == expected


def test_a_stopped_rank_is_not_blamed_for_the_errors_of_a_script(capfd, stopped_pid):
    told = say(RankEvent.STARTED, pid=os.getpid()) + say(RankEvent.STARTED, rank=1, pid=stopped_pid)
    assert run(told + say(RankEvent.FAILED, exit_code=1, reason="ValueError: a bad batch") + "exit 1", ranks=2) == 1
    assert "rank 0 on" in capfd.readouterr().err


def test_a_killed_rank_is_blamed_although_a_peer_reports_first(capfd):
    told = say(RankEvent.STARTED, pid=os.getpid()) + say(RankEvent.STARTED, rank=1, pid=99999999)
    assert (
        run(told + say(RankEvent.FAILED, exit_code=1, reason="PeerLostError: rank 1 has ended") + "exit 1", ranks=2)
        == 137
    )
    said = capfd.readouterr().err
    assert said.startswith(f"sirtakirun: rank 1 on {socket.gethostname()} failed (killed by SIGKILL")
    assert said.count("\n") == 1


@pytest.mark.lengthy
def test_a_rank_that_stays_stopped_is_named_once(capfd, stopped_pid, monkeypatch):
    monkeypatch.setattr(supervisor, "STOPPED_S", 0.1)
    run(say(RankEvent.STARTED, pid=stopped_pid) + "sleep 1")
    assert capfd.readouterr().err == (
        f"sirtakirun: rank 0 on {socket.gethostname()} waits: it is stopped, by SIGSTOP or a debugger; "
        f"`kill -CONT {stopped_pid}` resumes it\n"
    )


@pytest.mark.lengthy
def test_a_start_continues_while_ranks_arrive_or_compute():
    arriving = "".join(f"sleep 0.5; {say(RankEvent.STARTED, rank=rank, pid=os.getpid())}" for rank in range(6))
    assert run(arriving, ranks=6, start_timeout_s=2.5) == 0
    computes = [sys.executable, "-c", "import time; b = time.time()\nwhile time.time() < b + 3: pass"]
    computing = f"{computes[0]} {computes[1]} '{computes[2]}'; {say(RankEvent.STARTED, pid=os.getpid())}"
    assert run(computing, start_timeout_s=2.5) == 0


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("hosts", "says"), [((), "1 processes .* on this host make no progress"), (("far",), "far can be reached by ssh")]
)
def test_a_start_without_progress_ends_with_advice_that_fits(hosts, says):
    job = Supervisor(ranks=1, start_timeout_s=0.3, output=OutputOptions(hydra=True), hosts=hosts)
    with pytest.raises(LaunchError, match=says) as raised:
        job.run(["sh", "-c", "sleep 60; true"], os.environ)
    assert ("ssh" in str(raised.value)) is bool(hosts)


@pytest.mark.lengthy
def test_an_mpiexec_that_hangs_after_a_failure_is_ended_with_all_it_started():
    marker = f"71.{os.getpid()}"
    shell = f"trap '' TERM\nsleep {marker} &\n" + say(RankEvent.FAILED, exit_code=3) + f"sleep {marker}"
    assert run(shell) == 3
    assert processes(marker) == []


def test_a_rank_killed_without_a_word_is_noticed_though_mpiexec_is_not(capfd):
    assert run(say(RankEvent.STARTED, pid=99999999) + "sleep 60") == 137
    assert "failed (killed by SIGKILL" in capfd.readouterr().err


@pytest.mark.lengthy
def test_a_rank_that_has_finished_may_have_exited():
    assert run(say(RankEvent.STARTED, pid=99999999) + say(RankEvent.FINISHED, pid=99999999) + "sleep 0.6") == 0


@pytest.mark.lengthy
def test_a_rank_on_another_host_is_not_searched_here():
    assert run(say(RankEvent.STARTED, pid=99999999, host="elsewhere") + "sleep 0.6") == 0


def test_ranks_that_do_not_start_are_named():
    began = time.monotonic()
    with pytest.raises(
        LaunchError, match=r"2 of 3 ranks did not start within 0\.3 s \(missing ranks: 1, 2\).*--start-timeout"
    ):
        run(say(RankEvent.STARTED, pid=os.getpid(), host="elsewhere") + "sleep 60", ranks=3, start_timeout_s=0.3)
    assert time.monotonic() - began < 10


# ── janitor ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def left() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process in its own session that no other process ends."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(leftovers, "_SEGMENTS", tmp_path)
    return tmp_path


def run_janitor(monkeypatch: pytest.MonkeyPatch, mpiexec: int, *lines: str) -> float:
    """Run the janitor. Return its duration in seconds."""
    monkeypatch.setattr(sys, "argv", ["janitor", str(mpiexec), str(leftovers.END_S)])
    with tempfile.TemporaryFile("w+") as heard:
        heard.writelines(f"{line}\n" for line in lines)
        heard.seek(0)
        monkeypatch.setattr(sys, "stdin", heard)
        begin_s = time.monotonic()
        leftovers.main()
        return time.monotonic() - begin_s


def test_remaining_processes_are_killed_after_a_while_and_their_files_removed(
    left: subprocess.Popen[bytes], folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "END_S", 0.3)
    segment = folders / "sm_segment.x"
    segment.touch()
    monkeypatch.setattr(leftovers, "mapped_segments", lambda pid: {segment} if pid == left.pid else set())
    mpiexec = 2**22 + 1  # which has ended
    (folders / f"ompi.{mpiexec}").mkdir()
    reaper = subprocess.Popen.wait
    monkeypatch.setattr(os, "kill", lambda pid, number: (kill(pid, number), reaper(left)))
    assert run_janitor(monkeypatch, mpiexec, str(left.pid)) >= 0.3
    assert left.returncode == -signal.SIGKILL
    assert list(folders.iterdir()) == []


kill = os.kill


# ── leftovers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_the_mpi_librarys_files_that_a_process_has_mapped_are_its_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "_SEGMENTS", tmp_path)
    mapped = []
    for name in ("sm_segment.host.0", "vader_segment.x", "mpich_shm_ab c", "somebody_elses", "sm_segment.not_mapped"):
        path = tmp_path / name
        path.write_bytes(b"\0" * 4096)
        if "not_mapped" not in name:
            with path.open("r+b") as file:
                mapped.append(mmap.mmap(file.fileno(), 4096))
    found = {path.name for path in mapped_segments("self")}
    assert found == {"sm_segment.host.0", "vader_segment.x", "mpich_shm_ab c"}
    assert mapped_segments(os.getpid()) == mapped_segments("self")
    for memory in mapped:
        memory.close()
    assert mapped_segments("self") == set()


def test_only_files_that_would_block_an_mpiexec_of_the_same_process_id_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    makes_way_for_mpiexec()()  # where there is no folder
    own, other = (tmp_path / f"ompi.{pid}" for pid in (os.getpid(), 12))
    here = f"pmix.{socket.gethostname()}.tool"
    for path in (own / here, own / f"{here}.7", own / "pmix.elsewhere.tool", other / here):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    makes_way_for_mpiexec()()
    assert sorted(tmp_path.rglob("pmix.*")) == sorted([own / "pmix.elsewhere.tool", other / here])


def test_a_process_that_has_ended_and_is_not_buried_is_no_member() -> None:
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""], start_new_session=True)
    try:
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        assert os.getsid(dead.pid) == dead.pid  # it is still there
        assert session_members({dead.pid}) == []
    finally:
        dead.wait()


# ── termination ───────────────────────────────────────────────────────────────────────────────────────────────────────


ROOT = Path(__file__).parents[3]


PROGRAM = """
import os, signal, sys, time, types
from sirtaki.run.rank_channel import answer_termination
sys.modules["sirtaki.engine.job"] = types.SimpleNamespace(describe=lambda: "waits for rank 1")
answer_termination(lambda doing: print("it", doing, flush=True))
if sys.argv[1] == "itself, importing":
    sys.modules["sirtaki.engine.job"] = types.ModuleType("sirtaki.engine.job")
if sys.argv[1].startswith("itself"):
    os.kill(os.getpid(), signal.SIGTERM)
up, ready = os.pipe()
if (child := os.fork()) == 0:
    os.write(ready, b".")
    time.sleep(60)
else:
    os.read(up, 1)
    os.kill(child, signal.SIGTERM)
    sys.exit(-os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize(
    ("whom", "says", "returncode"),
    [
        ("itself", "it waits for rank 1\n", -signal.SIGTERM),
        ("itself, importing", "it \n", -signal.SIGTERM),
        ("its child", "", signal.SIGTERM),
    ],
)
def test_a_rank_reports_its_position_before_sigterm_ends_it_and_its_children_do_not(whom, says, returncode):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, whom]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.returncode, done.stderr) == (says, returncode, "")
