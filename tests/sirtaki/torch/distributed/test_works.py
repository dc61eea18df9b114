"""Works that operations return."""

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from sirtaki.comm.units import TensorReduction
from sirtaki.errors import CommError, PeerLostError
from sirtaki.torch.distributed.process_group import FillingWork, FollowedWork, LaneWork, LastingWork


class Lanes:
    """Lanes that complete on request."""

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


def test_a_future_or_a_query_makes_progress_without_a_wait() -> None:
    work, reduction, lanes = lane_work()
    future = work.get_future()
    assert work.get_future() is future
    assert (lanes.driven, work.is_completed(), work.is_success()) == (1, False, False)
    assert lanes.driven == 3, "each question has the lanes move"
    reduction.finish()
    assert future.value()[0] is work.result()[0]
    assert (work.wait(), work.is_completed(), work.is_success(), work.exception()) == (True, True, True, None)


def test_a_failure_is_reported_to_all_waiters() -> None:
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


def test_callbacks_run_once_and_in_the_end() -> None:
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


def test_the_future_of_a_failed_tensor_gets_the_error() -> None:
    lane, reduction, _ = lane_work()
    told: list[str] = []
    work = FollowedWork([lane], lambda: told.append("then"), [torch.ones(1)])
    future = work.get_future()
    reduction.finish(PeerLostError("rank 1 has ended"))
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        future.wait()
    assert not told


# ── works that C++ has, and Python has not ───────────────────────────────────────────────────────────────────────────


class Group(dist.ProcessGroup):
    """Gives works away, and keeps none."""

    works: ClassVar[list[LastingWork]] = []

    def allreduce(self, *_: object) -> LastingWork:
        return self.works.pop()


def given_to_cpp(work: FillingWork) -> Callable[[], object]:
    """Return a function that waits for the work in C++, after Python has released it."""
    group = Group(0, 1)
    _register_process_group("gives works away", group)
    group.works.append(LastingWork(work))
    total = torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", "gives works away")
    _unregister_process_group("gives works away")
    gc.collect()
    return lambda: torch.ops._c10d_functional.wait_tensor(total)


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_work_that_only_cpp_has_is_waited_for_before_and_after_its_end(ends_first: bool) -> None:
    lane, reduction, lanes = lane_work()
    wait = given_to_cpp(lane)
    if ends_first:
        reduction.finish()
    lanes.finish = lambda *_: reduction.finish() is None  # type: ignore[method-assign]
    wait()
    assert reduction.ended.done()


def test_a_work_that_only_cpp_references_raises_its_error() -> None:
    for follows in (False, True):
        lane, reduction, _ = lane_work()
        wait = given_to_cpp(FollowedWork([lane], lambda: None, []) if follows else lane)
        reduction.finish(PeerLostError("rank 1 has ended"))
        with pytest.raises(Exception, match="rank 1 has ended"):
            wait()


def test_works_without_a_waiter_keep_few_tensors_and_awaited_ones_none() -> None:
    refs = []
    for asks in (True, False):
        for _ in range(40):
            lane, reduction, _ = lane_work()
            refs.append(weakref.ref(reduction))
            work = LastingWork(lane)
            if asks:
                reduction.finish()
                work.wait()
            else:
                del work
                reduction.finish()
        del lane, reduction
    work = None  # type: ignore[assignment]
    gc.collect()
    assert sum(ref() is not None for ref in refs[:40]) == 0
    assert sum(ref() is not None for ref in refs[40:]) <= 16
