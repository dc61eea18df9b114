"""What an aggregator gives away, adds up once, and does not let itself be told; and what travels to it and back."""

import os
import shutil
import socket
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fakes.aggregators import check_sums, client_of, on_ranks, serving, values_of
from fakes.meshes import until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sirtaki.aggregator import HeatLayout, Patience
from sirtaki.aggregator.server import Aggregator, Entry, Job, Limits, StepRegisters, ask_status, table_sum, tables
from sirtaki.aggregator.wire import (
    HEADER_BYTES,
    Kind,
    Registration,
    Summation,
    Welcome,
    Wire,
    floats_of,
    groups,
    job_key,
    packet,
    runs,
)
from sirtaki.errors import AggregatorError, ConfigError
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
    with serving(limits=Limits(jobs=1, ranks=4)) as (address, aggregator):
        assert "a job may have 4 ranks, this one has 5" in refusal(address, ranks=5)
        first = client_of([address], 0, 1, LAYOUT)
        first.sum(values_of(0, 0, 1000, 16))
        assert "serves 1 jobs already" in refusal(address)
        first.close()
        until(lambda: not aggregator._jobs)
        second = client_of([address], 0, 1, LAYOUT, job="other")
        second.sum(values_of(0, 0, 1000, 16))
        second.close()


@pytest.mark.parametrize(
    ("rows", "width", "found"),
    [((100, 100), (100, 50), "ranks of this job differ"), ((99, 100), (16, 16), "ranks give")],
)
def test_ranks_that_differ_in_their_layout_or_rows_are_told_so(
    rows: tuple[int, int], width: tuple[int, int], found: str
) -> None:
    with serving() as (address, _):

        def act(rank: int) -> Any:
            layout = HeatLayout(rows=1000, width=width[rank])
            client = client_of([address], rank, 2, layout, patience=Patience(stall_s=1.0))
            try:
                return client.sum(np.zeros((rows[rank], width[rank]), np.float32))
            finally:
                client.close()

        results = on_ranks(2, act)
    assert all(isinstance(result, AggregatorError) for result in results)
    assert any(found in str(result) for result in results)


def test_a_job_that_is_silent_is_forgotten_and_comes_back() -> None:
    with serving(limits=Limits(silent_s=0.2)) as (address, aggregator):
        client = client_of([address], 0, 1, LAYOUT)
        values = values_of(0, 0, 1000, 16)
        client.sum(values)
        time.sleep(0.3)
        aggregator._tidied_s = -1e9
        until(lambda: not aggregator._jobs)
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
        until(lambda: bool(job.left))
        client = client_of([address], 0, 1, LAYOUT, job="second")
        client.sum(values_of(0, 0, 1000, 16))
        for each in (client, killed):
            each.close()


def test_who_was_stopped_takes_nobody_for_silent() -> None:
    wire = Wire.bound("127.0.0.1", 0)
    aggregator = Aggregator(wire, limits=Limits(silent_s=30.0))
    registration = Registration(job_key("job"), 1, 2, Summation.FLOAT32, 3, 4, 4, 1)
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
    nobody = Wire.connected(("127.0.0.1", 9))
    assert ask_status(nobody, timeout_s=0.5) is None
    nobody.close()


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


REGISTRATION = Registration(job_key("fuzz"), 3, 2, Summation.FLOAT32, 4, 8, 8, 1)

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
    answers = (rows for _ in range(4) if noisy.wait(0.5) for rows, _ in noisy.batches())
    assert any(rows.shape[1] > 32 and rows[-1, 3] == Kind.COUNTERS for rows in answers)
    noisy.close()
    heard.close()


# ── sums of a step ───────────────────────────────────────────────────────────────────────────────────────────────────

SMALL_JOB = Registration(job_key("small"), 1, 2, Summation.FLOAT32, 3, 4, 4, 1)


def entry(number: int, step: int = 0) -> Entry:
    return Entry(number, ("127.0.0.1", 1), step)


def opened(*steps: int) -> Job:
    job = Job(SMALL_JOB, 0.0)
    for rank, step in enumerate(steps):
        job.enter(rank, entry(rank + 1, step))
    return job


def complete(job: Job, step: int) -> None:
    registers = job.registers(step)
    assert registers is not None
    seqs = np.arange(3)
    assert registers.takes(seqs, 12)
    for rank in range(2):
        registers.add(rank, seqs, np.ones((3, 4), np.float32))


def test_two_steps_are_held_and_the_third_replaces_the_first_once_the_second_is_complete() -> None:
    job = opened(4, 5)
    assert job.first_step == 4
    assert job.registers(3) is None
    assert job.registers(6) is None
    complete(job, 4)
    assert job.registers(6) is None
    complete(job, 5)
    registers = job.registers(6)
    assert registers is not None
    assert registers.step == 6
    assert job.registers(4) is None
    assert job.registers(7) is None
    assert job.registers(5) is not None


def test_ranks_that_are_further_apart_than_they_can_be_do_not_train_together() -> None:
    assert not opened(4, 5).is_torn
    assert opened(4, 6).is_torn


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


# ── sums by tables: Libra (sparse), §3.5 ─────────────────────────────────────────────────────────────────────────────


def relative(x: np.ndarray, y: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    exact = x.astype(np.float64) + y
    return np.asarray(np.abs(table_sum(x, y) - exact) / np.abs(exact))


def test_seven_tables_take_what_the_paper_says() -> None:
    assert tables().papers_bytes == pytest.approx(408.5 * 1024)
    found = tables()
    for table in (found.exponent, found.log_m, found.log_m_ln2, found.small[1:], found.plus, found.power[:-1]):
        assert int(np.abs(table).max()) <= 65536  # 16 bits


def test_numbers_are_added_to_a_ten_thousandth_of_the_larger_one() -> None:
    x, y = np.random.default_rng(0).uniform(0, 1, (2, 100_000)).astype(np.float32)
    error = relative(x, y)
    assert error.max() < 1.5e-4
    assert np.median(error) < 4e-5  # the paper: 8e-4 on gradients
    assert error.max() > 2.0**-23  # it is an emulation, no plain sum
    x, y = np.random.default_rng(0).uniform(-1, 1, (2, 100_000)).astype(np.float32)
    assert relative(x, y).max() > 0.05  # of numbers that nearly cancel nothing is left
    absolute = np.abs(table_sum(x, y) - (x.astype(np.float64) + y)) / np.maximum(np.abs(x), np.abs(y))
    assert absolute.max() < 5e-4


@given(st.floats(width=32, allow_subnormal=False), st.floats(width=32, allow_subnormal=False))
def test_order_does_not_matter_and_special_numbers_stay_what_they_are(x: float, y: float) -> None:
    one, other = np.array([x], np.float32), np.array([y], np.float32)
    np.testing.assert_array_equal(table_sum(one, other), table_sum(other, one))
    with np.errstate(over="ignore", invalid="ignore"):
        plain = one + other
        found = table_sum(one, other)
    if not np.isfinite(one).all() or not np.isfinite(other).all():
        np.testing.assert_array_equal(found, plain)
    np.testing.assert_array_equal(table_sum(one, np.zeros(1, np.float32)), one + 0)
    assert table_sum(one, -one)[0] == 0 or not np.isfinite(x)


# ── what travels ─────────────────────────────────────────────────────────────────────────────────────────────────────

TOLD = Registration(job_key("one"), 7, 4, Summation.TABLE, 100, 352, 22, 16)


@pytest.mark.parametrize("at", range(16 + 8, len(TOLD.encoded())))
def test_registrations_with_zeros_or_lengths_that_cannot_be_are_none(at: int) -> None:
    body = TOLD.encoded()
    found = Registration.decoded(body[:at] + b"\xff" + body[at + 1 :])
    assert found is None or found.floats <= 360
    assert Registration.decoded(body[:at]) is None
    assert Welcome.decoded(body[:10]) is None


def test_packets_are_cut_where_they_differ_and_strange_ones_are_left_out() -> None:
    kinds = [(Kind.PART, 1), (Kind.PART, 1), (Kind.PART, 2), (Kind.PULL, 2)]
    texts = [packet(kind, rank=rank, seq=number) for number, (kind, rank) in enumerate(kinds)]
    rows = np.frombuffer(b"".join([*texts, b"x" * HEADER_BYTES]), np.uint8).reshape(5, HEADER_BYTES)
    assert [len(group) for group in groups(rows)] == [2, 1, 1]
    assert groups(rows[4:]) == []
    assert [len(group) for group in groups(rows[:2])] == [2]
    assert groups(np.zeros((1, 4), np.uint8)) == []
    assert groups(np.zeros((1, 0), np.uint8)) == []


@given(st.sets(st.integers(0, 60)))
def test_ranges_cover_each_number_once(numbers: set[int]) -> None:
    found = runs(np.array(sorted(numbers), np.int64))
    assert [number for begin, end in found for number in range(begin, end)] == sorted(numbers)
    assert all(end < begin for (_, end), (begin, _) in pairwise(found))


def pair(*, batches: bool, heard_in_batches: bool) -> tuple[Wire, Wire]:
    heard = Wire.bound("127.0.0.1", 0, batches=heard_in_batches)
    return Wire.connected(heard.address, batches=batches), heard


def received(wire: Wire, packets: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < packets and wire.wait(2):
        found += [row.tobytes() for rows, _ in wire.batches() for row in rows]
    return found


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("heard_in_batches", [True, False])
def test_what_is_sent_at_once_comes_packet_by_packet(batches: bool, heard_in_batches: bool) -> None:
    sender, receiver = pair(batches=batches, heard_in_batches=heard_in_batches)
    rows = np.random.default_rng(0).integers(0, 256, (200, 1472), dtype=np.uint8)
    sender.send_rows(rows)
    sender.send(b"short")
    assert received(receiver, 201) == [*(row.tobytes() for row in rows), b"short"]
    sender.close()
    receiver.close()


def test_whoever_has_sent_can_be_answered() -> None:
    sender, receiver = pair(batches=True, heard_in_batches=True)
    sender.send(b"ask")
    assert receiver.wait(2)
    ((rows, address),) = list(receiver.batches())
    assert rows.tobytes() == b"ask"
    receiver.send_rows(np.full((3, 8), 65, np.uint8), address)
    assert received(sender, 3) == [b"A" * 8] * 3
    sender.close()
    receiver.close()


def test_that_nobody_listens_is_noted_and_no_error() -> None:
    sender, receiver = pair(batches=True, heard_in_batches=True)
    receiver.close()
    for _ in range(3):
        sender.send(b"anyone?")
        sender.wait(0.2)
        assert list(sender.batches()) == []
    assert sender.refused
    sender.close()


def test_addresses_that_cannot_be_used_are_errors() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}: "):
            Wire.bound("127.0.0.1", port)
    for host in ("256.1.1.1", "é" * 70):
        with pytest.raises(ConfigError, match="no aggregator can be reached at"):
            Wire.connected((host, 5))


SHORT_FRAMES = """
import numpy as np
from sirtaki.aggregator.wire import Wire
heard = Wire.bound("127.0.0.1", 0)
sender = Wire.connected(heard.address)
rows = np.arange(100, dtype=np.uint8)[:, None].repeat(1472, axis=1)
for row in range(0, 100, 50):
    sender.send_rows(rows[row : row + 50])
came = [int(each[-1]) for _ in range(3) if heard.wait(1) for batch, _ in heard.batches() for each in batch]
assert came == list(range(100)), came
"""


def test_packets_longer_than_a_frame_come_in_fragments() -> None:
    """As in a tunnel; in a network namespace whose frames have 1300 bytes."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, unshare and ip")
    commands = 'ip link set lo mtu 1300 up && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", commands, sys.executable, SHORT_FRAMES],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare failed" in done.stderr:
        pytest.skip("this machine makes no network namespaces")
    assert done.returncode == 0, done.stderr
