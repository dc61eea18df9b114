"""Where the driver is lost, agents agree on the next one without asking each other."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from sirtaki.comm.control.mesh_rendezvous import Acceptor, listen
from sirtaki.errors import CommError
from sirtaki.json_channel import JsonChannel
from sirtaki.run.elastic import succession as successors
from sirtaki.run.elastic.succession import DRIVER, AgentConfig, Succession, agents_key, reach_driver

KEY = agents_key("secret", "job")


def config(number: int) -> AgentConfig:
    return AgentConfig(
        host=f"h{number}", number=number, places=(), secret="secret", job="job", command=(), environ={}, folder="/",
        hosts="one", interface=None, successor_config={},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here, with its output."""
    monkeypatch.setattr(Succession, "_write_to_file", lambda self: None)
    monkeypatch.setattr(successors, "CANDIDATE_S", 0.3)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def agents() -> Iterator[list[Succession]]:
    found = [Succession(config(number)) for number in (1, 2, 3)]
    yield found
    for own in found:
        own.close()


def told(agents: list[Succession]) -> list[tuple[int, list[tuple[str, int]]]]:
    return [(number, own.places) for number, own in enumerate(agents, start=1)]


def serve(agent: Succession, started: list[Succession]) -> None:
    """In the place of a process that would listen at the agent's port."""
    started.append(agent)
    duplicates = [socket.fromfd(each.fileno(), each.family, each.type) for each in agent._listeners]
    acceptor = Acceptor(duplicates, key=KEY, own=DRIVER, expected=[1, 2, 3])
    threading.Timer(3.0, lambda: [sock.close() for sock in acceptor.close().values()]).start()


def test_the_lowest_number_starts_it_and_the_others_find_it(agents: list[Succession]) -> None:
    started: list[Succession] = []
    found: list[JsonChannel | None] = [None] * 3
    places = told(agents)

    def look(index: int) -> None:
        found[index] = agents[index].find_driver(places)

    with mock.patch.object(Succession, "_start_driver", lambda self, agents: serve(self, started)):
        threads = [threading.Thread(target=look, args=[index]) for index in (2, 1, 0)]
        with mock.patch.object(successors, "CANDIDATE_S", 3.0):
            for thread in threads:
                thread.start()
                time.sleep(0.05)
            for thread in threads:
                thread.join()
    assert started == [agents[0]]
    assert all(channel is not None for channel in found)
    for channel in found:
        channel.close()


def test_an_agent_that_is_gone_is_passed_over(agents: list[Succession]) -> None:
    started: list[Succession] = []
    places = told(agents)
    agents[0].close()
    with mock.patch.object(Succession, "_start_driver", lambda self, agents: serve(self, started)):
        channel = agents[1].find_driver(places)
    assert started == [agents[1]]
    assert channel is not None
    channel.close()


@pytest.mark.slow
def test_an_agent_whose_driver_goes_on_without_it_starts_no_other_one(agents: list[Succession]) -> None:
    with mock.patch.object(successors, "CONNECT_S", 0.3), mock.patch("subprocess.Popen") as start:
        start.return_value.poll.return_value = None
        for _ in range(2):
            assert agents[0].find_driver(told(agents)[:1]) is None
        start.assert_called_once()


def test_an_agent_that_was_told_of_nobody_finds_nobody() -> None:
    alone = Succession(config(1))
    assert alone.find_driver([]) is None
    alone.close()


def test_a_driver_that_is_not_there_is_looked_for_for_so_long_only() -> None:
    (listener,) = listen(["127.0.0.1"])
    place = listener.getsockname()[:2]
    listener.close()
    begin_s = time.monotonic()
    with pytest.raises(CommError, match="cannot be reached at 127"):
        reach_driver([place], key=KEY, number=1, timeout_s=0.3)
    assert time.monotonic() - begin_s < 5.0
    with suppress(OSError):
        listener.close()
