"""How a warm-up's iterations are shared out between trials and finals."""

from sirtaki.autotune.meta.trials import Budget


def test_trials_may_use_what_the_finals_do_not_need() -> None:
    budget = Budget(iterations=100, discarded=1, measured=2)
    assert (budget.turn, budget.duel) == (3, 6)
    assert budget.left_for_trials(noise=0.0) == 100 - 15
    assert budget.left_for_trials(noise=0.05) == 100 - 25
    assert budget.left_for_trials(noise=1.0) == 100 - 30
    budget.spent = 95
    assert budget.left == 5
    assert budget.left_for_trials(noise=0.0) < 0


def test_a_duel_is_always_kept_for_the_finals() -> None:
    assert Budget(iterations=10, discarded=1, measured=2).left_for_trials(noise=0.0) == 10 - 6


def test_turns_are_longer_only_where_it_is_noisy() -> None:
    budget = Budget(iterations=100, discarded=1, measured=2, spent=40)
    assert budget.turn_iterations(0.01, field=3, rounds=2) == 2
    assert budget.turn_iterations(0.2, field=3, rounds=2) == 60 // 6 - 1


def test_a_short_warm_up_keeps_nothing_for_neighbours() -> None:
    assert Budget(iterations=100, discarded=1, measured=2).for_refinement(noise=0.04) == 12
    assert Budget(iterations=40, discarded=1, measured=2).for_refinement(noise=0.04) == 0
