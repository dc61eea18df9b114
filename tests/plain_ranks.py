"""Start ranks without MPI: `python plain_ranks.py N command …`, with torchrun's variables.

Exits with the status of the first rank that fails, after the remaining ranks have ended, or with 0.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO

from sirtaki.machine import ReservedPorts

GRACE_S = 5.0
"""Time in which ranks may detect a peer's exit themselves."""


def forward(output: IO[bytes]) -> None:
    """Forward output line by line, so that lines of several ranks are not mixed."""
    for line in output:
        os.write(1, line)


def main(size: int, command: list[str]) -> int:
    with ReservedPorts() as port:
        return run(size, command, str(port.first))


def run(size: int, command: list[str], port: str) -> int:
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    forwarders = [threading.Thread(target=forward, args=[rank.stdout], daemon=True) for rank in ranks]
    for forwarder in forwarders:
        forwarder.start()
    failed: dict[int, int] = {}  # exit codes by rank, in order of time
    deadline_s = float("inf")
    while [rank for rank in ranks if rank.poll() is None]:
        if time.monotonic() < deadline_s:
            failed |= {number: rank.returncode for number, rank in enumerate(ranks) if rank.returncode}
        if failed and deadline_s == float("inf"):
            deadline_s = time.monotonic() + GRACE_S
        if time.monotonic() > deadline_s:
            for rank in ranks:
                rank.send_signal(signal.SIGTERM if time.monotonic() < deadline_s + GRACE_S else signal.SIGKILL)
        time.sleep(0.02)
    for forwarder in forwarders:
        forwarder.join(GRACE_S)
    failed = failed or {number: rank.returncode for number, rank in enumerate(ranks) if rank.returncode}
    codes = [*failed.values(), 0]
    # On a busy machine, further ranks may have ended meanwhile.
    first = next((code for code in codes if code < 0), codes[0])
    return 128 - first if first < 0 else first


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
