"""Messages in JSON over a socket that does not block: between a rank, its agent, and the driver of the job."""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

LONGEST_BYTES = 8 * 2**20
"""A generation of some ten thousand ranks has room."""

_LENGTH = struct.Struct("<I")
_PIECE_BYTES = 65536


def encoded(message: Mapping[str, Any]) -> bytes:
    """For `JsonChannel.send_encoded`: a message that goes to many is written once."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


class JsonChannel:
    """One end. Nothing here blocks; whoever is to hear is asked by a selector."""

    def __init__(self, sock: socket.socket) -> None:
        """The socket becomes its own."""
        self._sock = sock
        sock.setblocking(False)
        self._in, self._out = bytearray(), bytearray()
        self._ended = False

    def fileno(self) -> int:
        """For a selector; -1 = closed."""
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        """`flush` should be called when it can be written."""
        return bool(self._out)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends what can be sent now, and keeps the rest. What is sent to somebody who is gone is dropped."""
        self.send_encoded(encoded(message))

    def send_encoded(self, text: bytes) -> None:
        """As `send`, of what `encoded` has given."""
        self._out += text
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

    def receive(self) -> list[dict[str, Any]]:
        """All whole messages that have come.

        Raises:
            ConnectionError: the other end is gone, or what it sends is no message.
        """
        try:
            while not self._ended and len(self._in) <= LONGEST_BYTES + _LENGTH.size:
                piece = self._sock.recv(_PIECE_BYTES)
                self._in += piece
                self._ended = not piece
        except BlockingIOError:
            pass
        except OSError:
            self._ended = True
        messages = list(self._whole())
        if self._ended and not messages:  # what came before is heard first
            raise ConnectionError("the other end is gone")
        return messages

    def _whole(self) -> list[dict[str, Any]]:
        found = []
        while len(self._in) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in)
            if length > LONGEST_BYTES:
                raise ConnectionError(f"a message of {length} bytes")
            if len(self._in) < _LENGTH.size + length:
                break
            text = bytes(self._in[_LENGTH.size : _LENGTH.size + length])
            del self._in[: _LENGTH.size + length]
            try:
                message = json.loads(text)
            except ValueError as err:
                raise ConnectionError("what came is not JSON") from err
            if not isinstance(message, dict):
                raise ConnectionError("what came is no message")
            found.append(message)
        return found

    def close(self) -> None:
        """Ends it; again is harmless."""
        self._sock.close()
