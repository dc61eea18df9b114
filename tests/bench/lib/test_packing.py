"""Algorithm 1 of Libra (sparse)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.lib.packing import conflicts, pack
from sirtaki.aggregator import HeatLayout
from sirtaki.errors import ConfigError

BATCHES = st.lists(st.integers(0, 300), unique=True, max_size=120)


def as_listed(rows: list[int], registers: int, capacity: int) -> list[list[int]]:
    """The listing, line by line."""
    packets: list[list[int]] = [[] for _ in range(-(-len(rows) // capacity))]
    left = []
    for row in rows:
        candidates = [
            packet
            for packet in packets
            if len(packet) < capacity and all(other % registers != row % registers for other in packet)
        ]
        (candidates[0] if candidates else left).append(row)
    packets += [left[begin : begin + capacity] for begin in range(0, len(left), capacity)]
    return [packet for packet in packets if packet]


@given(BATCHES, st.integers(1, 40), st.integers(1, 30))
def test_it_packs_as_the_listing_does(rows: list[int], registers: int, capacity: int) -> None:
    assert pack(rows, registers=registers, capacity=capacity) == as_listed(rows, registers, capacity)


@given(BATCHES, st.integers(1, 40), st.integers(1, 30))
def test_each_row_is_packed_once_and_only_the_last_packets_have_conflicts(
    rows: list[int], registers: int, capacity: int
) -> None:
    packets = pack(rows, registers=registers, capacity=capacity)
    assert sorted(row for packet in packets for row in packet) == sorted(rows)
    assert all(0 < len(packet) <= capacity for packet in packets)
    regular = packets[: -(-len(rows) // capacity)]
    left = [packet for packet in packets if conflicts([packet], registers=registers)]
    assert all(packet not in regular[:-1] or packet in left for packet in left)


@given(st.integers(1, 500), st.integers(1, 90), st.integers(1, 64))
def test_of_all_rows_it_makes_packets_of_consecutive_ones(rows: int, width: int, registers: int) -> None:
    layout = HeatLayout(rows=rows, width=width, registers=registers)
    packed = pack(range(rows), registers=layout.register_count, capacity=layout.packet_rows)
    assert [row for packet in packed for row in packet] == list(range(rows))
    assert len(packed) == layout.packets
    assert conflicts(packed, registers=layout.register_count) == 0


@pytest.mark.parametrize("exponent", [0.975, 1.024, 1.2])
def test_batches_with_zipfs_frequencies_have_less_than_one_conflict_a_packet(exponent: float) -> None:
    random, registers, hot = np.random.default_rng(0), 24, 30_000
    weights = 1.0 / np.arange(1, hot + 1) ** exponent
    found = packets = unpacked = 0
    for _ in range(10):
        rows = [int(row) for row in np.unique(random.choice(hot, 4096, p=weights / weights.sum()))]
        packed = pack(rows, registers=registers, capacity=24)
        found, packets = found + conflicts(packed, registers=registers), packets + len(packed)
        unpacked += conflicts([rows[begin : begin + 24] for begin in range(0, len(rows), 24)], registers=registers)
    assert found / packets < 1 < unpacked / packets


def test_conflicts_are_rows_that_meet_their_register_again() -> None:
    assert conflicts([[0, 1, 2], [0, 4, 8], [1]], registers=4) == 2
    assert conflicts([], registers=4) == 0


def test_what_is_not_positive_is_refused() -> None:
    for wrong in ({"registers": 0, "capacity": 1}, {"registers": 1, "capacity": 0}):
        with pytest.raises(ConfigError):
            pack([1], **wrong)
