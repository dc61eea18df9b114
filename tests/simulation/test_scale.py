"""What each rank and rank 0 use on many ranks: the product's control code on a simulated system.

The limits state how resources grow with the number of ranks, as docs/explanation/protocol.md does.
"""

import tracemalloc
from math import ceil, log2

import pytest
from simulation.control import HEARTBEAT_S, Job, Run, job, powers

from sirtaki.comm.control import handshake
from sirtaki.comm.control.mesh import BEATS
from sirtaki.errors import CommError


def met(run: Run, size: int) -> None:
    """Check that no rank was flooded: each pair of ranks needed one connection, and each rank a few requests."""
    assert not run.errors, run.errors
    assert all(each.connects == rank and each.accepts == size - 1 - rank for rank, each in enumerate(run.used))
    assert run.most("store_requests") <= 30
    assert run.used[0].store_requests <= 40 + size // 8
    assert run.total("store_requests") <= 30 * size
    assert run.most("store_bytes") <= 1500 + 60 * size
    assert run.total("log_lines") == 0


def agreed(run: Run, size: int) -> None:
    """Check that the ranks agree, and that rank 0 has no more to do than others."""
    assert not run.errors, run.errors
    assert set(run.results) == {1000 - min(1000, size)}
    assert {(each.sent, each.received) for each in run.used} == {(ceil(log2(size)),) * 2}
    assert run.most("sent_bytes") <= ceil(log2(size)) * 150
    assert run.seconds < 1e-3 * ceil(log2(size))


def rested(run: Run, minutes: int) -> None:
    """Check that a rank that does nothing sends heartbeats only, whatever the number of ranks."""
    beats = minutes * 60 * BEATS / HEARTBEAT_S
    assert all(beats - 2 <= each.sent <= beats and each.sent_bytes == 24 * each.sent for each in run.used)


def all_of(size: int, simulated: Job) -> None:
    """Run a whole job without faults, and check all of its resources."""
    met(simulated.meet(), size)
    opened = simulated.open()
    assert not opened.errors, opened.errors
    assert opened.most("sent") <= 2 * ceil(log2(size))  # each message may be divided, where the ranks wrap around
    assert opened.most("sent_bytes") <= 300 * size
    addresses = simulated.address()
    assert addresses.results == [rank.host for rank in simulated.ranks], addresses.errors
    assert addresses.used[0].accepts == 3 * (size - 1)
    assert simulated.system.dropped == 0
    assert simulated.system.longest_queue <= max(8, size // 16)
    summed = simulated.sum()
    assert all(each == [size * (size - 1) / 2] * 1000 for each in summed.results), summed.errors
    assert max(each.sent for each in summed.used) <= ceil(log2(size)) + 1
    agreed(simulated.agree(), size)
    simulated.watch(warning_s=60.0)
    rested(simulated.rest(60.0), 1)
    tracemalloc.start()
    left = simulated.leave()
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(left.results), left.results
    assert most_bytes < 8000 * size**2  # although every rank receives something from every other one
    assert {each.sent for each in left.used} == {2 * (size - 1)}  # that the script has ended, and the last message


@pytest.mark.lengthy
@pytest.mark.parametrize("size", [16, 33, 64])
def test_no_rank_uses_more_than_its_share(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    # As few as few hundred ranks would have; all ranks that connect to one at the same time would exceed it.
    monkeypatch.setattr(handshake, "MAX_UNPROVED", 8)
    with job(size) as simulated:
        all_of(size, simulated)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_rank_of_512_uses_more_than_its_share() -> None:
    with job(512) as simulated:
        all_of(512, simulated)


@pytest.mark.lengthy
@pytest.mark.parametrize("size", [256, 1024, pytest.param(4096, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_agreement_costs_the_logarithm_and_heartbeats_a_constant(size: int) -> None:
    with job(size) as simulated:
        simulated.link(powers(size))
        agreed(simulated.agree(), size)
        rested(simulated.rest(60.0), 1)


@pytest.mark.parametrize("size", [1024, pytest.param(16384, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_the_store_answers_a_few_requests_of_each_rank(size: int) -> None:
    with job(size) as simulated:
        run = simulated.exchange()
        assert not run.errors, run.errors
        assert run.results[:2] == [size, size]
        assert run.used[0].store_requests <= 40 + size // 30
        assert run.total("store_requests") <= 10 * size
        assert run.used[1].store_bytes <= 1500 + 20 * size


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [32, 64])
def test_all_ranks_name_a_rank_that_dies_during_an_agreement_and_the_others_meet_again(size: int) -> None:
    with job(size) as simulated:
        simulated.link(lambda rank: range(size))
        run = simulated.lose(5)
        del run.results[5]
        assert set(run.results) == {"rank 5 has ended: its connection is closed"}
        assert run.seconds < 0.1
        assert max(each.sent for each in run.used) <= 2 * size + 4
        assert max(each.sent_bytes for each in run.used) <= 200 * size
        assert run.total("log_lines") == 0  # the error says it

        again = simulated.recover()
        assert not again.errors, again.errors
        assert {each.connects + each.accepts for each in again.used} == {0, size - 2}
        assert again.seconds < 0.1
        assert simulated.agree().results.count(1000 - size + 1) == size - 1


@pytest.mark.parametrize("size", [32, 64])
def test_the_next_rank_names_a_rank_whose_host_is_lost(size: int) -> None:
    with job(size) as simulated:
        simulated.link(lambda rank: range(size))
        run = simulated.lose(5, silently=True)
        assert set(run.results[8:]) == {run.results[8]}
        assert run.results[8].startswith(f"rank 7 has sent nothing for {HEARTBEAT_S:.0f} s")
        assert run.seconds < HEARTBEAT_S * (1 + 2 / BEATS)
        assert max(each.sent for each in run.used) <= 2 * size + 4 * BEATS
        assert max(each.received for each in run.used) <= 2 * size + 4 * BEATS


def test_one_rank_says_for_whom_all_wait() -> None:
    size = 32
    with job(size) as simulated:
        simulated.link(lambda rank: range(size))
        simulated.watch(warning_s=60.0)
        run = simulated.hang(9, 70.0)
        assert not any(run.results), run.results
        [line] = [line for rank in simulated.ranks for line in rank.log]
        assert line.startswith("rank 0 has waited 60 s for gradient 7; missing: rank 9 ")
        # Rank 0 asks all, and answers all. The others ask rank 0 only.
        assert run.used[0].sent <= 2 * size + 30
        assert run.most("sent") <= 30


def test_the_lowest_rank_that_waits_speaks_if_rank_0_is_the_one_that_hangs() -> None:
    size = 32
    with job(size) as simulated:
        simulated.link(lambda rank: range(size))
        simulated.watch(warning_s=60.0)
        simulated.hang(0, 70.0)
        [line] = [line for rank in simulated.ranks for line in rank.log]
        assert line.startswith("rank 1 has waited 60 s for gradient 7; missing: rank 0 ")


def test_rank_0_names_a_slow_rank_once() -> None:
    size = 32
    with job(size) as simulated:
        simulated.link(lambda rank: [0, *powers(size)(rank)])
        simulated.watch(warning_s=60.0)
        run = simulated.train(25, slow=9, factor=3.0)
        assert not run.errors, run.errors
        [line] = [line for rank in simulated.ranks for line in rank.log]
        assert line.startswith("rank 9 on host 10.0.1.1 has been slow")
        assert run.used[0].received <= 25 * log2(size) + size * (run.seconds / 5 + 2)


def test_the_first_rank_names_a_rank_that_comes_late_or_never() -> None:
    size, late = 32, 7
    with job(size) as simulated:
        run = simulated.meet(late_s={late: 30.0})
        assert not run.errors, run.errors
        assert [line for rank in simulated.ranks for line in rank.log] == [
            "rank 0 has waited 10 s for rank 7 to start, and continues to wait; check that all processes of the job run"
        ]
        assert 30.0 < run.seconds < 40.0
        assert run.total("store_requests") <= 5000 * run.seconds

        run = simulated.meet(late_s={late: 1000.0}, timeout_s=60.0, limit_s=2000.0)
        errors = [str(error) for error in run.results if isinstance(error, CommError)]
        assert len(errors) >= size - 1
        assert all("missing: rank 7" in error for error in errors[: size - 1]), errors
