"""Sums through an aggregator are right and equal on all ranks, under any faults of network and processes."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from fakes.aggregators import (
    Weather,
    bad_network,
    check_sums,
    client_of,
    on_processes,
    on_ranks,
    process,
    serving,
    values_of,
)
from fakes.meshes import at_once, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sirtaki.comm.sparse.aggregator import (
    AggregatorClient,
    HeatLayout,
    PacketKind,
    StepRegisters,
    Wire,
    ask_status,
    floats_of,
    packet,
    table_sum,
    tables,
)
from sirtaki.errors import AggregatorError, ConfigError
from sirtaki.machine import parse_address

SMALL = HeatLayout(rows=2000, width=16)


def rows_in(step: int, layout: HeatLayout) -> int:
    """All, one, or a part of the rows."""
    return [layout.rows, 1, max(1, layout.rows // 2)][step % 3]


def sums_of(
    addresses: Sequence[str],
    ranks: int,
    layout: HeatLayout,
    steps: int,
    after: Callable[[int, int], None] = lambda rank, step: None,
    **options: Any,
) -> list[Any]:
    """Each rank's client, or its error, after steps whose sums are checked; `after(rank, step)` follows each."""
    found: list[Any] = [None] * ranks
    have = [-1] * ranks
    together = threading.Barrier(ranks)

    def act(rank: int) -> AggregatorClient:
        client = client_of(addresses, rank, ranks, layout, **options)
        try:
            for step in range(steps):
                found[rank] = client.sum(values_of(rank, step, rows_in(step, layout), layout.width))
                after(rank, step)
                have[rank] = step  # others may need what this rank has until they have it, too
                client.linger(lambda step=step: min(have) >= step or together.broken)
                together.wait(100)
                if rank == 0:
                    check_sums(found, step)
                together.wait(100)
        except BaseException:
            together.abort()
            raise
        finally:
            client.close()
        return client

    return on_ranks(ranks, act)


def linger(client: AggregatorClient, seconds: float = 0.5) -> None:
    rest_s = time.monotonic() + seconds
    client.linger(lambda: time.monotonic() > rest_s)


def assert_all_well(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("ranks", "batches", "layout"),
    [
        (1, True, SMALL),
        (2, False, SMALL),
        (5, True, SMALL),
        (3, True, HeatLayout(rows=1, width=1)),
        (3, True, HeatLayout(rows=361, width=1)),
        (3, False, HeatLayout(rows=9, width=1000)),
        (3, True, HeatLayout(rows=100, width=7, registers=3)),
    ],
)
def test_sums_of_any_shape_are_right_and_the_same_on_all_ranks(ranks: int, batches: bool, layout: HeatLayout) -> None:
    with serving(batches=batches) as (address, aggregator):
        assert_all_well(sums_of([address], ranks, layout, 4, connect=lambda to: Wire.connected(to, batches=batches)))
    packets = sum(-(-rows_in(step, layout) * layout.width // layout.floats) for step in range(4))
    assert (aggregator.counters["sums"], aggregator.counters["parts"]) == (packets, ranks * packets)


@pytest.mark.lengthy
def test_sums_by_tables_are_near_and_the_same_on_all_ranks() -> None:
    with serving(by_tables=True) as (address, _):

        def act(rank: int) -> Any:
            client = client_of([address], rank, 3, SMALL)
            found = client.sum(np.abs(values_of(rank, 0, 2000, 16)))
            linger(client)
            client.close()
            return found

        sums = on_ranks(3, act)
    expected = sum(np.abs(values_of(rank, 0, 2000, 16)).astype(np.float64) for rank in range(3))
    np.testing.assert_allclose(sums[0], expected, rtol=5e-4)
    assert bool((sums[0] != expected.astype(np.float32)).any())
    np.testing.assert_array_equal(sums[0], sums[2])


def test_values_that_cannot_be_summed_are_rejected_and_nothing_is_lost() -> None:
    for addresses, rank, ranks in ((["a:1"], 2, 2), ([], 0, 1), (["nowhere"], 0, 1), (["a:99999"], 0, 1)):
        with pytest.raises(ConfigError):
            client_of(addresses, rank, ranks, SMALL)
    for wrong in ({"rows": 0}, {"width": 0}, {"registers": 0}):
        with pytest.raises(ConfigError, match="at least 1, found HeatLayout"):
            HeatLayout(**{"rows": 1, "width": 1, **wrong})
    with serving() as (address, _):
        client = client_of([address], 0, 1, SMALL)
        for shape in ((2001, 16), (10, 15), (0, 16), (16,)):
            with pytest.raises(ConfigError, match="expected values of shape"):
                client.sum(np.zeros(shape, np.float32))
        values = values_of(0, 0, 2000, 16)
        np.testing.assert_array_equal(client.sum(values), values)
        client.close()


# ── a bad network ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("ranks", "rows", "steps"),
    [(2, 27_500, 2), pytest.param(4, 110_000, 50, marks=[pytest.mark.slow, pytest.mark.timeout(580)])],
    ids=["five thousand packets", "a million packets"],
)
def test_each_part_is_added_once_through_loss_duplicates_and_reordering(ranks: int, rows: int, steps: int) -> None:
    layout = HeatLayout(rows=rows, width=16)
    given = [values_of(rank, 0, layout.rows, layout.width) for rank in range(ranks)]
    exact, sizes = sum(each.astype(np.float64) for each in given), sum(np.abs(each) for each in given)

    def act(rank: int) -> Any:
        client = client_of([proxy], rank, ranks, layout)
        digests = []
        for step in range(steps):  # powers of two, so that steps differ and rounding does not
            scale = np.float32(2.0 ** (step % 8))
            found = client.sum(scale * given[rank])
            assert bool((np.abs(found - scale * exact) <= (ranks + 1) * 2.0**-24 * scale * sizes).all()), step
            digests.append(blake2b(found.tobytes()).hexdigest())
        linger(client, 1.0)
        client.close()
        return digests, client.resent, client.moves

    with process() as (address, _), bad_network(address, Weather(loss=0.01, twice=0.01, late=0.01)) as (proxy, packets):
        results = on_processes(ranks, act, timeout_s=560)
        assert_all_well(results)
        wire = Wire.connected(parse_address(address))
        counted, sent = ask_status(wire) or {}, packets()
        wire.close()
    expected = ranks * steps * layout.packets
    assert (counted["parts"], counted["sums"]) == (expected, steps * layout.packets)  # none lost, none twice
    assert counted["repeated"] > 0
    assert sent > 1.9 * expected  # there and back
    assert sum(resent for _, resent, _ in results) > 0.005 * expected
    assert [moves for _, _, moves in results] == [0] * ranks
    assert all(digests == results[0][0] for digests, _, _ in results)


# ── aggregators die ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.lengthy
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 50))])
def test_a_killed_aggregator_loses_no_step(seed: int) -> None:
    """It is killed at a moment of its own in the middle of steps."""
    layout = HeatLayout(rows=20_000, width=16)
    with process() as (standby, _), process() as (address, first):

        def act(rank: int) -> Any:
            # The host says that nobody listens: ranks go at once, and one that is starved takes nobody else for gone.
            client = client_of([address, standby], rank, 3, layout, lost_s=20.0)
            found = [client.sum(values_of(rank, step, layout.rows, layout.width)) for step in range(2)]
            if rank == 0:
                threading.Timer(0.01 + 0.01 * seed, first.kill).start()
            found += [client.sum(values_of(rank, step, layout.rows, layout.width)) for step in range(2, 12)]
            linger(client)
            client.close()
            return found, client.moves

        results = on_ranks(3, act)
    assert_all_well(results)
    for step, sums in enumerate(zip(*(found for found, _ in results), strict=True)):
        check_sums(sums, step)
    assert all(moves <= 1 for _, moves in results)


@pytest.mark.lengthy
def test_an_aggregator_that_ends_sends_ranks_to_its_standby_at_once() -> None:
    with process() as (standby, _), process() as (address, first):

        def end_it(rank: int, step: int) -> None:
            if rank == 0 and step == 1:
                first.terminate()
                assert first.wait(10) == 0

        clients = sums_of([address, standby], 2, SMALL, 5, end_it)
        assert_all_well(clients)
        assert all(client.moves == 1 for client in clients)


def test_an_aggregator_restarted_at_once_continues_without_a_standby() -> None:
    with process() as (address, first):
        restarted: list[Any] = []

        def restart(rank: int, step: int) -> None:
            if rank == 0 and step == 1:
                first.kill()
                first.wait()
                context = process(port=int(address.split(":")[1]))
                restarted.extend((context, context.__enter__()))

        clients = sums_of([address], 2, SMALL, 5, restart, lost_s=20.0)
        restarted[0].__exit__(None, None, None)
        assert_all_well(clients)
        assert all(client.moves == 0 for client in clients)


@pytest.mark.lengthy
def test_a_rank_that_is_a_step_ahead_sends_its_peers_the_dead_aggregators_sums() -> None:
    layout, deaf = HeatLayout(rows=500, width=4), threading.Event()

    class Deaf(Wire):
        def batches(self, most: int = 64) -> Any:
            return iter(()) if deaf.is_set() and self.address[1] == behind_at[0] else super().batches(most)

    behind_at: list[int] = []
    with serving() as (standby, second), serving() as (address, first):

        def connect(to: tuple[str, int]) -> Wire:
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.connect(to)
            behind_at.append(sock.getsockname()[1])
            return Deaf(sock)

        one, two = (
            client_of([address, standby], 0, 2, layout),
            client_of([address, standby], 1, 2, layout, connect=connect),
        )
        given = [[values_of(rank, step, 500, 4) for step in range(3)] for rank in range(2)]

        def ahead() -> Any:
            found = [one.sum(given[0][0]), one.sum(given[0][1])]
            first.stop()
            found.append(one.sum(given[0][2]))
            linger(one)
            return found

        def behind() -> Any:
            found = [two.sum(given[1][0])]
            deaf.set()
            return [*found, two.sum(given[1][1]), two.sum(given[1][2])]

        results = on_ranks(2, lambda rank: (ahead, behind)[rank]())
        assert_all_well(results)
        for step, sums in enumerate(zip(*results, strict=True)):
            check_sums(sums, step)
        assert second.counters["taken_over"] >= layout.packets  # step 1, which only one of them had
        one.close()
        two.close()


@pytest.mark.lengthy
def test_a_silent_aggregator_or_a_missing_rank_is_an_error_in_time() -> None:
    began_s = time.monotonic()
    nobody = client_of(["127.0.0.1:9", "127.0.0.1:10"], 0, 2, SMALL)
    with pytest.raises(AggregatorError, match=r"no aggregator \(.*\) answers"):
        nobody.sum(np.zeros((1, 16), np.float32))
    unknown = client_of(["256.0.0.1:9"], 0, 2, SMALL)
    with pytest.raises(AggregatorError, match="cannot be reached"):
        unknown.sum(np.zeros((1, 16), np.float32))
    with serving() as (address, _):
        alone = client_of([address], 0, 2, SMALL, lost_s=0.8, stall_s=2.0)
        with pytest.raises(AggregatorError, match="a rank that is slow or has exited"):
            alone.sum(np.zeros((1, 16), np.float32))
        for client in (nobody, unknown, alone):
            client.close()
    assert time.monotonic() - began_s < 30


def test_two_jobs_at_once_do_not_meet() -> None:
    with serving() as (address, aggregator):
        results = at_once(lambda name: sums_of([address], 2, SMALL, 4, job=name), ["a", "b"])
        until(lambda: not aggregator._jobs)  # all ranks have left
    for result in results:
        assert_all_well(result)


# ── what an aggregator gives away, and what it does not let itself be told ───────────────────────────────────────────


def refusal(address: str, layout: HeatLayout = SMALL, job: str = "other") -> str:
    client = client_of([address], 0, 1, layout, job=job, lost_s=2.0)
    with pytest.raises(AggregatorError) as caught:
        client.sum(np.zeros((layout.rows, layout.width), np.float32))
    client.close()
    return str(caught.value)


@pytest.mark.lengthy
def test_a_job_beyond_the_limits_is_rejected_and_others_are_not_disturbed() -> None:
    with serving(memory_bytes=400_000, jobs=1, silent_s=0.5) as (address, aggregator):
        assert "the step needs 2.5 MiB of registers, and 0.4 MiB are free" in refusal(
            address, HeatLayout(rows=40_000, width=16)
        )
        first = client_of([address], 0, 1, SMALL)
        values = values_of(0, 0, 2000, 16)
        np.testing.assert_array_equal(first.sum(values), values)
        assert "1 jobs are running, which is the limit" in refusal(address)
        np.testing.assert_array_equal(first.sum(values), values)
        time.sleep(0.6)
        second = client_of([address], 0, 1, SMALL, job="other")
        second.sum(values)  # the first was silent, and has lost its place
        second.close()
        np.testing.assert_array_equal(first.sum(values), values)  # it comes anew without loss
        first.close()
        assert aggregator.counters["refusals"] >= 2


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("rows", "width", "found"),
    [((100, 100), (100, 50), "ranks of this job differ"), ((99, 100), (16, 16), "ranks sent")],
)
def test_ranks_with_different_layouts_or_rows_get_an_error(
    rows: tuple[int, int], width: tuple[int, int], found: str
) -> None:
    with serving() as (address, _):

        def act(rank: int) -> Any:
            client = client_of([address], rank, 2, HeatLayout(rows=1000, width=width[rank]), stall_s=1.0)
            try:
                return client.sum(np.zeros((rows[rank], width[rank]), np.float32))
            finally:
                client.close()

        results = on_ranks(2, act)
    assert all(isinstance(result, AggregatorError) for result in results)
    assert any(found in str(result) for result in results)


@pytest.mark.lengthy
def test_it_sends_its_counters_to_every_client_that_asks_with_as_long_a_packet() -> None:
    with serving() as (address, _):
        client = client_of([address], 0, 1, SMALL)
        client.sum(values_of(0, 0, 2000, 16))
        wire = Wire.connected(parse_address(address))
        told = ask_status(wire) or {}
        assert (told["jobs"], told["ranks"], told["sums"]) == (1, 1, SMALL.packets)
        assert 0 < told["memory_bytes"] < told["memory_limit_bytes"]
        wire.send(packet(PacketKind.STATUS))
        assert not wire.wait(0.3)
        wire.close()
        client.close()
    nobody = Wire.connected(("127.0.0.1", 9))
    assert ask_status(nobody, timeout_s=0.5) is None
    nobody.close()


SEEDS = [
    packet(PacketKind.PART, rank=0, ranks=2, job=1, count=4, body=bytes(32)),
    packet(PacketKind.PART, rank=1, ranks=2, job=1, count=16, seq=1, body=bytes(32)),
    packet(PacketKind.SUM, rank=1, ranks=2, job=1, step=1, count=4, body=bytes(32)),
    packet(PacketKind.BYE, rank=0, job=1),
    packet(PacketKind.STATUS, body=bytes(1440)),
]
CHANGED = st.tuples(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 80), st.integers(0, 255)), max_size=4))


@pytest.mark.lengthy
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=100) | CHANGED, min_size=1, max_size=30))
def test_it_survives_every_packet(sent: list[Any]) -> None:
    """Random packets, and packets with changed bytes."""
    with serving(memory_bytes=10_000) as (address, aggregator):
        noisy = Wire.connected(parse_address(address))
        for one in sent:
            data = bytearray(one if isinstance(one, bytes) else one[0])
            for place, byte in () if isinstance(one, bytes) else one[1]:
                data[place % len(data)] = byte
            noisy.send(bytes(data))
        assert ask_status(noisy, timeout_s=20.0) is not None
        assert len(aggregator._jobs) <= 16
        noisy.close()


RANKS, PACKETS, FLOATS = 3, 6, 2
NUMBERS = st.lists(st.integers(0, PACKETS - 1), unique=True, min_size=1)


@given(st.lists(st.tuples(st.integers(0, RANKS - 1), NUMBERS), max_size=40), st.integers(0, PACKETS - 1))
def test_each_part_is_in_a_sum_once_for_all_orders_and_duplicates(
    batches: list[tuple[int, list[int]]], brought: int
) -> None:
    found = StepRegisters(ranks=RANKS, values=PACKETS * FLOATS, floats=FLOATS, by_tables=False)
    had: dict[int, set[int]] = {seq: set() for seq in range(PACKETS)}
    complete: list[int] = []
    for rank, numbers in batches:
        seqs = np.array(numbers, np.int64)
        values = np.array([[10.0 ** (2 * rank) * (seq + 1)] * FLOATS for seq in numbers], np.float32)
        new, repeated = found.add(rank, seqs, values)
        assert repeated == sum(rank in had[seq] or len(had[seq]) == RANKS for seq in numbers)
        complete += new.tolist()
        for seq in numbers:
            had[seq].add(rank)
    assert sorted(complete) == [seq for seq in range(PACKETS) if len(had[seq]) == RANKS]
    for seq, ranks in had.items():
        np.testing.assert_array_equal(
            floats_of(found.frames)[seq], np.float32(sum(10.0 ** (2 * rank) * (seq + 1) for rank in ranks))
        )
    before = floats_of(found.frames)[brought].tolist()
    put = found.put(np.array([brought]), np.full((1, FLOATS), 5.0, np.float32))
    assert put.tolist() == ([] if brought in complete else [brought])
    assert floats_of(found.frames)[brought].tolist() == (before if brought in complete else [5.0] * FLOATS)
    assert found.add(0, np.array([brought]), np.ones((1, FLOATS), np.float32))[1] == 1


# ── sums by tables: Libra (sparse), §3.5 ─────────────────────────────────────────────────────────────────────────────


def test_tables_hold_numbers_of_16_bits_as_the_papers_do() -> None:
    found = tables()
    for table in (found.exponent, found.log_m, found.log_m_ln2, found.small[1:], found.plus, found.power[:-1]):
        assert int(np.abs(table).max()) <= 65536  # 16 bits


def test_numbers_are_added_to_a_ten_thousandth_of_the_larger_one() -> None:
    def relative(x: Any, y: Any) -> Any:
        exact = x.astype(np.float64) + y
        return np.abs(table_sum(x, y) - exact) / np.abs(exact)

    x, y = np.random.default_rng(0).uniform(0, 1, (2, 100_000)).astype(np.float32)
    error = relative(x, y)
    assert 2.0**-23 < error.max() < 1.5e-4  # it is an emulation, no plain sum
    assert np.median(error) < 4e-5  # the paper: 8e-4 on gradients
    x, y = np.random.default_rng(0).uniform(-1, 1, (2, 100_000)).astype(np.float32)
    assert relative(x, y).max() > 0.05  # of numbers that nearly cancel nothing is left
    absolute = np.abs(table_sum(x, y) - (x.astype(np.float64) + y)) / np.maximum(np.abs(x), np.abs(y))
    assert absolute.max() < 5e-4


@given(st.floats(width=32, allow_subnormal=False), st.floats(width=32, allow_subnormal=False))
def test_order_does_not_matter_and_special_numbers_are_preserved(x: float, y: float) -> None:
    one, other = np.array([x], np.float32), np.array([y], np.float32)
    np.testing.assert_array_equal(table_sum(one, other), table_sum(other, one))
    if not np.isfinite(one).all() or not np.isfinite(other).all():
        with np.errstate(over="ignore", invalid="ignore"):
            np.testing.assert_array_equal(table_sum(one, other), one + other)
    np.testing.assert_array_equal(table_sum(one, np.zeros(1, np.float32)), one + 0)
    assert table_sum(one, -one)[0] == 0 or not np.isfinite(x)


# ── the socket ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("heard_in_batches", [True, False])
def test_packets_sent_together_are_received_one_by_one_and_can_be_answered(
    batches: bool, heard_in_batches: bool
) -> None:
    heard = Wire.bound("127.0.0.1", 0, batches=heard_in_batches)
    sender = Wire.connected(heard.address, batches=batches)

    def received(wire: Wire, packets: int) -> list[bytes]:
        found: list[bytes] = []
        while len(found) < packets and wire.wait(2):
            for rows, address in wire.batches():
                found += [row.tobytes() for row in rows]
                came_from.append(address)
        return found

    came_from: list[tuple[str, int]] = []
    rows = np.random.default_rng(0).integers(0, 256, (200, 1472), dtype=np.uint8)
    sender.send_rows(rows)
    sender.send(b"short")
    assert received(heard, 201) == [*(row.tobytes() for row in rows), b"short"]
    heard.send_rows(np.full((3, 8), 65, np.uint8), came_from[-1])
    assert received(sender, 3) == [b"A" * 8] * 3
    heard.close()
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
        with pytest.raises(ConfigError, match=r"the aggregator .* cannot be reached"):
            Wire.connected((host, 5))
