"""Waits for Gloo: time-outs and failures, also while ranks connect, and the end of streams."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo

from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.transports import gloo
from sirtaki.comm.transports.gloo import GlooTransport, WatchfulStore, _GlooUnitWork
from sirtaki.errors import CommError, PeerLostError


class Late:
    """A reduction whose timed wait gives up, and which is done at the `done_at`-th question."""

    def __init__(self, done_at: int, *, fails: bool = False) -> None:
        self._done_at, self._fails, self._asked = done_at, fails, 0

    def is_completed(self) -> bool:
        self._asked += 1
        return self._asked >= self._done_at

    def wait(self, timeout: object = None) -> None:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self._fails:
            raise RuntimeError("Connection closed by peer")


def work(late: Late) -> _GlooUnitWork:
    return _GlooUnitWork(late, torch.ones(2), 0.5, "elements [0, 2) on stream 0")  # type: ignore[arg-type]


def test_a_reduction_that_ends_just_when_the_time_is_up_has_not_failed() -> None:
    late = work(Late(2))
    assert late.wait(0.1)
    assert late._result.tolist() == [0.5, 0.5]
    assert late.wait(0.1)  # and is scaled once
    assert late._result.tolist() == [0.5, 0.5]


def test_a_reduction_that_continues_is_awaited_again() -> None:
    late = work(Late(4))
    assert not late.wait(0.1)
    assert late.wait(0.1)


def test_a_failed_reduction_names_the_reduced_range() -> None:
    with pytest.raises(CommError, match=r"elements \[0, 2\) on stream 0.*Connection closed"):
        work(Late(2, fails=True)).wait(0.1)


class Group:
    """A process group whose end waits for a thread of its own."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended

    def abort(self) -> None:
        pass

    def __del__(self) -> None:
        self._ended.wait(30.0)


def test_a_stream_whose_thread_does_not_end_delays_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "END_S", 0.05)
    ended = threading.Event()
    transport = GlooTransport(
        store=None,  # type: ignore[arg-type]  # nothing is opened
        prefix=str,
        address="",
        rank=0,
        size=2,
        timeout_s=1.0,
        agree=lambda _: None,
        failures=FailureBoard(),
    )
    groups: list[Any] = transport.streams
    groups += [Group(ended), Group(ended)]
    closer = threading.Thread(target=transport.close)
    closer.start()
    closer.join(10.0)
    held_up = closer.is_alive()
    ended.set()
    closer.join(10.0)
    assert not held_up


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


def test_gloo_does_not_wait_for_a_rank_that_has_exited() -> None:
    failures = FailureBoard()
    store = WatchfulStore(HashStore(), failures)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=60)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    threading.Timer(0.1, lambda: failures.report(PeerLostError("rank 1 is gone"))).start()
    with pytest.raises(Exception, match="rank 1 is gone"):
        ProcessGroupGloo(PrefixStore("x", store), 0, 2, options)
