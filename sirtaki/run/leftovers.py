"""What an MPI library leaves on this machine when its processes are killed: removed by whoever survives them."""

import contextlib
import shutil
import tempfile
from pathlib import Path

from sirtaki.machine import process_fields

_SEGMENTS = Path("/dev/shm")
_PREFIXES = ("sm_segment.", "vader_segment.", "mpich_shm_")  # Open MPI 5 and 4, MPICH


def mapped_segments(pid: int | str) -> set[Path]:
    """The MPI library's files in /dev/shm that process `pid` ("self" too) has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    paths = {Path(fields[5]) for line in lines if len(fields := line.split(None, 5)) == 6}
    return {path for path in paths if path.parent == _SEGMENTS and path.name.startswith(_PREFIXES)}


def remove_segments(segments: set[Path]) -> None:
    """Removes them where they are still there."""
    for path in segments:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_session_folder(mpiexec_pid: int) -> None:
    """Removes the folder of an mpiexec that was killed; one that has ended by itself has removed it."""
    shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{mpiexec_pid}", ignore_errors=True)


def session_members(sessions: set[int]) -> list[int]:
    """Processes of this machine that belong to one of `sessions`; Hydra gives each rank a session of its own.

    Not those that have ended and that nobody buries, as in a container whose first process does not.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session, *_ = process_fields(int(folder.name))
            if int(session) in sessions and state not in {"Z", "X"}:
                found.append(int(folder.name))
    return found
