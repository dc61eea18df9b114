"""What is told of a lost process or host, and whether the host is left out."""

import random

import pytest

from sirtaki.run.elastic.endings import Endings
from sirtaki.run.elastic.host_pool import HostPool
from sirtaki.run.elastic.losses import Losses
from sirtaki.run.elastic.policy import OnFailure, Policy
from sirtaki.run.elastic.roll import Roll
from sirtaki.run.elastic.workers import Phase, RankEnd, Worker

KILLED = RankEnd(exit_code=137)
RAISED = RankEnd(exit_code=3, reason="ValueError: a bad batch")


class Job:
    """Two hosts of two slots; a process on each has begun the first generation."""

    def __init__(self, **policy: object) -> None:
        values = Policy(start_ranks=2, min_ranks=1, **policy)  # type: ignore[arg-type]
        self.pool, self.roll = HostPool(values, random.Random(0)), Roll()
        self.pool.find({"a": 2, "b": 2})
        self.members = [self.roll.add(host, 0, 0.0) for host in ("a", "b")]
        self.roll.begin(self.members, 0.0)
        for member in self.members:
            member.enter(Phase.MEMBER, 0.0)
        self.losses = Losses(values, self.pool, self.roll, Endings(values))

    def lose(self, worker: Worker, end: RankEnd, *, may_start: bool = True) -> str:
        del self.roll.workers[worker.number]
        return self.losses.of_worker(worker, end, 1.0, may_start=lambda: may_start)


def test_a_process_that_is_killed_is_replaced_in_place() -> None:
    job = Job()
    told = job.lose(job.members[0], KILLED)
    assert told.endswith("; replaced in place, 1 goes on")
    assert job.members[0].label in told
    assert set(job.pool.usable) == {"a", "b"}


def test_nobody_is_replaced_where_nobody_may_start() -> None:
    job = Job()
    assert "replaced" not in job.lose(job.members[0], KILLED, may_start=False)


def test_a_host_may_be_dropped_at_once() -> None:
    job = Job(on_failure=OnFailure.DROP_HOST)
    assert "; host a is left out" in job.lose(job.members[0], KILLED)
    assert set(job.pool.usable) == {"b"}


def test_a_host_whose_processes_fail_again_and_again_is_left_out() -> None:
    job, told = Job(), ""
    for _ in range(10):
        worker = job.roll.add("a", 1, 0.0)
        told = job.lose(worker, RAISED)
        if "left out" in told:
            break
        assert "ValueError: a bad batch" in told
    assert "host a is left out" in told
    assert set(job.pool.usable) == {"b"}


@pytest.mark.parametrize(("wanted", "expected"), [(True, "host a is left out"), (False, "go")])
def test_a_host_that_is_gone_is_told_with_its_ranks(wanted: bool, expected: str) -> None:
    job = Job()
    if not wanted:
        job.pool.find({"b": 2})
    lost = job.members[:1]
    del job.roll.workers[lost[0].number]
    told = job.losses.of_host("a", lost, "its connection is closed", 1.0)
    assert told.startswith("host a is lost (its connection is closed)")
    assert expected in told
    assert ("left out" in told) is wanted
    assert told.endswith(", 1 goes on")
