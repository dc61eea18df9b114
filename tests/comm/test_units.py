"""Whole tensors in units: each element once, in one order, through few slots; and what fails fails for all."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.comm.control.failure import FailureBoard
from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.comm.transports.contract import FlatBuffer, ReduceOp, StreamSpec
from sirtaki.comm.units import TensorReduction, UnitPipeline
from sirtaki.errors import CommError, PeerLostError, StallError

ROUTE = TransportKind.GLOO, Algorithm.FLAT
UNIT_BYTES = 64


class FakeWork:
    """A unit of two ranks with equal values. Done at the first poll, unless the router holds it."""

    def __init__(self, router: "FakeRouter", part: torch.Tensor, op: ReduceOp) -> None:
        self._router, self._part, self._op = router, part, op

    def wait(self, timeout_s: float) -> bool:
        if self._router.error is not None:
            raise self._router.error
        if not self._router.moving.wait(timeout_s):
            return False
        if self._op is ReduceOp.SUM:
            self._part.copy_(self._part * 2)
        self._router.under_way -= 1
        return True


class FakeRouter:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.units: list[tuple[int, int, int]] = []
        self.under_way = self.most_under_way = 0
        self.moving = threading.Event()
        self.moving.set()
        self.error: CommError | None = None
        self.full = False

    def all_reduce(
        self, buffer: FlatBuffer, start: int, stop: int, *, route: Any, stream: int, op: ReduceOp
    ) -> FakeWork:
        assert (route, StreamSpec(stream).threads) == (ROUTE, None)
        if self.full:
            raise RuntimeError("no descriptor left")
        self.units.append((start, stop, stream))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        return FakeWork(self, buffer.tensor[start:stop], op)


def build(
    *, slots: int = 0, streams: int = 1, unit_bytes: int = UNIT_BYTES
) -> tuple[UnitPipeline, FakeRouter, FailureBoard]:
    router, failures = FakeRouter(), FailureBoard()
    memory = FlatBuffer(torch.zeros(slots * UNIT_BYTES, dtype=torch.uint8)) if slots else None
    pipeline = UnitPipeline(
        router,  # type: ignore[arg-type]
        SimpleNamespace(failures=failures),  # type: ignore[arg-type]
        route=ROUTE,
        streams=streams,
        unit_bytes=unit_bytes,
        slots=memory,
    )
    return pipeline, router, failures


def reduction(tensor: torch.Tensor, target: torch.Tensor | None = None, **options: Any) -> TensorReduction:
    return TensorReduction(tensor, tensor if target is None else target, **{"timeout_s": 30.0, **options})


@given(
    numels=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    dtypes=st.lists(st.sampled_from((torch.float64, torch.float32, torch.int8)), min_size=5, max_size=5),
    slots=st.integers(0, 3),
    streams=st.integers(1, 3),
)
@settings(deadline=None)  # a busy machine may pause any example
def test_each_element_is_reduced_once_with_any_slots_and_streams(
    numels: list[int], dtypes: list[torch.dtype], slots: int, streams: int
) -> None:
    pipeline, router, _ = build(slots=slots, streams=streams)
    tensors = [torch.arange(numel).to(dtype) % 50 for numel, dtype in zip(numels, dtypes, strict=False)]
    wanted = [2 * tensor for tensor in tensors]
    reductions = [reduction(tensor) for tensor in tensors]
    for each in reductions:
        pipeline.submit(each)
    for each, tensor, result in reversed(list(zip(reductions, tensors, wanted, strict=True))):
        assert pipeline.finish(each)
        assert torch.equal(tensor, result)
    assert [stream for *_, stream in router.units] == [number % streams for number in range(len(router.units))]
    assert router.under_way == 0
    if slots:
        assert router.most_under_way <= slots


def test_units_have_the_requested_size_and_use_the_slots_in_turn() -> None:
    pipeline, router, _ = build(slots=2)
    each = reduction(torch.ones(40))
    pipeline.submit(each)
    assert router.units == [(0, 16, 0), (16, 32, 0)]  # there is no third slot
    pipeline.finish(each)
    assert router.units[2:] == [(0, 8, 0)]


@pytest.mark.parametrize(("kib", "lengths_kib"), [(1024, [256] * 4), (400, [128, 128, 128, 16]), (100, [100])])
def test_a_tensor_of_less_than_a_unit_for_each_stream_takes_them_all(kib: int, lengths_kib: list[int]) -> None:
    pipeline, router, _ = build(streams=4, unit_bytes=2 << 20)
    pipeline.submit(reduction(torch.ones(256 * kib)))
    assert [(stop - start) // 256 for start, stop, _ in router.units] == lengths_kib
    assert [stream for *_, stream in router.units] == list(range(len(lengths_kib)))


@pytest.mark.parametrize("slots", [0, 2])
def test_a_part_of_the_result_may_be_requested(slots: int) -> None:
    pipeline, _, _ = build(slots=slots)
    source, target = torch.arange(100.0), torch.zeros(30)
    each = reduction(source, target, start=25)
    pipeline.submit(each)
    pipeline.finish(each)
    assert torch.equal(target, torch.arange(25.0, 55.0) * 2)
    assert torch.equal(source, torch.arange(100.0))


def test_callbacks_run_before_any_waiter_returns() -> None:
    pipeline, _, _ = build()
    told: list[str] = []
    each = reduction(torch.ones(3), then=lambda: told.append("then"))
    pipeline.submit(each)
    each.ended.add_done_callback(lambda _: told.append("done"))
    pipeline.finish(each)
    each.ended.add_done_callback(lambda _: told.append("late"))
    assert told == ["then", "done", "late"]


def test_an_empty_tensor_is_done_at_once() -> None:
    pipeline, router, _ = build()
    each = reduction(torch.ones(0))
    pipeline.submit(each)
    assert each.ended.done()
    assert not router.units


def test_a_timed_wait_can_be_repeated() -> None:
    pipeline, router, _ = build(slots=1)
    router.moving.clear()
    each = reduction(torch.ones(20))
    pipeline.submit(each)
    assert not pipeline.finish(each, timeout_s=0.03)
    router.moving.set()
    assert pipeline.finish(each, timeout_s=30.0)
    assert torch.equal(each.target, torch.full((20,), 2.0))


def test_draining_completes_all_pending_reductions() -> None:
    pipeline, _, _ = build(slots=1)
    reductions = [reduction(torch.ones(50)) for _ in range(3)]
    for each in reductions:
        pipeline.submit(each)
    pipeline.drain()
    assert all(each.ended.done() for each in reductions)


def test_a_rank_that_does_not_take_part_is_reported_after_the_time_limit() -> None:
    pipeline, router, _ = build()
    router.moving.clear()
    each = reduction(torch.ones(20), timeout_s=0.05)
    pipeline.submit(each)
    with pytest.raises(StallError, match=r"20 elements was not reduced within 0\.05 s"):
        pipeline.finish(each)


@pytest.mark.lengthy
@pytest.mark.parametrize("where", ["work", "board"])
def test_a_failure_ends_all_operations_in_flight_and_all_later_ones(where: str) -> None:
    pipeline, router, failures = build(slots=1)
    reductions = [reduction(torch.ones(50)) for _ in range(3)]
    for each in reductions:
        pipeline.submit(each)
    router.moving.clear()
    failures.report(PeerLostError("rank 3 has ended"))
    if where == "work":
        router.error = CommError("a connection broke")
    for each in reductions:
        with pytest.raises(PeerLostError, match="rank 3"):  # which is why it broke
            pipeline.finish(each)
    with pytest.raises(PeerLostError, match="rank 3"):
        pipeline.submit(reduction(torch.ones(3)))


def test_operations_of_a_rank_before_it_left_count() -> None:
    pipeline, router, failures = build()
    router.moving.clear()
    each = reduction(torch.ones(20))
    pipeline.submit(each)
    failures.report(PeerLostError("rank 3 has ended"))
    threading.Timer(0.05, router.moving.set).start()
    assert pipeline.finish(each)
    assert torch.equal(each.target, torch.full((20,), 2.0))


def test_a_result_that_cannot_be_stored_is_reported() -> None:
    pipeline, _, _ = build()

    def fail() -> None:
        raise ValueError("sizes differ")

    each = reduction(torch.ones(3), then=fail)
    pipeline.submit(each)
    with pytest.raises(CommError, match="sizes differ"):
        pipeline.finish(each)


@pytest.mark.parametrize("slots", [0, 1])
def test_an_unsendable_unit_fails_with_all_units_in_flight(slots: int) -> None:
    pipeline, router, _ = build(slots=slots)
    first, second = reduction(torch.ones(40)), reduction(torch.ones(40))
    pipeline.submit(first)
    router.full = True
    pipeline.submit(second)
    for each in (first, second):
        with pytest.raises(CommError, match="no descriptor left"):
            pipeline.finish(each)
