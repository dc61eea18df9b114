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
        pytest.param("stand_still", "within 2 s: another rank has not come", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("operation", ["sum", "gather", pytest.param("gather_gloo", marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_is_named(run_ranks: RunRanks, operation: str, fault: str, says: str) -> None:
    env = {**OVER_MESH, "SIRTAKI_TRANSPORT": "gloo"} if operation == "gather_gloo" else OVER_MESH
    job = run_ranks("torch_backend_faults.py", 3, fault, operation, env=env, check=False, timeout_s=60)
    assert job.stdout.count(says) == 2, job.stdout + job.stderr
    assert job.stdout.count("again: ") == 2
