"""Agents and ranks follow the hosts that may be used."""

import random
from typing import Any

from sirtaki.run.elastic.job_members import (
    Action,
    Dismiss,
    HostPool,
    JobMembers,
    KillRank,
    Policy,
    RankEnd,
    Say,
    StartAgent,
    StartRank,
    StopAgent,
)


def job(**policy: Any) -> JobMembers:
    """More ranks are to begin than the tests have slots: those that have joined wait."""
    values = Policy(start_ranks=9, min_ranks=1, **policy)
    return JobMembers(values, HostPool(values, random.Random(0)))


def settled(hosts: dict[str, int], **policy: Any) -> JobMembers:
    """All agents are there, and so are the ranks; they wait."""
    members = job(**policy)
    members.found(hosts, 0.0)
    for host in hosts:
        members.agent_up(host, 0.0)
    for worker in members.member_list.workers:
        members.joined(worker, has_state=False, now_s=0.0)
    return members


def done(actions: list[Action]) -> list[Action]:
    """Without what the user is told."""
    return [action for action in actions if not isinstance(action, Say)]


def test_an_agent_comes_before_its_hosts_ranks() -> None:
    members = job()
    assert members.found({"a": 2}, 0.0) == [StartAgent(host="a")]
    assert members.tick(0.0) == []
    started = members.agent_up("a", 0.0)
    assert started == [StartRank(worker=slot + 1, host="a", slot=slot) for slot in (0, 1)]
    assert members.tick(0.0) == []


def test_no_more_are_taken_on_than_the_most() -> None:
    members = settled({"a": 2, "b": 2}, max_ranks=3)
    assert [worker.host for worker in members.member_list.workers.values()] == ["a", "a", "b"]


def test_a_host_that_is_not_there_any_more_is_left_by_all_and_its_agent_goes_last() -> None:
    members = settled({"a": 1, "b": 1})
    number = next(worker.number for worker in members.member_list.workers.values() if worker.host == "b")
    assert done(members.found({"a": 1}, 1.0)) == [Dismiss(worker=number, host="b")]
    late_s = 1.0 + members.policy.leave_s
    assert members.tick(late_s) == []
    assert members.tick(late_s + 0.1) == [KillRank(worker=number, host="b", at_once=True)]
    assert members.ended(number, RankEnd(exit_code=137), late_s + 0.2) == [StopAgent(host="b")]
    assert members.agents == {"a": True}


def test_who_has_only_been_started_is_ended_gently() -> None:
    members = job()
    members.found({"a": 1}, 0.0)
    members.agent_up("a", 0.0)
    assert done(members.found({"b": 1}, 1.0)) == [
        KillRank(worker=1, host="a", at_once=False),
        StartAgent(host="b"),
    ]
