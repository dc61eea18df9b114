"""Outlives a launcher that is killed: `python -m sirtaki.run.janitor MPIEXEC_PID`, started beside mpiexec.

mpiexec is asked to end when its launcher dies (`Supervisor`), but may die of the closed output before it has cleaned
up, and may kill its ranks before they have. On standard input come the processes of ranks on this host, a line each,
and "done" if the launcher has seen to everything itself.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from .leftovers import mapped_segments, remove_segments, remove_session_folder, session_members

END_S = 8.0
"""How long mpiexec and its ranks may take to end once their launcher is gone; then they are killed."""


def main() -> None:
    """Returns when the launcher has, or when nothing of its job is left on this host."""
    sessions = {int(sys.argv[1])}
    for line in sys.stdin:
        if line == "done\n":
            return
        sessions.add(int(line))
    segments: set[Path] = set()
    deadline_s = time.monotonic() + END_S
    while left := session_members(sessions):
        segments.update(*map(mapped_segments, left))
        if time.monotonic() > deadline_s:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    remove_segments(segments)
    remove_session_folder(int(sys.argv[1]))


if __name__ == "__main__":
    main()
