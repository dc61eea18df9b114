"""The tuner's benchmarks: what the registry saves where planners are not sure of a model, landscapes, and replays."""

import json
import math
from collections.abc import Mapping

import numpy as np
import pytest

from bench.lib.landscapes import families
from bench.lib.landscapes.contenders import CONTENDERS, SIRTAKI
from bench.lib.landscapes.landscape import Message, Physics, replay
from bench.lib.landscapes.recorded import estimated, recorded, recordings
from bench.registry_transfer import ROUTE, SCENARIOS, Luck, TransferJob, jobs, misjudged, run
from bench.replay import HALF_MAX_INTERVAL, SHIPPED, answerable, misses, widened
from bench.sweep import model_rank_correlation
from sirtaki.autotune.knobs import KIB, Knobs
from sirtaki.comm.plan import TransportKind

JOB = TransferJob(network="resnet50", fabric="10 Gbit/s TCP", ranks=256)
PLAIN = Physics(capacity=lambda n, computing: 100.0, latency_s=lambda size: 1.0)
SIZES = (64 * KIB, 128 * KIB, 256 * KIB)
EVERY_FAMILY = pytest.mark.parametrize(
    "family", [*families.OPEN, *families.HELD_BACK], ids=lambda family: family.__name__
)


def knobs(size: int, streams: int) -> Knobs:
    return Knobs(unit_bytes=size, streams=streams, transport=TransportKind.GLOO)


# ── What the registry saves ────────────────────


def test_planners_get_a_model_that_is_off_by_the_noise() -> None:
    wrong = misjudged(JOB.model, noise=0.1, rng=np.random.default_rng(0))
    truth, believed = np.array(JOB.model.links[ROUTE].throughput), np.array(wrong.links[ROUTE].throughput)
    assert np.all(believed != truth)
    assert np.all(np.abs(np.log(believed / truth)) < 0.5)
    assert wrong.profile != JOB.model.profile
    assert misjudged(JOB.model, noise=0.0, rng=np.random.default_rng(0)).links == JOB.model.links


def test_no_registry_holds_the_job_itself_nor_another_kind_of_similarity() -> None:
    for job in jobs(24):
        for scenario in SCENARIOS:
            assert job not in job.others(scenario)
        assert all((other.network, other.fabric) == (job.network, job.fabric) for other in job.others("size"))
        assert all((other.fabric, other.ranks) == (job.fabric, job.ranks) for other in job.others("sibling"))
        assert len(job.others("size")) == 2


@pytest.mark.lengthy
def test_a_seed_that_is_the_optimum_is_found_by_its_first_measurement() -> None:
    settings = (Knobs(unit_bytes=1 << n, streams=8, transport=ROUTE[0]) for n in range(20, 25))
    best = min(settings, key=JOB.span_s)
    assert JOB.is_close(best)
    outcome = run(JOB, Luck(noise=0.0, seed=0, planners=False), seeds=[best])
    assert outcome.found_at == 5  # three of the default, a discarded and a measured one
    assert outcome.regret < 0.03
    assert 2 <= outcome.tried <= 5


# ── Landscapes of other physics and recorded ones ────────────────────


def test_messages_of_two_streams_share_the_rate_and_their_latencies_overlap() -> None:
    messages = [Message(0.0, 100.0, 0), Message(0.0, 100.0, 1)]
    assert replay(messages, compute_s=0.0, physics=PLAIN)[0] == pytest.approx(3.0)


def test_quality_and_capacity_beside_computation() -> None:
    physics = Physics(
        capacity=lambda n, computing: 10.0 if computing else 100.0,
        latency_s=lambda size: 0.0,
        quality=lambda size: 0.5,
    )
    # 200 bytes of work; 10 of them beside the last second of computation
    assert replay([Message(1.0, 100.0, 0)], compute_s=2.0, physics=physics) == pytest.approx((2 + 1.9, 2))


def test_communication_slows_computation_down() -> None:
    physics = Physics(capacity=lambda n, computing: 50.0, latency_s=lambda size: 0.0, slowdown=lambda n: 1.0 + n)
    # From 1 s on, two seconds of transfer let one second of computation pass; then the other two go on alone.
    assert replay([Message(1.0, 100.0, 0)], compute_s=4.0, physics=physics) == pytest.approx((1 + 2 + 2, 1 + 2 + 2))


@pytest.mark.slow
@EVERY_FAMILY
def test_every_family_has_a_best_setting(family: families.Family) -> None:
    scape = family(np.random.default_rng(99))
    assert 0.0 < scape.span_s(scape.best) <= scape.span_s(scape.default)
    assert scape.regret(scape.best) == 0.0


@EVERY_FAMILY
def test_every_family_gives_planners_a_model_and_is_the_same_again(family: families.Family) -> None:
    scape = family(np.random.default_rng(99))
    assert scape.default in scape.space
    space, model = scape.probed(0.04, np.random.default_rng(0))
    assert scape.default in space
    assert model is not None
    same = family(np.random.default_rng(99))
    knobs = Knobs(unit_bytes=2**20, streams=2, transport=TransportKind.GLOO)
    assert same.span_s(knobs) == scape.span_s(knobs)


@pytest.mark.parametrize("name", [SIRTAKI, "random", "optuna TPE"])
def test_a_contender_keeps_to_its_budget_and_is_judged_without_noise(name: str) -> None:
    scape = families.default_is_best(np.random.default_rng(1))
    outcome = CONTENDERS[name](scape, 30, 0.04, 0)
    assert outcome["iterations"] <= (75 if name == SIRTAKI else 30)
    assert outcome["cumulative"][10_000] >= 1.0
    assert sum(outcome["excess"].values()) == pytest.approx(outcome["cumulative"][10_000] - 1.0)
    assert outcome["regret"] >= 0.0
    assert outcome["cost"] >= 1.0


def measured(true_s: Mapping[Knobs, float], noise: float, rounds: int, seed: int) -> dict[Knobs, list[float]]:
    rng = np.random.default_rng(seed)
    return {one: (span_s * np.exp(noise * rng.standard_normal(rounds))).tolist() for one, span_s in true_s.items()}


def valley() -> dict[Knobs, float]:
    """Seconds: smooth, but for one cliff of 30 %."""
    at = {(size, streams): math.log2(size) - 17 + 0.5 * math.log2(streams) for size in SIZES for streams in range(1, 9)}
    return {knobs(*place): math.exp(0.1 * height**2) * (1.3 if place[1] > 6 else 1.0) for place, height in at.items()}


def test_luck_is_removed_from_settings_measured_a_few_times() -> None:
    true_s = valley()
    errors: dict[str, list[float]] = {"raw": [], "estimated": []}
    for seed in range(10):
        spans_s = measured(true_s, 0.2, 5, seed)
        for name, found in (("raw", spans_s), ("estimated", estimated(spans_s))):
            errors[name] += [abs(math.log(np.median(found[one]) / true_s[one])) for one in true_s]
    assert np.mean(errors["estimated"]) < 0.75 * np.mean(errors["raw"])


def test_recordings_of_real_jobs_can_be_read() -> None:
    for path in recordings():
        job = recorded(path)
        assert job.default in job.space
        assert 0.0 < job.span_s(job.best) <= job.span_s(job.default)
    assert sum(path.stat().st_size for path in recordings()) <= 500 * KIB


def test_planners_predictions_are_compared_with_recordings() -> None:
    path = next(path for path in recordings() if path.stem == "cluster-400-100")
    data = json.loads(path.read_text())
    assert model_rank_correlation(data) > 0.9
    upside_down = [{**one, "spans_s": [1.0 / span_s for span_s in one["spans_s"]]} for one in data["rows"]]
    assert model_rank_correlation({**data, "rows": upside_down}) < -0.9
    assert math.isnan(model_rank_correlation({**data, "model": None}))


# ── Replays ────────────────────


@pytest.mark.lengthy
def test_errors_of_replays_are_those_of_the_kept_sweeps_and_hold_for_jobs_that_they_were_not_fitted_to() -> None:
    for kind, known in SHIPPED.items():
        asked = answerable([one for one in misses() if one.kind == kind and not one.unseen])
        found = widened(asked)
        for name in ("any_question", "step", "units"):
            assert getattr(found, name) == pytest.approx(getattr(known, name), abs=1e-3)
        inside, told = 0, 0
        for job in {one.job for one in asked}:
            error = widened([one for one in asked if one.job != job])
            mine = [one for one in asked if one.job == job and one.width(error) <= HALF_MAX_INTERVAL]
            told += len(mine)
            inside += sum(one.error <= one.width(error) for one in mine)
        assert inside >= 0.9 * told > 0
