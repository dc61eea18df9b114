"""Sums through an aggregator: right, the same on all ranks, whatever is lost, and whoever dies."""

import os
import signal
import socket
import threading
import time
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import pytest
import torch
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
from fakes.meshes import close, connected, on_all, until
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.aggregator import AggregatorClient, HeatLayout, Patience, Summation
from sirtaki.aggregator.client import REORDER, AggregatedRows, Agreement, Exchange, RoundTrips
from sirtaki.aggregator.server import ask_status
from sirtaki.aggregator.wire import MOST_FLOATS, Kind, Wire, floats_of, headers_of, seqs_of
from sirtaki.comm.control.mesh import MeshCommunicator
from sirtaki.errors import AggregatorError, CommError, ConfigError
from sirtaki.host_port import parse_address

SMALL = HeatLayout(rows=2000, width=16)


def rows_in(step: int, layout: HeatLayout) -> int:
    """A step may have fewer rows than the layout."""
    return max(1, layout.rows // 3) if step == 1 else layout.rows


def sums_of(
    addresses: list[str],
    ranks: int,
    layout: HeatLayout,
    steps: int,
    after: Any = lambda rank, step: None,
    **options: Any,
) -> list[Any]:
    """A few steps on every rank; each is checked once all ranks have it."""
    together, have = threading.Barrier(ranks), [-1] * ranks
    found: list[Any] = [None] * ranks

    def act(rank: int) -> AggregatorClient:
        client = client_of(addresses, rank, ranks, layout, **options)
        try:
            for step in range(steps):
                found[rank] = client.sum(values_of(rank, step, rows_in(step, layout), layout.width))
                after(rank, step)
                have[rank] = step  # others may need this rank's part again until they have the sum, too
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


def check_steps(results: list[Any]) -> None:
    """The sums of each step, of all ranks."""
    assert_all_well(results)
    for step, sums in enumerate(zip(*results, strict=True)):
        check_sums(sums, step)


def assert_all_well(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("batches", [True, False])
def test_sums_are_right_and_the_same_on_all_ranks(ranks: int, batches: bool) -> None:
    with serving(batches=batches) as (address, aggregator):
        options = {"connect": lambda to: Wire.connected(to, batches=batches)}
        assert_all_well(sums_of([address], ranks, SMALL, 4, **options))
    packets = sum(-(-rows_in(step, SMALL) * SMALL.width // SMALL.floats) for step in range(4))
    assert (aggregator.counters.sums, aggregator.counters.parts) == (packets, ranks * packets)


@pytest.mark.parametrize(
    "layout",
    [
        HeatLayout(rows=1, width=1),
        HeatLayout(rows=361, width=1),
        HeatLayout(rows=100, width=7, registers=3),
        HeatLayout(rows=9, width=1000),
    ],
)
def test_any_shape_is_summed(layout: HeatLayout) -> None:
    with serving() as (address, _):
        assert_all_well(sums_of([address], 3, layout, 3))


def test_values_that_do_not_fit_are_refused_and_nothing_is_lost() -> None:
    with serving() as (address, _):
        client = client_of([address], 0, 1, SMALL)
        for shape in ((2001, 16), (10, 15), (0, 16), (16,)):
            with pytest.raises(ConfigError, match="the layout expects"):
                client.sum(np.zeros(shape, np.float32))
        values = values_of(0, 0, 2000, 16)
        np.testing.assert_array_equal(client.sum(values), values)
        client.close()


def test_invalid_ranks_and_addresses_are_refused() -> None:
    for addresses, rank, ranks in ((["a:1"], 2, 2), ([], 0, 1), (["nowhere"], 0, 1), (["a:99999"], 0, 1)):
        with pytest.raises(ConfigError):
            client_of(addresses, rank, ranks, SMALL)


def test_sums_by_tables_are_near_and_the_same_on_all_ranks() -> None:
    with serving() as (address, _):

        def act(rank: int) -> Any:
            client = client_of([address], rank, 3, SMALL, summation=Summation.TABLE)
            found = client.sum(np.abs(values_of(rank, 0, 2000, 16)))
            client.close()
            return found

        sums = on_ranks(3, act)
    expected = sum(np.abs(values_of(rank, 0, 2000, 16)).astype(np.float64) for rank in range(3))
    np.testing.assert_allclose(sums[0], expected, rtol=5e-4)
    assert bool((sums[0] != expected.astype(np.float32)).any())
    np.testing.assert_array_equal(sums[0], sums[2])


# ── a bad network ────────────────────────────────────────────────────────────────────────────────────────────────────


def through_a_bad_network(ranks: int, layout: HeatLayout, steps: int, timeout_s: float) -> None:
    """Every sum is checked on every rank; all ranks and the aggregator are processes."""
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
        results = on_processes(ranks, act, timeout_s=timeout_s)
        assert_all_well(results)
        wire = Wire.connected(parse_address(address))
        counted, sent = ask_status(wire), packets()
        wire.close()
    expected = ranks * steps * layout.packets
    assert counted is not None
    assert counted["parts"] == expected  # none lost, none twice
    assert counted["sums"] == steps * layout.packets
    assert int(counted["repeated"]) > 0
    assert sent > 1.9 * expected  # there and back
    assert sum(resent for _, resent, _ in results) > 0.005 * expected
    assert [moves for _, _, moves in results] == [0] * ranks
    assert all(digests == results[0][0] for digests, _, _ in results)


def test_five_thousand_packets_through_loss_duplicates_and_reordering() -> None:
    through_a_bad_network(2, HeatLayout(rows=27_500, width=16), 2, timeout_s=100)


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_a_million_packets_through_loss_duplicates_and_reordering() -> None:
    through_a_bad_network(4, HeatLayout(rows=110_000, width=16), 50, timeout_s=560)


# ── aggregators die ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_killed_aggregator_loses_no_step(seed: int) -> None:
    """It is killed at a moment of its own in the middle of steps; the standby is named by the aggregator alone."""
    layout = HeatLayout(rows=20_000, width=16)
    with process() as (standby, _), process("--standby", standby) as (address, first):

        def act(rank: int) -> Any:
            client = client_of([address], rank, 3, layout)
            found = [client.sum(values_of(rank, step, layout.rows, layout.width)) for step in range(2)]
            if rank == 0:
                threading.Timer(0.01 + 0.03 * seed, lambda: first.send_signal(signal.SIGKILL)).start()
            found += [client.sum(values_of(rank, step, layout.rows, layout.width)) for step in range(2, 12)]
            linger(client)
            client.close()
            return found, client.moves

        results = on_ranks(3, act)
    check_steps([found for found, _ in results])
    assert all(moves == 1 for _, moves in results)


def test_an_aggregator_that_ends_sends_ranks_to_its_standby_at_once() -> None:
    with process() as (standby, _), process("--standby", standby) as (address, first):

        def end_it(rank: int, step: int) -> None:
            if rank == 0 and step == 1:
                first.send_signal(signal.SIGTERM)
                assert first.wait(10) == 0

        clients = sums_of([address], 2, SMALL, 5, end_it)
        assert_all_well(clients)
        assert all(client.moves == 1 for client in clients)


def test_one_that_is_started_again_at_once_goes_on_without_a_standby() -> None:
    with process() as (address, first):
        restarted: list[Any] = []

        def restart(rank: int, step: int) -> None:
            if rank == 0 and step == 1:
                first.kill()
                first.wait()
                context = process(port=int(address.split(":")[1]))
                restarted.extend((context, context.__enter__()))

        clients = sums_of([address], 2, SMALL, 5, restart, patience=Patience(lost_s=5.0, stall_s=60.0))
        restarted[0].__exit__(None, None, None)
        assert_all_well(clients)
        assert all(client.moves == 0 for client in clients)


def test_a_rank_that_leaves_an_aggregator_which_is_alive_is_followed() -> None:
    """One rank alone cannot reach the first aggregator any more; the others hear that from the standby."""
    with serving() as (standby, _), serving() as (address, _), bad_network(address, Weather(0, 0, 0)) as (proxy, _):
        cut = threading.Event()

        class Cut(Wire):
            def batches(self, most: int = 64) -> Any:
                found = super().batches(most)
                return iter(list(found)[:0]) if cut.is_set() else found

        def connect(to: tuple[str, int]) -> Wire:
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.connect(to)
            return Cut(sock) if f"{to[0]}:{to[1]}" == proxy else Wire(sock)

        def act(rank: int) -> Any:
            options: dict[str, Any] = {"connect": connect} if rank == 1 else {}
            client = client_of([proxy if rank == 1 else address, standby], rank, 3, SMALL, **options)
            found = []
            for step in range(4):
                if step == 2 and rank == 1:
                    cut.set()
                found.append(client.sum(values_of(rank, step, 2000, 16)))
            linger(client)
            client.close()
            return found, client.moves

        results = on_ranks(3, act)
    check_steps([found for found, _ in results])
    assert [moves for _, moves in results] == [1, 1, 1]


def test_a_rank_that_is_a_step_ahead_gives_the_others_what_the_dead_one_had_told_it() -> None:
    with serving() as (standby, second), serving() as (address, first):
        layout = HeatLayout(rows=500, width=4)
        one, two = (client_of([address, standby], rank, 2, layout) for rank in range(2))
        deaf = threading.Event()
        wires = two._contacts[0].wire
        heard = wires.batches
        wires.batches = lambda most=64: iter(()) if deaf.is_set() else heard(most)  # type: ignore[method-assign]
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
        check_steps(results)
        assert second.counters.taken_over == layout.packets  # step 1, which only one of them had
        one.close()
        two.close()


def test_where_nobody_answers_there_is_an_error_in_time() -> None:
    with process() as (standby, second), process("--standby", standby) as (address, first):

        def kill_both(rank: int, step: int) -> None:
            if rank == 0 and step == 1:
                for each in (first, second):
                    each.kill()
                    each.wait()

        began_s = time.monotonic()
        results = sums_of([address], 2, SMALL, 5, kill_both)
        assert time.monotonic() - began_s < 20
    assert all(isinstance(result, AggregatorError | threading.BrokenBarrierError) for result in results), results
    assert any("no aggregator answers" in str(result) for result in results)


def test_a_rank_that_was_stopped_for_long_does_not_take_the_aggregator_for_gone() -> None:
    with serving() as (address, _):
        stopped: list[bool] = []

        def stop_once() -> None:
            if len(stopped) == 3:
                time.sleep(0.6)
            stopped.append(True)

        client = client_of([address], 0, 2, SMALL, patience=Patience(lost_s=0.3, stall_s=1.2), check=stop_once)
        with pytest.raises(AggregatorError, match="other ranks are late"):
            client.sum(np.zeros((1, 16), np.float32))
        client.close()


@pytest.mark.parametrize(
    ("patience", "check", "found"),
    [
        (Patience(stall_s=0.5), None, "for 0.5 s; other ranks are late or gone"),
        (Patience(stall_s=60.0), CommError("the job is lost"), "the job is lost"),
    ],
)
def test_a_wait_for_a_rank_that_does_not_come_ends(patience: Patience, check: Exception | None, found: str) -> None:
    def fail() -> None:
        if check is not None:
            raise check

    with serving() as (address, _):
        client = client_of([address], 0, 2, SMALL, patience=patience, check=fail)
        with pytest.raises((AggregatorError, CommError), match=found):
            client.sum(np.zeros((1, 16), np.float32))
        client.close()


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_jobs_at_once_do_not_meet() -> None:
    with serving() as (address, aggregator):
        others = HeatLayout(rows=3000, width=5)
        found: dict[str, Any] = {}
        jobs = {"one": (2, SMALL), "two": (3, others)}
        threads = [
            threading.Thread(
                target=lambda name=name, ranks=ranks, layout=layout: found.update(
                    {name: sums_of([address], ranks, layout, 6, job=name)}
                )
            )
            for name, (ranks, layout) in jobs.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for results in found.values():
            assert_all_well(results)
        until(lambda: not aggregator._jobs)  # all ranks have said that they leave


# ── tensors, with one verdict on all ranks ───────────────────────────────────────────────────────────────────────────

ROWS = HeatLayout(rows=400, width=8)


def rows_of(comm: MeshCommunicator, addresses: list[str]) -> AggregatedRows:
    agreement = Agreement(comm)
    client = client_of(addresses, comm.rank, comm.size, ROWS, check=agreement.check)
    return AggregatedRows(client, agreement)


def on_mesh(ranks: int, act: Any) -> list[Any]:
    links = connected(ranks)
    try:
        return on_all(links, act)
    finally:
        close(links)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_come_back_as_sums_of_their_kind(dtype: torch.dtype) -> None:
    with serving() as (address, _):

        def act(comm: MeshCommunicator) -> Any:
            rows = rows_of(comm, [address])
            values = torch.full((400, 8), comm.rank + 1.0, dtype=dtype, requires_grad=True)
            found = [rows.sum_rows(values), rows.sum_rows(values[:7])]
            rows.close()
            rows.close()
            return found

        for one, few in on_mesh(3, act):
            assert one.dtype == dtype
            assert torch.equal(one, torch.full((400, 8), 6.0, dtype=dtype))
            assert few.shape == (7, 8)
            assert not one.requires_grad


def test_a_killed_aggregator_ends_in_the_same_step_on_all_ranks_and_none_has_its_sums() -> None:
    with process() as (address, first):

        def act(comm: MeshCommunicator) -> Any:
            rows = rows_of(comm, [address])
            done = 0
            try:
                for step in range(200):
                    if comm.rank == 1 and step == 20:
                        first.kill()
                    rows.sum_rows(torch.ones(400, 8))
                    done += 1
            except AggregatorError as err:
                with pytest.raises(AggregatorError, match="given up in an earlier step"):
                    rows.sum_rows(torch.ones(400, 8))
                return done, rows.is_open, str(err)
            return done, rows.is_open, ""

        results = on_mesh(3, act)
    assert {done for done, _, _ in results} in ({20}, {21})
    assert not any(is_open for _, is_open, _ in results)
    assert all("aggregator" in text for _, _, text in results)


def test_numbers_that_are_no_floats_are_refused() -> None:
    with serving() as (address, _):

        def act(comm: MeshCommunicator) -> Any:
            rows = rows_of(comm, [address])
            with pytest.raises(ConfigError, match=r"torch.int64 cannot be summed"):
                rows.sum_rows(torch.ones(1, 8, dtype=torch.int64))
            rows.close()
            return True

        assert on_mesh(1, act) == [True]


def test_a_rank_that_alone_cannot_reach_it_keeps_nobody_waiting() -> None:
    with serving() as (address, _), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{silent.getsockname()[1]}"

        def act(comm: MeshCommunicator) -> Any:
            rows = rows_of(comm, [nobody if comm.rank == 1 else address])
            begin_s = time.monotonic()
            with pytest.raises(AggregatorError) as caught:
                rows.sum_rows(torch.ones(400, 8))
            return time.monotonic() - begin_s, str(caught.value)

        results = on_mesh(3, act)
    assert all(took_s < 10.0 for took_s, _ in results)  # not the minute after which the others would give up
    assert "no aggregator answers" in results[1][1]
    assert "rank 1 gets no sums: no aggregator answers" in results[0][1]


def test_a_socket_that_fails_is_an_aggregator_that_is_gone() -> None:
    with serving() as (address, _):

        def act(comm: MeshCommunicator) -> Any:
            rows = rows_of(comm, [address])
            rows.sum_rows(torch.ones(400, 8))
            if comm.rank == 0:
                rows._client._contact.wire._sock.shutdown(socket.SHUT_RDWR)
                os.close(rows._client._contact.wire._sock.detach())
            with pytest.raises(AggregatorError):
                rows.sum_rows(torch.ones(400, 8))
            return True

        assert on_mesh(2, act) == [True] * 2


# ── what is sent again ───────────────────────────────────────────────────────────────────────────────────────────────

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


@given(st.integers(1, 5000), st.integers(1, 1000), st.none() | st.integers(1, 500))
def test_all_values_of_a_layout_have_room_in_its_packets(rows: int, width: int, registers: int | None) -> None:
    layout = HeatLayout(rows=rows, width=width, registers=registers)
    assert (layout.packets - 1) * layout.floats < rows * width <= layout.packets * layout.floats
    assert layout.floats <= MOST_FLOATS
    assert layout.packet_rows <= layout.register_count


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"width": 0}, {"registers": 0}])
def test_a_layout_that_is_none_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="whole numbers from 1"):
        HeatLayout(**{"rows": 1, "width": 1, **wrong})
