"""Streams whose threads make MPI's calls; here over this process alone, where a reduction changes nothing."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sirtaki.comm.control.mpi import load_mpi
from sirtaki.comm.transports import mpi
from sirtaki.comm.transports.contract import FlatBuffer, ReduceOp, StreamSpec, ThreadWork
from sirtaki.comm.transports.mpi import MpiTransport
from sirtaki.errors import CommError, TransportError


def own_threads() -> int:
    return sum(thread.name.startswith("sirtaki-mpi") for thread in threading.enumerate())


def transport(agree: Any = lambda problem: None, duplicate: Any = None) -> MpiTransport:
    return MpiTransport(duplicate or (lambda: load_mpi().COMM_SELF), agree)


def reduce(there: MpiTransport, tensor: torch.Tensor, start: int, stop: int, *, stream: int = 0) -> Any:
    return there.all_reduce(FlatBuffer(tensor), start, stop, stream=StreamSpec(stream), op=ReduceOp.SUM, scale=0.5)


def test_a_work_is_done_once_it_is_finished_for_all_waiters() -> None:
    work = ThreadWork()
    assert not work.wait(0.0)
    assert not work.is_done()
    assert work.times() == (None, None)
    ended: list[bool] = []
    threads = [threading.Thread(target=lambda: ended.append(work.wait(10.0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    work.begun_s = before_s = time.perf_counter()
    work.finish()
    for thread in threads:
        thread.join()
    assert ended == [True] * 3
    begun, done = work.times()
    assert begun == before_s
    assert done is not None
    assert done >= before_s
    assert work.is_done()


def test_every_waiter_of_a_failed_work_gets_the_error() -> None:
    work = ThreadWork()
    work.finish(TransportError("no stream"))
    errors = []
    for _ in range(2):
        with pytest.raises(TransportError, match="no stream") as caught:
            work.wait(0.0)
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert work.is_done()


def test_an_error_of_mpi_reaches_the_waiter_and_the_next_unit_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    there = transport()
    there.open_streams([StreamSpec(0)])
    with monkeypatch.context() as patch:

        def fail(*args: Any, **named: Any) -> None:
            raise ValueError("MPI_ERR_TRUNCATE")

        patch.setattr(mpi, "mpi_all_reduce_", fail)
        with pytest.raises(CommError, match=r"MPI failed in elements \[1, 2\) on stream 0: MPI_ERR_TRUNCATE"):
            reduce(there, torch.ones(2), 1, 2).wait(5.0)
    assert reduce(there, torch.ones(2), 0, 2).wait(5.0)
    there.close()


def test_a_stream_that_another_rank_cannot_open_is_closed_here() -> None:
    opened: list[Any] = []

    def agree(problem: str) -> None:
        if len(opened) == 2:
            raise TransportError("rank 1: MPI stream 1: out of threads")

    def duplicate() -> Any:
        opened.append(SimpleNamespace())
        return load_mpi().COMM_SELF

    there = transport(agree, duplicate)
    there.open_streams([StreamSpec(0)])
    before = own_threads()
    with pytest.raises(TransportError, match="rank 1: MPI stream 1"):
        there.open_streams([StreamSpec(1)])
    assert own_threads() == before
    assert reduce(there, torch.ones(1), 0, 1).wait(5.0)
    there.close()


@pytest.mark.lengthy
def test_threads_finish_their_work_before_they_end_and_a_hanging_one_is_reported() -> None:
    before = own_threads()
    there = transport()
    there.open_streams([StreamSpec(1)])
    assert own_threads() == before + 2
    works = [reduce(there, torch.ones(1000), 0, 1000) for _ in range(20)]
    assert there.close()
    assert all(work.is_done() for work in works)
    assert own_threads() == before
    assert there.close()
    hangs = transport()
    hangs.open_streams([StreamSpec(0)])
    release = threading.Event()
    hangs.streams[0].put(lambda: release.wait() and None)
    assert not hangs.close()
    release.set()
