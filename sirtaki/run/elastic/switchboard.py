"""What a driver listens to: newcomers at its ports, those who have proved themselves, and threads that wake it."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from sirtaki.json_channel import JsonChannel

from .agent_server import AgentServer
from .elastic_job import Inheritance
from .succession import agents_key

Speaker = TypeVar("Speaker")


class Switchboard(Generic[Speaker]):
    """Of one driver; a connection belongs to a speaker, whoever that is."""

    def __init__(self, inheritance: Inheritance) -> None:
        """Listens at the ports that it inherits, which become its own."""
        self._events = selectors.DefaultSelector()
        key = agents_key(inheritance.secret, inheritance.name)
        self._server = AgentServer(inheritance.listeners, key=key, events=self._events)
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._events.register(self._woken, selectors.EVENT_READ)

    @property
    def places(self) -> list[tuple[str, int]]:
        """Where it listens."""
        return self._server.places

    def connect(self, channel: JsonChannel, speaker: Speaker) -> None:
        """From now on the speaker is heard."""
        self._events.register(channel, selectors.EVENT_READ, speaker)

    def watch(self, channel: JsonChannel, speaker: Speaker) -> None:
        """Asks for what is needed of a connection just now; nothing happens if it is not connected."""
        if self._events.get_map().get(channel) is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
            self._events.modify(channel, wanted, speaker)

    def disconnect(self, channel: JsonChannel) -> None:
        """It is heard no more; harmless if it is not connected. The channel stays open."""
        with contextlib.suppress(KeyError, ValueError):
            self._events.unregister(channel)

    def wake(self) -> None:
        """From any thread: `look` returns."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def look(self, timeout_s: float, welcome: Callable[[int, JsonChannel], None]) -> Iterator[Speaker]:
        """Waits for something to happen, at most so long; those who may be heard now.

        Args:
            timeout_s: see above.
            welcome: is given the number and the connection of each newcomer that has proved itself.
        """
        for chosen, _ in self._events.select(timeout_s):
            if chosen.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif chosen.data is self._server:
                if (found := self._server.advance(chosen.fd)) is not None:
                    welcome(*found)
            else:
                yield chosen.data
        self._server.drop_late()

    def close(self) -> None:
        """Listens no more; connections are their speakers'."""
        self._server.close()
        self._events.close()
        for end in (self._woken, self._waker):
            end.close()
