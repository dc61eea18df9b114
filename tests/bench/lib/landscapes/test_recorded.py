"""A recorded sweep as a landscape."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.landscapes import bars, by_family, summary
from bench.lib.landscapes.contenders import CONTENDERS, SIRTAKI
from bench.lib.landscapes.recorded import Recorded, estimated, recorded, recordings
from bench.sweep import model_rank_correlation
from sirtaki.autotune.knobs import KIB, Cut, Knobs
from sirtaki.comm.plan import TransportKind

SIZES, STREAMS = (64 * KIB, 128 * KIB, 256 * KIB), (1, 2, 4)
PLANNED = Knobs(unit_bytes=64 * KIB, streams=2, transport=TransportKind.GLOO, cuts=(Cut(stop=10), Cut(stop=60000)))


def knobs(size: int, streams: int) -> Knobs:
    return Knobs(unit_bytes=size, streams=streams, transport=TransportKind.GLOO)


@pytest.fixture
def job(tmp_path: Path) -> Recorded:
    rows = [
        {"arm": "", "knobs": knobs(size, streams).to_json(), "spans_s": [span_s, 2 * span_s, span_s / 2]}
        for size in SIZES
        for streams in STREAMS
        for span_s in [1e-6 * size / streams]
    ]
    rows.append({"arm": "planner", "knobs": PLANNED.to_json(), "spans_s": [0.01]})
    data = {
        "job": "small",
        "sizes": [60000],
        "default": knobs(SIZES[0], 1).to_json(),
        "routes": [["gloo", "flat"]],
        "streams": list(STREAMS),
        "narrowed_routes": [["gloo", "flat"]],
        "narrowed_streams": [1, 2],
        "model": None,
        "rows": rows,
    }
    path = tmp_path / "small.json"
    path.write_text(json.dumps(data))
    return recorded(path)


def test_measurements_scatter_as_those_that_were_taken_and_do_not_repeat_themselves(job: Recorded) -> None:
    rng, span_s = np.random.default_rng(0), 1e-6 * SIZES[1] / 2
    drawn = np.log([job.measure_s(knobs(SIZES[1], 2), 0, 0.5, rng) for _ in range(2000)])
    assert len(set(drawn)) == len(drawn)
    assert np.median(drawn) == pytest.approx(np.log(span_s), abs=0.1)
    assert np.std(drawn) == pytest.approx(np.std(np.log([0.5, 1.0, 2.0])), rel=0.1)
    assert job.span_s(knobs(SIZES[1], 2)) == pytest.approx(span_s)


def measured(true_s: Mapping[Knobs, float], noise: float, rounds: int, seed: int) -> dict[Knobs, list[float]]:
    rng = np.random.default_rng(seed)
    return {one: (span_s * np.exp(noise * rng.standard_normal(rounds))).tolist() for one, span_s in true_s.items()}


def valley() -> dict[Knobs, float]:
    """Seconds: smooth, but for one cliff of 30 %."""
    at = {(size, streams): math.log2(size) - 17 + 0.5 * math.log2(streams) for size in SIZES for streams in range(1, 9)}
    return {knobs(*place): math.exp(0.1 * height**2) * (1.3 if place[1] > 6 else 1.0) for place, height in at.items()}


def test_luck_is_taken_out_of_what_was_measured_a_few_times() -> None:
    true_s = valley()
    errors: dict[str, list[float]] = {"raw": [], "estimated": []}
    for seed in range(10):
        spans_s = measured(true_s, 0.2, 5, seed)
        for name, found in (("raw", spans_s), ("estimated", estimated(spans_s))):
            errors[name] += [abs(math.log(np.median(found[one]) / true_s[one])) for one in true_s]
    assert np.mean(errors["estimated"]) < 0.75 * np.mean(errors["raw"])


def test_what_was_measured_well_stays_as_it_is() -> None:
    spans_s = measured(valley(), 0.002, 5, 0)
    found = estimated(spans_s)
    assert all(found[one] == pytest.approx(spans_s[one], rel=1e-3) for one in spans_s)


def test_what_lies_between_counts_as_the_nearest(job: Recorded) -> None:
    assert job.nearest(knobs(SIZES[1] + 5000, 3)) == knobs(SIZES[1], 4)
    assert job.span_s(knobs(SIZES[2] - 5000, 4)) == job.span_s(knobs(SIZES[2], 4))


def test_plans_that_were_not_recorded_count_as_units_of_their_size(job: Recorded) -> None:
    other = replace(PLANNED, cuts=(Cut(stop=11), Cut(stop=60000)))
    assert job.span_s(PLANNED) == 0.01
    assert job.span_s(other) == job.span_s(replace(other, cuts=None))


def test_the_best_is_uniform_and_recorded(job: Recorded) -> None:
    assert job.nearest(job.best) == knobs(SIZES[0], 4)
    assert job.presumed  # there is no memory that ranks share
    assert job.probed(0.04, np.random.default_rng(0))[0].streams == (1, 2)


def test_a_warm_up_runs_on_it(job: Recorded) -> None:
    outcome = CONTENDERS[SIRTAKI](job, 60, 0.04, 0)
    assert outcome["over_default"] <= 1.0 + 1e-9


def test_what_is_kept_of_real_jobs_can_be_read() -> None:
    for path in recordings():
        job = recorded(path)
        assert job.default in job.space
        assert 0.0 < job.span_s(job.best) <= job.span_s(job.default)
    assert sum(path.stat().st_size for path in recordings()) <= 500 * KIB


def row(contender: str, family: str, seed: int, regret: float, *, default: float = 1.5) -> dict[str, object]:
    head = {"contender": contender, "family": family, "seed": seed, "regret": regret, "default_over_best": default}
    return {**head, "found_at": 9, "cost": 1.0, "over_default": 0.9}


def test_contenders_are_compared_on_the_seeds_that_both_have_had() -> None:
    rows = [row(SIRTAKI, "a", seed, 0.01 * (1 + 9 * seed)) for seed in range(2)] + [row("optuna GP", "a", 0, 0.04)]
    assert summary(rows, SIRTAKI)["mean regret"] == pytest.approx(0.055)
    assert by_family(rows, SIRTAKI, "regret", like="optuna GP") == {"a": 0.01}
    found = {bar.claim: bar.value for bar in bars(rows)}
    assert found["mean regret over that of the best other contender (optuna GP)"] == pytest.approx(0.25)
    assert found["regret behind the best contender in the worst family"] == pytest.approx(-0.03)


def test_what_is_asked_where_the_default_is_the_best_and_of_short_warm_ups() -> None:
    rows = [row(SIRTAKI, "a", 0, 0.02), row(SIRTAKI, "idle", 0, 0.008, default=1.0)]
    rows += [row("random", "a", 0, 0.04), row("random", "idle", 0, 0.016, default=1.0)]
    missed = [bar.claim for bar in bars(rows) if not bar.met]
    assert missed == ["regret where the default is the best"]
    assert [(bar.value, bar.limit) for bar in bars(rows, budget=40)] == [(pytest.approx(0.5), 1.0)]


def test_what_planners_predict_is_held_against_what_was_recorded() -> None:
    path = next(path for path in recordings() if path.stem == "cluster-400-100")
    data = json.loads(path.read_text())
    assert model_rank_correlation(data) > 0.9
    upside_down = [{**one, "spans_s": [1.0 / span_s for span_s in one["spans_s"]]} for one in data["rows"]]
    assert model_rank_correlation({**data, "rows": upside_down}) < -0.9
    assert math.isnan(model_rank_correlation({**data, "model": None}))
