"""The carrier: sums are right on all ranks, plans follow from what all of them see, and are told, kept and recalled."""

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RunRanks
from fakes.meshes import on_planes

from sirtaki.autotune.sparse import (
    CHECKS,
    LEARNING_ITERATIONS,
    LEAST_WATCHED,
    N_CANDIDATES,
    ROUNDS,
    Pace,
    SparseChoice,
    SparseSummary,
    Stage,
    TouchCounts,
)
from sirtaki.comm.control.failure import WAIT_SLICE_S
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.plan import TransportKind
from sirtaki.comm.sparse.lanes import SparseLanes
from sirtaki.comm.sparse.plan import GATHER, SparsePath, SparsePlan
from sirtaki.comm.sparse.worker import RowFormat
from sirtaki.engine import sparse_gradients as module
from sirtaki.engine.sparse_gradients import SparseCarrier, SparseMemory, Times, fastest, measure, plan_of, skew_of
from sirtaki.registry.entry import RowsKey, RowWay
from sirtaki.registry.safe_store import open_store
from sirtaki.settings import REGISTRY_OFF, Settings

ROWS, WIDTH, LOOKED_UP = 200, 5, 60
ENOUGH = LEARNING_ITERATIONS + 4
UNTIL_KEPT = LEARNING_ITERATIONS + ROUNDS * N_CANDIDATES
HOT_COLD = SparsePath.HOT_COLD


def rows(iteration: int, rank: int, dtype: torch.dtype, looked_up: int = LOOKED_UP) -> torch.Tensor:
    """Low rows more often, some several times."""
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    places = (torch.rand(looked_up, generator=generator) ** 3 * ROWS).long()
    values = torch.randn(looked_up, WIDTH, generator=generator, dtype=torch.float64)
    return torch.sparse_coo_tensor(places[None], values.to(dtype), (ROWS, WIDTH), check_invariants=True)


class Ranks:
    """One rank that trains parameters, and compares each sum with that of float64 and of the other ranks."""

    def __init__(
        self, control: ControlPlane, settings: Settings, dtype: torch.dtype = torch.float32, names: str = "a"
    ) -> None:
        self.control, self.dtype = control, dtype
        self.carrier = SparseCarrier(control, settings)
        self.carrier.watch({name: torch.zeros(ROWS, WIDTH, dtype=dtype) for name in names})
        self.iteration = 0

    def iterate(self, count: int = 1, looked_up: int = LOOKED_UP) -> None:
        for _ in range(count):
            self._iterate(looked_up)

    def _iterate(self, looked_up: int) -> None:
        given = [rows(self.iteration, rank, self.dtype, looked_up) for rank in range(self.control.size)]
        works = {name: self.carrier.start(name, given[self.control.rank]) for name in list(self.carrier.choices)[::-1]}
        wanted = sum(each.double().to_dense() for each in given)
        touched = torch.unique(torch.cat([each._indices()[0] for each in given]))
        for work in works.values():
            while not work.wait(WAIT_SLICE_S):
                self.carrier.check()
            total, found = work.reduced.rows, torch.zeros(ROWS, WIDTH, dtype=self.dtype)
            found[total.indices] = total.values
            tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.2}[self.dtype]
            torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
            assert torch.equal(total.indices, touched)
            bits = total.values.contiguous().view(torch.uint8).numpy().tobytes()
            assert len(set(self.control.all_gather(bits))) == 1, "ranks hold different bits"
        self.carrier.end_iteration(works)
        self.iteration += 1

    @property
    def plan(self) -> SparsePlan:
        return self.carrier.plans["a"]

    @property
    def stage(self) -> Stage:
        return self.carrier.choices["a"].stage


def on_ranks(
    size: int,
    act: Callable[[Ranks], Any],
    *,
    dtype: torch.dtype = torch.float32,
    names: str = "a",
    **settings: Any,
) -> list[Any]:
    def run(control: ControlPlane) -> Any:
        of_rank = {name: value[control.rank] if isinstance(value, list) else value for name, value in settings.items()}
        ranks = Ranks(control, Settings(**{"registry": REGISTRY_OFF, **of_rank}), dtype, names)
        try:
            return act(ranks)
        finally:
            ranks.carrier.close()
            ranks.carrier.close()
            if control.failures.error is None:
                control.reclaim()

    return on_planes(size, run)


@pytest.fixture
def _several_ways_promise_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does: probes on a busy one may leave a single way, which is not tried."""
    pace = Pace(exchange_s=1e-4, exchange_bytes_per_s=1e9, reduce_s=1e-4, reduce_bytes_per_s=1e9, add_bytes_per_s=1e9)
    monkeypatch.setattr(module, "measure", lambda *_, **__: pace)


@pytest.mark.usefixtures("_several_ways_promise_something")
def test_all_ranks_learn_try_and_keep_the_same_and_one_writes_it_down(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def act(ranks: Ranks) -> tuple[list[dict[str, SparsePlan]], list[SparseSummary]]:
        plans = []
        for _ in range(UNTIL_KEPT):
            assert not ranks.carrier.summaries or ranks.iteration > LEARNING_ITERATIONS
            plans.append(ranks.carrier.plans)
            ranks.iterate()
        assert all(choice.stage is Stage.KEEP for choice in ranks.carrier.choices.values())
        return plans, ranks.carrier.summaries

    (plans, found), *others = on_ranks(3, act, names="ab", trial_log=str(log))
    assert others == [(plans, found)] * 2
    assert all(len({each[name].path for each in plans}) >= N_CANDIDATES - 1 for name in "ab")
    assert [one.name for one in found] == ["b", "a"]  # as their gradients come
    for one in found:
        assert (one.n_rows, one.width, one.looked_up) == (ROWS, WIDTH, float(LOOKED_UP))
        assert one.horovod_bytes == 2 * LOOKED_UP * (WIDTH * 4 + 8)
        assert len(one.ways) > 1
        assert all(way.measured_s is not None and way.measured_s > 0.0 for way in one.ways)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["sparse"] * 2
    assert [SparseSummary.from_json(line) for line in lines] == found


@pytest.mark.usefixtures("_several_ways_promise_something")
def test_what_is_decided_anew_is_told_anew() -> None:
    def act(ranks: Ranks) -> list[float]:
        ranks.iterate(UNTIL_KEPT)
        before = ranks.carrier.summaries
        ranks.iterate(2 * LEAST_WATCHED + UNTIL_KEPT, looked_up=5)
        return [summary.looked_up for summary in (*before, *ranks.carrier.summaries)]

    assert on_ranks(2, act) == [[float(LOOKED_UP), 5.0]] * 2


@pytest.mark.parametrize("path", [path for path in SparsePath if path is not HOT_COLD])
def test_what_is_fixed_on_rank_0_holds_for_all_and_is_told_after_a_few_iterations(path: SparsePath) -> None:
    def act(ranks: Ranks) -> tuple[SparsePlan, str, bool]:
        ranks.iterate(LEARNING_ITERATIONS)
        (found,) = ranks.carrier.summaries
        return ranks.plan, found.plan.split()[0], found.ways[0].n_bytes > 0

    other = SparsePath.DENSE if path is SparsePath.OWNER else SparsePath.OWNER
    assert on_ranks(2, act, sparse=[path, other]) == [(SparsePlan(path=path), path.value, True)] * 2


@pytest.mark.parametrize("settings", [{"tune": False}, {"warmup_iterations": 0}])
def test_where_nothing_is_tuned_rows_are_gathered_and_nothing_is_written(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    def act(ranks: Ranks) -> tuple[SparsePlan, str]:
        ranks.iterate(LEARNING_ITERATIONS + 3)
        return ranks.plan, ranks.carrier.summaries[0].plan

    assert on_ranks(2, act, trial_log=str(tmp_path / "log"), **settings) == [(GATHER, "gather")] * 2
    assert not (tmp_path / "log").exists()


def test_one_rank_needs_no_lanes_and_parameters_that_change_are_learned_anew() -> None:
    def act(ranks: Ranks) -> bool:
        ranks.iterate()
        before = ranks.carrier.choices
        ranks.carrier.watch({"a": torch.zeros(ROWS, WIDTH), "b": torch.zeros(ROWS, WIDTH + 1)})
        after = ranks.carrier.choices
        assert after["a"] is before["a"]
        assert after["b"] is not before["b"]
        return ranks.carrier._means is None

    for size in (1, 2):
        assert on_ranks(size, act, names="ab") == [size == 1] * size


# ── probes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("kind", "streams"), [(TransportKind.GLOO, None), (TransportKind.GLOO, 3), (None, None)])
def test_all_ranks_measure_the_same_pace(kind: TransportKind | None, streams: int | None) -> None:
    def act(control: ControlPlane) -> tuple[Pace, int, int]:
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

MOST = LEARNING_ITERATIONS + 2 * CHECKS + ROUNDS * N_CANDIDATES + 1
FORM = RowFormat(ROWS, WIDTH, torch.float32)
HOT = SparsePlan(path=SparsePath.HOT_COLD, hot_rows=(0, 1, 2), cold=SparsePath.OWNER)


def counts(n: int = 40, *, shift: int = 0) -> TouchCounts:
    """Rows that two ranks look up, low ones more often."""
    found, random = TouchCounts(), np.random.default_rng(1)
    for _ in range(8):
        by_rank = [np.unique((random.random(n) ** 3 * ROWS).astype(np.int64) + shift) for _ in range(2)]
        found.note(by_rank, len(np.unique(np.concatenate(by_rank))))
    return found


def counts_by_turns(popular: int) -> TouchCounts:
    """So many rows are touched in each iteration and others in turn: 40 by one rank each, whatever is popular."""
    found = TouchCounts()
    for iteration in range(8):
        others = popular + (np.arange(40 - popular) + iteration * (40 - popular)) % (ROWS - popular)
        rows = np.sort(np.concatenate([np.arange(popular), others]))
        found.note([rows[::2], rows[1::2]], 40)
    return found


def kept(plan: SparsePlan, learned: TouchCounts) -> SparseChoice:
    choice = SparseChoice(fixed=None, tries=True)
    choice.learned, choice.plan, choice.measured_s = learned, plan, [0.1]
    return choice


def recalled(
    path: Path | str,
    learned: TouchCounts,
    *,
    keeps: SparsePlan | None = None,
    form: RowFormat = FORM,
) -> list[dict[str, SparsePlan]]:
    def run(control: ControlPlane) -> dict[str, SparsePlan]:
        memory = SparseMemory(control, Settings(registry=str(path)))
        found = memory.recall({"table": (form, learned)})
        if keeps is not None:
            memory.keep("table", form, kept(keeps, learned))
        memory.close()
        control.reclaim()
        return found

    return on_planes(2, run)


def test_what_was_kept_is_told_to_all_ranks_with_the_hot_rows_of_this_job(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    assert recalled(path, counts(), keeps=HOT) == [{}, {}]
    here = counts(shift=5)
    (first, second) = recalled(path, here)
    assert first == second
    assert (first["table"].path, first["table"].cold) == (SparsePath.HOT_COLD, SparsePath.OWNER)
    assert set(first["table"].hot_rows) == set(here.ranked()[:3].tolist())


def test_rows_of_another_shape_or_curve_start_anew(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    even, popular = counts_by_turns(0), counts_by_turns(20)
    assert (even.touched, even.union) == (popular.touched, popular.union) == (40, 40)
    recalled(path, even, keeps=GATHER)
    assert recalled(path, popular, keeps=HOT) == [{}, {}]
    assert recalled(path, even) == [{"table": GATHER}] * 2
    assert recalled(path, even, form=RowFormat(ROWS + 1, WIDTH, torch.float32)) == [{}, {}]
    assert recalled(path, popular)[0]["table"].path is SparsePath.HOT_COLD


def test_where_the_registry_is_off_or_broken_nothing_is_recalled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("off", tmp_path):  # a folder is no registry
        assert recalled(path, counts(), keeps=HOT) == [{}, {}]
        assert recalled(path, counts()) == [{}, {}]
    assert "training goes on without the registry" in caplog.text


@pytest.mark.parametrize("path", ["by air", "hot_cold"])
def test_a_way_that_is_none_here_is_not_taken(path: str) -> None:
    key = RowsKey(topology="", ranks=2, n_rows=ROWS, row_bytes=12, dtype="float32")
    way = RowWay(
        key=key,
        name="t",
        skew=skew_of(counts()),
        path=path,
        cold="gather",
        block_rows=1,
        n_hot=0,
        span_s=0.0,
        created_s=0.0,
    )
    assert plan_of(way, counts()) is None


def iterations_until_kept(path: Path, *, looked_up: int = LOOKED_UP) -> int:
    def act(ranks: Ranks) -> int:
        while ranks.stage is not Stage.KEEP and ranks.iteration < MOST:
            ranks.iterate(looked_up=looked_up)
        assert len(ranks.carrier.summaries) == 1
        return ranks.iteration

    (found,) = set(on_ranks(2, act, registry=str(path)))
    return int(found)


@pytest.mark.slow
def test_a_second_job_starts_from_what_was_kept_and_one_with_another_skew_tries_ways(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    tried = iterations_until_kept(path)
    with closing(open_store(str(path))) as store:
        (way,) = store.ways(RowWay)
    assert (way.name, way.key.n_rows, way.key.row_bytes) == ("a", ROWS, 4 * WIDTH)
    assert way.span_s > 0.0
    again = iterations_until_kept(path)
    assert again < tried if way.path == "gather" else again != tried
    assert iterations_until_kept(path, looked_up=3 * LOOKED_UP) > LEARNING_ITERATIONS


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
        assert "are touched like those" not in logs[first]
        assert f"are touched like those of weight in an earlier job, which went by {told[first][3]}" in logs[second]
        recalled = 0 if told[first][3] == "gather" else 2 * CHECKS
        if "is clearly faster than" in logs[second]:  # trials are short, and the machine may be busy
            assert told[second][2] == "probed"
        else:
            # In the first iteration gradients travel dense; it is found out then which are sparse.
            assert (int(told[second][1]), told[second][2]) == (LEARNING_ITERATIONS + recalled, "not probed")
            assert int(told[first][1]) >= int(told[second][1])
    assert "are touched like those of weight" in logs[4]
    ways = open_store(str(registry)).ways(RowWay)
    assert {way.skew.covered(ranks * 150) > 0.45 for way in ways} == {False, True}
