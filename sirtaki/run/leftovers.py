"""What an MPI library leaves on this machine when its processes are killed: removed by whoever survives them."""

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
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
    shutil.rmtree(_session_folder(mpiexec_pid), ignore_errors=True)


def makes_way_for_mpiexec() -> Callable[[], None]:
    """For a child that becomes mpiexec: what it calls first, so that nothing stale keeps mpiexec from starting.

    Open MPI's calls its folder after its process, and does not start ("The PMIx server's listener thread failed to
    start") where one of the same number was killed: in a container that is started again, numbers return at once.
    Another host's files in a shared folder bear its name, and are in nobody's way.
    """
    own = f"pmix.{socket.gethostname()}."

    def remove_stale() -> None:
        folder = _session_folder(os.getpid())
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                if name.startswith(own):
                    os.unlink(folder / name)

    return remove_stale


def _session_folder(mpiexec_pid: int) -> Path:
    return Path(tempfile.gettempdir()) / f"ompi.{mpiexec_pid}"


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
