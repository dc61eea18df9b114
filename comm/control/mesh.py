"""The control plane over TCP: connections between all ranks, and a communicator whose operations run over them.

Frames travel over one TCP connection to each other rank. Whoever waits for something reads for all: there is no thread
that would have to wake others up. What comes is put into the mailbox of its context. One thread sleeps until a
connection breaks or it is time for a heartbeat. Heartbeats go round in a ring, from each rank to the next one, and cost
a rank the same however many there are.

An operation is a generator of steps, which yields while something has not come yet; with short messages it takes ⌈log₂
size⌉ rounds for any number of ranks. Dissemination (Hensgen, Finkel, Manber 1988) serves the barrier and what may be
counted twice, Bruck's concatenation (Bruck et al. 1997) gathering, a binomial tree broadcasts, recursive doubling sums
over 2ⁿ ranks. All ranks end with the same bits: sums are taken in one order.
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
from .waiting import Deadline, wait_for

logger = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 4 * 1024**2
"""A frame's largest payload; longer messages take several, so that nobody allocates what a header merely claims."""

_HEADER = struct.Struct("<BBxxIQQ")

HEADER_BYTES = _HEADER.size


class FrameKind(IntEnum):
    """What a frame is for."""

    DATA = 1
    """A part of a collective operation."""
    POST = 2
    """A short message beside the operations."""
    ALIVE = 3
    """A heartbeat."""
    LOST = 4
    """The sender has lost a rank, whose number stands in `sequence`; the payload says how, in words. Tag 1: a fault."""
    BYE = 5
    """The sender needs the receiver no more; nothing comes after this."""


_KINDS = frozenset(FrameKind)


class Header(NamedTuple):
    """What stands before a payload.

    Attributes:
        tag: of a posted message.
        sequence: number of the operation within its context.
        context: number of the communicator; 0 = the mesh itself.
        length: bytes of the payload.
    """

    kind: int
    tag: int
    sequence: int
    context: int
    length: int


def encode(kind: FrameKind, *, context: int = 0, sequence: int = 0, tag: int = 0, length: int = 0) -> bytes:
    """The header of a frame."""
    return _HEADER.pack(kind, tag, sequence & 0xFFFFFFFF, context, length)


def decode(buffer: bytearray, offset: int) -> Header:
    """The header that stands at `offset`.

    Raises:
        CommError: it is none.
    """
    header = Header._make(_HEADER.unpack_from(buffer, offset))
    if header.kind not in _KINDS or header.length > MAX_PAYLOAD_BYTES:
        raise CommError(f"what came is no frame of a mesh: kind {header.kind}, {header.length} bytes")
    return header


DIRECT_BYTES = 64 * 1024
"""Longer messages are read from the socket into their place, if somebody waits for them."""


class _Wanted:
    """A long message that somebody waits for."""

    def __init__(self, view: memoryview, filled: int, sequence: int) -> None:
        self.view, self.filled, self.sequence = view, filled, sequence
        self.in_place = False  # the frame that is being read is


class Inbox:
    """Data of one sender, in order."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[int, memoryview]] = deque()
        self._wanted: _Wanted | None = None

    def place(self, header: Header) -> memoryview:
        """Return memory for the payload of a frame: that of the waiting receiver, if there is one."""
        wanted = self._wanted
        if wanted is None or len(wanted.view) - wanted.filled < header.length:
            return memoryview(bytearray(header.length))
        wanted.in_place = True
        return wanted.view[wanted.filled : wanted.filled + header.length]

    def take(self, header: Header, payload: memoryview) -> None:
        """Takes in a frame that has come whole."""
        wanted = self._wanted
        if wanted is None:
            self._arrived.append((header.sequence, payload))
            return
        _check(header.sequence, wanted.sequence, wanted.filled + len(payload), len(wanted.view))
        if not wanted.in_place:
            wanted.view[wanted.filled : wanted.filled + len(payload)] = payload
        wanted.in_place = False
        wanted.filled += len(payload)
        if wanted.filled == len(wanted.view):
            self._wanted = None

    def receive(self, view: memoryview, sequence: int) -> Iterator[None]:
        """Fills `view` with the next message, which has this `sequence`; yields while it has not come.

        Raises:
            MismatchError: the sender is elsewhere, or sends more.
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

    def post(self, view: memoryview, sequence: int) -> _Wanted:
        """Has the next message, of more than `DIRECT_BYTES`, read into `view`; called while nobody reads."""
        wanted = _Wanted(view, 0, sequence)
        self._wanted = wanted
        while self._arrived and wanted.filled < len(view):
            found, payload = self._arrived.popleft()
            self.take(Header(FrameKind.DATA, 0, found, 0, len(payload)), payload)
        return wanted


def _check(found: int, expected: int, length: int, room: int) -> None:
    if found != expected:
        raise MismatchError(f"the ranks are at different operations of a communicator: {found} and {expected}")
    if length > room:
        raise MismatchError(f"a rank sends {length} bytes or more where {room} are expected")


class Mailbox:
    """All that has come for one context.

    Attributes:
        posts: short messages: (sender, tag, message).
    """

    def __init__(self) -> None:
        self._inboxes: dict[int, Inbox] = {}
        self.posts: deque[tuple[int, int, bytes]] = deque()

    def inbox(self, source: int) -> Inbox:
        """Return the inbox for the sender with this rank in the mesh."""
        # setdefault: the thread that reads and the one that receives may come first at the same time
        return self._inboxes.get(source) or self._inboxes.setdefault(source, Inbox())

    def place(self, source: int, header: Header) -> memoryview:
        """Memory for the payload that follows `header`."""
        if header.kind == FrameKind.DATA:
            return self.inbox(source).place(header)
        return memoryview(bytearray(header.length))

    def take(self, source: int, header: Header, payload: memoryview) -> None:
        """Takes in a payload that has come."""
        if header.kind == FrameKind.DATA:
            self.inbox(source).take(header, payload)
        elif header.kind == FrameKind.POST:
            self.posts.append((source, header.tag, bytes(payload)))
        else:
            raise CommError(f"rank {source} sends a frame of kind {header.kind} to a communicator")


_INBOUND_BYTES = 64 * 1024

JOINED_BYTES = 4096
"""A message that is not longer is copied behind its header: the kernel takes one piece sooner than two."""

COPIED_BYTES = 64 * 1024
"""What cannot leave at once is copied if it is not longer, so that its sender may go on."""

_TURN_BYTES = 8 * 1024**2
"""After so many bytes of one connection the others have their turn."""


class Sending:
    """A message under way; `done` once its memory is not needed any more."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


class Connection:
    """A socket to `rank`.

    Attributes:
        rank: who is at the other end.
        heard_s: `time.monotonic()` when something last came.
        has_spoken: something has come.
        said_bye: the other end has taken its leave: that it closes is no failure.
        ended: nothing more can come.
    """

    def __init__(self, sock: socket.socket, rank: int, *, silence_s: float | None = None) -> None:
        """Owns the socket from now on; the kernel breaks it where the other host has been silent for so long."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if silence_s is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence_s)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silence_s))
        self._socket, self.rank = sock, rank
        self.heard_s = time.monotonic()
        self.said_bye = self.ended = self.has_spoken = False
        self._sending = free_in_forked_children(threading.Lock())
        self._queue: deque[tuple[list[memoryview], Sending]] = deque()
        self._inbound = bytearray(_INBOUND_BYTES)
        self._inbound_view = memoryview(self._inbound)
        self._begin = self._end = 0
        self._header: Header | None = None
        self._payload = memoryview(b"")
        self._filled = 0

    def fileno(self) -> int:
        """The descriptor, for epoll; -1 once the socket is closed."""
        return self._socket.fileno()

    # ── sending: from any thread ─────────────────────────────────────────────────────────────────────────────────

    @property
    def backlogged(self) -> bool:
        """Return whether something waits until the other end reads."""
        return bool(self._queue)

    def send(self, parts: Sequence[memoryview]) -> Sending:
        """Sends the parts one after the other, now or as soon as there is room; see `flush`."""
        sending = Sending()
        with self._sending:
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
        """Sends what waits, as far as there is room."""
        if not self._queue or not self._sending.acquire(blocking=False):
            return
        try:
            while self._queue:
                parts, sending = self._queue[0]
                rest = self._write(parts)
                if rest:
                    self._queue[0] = rest, sending
                    return
                sending.done = True
                self._queue.popleft()
        finally:
            self._sending.release()

    def _write(self, parts: list[memoryview]) -> list[memoryview]:
        """What could not be written of them. To an end that is gone everything can: whoever reads finds it gone."""
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
        """Hands what has come to `receiver`; `ended` is set at the end.

        Raises:
            CommError: what came is no frame, or no one's.
        """
        taken = 0
        while taken < _TURN_BYTES:
            direct = self._header is not None and self._begin == self._end
            into = self._payload[self._filled :] if direct else self._inbound_view[self._end :]
            try:
                count = self._socket.recv_into(into)
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if count == 0:
                self.ended = True
                return
            taken += count
            self.heard_s, self.has_spoken = time.monotonic(), True
            if direct:
                self._filled += count
                self._complete(receiver)
            else:
                self._end += count
                self._parse(receiver)
            if count < len(into):
                return

    def _parse(self, receiver: Links) -> None:
        while True:
            if self._header is None:
                if self._end - self._begin < HEADER_BYTES:
                    break
                header = decode(self._inbound, self._begin)
                begin = self._begin + HEADER_BYTES
                if header.length <= self._end - begin:  # all of it is here, as of most short messages
                    self._begin = begin + header.length
                    receiver.take(self.rank, header, memoryview(bytes(self._inbound_view[begin : self._begin])))
                    continue
                self._begin, self._header = begin, header
                self._payload, self._filled = receiver.place(self.rank, header), 0
            count = min(len(self._payload) - self._filled, self._end - self._begin)
            if count:
                self._payload[self._filled : self._filled + count] = self._inbound_view[
                    self._begin : self._begin + count
                ]
                self._filled += count
                self._begin += count
            if not self._complete(receiver):
                break
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin > _INBOUND_BYTES // 2:
            left = self._end - self._begin
            self._inbound[:left] = self._inbound[self._begin : self._end]
            self._begin, self._end = 0, left

    def _complete(self, receiver: Links) -> bool:
        """Hands the payload on if it is whole."""
        assert self._header is not None
        if self._filled < len(self._payload):
            return False
        header, payload = self._header, self._payload
        self._header, self._payload = None, memoryview(b"")
        receiver.take(self.rank, header, payload)
        return True

    def stop_sending(self) -> None:
        """Lets the other end find the end of the stream after what was sent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the socket in this process; may be called twice."""
        self._socket.close()


BEATS = 6
"""Heartbeats that may be missing before a rank is given up."""

CLOSE_S = 5.0
"""How long the end of a mesh waits for the others."""

MESH = 0
"""The context of what concerns the mesh itself."""

_LONGEST_REASON = 2000

FAULT = 1
"""The tag of a loss that is a fault."""


class Links:
    """The connections of `rank` to all others of a mesh.

    Attributes:
        failures: where the loss of a rank is reported.
        reading: held while payloads are placed.
    """

    def __init__(
        self, rank: int, sockets: Mapping[int, socket.socket], *, heartbeat_s: float | None, first_s: float = 0.0
    ) -> None:
        """Owns the sockets, one to every other rank, each of which has proved itself.

        Args:
            rank: of this process.
            sockets: by the rank at their other end.
            heartbeat_s: a rank that is silent for so long is given up; None = never.
            first_s: how long a rank may take to send its first message, if that is longer: it may still be connecting
                to other ranks, and sends nothing until it has met all of them.
        """
        self.rank, self.size = rank, len(sockets) + 1
        self.failures = FailureBoard()
        self._connections = {other: Connection(sock, other, silence_s=heartbeat_s) for other, sock in sockets.items()}
        self._mailboxes: dict[int, Mailbox] = {}
        self._freed: set[int] = {MESH}
        self._backlogged: set[Connection] = set()
        self.reading = free_in_forked_children(threading.Lock())
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
            self._thread.start()

    # ── for communicators ────────────────────────────────────────────────────────────────────────────────────────

    def open(self, context: int) -> Mailbox:
        """Return the mailbox of that context; some messages may have come already."""
        return self._mailboxes.get(context) or self._mailboxes.setdefault(context, Mailbox())

    def free(self, context: int) -> None:
        """Drops what comes for that context from now on."""
        self._freed.add(context)
        self._mailboxes.pop(context, None)

    def send(
        self, rank: int, kind: FrameKind, payload: memoryview, *, context: int, sequence: int, tag: int
    ) -> Sending:
        """Sends a message, in as many frames as it takes; its memory is in use until the `Sending` is done."""
        parts = []
        for start in range(0, len(payload) or 1, MAX_PAYLOAD_BYTES):
            part = payload[start : start + MAX_PAYLOAD_BYTES]
            header = encode(kind, context=context, sequence=sequence, tag=tag, length=len(part))
            parts += [memoryview(header), part] if len(part) > JOINED_BYTES else [memoryview(header + part)]
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
            self._lose(connection.rank, f"rank {self.rank} cannot understand rank {connection.rank}: {err}")
            return
        if connection.ended:
            self._drop(connection)
            if not connection.said_bye:
                self._lose(connection.rank, f"rank {connection.rank} has ended: its connection is closed")

    def place(self, source: int, header: Header) -> memoryview:
        """Memory for the payload that follows `header`."""
        if header.context in self._freed:
            return memoryview(bytearray(header.length))
        return self.open(header.context).place(source, header)

    def take(self, source: int, header: Header, payload: memoryview) -> None:
        """Takes in a payload that has come."""
        if header.context != MESH:
            if header.context not in self._freed:
                self.open(header.context).take(source, header, payload)
        elif header.kind == FrameKind.BYE:
            self._connections[source].said_bye = True
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

    def _lose(self, rank: int, reason: str) -> None:
        if self._closing or self.failures.error is not None:
            return
        self.failures.report(PeerLostError(reason))
        self._tell(rank, reason)

    def _tell(self, lost: int, reason: str, tag: int = 0) -> None:
        """Tells all others that a rank is lost, so that nobody has to find out by itself."""
        payload = memoryview(reason[:_LONGEST_REASON].encode())
        for connection in list(self._connections.values()):
            if connection.rank != lost and not connection.ended:
                header = encode(FrameKind.LOST, sequence=lost, tag=tag, length=len(payload))
                connection.send([memoryview(header), payload])

    def abort(self, reason: str, *, fault: bool = False) -> None:
        """Tells all others that this rank ends, and why; it is the last that they hear. From any thread."""
        self._closing = True
        self._tell(self.rank, reason, FAULT if fault else 0)
        for connection in list(self._connections.values()):
            connection.flush()
            if not connection.backlogged:
                connection.stop_sending()  # which wakes their threads, where nobody reads

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
            after.send([memoryview(encode(FrameKind.ALIVE))])
        if before.ended or time.monotonic() - before.heard_s < 1.5 * self._beat_s:
            self._silent_beats = 0
            return
        self._silent_beats += 1
        most = BEATS if before.has_spoken else self._first_beats
        if self._silent_beats >= most:
            setting = "SIRTAKI_HEARTBEAT_S" if before.has_spoken else "SIRTAKI_START_TIMEOUT_S"
            self._lose(
                before.rank,
                f"rank {before.rank} has sent nothing for {most * self._beat_s:.0f} s: it is stopped, hangs in code "
                f"that holds the interpreter, or its network is gone ({setting} says how long is too long)",
            )

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Collective: takes leave of all others, and closes the connections once they have, too."""
        for connection in self._connections.values():
            connection.send([memoryview(encode(FrameKind.BYE))])

        def ended() -> bool:
            if self.failures.error is None:
                self.progress()
            return self.failures.error is not None or all(
                each.said_bye or each.ended for each in self._connections.values()
            )

        # Closed with something unread, a connection would lose what the other end has not read yet.
        wait_for(ended, Deadline.after(CLOSE_S))
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
        """In a process that the script has forked: what it kept open would outlive its rank."""
        for connection in self._connections.values():
            connection.close()


# ── operations ────────────────────────────────────────────────────────────────────────────────────────────────────────

SHORT_BYTES = 32 * 1024
"""Up to here a round counts for more than the bytes in it."""

IDEMPOTENT = frozenset({Op.AND, Op.MINIMUM, Op.MAXIMUM})
"""A value that is counted twice changes nothing."""

Steps = Iterator[None]
Bytes = npt.NDArray[np.uint8]


class Exchange:
    """The messages of one operation of a communicator, told from those of others by its number."""

    def __init__(self, communicator: MeshCommunicator, sequence: int) -> None:
        self._comm, self._sequence = communicator, sequence
        self.rank, self.size = communicator.rank, communicator.size

    def send(self, array: Array, rank: int) -> Sending:
        """Sends the array, whose memory is in use until the sending is done."""
        comm = self._comm
        return comm._links.send(
            comm._members[rank], FrameKind.DATA, _view(array), context=comm._context, sequence=self._sequence, tag=0
        )

    def receive(self, array: Array, rank: int) -> Steps:
        """Fills the array with the next message from that rank."""
        inbox, view = self._comm._mailbox.inbox(self._comm._members[rank]), _view(array)
        if len(view) <= DIRECT_BYTES:
            yield from inbox.receive(view, self._sequence)
            return
        with self._comm._links.reading:
            wanted = inbox.post(view, self._sequence)
        while wanted.filled < len(view):
            yield


def until_sent(*sendings: Sending) -> Steps:
    """Yields until all sendings have left."""
    for sending in sendings:
        while not sending.done:
            yield


def disseminate(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce of a short array by an idempotent operation; of an empty one: a barrier."""
    other, combine, distance = np.empty_like(array), UFUNCS[op], 1
    while distance < exchange.size:
        sending = exchange.send(array, (exchange.rank + distance) % exchange.size)
        yield from exchange.receive(other, (exchange.rank - distance) % exchange.size)
        yield from until_sent(sending)
        combine(array, other, out=array)
        distance *= 2


def double(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce of a short array over 2ⁿ ranks: partners compute the same."""
    other, distance = np.empty_like(array), 1
    while distance < exchange.size:
        partner = exchange.rank ^ distance
        sending = exchange.send(array, partner)
        yield from exchange.receive(other, partner)
        yield from until_sent(sending)
        UFUNCS[op](array, other, out=array)
        distance *= 2


def gather(exchange: Exchange, whole: Array, counts: Sequence[int]) -> Steps:
    """Bruck's concatenation: `whole` holds this rank's part already, the others' come; `counts` elements a rank."""
    rank, size, have = exchange.rank, exchange.size, 1
    begin = [0, *accumulate(counts)]

    def parts(first: int, number: int) -> list[Array]:
        """The parts of so many ranks from `first` on, which may wrap around."""
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
    """All-reduce of a short array: everybody gathers all, and reduces them in the order of ranks."""
    everything = np.empty((exchange.size, array.size), dtype=array.dtype)
    everything[exchange.rank] = array
    yield from gather(exchange, everything.reshape(-1), [array.size] * exchange.size)
    UFUNCS[op].reduce(everything, axis=0, out=array)


def reduce_scatter(exchange: Exchange, array: Array, part: Array, counts: Sequence[int], op: Op) -> Steps:
    """Each rank sends each other its part, and reduces what it gets in the order of ranks."""
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
    """All-reduce of a long array: each rank reduces a part, and all gather the parts."""
    low, more = divmod(array.size, exchange.size)
    counts = [low + (rank < more) for rank in range(exchange.size)]
    part = np.empty(counts[exchange.rank], dtype=array.dtype)
    yield from reduce_scatter(exchange, array, part, counts, op)
    begin = sum(counts[: exchange.rank])
    array[begin : begin + part.size] = part
    yield from gather(exchange, array, counts)


def all_reduce(exchange: Exchange, array: Array, op: Op) -> Steps:
    """All-reduce of a 1-d array, in the way that suits its length."""
    size = exchange.size
    if array.nbytes <= SHORT_BYTES:
        if op in IDEMPOTENT:
            return disseminate(exchange, array, op)
        if size & (size - 1) == 0:
            return double(exchange, array, op)
        if array.nbytes * size <= SHORT_BYTES:
            return gather_and_reduce(exchange, array, op)
    return reduce_in_parts(exchange, array, op)


def broadcast(exchange: Exchange, array: Array, root: int) -> Steps:
    """Broadcast from `root` along a binomial tree."""
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
    """Each rank sends each other its part."""
    rank, size = exchange.rank, exchange.size
    give, take = ([0, *accumulate(each)] for each in counts)
    sendings = []
    for distance in range(1, size):
        other = (rank + distance) % size
        sendings.append(exchange.send(given[give[other] : give[other + 1]], other))
    received[take[rank] : take[rank + 1]] = given[give[rank] : give[rank + 1]]
    for distance in range(1, size):
        other = (rank - distance) % size
        yield from exchange.receive(received[take[other] : take[other + 1]], other)
    yield from until_sent(*sendings)


WORLD = MESH + 1
"""The context of all ranks."""


class MeshCommunicator:
    """Some ranks of a mesh.

    The number of its context follows from the communicator that it was opened from, so that opening one takes no
    message, and ranks outside of it need not know of it. A context belongs to one mesh, and ends with it.
    """

    backend = Backend.MESH

    def __init__(self, links: Links, members: Sequence[int] | None = None, context: int = WORLD) -> None:
        """Opens a communicator over these ranks of the mesh, this one among them.

        Args:
            links: the connections, which end with the communicator of all ranks.
            members: by their rank here, their rank in the mesh; None = all.
            context: its number, the same on all members, and no other's.
        """
        self._links, self._context = links, context
        self._members = tuple(range(links.size) if members is None else members)
        self.rank, self.size = self._members.index(links.rank), len(self._members)
        self.failures = links.failures
        self._mailbox = links.open(context)
        self._sequence = 0
        self._opened: Counter[str] = Counter()

    def duplicate(self) -> MeshCommunicator:
        """Opens another context over the same ranks; all compute its number, without a message."""
        return self._derived("duplicate", self._members)

    def subset(self, ranks: Sequence[int]) -> MeshCommunicator:
        """Opens a context over those ranks; all compute its number, without a message."""
        return self._derived(f"of {','.join(map(str, ranks))}", [self._members[rank] for rank in ranks])

    def _derived(self, how: str, members: Sequence[int]) -> MeshCommunicator:
        self._opened[how] += 1
        return MeshCommunicator(self._links, members, _number(f"{self._context} {how} {self._opened[how]}"))

    def free(self) -> None:
        """Ends this communicator without a message; with that of all ranks the mesh ends."""
        if self._context == WORLD:
            self._links.close()
        self._links.free(self._context)

    def abort(self, reason: str, *, fault: bool = False) -> None:
        """Tells all ranks of the mesh that this one ends, and why."""
        self._links.abort(reason, fault=fault)

    def same_host(self) -> int:
        """Equal on all ranks: a mesh knows nothing of hosts."""
        return 0

    # ── operations ───────────────────────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, array: Array, op: Op) -> Test:
        """Begins an all-reduce, by the algorithm that suits the size and the number of ranks."""
        return self._begin(all_reduce(self._next(), array.reshape(-1), op))

    def broadcast(self, array: Array, root: int) -> Test:
        """Begins a broadcast from `root` along a binomial tree."""
        return self._begin(broadcast(self._next(), array, root))

    def all_gather(self, mine: Array, gathered: Array, counts: Sequence[int] | None = None) -> Test:
        """Puts this rank's part in its place and begins to fill the others'."""
        counts = [mine.size] * self.size if counts is None else counts
        whole, begin = gathered.reshape(-1), sum(counts[: self.rank])
        whole[begin : begin + mine.size] = mine.reshape(-1)
        return self._begin(gather(self._next(), whole, counts))

    def all_to_all(
        self, sent: Array, received: Array, counts: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Test:
        """Begins to give each rank its part."""
        counts = ([sent.size // self.size] * self.size,) * 2 if counts is None else counts
        return self._begin(all_to_all(self._next(), sent.reshape(-1), received.reshape(-1), counts))

    def reduce_scatter(self, array: Array, part: Array, counts: Sequence[int], op: Op) -> Test:
        """Begins to reduce towards each rank's part."""
        return self._begin(reduce_scatter(self._next(), array, part, counts, op))

    def barrier(self) -> Test:
        """Begins a barrier: ranks tell each other that they have come."""
        return self._begin(disseminate(self._next(), np.empty(0, dtype=np.uint8), Op.AND))

    def send(self, array: Array, rank: int) -> Test:
        """Begins to send; it matches the `receive` of that rank, in the order of calls."""
        return self._begin(until_sent(Exchange(self, 0).send(array, rank)))

    def receive(self, array: Array, rank: int) -> Test:
        """Begins to receive from that rank what it sends next."""
        return self._begin(Exchange(self, 0).receive(array, rank))

    def _next(self) -> Exchange:
        self._sequence = self._sequence % 0xFFFFFFFF + 1  # 0 is what is not collective
        return Exchange(self, self._sequence)

    def _begin(self, steps: Steps) -> Test:
        """Takes the first steps, which do not wait for anyone."""
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
        """Sends a short message behind what is on its way to that rank; to itself, puts it into its own mailbox."""
        if rank == self.rank:
            self._mailbox.posts.append((self._links.rank, tag, message))
            return
        self._links.send(
            self._members[rank], FrameKind.POST, memoryview(message), context=self._context, sequence=0, tag=tag
        )

    def collect(self) -> tuple[int, int, bytes] | None:
        """The next short message in the mailbox, with its source and tag; looks at the links once if there is none."""
        posts = self._mailbox.posts
        if not posts:
            self._links.progress()
            if not posts:
                return None
        source, tag, message = posts.popleft()
        return self._members.index(source), tag, message


def _view(array: Array) -> memoryview:
    """The bytes of a contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # NumPy's stub of 3.11


def _number(origin: str) -> int:
    """64 bits, so that no two contexts of a mesh have one number."""
    number = int.from_bytes(hashlib.blake2b(origin.encode(), digest_size=8).digest(), "little")
    return max(number, WORLD + 1)
