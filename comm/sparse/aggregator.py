"""Sums of gradient rows by an aggregator, a process to which all ranks send. An experiment, not used in training jobs.

In the Libra paper, a network switch is the aggregator. An `Aggregator` sums the values that the ranks of a job send,
packet by packet. An `AggregatorClient` sends a rank's rows, receives the sums, and changes to a standby aggregator if
its aggregator fails.
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
from sirtaki.errors import AggregatorError, ConfigError, require
from sirtaki.machine import Address, parse_address

# ── packets and sockets ───────────────────────────────────────────────────────────────────────────────────────────────
#
# In the Libra paper, a packet contains pairs of row index and value. The packets here contain no indices: all ranks
# send the frequent rows as one dense block of equal layout, with zeros for rows without a gradient. Each packet
# contains n floats, so packet s contains those from position s · n of the block on. A real switch would need the
# indices.

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
        ("ranks", "<u2"),  # number of ranks of the job
        ("job", "<u8"),
        ("epoch", "<u8"),  # random id of the job in one run of the aggregator: clients notice a restart by it
        ("step", "<u4"),
        ("count", "<u4"),  # number of values in the step
        ("window", "<u4"),  # largest number of packets in flight per rank, set by the aggregator
        ("seq", "<u4"),
    ]
)
HEADER_BYTES = HEADER.itemsize
MAX_FLOATS = (PACKET_BYTES - HEADER_BYTES) // 4
_EQUAL_BYTES = HEADER_BYTES - 4


class PacketKind(IntEnum):
    """Kind of a packet between ranks and aggregator. Each comment names the sender, then the meaning."""

    PART = 1  # rank: values to sum
    SUM = 2  # aggregator: the sum; rank: a sum from the previous aggregator, which has failed
    ACK = 3  # aggregator: packet received, but packets of other ranks are missing
    REFUSED = 4  # aggregator: job rejected, with the reason
    GONE = 5  # aggregator: the aggregator shuts down
    BYE = 6  # rank: the rank leaves the job
    STATUS = 7  # any process: request of counters
    COUNTERS = 8  # aggregator: counters as JSON


def packet(kind: PacketKind, *, body: bytes = b"", **fields: int) -> bytes:
    """Return a packet as bytes: a header with these `fields`, then `body`."""
    header = np.zeros(1, HEADER)
    header["magic"], header["version"], header["kind"] = MAGIC, VERSION, kind
    for name, value in fields.items():
        header[name] = value
    return header.tobytes() + body


def frames(packets: int, floats: int, kind: PacketKind, **fields: int) -> Bytes:
    """Return a matrix, `(packets, bytes)`, whose rows are packets with `floats` zeros each, numbered from 0."""
    row = np.frombuffer(packet(kind, body=bytes(4 * floats), **fields), np.uint8)
    matrix = np.repeat(row[None], packets, axis=0)
    headers_of(matrix)["seq"] = np.arange(packets)
    return matrix


def headers_of(rows: Bytes) -> Headers:
    """Return a view, `(packets,)`, of the headers of equally long packets (the rows of a matrix)."""
    return rows[:, :HEADER_BYTES].view(HEADER)[:, 0]


def floats_of(rows: Bytes) -> Floats:
    """Return a view, `(packets, floats)`, of the values in equally long packets (the rows of a matrix)."""
    return rows[:, HEADER_BYTES:].view(np.float32)


def groups(rows: Bytes) -> list[Bytes]:
    """Split equally long packets into groups of consecutive packets with equal header fields, except `seq`.

    Packets of other protocols are dropped.
    """
    if rows.shape[1] < HEADER_BYTES:
        return []
    rows = rows[(rows[:, :3] == np.frombuffer(struct.pack("<HB", MAGIC, VERSION), np.uint8)).all(axis=1)]
    if not len(rows):
        return []
    cuts = np.flatnonzero((rows[1:, :_EQUAL_BYTES] != rows[:-1, :_EQUAL_BYTES]).any(axis=1)) + 1
    return np.split(rows, cuts)


def runs(seqs: Numbers) -> list[tuple[int, int]]:
    """Return ascending integers as ranges of consecutive integers, `[begin, end)`."""
    if not seqs.size:
        return []
    cuts = np.flatnonzero(np.diff(seqs) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(seqs, cuts)]


_UDP_SEGMENT, _UDP_GRO = 103, 104
_IP_MTU_DISCOVER, _NEVER = 10, 0
_MAX_SEGMENTS, _MAX_BYTES = 64, 64000
_BUFFER_BYTES = 65536
_SOCKET_BUFFER_BYTES = 4 * 2**20

_TRANSIENT = {errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENOBUFS, errno.ENETDOWN, errno.EPERM}


class Wire:
    """A UDP socket, for one thread. Sends and receives many packets per system call (GSO, GRO) where the kernel can.

    Attributes:
        refused: True once the peer's host reported that no process listens at the peer's port.
    """

    def __init__(self, sock: socket.socket, *, batches: bool = True) -> None:
        """Take ownership of the socket. `batches=False` disables GSO and GRO."""
        self._sock = sock
        # Use a blocking socket, so that the sender waits while the queue of the network device is full.
        sock.setblocking(True)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
        # Allow IP fragmentation, because the frames of a network may be shorter than packets.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _NEVER)
        self._segments = batches
        if batches:
            try:
                sock.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
            except OSError:
                self._segments = False
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = np.frombuffer(self._buffer, np.uint8)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.refused = False

    @classmethod
    def bound(cls, host: str, port: int, *, batches: bool = True) -> Wire:
        """Open a socket that receives packets at an address. Port 0 = any free port.

        Raises:
            ConfigError: the address cannot be bound.
        """
        try:
            return cls(_opened((host, port), socket.socket.bind), batches=batches)
        except (OSError, UnicodeError) as err:  # UnicodeError: the host name is malformed
            raise ConfigError(
                f"the aggregator (server that sums sparse gradients) cannot listen at {host}:{port}: {_reason(err)}; "
                "choose another host or port"
            ) from err

    @classmethod
    def connected(cls, address: Address, *, batches: bool = True) -> Wire:
        """Open a socket that exchanges packets with one address only.

        Raises:
            ConfigError: the host does not exist.
        """
        try:
            return cls(_opened(address, socket.socket.connect), batches=batches)
        except (OSError, UnicodeError) as err:
            raise ConfigError(
                f"the aggregator (server that sums sparse gradients) at {address[0]}:{address[1]} cannot be reached: "
                f"{_reason(err)}; check the host name and the network"
            ) from err

    @property
    def address(self) -> Address:
        """Return the socket's own address."""
        host, port = self._sock.getsockname()[:2]
        return str(host), int(port)

    @property
    def receive_bytes(self) -> int:
        """Return the size of the kernel's receive buffer."""
        return self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a packet arrives, for at most `timeout_s`. Return False if none has arrived."""
        return bool(self._poll.poll(max(0.0, 1e3 * timeout_s)))

    def send(self, data: bytes, to: Address | None = None) -> None:
        """Send a packet. Ignore network errors, as if the packet were lost. If no process listens, set `refused`."""
        try:
            if to is None:
                self._sock.send(data)
            else:
                self._sock.sendto(data, to)
        except OSError as err:
            self._handle_error(err)

    def send_rows(self, rows: Bytes, to: Address | None = None) -> None:
        """Send each row of a contiguous matrix as a packet. Block while the queue of the network device is full."""
        size = rows.shape[1]
        batch = min(_MAX_SEGMENTS, _MAX_BYTES // size) if self._segments else 1
        for begin in range(0, len(rows), batch):
            self._send_segments(rows[begin : begin + batch], size, to)

    def _send_segments(self, rows: Bytes, size: int, to: Address | None) -> None:
        cut = [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("H", size))] if len(rows) > 1 else []
        try:
            self._sock.sendmsg([rows.data], cut, 0, *(() if to is None else (to,)))
        except OSError as err:
            if len(rows) > 1 and err.errno in (errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.ENOPROTOOPT):
                # From now on, send packets one by one, because the network device does not support GSO (one system call
                # for many packets).
                self._segments = False
                self.send_rows(rows, to)
            else:
                self._handle_error(err)

    def batches(self, most: int = 64) -> Iterator[tuple[Bytes, Address]]:
        """Yield arrays of received packets, `(packets, bytes)`, each with the sender's address.

        Packets of an array have equal size and sender. An array is valid until the next one is yielded.
        """
        for _ in range(most):
            try:
                length, extra, _, sender = self._sock.recvmsg_into([self._buffer], 64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as err:
                self._handle_error(err)
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

    def _handle_error(self, err: OSError) -> None:
        if err.errno not in _TRANSIENT:
            raise err
        self.refused = self.refused or err.errno == errno.ECONNREFUSED

    def close(self) -> None:
        """Close the socket. May be called twice."""
        self._sock.close()


def _reason(err: Exception) -> str:
    return str(getattr(err, "strerror", None) or err)


def _opened(address: Address, begin: Callable[[socket.socket, Any], None]) -> socket.socket:
    """Create a UDP socket, and call `begin` (`socket.bind` or `socket.connect`) with it and the address."""
    family, _, _, _, found = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        begin(sock, found)
    except BaseException:
        sock.close()
        raise
    return sock


# ── the client: one rank's side ───────────────────────────────────────────────────────────────────────────────────────

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatLayout:
    """Layout of hot (frequent) rows in packets and in the aggregator's registers, which store sums.

    Attributes:
        rows: number of hot rows, ordered by how often they occur in gradients.
        width: number of float32 values per row.
        registers: number of rows whose sums the aggregator stores per packet (m in the Libra paper). None = as many
            rows as fit into a packet.

    Raises:
        ConfigError: a number is not positive.
    """

    rows: int
    width: int
    registers: int | None = None

    def __post_init__(self) -> None:
        valid = min(self.rows, self.width, 1 if self.registers is None else self.registers) >= 1
        require(valid, "HeatLayout", "numbers of at least 1", self)

    @property
    def floats(self) -> int:
        """Return the number of values per packet: one row per register, or a part of a row if rows are too long."""
        rows = MAX_FLOATS // self.width
        return min(rows, self.registers or rows) * self.width or MAX_FLOATS

    @property
    def packets(self) -> int:
        """Return the number of packets that contain all hot rows once."""
        return -(-self.rows * self.width // self.floats)


REORDER = 32
"""Number of later packets that may overtake a packet before it counts as lost."""

MAX_BURST = 88
"""Largest number of new packets that are sent between two reads of the socket."""

MAX_PROBES = 8
MIN_WINDOW = 16
PROBE_INTERVAL_S, SUSPENDED_S = 0.2, 0.1
FIRST_TIMEOUT_S, MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.1, 0.005, 0.5
MAX_RANKS = 65535


class _StepPackets:
    """Packets of one step (one call of `AggregatorClient.sum`): this rank's values, and the received sums.

    A client has two objects, for the current and the previous step.
    """

    def __init__(self, packets: int, floats: int, **fields: int) -> None:
        self._parts = frames(packets, floats, PacketKind.PART, **fields)
        # Keep received sums as packets, because this rank sends them to a standby if the aggregator fails.
        self._sums = frames(packets, floats, PacketKind.SUM, **fields)
        self._received, self._acknowledged = np.zeros(packets, np.bool_), np.zeros(packets, np.bool_)
        self._sent_s, self._tries = np.zeros(packets), np.zeros(packets, np.int64)
        self.number, self._count, self.resent = -1, 0, 0

    def begin(self, number: int, values: Floats) -> None:
        """Start step `number`, and copy this rank's `values`, `(n,)`, into the packets."""
        into = floats_of(self._parts)
        floats = into.shape[1]
        whole, rest = divmod(values.size, floats)
        into[:whole] = values[: whole * floats].reshape(whole, floats)
        if rest:
            into[whole] = np.pad(values[whole * floats :], (0, floats - rest))
        for headers in (headers_of(self._parts), headers_of(self._sums)):
            headers["step"], headers["count"] = number, values.size
        self.number, self._count = number, whole + (rest > 0)
        self._received[:] = False
        self.restart()

    def restart(self) -> None:
        """Mark all packets as unsent. Called for a new aggregator, which has received nothing of this step."""
        self._acknowledged[:], self._tries[:], self._top = False, 0, 0

    @property
    def is_complete(self) -> bool:
        """Return whether this rank has received all sums of this step."""
        return bool(self._received[: self._count].all())

    def result(self, size: int) -> Floats:
        """Return a copy of the first `size` received sums."""
        return floats_of(self._sums)[: self._count].reshape(-1)[:size].copy()

    def store(self, seqs: Numbers, values: Floats, now_s: float) -> float | None:
        """Store sums that the aggregator has sent. Sums that were received before are ignored.

        Args:
            seqs: numbers of the packets.
            values: sums in the packets, `(packets, floats)`.
            now_s: current time.

        Returns:
            The round-trip time in seconds, measured on packets that this rank has sent only once. 0.0 = there is no
            such packet. None = all sums were received before.
        """
        valid = seqs < self._count
        valid[valid] &= ~self._acknowledged[seqs[valid]]
        seqs, values = seqs[valid], values[valid]
        if not seqs.size:
            return None
        new = ~self._received[seqs]
        floats_of(self._sums)[seqs[new]] = values[new]
        self._received[seqs] = self._acknowledged[seqs] = True
        self._top = max(self._top, int(seqs.max()))
        once = seqs[self._tries[seqs] == 1]
        return now_s - float(self._sent_s[once].max()) if once.size else 0.0

    def send(self, wire: Wire, now_s: float, *, window: int, timeout_s: float) -> None:
        """Send packets that were not yet sent, at most `window` in flight, and resend lost packets.

        If the aggregator has answered all packets, send one packet every `PROBE_INTERVAL_S`. The answer shows whether
        the aggregator still has the sums of this step, or has failed.
        """
        missing = np.flatnonzero(~self._acknowledged[: self._count])
        if not missing.size:
            if self._count and now_s - self._sent_s[0] > PROBE_INTERVAL_S:
                self._sent_s[0] = now_s
                wire.send_rows(self._sums[:1])
            return
        open_ = missing[missing < missing[0] + window]
        tries, waited_s = self._tries[open_], now_s - self._sent_s[open_]
        fresh = open_[tries == 0][:MAX_BURST]
        lost = (tries > 0) & (waited_s > np.minimum(timeout_s * 2.0 ** (tries - 1), MAX_TIMEOUT_S))
        overtaken = open_ + REORDER < self._top
        # Of the packets that no later packet has overtaken, resend only a few, because their sums may just wait for a
        # slow rank.
        again = np.concatenate((open_[lost & overtaken], open_[lost & ~overtaken][:MAX_PROBES]))
        self.resent += again.size
        due = np.sort(np.concatenate((fresh, again)))
        self._sent_s[due] = now_s
        self._tries[due] += 1
        has = self._received[due]
        for source, chosen in ((self._parts, due[~has]), (self._sums, due[has])):
            for begin, end in runs(chosen):
                wire.send_rows(source[begin:end])


class AggregatorClient:
    """Connection of one rank to an aggregator. For one thread.

    Args:
        addresses: `host:port` of the aggregator and of its standbys, equal on all ranks.
        job: unique name of the job, equal on all ranks.
        rank: rank of this process.
        ranks: number of ranks.
        layout: layout of the rows in packets, equal on all ranks.
        lost_s: seconds without an answer after which an aggregator counts as failed.
        stall_s: seconds without a new sum after which `sum` raises an error.
        connect: opens a socket to an address.

    Attributes:
        moves: number of times that this client has changed to another aggregator.

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
        require(addresses, "addresses", "at least one address of an aggregator", "none")
        require(0 <= rank < ranks <= MAX_RANKS, "rank, ranks", f"0 <= rank < ranks <= {MAX_RANKS}", (rank, ranks))
        self._addresses = [parse_address(text) for text in addresses]
        self._names, self._connect, self._index = list(addresses), connect, 0
        self._layout, self._lost_s, self._stall_s = layout, lost_s, stall_s
        key = int.from_bytes(blake2b(job.encode(), digest_size=8).digest(), "little")
        self._fields = {"job": key, "rank": rank, "ranks": ranks}
        self._previous, self._current = (_StepPackets(layout.packets, layout.floats, **self._fields) for _ in range(2))
        self._wire: Wire | None = None
        self._epoch, self._window, self._failures, self.moves = 0, MIN_WINDOW, 0, 0
        self._mean_s = self._deviation_s = self._last_received_s = self._progress_s = 0.0

    @property
    def resent(self) -> int:
        """Return the number of packets that this client has sent again."""
        return self._previous.resent + self._current.resent

    def sum(self, values: Floats) -> Floats:
        """Sum values over all ranks. The result is bitwise equal on all ranks. Collective, blocking.

        Args:
            values: (k, width) float32, with at most the layout's number of rows. k is equal on all ranks. Not changed.

        Returns:
            A new array, (k, width).

        Raises:
            ConfigError: the shape does not fit the layout.
            AggregatorError: no aggregator answers or accepts the job, or no sum arrived for `stall_s`. The client is
                unusable afterwards. Some ranks may have received the step's sums.
        """
        shape, most, width = values.shape, self._layout.rows, self._layout.width
        valid = len(shape) == 2 and shape[1] == width and 0 < shape[0] <= most
        require(valid, "AggregatorClient.sum()", f"values of shape (1 … {most}, {width})", shape)
        self._previous, self._current = self._current, self._previous
        self._current.begin(self._previous.number + 1, np.ascontiguousarray(values, np.float32).reshape(-1))
        self._run(lambda: self._current.is_complete)
        return self._current.result(values.size).reshape(values.shape)

    def linger(self, until: Callable[[], bool]) -> None:
        """Continue to exchange packets with the aggregator until `until` returns True.

        Call this after the last sum. If the aggregator fails, its standby and the peers may need sums that only this
        rank has received.
        """
        while not until():
            with contextlib.suppress(AggregatorError):
                self._run(until)
            time.sleep(0.002)

    def close(self) -> None:
        """Leave the job. Call this after all ranks have received their last sums. May be called twice."""
        if self._wire is not None:
            # Send BYE three times, because packets may be lost, and the aggregator does not answer BYE.
            for _ in range(3):
                self._wire.send(packet(PacketKind.BYE, body=b"", **self._fields))
            self._wire.close()
            self._wire = None

    def _run(self, done: Callable[[], bool]) -> None:
        self._last_received_s = self._progress_s = time.monotonic()
        self._failures = 0
        while not done():
            now_s, wire = time.monotonic(), self._opened()
            timeout_s = FIRST_TIMEOUT_S
            if self._mean_s:
                timeout_s = min(max(self._mean_s + 4 * self._deviation_s, MIN_TIMEOUT_S), MAX_TIMEOUT_S)
            for step in (self._previous, self._current):
                step.send(wire, now_s, window=self._window, timeout_s=timeout_s)
            wire.wait(0.002)
            before_s, self._now_s = now_s, time.monotonic()
            # Do not count a pause of this process as silence of the aggregator, because no answer could be received.
            if self._now_s - before_s > SUSPENDED_S:
                self._last_received_s += self._now_s - before_s
            if not self._receive(wire):
                continue
            if (wire.refused and len(self._addresses) > 1) or self._now_s - self._last_received_s > self._lost_s:
                self._move("does not answer")
            elif self._now_s - self._progress_s > self._stall_s:
                raise AggregatorError(
                    f"the aggregator (process that sums sparse gradients) at {self._names[self._index]} has sent no "
                    f"sums for {self._stall_s:g} s, because it waits for a rank that is slow or has exited; "
                    "look at the logs of all ranks"
                )

    def _receive(self, wire: Wire) -> bool:
        """Process received packets. Return False if a packet has made this client change to another aggregator."""
        for rows, _ in wire.batches(8):
            for group in groups(rows):
                self._process(group)
                if self._wire is not wire:
                    return False
        return True

    def _opened(self) -> Wire:
        if self._wire is None:
            try:
                self._wire = self._connect(self._addresses[self._index])
            except ConfigError as err:
                raise AggregatorError(str(err)) from err
        return self._wire

    def _process(self, rows: Bytes) -> None:
        headers = headers_of(rows)
        first = headers[0]
        kind, epoch = int(first["kind"]), int(first["epoch"])
        if int(first["job"]) != self._fields["job"]:
            return
        self._last_received_s = self._now_s
        if kind == PacketKind.REFUSED:
            reason = rows[0, HEADER_BYTES:].tobytes().decode(errors="replace")
            raise AggregatorError(
                f"the aggregator (process that sums sparse gradients) at {self._names[self._index]} rejects this job: "
                f"{reason}; use another aggregator, or an all-reduce"
            )
        if kind == PacketKind.GONE and epoch == self._epoch:
            self._move("has ended")
        elif kind in (PacketKind.SUM, PacketKind.ACK):
            self._failures, self._window = 0, max(int(first["window"]), 1)
            if epoch != self._epoch:  # the first answer of this aggregator, or of a restarted one
                if self._epoch:
                    self._restart_steps()
                self._epoch = epoch
            for step in (self._previous, self._current):
                if kind == PacketKind.SUM and step.number == int(first["step"]):
                    took_s = step.store(headers["seq"].astype(np.int64), floats_of(rows), self._now_s)
                    if took_s is not None:
                        self._progress_s = self._now_s
                    # Smooth the round-trip time as TCP does (RFC 6298).
                    if took_s:
                        error_s = took_s - self._mean_s
                        self._deviation_s += (abs(error_s) - self._deviation_s) / 4
                        self._mean_s += error_s / 8 if self._mean_s else error_s

    def _restart_steps(self) -> None:
        for step in (self._previous, self._current):
            step.restart()

    def _move(self, why: str) -> None:
        self._failures += 1
        if self._failures >= len(self._addresses):
            names = ", ".join(self._names)
            raise AggregatorError(
                f"no aggregator (process that sums sparse gradients) answers at {names}; start it by `sirtaki "
                "aggregator`, or call an all-reduce instead of AggregatorClient.sum()"
            )
        before, self._index = self._names[self._index], (self._index + 1) % len(self._addresses)
        after = self._names[self._index]
        logger.warning(
            "rank %d now sends its sparse gradients to the aggregator (process that sums them) at %s, because the "
            "aggregator at %s %s",
            self._fields["rank"],
            after,
            before,
            why,
        )
        assert self._wire is not None
        self._wire.close()
        self._wire, self._epoch, self._window, self.moves = None, 0, MIN_WINDOW, self.moves + 1
        self._last_received_s = self._now_s
        self._restart_steps()


# ── table-based float addition: Libra, §3.5 ───────────────────────────────────────────────────────────────────────────

ONE = 1 << 16
"""The number 1.0 in fixed point with 16 fractional bits, the format of logarithms here."""

# Keys of the tables are differences of base-2 logarithms, in fixed point with 11 fractional bits. This is 1.0.
_NEAREST = 1 << 11
# The smaller of two summands is negligible if their base-2 logarithms differ by at least this number.
_FARTHEST = 31
# The table of mantissas ignores this number of the 23 mantissa bits, the lowest ones.
_SPLIT = 12
_LN2 = float(np.log(2.0))
_TINY = -(1 << 30)  # This number replaces log2(0), which is minus infinity.


class Tables:
    """Lookup tables for the addition of float32 numbers by logarithms, as in the Libra paper, section 3.5.

    The comments give the paper's names of the tables.
    """

    def __init__(self) -> None:
        high = np.arange(4096)
        m = 1.0 + (high & 2047) / 2048.0  # mantissa 1.f1…f11: its first 11 bits
        with np.errstate(divide="ignore"):
            self.exponent = np.arange(256, dtype=np.int64) - 127  # epoTable
            self.log_m = np.rint(ONE * np.log2(m)).astype(np.int64)
            self.log_rest = np.rint(256 * np.log2(high * 2.0**-23)).clip(_TINY).astype(np.int64)  # log Δm, 8 places
            self.log_m_ln2 = np.rint(256 * np.log2(m * _LN2)).astype(np.int64)
            keys = np.arange(65536)
            # Change of log2(m) by the mantissa's remaining bits Δm: Δm / (m ln 2), as a power of 2 of its logarithm.
            self.small = np.rint(ONE * 2.0 ** (-keys / 256)).astype(np.int64)
            theta = -keys / _NEAREST
            self.plus = np.rint(ONE * np.log2(1.0 + 2.0**theta)).astype(np.int64)  # miTable
            self.minus = np.rint(ONE * np.log2(1.0 - 2.0**theta)).clip(_TINY).astype(np.int64)  # not in the paper
            self.power = np.rint(ONE * (2.0 ** (keys / ONE) - 1.0)).astype(np.int64)  # expTable: a fraction


@cache
def tables() -> Tables:
    """Return the lookup tables for `table_sum`, which the first call computes."""
    return Tables()


def table_sum(x: Floats, y: Floats) -> Floats:
    """Add x and y approximately, by table lookups. Subnormal numbers count as 0. NaN and infinity stay exact."""
    x, y = np.broadcast_arrays(np.asarray(x, np.float32), np.asarray(y, np.float32))
    bits_x, bits_y = x.view(np.uint32).astype(np.int64), y.view(np.uint32).astype(np.int64)
    larger = (bits_x & 0x7FFFFFFF) >= (bits_y & 0x7FFFFFFF)
    first, second = np.where(larger, bits_x, bits_y), np.where(larger, bits_y, bits_x)
    i, j = _log2(first), _log2(second)
    found = tables()
    theta = i - j
    key = np.minimum((theta + 16) >> 5, 65535)  # round from 16 fractional bits to 11
    same_sign = (first ^ second) >> 31 == 0
    step = np.where(same_sign, found.plus[key], found.minus[key])
    step = np.where(theta >= _FARTHEST * ONE, 0, step)
    total = _power(i + step, first >> 31)
    total = np.where(~same_sign & (theta < 16), np.float32(0), total)
    zero_x, zero_y = _is_zero(first), _is_zero(second)
    values_first = first.astype(np.uint32).view(np.float32)
    total = np.where(zero_y, np.where(zero_x, np.float32(0), values_first), total)
    not_finite = ((first >> 23) & 0xFF) == 0xFF
    if not_finite.any():
        with np.errstate(invalid="ignore"):
            total[not_finite] = x[not_finite] + y[not_finite]
    return total.astype(np.float32)


def _is_zero(bits: Numbers) -> npt.NDArray[np.bool_]:
    return np.asarray((bits >> 23) & 0xFF == 0)


def _log2(bits: Numbers) -> Numbers:
    """Return log2 of the magnitude of float32 numbers, given as bits, by equation 1 of the Libra paper.

    The result is in fixed point with 16 fractional bits.
    """
    found = tables()
    m, rest = (bits >> _SPLIT) & 0x7FF, bits & 0xFFF
    key = np.minimum(found.log_m_ln2[m] - found.log_rest[rest], 65535)
    correction = np.where(rest == 0, 0, found.small[key])
    return np.asarray(found.exponent[(bits >> 23) & 0xFF] * ONE + found.log_m[m] + correction)


def _power(logarithm: Numbers, sign: Numbers) -> npt.NDArray[np.float32]:
    """Return ±2^logarithm as float32. Subnormal results become 0, and too large results become infinity."""
    exponent, fraction = (logarithm >> 16) + 127, tables().power[logarithm & 0xFFFF]
    carry = fraction >> 16
    exponent, fraction = exponent + carry, fraction & 0xFFFF
    bits = (exponent.clip(0, 255) << 23) | (fraction << 7)
    bits = np.where(exponent <= 0, 0, np.where(exponent >= 255, 0x7F800000, bits))
    return np.asarray((bits | (sign << 31)).astype(np.uint32).view(np.float32))


# ── the aggregator ────────────────────────────────────────────────────────────────────────────────────────────────────


class StepRegisters:
    """Sums over ranks of one step (one call of `AggregatorClient.sum`) of a job, stored as packets to send."""

    def __init__(self, *, ranks: int, values: int, floats: int, by_tables: bool, **fields: int) -> None:
        packets = -(-values // floats)
        self.frames = frames(packets, floats, PacketKind.SUM, ranks=ranks, count=values, **fields)
        self._sums = floats_of(self.frames)
        # Record which packets of each rank were added, so that repeated packets are ignored, as in the Libra paper.
        self._seen = np.zeros((ranks, packets), np.bool_)
        self._final = np.zeros(packets, np.bool_)
        self._add = table_sum if by_tables else np.add
        self.values, self.bytes = values, self.frames.nbytes + self._seen.nbytes

    def add(self, rank: int, seqs: Numbers, values: Floats) -> tuple[Numbers, int]:
        """Add packets of one rank to the sums. Ignore packets that were added before.

        Args:
            rank: rank that has sent the packets.
            seqs: numbers of the packets, without duplicates.
            values: values in the packets, `(packets, floats)`.

        Returns:
            The numbers of the packets whose sums are now complete, and how many packets were ignored.
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
        """Store complete sums of a failed aggregator, which a rank has sent.

        Return the numbers of the packets whose sums were incomplete in this object.
        """
        new = ~self._final[seqs]
        self._sums[seqs[new]] = values[new]
        self._final[seqs] = True
        return seqs[new]

    def final(self, seqs: Numbers) -> Numbers:
        """Return those packet numbers among `seqs` whose sums over all ranks are complete."""
        return seqs[self._final[seqs]]


class AggregationJob:
    """State of a job in the aggregator.

    It is created at the job's first packet. It is deleted when all ranks have left, or when a new job needs its place
    and the job has been silent for `silent_s`.
    """

    def __init__(self, ranks: int, floats: int) -> None:
        self.ranks, self.floats = ranks, floats
        self.epoch = secrets.randbits(63) | 1
        self.addresses: dict[int, Address] = {}
        # Keep the last two steps, because a slow rank may still need the sums of the previous step.
        self.steps: dict[int, StepRegisters] = {}
        self.left: set[int] = set()
        self.last_received_s = 0.0

    @property
    def bytes(self) -> int:
        """Return the size in bytes of the job's registers (sums)."""
        return sum(registers.bytes for registers in self.steps.values())


MAX_WINDOW = 1024


class Aggregator:
    """Sums the values that the ranks of jobs send, until it is stopped. Only `stop` is thread-safe.

    Attributes:
        counters: numbers of events since the start. `parts`: packets added. `repeated`: packets ignored, because they
            were added before. `sums`: packets whose sums became complete. `taken_over`: sums of a failed aggregator
            stored. `stale`: packets of old steps. `malformed`: packets not understood. `refusals`: packets rejected.
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
        """Create an aggregator, which `serve` starts.

        Args:
            wire: socket that is bound to the aggregator's address. The aggregator closes it.
            memory_bytes: largest size of the registers (sums) of all jobs together.
            jobs: largest number of jobs at a time.
            silent_s: seconds without a packet after which a new job may replace a job.
            by_tables: True to add numbers by table lookups, as the switch in the Libra paper does.
        """
        self._wire, self._memory_bytes, self._max_jobs, self._silent_s = wire, memory_bytes, jobs, silent_s
        self._by_tables = by_tables
        self._jobs: dict[int, AggregationJob] = {}
        self._stopping = False
        self.counters: Counter[str] = Counter()

    def serve(self) -> None:
        """Receive values and send sums until `stop` is called. Then make all ranks change to a standby."""
        # Make NumPy ignore overflows, because sums of the ranks' values may overflow without an error of this process.
        with np.errstate(all="ignore"):
            while not self._stopping:
                self._wire.wait(0.2)
                for rows, address in self._wire.batches():
                    valid = groups(rows)
                    self.counters["malformed"] += len(rows) - sum(map(len, valid))
                    for group in valid:
                        self._process(group, address)
        for key, job in self._jobs.items():
            for address in job.addresses.values():
                self._wire.send(packet(PacketKind.GONE, job=key, epoch=job.epoch), address)
        self._wire.close()

    def stop(self) -> None:
        """Make `serve` return. Thread-safe, and allowed in a signal handler."""
        self._stopping = True

    def _process(self, rows: Bytes, address: Address) -> None:
        headers = headers_of(rows)
        first = headers[0]
        kind, key, rank = int(first["kind"]), int(first["job"]), int(first["rank"])
        # Ignore short status requests, because an attacker could use their longer answers to flood a victim whose
        # address the requests pretend to come from.
        if kind == PacketKind.STATUS and rows.shape[1] >= PACKET_BYTES:
            self._wire.send(packet(PacketKind.COUNTERS, body=self._status_json()), address)
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
                job.addresses[rank], job.last_received_s = address, time.monotonic()
                self._add(kind, job, registers, rank, seqs, floats_of(rows)[once], address)
        else:
            self.counters["malformed"] += len(rows)

    def _registers(
        self, key: int, ranks: int, floats: int, step: int, size: int
    ) -> tuple[AggregationJob, StepRegisters] | str | None:
        """Return a job and its registers (sums) of a step. Create them at the first packet of the job or step.

        Returns:
            The job and its registers. A string = the packet must be rejected, for the reason in the string. None = the
            step is too old.
        """
        job = self._jobs.get(key)
        if job is None:
            now_s = time.monotonic()
            if len(self._jobs) >= self._max_jobs:
                silent = {key for key, other in self._jobs.items() if now_s - other.last_received_s > self._silent_s}
                self._jobs = {key: other for key, other in self._jobs.items() if key not in silent}
            if len(self._jobs) >= self._max_jobs:
                return f"{len(self._jobs)} jobs are running, which is the limit"
            job = AggregationJob(ranks, floats)
        if (ranks, floats) != (job.ranks, job.floats):
            return "ranks of this job differ in their number of ranks or in layout"
        newest = max(job.steps, default=step)
        if step < newest - 1:
            self.counters["stale"] += 1
            return None
        registers = job.steps.get(step)
        if registers is None:
            steps = {number: registers for number, registers in job.steps.items() if number >= max(step, newest) - 1}
            total_ranks = sum(each.ranks for each in {**self._jobs, key: job}.values())
            fits = self._wire.receive_bytes // 2 // (2 * (HEADER_BYTES + 4 * floats)) // total_ranks
            window = min(max(fits, MIN_WINDOW), MAX_WINDOW)
            needed = size * 4 + -(-size // floats) * (HEADER_BYTES + ranks)
            free = self._memory_bytes - sum(each.bytes for each in self._jobs.values() if each is not job)
            free -= sum(each.bytes for each in steps.values())
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
                logger.info(
                    "this aggregator (process that sums sparse gradients) accepted a new job of %d ranks; the job's "
                    "first step sums %d values per rank",
                    ranks,
                    size,
                )
        if registers.values != size:
            return f"ranks sent {size} and {registers.values} values in one step; the numbers must be equal"
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
        # Send the sums of repeated packets again, because a rank repeats a packet if it lacks the sum.
        if repeated:
            final = registers.final(seqs)
            self._send_sums(registers, np.setdiff1d(final, complete), address)
            if not len(final):
                self._wire.send(registers.frames[0, :HEADER_BYTES].tobytes().replace(_SUM, _ACK, 1), address)

    def _send_sums(self, registers: StepRegisters, seqs: Numbers, to: Address) -> None:
        for begin, end in runs(seqs):
            self._wire.send_rows(registers.frames[begin:end], to)

    def _status_json(self) -> bytes:
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
    """Return the event counters of the aggregator to which `wire` is connected. None = it has not answered in time."""
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
