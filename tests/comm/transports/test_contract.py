"""The contract between transports and their users, and the resources that streams need."""

import errno
import os
import resource
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from rank_jobs import ONLY_OVER_MPI, Job, played_on_ranks, slow

from sirtaki.comm.transports import contract
from sirtaki.comm.transports.contract import (
    UNLIMITED,
    Parcels,
    StreamCost,
    descriptor_limit,
    descriptors_for_streams,
    raise_descriptor_limit,
    reserved,
    scale_,
    streams_within,
)
from sirtaki.machine import thread_limits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_tensors_are_multiplied_and_rounded_once(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, 3.0, 1000.0], dtype=dtype)
    scale_(tensor, 1 / 3)
    wanted = (torch.tensor([1.0, 3.0, 1000.0], dtype=torch.float64) / 3).to(dtype)
    torch.testing.assert_close(tensor, wanted)


def test_integers_are_truncated_towards_zero() -> None:
    tensor = torch.tensor([3, -3, 7], dtype=torch.int32)
    scale_(tensor, 0.5)
    assert tensor.tolist() == [1, -1, 3]
    large = torch.tensor([2**52 + 2], dtype=torch.int64)  # which a float64 holds
    scale_(large, 0.5)
    assert large.tolist() == [2**51 + 1]


def test_non_contiguous_and_empty_tensors_are_scaled_too() -> None:
    base = torch.ones(4, 4)
    scale_(base[:, 1], 2.0)
    assert base.sum() == 20
    scale_(torch.empty(0, dtype=torch.int64), 0.5)


LENGTHS = np.array([[1, 2, 3], [0, 16, 5], [7, 0, 0]])


def test_parcels_are_ordered_by_receiver_and_arrive_by_sender() -> None:
    parcels = Parcels(LENGTHS)
    assert parcels.sent_by(0) == [(0, 1), (1, 3), (3, 6)]
    assert parcels.sent_by(2) == [(0, 7), (7, 7), (7, 7)]
    assert parcels.received_by(1) == [2, 16, 0]
    assert parcels.largest_outgoing_bytes == 21
    assert not parcels.empty


def test_a_parcel_for_all_is_there_once() -> None:
    parcels = Parcels.to_all([4, 0, 9])
    assert parcels.sent_by(2) == [(0, 9)] * 3
    assert parcels.received_by(1) == [4, 0, 9]
    assert parcels.largest_outgoing_bytes == 9


def test_parcels_are_empty_if_no_rank_sends() -> None:
    assert Parcels.to_all([0, 0]).empty


@pytest.mark.parametrize("of", [1, 2, 5, 30])
def test_pieces_make_up_the_whole(of: int) -> None:
    for parcels in (Parcels(LENGTHS), Parcels.to_all([4, 0, 9])):
        pieces = [parcels.piece(number, of) for number in range(of)]
        assert np.array_equal(sum(piece.lengths for piece in pieces), parcels.lengths)
        assert all(piece.shared == parcels.shared for piece in pieces)
        whole = -(-parcels.lengths // of)
        assert all((piece.lengths <= whole).all() for piece in pieces)


def in_use() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Yield the limits of descriptors (soft, hard). The test may change them."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_streams_fit_into_the_descriptors_and_one_is_always_tried() -> None:
    cost = StreamCost(descriptors=9, threads=2)
    assert [streams_within(free, cost, most=24) for free in (0, 8, 9, 26, 27, 1000)] == [1, 1, 1, 2, 3, 24]
    assert streams_within(0, StreamCost(threads=1), most=24) == 24


def test_held_descriptors_are_released() -> None:
    before = in_use()
    with reserved(StreamCost(descriptors=5, threads=3)) as problem:
        assert not problem
        assert in_use() == before + 5
    assert in_use() == before
    with pytest.raises(ValueError, match="between"), reserved(StreamCost(descriptors=5, threads=2)):
        raise ValueError("between")
    assert in_use() == before
    assert "sirtaki-reserved" not in [thread.name for thread in threading.enumerate()]


def test_unavailable_descriptors_are_reported_and_available_ones_released(limits: tuple[int, int]) -> None:
    before = in_use()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 10, limits[1]))
    with reserved(StreamCost(descriptors=1000)) as problem:
        assert problem.startswith("1000 more descriptors cannot be opened ([Errno 24]")
        assert problem.endswith(f"the limit is {before + 10}, see ulimit -Hn)")
    assert in_use() == before


def test_unavailable_threads_are_reported_unless_descriptors_are_scarce_already(
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
    with reserved(StreamCost(threads=3)) as problem:
        assert problem.startswith("3 more threads cannot be started: can't start new thread; the limit of threads is ")
        assert thread_limits() in problem
    assert not any(thread.is_alive() for thread in started)

    def none_left(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(contract.os, "open", none_left)
    with reserved(StreamCost(descriptors=1, threads=3)) as problem:
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


def test_streams_may_take_half_of_the_descriptors_that_are_free(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use() + 100, limits[1]))
    before = descriptors_for_streams()
    assert 45 <= before <= 55
    with reserved(StreamCost(descriptors=40)):
        assert descriptors_for_streams() == before - 20


def test_where_descriptors_cannot_be_counted_half_count_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_proc(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(contract.os, "listdir", no_proc)
    monkeypatch.setattr(contract, "descriptor_limit", lambda: 1000)
    assert descriptors_for_streams() == 250
    monkeypatch.setattr(contract, "descriptor_limit", lambda: 2)
    assert descriptors_for_streams() >= 0
    monkeypatch.undo()
    monkeypatch.setattr(contract.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert descriptor_limit() == UNLIMITED


test_all_ranks_agree_on_what_could_not_be_opened_and_go_on = ONLY_OVER_MPI(
    played_on_ranks("opening", Job(3), slow(Job(2)), slow(Job(4)))
)
