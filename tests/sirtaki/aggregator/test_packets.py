"""What a packet is, and what is none."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.aggregator.wire import (
    HEADER_BYTES,
    PACKET_BYTES,
    Kind,
    Registration,
    Summation,
    Welcome,
    floats_of,
    frames,
    groups,
    headers_of,
    job_key,
    packet,
    runs,
    seqs_body,
    seqs_of,
)

REGISTRATION = Registration(
    job=job_key("one"), entry=7, ranks=4, summation=Summation.TABLE, packets=100, floats=352, registers=22, width=16
)


def test_a_registration_and_a_welcome_come_as_they_were_sent() -> None:
    assert Registration.decoded(REGISTRATION.encoded()) == REGISTRATION
    welcome = Welcome(session=5, first_step=3, window=64, standby="10.0.0.5:9500")
    assert Welcome.decoded(welcome.encoded()) == welcome


@pytest.mark.parametrize("at", range(16 + 8, len(REGISTRATION.encoded())))
def test_registrations_with_zeros_or_lengths_that_cannot_be_are_none(at: int) -> None:
    body = REGISTRATION.encoded()
    found = Registration.decoded(body[:at] + b"\xff" + body[at + 1 :])
    assert found is None or found.floats <= 360
    assert Registration.decoded(body[:at]) is None
    assert Welcome.decoded(body[:10]) is None


def test_jobs_of_other_names_have_other_keys() -> None:
    assert len({job_key(name) for name in ("a", "b", "a ", "")}) == 4
    assert len(job_key("x" * 1000)) == 16


def test_a_matrix_of_packets_has_headers_that_can_be_written_in_place() -> None:
    matrix = frames(3, 5, Kind.PART, rank=2)
    headers_of(matrix)["session"] = 9
    floats_of(matrix)[1] = 1.5
    expected = packet(Kind.PART, rank=2, session=9, seq=1, body=np.full(5, 1.5, np.float32).tobytes())
    assert matrix[1].tobytes() == expected
    assert matrix.shape[1] <= PACKET_BYTES


def test_packets_are_cut_where_they_differ_and_strange_ones_are_left_out() -> None:
    kinds = [(Kind.PART, 1), (Kind.PART, 1), (Kind.PART, 2), (Kind.PULL, 2)]
    texts = [packet(kind, rank=rank, seq=number) for number, (kind, rank) in enumerate(kinds)]
    rows = np.frombuffer(b"".join([*texts, b"x" * HEADER_BYTES]), np.uint8).reshape(5, HEADER_BYTES)
    assert [len(group) for group in groups(rows)] == [2, 1, 1]
    assert groups(rows[4:]) == []
    assert [len(group) for group in groups(rows[:2])] == [2]
    assert groups(np.zeros((1, 4), np.uint8)) == []
    assert groups(np.zeros((1, 0), np.uint8)) == []


def test_numbers_in_a_body_come_as_they_were_sent() -> None:
    body = np.frombuffer(seqs_body(np.arange(300)), np.uint8)
    np.testing.assert_array_equal(seqs_of(body), np.arange(256))
    assert seqs_of(body[:3]).size == 0
    assert seqs_of(np.zeros(4 * 257, np.uint8)).size == 0


@given(st.sets(st.integers(0, 60)))
def test_ranges_cover_each_number_once(numbers: set[int]) -> None:
    found = runs(np.array(sorted(numbers), np.int64))
    assert [number for begin, end in found for number in range(begin, end)] == sorted(numbers)
    assert all(end < begin for (_, end), (begin, _) in pairwise(found))
