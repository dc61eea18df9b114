"""What a rank sends in a step, and again."""

from typing import Any, cast

import numpy as np
import pytest

from sirtaki.aggregator.client import LEAST_TIMEOUT_S, REORDER, Exchange, RoundTrips
from sirtaki.aggregator.wire import Kind, Wire, floats_of, headers_of, seqs_of

FLOATS = 4


class FakeWire:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, np.ndarray[Any, Any]]] = []
        self.pulled: list[int] = []

    def send_rows(self, rows: Any) -> None:
        for header, values in zip(headers_of(rows), floats_of(rows), strict=True):
            self.sent.append((int(header["kind"]), int(header["seq"]), values.copy()))

    def send(self, data: bytes) -> None:
        assert data[3] == Kind.PULL
        self.pulled += seqs_of(np.frombuffer(data[32:], np.uint8)).tolist()

    def seqs(self) -> list[int]:
        found = [seq for _, seq, _ in self.sent]
        self.sent.clear()
        return found


class Rank:
    """An exchange with a clock."""

    def __init__(self, packets: int) -> None:
        self.exchange = Exchange(rank=1, packets=packets, floats=FLOATS)
        self.wire, self.trips, self.now_s = FakeWire(), RoundTrips(), 100.0
        self.values = np.arange(packets * FLOATS, dtype=np.float32)
        self.exchange.begin(0, self.values)
        self.exchange.enter(5)

    def send(self, after_s: float = 0.001, window: int = 64) -> list[int]:
        self.now_s += after_s
        self.exchange.send(cast(Wire, self.wire), self.now_s, window=window, trips=self.trips)
        return self.wire.seqs()

    def ack(self, *seqs: int) -> None:
        self.exchange.take_acks(np.array(seqs), self.now_s, self.trips)

    def sums(self, *seqs: int) -> bool:
        values = np.array([[10.0 * seq] * FLOATS for seq in seqs], np.float32)
        return self.exchange.take_sums(np.array(seqs), values, self.now_s, self.trips)


def test_packets_carry_the_values_and_the_last_one_is_filled_up() -> None:
    exchange, wire = Exchange(rank=1, packets=3, floats=FLOATS), FakeWire()
    exchange.begin(7, np.arange(6, dtype=np.float32))
    exchange.send(cast(Wire, wire), 0.0, window=64, trips=RoundTrips())
    assert wire.sent == []  # there is no session yet
    exchange.enter(5)
    exchange.send(cast(Wire, wire), 0.0, window=64, trips=RoundTrips())
    assert [(kind, seq, values.tolist()) for kind, seq, values in wire.sent] == [
        (Kind.PART, 0, [0, 1, 2, 3]),
        (Kind.PART, 1, [4, 5, 0, 0]),
    ]


def test_no_more_are_under_way_than_the_window_allows() -> None:
    rank = Rank(100)
    assert rank.send(window=30) == list(range(30))
    assert rank.send(window=30) == []
    rank.ack(*range(30))  # they have come, but their sums have not
    assert rank.send(window=30) == []
    rank.sums(*range(1, 10))
    assert rank.send(window=30) == []
    rank.sums(0)
    assert rank.send(window=30) == list(range(30, 40))


def test_a_packet_that_was_overtaken_by_many_is_sent_again_at_once_and_its_neighbours_are_not() -> None:
    rank = Rank(200)
    rank.send(window=80)
    rank.now_s += 0.002
    rank.ack(*(seq for seq in range(REORDER + 10) if seq not in (3, REORDER + 5)))
    assert rank.send(window=80) == [3]
    assert rank.send(window=80, after_s=0.0006) == []
    again = rank.send(window=80, after_s=0.002)
    assert REORDER + 5 in again  # fewer have overtaken it, but by now it should have been heard of
    assert not set(range(REORDER + 10, 80)) & set(again)


def test_what_nothing_is_heard_of_is_sent_again_later_and_later() -> None:
    rank = Rank(2)
    assert rank.send() == [0, 1]
    rank.now_s += 0.003
    rank.ack(1)
    times_s = []
    while len(times_s) < 4:
        if rank.send():
            times_s.append(rank.now_s)
    gaps_s = np.diff(times_s)
    assert (gaps_s[1:] / gaps_s[:-1] > 1.5).all()
    assert gaps_s[0] >= LEAST_TIMEOUT_S


def test_where_many_seem_to_be_lost_it_is_asked_first_what_has_come() -> None:
    """One acknowledgement speaks of many packets, and may be lost as any packet."""
    rank = Rank(100)
    rank.send(window=60)
    rank.now_s += 0.002
    rank.ack(*range(40, 60))
    assert rank.send(window=60, after_s=0.01) == []
    assert set(range(40)) <= set(rank.wire.pulled)
    rank.ack(*range(38))
    assert rank.send(window=60, after_s=0.0006) == []  # the answer to the rest may be on its way
    assert rank.send(window=60, after_s=0.05) == [38, 39]


def test_a_sum_that_does_not_come_is_asked_for() -> None:
    rank = Rank(100)
    rank.send(window=80)
    rank.now_s += 0.002
    rank.ack(*range(80))
    rank.sums(*range(1, REORDER + 10))
    rank.now_s += 2 * rank.trips.timeout_s
    rank.send(window=80)
    assert 0 in rank.wire.pulled
    assert not set(range(1, REORDER + 10)) & set(rank.wire.pulled)


def test_sums_count_once_and_strange_numbers_do_not() -> None:
    rank = Rank(3)
    rank.send()
    assert rank.sums(0, 2)
    assert not rank.sums(0, 2)
    assert not rank.sums(3, 1000)
    assert not rank.exchange.is_complete
    rank.ack(5, 1000)
    assert rank.sums(1)
    assert rank.exchange.is_complete
    np.testing.assert_array_equal(rank.exchange.result(9), [0, 0, 0, 0, 10, 10, 10, 10, 20])


def test_in_another_session_it_brings_the_sums_that_it_has_and_sends_all_other_parts() -> None:
    rank = Rank(4)
    rank.send()
    rank.sums(1, 2)
    rank.exchange.enter(6)
    rank.now_s += 0.001
    rank.exchange.send(cast(Wire, rank.wire), rank.now_s, window=64, trips=rank.trips)
    kinds = {seq: (kind, float(values[0])) for kind, seq, values in rank.wire.sent}
    assert kinds == {0: (Kind.PART, 0.0), 1: (Kind.SUM, 10.0), 2: (Kind.SUM, 20.0), 3: (Kind.PART, 12.0)}
    rank.wire.sent.clear()
    rank.sums(0, 3)
    assert rank.exchange.is_complete
    rank.ack(1)
    rank.now_s += 1.0
    assert rank.send() == [2]  # nobody has said that it has come
    rank.exchange.rest()
    assert rank.send(1.0) == []


def test_when_much_is_lost_less_is_sent_and_more_again_when_it_is_well() -> None:
    rank = Rank(4096)
    rank.send(window=64)
    assert rank.send(after_s=1.0, window=64) == []  # nobody answers what it asks then, either
    assert rank.send(after_s=1.0, window=64) == list(range(64))
    low = rank.exchange.window_share
    assert low == 0.5
    for seq in range(64):
        rank.sums(seq)
    assert rank.exchange.window_share > low


def test_timeouts_follow_what_is_measured() -> None:
    trips = RoundTrips()
    first_s = trips.timeout_s
    for _ in range(50):
        trips.add(0.02)
    assert trips.timeout_s == pytest.approx(0.02, rel=0.1)
    assert trips.timeout_s < first_s
    for seconds in (0.01, 0.2) * 30:
        trips.add(seconds)
    assert trips.timeout_s > 0.2
