"""Fork ranks from a process that has imported PyTorch.

Otherwise half of the suite's processor time would go into `import torch`. The launcher starts

    python preloaded.py FOLDER program.py arguments

for each rank. This process sends its arguments, environment and standard streams to a server, which forks the rank. It
forwards signals to the rank, and exits with the rank's status. Ranks of even and of odd number use two servers, so that
their hash seeds differ, as in separate processes. Otherwise a fork is as fresh as a new process: MPI and Sirtaki are
not initialised, and there are no further threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

SERVERS = 2
AGENT = "SIRTAKI_AGENT"
FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
MESSAGE_BYTES = 1 << 18


def connect(folder: Path) -> socket.socket:
    """Connect to the server of this rank."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
    rank = int(next((os.environ[name] for name in names if name in os.environ), os.getpid()))
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(str(folder / str(rank % SERVERS)))
    return server


def stand_in(folder: Path, arguments: list[str]) -> None:
    """Let the server fork the program, and exit with its status."""
    server = connect(folder)
    wanted = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    agent = [int(os.environ[AGENT].split(",")[0])] if AGENT in os.environ else []
    socket.send_fds(server, [json.dumps(wanted).encode()], [0, 1, 2, *agent])
    for descriptor in agent:
        os.close(descriptor)  # the rank now has this descriptor

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ConnectionError):  # the program has just ended
            server.send(bytes([number]))

    for number in FORWARDED:
        signal.signal(number, forward)
    try:
        end = server.recv(8)
    except ConnectionResetError:  # the program ended before it read a forwarded signal
        end = server.recv(8)
    status = os.waitstatus_to_exitcode(int.from_bytes(end, "little"))
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


class Server:
    """Forks a rank per request. Ends, and kills its ranks, when its standard input is closed."""

    def __init__(self, address: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{address}.new")
        self._listener.listen(64)
        os.rename(f"{address}.new", address)  # atomic, so that whoever finds the address can connect
        self._ranks: dict[int, socket.socket] = {}
        self._wakeups, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake)
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> dict[str, Any]:
        """Serve requests. In a forked rank, return the request."""
        with selectors.DefaultSelector() as events:
            for each in (0, self._wakeups, self._listener):
                events.register(each, selectors.EVENT_READ)
            while True:
                for key, _ in events.select():
                    if key.fileobj == 0:
                        self._end()
                    elif key.fileobj == self._wakeups:
                        os.read(self._wakeups, 4096)
                        self._tell_ends(events)
                    elif key.fileobj is self._listener:
                        if (wanted := self._fork(events)) is not None:
                            return wanted
                    else:
                        self._pass_on(key.data)

    def _fork(self, events: selectors.BaseSelector) -> dict[str, Any] | None:
        asker, _ = self._listener.accept()
        message, streams, _, _ = socket.recv_fds(asker, MESSAGE_BYTES, 4)
        if pid := os.fork():
            for stream in streams:
                os.close(stream)
            self._ranks[pid] = asker
            events.register(asker, selectors.EVENT_READ, pid)
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, stream in enumerate(streams[:3]):
            os.dup2(stream, number)
            os.close(stream)
        for other in (self._listener, asker, *self._ranks.values()):
            other.close()
        for end in (self._wakeups, self._wake):
            os.close(end)
        wanted: dict[str, Any] = json.loads(message)
        for agent in streams[3:]:
            wanted["environment"][AGENT] = f"{agent},{wanted['environment'][AGENT].partition(',')[2]}"
        return wanted

    def _tell_ends(self, events: selectors.BaseSelector) -> None:
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            asker = self._ranks.pop(pid)
            events.unregister(asker)
            with asker, contextlib.suppress(OSError):  # the launcher may have killed it
                asker.send(status.to_bytes(8, "little"))

    def _pass_on(self, pid: int) -> None:
        if pid not in self._ranks:  # it has ended meanwhile
            return
        try:
            number = self._ranks[pid].recv(1)
        except OSError:
            number = b""
        os.kill(pid, number[0] if number else signal.SIGKILL)

    def _end(self) -> None:
        for pid in self._ranks:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def become(wanted: dict[str, Any]) -> ModuleType:
    """Give this process the state of `python program.py arguments` before the first line of the program."""
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    sys.argv[:] = wanted["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    faulthandler.enable()  # prints the stacks of a rank that crashes
    module = ModuleType("__main__")
    module.__file__ = sys.argv[0]
    sys.modules["__main__"] = module
    return module


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if place.is_dir():
        stand_in(place, sys.argv[2:])

    import mpi4py  # noqa: F401
    import networkx  # noqa: F401
    import optuna  # noqa: F401
    import pytest  # noqa: F401
    import sqlalchemy  # noqa: F401
    import torch._dynamo  # because the first optimizer of a process imports it
    import torch.distributed  # noqa: F401

    import sirtaki.torch  # noqa: F401

    gc.collect()
    gc.freeze()  # so that garbage collections in ranks do not copy shared pages
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    program = become(Server(place).serve())
    with open(sys.argv[0], encoding="utf-8") as file:
        code = compile(file.read(), sys.argv[0], "exec")
    exec(code, program.__dict__)
