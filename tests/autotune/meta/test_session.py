"""The warm-up session against emulated jobs: what it runs, what it keeps, and how it spends its budget."""

import math
from dataclasses import replace

import pytest
from fakes.warmup_job import BEST, DEFAULT, OUTSIDE, SPACE, Job, ListArm, Sure, landscape, session, streams
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.autotune.arms.techniques import GridArm
from sirtaki.autotune.knobs import MIB
from sirtaki.autotune.meta.session import DEFAULT_ARM, Purpose
from sirtaki.autotune.trial import Proposal, TrialStatus
from sirtaki.errors import TuningError

# The usual course.


def test_the_default_is_measured_first_after_a_discarded_iteration() -> None:
    first = session().assignment
    assert (first.knobs, first.purpose, first.arm) == (DEFAULT, Purpose.DEFAULT, DEFAULT_ARM)
    assert (first.discarded_iterations, first.measured_iterations) == (1, 2)


def test_the_best_setting_is_found_and_kept_after_beating_the_default() -> None:
    job = Job(session(ListArm(streams(2), BEST, streams(8)))).run()
    assert job.result.knobs == BEST
    assert job.result.tuned
    assert job.result.arm == "list"
    assert job.result.best_span_s == pytest.approx(landscape(BEST))
    assert job.result.default_span_s == pytest.approx(landscape(DEFAULT))
    assert "beat the default" in job.result.reason
    assert BEST in job.run_for(Purpose.FINALS)
    assert DEFAULT in job.run_for(Purpose.FINALS)


def test_after_the_end_the_kept_knobs_are_assigned_with_nothing_to_measure() -> None:
    job = Job(session(ListArm(BEST))).run()
    final = job.session.assignment
    assert (final.knobs, final.purpose, final.measured_iterations) == (BEST, Purpose.KEPT, 0)
    with pytest.raises(TuningError, match="over"):
        job.session.record([1.0])


@settings(max_examples=40, deadline=None)
@given(
    budget=st.integers(0, 120),
    discarded=st.integers(0, 3),
    measured=st.integers(1, 4),
    noise=st.sampled_from([0.0, 0.03, 0.3]),
    seed=st.integers(0, 99),
)
def test_the_budget_is_kept_and_the_books_agree(
    budget: int, discarded: int, measured: int, noise: float, seed: int
) -> None:
    warm_up = session(budget_iterations=budget, discarded_iterations=discarded, measured_iterations=measured)
    job = Job(warm_up, noise=noise, seed=seed).run()
    smallest = 3 * (discarded + measured)  # the default, and one round of the finals
    assert job.session.done
    assert job.iterations == job.result.iterations_used <= max(budget, smallest)
    assert job.result.n_trials == len({now.knobs for now in job.assignments})


def test_knobs_that_run_already_discard_no_iteration() -> None:
    job = Job(session(GridArm(SPACE)), noise=0.05).run()
    previous = None
    for now in job.assignments:
        assert now.discarded_iterations == (0 if now.knobs == previous else 1)
        previous = now.knobs


def test_the_same_seed_gives_the_same_course() -> None:
    courses = [Job(session(GridArm(SPACE)), noise=0.1, seed=5).run().assignments for _ in range(2)]
    assert courses[0] == courses[1]


# Trials.


def test_a_clearly_worse_setting_is_given_up_after_one_measurement() -> None:
    worse = streams(1)
    slow = replace(worse, unit_bytes=64 * MIB)
    job = Job(session(ListArm(BEST, slow))).run()
    assert len(job.run_for(Purpose.TRIAL)) == 2 + 1
    pruned = next(trial for trial in job.session.trials if trial.knobs == slow)
    assert (pruned.status, pruned.iterations) == (TrialStatus.PRUNED, 1)


def test_a_setting_close_to_the_best_is_measured_more_often() -> None:
    near = replace(BEST, unit_bytes=5 * MIB)
    ties = {BEST: 0.1, near: 0.0999, DEFAULT: 0.2}
    job = Job(session(ListArm(BEST, near)), span_of=ties.__getitem__).run()
    assert job.run_for(Purpose.TRIAL).count(BEST) == 2
    assert job.run_for(Purpose.TRIAL).count(near) == 4


def test_only_a_lead_beyond_the_noise_is_a_new_best() -> None:
    spans = {DEFAULT: 0.2, BEST: 0.1, streams(2): 0.0995, streams(3): 0.0990, streams(4): 0.07}
    arm = ListArm(*(knobs for knobs in spans if knobs != DEFAULT))
    Job(session(arm), span_of=spans.__getitem__).run()
    bests = {trial.knobs for trial in arm.told if trial.was_best}
    assert bests == {BEST, streams(4)}


def test_the_arm_is_told_the_default_and_every_trial() -> None:
    arm = ListArm(streams(2), BEST)
    job = Job(session(arm)).run()
    assert [(trial.arm, trial.knobs) for trial in arm.told][:3] == [
        (DEFAULT_ARM, DEFAULT),
        ("list", streams(2)),
        ("list", BEST),
    ]
    assert list(job.session.trials) == arm.told


def test_a_duplicate_is_not_run_again_but_told_with_what_is_known() -> None:
    arm = ListArm(BEST, BEST, DEFAULT, streams(2))
    job = Job(session(arm)).run()
    assert job.run_for(Purpose.TRIAL) == [BEST, BEST, streams(2)]  # BEST twice for its two measured iterations
    told = [trial for trial in arm.told if trial.arm == "list"]
    assert [trial.knobs for trial in told] == [BEST, BEST, DEFAULT, streams(2)]
    assert told[1].span_s == told[0].span_s
    assert not told[1].was_best


def test_an_arm_that_only_repeats_itself_ends_the_search() -> None:
    arm = ListArm(*[BEST] * 100)
    job = Job(session(arm)).run()
    assert "nothing left to propose" in job.result.reason
    assert arm.asked < 15


def test_settings_with_the_same_identity_are_not_run_twice() -> None:
    arm = ListArm(streams(2), streams(3), streams(4))
    job = Job(session(arm, identity=lambda knobs: min(knobs.streams, 2))).run()
    assert set(job.run_for(Purpose.TRIAL)) == {streams(2)}


def test_an_arm_may_ask_for_more_iterations_of_what_it_knows() -> None:
    arm = ListArm(BEST, Proposal(arm="list", knobs=BEST, iterations=5), Proposal(arm="list", knobs=BEST, iterations=4))
    job = Job(session(arm)).run()
    assert job.run_for(Purpose.TRIAL).count(BEST) == 5
    assert [trial.iterations for trial in arm.told if trial.arm == "list"] == [2, 5, 5]


def test_a_proposal_outside_the_space_is_refused_and_told_as_failed(caplog: pytest.LogCaptureFixture) -> None:
    arm = ListArm(OUTSIDE, BEST)
    job = Job(session(arm)).run()
    assert OUTSIDE not in [now.knobs for now in job.assignments]
    assert arm.told[1].knobs == OUTSIDE
    assert arm.told[1].status is TrialStatus.FAILED
    assert "refused knobs outside" in caplog.text
    assert job.result.knobs == BEST


@pytest.mark.parametrize("span_s", [math.inf, math.nan, -1.0])
def test_a_setting_that_cannot_be_run_is_a_failed_trial_and_never_kept(span_s: float) -> None:
    arm = ListArm(streams(8), BEST)
    job = Job(session(arm), span_of=lambda knobs: span_s if knobs == streams(8) else landscape(knobs)).run()
    failed = next(trial for trial in arm.told if trial.knobs == streams(8))
    assert (failed.status, failed.span_s, failed.was_best) == (TrialStatus.FAILED, math.inf, False)
    assert job.run_for(Purpose.TRIAL).count(streams(8)) == 1
    assert job.result.knobs == BEST


def test_if_even_the_default_fails_what_runs_is_kept() -> None:
    job = Job(session(ListArm(BEST)), span_of=lambda knobs: math.inf if knobs == DEFAULT else 0.1).run()
    assert job.result.knobs == BEST


def test_if_nothing_runs_the_default_stays() -> None:
    job = Job(session(ListArm(BEST, streams(2))), span_of=lambda knobs: math.inf).run()
    assert job.result.knobs == DEFAULT
    assert not job.result.tuned


# The end of the search.


def test_the_search_stops_early_when_nothing_beats_the_best_and_the_model_expects_nothing() -> None:
    ladder = [replace(DEFAULT, unit_bytes=MIB + i) for i in range(200)]
    flat = {DEFAULT: 0.2, **dict.fromkeys(ladder, 0.1)}
    bored = Job(session(Sure(0.0, *ladder), budget_iterations=300), span_of=flat.__getitem__).run()
    hopeful = Job(session(Sure(0.5, *ladder), budget_iterations=300), span_of=flat.__getitem__).run()
    assert "no new best" in bored.result.reason
    assert bored.result.n_trials < hopeful.result.n_trials
    assert "budget of 300 iterations used" in hopeful.result.reason


def test_a_budget_too_small_for_a_trial_keeps_the_default() -> None:
    job = Job(session(GridArm(SPACE), budget_iterations=5)).run()
    assert job.result.knobs == DEFAULT
    assert job.run_for(Purpose.TRIAL) == []


# Small things.


def test_an_empty_measurement_is_refused() -> None:
    with pytest.raises(TuningError, match="must not be empty"):
        session().record([])


@pytest.mark.parametrize("options", [{"discarded_iterations": -1}, {"measured_iterations": 0}])
def test_an_impossible_trial_length_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(TuningError, match="measured"):
        session(**options)
