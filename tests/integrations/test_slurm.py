"""The scripts of examples/slurm on a Slurm cluster of this machine: they train, get signals, and resume."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from integrations.launching import EXAMPLES, PROGRAMS
from integrations.slurm_cluster import Job, SlurmCluster, why_unavailable

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_unavailable() is not None, reason=f"no Slurm here: {why_unavailable()}"),
]

SLOWED = Path(__file__).parent / "slowed.py"
DIGITS = EXAMPLES / "elastic_digits.py"
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "SIRTAKI_REGISTRY": "off",
    "SIRTAKI_WARMUP_ITERATIONS": "26",
    "SIRTAKI_CHECKPOINT_S": "3600",  # none but those that a signal asks for
    "PATH": os.pathsep.join((str(PROGRAMS), os.environ["PATH"])),
    "PYTHONPATH": str(EXAMPLES.parent),
}
END_S = 200.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster() as found:
        yield found


def places(cluster: SlurmCluster, ranks: int) -> list[str]:
    """Options for so many ranks on all nodes, which win over those in a script."""
    nodes = len(cluster.nodes)
    return [f"--nodes={nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={-(-ranks // nodes)}"]


def submit(
    cluster: SlurmCluster,
    folder: Path,
    script: str,
    *options: str,
    ranks: int = 2,
    words: tuple[Path, ...] = (SLOWED, DIGITS),
) -> Job:
    path = EXAMPLES / "slurm" / script
    return cluster.submit(path, *places(cluster, ranks), *options, words=words, environ=ENVIRON, folder=folder)


def epochs(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"epoch (\d+): loss", text)]


def assert_trained(text: str) -> None:
    accuracy = re.search(r"accuracy: ([\d.]+) %", text)
    assert accuracy is not None, text
    assert float(accuracy[1]) > 85


def test_jobs_of_an_array_run_at_once_with_uneven_numbers_of_ranks(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "train.sh", "--array=0-1", ranks=3, words=(DIGITS,))
    assert job.wait(END_S) == "COMPLETED", job.output()
    for output in tmp_path.glob("slurm-*.txt"):
        assert epochs(output.read_text()) == [1, 2, 3, 4, 5, 6]
        assert_trained(output.read_text())
    assert len(list(tmp_path.glob("slurm-*.txt"))) == 2


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("train.sh", ("scancel", "--signal=TERM")),
        ("train.sh", ("scontrol", "requeue")),
        ("sirtakirun.sh", ("scancel", "--batch", "--signal=USR1")),
    ],
)
def test_a_job_that_gets_a_signal_resumes_from_its_last_commit(
    cluster: SlurmCluster, tmp_path: Path, script: str, words: tuple[str, ...]
) -> None:
    job = submit(cluster, tmp_path, script)
    job.wait_for("epoch 2:", END_S)
    cluster.ask(*words, job.number)
    cluster.wait_for(lambda: job.show("JobState") == "PENDING", END_S, "requeue")
    first = job.output()
    assert "commit" in first
    assert_ended(cluster)
    cluster.wait_for(cluster.is_idle, END_S, "idle nodes")
    time.sleep(1.5)  # a node refuses to start a job anew in the second in which it has ended it
    cluster.ask("scontrol", "update", f"JobId={job.number}", "StartTime=now")  # else Slurm waits two minutes
    assert job.wait(END_S) == "COMPLETED", job.output()
    second = job.output()[len(first) :]
    assert "continuing from the checkpoint" in second
    assert epochs(first) + epochs(second) == [1, 2, 3, 4, 5, 6], job.output()
    assert_trained(second)


@pytest.mark.parametrize("script", ["train.sh", "sirtakirun.sh", "mpi.sh"])
def test_a_job_cancelled_in_its_warm_up_leaves_nothing_and_is_not_requeued(
    cluster: SlurmCluster, tmp_path: Path, script: str
) -> None:
    if script == "mpi.sh":
        skip_without_pmix(cluster)
    job = submit(cluster, tmp_path, script, "--export=ALL,SLOWED_S=0.5")
    job.wait_for("slowed", END_S)
    assert "tuned in" not in job.output()
    cluster.ask("scancel", job.number)
    assert job.wait(END_S) == "CANCELLED", job.output()
    assert_ended(cluster)
    assert cluster.shared() == ""


def assert_ended(cluster: SlurmCluster) -> None:
    cluster.wait_for(lambda: not cluster.processes(), 15.0, "end of the job's processes")


def test_a_node_that_dies_takes_its_ranks_only(cluster: SlurmCluster, tmp_path: Path) -> None:
    if len(cluster.nodes) < 2:
        pytest.skip("there is one node only: no namespaces here")
    job = submit(cluster, tmp_path, "sirtakirun.sh")
    job.wait_for("epoch 2:", END_S)
    cluster.kill_node("node2")
    try:
        job.wait_for("1 rank (1 on node1)", END_S)
        job.wait_for("accuracy", END_S)
    finally:
        cluster.start_node("node2")
    assert epochs(job.output())[-1] == 6
    assert_trained(job.output())
    job.wait(END_S)


def skip_without_pmix(cluster: SlurmCluster) -> None:
    """Debian's Slurm names PMIx also where the library that it wants is missing."""
    words = ["srun", "--mpi=pmix", "true"]
    if subprocess.run(words, env=cluster.environ, capture_output=True, check=False, timeout=30).returncode:
        pytest.skip("this Slurm does not speak PMIx")


def test_ranks_over_the_clusters_own_mpi(cluster: SlurmCluster, tmp_path: Path) -> None:
    skip_without_pmix(cluster)
    job = submit(cluster, tmp_path, "mpi.sh", words=(DIGITS,))
    assert job.wait(END_S) == "COMPLETED", job.output()
    assert_trained(job.output())


def test_a_torchrun_on_each_node(cluster: SlurmCluster, tmp_path: Path) -> None:
    nodes, one_a_node = len(cluster.nodes), "--export=ALL,RANKS_PER_NODE=1"
    job = submit(cluster, tmp_path, "torchrun.sh", one_a_node, ranks=nodes, words=(EXAMPLES / "ddp_attached.py",))
    assert job.wait(END_S) == "COMPLETED", job.output()
    assert "epoch 10: loss" in job.output()


def in_allocation(cluster: SlurmCluster, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["salloc", *places(cluster, 2), *words],
        env={**cluster.environ, **ENVIRON}, capture_output=True, text=True, timeout=END_S, check=False,
    )  # fmt: skip


def test_sirtakirun_takes_hosts_and_slots_of_the_allocation(cluster: SlurmCluster) -> None:
    job = in_allocation(cluster, "sirtakirun", "--verbose", "python", str(DIGITS))
    assert job.returncode == 0, job.stderr
    assert f"hosts: {', '.join(f'{node} ({2 // len(cluster.nodes)} slots)' for node in cluster.nodes)}" in job.stderr
    assert_trained(job.stdout)


def test_sirtakirun_reports_that_srun_has_started_several_of_it(cluster: SlurmCluster) -> None:
    job = in_allocation(cluster, "srun", "--ntasks=2", "sirtakirun", "python", str(DIGITS))
    assert job.returncode == 2
    assert "srun started sirtakirun 2 times; start it once, without srun" in job.stderr
