import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.run.output import OutputOptions, RankOutput
from sirtaki.run.rank_channel import Event, Message

texts = st.lists(st.tuples(st.integers(0, 12), st.text("ab []0:<>@,\r", max_size=12)), max_size=12)


def shown(lines, **options):
    console, messages = io.StringIO(newline=""), []
    output = RankOutput(
        "stdout", console=console, on_message=messages.append, options=OutputOptions(**{"hydra": False, **options})
    )
    output.pump(io.BytesIO(lines))
    return console.getvalue(), messages


@given(texts)
def test_each_line_comes_out_behind_its_rank_under_both_families(lines):
    expected = "".join(f"[{rank}] {text}\n" for rank, text in lines)
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


def test_files_get_each_ranks_lines(tmp_path):
    shown(b"[1,0]<stdout>: a\n[1,1]<stdout>: b\n[1,0]<stdout>: c\nown\n", folder=tmp_path)
    assert (tmp_path / "rank.0" / "stdout").read_text() == "a\nc\n"
    assert (tmp_path / "rank.1" / "stdout").read_text() == "b\n"


def test_a_console_that_has_gone_does_not_end_the_job(tmp_path):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    output = RankOutput("stdout", console=Gone(), on_message=print, options=OutputOptions(hydra=False, folder=tmp_path))
    output.pump(io.BytesIO(b"[1,0]<stdout>: a\n[1,0]<stdout>: b\n"))
    assert (tmp_path / "rank.0" / "stdout").read_text() == "a\nb\n"
