"""A store is reached, and one that ends meanwhile keeps nobody."""

import socket
import threading
import time

import pytest
import torch
from torch.torch_version import TorchVersion

from sirtaki.comm.control import addresses
from sirtaki.comm.control.addresses import Rendezvous, connect_to_store
from sirtaki.comm.control.failure import FailureBoard
from sirtaki.errors import ConfigError, PeerLostError, SirtakiError


def test_what_one_writes_the_other_reads() -> None:
    served, connected = Rendezvous(), Rendezvous()
    offer = served.serve(one_host=True, interface=None)
    assert not isinstance(offer, SirtakiError)
    assert connected.connect(offer, failures=FailureBoard()) == ""
    assert served.store is not None
    assert connected.store is not None
    connected.store.set("where", "here")
    assert served.store.get("where") == b"here"
    assert (served.own_address, connected.own_address) == ("127.0.0.1", "127.0.0.1")


def test_an_interface_that_is_not_there_is_what_the_others_hear_of() -> None:
    problem = Rendezvous().serve(one_host=False, interface="nowhere0")
    assert isinstance(problem, ConfigError)
    assert "nowhere0" in str(problem)


def test_a_host_that_does_not_answer_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    problem = Rendezvous().connect((["127.0.0.1"], port), failures=FailureBoard())
    assert f"127.0.0.1:{port}" in problem


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.6", reason="this PyTorch takes who is silent for a store")
def test_who_connects_to_a_rank_that_is_gone_hears_of_it() -> None:
    failures = FailureBoard()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as a process that is dying: it accepts, and never answers
        threading.Timer(0.1, failures.report, [PeerLostError("rank 0 has ended")]).start()
        begin_s = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 0 has ended"):
            connect_to_store("127.0.0.1", silent.getsockname()[1], failures=failures)
    assert time.monotonic() - begin_s < 5.0


def test_who_finds_nobody_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "LIMIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RuntimeError):
        connect_to_store("127.0.0.1", port, failures=FailureBoard())
