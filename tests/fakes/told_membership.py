"""The membership of an elastic job as the test process keeps it: ranks ask over a socket of the local host.

`Keeper` is the test's side, `TestMembership` a rank's. Both speak JSON, one message a line. The keeper knows what an
agent knows: who has called `join`, and whose connection has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sirtaki.comm.control.mesh_rendezvous import Appointment, Attendee, Meeting, attendee, open_places
from sirtaki.engine.membership import Change, Dismissed, Generation, Member
from sirtaki.errors import CommError

SOCKET, WORKER = "SIRTAKI_TEST_KEEPER", "SIRTAKI_TEST_WORKER"
"""Variables of a rank: where the keeper listens, and the number of this process, which no other has in its job."""


class ToldMembership:
    """See `Membership`."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(os.environ[SOCKET])
        self._lines = b""
        self._change = Change(0)
        self.worker = int(os.environ[WORKER])
        self.say(kind="hello", worker=self.worker, pid=os.getpid())

    def say(self, **message: Any) -> None:
        """To the keeper."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _heard(self, timeout_s: float) -> list[dict[str, Any]]:
        if select.select([self._socket], [], [], timeout_s)[0]:
            said = self._socket.recv(1 << 16)
            if not said:
                raise CommError("the keeper is gone")
            *lines, self._lines = (self._lines + said).split(b"\n")
            return [json.loads(line) for line in lines]
        return []

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        listeners = open_places(None, loopback_only=True)
        mine = attendee(listeners)
        self.say(kind="join", after=after, has_state=has_state, host=mine.host, places=mine.places)
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for message in self._heard(deadline_s - time.monotonic()):
                if message["kind"] == "dismissed":
                    raise Dismissed("the test wants it so")
                if message["kind"] == "generation":
                    self._change = Change(0)
                    return self._generation(message, listeners)
        raise CommError("there is no next generation in time")

    def _generation(self, message: dict[str, Any], listeners: tuple[socket.socket, ...]) -> Generation:
        attendees = tuple(
            Attendee(host=tuple(each["host"]), places=tuple((host, port) for host, port in each["places"]))
            for each in message["members"]
        )
        return Generation(
            number=message["number"],
            members=tuple(
                Member(host="here", slot=each["worker"], is_new=not each["has_state"]) for each in message["members"]
            ),
            meeting=Meeting(
                rank=message["rank"],
                size=len(attendees),
                name=f"generation {message['number']}",
                appointment=Appointment(
                    attendees=attendees, secret="test", listeners=listeners, in_vain=self._why_in_vain
                ),
            ),
        )

    def _why_in_vain(self) -> str:
        return "a member has ended" if self.change() & Change.REMOVED else ""

    def change(self) -> Change:
        for message in self._heard(0.0):
            if message["kind"] == "change":
                self._change |= Change(message["change"])
        return self._change

    def on_loss(self, report: Callable[[str], object]) -> None:
        pass

    def finished(self) -> None:
        self.say(kind="finished")


@dataclass(eq=False)
class _Worker:
    sock: socket.socket
    number: int = -1
    pid: int = 0
    join: dict[str, Any] | None = None
    dismissed: bool = False
    lines: bytes = b""
    told: list[dict[str, Any]] = field(default_factory=list)


class Keeper:
    """Decides who belongs to a generation: all that are there, once all that were in the one before have called `join`.

    Attributes:
        generations: of each the workers' numbers, by rank.
        told: what workers have said of themselves: (`time.monotonic()`, worker, message).
        finished: workers whose scripts have come to their end.
        lost: (`time.monotonic()`, worker) of those whose connections have ended, and were not finished.
    """

    def __init__(self, address: Path) -> None:
        """Listens at the address."""
        self.address = address
        self.generations: list[list[int]] = []
        self.told: list[tuple[float, int, dict[str, Any]]] = []
        self.finished: list[int] = []
        self.lost: list[tuple[float, int]] = []
        self.least = 1
        self._members: list[_Worker] = []
        self._workers: dict[socket.socket, _Worker] = {}
        self._lock = threading.RLock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(address))
        self._listener.listen(64)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def pid(self, worker: int) -> int | None:
        """Of a worker that is there."""
        with self._lock:
            return next((each.pid for each in self._workers.values() if each.number == worker), None)

    def present(self) -> list[int]:
        """Members of the present generation that are there, by rank."""
        with self._lock:
            return [each.number for each in self._members if each.sock in self._workers]

    def dismiss(self, worker: int) -> None:
        """It is not wanted any more."""
        with self._lock:
            for each in self._workers.values():
                if each.number == worker:
                    each.dismissed = True
            self._announce(Change.REMOVED)
            self._form()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        for sock in (*self._workers, self._listener):
            sock.close()

    def _run(self) -> None:
        while not self._ending.is_set():
            ready, _, _ = select.select([self._listener, *self._workers], [], [], 0.05)
            with self._lock:
                for sock in ready:
                    if sock is self._listener:
                        new, _ = sock.accept()
                        self._workers[new] = _Worker(new)
                    else:
                        self._hear(self._workers[sock])

    def _hear(self, worker: _Worker) -> None:
        try:
            said = worker.sock.recv(1 << 16)
        except OSError:
            said = b""
        *lines, worker.lines = (worker.lines + said).split(b"\n")
        for line in lines:
            message = json.loads(line)
            kind = message.pop("kind")
            if kind == "hello":
                worker.number, worker.pid = message["worker"], message["pid"]
            elif kind == "join":
                worker.join = message
                if worker not in self._members and not worker.dismissed:
                    self._announce(Change.ADDED)
                self._form()
            elif kind == "finished":
                self.finished.append(worker.number)
            else:
                self.told.append((time.monotonic(), worker.number, {"kind": kind, **message}))
        if not said:
            del self._workers[worker.sock]
            worker.sock.close()
            if worker.number not in self.finished and not worker.dismissed:
                self.lost.append((time.monotonic(), worker.number))
            if worker in self._members:
                self._announce(Change.REMOVED)
            self._form()

    def _announce(self, change: Change) -> None:
        for member in self._members:
            if member.join is None:
                self._send(member, kind="change", change=change.value)

    def _form(self) -> None:
        """Begins the next generation if it is time."""
        for worker in self._workers.values():
            if worker.dismissed and worker.join is not None:
                self._send(worker, kind="dismissed")
                worker.join = None
        there = [each for each in self._workers.values() if each.join is not None]
        waited_for = [
            each
            for each in self._members
            if each.sock in self._workers
            and each.join is None
            and each.number not in self.finished
            and not each.dismissed
        ]
        if waited_for or len(there) < self.least or not there:
            return
        old = [each for each in self._members if each in there]
        members = sorted([*old, *(each for each in there if each not in old)], key=_is_stateless)
        said = [{"worker": each.number, **(each.join or {})} for each in members]
        self.generations.append([each.number for each in members])
        self._members = members
        for rank, member in enumerate(members):
            member.join = None
            self._send(member, kind="generation", number=len(self.generations), rank=rank, members=said)

    def _send(self, worker: _Worker, **message: Any) -> None:
        with contextlib.suppress(OSError):  # its end is heard, too
            worker.sock.sendall(json.dumps(message).encode() + b"\n")


def _is_stateless(worker: _Worker) -> bool:
    return worker.join is not None and not worker.join["has_state"]
