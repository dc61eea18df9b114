"""All connections of this rank: what comes is handed to whom it belongs, and a rank that is gone is told to everyone.

Whoever waits for something reads for all: there is no thread that would have to wake others up. One thread sleeps until
a connection breaks or it is time for a heartbeat. Heartbeats go round in a ring, from each rank to the next one, and
cost a rank the same however many there are.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from socket import socket

from sirtaki.comm.control.failure import FailureBoard
from sirtaki.errors import CommError, PeerLostError

from .connection import Connection, Sending
from .frames import MAX_PAYLOAD_BYTES, Header, Kind, encode
from .mailbox import Mailbox

logger = logging.getLogger(__name__)

BEATS = 6
"""Heartbeats that may be missing before a rank is given up."""

CLOSE_S = 5.0
"""How long the end of a mesh waits for the others."""

MESH = 0
"""The context of what concerns the mesh itself."""

_LONGEST_REASON = 2000


class Links:
    """The connections of `rank` to all others of a mesh.

    Attributes:
        failures: where the loss of a rank is reported.
        reading: held while payloads are placed.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket], *, heartbeat_s: float | None) -> None:
        """Owns the sockets, one to every other rank, each of which has proved itself.

        Args:
            rank: of this process.
            sockets: by the rank at their other end.
            heartbeat_s: a rank that is silent for so long is given up; None = never.
        """
        self.rank, self.size = rank, len(sockets) + 1
        self.failures = FailureBoard()
        self._connections = {other: Connection(sock, other, silence_s=heartbeat_s) for other, sock in sockets.items()}
        self._mailboxes: dict[int, Mailbox] = {}
        self._freed: set[int] = {MESH}
        self._backlogged: set[Connection] = set()
        self.reading = threading.Lock()
        self._readable, self._hung_up = select.epoll(), select.epoll()
        self._by_descriptor: dict[int, Connection] = {}
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._hung_up.register(self._wakeup, select.EPOLLIN)
        for connection in self._connections.values():
            descriptor = connection.fileno()
            self._by_descriptor[descriptor] = connection
            self._readable.register(descriptor, select.EPOLLIN)
            self._hung_up.register(descriptor, select.EPOLLRDHUP)
        self._beat_s = heartbeat_s / BEATS if heartbeat_s else None
        self._silent_beats = 0
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="sirtaki-mesh", daemon=True)
        if self._connections:
            _open.add(self)
            self._thread.start()

    # ── for communicators ────────────────────────────────────────────────────────────────────────────────────────

    def open(self, context: int) -> Mailbox:
        """Where the messages of that context are; some may have come already."""
        return self._mailboxes.get(context) or self._mailboxes.setdefault(context, Mailbox())

    def free(self, context: int) -> None:
        """What comes for that context from now on is dropped."""
        self._freed.add(context)
        self._mailboxes.pop(context, None)

    def send(self, rank: int, kind: Kind, payload: memoryview, *, context: int, sequence: int, tag: int) -> Sending:
        """Sends a message, in as many frames as it takes; its memory is in use until the `Sending` is done."""
        parts = []
        for start in range(0, len(payload) or 1, MAX_PAYLOAD_BYTES):
            part = payload[start : start + MAX_PAYLOAD_BYTES]
            header = encode(kind, context=context, sequence=sequence, tag=tag, length=len(part))
            parts += [memoryview(header), part]
        connection = self._connections[rank]
        sending = connection.send(parts)
        if connection.backlogged:
            self._backlogged.add(connection)
        return sending

    def progress(self) -> None:
        """Reads what has come and sends what has waited, unless another thread is doing that."""
        if self.reading.acquire(blocking=False):
            try:
                self._progress()
            finally:
                self.reading.release()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _progress(self) -> None:
        for descriptor, _ in self._readable.poll(0):
            if (connection := self._by_descriptor.get(descriptor)) is not None:
                self._read(connection)
        for connection in list(self._backlogged):
            self._backlogged.discard(connection)
            connection.flush()
            if connection.backlogged:
                self._backlogged.add(connection)

    def _read(self, connection: Connection) -> None:
        try:
            connection.read(self)
        except CommError as err:
            self._drop(connection)
            self._lose(connection.rank, f"rank {self.rank} cannot understand rank {connection.rank}: {err}")
            return
        if connection.ended:
            self._drop(connection)
            if not connection.said_bye:
                self._lose(connection.rank, f"rank {connection.rank} has ended: its connection is closed")

    def place(self, source: int, header: Header) -> memoryview:
        """See `Receiver`."""
        if header.context in self._freed:
            return memoryview(bytearray(header.length))
        return self.open(header.context).place(source, header)

    def take(self, source: int, header: Header, payload: memoryview) -> None:
        """See `Receiver`."""
        if header.context != MESH:
            if header.context not in self._freed:
                self.open(header.context).take(source, header, payload)
        elif header.kind == Kind.BYE:
            self._connections[source].said_bye = True
        elif header.kind == Kind.LOST:
            self.failures.report(PeerLostError(bytes(payload).decode(errors="replace")))

    def _drop(self, connection: Connection) -> None:
        connection.ended = True
        descriptor = connection.fileno()
        if self._by_descriptor.pop(descriptor, None) is not None:
            for poll in (self._readable, self._hung_up):
                with suppress(OSError):
                    poll.unregister(descriptor)
            connection.close()

    # ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _lose(self, rank: int, reason: str) -> None:
        if self._closing or self.failures.error is not None:
            return
        self.failures.report(PeerLostError(reason))
        self._tell(rank, reason)

    def _tell(self, lost: int, reason: str) -> None:
        """Tells all others that a rank is lost, so that nobody has to find out by itself."""
        payload = memoryview(reason[:_LONGEST_REASON].encode())
        for connection in list(self._connections.values()):
            if connection.rank != lost and not connection.ended:
                header = encode(Kind.LOST, sequence=lost, length=len(payload))
                connection.send([memoryview(header), payload])

    def abort(self, reason: str) -> None:
        """Tells all others that this rank ends, and why; it is the last that they hear. From any thread."""
        self._closing = True
        self._tell(self.rank, reason)
        for connection in list(self._connections.values()):
            connection.flush()

    def _watch(self) -> None:
        """The thread: sleeps until a connection breaks, and sends and expects heartbeats."""
        due_s = time.monotonic() + (self._beat_s or 0.0)
        while not self._closing:
            wait_s = None if self._beat_s is None else max(0.0, due_s - time.monotonic())
            broken = self._hung_up.poll(wait_s)
            if self._closing:
                return
            with self.reading:
                for descriptor, _ in broken:
                    connection = self._by_descriptor.get(descriptor)
                    while connection is not None and not connection.ended:  # what it sent before comes first
                        self._read(connection)
                self._progress()
            if self._beat_s is not None and time.monotonic() >= due_s:
                due_s = time.monotonic() + self._beat_s
                self._beat()

    def _beat(self) -> None:
        """One heartbeat: beats are counted, not seconds, so that a host that slept blames nobody."""
        assert self._beat_s is not None
        after = self._connections[(self.rank + 1) % self.size]
        before = self._connections[(self.rank - 1) % self.size]
        if not after.ended and not after.backlogged:
            after.send([memoryview(encode(Kind.ALIVE))])
        if before.ended or time.monotonic() - before.heard_s < 1.5 * self._beat_s:
            self._silent_beats = 0
            return
        self._silent_beats += 1
        if self._silent_beats >= BEATS:
            silent_s = BEATS * self._beat_s
            self._lose(
                before.rank,
                f"rank {before.rank} has sent nothing for {silent_s:.0f} s: it is stopped, hangs in code that holds "
                "the interpreter, or its network is gone (SIRTAKI_HEARTBEAT_S says how long is too long)",
            )

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Collective: takes leave of all others, and closes the connections once they have, too."""
        for connection in self._connections.values():
            connection.send([memoryview(encode(Kind.BYE))])
        deadline_s = time.monotonic() + CLOSE_S
        # Closed with something unread, a connection would lose what the other end has not read yet.
        while not all(each.said_bye or each.ended for each in self._connections.values()):
            if time.monotonic() > deadline_s or self.failures.error is not None:
                break
            self.progress()
            time.sleep(1e-3)
        self._closing = True
        with suppress(OSError):
            os.eventfd_write(self._wakeup, 1)
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        with self.reading:
            for connection in self._connections.values():
                connection.flush()
                connection.stop_sending()
                self._drop(connection)
            self._readable.close()
            self._hung_up.close()
            os.close(self._wakeup)
            self._wakeup = -1

    def close_in_child(self) -> None:
        """In a process that the script has forked, as data loaders do: what it kept open would outlive its rank."""
        for connection in self._connections.values():
            connection.close()


_open: weakref.WeakSet[Links] = weakref.WeakSet()


def _close_in_child() -> None:
    for links in list(_open):
        links.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
