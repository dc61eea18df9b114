"""Ranks of every launcher meet where the script says `init_method="sirtaki://"`."""

import pytest
from conftest import RunRanks
from rank_jobs import ONLY_OVER_MPI, OVER_MESH


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="mpiexec", marks=ONLY_OVER_MPI),
        pytest.param(OVER_MESH, id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_ranks_meet(run_ranks: RunRanks, env: dict[str, str]) -> None:
    told = run_ranks("torch_backend_meeting.py", 3, env=env).stdout.splitlines()
    assert sorted(told) == [f"rank {rank} of 3: 3" for rank in range(3)]
