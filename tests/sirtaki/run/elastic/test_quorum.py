"""Of two sides of a network that has come apart one goes on at most, whichever generation each believes in."""

from itertools import combinations

import pytest

from sirtaki.run.elastic.job_members import Quorum


def driver(*generations: tuple[int, ...]) -> Quorum:
    """One that has begun these, and of which no agent has said that it knows of any."""
    quorum = Quorum()
    for number, members in enumerate(generations, start=1):
        quorum.begin(number, members)
    return quorum


def successor(present: tuple[int, ...], *lists: tuple[int, ...]) -> Quorum:
    quorum = Quorum()
    quorum.take_over(lists, 1, present)
    return quorum


@pytest.mark.parametrize("size", range(1, 7))
def test_of_a_driver_and_those_that_it_cannot_reach_one_goes_on(size: int) -> None:
    members = tuple(range(10, 10 + size))
    for count in range(size + 1):
        for gone in combinations(members, count):
            old = driver(members)
            old.lose(gone)
            new = successor(gone, members)
            assert old.is_lost is not new.is_lost


def test_members_that_have_died_for_certain_go_on_nowhere() -> None:
    quorum = driver((1, 2, 3, 4))
    quorum.lose([2, 3, 4])
    assert quorum.is_lost
    quorum.died(2)
    assert not quorum.is_lost  # 3 and 4 are half, without the first


def test_until_enough_know_of_a_generation_the_one_before_counts() -> None:
    quorum = driver((1, 2, 3), (1, 4, 5, 6, 2, 3))
    assert quorum.older == [[1, 2, 3]]
    quorum.lose([2, 3])
    assert quorum.is_lost
    quorum = driver((1, 2, 3), (1, 4, 5, 6, 2, 3))
    quorum.inform(2, lambda worker: worker == 1)
    assert not quorum.settle()
    quorum.inform(2, lambda worker: worker == 2)
    assert quorum.settle()
    assert quorum.older == []
    quorum.lose([2, 3])
    assert not quorum.is_lost


def test_who_takes_over_must_do_so_in_each_generation_that_counts() -> None:
    lists = (1, 2, 3, 4, 5), (1, 6, 7, 8, 2, 3)
    assert successor((1, 6, 7, 8), *lists).is_lost
    assert not successor((2, 3, 4, 5), lists[0]).is_lost
    assert not successor((1, 2, 3, 6, 7, 8), *lists).is_lost


def test_a_generation_begins_without_those_only_that_could_not_go_on() -> None:
    quorum = driver((1, 2, 3, 4, 5))
    assert quorum.permits([1, 2, 3])
    assert not quorum.permits([1, 2])
    quorum.died(3)
    assert not quorum.permits([1])
    assert quorum.permits([1, 2])


def test_before_the_first_generation_nothing_is_lost() -> None:
    quorum = Quorum()
    quorum.lose([1])
    assert not quorum.is_lost
    assert quorum.permits([1])
    assert not quorum.settle()
