"""Clean up after killed jobs on this machine.

`python -m sirtaki.run.leftovers PID SECONDS` is a janitor: a process that outlives the launcher, or the agent of an
elastic job, that started it. mpiexec ends when its launcher dies (`Supervisor`), but may die from the closed output
before it has cleaned up, and may kill its ranks before they have. The starter writes to the janitor's standard input:
the process ids of ranks on this host, one per line, with a minus sign once they have ended, and "done" if it has
cleaned up itself. The janitor polls for the ranks' shared memory files meanwhile, because all ranks may be dead when it
detects the end of the starter.
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
    """Return the MPI library's files in /dev/shm that process `pid` (or "self") has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    paths = {Path(fields[5]) for line in lines if len(fields := line.split(None, 5)) == 6}
    return {path for path in paths if path.parent == _SEGMENTS and path.name.startswith(_PREFIXES)}


def remove_segments(segments: set[Path]) -> None:
    """Remove these files if they exist."""
    for path in segments:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_session_folder(mpiexec_pid: int) -> None:
    """Remove the session folder of a killed mpiexec. An mpiexec that exits normally removes it itself."""
    shutil.rmtree(_session_folder(mpiexec_pid), ignore_errors=True)


def makes_way_for_mpiexec() -> Callable[[], None]:
    """Return a function that a child calls before it becomes mpiexec, to remove stale files of an earlier mpiexec.

    Open MPI names its session folder after its process id. It does not start ("The PMIx server's listener thread failed
    to start") if a killed mpiexec with the same id left files. In a restarted container, ids repeat at once. Files of
    other hosts in a shared folder contain their host names and do no harm.
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
    """Return the processes of this machine in one of these sessions. Hydra starts each rank in its own session.

    Zombies are skipped, because they stay in a container whose init process does not reap them.
    """
    import psutil  # imported here as in `is_alive`

    found = list[int]()
    try:
        pids = psutil.pids()
    except (OSError, IndexError):  # /proc is missing or empty
        return found
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.getsid(pid) in sessions and is_alive(pid):
                found.append(pid)
    return found


def kill(pids: Iterable[int]) -> None:
    """Kill these processes if they exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


END_S = 8.0
"""Seconds that mpiexec and its ranks may take to end after the launcher has died. Then a janitor kills them."""


class Janitor:
    """A process that cleans up if this process is killed. Inactive if no process can be started."""

    def __init__(self, pid: int, *, end_s: float = END_S) -> None:
        """Start the process.

        Args:
            pid: first process of a session that must end completely. It may be an mpiexec.
            end_s: seconds that remaining processes may take to end before they are killed.
        """
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # the machine has no free process slot
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sirtaki.run.leftovers", str(pid), str(end_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C and the end of a killed process group do not reach it
            )

    def watch(self, pid: int) -> None:
        """Add a started rank, whose session must end, too."""
        self._send(str(pid))

    def forget(self, pid: int) -> None:
        """Remove a rank that has ended with all its children."""
        self._send(f"-{pid}")

    def dismiss(self) -> None:
        """End the janitor and wait for its end, because there is nothing to clean up."""
        self._send("done")
        if self._process is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.communicate()

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # the janitor was killed or dismissed
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()


def main() -> None:
    """Run the janitor, until its starter dismisses it or all processes of the job on this host have ended."""
    own, end_s = int(sys.argv[1]), float(sys.argv[2])
    sessions, segments = {own}, set[Path]()
    partial, pause_s = "", 0.5
    while True:
        if not select.select([sys.stdin], [], [], pause_s)[0]:
            segments.update(*map(mapped_segments, session_members(sessions)))
            pause_s = min(2.0 * pause_s, 60.0) if segments else min(1.2 * pause_s, 5.0)
            continue
        if not (received := os.read(sys.stdin.fileno(), 1 << 16)):
            break
        *lines, partial = (partial + received.decode()).split("\n")
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
