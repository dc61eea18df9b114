"""What a warm-up session makes of what earlier jobs have left: settings, seeds, unfinished trials."""

import math
from dataclasses import replace

import numpy as np
import pytest
from fakes.warmup_job import BEST, DEFAULT, OUTSIDE, SPACE, Job, ListArm, landscape, session, streams

from sirtaki.autotune.knobs import MIB, Knobs
from sirtaki.autotune.meta.bandit import BanditArm, Opening
from sirtaki.autotune.meta.session import PLAN_ARM, REGISTRY_ARM, Promise, Purpose
from sirtaki.autotune.trial import Arm, Trial
from sirtaki.errors import PlanError, TuningError


def test_the_registrys_setting_runs_at_once_and_ends_the_warm_up_if_it_beats_the_default() -> None:
    arm = ListArm(streams(2))
    warm_up = session(arm, exact=BEST)
    assert warm_up.assignment.knobs == BEST
    assert warm_up.assignment.arm == REGISTRY_ARM
    job = Job(warm_up).run()
    assert job.result.knobs == BEST
    assert job.result.arm == REGISTRY_ARM
    assert job.result.iterations_used <= 12
    assert arm.asked == 0
    assert "registry" in job.result.reason


def test_checking_the_registrys_setting_takes_few_iterations_even_where_it_is_noisy() -> None:
    jobs = [
        Job(session(ListArm(), exact=BEST), span_of=lambda knobs: 0.1, noise=0.3, seed=seed).run() for seed in range(20)
    ]
    kept = [job for job in jobs if "checked against the default" in job.result.reason]
    assert len(kept) > 10
    assert all(job.result.iterations_used <= 3 * 2 * (1 + 4) for job in kept)


def test_a_registrys_setting_that_loses_is_followed_by_the_usual_search() -> None:
    slow = replace(DEFAULT, unit_bytes=64 * MIB)
    arm = ListArm(BEST)
    job = Job(session(exact=slow), search_with=arm).run()
    assert job.assignments[0].knobs == slow
    assert job.result.knobs == BEST
    assert job.result.default_span_s == pytest.approx(landscape(DEFAULT))
    assert [trial.knobs for trial in arm.told[:2]] == [slow, DEFAULT]


def test_after_a_registrys_setting_that_loses_similar_jobs_settings_come_first_within_the_space_that_is_left() -> None:
    warm_up = session(exact=replace(DEFAULT, unit_bytes=64 * MIB))
    while warm_up.assignment.purpose is not Purpose.SEARCH:
        warm_up.record([landscape(warm_up.assignment.knobs)] * warm_up.assignment.measured_iterations)
    assert warm_up.assignment.knobs == DEFAULT
    narrow = replace(SPACE, streams=(1, 4))
    warm_up.begin_search(ListArm(streams(2), streams(4)), space=narrow, seeds=[BEST])
    job = Job(warm_up).run()
    assert set(job.run_for(Purpose.TRIAL)) == {BEST, streams(4)}
    assert job.assignments[0].knobs == BEST
    with pytest.raises(TuningError, match="begins after"):
        warm_up.begin_search(ListArm(), space=SPACE)


@pytest.mark.parametrize("exact", [BEST, DEFAULT])
@pytest.mark.parametrize("times", [0.3, 1.0, 3.5])
def test_a_registrys_setting_is_where_a_short_search_begins_if_the_link_has_changed(exact: Knobs, times: float) -> None:
    better = replace(BEST, unit_bytes=8 * MIB)
    arm = ListArm(better)
    promise = Promise(exact_s=times * landscape(exact), default_s=times * landscape(DEFAULT))
    warm_up = session(exact=exact, promise=promise, budget_iterations=1000)
    job = Job(warm_up, search_with=arm, span_of=lambda knobs: 0.05 if knobs == better else landscape(knobs)).run()
    assert job.result.knobs == (exact if times == 1.0 else better)
    assert job.result.iterations_used < 60
    assert arm.asked == (0 if times == 1.0 else 2)


def test_a_registrys_setting_that_gains_less_than_it_did_is_where_a_short_search_begins() -> None:
    better = replace(BEST, unit_bytes=8 * MIB)
    promise = Promise(exact_s=landscape(DEFAULT) / 3.0, default_s=landscape(DEFAULT))
    spans_s = {BEST: 0.9 * landscape(DEFAULT), better: landscape(DEFAULT) / 2.0}
    arm = ListArm(better)
    job = Job(
        session(exact=BEST, promise=promise),
        search_with=arm,
        span_of=lambda knobs: spans_s.get(knobs, landscape(DEFAULT)),
    ).run()
    assert job.result.knobs == better
    assert job.assignments[0].knobs == BEST


@pytest.mark.parametrize("exact", [BEST, None])
def test_what_cannot_be_expanded_to_a_plan_is_refused_wherever_it_comes_from(
    exact: Knobs | None, caplog: pytest.LogCaptureFixture
) -> None:
    def identity(knobs: Knobs) -> Knobs:
        if knobs.streams in (3, 4):
            raise PlanError("the units end at element 3 of 5")
        range(knobs.unit_bytes)
        return knobs

    strange = replace(DEFAULT, unit_bytes=2.5 * MIB)  # type: ignore[arg-type]
    arm = ListArm(BEST, streams(3), strange, streams(2))
    history = [Trial(arm="grid", knobs=knobs, iterations=2, span_s=0.1) for knobs in (BEST, DEFAULT)]
    job = Job(session(arm, exact=exact, seeds=[BEST], history=history, identity=identity)).run()
    assert not {now.knobs for now in job.assignments} & {BEST, streams(3)}
    assert job.result.knobs == streams(2)
    assert caplog.text.count("do not fit") == 1


def test_a_claimed_history_is_read_no_farther_than_a_session_can_have_gone() -> None:
    history = [Trial(arm="grid", knobs=DEFAULT, iterations=10**9, span_s=span_s) for span_s in (0.1, math.inf)] * 5000
    seen: list[Knobs] = []

    def identity(knobs: Knobs) -> Knobs:
        seen.append(knobs)
        return knobs

    job = Job(session(ListArm(BEST), history=history, identity=identity)).run()
    assert job.result.knobs == BEST
    assert len(seen) < 1000


def test_a_registry_that_knows_the_default_as_best_ends_the_warm_up() -> None:
    job = Job(session(exact=DEFAULT)).run()
    assert job.result.knobs == DEFAULT
    assert job.result.iterations_used == 3


def test_a_registrys_setting_outside_the_space_is_not_run() -> None:
    job = Job(session(ListArm(BEST), exact=OUTSIDE)).run()
    assert OUTSIDE not in [now.knobs for now in job.assignments]
    assert job.result.knobs == BEST


def test_what_similar_jobs_found_counts_as_better_by_any_lead_and_what_an_arm_proposes_by_a_clear_one() -> None:
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


def test_a_plan_that_the_user_gives_is_the_very_first_proposal_and_kept_only_if_it_is_faster() -> None:
    arm = ListArm(streams(8))
    job = Job(session(arm, given=BEST, seeds=[streams(2)])).run()
    assert list(dict.fromkeys(job.run_for(Purpose.TRIAL))) == [BEST, streams(2), streams(8)]
    assert (job.result.knobs, job.result.arm) == (BEST, PLAN_ARM)
    slow = replace(DEFAULT, unit_bytes=64 * MIB)
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
        (DEFAULT, replace(DEFAULT, unit_bytes=64 * MIB), DEFAULT),
        (BEST, OUTSIDE, BEST),
    ],
)
def test_a_plan_that_the_user_gives_is_compared_with_the_registrys_setting(
    exact: Knobs, given: Knobs, kept: Knobs
) -> None:
    arm = ListArm(streams(8))
    job = Job(session(arm, exact=exact, given=given)).run()
    assert job.result.knobs == kept
    assert arm.asked == 0
    assert OUTSIDE not in [now.knobs for now in job.assignments]
    whose = {BEST: "the plan that was given" if exact != BEST else "the registry's setting"}.get(
        kept, "the registry knows"
    )
    assert whose in job.result.reason


def test_where_neither_holds_a_search_begins_and_the_plan_is_not_run_again() -> None:
    slow, slower = replace(DEFAULT, unit_bytes=48 * MIB), replace(DEFAULT, unit_bytes=64 * MIB)
    job = Job(session(exact=slow, given=slower), search_with=ListArm(BEST)).run()
    assert job.result.knobs == BEST
    assert slower not in job.run_for(Purpose.TRIAL)
    assert slower in job.run_for(Purpose.FINALS)


def test_cut_short_the_best_so_far_is_known_at_any_moment() -> None:
    job = Job(session(ListArm(streams(2), BEST, streams(8))))
    assert job.result.knobs == DEFAULT
    assert math.isinf(job.result.default_span_s)
    job.run(5)
    assert not job.session.done
    assert job.result.knobs == BEST
    assert job.result.reason == "the warm-up was cut short"


def test_a_job_cut_short_goes_on_where_it_was() -> None:
    first = Job(session(ListArm(streams(2), BEST))).run(5)
    arm = ListArm(BEST, streams(8))
    told = [Trial.from_json(trial.to_json()) for trial in first.session.trials]
    second = Job(session(arm, history=told), span_of=lambda knobs: 3.0 * landscape(knobs)).run()
    assert second.run_for(Purpose.TRIAL) == [streams(8)]  # BEST is known and not run again
    assert second.result.knobs == BEST
    recalled = next(trial for trial in arm.told if trial.knobs == BEST)
    assert recalled.span_s == pytest.approx(3.0 * landscape(BEST))  # scaled by what the default takes now
    assert second.result.iterations_used > second.iterations


class Named(ListArm):
    def __init__(self, name: str, *proposals: Knobs) -> None:
        self.name = name
        super().__init__(*proposals)


def bandit_of(*arms: Arm) -> BanditArm:
    return BanditArm(arms, rng=np.random.default_rng(0), window=20, opening=Opening.AS_GIVEN)


@pytest.mark.parametrize("records", [5, 30])
def test_the_bandit_of_a_job_that_goes_on_knows_what_each_arm_has_earned(records: int) -> None:
    arms = Named("lucky", streams(2), BEST), Named("unlucky", replace(DEFAULT, unit_bytes=64 * MIB), streams(8))
    before = bandit_of(*arms)
    first = Job(session(before)).run(records)  # cut short among the trials, or in the finals
    assert not first.session.done or records == 30
    told = [Trial.from_json(trial.to_json()) for trial in first.session.trials]
    after = bandit_of(Named("lucky"), Named("unlucky"))
    second = Job(session(after, history=told)).run(1)
    assert after.credits == before.credits
    assert after.credits["lucky"] > after.credits["unlucky"]
    assert [after.bandit.uses(arm) for arm in after.bandit.arms] == [
        before.bandit.uses(arm) for arm in before.bandit.arms
    ]
    assert second.result.arm == "lucky"


def test_a_job_that_goes_on_credits_nobody_for_less_than_the_best_of_before() -> None:
    first = Job(session(ListArm(BEST))).run(3)
    told = [Trial.from_json(trial.to_json()) for trial in first.session.trials]
    second = Job(session(ListArm(streams(2), streams(3)), history=told)).run()
    assert landscape(streams(3)) < landscape(DEFAULT)
    assert not any(trial.was_best for trial in second.session.trials if trial.knobs != BEST)


def test_a_history_that_used_the_budget_leaves_the_finals() -> None:
    history = [Trial(arm="list", knobs=BEST, iterations=500, span_s=0.01)]
    job = Job(session(ListArm(streams(2)), history=history)).run()
    assert job.run_for(Purpose.TRIAL) == []
    assert BEST in job.run_for(Purpose.FINALS)
