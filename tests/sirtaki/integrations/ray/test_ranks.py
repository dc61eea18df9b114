"""Ranks on Ray, tested without Ray: the package to install, notification of failures, and rank 0's values."""

import importlib.util
from typing import Any

import pytest
from conftest import RunRanks
from rank_jobs import OVER_MESH, UNTUNED

import sirtaki.ray
from sirtaki.errors import ConfigError
from sirtaki.integrations.ray import ranks as actors
from sirtaki.integrations.ray.ranks import (
    ActorPlace,
    Demand,
    RaySettings,
    Shape,
    actor_environ,
    elastic_policy,
    in_rank_order,
    place_variables,
)
from sirtaki.integrations.ray.ray_logger import Log, receiving_log
from sirtaki.ray import ray_logger
from sirtaki.run.as_horovod import SHIM
from sirtaki.run.elastic.job_members import OnFailure


def test_without_ray_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("RayExecutor", "SirtakiConfig"):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'sirtaki\[ray\]'"):
            getattr(sirtaki.ray, name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_peers_learn_of_a_failed_rank_and_all_can_start_again(run_ranks: RunRanks, ranks: int) -> None:
    assert run_ranks("ray_telling.py", ranks, env={**UNTUNED, **OVER_MESH}).stdout.count("went on") == ranks


class FakeQueue:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: Any) -> None:
        self.values.append(value)

    def get(self) -> Any:
        return self.values.pop(0)

    def empty(self) -> bool:
        return not self.values


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> FakeQueue:
    made = FakeQueue()
    monkeypatch.setattr(ray_logger, "_queue", made)
    return made


def test_all_listeners_receive_rank_0s_output_in_order(queue: FakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    monkeypatch.setenv("HOROVOD_RANK", "0")
    ray_logger.log(1)
    ray_logger.log({"loss": 2.0})
    Log(queue, [heard.append, lambda value: heard.append(str(value))]).deliver()
    assert heard == [1, "1", {"loss": 2.0}, "{'loss': 2.0}"]
    monkeypatch.setenv("HOROVOD_RANK", "1")
    ray_logger.log(1)
    assert queue.empty()


def test_without_listeners_there_is_no_queue() -> None:
    with receiving_log(()) as log:
        assert log.queue is None
        log.deliver()
    ray_logger.configure(None)
    ray_logger.log(1)


def test_a_node_holds_as_many_ranks_as_its_scarcest_resource_allows() -> None:
    both = Demand(cpus=2, gpus=1)
    assert [both.fitting(there) for there in ({"CPU": 9, "GPU": 2}, {"CPU": 5, "GPU": 8}, {"CPU": 9})] == [2, 2, 0]


def test_hosts_get_one_bundle_each_and_free_ranks_too() -> None:
    assert Shape(ranks=3).bundles == [{"CPU": 1}] * 3
    hosts = Shape(ranks=2, hosts=3, demand=Demand(cpus=1, gpus=1))
    assert (hosts.size, hosts.bundles) == (6, [{"CPU": 2, "GPU": 2}] * 3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RaySettings(timeout_s=0), "timeout_s: expected a positive number"),
        (lambda: Demand(cpus=0), "0 CPUs, 0 GPUs"),
        (lambda: Shape(ranks=0), "num_workers.*found 0"),
        (lambda: elastic_policy(None, 0, None), "min_workers=0"),
        (lambda: elastic_policy(4, 2, 3), "num_workers=4, max_workers=3"),
        (lambda: elastic_policy(2, 2, 3, cooldown_s=(5.0, 1.0)), "cooldown_range: expected"),
    ],
)
def test_nonsense_is_refused(make: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()  # type: ignore[operator]


def test_an_elastic_job_starts_with_the_minimum_by_default() -> None:
    policy = elastic_policy(None, 2, None, reset_limit=3)
    assert (policy.start_ranks, policy.min_ranks, policy.max_ranks, policy.reset_limit) == (2, 2, None, 3)
    assert (policy.on_failure, policy.cooldown_s) == (OnFailure.REPLACE_RANK, (30.0, 600.0))


def place(host: str, *gpus: str) -> ActorPlace:
    return ActorPlace(host=(host,), address=f"10.0.0.{ord(host)}", gpus=gpus)


def test_ranks_of_a_host_are_adjacent_and_hosts_are_in_the_order_of_discovery() -> None:
    assert in_rank_order([place("b"), place("a"), place("b"), place("c"), place("a")]) == [0, 2, 1, 4, 3]


def test_each_rank_finds_its_place_in_horovods_and_torchruns_variables() -> None:
    found = place_variables([place("b"), place("b"), place("a")])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")
    assert [[int(each[name]) for name in names] for each in found] == [
        [0, 3, 0, 2, 0, 2],
        [1, 3, 1, 2, 0, 1],
        [2, 3, 0, 1, 1, 2],
    ]
    assert [each["HOROVOD_RANK"] for each in found] == ["0", "1", "2"]
    assert found[2]["HOROVOD_HOSTNAME"] == "10.0.0.97"
    assert "CUDA_VISIBLE_DEVICES" not in found[0]


def test_ranks_see_all_gpus_of_the_job_on_their_host() -> None:
    found = place_variables([place("a", "2"), place("a", "0"), place("b", "1")])
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["2,0", "2,0", "1"]


def environ_of(environ: dict[str, str], added: dict[str, str], **more: object) -> dict[str, str]:
    settings = RaySettings(timeout_s=30.0, **more)  # type: ignore[arg-type]
    return actor_environ(environ, added, Demand(cpus=2.0), settings)


def test_settings_are_passed_on_and_an_outer_jobs_variables_are_not() -> None:
    outer = {"SIRTAKI_TUNE": "0", "HOROVOD_TIMELINE": "t.json", "HOROVOD_RANK": "3", "RANK": "3", "HOME": "/root"}
    found = environ_of(outer, {"MINE": "1"})
    assert (found["SIRTAKI_TUNE"], found["HOROVOD_TIMELINE"], found["MINE"]) == ("0", "t.json", "1")
    assert not {"HOROVOD_RANK", "RANK", "HOME", "PYTHONPATH"} & found.keys()
    assert (found["OMP_NUM_THREADS"], found["SIRTAKI_START_TIMEOUT_S"]) == ("2", "30")


def test_the_users_variables_have_priority_and_ray_does_not_see_the_secret() -> None:
    outer = {"SIRTAKI_SECRET": "s", "SIRTAKI_START_TIMEOUT_S": "7"}
    found = environ_of(outer, {"OMP_NUM_THREADS": "9", "SIRTAKI_GLOO_IFACE": "eth9"}, interfaces="eth0")
    assert (found["OMP_NUM_THREADS"], found["SIRTAKI_START_TIMEOUT_S"]) == ("9", "7")
    assert (found["SIRTAKI_GLOO_IFACE"], found["NCCL_SOCKET_IFNAME"]) == ("eth9", "eth0")
    assert "SIRTAKI_SECRET" not in found


def test_where_horovods_name_gives_sirtaki_it_does_on_the_ranks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "is_installed", lambda: True)
    assert environ_of({"PYTHONPATH": "/mine"}, {})["PYTHONPATH"] == f"{SHIM}:/mine"
    assert environ_of({}, {})["PYTHONPATH"] == str(SHIM)
