"""Ranks find each other, or are told why not, within a time limit."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from fakes.meshes import close

from sirtaki.comm.control import mesh_rendezvous
from sirtaki.comm.control.failure import poll_until
from sirtaki.comm.control.mesh import MeshCommunicator
from sirtaki.comm.control.mesh_rendezvous import Meeting, meet
from sirtaki.errors import CommError, ConfigError

names = (f"test {number}" for number in itertools.count())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def meetings(size: int, **changes: Any) -> list[Meeting]:
    port, name = free_port(), next(names)
    common = {"size": size, "host": "127.0.0.1", "port": port, "name": name} | changes
    return [Meeting(rank=rank, **common) for rank in range(size)]


def together(
    places: Sequence[Meeting], *, timeout_s: float = 20.0, secrets: Sequence[str | None] = ()
) -> list[MeshCommunicator | Exception]:
    """What each rank gets, in a thread each."""
    results: list[Any] = [None] * len(places)

    def join(number: int) -> None:
        try:
            results[number] = meet(
                places[number],
                interface=None,
                secret=secrets[number] if secrets else None,
                timeout_s=timeout_s,
                heartbeat_s=None,
            )
        except Exception as err:
            results[number] = err

    threads = [threading.Thread(target=join, args=[number]) for number in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def leave(comms: Sequence[Any]) -> None:
    close([comm._links for comm in comms if isinstance(comm, MeshCommunicator)])


@pytest.mark.parametrize("secret", [None, "ours"])
def test_ranks_meet_and_may_meet_again(secret: str | None) -> None:
    places = meetings(3)
    for _ in range(2):
        comms = together(places, secrets=[secret] * 3)
        assert [(comm.rank, comm.size) for comm in comms] == [(0, 3), (1, 3), (2, 3)], comms
        tests = [comm.barrier() for comm in comms]
        poll_until(lambda tests=tests: [test() for test in tests] == [True] * 3, failures=comms[0].failures)
        leave(comms)


def test_some_of_the_ranks_may_meet_without_the_others() -> None:
    places = meetings(4, members=(1, 3))
    comms = together([places[1], places[3]])
    assert [(comm.rank, comm.size) for comm in comms] == [(0, 2), (1, 2)], comms
    leave(comms)


def test_a_rank_alone_needs_nobody() -> None:
    assert meet(Meeting(rank=0, size=1), interface=None, secret=None, timeout_s=1.0, heartbeat_s=None).size == 1


def expect(results: Sequence[Any], kind: type[Exception], *words: str) -> None:
    """Every rank raises, and one of them says all of this."""
    assert all(isinstance(result, (ConfigError, CommError)) for result in results), results
    assert any(isinstance(result, kind) and all(word in str(result) for word in words) for result in results), results


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    begin_s = time.monotonic()
    expect(together(meetings(3)[:2], timeout_s=1.0), CommError, "rank 2 of 3 did not come", "START_TIMEOUT")
    assert time.monotonic() - begin_s < 5.0


def test_a_master_that_is_not_there_is_an_error_with_the_remedy() -> None:
    expect(together(meetings(2)[1:], timeout_s=0.5), CommError, "finds nobody at 127.0.0.1", "MASTER_ADDR")
    expect(together(meetings(2, host="no.such.host.invalid")[1:], timeout_s=0.5), ConfigError, "names no host")


def test_a_port_that_is_taken_is_an_error_with_the_remedy() -> None:
    with socket.create_server(("", 0)) as other:
        places = meetings(2, port=other.getsockname()[1])
        expect(together(places[:1], timeout_s=2.0), ConfigError, "MASTER_PORT", "a port of its own")


def test_two_processes_of_one_rank_are_told_so() -> None:
    places = meetings(2)

    class Uncounted(dict):  # both are this process here, which would count its meetings
        def __missing__(self, key: object) -> int:
            return 0

        def __setitem__(self, key: object, value: int) -> None:
            pass

    with mock.patch.object(mesh_rendezvous, "_met", Uncounted()):
        results = together([places[0], places[1], places[1]], timeout_s=5.0)
    errors = [result for result in results if isinstance(result, Exception)]
    assert any("two processes say that they are rank 1" in str(error) for error in errors), results
    leave(results)


def test_ranks_of_different_worlds_are_told_so() -> None:
    two = meetings(2)
    odd = Meeting(rank=1, size=3, host=two[0].host, port=two[0].port, name=two[0].name)
    expect(together([two[0], odd], timeout_s=10.0), ConfigError, "WORLD_SIZE is 2 on rank 0 and 3 on rank 1")


@pytest.mark.parametrize(
    ("secrets", "words"),
    [(["a", "b"], ["do not prove themselves", "SIRTAKI_SECRET"]), (["a", None], ["SIRTAKI_SECRET is set on one"])],
)
def test_ranks_with_different_secrets_are_told_so(
    monkeypatch: pytest.MonkeyPatch, secrets: list[str | None], words: list[str]
) -> None:
    monkeypatch.setattr(mesh_rendezvous, "WRONG_SECRET_S", 0.2)
    expect(together(meetings(2), secrets=secrets), ConfigError, *words)


def test_ranks_of_several_hosts_listen_at_the_chosen_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[str | None] = []

    def addresses(interface: str | None) -> list[str]:
        offered.append(interface)
        return ["127.0.0.3", "127.0.0.2"]

    monkeypatch.setattr(mesh_rendezvous, "host_identity", lambda: (str(threading.get_ident()),))
    monkeypatch.setattr(mesh_rendezvous, "own_addresses", addresses)
    comms = together(meetings(2))
    peer = next(iter(comms[1]._links._connections.values()))._socket.getpeername()[0]
    assert peer == "127.0.0.3"
    assert offered == [None, None]
    leave(comms)


@pytest.mark.slow
def test_nothing_stays_open_after_a_failure() -> None:
    together(meetings(2), timeout_s=5.0, secrets=["warm", "up"])
    before = len(os.listdir("/proc/self/fd"))
    expect(together(meetings(3)[1:], timeout_s=0.3), CommError, "finds nobody")
    assert len(os.listdir("/proc/self/fd")) <= before
