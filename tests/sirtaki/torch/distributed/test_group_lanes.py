"""A rank that does not take part in a large operation is soon named to its peers."""

import itertools
import re

import pytest
from conftest import RunRanks
from rank_jobs import OVER_MESH


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("kill", "PeerLostError: rank 1 has ended"),
        pytest.param("before", "PeerLostError: rank 1 has ended", marks=pytest.mark.slow),
        pytest.param("destroy", "PeerLostError: rank 1 has destroyed the process group", marks=pytest.mark.slow),
        pytest.param("stand_still", "within 2 s; a rank hangs", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "operation", ["sum", "gather", "compiled", pytest.param("gather_gloo", marks=pytest.mark.slow)]
)
def test_a_missing_rank_is_named(run_ranks: RunRanks, operation: str, fault: str, says: str) -> None:
    env = {**OVER_MESH, "SIRTAKI_TRANSPORT": "gloo"} if operation == "gather_gloo" else OVER_MESH
    job = run_ranks("torch_backend_faults.py", 3, fault, operation, env=env, check=False, timeout_s=60)
    assert job.stdout.count(says) == 2, job.stdout + job.stderr
    assert job.stdout.count("again: ") == 2


WAYS = (("shared_memory", "in_thread"), ("gloo", "submitting"), ("shared_memory", "submitting"), ("gloo", "waiting"))
AT_ONCE = (("sum", "sum"), ("gather", "small"))
"""Operation in which rank 1 fails, and operation of its peers: the same one, or one over Gloo."""

CASES = [
    pytest.param(ranks, *way, *doing, id="-".join([f"{ranks}-ranks", *way, *doing]), marks=marks)
    for ranks, way, doing, marks in (
        (2, WAYS[0], AT_ONCE[0], ()),
        (3, WAYS[1], AT_ONCE[1], ()),
        *(
            (ranks, way, doing, pytest.mark.slow)
            for ranks, way, doing in itertools.product(
                (2, 3), WAYS, (*AT_ONCE, ("sum", "barrier"), ("gather", "gather"), ("sum", "broadcast"))
            )
            if (ranks, way, doing) not in {(2, WAYS[0], AT_ONCE[0]), (3, WAYS[1], AT_ONCE[1])}
            and (*way, *doing) != ("gloo", "waiting", "sum", "sum")  # of which the rank at fault has done its part
            and (way != WAYS[0] or doing[0] == doing[1])  # whose thread begins when all ranks have come
        ),
    )
]


@pytest.mark.parametrize(("ranks", "transport", "fault", "operation", "meanwhile"), CASES)
def test_an_error_on_a_live_rank_is_reported_to_all_at_once(
    run_ranks: RunRanks, ranks: int, transport: str, fault: str, operation: str, meanwhile: str
) -> None:
    env = {**OVER_MESH, "SIRTAKI_TRANSPORT": transport, "SIRTAKI_HEARTBEAT_S": "120"}  # no heartbeat wakes anybody
    job = run_ranks("torch_backend_faults.py", ranks, fault, operation, meanwhile, env=env, check=False, timeout_s=60)
    told = re.findall(r"told after (.*) s: PeerFaultError: rank 1: .*a broken ", job.stdout)
    assert len(told) == ranks - 1, job.stdout + job.stderr
    assert max(map(float, told)) < 2.5
    assert job.stdout.count("again: PeerFaultError") == ranks - 1


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.integration)])
def test_a_mistake_and_a_group_that_ends_are_no_faults(run_ranks: RunRanks, ranks: int) -> None:
    output = run_ranks("torch_backend_faults.py", ranks, "none", env=OVER_MESH).stdout
    assert output.count("under way within 1 s") == ranks, output
    assert "told" not in output


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        pytest.param("kill", "PeerLostError: rank 1 has ended", marks=pytest.mark.slow),
        ("stand_still", "waited 2 s for the gradients of iteration 0"),
    ],
)
def test_a_rank_missing_in_a_step_of_ddp_is_named_within_the_groups_timeout(
    run_ranks: RunRanks, fault: str, says: str
) -> None:
    job = run_ranks("torch_backend_faults.py", 3, fault, "gradients", env=OVER_MESH, check=False, timeout_s=60)
    assert job.stdout.count(says) == 2, job.stdout + job.stderr
    assert job.stdout.count("again: ") == 2
