"""Who waits for a key hears of a failure of the job, also from within PyTorch."""

import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo

from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.transports.gloo import WatchfulStore
from sirtaki.errors import PeerLostError


def test_keys_are_those_of_the_other_store() -> None:
    inner, store = HashStore(), WatchfulStore(HashStore(), FailureBoard())
    store = WatchfulStore(inner, FailureBoard())
    store.set("a", "1")
    assert inner.get("a") == store.get("a") == b"1"
    assert store.add("n", 3) == inner.add("n", 0) == 3
    assert store.check(["a"])
    assert not store.check(["b"])
    threading.Timer(0.05, lambda: inner.set("b", "2")).start()
    assert store.get("b") == b"2"


def test_gloo_does_not_wait_for_a_rank_that_is_gone() -> None:
    failures = FailureBoard()
    store = WatchfulStore(HashStore(), failures)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=60)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    threading.Timer(0.1, lambda: failures.report(PeerLostError("rank 1 is gone"))).start()
    with pytest.raises(Exception, match="rank 1 is gone"):
        ProcessGroupGloo(PrefixStore("x", store), 0, 2, options)


def test_gloos_own_time_limit_holds() -> None:
    store, options = WatchfulStore(HashStore(), FailureBoard()), ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=0.2)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    with pytest.raises(Exception, match="no rank has told"):
        ProcessGroupGloo(PrefixStore("x", store), 0, 2, options)
