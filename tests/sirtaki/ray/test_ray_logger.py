"""Rank 0 is heard, if anybody listens."""

from typing import Any

import pytest

from sirtaki.ray import ray_logger
from sirtaki.ray.ray_logger import Log, heard_by


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
