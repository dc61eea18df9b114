"""Waiting for each other."""

import threading
import time
from types import SimpleNamespace

import pytest
from fakes.jobs import on_jobs

from sirtaki.engine import job
from sirtaki.errors import NotInitializedError
from sirtaki.torch.collectives import barrier, join
from sirtaki.torch.process_sets import ProcessSet, add_process_set

SIZE = 3


def test_nobody_leaves_a_barrier_before_all_have_come() -> None:
    came: list[int] = []
    lock = threading.Lock()

    def act(rank: int) -> None:
        for turn in range(5):
            time.sleep(0.001 * rank)
            with lock:
                came.append(turn)
            assert barrier() is None
            assert came.count(turn) == SIZE

    on_jobs(SIZE, act)


def test_a_barrier_of_a_set_is_for_its_ranks() -> None:
    def act(rank: int) -> None:
        there = add_process_set(ProcessSet([0, 2]))
        if rank == 1:
            with pytest.raises(ValueError, match="rank 1 is not in the process set"):
                barrier(there)
        else:
            barrier(there)

    on_jobs(SIZE, act)


def test_join_is_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(settled=True, engine=None, joining=SimpleNamespace(join=lambda: 2))
    monkeypatch.setattr(job, "current", lambda: current)
    assert join() == join(device=0) == 2
    current.settled = False  # in a job under way, whose other ranks are in elastic.run
    with pytest.raises(NotInitializedError, match=r"inside of it"):
        join()
