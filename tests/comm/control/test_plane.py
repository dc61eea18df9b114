"""The control plane: who is where, and what all agree on."""

import pytest
from conftest import RunRanks
from rank_jobs import OVER_MESH


@pytest.mark.parametrize(("ranks", "local_size"), [(1, "all"), (2, "all"), (3, "all"), (4, 2), (4, 1)])
def test_ranks_agree_and_know_their_places(run_ranks: RunRanks, ranks: int, local_size: str | int) -> None:
    output = run_ranks("control.py", ranks, local_size).stdout
    assert sorted(output.split("\n")[:-1]) == [f"ok {rank}" for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "local_size"), [(4, 2), pytest.param(1, "all", marks=pytest.mark.slow)])
def test_they_do_over_a_mesh(run_ranks: RunRanks, ranks: int, local_size: str | int) -> None:
    output = run_ranks("control.py", ranks, local_size, env=OVER_MESH).stdout
    assert sorted(output.split("\n")[:-1]) == [f"ok {rank}" for rank in range(ranks)]
