"""What a rank tells comes through any output whole, whatever stands beside it."""

import pytest

from sirtaki.run.rank_channel import PATTERN, Event, Message


def back(line: str) -> Message:
    matched = PATTERN.fullmatch(line.encode())
    assert matched is not None
    return Message.decode(matched)


@pytest.mark.parametrize("event", Event)
def test_every_event_comes_back(event: Event) -> None:
    told = Message(event=event, rank=3, pid=4711, host="node-1.example", exit_code=137, reason="in step 7")
    assert back(told.encode()) == told
    assert told.encode().endswith("\n")
    assert told.encode().count("\n") == 1


def test_what_is_not_said_is_empty() -> None:
    found = back(Message(event=Event.STARTED, rank=0, pid=1, host="h").encode())
    assert (found.exit_code, found.reason) == (0, "")


@pytest.mark.parametrize(
    "reason", ["a  b\n\tc", "\x1e\x1f", "größe 100 % +&=", "\0", "%20", "\ud800x", "ValueError('“”')", " ", "…"]
)
def test_any_reason_comes_back_in_one_line(reason: str) -> None:
    line = Message(event=Event.FAILED, rank=0, pid=1, host="h", reason=reason).encode()
    assert line.isascii()
    assert line.count("\n") == 1
    found = back(line).reason
    assert found == reason.encode(errors="replace").decode()


def test_a_long_reason_is_cut() -> None:
    assert back(Message(event=Event.FAILED, rank=0, pid=1, host="h", reason="ü" * 301).encode()).reason == "ü" * 300


def test_messages_are_found_between_a_programs_own_text_and_taken_out() -> None:
    one = Message(event=Event.STARTED, rank=0, pid=1, host="h")
    other = Message(event=Event.FAILED, rank=1, pid=2, host="h", exit_code=1, reason="a b")
    text = b"loss 3\n" + one.encode().encode() + b"half " + other.encode().encode() + b"a line\n"
    assert [Message.decode(found) for found in PATTERN.finditer(text)] == [one, other]
    assert PATTERN.sub(b"", text) == b"loss 3\nhalf a line\n"


@pytest.mark.parametrize(
    "text",
    [b"sirtaki started 0 1 0 h \n", b"\x1esirtaki started 0 1 h \x1e\n", b"\x1esirtaki started a 1 0 h \x1e\n"],
)
def test_what_only_looks_like_one_is_left_in_the_output(text: bytes) -> None:
    assert PATTERN.search(text) is None
