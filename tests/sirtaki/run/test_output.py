"""Output and messages of ranks are received, marked and shown, on any console and in files."""

import errno
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.run import output as output_module
from sirtaki.run.output import Console, NoticeFilter, OutputOptions, RankOutput
from sirtaki.run.rank_channel import PATTERN, UNFINISHED, ChannelLine, RankEvent

# ── output ────────────────────────────────────────────────────────────────────────────────────────────────────────────


texts = st.lists(st.tuples(st.integers(0, 12), st.text("ab []0:<>@,\r", max_size=12)), max_size=12)


def receive(stream, lines, on_message=print, **options):
    output = RankOutput(
        "stdout",
        console=Console(stream),
        on_message=on_message,
        notices=NoticeFilter(print, print),
        options=OutputOptions(**{"hydra": False, **options}),
    )
    output.pump(io.BytesIO(lines))
    output.finish()


def shown(lines, **options):
    console, messages = io.StringIO(newline=""), []
    receive(console, lines, messages.append, **options)
    return console.getvalue(), messages


def overwriting(rank, text):
    """Restart a line after a carriage return."""
    inside, last = (text[:-1], "\r") if text.endswith("\r") else (text, "")
    body = inside.replace("\r", f"\r[{rank}] ")
    return (body if inside.startswith("\r") else f"[{rank}] {body}") + last


@given(texts)
def test_each_line_is_shown_behind_its_rank_under_both_families(lines):
    expected = "".join(f"{overwriting(rank, text)}\n" for rank, text in lines)
    for hydra, mark in ((False, "[1,{}]<stdout>: "), (False, "[prterun-n0-7@1,{}]<stdout>: "), (True, "[{}] ")):
        marked = "".join(f"{mark.format(rank)}{text}\n" for rank, text in lines)
        assert shown(marked.encode(), hydra=hydra) == (expected, [])


@pytest.mark.parametrize("event", RankEvent)
def test_messages_are_received_and_not_shown(event):
    message = ChannelLine(event=event, rank=3, pid=77, host="node-1.x", exit_code=4)
    assert shown(b"[1,3]<stderr>: " + message.encode().encode()) == ("", [message])
    assert shown(b"[1,0]<stderr>: tail" + message.encode().encode()) == ("[0] tail\n", [message])


def raising(rank, event=RankEvent.RAISES, reason=""):
    message = ChannelLine(event=event, rank=rank, pid=7, host="n", reason=reason)
    return b"[1,%d]<stderr>: " % rank + message.encode().encode()


def error_of(rank, *lines, end=RankEvent.FAILED, reason=""):
    written = b"".join(b"[1,%d]<stderr>: %s\n" % (rank, line) for line in lines)
    return [raising(rank, reason=reason), *written.splitlines(keepends=True), *([raising(rank, end)] if end else [])]


def test_errors_of_several_ranks_are_shown_one_after_the_other():
    first, second = error_of(0, b"Traceback", b" a", b"E: x"), error_of(1, b"Traceback", b" b", b"E: y")
    mixed = b"".join(line for pair in zip(first, second, strict=True) for line in pair)
    assert shown(mixed)[0] == "[0] Traceback\n[0]  a\n[0] E: x\n[1] Traceback\n[1]  b\n[1] E: y\n"


def test_where_the_cause_has_been_shown_its_victims_are_brief():
    victim = error_of(0, b"Traceback", b" a", b"PeerLostError: rank 1", reason="PeerLostError: rank 1")
    cause = error_of(1, b"Traceback", b"E: x")
    assert shown(b"".join([*cause, *victim]))[0].endswith("[1] E: x\n[0] PeerLostError: rank 1\n")
    assert shown(b"".join([*victim, *cause]))[0].startswith("[0] Traceback\n[0]  a\n")


@pytest.mark.parametrize("end", [None, RankEvent.TERMINATED])
def test_an_error_is_shown_though_its_rank_is_ended_meanwhile(end):
    assert shown(b"".join(error_of(0, b"Traceback", b"E: x", end=end)))[0] == "[0] Traceback\n[0] E: x\n"


def test_files_contain_each_ranks_output_and_a_slot_has_one_file_for_all_its_processes(tmp_path):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").write_text("of another job")
    lines = unfinished((0, b"\rstep 1"), (1, b"b\xff\n"), (0, b"\rstep 2\n"), (2, b"replaced\n")) + b"own\n"
    told = shown(lines, folder=tmp_path, prefix=False, place=lambda rank: f"rank.{rank % 2}")[0]
    assert told == "\rstep 1\nb\ufffd\n\rstep 2\nreplaced\nown\n"
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"\rstep 1\rstep 2\nreplaced\n"
    assert (tmp_path / "rank.1" / "stdout").read_bytes() == b"b\xff\n"


def test_a_full_disk_ends_the_ranks_files_and_not_the_job(tmp_path, capfd):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    assert shown(b"[1,0]<stdout>: a\n[1,0]<stdout>: b\n", folder=tmp_path)[0] == "[0] a\n[0] b\n"
    assert capfd.readouterr().err.count("cannot write stdout of rank 0") == 1


def unfinished(*parts):
    return b"".join(
        b"[1,%d]<stderr>: " % rank + text + (b"" if text.endswith(b"\n") else UNFINISHED) for rank, text in parts
    )


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(0, b"\rstep 1"), (0, b"\rstep 2"), (0, b"\n")], "\r[0] step 1\r[0] step 2\n"),
        ([(0, b"\rstep 1"), (1, b"\rstep 1")], "\r[0] step 1\r[1] step 1\n"),
        ([(0, b"\rstep 1"), (1, b"loss 3\n"), (0, b"\rstep 2\n")], "\r[0] step 1\n[1] loss 3\n\r[0] step 2\n"),
        ([(0, b"name? "), (0, b"thanks\n")], "[0] name? thanks\n"),
        ([(0, b"\r   \r"), (0, b"done\n")], "\r[0]    \r[0] done\n"),
        ([(0, b"a"), (1, b"b"), (0, b"c\n")], "[0] a\n[1] b\n[0] c\n"),
    ],
)
def test_unfinished_lines_are_shown_and_continued(parts, expected):
    assert shown(unfinished(*parts))[0] == expected


# ── console ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_are_appended_to_a_file_unchanged(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream:
        print("before", file=stream)
        console = Console(stream)
        console.write(b"\xff\x00\n")
        console.write(b"")
        assert console.at_line_start
    assert (tmp_path / "out").read_bytes() == b"before\n\xff\x00\n"


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


def test_a_reader_that_has_exited_causes_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    stream = Fails(BrokenPipeError())
    console = Console(stream)
    console.write(b"a\n")
    console.write(b"b\n")
    assert stream.tried == 1
    assert capfd.readouterr().err == ""


def test_a_full_disk_is_reported_once_and_retried(capfd: pytest.CaptureFixture[str]) -> None:
    stream = Fails(OSError(errno.ENOSPC, "No space left on device"))
    console = Console(stream, "stdout")
    console.write(b"a\n")
    console.write(b"b\n")
    assert stream.tried == 2
    assert capfd.readouterr().err == (
        "sirtakirun: cannot write stdout ([Errno 28] No space left on device); the job continues\n"
    )


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


# ── rank output ───────────────────────────────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize(
    ("encoding", "written"),
    [("ascii", b"gr\\xf6\\xdfe \\udcff\n"), ("utf-8", "größe \\udcff\n".encode()), ("utf-8:surrogateescape", b"")],
)
def test_characters_that_the_encoding_lacks_are_escaped(encoding: str, written: bytes) -> None:
    out, _ = output('print("gr\\u00f6\\u00dfe \\udcff")', PYTHONIOENCODING=encoding)
    assert out == (written or "größe ".encode() + b"\xff\n")


# ── rank channel ──────────────────────────────────────────────────────────────────────────────────────────────────────


def back(line: str) -> ChannelLine:
    matched = PATTERN.fullmatch(line.encode())
    assert matched is not None
    return ChannelLine.decode(matched)


@pytest.mark.parametrize(
    "reason", ["a  b\n\tc", "\x1e\x1f", "größe 100 % +&=", "\0", "%20", "\ud800x", "ValueError('“”')", " ", "…"]
)
def test_any_reason_is_restored_from_one_line(reason: str) -> None:
    line = ChannelLine(event=RankEvent.FAILED, rank=0, pid=1, host="h", reason=reason).encode()
    assert line.isascii()
    assert line.count("\n") == 1
    found = back(line).reason
    assert found == reason.encode(errors="replace").decode()


@pytest.mark.parametrize(
    "text",
    [b"sirtaki started 0 1 0 h \n", b"\x1esirtaki started 0 1 h \x1e\n", b"\x1esirtaki started a 1 0 h \x1e\n"],
)
def test_output_that_only_resembles_a_message_is_shown(text: bytes) -> None:
    assert PATTERN.search(text) is None


# ── mpiexec notices ───────────────────────────────────────────────────────────────────────────────────────────────────


RULE = "-" * 74


KILLED = "prterun noticed that process rank 1 with PID 16144 on node n0 exited on\nsignal 9 (Killed)."


EXITED = """\
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-7947@1,2]
   Exit code:    7"""


ABORTED = """\
MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD
  Proc: [[52025,1],3]
  Errorcode: 5

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes."""


AFTER = 'prterun has exited due to process rank 0 with PID 0 on node vm calling\n"abort".'


IMPROPER = "prterun has exited due to process rank 1 with PID 13536 on node vm exiting\nimproperly."


HYDRA = "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 12 RUNNING AT vm\n=   EXIT CODE: 9"


OTHER = "There are not enough slots available in the system to satisfy the 4\nslots that were requested."


def taken(text):
    endings, unreached = [], []
    notices = NoticeFilter(endings.append, unreached.append)
    shown = b"".join(notices.take(f"{line}\n".encode()) for line in text.splitlines())
    shown += notices.rest()
    return shown.decode(), [(end.rank, end.exit_code, end.reason) for end in endings], unreached


@pytest.mark.parametrize(
    ("box", "endings"),
    [
        (KILLED, [(1, 137, "killed by SIGKILL, as the system does if memory runs out")]),
        (KILLED.replace("9 (Killed)", "11 (Segmentation fault)"), [(1, 139, "killed by SIGSEGV")]),
        (EXITED, [(2, 7, "exit code 7")]),
        (EXITED.replace("prterun-vm-7947@1,2", "[26313,1],2"), [(2, 7, "exit code 7")]),
        (ABORTED, [(3, 5, "it called MPI_Abort with 5")]),
        (AFTER, [(0, 1, "it called MPI_Abort")]),
        (IMPROPER, [(1, 1, "it ended without MPI_Finalize")]),
        (HYDRA, [(None, 9, "exit code 9")]),
    ],
)
def test_mpiexecs_messages_about_ended_ranks_are_parsed_and_not_shown(box, endings, monkeypatch):
    monkeypatch.setattr(output_module, "memory_limits", lambda: "")
    assert taken(f"before\n{RULE}\n{box}\n{RULE}\nafter") == ("before\nafter\n", endings, [])


def test_a_rank_that_memory_may_have_ended_is_reported_with_the_limit_of_this_host(monkeypatch):
    monkeypatch.setattr(output_module, "memory_limits", lambda: "2 GiB of the container")
    memory = "killed by SIGKILL, as the system does if memory runs out"
    limited = f"{memory} (the limit is 2 GiB of the container)"
    assert output_module.killed(1, "localhost", signal.SIGKILL).reason == limited
    assert output_module.killed(1, "another", signal.SIGKILL).reason == memory
    assert output_module.killed(1, "localhost", signal.SIGSEGV).reason == "killed by SIGSEGV"


def test_a_host_that_has_fallen_silent_is_the_end_of_its_ranks():
    box = """PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-n0-987@0,0] on node n0
  Remote daemon: [prterun-n0-987@0,2] on node n2

This is usually due to either a failure of the TCP network"""
    assert taken(f"{RULE}\n{box}\n{RULE}") == ("", [(None, 1, "its host cannot be reached any more")], [])


def test_other_boxes_are_shown_whole_also_where_they_are_cut_off_or_no_box():
    for text in (f"{RULE}\n{OTHER}\n{RULE}\n", f"{RULE}\n{OTHER}\n", f"{RULE}\n" + "line\n" * 200):
        assert taken(text) == (text, [], [])
