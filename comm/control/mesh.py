"""Small collectives over TCP: a mesh (connections between all ranks), and a communicator that uses them.

Each pair of ranks shares one TCP connection, which carries frames (messages, or parts of long messages). A thread that
waits for a message reads all connections, and delivers each frame to the mailbox of its communicator, whose id is the
frame's context. So no reader thread is needed, and no thread must be woken when a message arrives. One background
thread sleeps until a connection breaks or a heartbeat is due. Heartbeats travel in a ring, from each rank to the next,
so their cost per rank does not depend on the number of ranks.

A collective operation is a generator that yields while it waits for a message. With short arrays it takes ⌈log₂ size⌉
messages in sequence. The algorithms are dissemination (Hensgen, Finkel, Manber 1988) for barriers and idempotent
reductions, Bruck's concatenation (Bruck et al. 1997) for all-gather, a binomial tree for broadcast, and recursive
doubling for sums over 2ⁿ ranks. Results are bitwise equal on all ranks, because all ranks add in the same order.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sirtaki.errors import CommError, MismatchError, PeerFaultError, PeerLostError
from sirtaki.machine import free_in_forked_children, in_forked_children

from .communicator import UFUNCS, Array, Backend, Op, Test
from .failure import FailureBoard
from .waiting import Deadline, start_thread, wait_for

logger = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 4 * 1024**2
"""Largest payload of a frame (message, or part of a long message) in bytes. Longer messages are split, so that a
corrupt header cannot cause a huge allocation."""

_HEADER = struct.Struct("<BBxxIQQ")

HEADER_BYTES = _HEADER.size


class FrameKind(IntEnum):
    """Purpose of a frame, which is a message between two ranks or a part of a long one."""

    DATA = 1
    """A message of a collective operation, of `send` or of `receive`."""
    POST = 2
    """A short message that `post` sends and `collect` reads, outside the collective operations."""
    ALIVE = 3
    """A heartbeat, by which the receiver knows that the sender is alive."""
    LOST = 4
    """The sender reports that a rank is lost to the job.

    The header's field `sequence` is the number of the lost rank, the payload is the reason as text. The tag is `FAULT`
    if only the rank's communication failed, else 0.
    """
    BYE = 5
    """The sender closes its connections. It sends nothing after this frame."""


_KINDS = frozenset(FrameKind)


class Header(NamedTuple):
    """Header of a frame, which is a message between two ranks or a part of a long one.

    Attributes:
        kind: a `FrameKind`.
        tag: tag of a short message that `post` sends.
        sequence: sequence number of the operation in its communicator.
        context: id of the communicator to which the frame belongs. 0 = the frame concerns all communicators.
        length: payload length in bytes.
    """

    kind: int
    tag: int
    sequence: int
    context: int
    length: int


def encode(kind: FrameKind, *, context: int = 0, sequence: int = 0, tag: int = 0, length: int = 0) -> bytes:
    """Return the header of a frame as bytes."""
    return _HEADER.pack(kind, tag, sequence & 0xFFFFFFFF, context, length)


def decode(buffer: memoryview, offset: int) -> Header:
    """Return the frame header whose bytes begin at `offset` of `buffer`.

    Raises:
        CommError: the bytes at `offset` are not a valid header.
    """
    header = Header._make(_HEADER.unpack_from(buffer, offset))
    if header.kind not in _KINDS or header.length > MAX_PAYLOAD_BYTES:
        raise CommError(
            f"another rank sent an invalid message (kind {header.kind}, {header.length} bytes, limit "
            f"{MAX_PAYLOAD_BYTES} bytes); check that all ranks run the same version of Sirtaki"
        )
    return header


DIRECT_BYTES = 64 * 1024
"""Size in bytes above which a message is read from the socket straight into the receiver's array, if the receiver
already waits for it."""


class _PostedReceive:
    """A receive of a long message into the array `view`, of which `filled` bytes have arrived."""

    def __init__(self, view: memoryview, filled: int, sequence: int) -> None:
        self.view, self.filled, self.sequence = view, filled, sequence
        self.in_place = False  # True while bytes are read from the socket straight into `view`, without a copy.


class Inbox:
    """Queue of the messages that one communicator has received from one sender and not yet used in an operation."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[int, memoryview]] = deque()
        self._posted: _PostedReceive | None = None

    def place(self, header: Header) -> memoryview:
        """Return memory for the payload of a frame: the waiting receiver's array if it fits there, else new memory."""
        posted = self._posted
        if posted is None or len(posted.view) - posted.filled < header.length:
            return memoryview(bytearray(header.length))
        posted.in_place = True
        return posted.view[posted.filled : posted.filled + header.length]

    def deliver(self, header: Header, payload: memoryview) -> None:
        """Copy the payload of a complete frame into the waiting receiver's array, or queue it if no receiver waits."""
        posted = self._posted
        if posted is None:
            self._arrived.append((header.sequence, payload))
            return
        _check(header.sequence, posted.sequence, posted.filled + len(payload), len(posted.view))
        if not posted.in_place:
            posted.view[posted.filled : posted.filled + len(payload)] = payload
        posted.in_place = False
        posted.filled += len(payload)
        if posted.filled == len(posted.view):
            self._posted = None

    def receive(self, view: memoryview, sequence: int) -> Iterator[None]:
        """Fill `view` with the next message of the operation with number `sequence`. Yield while bytes are missing.

        Raises:
            MismatchError: the sender is at another operation, or sends a longer message.
        """
        filled = 0
        while True:
            while not self._arrived:
                yield
            found, payload = self._arrived.popleft()
            _check(found, sequence, filled + len(payload), len(view))
            view[filled : filled + len(payload)] = payload
            filled += len(payload)
            if filled == len(view):
                return

    def post_receive(self, view: memoryview, sequence: int) -> _PostedReceive:
        """Register `view`, an array of more than `DIRECT_BYTES`, as the destination of the next message.

        The caller holds `Links.read_lock`.
        """
        posted = _PostedReceive(view, 0, sequence)
        self._posted = posted
        while self._arrived and posted.filled < len(view):
            found, payload = self._arrived.popleft()
            self.deliver(Header(FrameKind.DATA, 0, found, 0, len(payload)), payload)
        return posted


def _check(found: int, expected: int, length: int, room: int) -> None:
    if found != expected:
        raise MismatchError(
            f"another rank is at collective number {found}, but this rank is at number {expected}; all ranks must call "
            "the same operations in the same order"
        )
    if length > room:
        raise MismatchError(
            f"another rank sent at least {length} bytes to a collective, but this rank expects {room} bytes; all ranks "
            "must pass tensors of equal size"
        )


class Mailbox:
    """Received messages of one communicator.

    Attributes:
        posts: short messages that other ranks have sent by `post`, as (sender, tag, message).
    """

    def __init__(self) -> None:
        self._inboxes: dict[int, Inbox] = {}
        self.posts: deque[tuple[int, int, bytes]] = deque()

    def inbox(self, source: int) -> Inbox:
        """Return the inbox of the sender with rank `source` in the mesh."""
        # Use setdefault, because the reading thread and the receiving thread may both create the inbox.
        return self._inboxes.get(source) or self._inboxes.setdefault(source, Inbox())

    def place(self, source: int, header: Header) -> memoryview:
        """Return memory for the payload that follows `header`."""
        if header.kind == FrameKind.DATA:
            return self.inbox(source).place(header)
        return memoryview(bytearray(header.length))

    def deliver(self, source: int, header: Header, payload: memoryview) -> None:
        """Store a complete frame: in `posts` if the sender used `post`, else in the sender's inbox."""
        if header.kind == FrameKind.DATA:
            self.inbox(source).deliver(header, payload)
        elif header.kind == FrameKind.POST:
            self.posts.append((source, header.tag, bytes(payload)))
        else:
            raise CommError(
                f"rank {source} sent a message of unexpected kind {header.kind}; check that all ranks run the same "
                "version of Sirtaki"
            )


_INBOUND_BYTES = 64 * 1024

_NOTHING = memoryview(b"")

COALESCED_BYTES = 4096
"""Size in bytes up to which a message is copied into one buffer with its header, because the kernel sends one buffer
faster than two."""

COPIED_BYTES = 64 * 1024
"""Size in bytes up to which the unsent rest of a message is copied, so that the sender may reuse its array."""

_MAX_READ_BYTES = 8 * 1024**2
"""Largest number of bytes to read from one connection before the other connections are read."""


class Sending:
    """A message that is being sent. `done` is True once the caller may reuse the message's memory."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


class Connection:
    """A TCP connection to a peer (another rank). Sending is thread-safe. To read, a thread must hold `Links.read_lock`.

    Attributes:
        rank: rank of the peer.
        last_read_s: `time.monotonic()` when bytes were last received.
        has_received: True once any bytes were received.
        received_bye: True once the peer has sent BYE, its last frame. The end of the connection is then no failure.
        ended: True once nothing more can be received.
    """

    # Use `__slots__` to save memory. A rank of a large job has thousands of connections, and most of them carry no
    # messages.
    __slots__ = (
        "_filled",
        "_header",
        "_payload",
        "_queue",
        "_rest",
        "_send_lock",
        "_socket",
        "ended",
        "has_received",
        "last_read_s",
        "rank",
        "received_bye",
    )

    def __init__(self, sock: socket.socket, rank: int, *, silence_s: float | None = None) -> None:
        """Take ownership of the socket.

        Args:
            sock: a connected TCP socket.
            rank: rank of the peer.
            silence_s: seconds without an answer of the peer's kernel after which this host's kernel breaks the
                connection. None = no limit.
        """
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if silence_s is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence_s)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence_s))
        self._socket, self.rank = sock, rank
        self.last_read_s = time.monotonic()
        self.received_bye = self.ended = self.has_received = False
        # A forked child frees this lock in `close_in_child`, because a thread of the parent may hold it at the fork.
        self._send_lock = threading.Lock()
        self._queue: list[tuple[list[memoryview], Sending]] = []
        self._rest = b""  # Beginning of a header whose other bytes have not arrived yet.
        self._header: Header | None = None
        self._payload = _NOTHING
        self._filled = 0

    def fileno(self) -> int:
        """Return the socket's file descriptor, for epoll. -1 once the socket is closed."""
        return self._socket.fileno()

    # ── sending: from any thread ─────────────────────────────────────────────────────────────────────────────────

    @property
    def backlogged(self) -> bool:
        """Return whether messages to the peer are queued because the kernel's send buffer is full."""
        return bool(self._queue)

    def send(self, parts: Sequence[memoryview]) -> Sending:
        """Send the parts of a message in order. Bytes that do not fit into the kernel's buffer are queued for `flush`.

        Thread-safe, non-blocking.
        """
        sending = Sending()
        with self._send_lock:
            rest = list(parts) if self._queue else self._write(list(parts))
            if not rest:
                sending.done = True
            else:
                if sum(len(part) for part in rest) <= COPIED_BYTES:
                    rest = [memoryview(b"".join(rest))]
                    sending.done = True
                self._queue.append((rest, sending))
        return sending

    def flush(self) -> None:
        """Send queued messages until the kernel's send buffer is full. Thread-safe, non-blocking."""
        if not self._queue or not self._send_lock.acquire(blocking=False):
            return
        try:
            while self._queue:
                parts, sending = self._queue[0]
                rest = self._write(parts)
                if rest:
                    self._queue[0] = rest, sending
                    return
                sending.done = True
                del self._queue[0]
        finally:
            self._send_lock.release()

    def _write(self, parts: list[memoryview]) -> list[memoryview]:
        """Write parts of messages to the socket, and return the parts that the kernel did not accept.

        On a broken connection, all parts count as written, because the reading thread reports the loss of the peer.
        """
        while parts:
            try:
                written = self._socket.sendmsg(parts, [], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError:
                return []
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if written:
                parts[0] = parts[0][written:]
        return parts

    # ── reading: by one thread at a time ─────────────────────────────────────────────────────────────────────────

    def read(self, receiver: Links) -> None:
        """Read the bytes that have arrived, and deliver complete frames to `receiver`. At the end, set `ended`.

        Raises:
            CommError: an invalid frame was received.
        """
        buffer, total = receiver.inbound, 0
        while total < _MAX_READ_BYTES:
            direct, kept = self._header is not None, len(self._rest)
            into = self._payload[self._filled :] if direct else buffer[kept:]
            try:
                count = self._socket.recv_into(into)
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if count == 0:
                self.ended = True
                return
            total += count
            self.last_read_s, self.has_received = time.monotonic(), True
            if direct:
                self._filled += count
                if self._filled == len(self._payload):
                    header, payload = self._header, self._payload
                    self._header, self._payload = None, _NOTHING
                    assert header is not None
                    receiver.deliver(self.rank, header, payload)
            else:
                buffer[:kept] = self._rest
                self._parse(receiver, buffer[: kept + count])
            if count < len(into):
                return

    def _parse(self, receiver: Links, data: memoryview) -> None:
        """Deliver the complete frames in `data`. Keep the bytes of an incomplete frame for the next call."""
        begin = 0
        while len(data) - begin >= HEADER_BYTES:
            header = decode(data, begin)
            begin += HEADER_BYTES
            end = begin + header.length
            if end > len(data):
                self._header, self._payload = header, receiver.place(self.rank, header)
                self._filled = len(data) - begin
                self._payload[: self._filled] = data[begin:]
                begin = len(data)
            else:
                receiver.deliver(self.rank, header, memoryview(bytes(data[begin:end])))
                begin = end
        self._rest = bytes(data[begin:])

    def stop_sending(self) -> None:
        """Shut down the sending side. The peer reads the end of the stream after the last message."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket in this process. A second call does nothing."""
        self._socket.close()

    def close_in_child(self) -> None:
        """Close the socket in a forked child.

        Replace the send lock, because a thread of the parent may have held it at the fork.
        """
        self._send_lock._at_fork_reinit()  # type: ignore[attr-defined]  # all lock types have it
        self.close()


BEATS = 6
"""Number of heartbeats in a row that a rank may miss before it counts as lost."""

CLOSE_S = 5.0
"""Seconds for which `Links.close` waits until all other ranks have sent BYE, their last frame."""

MESH = 0
"""Context id of frames that concern all connections of a rank, not one communicator, such as heartbeats."""

_MAX_REASON = 2000

FAULT = 1
"""Tag of a LOST frame (report that a rank is lost) if only the rank's communication failed, but not its process."""


class Links:
    """TCP connections of this rank to its peers, which are all other ranks.

    Attributes:
        failures: failure board, on which the loss of a rank is reported to all threads of this rank.
        read_lock: held by the thread that reads the sockets and delivers messages.
        inbound: buffer of the reading thread.
    """

    def __init__(
        self, rank: int, sockets: Mapping[int, socket.socket], *, heartbeat_s: float | None, first_s: float = 0.0
    ) -> None:
        """Take ownership of the sockets, and start the background thread.

        Args:
            rank: rank of this process.
            sockets: authenticated connections by the rank of the peer.
            heartbeat_s: seconds without a message after which a rank counts as lost. None = never.
            first_s: seconds without a first message after which a rank counts as lost, if longer than `heartbeat_s`. A
                rank sends nothing before it is connected to all other ranks, which may take long.
        """
        self.rank, self.size = rank, len(sockets) + 1
        self.failures = FailureBoard()
        self._connections = {other: Connection(sock, other, silence_s=heartbeat_s) for other, sock in sockets.items()}
        self._mailboxes: dict[int, Mailbox] = {}
        self._freed: set[int] = {MESH}
        self._backlogged: set[Connection] = set()
        self.read_lock = free_in_forked_children(threading.Lock())
        self.inbound = memoryview(bytearray(_INBOUND_BYTES))
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
        self._first_beats = max(BEATS, math.ceil(first_s / self._beat_s)) if self._beat_s else BEATS
        self._silent_beats = 0
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="sirtaki-mesh", daemon=True)
        if self._connections:
            in_forked_children(self, Links.close_in_child)
            start_thread(self._thread)

    # ── for communicators ────────────────────────────────────────────────────────────────────────────────────────

    def open(self, context: int) -> Mailbox:
        """Open the mailbox of the communicator with id `context`.

        Messages that arrived before this call are already in it.
        """
        return self._mailboxes.get(context) or self._mailboxes.setdefault(context, Mailbox())

    def free(self, context: int) -> None:
        """Close the mailbox of the communicator with id `context`. Messages for it are dropped from now on."""
        self._freed.add(context)
        self._mailboxes.pop(context, None)

    def send(
        self, rank: int, kind: FrameKind, payload: memoryview, *, context: int, sequence: int, tag: int
    ) -> Sending:
        """Send a message, in several frames if it is long. Its memory must not change until the `Sending` is done."""
        parts = []
        for start in range(0, len(payload) or 1, MAX_PAYLOAD_BYTES):
            part = payload[start : start + MAX_PAYLOAD_BYTES]
            header = encode(kind, context=context, sequence=sequence, tag=tag, length=len(part))
            parts += [memoryview(header), part] if len(part) > COALESCED_BYTES else [memoryview(header + part)]
        connection = self._connections[rank]
        sending = connection.send(parts)
        if connection.backlogged:
            self._backlogged.add(connection)
        return sending

    def progress(self) -> None:
        """Read arrived messages and send queued ones, unless another thread does so already. Non-blocking."""
        if self.read_lock.acquire(blocking=False):
            try:
                self._progress()
            finally:
                self.read_lock.release()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _progress(self) -> None:
        for descriptor, _ in self._readable.poll(0):
            if (connection := self._by_descriptor.get(descriptor)) is not None:
                self._read(connection)
        for connection in list(self._backlogged) if self._backlogged else ():
            self._backlogged.discard(connection)
            connection.flush()
            if connection.backlogged:
                self._backlogged.add(connection)

    def _read(self, connection: Connection) -> None:
        try:
            connection.read(self)
        except CommError as err:
            self._drop(connection)
            self._report_lost(connection.rank, f"rank {self.rank} received bad data from rank {connection.rank}: {err}")
            return
        except BaseException:
            # Catch KeyboardInterrupt, too. The read may have stopped within a message, so the connection is unusable.
            self._drop(connection)
            self._report_lost(connection.rank, f"rank {self.rank} was interrupted while it read from {connection.rank}")
            raise
        if connection.ended:
            self._drop(connection)
            if not connection.received_bye:
                self._report_lost(connection.rank, f"rank {connection.rank} has ended: its connection is closed")

    def place(self, source: int, header: Header) -> memoryview:
        """Return memory for the payload that follows `header`."""
        if header.context in self._freed:
            return memoryview(bytearray(header.length))
        return self.open(header.context).place(source, header)

    def deliver(self, source: int, header: Header, payload: memoryview) -> None:
        """Deliver a complete frame to its communicator's mailbox, or handle it here if it concerns all connections."""
        if header.context != MESH:
            if header.context not in self._freed:
                self.open(header.context).deliver(source, header, payload)
        elif header.kind == FrameKind.BYE:
            self._connections[source].received_bye = True
        elif header.kind == FrameKind.LOST:
            kind = PeerFaultError if header.tag == FAULT else PeerLostError
            self.failures.report(kind(bytes(payload).decode(errors="replace")))

    def _drop(self, connection: Connection) -> None:
        connection.ended = True
        descriptor = connection.fileno()
        if self._by_descriptor.pop(descriptor, None) is not None:
            for poll in (self._readable, self._hung_up):
                with suppress(OSError):
                    poll.unregister(descriptor)
            connection.close()

    # ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _report_lost(self, rank: int, reason: str) -> None:
        if self._closing or self.failures.error is not None:
            return
        self.failures.report(PeerLostError(reason))
        self._send_lost(rank, reason)

    def _send_lost(self, lost: int, reason: str, tag: int = 0) -> None:
        """Send the rank number and the cause of a loss to all ranks, so that all ranks report the same cause."""
        payload = memoryview(reason[:_MAX_REASON].encode())
        for connection in list(self._connections.values()):
            if connection.rank != lost and not connection.ended:
                header = encode(FrameKind.LOST, sequence=lost, tag=tag, length=len(payload))
                connection.send([memoryview(header), payload])

    def abort(self, reason: str, *, fault: bool = False) -> None:
        """Broadcast that this rank aborts, and why, as its last message. Thread-safe."""
        self._closing = True
        self._send_lost(self.rank, reason, FAULT if fault else 0)
        for connection in list(self._connections.values()):
            connection.flush()
            if not connection.backlogged:
                # Shut down the sending side, so that the peer's background thread wakes up and reads the LOST frame.
                connection.stop_sending()

    def _watch(self) -> None:
        """Run the background thread: detect broken connections, and exchange heartbeats."""
        due_s = time.monotonic() + (self._beat_s or 0.0)
        while not self._closing:
            wait_s = None if self._beat_s is None else max(0.0, due_s - time.monotonic())
            broken = self._hung_up.poll(wait_s)
            if self._closing:
                return
            with self.read_lock:
                for descriptor, _ in broken:
                    connection = self._by_descriptor.get(descriptor)
                    # Read the last frames of a broken connection, because they may say why it ended (LOST or BYE).
                    while connection is not None and not connection.ended:
                        self._read(connection)
                self._progress()
            if self._beat_s is not None and time.monotonic() >= due_s:
                due_s = time.monotonic() + self._beat_s
                self._exchange_heartbeat()

    def _exchange_heartbeat(self) -> None:
        """Send a heartbeat to the next rank, and report the previous rank as lost if it has been silent for too long.

        Silence is counted in heartbeat periods, because a difference of clock times would include the time for which
        this host was suspended.
        """
        assert self._beat_s is not None
        after = self._connections[(self.rank + 1) % self.size]
        before = self._connections[(self.rank - 1) % self.size]
        if not after.ended and not after.backlogged:
            after.send([memoryview(encode(FrameKind.ALIVE))])
        if before.ended or time.monotonic() - before.last_read_s < 1.5 * self._beat_s:
            self._silent_beats = 0
            return
        self._silent_beats += 1
        limit = BEATS if before.has_received else self._first_beats
        if self._silent_beats >= limit:
            setting = "SIRTAKI_HEARTBEAT_S" if before.has_received else "SIRTAKI_START_TIMEOUT_S"
            self._report_lost(
                before.rank,
                f"rank {before.rank} has sent nothing for {limit * self._beat_s:.0f} s: it is stopped, hangs in code "
                f"that holds the interpreter, or its network is down (limit: {setting})",
            )

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Close all connections: send BYE (the last frame) to all ranks, and wait for theirs. Collective."""
        for connection in self._connections.values():
            connection.send([memoryview(encode(FrameKind.BYE))])

        def ended() -> bool:
            if self.failures.error is None:
                self.progress()
            return self.failures.error is not None or all(
                each.received_bye or each.ended for each in self._connections.values()
            )

        # Wait for each peer's BYE. Closing a socket with unread data would reset it, and the peer would lose messages.
        wait_for(ended, Deadline.after(CLOSE_S))
        self._closing = True
        with suppress(OSError):
            os.eventfd_write(self._wakeup, 1)
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        with self.read_lock:
            for connection in self._connections.values():
                connection.flush()
                connection.stop_sending()
                self._drop(connection)
            self._readable.close()
            self._hung_up.close()
            os.close(self._wakeup)
            self._wakeup = -1

    def close_in_child(self) -> None:
        """Close the copies of the sockets in a forked child, because open copies keep the connections alive."""
        for connection in self._connections.values():
            connection.close_in_child()


# ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────────

SHORT_BYTES = 32 * 1024
"""Largest array in bytes that counts as short. Short arrays use algorithms with few messages in sequence, because
latency dominates their time."""

IDEMPOTENT = frozenset({Op.AND, Op.MINIMUM, Op.MAXIMUM})
"""Idempotent reduction operations: the result does not change if a value is reduced twice."""

Steps = Iterator[None]
Bytes = npt.NDArray[np.uint8]


class Exchange:
    """Sends and receives the messages of one collective operation.

    The sequence number distinguishes the operation from others of the same communicator.
    """

    def __init__(self, communicator: MeshCommunicator, sequence: int) -> None:
        self._comm, self._sequence = communicator, sequence
        self.rank, self.size = communicator.rank, communicator.size

    def send(self, array: Array, rank: int) -> Sending:
        """Start to send the array to `rank`. The array must not change until the `Sending` is done."""
        comm = self._comm
        return comm._links.send(
            comm._members[rank], FrameKind.DATA, _view(array), context=comm._context, sequence=self._sequence, tag=0
        )

    def receive(self, array: Array, rank: int) -> Steps:
        """Fill the array with the next message of `rank`. Yield while bytes are missing."""
        inbox, view = self._comm._mailbox.inbox(self._comm._members[rank]), _view(array)
        if len(view) <= DIRECT_BYTES:
            yield from inbox.receive(view, self._sequence)
            return
        with self._comm._links.read_lock:
            posted = inbox.post_receive(view, self._sequence)
        while posted.filled < len(view):
            yield


def until_sent(*sendings: Sending) -> Steps:
    """Yield until the caller may reuse the memory of the messages that are being sent."""
    for sending in sendings:
        while not sending.done:
            yield


def disseminate(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce a short array in place by dissemination, with an idempotent operation (such as a minimum).

    With an empty array, this is a barrier.
    """
    other, combine, distance = np.empty_like(array), UFUNCS[op], 1
    while distance < exchange.size:
        sending = exchange.send(array, (exchange.rank + distance) % exchange.size)
        yield from exchange.receive(other, (exchange.rank - distance) % exchange.size)
        yield from until_sent(sending)
        combine(array, other, out=array)
        distance *= 2


def recursive_doubling(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce a short array in place by recursive doubling.

    In each step, two ranks exchange their arrays and compute the same sum, so results are equal on all ranks. If there
    are more than 2ⁿ ranks, each rank from 2ⁿ on first sends its array to a lower rank, which returns the result.
    """
    other, distance, rank = np.empty_like(array), 1, exchange.rank
    power = 2 ** (exchange.size.bit_length() - 1)
    if rank >= power:
        yield from until_sent(exchange.send(array, rank - power))
        yield from exchange.receive(array, rank - power)
        return
    if rank + power < exchange.size:
        yield from exchange.receive(other, rank + power)
        UFUNCS[op](array, other, out=array)
    while distance < power:
        partner = rank ^ distance
        sending = exchange.send(array, partner)
        yield from exchange.receive(other, partner)
        yield from until_sent(sending)
        # Reduce in rank order on both ranks, so that their results are bitwise equal. The sum of two NaNs is the first
        # one.
        UFUNCS[op](*((array, other) if rank < partner else (other, array)), out=array)
        distance *= 2
    if rank + power < exchange.size:
        yield from until_sent(exchange.send(array, rank + power))


def gather(exchange: Exchange, whole: Array, counts: Sequence[int]) -> Steps:
    """All-gather by Bruck's concatenation.

    Args:
        exchange: sends and receives the messages of this operation.
        whole: result, 1-d. On entry, it holds this rank's part.
        counts: number of elements of each rank's part.
    """
    rank, size, have = exchange.rank, exchange.size, 1
    begin = [0, *accumulate(counts)]

    def parts(first: int, number: int) -> list[Array]:
        """Return the parts of `number` consecutive ranks, beginning with rank `first`.

        If the last rank is among them and rank 0 follows, return two views instead of one.
        """
        over = max(0, first + number - size)
        pieces = [whole[begin[first] : begin[first + number - over]]]
        return pieces if not over else [*pieces, whole[: begin[over]]]

    while have < size:
        number = min(have, size - have)
        sendings = [exchange.send(part, (rank - have) % size) for part in parts(rank, number)]
        for part in parts((rank + have) % size, number):
            yield from exchange.receive(part, (rank + have) % size)
        yield from until_sent(*sendings)
        have += number


def gather_and_reduce(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce a short array in place: all-gather the arrays, then reduce them locally in rank order."""
    everything = np.empty((exchange.size, array.size), dtype=array.dtype)
    everything[exchange.rank] = array
    yield from gather(exchange, everything.reshape(-1), [array.size] * exchange.size)
    UFUNCS[op].reduce(everything, axis=0, out=array)


def reduce_scatter(exchange: Exchange, array: Array, part: Array, counts: Sequence[int], op: Op) -> Steps:
    """Reduce-scatter: send each rank its part directly, and reduce the received parts in rank order."""
    begin, rank, size = [0, *accumulate(counts)], exchange.rank, exchange.size
    sendings = [
        exchange.send(array[begin[other] : begin[other + 1]], other)
        for other in ((rank + distance) % size for distance in range(1, size))
    ]
    theirs = np.empty_like(part)
    for other in range(size):
        target = part if other == 0 else theirs
        if other == rank:
            target[...] = array[begin[rank] : begin[rank + 1]]
        else:
            yield from exchange.receive(target, other)
        if other:
            UFUNCS[op](part, theirs, out=part)
    yield from until_sent(*sendings)


def reduce_in_parts(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce a long array in place: reduce-scatter it, then all-gather the reduced parts."""
    low, more = divmod(array.size, exchange.size)
    counts = [low + (rank < more) for rank in range(exchange.size)]
    part = np.empty(counts[exchange.rank], dtype=array.dtype)
    yield from reduce_scatter(exchange, array, part, counts, op)
    begin = sum(counts[: exchange.rank])
    array[begin : begin + part.size] = part
    yield from gather(exchange, array, counts)


def all_reduce(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce a 1-d array in place, by the algorithm that suits its length and the number of ranks."""
    size = exchange.size
    if array.nbytes <= SHORT_BYTES:
        if op in IDEMPOTENT:
            return disseminate(exchange, array, op)
        if size & (size - 1) and array.nbytes * size <= SHORT_BYTES:
            return gather_and_reduce(exchange, array, op)
        return recursive_doubling(exchange, array, op)
    return reduce_in_parts(exchange, array, op)


def broadcast(exchange: Exchange, array: Array, root: int) -> Steps:
    """Broadcast the array of rank `root` along a binomial tree of ranks."""
    size = exchange.size
    place = (exchange.rank - root) % size
    distance = 1
    while distance < size and not place & distance:
        distance *= 2
    if place:
        yield from exchange.receive(array, (place - distance + root) % size)
    sendings = []
    while distance > 1:
        distance //= 2
        if place + distance < size:
            sendings.append(exchange.send(array, (place + distance + root) % size))
    yield from until_sent(*sendings)


def all_to_all(exchange: Exchange, given: Array, received: Array, counts: tuple[Sequence[int], Sequence[int]]) -> Steps:
    """All-to-all: send each rank its part of `given`, and receive a part from each rank.

    Args:
        exchange: sends and receives the messages of this operation.
        given: parts to send, contiguous, by rank.
        received: result: received parts, contiguous, by rank.
        counts: number of elements of each part, as (sent, received).
    """
    rank, size = exchange.rank, exchange.size
    sent_from, received_from = ([0, *accumulate(each)] for each in counts)
    sendings = []
    for distance in range(1, size):
        other = (rank + distance) % size
        sendings.append(exchange.send(given[sent_from[other] : sent_from[other + 1]], other))
    received[received_from[rank] : received_from[rank + 1]] = given[sent_from[rank] : sent_from[rank + 1]]
    for distance in range(1, size):
        other = (rank - distance) % size
        yield from exchange.receive(received[received_from[other] : received_from[other + 1]], other)
    yield from until_sent(*sendings)


WORLD = MESH + 1
"""Id (context) of the communicator of all ranks."""


class MeshCommunicator:
    """A communicator over some ranks of a mesh (TCP connections between all ranks).

    Messages carry the communicator's id, its context. The id is a hash of the parent communicator's id and of the call
    that opened this one. So opening a communicator needs no message, and ranks outside it need not take part.
    """

    backend = Backend.MESH

    def __init__(self, links: Links, members: Sequence[int] | None = None, context: int = WORLD) -> None:
        """Open a communicator over some ranks of the mesh, including this rank.

        Args:
            links: connections to all other ranks. They are closed when the communicator of all ranks is freed.
            members: for each rank of this communicator, its rank in the mesh. None = all ranks.
            context: id of this communicator, equal on all its ranks and unique in the mesh.
        """
        self._links, self._context = links, context
        # Keep a range of ranks, because `range.index` takes constant time, whereas `list.index` searches.
        self._members: Sequence[int] = range(links.size) if members is None else members
        self.rank, self.size = self._members.index(links.rank), len(self._members)
        self.failures = links.failures
        self._mailbox = links.open(context)
        self._sequence = 0
        self._opened: Counter[str] = Counter()

    def duplicate(self) -> MeshCommunicator:
        """Open a communicator over the same ranks, without sending a message."""
        return self._derive("duplicate", self._members)

    def subset(self, ranks: Sequence[int]) -> MeshCommunicator:
        """Open a communicator over `ranks`, without sending a message."""
        return self._derive(f"of {','.join(map(str, ranks))}", tuple(self._members[rank] for rank in ranks))

    def _derive(self, how: str, members: Sequence[int]) -> MeshCommunicator:
        self._opened[how] += 1
        return MeshCommunicator(self._links, members, _context_id(f"{self._context} {how} {self._opened[how]}"))

    def free(self) -> None:
        """Free this communicator, without sending a message.

        Freeing the communicator of all ranks also closes the TCP connections.
        """
        if self._context == WORLD:
            self._links.close()
        self._links.free(self._context)

    def abort(self, reason: str, *, fault: bool = False) -> None:
        """Tell all ranks of the job that this rank aborts, and why. Thread-safe."""
        self._links.abort(reason, fault=fault)

    def same_host(self) -> int:
        """Return 0 on all ranks, because TCP connections do not show which ranks share a host."""
        return 0

    # ── operations ───────────────────────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, array: Array, op: Op) -> Test:
        """Start an all-reduce, by the algorithm that suits the array's size and the number of ranks."""
        return self._start(all_reduce(self._next(), array.reshape(-1), op))

    def broadcast(self, array: Array, root: int) -> Test:
        """Start a broadcast along a binomial tree."""
        return self._start(broadcast(self._next(), array, root))

    def all_gather(self, own: Array, gathered: Array, counts: Sequence[int] | None = None) -> Test:
        """Copy this rank's part into `gathered`, and start an all-gather."""
        counts = [own.size] * self.size if counts is None else counts
        whole, begin = gathered.reshape(-1), sum(counts[: self.rank])
        whole[begin : begin + own.size] = own.reshape(-1)
        return self._start(gather(self._next(), whole, counts))

    def all_to_all(
        self, sent: Array, received: Array, counts: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Test:
        """Start an all-to-all."""
        counts = ([sent.size // self.size] * self.size,) * 2 if counts is None else counts
        return self._start(all_to_all(self._next(), sent.reshape(-1), received.reshape(-1), counts))

    def reduce_scatter(self, array: Array, part: Array, counts: Sequence[int], op: Op) -> Test:
        """Start a reduce-scatter."""
        return self._start(reduce_scatter(self._next(), array, part, counts, op))

    def barrier(self) -> Test:
        """Start a barrier."""
        return self._start(disseminate(self._next(), np.empty(0, dtype=np.uint8), Op.AND))

    def send(self, array: Array, rank: int) -> Test:
        """Start to send `array` to `rank`. The k-th send to a rank matches that rank's k-th receive."""
        return self._start(until_sent(Exchange(self, 0).send(array, rank)))

    def receive(self, array: Array, rank: int) -> Test:
        """Start to receive the next array from `rank`."""
        return self._start(Exchange(self, 0).receive(array, rank))

    def _next(self) -> Exchange:
        # Skip the sequence number 0, because it is reserved for `send` and `receive`.
        self._sequence = self._sequence % 0xFFFFFFFF + 1
        return Exchange(self, self._sequence)

    def _start(self, steps: Steps) -> Test:
        """Run an operation until it must wait for a message. Return its `Test`, which continues the operation."""
        done = next(steps, True) is True
        progress = self._links.progress

        def test() -> bool:
            nonlocal done
            if not done:
                progress()
                done = next(steps, True) is True
            return done

        return test

    # ── short messages ───────────────────────────────────────────────────────────────────────────────────────────

    def post(self, rank: int, tag: int, message: bytes) -> None:
        """Send a short message, which `rank` reads by `collect`. A message to this rank itself is delivered at once.

        Messages to one rank arrive in order.
        """
        if rank == self.rank:
            self._mailbox.posts.append((self._links.rank, tag, message))
            return
        self._links.send(
            self._members[rank], FrameKind.POST, memoryview(message), context=self._context, sequence=0, tag=tag
        )

    def collect(self) -> tuple[int, int, bytes] | None:
        """Return the next message sent by `post`, as (source, tag, message). None if none has arrived.

        If no message has been read yet, first read the connections.
        """
        posts = self._mailbox.posts
        if not posts:
            self._links.progress()
            if not posts:
                return None
        source, tag, message = posts.popleft()
        return self._members.index(source), tag, message


def _view(array: Array) -> memoryview:
    """Return the bytes of a contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # NumPy's stub of 3.11


def _context_id(origin: str) -> int:
    """Return a communicator's id: a 64-bit hash of `origin`, a text with its parent's id and the opening call."""
    number = int.from_bytes(hashlib.blake2b(origin.encode(), digest_size=8).digest(), "little")
    return max(number, WORLD + 1)
