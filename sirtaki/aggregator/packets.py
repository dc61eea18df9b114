"""The packets between ranks and an aggregator: one header, what follows it, and what is refused.

A packet is a header of 32 bytes and a body, in little-endian byte order, and never longer than 1472 bytes, so that it
fits into an Ethernet frame. Parts and sums carry float32 values: packet `seq` of a step those from `seq * floats` on,
and `count` is how many values the step has.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
Headers = npt.NDArray[Any]  # Any: a structured dtype has no static type

MAGIC, VERSION = 0x5254, 1
PACKET_BYTES = 1472
HEADER = np.dtype(
    [
        ("magic", "<u2"),
        ("version", "u1"),
        ("kind", "u1"),
        ("rank", "<u2"),
        ("spare", "<u2"),
        ("session", "<u8"),
        ("step", "<u4"),
        ("seq", "<u4"),
        ("count", "<u4"),
        ("spare_too", "<u4"),
    ]
)
HEADER_BYTES = HEADER.itemsize
ALIKE_BYTES = HEADER.fields["seq"][1] if HEADER.fields else 0
"""So many bytes at its beginning are the same in packets of one kind, rank, session and step."""

MOST_FLOATS = (PACKET_BYTES - HEADER_BYTES) // 4
MOST_SEQS = 256
"""That one acknowledgement or request names."""

_OURS = struct.pack("<HB", MAGIC, VERSION)
_REGISTRATION = struct.Struct("<16sQHBxIIII")
_WELCOME = struct.Struct("<QII")


class Kind(IntEnum):
    """What a packet says, and who sends it."""

    REGISTER = 1  # rank: this is my job, my rank, my layout
    WAIT = 2  # aggregator: known, but other ranks have not come yet
    WELCOME = 3  # aggregator: all are here, begin
    REFUSED = 4  # aggregator: no, with the reason
    PART = 5  # rank: values to be added
    SUM = 6  # aggregator: the sum; rank: a sum that it has from an aggregator that is gone
    ACK = 7  # aggregator: these have come
    PULL = 8  # rank: what has become of these?
    PING = 9  # rank
    PONG = 10  # aggregator
    UNKNOWN = 11  # aggregator: there is no such session
    GONE = 12  # aggregator: it ends
    BYE = 13  # rank: it needs nothing more
    STATUS = 14  # anybody
    COUNTERS = 15  # aggregator: JSON
    LOOK = 16  # rank: is anyone of my job there?
    SEEN = 17  # aggregator: so many (in `count`)
    ALIVE = 18  # rank: it needs nothing now, and will come again


class Summation(IntEnum):
    """How an aggregator adds."""

    FLOAT32 = 0
    TABLE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a rank says of its job, which all ranks have to say alike but for `entry`.

    Attributes:
        job: 16 bytes that name it; `job_key` makes them of a text.
        entry: drawn anew each time that a rank comes to an aggregator.
        ranks: of the job.
        packets: most that a step has.
        floats: of each packet.
        registers: of the heat layout.
        width: float32 values of a row.
    """

    job: bytes
    entry: int
    ranks: int
    summation: Summation
    packets: int
    floats: int
    registers: int
    width: int

    def encoded(self) -> bytes:
        """As the body of a packet."""
        layout = (self.packets, self.floats, self.registers, self.width)
        return _REGISTRATION.pack(self.job, self.entry, self.ranks, self.summation, *layout)

    @classmethod
    def decoded(cls, body: bytes) -> Registration | None:
        """What the body says; None where it is no registration."""
        if len(body) != _REGISTRATION.size:
            return None
        job, entry, ranks, summation, packets, floats, registers, width = _REGISTRATION.unpack(body)
        sane = ranks > 0 and packets > 0 and 0 < floats <= MOST_FLOATS and registers > 0 and width > 0
        if not sane or summation not in tuple(Summation):
            return None
        return cls(
            job=job,
            entry=entry,
            ranks=ranks,
            summation=Summation(summation),
            packets=packets,
            floats=floats,
            registers=registers,
            width=width,
        )

    @property
    def agreed(self) -> tuple[int, ...]:
        """What has to be the same on all ranks."""
        return self.ranks, self.summation, self.packets, self.floats, self.registers, self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What an aggregator tells each rank once all have come.

    Attributes:
        session: names these sums; whatever carries another number belongs to something that is over.
        first_step: the earliest step that a rank still works on.
        window: packets that a rank may have under way.
        standby: `host:port` of another aggregator, or empty.
    """

    session: int
    first_step: int
    window: int
    standby: str

    def encoded(self) -> bytes:
        """As the body of a packet."""
        return _WELCOME.pack(self.session, self.first_step, self.window) + self.standby.encode()

    @classmethod
    def decoded(cls, body: bytes) -> Welcome | None:
        """What the body says; None where it is no welcome."""
        if len(body) < _WELCOME.size:
            return None
        session, first_step, window = _WELCOME.unpack_from(body)
        standby = body[_WELCOME.size :].decode(errors="replace")
        return cls(session=session, first_step=first_step, window=max(window, 1), standby=standby)


def job_key(name: str) -> bytes:
    """16 bytes for a job's name."""
    return blake2b(name.encode(), digest_size=16).digest()


def packet(
    kind: Kind, *, rank: int = 0, session: int = 0, step: int = 0, seq: int = 0, count: int = 0, body: bytes = b""
) -> bytes:
    """One packet."""
    header = np.zeros(1, HEADER)
    header[0] = (MAGIC, VERSION, kind, rank, 0, session, step, seq, count, 0)
    return header.tobytes() + body


def seqs_body(seqs: npt.NDArray[np.integer[Any]]) -> bytes:
    """The body of an acknowledgement or a request."""
    return seqs[:MOST_SEQS].astype("<u4").tobytes()


def seqs_of(body: Bytes) -> Numbers:
    """The sequence numbers that a body names; none where it is malformed."""
    if body.size % 4 or body.size > 4 * MOST_SEQS:
        return np.zeros(0, np.int64)
    return np.frombuffer(body.tobytes(), "<u4").astype(np.int64)


def headers_of(rows: Bytes) -> Headers:
    """The headers of packets of one size, a view where it may be one: (packets,)."""
    return rows[:, :HEADER_BYTES].view(HEADER)[:, 0]


def floats_of(rows: Bytes) -> Floats:
    """The values of packets of one size, a view: (packets, floats)."""
    return rows[:, HEADER_BYTES:].view(np.float32)


def frames(packets: int, floats: int, kind: Kind, rank: int = 0) -> Bytes:
    """A matrix with a packet of `floats` values in each row, headers filled in but for session, step and count."""
    matrix = np.zeros((packets, HEADER_BYTES + 4 * floats), np.uint8)
    headers = headers_of(matrix)
    headers["magic"], headers["version"], headers["kind"], headers["rank"] = MAGIC, VERSION, kind, rank
    headers["seq"] = np.arange(packets)
    return matrix


def groups(rows: Bytes) -> list[Bytes]:
    """Packets of one size, cut where kind, rank, session or step change; those that are none of ours are left out."""
    if rows.shape[1] < HEADER_BYTES:
        return []
    if (rows[:, :ALIKE_BYTES] == rows[0, :ALIKE_BYTES]).all():
        return [rows] if rows[0, :3].tobytes() == _OURS else []
    ours = (rows[:, :3] == np.frombuffer(_OURS, np.uint8)).all(axis=1)
    if not ours.all():
        rows = rows[ours]
    if len(rows) < 2:
        return [rows] if len(rows) else []
    cuts = np.flatnonzero((rows[1:, :ALIKE_BYTES] != rows[:-1, :ALIKE_BYTES]).any(axis=1)) + 1
    return np.split(rows, cuts) if cuts.size else [rows]


def runs(seqs: Numbers) -> list[tuple[int, int]]:
    """Ascending numbers as ranges: [(begin, end), …]."""
    if not seqs.size:
        return []
    cuts = np.flatnonzero(np.diff(seqs) != 1) + 1
    begins, ends = np.concatenate(([0], cuts)), np.concatenate((cuts, [seqs.size]))
    return [(int(seqs[begin]), int(seqs[end - 1]) + 1) for begin, end in zip(begins, ends, strict=True)]
