import math
from dataclasses import replace

import numpy as np
import pytest

from sirtaki.autotune.knobs import KIB, MIB, Knobs
from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.autotune.model.planning import PlanningModel, calibrate_contention, calibrate_link, fitted_to_trials
from sirtaki.autotune.model.simulator import Profile, Simulator
from sirtaki.autotune.trial import Trial, TrialStatus
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.errors import TuningError
from sirtaki.measures import LinkModel

LINK = LinkModel(alpha_s=1.4e-3, throughput=(5e8, 8e8, 9e8, 9e8))

LAYOUT = GradientLayout(sizes=(200_000,) * 40)
PROFILE = Profile.from_durations([1e-3] * 40)


def trials_on(link, *, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    simulator = Simulator(layout=LAYOUT, profile=PROFILE, link=link)
    trials = []
    for unit_bytes in (256 * KIB, MIB, 4 * MIB):
        for streams in (1, 2, 4):
            knobs = Knobs(unit_bytes=unit_bytes, streams=streams, transport=TransportKind.GLOO)
            span_s = simulator.run_knobs(knobs).span_s * math.exp(noise * rng.standard_normal())
            trials.append(Trial(arm="grid", knobs=knobs, iterations=1, span_s=span_s))
    return trials


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.02), (0.03, 0.15)])
def test_a_wrong_link_is_corrected_by_trials(noise, tolerance):
    shape = [0.6 * 2 ** (n / 3) for n in range(4)]  # from 0.6 times the true G(1) to 1.2 times the true G(4)
    rates = tuple(rate * factor for rate, factor in zip(LINK.throughput, shape, strict=True))
    wrong = LinkModel(alpha_s=3e-3, throughput=rates)
    fitted = calibrate_link(wrong, layout=LAYOUT, profile=PROFILE, trials=trials_on(LINK, noise=noise))
    assert fitted.alpha_s == pytest.approx(LINK.alpha_s, rel=tolerance)
    assert fitted.throughput[0] == pytest.approx(LINK.throughput[0], rel=tolerance)
    assert fitted.throughput[3] == pytest.approx(LINK.throughput[3], rel=tolerance)


def test_a_correction_finds_the_processors_time():
    link = replace(LINK, host_s=2e-3)
    wrong = replace(link, host_s=0.5e-3)
    assert calibrate_link(wrong, layout=LAYOUT, profile=PROFILE, trials=trials_on(link)).host_s == pytest.approx(
        2e-3, rel=0.1
    )


def test_a_correction_keeps_what_is_right():
    link = replace(LINK, host_s=1e-3)
    fitted = calibrate_link(link, layout=LAYOUT, profile=PROFILE, trials=trials_on(link))
    assert fitted.host_s == pytest.approx(link.host_s, rel=1e-3)
    assert fitted.alpha_s == pytest.approx(link.alpha_s, rel=1e-3)


def test_failed_trials_correct_nothing():
    trials = [
        Trial(arm="grid", knobs=t.knobs, iterations=1, span_s=math.inf, status=TrialStatus.FAILED)
        for t in trials_on(LINK)
    ]
    with pytest.raises(TuningError, match="4 trials or more that ran"):
        calibrate_link(LINK, layout=LAYOUT, profile=PROFILE, trials=trials)


def test_trials_that_no_link_explains_are_refused():
    trials = [
        Trial(arm="grid", knobs=trial.knobs, iterations=1, span_s=10.0 ** (index % 3 - 1))
        for index, trial in enumerate(trials_on(LINK))
    ]
    with pytest.raises(TuningError, match="misses the trials"):
        calibrate_link(LINK, layout=LAYOUT, profile=PROFILE, trials=trials)


CONTENTION = ContentionModel(
    alpha_1=1.0,
    alpha_2=1.5e-4,
    overlapped=RateCurve(gamma_1=5e8, gamma_2=4.5e8, gamma_3=0.03),
    alone=RateCurve(gamma_1=6e8, gamma_2=5.4e8, gamma_3=0.03),
)
THREADS = (128, 512, 1024, 4096)


def trials_with_threads(*, noise=0.0, threads=THREADS, seed=0):
    rng = np.random.default_rng(seed)
    simulator = Simulator(layout=LAYOUT, profile=PROFILE, link=LINK, contention=CONTENTION)
    trials = []
    for unit_bytes in (MIB, 2 * MIB, 8 * MIB):
        for r in threads:
            knobs = Knobs(unit_bytes=unit_bytes, streams=1, threads=r, transport=TransportKind.NCCL)
            span_s = simulator.run_knobs(knobs).span_s * math.exp(noise * rng.standard_normal())
            trials.append(Trial(arm="grid", knobs=knobs, iterations=1, span_s=span_s))
    return trials


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.03), (0.03, 0.1)])
def test_contention_fitted_to_spans_predicts_other_spans(noise, tolerance):
    fitted = calibrate_contention(LINK, layout=LAYOUT, profile=PROFILE, trials=trials_with_threads(noise=noise))
    assert fitted.residual < max(2 * noise, 0.02)
    truth = Simulator(layout=LAYOUT, profile=PROFILE, link=LINK, contention=CONTENTION)
    found = Simulator(layout=LAYOUT, profile=PROFILE, link=LINK, contention=fitted)
    for r in (256, 2048):
        knobs = Knobs(unit_bytes=3 * MIB, streams=1, threads=r, transport=TransportKind.NCCL)
        assert found.run_knobs(knobs).span_s == pytest.approx(truth.run_knobs(knobs).span_s, rel=tolerance)


def test_contention_needs_three_thread_counts_and_six_trials():
    few = trials_with_threads(threads=(128, 512))
    with pytest.raises(TuningError, match=r"not to \[128, 512\]"):
        calibrate_contention(LINK, layout=LAYOUT, profile=PROFILE, trials=few)
    with pytest.raises(TuningError, match="6 trials or more that ran"):
        calibrate_contention(LINK, layout=LAYOUT, profile=PROFILE, trials=few[:5])


def test_spans_that_no_contention_explains_are_refused():
    trials = [
        Trial(arm="grid", knobs=trial.knobs, iterations=1, span_s=10.0 ** (index % 3 - 1))
        for index, trial in enumerate(trials_with_threads())
    ]
    with pytest.raises(TuningError, match="contention misses the trials"):
        calibrate_contention(LINK, layout=LAYOUT, profile=PROFILE, trials=trials)


# ── a job's model ────────────────────────────────────────────────────────────────────────────────────────────────

GLOO, MPI = (TransportKind.GLOO, Algorithm.FLAT), (TransportKind.MPI, Algorithm.FLAT)
PROBED = LinkModel(alpha_s=1e-3, throughput=(4e8, 8e8, 1.2e9, 1.6e9))
"""Of an idle network: streams do not hinder each other there."""


def planning_model(link: LinkModel) -> PlanningModel:
    return PlanningModel(layout=LAYOUT, profile=PROFILE, links={GLOO: link, MPI: link})


def worst_miss(model: PlanningModel) -> float:
    simulator = model.simulator(GLOO)
    return max(abs(math.log(simulator.run_knobs(trial.knobs).span_s / trial.span_s)) for trial in trials_on(LINK))


def test_what_trials_speak_against_is_fitted_to_them_and_nothing_else() -> None:
    probed = planning_model(PROBED)
    fitted = fitted_to_trials(probed, trials_on(LINK, noise=0.03)[:7])
    assert worst_miss(fitted) < worst_miss(probed) / 2
    assert fitted.links[MPI] == PROBED


def test_links_that_meet_the_trials_stay_as_they_were_probed() -> None:
    assert fitted_to_trials(planning_model(LINK), trials_on(LINK, noise=0.03)) == planning_model(LINK)


def test_few_trials_and_such_as_no_link_explains_change_nothing() -> None:
    probed = planning_model(PROBED)
    assert fitted_to_trials(probed, trials_on(LINK)[:4]) == probed
    wild = [replace(trial, span_s=0.01 * 7.0 ** ((5 * i) % 9)) for i, trial in enumerate(trials_on(LINK))]
    assert fitted_to_trials(probed, wild) == probed


NCCL = (TransportKind.NCCL, Algorithm.FLAT)


def threads_model(contention: ContentionModel) -> PlanningModel:
    return PlanningModel(layout=LAYOUT, profile=PROFILE, links={NCCL: LINK}, contention=contention)


def missed(model: PlanningModel, trials: list[Trial]) -> float:
    simulator = model.simulator(NCCL)
    return max(abs(math.log(simulator.run_knobs(trial.knobs).span_s / trial.span_s)) for trial in trials)


def test_contention_that_trials_speak_against_is_fitted_to_them() -> None:
    """Probes of a matrix product alone had shown half the rates, and computation that hardly notices."""
    probed = threads_model(
        replace(
            CONTENTION,
            alpha_2=1e-5,
            overlapped=replace(CONTENTION.overlapped, gamma_1=2.5e8, gamma_2=2.2e8),
            alone=replace(CONTENTION.alone, gamma_1=3e8, gamma_2=2.7e8),
        )
    )
    trials = trials_with_threads(noise=0.03)
    fitted = fitted_to_trials(probed, trials)
    assert missed(probed, trials) > 0.3
    assert missed(fitted, trials_with_threads()) < 0.12
    assert fitted.contention != probed.contention


def test_contention_that_meets_the_trials_stays_as_it_was_probed() -> None:
    probed = threads_model(CONTENTION)
    assert fitted_to_trials(probed, trials_with_threads(noise=0.03)) == probed


def test_where_two_thread_counts_ran_the_link_alone_is_fitted() -> None:
    probed = threads_model(replace(CONTENTION, alpha_2=6e-4))
    fitted = fitted_to_trials(probed, trials_with_threads(threads=(128, 1024)))
    assert fitted.contention == probed.contention
