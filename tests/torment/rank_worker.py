"""A rank that plays one program after the other, as a socket tells it: `rank_worker.py SOCKET PID`.

Sirtaki is started anew when the world size or the settings change, and every few programs. The rank ends with PID.
With SIRTAKI_TEST_RETUNE set, programs that are tuned re-tune at every opportunity.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from multiprocessing.connection import Client, Connection
from pathlib import Path

from fakes import hasty, restless
from mpi4py import MPI
from torment.program import Program
from torment.script import Script

import sirtaki.torch as hvd

PROGRAMS_PER_INIT = 12
PREFIX = "SIRTAKI_"


class Worker:
    """Plays programs on this rank."""

    def __init__(self) -> None:
        self._world: MPI.Intracomm = MPI.COMM_WORLD
        self._running: tuple[object, ...] | None = None  # world size and settings
        self._played = 0

    def play(self, program: Program) -> tuple[str, object]:
        """Collective: ("done", trace), ("raised", its traceback), or ("idle", None) on ranks that are not wanted."""
        try:
            self._prepare(program)
            if self._world.rank >= program.ranks:
                return "idle", None
            script = Script(program)
            trace = script.play()
            script.close()
            del script
            gc.collect()
        except BaseException:  # whatever it is, the one who asked wants to know
            return "raised", traceback.format_exc()
        return "done", trace

    def _prepare(self, program: Program) -> None:
        wanted = (program.ranks, program.environment)
        self._played += 1
        if self._running == wanted and self._played % PROGRAMS_PER_INIT:
            return
        hvd.shutdown()
        self._running = wanted
        given = {PREFIX + name.upper(): value for name, value in program.environment}
        if RETUNES and "SIRTAKI_WARMUP_ITERATIONS" in given:
            given.update(restless.WARM_UP)
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            del os.environ[name]
        os.environ.update({**DEFAULTS, **given})
        hasty.be("SIRTAKI_OVERLAP_FORWARD" in given)
        gc.freeze()  # all that is imported by now need not be looked through after each program
        if self._world.rank < program.ranks:
            hvd.init(comm=None if program.ranks == self._world.size else list(range(program.ranks)))


RETUNES = "SIRTAKI_TEST_RETUNE" in os.environ
DEFAULTS = {f"{PREFIX}REGISTRY": "off", f"{PREFIX}LOG_LEVEL": "error", f"{PREFIX}WARMUP_ITERATIONS": "0"}


def serve(connection: Connection) -> None:
    """Plays until the other side says so or is gone."""
    worker = Worker()
    connection.send((MPI.COMM_WORLD.rank, os.getpid()))
    if RETUNES:
        restless.begin(MPI.COMM_WORLD.rank)
    while True:
        try:
            text = connection.recv()
        except EOFError:
            return
        if text is None:
            break
        connection.send(worker.play(Program.from_json(text)))
    hvd.shutdown()


def end_with(pid: int) -> None:
    """Ends this process once that one is gone, even if a program hangs here."""
    while Path(f"/proc/{pid}").exists():
        time.sleep(2.0)
    os._exit(1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1]).parent
    # Where each thread is, when the one who asked has waited too long.
    stacks = (folder / f"stacks.{MPI.COMM_WORLD.rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    threading.Thread(target=end_with, args=[int(sys.argv[2])], daemon=True).start()
    serve(Client(sys.argv[1], family="AF_UNIX"))
