"""Messages arrive whole and in order, whatever pieces they come in; what is no message ends the connection."""

import json
import socket
import struct
from collections.abc import Iterator

import pytest

from sirtaki.json_channel import LONGEST_BYTES, JsonChannel


@pytest.fixture
def ends() -> Iterator[tuple[JsonChannel, socket.socket]]:
    own, other = socket.socketpair()
    channel = JsonChannel(own)
    yield channel, other
    channel.close()
    other.close()


def framed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def test_messages_come_whole_whatever_the_pieces(ends: tuple[JsonChannel, socket.socket]) -> None:
    channel, other = ends
    sent = [{"number": number, "text": "ä" * number} for number in range(5)]
    data = b"".join(framed(json.dumps(message).encode()) for message in sent)
    found = []
    for start in range(0, len(data), 7):
        other.sendall(data[start : start + 7])
        found += channel.receive()
    assert found == sent
    assert channel.receive() == []


def test_what_came_before_the_end_is_heard(ends: tuple[JsonChannel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(framed(b'{"last": 1}'))
    other.close()
    assert channel.receive() == [{"last": 1}]
    with pytest.raises(ConnectionError):
        channel.receive()


@pytest.mark.parametrize(
    "data",
    [framed(b"no JSON"), framed(b"[1]"), framed(b'"text"'), struct.pack("<I", LONGEST_BYTES + 1), framed(b"\xff{}")],
)
def test_what_is_no_message_is_an_error(ends: tuple[JsonChannel, socket.socket], data: bytes) -> None:
    channel, other = ends
    other.sendall(data)
    with pytest.raises(ConnectionError):
        channel.receive()


def test_half_a_message_is_not_heard(ends: tuple[JsonChannel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(framed(b'{"a": 1}')[:-1])
    assert channel.receive() == []
    other.close()
    with pytest.raises(ConnectionError):
        channel.receive()


def test_who_does_not_read_holds_nobody_up(ends: tuple[JsonChannel, socket.socket]) -> None:
    channel, other = ends
    message = {"text": "x" * 1_000_000}
    channel.send(message)
    channel.send({"number": 2})
    assert channel.has_unsent
    reader, found = JsonChannel(other), []
    while len(found) < 2:
        channel.flush()
        found += reader.receive()
    assert found == [message, {"number": 2}]
    assert not channel.has_unsent


def test_what_is_sent_to_nobody_is_dropped(ends: tuple[JsonChannel, socket.socket]) -> None:
    channel, other = ends
    other.close()
    for _ in range(3):
        channel.send({"number": 1})
    assert not channel.has_unsent
