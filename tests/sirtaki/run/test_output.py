import errno
import io
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.run.console import Console
from sirtaki.run.output import NoticeFilter, OutputOptions, RankOutput
from sirtaki.run.rank_channel import UNFINISHED, Event, Message

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


def shown(lines, **options):
    console, messages = io.StringIO(newline=""), []
    receive(console, lines, messages.append, **options)
    return console.getvalue(), messages


def overwriting(rank, text):
    """A carriage return within a line begins it anew."""
    inside, last = (text[:-1], "\r") if text.endswith("\r") else (text, "")
    body = inside.replace("\r", f"\r[{rank}] ")
    return (body if inside.startswith("\r") else f"[{rank}] {body}") + last


@given(texts)
def test_each_line_comes_out_behind_its_rank_under_both_families(lines):
    expected = "".join(f"{overwriting(rank, text)}\n" for rank, text in lines)
    for hydra, mark in ((False, "[1,{}]<stdout>: "), (False, "[prterun-n0-7@1,{}]<stdout>: "), (True, "[{}] ")):
        marked = "".join(f"{mark.format(rank)}{text}\n" for rank, text in lines)
        assert shown(marked.encode(), hydra=hydra) == (expected, [])


def test_ranks_that_end_without_an_end_of_line_are_still_told_apart():
    assert shown(b"[1,0]<stdout>: a[1,1]<stdout>: b")[0] == "[0] a\n[1] b\n"


def test_without_prefix_the_text_is_as_the_rank_wrote_it():
    assert shown(b"[1,3]<stderr>: text\n", prefix=False)[0] == "text\n"


def test_mpiexecs_own_lines_pass_through():
    assert shown(b"prterun noticed\n")[0] == "prterun noticed\n"


def test_bytes_that_are_no_text_do_not_stop_the_output():
    assert shown(b"[1,0]<stdout>: \xff\xfe\n[1,0]<stdout>: b\n")[0].endswith("[0] b\n")


@pytest.mark.parametrize("event", Event)
def test_messages_are_heard_and_not_shown(event):
    message = Message(event=event, rank=3, pid=77, host="node-1.x", exit_code=4)
    assert shown(b"[1,3]<stderr>: " + message.encode().encode()) == ("", [message])
    assert shown(b"[1,0]<stderr>: tail" + message.encode().encode()) == ("[0] tail\n", [message])


def raising(rank, event=Event.RAISES, reason=""):
    message = Message(event=event, rank=rank, pid=7, host="n", reason=reason)
    return b"[1,%d]<stderr>: " % rank + message.encode().encode()


def error_of(rank, *lines, end=Event.FAILED, reason=""):
    written = b"".join(b"[1,%d]<stderr>: %s\n" % (rank, line) for line in lines)
    return [raising(rank, reason=reason), *written.splitlines(keepends=True), *([raising(rank, end)] if end else [])]


def test_errors_of_several_ranks_are_shown_one_after_the_other():
    first, second = error_of(0, b"Traceback", b" a", b"E: x"), error_of(1, b"Traceback", b" b", b"E: y")
    mixed = b"".join(line for pair in zip(first, second, strict=True) for line in pair)
    assert shown(mixed)[0] == "[0] Traceback\n[0]  a\n[0] E: x\n[1] Traceback\n[1]  b\n[1] E: y\n"


def test_an_error_that_several_ranks_raise_is_shown_once():
    lines = [line for rank in (2, 0, 1) for line in error_of(rank, b"Traceback", b"E: x")]
    expected = "[2] Traceback\n[2] E: x\n[0] the same error as on rank 2\n[1] the same error as on rank 2\n"
    assert shown(b"".join(lines))[0] == expected


def test_where_the_cause_has_been_shown_its_victims_are_brief():
    victim = error_of(0, b"Traceback", b" a", b"PeerLostError: rank 1", reason="PeerLostError: rank 1")
    cause = error_of(1, b"Traceback", b"E: x")
    assert shown(b"".join([*cause, *victim]))[0].endswith("[1] E: x\n[0] PeerLostError: rank 1\n")
    assert shown(b"".join([*victim, *cause]))[0].startswith("[0] Traceback\n[0]  a\n")


@pytest.mark.parametrize("end", [None, Event.TERMINATED])
def test_an_error_is_shown_though_its_rank_is_ended_meanwhile(end):
    assert shown(b"".join(error_of(0, b"Traceback", b"E: x", end=end)))[0] == "[0] Traceback\n[0] E: x\n"


def test_what_a_rank_writes_after_its_error_is_shown_at_once():
    late = b"[1,0]<stderr>: late\n"
    assert shown(b"".join(error_of(0, b"E: x")) + late)[0] == "[0] E: x\n[0] late\n"


def test_files_get_each_ranks_lines(tmp_path):
    shown(b"[1,0]<stdout>: a\n[1,1]<stdout>: b\n[1,0]<stdout>: c\nown\n", folder=tmp_path)
    assert (tmp_path / "rank.0" / "stdout").read_text() == "a\nc\n"
    assert (tmp_path / "rank.1" / "stdout").read_text() == "b\n"


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.ENOSPC, "No space left"), ValueError("closed")])
def test_a_console_that_cannot_be_written_does_not_end_the_job(tmp_path, error, capfd):
    class Gone(io.StringIO):
        def write(self, text):
            raise error

    receive(Gone(), b"[1,0]<stdout>: a\n[1,0]<stdout>: b\n", folder=tmp_path)
    assert (tmp_path / "rank.0" / "stdout").read_text() == "a\nb\n"
    assert capfd.readouterr().err.count("cannot be written") == (not isinstance(error, BrokenPipeError))


def test_a_closed_standard_output_is_none_and_takes_nothing():
    receive(None, b"[1,0]<stdout>: a\n")


def test_a_full_disk_ends_the_ranks_files_and_not_the_job(tmp_path, capfd):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    assert shown(b"[1,0]<stdout>: a\n[1,0]<stdout>: b\n", folder=tmp_path)[0] == "[0] a\n[0] b\n"
    assert capfd.readouterr().err.count("rank 0 is kept no longer") == 1


def test_bytes_reach_a_terminal_of_any_encoding_as_the_rank_wrote_them(tmp_path):
    with open(tmp_path / "ascii", "w", encoding="ascii") as console:
        receive(console, "[1,0]<stdout>: größe\n".encode())
    assert (tmp_path / "ascii").read_text(encoding="utf-8") == "[0] größe\n"


def test_a_terminal_that_does_not_block_gets_everything():
    inbox, outbox = os.pipe()
    os.set_blocking(outbox, False)
    lines = b"[1,0]<stdout>: " + b"x" * 200_000 + b"\n"
    with open(inbox, "rb") as reader, open(outbox, "w") as console:
        writing = threading.Thread(target=receive, args=(console, lines))
        writing.start()
        got = reader.read(200_005)
        writing.join()
    assert got == b"[0] " + b"x" * 200_000 + b"\n"


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
def test_lines_that_are_not_finished_are_shown_and_go_on(parts, expected):
    assert shown(unfinished(*parts))[0] == expected


def test_a_ranks_file_holds_what_the_rank_wrote(tmp_path):
    shown(unfinished((0, b"\rstep 1"), (1, b"x"), (0, b"\rstep 2\n")), folder=tmp_path)
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"\rstep 1\rstep 2\n"


def test_the_launchers_own_line_does_not_go_on_in_a_ranks():
    stream = io.StringIO(newline="")
    console = Console(stream)
    console.write(b"\r[0] step 1")
    console.say("rank 1 failed")
    assert stream.getvalue() == "\r[0] step 1\nsirtakirun: rank 1 failed\n"
