"""JSON messages over a non-blocking socket. An elastic job has such sockets between its launcher (driver), the process
that starts the ranks of a host (agent), and the ranks.

Each message is a tagged `msgspec.Struct`. An unknown, invalid or oversized message closes the connection.
"""

import contextlib
import selectors
import socket
import struct
import zlib
from typing import Any, Generic, TypeVar

import msgspec

from sirtaki.machine import in_forked_children

LONGEST_BYTES = 8 * 2**20
"""Maximum bytes of a message. This is enough for a list of ten thousand ranks."""

LONG_BYTES = 64 * 1024
"""Longer messages are compressed, because a list of all ranks goes to each host after an elastic restart."""

_LENGTH = struct.Struct("<I")
_PIECE_BYTES = 65536

Received = TypeVar("Received")


def encoded(message: msgspec.Struct) -> bytes:
    """Encode a message for `JsonChannel.send`, so that a message to several receivers is encoded only once."""
    text = msgspec.json.encode(message)
    if len(text) > LONG_BYTES:
        text = zlib.compress(text, 1)
    return _LENGTH.pack(len(text)) + text


class JsonChannel(Generic[Received]):
    """One end of a JSON message channel. All methods are non-blocking."""

    def __init__(self, sock: socket.socket, understood: Any) -> None:
        """Take ownership of the socket.

        Args:
            sock: socket connected to the peer.
            understood: class, or union of classes, of the messages to receive. Other messages are rejected.
        """
        self._sock = sock
        sock.setblocking(False)
        self._decoder: msgspec.json.Decoder[Received] = msgspec.json.Decoder(understood)
        self._in, self._out = bytearray(), bytearray()
        self._ended = False
        self._events: selectors.BaseSelector | None = None
        self._data: Any = None
        self._waits_for = selectors.EVENT_READ
        # Close the socket in forked children. While a child has a copy, the peer would not notice that this process
        # closes it.
        in_forked_children(self, lambda channel: channel._sock.close())

    def watch(self, events: selectors.BaseSelector, data: Any) -> None:
        """Register this channel with a selector. The selector's events for the channel carry `data`.

        The selector reports the channel when it is readable, and when unsent data can be sent. Call `receive` in both
        cases. `close` unregisters the channel.
        """
        self._events, self._data = events, data
        events.register(self, self._waits_for, data)
        self.flush()

    def fileno(self) -> int:
        """Return the file descriptor for a selector; -1 after `close`."""
        return self._sock.fileno()

    def send(self, message: msgspec.Struct | bytes) -> None:
        """Send a message, or the output of `encoded`. Bytes that the socket does not accept yet are queued.

        Messages to a peer that has exited are dropped.
        """
        self._out += message if isinstance(message, bytes) else encoded(message)
        self.flush()

    def flush(self) -> None:
        """Send as many queued bytes as the socket accepts. If the peer has exited, `receive` raises an error later."""
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
        """Return all complete messages received since the last call; none after `close`.

        Raises:
            ConnectionError: the peer has exited, or sent invalid data.
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
                raise ConnectionError(
                    f"another process of this job (launcher, agent or rank) sent a control message of {length} bytes, "
                    f"more than the limit of {LONGEST_BYTES} bytes; check that all run the same version of Sirtaki"
                )
            end = _LENGTH.size + length
            if len(self._in) < end:
                break
            text = bytes(self._in[_LENGTH.size : end])
            del self._in[:end]
            try:
                if text.startswith(b"x"):
                    # The message is compressed: `x` is the first byte of zlib's format, and no JSON text begins with
                    # it.
                    text = zlib.decompressobj().decompress(text, LONGEST_BYTES)
                messages.append(self._decoder.decode(text))
            except (ValueError, zlib.error) as err:  # msgspec also raises ValueError for bytes that are not UTF-8.
                raise ConnectionError(
                    f"another process of this job (launcher, agent or rank) sent an invalid control message ({err}); "
                    "check that all run the same version of Sirtaki"
                ) from err
        # Raise the error only if no message is left, because messages that arrived before the end must be returned.
        if self._ended and not messages:
            raise ConnectionError(
                "another process of this job (launcher, agent or rank) exited or closed its control connection"
            )
        return messages

    def close(self) -> None:
        """Close the channel. Idempotent."""
        if self._events is not None:
            with contextlib.suppress(KeyError, ValueError):
                # Ignore an error of the selector, because it may be closed already.
                self._events.unregister(self)
            self._events = None
        self._sock.close()
