"""Ranks that are Ray's actors: called, failing, killed, coming and going; Ray Train over Sirtaki; all with real Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from integrations import ray_functions
from integrations.launching import EXAMPLES

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

from sirtaki.errors import ConfigError, LaunchError, PeerLostError  # noqa: E402
from sirtaki.ray import RayExecutor, SirtakiConfig  # noqa: E402
from sirtaki.run.as_horovod import SHIM  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # Ray's own, of sockets and processes that it leaves to the garbage
]

ENVIRON = {
    "SIRTAKI_REGISTRY": "off",
    "SIRTAKI_TUNE": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join((str(EXAMPLES.parent), str(EXAMPLES.parent / "tests"))),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of this machine, of 3 and 2 CPUs as Ray counts."""
    old = {name: os.environ.get(name) for name in ENVIRON}
    os.environ.update(ENVIRON)
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    second = nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address, log_to_driver=False)
    nodes.second = second
    yield nodes
    ray.shutdown()
    nodes.shutdown()
    for name, value in old.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@pytest.fixture(scope="module")
def executor(cluster: Any) -> Iterator[RayExecutor]:
    """Two ranks, each on a node of its own."""
    added = {"EXTRA": "x", "PYTHONPATH": os.pathsep.join((str(SHIM), ENVIRON["PYTHONPATH"]))}
    made = RayExecutor(RayExecutor.create_settings(nics=["lo"]), num_hosts=2, num_workers_per_host=1)
    made.start(ray_functions.Counter, executable_args=[10], executable_kwargs={"step": 2}, extra_env_vars=added)
    yield made
    made.shutdown()


def test_ranks_get_their_places_and_return_the_functions_results(executor: RayExecutor) -> None:
    heard: list[Any] = []
    found = executor.run(ray_functions.who_am_i, ["a"], {"b": 1}, callbacks=[heard.append])
    assert [each["place"] for each in found] == [(0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1)]
    assert [each["told"] for each in found] == [(0, 2, 0, 2), (1, 2, 1, 2)]
    assert [each["sum"] for each in found] == [3.0, 3.0]
    assert [each["given"] for each in found] == [(("a",), {"b": 1})] * 2
    assert [(each["mpi"], each["extra"], each["as_horovod"]) for each in found] == [(False, "x", True)] * 2
    assert heard == [{"from": 0}]
    assert ray.get(executor.run_remote(ray_functions.who_am_i))[1]["place"][0] == 1


def test_each_rank_has_an_object_of_the_class(executor: RayExecutor) -> None:
    assert executor.execute(lambda counter: counter.count()) == [12, 12]
    assert executor.execute_single(lambda counter: counter.count()) == 14
    assert executor.execute(lambda counter: counter.value) == [14, 12]
    with pytest.raises(LaunchError, match="are running already"):
        executor.start()


def test_parameters_become_those_of_one_process(executor: RayExecutor) -> None:
    expected = ray_functions.weights_after(20, rank=0, size=1)
    for found in executor.run(ray_functions.train_over, [20]):
        assert found == pytest.approx(expected, abs=1e-5)


def test_an_error_is_raised_by_its_name_at_once_and_the_ranks_can_be_called_again(executor: RayExecutor) -> None:
    begin_s = time.monotonic()
    with pytest.raises(LookupError, match="rank 1 has found nothing"):
        executor.run(ray_functions.raise_on, [1])
    assert time.monotonic() - begin_s < 8
    with pytest.raises(PeerLostError, match="a rank raised LookupError: rank 0 has found nothing"):
        ray.get(executor.run_remote(ray_functions.raise_on, [0])[1])
    assert [each["sum"] for each in executor.run(ray_functions.who_am_i)] == [3.0, 3.0]


def test_a_killed_actor_ends_the_call_and_a_new_start_helps(executor: RayExecutor) -> None:
    executor.run(ray_functions.who_am_i)
    threading.Timer(1.0, ray.kill, [executor.workers[1]]).start()
    begin_s = time.monotonic()
    with pytest.raises(ray.exceptions.RayActorError):
        executor.run(ray_functions.raise_on, [7])
    assert time.monotonic() - begin_s < 20
    with pytest.raises(LaunchError, match="call shutdown\\(\\) and start\\(\\)"):
        executor.run(ray_functions.who_am_i)
    executor.shutdown()


def test_contradictory_options_and_too_few_resources_are_reported(cluster: Any) -> None:
    with pytest.raises(ConfigError, match="either num_workers or num_hosts"):
        RayExecutor(num_workers=2, num_hosts=2)
    with pytest.raises(ConfigError, match="min_workers=2, num_workers=1"):
        RayExecutor(num_workers=1, min_workers=2)
    with pytest.raises(LaunchError, match=r"call start\(\)"):
        RayExecutor(num_workers=1).run(print)
    with pytest.raises(LaunchError, match=r"lacks resources for .*'CPU': 50"):
        RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), num_workers=1, cpus_per_worker=50).start()


def loop(config: dict[str, Any]) -> None:
    """Train under Ray Train; fail on rank 1 after the first checkpoint, and resume from it."""
    import torch
    import torch.distributed as dist
    from ray import train
    from ray.train.torch import prepare_model

    import sirtaki.torch as hvd

    hvd.init()
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        report(hvd.rank(), 3, {})
        if hvd.rank() == 1:
            raise LookupError("once")
        while True:
            hvd.allreduce(torch.ones(3))
    with checkpoint.as_directory() as folder:
        first = int(Path(folder, "step").read_text())
    model = prepare_model(torch.nn.Linear(2, 1))
    weights = ray_functions.weights_after(config["steps"], hvd.rank(), hvd.size(), hvd.DistributedOptimizer)
    found = {"weights": weights, "first": first, "backend": dist.get_backend(), "model": type(model).__name__}
    report(hvd.rank(), config["steps"], found)


def report(rank: int, step: int, metrics: dict[str, Any]) -> None:
    from ray import train

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "step").write_text(str(step))
        train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder) if rank == 0 else None)


def test_ray_train_trains_over_sirtaki_and_resumes_from_a_checkpoint(cluster: Any, tmp_path: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        loop,
        train_loop_config={"steps": 20},
        torch_config=SirtakiConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)),
    )
    result = trainer.fit()
    assert (result.metrics["backend"], result.metrics["model"]) == ("sirtaki", "DistributedDataParallel")
    assert result.metrics["first"] == 3
    assert result.metrics["weights"] == pytest.approx(ray_functions.weights_after(20, rank=0, size=1), abs=1e-5)
    with result.checkpoint.as_directory() as folder:
        assert Path(folder, "step").read_text() == "20"


def until(happens: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_ranks_are_killed_nodes_lost_and_found_and_the_others_continue(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop, records = tmp_path / "stop", tmp_path / "records"
    records.mkdir()

    def is_at_work(size: int) -> bool:
        """So many ranks, all of one size, have written within the last second."""
        lately = [each for each in ray_functions.newest(records) if time.time() - each[0] < 1.0]
        return sorted(rank for _, rank, there, _ in lately if there == size) == list(range(size))

    executor = RayExecutor(num_workers=3, min_workers=1, max_workers=3, cpus_per_worker=1.5, cooldown_range=(1, 2))
    executor.start()
    results: list[Any] = []
    caller = threading.Thread(
        target=lambda: results.extend(executor.run(ray_functions.train_elastically, [str(stop), str(records)]))
    )
    caller.start()
    try:
        until(lambda: is_at_work(3))
        ray.kill(executor.workers[1])
        killed_s = time.monotonic()
        until(lambda: is_at_work(2))
        assert time.monotonic() - killed_s < 5
        until(lambda: is_at_work(3))
        cluster.remove_node(cluster.second)
        until(lambda: is_at_work(2))
        cluster.second = cluster.add_node(num_cpus=2)
        until(lambda: is_at_work(3))
    finally:
        stop.touch()
        caller.join(30)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert len({step for _, step in results}) == 1
    assert results[0][1] > 10
    executor.shutdown()
    said = capsys.readouterr().err
    assert "rank 1 (host " in said
    assert "was killed by SIGKILL; replaced in place, 2 continue" in said
    assert "(Ray has lost its node) with rank " in said


def test_where_all_ranks_of_an_elastic_job_raise_the_error_has_its_name(cluster: Any) -> None:
    executor = RayExecutor(num_workers=1, min_workers=1, max_workers=1)
    executor.start()
    with pytest.raises(LookupError, match="rank 0 has found nothing"):
        executor.run(ray_functions.raise_on, [0])
    with pytest.raises(ConfigError, match="requires a fixed number of ranks"):
        executor.run_remote(print)
    executor.shutdown()


def test_the_example_trains(cluster: Any, tmp_path: Path) -> None:
    job = subprocess.run(
        [sys.executable, str(EXAMPLES / "ray_digits.py"), "--epochs", "3", "--address", cluster.address],
        cwd=tmp_path,
        env={**os.environ, **ENVIRON},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert job.returncode == 0, job.stderr[-3000:]
    assert "epoch 3: loss 0." in job.stdout
    assert "2 ranks, accuracy 9" in job.stdout
