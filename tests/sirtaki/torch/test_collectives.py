"""Horovod's collectives on several ranks: values, errors, orders, joins and process sets."""

import pytest
from conftest import RunRanks
from rank_jobs import OVER_MESH, Job, integration, played_on_ranks, slow

ENV = {"SIRTAKI_REGISTRY": "off"}


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.integration)])
def test_every_collective_agrees_with_numpy(run_ranks: RunRanks, ranks: int) -> None:
    assert run_ranks("collectives_reference.py", ranks, 60, env=ENV).stdout.count("60 cases agree") == ranks


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.integration)])
def test_disagreements_are_errors_on_every_rank_and_the_job_continues(run_ranks: RunRanks, ranks: int) -> None:
    assert run_ranks("collectives_errors.py", ranks, env=ENV).stdout.count("as they should be") == ranks


test_groups_joins_gradients_and_process_sets_behave = played_on_ranks(
    "collectives_behaviour",
    *(Job(ranks, env=ENV) for ranks in (1, 2)),
    slow(Job(3, env=ENV)),
    integration(Job(4, env=ENV)),
    Job(3, "mesh", {**ENV, **OVER_MESH}),
)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.integration)])
def test_random_programs_in_different_orders_end_right(run_ranks: RunRanks, ranks: int) -> None:
    assert run_ranks("collectives_programs.py", ranks, 60, env=ENV).stdout.count("60 programs") == ranks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_thousand_random_programs_end_right(run_ranks: RunRanks, ranks: int) -> None:
    output = run_ranks("collectives_programs.py", ranks, 1000, env=ENV, timeout_s=115).stdout
    assert output.count("1000 programs") == ranks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_drawn_cases_agree_with_numpy(run_ranks: RunRanks, ranks: int) -> None:
    output = run_ranks("collectives_reference.py", ranks, 1000, env=ENV, timeout_s=115).stdout
    assert output.count("1000 cases agree") == ranks
