"""Mutual authentication of the connections between processes of a job.

Each end sends a random challenge, and proves its knowledge of the job's key by an HMAC-SHA256 over both challenges and
both ranks. Neither end reads any other data before it has checked the proof. Sending a recorded handshake again proves
nothing, because the challenges differ. Messages after the handshake are not encrypted.

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

from .waiting import start_thread

HANDSHAKE_S = 5.0
"""Time limit in seconds of a handshake (mutual authentication of a new connection)."""

MAX_UNPROVED = 128
"""Largest number of connections whose handshake (authentication) is unfinished. If one more is accepted, the oldest of
them is closed."""

MAGIC = b"SIRTAKI\x01"
_HELLO = struct.Struct("<8sII32s")
_CHALLENGE_BYTES = _PROOF_BYTES = 32
_REPLY_BYTES = _CHALLENGE_BYTES + _PROOF_BYTES
_WELCOME = b"\x01"


class NoProof(CommError):
    """The process at the other end of a connection did not prove that it knows the job's secret."""


def job_key(secret: str, job: str) -> bytes:
    """Derive the key that authenticates the connections of a job (or mesh) named `job` from the secret."""
    return hmac.digest(secret.encode(), f"sirtaki mesh {job}".encode(), "sha256")


def _proof(key: bytes, side: bytes, hello: bytes, challenge: bytes) -> bytes:
    return hmac.digest(key, side + hello + challenge, "sha256")


def connect(address: tuple[str, int], *, key: bytes, own: int, other: int) -> socket.socket:
    """Connect to the process with number `other`, and authenticate both ends.

    Raises:
        OSError: no process listens at `address`, or it does not answer in time.
        NoProof: the process at `address` did not prove that it knows the job's secret.
    """
    sock = socket.create_connection(address, timeout=HANDSHAKE_S)
    try:
        hello = _HELLO.pack(MAGIC, own, other, secrets.token_bytes(_CHALLENGE_BYTES))
        sock.sendall(hello)
        reply = _read(sock, _REPLY_BYTES, address)
        challenge, proof = reply[:_CHALLENGE_BYTES], reply[_CHALLENGE_BYTES:]
        if not hmac.compare_digest(proof, _proof(key, b"acceptor", hello, challenge)):
            raise NoProof(
                f"the process at {address[0]}:{address[1]} does not know this job's secret; it belongs to another job "
                "or has another SIRTAKI_SECRET"
            )
        sock.sendall(_proof(key, b"connector", hello, challenge))
        if _read(sock, len(_WELCOME), address) != _WELCOME:
            raise OSError(
                f"the process at {address[0]}:{address[1]} did not confirm the connection; it may run another version "
                "of Sirtaki"
            )
    except BaseException:
        sock.close()
        raise
    return sock


def _read(sock: socket.socket, length: int, address: tuple[str, int]) -> bytes:
    """Read exactly `length` bytes from the process at `address`, within the time limit of a handshake."""
    deadline_s, read = time.monotonic() + HANDSHAKE_S, b""
    while len(read) < length:
        sock.settimeout(max(1e-3, deadline_s - time.monotonic()))
        if not (more := sock.recv(length - len(read))):
            raise ConnectionError(
                f"the process at {address[0]}:{address[1]} closed the connection during the handshake: check that it "
                "still runs and belongs to this job"
            )
        read += more
    return read


class UnprovedConnection:
    """An accepted connection whose handshake is unfinished."""

    def __init__(self, sock: socket.socket) -> None:
        """Store an accepted non-blocking socket, and start the time limit of its handshake."""
        self.sock, self.deadline_s = sock, time.monotonic() + HANDSHAKE_S
        self.hello = self.read = b""
        self.challenge = secrets.token_bytes(_CHALLENGE_BYTES)

    def advance(self, key: bytes, own: int) -> int | None:
        """Continue the handshake with the bytes that have arrived. Non-blocking.

        Returns:
            The number of the remote process once it is authenticated, else None.

        Raises:
            OSError: the handshake failed.
        """
        wanted = _PROOF_BYTES if self.hello else _HELLO.size
        more = self.sock.recv(wanted - len(self.read))
        if not more:
            raise ConnectionError(
                "a process connected to this one, but closed the connection before authentication ended; it has "
                "exited, or has another SIRTAKI_SECRET: look at its log"
            )
        self.read += more
        if len(self.read) < wanted:
            return None
        read, self.read = self.read, b""
        if not self.hello:
            magic, _, to, _ = _HELLO.unpack(read)
            if magic != MAGIC or to != own:
                raise ConnectionError(
                    "this process refused a connection that was meant for another process, or does not come from "
                    "Sirtaki; check that no other program or job uses the same port"
                )
            self.hello = read
            self.send(self.challenge + _proof(key, b"acceptor", read, self.challenge))
            return None
        if not hmac.compare_digest(read, _proof(key, b"connector", self.hello, self.challenge)):
            raise ConnectionError(
                "this process refused a connection, because the connecting process has another SIRTAKI_SECRET or "
                "belongs to another job; set SIRTAKI_SECRET to one value on all ranks"
            )
        return int(_HELLO.unpack(self.hello)[1])

    def send(self, message: bytes) -> None:
        """Send a message of the handshake. Non-blocking.

        Raises:
            OSError: the connection broke.
        """
        # The empty send buffer of a new connection has room for the whole message. If only a part was sent, the buffer
        # is full, because the peer does not read.
        if self.sock.send(message) < len(message):
            raise ConnectionError(
                "a process opened a connection to this one, but does not answer the authentication; check that it is a "
                "rank of this job and does not hang"
            )


def listen(addresses: Sequence[str]) -> list[socket.socket]:
    """Listen at a free port of each address, and at no other address.

    Raises:
        OSError: an address cannot be bound.
    """
    listeners: list[socket.socket] = []
    try:
        for address in addresses:
            listeners.append(socket.create_server((address, 0), backlog=512))  # noqa: PERF401  # to close them on failure
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


class HandshakeListener:
    """Accepts connections, and authenticates each by a handshake. Non-blocking: `advance` handles events of a selector.

    A process without the secret can keep a connection open only for the time limit of a handshake.

    Attributes:
        addresses: (host, port) of each listener.
        refused: number of connections that failed the handshake.
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
        """Take ownership of the listeners.

        Args:
            listeners: listening sockets.
            key: key of the job.
            own: number of this process, which a connecting process must name.
            events: selector in which this object registers its sockets, with itself as data.
            is_wanted: returns whether to accept an authenticated process with this number.
        """
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._key, self._own, self._events, self._is_wanted = key, own, events, is_wanted
        self._candidates: dict[int, UnprovedConnection] = {}
        self.addresses: list[tuple[str, int]] = [listener.getsockname()[:2] for listener in listeners]
        self.refused = 0
        for listener in listeners:
            listener.setblocking(False)
            events.register(listener, selectors.EVENT_READ, self)

    def advance(self, descriptor: int) -> tuple[int, socket.socket] | None:
        """Handle a selector event of a file descriptor: accept a connection, or continue its handshake.

        Returns:
            (number of the remote process, its connection) if the event completed a handshake, else None.
        """
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
                    raise ConnectionError(
                        "this process refused an unexpected or second connection from rank (or launcher agent) "
                        f"{number}; check that no two processes have the same RANK"
                    )
                candidate.send(_WELCOME)
            except BlockingIOError:
                # Ignore the event, because it belongs to a closed connection whose descriptor is in use again.
                return None
            except OSError:
                self._drop(descriptor)
                return None
            del self._candidates[descriptor]
            self._events.unregister(candidate.sock)
            return number, candidate.sock
        return None

    def drop_expired(self) -> None:
        """Close connections whose handshake exceeded the time limit."""
        now_s = time.monotonic()
        for descriptor in [number for number, each in self._candidates.items() if each.deadline_s < now_s]:
            self._drop(descriptor)

    def close(self) -> None:
        """Close the listeners and the unfinished connections."""
        for descriptor in list(self._candidates):
            self._drop(descriptor)
        for listener in self._listeners.values():
            with suppress(KeyError, ValueError):
                self._events.unregister(listener)
            listener.close()

    def _drop(self, descriptor: int) -> None:
        candidate = self._candidates.pop(descriptor)
        self._events.unregister(candidate.sock)
        candidate.sock.close()
        self.refused += 1


class Acceptor:
    """A thread that accepts and authenticates the connections that the higher ranks open to this rank.

    Attributes:
        handshakes: object that authenticates the connections.
    """

    def __init__(self, listeners: Sequence[socket.socket], *, key: bytes, own: int, expected: Sequence[int]) -> None:
        """Take ownership of the listeners, and start the thread.

        Args:
            listeners: listening sockets.
            key: key of the job.
            own: rank of this process.
            expected: ranks whose connections are accepted.
        """
        self._expected = set(expected)
        self._accepted: dict[int, socket.socket] = {}
        self._closing = threading.Event()
        self._events = selectors.DefaultSelector()
        self.handshakes = HandshakeListener(
            listeners,
            key=key,
            own=own,
            events=self._events,
            is_wanted=self._is_wanted,
        )
        self._thread = threading.Thread(target=self._run, name="sirtaki-accept", daemon=True)
        try:
            start_thread(self._thread)
        except CommError:
            self.handshakes.close()
            self._events.close()
            raise

    def _is_wanted(self, rank: int) -> bool:
        return rank in self._expected and rank not in self._accepted

    @property
    def is_complete(self) -> bool:
        """Return whether all expected ranks have connected."""
        return len(self._accepted) == len(self._expected)

    @property
    def missing(self) -> list[int]:
        """Return the expected ranks that have not connected yet."""
        return sorted(self._expected - self._accepted.keys())

    def close(self) -> dict[int, socket.socket]:
        """Stop listening. Return the authenticated connections by rank, which the caller must close."""
        self._closing.set()
        self._thread.join()
        self.handshakes.close()
        self._events.close()
        return self._accepted

    def _run(self) -> None:
        while not (self.is_complete or self._closing.is_set()):
            for chosen, _ in self._events.select(0.05):
                if (found := self.handshakes.advance(chosen.fd)) is not None:
                    self._accepted[found[0]] = found[1]
            self.handshakes.drop_expired()
