"""Sparse gradients: all ranks agree on them and sum their rows by plans that are learned, logged, kept and recalled."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RunRanks
from fakes.meshes import on_planes

from sirtaki.autotune.sparse import (
    LEARNING_ITERATIONS,
    LEAST_WATCHED,
    N_CANDIDATES,
    TRIAL_BUDGET,
    CollectiveCosts,
    SparseSummary,
    TouchCounts,
)
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.sparse.plan import GATHER, SparsePath, SparsePlan
from sirtaki.comm.sparse.worker import SparseLanes
from sirtaki.engine import sparse_gradients as module
from sirtaki.engine.reducing.sparse_names import KnownSparse
from sirtaki.engine.settings import REGISTRY_OFF, Settings
from sirtaki.engine.sparse_gradients import SparseReductions, Times, fastest, measure, plan_of, skew_of
from sirtaki.engine.tuning.memory import SettingsMemory
from sirtaki.registry.opening import open_store
from sirtaki.registry.schema import RowsKey, RowsRecord

ROWS, WIDTH = 4, 2


def rows(*indices: int, value: float = 1.0) -> torch.Tensor:
    """Return a sparse gradient with ones in these rows."""
    places = torch.tensor([list(indices)], dtype=torch.int64).reshape(1, -1)
    return torch.sparse_coo_tensor(
        places, torch.full((len(indices), WIDTH), value), (ROWS, WIDTH), check_invariants=True
    )


class Rank:
    """One rank's sparse reductions of some parameters of one shape."""

    def __init__(self, known: KnownSparse, control: ControlPlane, params: dict[str, torch.nn.Parameter]) -> None:
        self.known, self.control, self.rank, self.params = known, control, control.rank, params
        self.known.watch(params)

    @property
    def sparse(self) -> SparseReductions:
        assert self.known.rows is not None
        return self.known.rows

    def give(self, name: str, gradient: torch.Tensor) -> None:
        """Submit a gradient, as after a backward pass."""
        self.params[name].grad = gradient
        self.sparse.start(name, gradient, gradient._version)

    def finish(self, *, joined: bool = False) -> None:
        self.sparse.fill_missing(joined=joined)
        assert self.sparse.reduce(None)
        self.sparse.end_iteration()

    def first_of_each_row(self, name: str) -> list[float] | None:
        gradient = self.params[name].grad
        if gradient is None:
            return None
        assert gradient.is_sparse
        assert gradient.is_coalesced()
        values: list[float] = gradient.to_dense()[:, 0].tolist()
        return values


def on_ranks(
    act: Callable[[Any], Any],
    known: Iterable[str] = "ab",
    *,
    size: int = 2,
    kind: type[Rank] = Rank,
    params: Callable[[], dict[str, torch.nn.Parameter]] = lambda: {
        name: torch.nn.Parameter(torch.zeros(ROWS, WIDTH)) for name in "ab"
    },
    reduction: Reduction = Reduction(),  # noqa: B008  # frozen
    as_dense: bool = False,
    **settings: Any,
) -> list[Any]:
    """Call `act` on each rank. Return the results. A list among the settings has one value per rank."""

    def run(control: ControlPlane) -> Any:
        of_rank = {name: value[control.rank] if isinstance(value, list) else value for name, value in settings.items()}
        own = Settings(**{"registry": REGISTRY_OFF, **of_rank})
        open_rows = partial(SparseReductions, control, own, reduction)
        sparse = KnownSparse(control, open_rows, known=known, as_dense=as_dense)
        try:
            return act(kind(sparse, control, params()))
        finally:
            sparse.close()
            sparse.close()
            if control.failures.error is None:
                control.reclaim()

    return on_planes(size, run)


def zero_rows(rank: Rank) -> None:
    """Submit no gradients."""


def comes(rank: Rank) -> None:
    assert rank.sparse.missing == {"a", "b"}
    rank.give("a", rows(0, 1) if rank.rank else rows(1, 3, 3))
    rank.give("b", rows())
    assert rank.sparse.pending
    assert rank.sparse.missing == set()


def comes_on_one_rank(rank: Rank) -> None:
    if rank.rank:
        rank.give("a", rows(0))


def is_of_an_earlier_pass(rank: Rank) -> None:
    comes_on_one_rank(rank)
    if not rank.rank:
        rank.params["b"].grad = rows(2)


def is_dense_on_one_rank(rank: Rank) -> None:
    rank.give("a", torch.ones(ROWS, WIDTH) if rank.rank else rows(1))


@pytest.mark.parametrize(
    ("act", "a", "b", "options"),
    [
        (comes, [1.0, 2.0, 0.0, 2.0], [0.0] * 4, {}),
        (comes, [0.75, 1.5, 0.0, 1.5], [0.0] * 4, {"reduction": Reduction(prescale=3.0, postscale=0.25)}),
        (zero_rows, [0.0] * 4, [0.0] * 4, {}),
        (comes_on_one_rank, [1.0, 0.0, 0.0, 0.0], [0.0] * 4, {}),
        (comes_on_one_rank, [1.0, 0.0, 0.0, 0.0], None, {"unused_as_none": True}),
        (is_of_an_earlier_pass, [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], {}),
        (is_dense_on_one_rank, [1.0, 2.0, 1.0, 1.0], [0.0] * 4, {}),
    ],
)
def test_rows_of_all_ranks_are_summed_in_any_distribution(
    act: Callable[[Rank], None], a: list[float], b: list[float] | None, options: dict[str, Any]
) -> None:
    def play(rank: Rank) -> None:
        for _ in range(2):
            for param in rank.params.values():
                param.grad = None
            act(rank)
            rank.finish()
            assert (rank.first_of_each_row("a"), rank.first_of_each_row("b")) == (a, b)
            assert not rank.sparse.pending

    on_ranks(play, **options)


def test_a_gradient_set_to_none_stays_none_and_a_reduced_one_is_assigned_once() -> None:
    def act(rank: Rank) -> None:
        for name in "ab":
            rank.give(name, rows(rank.rank))
        if rank.rank:
            rank.params["a"].grad = None
        assert rank.sparse.reduce(None)
        rank.params["b"].grad = mine = rows(3)
        rank.finish()
        assert rank.first_of_each_row("a") == (None if rank.rank else [1.0, 1.0, 0.0, 0.0])
        assert rank.params["b"].grad is mine

    on_ranks(act)


def test_a_joined_rank_and_a_frozen_parameter_give_nothing() -> None:
    def act(rank: Rank) -> None:
        for name in "ab":
            rank.params[name].grad = rows(rank.rank)
        rank.params["b"].requires_grad_(requires_grad=False)
        rank.finish(joined=rank.rank == 1)
        assert rank.first_of_each_row("a") == [1.0, 0.0, 0.0, 0.0]
        assert rank.first_of_each_row("b") == [float(rank.rank == row) for row in range(ROWS)]  # left alone

    on_ranks(act)


@pytest.mark.parametrize("edit", ["write", "replace", None])
def test_changes_before_the_reduction_are_lost_and_logged_once(
    edit: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    def act(rank: Rank) -> None:
        for _ in range(2):
            gradient = rows(0).coalesce()
            rank.give("a", gradient)
            if edit == "write":
                gradient.mul_(9.0)
            elif edit == "replace":
                rank.params["a"].grad = rows(2)
            rank.finish()
            assert rank.first_of_each_row("a") == [2.0, 0.0, 0.0, 0.0]

    with caplog.at_level(logging.WARNING):
        on_ranks(act, known="a")
    told = [
        message
        for message in caplog.messages
        if "user code changed the sparse gradient of a while Sirtaki was reducing it" in message
    ]
    assert len(told) == (2 if edit else 0)  # once a rank


def test_a_gradient_found_to_be_sparse_is_sent_dense_until_all_ranks_agree() -> None:
    def act(rank: Rank) -> None:
        for name in "ab":
            rank.params[name].grad = torch.ones(ROWS, WIDTH)
        if rank.rank == 1:
            rank.params["b"].grad = rows(1)
            dense = rank.known.to_wire_format("b")
            assert not dense.is_sparse
            assert rank.params["b"].grad is dense
            assert rank.known.found == {"b"}
        assert rank.known.is_unagreed("b")
        assert rank.known.agree()
        assert rank.known.known == {"b"}
        assert rank.params["b"].grad is not None
        assert rank.params["b"].grad.is_sparse
        assert not rank.params["a"].grad.is_sparse  # type: ignore[union-attr]
        rank.known.watch(rank.params)
        assert rank.known.names == {"b"}
        assert rank.known.found == set()
        assert not rank.known.is_unagreed("b")
        assert rank.known.to_wire_format("b") is rank.params["b"].grad
        assert not rank.known.agree()

    on_ranks(act, known="")


def test_where_sparse_ones_are_made_dense_nothing_is_found() -> None:
    def act(rank: Rank) -> None:
        rank.params["a"].grad = rows(1)
        assert not rank.known.is_unagreed("a")
        assert not rank.known.to_wire_format("a").is_sparse
        assert not rank.known.agree()
        assert rank.known.known == set()

    on_ranks(act, known="", as_dense=True)


def test_an_interrupted_wait_continues_and_gradients_in_flight_cannot_be_written() -> None:
    def act(rank: Rank) -> None:
        rank.known.watch({"b": rank.params["b"]})
        assert (rank.known.names, rank.known.known, rank.sparse.missing) == ({"b"}, {"a", "b"}, {"b"})
        if rank.rank == 0:
            gradient = rows(0).coalesce()
            rank.give("b", gradient)
            gradient.values().mul_(9.0)
            assert not rank.sparse.reduce(lambda: True)
        rank.control.barrier()
        if rank.rank == 1:
            rank.give("b", rows(1))
        rank.finish()
        assert rank.first_of_each_row("b") == [1.0, 1.0, 0.0, 0.0]

    on_ranks(act)


# ── how rows travel ──────────────────────────────────────────────────────────────────────────────────────────────────

TABLE_ROWS, TABLE_WIDTH, LOOKED_UP = 200, 5, 60
UNTIL_KEPT = LEARNING_ITERATIONS + round(2.5 * TRIAL_BUDGET) + 20  # the proof takes at most 1.5 budgets
HOT_COLD = SparsePath.HOT_COLD


def looked_up_rows(iteration: int, rank: int, looked_up: int) -> torch.Tensor:
    """Low rows more often, some several times."""
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    places = (torch.rand(looked_up, generator=generator) ** 3 * TABLE_ROWS).long()
    values = torch.randn(looked_up, TABLE_WIDTH, generator=generator)
    return torch.sparse_coo_tensor(places[None], values, (TABLE_ROWS, TABLE_WIDTH), check_invariants=True)


class Trains(Rank):
    """A rank that compares each sum with float64 and with its peers."""

    iteration = 0

    def iterate(self, count: int = 1, looked_up: int = LOOKED_UP) -> None:
        for _ in range(count):
            given = [looked_up_rows(self.iteration, rank, looked_up) for rank in range(self.control.size)]
            wanted = sum(each.double().to_dense() for each in given)
            touched = torch.unique(torch.cat([each._indices()[0] for each in given]))
            for name in self.sparse.targets:
                self.give(name, given[self.rank])
            self.finish()
            for name in self.sparse.targets:
                found = self.params[name].grad
                assert found is not None
                torch.testing.assert_close(found.to_dense().double(), wanted, rtol=1e-5, atol=1e-5)
                assert torch.equal(found.indices()[0], touched)
                bits = found.values().contiguous().view(torch.uint8).numpy().tobytes()
                assert len(set(self.control.all_gather(bits))) == 1, "ranks hold different bits"
            self.iteration += 1

    @property
    def plan(self) -> SparsePlan:
        return self.sparse.plans["a"]


def tables(names: str = "a") -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.zeros(TABLE_ROWS, TABLE_WIDTH)) for name in names}


def on_training_ranks(size: int, act: Callable[[Trains], Any], names: str = "a", **settings: Any) -> list[Any]:
    return on_ranks(act, names, size=size, kind=Trains, params=lambda: tables(names), **settings)


@pytest.fixture
def _several_ways_promise_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make several algorithms promising, because probes on a busy machine may leave only one, which is not tried."""
    pace = CollectiveCosts(
        exchange_s=1e-4, exchange_bytes_per_s=1e9, reduce_s=1e-4, reduce_bytes_per_s=1e9, add_bytes_per_s=1e9
    )
    monkeypatch.setattr(module, "measure", lambda *_, **__: pace)


@pytest.mark.lengthy
@pytest.mark.usefixtures("_several_ways_promise_something")
def test_all_ranks_learn_try_and_keep_the_same_and_one_writes_it_down(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def act(rank: Trains) -> tuple[list[dict[str, SparsePlan]], list[SparseSummary]]:
        plans = []
        for _ in range(UNTIL_KEPT):
            assert not rank.sparse.summaries or rank.iteration > LEARNING_ITERATIONS
            plans.append(rank.sparse.plans)
            rank.iterate()
        assert all(target.kept for target in rank.sparse.targets.values())
        return plans, rank.sparse.summaries

    (plans, found), *others = on_training_ranks(3, act, names="ab", trial_log=str(log))
    assert others == [(plans, found)] * 2
    assert all(len({each[name].path for each in plans}) >= N_CANDIDATES - 1 for name in "ab")
    assert [one.name for one in found] == ["b", "a"]  # as their gradients come
    for one in found:
        assert (one.n_rows, one.width, one.looked_up) == (TABLE_ROWS, TABLE_WIDTH, float(LOOKED_UP))
        assert one.horovod_bytes == 2 * LOOKED_UP * (TABLE_WIDTH * 4 + 8)
        assert len(one.ways) > 1
        assert all(way.measured_s is not None and way.measured_s > 0.0 for way in one.ways)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["sparse"] * 2
    by_name = sorted((SparseSummary.from_json(line) for line in lines), key=lambda one: one.name)
    assert by_name == sorted(found, key=lambda one: one.name)


@pytest.mark.usefixtures("_several_ways_promise_something")
def test_a_new_decision_is_logged_again() -> None:
    def act(rank: Trains) -> list[float]:
        rank.iterate(UNTIL_KEPT)
        before = rank.sparse.summaries
        rank.iterate(2 * LEAST_WATCHED + UNTIL_KEPT, looked_up=5)
        return [summary.looked_up for summary in (*before, *rank.sparse.summaries)]

    assert on_training_ranks(2, act) == [[float(LOOKED_UP), 5.0]] * 2


@pytest.mark.parametrize("path", [path for path in SparsePath if path is not HOT_COLD])
def test_rank_0s_fixed_algorithm_applies_to_all_and_is_logged_after_a_few_iterations(path: SparsePath) -> None:
    def act(rank: Trains) -> tuple[SparsePlan, str, bool]:
        rank.iterate(LEARNING_ITERATIONS)
        (found,) = rank.sparse.summaries
        return rank.plan, found.plan.split()[0], found.ways[0].n_bytes > 0

    other = SparsePath.DENSE if path is SparsePath.OWNER else SparsePath.OWNER
    assert on_training_ranks(2, act, sparse=[path, other]) == [(SparsePlan(path=path), path.value, True)] * 2


@pytest.mark.parametrize("settings", [{"tune": False}, {"warmup_iterations": 0}])
def test_where_nothing_is_tuned_rows_are_gathered_and_nothing_is_written(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    def act(rank: Trains) -> tuple[SparsePlan, str]:
        rank.iterate(LEARNING_ITERATIONS + 3)
        return rank.plan, rank.sparse.summaries[0].plan

    assert on_training_ranks(2, act, trial_log=str(tmp_path / "log"), **settings) == [(GATHER, "gather")] * 2
    assert not (tmp_path / "log").exists()


def test_parameters_that_change_are_learned_anew() -> None:
    def act(rank: Trains) -> None:
        rank.iterate()
        before = rank.sparse.targets
        rank.sparse.watch({"a": rank.params["a"], "b": torch.zeros(TABLE_ROWS, TABLE_WIDTH + 1)})
        after = rank.sparse.targets
        assert after["a"] is before["a"]
        assert after["b"] is not before["b"]

    on_training_ranks(2, act, names="ab")


# ── probes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.lengthy
@pytest.mark.parametrize(("kind", "streams"), [(TransportKind.GLOO, None), (TransportKind.GLOO, 3), (None, None)])
def test_all_ranks_measure_the_same_pace(kind: TransportKind | None, streams: int | None) -> None:
    def act(control: ControlPlane) -> tuple[CollectiveCosts, int, int]:
        lanes = SparseLanes(control, timeout_s=20.0, kind=kind, streams=streams or 4)
        pace = measure(control, lanes, streams=streams)
        lanes.close()
        control.reclaim()
        return pace, lanes.exchange_streams, lanes.reduce_streams

    (found, other) = on_planes(2, act)
    assert found == other
    pace, *counts = found
    assert pace.exchange_bytes_per_s > 1e6
    assert pace.reduce_bytes_per_s > 1e6
    assert pace.add_bytes_per_s > 1e6
    if streams:
        assert counts == [streams] * 2
    if kind is None:
        assert counts == [1, 1]  # shared memory


def test_another_number_of_streams_is_used_only_where_it_is_clearly_faster() -> None:
    times = {4: Times(0.0, 1.0), 8: Times(0.0, 0.95), 2: Times(0.0, 0.92)}
    assert fastest(times, usual=4) == 4
    assert fastest({**times, 1: Times(0.0, 0.8)}, usual=4) == 1
    assert fastest({3: Times(0.0, 1.0)}, usual=4) == 3  # all that may be used


def test_the_streams_in_use_are_measured_however_slow_the_network_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUDGET_S", 0.0)

    def act(control: ControlPlane) -> tuple[int, int]:
        lanes = SparseLanes(control, timeout_s=20.0, kind=TransportKind.GLOO, streams=4)
        measure(control, lanes, streams=None)
        lanes.close()
        control.reclaim()
        return lanes.exchange_streams, lanes.reduce_streams

    assert on_planes(2, act) == [(4, 4)] * 2


# ── what earlier jobs have kept ──────────────────────────────────────────────────────────────────────────────────────

HOT = SparsePlan(path=SparsePath.HOT_COLD, hot_rows=(0, 1, 2), cold=SparsePath.OWNER)


def counts(n: int = 40, *, shift: int = 0) -> TouchCounts:
    """Rows that two ranks look up, low ones more often."""
    found, random = TouchCounts(), np.random.default_rng(1)
    for _ in range(8):
        by_rank = [np.unique((random.random(n) ** 3 * TABLE_ROWS).astype(np.int64) + shift) for _ in range(2)]
        found.add(by_rank, len(np.unique(np.concatenate(by_rank))))
    return found


def counts_by_turns(popular: int) -> TouchCounts:
    """Return counts of frequent rows, and of 40 further rows in turn, each accessed by one rank."""
    found = TouchCounts()
    for iteration in range(8):
        others = popular + (np.arange(40 - popular) + iteration * (40 - popular)) % (TABLE_ROWS - popular)
        rows = np.sort(np.concatenate([np.arange(popular), others]))
        found.add([rows[::2], rows[1::2]], 40)
    return found


def stored(plan: SparsePlan, learned: TouchCounts) -> RowsRecord:
    return RowsRecord(
        key=RowsKey(topology="", ranks=2, n_rows=TABLE_ROWS, row_bytes=12, dtype="float32"),
        name="table",
        skew=skew_of(learned),
        path=plan.path,
        cold=plan.cold,
        block_rows=plan.block_rows,
        n_hot=len(plan.hot_rows),
        span_s=0.1,
        created_s=time.time(),
    )


def recalled(memory: SettingsMemory, learned: TouchCounts) -> SparsePlan | None:
    key = stored(GATHER, learned).key
    return memory.recall(RowsRecord, key, ("table", skew_of(learned)), lambda record: plan_of(record, learned))


def test_a_plan_is_recalled_with_the_hot_rows_of_this_job(tmp_path: Path) -> None:
    memory, here = SettingsMemory(str(tmp_path / "registry.db")), counts(shift=5)
    assert memory.keep(stored(HOT, counts()))
    plan = recalled(memory, here)
    assert plan is not None
    assert (plan.path, plan.cold) == (SparsePath.HOT_COLD, SparsePath.OWNER)
    assert set(plan.hot_rows) == set(here.ranked()[:3].tolist())


def test_rows_with_another_curve_start_anew(tmp_path: Path) -> None:
    memory = SettingsMemory(str(tmp_path / "registry.db"))
    even, popular = counts_by_turns(0), counts_by_turns(20)
    assert (even.touched, even.union) == (popular.touched, popular.union) == (40, 40)
    assert memory.keep(stored(GATHER, even))
    assert (recalled(memory, even), recalled(memory, popular)) == (GATHER, None)


TOLD = re.compile(r"(even|popular): kept after (\d+), (probed|not probed), (\w+)")


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_second_training_starts_from_the_first_ones_way_and_another_skew_is_tried_anew(
    run_ranks: RunRanks, tmp_path: Path, ranks: int
) -> None:
    registry, skews = tmp_path / "registry.db", ["even", "even", "popular", "popular", "even"]
    env = {"SIRTAKI_REGISTRY": str(registry), "SIRTAKI_LOG_LEVEL": "info"}
    job = run_ranks("sparse_memory.py", ranks, *skews, env=env, timeout_s=180)
    told = TOLD.findall(job.stdout)
    logs = re.split(r"trained: \w+", job.stderr)
    assert [skew for skew, *_ in told] == skews
    for first, second in ((0, 1), (2, 3)):
        assert told[first][2] == "probed"
        assert "are skewed like those" not in logs[first]
        assert f"are skewed like those to weight in an earlier job, which used {told[first][3]}" in logs[second]
        if "is clearly faster than" in logs[second]:  # trials are short, and the machine may be busy
            assert told[second][2] == "probed"
        else:
            # In the first iteration gradients travel dense; it is found out then which are sparse.
            assert told[second][2] == "not probed"
            assert int(told[second][1]) - LEARNING_ITERATIONS in recalled
    assert "are skewed like those to weight" in logs[4]
    ways = open_store(str(registry)).all(RowsRecord)
    assert {way.skew.covered(ranks * 150) > 0.45 for way in ways} == {False, True}
