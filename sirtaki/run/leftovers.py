"""Removes what jobs leave on this machine when their processes are killed.

`python -m sirtaki.run.leftovers PID SECONDS` is a janitor: it outlives the launcher, or the agent of an elastic job,
that has started it. mpiexec is asked to end when its launcher dies (`Supervisor`), but may die of the closed output
before it has cleaned up, and may kill its ranks before they have. On standard input come the processes of ranks on this
host, a line each, with a minus once they have ended, and "done" if the starter has seen to everything itself. Meanwhile
it looks now and then at what they have in shared memory, as they may all be gone when it hears that the starter is.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from sirtaki.comm.control.waiting import Deadline, Poll, wait_for
from sirtaki.machine import is_alive

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
    """Removes these files, where they are still there."""
    for path in segments:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_session_folder(mpiexec_pid: int) -> None:
    """Removes the folder of an mpiexec that was killed; one that has ended by itself has removed it."""
    shutil.rmtree(_session_folder(mpiexec_pid), ignore_errors=True)


def makes_way_for_mpiexec() -> Callable[[], None]:
    """Returns what a child that becomes mpiexec calls first, so that nothing stale keeps mpiexec from starting.

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

    Zombies are left out: in a container whose first process does not collect them they stay.
    """
    import psutil  # as in `is_alive`

    found = list[int]()
    try:
        pids = psutil.pids()
    except (OSError, IndexError):  # no /proc: it is missing, or empty
        return found
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.getsid(pid) in sessions and is_alive(pid):
                found.append(pid)
    return found


def kill(pids: Iterable[int]) -> None:
    """Kills these processes, where they are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


END_S = 8.0
"""How long mpiexec and its ranks may take to end once their launcher is gone; then a janitor kills them."""


class Janitor:
    """A process that cleans up after another one if this one is killed; there may be none for want of processes."""

    def __init__(self, pid: int, *, end_s: float = END_S) -> None:
        """Starts the process.

        Args:
            pid: first process of a session of which nothing is to be left, and an mpiexec, if it is one.
            end_s: how long what is left may take to end; then it is killed.
        """
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # a machine that is full of processes has none for this
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sirtaki.run.leftovers", str(pid), str(end_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C and a killed process group do not reach it
            )

    def watch(self, pid: int) -> None:
        """Takes note of a rank that has been started, whose session is to end, too."""
        self._tell(str(pid))

    def forget(self, pid: int) -> None:
        """Takes note of a rank that has ended with all that it had started."""
        self._tell(f"-{pid}")

    def dismiss(self) -> None:
        """Ends the process, as there is nothing to clean up, and waits until it has ended."""
        self._tell("done")
        if self._process is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.communicate()

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # somebody has killed it, or it has been dismissed
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()


def main() -> None:
    """Runs the janitor, until its starter dismisses it or nothing of the job is left on this host."""
    own, end_s = int(sys.argv[1]), float(sys.argv[2])
    sessions, segments = {own}, set[Path]()
    said, pause_s = "", 0.5
    while True:
        if not select.select([sys.stdin], [], [], pause_s)[0]:
            segments.update(*map(mapped_segments, session_members(sessions)))
            pause_s = min(2.0 * pause_s, 60.0) if segments else min(1.2 * pause_s, 5.0)
            continue
        if not (heard := os.read(sys.stdin.fileno(), 1 << 16)):
            break
        *lines, said = (said + heard.decode()).split("\n")
        if "done" in lines:
            return
        for line in lines:
            if line.startswith("-"):
                sessions.discard(-int(line))
            else:
                sessions.add(int(line))
    deadline = Deadline.after(end_s)

    def are_gone() -> bool:
        left = session_members(sessions)
        segments.update(*map(mapped_segments, left))
        if deadline.passed:
            kill(left)
        return not left

    wait_for(are_gone, poll=Poll.SLOW)
    remove_segments(segments)
    remove_session_folder(own)


if __name__ == "__main__":
    main()
