"""Agents get in; strangers cost a time limit and no more."""

import selectors
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from sirtaki.comm.control import mesh_rendezvous
from sirtaki.comm.control.mesh_rendezvous import NoProof, connect, listen
from sirtaki.json_channel import JsonChannel
from sirtaki.run.elastic.agent_crew import AgentServer
from sirtaki.run.elastic.succession import DRIVER, agents_key, reach_driver

KEY = agents_key("secret", "job")


class Serving:
    """A server that is asked in a thread."""

    def __init__(self) -> None:
        self.events = selectors.DefaultSelector()
        self.server = AgentServer(listen(["127.0.0.1"]), key=KEY, events=self.events)
        self.found: list[tuple[int, JsonChannel]] = []
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.closing.is_set():
            for chosen, _ in self.events.select(0.01):
                if (found := self.server.advance(chosen.fd)) is not None:
                    self.found.append(found)
            self.server.drop_late()

    def close(self) -> None:
        self.closing.set()
        self.thread.join()
        self.server.close()
        self.events.close()
        for _, channel in self.found:
            channel.close()


@pytest.fixture
def serving() -> Iterator[Serving]:
    serving = Serving()
    yield serving
    serving.close()


def test_an_agent_gets_in_while_strangers_stand_at_the_door(serving: Serving) -> None:
    (place,) = serving.server.places
    silent = [socket.create_connection(place) for _ in range(mesh_rendezvous.MAX_UNPROVED + 5)]
    with socket.create_connection(place) as loud:
        loud.sendall(b"GET / HTTP/1.1\r\n" * 100)
        driver = reach_driver([place], key=KEY, number=7)
    driver.send({"is": "up"})
    deadline_s = time.monotonic() + 5.0
    while not serving.found:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    ((number, channel),) = serving.found
    assert number == 7
    while not (messages := channel.receive()):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert messages == [{"is": "up"}]
    driver.close()
    for sock in silent:
        sock.close()


def test_who_has_another_secret_is_refused_and_finds_out(serving: Serving) -> None:
    with pytest.raises(NoProof):
        connect(serving.server.places[0], key=agents_key("guess", "job"), own=1, other=DRIVER)
    assert serving.found == []


def test_a_stranger_who_says_nothing_is_dropped_in_time(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_rendezvous, "HANDSHAKE_S", 0.2)
    with socket.create_connection(serving.server.places[0], timeout=5.0) as stranger:
        assert stranger.recv(1) == b""
