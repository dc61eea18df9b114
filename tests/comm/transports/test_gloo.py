"""Waits for Gloo: time-outs and failures, also while ranks connect, and the end of streams."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from fakes.meshes import on_planes, until
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.waiting import wait_for
from sirtaki.comm.transports import gloo
from sirtaki.comm.transports.gloo import GlooTransport, GroupOpening, _GlooUnitWork
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
        gather=lambda value: [value],
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


def creator(rank: int, size: int) -> Callable[[Store], ProcessGroupGloo]:
    def create(store: Store) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._threads = timedelta(seconds=60), 1
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return ProcessGroupGloo(store, rank, size, options)

    return create


def test_opening_many_groups_takes_as_many_rounds_as_opening_one() -> None:
    rounds: list[int] = []

    def act(control: ControlPlane) -> None:
        for count in (1, 5):
            gathered = 0

            def gather(value: Any) -> list[Any]:
                nonlocal gathered
                gathered += 1
                return control.all_gather(value)

            groups = GroupOpening(gather, control.failures).open([creator(control.rank, control.size)] * count)
            for number, group in enumerate(groups):
                tensor = torch.full((3,), float(number + control.rank))
                group.allreduce([tensor]).wait()  # type: ignore[attr-defined]
                assert tensor.tolist() == [3.0 * number + 3.0] * 3
            rounds.append(gathered)

    on_planes(3, act)
    assert rounds == [2] * 6


def test_a_rank_that_cannot_open_a_group_is_named_at_once_on_all_ranks() -> None:
    def act(control: ControlPlane) -> None:
        def fail(store: Store) -> ProcessGroupGloo:
            raise RuntimeError("no socket")

        creators = [creator(control.rank, 3)] * 3
        if control.rank == 1:
            creators[1] = fail
        begin_s = time.monotonic()
        with pytest.raises(RuntimeError, match="no socket"):
            GroupOpening(control.all_gather, control.failures).open(creators)
        assert time.monotonic() - begin_s < 20.0
        control.barrier()

    on_planes(3, act)


def test_gloo_does_not_wait_for_a_rank_that_has_exited() -> None:
    failures, others = FailureBoard(), set(threading.enumerate())

    def gather(value: Any) -> list[Any]:
        wait_for(lambda: False, failures=failures)
        raise AssertionError

    threading.Timer(0.1, lambda: failures.report(PeerLostError("rank 1 is gone"))).start()
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        GroupOpening(gather, failures).open([creator(0, 2)] * 2)
    until(lambda: not any(thread.name == "sirtaki-opening" for thread in set(threading.enumerate()) - others))
