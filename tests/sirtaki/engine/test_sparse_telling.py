"""How sparse gradients travel is told when it is decided, to all ranks alike, and written down by one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.meshes import on_planes

from sirtaki.autotune.sparse import LEARNING_ITERATIONS, LEAST_WATCHED, N_CANDIDATES, ROUNDS, Pace, SparseSummary
from sirtaki.comm.control.failure import WAIT_SLICE_S
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.sparse.plan import SparsePath
from sirtaki.engine import sparse_carrier
from sirtaki.engine.sparse_carrier import SparseCarrier
from sirtaki.settings import REGISTRY_OFF, Settings

ROWS, WIDTH, LOOKED_UP = 40, 3, 12
UNTIL_KEPT = LEARNING_ITERATIONS + ROUNDS * N_CANDIDATES


@pytest.fixture(autouse=True)
def _several_ways_promise_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does: probes on a busy one may leave a single way, which is not tried."""
    pace = Pace(exchange_s=1e-4, exchange_bytes_per_s=1e9, reduce_s=1e-4, reduce_bytes_per_s=1e9, add_bytes_per_s=1e9)
    monkeypatch.setattr(sparse_carrier, "measure", lambda *_, **__: pace)


def iterate(carrier: SparseCarrier, control: ControlPlane, n: int, *, looked_up: int = LOOKED_UP) -> None:
    for _ in range(n):
        places = torch.arange(looked_up) % 6 + 2 * control.rank  # each several times
        gradient = torch.sparse_coo_tensor(
            places[None], torch.ones(looked_up, WIDTH), (ROWS, WIDTH), check_invariants=True
        )
        work = carrier.start("table", gradient)
        while not work.wait(WAIT_SLICE_S):
            carrier.check()
        carrier.end_iteration({"table": work})


def summaries(iterations: int, **settings: Any) -> list[list[SparseSummary]]:
    def run(control: ControlPlane) -> list[SparseSummary]:
        carrier = SparseCarrier(control, Settings(**{"registry": REGISTRY_OFF, **settings}))
        carrier.watch({"table": torch.zeros(ROWS, WIDTH)})
        iterate(carrier, control, iterations)
        carrier.close()
        control.reclaim()
        return carrier.summaries

    return on_planes(2, run)


def test_what_was_tried_is_told_to_all_ranks_and_written_down_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (found,), same = summaries(UNTIL_KEPT, trial_log=str(log))
    assert same == [found]
    assert (found.n_rows, found.width, found.looked_up, found.touched, found.union) == (ROWS, WIDTH, 12.0, 12.0, 8.0)
    assert found.horovod_bytes == 12 * (3 * 4 + 8)
    assert len(found.ways) > 1
    assert all(way.measured_s is not None and way.measured_s > 0.0 for way in found.ways)
    (line,) = map(json.loads, log.read_text().splitlines())
    assert line["event"] == "sparse"
    assert SparseSummary.from_json(line) == found


def test_before_it_is_decided_nothing_is_told() -> None:
    assert summaries(LEARNING_ITERATIONS) == [[], []]


@pytest.mark.parametrize("path", [path for path in SparsePath if path is not SparsePath.HOT_COLD])
def test_a_fixed_way_is_told_after_a_few_iterations(path: SparsePath) -> None:
    (found,), _ = summaries(LEARNING_ITERATIONS, sparse=path)
    assert (found.plan.split()[0], found.touched, found.union) == (path.value, 12.0, 8.0)
    assert found.ways[0].n_bytes > 0


def test_where_nothing_is_tuned_no_log_is_written(tmp_path: Path) -> None:
    (found,), _ = summaries(LEARNING_ITERATIONS, tune=False, trial_log=str(tmp_path / "log"))
    assert found.plan == "gather"
    assert not (tmp_path / "log").exists()


def test_what_is_decided_anew_is_told_anew() -> None:
    def run(control: ControlPlane) -> list[tuple[float, float]]:
        carrier = SparseCarrier(control, Settings(registry=REGISTRY_OFF))
        carrier.watch({"table": torch.zeros(ROWS, WIDTH)})
        iterate(carrier, control, UNTIL_KEPT)
        before = carrier.summaries
        iterate(carrier, control, 2 * LEAST_WATCHED + UNTIL_KEPT, looked_up=3)
        carrier.close()
        control.reclaim()
        return [(summary.looked_up, summary.touched) for summary in (*before, *carrier.summaries)]

    assert on_planes(2, run) == [[(12.0, 12.0), (3.0, 6.0)]] * 2
