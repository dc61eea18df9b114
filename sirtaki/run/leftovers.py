"""Clean up after killed jobs on this machine.

`python -m sirtaki.run.leftovers PID SECONDS` is a janitor: a process that cleans up if its starter, the launcher or an
agent, is killed. mpiexec cannot do this. When its launcher dies, mpiexec may die from the closed output before it has
cleaned up, or kill its ranks before they have cleaned up.

The starter writes lines to the janitor's standard input. `1234` means that a rank with this process id was started on
this host, `-1234` that this rank has ended, and `done` that the starter itself has cleaned up. The janitor records the
shared memory files of running ranks, because the files of a dead rank cannot be found any more.
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
_PREFIXES = ("sm_segment.", "vader_segment.", "mpich_shm_")  # File name prefixes of Open MPI 5, Open MPI 4 and MPICH.


def mapped_segments(pid: int | str) -> set[Path]:
    """Return the files in /dev/shm that the MPI library has created and that process `pid` (or "self") has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    paths = {Path(fields[5]) for line in lines if len(fields := line.split(None, 5)) == 6}
    return {path for path in paths if path.parent == _SEGMENTS and path.name.startswith(_PREFIXES)}


def remove_segments(segments: set[Path]) -> None:
    """Remove these shared memory files if they exist."""
    for path in segments:
        with contextlib.suppress(OSError):
            path.unlink()


def remove_session_folder(mpiexec_pid: int) -> None:
    """Remove the session folder of a killed mpiexec. An mpiexec that exits normally removes its session folder
    itself.
    """
    shutil.rmtree(_session_folder(mpiexec_pid), ignore_errors=True)


def makes_way_for_mpiexec() -> Callable[[], None]:
    """Return a function that removes stale files of an earlier mpiexec. The launcher's child process calls the function
    before it becomes mpiexec.

    Open MPI names its session folder after its process id. If a killed mpiexec with the same id has left files, Open
    MPI does not start ("The PMIx server's listener thread failed to start"). In a restarted container, process ids
    repeat soon. Files of other hosts in a shared folder do no harm, because their names contain the host.
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
    """Return the ids of all processes on this machine that belong to one of these sessions. Hydra starts each rank in
    its own session.

    Zombies are skipped, because in a container without a reaping init process they never disappear.
    """
    import psutil  # Imported only here, because psutil takes time to load.

    found = list[int]()
    try:
        pids = psutil.pids()
    except (OSError, IndexError):  # Return nothing if /proc is missing or empty.
        return found
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.getsid(pid) in sessions and is_alive(pid):
                found.append(pid)
    return found


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to these processes if they exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


END_S = 8.0
"""Seconds that mpiexec and its ranks may take to end after the launcher has died. Then the janitor kills them.

The janitor is a process that cleans up after a killed launcher.
"""


class Janitor:
    """Handle of a janitor: a process that ends ranks and removes their shared memory if this process is killed. Does
    nothing if the janitor cannot be started.
    """

    def __init__(self, pid: int, *, end_s: float = END_S) -> None:
        """Start the janitor, a process that cleans up if this one is killed.

        Args:
            pid: first process of a session whose processes must all end. It may be an mpiexec.
            end_s: seconds that remaining processes may take to end before they are killed.
        """
        self._process: subprocess.Popen[bytes] | None = None
        # Run the job without a janitor if no process can be started.
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sirtaki.run.leftovers", str(pid), str(end_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Protect the janitor from Ctrl-C and from a signal to the whole process group.
            )

    def watch(self, pid: int) -> None:
        """Tell the janitor (the process that cleans up after this one) that a rank was started.

        It must end the rank's session, too.
        """
        self._send(str(pid))

    def forget(self, pid: int) -> None:
        """Tell the janitor (the process that cleans up after this one) that a rank and all its children have ended."""
        self._send(f"-{pid}")

    def dismiss(self) -> None:
        """End the janitor (the process that cleans up after this one), because nothing is left to clean up.

        Wait for its end.
        """
        self._send("done")
        if self._process is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.communicate()

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # Ignore that the janitor was killed or dismissed.
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()


def main() -> None:
    """Run the janitor, a process that cleans up if its starter is killed. Ends when the starter dismisses it, or when
    all processes of the job on this host have ended.
    """
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
