"""The launcher of a process determines the carrier of the control plane, unless the user chooses one."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import msgspec
import pytest
import torch
import torch.distributed as dist
from fakes.meshes import close
from torch.distributed import HashStore

from sirtaki.comm.control import members
from sirtaki.comm.control.communicator import Backend
from sirtaki.comm.control.members import Membership
from sirtaki.engine.ranks import choose_backend, open_at_store, open_ranks, settings_beside
from sirtaki.engine.settings import NEVER_S, Settings
from sirtaki.errors import ConfigError

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
TORCHRUN = {**TORCH, "TORCHELASTIC_RUN_ID": "x"}
MPIEXEC = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NODELIST": "node0",
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Backend.MESH),
        (TORCH, Backend.MESH),
        (TORCHRUN, Backend.MESH),
        (MPIEXEC, Backend.MPI),
        ({"PMI_RANK": "0"}, Backend.MPI),
        ({"PMIX_RANK": "0", **SRUN}, Backend.MPI),
        ({**MPIEXEC, **TORCH}, Backend.MPI),  # sirtakirun's ranks have both
        ({**MPIEXEC, **TORCHRUN}, Backend.MESH),  # a torchrun on each host that mpiexec has started
        (SRUN, Backend.MESH),
        ({**SRUN, **TORCH}, Backend.MESH),
    ],
)
def test_the_nearest_launcher_decides(environ: dict[str, str], expected: Backend) -> None:
    assert choose_backend(Settings(), environ) is expected
    for backend in Backend:
        assert choose_backend(Settings(control=backend), environ) is backend


def test_a_rank_without_a_launcher_needs_mpi_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend(Settings.from_environ({"SIRTAKI_TRANSPORT": "mpi"}), {}) is Backend.MPI
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", object())  # the script has it
    assert choose_backend(Settings(), {}) is Backend.MPI


def test_an_srun_that_speaks_to_mpi_starts_jobs_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sirtaki.engine.ranks.find_spec", lambda name: None)
    assert choose_backend(Settings(), {"PMIX_RANK": "0", **SRUN}) is Backend.MESH
    assert choose_backend(Settings(), MPIEXEC) is Backend.MPI  # which says what is missing


def test_a_list_of_ranks_must_name_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCH.items():
        monkeypatch.setenv(name, value)
    settings = Settings(control=Backend.MESH)
    with pytest.raises(
        ConfigError, match=r"rank 1 called init\(comm=\[0, 2\]\), but this list does not contain rank 1"
    ):
        open_ranks(settings, [0, 2])
    with pytest.raises(ConfigError, match="lists rank 7, but the job has only the ranks 0 to 3"):
        open_ranks(settings, [1, 7])
    assert open_ranks(settings, [1]).size == 1


def test_the_limit_for_missing_ranks_is_the_groups_timeout_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    group = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]
    gloo = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=7))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    settings = settings_beside(group)
    assert settings.missing_ranks_limit_s == 7.0
    gloo._set_default_timeout(timedelta(seconds=90))  # type: ignore[attr-defined]
    assert settings.missing_ranks_limit_s == 90.0
    assert settings.transport_timeout_s == NEVER_S, "transports do not give up before the limit, which may grow"
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "30")
    assert settings_beside(group).missing_ranks_limit_s == 30.0
    assert settings_beside(group).transport_timeout_s > 30.0


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_that_meet_in_a_store_listen_beyond_loopback_only_if_they_have_several_hosts(
    monkeypatch: pytest.MonkeyPatch, hosts: int
) -> None:
    if hosts == 2:
        monkeypatch.setattr(members, "host_identity", lambda: (str(threading.get_ident()),))
        monkeypatch.setattr(members, "own_addresses", lambda interface: ["127.0.0.2"])
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        meshes = list(
            threads.map(lambda rank: open_at_store(Settings(), store, rank=rank, size=2, timeout_s=20.0), [0, 1])
        )
    told = [msgspec.json.decode(store.get(f"addresses/{rank}"), type=tuple[int, Membership]) for rank in range(2)]
    listened = {host for _, each in told for host, _ in each.members[0].addresses}
    assert listened == ({"127.0.0.1"} if hosts == 1 else {"127.0.0.1", "127.0.0.2"})
    close([mesh._links for mesh in meshes])  # type: ignore[attr-defined]


def test_a_users_secret_is_not_shown_and_all_ranks_or_none_must_have_one() -> None:
    def meet(store: HashStore, given: list[str | None]) -> list[object]:
        def one(rank: int) -> object:
            try:
                return open_at_store(Settings(secret=given[rank]), store, rank=rank, size=2, timeout_s=20.0)
            except ConfigError as err:
                return str(err)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(one, [0, 1]))

    store = HashStore()
    meshes = meet(store, ["of the user", "of the user"])
    close([mesh._links for mesh in meshes])  # type: ignore[attr-defined]
    assert all(b"of the user" not in store.get(f"{what}/{rank}") for what in ("host", "addresses") for rank in range(2))
    told = meet(HashStore(), ["of the user", None])
    assert told == ["SIRTAKI_SECRET is set on only one of the ranks 0 and 1; set it to one value on all ranks"] * 2
