"""What operations give back."""

from datetime import timedelta
from typing import Any

import pytest
import torch

from sirtaki.comm.units import TensorReduction
from sirtaki.errors import CommError, PeerLostError
from sirtaki.torch.distributed.process_group import FollowedWork, LaneWork


class Lanes:
    """Lanes that end when told to."""

    def __init__(self) -> None:
        self.driven = 0

    def drive(self) -> None:
        self.driven += 1

    def finish(self, reduction: TensorReduction, timeout_s: float | None = None) -> bool:
        done = reduction.wait(0.0 if timeout_s is None else timeout_s)
        reduction.check()
        return done


def lane_work() -> tuple[LaneWork, TensorReduction, Lanes]:
    tensor = torch.ones(2)
    lanes, reduction = Lanes(), TensorReduction(tensor, tensor, timeout_s=1.0)
    return LaneWork(lanes, reduction, [tensor]), reduction, lanes  # type: ignore[arg-type]


def test_a_future_and_a_question_have_the_tensor_move_though_nobody_waits() -> None:
    work, reduction, lanes = lane_work()
    future = work.get_future()
    assert work.get_future() is future
    assert (lanes.driven, work.is_completed(), work.is_success()) == (1, False, False)
    assert lanes.driven == 3, "each question has the lanes move"
    reduction.finish()
    assert future.value()[0] is work.result()[0]
    assert (work.wait(), work.is_completed(), work.is_success(), work.exception()) == (True, True, True, None)


def test_a_failure_is_told_to_all_who_ask() -> None:
    work, reduction, _ = lane_work()
    future = work.get_future()
    reduction.finish(PeerLostError("rank 1 has ended"))
    for ask in (work.wait, work.synchronize, future.wait):
        with pytest.raises(Exception, match="rank 1 has ended"):
            ask()
    assert isinstance(work.exception(), CommError)
    assert not work.is_success()


def test_a_wait_may_be_limited() -> None:
    work, _, _ = lane_work()
    with pytest.raises(RuntimeError, match=r"did not end within 0\.01 s"):
        work.wait(timedelta(seconds=0.01))


class Inner:
    """A work of another group."""

    def __init__(self, error: str = "") -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self._error = error

    def end(self) -> None:
        if self._error:
            self.future.set_exception(RuntimeError(self._error))
        else:
            self.future.set_result([])

    def wait(self, timeout: timedelta) -> bool:
        self.future.wait()
        return True

    def is_completed(self) -> bool:
        return self.future.done()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


def followed(*inner: Inner) -> tuple[FollowedWork, list[str]]:
    told: list[str] = []
    return FollowedWork(inner, lambda: told.append("then"), [torch.ones(1)]), told  # type: ignore[arg-type]


def test_what_follows_is_done_once_and_after_all() -> None:
    one, other = Inner(), Inner()
    work, told = followed(one, other)
    future = work.get_future()
    one.end()
    assert (work.is_completed(), work.exception(), told) == (False, None, [])
    other.end()
    assert future.wait() is not None
    assert (work.wait(), work.is_completed(), work.is_success()) == (True, True, True)
    assert told == ["then"]


def test_nothing_follows_a_failure() -> None:
    inner = Inner("connection closed")
    work, told = followed(Inner(), inner)
    work._works[0].end()  # type: ignore[attr-defined]
    inner.end()
    assert (work.is_completed(), work.is_success()) == (True, False)
    assert "connection closed" in str(work.exception())
    with pytest.raises(RuntimeError, match="connection closed"):
        work.get_future().wait()
    assert not told
