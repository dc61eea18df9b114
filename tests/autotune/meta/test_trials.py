"""The books of a warm-up: what runs costs iterations, what has run is told once, and who is best by how much."""

import math
from typing import Any

import pytest
from fakes.warmup_job import BEST, DEFAULT, Believer, ListArm, streams

from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.meta.trials import DEFAULT_ARM, REGISTRY_ARM, Budget, Purpose, Trials
from sirtaki.autotune.trial import Proposal, Trial, TrialStatus


def trials(arm: Any = None, *, iterations: int = 100, running: Knobs | None = None, identity: Any = None) -> Trials:
    return Trials(
        default=DEFAULT,
        budget=Budget(iterations=iterations, discarded=1, measured=2),
        identity=identity or (lambda knobs: knobs),
        arm=arm or ListArm(),
        running=running,
    )


def run(book: Trials, knobs: Knobs, *spans_s: float, arm: str = "list", finish: bool = True) -> int:
    """Has a setting measured; the iterations that were discarded."""
    script = book.run(knobs, arm=arm, purpose=Purpose.TRIAL, measured=len(spans_s))
    now = next(script)
    assert (now.knobs, now.arm, now.purpose, now.measured_iterations) == (knobs, arm, Purpose.TRIAL, len(spans_s))
    with pytest.raises(StopIteration) as stop:
        script.send(list(spans_s))
    assert stop.value.value == list(spans_s)
    if finish:
        book.finish(Proposal(arm=arm, knobs=knobs))
    return now.discarded_iterations


def trial(knobs: Knobs, span_s: float, *, arm: str = "old", iterations: int = 2, **more: Any) -> Trial:
    return Trial(arm=arm, knobs=knobs, iterations=iterations, span_s=span_s, **more)


def test_iterations_are_discarded_where_the_knobs_change_and_all_are_counted() -> None:
    book = trials()
    assert run(book, DEFAULT, 1.0, 1.0) == 1
    assert run(book, DEFAULT, 1.0) == 0
    assert run(book, BEST, 0.5) == 1
    assert run(book, DEFAULT, 1.0) == 1
    assert book.budget.spent == 3 + 1 + 2 + 2


def test_what_runs_already_needs_no_discarded_iteration() -> None:
    assert run(trials(running=BEST), BEST, 1.0) == 0
    assert run(trials(running=DEFAULT), BEST, 1.0) == 1


def test_the_default_is_a_trial_of_its_own() -> None:
    arm = ListArm()
    book = trials(arm)
    script = book.run_default()
    now = next(script)
    assert (now.knobs, now.arm, now.purpose, now.measured_iterations) == (DEFAULT, DEFAULT_ARM, Purpose.DEFAULT, 2)
    with pytest.raises(StopIteration):
        script.send([1.0, 1.2])
    (told,) = arm.told
    assert (told.arm, told.span_s, told.status, told.was_best) == (DEFAULT_ARM, 1.1, TrialStatus.COMPLETE, False)
    assert book.all == [told]


def test_every_trial_is_told_with_what_became_of_it() -> None:
    arm = ListArm()
    book = trials(arm)
    run(book, DEFAULT, 1.0, 1.0)
    run(book, streams(2), 9.0)
    run(book, streams(3), math.inf)
    run(book, BEST, 0.5, 0.5)
    assert arm.told == book.all
    assert [one.status for one in arm.told] == [
        TrialStatus.COMPLETE,
        TrialStatus.PRUNED,
        TrialStatus.FAILED,
        TrialStatus.COMPLETE,
    ]
    assert [one.was_best for one in arm.told] == [False, False, False, True]
    assert book.since_best == 0
    run(book, streams(2), 9.0)
    assert book.since_best == 1
    assert arm.told[-1].iterations == 2  # both measurements


def test_an_arm_that_asked_for_more_has_its_trial_complete_only_then() -> None:
    book = trials()
    run(book, BEST, 0.5, 0.5, finish=False)
    book.finish(Proposal(arm="list", knobs=BEST, iterations=3))
    assert book.all[-1].status is TrialStatus.PRUNED
    run(book, BEST, 0.5, finish=False)
    book.finish(Proposal(arm="list", knobs=BEST, iterations=3))
    assert book.all[-1].status is TrialStatus.COMPLETE


def test_a_lead_within_the_noise_is_no_new_best() -> None:
    book = trials()
    run(book, DEFAULT, 1.0, 1.0)
    run(book, streams(2), 0.999, 0.999)
    assert not book.all[-1].was_best
    run(book, streams(3), 0.5, 0.5)
    run(book, streams(4), 0.499, 0.499)
    assert [one.was_best for one in book.all] == [False, False, True, False]
    assert book.since_best == 1


def test_the_fastest_is_best_if_it_leads_by_more_than_luck_and_what_was_named_beforehand_by_any_lead() -> None:
    book = trials()
    assert book.best_so_far() == DEFAULT
    run(book, DEFAULT, 1.0, 1.0)
    run(book, streams(2), 0.98, 0.98)
    assert book.best_so_far() == DEFAULT
    run(book, streams(3), 0.99, 0.99, arm=REGISTRY_ARM)
    assert book.best_so_far() == streams(3)
    run(book, streams(4), 0.5, 0.5)
    assert book.best_so_far() == streams(4)
    slower = trials()
    run(slower, DEFAULT, 1.0, 1.0)
    run(slower, streams(3), 1.01, 1.01, arm=REGISTRY_ARM)
    assert slower.best_so_far() == DEFAULT


def test_what_a_surrogate_believes_goes_before_what_was_measured() -> None:
    measured, believed = trials(), trials(Believer(BEST))
    for book in (measured, believed):
        run(book, BEST, 0.5, 0.5)
    assert measured.believed_s(BEST) == 0.5
    assert believed.believed_s(BEST) == 0.01
    assert measured.believed_s(DEFAULT) == math.inf
    assert measured.setting(DEFAULT).spans_s == []


def test_knobs_that_are_one_setting_share_their_measurements() -> None:
    book = trials(identity=lambda knobs: min(knobs.streams, 4))
    run(book, streams(4), 1.0)
    run(book, streams(8), 3.0)
    assert book.same(streams(6), streams(4))
    assert not book.same(streams(3), streams(4))
    assert book.setting(streams(6)).spans_s == [1.0, 3.0]


def test_an_earlier_sessions_trials_are_scaled_by_what_the_default_takes_now() -> None:
    arm = ListArm()
    book = trials(arm)
    run(book, DEFAULT, 2.0, 2.0)
    arm.told.clear()
    book.take_in([trial(DEFAULT, 5.0), trial(DEFAULT, 1.0), trial(BEST, 0.5, noise_s=0.1)])
    (told,) = arm.told  # the default was told just now
    assert (told.knobs, told.span_s, told.noise_s) == (BEST, 1.0, 0.2)
    assert book.setting(BEST).spans_s == [1.0, 1.0]
    assert book.best_so_far() == BEST


def test_they_count_as_they_are_where_the_default_was_not_measured_or_could_not_be() -> None:
    for default in ([], [trial(DEFAULT, math.inf)]):
        book = trials()
        run(book, DEFAULT, 2.0, 2.0)
        book.take_in([*default, trial(BEST, 0.5)])
        assert book.setting(BEST).span_s == 0.5


def test_of_several_trials_of_one_setting_the_last_holds_the_measurements_and_the_first_tells_who_proposed_it() -> None:
    arm = ListArm()
    book = trials(arm)
    run(book, DEFAULT, 1.0, 1.0)
    spent = book.budget.spent
    book.take_in([trial(BEST, 0.9, arm="first", iterations=1), trial(BEST, 0.5, arm="later", iterations=6)])
    assert book.setting(BEST).arm == "first"
    assert book.setting(BEST).spans_s == [0.5, 0.5]  # no more than a trial of this session has
    assert [one.span_s for one in arm.told[1:]] == [0.9, 0.5]
    assert book.budget.spent == spent + 6 + 1


def test_an_earlier_session_leaves_enough_for_a_duel_or_a_turn() -> None:
    many = [trial(streams(number), 1.0, iterations=40) for number in (2, 3, 4, 6)]
    for iterations, left in ((100, 12), (10, 7), (4, 1)):
        book = trials(iterations=iterations)
        book.take_in(many)
        assert book.budget.left == left


def test_who_beats_only_the_default_after_an_earlier_session_is_no_new_best() -> None:
    book = trials()
    run(book, DEFAULT, 1.0, 1.0)
    book.take_in([trial(DEFAULT, 1.0), trial(BEST, 0.3)])
    run(book, streams(2), 0.6, 0.6)
    assert not book.all[-1].was_best
    run(book, streams(3), 0.1, 0.1)
    assert book.all[-1].was_best


def test_what_is_left_for_trials_is_less_than_the_budget() -> None:
    book = trials()
    assert book.left == book.budget.left_for_trials(book.ledger.noise)
    assert 0 < book.left < 100
