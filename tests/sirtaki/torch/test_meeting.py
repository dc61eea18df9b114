"""Barriers."""

import threading
import time
from types import SimpleNamespace

import pytest
from fakes.jobs import on_jobs

from sirtaki.engine import job
from sirtaki.errors import NotInitializedError
from sirtaki.torch.collectives import barrier, join

SIZE = 3


def test_no_rank_leaves_a_barrier_before_all_have_entered() -> None:
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


def test_join_is_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(settled=True, engine=None, joining=SimpleNamespace(join=lambda: 2))
    monkeypatch.setattr(job, "current", lambda: current)
    assert join() == join(device=0) == 2
    current.settled = False  # in a job under way, whose other ranks are in elastic.run
    with pytest.raises(NotInitializedError, match=r"only inside hvd.elastic.run"):
        join()
