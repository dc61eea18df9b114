"""Frames of any length arrive whole and in order, however slowly the other end reads."""

import socket
from collections.abc import Iterator

import pytest

from sirtaki.comm.control.mesh_links import COPIED_BYTES, MAX_PAYLOAD_BYTES, Connection, Header, Kind, encode
from sirtaki.errors import CommError


class Collected:
    """A receiver that keeps everything."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []

    def place(self, source: int, header: Header) -> memoryview:
        return memoryview(bytearray(header.length))

    def take(self, source: int, header: Header, payload: memoryview) -> None:
        self.frames.append((header.sequence, bytes(payload)))


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    connections = Connection(one, 1, silence_s=5.0), Connection(other, 0)
    yield connections
    for connection in connections:
        connection.close()


def frame(sequence: int, payload: bytes) -> list[memoryview]:
    return [memoryview(encode(Kind.DATA, sequence=sequence, length=len(payload))), memoryview(payload)]


def test_frames_of_all_lengths_arrive_in_order(ends: tuple[Connection, Connection]) -> None:
    sender, reader = ends
    lengths = [0, 1, 40, 65_511, 65_512, 65_513, 200_000, 0, MAX_PAYLOAD_BYTES, 3] * 3
    sent = [(number, bytes([number]) * length) for number, length in enumerate(lengths)]
    sendings = [sender.send(frame(number, payload)) for number, payload in sent]
    assert sender.backlogged
    assert not sendings[-2].done  # long, and nobody reads
    received = Collected()
    while len(received.frames) < len(sent):
        reader.read(received)
        sender.flush()
    assert received.frames == sent
    assert all(sending.done for sending in sendings)
    assert not sender.backlogged


def test_what_is_short_needs_its_memory_no_more(ends: tuple[Connection, Connection]) -> None:
    sender, reader = ends
    while not sender.backlogged:
        sender.send(frame(0, bytes(MAX_PAYLOAD_BYTES)))
    mine = bytearray(b"x" * 100)
    header = memoryview(encode(Kind.DATA, sequence=1, length=len(mine)))
    assert len(mine) < COPIED_BYTES
    assert sender.send([header, memoryview(mine)]).done
    mine[:] = b"y" * 100
    received = Collected()
    while not received.frames or received.frames[-1][0] != 1:
        reader.read(received)
        sender.flush()
    assert received.frames[-1] == (1, b"x" * 100)


def test_the_end_comes_after_what_was_sent(ends: tuple[Connection, Connection]) -> None:
    sender, reader = ends
    sender.send(frame(7, b"last"))
    sender.stop_sending()
    received = Collected()
    while not reader.ended:
        reader.read(received)
    assert received.frames == [(7, b"last")]


def test_what_is_no_frame_is_an_error(ends: tuple[Connection, Connection]) -> None:
    sender, reader = ends
    sender.send([memoryview(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n")])
    with pytest.raises(CommError, match="no frame"):
        for _ in iter(lambda: reader.read(Collected()), "until it raises"):
            pass


def test_to_an_end_that_is_gone_everything_can_be_sent(ends: tuple[Connection, Connection]) -> None:
    sender, reader = ends
    reader.close()
    sendings = [sender.send(frame(0, bytes(MAX_PAYLOAD_BYTES))) for _ in range(5)]
    sender.flush()
    assert all(sending.done for sending in sendings)
