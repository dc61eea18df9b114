"""Messages in JSON over a socket that does not block: between a rank, its agent, and the driver of the job.

Each message is a `msgspec.Struct` with a tag; what is unknown, damaged or too long ends the connection, by name.
"""

import contextlib
import selectors
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from sirtaki.machine import in_forked_children

LONGEST_BYTES = 8 * 2**20
"""A generation of some ten thousand ranks has room."""

_LENGTH = struct.Struct("<I")
_PIECE_BYTES = 65536

Received = TypeVar("Received")


def encoded(message: msgspec.Struct) -> bytes:
    """The message as it is sent; one that goes to many is written once."""
    text = msgspec.json.encode(message)
    return _LENGTH.pack(len(text)) + text


class JsonChannel(Generic[Received]):
    """One end. Nothing here blocks; a selector says when to `receive`, to which `watch` gives it."""

    def __init__(self, sock: socket.socket, understood: Any) -> None:
        """The socket becomes its own.

        Args:
            sock: connected to the other end.
            understood: class, or union of classes, of the messages that may come (Any: as msgspec's decoder takes it).
        """
        self._sock = sock
        sock.setblocking(False)
        self._decoder: msgspec.json.Decoder[Received] = msgspec.json.Decoder(understood)
        self._in, self._out = bytearray(), bytearray()
        self._ended = False
        self._events: selectors.BaseSelector | None = None
        self._data: Any = None
        self._waits_for = selectors.EVENT_READ
        in_forked_children(self, lambda channel: channel._sock.close())  # else the other end would not see it end

    def watch(self, events: selectors.BaseSelector, data: Any) -> None:
        """Has a selector report this channel with `data`: when something comes, and when there is room for the rest.

        `receive` sends that rest, too; `close` ends it.
        """
        self._events, self._data = events, data
        events.register(self, self._waits_for, data)
        self.flush()

    def fileno(self) -> int:
        """For a selector; -1 = closed."""
        return self._sock.fileno()

    def send(self, message: msgspec.Struct | bytes) -> None:
        """Sends what can be sent now of a message, or of what `encoded` has made of it, and keeps the rest.

        What is sent to somebody who is gone is dropped.
        """
        self._out += message if isinstance(message, bytes) else encoded(message)
        self.flush()

    def flush(self) -> None:
        """Sends what can be sent now. That the other end is gone is found by `receive`."""
        try:
            while self._out:
                del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()
        waits_for = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if self._events is not None and waits_for != self._waits_for:
            self._waits_for = waits_for
            self._events.modify(self, waits_for, self._data)

    def receive(self) -> list[Received]:
        """All whole messages that have come; none once this end is closed.

        Raises:
            ConnectionError: the other end is gone, or what it sends is no message.
        """
        if self.fileno() < 0:
            return []
        if self._events is not None:
            self.flush()
        try:
            while not self._ended and len(self._in) <= LONGEST_BYTES + _LENGTH.size:
                piece = self._sock.recv(_PIECE_BYTES)
                self._in += piece
                self._ended = not piece
        except BlockingIOError:
            pass
        except OSError:
            self._ended = True
        messages: list[Received] = []
        while len(self._in) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in)
            if length > LONGEST_BYTES:
                raise ConnectionError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._in) < end:
                break
            text = bytes(self._in[_LENGTH.size : end])
            del self._in[:end]
            try:
                messages.append(self._decoder.decode(text))
            except ValueError as err:  # msgspec's, and that of bytes that are no text
                raise ConnectionError(f"what came is no message: {err}") from err
        if self._ended and not messages:  # what came before is heard first
            raise ConnectionError("the other end is gone")
        return messages

    def close(self) -> None:
        """Ends it; again is harmless."""
        if self._events is not None:
            with contextlib.suppress(KeyError, ValueError):  # the selector may be closed
                self._events.unregister(self)
            self._events = None
        self._sock.close()
