"""What an aggregator gives away, and what it does not let itself be told."""

import time
from typing import Any

import numpy as np
import pytest
from fakes.aggregators import check_sums, client_of, on_ranks, serving, values_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sirtaki.aggregator import HeatLayout, Patience
from sirtaki.aggregator.server import Aggregator, Limits, ask_status
from sirtaki.aggregator.wire import Kind, Registration, Summation, Wire, job_key, packet
from sirtaki.errors import AggregatorError
from sirtaki.host_port import parse_address

LAYOUT = HeatLayout(rows=1000, width=16)


def refusal(address: str, layout: HeatLayout = LAYOUT, ranks: int = 1, job: str = "other") -> str:
    client = client_of([address], 0, ranks, layout, job=job, patience=Patience(lost_s=2.0))
    with pytest.raises(AggregatorError) as caught:
        client.sum(np.zeros((1, layout.width), np.float32))
    client.close()
    return str(caught.value)


def test_a_job_that_needs_more_memory_than_is_left_is_refused_with_figures() -> None:
    with serving(limits=Limits(memory_bytes=200_000)) as (address, aggregator):
        first = client_of([address], 0, 1, LAYOUT)
        values = values_of(0, 0, 1000, 16)
        np.testing.assert_array_equal(first.sum(values), values)
        text = refusal(address)
        assert f"the aggregator at {address} refuses this job: the job needs 0.1 MiB of registers, and 0.1 MiB" in text
        np.testing.assert_array_equal(first.sum(values), values)  # whoever is there is not disturbed
        first.close()
        assert aggregator.counters.refusals >= 1


def test_there_are_no_more_jobs_and_ranks_than_its_limits() -> None:
    with serving(limits=Limits(jobs=1, ranks=4)) as (address, _):
        assert "a job may have 4 ranks, this one has 5" in refusal(address, ranks=5)
        first = client_of([address], 0, 1, LAYOUT)
        first.sum(values_of(0, 0, 1000, 16))
        assert "serves 1 jobs already" in refusal(address)
        first.close()
        second = client_of([address], 0, 1, LAYOUT, job="other")
        deadline_s = time.monotonic() + 5
        while time.monotonic() < deadline_s:  # until it has heard that the first is gone
            try:
                second.sum(values_of(0, 0, 1000, 16))
                break
            except AggregatorError:
                second.close()
                second = client_of([address], 0, 1, LAYOUT, job="other")
        else:
            pytest.fail("the first job's place was not given to the second")
        second.close()


def test_ranks_that_differ_in_their_layout_are_told_so() -> None:
    with serving() as (address, _):

        def act(rank: int) -> Any:
            layout = HeatLayout(rows=100, width=100 - 50 * rank)
            client = client_of([address], rank, 2, layout, patience=Patience(stall_s=1.0))
            try:
                return client.sum(np.zeros((100, layout.width), np.float32))
            finally:
                client.close()

        results = on_ranks(2, act)
    assert all(isinstance(result, AggregatorError) for result in results)
    assert any("ranks of this job differ" in str(result) for result in results)


def test_ranks_that_give_different_numbers_of_rows_are_all_told_so() -> None:
    with serving() as (address, _):

        def act(rank: int) -> Any:
            client = client_of([address], rank, 2, LAYOUT)
            try:
                return client.sum(np.zeros((99 + rank, 16), np.float32))
            finally:
                client.close()

        began_s = time.monotonic()
        results = on_ranks(2, act)
        assert time.monotonic() - began_s < 5
    assert all("ranks give" in str(result) for result in results), results


def test_a_job_that_is_silent_is_forgotten_and_comes_back() -> None:
    with serving(limits=Limits(silent_s=0.2)) as (address, aggregator):
        client = client_of([address], 0, 1, LAYOUT)
        values = values_of(0, 0, 1000, 16)
        client.sum(values)
        time.sleep(0.3)
        aggregator._tidied_s = -1e9
        deadline_s = time.monotonic() + 5
        while aggregator._jobs and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not aggregator._jobs
        np.testing.assert_array_equal(client.sum(values), values)
        client.close()


def test_a_job_that_sums_nothing_for_long_keeps_its_place_as_long_as_a_rank_of_it_lives() -> None:
    alive = Patience(alive_s=0.05)
    with serving(limits=Limits(silent_s=0.5)) as (address, aggregator):
        client = client_of([address], 0, 1, LAYOUT, patience=alive)
        client.sum(values_of(0, 0, 1000, 16))
        (job,) = aggregator._jobs.values()
        session, came_s = job.session, job.heard_s
        deadline_s = time.monotonic() + 20
        while job.heard_s < came_s + 0.6 and time.monotonic() < deadline_s:
            time.sleep(0.02)
            aggregator._tidied_s = -1e9
        client.sum(values_of(0, 1, 1000, 16))
        assert client._contact.session == session
        client.close()


def test_the_place_of_a_job_that_ranks_have_left_is_given_away_though_others_have_not_said_so() -> None:
    with serving(limits=Limits(jobs=1)) as (address, aggregator):

        def act(rank: int) -> Any:
            client = client_of([address], rank, 2, LAYOUT, job="first")
            client.sum(values_of(rank, 0, 1000, 16))
            return client

        there, killed = on_ranks(2, act)
        assert "serves 1 jobs already" in refusal(address, job="second")
        there.close()
        (job,) = aggregator._jobs.values()
        deadline_s = time.monotonic() + 10
        while not job.left and time.monotonic() < deadline_s:
            time.sleep(0.01)
        client = client_of([address], 0, 1, LAYOUT, job="second")
        client.sum(values_of(0, 0, 1000, 16))
        for each in (client, killed):
            each.close()


def test_who_was_stopped_takes_nobody_for_silent() -> None:
    wire = Wire.bound("127.0.0.1", 0)
    aggregator = Aggregator(wire, limits=Limits(silent_s=30.0))
    registration = Registration(
        job=job_key("job"), entry=1, ranks=2, summation=Summation.FLOAT32, packets=3, floats=4, registers=4, width=1
    )
    aggregator._register(0, 0, registration.encoded(), ("127.0.0.1", 9))
    (job,) = aggregator._jobs.values()
    for moment in ("_now_s", "_tidied_s"):
        setattr(aggregator, moment, getattr(aggregator, moment) - 60.0)
    job.heard_s -= 60.0
    aggregator.turn()
    assert aggregator._jobs
    job.heard_s -= 60.0
    aggregator._tidied_s -= 60.0
    aggregator.turn()
    assert not aggregator._jobs
    wire.close()


def test_it_tells_what_it_has_counted_to_whoever_asks_with_as_long_a_packet() -> None:
    with serving(standby="127.0.0.1:7") as (address, _):
        client = client_of([address], 0, 1, LAYOUT)
        client.sum(values_of(0, 0, 1000, 16))
        wire = Wire.connected(parse_address(address))
        told = ask_status(wire)
        assert told is not None
        assert (told["jobs"], told["open"], told["ranks"], told["sums"]) == (1, 1, 1, LAYOUT.packets)
        assert told["standby"] == "127.0.0.1:7"
        assert 0 < int(told["memory_bytes"]) < int(told["memory_limit_bytes"])
        wire.send(packet(Kind.STATUS))
        assert not wire.wait(0.3)
        wire.close()
        client.close()


def test_where_nobody_listens_there_is_no_status() -> None:
    wire = Wire.connected(("127.0.0.1", 9))
    assert ask_status(wire, timeout_s=0.5) is None
    wire.close()


# ── what is not understood ───────────────────────────────────────────────────────────────────────────────────────────


def test_packets_of_no_job_of_strangers_and_of_other_steps_are_counted_and_change_nothing() -> None:
    with serving() as (address, aggregator):
        together: list[Any] = []

        def act(rank: int) -> Any:
            client = client_of([address], rank, 2, LAYOUT)
            found = [client.sum(values_of(rank, 0, 1000, 16))]
            if rank == 0:
                together.append(client)
                session = client._contact.session
                stranger = Wire.connected(parse_address(address))
                body = np.full(LAYOUT.floats, 1e9, np.float32).tobytes()
                counts = {"step": 1, "count": 16000, "body": body}
                stranger.send(packet(Kind.PART, rank=1, session=session, **counts))  # type: ignore[arg-type]
                stranger.send(packet(Kind.SUM, rank=0, session=session, **counts))  # type: ignore[arg-type]
                stranger.send(packet(Kind.PART, rank=1, session=12345, **counts))  # type: ignore[arg-type]
                stranger.send(packet(Kind.BYE, rank=1, session=session))
                own = client._contact.wire
                for wrong in (
                    packet(Kind.PART, rank=0, session=session, step=9, count=16000, body=body),
                    packet(Kind.PART, rank=0, session=session, step=1, count=10**9, body=body),
                    packet(Kind.PART, rank=0, session=session, step=1, seq=10**6, count=16000, body=body),
                    packet(Kind.PART, rank=0, session=session, step=1, count=16000, body=body[:-4]),
                    packet(Kind.PULL, rank=0, session=session, step=1, body=b"\xff" * 4),
                ):
                    own.send(wrong)
                time.sleep(0.3)
                stranger.close()
            found.append(client.sum(values_of(rank, 1, 1000, 16)))
            rest_s = time.monotonic() + 0.3
            client.linger(lambda: time.monotonic() > rest_s)
            client.close()
            return found

        results = on_ranks(2, act)
        for step, sums in enumerate(zip(*results, strict=True)):
            check_sums(sums, step)
        counted = aggregator.counters
        assert (counted.foreign, counted.unknown) == (3, 1)
        assert counted.malformed == 3
        assert counted.stale >= 2


REGISTRATION = Registration(
    job=job_key("fuzz"), entry=3, ranks=2, summation=Summation.FLOAT32, packets=4, floats=8, registers=8, width=1
)

SEEDS = [
    packet(Kind.REGISTER, rank=0, body=REGISTRATION.encoded()),
    packet(Kind.REGISTER, rank=1, body=REGISTRATION.encoded()),
    packet(Kind.PART, rank=0, session=1, count=4, body=bytes(32)),
    packet(Kind.SUM, rank=1, session=1, count=4, seq=3, body=bytes(32)),
    packet(Kind.PULL, rank=1, session=1, body=bytes(8)),
    packet(Kind.BYE, rank=0, session=1),
    packet(Kind.LOOK, body=bytes(16)),
    packet(Kind.STATUS, body=bytes(1440)),
]

CHANGED = st.tuples(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 80), st.integers(0, 255)), max_size=4))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=100) | CHANGED, min_size=1, max_size=30))
def test_whatever_it_is_sent_it_goes_on(sent: list[Any]) -> None:
    """Noise, and packets in which some bytes are others; the session is one that the fuzz knows."""
    heard = Wire.bound("127.0.0.1", 0)
    aggregator, noisy = Aggregator(heard), Wire.connected(heard.address)
    for number, one in enumerate(sent):
        if isinstance(one, tuple):
            data = bytearray(one[0])
            for place, byte in one[1]:
                data[place % len(data)] = byte
            one = bytes(data)
        noisy.send(one)
        for job in aggregator._jobs.values():
            if job.is_open and number % 3 == 0:  # so that what follows gets further
                aggregator._sessions = {1: job}
        aggregator.turn()
    assert len(aggregator._jobs) <= 16
    noisy.send(packet(Kind.STATUS, body=bytes(1440)))
    heard.wait(1)
    aggregator.turn()
    assert ask_answer(noisy)
    noisy.close()
    heard.close()


def ask_answer(wire: Wire) -> bool:
    deadline_s = time.monotonic() + 2
    while time.monotonic() < deadline_s and wire.wait(0.5):
        if any(rows.shape[1] > 32 and rows[-1, 3] == Kind.COUNTERS for rows, _ in wire.batches()):
            return True
    return False
