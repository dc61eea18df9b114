"""The pool opens what plans need, in one order, and closes what was unused longest."""

from collections.abc import Callable

import pytest
from fakes.groups import LoneOpener

from sirtaki.comm.nccl_streams.transport import CommunicatorKey, CommunicatorPool, Scope
from sirtaki.errors import CommError, PlanError


def pool_of(
    opener: LoneOpener, limit: int = 4, worst: Callable[[float], float] = lambda value: value
) -> CommunicatorPool:
    return CommunicatorPool(opener, limit=limit, worst=worst)


def keys(*streams: int) -> list[CommunicatorKey]:
    return [CommunicatorKey(stream) for stream in streams]


def test_communicators_are_opened_once_and_in_the_order_in_which_they_are_asked_for() -> None:
    opener = LoneOpener()
    pool = pool_of(opener)
    pool.require(keys(2, 0))
    pool.require(keys(0, 1, 2, 0))
    assert opener.opened == keys(2, 0, 1)
    assert pool[CommunicatorKey(1)] is opener.made[CommunicatorKey(1)]


def test_a_stream_with_other_ctas_or_other_ranks_is_another_communicator() -> None:
    opener = LoneOpener()
    several = [CommunicatorKey(0), CommunicatorKey(0, 4), CommunicatorKey(0, 4, Scope.NODE)]
    pool_of(opener).require(several)
    assert opener.opened == several
    assert [str(key) for key in several] == ["stream 0", "stream 0 with 4 CTAs", "stream 0 with 4 CTAs (node)"]


def test_the_pool_counts_what_is_open_for_a_stream() -> None:
    pool = pool_of(LoneOpener(), limit=3)
    pool.require([CommunicatorKey(0), CommunicatorKey(0, 4), CommunicatorKey(0, 4, Scope.NODE)])
    assert [pool.count(0, Scope.ALL), pool.count(0, Scope.NODE), pool.count(1, Scope.ALL)] == [2, 1, 0]
    pool.require(keys(1))
    assert [pool.count(0, Scope.ALL), pool.count(1, Scope.ALL)] == [1, 1], "the one unused longest is closed"


def test_what_was_unused_longest_is_closed_for_others() -> None:
    opener = LoneOpener()
    pool = pool_of(opener, limit=3)
    pool.require(keys(0, 1, 2))
    pool.require(keys(0))
    pool.require(keys(3))
    assert opener.made[CommunicatorKey(1)].closed
    assert sorted(key.stream for key in pool.keys()) == [0, 2, 3]  # noqa: SIM118  # a pool is no mapping
    pool.require(keys(3, 4, 5))
    assert sorted(key.stream for key in pool.keys()) == [3, 4, 5]  # noqa: SIM118


def test_a_plan_that_needs_too_many_is_refused_before_anything_is_closed() -> None:
    opener = LoneOpener()
    pool = pool_of(opener, limit=2)
    pool.require(keys(7))
    with pytest.raises(PlanError, match="needs 3 communicators; at most 2"):
        pool.require(keys(0, 1, 2))
    assert opener.opened == keys(7)
    assert not opener.made[CommunicatorKey(7)].closed


def test_memory_is_bounded_by_what_the_fullest_rank_has_seen() -> None:
    opener = LoneOpener(taken_bytes=10)
    pool = pool_of(opener, limit=24, worst=lambda value: 3 * value)  # on another rank each takes 3 % of the memory
    pool.require(keys(0, 1, 2))
    pool.require(keys(3))
    assert opener.made[CommunicatorKey(0)].closed
    assert len(pool) == 3
    with pytest.raises(PlanError, match="of the GPU's memory"):
        pool.require(keys(3, 4, 5, 6))


def test_only_what_the_last_plan_needs_is_kept_in_the_end() -> None:
    opener = LoneOpener()
    pool = pool_of(opener)
    pool.require(keys(0, 1, 2))
    pool.keep_only(keys(1))
    assert pool.keys() == (CommunicatorKey(1),)
    pool.close()
    assert all(group.closed for group in opener.made.values())


def test_an_error_names_the_communicator() -> None:
    opener = LoneOpener()
    pool = pool_of(opener)
    pool.require(keys(0, 1))
    pool.check()
    opener.made[CommunicatorKey(1)].problem = "remote error"
    with pytest.raises(CommError, match="NCCL failed on stream 1: remote error"):
        pool.check()
