"""How two ranks prove to each other that they belong to one job, before either reads anything else.

Each sends a random challenge, and answers the other's with an HMAC-SHA256 under the job's key over both challenges and
both ranks. What was recorded from one connection proves nothing on another. Messages are not encrypted afterwards.

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
from collections.abc import Sequence
from contextlib import suppress

from sirtaki.errors import CommError

HANDSHAKE_S = 5.0
"""How long a connection may take to prove itself."""

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
    """What proves are made with: of the job's secret, for this job only."""
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


class Candidate:
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


class Acceptor:
    """Accepts the connections of other ranks, in a thread; strangers cost a time limit and no more.

    Attributes:
        refused: connections that did not prove themselves.
    """

    def __init__(self, listeners: Sequence[socket.socket], *, key: bytes, own: int, expected: Sequence[int]) -> None:
        """The listeners become its own."""
        self._key, self._own, self._expected = key, own, set(expected)
        self._accepted: dict[int, socket.socket] = {}
        self._closing = threading.Event()
        self.refused = 0
        self._listeners = listeners
        self._thread = threading.Thread(target=self._run, name="sirtaki-accept", daemon=True)
        self._thread.start()

    @property
    def places(self) -> list[tuple[str, int]]:
        """Where it listens."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    @property
    def missing(self) -> list[int]:
        """Ranks that have not connected yet."""
        return sorted(self._expected - self._accepted.keys())

    def wait(self, timeout_s: float) -> bool:
        """Whether all are there, at the latest after so long."""
        self._thread.join(timeout_s)
        return not self.missing

    def close(self) -> dict[int, socket.socket]:
        """Stops listening, and gives the connections by rank; they are the caller's."""
        self._closing.set()
        self._thread.join()
        for listener in self._listeners:
            listener.close()
        return self._accepted

    def _run(self) -> None:
        unproved: dict[int, Candidate] = {}
        with selectors.DefaultSelector() as events:
            for listener in self._listeners:
                listener.setblocking(False)
                events.register(listener, selectors.EVENT_READ)

            def drop(descriptor: int) -> None:
                gone = unproved.pop(descriptor)
                events.unregister(gone.sock)
                gone.sock.close()
                self.refused += 1

            while self.missing and not self._closing.is_set():
                for chosen, _ in events.select(0.05):
                    if chosen.fd not in unproved:
                        with suppress(OSError):
                            sock, _ = chosen.fileobj.accept()  # type: ignore[union-attr]  # a listener
                            sock.setblocking(False)
                            if len(unproved) >= MAX_UNPROVED:
                                drop(next(iter(unproved)))
                            unproved[sock.fileno()] = Candidate(sock)
                            events.register(sock, selectors.EVENT_READ)
                        continue
                    candidate = unproved[chosen.fd]
                    try:
                        rank = candidate.advance(self._key, self._own)
                        if rank is not None and rank not in self.missing:
                            raise ConnectionError("it is there already")
                        if rank is not None:
                            candidate.welcome()
                    except OSError:
                        drop(chosen.fd)
                        continue
                    if rank is not None:
                        del unproved[chosen.fd]
                        events.unregister(candidate.sock)
                        self._accepted[rank] = candidate.sock
                now_s = time.monotonic()
                for descriptor in [fd for fd, each in unproved.items() if each.deadline_s < now_s]:
                    drop(descriptor)
            for descriptor in list(unproved):
                drop(descriptor)
