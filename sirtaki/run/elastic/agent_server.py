"""Where agents find the driver: ports at which only those get anywhere who know the job's secret."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from sirtaki.comm.control.mesh.handshake import MAX_UNPROVED, Candidate
from sirtaki.json_channel import JsonChannel

from .succession import DRIVER


class AgentServer:
    """Listens, and tells agents from strangers; it is asked by the driver's selector and never blocks."""

    def __init__(self, listeners: Sequence[socket.socket], *, key: bytes, events: selectors.BaseSelector) -> None:
        """The listeners become its own."""
        self._key, self._events = key, events
        self._listeners = listeners
        self._candidates: dict[int, Candidate] = {}
        for listener in self._listeners:
            listener.setblocking(False)
            events.register(listener, selectors.EVENT_READ, self)

    @property
    def places(self) -> list[tuple[str, int]]:
        """Where it listens."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    def advance(self, descriptor: int) -> tuple[int, JsonChannel] | None:
        """Something has come there: the number of an agent and its connection, once it has proved itself."""
        candidate = self._candidates.get(descriptor)
        if candidate is None:
            self._accept(descriptor)
            return None
        try:
            number = candidate.advance(self._key, DRIVER)
            if number is None:
                return None
            candidate.welcome()
        except OSError:
            self._drop(descriptor)
            return None
        del self._candidates[descriptor]
        self._events.unregister(candidate.sock)
        candidate.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return number, JsonChannel(candidate.sock)

    def drop_late(self) -> None:
        """Closes what has not proved itself in time."""
        now_s = time.monotonic()
        for descriptor in [number for number, each in self._candidates.items() if each.deadline_s < now_s]:
            self._drop(descriptor)

    def close(self) -> None:
        """Listens no more."""
        for descriptor in list(self._candidates):
            self._drop(descriptor)
        for listener in self._listeners:
            with suppress(KeyError, ValueError):
                self._events.unregister(listener)
            listener.close()

    def _accept(self, descriptor: int) -> None:
        for listener in self._listeners:
            if listener.fileno() != descriptor:
                continue
            with suppress(OSError):
                sock, _ = listener.accept()
                sock.setblocking(False)
                if len(self._candidates) >= MAX_UNPROVED:
                    self._drop(next(iter(self._candidates)))
                self._candidates[sock.fileno()] = Candidate(sock)
                self._events.register(sock, selectors.EVENT_READ, self)

    def _drop(self, descriptor: int) -> None:
        gone = self._candidates.pop(descriptor)
        self._events.unregister(gone.sock)
        gone.sock.close()
