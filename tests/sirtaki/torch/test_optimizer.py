"""Programs for ranks that train with a DistributedOptimizer; each compares itself with training in one process."""

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., Any]
UNTUNED = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "0"}
TUNED = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "60"}
SMALL_UNITS = {**UNTUNED, "SIRTAKI_UNIT_BYTES": "65536"}
TWO_NODES = {**UNTUNED, "SIRTAKI_LOCAL_SIZE": "2", "SIRTAKI_STREAMS": "3"}
GLOO = {**UNTUNED, "SIRTAKI_TRANSPORT": "gloo", "SIRTAKI_STREAMS": "3"}
NEVER_ENDING_WARMUP = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "100000"}


def test_training_on_two_ranks_equals_training_on_the_joined_batch(run_ranks: RunRanks) -> None:
    run_ranks("optimizer_training.py", 2, env=UNTUNED, timeout_s=110)


def test_plans_tried_by_the_warmup_change_no_gradient(run_ranks: RunRanks) -> None:
    run_ranks("optimizer_training.py", 2, "plans_that_change", env=TUNED, timeout_s=110)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "env"),
    [(1, UNTUNED), (2, TUNED), (3, SMALL_UNITS), (3, NEVER_ENDING_WARMUP), (4, TUNED), (4, TWO_NODES)],
)
def test_training_on_any_number_of_ranks_equals_training_on_the_joined_batch(
    run_ranks: RunRanks, ranks: int, env: dict[str, str]
) -> None:
    run_ranks("optimizer_training.py", ranks, env=env, timeout_s=500)


def test_sparse_gradients_groups_process_sets_and_join_on_three_ranks(run_ranks: RunRanks) -> None:
    run_ranks("optimizer_features.py", 3, env=UNTUNED, timeout_s=110)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "env"), [(1, UNTUNED), (2, TUNED), (4, UNTUNED), (4, TUNED)])
def test_sparse_gradients_groups_process_sets_and_join_on_any_number_of_ranks(
    run_ranks: RunRanks, ranks: int, env: dict[str, str]
) -> None:
    run_ranks("optimizer_features.py", ranks, env=env, timeout_s=500)


def test_shared_parameters_and_dropped_closed_and_rewrapped_optimizers_on_two_ranks(run_ranks: RunRanks) -> None:
    run_ranks("optimizer_lifetimes.py", 2, env=UNTUNED, timeout_s=110)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "only", "env"),
    [(1, "", UNTUNED), (3, "", UNTUNED), (3, "", TUNED), (4, "", TWO_NODES), (2, "many", UNTUNED), (2, "many", GLOO)],
)
def test_shared_parameters_and_lifetimes_on_any_number_of_ranks(
    run_ranks: RunRanks, ranks: int, only: str, env: dict[str, str]
) -> None:
    run_ranks("optimizer_lifetimes.py", ranks, *filter(None, [only]), env=env, timeout_s=850)
