"""What can be said of ranks on Ray without Ray: what to install, who hears of a failure, and of rank 0's values."""

import importlib.util
from typing import Any

import pytest
from conftest import RunRanks
from rank_jobs import OVER_MESH, UNTUNED

import sirtaki.ray
from sirtaki.ray import ray_logger
from sirtaki.ray.ray_logger import Log, heard_by


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in sirtaki.ray.__all__:
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'sirtaki\[ray\]'"):
            getattr(sirtaki.ray, name)


def test_what_is_not_there_is_no_matter_of_ray() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'RayExecutr'"):
        _ = sirtaki.ray.RayExecutr


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_other_ranks_hear_of_it_and_all_can_begin_anew(run_ranks: RunRanks, ranks: int) -> None:
    assert run_ranks("ray_telling.py", ranks, env={**UNTUNED, **OVER_MESH}).stdout.count("went on") == ranks


class FakeQueue:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: Any) -> None:
        self.values.append(value)

    def get(self) -> Any:
        return self.values.pop(0)

    def empty(self) -> bool:
        return not self.values


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> FakeQueue:
    made = FakeQueue()
    monkeypatch.setattr(ray_logger, "_queue", made)
    return made


def test_rank_0_is_heard_by_all_listeners_in_order(queue: FakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    monkeypatch.setenv("HOROVOD_RANK", "0")
    ray_logger.log(1)
    ray_logger.log({"loss": 2.0})
    Log(queue, [heard.append, lambda value: heard.append(str(value))]).deliver()
    assert heard == [1, "1", {"loss": 2.0}, "{'loss': 2.0}"]


def test_other_ranks_are_not(queue: FakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "1")
    ray_logger.log(1)
    assert queue.empty()


def test_without_listeners_there_is_no_queue() -> None:
    with heard_by(()) as log:
        assert log.queue is None
        log.deliver()
    ray_logger.configure(None)
    ray_logger.log(1)
