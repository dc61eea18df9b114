"""Tuning sessions against emulated jobs: what they run, what they keep, and how they spend their budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes.warmup_job import (
    BEST,
    DEFAULT,
    OUTSIDE,
    SPACE,
    Believer,
    Job,
    ListArm,
    Sure,
    landscape,
    remembered,
    session,
    streams,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.autotune.arms.techniques import GridArm
from sirtaki.autotune.knobs import KIB, MIB, Cut, Knobs, Lossy
from sirtaki.autotune.meta.bandit import default_arms
from sirtaki.autotune.meta.session import (
    DEFAULT_ARM,
    FINALS_ARM,
    PLAN_ARM,
    REFINEMENT_ARM,
    REGISTRY_ARM,
    Ledger,
    Purpose,
    Remembered,
    SessionResult,
    Setting,
    TuningSession,
)
from sirtaki.autotune.trial import Proposal, Trial, TrialStatus
from sirtaki.comm.plan import TransportKind, UnitClass
from sirtaki.errors import PlanError, TuningError


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
    with pytest.raises(TuningError, match="session had ended"):
        job.session.record([1.0])


@pytest.mark.lengthy
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
    assert job.session.done
    assert job.iterations == job.result.iterations_used <= job.session.iterations_at_most
    assert job.result.n_trials == len({now.knobs for now in job.assignments})


def test_knobs_that_run_already_discard_no_iteration() -> None:
    job = Job(session(GridArm(SPACE)), noise=0.05).run()
    previous = None
    for now in job.assignments:
        assert now.discarded_iterations == (0 if now.knobs == previous else 1)
        previous = now.knobs


# Trials.
def test_a_clearly_worse_setting_is_given_up_after_one_measurement() -> None:
    worse = streams(1)
    slow = worse.but(unit_bytes=64 * MIB)
    job = Job(session(ListArm(BEST, slow))).run()
    assert len(job.run_for(Purpose.TRIAL)) == 2 + 1
    pruned = next(trial for trial in job.session.trials if trial.knobs == slow)
    assert (pruned.status, pruned.iterations) == (TrialStatus.PRUNED, 1)


def test_a_setting_close_to_the_best_is_measured_more_often() -> None:
    near = BEST.but(unit_bytes=5 * MIB)
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


def test_the_arm_gets_the_results_of_the_default_and_every_trial() -> None:
    arm = ListArm(streams(2), BEST)
    job = Job(session(arm)).run()
    assert [(trial.arm, trial.knobs) for trial in arm.told][:3] == [
        (DEFAULT_ARM, DEFAULT),
        ("list", streams(2)),
        ("list", BEST),
    ]
    assert list(job.session.trials) == arm.told


def test_a_duplicate_is_not_run_again_and_gets_the_known_result() -> None:
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


def test_an_arm_may_ask_for_more_iterations_of_a_measured_setting() -> None:
    arm = ListArm(BEST, Proposal(arm="list", knobs=BEST, iterations=5), Proposal(arm="list", knobs=BEST, iterations=4))
    job = Job(session(arm)).run()
    assert job.run_for(Purpose.TRIAL).count(BEST) == 5
    assert [trial.iterations for trial in arm.told if trial.arm == "list"] == [2, 5, 5]


def test_a_proposal_outside_the_space_is_rejected_and_counts_as_failed(caplog: pytest.LogCaptureFixture) -> None:
    arm = ListArm(OUTSIDE, BEST)
    job = Job(session(arm)).run()
    assert OUTSIDE not in [now.knobs for now in job.assignments]
    assert arm.told[1].knobs == OUTSIDE
    assert arm.told[1].status is TrialStatus.FAILED
    assert "is outside the permitted space" in caplog.text
    assert job.result.knobs == BEST


@pytest.mark.parametrize("span_s", [math.inf, math.nan, 0.0, -1.0])
def test_a_setting_that_cannot_be_run_is_a_failed_trial_and_never_kept(span_s: float) -> None:
    arm = ListArm(streams(8), BEST)
    job = Job(session(arm), span_of=lambda knobs: span_s if knobs == streams(8) else landscape(knobs)).run()
    failed = next(trial for trial in arm.told if trial.knobs == streams(8))
    assert (failed.status, failed.span_s, failed.was_best) == (TrialStatus.FAILED, math.inf, False)
    assert job.run_for(Purpose.TRIAL).count(streams(8)) == 1
    assert job.result.knobs == BEST


def test_if_even_the_default_fails_the_current_setting_is_kept() -> None:
    job = Job(session(ListArm(BEST)), span_of=lambda knobs: math.inf if knobs == DEFAULT else 0.1).run()
    assert job.result.knobs == BEST


# The end of the search.
def test_the_search_stops_early_when_nothing_beats_the_best_and_the_model_expects_nothing() -> None:
    ladder = [DEFAULT.but(unit_bytes=MIB + i) for i in range(200)]
    flat = {DEFAULT: 0.2, **dict.fromkeys(ladder, 0.1)}
    bored = Job(session(Sure(0.0, *ladder), budget_iterations=300), span_of=flat.__getitem__).run()
    hopeful = Job(session(Sure(0.5, *ladder), budget_iterations=300), span_of=flat.__getitem__).run()
    assert "no new best" in bored.result.reason
    assert bored.result.n_trials < hopeful.result.n_trials
    assert "the search has used its 300 steps" in hopeful.result.reason


# Small things.
def test_an_empty_measurement_is_refused() -> None:
    with pytest.raises(TuningError, match="at least one measured time"):
        session().record([])


@pytest.mark.parametrize("options", [{"discarded_iterations": -1}, {"measured_iterations": 0}])
def test_an_impossible_trial_length_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(TuningError, match="_iterations: expected at least"):
        session(**options)


def test_the_registrys_setting_runs_at_once_and_ends_the_warm_up_if_it_beats_the_default() -> None:
    arm = ListArm(streams(2))
    warm_up = session(arm, exact=remembered(BEST))
    assert warm_up.assignment.knobs == BEST
    assert warm_up.assignment.arm == REGISTRY_ARM
    job = Job(warm_up).run()
    assert job.result.knobs == BEST
    assert job.result.arm == REGISTRY_ARM
    assert job.result.iterations_used <= 13
    assert arm.asked == 0
    assert "registry" in job.result.reason


def test_a_registrys_setting_that_loses_is_followed_by_the_usual_search() -> None:
    slow = DEFAULT.but(unit_bytes=64 * MIB)
    arm = ListArm(BEST)
    job = Job(session(exact=remembered(slow)), search_with=arm).run()
    assert job.assignments[0].knobs == slow
    assert job.result.knobs == BEST
    assert job.result.default_span_s == pytest.approx(landscape(DEFAULT))
    assert [trial.knobs for trial in arm.told[:2]] == [slow, DEFAULT]


def test_after_a_registrys_setting_loses_similar_jobs_settings_are_first_within_the_rest_of_the_space() -> None:
    warm_up = session(exact=remembered(DEFAULT.but(unit_bytes=64 * MIB)))
    while warm_up.assignment.purpose is not Purpose.SEARCH:
        warm_up.record([landscape(warm_up.assignment.knobs)] * warm_up.assignment.measured_iterations)
    assert warm_up.assignment.knobs == DEFAULT
    narrow = replace(SPACE, streams=(1, 4))
    warm_up.begin_search(ListArm(streams(2), streams(4)), space=narrow, seeds=[BEST])
    job = Job(warm_up).run()
    assert set(job.run_for(Purpose.TRIAL)) == {BEST, streams(4)}
    assert job.assignments[0].knobs == BEST
    with pytest.raises(TuningError, match=r"assignment.purpose in begin_search\(\): expected"):
        warm_up.begin_search(ListArm(), space=SPACE)


@pytest.mark.parametrize("exact", [BEST, DEFAULT])
@pytest.mark.parametrize("times", [0.3, 1.0, 3.5])
def test_a_registrys_setting_is_where_a_short_search_begins_if_the_link_has_changed(exact: Knobs, times: float) -> None:
    better = BEST.but(unit_bytes=8 * MIB)
    arm = ListArm(better)
    warm_up = session(exact=remembered(exact, times=times), budget_iterations=1000)
    job = Job(warm_up, search_with=arm, span_of=lambda knobs: 0.05 if knobs == better else landscape(knobs)).run()
    assert job.result.knobs == (exact if times == 1.0 else better)
    assert job.result.iterations_used < 60
    assert arm.asked == (0 if times == 1.0 else 2)


@pytest.mark.parametrize("exact", [BEST, None])
def test_a_setting_without_a_valid_plan_is_rejected_from_every_source(
    exact: Knobs | None, caplog: pytest.LogCaptureFixture
) -> None:
    def identity(knobs: Knobs) -> Knobs:
        if knobs.streams in (3, 4):
            raise PlanError("the units end at element 3 of 5")
        range(knobs.unit_bytes)
        return knobs

    strange = DEFAULT.but(unit_bytes=2.5 * MIB)  # type: ignore[arg-type]
    arm = ListArm(BEST, streams(3), strange, streams(2))
    history = [Trial(arm="grid", knobs=knobs, iterations=2, span_s=0.1) for knobs in (BEST, DEFAULT)]
    job = Job(session(arm, exact=exact and remembered(exact), seeds=[BEST], history=history, identity=identity)).run()
    assert not {now.knobs for now in job.assignments} & {BEST, streams(3)}
    assert job.result.knobs == streams(2)
    assert caplog.text.count("does not fit") == 1


def test_a_recalled_history_is_read_up_to_a_sessions_largest_length() -> None:
    history = [Trial(arm="grid", knobs=DEFAULT, iterations=10**9, span_s=span_s) for span_s in (0.1, math.inf)] * 5000
    seen: list[Knobs] = []

    def identity(knobs: Knobs) -> Knobs:
        seen.append(knobs)
        return knobs

    job = Job(session(ListArm(BEST), history=history, identity=identity)).run()
    assert job.result.knobs == BEST
    assert len(seen) < 1000


def test_a_registry_with_the_default_as_best_ends_the_warm_up() -> None:
    job = Job(session(exact=remembered(DEFAULT))).run()
    assert job.result.knobs == DEFAULT
    assert job.result.iterations_used == 3


def test_settings_of_similar_jobs_win_by_any_lead_and_proposals_of_arms_by_a_clear_one() -> None:
    slightly_better = {DEFAULT: 1.0, BEST: 0.98}
    for options, kept in (({"arm": ListArm(), "seeds": [BEST]}, BEST), ({"arm": ListArm(BEST)}, DEFAULT)):
        job = Job(session(**options), span_of=lambda knobs: slightly_better[knobs]).run(records=2)  # type: ignore[arg-type]
        assert job.run_for(Purpose.TRIAL) == [BEST]
        assert job.result.knobs == kept


def test_seeds_are_tried_before_the_arm_is_asked() -> None:
    arm = ListArm(streams(8))
    job = Job(session(arm, seeds=[streams(2), OUTSIDE, BEST])).run()
    order = list(dict.fromkeys(job.run_for(Purpose.TRIAL)))
    assert order == [streams(2), BEST, streams(8)]
    assert job.result.arm == REGISTRY_ARM


def test_a_resumed_session_improves_its_result_step_by_step_and_claims_it_against_the_default() -> None:
    tuned = session(ListArm(streams(2)), budget_iterations=20)
    job = Job(tuned, noise=0.02).run()
    times = [landscape(job.result.knobs)]
    for _ in range(8):
        assert tuned.resume(10_000)
        assert not tuned.done
        assert tuned.result.knobs == job.run(1).result.knobs  # the last result stays until the next one is proved
        times.append(landscape(job.run().result.knobs))
    assert times == sorted(times, reverse=True)
    assert times[-1] < 1.05 * landscape(BEST)
    assert job.result.gain is not None
    assert job.result.gain.low <= landscape(DEFAULT) / times[-1] <= job.result.gain.high


def test_resumed_sessions_claim_no_gain_where_there_is_none() -> None:
    claims = 0
    for seed in range(60):
        tuned = session(GridArm(SPACE), budget_iterations=40, rng=np.random.default_rng(seed))
        job = Job(tuned, span_of=lambda knobs: 0.1, noise=0.05, seed=seed).run()
        for _ in range(4):
            tuned.resume(10_000)
            job.run()
        claims += job.result.gain is not None
    assert claims <= 3


def test_a_session_is_not_resumed_where_little_is_expected() -> None:
    sure = session(Sure(0.001, BEST))
    Job(sure).run()
    assert not sure.resume(10_000)
    assert sure.done
    assert sure.resume(1_000_000)
    assert not sure.done


def test_only_an_ended_session_can_be_resumed() -> None:
    with pytest.raises(TuningError, match="only after it has ended"):
        session().resume(10_000)


def test_a_plan_that_the_user_gives_is_the_very_first_proposal_and_kept_only_if_it_is_faster() -> None:
    arm = ListArm(streams(8))
    job = Job(session(arm, given=BEST, seeds=[streams(2)])).run()
    assert list(dict.fromkeys(job.run_for(Purpose.TRIAL))) == [BEST, streams(2), streams(8)]
    assert (job.result.knobs, job.result.arm) == (BEST, PLAN_ARM)
    slow = DEFAULT.but(unit_bytes=64 * MIB)
    job = Job(session(ListArm(), given=slow)).run()
    assert slow in job.run_for(Purpose.TRIAL)
    assert job.result.knobs != slow
    job = Job(session(ListArm(BEST), given=OUTSIDE)).run()
    assert job.result.knobs == BEST


@pytest.mark.parametrize(
    ("exact", "given", "kept"),
    [
        (streams(2), BEST, BEST),
        (BEST, streams(2), BEST),
        (BEST, BEST, BEST),
        (DEFAULT, BEST, BEST),
        (DEFAULT, DEFAULT.but(unit_bytes=64 * MIB), DEFAULT),
        (BEST, OUTSIDE, BEST),
    ],
)
def test_a_plan_that_the_user_gives_is_compared_with_the_registrys_setting(
    exact: Knobs, given: Knobs, kept: Knobs
) -> None:
    arm = ListArm(streams(8))
    job = Job(session(arm, exact=exact and remembered(exact), given=given)).run()
    assert job.result.knobs == kept
    assert arm.asked == 0
    assert OUTSIDE not in [now.knobs for now in job.assignments]
    whose = {BEST: "the given plan" if exact != BEST else "the registry's setting"}.get(
        kept, "the registry's best setting for this job is the default"
    )
    assert whose in job.result.reason


def test_a_session_cut_short_has_a_best_setting_at_any_moment() -> None:
    job = Job(session(ListArm(streams(2), BEST, streams(8))))
    assert job.result.knobs == DEFAULT
    assert math.isinf(job.result.default_span_s)
    job.run(5)
    assert not job.session.done
    assert job.result.knobs == BEST
    assert job.result.reason == "the tuning phase was cut short"


def test_a_job_cut_short_resumes_its_search() -> None:
    first = Job(session(ListArm(streams(2), BEST))).run(5)
    arm = ListArm(BEST, streams(8))
    told = [Trial.from_json(trial.to_json()) for trial in first.session.trials]
    second = Job(session(arm, history=told), span_of=lambda knobs: 3.0 * landscape(knobs)).run()
    assert second.run_for(Purpose.TRIAL) == [streams(8)]  # BEST is known and not run again
    assert second.result.knobs == BEST
    recalled = next(trial for trial in arm.told if trial.knobs == BEST)
    assert recalled.span_s == pytest.approx(3.0 * landscape(BEST))  # scaled by what the default takes now
    assert second.result.iterations_used > second.iterations


def test_a_history_that_used_the_budget_leaves_the_finals() -> None:
    history = [Trial(arm="list", knobs=BEST, iterations=500, span_s=0.01)]
    job = Job(session(ListArm(streams(2)), history=history)).run()
    assert job.run_for(Purpose.TRIAL) == []
    assert BEST in job.run_for(Purpose.FINALS)


def test_close_finalists_are_measured_again_and_the_lucky_one_loses() -> None:
    """Two settings; the truly slower one was lucky in its trial."""
    lucky, good = streams(2), BEST
    spans = {lucky: iter([0.095, 0.096, *[0.108] * 50]), good: iter([0.1] * 50), DEFAULT: iter([0.2] * 50)}
    job = Job(session(ListArm(lucky, good)), span_of=lambda knobs: next(spans[knobs])).run()
    assert lucky in job.run_for(Purpose.FINALS)
    assert job.result.knobs == good
    assert any(trial.arm == FINALS_ARM for trial in job.session.trials)


def test_a_setting_that_the_surrogate_predicts_to_be_best_reaches_the_finals() -> None:
    near = [*(streams(count) for count in (2, 3, 4, 6, 8)), BEST.but(streams=2)]
    spans = {knobs: 0.1 + 0.001 * i for i, knobs in enumerate(near)} | {DEFAULT: 0.2}
    doubted = Job(session(ListArm(*near)), span_of=spans.__getitem__).run()
    believed = Job(session(Believer(near[-1], *near)), span_of=spans.__getitem__).run()
    assert near[-1] not in doubted.run_for(Purpose.FINALS)
    assert near[-1] in believed.run_for(Purpose.FINALS)


def test_where_the_default_clearly_beats_the_winner_another_finalist_has_its_turn() -> None:
    def shifting(knobs: Knobs) -> float:
        proving = job.session.assignment.purpose is Purpose.FINALS
        return {DEFAULT: 0.1, BEST: 0.2 if proving else 0.05, streams(2): 0.0505}[knobs]

    job = Job(session(ListArm(BEST, streams(2))), span_of=shifting)
    job.run()
    assert job.result.knobs == streams(2)


# What is proved.
FASTER = {DEFAULT: 1.0, BEST: 1.0 / 1.1}


def proofs(
    span_of: Callable[[Knobs, int], float], *, noise: float, seeds: int = 60, **options: Any
) -> list[SessionResult]:
    """Results of sessions whose spans depend on the iteration, too."""
    found = []
    for seed in range(seeds):
        job = Job(session(ListArm(BEST, streams(2), streams(3)), **options), noise=noise, seed=seed)
        job.span_of = lambda knobs, job=job: span_of(knobs, job.iterations)  # type: ignore[misc]
        found.append(job.run().result)
    return found


PACES: list[Callable[[int], float]] = [lambda _: 1.0, lambda n: 1.01**n, lambda n: 1.0 if n < 30 else 3.0]


@pytest.mark.lengthy
@pytest.mark.parametrize("noise", [0.02, 0.05, 0.2, 0.8])
def test_where_nothing_is_faster_the_default_stays_under_any_noise_and_drift(noise: float) -> None:
    found = [
        result
        for pace in PACES
        for result in proofs(lambda _, n, pace=pace: pace(n), noise=noise, seeds=40)  # type: ignore[misc]
    ]
    tuned = [result for result in found if result.tuned]
    assert len(tuned) <= 0.09 * len(found)  # a rate of 4 % exceeds this in one of a thousand cases
    assert all(result.gain is None for result in found if not result.tuned)
    assert all(result.gain is not None and result.gain.low > 1.0 for result in tuned)


def test_a_gain_of_ten_per_cent_is_proved_at_a_noise_of_five_and_its_interval_holds_it() -> None:
    found = proofs(lambda knobs, _: FASTER.get(knobs, 1.05), noise=0.05)
    kept = [result for result in found if result.knobs == BEST]
    assert len(kept) >= 0.8 * len(found)
    assert sum(result.gain is not None and result.gain.low <= 1.1 <= result.gain.high for result in kept) >= 0.9 * len(
        kept
    )
    for result in kept:
        assert result.gain is not None
        assert result.default_span_s / result.best_span_s == pytest.approx(result.gain.times)


def test_many_pairs_prove_a_gain_by_their_own_scatter_after_a_noisy_search() -> None:
    luck = np.random.default_rng(0)

    def calmer(knobs: Knobs, iteration: int) -> float:
        noise = 0.2 if iteration < 50 else 0.02
        return {DEFAULT: 1.0, BEST: 1.0 / 1.15}.get(knobs, 1.5) * math.exp(noise * luck.standard_normal())

    kept = [result for result in proofs(calmer, noise=0.0, seeds=40) if result.knobs == BEST]
    assert len(kept) >= 30
    assert all(result.gain is not None and result.gain.low > 1.0 for result in kept)


def test_on_a_busy_host_the_default_stays_after_the_final_comparison_and_the_log_reports_it() -> None:
    luck = np.random.default_rng(0)

    def busy(knobs: Knobs, iteration: int) -> float:
        return FASTER.get(knobs, 1.05) * (math.exp(abs(luck.standard_normal())) if iteration > 15 else 1.0)

    found = proofs(busy, noise=0.01, seeds=20)
    assert not any(result.tuned for result in found)
    assert any("other jobs seem to use the host" in result.reason and result.doubt for result in found)


def test_a_default_whose_drift_exceeds_the_gain_stays_and_the_log_reports_it() -> None:
    (found,) = proofs(lambda knobs, n: FASTER.get(knobs, 1.05) * 1.05**n, noise=0.0, seeds=1)
    assert not found.tuned
    assert "the default itself became" in found.reason


@pytest.mark.parametrize("times", [0.7, 0.99])
def test_a_remembered_setting_that_is_slower_in_its_first_paired_turns_is_replaced(times: float) -> None:
    spans = {DEFAULT: times, BEST: 1.0, streams(2): 0.4}
    found = Job(session(exact=remembered(BEST)), span_of=spans.__getitem__, search_with=ListArm(streams(2))).run()
    assert found.result.knobs == streams(2)


def test_a_remembered_setting_is_checked_however_small_the_budget_is_and_the_default_measured_if_it_cannot_be_run() -> (
    None
):
    job = Job(session(exact=remembered(BEST), budget_iterations=5)).run()
    assert (job.result.knobs, job.iterations) == (BEST, 13)
    broken = {DEFAULT: 0.2, BEST: math.inf}
    job = Job(session(exact=remembered(BEST)), span_of=broken.__getitem__).run()
    assert (job.result.knobs, job.result.default_span_s) == (DEFAULT, 0.2)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_remembered_setting_whose_gain_was_never_proved_is_proved_before_it_is_kept(noise: float) -> None:
    for seed in range(10):
        job = Job(session(exact=remembered(BEST, proved=False)), noise=noise, seed=seed).run()
        assert job.result.gain is not None
        assert job.result.gain.proved
        assert job.result.knobs == BEST


BUDGET = 12


def test_the_current_setting_stays_if_nothing_beats_it() -> None:
    arm = ListArm(streams(2), streams(3), BEST.but(unit_bytes=8 * MIB))
    job = Job(session(arm, default=BEST, retune=True, budget_iterations=BUDGET, seeds=[DEFAULT])).run()
    assert job.result.knobs == BEST
    assert not job.result.tuned
    assert "the setting that ran" in job.result.reason


@settings(deadline=None)
@given(noise=st.sampled_from([0.0, 0.03, 0.1, 0.3]), seed=st.integers(0, 99), discarded=st.integers(0, 2))
def test_the_budget_of_a_retune_is_never_exceeded(noise: float, seed: int, discarded: int) -> None:
    job = Job(
        session(
            default=streams(2), retune=True, budget_iterations=BUDGET, seeds=[DEFAULT], discarded_iterations=discarded
        ),
        noise=noise,
        seed=seed,
    ).run()
    assert job.iterations <= (38 if discarded == 2 else 31)


def test_of_a_few_proposals_the_best_is_found_at_a_noise_of_ten_per_cent() -> None:
    def changed(knobs: Knobs) -> float:
        return landscape(knobs.but(streams=max(1, knobs.streams // 4)))  # four times as many streams are needed

    better = BEST.but(streams=8)
    found = [
        Job(
            session(ListArm(streams(2), better, streams(6)), default=DEFAULT, retune=True, budget_iterations=BUDGET),
            span_of=changed,
            noise=0.1,
            seed=seed,
        )
        .run()
        .result.knobs
        for seed in range(40)
    ]
    assert found.count(better) >= 30


QUIET = 0.02


def setting(*spans_s: float) -> Setting:
    knobs = Knobs(unit_bytes=MIB, streams=1, transport=TransportKind.GLOO)
    return Setting(knobs=knobs, arm="a", spans_s=list(spans_s))


@pytest.mark.parametrize(
    ("other_times", "exact_s", "default_s", "changed"),
    [
        (1.5, 0.1, 0.2, False),
        (1.5, 0.13, 0.26, False),  # a busier machine
        (1.5, 0.2, 0.4, True),
        (1.5, 0.05, 0.1, True),
        (1.5, 0.1, 0.1, True),  # it gains nothing any more
        (1.5, 0.1, 0.5, True),  # it gains more
        (1.5, 0.11, 0.19, False),
        (1.5, 0.15, 0.15, True),
        (1.5, math.inf, 0.2, False),  # it could not be measured
        (3.0, 0.2, 0.4, False),  # times vary more, gains do not
        (3.0, 0.4, 0.8, True),
        (3.0, 0.2, 0.25, True),
    ],
)
def test_a_gain_that_differs_counts_more_than_times_that_do(
    other_times: float, exact_s: float, default_s: float, changed: bool
) -> None:
    promise = Remembered(knobs=BEST, best_s=0.1, default_s=0.2, noise=QUIET, other_times=other_times)
    assert promise.contradicted_by(setting(*[exact_s] * 4), setting(*[default_s] * 4), noise=QUIET) == changed


@pytest.mark.parametrize(("span_s", "changed"), [(0.14, False), (0.3, True)])
def test_a_default_that_was_the_best_has_no_gain_to_change(span_s: float, changed: bool) -> None:
    both = setting(span_s, span_s)
    assert Remembered(knobs=BEST, best_s=0.1, default_s=0.1).contradicted_by(both, both, noise=QUIET) == changed


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_noise_alone_breaks_hardly_any(noise: float) -> None:
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(300):
        then, now = (np.exp(noise * rng.standard_normal((2, 4))) for _ in range(2))
        promise = Remembered(
            knobs=BEST, best_s=0.1 * np.median(then[0]), default_s=0.2 * np.median(then[1]), noise=noise
        )
        exact, default = setting(*(0.1 * now[0]).tolist()), setting(*(0.2 * now[1]).tolist())
        found += promise.contradicted_by(exact, default, noise=noise)
    assert found <= 6


TINY = replace(SPACE, unit_bytes=(64 * KIB, 128 * KIB))


UNTUNED = DEFAULT.but(unit_bytes=128 * KIB, streams=1)


def of_two_units(knobs: Knobs) -> Hashable:
    """One unit, or two of them on one or two streams."""
    units = 1 if knobs.unit_bytes > 70 * KIB else 2
    return units, min(units, knobs.streams)


class SameAgain(ListArm):
    """Proposes one setting for ever."""

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        return [Proposal(arm=self.name, knobs=UNTUNED)]


@pytest.mark.parametrize("arm", [SameAgain(), ListArm()])
def test_where_few_settings_differ_unproposed_ones_are_tried_too(arm: ListArm) -> None:
    span_s = {(1, 1): 1.0, (2, 1): 1.1, (2, 2): 0.5}
    job = Job(
        session(arm, space=TINY, default=UNTUNED, identity=of_two_units),
        span_of=lambda knobs: span_s[of_two_units(knobs)],  # type: ignore[index]
    ).run()
    assert {of_two_units(now.knobs) for now in job.assignments} == set(span_s)
    assert of_two_units(job.result.knobs) == (2, 2)


def test_neighbours_of_a_plan_are_uniform_units_of_its_size_and_their_neighbours() -> None:
    assert list(SPACE.around(BEST.but(cuts=(Cut(stop=5),)), ())) == [BEST, *SPACE.around(BEST, ())]


def test_a_session_walks_from_neighbour_to_neighbour() -> None:
    """An arm stops two steps off the best number of streams."""
    job = Job(session(ListArm(BEST.but(streams=2)), refine=True)).run()
    assert job.result.knobs.streams in (3, 4)
    assert job.result.best_span_s < landscape(BEST.but(streams=2))
    assert any(trial.arm == REFINEMENT_ARM for trial in job.session.trials)
    assert job.iterations <= 100


def test_where_noise_hides_neighbours_they_are_not_run() -> None:
    job = Job(session(ListArm(BEST.but(streams=2)), refine=True), noise=0.3).run()
    assert not any(trial.arm == REFINEMENT_ARM for trial in job.session.trials)


def test_settings_of_one_identity_are_neighbours_once() -> None:
    def identity(knobs: Knobs) -> int:
        return math.ceil(math.log2(knobs.streams))

    job = Job(session(ListArm(), refine=True, identity=identity)).run()
    ran = [trial.knobs for trial in job.session.trials if trial.arm == REFINEMENT_ARM]
    assert len({identity(knobs) for knobs in (DEFAULT, *ran)}) == len({DEFAULT, *ran})


def knobs(streams: int) -> Knobs:
    return Knobs(unit_bytes=MIB, streams=streams, transport=TransportKind.GLOO)


def ledger() -> Ledger:
    return Ledger(identity=lambda knobs: knobs)


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
def test_the_noise_is_learnt_from_repeated_measurements_and_not_from_differences_of_settings(noise: float) -> None:
    rng = np.random.default_rng(0)
    book = ledger()
    for count in range(1, 101):
        book.add(knobs(count), arm="a", spans_s=(count * np.exp(noise * rng.standard_normal(3))).tolist())
    assert book.noise == pytest.approx(noise, rel=0.2)


def test_a_few_outliers_do_not_make_the_noise_large() -> None:
    book = ledger()
    for count in range(1, 11):
        book.add(knobs(count), arm="a", spans_s=[1.0, 1.01])
    book.add(knobs(11), arm="a", spans_s=[1.0, 50.0])
    assert book.noise < 0.04


def test_a_lead_grows_with_the_measurements_and_is_symmetric() -> None:
    few, many = ledger(), ledger()
    for book, repeats in ((few, 1), (many, 4)):
        book.add(knobs(1), arm="a", spans_s=[1.0] * repeats)
        book.add(knobs(2), arm="a", spans_s=[1.1] * repeats)
    leads = []
    for book in (few, many):
        first, second = book.ranked()
        assert book.lead(first, second) == pytest.approx(-book.lead(second, first))
        leads.append(book.lead(first, second))
    assert 0.0 < 2.0 * leads[0] <= leads[1]


def test_the_span_takes_an_outlier_like_a_median_and_two_spans_like_a_mean() -> None:
    book = ledger()
    assert book.add(knobs(1), arm="a", spans_s=[1.0, 2.0]).span_s == 1.5
    assert book.add(knobs(2), arm="a", spans_s=[1.0, 1.1, 0.9, 1.0, 50.0]).span_s == pytest.approx(1.05)


# What loses something.
LOSSY_SPACE = replace(SPACE, lossy=("int8", "powersgd:4"), classes=(UnitClass.LARGE,))


def lossy_session(seed: int) -> TuningSession:
    arm = default_arms(space=LOSSY_SPACE, rng=np.random.default_rng(seed), budget_iterations=100)
    return session(arm, space=LOSSY_SPACE, refine=True)


@pytest.mark.lengthy
def test_compressors_that_gain_nothing_are_not_kept() -> None:
    """Each proof may be wrong in one of forty jobs."""
    jobs = [Job(lossy_session(seed), noise=0.03, seed=seed).run() for seed in range(20)]
    assert all(any(knobs.lossy for knobs in job.run_for(Purpose.TRIAL)) for job in jobs)
    assert sum(bool(job.result.knobs.lossy) for job in jobs) <= 2
    assert sum(job.result.tuned for job in jobs) >= 18
    assert all(job.iterations <= job.session.iterations_at_most == 250 for job in jobs)


def test_a_compressor_that_makes_iterations_faster_is_kept() -> None:
    def span_of(knobs: Knobs) -> float:
        return landscape(knobs) * (1.0 if not knobs.lossy else 0.6 if knobs.lossy.large == "int8" else 1.5)

    for seed in range(5):
        job = Job(lossy_session(seed), span_of=span_of, noise=0.03, seed=seed).run()
        assert job.result.knobs.lossy
        assert job.result.knobs.lossy.large == "int8"
        gain = job.result.gain
        assert gain is not None
        assert gain.proved
        # Over the default: what the fastest setting gains that loses nothing, and what compressing adds.
        lossless_s = min(span_of(knobs) for knobs in job.run_for(Purpose.FINALS) if not knobs.lossy)
        assert gain.times == pytest.approx(landscape(DEFAULT) / span_of(job.result.knobs), rel=0.15)
        assert gain.times > 1.3 * landscape(DEFAULT) / lossless_s
        assert "beat the fastest lossless setting in" in job.result.reason or lossless_s == landscape(DEFAULT)


def test_a_lossy_setting_slower_than_the_fastest_lossless_one_is_not_kept() -> None:
    compressed = BEST.but(lossy=Lossy.all_by("int8"))
    arm = ListArm(BEST, compressed, streams(2))
    job = Job(
        session(arm, space=LOSSY_SPACE), span_of=lambda knobs: landscape(knobs) * (1.1 if knobs.lossy else 1.0)
    ).run()
    assert compressed in job.run_for(Purpose.TRIAL)
    assert job.result.knobs == BEST


def test_a_retune_drops_a_compressor_that_has_become_slower() -> None:
    compressed = BEST.but(lossy=Lossy.all_by("int8"))
    retune = session(ListArm(BEST), space=LOSSY_SPACE, default=compressed, budget_iterations=25, retune=True)
    job = Job(retune, span_of=lambda knobs: landscape(knobs) * (2.0 if knobs.lossy else 1.0)).run()
    assert job.result.knobs == BEST
