"""Messages between ranks and aggregator, and how they travel in datagrams."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sirtaki.errors import ConfigError
from sirtaki.host_port import Address

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


class Registration(NamedTuple):
    """What a rank says of its job, which all ranks have to say alike but for `entry`.

    Attributes:
        job: 16 bytes that name it; `job_key` makes them of a text.
        entry: drawn anew each time that a rank comes to an aggregator.
        ranks: of the job.
        summation: a `Summation`.
        packets: most that a step has.
        floats: of each packet.
        registers: of the heat layout.
        width: float32 values of a row.
    """

    job: bytes
    entry: int
    ranks: int
    summation: int
    packets: int
    floats: int
    registers: int
    width: int

    def encoded(self) -> bytes:
        """As the body of a packet."""
        return _REGISTRATION.pack(*self)

    @classmethod
    def decoded(cls, body: bytes) -> Registration | None:
        """What the body says; None where it is no registration."""
        if len(body) != _REGISTRATION.size:
            return None
        found = cls._make(_REGISTRATION.unpack(body))
        sane = all(found[4:]) and found.ranks and found.floats <= MOST_FLOATS and found.summation in tuple(Summation)
        return found if sane else None

    @property
    def agreed(self) -> tuple[int, ...]:
        """What has to be the same on all ranks."""
        return self[2:]


class Welcome(NamedTuple):
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
        return _WELCOME.pack(*self[:3]) + self.standby.encode()

    @classmethod
    def decoded(cls, body: bytes) -> Welcome | None:
        """What the body says; None where it is no welcome."""
        if len(body) < _WELCOME.size:
            return None
        session, first_step, window = _WELCOME.unpack_from(body)
        return cls(session, first_step, max(window, 1), body[_WELCOME.size :].decode(errors="replace"))


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


_UDP_SEGMENT, _UDP_GRO = 103, 104
_IP_MTU_DISCOVER, _NEVER = 10, 0
_MOST_SEGMENTS, _MOST_BYTES = 64, 64000
_BUFFER_BYTES = 65536
_SOCKET_BUFFER_BYTES = 4 * 2**20

_PASSING = {errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENOBUFS, errno.ENETDOWN, errno.EPERM}


class Wire:
    """One socket; of one thread."""

    def __init__(self, sock: socket.socket, *, batches: bool = True) -> None:
        """The socket becomes its own; `batches=False` sends and receives packet by packet."""
        self._sock = sock
        sock.setblocking(True)  # to send; that is how a full queue of the link holds a sender back
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
        with contextlib.suppress(OSError):  # where frames are shorter than packets, these are sent in fragments
            sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _NEVER)
        self._cuts = batches
        if batches:
            try:
                sock.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
            except OSError:
                self._cuts = False
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = np.frombuffer(self._buffer, np.uint8)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.refused = False

    @classmethod
    def bound(cls, host: str, port: int, *, batches: bool = True) -> Wire:
        """Listens at an address; port 0 = any.

        Raises:
            ConfigError: it cannot.
        """
        try:
            return cls(_opened((host, port), socket.socket.bind), batches=batches)
        except (OSError, UnicodeError) as err:  # a name that is none
            raise ConfigError(f"an aggregator cannot listen at {host}:{port}: {_reason(err)}") from err

    @classmethod
    def connected(cls, address: Address, *, batches: bool = True) -> Wire:
        """Speaks with one address, and hears nobody else.

        Raises:
            ConfigError: there is no such host.
        """
        try:
            return cls(_opened(address, socket.socket.connect), batches=batches)
        except (OSError, UnicodeError) as err:
            raise ConfigError(f"no aggregator can be reached at {address[0]}:{address[1]}: {_reason(err)}") from err

    @property
    def address(self) -> Address:
        """Its own."""
        host, port = self._sock.getsockname()[:2]
        return str(host), int(port)

    @property
    def receive_bytes(self) -> int:
        """What the kernel keeps of packets that nobody has taken yet."""
        return self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    def wait(self, timeout_s: float) -> bool:
        """Until something has come, or the time is up."""
        return bool(self._poll.poll(max(0.0, 1e3 * timeout_s)))

    def send(self, data: bytes, to: Address | None = None) -> None:
        """One packet. What cannot be sent now is lost, as any packet may be; that the peer is not there is noted."""
        try:
            if to is None:
                self._sock.send(data)
            else:
                self._sock.sendto(data, to)
        except OSError as err:
            self._note(err)

    def send_rows(self, rows: Bytes, to: Address | None = None) -> None:
        """A packet for each row of a contiguous matrix; blocks while the link's queue is full."""
        size = rows.shape[1]
        most = min(_MOST_SEGMENTS, _MOST_BYTES // size) if self._cuts else 1
        for begin in range(0, len(rows), most):
            self._send_cut(rows[begin : begin + most], size, to)

    def _send_cut(self, rows: Bytes, size: int, to: Address | None) -> None:
        cut = [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("H", size))] if len(rows) > 1 else []
        try:
            self._sock.sendmsg([rows.data], cut, 0, *(() if to is None else (to,)))
        except OSError as err:
            if len(rows) > 1 and err.errno in (errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.ENOPROTOOPT):
                self._cuts = False  # this way out cannot do it
                self.send_rows(rows, to)
            else:
                self._note(err)

    def batches(self, most: int = 64) -> Iterator[tuple[Bytes, Address]]:
        """What has come: packets of one size from one sender, (packets, bytes), valid until the next is asked for."""
        for _ in range(most):
            try:
                length, extra, _, sender = self._sock.recvmsg_into([self._buffer], 64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as err:
                self._note(err)
                continue
            size = next(
                (struct.unpack_from("i", data)[0] for level, kind, data in extra if kind == _UDP_GRO and level == 17),
                length,
            )
            address = (sender[0], sender[1]) if sender else ("", 0)
            whole = length // size if size else 0
            if whole:
                yield self._view[: whole * size].reshape(whole, size), address
            if size and length % size:
                yield self._view[whole * size : length].reshape(1, -1), address
            elif not size:
                yield self._view[:0].reshape(1, 0), address

    def _note(self, err: OSError) -> None:
        if err.errno not in _PASSING:
            raise err
        self.refused = self.refused or err.errno == errno.ECONNREFUSED

    def close(self) -> None:
        """Ends it; again is harmless."""
        self._sock.close()


def _reason(err: Exception) -> str:
    return str(getattr(err, "strerror", None) or err)


def _opened(address: Address, begin: Callable[[socket.socket, Any], None]) -> socket.socket:
    """A datagram socket, bound or connected."""
    family, _, _, _, found = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        begin(sock, found)
    except BaseException:
        sock.close()
        raise
    return sock
