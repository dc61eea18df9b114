"""Messages arrive complete and in order, in any pieces. Invalid data ends the connection."""

import secrets
import selectors
import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest

from sirtaki.engine.json_channel import LONGEST_BYTES, JsonChannel, encoded


class Count(msgspec.Struct, tag=True):
    number: int
    text: str = ""


class Other(msgspec.Struct, tag=True):
    """A message type that the receiver does not expect."""


@pytest.fixture
def ends() -> Iterator[tuple[JsonChannel[Count], socket.socket]]:
    own, other = socket.socketpair()
    channel: JsonChannel[Count] = JsonChannel(own, Count)
    yield channel, other
    channel.close()
    other.close()


def framed(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def test_messages_arrive_complete_in_any_pieces(ends: tuple[JsonChannel[Count], socket.socket]) -> None:
    channel, other = ends
    sent = [Count(number, "ä" * number) for number in range(5)]
    data = b"".join(map(encoded, sent))
    found = []
    for start in range(0, len(data), 7):
        other.sendall(data[start : start + 7])
        found += channel.receive()
    assert found == sent
    assert channel.receive() == []
    other.sendall(encoded(Count(1)) + encoded(Count(2))[:-1])
    other.close()
    assert channel.receive() == [Count(1)]  # what came before the end is heard, but not half a message
    with pytest.raises(ConnectionError):
        channel.receive()


def test_a_long_list_is_sent_compressed(ends: tuple[JsonChannel[Count], socket.socket]) -> None:
    channel, other = ends
    sent = Count(1, "rank " * 100_000)
    data = encoded(sent)
    assert len(data) < 10_000
    other.sendall(data + encoded(Count(2)))
    assert channel.receive() == [sent, Count(2)]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (framed(b"no JSON"), "malformed"),
        (framed(b"[1]"), "array"),
        (framed(b"x is not compressed"), "while decompressing"),
        (framed(b"\xff{}"), "malformed"),
        (struct.pack("<I", LONGEST_BYTES + 1), f"{LONGEST_BYTES + 1} bytes"),
        (encoded(Other()), "Other"),
        (framed(b'{"type":"Count","number":"one"}'), r"\$\.number"),
        (framed(b'{"type":"Count"}'), "number"),
    ],
)
def test_an_unknown_or_damaged_message_ends_the_connection_with_its_name(
    ends: tuple[JsonChannel[Count], socket.socket], data: bytes, named: str
) -> None:
    channel, other = ends
    other.sendall(data)
    with pytest.raises(ConnectionError, match=named):
        channel.receive()


def test_a_peer_that_does_not_read_does_not_block_the_sender(ends: tuple[JsonChannel[Count], socket.socket]) -> None:
    channel, other = ends
    message = Count(1, secrets.token_hex(500_000))
    channel.send(message)
    reader, found = JsonChannel(other, Count), list[Count]()
    with selectors.DefaultSelector() as events:
        channel.watch(events, "sender")
        reader.watch(events, "reader")
        channel.send(encoded(Count(2)))
        while len(found) < 2:
            for chosen, _ in events.select(5.0):
                assert chosen.data in ("sender", "reader")
                found += reader.receive() if chosen.data == "reader" else channel.receive()
        assert found == [message, Count(2)]
        assert not events.select(0.0)  # nothing is left to send
        channel.close()
        assert channel.receive() == []
        assert [chosen.data for chosen, _ in events.select(5.0)] == ["reader"]  # which finds the end


def test_a_message_without_a_receiver_is_dropped(ends: tuple[JsonChannel[Count], socket.socket]) -> None:
    channel, other = ends
    other.close()
    for _ in range(3):
        channel.send(Count(1))
    with selectors.DefaultSelector() as events:
        channel.watch(events, None)
        assert [mask for _, mask in events.select(5.0)] == [selectors.EVENT_READ]  # the end, and no room for a rest
