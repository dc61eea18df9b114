"""Hot rows through an aggregator: on all ranks or on none, right in the step in which it dies, too."""

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fakes.aggregators import process, serving
from fakes.meshes import on_planes, until

from sirtaki.aggregator import Patience
from sirtaki.aggregator.server import Limits
from sirtaki.aggregator.wire import Wire
from sirtaki.autotune.sparse import LEARNING_ITERATIONS, ROUNDS, Stage
from sirtaki.comm.control.failure import WAIT_SLICE_S
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.sparse.lanes import SparseLanes
from sirtaki.comm.sparse.plan import SparsePath
from sirtaki.engine import sparse_carrier as module
from sirtaki.engine.sparse_carrier import HotRowAggregator, SparseCarrier
from sirtaki.errors import PeerLostError
from sirtaki.settings import REGISTRY_OFF, Settings

ROWS, WIDTH = 200, 5
ENOUGH = LEARNING_ITERATIONS + 4
HOT_COLD = SparsePath.HOT_COLD


def rows(iteration: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    places = (torch.rand(60, generator=generator) ** 3 * ROWS).long()
    values = torch.randn(60, WIDTH, generator=generator, dtype=torch.float64)
    return torch.sparse_coo_tensor(places[None], values.to(dtype), (ROWS, WIDTH), check_invariants=True)


class Ranks:
    """One rank that trains one parameter, and compares each sum with that of float64 and of the other ranks."""

    def __init__(self, control: ControlPlane, settings: Settings, dtype: torch.dtype) -> None:
        self.control, self.dtype = control, dtype
        self.carrier = SparseCarrier(control, settings)
        self.carrier.watch({"table": torch.zeros(ROWS, WIDTH, dtype=dtype)})
        self._iteration = 0

    def iterate(self, count: int = 1) -> None:
        for _ in range(count):
            self._iterate()

    def _iterate(self) -> None:
        given = [rows(self._iteration, rank, self.dtype) for rank in range(self.control.size)]
        work = self.carrier.start("table", given[self.control.rank])
        while not work.wait(WAIT_SLICE_S):
            self.carrier.check()
        total = work.reduced.rows
        found, wanted = torch.zeros(ROWS, WIDTH, dtype=self.dtype), sum(each.double().to_dense() for each in given)
        found[total.indices] = total.values
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.2}[self.dtype]
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
        touched = torch.unique(torch.cat([each._indices()[0] for each in given]))
        assert torch.equal(total.indices, touched)
        bits = total.values.contiguous().view(torch.uint8).numpy().tobytes()
        assert len(set(self.control.all_gather(bits))) == 1, "ranks hold different bits"
        self.carrier.end_iteration({"table": work})
        self._iteration += 1

    @property
    def is_aggregated(self) -> bool:
        return self.carrier.plans["table"].aggregated and self.carrier._means.lanes.hot_sums is not None

    @property
    def stage(self) -> Stage:
        return self.carrier._choices["table"].stage


def on_ranks(
    size: int, act: Callable[[Ranks], Any], *, dtype: torch.dtype = torch.float32, **settings: Any
) -> list[Any]:
    def run(control: ControlPlane) -> Any:
        of_rank = {name: value[control.rank] if isinstance(value, list) else value for name, value in settings.items()}
        ranks = Ranks(control, Settings(registry=REGISTRY_OFF, **of_rank), dtype)
        try:
            return act(ranks)
        finally:
            ranks.carrier.close()
            if control.failures.error is None:
                control.reclaim()

    return on_planes(size, run)


def hot_cold(ranks: Ranks) -> bool:
    ranks.iterate(ENOUGH)
    assert ranks.carrier.plans["table"].path is HOT_COLD
    return ranks.is_aggregated


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("size", [2, 3])
def test_hot_rows_go_there_where_their_way_is_fixed(size: int, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (address, aggregator):
        assert on_ranks(size, hot_cold, sparse=HOT_COLD, aggregator=(address,)) == [True] * size
        assert aggregator.counters.sums > 10
    assert not warnings(caplog)


def test_large_tensors_go_in_several_turns_and_others_than_float32_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_FLOATS", 1000)

    def act(control: ControlPlane) -> None:
        hot = HotRowAggregator.joined(control, (address,), used=True, stall_s=60.0, check=lambda: None)
        assert hot is not None
        for numel in (1, 1000, 4500):
            values = torch.arange(float(numel)) * (control.rank + 1)
            total = hot.sum(values)
            assert total is not None
            assert torch.equal(total, torch.arange(float(numel)) * 3)
            assert torch.equal(values, torch.arange(float(numel)) * (control.rank + 1))
        assert hot.sum(torch.ones(3, dtype=torch.float64)) is None
        assert hot.is_open
        hot.close()
        hot.close()
        assert hot.sum(torch.ones(3)) is None
        control.reclaim()

    with serving() as (address, _):
        on_planes(2, act)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_numbers_other_than_float32_stay_between_the_ranks(dtype: torch.dtype) -> None:
    with serving() as (address, _):
        assert on_ranks(2, hot_cold, dtype=dtype, sparse=HOT_COLD, aggregator=(address,)) == [False] * 2


def test_it_is_tried_beside_the_other_ways() -> None:
    def act(ranks: Ranks) -> tuple[int, int, Stage]:
        ranks.iterate(LEARNING_ITERATIONS)
        candidates = ranks.carrier._choices["table"].candidates
        ranks.iterate(ROUNDS * len(candidates) + 2)
        return sum(plan.aggregated for plan in candidates), sum(not plan.aggregated for plan in candidates), ranks.stage

    with serving() as (address, aggregator):
        for through, others, stage in on_ranks(3, act, aggregator=(address,)):
            assert (through, stage) == (1, Stage.KEEP)
            assert others >= 1
        assert aggregator.counters.sums >= ROUNDS


@pytest.mark.parametrize("settings", [{"sparse": SparsePath.GATHER}, {"tune": False}])
def test_it_says_where_it_has_no_effect(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (address, aggregator):
        on_ranks(2, lambda ranks: ranks.iterate(2), aggregator=(address,), **settings)
        assert aggregator.counters.sums == 0
    assert len(warnings(caplog)) == 1
    assert (
        "SIRTAKI_AGGREGATOR has no effect: it sums hot rows, which there are with SIRTAKI_SPARSE=hot_cold"
        in caplog.text
    )


def test_a_host_that_one_rank_does_not_know_is_told_once_and_nobody_uses_it(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"sparse": HOT_COLD, "aggregator": ("256.1.1.1:7000",)}
    assert on_ranks(3, hot_cold, **settings) == [False] * 3
    assert len(warnings(caplog)) == 1
    assert "SIRTAKI_AGGREGATOR=256.1.1.1:7000 is not used, ranks sum all rows themselves: rank 0: no agg" in caplog.text


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Patience", partial(Patience, lost_s=0.5))


@pytest.mark.usefixtures("_impatient")
def test_where_nobody_listens_it_is_told_once_and_nobody_uses_it(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (address, _):
        pass
    assert on_ranks(2, hot_cold, sparse=HOT_COLD, aggregator=(address,)) == [False] * 2
    assert len(warnings(caplog)) == 1
    assert f"no aggregator answers ({address})" in caplog.text


@pytest.mark.parametrize("first", [True, False])
def test_what_rank_0_names_holds_for_all(first: bool, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (address, aggregator):
        named = [(address,), None, ("256.1.1.1:7000",)] if first else [None, (address,), (address,)]
        assert on_ranks(3, hot_cold, sparse=HOT_COLD, aggregator=named) == [first] * 3
        assert bool(aggregator.counters.sums) == first
    assert len(warnings(caplog)) == 1
    other = "rank 1 has nothing, rank 2 has 256.1.1.1:7000" if first else f"rank 1 has {address}"
    shown = address if first else "nothing"
    assert f"differs between ranks; rank 0's holds for all, {shown}: {other}" in caplog.text


def test_when_it_ends_in_the_middle_of_training_ranks_go_on_by_themselves(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (address, aggregator):

        def act(ranks: Ranks) -> bool:
            before = hot_cold(ranks)
            if ranks.control.rank == 0:
                aggregator.stop()
            ranks.iterate(6)
            plan, (told,) = ranks.carrier.plans["table"], ranks.carrier.summaries
            assert told.plan == plan.describe()
            return before and plan.path is HOT_COLD and not plan.aggregated

        assert on_ranks(3, act, sparse=HOT_COLD, aggregator=(address,)) == [True] * 3
    assert len(warnings(caplog)) == 1
    assert "is lost, ranks sum all rows themselves from this step on" in caplog.text


def test_when_it_ends_while_it_is_tried_ways_are_learned_anew() -> None:
    with serving() as (address, aggregator):

        def act(ranks: Ranks) -> tuple[Stage, int]:
            ranks.iterate(LEARNING_ITERATIONS + 2)
            assert ranks.stage is Stage.TRY
            ranks.control.barrier()
            if ranks.control.rank == 1:
                aggregator.stop()
            while ranks.stage is Stage.TRY:
                ranks.iterate()
            learns = ranks.stage
            ranks.iterate(LEARNING_ITERATIONS + 1)
            return learns, sum(plan.aggregated for plan in ranks.carrier._choices["table"].candidates)

        assert on_ranks(2, act, aggregator=(address,)) == [(Stage.LEARN, 0)] * 2


def test_a_standby_takes_over_from_one_that_is_killed() -> None:
    with process() as (standby, _), process() as (address, first):

        def act(ranks: Ranks) -> bool:
            before = hot_cold(ranks)
            if ranks.control.rank == 0:
                first.kill()
            ranks.iterate(6)
            return before and ranks.is_aggregated

        assert on_ranks(3, act, sparse=HOT_COLD, aggregator=(address, standby)) == [True] * 3


@pytest.mark.usefixtures("_impatient")
def test_one_that_is_killed_is_done_without() -> None:
    with process() as (address, only):

        def act(ranks: Ranks) -> bool:
            before = hot_cold(ranks)
            if ranks.control.rank == 1:
                only.kill()
            ranks.iterate(6)
            return before and not ranks.is_aggregated

        assert on_ranks(2, act, sparse=HOT_COLD, aggregator=(address,)) == [True] * 2


def test_each_optimizer_is_a_job_of_its_own_and_leaves_it() -> None:
    def act(ranks: Ranks) -> bool:
        again = Ranks(
            ranks.control, Settings(registry=REGISTRY_OFF, sparse=HOT_COLD, aggregator=(address,)), torch.float32
        )
        found = hot_cold(ranks) and hot_cold(again)
        again.carrier.close()
        return found

    with serving() as (address, aggregator):
        assert on_ranks(2, act, sparse=HOT_COLD, aggregator=(address,)) == [True] * 2
        assert aggregator.counters.sessions == 2
        until(lambda: not aggregator._jobs)


def test_a_wait_for_a_rank_that_does_not_come_ends_when_the_carrier_is_closed() -> None:
    def act(ranks: Ranks) -> bool:
        assert hot_cold(ranks)
        if ranks.control.rank == 0:
            ranks.carrier.start("table", rows(0, 0, torch.float32))
            thread = ranks.carrier._means.worker._thread
            ranks.carrier.close()
            return not thread.is_alive()
        return True

    with serving() as (address, _):
        assert on_ranks(2, act, sparse=HOT_COLD, aggregator=(address,)) == [True] * 2


def test_a_wait_for_a_rank_that_is_lost_ends_with_the_job() -> None:
    def act(ranks: Ranks) -> None:
        assert hot_cold(ranks)
        if ranks.control.rank == 0:
            work = ranks.carrier.start("table", rows(0, 0, torch.float32))
            threading.Timer(0.1, ranks.control.failures.report, [PeerLostError("rank 1 is gone")]).start()
            while not work.wait(WAIT_SLICE_S):
                pass

    with serving() as (address, _), pytest.raises(PeerLostError, match="rank 1 is gone"):
        on_ranks(2, act, sparse=HOT_COLD, aggregator=(address,))


def test_a_job_that_is_lost_while_it_joins_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody, closed, close = Wire.bound("127.0.0.1", 0), [], SparseLanes.close
    monkeypatch.setattr(SparseLanes, "close", lambda lanes: closed.append(lanes) or close(lanes))

    def act(control: ControlPlane) -> None:
        threading.Timer(0.2, control.failures.report, [PeerLostError("rank 1 is gone")]).start()
        address = f"127.0.0.1:{nobody.address[1]}"
        carrier = SparseCarrier(control, Settings(registry=REGISTRY_OFF, sparse=HOT_COLD, aggregator=(address,)))
        try:
            carrier.watch({"table": torch.zeros(ROWS, WIDTH)})
        finally:
            carrier.close()

    with contextlib.closing(nobody), pytest.raises(PeerLostError, match="rank 1 is gone"):
        on_planes(2, act)
    assert len(closed) == 2
    assert all(thread.name != "sirtaki-heartbeat" for thread in threading.enumerate())


def test_an_aggregator_that_has_no_room_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    with serving(limits=Limits(memory_bytes=1 << 20)) as (address, _):
        assert on_ranks(3, hot_cold, sparse=HOT_COLD, aggregator=(address,)) == [False] * 3
    assert len(warnings(caplog)) == 1
    assert "refuses this job: the job needs 4.1 MiB of registers, and 1.0 MiB are free" in caplog.text
