"""A driver hears those who have proved themselves, and threads that wake it, and nobody else."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from sirtaki.comm.control.mesh_rendezvous import listen
from sirtaki.json_channel import JsonChannel
from sirtaki.run.elastic.agent_crew import DriverEndpoint, Switchboard
from sirtaki.run.elastic.succession import agents_key, reach_driver

KEY = agents_key("secret", "job")
LATE_S = 5.0


@pytest.fixture
def board() -> Iterator[Switchboard[str]]:
    board = Switchboard[str](DriverEndpoint(name="job", secret="secret", listeners=tuple(listen(["127.0.0.1"]))))
    yield board
    board.close()


def joined(board: Switchboard[str], number: int) -> tuple[JsonChannel, JsonChannel]:
    """Both ends of the connection of a newcomer: the board's and its own."""
    found: list[tuple[int, JsonChannel]] = []
    own: list[JsonChannel] = []
    thread = threading.Thread(target=lambda: own.append(reach_driver(board.places, key=KEY, number=number)))
    thread.start()
    deadline_s = time.monotonic() + LATE_S
    while not found:
        assert time.monotonic() < deadline_s
        assert not list(board.look(0.01, lambda *newcomer: found.append(newcomer)))
    thread.join()
    ((seen, channel),) = found
    assert seen == number
    return channel, own[0]


def heard(board: Switchboard[str], timeout_s: float) -> list[str]:
    return list(board.look(timeout_s, lambda *_: pytest.fail("nobody has come")))


def test_a_newcomer_is_heard_once_it_is_connected_until_it_is_not(board: Switchboard[str]) -> None:
    channel, other = joined(board, 7)
    other.send({"is": "up"})
    assert heard(board, 0.05) == []  # not connected yet
    board.connect(channel, "seven")
    assert heard(board, LATE_S) == ["seven"]
    assert channel.receive() == [{"is": "up"}]
    assert heard(board, 0.0) == []
    board.disconnect(channel)
    board.disconnect(channel)
    other.send({"is": "still up"})
    assert heard(board, 0.05) == []
    channel.close()
    other.close()


def test_who_could_not_be_told_all_is_named_when_there_is_room(board: Switchboard[str]) -> None:
    channel, other = joined(board, 7)
    board.connect(channel, "seven")
    while not channel.has_unsent:
        channel.send({"long": "x" * 1_000_000})
    assert heard(board, 0.0) == []  # nobody reads, and it was not asked for
    board.watch(channel, "seven")
    assert heard(board, 0.05) == []
    deadline_s = time.monotonic() + LATE_S
    while channel.has_unsent:
        assert time.monotonic() < deadline_s
        other.receive()
        for _ in heard(board, 0.0):
            channel.flush()
    board.watch(channel, "seven")
    other.receive()
    assert heard(board, 0.0) == []  # there is room, but nothing to be sent
    channel.close()
    other.close()


def test_who_is_not_connected_is_not_watched(board: Switchboard[str]) -> None:
    ours, theirs = (JsonChannel(end) for end in socket.socketpair())
    theirs.send({"is": "up"})
    board.watch(ours, "nobody")
    assert heard(board, 0.05) == []
    ours.close()
    theirs.close()


def test_any_thread_wakes_it(board: Switchboard[str]) -> None:
    begun_s = time.monotonic()
    for _ in range(100_000):  # more than a socket has room for
        board.wake()
    assert heard(board, 60.0) == []
    threading.Timer(0.05, board.wake).start()
    while time.monotonic() < begun_s + 0.05:
        heard(board, 0.01)
    assert heard(board, 60.0) == []
    assert time.monotonic() < begun_s + 30.0
