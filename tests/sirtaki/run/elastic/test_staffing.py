"""Agents and ranks follow the hosts that may be used."""

import random

from sirtaki.run.elastic.actions import Dismiss, KillRank, StartAgent, StartRank, StopAgent
from sirtaki.run.elastic.host_pool import HostPool
from sirtaki.run.elastic.policy import Policy
from sirtaki.run.elastic.roll import Roll
from sirtaki.run.elastic.staffing import Staffing
from sirtaki.run.elastic.workers import Phase


class Job:
    def __init__(self, hosts: dict[str, int], **policy: object) -> None:
        self.policy = Policy(start_ranks=1, min_ranks=1, **policy)  # type: ignore[arg-type]
        self.pool, self.roll = HostPool(self.policy, random.Random(0)), Roll()
        self.pool.find(hosts)
        self.staffing = Staffing(self.policy, self.pool, self.roll)

    def settle(self) -> None:
        """All agents are there, and so are the ranks; they wait."""
        self.staffing.take_on(0.0)
        self.staffing.agents.update(dict.fromkeys(self.staffing.agents, True))
        self.staffing.take_on(0.0)
        for worker in self.roll.workers.values():
            worker.enter(Phase.WAITING, 0.0)


def test_an_agent_comes_before_its_hosts_ranks() -> None:
    job = Job({"a": 2})
    assert job.staffing.take_on(0.0) == [StartAgent(host="a")]
    assert job.staffing.take_on(0.0) == []
    job.staffing.agents["a"] = True
    assert job.staffing.take_on(0.0) == [StartRank(worker=slot + 1, host="a", slot=slot) for slot in (0, 1)]
    assert job.staffing.take_on(0.0) == []


def test_no_more_are_taken_on_than_the_most() -> None:
    job = Job({"a": 2, "b": 2}, max_ranks=3)
    job.settle()
    assert [worker.host for worker in job.roll.workers.values()] == ["a", "a", "b"]


def test_a_host_that_is_not_there_any_more_is_left_by_all_and_its_agent_goes_last() -> None:
    job = Job({"a": 1, "b": 1})
    job.settle()
    number = next(worker.number for worker in job.roll.workers.values() if worker.host == "b")
    job.pool.find({"a": 1})
    assert job.staffing.send_away(1.0) == [Dismiss(worker=number, host="b")]
    late_s = 1.0 + job.policy.leave_s
    assert job.staffing.send_away(late_s) == []
    assert job.staffing.send_away(late_s + 0.1) == [KillRank(worker=number, host="b", at_once=True)]
    del job.roll.workers[number]
    assert job.staffing.send_away(late_s + 0.2) == [StopAgent(host="b")]
    assert job.staffing.agents == {"a": True}


def test_who_has_only_been_started_is_ended_gently() -> None:
    job = Job({"a": 1})
    job.settle()
    (worker,) = job.roll.workers.values()
    worker.enter(Phase.STARTING, 0.0)
    job.pool.find({"b": 1})
    assert job.staffing.send_away(1.0) == [KillRank(worker=worker.number, host="a", at_once=False)]
    assert worker.phase is Phase.DISMISSED
