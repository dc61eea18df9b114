import sys

import pytest

from sirtaki.engine.mpi_library import Launcher, MpiLibrary, find_mpi_library, find_mpiexec
from sirtaki.errors import LaunchError

OPEN_MPI = "mpiexec (Open MPI) 5.0.11"
MPICH = "HYDRA build details:\n    Version: 4.2.1"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(folder, answer)` puts an mpiexec that answers so to --version there; PATH finds none."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))

    def put(folder, answer, name="mpiexec"):
        file = tmp_path / folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\necho '{answer}'\n")
        file.chmod(0o755)
        return file

    return put


def library(path=None, vendor="Open MPI", version=(5, 0, 11)):
    return MpiLibrary(vendor=vendor, version=version, library=path, mpi4py="4.1", horovod=None)


def test_the_mpiexec_beside_the_library_has_priority_over_the_one_on_path(install, tmp_path):
    install("path", OPEN_MPI)
    beside = install("opt/bin", OPEN_MPI)
    assert find_mpiexec(library(tmp_path / "opt" / "lib" / "x86_64" / "libmpi.so")) == beside


def test_an_mpiexec_of_another_vendor_or_version_is_skipped(install, tmp_path):
    install("opt/bin", MPICH)
    install("path", "mpirun (Open MPI) 4.1.4", name="mpirun")
    own = install("path", OPEN_MPI, name="mpiexec.openmpi")
    assert find_mpiexec(library(tmp_path / "opt" / "lib" / "libmpi.so")) == own


@pytest.mark.parametrize(
    ("vendor", "version", "answer"),
    [
        ("MPICH", (4, 2, 1), MPICH),
        ("Intel MPI", (2021, 9), "Intel(R) MPI Library for Linux* OS, Version 2021.9"),
        ("MVAPICH", (3, 0), MPICH),
    ],
)
def test_each_mpi_library_is_recognised_by_its_mpiexecs_output(install, vendor, version, answer):
    own = install("path", answer)
    assert find_mpiexec(library(vendor=vendor, version=version)) == own
    assert library(vendor=vendor).launcher is Launcher.HYDRA
    with pytest.raises(LaunchError):
        find_mpiexec(library())


def test_without_the_right_one_the_error_names_those_that_were_tried(install):
    wrong = install("path", MPICH)
    with pytest.raises(LaunchError, match=f"Open MPI 5.0.11.*{wrong}.*HYDRA"):
        find_mpiexec(library())


def test_an_interpreter_without_mpi4py_is_an_error_with_the_remedy(tmp_path):
    with pytest.raises(LaunchError, match="could not be run"):
        find_mpi_library(str(tmp_path / "python"))
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(LaunchError, match=r"sirtaki\[openmpi\]"):
        find_mpi_library(str(bare))
