"""What the comparison of simulator and measurement draws, and how it judges; nothing is measured here."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from bench.lib.harness import Report
from bench.reality import ROUTE, STREAMS, grid_settings, judge, random_settings
from sirtaki.autotune.knobs import KIB, Knobs
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.comm.plan import GradientLayout
from sirtaki.measures import LinkModel

LAYOUT = GradientLayout(sizes=(100_000,) * 20)
MODEL = PlanningModel(
    layout=LAYOUT,
    profile=Profile.from_durations([1e-3] * 20),
    links={ROUTE: LinkModel(alpha_s=1e-3, throughput=(8e6, 16e6, 24e6, 31e6))},
)


def test_random_plans_fit_the_layout_and_every_second_one_has_cuts_of_its_own():
    settings = random_settings(LAYOUT, 12, np.random.default_rng(3))
    for number, knobs in enumerate(settings):
        plan = knobs.to_plan(LAYOUT)  # checks that it covers every element once
        assert (knobs.cuts is not None) == bool(number % 2)
        assert knobs.streams in STREAMS
        assert 64 * KIB <= knobs.unit_bytes <= LAYOUT.total_bytes
        assert plan.streams == knobs.streams
    assert len(set(settings)) == len(settings)


def test_the_same_seed_draws_the_same_plans_on_every_rank():
    first, second = (random_settings(LAYOUT, 6, np.random.default_rng(1)) for _ in range(2))
    assert first == second
    assert random_settings(LAYOUT, 6, np.random.default_rng(2)) != first


def test_the_grid_has_every_unit_size_that_cuts_the_layout_with_every_number_of_streams():
    grid = grid_settings(LAYOUT)
    assert len(set(grid)) == len(grid)
    assert all(knobs.unit_bytes <= LAYOUT.total_bytes for knobs in grid)
    assert all(low.unit_bytes <= high.unit_bytes for low, high in pairwise(grid))


def result_of(*, off: float, winner: float) -> dict[str, Any]:
    """Measurements that the simulator misses by `off`, and a winner that takes `winner` times as long as the best."""
    simulator = MODEL.simulator(ROUTE)

    def spans_s(settings: list[Knobs], factor: float) -> list[list[float]]:
        return [[simulator.run_knobs(knobs).span_s * factor] * 3 for knobs in settings]

    plans, grid = random_settings(LAYOUT, 4, np.random.default_rng(0)), grid_settings(LAYOUT)
    best = min(grid, key=lambda knobs: simulator.run_knobs(knobs).span_s)
    return {
        "model": MODEL.to_json(),
        "probes": [],
        "plans": [knobs.to_json() for knobs in plans],
        "plan_spans_s": spans_s(plans, 1 / (1 + off)),
        "grid": [knobs.to_json() for knobs in grid],
        "grid_spans_s": spans_s(grid, 1.0),
        "field": [best.to_json(), best.to_json()],
        "field_spans_s": [*spans_s([best], winner), *spans_s([best], 1.0)],
        "warmup_s": 1.0,
        "warmup_steps": 100,
    }


@pytest.mark.parametrize(("off", "winner", "met"), [(0.04, 1.04, (True, True)), (-0.06, 1.06, (False, False))])
def test_the_bars_are_the_mean_error_and_the_winners_loss(off, winner, met):
    report = Report(name="reality")
    judge(report, result_of(off=off, winner=winner))
    error, loss = report.bars
    assert error.value == pytest.approx(abs(off))
    assert loss.value == pytest.approx(winner)
    assert (error.met, loss.met) == met
    assert [row["error"] for row in report.rows if row["kind"] == "random plan"] == pytest.approx([off] * 4)
