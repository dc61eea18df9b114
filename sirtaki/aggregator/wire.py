"""Packets between ranks and aggregator, and the socket that they travel by.

Libra's packets are pairs of row and value; these carry no row numbers. All ranks are given the same layout (rows by
heat, width, registers), and hot rows travel as a dense block, so packet s holds the floats from s · n on; rows that a
rank has not touched travel as zeros. A real switch in the place of the process would need the numbers back.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from sirtaki.errors import ConfigError
from sirtaki.host_port import Address

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
Headers = npt.NDArray[Any]  # Any: a structured dtype has no static type

MAGIC, VERSION = 0x5254, 2
PACKET_BYTES = 1472
HEADER = np.dtype(
    [
        ("magic", "<u2"),
        ("version", "u1"),
        ("kind", "u1"),
        ("rank", "<u2"),
        ("ranks", "<u2"),  # of the job
        ("job", "<u8"),
        ("epoch", "<u8"),  # drawn by an aggregator for each job that it takes: another one knows nothing of before
        ("step", "<u4"),
        ("count", "<u4"),  # values of the step
        ("window", "<u4"),  # packets that a rank may have under way, as the aggregator says
        ("seq", "<u4"),
    ]
)
HEADER_BYTES = HEADER.itemsize
MOST_FLOATS = (PACKET_BYTES - HEADER_BYTES) // 4
_ALIKE_BYTES = HEADER_BYTES - 4


class Kind(IntEnum):
    """What a packet says, and who sends it."""

    PART = 1  # rank: values to be added
    SUM = 2  # aggregator: the sum; rank: a sum that it has from an aggregator that is gone
    ACK = 3  # aggregator: it is there, and other ranks' parts are missing
    REFUSED = 4  # aggregator: no, with the reason
    GONE = 5  # aggregator: it ends
    BYE = 6  # rank: it needs nothing more
    STATUS = 7  # anybody
    COUNTERS = 8  # aggregator: JSON


def packet(kind: Kind, *, body: bytes = b"", **fields: int) -> bytes:
    """One packet."""
    header = np.zeros(1, HEADER)
    header["magic"], header["version"], header["kind"] = MAGIC, VERSION, kind
    for name, value in fields.items():
        header[name] = value
    return header.tobytes() + body


def frames(packets: int, floats: int, kind: Kind, **fields: int) -> Bytes:
    """A matrix with a packet of `floats` values in each row, numbered from 0: (packets, bytes)."""
    row = np.frombuffer(packet(kind, body=bytes(4 * floats), **fields), np.uint8)
    matrix = np.repeat(row[None], packets, axis=0)
    headers_of(matrix)["seq"] = np.arange(packets)
    return matrix


def headers_of(rows: Bytes) -> Headers:
    """The headers of packets of one size, a view: (packets,)."""
    return rows[:, :HEADER_BYTES].view(HEADER)[:, 0]


def floats_of(rows: Bytes) -> Floats:
    """The values of packets of one size, a view: (packets, floats)."""
    return rows[:, HEADER_BYTES:].view(np.float32)


def groups(rows: Bytes) -> list[Bytes]:
    """Packets of one size, cut where anything but their number changes; what is none of ours is left out."""
    if rows.shape[1] < HEADER_BYTES:
        return []
    rows = rows[(rows[:, :3] == np.frombuffer(struct.pack("<HB", MAGIC, VERSION), np.uint8)).all(axis=1)]
    if not len(rows):
        return []
    cuts = np.flatnonzero((rows[1:, :_ALIKE_BYTES] != rows[:-1, :_ALIKE_BYTES]).any(axis=1)) + 1
    return np.split(rows, cuts)


def runs(seqs: Numbers) -> list[tuple[int, int]]:
    """Ascending numbers as ranges: [(begin, end), …]."""
    if not seqs.size:
        return []
    cuts = np.flatnonzero(np.diff(seqs) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(seqs, cuts)]


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
