"""Measure the network between hosts with TCP connections (flows): bandwidth, round trip, and retransmitted segments.

The hosts form a ring. One rank of each host sends to the next host, and receives from the previous one, as in a ring
all-reduce. Threads send and receive with blocking calls, so that large rates do not depend on one thread of Python.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sirtaki.errors import CommError, ConfigError, TransportError
from sirtaki.machine import LOOPBACK, own_addresses

from .control.plane import reach

CHUNK_BYTES, RECEIVED_BYTES = 1 << 16, 1 << 20
"""Size in bytes of the buffer that one call sends, and of the buffer into which one call receives."""

CONNECT_TIMEOUT_S = 10.0
RAMP_S, RAMP_ROUND_TRIPS = 0.3, 20
"""Duration of the ramp (sending before bytes are counted): a number of seconds plus a number of round trips. The ramp
is needed because TCP starts slowly, and traffic shapers allow a first burst."""

TCP_INFO_RTT, TCP_INFO_RETRANSMITTED, TCP_INFO_SENT = 68, 100, 136
"""Offsets in bytes of three unsigned 32-bit fields of Linux' `struct tcp_info`: smoothed round trip in µs, number of
retransmitted segments, and number of sent segments."""

AllGather = Callable[[Any], list[Any]]
"""Collective function that gets a value of this rank, and returns the values of all ranks, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSample:
    """Measurement of concurrent flows on one host.

    Attributes:
        bytes_per_s: payload that all flows from the previous host delivered.
        busy: largest fraction of one processor that a sending or receiving thread used. Near 1, this program limits
            the rate, not the network.
        round_trip_s: mean round trip of the flows to the next host while they send. None = the kernel does not report
            it.
        retransmitted, segments: number of segments that the flows to the next host have retransmitted, and have sent in
            all. None = the kernel does not report it.
    """

    bytes_per_s: float
    busy: float
    round_trip_s: float | None = None
    retransmitted: int | None = None
    segments: int | None = None


class FlowRing:
    """A ring of hosts between which flows are measured. All ranks must call its methods in the same order.

    Attributes:
        round_trip_s: for each sender (one rank per host), shortest round trip in seconds of an idle connection to the
            next host.
    """

    def __init__(
        self,
        *,
        rank: int,
        senders: Sequence[int],
        all_gather: AllGather,
        interface: str | None = None,
        loopback: bool = False,
    ) -> None:
        """Listen for connections, and find an address of the next host in the ring of hosts. Collective.

        Args:
            rank: rank of this process.
            senders: ranks that send and receive: one of each host. The other ranks only wait.
            all_gather: gathers a value of all ranks.
            interface: network interface to offer to the other hosts. None = find one.
            loopback: True if all ranks are on one host.

        Raises:
            TransportError: a host cannot be reached. Raised on all ranks.
        """
        self._rank, self._senders, self._all_gather = rank, list(senders), all_gather
        self._token, self._listener, self._next = secrets.token_bytes(16), None, ("", 0, b"")
        problem, offer = "", None
        if rank in self._senders:
            try:
                addresses = [LOOPBACK] if loopback else own_addresses(interface)
                self._listener = socket.create_server((LOOPBACK if loopback else "0.0.0.0", 0), backlog=128)
                self._listener.settimeout(CONNECT_TIMEOUT_S)
                offer = (addresses, self._listener.getsockname()[1], self._token)
            except (OSError, ConfigError) as err:
                problem = str(err)
        offers = all_gather(offer)
        round_trip_s = 0.0
        if offer is not None:
            follower = self._senders[(self._senders.index(rank) + 1) % len(self._senders)]
            try:
                if offers[follower] is not None:
                    addresses, port, token = offers[follower]
                    address, _, round_trip_s = reach(addresses, port, of=f"rank {follower}")
                    self._next = (address, port, token)
            except CommError as err:
                problem = str(err)
        self._raise_everywhere(problem)
        by_rank = all_gather(round_trip_s)
        self.round_trip_s = [by_rank[sender] for sender in self._senders]

    def measure(self, flows: int, *, duration_s: float) -> list[FlowSample]:
        """Send over new connections from each host to the next, all hosts at the same time. Collective.

        Args:
            flows: number of concurrent connections from each host to the next.
            duration_s: seconds in which bytes are counted, after the ramp.

        Returns:
            One sample for each sender, in their order, equal on all ranks.

        Raises:
            TransportError: a connection failed. Raised on all ranks.
        """
        outgoing, incoming, threads = list[socket.socket](), list[socket.socket](), list[threading.Thread]()
        try:
            problem = ""
            if self._listener is not None:
                try:
                    for _ in range(flows):
                        outgoing.append(socket.create_connection(self._next[:2], timeout=CONNECT_TIMEOUT_S))
                        outgoing[-1].sendall(self._next[2])
                    while len(incoming) < flows:
                        incoming += self._accepted()
                except OSError as err:
                    problem = f"a connection between the hosts failed while it was measured: {err}"
            self._raise_everywhere(problem)
            counters = [_Counter() for _ in (*outgoing, *incoming)]
            for work, connection, counter in zip(
                [_send] * flows + [_receive] * flows, (*outgoing, *incoming), counters, strict=False
            ):
                connection.settimeout(None)
                threads.append(threading.Thread(target=work, args=(connection, counter), daemon=True))
                threads[-1].start()
            ramp_s = RAMP_S + RAMP_ROUND_TRIPS * max(self.round_trip_s)
            sample = _counted(outgoing, counters, ramp_s, duration_s) if outgoing else None
            # Gather before the flows end, because all flows must send until every host has counted.
            samples = self._all_gather(sample)
        finally:
            for connection in (*outgoing, *incoming):
                _end(connection)
            for thread in threads:
                thread.join()
            for connection in (*outgoing, *incoming):
                connection.close()
        return [samples[sender] for sender in self._senders]

    def close(self) -> None:
        """Stop listening. Not collective."""
        if self._listener is not None:
            self._listener.close()

    def _accepted(self) -> list[socket.socket]:
        """Accept a connection. Return it in a list, which is empty if the connection does not send the token.

        Only flows of the previous host send the token. Other connections are closed.
        """
        assert self._listener is not None
        connection, _ = self._listener.accept()
        connection.settimeout(CONNECT_TIMEOUT_S)
        if connection.recv(len(self._token)) == self._token:
            return [connection]
        connection.close()
        return []

    def _raise_everywhere(self, problem: str) -> None:
        """Raise on all ranks if any rank passes a `problem` (error text). Collective."""
        problems = self._all_gather(problem)
        for rank, text in enumerate(problems):
            if text:
                self.close()
                raise TransportError(f"rank {rank}: {text}")


@dataclass(slots=True)
class _Counter:
    """Number of bytes that a thread has received, and processor time in seconds that the thread has used."""

    received: int = 0
    used_s: float = 0.0


def _send(connection: socket.socket, counter: _Counter) -> None:
    """Send until the connection is shut down."""
    chunk = bytes(CHUNK_BYTES)
    with suppress(OSError):
        while True:
            connection.sendall(chunk)
            counter.used_s = time.thread_time()


def _receive(connection: socket.socket, counter: _Counter) -> None:
    """Receive, and count the bytes, until the connection is shut down."""
    buffer = bytearray(RECEIVED_BYTES)
    with suppress(OSError):
        while n_bytes := connection.recv_into(buffer):
            counter.received += n_bytes
            counter.used_s = time.thread_time()


def _counted(
    outgoing: Sequence[socket.socket], counters: Sequence[_Counter], ramp_s: float, duration_s: float
) -> FlowSample:
    """Wait `ramp_s` seconds until the flows have reached their rate, and measure them for `duration_s` seconds."""
    time.sleep(ramp_s)
    begin_s = time.perf_counter()
    before, used_s = sum(one.received for one in counters), [one.used_s for one in counters]
    time.sleep(duration_s)
    seconds, counted = time.perf_counter() - begin_s, sum(one.received for one in counters) - before
    busy = max(one.used_s - first_s for one, first_s in zip(counters, used_s, strict=True)) / seconds
    known = [told for told in map(_tcp_info, outgoing) if told is not None]
    if not known:
        return FlowSample(bytes_per_s=counted / seconds, busy=busy)
    round_trips_us, retransmitted, segments = map(sum, zip(*known, strict=True))
    return FlowSample(
        bytes_per_s=counted / seconds,
        busy=busy,
        round_trip_s=round_trips_us / len(known) / 1e6,
        retransmitted=retransmitted,
        segments=segments,
    )


def _tcp_info(connection: socket.socket) -> tuple[int, int, int] | None:
    """Return (round trip in µs, retransmitted segments, sent segments). None = the kernel does not report them."""
    offsets = (TCP_INFO_RTT, TCP_INFO_RETRANSMITTED, TCP_INFO_SENT)
    with suppress(AttributeError, OSError, struct.error):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        rtt_us, retransmitted, sent = (struct.unpack_from("I", info, offset)[0] for offset in offsets)
        return rtt_us, retransmitted, sent
    return None


def _end(connection: socket.socket) -> None:
    """Shut down a connection, so that its thread ends. `close` then discards unsent bytes instead of sending them."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
