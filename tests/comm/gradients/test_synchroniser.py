"""Gradients are reduced right, whatever the order in which they come."""

import pytest
from conftest import RunRanks


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3, 4))])
def test_gradients_equal_the_mean_in_any_order_and_under_any_plan(run_ranks: RunRanks, ranks: int) -> None:
    output = run_ranks("synchroniser.py", ranks, 8, timeout_s=100).stdout
    assert output.count("ok ") == ranks


@pytest.mark.slow
def test_a_thousand_iterations_in_random_orders_stay_right(run_ranks: RunRanks) -> None:
    assert run_ranks("synchroniser.py", 3, 1000, timeout_s=600).stdout.count("ok ") == 3
