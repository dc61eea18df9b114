"""Gradients over streams are right without a GPU: on streams that are late at random, and memory that is used again.

The order in which NCCL would be used is compared between the ranks by the programme itself.
"""

import re

import pytest
from conftest import RunRanks
from rank_jobs import ONLY_OVER_MPI

from sirtaki.comm.plan import NcclWay

pytestmark = ONLY_OVER_MPI  # which plays NCCL here


def run(run_ranks: RunRanks, what: str, ranks: int, iterations: int = 1, *, local_size: str = "") -> str:
    env = {"TEST_LOCAL_SIZE": local_size} if local_size else {}
    output: str = run_ranks("streams.py", ranks, what, iterations, env=env, timeout_s=110).stdout
    assert output.count("ok ") == ranks
    return output


SLOW = pytest.mark.slow


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_units_on_several_communicators_pass_the_conformance_suite(run_ranks: RunRanks, ranks: int) -> None:
    assert "route nccl flat" in run(run_ranks, "nccl-conform", ranks)


@SLOW
def test_hierarchical_units_pass_the_conformance_suite(run_ranks: RunRanks) -> None:
    assert "route nccl hierarchical" in run(run_ranks, "nccl-conform", 4, local_size="2")


@SLOW
def test_units_staged_through_the_host_pass_the_conformance_suite(run_ranks: RunRanks) -> None:
    assert "route staged flat" in run(run_ranks, "staged-conform", 2)


@SLOW
def test_units_staged_hierarchically_pass_the_conformance_suite(run_ranks: RunRanks) -> None:
    assert "route staged hierarchical" in run(run_ranks, "staged-conform", 4, local_size="2")


def test_sums_are_right_under_every_nccl_setting(run_ranks: RunRanks) -> None:
    output = run(run_ranks, "nccl-ways", 2)
    assert output.count("summed by") == 2 * len(NcclWay)
    assert f"on {2 * len(NcclWay)} communicators" in output


@pytest.mark.integration
def test_one_stream_is_compared_with_two(run_ranks: RunRanks) -> None:
    run(run_ranks, "nccl-gain", 2)


@pytest.mark.parametrize("what", ["nccl-train", pytest.param("staged-train", marks=SLOW)])
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_gradients_equal_the_mean_though_everything_happens_late(run_ranks: RunRanks, what: str, ranks: int) -> None:
    run(run_ranks, what, ranks, 12)


@SLOW
def test_gradients_equal_the_mean_between_nodes(run_ranks: RunRanks) -> None:
    run(run_ranks, "nccl-train", 4, 20, local_size="2")


@pytest.mark.parametrize(("what", "ranks"), [("nccl-two", 3), pytest.param("staged-two", 3, marks=SLOW)])
def test_two_optimizers_in_one_backward_pass_use_nccl_in_one_order(run_ranks: RunRanks, what: str, ranks: int) -> None:
    run(run_ranks, what, ranks, 10)


@SLOW
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["nccl-train", "staged-train", "nccl-two"])
def test_hundreds_of_iterations_on_late_streams_stay_right(run_ranks: RunRanks, what: str) -> None:
    output = run_ranks("streams.py", 2, what, 300, timeout_s=580).stdout
    assert output.count("ok ") == 2


@pytest.mark.integration
def test_a_job_tunes_on_streams_and_frees_streams_that_its_winner_does_not_need(run_ranks: RunRanks) -> None:
    job = run_ranks("streams_training.py", 2, 180, "nothing", 0, env={"SIRTAKI_WARMUP_ITERATIONS": "60"}, timeout_s=100)
    assert "tuned in" in job.stderr
    opened, left = map(int, re.findall(r"done 0; opened (\d+), left (\d+)", job.stdout)[0])
    assert 1 <= left < opened


def test_a_rank_that_stays_away_from_a_gpu_that_waits_ends_the_job_by_name(run_ranks: RunRanks) -> None:
    env = {
        "SIRTAKI_TUNE": "0",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3",
    }
    job = run_ranks("streams_training.py", 2, 20, "sleep", 8, env=env, check=False, timeout_s=60)
    assert job.returncode != 0
    assert "the job has failed while its GPU waits" in job.stderr
    assert "missing: rank 1 runs streams_training.py" in job.stderr
    assert re.search(r"its GPU waits for unit 1 of \d+ \(2\.bias.*\) on stream 0", job.stderr)


def test_an_error_of_nccl_ends_the_job_by_name(run_ranks: RunRanks) -> None:
    job = run_ranks("streams_training.py", 2, 100, "error", 8, env={"SIRTAKI_TUNE": "0"}, check=False, timeout_s=60)
    assert job.returncode != 0
    assert "the NCCL communicator of stream 0 failed: remote error" in job.stderr
