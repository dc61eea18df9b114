"""Libra's switch as a process on a host: an experiment with the paper's sums of hot rows, beside training jobs.

An aggregator adds up the parts that the ranks of a job send, packet by packet; a rank's client sends its rows, gets the
sums, and goes to a standby where an aggregator is gone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import secrets
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from sirtaki.comm.control.waiting import Deadline, Poll, wait_for
from sirtaki.errors import AggregatorError, ConfigError
from sirtaki.machine import Address, parse_address

# ── packets between ranks and aggregator, and the socket that they travel by ──────────────────────────────────────────
#
# Libra's packets are pairs of row and value; these carry no row numbers. All ranks are given the same layout (rows by
# heat, width, registers), and hot rows travel as a dense block, so packet s holds the floats from s · n on; rows that a
# rank has not touched travel as zeros. A real switch in the place of the process would need the numbers back.

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


class PacketKind(IntEnum):
    """What a packet says, and who sends it."""

    PART = 1  # rank: values to be added
    SUM = 2  # aggregator: the sum; rank: a sum that it has from an aggregator that is gone
    ACK = 3  # aggregator: it is there, and other ranks' parts are missing
    REFUSED = 4  # aggregator: no, with the reason
    GONE = 5  # aggregator: it ends
    BYE = 6  # rank: it needs nothing more
    STATUS = 7  # anybody
    COUNTERS = 8  # aggregator: JSON


def packet(kind: PacketKind, *, body: bytes = b"", **fields: int) -> bytes:
    """One packet."""
    header = np.zeros(1, HEADER)
    header["magic"], header["version"], header["kind"] = MAGIC, VERSION, kind
    for name, value in fields.items():
        header[name] = value
    return header.tobytes() + body


def frames(packets: int, floats: int, kind: PacketKind, **fields: int) -> Bytes:
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


# ── a rank's side of the aggregator ───────────────────────────────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatLayout:
    """Rows of one width in registers.

    Attributes:
        rows: how many, ordered by heat.
        width: float32 values of a row.
        registers: m; None = one for each row of a packet, the fewest without conflicts.

    Raises:
        ConfigError: a number is not positive.
    """

    rows: int
    width: int
    registers: int | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.width < 1 or (self.registers is not None and self.registers < 1):
            raise ConfigError(f"{self} cannot be laid out; rows, width and registers are whole numbers from 1")

    @property
    def floats(self) -> int:
        """Values of a packet: at most one row of each register; of a long row, as many as there is room for."""
        rows = MOST_FLOATS // self.width
        return min(rows, self.registers or rows) * self.width or MOST_FLOATS

    @property
    def packets(self) -> int:
        """Of a step in which all rows are summed."""
        return -(-self.rows * self.width // self.floats)


REORDER = 32
"""Packets by which another may be overtaken without being taken for lost."""

MOST_AT_ONCE = 88
"""New packets between two looks at what has come."""

FEW = 8
LEAST_WINDOW = 16
ASK_EVERY_S, ASLEEP_S = 0.2, 0.1
FIRST_TIMEOUT_S, LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 0.1, 0.005, 0.5
MOST_RANKS = 65535


class _StepPackets:
    """Packets of one step: what is sent, what has come. Used again for the step after the next."""

    def __init__(self, packets: int, floats: int, **fields: int) -> None:
        self._parts = frames(packets, floats, PacketKind.PART, **fields)
        self._sums = frames(packets, floats, PacketKind.SUM, **fields)  # sent only to take them elsewhere
        self._has, self._settled = np.zeros(packets, np.bool_), np.zeros(packets, np.bool_)
        self._sent_s, self._tries = np.zeros(packets), np.zeros(packets, np.int64)
        self.number, self._count, self.resent = -1, 0, 0

    def begin(self, number: int, values: Floats) -> None:
        """Takes the values of a step, (n,)."""
        into = floats_of(self._parts)
        floats = into.shape[1]
        whole, rest = divmod(values.size, floats)
        into[:whole] = values[: whole * floats].reshape(whole, floats)
        if rest:
            into[whole] = np.pad(values[whole * floats :], (0, floats - rest))
        for headers in (headers_of(self._parts), headers_of(self._sums)):
            headers["step"], headers["count"] = number, values.size
        self.number, self._count = number, whole + (rest > 0)
        self._has[:] = False
        self.enter()

    def enter(self) -> None:
        """Another aggregator knows nothing: it gets the sums that are here, and the parts of all others."""
        self._settled[:], self._tries[:], self._top = False, 0, 0

    @property
    def is_complete(self) -> bool:
        """All sums are here."""
        return bool(self._has[: self._count].all())

    def result(self, size: int) -> Floats:
        """The first `size` sums, a copy."""
        return floats_of(self._sums)[: self._count].reshape(-1)[:size].copy()

    def take(self, seqs: Numbers, values: Floats, now_s: float) -> float | None:
        """Takes sums, some perhaps once more; returns how long the last of those took that were sent once only."""
        known = seqs < self._count
        known[known] &= ~self._settled[seqs[known]]
        seqs, values = seqs[known], values[known]
        if not seqs.size:
            return None
        new = ~self._has[seqs]
        floats_of(self._sums)[seqs[new]] = values[new]
        self._has[seqs] = self._settled[seqs] = True
        self._top = max(self._top, int(seqs.max()))
        once = seqs[self._tries[seqs] == 1]
        return now_s - float(self._sent_s[once].max()) if once.size else 0.0

    def send(self, wire: Wire, now_s: float, *, window: int, usual_s: float) -> None:
        """Sends what the window lets out, and again what seems to be lost; now and then a packet if that is nothing."""
        missing = np.flatnonzero(~self._settled[: self._count])
        if not missing.size:
            if self._count and now_s - self._sent_s[0] > ASK_EVERY_S:  # is it still there, and the same?
                self._sent_s[0] = now_s
                wire.send_rows(self._sums[:1])
            return
        open_ = missing[missing < missing[0] + window]
        tries, waited_s = self._tries[open_], now_s - self._sent_s[open_]
        fresh = open_[tries == 0][:MOST_AT_ONCE]
        lost = (tries > 0) & (waited_s > np.minimum(usual_s * 2.0 ** (tries - 1), MOST_TIMEOUT_S))
        overtaken = open_ + REORDER < self._top
        # Of those that nothing has overtaken a few ask what has become of all: if ranks are late, they are not lost.
        again = np.concatenate((open_[lost & overtaken], open_[lost & ~overtaken][:FEW]))
        self.resent += again.size
        due = np.sort(np.concatenate((fresh, again)))
        self._sent_s[due] = now_s
        self._tries[due] += 1
        has = self._has[due]
        for source, chosen in ((self._parts, due[~has]), (self._sums, due[has])):
            for begin, end in runs(chosen):
                wire.send_rows(source[begin:end])


class AggregatorClient:
    """One rank of a job at an aggregator; of one thread.

    Args:
        addresses: `host:port` of the aggregator, and of its standbys, the same on all ranks.
        job: name that no other job has, the same on all ranks.
        rank: this one.
        ranks: of the job.
        layout: what is summed, the same on all ranks.
        lost_s: without any answer, before an aggregator is taken for gone.
        stall_s: without a new sum, before this rank gives up; others may be late for many reasons.
        connect: opens a socket to an address.

    Attributes:
        moves: how often it has gone to another aggregator.

    Raises:
        ConfigError: an address or number is invalid.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        job: str,
        rank: int,
        ranks: int,
        layout: HeatLayout,
        lost_s: float = 2.0,
        stall_s: float = 120.0,
        connect: Callable[[Address], Wire] = Wire.connected,
    ) -> None:
        if not addresses or not 0 <= rank < ranks <= MOST_RANKS:
            raise ConfigError(f"rank {rank} of {ranks} at {len(addresses)} aggregators: there has to be one of each")
        self._addresses = [parse_address(text) for text in addresses]
        self._names, self._connect, self._at = list(addresses), connect, 0
        self._layout, self._lost_s, self._stall_s = layout, lost_s, stall_s
        key = int.from_bytes(blake2b(job.encode(), digest_size=8).digest(), "little")
        self._fields = {"job": key, "rank": rank, "ranks": ranks}
        self._previous, self._current = (_StepPackets(layout.packets, layout.floats, **self._fields) for _ in range(2))
        self._wire: Wire | None = None
        self._epoch, self._window, self._failures, self.moves = 0, LEAST_WINDOW, 0, 0
        self._mean_s = self._deviation_s = self._heard_s = self._progress_s = 0.0

    @property
    def resent(self) -> int:
        """Packets that were sent more than once."""
        return self._previous.resent + self._current.resent

    def sum(self, values: Floats) -> Floats:
        """Collective: every rank gives values of one shape, and gets the sum over ranks, bit by bit the same on all.

        Args:
            values: (k, width) float32, k at most the layout's rows; the same k on all ranks. Not changed.

        Returns:
            A new array, (k, width).

        Raises:
            ConfigError: the shape does not fit the layout.
            AggregatorError: no aggregator answers or takes the job, or no sum has come for long. The client cannot be
                used any more; other ranks may have got this step's sums.
        """
        if values.ndim != 2 or values.shape[1] != self._layout.width or not 0 < len(values) <= self._layout.rows:
            expected = f"(1 … {self._layout.rows}, {self._layout.width})"
            raise ConfigError(f"values of shape {values.shape} cannot be summed; the layout expects {expected}")
        self._previous, self._current = self._current, self._previous
        self._current.begin(self._previous.number + 1, np.ascontiguousarray(values, np.float32).reshape(-1))
        self._run(lambda: self._current.is_complete)
        return self._current.result(values.size).reshape(values.shape)

    def linger(self, until: Callable[[], bool]) -> None:
        """Goes on serving other ranks until a condition holds; they may need what a dead aggregator told this one."""
        while not until():
            with contextlib.suppress(AggregatorError):
                self._run(until)
            time.sleep(0.002)

    def close(self) -> None:
        """Leaves; again is harmless. Not before all ranks have their last sums: see `linger`."""
        if self._wire is not None:
            for _ in range(3):  # as nobody answers
                self._wire.send(packet(PacketKind.BYE, body=b"", **self._fields))
            self._wire.close()
            self._wire = None

    def _run(self, done: Callable[[], bool]) -> None:
        self._heard_s = self._progress_s = time.monotonic()
        self._failures = 0
        while not done():
            now_s, wire = time.monotonic(), self._opened()
            usual_s = FIRST_TIMEOUT_S
            if self._mean_s:
                usual_s = min(max(self._mean_s + 4 * self._deviation_s, LEAST_TIMEOUT_S), MOST_TIMEOUT_S)
            for step in (self._previous, self._current):
                step.send(wire, now_s, window=self._window, usual_s=usual_s)
            wire.wait(0.002)
            before_s, self._now_s = now_s, time.monotonic()
            if self._now_s - before_s > ASLEEP_S:  # stopped or starved: that says nothing of the aggregator
                self._heard_s += self._now_s - before_s
            if not self._receive(wire):
                continue
            if (wire.refused and len(self._addresses) > 1) or self._now_s - self._heard_s > self._lost_s:
                self._move("does not answer")
            elif self._now_s - self._progress_s > self._stall_s:
                raise AggregatorError(
                    f"no sum has come from the aggregator at {self._names[self._at]} for {self._stall_s:g} s; "
                    "other ranks are late or gone"
                )

    def _receive(self, wire: Wire) -> bool:
        """Takes what has come; False where that told this rank to go elsewhere."""
        for rows, _ in wire.batches(8):
            for group in groups(rows):
                self._take(group)
                if self._wire is not wire:
                    return False
        return True

    def _opened(self) -> Wire:
        if self._wire is None:
            try:
                self._wire = self._connect(self._addresses[self._at])
            except ConfigError as err:
                raise AggregatorError(str(err)) from err
        return self._wire

    def _take(self, rows: Bytes) -> None:
        headers = headers_of(rows)
        first = headers[0]
        kind, epoch = int(first["kind"]), int(first["epoch"])
        if int(first["job"]) != self._fields["job"]:
            return
        self._heard_s = self._now_s
        if kind == PacketKind.REFUSED:
            reason = rows[0, HEADER_BYTES:].tobytes().decode(errors="replace")
            raise AggregatorError(f"the aggregator at {self._names[self._at]} refuses this job: {reason}")
        if kind == PacketKind.GONE and epoch == self._epoch:
            self._move("ends")
        elif kind in (PacketKind.SUM, PacketKind.ACK):
            self._failures, self._window = 0, max(int(first["window"]), 1)
            if epoch != self._epoch:  # its first word, or it was started anew
                if self._epoch:
                    self._enter()
                self._epoch = epoch
            for step in (self._previous, self._current):
                if kind == PacketKind.SUM and step.number == int(first["step"]):
                    took_s = step.take(headers["seq"].astype(np.int64), floats_of(rows), self._now_s)
                    if took_s is not None:
                        self._progress_s = self._now_s
                    if took_s:  # smoothed as TCP does (RFC 6298)
                        error_s = took_s - self._mean_s
                        self._deviation_s += (abs(error_s) - self._deviation_s) / 4
                        self._mean_s += error_s / 8 if self._mean_s else error_s

    def _enter(self) -> None:
        for step in (self._previous, self._current):
            step.enter()

    def _move(self, why: str) -> None:
        self._failures += 1
        if self._failures >= len(self._addresses):
            names = ", ".join(self._names)
            raise AggregatorError(f"no aggregator answers ({names}); sums have to be made by other means")
        before, self._at = self._names[self._at], (self._at + 1) % len(self._addresses)
        logger.warning(
            "the aggregator at %s %s; rank %d goes to %s", before, why, self._fields["rank"], self._names[self._at]
        )
        assert self._wire is not None
        self._wire.close()
        self._wire, self._epoch, self._window, self.moves = None, 0, LEAST_WINDOW, self.moves + 1
        self._heard_s = self._now_s
        self._enter()


# ── Sums by tables: Libra (sparse), §3.5 ─────────────────────────────────────────────────────────────────────────────

ONE = 1 << 16
"""Logarithms have 16 binary places here."""

_NEAREST = 1 << 11  # of the difference j - i 5 bits before and 11 behind the point are a key
_FARTHEST = 31  # beyond so many powers of two the smaller number is nothing
_SPLIT = 12  # bits of the fraction behind its 11th
_LN2 = float(np.log(2.0))
_TINY = -(1 << 30)  # log2 of nothing


class Tables:
    """The tables, by the paper's names; an index is a key, an entry has 16 bits (one that is nothing: a mark)."""

    def __init__(self) -> None:
        high = np.arange(4096)
        m = 1.0 + (high & 2047) / 2048.0  # 1.f1…f11
        with np.errstate(divide="ignore"):
            self.exponent = np.arange(256, dtype=np.int64) - 127  # epoTable
            self.log_m = np.rint(ONE * np.log2(m)).astype(np.int64)
            self.log_rest = np.rint(256 * np.log2(high * 2.0**-23)).clip(_TINY).astype(np.int64)  # log Δm, 8 places
            self.log_m_ln2 = np.rint(256 * np.log2(m * _LN2)).astype(np.int64)
            keys = np.arange(65536)
            self.small = np.rint(ONE * 2.0 ** (-keys / 256)).astype(np.int64)  # 2^(log Δm - log(m ln 2))
            theta = -keys / _NEAREST
            self.plus = np.rint(ONE * np.log2(1.0 + 2.0**theta)).astype(np.int64)  # miTable
            self.minus = np.rint(ONE * np.log2(1.0 - 2.0**theta)).clip(_TINY).astype(np.int64)  # not the paper's
            self.power = np.rint(ONE * (2.0 ** (keys / ONE) - 1.0)).astype(np.int64)  # expTable: a fraction


@cache
def tables() -> Tables:
    """They are made once."""
    return Tables()


def table_sum(x: Floats, y: Floats) -> Floats:
    """The sum of x and y by tables. Subnormal numbers count as 0; NaN and infinities are added as usual."""
    x, y = np.broadcast_arrays(np.asarray(x, np.float32), np.asarray(y, np.float32))
    bits_x, bits_y = x.view(np.uint32).astype(np.int64), y.view(np.uint32).astype(np.int64)
    larger = (bits_x & 0x7FFFFFFF) >= (bits_y & 0x7FFFFFFF)
    first, second = np.where(larger, bits_x, bits_y), np.where(larger, bits_y, bits_x)
    i, j = _log2(first), _log2(second)
    found = tables()
    theta = i - j
    key = np.minimum((theta + 16) >> 5, 65535)  # 16 places → 11
    alike = (first ^ second) >> 31 == 0
    step = np.where(alike, found.plus[key], found.minus[key])
    step = np.where(theta >= _FARTHEST * ONE, 0, step)
    total = _power(i + step, first >> 31)
    total = np.where(~alike & (theta < 16), np.float32(0), total)
    nothing_x, nothing_y = _is_nothing(first), _is_nothing(second)
    values_first = first.astype(np.uint32).view(np.float32)
    total = np.where(nothing_y, np.where(nothing_x, np.float32(0), values_first), total)
    unusual = ((first >> 23) & 0xFF) == 0xFF
    if unusual.any():
        with np.errstate(invalid="ignore"):
            total[unusual] = x[unusual] + y[unusual]
    return total.astype(np.float32)


def _is_nothing(bits: Numbers) -> npt.NDArray[np.bool_]:
    return np.asarray((bits >> 23) & 0xFF == 0)


def _log2(bits: Numbers) -> Numbers:
    """log2 of the magnitude, 16 places: equation 1."""
    found = tables()
    m, rest = (bits >> _SPLIT) & 0x7FF, bits & 0xFFF
    key = np.minimum(found.log_m_ln2[m] - found.log_rest[rest], 65535)
    correction = np.where(rest == 0, 0, found.small[key])
    return np.asarray(found.exponent[(bits >> 23) & 0xFF] * ONE + found.log_m[m] + correction)


def _power(logarithm: Numbers, sign: Numbers) -> npt.NDArray[np.float32]:
    """±2^logarithm; 0 where that is subnormal, infinite where it is too large."""
    exponent, fraction = (logarithm >> 16) + 127, tables().power[logarithm & 0xFFFF]
    carry = fraction >> 16
    exponent, fraction = exponent + carry, fraction & 0xFFFF
    bits = (exponent.clip(0, 255) << 23) | (fraction << 7)
    bits = np.where(exponent <= 0, 0, np.where(exponent >= 255, 0x7F800000, bits))
    return np.asarray((bits | (sign << 31)).astype(np.uint32).view(np.float32))


# ── Registers ────────────────────────────────────────────────────────────────────────────────────────────────────────


class StepRegisters:
    """Sums of one step, in packets."""

    def __init__(self, *, ranks: int, values: int, floats: int, by_tables: bool, **fields: int) -> None:
        packets = -(-values // floats)
        self.frames = frames(packets, floats, PacketKind.SUM, ranks=ranks, count=values, **fields)
        self._sums = floats_of(self.frames)
        self._seen = np.zeros((ranks, packets), np.bool_)  # the paper's guard against repeated writes
        self._final = np.zeros(packets, np.bool_)
        self._add = table_sum if by_tables else np.add
        self.values, self.bytes = values, self.frames.nbytes + self._seen.nbytes

    def add(self, rank: int, seqs: Numbers, values: Floats) -> tuple[Numbers, int]:
        """Adds the parts of one rank that are not in yet; a number comes once.

        Returns:
            Which packets have become complete, and how many parts were there already.
        """
        new = ~(self._seen[rank, seqs] | self._final[seqs])
        repeated = len(seqs) - int(new.sum())
        if repeated:
            seqs, values = seqs[new], values[new]
        self._seen[rank, seqs] = True
        self._sums[seqs] = self._add(self._sums[seqs], values)
        complete = seqs[self._seen[:, seqs].all(axis=0)]
        self._final[complete] = True
        return complete, repeated

    def put(self, seqs: Numbers, values: Floats) -> Numbers:
        """Takes sums that another aggregator has made, as they are; returns which were not complete here."""
        new = ~self._final[seqs]
        self._sums[seqs[new]] = values[new]
        self._final[seqs] = True
        return seqs[new]

    def final(self, seqs: Numbers) -> Numbers:
        """Those of the packets whose sums are there."""
        return seqs[self._final[seqs]]


class AggregationJob:
    """One job; it exists from its first packet until all ranks have left, or its place is needed and it is silent."""

    def __init__(self, ranks: int, floats: int) -> None:
        self.ranks, self.floats = ranks, floats
        self.epoch = secrets.randbits(63) | 1
        self.addresses: dict[int, Address] = {}
        self.steps: dict[int, StepRegisters] = {}  # two: a rank may need sums that others have got already
        self.left: set[int] = set()
        self.heard_s = 0.0

    @property
    def bytes(self) -> int:
        """Of its registers."""
        return sum(registers.bytes for registers in self.steps.values())


MOST_WINDOW = 1024


class Aggregator:
    """Serves jobs until it is stopped; of one thread, but for `stop`.

    Attributes:
        counters: what has happened since it was started: `parts` added, `repeated` ones that were not, `sums`,
            `taken_over` from an aggregator that is gone, `stale` and `malformed` packets, `refusals`.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        memory_bytes: int = 256 * 2**20,
        jobs: int = 16,
        silent_s: float = 15.0,
        by_tables: bool = False,
    ) -> None:
        """Serves at a socket.

        Args:
            wire: the socket, which becomes its own.
            memory_bytes: for the registers of all jobs.
            jobs: at once.
            silent_s: a job of which nothing was heard for so long gives its place to another one.
            by_tables: adds as Libra's switch does.
        """
        self._wire, self._memory_bytes, self._most_jobs, self._silent_s = wire, memory_bytes, jobs, silent_s
        self._by_tables = by_tables
        self._jobs: dict[int, AggregationJob] = {}
        self._stopping = False
        self.counters: Counter[str] = Counter()

    def serve(self) -> None:
        """Until `stop` is called; then ranks are told, and go elsewhere at once."""
        with np.errstate(all="ignore"):  # what ranks add up is theirs
            while not self._stopping:
                self._wire.wait(0.2)
                for rows, address in self._wire.batches():
                    known = groups(rows)
                    self.counters["malformed"] += len(rows) - sum(map(len, known))
                    for group in known:
                        self._take(group, address)
        for key, job in self._jobs.items():
            for address in job.addresses.values():
                self._wire.send(packet(PacketKind.GONE, job=key, epoch=job.epoch), address)
        self._wire.close()

    def stop(self) -> None:
        """Also from a signal handler or another thread."""
        self._stopping = True

    def _take(self, rows: Bytes, address: Address) -> None:
        headers = headers_of(rows)
        first = headers[0]
        kind, key, rank = int(first["kind"]), int(first["job"]), int(first["rank"])
        if kind == PacketKind.STATUS and rows.shape[1] >= PACKET_BYTES:  # no answer is longer than its question
            self._wire.send(packet(PacketKind.COUNTERS, body=self._told()), address)
        elif kind == PacketKind.BYE:
            if (job := self._jobs.get(key)) is not None:
                job.left.add(rank)
                if len(job.left) == job.ranks:
                    del self._jobs[key]
        elif kind in (PacketKind.PART, PacketKind.SUM) and rank < first["ranks"] and rows.shape[1] > HEADER_BYTES:
            seqs, once = np.unique(headers["seq"].astype(np.int64), return_index=True)
            size, floats = int(first["count"]), (rows.shape[1] - HEADER_BYTES) // 4
            if rows.shape[1] % 4 or not size or seqs[-1] >= -(-size // floats):
                self.counters["malformed"] += len(rows)
                return
            found = self._registers(key, int(first["ranks"]), floats, int(first["step"]), size)
            if isinstance(found, str):
                self.counters["refusals"] += 1
                self._wire.send(packet(PacketKind.REFUSED, job=key, body=found.encode()), address)
            elif found is not None:
                job, registers = found
                job.addresses[rank], job.heard_s = address, time.monotonic()
                self._add(kind, job, registers, rank, seqs, floats_of(rows)[once], address)
        else:
            self.counters["malformed"] += len(rows)

    def _registers(
        self, key: int, ranks: int, floats: int, step: int, size: int
    ) -> tuple[AggregationJob, StepRegisters] | str | None:
        """A job's registers of a step, made for its first packet; why it is refused; None for a step that is over."""
        job = self._jobs.get(key)
        if job is None:
            now_s = time.monotonic()
            if len(self._jobs) >= self._most_jobs:
                silent = {key for key, there in self._jobs.items() if now_s - there.heard_s > self._silent_s}
                self._jobs = {key: there for key, there in self._jobs.items() if key not in silent}
            if len(self._jobs) >= self._most_jobs:
                return f"it serves {len(self._jobs)} jobs already, which is its limit"
            job = AggregationJob(ranks, floats)
        if (ranks, floats) != (job.ranks, job.floats):
            return "ranks of this job differ in ranks or layout"
        newest = max(job.steps, default=step)
        if step < newest - 1:
            self.counters["stale"] += 1
            return None
        registers = job.steps.get(step)
        if registers is None:
            steps = {number: there for number, there in job.steps.items() if number >= max(step, newest) - 1}
            everyone = sum(there.ranks for there in {**self._jobs, key: job}.values())
            fits = self._wire.receive_bytes // 2 // (2 * (HEADER_BYTES + 4 * floats)) // everyone
            window = min(max(fits, LEAST_WINDOW), MOST_WINDOW)
            needed = size * 4 + -(-size // floats) * (HEADER_BYTES + ranks)
            free = self._memory_bytes - sum(there.bytes for there in self._jobs.values() if there is not job)
            free -= sum(there.bytes for there in steps.values())
            if needed > free:
                return f"the step needs {needed / 2**20:.1f} MiB of registers, and {free / 2**20:.1f} MiB are free"
            registers = StepRegisters(
                ranks=ranks,
                values=size,
                floats=floats,
                by_tables=self._by_tables,
                job=key,
                epoch=job.epoch,
                step=step,
                window=window,
            )
            job.steps = {**steps, step: registers}
            if self._jobs.setdefault(key, job) is job and len(job.steps) == 1:
                logger.info("a job of %d ranks has come, with %d values in its first step", ranks, size)
        if registers.values != size:
            return f"ranks give {size} and {registers.values} values in one step"
        return job, registers

    def _add(
        self,
        kind: int,
        job: AggregationJob,
        registers: StepRegisters,
        rank: int,
        seqs: Numbers,
        values: Floats,
        address: Address,
    ) -> None:
        if kind == PacketKind.SUM:
            complete, repeated = registers.put(seqs, values), len(seqs)
            self.counters["taken_over"] += len(complete)
        else:
            complete, repeated = registers.add(rank, seqs, values)
            self.counters["parts"] += len(seqs) - repeated
            self.counters["repeated"] += repeated
            self.counters["sums"] += len(complete)
        for to in job.addresses.values():
            self._send_sums(registers, complete, to)
        if repeated:  # this rank asks
            there = registers.final(seqs)
            self._send_sums(registers, np.setdiff1d(there, complete), address)
            if not len(there):
                self._wire.send(registers.frames[0, :HEADER_BYTES].tobytes().replace(_SUM, _ACK, 1), address)

    def _send_sums(self, registers: StepRegisters, seqs: Numbers, to: Address) -> None:
        for begin, end in runs(seqs):
            self._wire.send_rows(registers.frames[begin:end], to)

    def _told(self) -> bytes:
        jobs = self._jobs.values()
        return json.dumps(
            {
                "jobs": len(jobs),
                "ranks": sum(len(job.addresses) for job in jobs),
                "memory_bytes": sum(job.bytes for job in jobs),
                "memory_limit_bytes": self._memory_bytes,
                **self.counters,
            }
        ).encode()


_SUM, _ACK = (packet(kind)[:4] for kind in (PacketKind.SUM, PacketKind.ACK))


def ask_status(wire: Wire, timeout_s: float = 2.0) -> dict[str, int] | None:
    """What the aggregator at the other end of `wire` counts; None where nobody answers."""
    counters: dict[str, int] = {}

    def is_answered() -> bool:
        wire.refused = False
        wire.send(packet(PacketKind.STATUS, body=bytes(PACKET_BYTES - HEADER_BYTES)))
        wire.wait(0.3)
        for rows, _ in wire.batches():
            for group in groups(rows):
                if headers_of(group)["kind"][0] == PacketKind.COUNTERS:
                    with contextlib.suppress(ValueError):
                        counters.update(json.loads(group[0, HEADER_BYTES:].tobytes()))
        return bool(counters)

    return counters if wait_for(is_answered, Deadline.after(timeout_s), Poll.SLOW) else None
