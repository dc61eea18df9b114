"""The registers of one step: each part is added once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.aggregator.server import StepRegisters
from sirtaki.aggregator.wire import Kind, Summation, floats_of, headers_of

RANKS, PACKETS, FLOATS = 3, 12, 2

IN_ANY_ORDER = st.lists(st.integers(0, PACKETS - 1), min_size=1)
WITH_GAPS = st.tuples(st.integers(0, PACKETS - 1), st.integers(1, PACKETS), st.integers(-1, PACKETS)).map(
    lambda drawn: [seq for seq in range(drawn[0], min(PACKETS, drawn[0] + drawn[1])) if seq != drawn[2]] or [drawn[0]]
)
BATCHES = st.lists(st.tuples(st.integers(0, RANKS - 1), IN_ANY_ORDER | WITH_GAPS), max_size=40)


def registers(summation: Summation = Summation.FLOAT32) -> StepRegisters:
    found = StepRegisters(ranks=RANKS, packets=PACKETS, floats=FLOATS, summation=summation)
    found.begin(4, session=77)
    return found


def part(rank: int, seq: int) -> float:
    return float(10 ** (2 * rank) * (seq + 1))


def parts(rank: int, seqs: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    return np.array([[part(rank, int(seq))] * FLOATS for seq in seqs], np.float32)


@given(BATCHES)
def test_whatever_comes_how_often_each_part_is_in_a_sum_once(batches: list[tuple[int, list[int]]]) -> None:
    found = registers()
    had: dict[int, set[int]] = {seq: set() for seq in range(PACKETS)}
    complete: list[int] = []
    repeated = 0
    for rank, numbers in batches:
        seqs = np.array(numbers, np.int64)
        assert found.takes(seqs, PACKETS * FLOATS)
        new, again = found.add(rank, seqs, parts(rank, seqs))
        complete += new.tolist()
        repeated += again
        for seq in numbers:
            had[seq].add(rank)
    assert sorted(complete) == [seq for seq in range(PACKETS) if len(had[seq]) == RANKS]
    assert repeated == sum(len(numbers) for _, numbers in batches) - sum(map(len, had.values()))
    sums = floats_of(found.frames)
    for seq, ranks in had.items():
        if ranks:
            np.testing.assert_array_equal(sums[seq], np.float32(sum(part(rank, seq) for rank in ranks)))
    assert found.is_complete == (len(complete) == PACKETS)
    np.testing.assert_array_equal(found.final(np.arange(PACKETS)), sorted(complete))


def test_sums_stand_in_packets_that_can_be_sent() -> None:
    found = registers()
    everything = np.arange(5)
    assert found.takes(everything, 5 * FLOATS)
    for rank in range(RANKS):
        found.add(rank, everything, parts(rank, everything))
    header = headers_of(found.frames)[3]
    assert (header["kind"], header["session"], header["step"], header["seq"], header["count"]) == (
        Kind.SUM,
        77,
        4,
        3,
        5 * FLOATS,
    )
    assert found.is_complete


def test_packets_that_speak_of_another_number_of_values_are_not_taken() -> None:
    found = registers()
    assert not found.takes(np.array([0]), 0)
    assert not found.takes(np.array([0]), PACKETS * FLOATS + 1)
    assert not found.takes(np.array([5]), 5 * FLOATS)
    assert found.takes(np.array([4]), 5 * FLOATS)
    assert not found.takes(np.array([4]), 5 * FLOATS - 1)
    assert found.differs(5 * FLOATS - 1)
    assert not found.differs(5 * FLOATS)


def test_sums_that_are_brought_stay_as_they_came() -> None:
    found = registers()
    assert found.takes(np.array([1, 2]), PACKETS * FLOATS)
    found.add(0, np.array([1, 2]), parts(0, np.array([1, 2])))
    brought = found.put(np.array([1, 1]), np.array([[5.0, 6.0], [5.0, 6.0]], np.float32))
    assert brought.tolist() == [1]
    assert found.put(np.array([1]), np.array([[9.0, 9.0]], np.float32)).size == 0
    assert found.waiting(0, np.array([0, 1, 2])).tolist() == [2]
    new, repeated = found.add(1, np.array([1, 2]), parts(1, np.array([1, 2])))
    assert (new.size, repeated) == (0, 1)
    assert floats_of(found.frames)[1].tolist() == [5.0, 6.0]


def test_another_step_begins_with_nothing() -> None:
    found = registers()
    found.takes(np.array([0]), 1)
    found.put(np.array([0]), np.ones((1, FLOATS), np.float32))
    assert found.is_complete
    found.begin(6, session=78)
    assert not found.is_complete
    assert found.takes(np.array([0]), 2 * FLOATS)
    found.add(2, np.array([0]), parts(2, np.array([0])))
    assert floats_of(found.frames)[0, 0] == part(2, 0)


def test_tables_are_looked_up_where_that_is_asked_for() -> None:
    found, one = registers(Summation.TABLE), np.array([0])
    found.takes(one, PACKETS * FLOATS)
    for value in (0.3, 0.7):
        found.add(int(value > 0.5), one, np.full((1, FLOATS), value, np.float32))
    total = float(floats_of(found.frames)[0, 0])
    assert total == pytest.approx(1.0, rel=2e-4)
    assert total != np.float32(0.3) + np.float32(0.7)


def test_what_they_take_is_about_what_is_counted() -> None:
    found = StepRegisters(ranks=4, packets=1000, floats=360, summation=Summation.FLOAT32)
    counted = StepRegisters.bytes_for(ranks=4, packets=1000, floats=360)
    assert found.frames.nbytes <= counted <= 1.02 * found.frames.nbytes
