"""The warm start's benchmark: what its registries hold, and how its runs are judged."""

import math

import pytest

from bench.lib.simulated_jobs import jobs, optimum_s
from bench.registry_transfer import (
    ASKED,
    SCENARIOS,
    Luck,
    Place,
    bars,
    entry_of,
    proposals,
    run,
    standard_errors,
    summary,
)
from bench.tuner import Truth
from sirtaki.autotune.knobs import Knobs
from sirtaki.registry.warm_start import topology_distance

PLACE = Place(network="resnet50", fabric="10 Gbit/s TCP", ranks=256)
LUCK = Luck(noise=0.03, seed=0, planners=True)


def test_a_place_is_the_job_of_its_name() -> None:
    for job in jobs(24):
        place = Place.of(job)
        assert place.job().name == job.name
        assert place.topology().world_size == place.ranks


def test_no_registry_holds_the_job_itself_nor_another_kind_of_similarity() -> None:
    for place in map(Place.of, jobs(24)):
        for scenario in SCENARIOS:
            assert place not in place.others(scenario)
        assert all((other.network, other.fabric) == (place.network, place.fabric) for other in place.others("size"))
        assert all((other.fabric, other.ranks) == (place.fabric, place.ranks) for other in place.others("sibling"))
        assert len(place.others("size")) == 2


def test_fabrics_of_one_shape_are_different_clusters() -> None:
    shapes = [Place(network="vgg16", fabric=fabric, ranks=8).topology().shape() for fabric in ("a", "b")]
    assert 0 < topology_distance(*shapes) < 0.2


def test_a_similar_jobs_winner_is_proposed_in_the_space_of_the_job() -> None:
    other = entry_of(Place(network="resnet50", fabric="10 Gbit/s TCP", ranks=64), LUCK)
    assert other.link is not None
    assert other.speedup >= 1
    for luck in (LUCK, Luck(noise=0.03, seed=0, planners=False)):
        found = proposals(PLACE, [other], luck)
        assert len(found) <= 1
        assert all(knobs in PLACE.job().space for knobs in found)


def test_a_seed_that_is_the_optimum_is_found_by_its_first_measurement() -> None:
    job = PLACE.job()
    truth = Truth(job, optimum_s=optimum_s(job))
    best = min(
        (Knobs(unit_bytes=1 << n, streams=8, transport=job.default.transport) for n in range(20, 25)), key=truth.span_s
    )
    assert truth.is_close(best)
    outcome = run(truth, Luck(noise=0.0, seed=0, planners=False), seeds=[best])
    assert outcome.found_at == 5  # three of the default, a discarded and a measured one
    assert 2 <= outcome.tried <= 5


@pytest.mark.parametrize(
    ("samples", "errors"),
    [([0.0, 0.0], 0.0), ([1.0, 1.0], math.inf), ([-1.0, -1.0], -math.inf), ([1.0, 3.0], 2.0)],
)
def test_means_are_measured_in_their_standard_errors(samples: list[float], errors: float) -> None:
    assert standard_errors(samples) == pytest.approx(errors)


def test_bars_are_missed_where_a_registry_costs_more_than_its_proposals() -> None:
    def report(scenario: str, warm: list[float | None], excess: list[float]) -> dict[str, object]:
        row = {"cold": [5, None], "warm": warm, "tried": [2, 4], "excess": excess}
        regrets = {"cold_regret": [0.0, 0.1], "warm_regret": [0.0, 0.0]}
        return {"scenario": scenario, "noise": 0.03, "planners": True, **summary([{**row, **regrets}])}

    good = bars([report(scenario, [5, 5], [-2.0, -99.0]) for scenario in ASKED])
    assert all(bar.met for bar in good)
    bad = bars([report("sibling", [7, None], [4.0, 5.0])])
    assert [bar.met for bar in bad] == [False, False, False, True]
    assert next(bar.claim for bar in bad if not bar.met) == "sibling, noise 3 %: median iterations to 3 %"
