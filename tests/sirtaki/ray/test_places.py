"""Who is which rank, and what ranks find in their environment."""

import pytest

from sirtaki.ray import places
from sirtaki.ray.places import ActorPlace, actor_environ, in_rank_order, place_variables
from sirtaki.run.as_horovod import SHIM


def place(host: str, *gpus: str) -> ActorPlace:
    return ActorPlace(host=(host,), address=f"10.0.0.{ord(host)}", gpus=gpus)


def test_ranks_of_a_host_are_neighbours_and_hosts_come_in_the_order_in_which_they_were_found() -> None:
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
    values = {"cpus": 2.0, "timeout_s": 30.0, "interfaces": "", **more}
    return actor_environ(environ, added, **values)  # type: ignore[arg-type]


def test_settings_go_along_and_what_an_outer_job_has_set_does_not() -> None:
    outer = {"SIRTAKI_TUNE": "0", "HOROVOD_TIMELINE": "t.json", "HOROVOD_RANK": "3", "RANK": "3", "HOME": "/root"}
    found = environ_of(outer, {"MINE": "1"})
    assert (found["SIRTAKI_TUNE"], found["HOROVOD_TIMELINE"], found["MINE"]) == ("0", "t.json", "1")
    assert not {"HOROVOD_RANK", "RANK", "HOME", "PYTHONPATH"} & found.keys()
    assert (found["OMP_NUM_THREADS"], found["SIRTAKI_START_TIMEOUT_S"]) == ("2", "30")


def test_what_the_user_adds_counts_most_and_the_secret_is_not_shown_to_ray() -> None:
    outer = {"SIRTAKI_SECRET": "s", "SIRTAKI_START_TIMEOUT_S": "7"}
    found = environ_of(outer, {"OMP_NUM_THREADS": "9", "SIRTAKI_GLOO_IFACE": "eth9"}, interfaces="eth0")
    assert (found["OMP_NUM_THREADS"], found["SIRTAKI_START_TIMEOUT_S"]) == ("9", "7")
    assert (found["SIRTAKI_GLOO_IFACE"], found["NCCL_SOCKET_IFNAME"]) == ("eth9", "eth0")
    assert "SIRTAKI_SECRET" not in found


def test_where_horovods_name_gives_sirtaki_it_does_on_the_ranks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "is_installed", lambda: True)
    assert environ_of({"PYTHONPATH": "/mine"}, {})["PYTHONPATH"] == f"{SHIM}:/mine"
    assert environ_of({}, {})["PYTHONPATH"] == str(SHIM)
