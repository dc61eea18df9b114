"""A store is reached, and one that ends meanwhile keeps nobody."""

import socket
import threading
import time

import pytest

from sirtaki.comm.control import rendezvous_store
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.control.rendezvous_store import connect_to_store, serve_store
from sirtaki.errors import PeerLostError


def test_what_one_writes_the_other_reads() -> None:
    served = serve_store()
    store = connect_to_store("127.0.0.1", served.port, failures=FailureBoard())
    store.set("where", "here")
    assert served.get("where") == b"here"


def test_who_connects_to_a_rank_that_is_gone_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_store, "ATTEMPT_S", 0.2)
    failures = FailureBoard()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as a process that is dying: it accepts, and never answers
        threading.Timer(0.1, failures.report, [PeerLostError("rank 0 has ended")]).start()
        begin_s = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 0 has ended"):
            connect_to_store("127.0.0.1", silent.getsockname()[1], failures=failures)
    assert time.monotonic() - begin_s < 5.0


def test_who_finds_nobody_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_store, "ATTEMPT_S", 0.05)
    monkeypatch.setattr(rendezvous_store, "LIMIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RuntimeError):
        connect_to_store("127.0.0.1", port, failures=FailureBoard())
