"""A function that raises in a process that goes on: the job of this rank ends."""

import pytest
from conftest import RunRanks
from rank_jobs import OVER_MESH, UNTUNED


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_other_ranks_hear_of_it_and_all_can_begin_anew(run_ranks: RunRanks, ranks: int) -> None:
    assert run_ranks("ray_telling.py", ranks, env={**UNTUNED, **OVER_MESH}).stdout.count("went on") == ranks
