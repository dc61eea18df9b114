"""The carrier: plans follow from what all ranks see, change between iterations, and hold for all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes.meshes import on_planes

from sirtaki.autotune.sparse import LEARNING_ITERATIONS, N_CANDIDATES, ROUNDS, Stage
from sirtaki.comm.control.failure import WAIT_SLICE_S
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.sparse.plan import SparsePath, SparsePlan
from sirtaki.engine.sparse_carrier import SparseCarrier
from sirtaki.settings import REGISTRY_OFF, Settings

ROWS, WIDTH = 40, 3


def rows(iteration: int, rank: int, salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * iteration + 10 * salt + rank)
    places = (torch.rand(12, generator=generator) ** 2 * ROWS).long()
    values = torch.randn(12, WIDTH, generator=generator, dtype=torch.float64)
    return torch.sparse_coo_tensor(places[None], values, (ROWS, WIDTH), check_invariants=True)


def iterate(carrier: SparseCarrier, control: ControlPlane, params: dict[str, torch.Tensor], iteration: int) -> None:
    works = {name: carrier.start(name, rows(iteration, control.rank, salt)) for salt, name in enumerate(params)}
    for salt, work in enumerate(works.values()):
        while not work.wait(WAIT_SLICE_S):
            carrier.check()
        wanted = sum(rows(iteration, rank, salt).to_dense() for rank in range(control.size))
        found = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
        found[work.reduced.rows.indices] = work.reduced.rows.values
        torch.testing.assert_close(found, wanted)
    carrier.end_iteration(works)


def on_carriers(
    size: int, act: Callable[[SparseCarrier, ControlPlane, dict[str, torch.Tensor]], Any], **settings: Any
) -> list[Any]:
    def run(control: ControlPlane) -> Any:
        params = {name: torch.zeros(ROWS, WIDTH, dtype=torch.float64) for name in "ab"}
        carrier = SparseCarrier(control, Settings(**{"registry": REGISTRY_OFF, **settings}))
        carrier.watch(params)
        try:
            return act(carrier, control, params)
        finally:
            carrier.close()
            carrier.close()
            control.reclaim()

    return on_planes(size, run)


def test_all_ranks_learn_try_and_keep_the_same() -> None:
    def act(
        carrier: SparseCarrier, control: ControlPlane, params: dict[str, torch.Tensor]
    ) -> list[dict[str, SparsePlan]]:
        plans = []
        for iteration in range(LEARNING_ITERATIONS + ROUNDS * N_CANDIDATES + 3):
            plans.append(carrier.plans)
            iterate(carrier, control, params, iteration)
        assert all(choice.stage is Stage.KEEP for choice in carrier._choices.values())
        return plans

    found = on_carriers(3, act)
    assert found[0] == found[1] == found[2]
    for name in "ab":
        assert len({plans[name].path for plans in found[0]}) >= N_CANDIDATES - 1


def test_what_is_fixed_on_rank_0_holds_for_all() -> None:
    def run(control: ControlPlane) -> dict[str, SparsePlan]:
        carrier = SparseCarrier(
            control, Settings(registry=REGISTRY_OFF, sparse=SparsePath.OWNER if control.rank == 0 else SparsePath.DENSE)
        )
        params = {"a": torch.zeros(ROWS, WIDTH, dtype=torch.float64)}
        carrier.watch(params)
        iterate(carrier, control, params, 0)
        carrier.close()
        control.reclaim()
        return carrier.plans

    assert on_planes(2, run) == [{"a": SparsePlan(path=SparsePath.OWNER)}] * 2


@pytest.mark.parametrize("settings", [{"tune": False}, {"warmup_iterations": 0}])
def test_where_nothing_is_tuned_rows_are_gathered(settings: dict[str, Any]) -> None:
    def act(carrier: SparseCarrier, control: ControlPlane, params: dict[str, torch.Tensor]) -> set[SparsePath]:
        paths = set()
        for iteration in range(LEARNING_ITERATIONS + 3):
            paths |= {plan.path for plan in carrier.plans.values()}
            iterate(carrier, control, params, iteration)
        return paths

    assert on_carriers(2, act, **settings) == [{SparsePath.GATHER}] * 2


def test_one_rank_needs_no_lanes() -> None:
    def act(carrier: SparseCarrier, control: ControlPlane, params: dict[str, torch.Tensor]) -> None:
        iterate(carrier, control, params, 0)
        assert carrier._means is None

    on_carriers(1, act)


def test_parameters_that_change_are_learned_anew_and_others_go_on() -> None:
    def act(carrier: SparseCarrier, control: ControlPlane, params: dict[str, torch.Tensor]) -> None:
        iterate(carrier, control, params, 0)
        before = dict(carrier._choices)
        carrier.watch({"a": params["a"], "b": params["b"].float()})
        assert carrier._choices["a"] is before["a"]
        assert carrier._choices["b"] is not before["b"]

    on_carriers(2, act)
