"""What streams take of a process: counted before they are opened, held for a moment, given back."""

import errno
import os
import resource
import threading
from collections.abc import Iterator

import pytest

from sirtaki.comm.transports import contract
from sirtaki.comm.transports.contract import (
    UNLIMITED,
    StreamCost,
    descriptor_limit,
    descriptors_for_streams,
    held,
    raise_descriptor_limit,
    streams_within,
)


def in_use() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Those of descriptors, (soft, hard), which the test may change."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_costs_add_up_and_multiply() -> None:
    cost = StreamCost(descriptors=2, threads=1) * 3 + StreamCost(threads=4)
    assert cost == StreamCost(descriptors=6, threads=7)


def test_streams_fit_into_the_descriptors_and_one_is_always_tried() -> None:
    cost = StreamCost(descriptors=9, threads=2)
    assert [streams_within(free, cost, most=24) for free in (0, 8, 9, 26, 27, 1000)] == [1, 1, 1, 2, 3, 24]
    assert streams_within(0, StreamCost(threads=1), most=24) == 24


def test_what_is_held_is_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with held(StreamCost(descriptors=5, threads=3)) as problem:
        assert not problem
        assert len(os.listdir("/proc/self/fd")) == before + 5
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_held_is_given_back_after_an_error_too() -> None:
    def fail() -> None:
        with held(StreamCost(descriptors=5, threads=2)):
            assert [thread.name for thread in threading.enumerate()].count("sirtaki-held") == 2
            raise ValueError("between")

    before = in_use()
    with pytest.raises(ValueError, match="between"):
        fail()
    assert in_use() == before
    assert "sirtaki-held" not in [thread.name for thread in threading.enumerate()]


def test_descriptors_that_cannot_be_had_are_told_and_those_that_could_are_given_back(limits: tuple[int, int]) -> None:
    before = in_use()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 10, limits[1]))
    with held(StreamCost(descriptors=1000)) as problem:
        assert problem.startswith("1000 more descriptors cannot be had ([Errno 24]")
        assert problem.endswith(f"the limit is {before + 10})")
    assert in_use() == before


def test_threads_that_cannot_be_had_are_told_unless_descriptors_are_scarce_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []

    class Scarce(threading.Thread):
        def start(self) -> None:
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
            started.append(self)
            super().start()

    monkeypatch.setattr(contract.threading, "Thread", Scarce)
    with held(StreamCost(threads=3)) as problem:
        assert problem == "3 more threads cannot be started (can't start new thread)"
    assert not any(thread.is_alive() for thread in started)

    def none_left(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(contract.os, "open", none_left)
    with held(StreamCost(descriptors=1, threads=3)) as problem:
        assert "1 more descriptors" in problem


def test_the_limit_is_raised_as_far_as_it_may_be(limits: tuple[int, int]) -> None:
    hard = limits[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    assert descriptor_limit() == 200
    assert raise_descriptor_limit() == (UNLIMITED if hard == resource.RLIM_INFINITY else hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_a_limit_that_may_not_be_raised_stays(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise error("not permitted")

    monkeypatch.setattr(contract.resource, "getrlimit", lambda which: (200, 400))
    monkeypatch.setattr(contract.resource, "setrlimit", refuse)
    assert raise_descriptor_limit() == 200


def test_no_limit_is_a_large_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert descriptor_limit() == UNLIMITED


def test_streams_may_take_half_of_the_descriptors_that_are_free(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use() + 100, limits[1]))
    before = descriptors_for_streams()
    assert 45 <= before <= 55
    with held(StreamCost(descriptors=40)):
        assert descriptors_for_streams() == before - 20


def test_where_nobody_can_count_them_half_are_taken_to_be_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_proc(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(contract.os, "listdir", no_proc)
    monkeypatch.setattr(contract, "descriptor_limit", lambda: 1000)
    assert descriptors_for_streams() == 250


def test_a_process_above_its_limit_has_none_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "descriptor_limit", lambda: 2)
    assert descriptors_for_streams() == 0
