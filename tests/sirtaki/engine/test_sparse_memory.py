"""A later job whose rows are touched alike starts from what an earlier one has kept; another one does not."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.meshes import on_planes

from sirtaki.autotune.sparse import CHECKS, LEARNING_ITERATIONS, N_CANDIDATES, ROUNDS, SparseChoice, Stage, TouchCounts
from sirtaki.comm.control.failure import WAIT_SLICE_S
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.sparse.plan import GATHER, SparsePath, SparsePlan
from sirtaki.comm.sparse.worker import RowFormat
from sirtaki.engine.sparse_carrier import Learned, SparseCarrier, SparseMemory, plan_of, skew_of
from sirtaki.registry.entry import RowsKey, RowWay
from sirtaki.registry.safe_store import open_store
from sirtaki.settings import Settings

ROWS, WIDTH = 200, 3
MOST = LEARNING_ITERATIONS + 2 * CHECKS + ROUNDS * N_CANDIDATES + 1
FORM = RowFormat(ROWS, WIDTH, torch.float32)
HOT = SparsePlan(path=SparsePath.HOT_COLD, hot_rows=(0, 1, 2), cold=SparsePath.OWNER)


def counts(n: int = 40, *, shift: int = 0) -> TouchCounts:
    """Rows by two ranks, low ones more often."""
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
    aggregator: bool = False,
) -> list[dict[str, SparsePlan]]:
    def run(control: ControlPlane) -> dict[str, SparsePlan]:
        memory = SparseMemory(control, Settings(registry=str(path)))
        found = memory.recall({"table": Learned(form, learned)}, aggregator=aggregator)
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


def test_rows_that_are_touched_otherwise_and_other_shapes_start_anew(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    recalled(path, counts(), keeps=HOT)
    assert recalled(path, counts(80)) == [{}, {}]
    assert recalled(path, counts(), form=RowFormat(ROWS + 1, WIDTH, torch.float32)) == [{}, {}]


def test_as_many_rows_that_are_touched_by_another_curve_start_anew(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    even, popular = counts_by_turns(0), counts_by_turns(20)
    assert (even.touched, even.union) == (popular.touched, popular.union) == (40, 40)
    recalled(path, even, keeps=GATHER)
    assert recalled(path, popular, keeps=HOT) == [{}, {}]
    assert recalled(path, even) == [{"table": GATHER}] * 2
    assert recalled(path, popular)[0]["table"].path is SparsePath.HOT_COLD


def test_what_was_tried_with_an_aggregator_is_recalled_where_there_is_one(tmp_path: Path) -> None:
    path, aggregated = tmp_path / "registry.db", replace(HOT, aggregated=True)
    recalled(path, counts(), keeps=aggregated, aggregator=True)
    assert recalled(path, counts()) == [{}, {}]
    assert recalled(path, counts(), aggregator=True)[0]["table"].aggregated
    doubles = RowFormat(ROWS, WIDTH, torch.float64)  # which an aggregator does not add
    recalled(path, counts(), keeps=HOT, form=doubles, aggregator=True)
    assert recalled(path, counts(), form=doubles)[0]["table"].path is SparsePath.HOT_COLD


def test_where_the_registry_is_off_or_broken_nothing_is_recalled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("off", tmp_path):  # a folder is no registry
        assert recalled(path, counts(), keeps=HOT) == [{}, {}]
        assert recalled(path, counts()) == [{}, {}]
    assert "training goes on without the registry" in caplog.text


@pytest.mark.parametrize(("path", "n_hot"), [("by air", 0), ("hot_cold", 0)])
def test_a_way_that_is_none_here_is_not_taken(path: str, n_hot: int) -> None:
    key = RowsKey(topology="", ranks=2, n_rows=ROWS, row_bytes=12, dtype="float32")
    way = RowWay(
        key=key,
        name="t",
        skew=skew_of(counts()),
        path=path,
        cold="gather",
        block_rows=1,
        n_hot=n_hot,
        span_s=0.0,
        created_s=0.0,
    )
    assert plan_of(way, counts()) is None


def iterate(carrier: SparseCarrier, rank: int, n: int, looked_up: int) -> int:
    """Trains until the way is kept; iterations that it took."""
    for iteration in range(n):
        places = torch.from_numpy(drawn(iteration, rank, looked_up))
        values = torch.ones(looked_up, WIDTH)
        gradient = torch.sparse_coo_tensor(places[None], values, (ROWS, WIDTH), check_invariants=True)
        work = carrier.start("table", gradient)
        while not work.wait(WAIT_SLICE_S):
            carrier.check()
        carrier.end_iteration({"table": work})
        if carrier._choices["table"].stage is Stage.KEEP:
            return iteration + 1
    return n


def iterations_until_kept(path: Path, *, looked_up: int = 40) -> set[int]:
    def run(control: ControlPlane) -> int:
        carrier = SparseCarrier(control, Settings(registry=str(path)))
        carrier.watch({"table": torch.zeros(ROWS, WIDTH)})
        found = iterate(carrier, control.rank, MOST, looked_up)
        assert len(carrier.summaries) == 1
        carrier.close()
        control.reclaim()
        return found

    return set(on_planes(2, run))


def drawn(iteration: int, rank: int, n: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Rows that a rank looks up, low ones more often."""
    return (np.random.default_rng([iteration, rank]).random(n) ** 3 * ROWS).astype(np.int64)


@pytest.mark.slow
def test_a_second_job_is_through_when_it_has_learned_and_one_with_another_skew_tries_ways(tmp_path: Path) -> None:
    path, learned = tmp_path / "registry.db", TouchCounts()
    for iteration in range(LEARNING_ITERATIONS):
        by_rank = [np.unique(drawn(iteration, rank, 40)) for rank in range(2)]
        learned.note(by_rank, len(np.unique(np.concatenate(by_rank))))
    recalled(path, learned, keeps=GATHER)
    assert iterations_until_kept(path, looked_up=40) == {LEARNING_ITERATIONS}
    (other,) = iterations_until_kept(path, looked_up=120)
    assert other > LEARNING_ITERATIONS


@pytest.mark.slow
def test_what_a_job_has_tried_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    (tried,) = iterations_until_kept(path)
    with closing(open_store(str(path))) as store:
        (way,) = store.row_ways()
    assert (way.name, way.key.n_rows, way.key.row_bytes) == ("table", ROWS, 4 * WIDTH)
    assert way.span_s > 0.0
    (again,) = iterations_until_kept(path)
    assert again < tried if way.path == "gather" else again != tried
