"""The bandit's credit: the O(1) book-keeping against the printed formula, and who is chosen."""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.autotune.meta.bandit import AUCBandit, Opening, window_for
from sirtaki.errors import TuningError

ARMS = ("grid", "pbt", "bayesian", "hyperband")

histories = st.lists(st.tuples(st.sampled_from(ARMS), st.booleans()), max_size=60)
windows = st.integers(min_value=1, max_value=25)


def textbook_auc(arm: str, window: Sequence[tuple[str, bool]]) -> float:
    """AIACC § VI: under a curve that goes up with each win of the arm, over that under one that always goes up."""
    wins = [won for user, won in window if user == arm]
    return sum(accumulate(wins)) / sum(accumulate([True] * len(wins))) if wins else 0.0


def textbook_score(arm: str, window: Sequence[tuple[str, bool]], exploration: float) -> float:
    uses = sum(user == arm for user, _ in window)
    if uses == 0:
        return math.inf
    return textbook_auc(arm, window) + exploration * math.sqrt(2.0 * math.log2(len(window)) / uses)


def replay(history: Sequence[tuple[str, bool]], *, window: int) -> AUCBandit:
    bandit = AUCBandit(ARMS, window=window)
    for arm, was_best in history:
        bandit.push(arm, was_best=was_best)
    return bandit


@given(history=histories, window=windows)
def test_the_running_sums_agree_with_the_formula_at_every_step(history: list[tuple[str, bool]], window: int) -> None:
    bandit = AUCBandit(ARMS, window=window)
    for step, (arm, was_best) in enumerate(history, start=1):
        bandit.push(arm, was_best=was_best)
        inside = history[max(0, step - window) : step]
        for name in ARMS:
            assert bandit.auc(name) == pytest.approx(textbook_auc(name, inside))
            assert bandit.score(name) == pytest.approx(textbook_score(name, inside, 0.2))


@given(history=histories, window=windows)
def test_credit_lies_between_never_and_always(history: list[tuple[str, bool]], window: int) -> None:
    bandit = replay(history, window=window)
    assert all(0.0 <= bandit.auc(arm) <= 1.0 for arm in ARMS)
    assert sum(bandit.uses(arm) for arm in ARMS) == min(len(history), window)


def test_an_unused_arm_comes_first() -> None:
    bandit = replay([("grid", True), ("pbt", True), ("bayesian", True)], window=10)
    assert bandit.ranking(np.random.default_rng(0))[0] == "hyperband"


def test_an_arm_whose_uses_have_left_the_window_comes_first_again() -> None:
    bandit = replay([("grid", True)] + [("pbt", True)] * 5 + [("bayesian", True), ("hyperband", True)], window=7)
    assert bandit.uses("grid") == 0
    assert bandit.ranking(np.random.default_rng(0))[0] == "grid"


def test_early_wins_count_more_than_late_ones_since_they_lift_the_rest_of_the_curve() -> None:
    late = replay([("grid", False), ("grid", False), ("grid", True)], window=10)
    early = replay([("grid", True), ("grid", False), ("grid", False)], window=10)
    assert late.auc("grid") == pytest.approx(1 / 6)
    assert early.auc("grid") == pytest.approx(3 / 6)


def test_a_win_is_forgotten_once_it_has_left_the_window() -> None:
    uses = [("grid", True), *[("pbt", False)] * 8, ("grid", False)]
    assert replay(uses, window=10).auc("grid") == pytest.approx(2 / 3)
    assert replay([*uses, ("pbt", False)], window=10).auc("grid") == 0.0


def test_an_arm_that_always_wins_has_the_whole_area() -> None:
    assert replay([("pbt", True)] * 9, window=5).auc("pbt") == 1.0


def test_exploration_shrinks_with_use() -> None:
    bandit = replay(
        [("grid", False)] * 4 + [("pbt", False)] * 2 + [("bayesian", False), ("hyperband", False)], window=9
    )
    order = bandit.ranking(np.random.default_rng(0))
    assert set(order[:2]) == {"bayesian", "hyperband"}
    assert order[2:] == ["pbt", "grid"]


def test_ties_are_broken_by_the_given_generator_alone() -> None:
    bandit = AUCBandit(ARMS, window=5)
    orders = {tuple(bandit.ranking(np.random.default_rng(seed))) for seed in range(30)}
    assert len(orders) > 5
    assert bandit.ranking(np.random.default_rng(4)) == bandit.ranking(np.random.default_rng(4))


def test_a_single_use_in_a_window_of_one_is_scored() -> None:
    bandit = replay([("grid", True)], window=1)
    assert bandit.score("grid") == 1.0  # log2(1) = 0: no exploration


def test_the_window_slides_within_the_budget_and_has_room_for_every_arm() -> None:
    assert window_for(100, 4) == 50
    assert window_for(33, 10) == 16
    assert window_for(10, 8) == 8


@pytest.mark.parametrize("arms", [(), ("grid", "grid")])
def test_arms_without_a_name_of_their_own_are_refused(arms: tuple[str, ...]) -> None:
    with pytest.raises(TuningError, match="different names"):
        AUCBandit(arms, window=3)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(TuningError, match="at least one use"):
        AUCBandit(ARMS, window=0)


def test_the_arms_can_open_in_the_order_given_and_score_decides_afterwards() -> None:
    bandit = AUCBandit(ARMS, window=10)
    rng = np.random.default_rng(0)
    opened = []
    for _ in ARMS:
        opened.append(bandit.ranking(rng, opening=Opening.AS_GIVEN)[0])
        bandit.push(opened[-1], was_best=opened[-1] == "bayesian")
    assert opened == list(ARMS)
    assert bandit.ranking(rng, opening=Opening.AS_GIVEN)[0] == "bayesian"
