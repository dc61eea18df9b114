"""A rank that fails ends the job everywhere, soon, and is named."""

import pytest
from conftest import RunRanks

STALL = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4",
    "SIRTAKI_REGISTRY": "off",
}


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        (
            "raise",
            1,
            [
                "ValueError: a bad batch",
                "rank 1 ends the job, because it raised ValueError; it is in iteration 10",
                "has not computed 0.weight",
            ],
        ),
        ("exit", 3, ["rank 1 has ended"]),
        pytest.param("raise_exit", 9, ["rank 1 has ended its script"], marks=pytest.mark.slow),
        ("leave", 1, ["rank 1 has ended its script"]),
        ("kill", 137, ["signal 9"]),
        pytest.param("exit_in_c", 5, ["Exit code:    5"], marks=pytest.mark.slow),
        pytest.param(
            "stop_calling",
            1,
            ["missing: rank 1 runs faults.py", "in commit", "has not computed 0.weight"],
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_failing_rank_ends_the_job_and_is_named(
    run_ranks: RunRanks, fault: str, code: int, says: list[str], transport: str
) -> None:
    env = {**STALL, "SIRTAKI_TRANSPORT": transport, "SIRTAKI_TUNE": "0"}
    job = run_ranks("faults.py", 3, fault, env=env, check=False, timeout_s=90)
    assert job.returncode == code, job.stderr
    for text in says:
        assert text in job.stderr
    assert "done" not in job.stdout


@pytest.mark.parametrize(
    ("fault", "transport"),
    [
        ("transport", "gloo"),
        ("transport_thread", "shared_memory"),
        pytest.param("transport", "shared_memory", marks=pytest.mark.slow),
    ],
)
def test_an_error_below_training_is_reported_once_with_the_position_of_training(
    run_ranks: RunRanks, fault: str, transport: str
) -> None:
    env = {**STALL, "SIRTAKI_TRANSPORT": transport, "SIRTAKI_TUNE": "0"}
    job = run_ranks("faults.py", 2, fault, env=env, check=False, timeout_s=90)
    assert job.returncode == 1, job.stderr
    assert job.stderr.count("(rank 1, iteration 10, unit 1 of 1 (") == 1, job.stderr
    assert "0.weight" in job.stderr
    assert "ZeroDivisionError: a broken transport" in job.stderr
    assert "Exception in thread" not in job.stderr
    assert "done" not in job.stdout


def test_a_disagreement_is_reported_in_full_by_rank_0_and_in_a_line_by_its_peers(run_ranks: RunRanks) -> None:
    job = run_ranks("faults.py", 3, "mismatch", env={**STALL, "SIRTAKI_TUNE": "0"}, check=False, timeout_s=90)
    assert job.returncode == 1, job.stderr
    assert job.stderr.count("Traceback") == 1, job.stderr
    assert job.stderr.count("raised MismatchError: Mismatched ALLREDUCE tensor shapes") == 2, job.stderr


@pytest.mark.slow
def test_a_stall_is_a_warning_before_it_is_an_error(run_ranks: RunRanks) -> None:
    job = run_ranks("faults.py", 2, "stop_calling", env=STALL, check=False, timeout_s=60)
    # On a busy machine an earlier iteration may take a second, too.
    assert "rank 0 has waited 1 s for the gradients of iteration 10" in job.stderr
    assert job.stderr.index("has waited") < job.stderr.index("StallError")
    assert "StallError" in job.stderr


@pytest.mark.parametrize("fault", [pytest.param("none", marks=pytest.mark.slow), "fork"])
def test_without_a_fault_all_ranks_finish_also_where_a_process_they_forked_ends(
    run_ranks: RunRanks, fault: str
) -> None:
    env = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_TUNE": "0"}
    assert run_ranks("faults.py", 3, fault, env=env).stdout.count("done") == 3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_is_stopped_while_it_leaves_is_awaited(run_ranks: RunRanks, ranks: int) -> None:
    assert run_ranks("late_to_leave.py", ranks, timeout_s=60).stdout.count("ok") == ranks
