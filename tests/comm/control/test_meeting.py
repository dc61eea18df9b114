"""Ranks connect and authenticate each other, or get an error with the reason, within a time limit."""

import contextlib
import itertools
import os
import pickle
import random
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from fakes.meshes import at_once, close, until
from torch.distributed import HashStore

from sirtaki.comm.control import handshake, members
from sirtaki.comm.control.handshake import Acceptor, NoProof, connect, job_key, listen
from sirtaki.comm.control.members import (
    Listeners,
    Meeting,
    Member,
    Membership,
    StoreExchange,
    connect_members,
    listening,
    meet,
    open_listeners,
)
from sirtaki.comm.control.mesh import MeshCommunicator
from sirtaki.comm.control.waiting import Deadline, wait_for
from sirtaki.errors import CommError, ConfigError, PeerLostError
from sirtaki.machine import ReservedPorts

# ── rendezvous ────────────────────────────────────────────────────────────────────────────────────────────────────────


names = (f"test {number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def _ports() -> Iterator[None]:
    yield
    while reserved:
        reserved.pop().close()


reserved: list[ReservedPorts] = []
"""Ports of the running test."""


def meetings(size: int, **changes: Any) -> list[Meeting]:
    reserved.append(ReservedPorts())
    common = {"size": size, "host": "127.0.0.1", "port": reserved[-1].first, "name": next(names)} | changes
    return [Meeting(rank=rank, **common) for rank in range(size)]


def together(
    places: Sequence[Meeting], *, timeout_s: float = 20.0, secrets: Sequence[str | None] = ()
) -> list[MeshCommunicator | Exception]:
    """Connect ranks in one thread each. Return the results by rank."""

    def join(place: Meeting, secret: str | None) -> MeshCommunicator | Exception:
        try:
            return meet(place, interface=None, secret=secret, timeout_s=timeout_s, heartbeat_s=None)
        except Exception as err:
            return err

    return at_once(join, places, secrets or [None] * len(places))


def leave(comms: Sequence[Any]) -> None:
    close([comm._links for comm in comms if isinstance(comm, MeshCommunicator)])


@pytest.mark.parametrize("secret", [None, "ours"])
def test_ranks_meet_and_may_meet_again(secret: str | None) -> None:
    places = meetings(3)
    for _ in range(2):
        comms = together(places, secrets=[secret] * 3)
        assert [(comm.rank, comm.size) for comm in comms] == [(0, 3), (1, 3), (2, 3)], comms
        tests = [comm.barrier() for comm in comms]
        wait_for(lambda tests=tests: [test() for test in tests] == [True] * 3, failures=comms[0].failures)
        leave(comms)


def test_some_of_the_ranks_may_meet_without_the_others() -> None:
    places = meetings(4, members=(1, 3))
    comms = together([places[1], places[3]])
    assert [(comm.rank, comm.size) for comm in comms] == [(0, 2), (1, 2)], comms
    leave(comms)


def expect(results: Sequence[Any], kind: type[Exception], *words: str) -> None:
    """Check that every rank raises, and that one of the messages contains all words."""
    assert all(isinstance(result, (ConfigError, CommError)) for result in results), results
    assert any(isinstance(result, kind) and all(word in str(result) for word in words) for result in results), results


@pytest.mark.lengthy
def test_a_missing_rank_is_named_in_time() -> None:
    begin_s = time.monotonic()
    expect(
        together(meetings(3)[:2], timeout_s=1.0),
        CommError,
        "not all 3 ranks have registered",
        "missing: rank 2",
        "START_TIMEOUT",
    )
    assert time.monotonic() - begin_s < 5.0


@pytest.mark.lengthy
def test_a_missing_master_is_an_error_with_the_remedy() -> None:
    expect(together(meetings(2)[1:], timeout_s=0.5), CommError, "cannot connect to rank 0 at 127.0.0.1", "MASTER_ADDR")
    expect(
        together(meetings(2, host="no.such.host.invalid")[1:], timeout_s=0.5), ConfigError, "is not the name of a host"
    )


def test_a_port_in_use_is_an_error_with_the_remedy() -> None:
    with socket.create_server(("", 0)) as other:
        places = meetings(2, port=other.getsockname()[1])
        expect(together(places[:1], timeout_s=2.0), ConfigError, "MASTER_PORT", "another port")


def test_two_processes_of_one_rank_get_an_error() -> None:
    places = meetings(2)

    class Uncounted(dict):  # both are this process here, which would count its meetings
        def __missing__(self, key: object) -> int:
            return 0

        def __setitem__(self, key: object, value: int) -> None:
            pass

    with mock.patch.object(members, "_meeting_counts", Uncounted()):
        results = together([places[0], places[1], places[1]], timeout_s=5.0)
    errors = [result for result in results if isinstance(result, Exception)]
    assert any("two processes claim rank 1" in str(error) for error in errors), results
    leave(results)


def test_ranks_of_different_worlds_get_an_error() -> None:
    two = meetings(2)
    odd = Meeting(rank=1, size=3, host=two[0].host, port=two[0].port, name=two[0].name)
    expect(together([two[0], odd], timeout_s=10.0), ConfigError, "WORLD_SIZE is 2 on rank 0 and 3 on rank 1")


class CountingStore:
    """A store that records how many keys each request names."""

    def __init__(self) -> None:
        self._inner, self.requests = HashStore(), list[tuple[str, int]]()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.requests.append((method, len(arguments[0]) if isinstance(arguments[0], list) else 1))
            return getattr(self._inner, method)(*arguments)

        return call


def test_one_rank_reads_the_records_of_all_ranks_and_the_others_read_one_key() -> None:
    """Otherwise the requests to the store grow with the square of the number of ranks."""
    size, stores = 200, [CountingStore() for _ in range(2)]
    stores[1]._inner = stores[0]._inner

    def exchange(rank: int) -> list[Membership]:
        place = {"own": rank, "size": size, "place": "here", "deadline": Deadline.after(60.0)}
        own = Membership(members=(Member(number=rank),), name="", secret="")
        return StoreExchange(stores[min(rank, 1)], range(size), **place)(own)  # type: ignore[arg-type]

    tables = at_once(exchange, range(size))
    assert all([each.members[0].number for each in table] == list(range(size)) for table in tables)
    assert sum(count for method, count in stores[0].requests if method == "multi_get") == size
    assert max(count for _, count in stores[0].requests) <= 64
    assert {count for _, count in stores[1].requests} == {1}
    assert [method for method, _ in stores[1].requests].count("get") == size - 1


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("secrets", "words"),
    [
        (["a", "b"], ["authentication between ranks", "SIRTAKI_SECRET"]),
        (["a", None], ["SIRTAKI_SECRET is set on only one"]),
    ],
)
def test_ranks_with_different_secrets_get_an_error(
    monkeypatch: pytest.MonkeyPatch, secrets: list[str | None], words: list[str]
) -> None:
    monkeypatch.setattr(members, "WRONG_SECRET_S", 0.2)
    expect(together(meetings(2), secrets=secrets), ConfigError, *words)


def test_ranks_of_several_hosts_listen_at_the_chosen_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[str | None] = []

    def addresses(interface: str | None) -> list[str]:
        offered.append(interface)
        return ["127.0.0.3", "127.0.0.2"]

    monkeypatch.setattr(members, "host_identity", lambda: (str(threading.get_ident()),))
    monkeypatch.setattr(members, "own_addresses", addresses)
    comms = together(meetings(2))
    peer = next(iter(comms[1]._links._connections.values()))._socket.getpeername()[0]
    assert peer == "127.0.0.3"
    assert offered == [None, None]
    leave(comms)


def test_too_few_file_descriptors_or_threads_are_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_s = time.monotonic()
    used = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(members.resource, "getrlimit", lambda which: (used + 5, used + 5))
        expect(together(meetings(2)), ConfigError, "more file descriptors to connect 2 ranks", "ulimit -Hn")

    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "sirtaki-accept":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    expect(together(meetings(2)), CommError, "can't start new thread; the limit of threads", "start fewer ranks")
    assert time.monotonic() - begin_s < 20.0


@pytest.mark.slow
def test_nothing_stays_open_after_a_failure() -> None:
    together(meetings(2), timeout_s=5.0, secrets=["warm", "up"])
    before = len(os.listdir("/proc/self/fd"))
    expect(together(meetings(3)[1:], timeout_s=0.3), CommError, "cannot connect to rank 0")
    assert len(os.listdir("/proc/self/fd")) <= before


# ── ranks that are known ──────────────────────────────────────────────────────────────────────────────────────────────


def known(size: int) -> tuple[Membership, list[Listeners]]:
    """Return a membership of ranks that listen, and their listeners."""
    listeners = [open_listeners(None, loopback_only=True) for _ in range(size)]
    ranks = tuple(listening(Member(number=rank), own) for rank, own in enumerate(listeners))
    return Membership(generation=1, members=ranks, name="job", secret="secret"), listeners


def connect_one(membership: Membership, listeners: Listeners, rank: int, timeout_s: float = 20.0, **how: Any) -> Any:
    try:
        return connect_members(
            membership, listeners, rank=rank, deadline=Deadline.after(timeout_s), heartbeat_s=None, **how
        )
    except (CommError, ConfigError) as err:
        return err


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_meet_and_their_ports_are_closed(size: int) -> None:
    membership, listeners = known(size)
    ranks = at_once(lambda rank: connect_one(membership, listeners[rank], rank), range(size))
    assert [rank.size for rank in ranks] == [size] * size
    barriers = [rank.barrier() for rank in ranks]
    until(lambda: all([test() for test in barriers]))  # noqa: C419  # each moves on while it is tested
    assert all(listener.fileno() < 0 for own in listeners for listener in own)
    close([rank._links for rank in ranks])


def test_ranks_that_the_launcher_knows_to_have_exited_are_not_awaited() -> None:
    gone = threading.Event()
    membership, listeners = known(3)
    for listener in listeners[1]:
        listener.close()
    threading.Timer(0.2, gone.set).start()
    begin_s = time.monotonic()

    def why_in_vain() -> str:
        return "rank 1 was killed" if gone.is_set() else ""

    results = at_once(
        lambda rank: connect_one(membership, listeners[rank], rank, 60.0, why_in_vain=why_in_vain), [0, 2]
    )
    assert time.monotonic() - begin_s < handshake.HANDSHAKE_S + 5.0
    for result in results:
        assert isinstance(result, PeerLostError)
        assert "rank 1 was killed" in str(result)


@pytest.mark.lengthy
def test_a_rank_of_another_generation_is_rejected() -> None:
    membership, listeners = known(2)
    other = replace(membership, generation=2)
    first, second = at_once(
        lambda rank, told: connect_one(told, listeners[rank], rank, 1.0), [0, 1], [other, membership]
    )
    assert isinstance(first, CommError)
    assert "did not connect" in str(first)
    assert isinstance(second, (CommError, ConfigError))


def test_another_host_is_reached_at_other_addresses_than_loopback() -> None:
    """Its own loopback is not ours."""
    membership, (own, other) = known(2)
    elsewhere = Member(host=("elsewhere",), addresses=(("127.0.0.1", 1), ("127.0.0.2", 2)))
    told = replace(membership, members=(elsewhere, membership.members[1]))
    assert "rank 0 cannot be reached at 127.0.0.2:2 (" in str(connect_one(told, other, 1, 0.2))
    for listener in own:
        listener.close()


# ── handshake ─────────────────────────────────────────────────────────────────────────────────────────────────────────


KEY = job_key("secret", "job")


@pytest.fixture
def acceptor() -> Iterator[Acceptor]:
    """Yield rank 0's acceptor, which waits for ranks 1 and 2."""
    acceptor = Acceptor(listen(["127.0.0.1"]), key=KEY, own=0, expected=[1, 2])
    yield acceptor
    for sock in acceptor.close().values():
        sock.close()


def hang_up(sock: socket.socket) -> bool:
    """Return whether the peer closes the connection without an answer."""
    sock.settimeout(5.0)
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1000) == b""
    return True


def test_ranks_with_the_secret_are_connected_once_each(acceptor: Acceptor) -> None:
    with connect(acceptor.handshakes.addresses[0], key=KEY, own=2, other=0) as two:
        assert 1 in acceptor.missing
        with pytest.raises(OSError, match=r"closed the connection during the handshake|reset"):
            connect(acceptor.handshakes.addresses[0], key=KEY, own=2, other=0)
        with connect(acceptor.handshakes.addresses[0], key=KEY, own=1, other=0) as one:
            until(lambda: not acceptor.missing)
            accepted = acceptor.close()
            for rank, sock in ((1, one), (2, two)):
                sock.sendall(b"frame")
                accepted[rank].settimeout(5.0)
                assert accepted[rank].recv(10) == b"frame"
    assert acceptor.handshakes.refused == 1


@pytest.mark.parametrize("key", [job_key("wrong", "job"), job_key("secret", "another job")])
def test_a_wrong_secret_is_noticed_by_the_connector(acceptor: Acceptor, key: bytes) -> None:
    with pytest.raises(NoProof):
        connect(acceptor.handshakes.addresses[0], key=key, own=1, other=0)
    assert acceptor.missing == [1, 2]


def test_a_peer_that_cannot_answer_the_challenge_is_rejected(acceptor: Acceptor) -> None:
    with socket.create_connection(acceptor.handshakes.addresses[0]) as sock:
        sock.sendall(handshake._HELLO.pack(handshake.MAGIC, 1, 0, bytes(32)))
        assert len(sock.recv(64)) == 64
        sock.sendall(bytes(32))
        assert hang_up(sock)
    assert acceptor.missing == [1, 2]


def test_a_replay_proves_nothing(acceptor: Acceptor) -> None:
    """The proof of one connection is sent again on another one."""
    with socket.create_server(("127.0.0.1", 0)) as relay:
        seen: list[bytes] = []

        def forward() -> None:
            inner, _ = relay.accept()
            with inner, socket.create_connection(acceptor.handshakes.addresses[0]) as outer:
                for source, target, length in ((inner, outer, 48), (outer, inner, 64), (inner, outer, 32)):
                    data = source.recv(length)
                    seen.append(data)
                    target.sendall(data)
                inner.sendall(outer.recv(1))

        thread = threading.Thread(target=forward)
        thread.start()
        connect(relay.getsockname()[:2], key=KEY, own=1, other=0).close()
        thread.join()
    until(lambda: acceptor.missing == [2])
    hello, _, proof = seen
    for as_rank in (1, 2):
        with socket.create_connection(acceptor.handshakes.addresses[0]) as sock:
            sock.sendall(hello[:8] + as_rank.to_bytes(4, "little") + hello[12:])
            sock.recv(64)
            sock.sendall(proof)
            assert hang_up(sock)
    assert acceptor.missing == [2]
    elsewhere = Acceptor(listen(["127.0.0.1"]), key=KEY, own=0, expected=[1])
    with socket.create_connection(elsewhere.handshakes.addresses[0]) as sock:  # where rank 1 is waited for still
        sock.sendall(hello)
        sock.recv(64)
        sock.sendall(proof)
        assert hang_up(sock)
    assert elsewhere.close() == {}


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: sirtaki\r\nConnection: keep-alive\r\n\r\n",
        pickle.dumps({"a": list(range(50))}),
        handshake._HELLO.pack(handshake.MAGIC, 1, 5, bytes(32)),  # to another rank
        b"\0" * 100_000,
    ],
)
def test_garbage_is_hung_up_on(acceptor: Acceptor, said: bytes) -> None:
    with socket.create_connection(acceptor.handshakes.addresses[0]) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(said)
        assert hang_up(sock)
    connect(acceptor.handshakes.addresses[0], key=KEY, own=1, other=0).close()


def test_slow_and_numerous_strangers_delay_no_rank(acceptor: Acceptor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(handshake, "MAX_UNPROVED", 8)
    with contextlib.ExitStack() as strangers:
        crowd = [strangers.enter_context(socket.create_connection(acceptor.handshakes.addresses[0])) for _ in range(30)]
        crowd[-1].sendall(handshake.MAGIC)
        connect(acceptor.handshakes.addresses[0], key=KEY, own=1, other=0).close()
        until(lambda: acceptor.handshakes.refused == 30)  # 22 for lack of room, the others when their time was up
        assert hang_up(crowd[-1])
    connect(acceptor.handshakes.addresses[0], key=KEY, own=2, other=0).close()
    until(lambda: not acceptor.missing)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hostile_connections_leave_nothing_behind(acceptor: Acceptor, count: int) -> None:
    before, own_kb = len(os.listdir("/proc/self/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng = random.Random(count)
    said: list[Callable[[], bytes]] = [
        lambda: rng.randbytes(rng.randrange(1, 2000)),
        lambda: handshake.MAGIC + b"\xff" * rng.randrange(200),  # huge numbers where ranks are expected
        lambda: pickle.dumps({"run": [b"x" * 50] * 20}),
        lambda: handshake._HELLO.pack(handshake.MAGIC, 1, 0, rng.randbytes(32)) + rng.randbytes(32),
        lambda: b"",  # half-open
    ]
    open_ones: deque[socket.socket] = deque()
    for _ in range(count):
        sock = socket.create_connection(acceptor.handshakes.addresses[0], timeout=10.0)
        with contextlib.suppress(OSError):
            sock.sendall(rng.choice(said)())
        open_ones.append(sock)
        while len(open_ones) > 50:
            open_ones.popleft().close()
    connect(acceptor.handshakes.addresses[0], key=KEY, own=1, other=0).close()
    for sock in open_ones:
        sock.close()
    until(lambda: acceptor.handshakes.refused == count)
    assert acceptor.missing == [2]
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)  # that of rank 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own_kb < 20_000


def test_it_listens_only_at_the_given_address(acceptor: Acceptor) -> None:
    ((host, port),) = acceptor.handshakes.addresses
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    acceptor.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))
