"""Hosts keep their order, are left out when they fail, and come back."""

import random

import pytest

from sirtaki.run.elastic.job_members import HostPool, Policy


def pool(cooldown_s: tuple[float, float] | None = (10.0, 60.0)) -> HostPool:
    found = HostPool(Policy(start_ranks=1, min_ranks=1, cooldown_s=cooldown_s), random.Random(1))
    found.find({"a": 1, "b": 2})
    return found


def test_hosts_keep_their_order_however_they_are_told() -> None:
    hosts = pool()
    hosts.find({"c": 1, "b": 3, "a": 1})
    assert list(hosts.usable.items()) == [("a", 1), ("b", 3), ("c", 1)]


def test_a_dropped_host_stays_away_longer_each_time() -> None:
    hosts, times_s = pool(), []
    for _ in range(5):
        times_s.append(hosts.drop("a", 0.0))
        assert list(hosts.usable) == ["b"]
        assert hosts.take_back(times_s[-1] - 0.1) == []
        assert hosts.take_back(times_s[-1]) == ["a"]
    assert times_s == [pytest.approx(wanted, rel=0.1) for wanted in (10, 20, 40, 60, 60)]
    assert max(times_s) <= 60.0


def test_without_a_cooldown_it_stays_away_for_good() -> None:
    hosts = pool(None)
    assert hosts.drop("a", 0.0) is None
    assert hosts.take_back(1e9) == []
    assert hosts.known == {"a": 1, "b": 2}


def test_three_strikes_in_a_row_are_one_too_many() -> None:
    hosts = pool()
    assert [hosts.strike("a") for _ in range(2)] == [False, False]
    hosts.clear("a")
    assert [hosts.strike("a") for _ in range(3)] == [False, False, True]
    assert not hosts.strike("b")


def test_another_driver_goes_on_with_what_was_left_out() -> None:
    policy = Policy(start_ranks=1, min_ranks=1, cooldown_s=(10.0, 1000.0))
    pool, successor = HostPool(policy, random.Random(0)), HostPool(policy, random.Random(0))
    for each in (pool, successor):
        each.find({"a": 1, "b": 1})
    pool.drop("b", 0.0)
    assert pool.take_back(12.0) == ["b"]
    second_s = pool.drop("b", 12.0)
    assert second_s is not None
    successor.remember(pool.left_out(15.0), 100.0)
    assert successor.usable == {"a": 1}
    assert successor.take_back(100.0 + second_s - 3.1) == []
    assert successor.take_back(100.0 + second_s - 2.9) == ["b"]
    third_s = successor.drop("b", 200.0)
    assert third_s is not None
    assert third_s > 30.0
