"""Proof of the job's secret on each connection between two processes of a job.

Before either end of a connection reads anything else, each sends a random challenge, and answers the other's with an
HMAC-SHA256 under the job's key over both challenges and both ranks. What was recorded from one connection proves
nothing on another. Messages are not encrypted afterwards.

    connector → acceptor   hello: magic, from, to, challenge
    acceptor → connector   challenge, proof
    connector → acceptor   proof
    acceptor → connector   welcome
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from sirtaki.errors import CommError

HANDSHAKE_S = 5.0
"""Seconds within which a connection must prove that it belongs to the job."""

MAX_UNPROVED = 128
"""Connections that have not proved themselves yet; one more, and the oldest of them is closed."""

MAGIC = b"SIRTAKI\x01"
_HELLO = struct.Struct("<8sII32s")
_CHALLENGE_BYTES = _PROOF_BYTES = 32
_REPLY_BYTES = _CHALLENGE_BYTES + _PROOF_BYTES
_WELCOME = b"\x01"


class NoProof(CommError):
    """The other end does not know the job's secret."""


def job_key(secret: str, job: str) -> bytes:
    """Key of the proofs, derived from the job's secret for this job only."""
    return hmac.digest(secret.encode(), f"sirtaki mesh {job}".encode(), "sha256")


def _proof(key: bytes, side: bytes, hello: bytes, challenge: bytes) -> bytes:
    return hmac.digest(key, side + hello + challenge, "sha256")


def connect(address: tuple[str, int], *, key: bytes, own: int, other: int) -> socket.socket:
    """A connection to rank `other`, both ends of which have proved themselves to be the job's ranks.

    Raises:
        OSError: nobody is there, or it does not answer in time.
        NoProof: it does not prove itself.
    """
    sock = socket.create_connection(address, timeout=HANDSHAKE_S)
    try:
        hello = _HELLO.pack(MAGIC, own, other, secrets.token_bytes(_CHALLENGE_BYTES))
        sock.sendall(hello)
        reply = _read(sock, _REPLY_BYTES)
        challenge, proof = reply[:_CHALLENGE_BYTES], reply[_CHALLENGE_BYTES:]
        if not hmac.compare_digest(proof, _proof(key, b"acceptor", hello, challenge)):
            raise NoProof(f"who answers at {address[0]}:{address[1]} does not know this job's secret")
        sock.sendall(_proof(key, b"connector", hello, challenge))
        if _read(sock, len(_WELCOME)) != _WELCOME:
            raise OSError("not welcome")
    except BaseException:
        sock.close()
        raise
    return sock


def _read(sock: socket.socket, length: int) -> bytes:
    """So many bytes, and no more, within the time that a handshake may take in all."""
    deadline_s, read = time.monotonic() + HANDSHAKE_S, b""
    while len(read) < length:
        sock.settimeout(max(1e-3, deadline_s - time.monotonic()))
        if not (more := sock.recv(length - len(read))):
            raise ConnectionError("it was closed in the middle of the handshake")
        read += more
    return read


class UnprovedConnection:
    """A connection that somebody has made, and that has not proved itself yet."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes a socket that does not block."""
        self.sock, self.deadline_s = sock, time.monotonic() + HANDSHAKE_S
        self.hello = self.read = b""
        self.challenge = secrets.token_bytes(_CHALLENGE_BYTES)

    def advance(self, key: bytes, own: int) -> int | None:
        """Reads what has come; the rank at the other end once it has proved itself.

        Raises:
            OSError: it has not, and will not.
        """
        wanted = _PROOF_BYTES if self.hello else _HELLO.size
        more = self.sock.recv(wanted - len(self.read))
        if not more:
            raise ConnectionError("closed")
        self.read += more
        if len(self.read) < wanted:
            return None
        read, self.read = self.read, b""
        if not self.hello:
            magic, _, to, _ = _HELLO.unpack(read)
            if magic != MAGIC or to != own:
                raise ConnectionError("no rank of this job")
            self.hello = read
            self._send(self.challenge + _proof(key, b"acceptor", read, self.challenge))
            return None
        if not hmac.compare_digest(read, _proof(key, b"connector", self.hello, self.challenge)):
            raise ConnectionError("no proof")
        return int(_HELLO.unpack(self.hello)[1])

    def _send(self, message: bytes) -> None:
        if self.sock.send(message) < len(message):  # into an empty buffer
            raise ConnectionError("it does not read")

    def welcome(self) -> None:
        """To whom has proved itself.

        Raises:
            OSError: it is gone.
        """
        self._send(_WELCOME)


def listen(addresses: Sequence[str]) -> list[socket.socket]:
    """Listens at a port of each address, and nowhere else.

    Raises:
        OSError: it cannot.
    """
    listeners: list[socket.socket] = []
    try:
        for address in addresses:
            listeners.append(socket.create_server((address, 0), backlog=512))  # noqa: PERF401  # closed if one fails
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


class HandshakeListener:
    """Lets connections in that prove themselves; asked by a selector, it never blocks.

    Strangers cost a time limit and no more.

    Attributes:
        places: where it listens.
        refused: connections that did not prove themselves.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        *,
        key: bytes,
        own: int,
        events: selectors.BaseSelector,
        is_wanted: Callable[[int], bool] = lambda number: True,
    ) -> None:
        """The listeners become its own.

        Args:
            listeners: sockets.
            key: of the job.
            own: number by which it is looked for.
            events: where it registers what it waits for, with itself as the data.
            is_wanted: says of the number of who has proved itself whether it is let in.
        """
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._key, self._own, self._events, self._is_wanted = key, own, events, is_wanted
        self._candidates: dict[int, UnprovedConnection] = {}
        self.places: list[tuple[str, int]] = [listener.getsockname()[:2] for listener in listeners]
        self.refused = 0
        for listener in listeners:
            listener.setblocking(False)
            events.register(listener, selectors.EVENT_READ, self)

    def advance(self, descriptor: int) -> tuple[int, socket.socket] | None:
        """Something has come there: number and connection of who has proved itself by it; None = nobody."""
        if (listener := self._listeners.get(descriptor)) is not None:
            with suppress(OSError):
                sock, _ = listener.accept()
                sock.setblocking(False)
                if len(self._candidates) >= MAX_UNPROVED:
                    self._drop(next(iter(self._candidates)))
                self._candidates[sock.fileno()] = UnprovedConnection(sock)
                self._events.register(sock, selectors.EVENT_READ, self)
        elif (candidate := self._candidates.get(descriptor)) is not None:
            try:
                number = candidate.advance(self._key, self._own)
                if number is None:
                    return None
                if not self._is_wanted(number):
                    raise ConnectionError("it is there already")
                candidate.welcome()
            except BlockingIOError:  # what came was for one of the same descriptor that has just been dropped
                return None
            except OSError:
                self._drop(descriptor)
                return None
            del self._candidates[descriptor]
            self._events.unregister(candidate.sock)
            return number, candidate.sock
        return None

    def drop_late(self) -> None:
        """Closes what has not proved itself in time."""
        now_s = time.monotonic()
        for descriptor in [number for number, each in self._candidates.items() if each.deadline_s < now_s]:
            self._drop(descriptor)

    def close(self) -> None:
        """Listens no more."""
        for descriptor in list(self._candidates):
            self._drop(descriptor)
        for listener in self._listeners.values():
            with suppress(KeyError, ValueError):
                self._events.unregister(listener)
            listener.close()

    def _drop(self, descriptor: int) -> None:
        gone = self._candidates.pop(descriptor)
        self._events.unregister(gone.sock)
        gone.sock.close()
        self.refused += 1


class Acceptor:
    """Accepts the connections of other ranks, in a thread."""

    def __init__(self, listeners: Sequence[socket.socket], *, key: bytes, own: int, expected: Sequence[int]) -> None:
        """The listeners become its own."""
        self._expected = set(expected)
        self._accepted: dict[int, socket.socket] = {}
        self._closing = threading.Event()
        self._events = selectors.DefaultSelector()
        self.door = HandshakeListener(
            listeners, key=key, own=own, events=self._events, is_wanted=lambda rank: rank in self.missing
        )
        self._thread = threading.Thread(target=self._run, name="sirtaki-accept", daemon=True)
        self._thread.start()

    @property
    def missing(self) -> list[int]:
        """Ranks that have not connected yet."""
        return sorted(self._expected - self._accepted.keys())

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most `timeout_s`; return whether all ranks have connected."""
        self._thread.join(timeout_s)
        return not self.missing

    def close(self) -> dict[int, socket.socket]:
        """Stops listening, and gives the connections by rank; they are the caller's."""
        self._closing.set()
        self._thread.join()
        self.door.close()
        self._events.close()
        return self._accepted

    def _run(self) -> None:
        while self.missing and not self._closing.is_set():
            for chosen, _ in self._events.select(0.05):
                if (found := self.door.advance(chosen.fd)) is not None:
                    self._accepted[found[0]] = found[1]
            self.door.drop_late()
