"""What travels on a connection of the mesh: frames, each with the context that it belongs to."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from sirtaki.errors import CommError

MAX_PAYLOAD_BYTES = 4 * 1024**2
"""Of one frame; longer messages take several, so that nobody allocates what a header merely claims."""

_HEADER = struct.Struct("<BBxxIQQ")

HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    """What a frame is for."""

    DATA = 1
    """A part of a collective operation."""
    POST = 2
    """A short message beside the operations."""
    ALIVE = 3
    """A heartbeat."""
    LOST = 4
    """The sender has lost a rank, whose number stands in `sequence`; the payload says how, in words."""
    BYE = 5
    """The sender needs the receiver no more; nothing comes after this."""


_KINDS = frozenset(Kind)


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


def encode(kind: Kind, *, context: int = 0, sequence: int = 0, tag: int = 0, length: int = 0) -> bytes:
    """The header of a frame."""
    return _HEADER.pack(kind, tag, sequence & 0xFFFFFFFF, context, length)


def decode(buffer: bytearray, offset: int) -> Header:
    """The header that stands at `offset`.

    Raises:
        CommError: it is none.
    """
    header = Header(*_HEADER.unpack_from(buffer, offset))
    if header.kind not in _KINDS or header.length > MAX_PAYLOAD_BYTES:
        raise CommError(f"what came is no frame of a mesh: kind {header.kind}, {header.length} bytes")
    return header
