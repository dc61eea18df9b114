"""Sums through an aggregator: right, the same on all ranks, whatever is lost, and whoever dies."""

import signal
import threading
import time
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

from sirtaki.aggregator import AggregatorClient, HeatLayout, Patience, Summation
from sirtaki.aggregator.server import ask_status
from sirtaki.aggregator.wire import Wire
from sirtaki.errors import AggregatorError, CommError, ConfigError
from sirtaki.host_port import parse_address

SMALL = HeatLayout(rows=2000, width=16)


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
                found[rank] = client.sum(values_of(rank, step, layout.rows, layout.width))
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
    assert aggregator.counters.sums == 4 * SMALL.packets
    assert aggregator.counters.parts == 4 * SMALL.packets * ranks


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


def test_a_step_may_have_fewer_rows_than_the_layout() -> None:
    with serving() as (address, _):

        def act(rank: int) -> list[Any]:
            client = client_of([address], rank, 2, SMALL)
            found = [client.sum(values_of(rank, step, rows, 16)) for step, rows in enumerate((2000, 1, 777, 2000))]
            client.close()
            return found

        for step, sums in enumerate(zip(*on_ranks(2, act), strict=True)):
            check_sums(sums, step)


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
        rest_s = time.monotonic() + 1.0
        client.linger(lambda: time.monotonic() > rest_s)
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
def test_twenty_thousand_packets_through_loss_duplicates_and_reordering() -> None:
    through_a_bad_network(4, HeatLayout(rows=27_500, width=16), 4, timeout_s=100)


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
            rest_s = time.monotonic() + 0.5
            client.linger(lambda: time.monotonic() > rest_s)
            client.close()
            return found, client.moves

        results = on_ranks(3, act)
        assert_all_well(results)
    for step, sums in enumerate(zip(*(found for found, _ in results), strict=True)):
        check_sums(sums, step)
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
            import socket

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
            rest_s = time.monotonic() + 0.5
            client.linger(lambda: time.monotonic() > rest_s)
            client.close()
            return found, client.moves

        results = on_ranks(3, act)
        assert_all_well(results)
    for step, sums in enumerate(zip(*(found for found, _ in results), strict=True)):
        check_sums(sums, step)
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
            rest_s = time.monotonic() + 0.5
            one.linger(lambda: time.monotonic() > rest_s)
            return found

        def behind() -> Any:
            found = [two.sum(given[1][0])]
            deaf.set()
            return [*found, two.sum(given[1][1]), two.sum(given[1][2])]

        results = on_ranks(2, lambda rank: (ahead, behind)[rank]())
        assert_all_well(results)
        for step, sums in enumerate(zip(*results, strict=True)):
            check_sums(sums, step)
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


def test_where_none_was_ever_there_it_is_an_error_too() -> None:
    client = client_of(["127.0.0.1:9"], 0, 1, SMALL, patience=Patience(lost_s=0.3))
    with pytest.raises(AggregatorError, match=r"no aggregator answers \(127.0.0.1:9\)"):
        client.sum(np.zeros((1, 16), np.float32))
    client.close()


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


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    with serving() as (address, _):
        client = client_of([address], 0, 2, SMALL, patience=Patience(stall_s=0.5))
        with pytest.raises(AggregatorError, match=r"for 0.5 s; other ranks are late or gone"):
            client.sum(np.zeros((1, 16), np.float32))
        client.close()


def test_what_its_check_raises_ends_a_wait() -> None:
    def check() -> None:
        raise CommError("the job is lost")

    with serving() as (address, _):
        client = client_of([address], 0, 2, SMALL, check=check)
        with pytest.raises(CommError, match="the job is lost"):
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
        assert aggregator.counters.sums == 6 * (SMALL.packets + others.packets)
        deadline_s = time.monotonic() + 5
        while aggregator._jobs and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert not aggregator._jobs  # all ranks have said that they leave
