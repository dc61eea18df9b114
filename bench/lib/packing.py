"""Which rows share a packet: Libra (sparse), algorithm 1.

A switch can touch a register once while a packet passes; a packet with two rows of one register goes round again
("recirculation"). Of all rows in heat order the algorithm makes packets of consecutive ones, without a conflict as
long as a packet has no more rows than there are registers; that is how a fixed layout is sent. Of a batch, the rows
that one step has touched, it makes what is counted here.
"""

from __future__ import annotations

from collections.abc import Sequence

from sirtaki.errors import ConfigError

Packets = list[list[int]]


def pack(rows: Sequence[int], *, registers: int, capacity: int) -> Packets:
    """Packets of at most `capacity` rows, in which rows of one register meet only where nothing else is possible.

    Args:
        rows: their numbers by heat; each at most once.
        registers: m; row i lies in register i mod m.
        capacity: rows of a packet.

    Raises:
        ConfigError: `registers` or `capacity` is not positive.
    """
    if registers < 1 or capacity < 1:
        raise ConfigError(f"{registers} registers and packets of {capacity} rows: both are whole numbers from 1")
    packets: Packets = [[] for _ in range(-(-len(rows) // capacity))]  # line 1
    left: list[int] = []  # G'
    # A register's next candidate is behind all that hold a row of it: earlier ones are full, or hold one.
    behind = [0] * registers
    first_open = 0
    for row in rows:  # line 3
        register = row % registers  # line 4
        place = max(behind[register], first_open)
        while place < len(packets) and len(packets[place]) == capacity:  # line 16: full ones are no candidates
            place += 1
        if place == len(packets):
            left.append(row)  # line 20
            continue
        packets[place].append(row)  # lines 13 and 14
        behind[register] = place + 1  # lines 7 to 9
        while first_open < len(packets) and len(packets[first_open]) == capacity:
            first_open += 1
    packets += [left[begin : begin + capacity] for begin in range(0, len(left), capacity)]  # line 23
    return [packet for packet in packets if packet]


def conflicts(packets: Sequence[Sequence[int]], *, registers: int) -> int:
    """Rows that meet another of their register in their packet: how often a switch would have to go round, in all."""
    return sum(len(packet) - len({row % registers for row in packet}) for packet in packets)
