"""One connection of the mesh: to one other rank, for all contexts, read and written without ever blocking."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from .frames import HEADER_BYTES, Header, decode

_INBOUND_BYTES = 64 * 1024

COPIED_BYTES = 64 * 1024
"""What cannot leave at once is copied if it is not longer, so that its sender may go on."""

_TURN_BYTES = 8 * 1024**2
"""After so many bytes of one connection the others have their turn."""


class Receiver(Protocol):
    """Says where payloads go."""

    def place(self, source: int, header: Header) -> memoryview:
        """Memory for the payload that follows `header`."""
        ...

    def take(self, source: int, header: Header, payload: memoryview) -> None:
        """The payload has come."""
        ...


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
        self.said_bye = self.ended = False
        self._sending = threading.Lock()
        self._queue: deque[tuple[list[memoryview], Sending]] = deque()
        self._inbound = bytearray(_INBOUND_BYTES)
        self._inbound_view = memoryview(self._inbound)
        self._begin = self._end = 0
        self._header: Header | None = None
        self._payload = memoryview(b"")
        self._filled = 0

    def fileno(self) -> int:
        """For epoll; -1 once it is closed."""
        return self._socket.fileno()

    # ── sending: from any thread ─────────────────────────────────────────────────────────────────────────────────

    @property
    def backlogged(self) -> bool:
        """Something waits until the other end reads."""
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

    def read(self, receiver: Receiver) -> None:
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
            self.heard_s = time.monotonic()
            if direct:
                self._filled += count
                self._complete(receiver)
            else:
                self._end += count
                self._parse(receiver)
            if count < len(into):
                return

    def _parse(self, receiver: Receiver) -> None:
        while True:
            if self._header is None:
                if self._end - self._begin < HEADER_BYTES:
                    break
                header = decode(self._inbound, self._begin)
                self._begin += HEADER_BYTES
                self._payload, self._filled = receiver.place(self.rank, header), 0
                self._header = header
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

    def _complete(self, receiver: Receiver) -> bool:
        """Hands the payload on if it is whole."""
        assert self._header is not None
        if self._filled < len(self._payload):
            return False
        header, payload = self._header, self._payload
        self._header, self._payload = None, memoryview(b"")
        receiver.take(self.rank, header, payload)
        return True

    def stop_sending(self) -> None:
        """The other end finds the end of the stream after what was sent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the socket in this process; may be called twice."""
        self._socket.close()
