"""Whoever does not know the secret gets nowhere, and holds nobody up."""

import contextlib
import pickle
import socket
import threading
from collections.abc import Iterator

import pytest
from fakes.meshes import until

from sirtaki.comm.control import mesh_rendezvous
from sirtaki.comm.control.mesh_rendezvous import Acceptor, NoProof, connect, job_key, listen

KEY = job_key("secret", "job")


@pytest.fixture
def acceptor() -> Iterator[Acceptor]:
    """Of rank 0, which waits for ranks 1 and 2."""
    acceptor = Acceptor(listen(["127.0.0.1"]), key=KEY, own=0, expected=[1, 2])
    yield acceptor
    for sock in acceptor.close().values():
        sock.close()


def hang_up(sock: socket.socket) -> bool:
    """Whether the other end closes the connection without a word."""
    sock.settimeout(5.0)
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1000) == b""
    return True


def test_ranks_that_know_the_secret_are_connected_each_once(acceptor: Acceptor) -> None:
    with connect(acceptor.door.places[0], key=KEY, own=2, other=0) as two:
        assert not acceptor.wait(0.01)
        with pytest.raises(OSError, match=r"closed|reset"):
            connect(acceptor.door.places[0], key=KEY, own=2, other=0)
        with connect(acceptor.door.places[0], key=KEY, own=1, other=0) as one:
            assert acceptor.wait(5.0)
            accepted = acceptor.close()
            for rank, sock in ((1, one), (2, two)):
                sock.sendall(b"frame")
                accepted[rank].settimeout(5.0)
                assert accepted[rank].recv(10) == b"frame"
    assert acceptor.door.refused == 1


@pytest.mark.parametrize("key", [job_key("wrong", "job"), job_key("secret", "another job")])
def test_a_wrong_secret_is_noticed_by_the_connector(acceptor: Acceptor, key: bytes) -> None:
    with pytest.raises(NoProof):
        connect(acceptor.door.places[0], key=key, own=1, other=0)
    assert acceptor.missing == [1, 2]


def test_who_cannot_answer_the_challenge_is_refused(acceptor: Acceptor) -> None:
    with socket.create_connection(acceptor.door.places[0]) as sock:
        sock.sendall(mesh_rendezvous._HELLO.pack(mesh_rendezvous.MAGIC, 1, 0, bytes(32)))
        assert len(sock.recv(64)) == 64
        sock.sendall(bytes(32))
        assert hang_up(sock)
    assert acceptor.missing == [1, 2]


def test_a_replay_proves_nothing(acceptor: Acceptor) -> None:
    """What one connection was proved with is sent again on another."""
    with socket.create_server(("127.0.0.1", 0)) as relay:
        seen: list[bytes] = []

        def forward() -> None:
            inner, _ = relay.accept()
            with inner, socket.create_connection(acceptor.door.places[0]) as outer:
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
        with socket.create_connection(acceptor.door.places[0]) as sock:
            sock.sendall(hello[:8] + as_rank.to_bytes(4, "little") + hello[12:])
            sock.recv(64)
            sock.sendall(proof)
            assert hang_up(sock)
    assert acceptor.missing == [2]


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: sirtaki\r\nConnection: keep-alive\r\n\r\n",
        pickle.dumps({"a": list(range(50))}),
        mesh_rendezvous._HELLO.pack(mesh_rendezvous.MAGIC, 1, 5, bytes(32)),  # to another rank
        b"\0" * 100_000,
    ],
)
def test_garbage_is_hung_up_on(acceptor: Acceptor, said: bytes) -> None:
    with socket.create_connection(acceptor.door.places[0]) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(said)
        assert hang_up(sock)
    connect(acceptor.door.places[0], key=KEY, own=1, other=0).close()


def test_the_slow_and_the_many_hold_nobody_up(acceptor: Acceptor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_rendezvous, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(mesh_rendezvous, "MAX_UNPROVED", 8)
    with contextlib.ExitStack() as strangers:
        crowd = [strangers.enter_context(socket.create_connection(acceptor.door.places[0])) for _ in range(30)]
        crowd[-1].sendall(mesh_rendezvous.MAGIC)
        connect(acceptor.door.places[0], key=KEY, own=1, other=0).close()
        until(lambda: acceptor.door.refused == 30)  # 22 for lack of room, the others when their time was up
        assert hang_up(crowd[-1])
    connect(acceptor.door.places[0], key=KEY, own=2, other=0).close()
    assert acceptor.wait(5.0)


def test_it_listens_where_it_is_told_only(acceptor: Acceptor) -> None:
    ((host, port),) = acceptor.door.places
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    acceptor.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))
