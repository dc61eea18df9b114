"""Outlives a launcher that is killed: `python -m sirtaki.run.janitor MPIEXEC_PID [SECONDS]`, started beside mpiexec.

mpiexec is asked to end when its launcher dies (`Supervisor`), but may die of the closed output before it has cleaned
up, and may kill its ranks before they have. On standard input come the processes of ranks on this host, a line each,
with a minus once they have ended, and "done" if the launcher has seen to everything itself. Agents of elastic jobs,
whose ranks nobody else ends, give the seconds as 0.
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
    sessions, end_s = {int(sys.argv[1])}, float(sys.argv[2]) if len(sys.argv) > 2 else END_S
    for line in sys.stdin:
        if line == "done\n":
            return
        if line.startswith("-"):
            sessions.discard(-int(line))
        else:
            sessions.add(int(line))
    segments: set[Path] = set()
    deadline_s = time.monotonic() + end_s
    while left := session_members(sessions):
        segments.update(*map(mapped_segments, left))
        if time.monotonic() >= deadline_s:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    remove_segments(segments)
    remove_session_folder(int(sys.argv[1]))


if __name__ == "__main__":
    main()
