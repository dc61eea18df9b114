"""Whoever waits for large tensors of a rank that does not come is told which one, and soon."""

import pytest
from conftest import RunRanks
from rank_jobs import OVER_MESH


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("kill", "PeerLostError: rank 1 has ended"),
        pytest.param("before", "PeerLostError: rank 1 has ended", marks=pytest.mark.slow),
        pytest.param("destroy", "PeerLostError: rank 1 has destroyed the process group", marks=pytest.mark.slow),
        pytest.param("stand_still", "StallError: a tensor of 500000 elements was not reduced", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_does_not_come_is_named(run_ranks: RunRanks, fault: str, says: str) -> None:
    job = run_ranks("torch_backend_faults.py", 3, fault, env=OVER_MESH, check=False, timeout_s=60)
    assert job.stdout.count(says) == 2, job.stdout + job.stderr
    assert job.stdout.count("again: ") == 2
