"""The tuner's benchmark: its jobs, its models' errors, its peers, and how a run is judged."""

import math
from dataclasses import replace

import numpy as np
import pytest

from bench.lib import simulated_jobs
from bench.lib.simulated_jobs import ROUTE, Job, jobs, misjudged, optimum_s
from bench.tuner import HorovodTruth, Listed, Truth, bars, contenders, run, summary
from sirtaki.autotune.knobs import KIB, MIB, KnobLattice, Knobs, KnobSpace
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.autotune.trial import Proposal
from sirtaki.comm.plan import GradientLayout
from sirtaki.measures import LinkModel


@pytest.fixture(scope="module")
def job() -> Job:
    """Twenty gradients over a link that four flows fill."""
    layout = GradientLayout(sizes=(256 * KIB,) * 20)
    link = LinkModel(alpha_s=1e-3, throughput=(1e9, 2e9, 3e9, 4e9))
    space = KnobSpace(routes=(ROUTE,), unit_bytes=(64 * KIB, 16 * MIB), streams=(1, 2, 4, 8))
    default = Knobs(unit_bytes=16 * MIB, streams=1, transport=ROUTE[0])
    model = PlanningModel(layout=layout, profile=Profile.from_durations([1e-3] * 20), links={ROUTE: link})
    return Job(name="small", space=space, default=default, model=model)


@pytest.fixture(scope="module")
def truth(job: Job) -> Truth:
    return Truth(job, optimum_s=optimum_s(job))


def test_the_jobs_meet_every_cluster_twice_and_every_network() -> None:
    names = [job.name for job in jobs(24)]
    assert len(set(names)) == 24
    assert {name.split(", ")[0] for name in names} == set(simulated_jobs.NETWORKS)
    assert all(sum(cluster in name for name in names) == 2 for cluster in {n.split(", ", 1)[1] for n in names})


def test_every_default_lies_in_its_space() -> None:
    assert all(job.default in job.space for job in jobs(24))


def test_no_setting_of_the_searched_lattice_beats_the_optimum(truth: Truth) -> None:
    settings = KnobLattice(truth.job.space).points
    assert min(map(truth.span_s, settings)) >= truth.optimum_s


def test_planners_get_a_model_that_is_off_by_the_noise(job: Job) -> None:
    wrong = misjudged(job.model, noise=0.1, rng=np.random.default_rng(0))
    truth, believed = np.array(job.model.links[ROUTE].throughput), np.array(wrong.links[ROUTE].throughput)
    assert np.all(believed != truth)
    assert np.all(np.abs(np.log(believed / truth)) < 0.5)
    assert wrong.profile != job.model.profile
    assert misjudged(job.model, noise=0.0, rng=np.random.default_rng(0)).links == job.model.links


def test_a_run_counts_iterations_until_the_kept_setting_is_close(truth: Truth) -> None:
    best = min(KnobLattice(truth.job.space).points, key=truth.span_s)
    found = run(truth, Listed("good", [Proposal(arm="good", knobs=best)]), noise=0.03, seed=0)
    nothing = run(truth, Listed("idle", []), noise=0.03, seed=0)
    assert 3 < found.found_at <= found.iterations
    assert found.regret < 0.03
    assert math.isinf(nothing.found_at)
    assert nothing.over_default <= 1.0  # what lies next to the default runs all the same


def test_a_default_that_is_close_is_found_at_once(truth: Truth) -> None:
    best = min(KnobLattice(truth.job.space).points, key=truth.span_s)
    already = Truth(replace(truth.job, default=best), optimum_s=truth.optimum_s)
    assert run(already, Listed("idle", []), noise=0.03, seed=0).found_at == 0.0


def test_the_horovod_like_peer_waits_for_its_cycles_and_fuses_up_to_its_threshold(job: Job) -> None:
    peer = HorovodTruth(job, optimum_s=1.0)
    base = peer.job.default
    short, long = (peer.span_s(replace(base, threads=cycle)) for cycle in (10, 500))
    assert long > short + 0.02  # all gradients wait for a tick at 50 ms
    small, large = (peer.span_s(replace(base, unit_bytes=size, threads=500)) for size in (MIB, 16 * MIB))
    assert small == pytest.approx(large + 18e-3)  # one start-up for each of 20 gradients, against two


@pytest.mark.parametrize("name", ["bandit", "bandit as printed", "random", "grid", "asc_wfbp_n", "horovod-like"])
def test_every_kind_of_contender_runs(name: str, truth: Truth) -> None:
    make = contenders()[name]
    here = HorovodTruth(truth.job, optimum_s=truth.optimum_s) if name == "horovod-like" else truth
    outcome = run(here, make(here.job, 0.03, 1), noise=0.03, seed=1)
    assert outcome == run(here, make(here.job, 0.03, 1), noise=0.03, seed=1)
    assert outcome.iterations <= 100


def test_the_summary_takes_runs_that_never_come_close_for_what_they_are() -> None:
    row = {
        "contender": "bandit",
        "noise": 0.1,
        "iterations_to_3_percent": [4.0, None, 8.0],
        "regret": [0.01, 0.5, 0.0],
        "over_default": [0.5, 1.05, 0.9],
        "iterations": [50, 100, 60],
    }
    ours = summary([row], "bandit")
    assert ours["median_iterations_to_3_percent"] == 8.0
    assert ours["mean_iterations_to_3_percent"] == pytest.approx((4 + 100 + 8) / 3)
    assert ours["within_3_percent_at_the_end"] == pytest.approx(2 / 3)
    assert ours["worst_loss_to_default_in_noises"] == pytest.approx(0.5)
    worse = summary([{**row, "contender": "grid", "regret": [0.2, 0.6, 0.1]}], "grid")
    met = {bar.claim: bar.met for bar in bars([ours, worse])}
    assert met["bandit: share of runs not within 3 %"] is False
    assert met["bandit: mean regret, less the best single arm's"] is True
